"""Files of tokens, mapped into memory: flat numbers as nanoGPT writes them, or Megatron's .bin next to its .idx."""

import struct
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from slipstream.runtime.config import ConfigError, TokenDtype

MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")
"""Header of an .idx after the magic: version, code of the dtype, number of sequences, number of document bounds."""
_CODES = {4: "int32", 8: "uint16"}
"""Megatron's codes of the supported dtypes. Unsupported ones are uint8 1, int8 2, int16 3, int64 5."""
DEFAULT_DTYPE: TokenDtype = "uint16"


def map_tokens(path: Path, dtype: TokenDtype | None) -> NDArray[Any]:
    """Map the tokens of a file. Pages are read when they are used, and shared by all processes of a machine.

    If `dtype` is None, it is taken from the .idx of the same name in the same folder; if there is no .idx, it is
    uint16. Raises ConfigError if the file does not exist, or if its length, its .idx and `dtype` do not agree.
    """
    subject = f"training.tokens is {str(path)!r}"
    if not path.is_file():
        raise ConfigError(f"{subject}, which {'is no file' if path.exists() else 'does not exist'}; expected a file of "
                          "tokens (.bin)")
    index = path.with_suffix(".idx")
    try:
        size = path.stat().st_size
        indexed_dtype = _read_index_dtype(index, size) if path.suffix == ".bin" and index.is_file() else None
        if indexed_dtype is not None and dtype is not None and indexed_dtype != dtype:
            raise ConfigError(f"training.token_dtype is {dtype!r}, and {index} says {indexed_dtype!r}; leave it out")
        chosen = np.dtype(indexed_dtype or dtype or DEFAULT_DTYPE).newbyteorder("<")
        if size % chosen.itemsize:
            raise ConfigError(f"{subject}, of {size} bytes; expected a multiple of {chosen.itemsize}, as tokens are "
                              f"{chosen.name} (training.token_dtype)")
        return np.memmap(path, chosen, mode="r") if size else np.zeros(0, chosen)
    except OSError as error:
        raise ConfigError(f"{subject}, which cannot be read: {error.strerror}") from None


def _read_index_dtype(index: Path, size: int) -> str | None:
    """Return the dtype that the .idx file `index` names; None if its format is not Megatron's.

    Raises ConfigError if it is damaged, or does not describe a .bin of `size` bytes.
    """
    with index.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return None
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise ConfigError(f"{index}: ends within its header; it is damaged")
        version, code, sequences, _ = _HEADER.unpack(header)
        if version != 1 or code not in _CODES:
            raise ConfigError(f"{index}: version {version}, tokens of code {code}; expected version 1, and one of "
                              + ", ".join(f"{number} ({name})" for number, name in _CODES.items()))
        lengths = np.fromfile(file, "<i4", sequences) if sequences <= size else np.zeros(0, "<i4")
    expected = int(lengths.sum(dtype=np.int64)) * np.dtype(_CODES[code]).itemsize
    if len(lengths) != sequences or expected != size:
        raise ConfigError(f"{index}: lists {sequences} sequences of {expected} bytes; its .bin has {size} bytes: "
                          "they do not belong together")
    return _CODES[code]
