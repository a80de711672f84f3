"""Write a run's final parameters: one file a layer, `parameters/layer-NNNN.safetensors`.

A worker writes a draft, and renames it when the coordinator has compared the digests of all
holders.
"""

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
    """Write a layer's parameters, `state`, to a draft: a file named by `order`. Raises OSError.

    The draft is renamed once all holders agree on it.
    """
    draft = _draft_path(out, layer, order)
    draft.parent.mkdir(parents=True, exist_ok=True)
    write_tensors(draft, state)


def publish_layer(out: Path, layer: int, order: int) -> None:
    """Rename a layer's draft to its final file, once all holders agree on it. Raises OSError."""
    _draft_path(out, layer, order).replace(layer_path(out, layer))


def draft_layer_with_retry(
    out: Path,
    layer: int,
    order: int,
    state: Mapping[str, Tensor],
    say: Callable[[str], None],
    look_seconds: float = RETRY_SECONDS,
) -> None:
    """Write a layer's draft (`draft_layer`), and retry while the disk is full.

    `say` gets one message, when the first attempt fails; `look_seconds` pass between attempts.
    Raises OSError if writing fails for another reason.
    """
    # Retries never end, because no other process has the final parameters.
    is_reported = False
    while True:
        try:
            return draft_layer(out, layer, order, state)
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            if not is_reported:
                say(
                    f"{out / 'parameters'} cannot be written: {error.strerror}; the workers wait "
                    "for free space"
                )
            is_reported = True
            time.sleep(look_seconds)


def _draft_path(out: Path, layer: int, order: int) -> Path:
    path = layer_path(out, layer)
    return path.with_name(f".{path.stem}-{order}")


def load_layer(out: Path, layer: int) -> dict[str, Tensor]:
    """Return a layer's parameters and buffers, on the CPU. Raises OSError and TensorError."""
    return read_tensors(layer_path(out, layer))


def load_parameters(out: Path) -> dict[str, Tensor]:
    """Return all layers' final parameters and buffers; keys are `0.weight` and the like.

    The result is empty if there are none. Raises OSError and TensorError.
    """
    paths = (out / "parameters").glob(f"layer-*{_SUFFIX}")
    layers = sorted(int(path.stem.removeprefix("layer-")) for path in paths)
    return {
        f"{layer}.{name}": tensor
        for layer in layers
        for name, tensor in load_layer(out, layer).items()
    }
