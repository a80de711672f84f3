"""Pages as files that work offline: a template of `cli/page/` with its parts put in."""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

_FOLDER = files("slipstream.cli") / "page"


def text_of(*names: str) -> str:
    """Styles or scripts of `cli/page/`, one after the other."""
    return "\n".join((_FOLDER / name).read_text("utf-8") for name in names)


def as_data(value: object) -> str:
    """JSON for a script element, in which `<` must not begin a tag: it is written as an escape."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def packed(value: object) -> str:
    """`as_data`, compressed (zlib) and in base64: a page takes it apart when it is asked for."""
    return base64.b64encode(zlib.compress(as_data(value).encode(), 9)).decode()


def filled(template: str, *, title: str, styles: Sequence[str], scripts: Sequence[str], data: str,
           parts: Mapping[str, str] | None = None) -> str:
    """`head.html` and a template, with `{{TITLE}}`, `{{STYLE}}`, `{{SCRIPT}}`, `{{DATA}}` and further parts in place.

    `title` is text; `data` and the further parts are put in as they are.
    """
    whole = {"TITLE": escape(title), "STYLE": text_of(*styles), "SCRIPT": text_of(*scripts), "DATA": data,
             **(parts or {})}
    head, *rest = text_of("head.html", template).split("{{")
    text = head
    for piece in rest:
        name, _, following = piece.partition("}}")
        text += whole[name] + following
    return text
