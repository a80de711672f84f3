"""How large layers are that another worker needs."""

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.model.layers.layered_model import LayeredModel
from slipstream.runtime.model.layers.worker_group import standing_in
from slipstream.runtime.model.state.holding import without_memory


def slots_of(config: TrainingConfig) -> int:
    """How many numbers an optimizer remembers of each element. Those of one's own are taken to be like AdamW."""
    return 2 + config.amsgrad if config.optimizer != "sgd" else 1 if config.momentum else 0


def state_bytes(model: LayeredModel, config: TrainingConfig, holders: int = 1) -> list[int]:
    """About what a process of another worker needs of each layer: parameters, buffers, and of the optimizer's state
    what it keeps beside so many holders."""
    kept = slots_of(config) * (min(1.0, 2 / holders) if config.shard_optimizer else 1.0)
    found = []
    for layer in range(model.layers):
        with standing_in(config.tensor_parallel):
            module = without_memory(model, layer)
        parameters = list(module.parameters())
        stepped = sum(4 * one.numel() if config.master_weights else one.nbytes for one in parameters)
        found.append(sum(one.nbytes for one in (*module.buffers(), *parameters)) + round(kept * stepped))
    return found
