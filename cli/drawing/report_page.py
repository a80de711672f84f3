"""Define what reports share: tables, and a document in light, dark and print."""

from collections.abc import Sequence
from html import escape

from slipstream.cli.drawing.page_file import read_texts

THEME_SWITCH = (
    '<label class="theme">Theme <select id="theme"><option value="">system</option>'
    '<option value="light">light</option><option value="dark">dark</option></select></label>'
)
THEME_SCRIPT = """
document.getElementById('theme').addEventListener('change', event => {
  if (event.target.value) document.documentElement.dataset.theme = event.target.value;
  else delete document.documentElement.dataset.theme;
});
"""
"""Script of the switch between light, dark, and what the system prefers."""


def build_document(title: str, body: str, script: str = "") -> bytes:
    """Return an HTML file without network or fonts; `body` and `script` go in unchanged."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · Slipstream</title>"
        f"<style>\n{read_texts('report.css')}</style></head>\n"
        f"<body>\n{THEME_SWITCH}\n{body}\n<script>{THEME_SCRIPT}{script}</script>\n</body></html>\n"
    ).encode()


def render_table(head: Sequence[str], rows: Sequence[tuple[bool, Sequence[str]]]) -> str:
    """Return an HTML table with the column titles `head`.

    A row is a pair: whether it is marked as a reference line, and the texts of its cells.
    """
    names = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = ""
    for marked, cells in rows:
        kind = " class=reference" if marked else ""
        body += f"<tr{kind}>{''.join(map(_html_cell, cells))}</tr>"
    table = f"<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _html_cell(text: str) -> str:
    long = len(text) > 40
    return f"<td{' class=text' if long else ''}>{escape(text)}</td>"


def colour_swatch(colour: str) -> str:
    """Return an HTML element that shows a colour, for legends."""
    return f'<span class="swatch" style="background:{colour}"></span>'
