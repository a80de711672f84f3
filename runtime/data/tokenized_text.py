"""Text as tokens, by a tokenizer of the `tokenizers` package; tokenized once on a machine, and cached for the user.

Workers map the same file (`runtime.data.token_file`). If the cache cannot be written, each worker holds the
tokens in its own memory.
"""

import hashlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slipstream.runtime.config import ConfigError
from slipstream.runtime.errors import first_line
from slipstream.schedules.files import write_atomically

PIECE_CHARACTERS = 2**20
"""Number of characters, rounded up to whole lines, that are tokenized at a time."""
CACHE_VERSION = 1
"""Version of how text is cut into pieces; part of the name of a file in the cache."""


def tokenize_file(path: Path, tokenizer: Path, vocabulary: int) -> NDArray[Any]:
    """Return the tokens of a UTF-8 text, without special tokens.

    Raises ConfigError if the package `tokenizers` is not installed, if a file cannot be used, or if the tokenizer's
    vocabulary is larger than `vocabulary`, the model's.
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
    """Load a tokenizer, and return it with the least vocabulary size that a model needs for it. Raises ConfigError if
    that exceeds `vocabulary`, or if the tokenizer cannot be loaded."""
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
    """Return the path of the cached tokens of a text; it depends on the contents of the text and of the tokenizer.

    Raises ConfigError if one of them cannot be read.
    """
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
    """Yield the tokens of a text, in an array for each section of about `PIECE_CHARACTERS` characters. Raises
    ConfigError if the text is not UTF-8."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while lines := file.readlines(PIECE_CHARACTERS):
                yield np.fromiter(encoder.encode("".join(lines), add_special_tokens=False).ids, dtype)
    except UnicodeDecodeError as error:
        raise ConfigError(f"training.text is {str(path)!r}, which is not UTF-8 text: {error.reason}") from None
