"""Map files of tokens into memory, and tokenize text.

Text is tokenized by a tokenizer of the `tokenizers` package, once on a machine, and cached for the
user. Workers map the same cached file. If the cache cannot be written, each worker holds the tokens
in its own memory. Files of tokens are flat numbers as nanoGPT writes them, or Megatron's .bin next
to its .idx.
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
"""An .idx after its magic: version, dtype's code, numbers of sequences and document bounds."""
_CODES = {4: "int32", 8: "uint16"}
"""Supported dtypes by Megatron's code. Others are uint8 1, int8 2, int16 3, int64 5."""
DEFAULT_DTYPE: TokenDtype = "uint16"


def map_tokens(path: Path, dtype: TokenDtype | None) -> NDArray[Any]:
    """Map the tokens of a file, read-only, into memory that a machine's processes share.

    If `dtype` is None, a .bin file has that of Megatron's .idx file of the same name in the same
    folder; without such a file, the dtype is uint16. Raises ConfigError if a file cannot be read,
    if the .idx is damaged, or if the length, the .idx and `dtype` do not agree.
    """
    subject = f"training.tokens is {str(path)!r}"
    if not path.is_file():
        raise ConfigError(
            f"{subject}, which {'is no file' if path.exists() else 'does not exist'}; expected a "
            "file of tokens (.bin)"
        )
    index = path.with_suffix(".idx")
    try:
        size = path.stat().st_size
        # Megatron's .idx names the dtype; nanoGPT's files have none.
        indexed_dtype = None
        if path.suffix == ".bin" and index.is_file():
            indexed_dtype = _read_index_dtype(index, size)
        if indexed_dtype is not None and dtype is not None and indexed_dtype != dtype:
            raise ConfigError(
                f"training.token_dtype is {dtype!r}, and {index} says {indexed_dtype!r}; leave it "
                "out"
            )
        chosen = np.dtype(indexed_dtype or dtype or DEFAULT_DTYPE).newbyteorder("<")
        if size % chosen.itemsize:
            raise ConfigError(
                f"{subject}, of {size} bytes; expected a multiple of {chosen.itemsize}, as tokens "
                f"are {chosen.name} (training.token_dtype)"
            )
        # An empty file cannot be mapped.
        return np.memmap(path, chosen, mode="r") if size else np.zeros(0, chosen)
    except OSError as error:
        raise ConfigError(f"{subject}, which cannot be read: {error.strerror}") from None


def _read_index_dtype(index: Path, size: int) -> str | None:
    """Return the dtype that an .idx file names; None if the file is not Megatron's."""
    with index.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            return None
        header = file.read(_HEADER.size)
        if len(header) < _HEADER.size:
            raise ConfigError(f"{index}: ends within its header; it is damaged")
        version, code, sequences, _ = _HEADER.unpack(header)
        if version != 1 or code not in _CODES:
            raise ConfigError(
                f"{index}: version {version}, tokens of code {code}; expected version 1, and one "
                "of " + ", ".join(f"{number} ({name})" for number, name in _CODES.items())
            )
        # A damaged count must not make this read gigabytes.
        lengths = np.fromfile(file, "<i4", sequences) if sequences <= size else np.zeros(0, "<i4")
    expected = int(lengths.sum(dtype=np.int64)) * np.dtype(_CODES[code]).itemsize
    if len(lengths) != sequences or expected != size:
        raise ConfigError(
            f"{index}: lists {sequences} sequences of {expected} bytes; its .bin has {size} bytes: "
            "they do not belong together"
        )
    return _CODES[code]


PIECE_CHARACTERS = 2**20
"""Number of characters that are tokenized at a time, rounded up to whole lines."""
CACHE_VERSION = 1
"""Version of how text is cut, which is part of a cached file's name."""


def tokenize_file(path: Path, tokenizer: Path, vocabulary: int) -> NDArray[Any]:
    """Return the tokens of a UTF-8 text, without special tokens.

    They are cached for later calls if the user's cache folder can be written. Raises ConfigError if
    the package `tokenizers` is not installed, if a file cannot be used, or if the tokenizer's
    vocabulary is larger than the model's.
    """
    encoder, count = _load_tokenizer(tokenizer, vocabulary)
    cached = _cache_path(path, tokenizer)
    dtype = np.dtype("<u2" if count <= 2**16 else "<u4")
    # Tokens of the same text and tokenizer are in the cache since an earlier run.
    with suppress(OSError):
        if cached.stat().st_size:
            return np.memmap(cached, dtype, mode="r")
    # Cut in pieces, a large text needs little memory besides its tokens.
    tokens = np.concatenate([np.zeros(0, dtype), *_tokenize_pieces(path, encoder, dtype)])
    # Without a cache every worker tokenizes, which only costs time and memory.
    with suppress(OSError):
        write_atomically(cached, tokens.tobytes())
    return tokens


def _load_tokenizer(path: Path, vocabulary: int) -> tuple[Any, int]:
    if importlib.util.find_spec("tokenizers") is None:
        raise ConfigError(
            "training.tokenizer needs the package tokenizers: pip install -e '.[tokenizers]'"
        )
    from tokenizers import Tokenizer  # the import takes time and needs the package

    subject = f"training.tokenizer is {str(path)!r}"
    if not path.is_file():
        raise ConfigError(
            f"{subject}, which {'is no file' if path.exists() else 'does not exist'}; expected the "
            "path of a tokenizer.json"
        )
    try:
        encoder = Tokenizer.from_file(str(path))
    except Exception as error:  # the package does not document what it raises
        raise ConfigError(
            f"{subject}, which cannot be read as a tokenizer: {first_line(error)}"
        ) from None
    count = max(encoder.get_vocab().values(), default=-1) + 1
    if count > vocabulary:
        raise ConfigError(
            f"{subject}, of {count} tokens; expected at most {vocabulary}, the model's vocabulary"
        )
    return encoder, count


def _cache_path(text: Path, tokenizer: Path) -> Path:
    # The contents name the file, so a changed text or tokenizer is never taken for the old one.
    digest = hashlib.sha256(f"{CACHE_VERSION}".encode())
    for name, path in (("training.text", text), ("training.tokenizer", tokenizer)):
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(
                f"{name} is {str(path)!r}, which cannot be read: {error.strerror}"
            ) from None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "slipstream" / "tokens" / f"{digest.hexdigest()[:32]}.bin"


def _tokenize_pieces(path: Path, encoder: Any, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while lines := file.readlines(PIECE_CHARACTERS):
                encoding = encoder.encode("".join(lines), add_special_tokens=False)
                yield np.fromiter(encoding.ids, dtype)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"training.text is {str(path)!r}, which is not UTF-8 text: {error.reason}"
        ) from None
