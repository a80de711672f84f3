"""Format the rows of all steps as one page, in the form of docs/devices.md."""

from collections.abc import Iterable, Sequence
from datetime import datetime

from benchmarks.devices.report import Row


def page(rows: Iterable[Row], command: str) -> str:
    """Return the page in Markdown, with the last report of each row."""
    found: dict[str, dict[str, str]] = {}
    for row in rows:
        found.setdefault(row.step, {})[row.what] = row.value
    lines = [f"{datetime.now().date()}, `{command}`:"]
    for step, values in found.items():
        lines += [
            "",
            f"**{step}**",
            "",
            *table([(_cell(what), _cell(value)) for what, value in values.items()]),
        ]
    return "\n".join(lines) + "\n"


def table(rows: Sequence[tuple[str, str]]) -> list[str]:
    """Return a table of two columns."""
    return ["| | |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
