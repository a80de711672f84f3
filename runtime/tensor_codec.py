"""Convert named tensors to bytes and back, in the format of safetensors.

The format contains no executable code; https://huggingface.co/docs/safetensors describes it. Other
tools read the files written here, and files that other tools wrote can be read here.
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

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorError(ValueError):
    """Error, in one line, for bytes or a file without the expected tensors."""


class FileDigest(NamedTuple):
    """Length and SHA-256 of a file's bytes, by which damage to the file is noticed."""

    bytes: int
    sha256: str


def encode_tensors(tensors: Mapping[str, Tensor]) -> list[bytes | memoryview]:
    """Encode tensors as buffers whose bytes, one after another, are a safetensors file.

    Tensors may have any device, shape and strides. Contiguous CPU tensors of common dtypes are not
    copied: their buffer is a view of their memory. Raises SafetensorError or KeyError for a dtype
    that safetensors lacks.
    """
    # Tensors with large elements first, so each is aligned, as the package wants it.
    names = sorted(tensors, key=lambda name: -tensors[name].element_size())
    ready = {name: tensors[name].detach().cpu().contiguous() for name in names}
    if any(tensor.dtype not in _DTYPES for tensor in ready.values()):
        # The package refuses shared memory.
        return [save({name: tensor.clone() for name, tensor in ready.items()})]

    # The header is written here because `safetensors.torch.save` copies twice, at about 1 GB/s, and
    # blocks all other threads meanwhile.
    entries, end = {}, 0
    for name, tensor in ready.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": tuple(tensor.shape),
            "data_offsets": (start, end),
        }
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)  # the format wants what follows aligned
    return [
        len(header).to_bytes(8, "little") + header,
        *(
            tensor.reshape(-1).view(torch.uint8).numpy().data
            for tensor in ready.values()
            if tensor.numel()
        ),
    ]


def decode_tensors(data: bytes) -> dict[str, Tensor]:
    """Return copies on the CPU of the tensors in safetensors bytes. Raises TensorError."""
    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise TensorError(f"no tensors: {_one_line(error)}") from None


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> FileDigest:
    """Write tensors to a file, flushed to disk; return the file's length and hash.

    If writing fails, the file is removed. Raises OSError, and KeyError as `encode_tensors` does.
    """
    # `save_file` of the safetensors package is not used: it writes to a temporary file with a name
    # of its own, which would remain if the process were killed.
    size, digest = 0, hashlib.sha256()
    try:
        with path.open("wb") as file:
            for piece in encode_tensors(tensors):
                file.write(piece)
                digest.update(piece)
                size += len(piece)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        # No reader may find half a file.
        path.unlink(missing_ok=True)
        if isinstance(error, SafetensorError):
            raise OSError(_one_line(error)) from None
        raise
    return FileDigest(size, digest.hexdigest())


def read_tensors(path: Path, expected: FileDigest | None = None) -> dict[str, Tensor]:
    """Return the tensors of a file, on the CPU.

    Raises TensorError if it is no safetensors file or differs from `expected`, and OSError if it
    cannot be read.
    """
    if expected is not None:
        verify_file(path, expected)
    try:
        return load_file(path)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise TensorError(f"{path}: not a safetensors file: {_one_line(error)}") from None


def verify_file(path: Path, expected: FileDigest) -> None:
    """Raise TensorError if length or SHA-256 of a file are not as expected.

    Raises OSError if the file cannot be read.
    """
    # The length first: it shows most damage at once.
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size != expected.bytes:
            raise TensorError(f"{path}: {size} bytes; expected {expected.bytes}: it is damaged")
        if hashlib.file_digest(file, "sha256").hexdigest() != expected.sha256:
            raise TensorError(
                f"{path}: its SHA-256 is not that of the bytes written: it is damaged"
            )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
