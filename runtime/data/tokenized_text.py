"""Map files of tokens into memory, and tokenize text.

Text is tokenized by a tokenizer of the `tokenizers` package, once on a machine, and cached for the
user. Workers map the same file. If the cache cannot be written, each worker holds the tokens in its
own memory. Other files are flat numbers as nanoGPT writes them, or Megatron's .bin next to its
.idx.
"""

import hashlib
import importlib.util
import os
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from slipstream.runtime.config import ConfigError, TokenDtype
from slipstream.runtime.errors import first_line
from slipstream.schedules.files import write_atomically

MAGIC: Final = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<QBQQ")
"""Header of an .idx after the magic: version, dtype's code, numbers of sequences and bounds."""
_CODES = {4: "int32", 8: "uint16"}
"""Megatron's codes of the supported dtypes. Others are uint8 1, int8 2, int16 3, int64 5."""
DEFAULT_DTYPE: TokenDtype = "uint16"


def map_tokens(path: Path, dtype: TokenDtype | None) -> NDArray[Any]:
    """Map the tokens of a file, whose pages all processes of a machine share.

    If `dtype` is None, it is taken from the .idx of the same name in the same folder; if there is
    no .idx, it is uint16. Raises ConfigError if the file does not exist, or if its length, its .idx
    and `dtype` do not agree.
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
    """Return the dtype that an .idx file names; None if it is not Megatron's."""
    # Raises ConfigError if it is damaged, or does not describe a .bin of `size` bytes.
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


PIECE_CHARACTERS = 2**20
"""Characters, rounded up to whole lines, that are tokenized at a time."""
CACHE_VERSION = 1
"""Version of how text is cut into pieces. Part of the name of a file in the cache."""


def tokenize_file(path: Path, tokenizer: Path, vocabulary: int) -> NDArray[Any]:
    """Return the tokens of a UTF-8 text, without special tokens.

    Raises ConfigError if the package `tokenizers` is not installed, if a file cannot be used, or if
    the tokenizer's vocabulary is larger than `vocabulary`, the model's.
    """
    encoder, count = _load_tokenizer(tokenizer, vocabulary)
    cached = _cache_path(path, tokenizer)
    dtype = np.dtype("<u2" if count <= 2**16 else "<u4")
    with suppress(OSError):
        if cached.stat().st_size:
            return np.memmap(cached, dtype, mode="r")
    tokens = np.concatenate([np.zeros(0, dtype), *_tokenize_pieces(path, encoder, dtype)])
    with suppress(OSError):
        write_atomically(cached, tokens.tobytes())
    return tokens


def _load_tokenizer(path: Path, vocabulary: int) -> tuple[Any, int]:
    """Load a tokenizer, and return the vocabulary that it needs, too. Raises ConfigError."""
    if importlib.util.find_spec("tokenizers") is None:
        raise ConfigError("training.tokenizer needs the package tokenizers: pip install -e '.[tokenizers]'")
    from tokenizers import Tokenizer  # the import takes time and needs the package

    subject = f"training.tokenizer is {str(path)!r}"
    if not path.is_file():
        raise ConfigError(f"{subject}, which {'is no file' if path.exists() else 'does not exist'}; expected the path "
                          "of a tokenizer.json")
    try:
        encoder = Tokenizer.from_file(str(path))
    except Exception as error:  # the package does not document what it raises
        raise ConfigError(f"{subject}, which cannot be read as a tokenizer: {first_line(error)}") from None
    count = max(encoder.get_vocab().values(), default=-1) + 1
    if count > vocabulary:
        raise ConfigError(f"{subject}, of {count} tokens; expected at most {vocabulary}, the model's vocabulary")
    return encoder, count


def _cache_path(text: Path, tokenizer: Path) -> Path:
    """Return the path of a text's cached tokens, by the contents of text and tokenizer."""
    # Raises ConfigError if one of them cannot be read.
    digest = hashlib.sha256(f"{CACHE_VERSION}".encode())
    for name, path in (("training.text", text), ("training.tokenizer", tokenizer)):
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"{name} is {str(path)!r}, which cannot be read: {error.strerror}") from None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "slipstream" / "tokens" / f"{digest.hexdigest()[:32]}.bin"


def _tokenize_pieces(path: Path, encoder: Any, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    """Yield the tokens of a text, section by section. Raises ConfigError if it is not UTF-8."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while lines := file.readlines(PIECE_CHARACTERS):
                yield np.fromiter(encoder.encode("".join(lines), add_special_tokens=False).ids, dtype)
    except UnicodeDecodeError as error:
        raise ConfigError(f"training.text is {str(path)!r}, which is not UTF-8 text: {error.reason}") from None
