"""Build pages that work offline, from a template of `cli/page/` and its parts."""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files

_FOLDER = files("slipstream.cli") / "page"


def read_texts(*names: str) -> str:
    """Return the texts of these files of `cli/page/`, joined by line breaks."""
    return "\n".join((_FOLDER / name).read_text("utf-8") for name in names)


def to_json(value: object) -> str:
    """Encode a value as JSON for a script element of HTML, with `<` escaped.

    Raises ValueError for a number that is infinite or not a number.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def pack_json(value: object) -> str:
    """Encode a value by `to_json`, compressed by zlib, in base64, for the page to unpack."""
    return base64.b64encode(zlib.compress(to_json(value).encode(), 9)).decode()


def fill_page(
    template: str,
    *,
    title: str,
    styles: Sequence[str],
    scripts: Sequence[str],
    data: str,
    parts: Mapping[str, str] | None = None,
) -> str:
    """Return the HTML of `head.html` and the file `template`, with placeholders replaced.

    Both are from `cli/page/`; a placeholder is `{{NAME}}`. Raises KeyError for one without a value.

    Parameters
    ----------
    title
        Title of the page, not yet escaped, for `{{TITLE}}`.
    styles, scripts
        Files of `cli/page/`, for `{{STYLE}}` and `{{SCRIPT}}`.
    data
        Text for `{{DATA}}`, inserted unchanged.
    parts
        HTML for further placeholders by their names, inserted unchanged.
    """
    whole = {
        "TITLE": escape(title),
        "STYLE": read_texts(*styles),
        "SCRIPT": read_texts(*scripts),
        "DATA": data,
        **(parts or {}),
    }
    head, *rest = read_texts("head.html", template).split("{{")
    text = head
    for piece in rest:
        name, _, following = piece.partition("}}")
        text += whole[name] + following
    return text
