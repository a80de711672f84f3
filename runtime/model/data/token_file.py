"""Files of tokens, mapped: flat numbers, as nanoGPT writes them, or Megatron's .bin with an .idx beside it."""

import struct
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from slipstream.runtime.config import ConfigError, TokenDtype

MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")
"""Of an .idx, after the magic: version, code of the dtype, number of sequences, number of document bounds."""
_CODES = {4: "int32", 8: "uint16"}
"""Megatron's codes of the dtypes that are read here. Those of others: uint8 1, int8 2, int16 3, int64 5."""
DEFAULT: TokenDtype = "uint16"


def map_tokens(path: Path, dtype: TokenDtype | None) -> NDArray[Any]:
    """The tokens of a file; their pages are read when they are used, and shared by all processes of a machine.

    `dtype` may be None: an .idx beside the file says it, else it is uint16. Raises ConfigError where there is no
    such file, or it and its .idx are not of such numbers.
    """
    wrong = f"training.tokens is {str(path)!r}"
    if not path.is_file():
        raise ConfigError(f"{wrong}, which {'is no file' if path.exists() else 'does not exist'}; expected a file of "
                          "tokens (.bin)")
    index = path.with_suffix(".idx")
    try:
        size = path.stat().st_size
        said = _said_by(index, size) if path.suffix == ".bin" and index.is_file() else None
        if said is not None and dtype is not None and said != dtype:
            raise ConfigError(f"training.token_dtype is {dtype!r}, and {index} says {said!r}; leave it out")
        chosen = np.dtype(said or dtype or DEFAULT).newbyteorder("<")
        if size % chosen.itemsize:
            raise ConfigError(f"{wrong}, of {size} bytes; expected a multiple of {chosen.itemsize}, as tokens are "
                              f"{chosen.name} (training.token_dtype)")
        return np.memmap(path, chosen, mode="r") if size else np.zeros(0, chosen)
    except OSError as error:
        raise ConfigError(f"{wrong}, which cannot be read: {error.strerror}") from None


def _said_by(index: Path, size: int) -> str | None:
    """The dtype that an .idx says, once it fits the size of its .bin; None: it is not one of Megatron's."""
    with index.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return None
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise ConfigError(f"{index}: ends in its header; it is damaged")
        version, code, sequences, _ = _HEADER.unpack(header)
        if version != 1 or code not in _CODES:
            raise ConfigError(f"{index}: version {version}, tokens of code {code}; expected version 1, and one of "
                              + ", ".join(f"{number} ({name})" for number, name in _CODES.items()))
        lengths = np.fromfile(file, "<i4", sequences) if sequences <= size else np.zeros(0, "<i4")
    expected = int(lengths.sum(dtype=np.int64)) * np.dtype(_CODES[code]).itemsize
    if len(lengths) != sequences or expected != size:
        raise ConfigError(f"{index}: speaks of {sequences} sequences of {expected} bytes; its .bin has {size} bytes: "
                          "they do not belong together")
    return _CODES[code]
