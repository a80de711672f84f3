"""Final parameters of a run: one safetensors file a layer, `parameters/layer-NNNN.safetensors`."""

import errno
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from slipstream.runtime.model.tensor_codec import read_tensors, write_tensors

_SUFFIX = ".safetensors"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk or an exhausted quota; writing may succeed later."""
RETRY_SECONDS = 1.0
"""Seconds between two attempts to write to a full disk."""


def layer_path(out: Path, layer: int) -> Path:
    """Return the path of the file with a layer's final parameters in the folder `out` of a run."""
    return out / "parameters" / f"layer-{layer:04d}{_SUFFIX}"


def save_layer(out: Path, layer: int, state: Mapping[str, Tensor]) -> None:
    """Write a layer's parameters and buffers to its file, completely or not at all. Raises OSError if that fails."""
    path = layer_path(out, layer)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.stem}-{os.getpid()}")
    write_tensors(draft, state)
    draft.replace(path)


def save_layer_with_retry(out: Path, layer: int, state: Mapping[str, Tensor], say: Callable[[str], None],
                          look_seconds: float = RETRY_SECONDS) -> None:
    """Write a layer as `save_layer` does, and retry every `look_seconds` while the disk is full.

    The callback `say` gets one message, when the first attempt fails because the disk is full. Retries never end,
    because no other process has the final parameters. Raises OSError for any reason other than a full disk.
    """
    is_reported = False
    while True:
        try:
            return save_layer(out, layer, state)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            if not is_reported:
                say(f"{out / 'parameters'} cannot be written: {error.strerror}; the workers wait for free space")
            is_reported = True
            time.sleep(look_seconds)


def load_layer(out: Path, layer: int) -> dict[str, Tensor]:
    """Return a layer's parameters and buffers from its file, on the CPU. Raises OSError and TensorError."""
    return read_tensors(layer_path(out, layer))


def load_parameters(out: Path) -> dict[str, Tensor]:
    """Return the parameters and buffers of all layers of a run, by `layer.name`. Raises OSError and TensorError."""
    paths = (out / "parameters").glob(f"layer-*{_SUFFIX}")
    return {f"{layer}.{name}": tensor for layer in sorted(int(path.stem.removeprefix("layer-")) for path in paths)
            for name, tensor in load_layer(out, layer).items()}
