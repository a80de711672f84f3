"""Write a run's final parameters: one file a layer, `parameters/layer-NNNN.safetensors`. A worker
writes a draft, and renames it when the coordinator has compared the digests of all holders."""

import errno
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from slipstream.runtime.tensor_codec import read_tensors, write_tensors

_SUFFIX = ".safetensors"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk or an exhausted quota; writing may succeed later."""
RETRY_SECONDS = 1.0
"""Seconds between two attempts to write to a full disk."""


def layer_path(out: Path, layer: int) -> Path:
    """Return the path of a layer's final parameters in a run's folder `out`."""
    return out / "parameters" / f"layer-{layer:04d}{_SUFFIX}"


def draft_layer(out: Path, layer: int, order: int, state: Mapping[str, Tensor]) -> None:
    """Write a layer to a draft of its file, which bears an order's number. Raises OSError."""
    draft = _draft_path(out, layer, order)
    draft.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(draft, state)


def publish_layer(out: Path, layer: int, order: int) -> None:
    """Rename the draft of a layer to its file, as all holders agree. Raises OSError."""
    _draft_path(out, layer, order).replace(layer_path(out, layer))


def draft_layer_with_retry(out: Path, layer: int, order: int, state: Mapping[str, Tensor], say: Callable[[str], None],
                           look_seconds: float = RETRY_SECONDS) -> None:
    """Write a layer as `draft_layer` does, and retry while the disk is full.

    It does so every `look_seconds`. The callback `say` gets one message, when the first attempt
    fails because the disk is full. Retries never end, because no other process has the final
    parameters. Raises OSError for any reason other than a full disk.
    """
    is_reported = False
    while True:
        try:
            return draft_layer(out, layer, order, state)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            if not is_reported:
                say(f"{out / 'parameters'} cannot be written: {error.strerror}; the workers wait for free space")
            is_reported = True
            time.sleep(look_seconds)


def _draft_path(out: Path, layer: int, order: int) -> Path:
    path = layer_path(out, layer)
    return path.with_name(f".{path.stem}-{order}")


def load_layer(out: Path, layer: int) -> dict[str, Tensor]:
    """Return a layer's parameters and buffers, on the CPU. Raises OSError and TensorError."""
    return read_tensors(layer_path(out, layer))


def load_parameters(out: Path) -> dict[str, Tensor]:
    """Return all layers' parameters and buffers by `layer.name`. Raises OSError and TensorError."""
    paths = (out / "parameters").glob(f"layer-*{_SUFFIX}")
    return {f"{layer}.{name}": tensor for layer in sorted(int(path.stem.removeprefix("layer-")) for path in paths)
            for name, tensor in load_layer(out, layer).items()}
