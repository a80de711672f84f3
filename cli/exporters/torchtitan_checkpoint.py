"""Export a run's checkpoint as torchtitan's, in the format of torch.distributed.checkpoint."""

import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from slipstream.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, load_layers
from slipstream.runtime.config import ModelConfig
from slipstream.runtime.models.sharing import sharing_of
from slipstream.runtime.models.torchtitan.model import TorchtitanModel
from slipstream.schedules.files import replace_folder

_META = torch.device("meta")


class _LazyPlanner(DefaultSavePlanner):
    """Planner of torch.distributed.checkpoint that reads each tensor only when it is written."""

    def __init__(self, read: Callable[[str], Tensor]) -> None:
        super().__init__()
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Read the tensor that is about to be written, and return it."""
        return self._read(index.fqn)


def export_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the model of a run's checkpoint as torchtitan's checkpoint to `folder`.

    The folder is replaced as a whole, and one layer is kept in memory at a time. Raises
    CheckpointError if the run's model is not torchtitan's, or a layer cannot be read, ConfigError
    if the model cannot be built, and OSError if the folder cannot be written.
    """
    identity = checkpoint.manifest.identity
    name = identity.get("model.torchtitan")
    if not isinstance(name, str):
        raise CheckpointError(
            f"{checkpoint.path}: not a model of torchtitan ([model] torchtitan): its model.name is "
            f"{identity.get('model.name')!r}"
        )
    # The kind of attention does not change the parameters.
    model = TorchtitanModel(
        ModelConfig(
            torchtitan=name, context=identity["model.context"], options={"attention": "sdpa"}
        ),
        0,
        getattr(torch, identity["parameters"]),
        _META,
    )
    # Names and shapes of all parameters, without memory for them: what the checkpoint will have.
    sharing, shapes = sharing_of(model), list[Mapping[str, torch.Size]]()
    layer_of, planned = dict[str, int](), dict[str, Tensor]()
    for layer in range(model.layers):
        with _META:
            parameters = dict(model.build(layer).named_parameters())
        shapes.append({key: tensor.shape for key, tensor in parameters.items()})
        for key, tensor in model.rename_for_checkpoint(layer, parameters).items():
            layer_of[key], planned[key] = layer, tensor

    @functools.lru_cache(maxsize=1)
    def read_layer(layer: int) -> dict[str, Tensor]:
        state = sharing.with_copies(
            layer,
            load_layers(checkpoint, [layer])[layer],
            lambda other: load_layers(checkpoint, [other])[other],
        )
        found = {
            key.removeprefix("model."): tensor
            for key, tensor in state.items()
            if key.startswith("model.")
        }
        # A run may have trained a changed configuration of the same name.
        if {key: tensor.shape for key, tensor in found.items()} != shapes[layer] or identity[
            "layers"
        ] != model.layers:
            raise CheckpointError(
                f"{checkpoint.path}: its layers are not those of torchtitan's {name}, but of a "
                "configuration of its own; torchtitan's last checkpoint of that run has them"
            )
        return model.rename_for_checkpoint(layer, found)

    with replace_folder(folder) as draft, warnings.catch_warnings():
        # torch.distributed is not needed here.
        warnings.filterwarnings("ignore", "torch.distributed is ", UserWarning)
        try:
            save(
                planned,
                checkpoint_id=draft,
                planner=_LazyPlanner(lambda key: read_layer(layer_of[key])[key]),
                no_dist=True,
            )
        except CheckpointException as error:
            raise next(iter(error.failures.values()))[0] from None
