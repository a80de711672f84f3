"""Define what reports share: tables, and a style in light, dark and print."""

from collections.abc import Sequence
from html import escape

STYLE = """
:root { color-scheme: light; --ink: #1b1f23; --paper: #fff; --dim: #57606a; --rule: #e5e8eb; --soft: #3d444b; }
@media (prefers-color-scheme: dark) { :root:not([data-theme="light"]) { color-scheme: dark; --ink: #e6edf3;
       --paper: #0d1117; --dim: #9198a1; --rule: #30363d; --soft: #c4ccd4; } }
:root[data-theme="dark"] { color-scheme: dark; --ink: #e6edf3; --paper: #0d1117; --dim: #9198a1; --rule: #30363d;
       --soft: #c4ccd4; }
@media print { :root { color-scheme: light; --ink: #000; --paper: #fff; --dim: #444; --rule: #ccc; --soft: #222; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 1000px;
       margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin: 0 0 .3rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem; }
h3 { font-size: 1rem; margin: 1.2rem 0 .3rem; }
.lead { font-size: 1.1rem; margin: .6rem 0; } .dim { color: var(--dim); font-size: .9rem; }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif; fill: var(--ink); }
svg .grid { stroke: var(--rule); stroke-width: 1; } svg .axis { stroke: var(--ink); stroke-width: 1; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
.scroll { overflow-x: auto; } .chart svg { min-width: 760px; } .narrow { display: none; }
@media (max-width: 700px) { .wide { display: none; } .narrow { display: block; } }
.theme { float: right; color: var(--dim); font-size: .9rem; } .theme select { font: inherit; }
th, td { padding: .3rem .5rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid var(--ink);
       white-space: normal; vertical-align: bottom; font-weight: 600; }
td.text { text-align: left; white-space: normal; }
tr.reference { color: var(--dim); font-style: italic; }
.legend { margin: .3rem 0; } .legend label { display: inline-block; margin: 0 1rem .2rem 0; cursor: pointer; }
.swatch { display: inline-block; width: 1.1em; height: .7em; margin-right: .35em; border-radius: 2px; }
dt { font-weight: 600; margin-top: .5rem; } dd { margin: 0; color: var(--soft); font-size: .92rem; }
@media print { body { margin: 0; max-width: none; font-size: 11px; } input, .theme { display: none; }
       .legend .off { display: none; } .scroll { overflow: visible; }
       th, td { padding: .15rem .25rem; font-size: .68rem; }
       svg, tr { break-inside: avoid; } h2, h3 { break-after: avoid; }
       * { print-color-adjust: exact; -webkit-print-color-adjust: exact; } }
"""
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
        f"<title>{escape(title)} · Slipstream</title><style>{STYLE}</style></head>\n"
        f"<body>\n{THEME_SWITCH}\n{body}\n<script>{THEME_SCRIPT}{script}</script>\n</body></html>\n"
    ).encode()


def build_table(head: Sequence[str], rows: Sequence[tuple[bool, Sequence[str]]]) -> str:
    """Return an HTML table with the column titles `head`.

    A row is a pair: whether it is marked as a reference (a limit to compare policies with), and the
    texts of its cells.
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
