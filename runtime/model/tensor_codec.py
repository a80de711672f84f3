"""Named tensors as bytes, on disk and between workers: the safetensors format. Nothing in it can be run.

https://huggingface.co/docs/safetensors describes the format; other tools read these files and write such.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save
from torch import Tensor

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
          torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
          torch.bool: "BOOL"}


class TensorError(ValueError):
    """Bytes or a file that hold no readable tensors. The message is one line."""


class Written(NamedTuple):
    """What identifies the bytes of a file."""

    bytes: int
    sha256: str


def encode(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """Tensors of any device, shape and layout, as the pieces of safetensors bytes.

    What is contiguous on the CPU is not copied: a piece is its memory. The package's `save` copies twice, at about
    1 GB/s, and holds up all other threads meanwhile; that is why the header is written here.
    """
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(
        tensors.items(), key=lambda one: -one[1].element_size())}  # so each is aligned, as the package wants it
    if any(tensor.dtype not in _NAMES for tensor in ready.values()):
        return [save({name: tensor.clone() for name, tensor in ready.items()})]  # it refuses shared memory
    entries, end = {}, 0
    for name, tensor in ready.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _NAMES[tensor.dtype], "shape": tuple(tensor.shape), "data_offsets": (start, end)}
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)  # the format wants what follows aligned
    return [len(header).to_bytes(8, "little") + header,
            *(tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in ready.values() if tensor.numel())]


def decode(data: bytes) -> dict[str, Tensor]:
    """The tensors of safetensors bytes, on the CPU, copied once. Raises TensorError."""
    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise TensorError(f"no tensors: {_one_line(error)}") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write a file to the disk, to its last byte. Raises OSError, and then leaves none.

    The package's `save_file` writes a temporary file of a name of its own, which a killed writer would leave.
    """
    size, digest = 0, hashlib.sha256()
    try:
        with path.open("wb") as file:
            for piece in encode(tensors):
                file.write(piece)
                digest.update(piece)
                size += len(piece)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, SafetensorError):
            raise OSError(_one_line(error)) from None
        raise
    return Written(size, digest.hexdigest())


def read_tensors(path: Path, expected: Written | None = None) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU.

    Raises TensorError when it is not what `expected` says, or no such file at all, and OSError.
    """
    if expected is not None:
        require_written(path, expected)
    try:
        return load_file(path)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise TensorError(f"{path}: no safetensors file: {_one_line(error)}") from None


def require_written(path: Path, expected: Written) -> None:
    """Compare a file with what was written. Raises TensorError where it differs, and OSError."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.bytes:
            raise TensorError(f"{path}: {size} bytes; expected {expected.bytes}: it is damaged")
        if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
            raise TensorError(f"{path}: its bytes are not those that were written: it is damaged")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
