"""Documents of any kind: what is refused, in one line that names the file."""

import msgspec
import pytest

from slipstream.schedules.document import DocumentError, DocumentKind


class Note(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: str
    version: int
    lines: list[str]


KIND = DocumentKind(
    name="note",
    format="test.note",
    version=2,
    content=Note,
    bulk=("lines",),
    max_bytes=200,
    error=DocumentError,
)
GOOD = b'{"format":"test.note","version":2,"lines":["a","a"]}'


def test_a_document_is_read():
    assert KIND.decode(GOOD, "n.json").lines == ["a", "a"]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (GOOD[:-3], "n.json: no readable note: "),
        (b"\xff", "n.json: no readable note: "),
        (GOOD.replace(b"test.note", b"test.book"), "key 'format' is 'test.book', not 'test.note'"),
        (GOOD.replace(b":2", b":3"), "note format version 3; this Slipstream reads 2"),
        (
            GOOD.replace(b'"version":2,', b'"version":2,"version":2,'),
            "key 'version' is given twice",
        ),
        (GOOD.replace(b'"lines"', b'"more":1,"lines"'), "unknown field `more`"),
        (
            GOOD.replace(b'"a"', b'"' + b"a" * 200 + b'"', 1),
            "more than 200 bytes, the limit for a note file",
        ),
    ],
)
def test_others_are_refused_in_one_line(data, says):
    with pytest.raises(DocumentError) as refused:
        KIND.decode(data, "n.json")
    assert says in str(refused.value) and "\n" not in str(refused.value)
