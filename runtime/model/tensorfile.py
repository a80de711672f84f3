"""Named tensors in a file, in the safetensors format: a length, a JSON header, bytes. Nothing in it can be run.

https://huggingface.co/docs/safetensors describes the format; other tools read these files and write such.
"""

import hashlib
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
          "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
          "BOOL": torch.bool}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 2**24

_Size = Annotated[int, Meta(ge=0, le=2**62)]


class TensorFileError(ValueError):
    """A file that holds no readable tensors. The message is one line."""


class Written(NamedTuple):
    """What identifies the bytes of a file."""

    bytes: int
    sha256: str


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write a file to the disk, to its last byte. Raises OSError, and then leaves none."""
    digest, size = hashlib.sha256(), 0
    try:
        with path.open("wb") as file:
            for chunk in _chunks(tensors):
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return Written(size, digest.hexdigest())


def read_tensors(path: Path, expected: Written | None = None) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU.

    Raises TensorFileError when it is not what `expected` says, or no such file at all, and OSError.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if expected is not None and size != expected.bytes:
            raise TensorFileError(f"{path}: {size} bytes; expected {expected.bytes}: it is damaged")
        digest = hashlib.sha256()
        entries = _read_header(path, file, size, digest)
        tensors = {}
        for name, entry in entries:
            raw = torch.empty(entry.data_offsets[1] - entry.data_offsets[0], dtype=torch.uint8)
            if raw.numel():
                if file.readinto(raw.numpy().data) != raw.numel():
                    raise TensorFileError(f"{path}: ends in the middle of {name!r}")
                digest.update(raw.numpy().data)
            tensors[name] = raw.view(DTYPES[entry.dtype]).reshape(entry.shape)
        if expected is not None and digest.hexdigest() != expected.sha256:
            raise TensorFileError(f"{path}: its bytes are not those that were written: it is damaged")
    return tensors


def _chunks(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    entries, end = {}, 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    header = msgspec.json.encode(entries)
    header += b" " * (-len(header) % 8)  # the format wants what follows aligned
    yield len(header).to_bytes(8, "little") + header
    for tensor in tensors.values():
        if tensor.numel():
            raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            yield raw.numpy().data


def _read_header(path: Path, file: BinaryIO, size: int, digest: "hashlib._Hash") -> list[tuple[str, _Entry]]:
    """The entries, in the order of their bytes, which fill the rest of the file exactly."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        raise TensorFileError(f"{path}: no safetensors file: it has no header")
    header = file.read(length)
    digest.update(prefix + header)
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        entries = sorted(((name, msgspec.json.decode(value, type=_Entry)) for name, value in raw.items()),
                         key=lambda entry: entry[1].data_offsets)
    except (ValueError, RecursionError) as error:
        raise TensorFileError(f"{path}: no safetensors file: {' '.join(str(error).split())[:200]}") from None
    place = 0
    for name, entry in entries:
        start, end = entry.data_offsets
        dtype = DTYPES.get(entry.dtype)
        if dtype is None or start != place or end - start != math.prod(entry.shape) * dtype.itemsize:
            raise TensorFileError(f"{path}: the header's entry for {name!r} fits neither its shape nor its neighbours")
        place = end
    if 8 + length + place != size:
        raise TensorFileError(f"{path}: {size} bytes; its header describes {8 + length + place}")
    return entries
