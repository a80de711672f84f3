"""Named tensors as bytes, on disk and between workers: the safetensors format. Nothing in it can be run.

https://huggingface.co/docs/safetensors describes the format; other tools read these files and write such.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor


class TensorError(ValueError):
    """Bytes or a file that hold no readable tensors. The message is one line."""


class Written(NamedTuple):
    """What identifies the bytes of a file."""

    bytes: int
    sha256: str


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """Tensors of any device, shape and layout, as safetensors. Those on the CPU are copied once."""
    return save(_separate(tensors))


def decode(data: bytes) -> dict[str, Tensor]:
    """What `encode` wrote, on the CPU. Raises TensorError."""
    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise TensorError(f"no tensors: {_one_line(error)}") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write a file to the disk, to its last byte. Raises OSError, and then leaves none."""
    try:
        path.touch()
        mode = path.stat().st_mode
        save_file(_separate(tensors), path)
        path.chmod(mode)  # safetensors makes files that their owner alone may read
        with path.open("rb+") as file:
            digest = hashlib.file_digest(file, "sha256")
            os.fsync(file.fileno())
            return Written(file.tell(), digest.hexdigest())
    except BaseException as error:
        path.unlink(missing_ok=True)
        if isinstance(error, SafetensorError):
            raise OSError(_one_line(error)) from None
        raise


def read_tensors(path: Path, expected: Written | None = None) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU.

    Raises TensorError when it is not what `expected` says, or no such file at all, and OSError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if expected is not None and size != expected.bytes:
            raise TensorError(f"{path}: {size} bytes; expected {expected.bytes}: it is damaged")
        if expected is not None and hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
            raise TensorError(f"{path}: its bytes are not those that were written: it is damaged")
    try:
        return load_file(path)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise TensorError(f"{path}: no safetensors file: {_one_line(error)}") from None


def _separate(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors contiguous on the CPU, each in memory of its own: safetensors refuses any that share theirs.

    Whatever is so already is not copied.
    """
    separate: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        one = tensor.detach().cpu().contiguous()
        storage = one.untyped_storage()
        if storage.nbytes() != one.nbytes or storage.data_ptr() in taken:
            one = one.clone(memory_format=torch.contiguous_format)
        taken.add(one.untyped_storage().data_ptr())
        separate[name] = one
    return separate


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
