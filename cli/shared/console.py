"""Output of all commands: the answer, refusals, durations and hints.

stdout carries the answer (with --json exactly one JSON object), stderr everything else. Exit 0: done; 1: the answer is
no; 2: bad input.
"""

import contextlib
import difflib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions
from rich.rule import Rule


class _Words(Console):
    """In a terminal, lines end between words; but the terminal folds where a long path has no room in one."""

    def print(self, *objects: Any, **how: Any) -> None:
        """As Rich's own."""
        if self.is_terminal and how.get("soft_wrap") and all(
                len(word) <= self.width for one in objects for word in str(one).split()):
            how = {**how, "soft_wrap": False}
        super().print(*objects, **how)


class _StandardError(_Words):
    """Where nobody reads it any more, as when what has started a run is dead, the work goes on without a word."""

    def on_broken_pipe(self) -> None:
        """Rich's own ends the program."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


class _StandardOutput(_Words):
    """In a file or a pipe, no line is folded and no column of a table is cut, unless COLUMNS says how wide it is.

    `width` is still that of a usual terminal there: pictures are drawn for it.
    """

    @property
    def _folds(self) -> bool:
        return self.is_terminal or "COLUMNS" in os.environ

    @property
    def options(self) -> ConsoleOptions:
        """How things are rendered."""
        return super().options if self._folds else super().options.update(width=UNFOLDED_COLUMNS)

    def print(self, *objects: Any, **how: Any) -> None:
        """As Rich's own."""
        super().print(*objects, **{"crop": self._folds, **how})

    def rule(self, title: Any = "", **how: Any) -> None:
        """As Rich's own, but never wider than a usual terminal."""
        self.print(Rule(title, **how), width=self.width)


UNFOLDED_COLUMNS = 10_000
out = _StandardOutput(markup=False, highlight=False)
err = _StandardError(stderr=True, markup=False, highlight=False)
"""Text is printed as it is: names of files may hold brackets."""


def out_of(width: int | None) -> Console:
    """`out`, or one for so many columns."""
    return Console(width=width, markup=False, highlight=False) if width else out


def screen(beside: Iterable[str]) -> int | None:
    """Lines that are left on the screen beside these, folded as they are printed; None where there is no terminal."""
    if not out.is_terminal:
        return None
    return out.height - sum(len(out.render_lines(line, pad=False)) for line in beside) - 2  # the file, the prompt


def print_json(answer: Mapping[str, object]) -> None:
    """Print the one JSON object of --json."""
    sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")
    sys.stdout.flush()  # before what stderr says next, where both go to one file


def printable(text: str) -> str:
    """Text with control characters escaped; names of files and their contents may hold some."""
    return "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)


def complain(message: object) -> None:
    """Print a line in red on stderr, after the program's name.

    Under torchrun, its agent repeats the line at the end of what it prints, as the cause: it looks for it in this file
    (`torch.distributed.elastic.multiprocessing.errors`).
    """
    line = printable(f"slipstream: {message}")
    err.print(line, style="red", soft_wrap=True)
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        said = {"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps(said), encoding="utf-8")


def refuse(message: object) -> NoReturn:
    """Bad input: one line on stderr, exit 2."""
    complain(" ".join(str(message).split()))
    raise typer.Exit(2)


def answer_no(message: object) -> NoReturn:
    """The answer is no: the reason on stderr, exit 1."""
    complain(message)
    raise typer.Exit(1)


def near(word: str, words: Iterable[str]) -> str:
    """`; did you mean 'x'?` where one of the words is close to `word`; otherwise empty."""
    found = difflib.get_close_matches(word, list(words), 1)
    return f"; did you mean {found[0]!r}?" if found else ""


def completing(*words: str) -> Callable[[str], list[str]]:
    """Shell completion for an option that takes one of these words."""
    def offer(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return offer


def duration(seconds: float) -> str:
    """A time for a reader, with four digits: `30 s`, `29.7 ms`, `850 us`."""
    unit, name = next(((unit, name) for unit, name in ((1.0, "s"), (1e-3, "ms")) if seconds >= unit), (1e-6, "us"))
    return f"{seconds / unit:.4g} {name}" if seconds else "0 s"
