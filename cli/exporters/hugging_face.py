"""Export the model of a checkpoint to a folder that `from_pretrained` of transformers loads."""

from pathlib import Path

from torch import Tensor

from slipstream.runtime.checkpoints.checkpoint import Checkpoint, CheckpointError, load_layers
from slipstream.runtime.checkpoints.hugging_face_export import export_model


def export_checkpoint(checkpoint: Checkpoint, folder: Path) -> None:
    """Write the model of a checkpoint to a folder that transformers can load.

    The folder is replaced as a whole. Raises CheckpointError if the model is none of `[model]
    hugging_face` or a layer cannot be read, ConfigError if transformers refuses the model's config,
    and OSError if the folder cannot be written.
    """
    document = checkpoint.manifest.identity.get("model.hugging_face")
    if not isinstance(document, dict):
        raise CheckpointError(
            f"{checkpoint.path}: not a transformers model ([model] hugging_face): its model.name "
            f"is {checkpoint.manifest.identity.get('model.name')!r}"
        )

    # One layer at a time, so that the whole model need not fit into memory.
    def read_state(layer: int) -> dict[str, Tensor]:
        tensors = load_layers(checkpoint, [layer])[layer]
        return {
            name.removeprefix("model."): tensor
            for name, tensor in tensors.items()
            if name.startswith("model.")
        }

    export_model(document, read_state, folder)
