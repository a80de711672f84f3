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

    `by_muon` is True for a parameter that Muon steps. A user's own optimizer counts like AdamW.
    """
    if by_muon:
        return 1
    if config.optimizer == "sgd":
        return 1 if config.momentum else 0
    return 2 + config.amsgrad


def estimate_layer_bytes(
    model: LayeredModel, config: TrainingConfig, holders: int = 1
) -> list[int]:
    """Return an estimate of each layer's bytes on a rank of a new holder.

    Parameters, buffers and optimizer state count. If states are sharded over `holders` workers, two
    parts of the optimizer state count: the holder's own, and the copy of another. Raises
    ConfigError if shared parameters, or patterns of parameters for Muon, are wrong, and ValueError
    as `build_on_meta` does.
    """
    share = min(1.0, 2 / holders) if config.shard_optimizer else 1.0
    sizes, sharing = [], sharing_of(model)
    for layer in range(model.layers):
        with simulating_rank(config.tensor_parallel):
            module = build_on_meta(model, layer)
        state_bytes = 0
        rules = step_rules(module)
        for name, parameter in module.named_parameters():
            # The optimizer keeps nothing for a parameter that its layer steps.
            if name in rules:
                continue
            shared_name = str(sharing.first_of_group(layer, name))
            by_muon = is_stepped_by_muon(shared_name, parameter, config, sharing.last)
            # State has the dtype of what is stepped: float32 master weights, or the parameter.
            slot_bytes = 4 * parameter.numel() if config.master_weights else parameter.nbytes
            state_bytes += slots_per_element(config, by_muon=by_muon) * slot_bytes
            # A part has master weights in place of its parameters.
            state_bytes += slot_bytes - parameter.nbytes
        tensors = (*module.buffers(), *module.parameters())
        sizes.append(sum(tensor.nbytes for tensor in tensors) + round(share * state_bytes))
    return sizes
