"""Talk to the user of any command: answers, errors, progress in a log, Ctrl-C.

stdout carries the answer (with --json exactly one JSON object), and stderr everything else. Exit
status 0: done; 1: the answer is no; 2: bad input; over 128: a signal, such as Ctrl-C.
"""

import contextlib
import difflib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console, ConsoleOptions
from rich.rule import Rule

from slipstream.planner.budget import defer_interrupts


class _WrappingConsole(Console):
    """Console that wraps lines between words in a terminal."""

    def print(self, *objects: Any, **how: Any) -> None:
        """Print as `rich.console.Console.print` does, wrapped between words if possible."""
        if (
            self.is_terminal
            and how.get("soft_wrap")
            and all(len(word) <= self.width for item in objects for word in str(item).split())
        ):
            how = {**how, "soft_wrap": False}
        super().print(*objects, **how)


class _StderrConsole(_WrappingConsole):
    """Console for stderr that discards all output once nobody reads it."""

    def on_broken_pipe(self) -> None:
        """Discard all further output, where Rich's own method ends the program."""
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stderr.fileno())
        os.close(nowhere)


class _StdoutConsole(_WrappingConsole):
    """Console for stdout that crops nothing in a file or pipe, unless COLUMNS is set."""

    def on_broken_pipe(self) -> None:
        """Exit with the status of a broken pipe, since Rich's own, 1, means no."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(BROKEN_PIPE_STATUS)

    @property
    def _is_folded(self) -> bool:
        return self.is_terminal or "COLUMNS" in os.environ

    @property
    def options(self) -> ConsoleOptions:
        """Options of rendering, without a limit of width in a file or pipe."""
        return (
            super().options if self._is_folded else super().options.update(width=UNFOLDED_COLUMNS)
        )

    def print(self, *objects: Any, **how: Any) -> None:
        """Print as the base class does, but crop no lines in a file or pipe."""
        super().print(*objects, **{"crop": self._is_folded, **how})

    def rule(self, title: Any = "", **how: Any) -> None:
        """Print a rule as wide as the terminal or, in a file, as Rich's default."""
        self.print(Rule(title, **how), width=self.width)


BROKEN_PIPE_STATUS = 128 + 13
"""Exit status, that of SIGPIPE, if nobody reads the answer, as in `| head`."""
UNFOLDED_COLUMNS = 10_000
"""Width, in characters, at which no line is folded."""
out = _StdoutConsole(markup=False, highlight=False)
err = _StderrConsole(stderr=True, markup=False, highlight=False)
"""Console for stderr; like `out`, it does not take brackets in file names for markup."""


def console_of_width(width: int | None) -> Console:
    """Return a console for stdout that is `width` characters wide; None: the usual one."""
    return Console(width=width, markup=False, highlight=False) if width else out


def count_free_lines(beside: Iterable[str]) -> int | None:
    """Return how many lines of the screen the texts in `beside` leave free.

    Two lines are kept for stderr and the prompt, so the result may be negative. It is None if
    stdout is no terminal.
    """
    if not out.is_terminal:
        return None
    return out.height - sum(len(out.render_lines(line, pad=False)) for line in beside) - 2


def print_json(answer: Mapping[str, object]) -> None:
    """Print a command's answer to --json, as one line.

    Exits with `BROKEN_PIPE_STATUS` if nobody reads it. Raises ValueError for a number that is
    infinite or not a number.
    """
    try:
        sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")
        sys.stdout.flush()  # before what stderr says next, where both go to one file
    except BrokenPipeError:
        out.on_broken_pipe()


def escape_controls(text: str) -> str:
    """Return a text with all but printable characters and line feeds escaped."""
    return "".join(map(_escape_control, text))


def _escape_control(character: str) -> str:
    if character.isprintable() or character == "\n":
        return character
    return character.encode("unicode_escape").decode()


def print_error(message: object) -> None:
    """Print a message in red on stderr, after the program's name.

    If torchrun has started this process, the message is reported to its agent, too.
    """
    line = escape_controls(f"slipstream: {message}")
    err.print(line, style="red", soft_wrap=True)
    # torchrun's agent reads the cause of a failure from this file, and repeats it at the end of its
    # output (`torch.distributed.elastic.multiprocessing.errors`).
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        report = {"message": {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}}
        with contextlib.suppress(OSError):
            Path(file).write_text(json.dumps(report), encoding="utf-8")


def refuse(message: object) -> NoReturn:
    """Report bad input with one line on stderr, and exit with status 2."""
    print_error(" ".join(str(message).split()))
    raise typer.Exit(2)


def exit_negative(message: object) -> NoReturn:
    """Report on stderr why the answer is no, and exit with status 1."""
    print_error(message)
    raise typer.Exit(1)


def suggest(word: str, words: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` for the closest of `words`, or ""."""
    matches = difflib.get_close_matches(word, list(words), 1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def complete_from(*words: str) -> Callable[[str], list[str]]:
    """Return a shell completion for an option that takes one of these words."""

    def offer(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return offer


def duration(seconds: float) -> str:
    """Format a time with at most four significant digits: `30 s`, `29.7 ms`, `850 us`."""
    unit, name = next(
        ((unit, name) for unit, name in ((1.0, "s"), (1e-3, "ms")) if seconds >= unit), (1e-6, "us")
    )
    return f"{seconds / unit:.4g} {name}" if seconds else "0 s"


QUIET_SECONDS = 10.0
"""Shortest time, in seconds, from any line to one that says what is being done."""


class LogProgress:
    """Printer of lines on progress to stderr, unless stderr is a terminal.

    Lines begin with `subject`, what the command does; `unit` names, in the plural, what it counts.
    """

    def __init__(
        self, subject: str, unit: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._subject, self._unit, self._clock = subject, unit, clock
        self._tenths, self._last_time = -1, -QUIET_SECONDS

    def show_count(self, done: int, total: int) -> None:
        """Print how many of `total` are done, at first and whenever a further tenth is."""
        tenths = 10 * done // total if total else 0
        if tenths > self._tenths:
            self._tenths = tenths
            self._print(f"{done} of {total} {self._unit}")

    def show_work(self, text: str) -> None:
        """Print what is being done, unless a line was printed in the last `QUIET_SECONDS`."""
        if self._clock() - self._last_time >= QUIET_SECONDS:
            self._print(text)

    def _print(self, text: str) -> None:
        if not err.is_terminal:
            self._last_time = self._clock()
            err.print(f"{self._subject}: {text}", soft_wrap=True)


@contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay KeyboardInterrupt to the context's end, unless Ctrl-C is pressed twice."""
    # Some modules would swallow it during their import.
    with defer_interrupts() as interrupted:
        yield
    if interrupted.is_set():
        raise KeyboardInterrupt


@contextmanager
def watch_interrupts() -> Iterator[Callable[[], None]]:
    """Yield a function that raises KeyboardInterrupt if Ctrl-C has been pressed.

    A second Ctrl-C raises KeyboardInterrupt at once.
    """
    with defer_interrupts() as interrupted:

        def check_interrupt() -> None:
            if interrupted.is_set():
                raise KeyboardInterrupt

        yield check_interrupt
