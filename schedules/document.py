"""Read JSON that may be truncated or malicious, in bounded memory, with one-line errors."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec

from slipstream.schedules.files import read_at_most

T = TypeVar("T")


class DocumentError(ValueError):
    """Error of one line for a file that cannot be read."""


class Header(msgspec.Struct, frozen=True):
    """Format and version of a file, read first so that an error can name them."""

    format: Annotated[str, msgspec.Meta(max_length=100)] | None = None
    version: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None


_HEADER = msgspec.json.Decoder(Header)
_VALUES = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class DocumentKind(Generic[T]):
    """Kind of JSON file, such as a schedule, with its reader.

    A file is one object with keys `format` and `version`. Create instances at import only: msgspec
    crashes if two threads build the decoder of a type for the first time at once.
    """

    name: str
    format: str
    version: int
    content: type[T]
    bulk: tuple[str, ...]
    """Keys of large values, which are not searched for duplicate keys."""
    max_bytes: int
    error: type[DocumentError]
    damaged: type[DocumentError] | None = None
    """Type of error for a file that is malformed; None means `error`."""
    older: tuple[int, ...] = ()
    """Older versions of the format that can be read, besides `version`."""
    _decoder: msgspec.json.Decoder[T] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Built at import, before several threads decode; the dataclass is frozen, hence this call.
        object.__setattr__(self, "_decoder", msgspec.json.Decoder(self.content))

    def decode(self, data: bytes, source: str) -> T:
        """Decode a document's bytes; errors name it by `source`, in one line.

        Raises `error` if the document is too large, or has another format or version. Raises
        `damaged` (or `error` if that is None) if it is malformed.
        """
        if len(data) > self.max_bytes:
            raise self.error(f"{source}: more than {self.max_bytes} bytes{self._size_remark}")
        try:
            # The header first: a file of another version could fail in its content, with a
            # misleading error.
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
        """Return a file's bytes. Raises `error` if they are over `max_bytes`, or unreadable."""
        return read_at_most(path, self.max_bytes, self.error, self._size_remark)

    @property
    def _size_remark(self) -> str:
        return f", the limit for a {self.name} file"

    def _refuse_duplicates(self, data: bytes) -> None:
        """Raise ValueError if an object in the document, outside `bulk`, has a key twice."""
        # Only the slow standard parser reports duplicates, so it gets the file without its bulk.
        values = _VALUES.decode(data)
        for key in self.bulk:
            data = data.replace(bytes(values[key]), b"0", 1)
        json.loads(data, object_pairs_hook=_dict_of_distinct)


def _dict_of_distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a dict from pairs. Raises ValueError if a key occurs twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(key for key in keys if keys.count(key) > 1)!r} is given twice")
    return values
