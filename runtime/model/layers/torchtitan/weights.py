"""Checkpoints of torchtitan, which are torch.distributed.checkpoint's: one layer of them at a time."""

from pathlib import Path

from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load

from slipstream.runtime.config import ConfigError
from slipstream.runtime.errors import first_line
from slipstream.runtime.model.layers.torchtitan.specification import KEY


def load_layer(module: nn.Module, folder: Path) -> None:
    """Fill a layer's parameters. Raises ConfigError where the checkpoint does not have them, or not so."""
    state = module.state_dict()
    try:
        load(state, checkpoint_id=folder, no_dist=True)
        module.load_state_dict(state)
    except (Exception, CheckpointException) as error:  # the latter is none of the former
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        raise ConfigError(f"{KEY}: model.options.checkpoint is {str(folder)!r}, of which "
                          f"{next(iter(state), 'nothing')!r} and others of its layer cannot be read: "
                          f"{first_line(cause)}; expected a folder step-N that torchtitan has written") from None
