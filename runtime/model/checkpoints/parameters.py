"""The parameters that a run leaves: one safetensors file a layer, `parameters/layer-NNNN.safetensors`."""

import errno
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from slipstream.runtime.model.tensor_codec import read_tensors, write_tensors

_SUFFIX = ".safetensors"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a disk that may have room later."""
LOOK_SECONDS = 1.0


def layer_path(out: Path, layer: int) -> Path:
    """Where a run's folder keeps a layer."""
    return out / "parameters" / f"layer-{layer:04d}{_SUFFIX}"


def save_layer(out: Path, layer: int, state: Mapping[str, Tensor]) -> None:
    """Write a layer's parameters and buffers, whole or not at all. Raises OSError."""
    path = layer_path(out, layer)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.stem}-{os.getpid()}")
    write_tensors(draft, state)
    draft.replace(path)


def save_layer_when_there_is_room(out: Path, layer: int, state: Mapping[str, Tensor], say: Callable[[str], None],
                                  look_seconds: float = LOOK_SECONDS) -> None:
    """Write a layer as `save_layer` does, and wait while the disk is full, which `say` is told once.

    Nobody else has the parameters of a run that has ended. Raises OSError for other reasons.
    """
    said = False
    while True:
        try:
            return save_layer(out, layer, state)
        except OSError as error:
            if error.errno not in FULL:
                raise
            if not said:
                say(f"{out / 'parameters'} cannot be written: {error.strerror}; the workers wait for room")
            said = True
            time.sleep(look_seconds)


def load_layer(out: Path, layer: int) -> dict[str, Tensor]:
    """Read a layer's parameters and buffers, on the CPU. Raises OSError and TensorError."""
    return read_tensors(layer_path(out, layer))


def load_parameters(out: Path) -> dict[str, Tensor]:
    """All layers that a run's folder holds, by `layer.name`. Raises OSError and TensorError."""
    found = (out / "parameters").glob(f"layer-*{_SUFFIX}")
    return {f"{layer}.{name}": tensor for layer in sorted(int(path.stem.removeprefix("layer-")) for path in found)
            for name, tensor in load_layer(out, layer).items()}
