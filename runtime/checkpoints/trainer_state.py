"""Convert the state of torchtitan's Trainer to a run's checkpoint, and back.

The Trainer holds the whole model, on the CPU. One layer of it is written or read at a time.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save as save_titans

from slipstream.runtime.checkpoints.checkpoint import (
    Checkpoint,
    identity_of,
    load_layers,
    open_checkpoint,
    start_saving,
)
from slipstream.runtime.config import RunConfig
from slipstream.runtime.models.layered_model import build_model, parameter_dtype
from slipstream.runtime.models.sharing import sharing_of

_CPU = torch.device("cpu")


def save_trainer(trainer: Any, config: RunConfig, folder: Path) -> Checkpoint | None:
    """Save a Trainer's state as a checkpoint in `folder`, for a run to begin with.

    Before the first step, only the initial parameters are written, to the folder that the config's
    option `checkpoint` names, and the result is None. Raises ConfigError if the model cannot be
    built, and CheckpointError if the checkpoint cannot be written.
    """
    if trainer.step == 0:
        save_titans(
            trainer.model_parts[0].state_dict(),
            checkpoint_id=config.model.options["checkpoint"],
            no_dist=True,
        )
        return None
    layers = list(_layer_parameters(trainer, config))
    states, identity = _optimizer_states(trainer), identity_of(config, len(layers))
    # Each layer is a save of its own, so that only one layer is in memory twice; the last save
    # finds all layers written, and completes the checkpoint.
    for layer, members in enumerate(layers):
        state = {f"model.{name}": tensor.detach() for name, tensor in members.items()}
        for name, parameter in members.items():
            for slot, value in states.get(parameter, {}).items():
                state[f"optimizer.{slot}.{name}"] = value
        start_saving(folder, trainer.step, {layer: state}, identity).wait()
    return open_checkpoint(folder / f"iteration-{trainer.step}", identity)


def load_into_trainer(trainer: Any, config: RunConfig, checkpoint: Checkpoint) -> None:
    """Load a checkpoint's layers and optimizer state into a Trainer, configured as in `config`.

    Raises CheckpointError if a layer cannot be read, and ConfigError if the model cannot be built.
    """
    for layer, members in enumerate(_layer_parameters(trainer, config)):
        tensors = load_layers(checkpoint, [layer])[layer]
        for name, parameter in members.items():
            # Keys are `optimizer.SLOT.NAME`, such as `optimizer.exp_avg.weight`.
            state = dict[str, Tensor]()
            for key, value in tensors.items():
                kind, _, slot_and_name = key.partition(".")
                slot, _, stepped_name = slot_and_name.partition(".")
                if kind == "optimizer" and stepped_name == name:
                    state[slot] = value
            with torch.no_grad():
                parameter.copy_(tensors[f"model.{name}"])
            # Before the first step there is no state; the optimizer then creates it.
            if not state:
                continue
            for optimizer in trainer.optimizers:
                if parameter in _stepped_parameters(optimizer):
                    optimizer.state[parameter] = state
                    break


def _layer_parameters(trainer: Any, config: RunConfig) -> Iterator[dict[str, Tensor]]:
    # Biases that are buffers in the Trainer are included. A parameter that layers share is yielded
    # once, with the layer that comes first in its group.
    model = build_model(config.model, 0, parameter_dtype(config.training), _CPU)
    sharing, [whole] = sharing_of(model), trainer.model_parts
    tensors = {
        **dict(whole.named_parameters(remove_duplicate=False)),
        **dict(whole.named_buffers()),
    }
    for layer in range(model.layers):
        with torch.device("meta"):
            module = model.build(layer)
        copies = sharing.copies_in(layer)
        yield {name: tensors[name] for name, _ in module.named_parameters() if name not in copies}


def _optimizer_states(trainer: Any) -> dict[Tensor, dict[str, Tensor]]:
    return {
        parameter: state
        for optimizer in trainer.optimizers
        for parameter, state in optimizer.state.items()
    }


def _stepped_parameters(optimizer: torch.optim.Optimizer) -> set[Tensor]:
    return {parameter for group in optimizer.param_groups for parameter in group["params"]}
