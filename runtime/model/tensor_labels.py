"""What must be said of named tensors before their bytes: name, dtype and shape, as JSON; nothing is unpickled."""

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from runtime.model.tensorfile import DTYPES, MAX_HEADER_BYTES, NAMES

MAX_BYTES = MAX_HEADER_BYTES
"""No layer has names for more."""


class Label(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a layer."""

    name: str
    dtype: str
    """As safetensors writes it."""
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype."""
        return DTYPES[self.dtype]


def labels_of(tensors: Mapping[str, Tensor]) -> tuple[Label, ...]:
    """Describe tensors, in their order."""
    return tuple(Label(name, NAMES[tensor.dtype], tuple(tensor.shape)) for name, tensor in tensors.items())


def require_sane(labels: tuple[Label, ...]) -> None:
    """Raises ValueError, in one line, when room for such tensors cannot be made."""
    for label in labels:
        if label.dtype not in DTYPES or any(not 0 <= size < 2**40 for size in label.shape):
            raise ValueError(f"a peer sent a tensor {label.name!r} of {label.dtype} {list(label.shape)}")
