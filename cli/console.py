"""What every command shares: where output goes, and how an answer or a refusal ends the program.

stdout carries the answer (with --json exactly one JSON object), stderr everything else. Exit 0 done, 1 the answer is
no, 2 bad input.
"""

import difflib
import errno
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import typer
from rich.console import Console

from planner.interrupt import interruptible
from schedules.files import read_at_most, write_atomically
from schedules.schedule import Worker

out = Console()
err = Console(stderr=True)


def print_json(answer: Mapping[str, object]) -> None:
    """Print the one JSON object that --json promises."""
    sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")


def printable(text: str) -> str:
    """Text in which control characters, which names of files and their contents may hold, are written as escapes."""
    return "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)


def complain(message: object) -> None:
    """A line in red on stderr, after the program's name."""
    err.print(printable(f"slipstream: {message}"), style="red", markup=False, highlight=False, soft_wrap=True)


def refuse(message: object) -> NoReturn:
    """Bad input: one line on stderr, exit 2."""
    complain(" ".join(str(message).split()))
    raise typer.Exit(2)


def answer_no(message: object) -> NoReturn:
    """The answer is no: the reason on stderr, exit 1."""
    complain(message)
    raise typer.Exit(1)


@contextmanager
def loading() -> Iterator[None]:
    """Import modules within. Ctrl-C is acted upon afterwards: some modules swallow it, and then are half there."""
    with interruptible() as interrupted:
        yield
    if interrupted.is_set():
        raise KeyboardInterrupt


@contextmanager
def heeding() -> Iterator[Callable[[], None]]:
    """Long work. The first Ctrl-C is acted upon where the function is called that this gives, the second at once."""
    with interruptible() as interrupted:
        def heed() -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt

        yield heed


def near(word: str, words: Iterable[str]) -> str:
    """`; did you mean 'x'?`, where one of the words is close to what was written; else nothing."""
    found = difflib.get_close_matches(word, list(words), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def completing(*words: str) -> Callable[[str], list[str]]:
    """For an option that takes one of these words: what a shell offers when the user presses Tab."""
    def offer(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return offer


def parse_workers(texts: list[str]) -> tuple[Worker, ...]:
    """Workers given as D.S options, sorted, each once. Exits 2 when one is malformed."""
    try:
        return tuple(sorted({Worker.parse(text) for text in texts}))
    except ValueError as error:
        refuse(error)


def is_there(path: Path) -> bool:
    """Whether there is anything; also where nobody may look, so that whoever opens it tells the reason."""
    try:
        return path.exists()
    except OSError:
        return True


def require_writable(path: Path | None) -> None:
    """Exits 2 where no file can be written to `path`, before the work is done whose outcome it is to hold."""
    if path is None:
        return
    try:
        place = next(place for place in (path, *path.absolute().parents) if place.exists())
    except OSError as error:
        refuse(f"{path}: cannot be written: {error.strerror}")
    if place == path and path.is_dir():
        problem = errno.EISDIR
    elif place != path and not place.is_dir():
        problem = errno.ENOTDIR
    elif not os.access(place, os.W_OK):
        problem = errno.EACCES
    else:
        return
    refuse(f"{path}: cannot be written: {os.strerror(problem)}")


def write_or_refuse(path: Path, data: bytes) -> None:
    """Write a file whole or not at all; exits 2 where it cannot be written."""
    try:
        write_atomically(path, data)
    except OSError as error:
        refuse(f"{path}: cannot be written: {error.strerror}")


def read_text_or_refuse(path: Path, most: int) -> str:
    """The text in a file of at most so many bytes; exits 2 with one line where it cannot be read."""
    try:
        return read_at_most(path, most, ValueError).decode()
    except UnicodeDecodeError:
        refuse(f"{path}: not UTF-8 text")
    except ValueError as error:
        refuse(error)


def duration(seconds: float) -> str:
    """A time as a person reads it: `30 s`, `29.7 ms`, `850 us`; four digits."""
    unit, name = next(((unit, name) for unit, name in ((1.0, "s"), (1e-3, "ms")) if seconds >= unit), (1e-6, "us"))
    return f"{seconds / unit:.4g} {name}" if seconds else "0 s"
