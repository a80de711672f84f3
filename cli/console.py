"""What every command shares: where output goes, and how an answer or a refusal ends the program.

stdout carries the answer (with --json exactly one JSON object), stderr everything else. Exit 0 done, 1 the answer is
no, 2 bad input.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

from schedules.files import write_atomically
from schedules.schedule import Worker

out = Console()
err = Console(stderr=True)


def print_json(answer: Mapping[str, object]) -> None:
    """Print the one JSON object that --json promises."""
    sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")


def refuse(message: object) -> NoReturn:
    """Bad input: one line on stderr, exit 2."""
    err.print(f"slipstream: {' '.join(str(message).split())}", style="red", markup=False, highlight=False,
              soft_wrap=True)
    raise typer.Exit(2)


def answer_no(message: object) -> NoReturn:
    """The answer is no: the reason on stderr, exit 1."""
    err.print(f"slipstream: {message}", style="red", markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(1)


def parse_workers(texts: list[str]) -> tuple[Worker, ...]:
    """Workers given as D.S options, sorted, each once. Exits 2 when one is malformed."""
    try:
        return tuple(sorted({Worker.parse(text) for text in texts}))
    except ValueError as error:
        refuse(error)


def write_or_refuse(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; exits 2 where it cannot be written."""
    try:
        write_atomically(path, data)
    except OSError as error:
        refuse(f"{path}: cannot be written: {error.strerror}")


def read_text_or_refuse(path: Path, most: int) -> str:
    """The text in a file of at most so many bytes; exits 2 with one line where it cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
        if len(data) > most:
            refuse(f"{path}: more than {most} bytes")
        return data.decode()
    except OSError as error:
        refuse(f"{path}: cannot be read: {error.strerror}")
    except UnicodeDecodeError:
        refuse(f"{path}: not UTF-8 text")


def duration(seconds: float) -> str:
    """A time as a person reads it: `30 s`, `29.7 ms`, `850 us`; four digits."""
    unit, name = next(((unit, name) for unit, name in ((1.0, "s"), (1e-3, "ms")) if seconds >= unit), (1e-6, "us"))
    return f"{seconds / unit:.4g} {name}" if seconds else "0 s"
