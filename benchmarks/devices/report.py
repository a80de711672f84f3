"""Print the rows of the page, and append them to a file at once.

No measurement is lost.
"""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROWS = "devices.json"
"""Name of the file in the output folder, with one JSON object per line."""


class Row(NamedTuple):
    """Figure or failure."""

    step: str
    what: str
    value: str
    facts: dict[str, Any]
    """Values for later steps and other programs."""


class Report:
    """Writer of the rows of one step."""

    def __init__(self, folder: Path, step: str) -> None:
        self.folder = folder
        self._step = step
        self._began = time.monotonic()

    def row(self, what: str, value: str, **facts: Any) -> None:
        """Print a row, and append it to the file."""
        print(
            f"{self._step} | {what}: {value} [{time.monotonic() - self._began:.0f} s]", flush=True
        )
        with (self.folder / ROWS).open("a") as file:
            file.write(json.dumps(Row(self._step, what, value, facts)._asdict()) + "\n")


def read_rows(folder: Path) -> Iterator[Row]:
    """Return all rows so far."""
    path = folder / ROWS
    for line in path.read_text().splitlines() if path.exists() else ():
        yield Row(**json.loads(line))


def milliseconds(seconds: float) -> str:
    """Format a duration for a reader."""
    return f"{seconds * 1e3:.4g} ms"


def mebibytes(size: float) -> str:
    """Format bytes for a reader."""
    return f"{size / 2**20:,.{2 if abs(size) < 2**25 else 0}f} MiB"
