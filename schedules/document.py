"""Reads JSON files that may be truncated, malicious or not ours: refused in one line, in bounded memory."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from slipstream.schedules.files import read_at_most

T = TypeVar("T")


class DocumentError(ValueError):
    """The file cannot be read. The message is one line."""


class Header(msgspec.Struct, frozen=True):
    """Read first, so that the message about a file of another kind or version says so."""

    format: Annotated[str, msgspec.Meta(max_length=100)] | None = None
    version: Annotated[int, msgspec.Meta(ge=-2**63, le=2**63 - 1)] | None = None


_HEADER = msgspec.json.Decoder(Header)
_VALUES = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class DocumentKind(Generic[T]):
    """A kind of JSON file: one object with keys `format` and `version`. Made at import, as all decoders are:

    msgspec crashes where two threads read a type for the first time at once.
    """

    name: str
    format: str
    version: int
    content: type[T]
    bulk: tuple[str, ...]
    """Keys whose values are most of the file; there are no JSON objects in them."""
    max_bytes: int
    error: type[DocumentError]
    damaged: type[DocumentError] | None = None
    """Raised where a file is no JSON, or not of this kind's form; None: `error` is."""
    older: tuple[int, ...] = ()
    """Versions that are read beside `version`."""
    _decoder: msgspec.json.Decoder[T] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_decoder", msgspec.json.Decoder(self.content))

    def decode(self, data: bytes, source: str) -> T:
        """Read a document; `source` names it in errors. Raises `error` or `damaged`, with one line."""
        if len(data) > self.max_bytes:
            raise self.error(f"{source}: more than {self.max_bytes} bytes{self._remark}")
        try:
            header = _HEADER.decode(data)
            if header.format != self.format:
                raise self.error(f"{source}: no Slipstream {self.name}: key 'format' is {header.format!r}, not "
                                 f"{self.format!r}")
            if header.version not in (*self.older, self.version):
                raise self.error(f"{source}: {self.name} format version {header.version}; this Slipstream reads "
                                 f"{' and '.join(map(str, (*self.older, self.version)))}")
            document = self._decoder.decode(data)
            self._refuse_duplicates(data)
        except DocumentError:
            raise
        except (ValueError, RecursionError) as error:  # msgspec.DecodeError and UnicodeDecodeError are ValueErrors
            reason = " ".join(str(error).split())[:200]
            raise (self.damaged or self.error)(f"{source}: no readable {self.name}: {reason}") from None
        return document

    def read_bytes(self, path: Path) -> bytes:
        """The bytes of a file of at most `max_bytes`. Raises `error`."""
        return read_at_most(path, self.max_bytes, self.error, self._remark)

    @property
    def _remark(self) -> str:
        return f", the most that a {self.name} file may have"

    def _refuse_duplicates(self, data: bytes) -> None:
        """Refuse keys that are given twice. The bulk is cut out first, so that the rest is small."""
        values = _VALUES.decode(data)
        for key in self.bulk:
            data = data.replace(bytes(values[key]), b"0", 1)
        json.loads(data, object_pairs_hook=_distinct)


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return found
