"""Text as tokens, by a tokenizer of the `tokenizers` package. Made once on a machine, and kept in the user's cache.

Workers map the same file (`runtime.model.data.token_file`). Where the cache cannot be written, each keeps the tokens
itself.
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

PIECE = 2**20
"""Characters, rounded up to whole lines, that are tokenized at a time."""
VERSION = 1
"""Of how text is cut into pieces."""


def tokenized(path: Path, tokenizer: Path, vocabulary: int) -> NDArray[Any]:
    """The tokens of a text in UTF-8, without special tokens.

    Raises ConfigError where the package is not installed, a file cannot be used, or the model's vocabulary is smaller
    than the tokenizer's.
    """
    encoder, count = _loaded(tokenizer, vocabulary)
    kept = _kept_at(path, tokenizer)
    dtype = np.dtype("<u2" if count <= 2**16 else "<u4")
    with suppress(OSError):
        if kept.stat().st_size:
            return np.memmap(kept, dtype, mode="r")
    tokens = np.concatenate([np.zeros(0, dtype), *_pieces(path, encoder, dtype)])
    with suppress(OSError):
        write_atomically(kept, tokens.tobytes())
    return tokens


def _loaded(path: Path, vocabulary: int) -> tuple[Any, int]:
    """The tokenizer, and how many tokens a model must have for it."""
    if importlib.util.find_spec("tokenizers") is None:
        raise ConfigError("training.tokenizer needs the package tokenizers: pip install -e '.[tokenizers]'")
    from tokenizers import Tokenizer  # takes time, and needs the package

    wrong = f"training.tokenizer is {str(path)!r}"
    if not path.is_file():
        raise ConfigError(f"{wrong}, which {'is no file' if path.exists() else 'does not exist'}; expected the path "
                          "of a tokenizer.json")
    try:
        encoder = Tokenizer.from_file(str(path))
    except Exception as error:  # what the package raises, it does not say
        raise ConfigError(f"{wrong}, which cannot be read as a tokenizer: {first_line(error)}") from None
    count = max(encoder.get_vocab().values(), default=-1) + 1
    if count > vocabulary:
        raise ConfigError(f"{wrong}, of {count} tokens; expected at most {vocabulary}, the model's vocabulary")
    return encoder, count


def _kept_at(text: Path, tokenizer: Path) -> Path:
    """A name that is the same for the same text and tokenizer only."""
    digest = hashlib.sha256(f"{VERSION}".encode())
    for name, path in (("training.text", text), ("training.tokenizer", tokenizer)):
        try:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ConfigError(f"{name} is {str(path)!r}, which cannot be read: {error.strerror}") from None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "slipstream" / "tokens" / f"{digest.hexdigest()[:32]}.bin"


def _pieces(path: Path, encoder: Any, dtype: np.dtype[Any]) -> Iterator[NDArray[Any]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while lines := file.readlines(PIECE):
                yield np.fromiter(encoder.encode("".join(lines), add_special_tokens=False).ids, dtype)
    except UnicodeDecodeError as error:
        raise ConfigError(f"training.text is {str(path)!r}, which is no text in UTF-8: {error.reason}") from None
