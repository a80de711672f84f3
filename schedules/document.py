"""Read JSON that may be truncated or malicious, in bounded memory, with one-line errors."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from slipstream.schedules.files import read_at_most

T = TypeVar("T")


class DocumentError(ValueError):
    """Error: the file cannot be read. The message is one line."""


class Header(msgspec.Struct, frozen=True):
    """Keys that are read first, so that an error can name another kind or version."""

    format: Annotated[str, msgspec.Meta(max_length=100)] | None = None
    version: Annotated[int, msgspec.Meta(ge=-2**63, le=2**63 - 1)] | None = None


_HEADER = msgspec.json.Decoder(Header)
_VALUES = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class DocumentKind(Generic[T]):
    """Kind of JSON file, with its reader.

    Each file is one object that has the keys `format` and `version`, among others. Create instances
    at import only: msgspec crashes if two threads build the decoder of a type for the first time at
    once.
    """

    name: str
    format: str
    version: int
    content: type[T]
    bulk: tuple[str, ...]
    """Keys of most of the file, whose values have no objects, so no duplicate keys."""
    max_bytes: int
    error: type[DocumentError]
    damaged: type[DocumentError] | None = None
    """Type of error for a file that is not JSON or not of this form. None: `error`."""
    older: tuple[int, ...] = ()
    """Older versions that can be read besides `version`."""
    _decoder: msgspec.json.Decoder[T] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_decoder", msgspec.json.Decoder(self.content))

    def decode(self, data: bytes, source: str) -> T:
        """Decode a document. `source` names it in errors, whose messages have one line.

        Raises `error` if the document is too large or of another kind or version, and `damaged` (or
        `error` if that is None) if it is malformed.
        """
        if len(data) > self.max_bytes:
            raise self.error(f"{source}: more than {self.max_bytes} bytes{self._size_remark}")
        try:
            header = _HEADER.decode(data)
            if header.format != self.format:
                raise self.error(
                    f"{source}: not a Slipstream {self.name}: key 'format' is {header.format!r}, "
                    f"not {self.format!r}"
                )
            if header.version not in (*self.older, self.version):
                raise self.error(
                    f"{source}: {self.name} format version {header.version}; this Slipstream reads "
                    f"{' and '.join(map(str, (*self.older, self.version)))}"
                )
            document = self._decoder.decode(data)
            self._refuse_duplicates(data)
        except DocumentError:
            raise
        except (ValueError, RecursionError) as error:
            # msgspec.DecodeError and UnicodeDecodeError are ValueErrors
            reason = " ".join(str(error).split())[:200]
            raise (self.damaged or self.error)(
                f"{source}: no readable {self.name}: {reason}"
            ) from None
        return document

    def read_bytes(self, path: Path) -> bytes:
        """Return a file's bytes. Raises `error` if over `max_bytes`, or unreadable."""
        return read_at_most(path, self.max_bytes, self.error, self._size_remark)

    @property
    def _size_remark(self) -> str:
        """Text that a message about a too large file ends with."""
        return f", the limit for a {self.name} file"

    def _refuse_duplicates(self, data: bytes) -> None:
        """Raise ValueError if an object in the document has a key twice."""
        values = _VALUES.decode(data)
        for key in self.bulk:
            data = data.replace(bytes(values[key]), b"0", 1)
        json.loads(data, object_pairs_hook=_dict_of_distinct)


def _dict_of_distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from pairs. Raises ValueError if a key is given twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return values
