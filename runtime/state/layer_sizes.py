"""Estimate the sizes of layers for a worker that does not hold them yet."""

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.models.layered_model import LayeredModel
from slipstream.runtime.models.sharing import sharing_of
from slipstream.runtime.models.step_rules import step_rules
from slipstream.runtime.ranks.worker_group import simulating_rank
from slipstream.runtime.state.held_layers import build_on_meta
from slipstream.runtime.state.parameter_groups import is_stepped_by_muon


def slots_per_element(config: TrainingConfig, *, by_muon: bool = False) -> int:
    """Return how many values the optimizer keeps for each element of a parameter.

    A user's own optimizer counts like AdamW. With `by_muon`, return the number for parameters that
    Muon steps.
    """
    if by_muon:
        return 1
    return 2 + config.amsgrad if config.optimizer != "sgd" else 1 if config.momentum else 0


def estimate_layer_bytes(model: LayeredModel, config: TrainingConfig, holders: int = 1) -> list[int]:
    """Return an estimate of each layer's bytes on a rank of a new holder.

    It covers parameters, buffers and optimizer state. If a layer's optimizer state is sharded over
    `holders` workers, each stores two parts of it: its own, and a copy of another.
    """
    share = min(1.0, 2 / holders) if config.shard_optimizer else 1.0
    sizes, sharing = [], sharing_of(model)
    for layer in range(model.layers):
        with simulating_rank(config.tensor_parallel):
            module = build_on_meta(model, layer)
        state = 0
        rules = step_rules(module)
        for name, one in module.named_parameters():
            if name in rules:
                continue
            by_muon = is_stepped_by_muon(str(sharing.first_of_group(layer, name)), one, config, sharing.last)
            state += slots_per_element(config, by_muon=by_muon) * (4 * one.numel() if config.master_weights
                                                                   else one.nbytes)
        sizes.append(sum(one.nbytes for one in (*module.buffers(), *module.parameters())) + round(share * state))
    return sizes
