"""Mark options that name a file to write, and protect files that should be kept.

An output never replaces what the command reads, nor a file of a table, run or checkpoint. Other
files are replaced if they are of the kind that the option writes, or with --force: what the same
command wrote before is written again. A job file is never replaced without --force.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from slipstream.cli.shared.console import refuse
from slipstream.planner.job.file import extended_files
from slipstream.schedules.codec import FORMAT

TABLE_FILES = frozenset(
    {"index.json", "index.md", "job.toml", "programs.json.gz", "entries", "parts"}
)
RUN_FILES = frozenset(
    {
        "schedule.json",
        ".running.json",
        "losses.jsonl",
        "metrics.jsonl",
        "events.jsonl",
        "schedules",
        "trace.json",
        "parameters",
        "hugging-face",
        "checkpoints",
        "logs",
    }
)
JOB_SUFFIX = ".toml"
CHECKPOINT = "manifest.json"
HEAD_BYTES = 4096
"""Number of bytes at the beginning of a file by which its kind is recognised."""


class OutputKind(str):
    """Kind of the files that an option writes.

    The kind is itself the metavar of such an option, and reads `FILE` in the help. An option that
    reads files has plain text as its metavar.
    """

    name: str
    """Name of the kind in messages, with its article, such as "a schedule"."""
    opening: re.Pattern[bytes] | None
    """Pattern of such files' beginning; None: only empty files are replaced without --force."""

    def __new__(cls, name: str, opening: re.Pattern[bytes] | None) -> Self:
        """Create the metavar of a kind, with the fields `name` and `opening`."""
        kind = super().__new__(cls, "FILE")
        kind.name, kind.opening = name, opening
        return kind


SCHEDULE = OutputKind("a schedule", re.compile(rb'\{"format":"%s"' % FORMAT.encode()))
ORDER = OutputKind(
    "an order of ops",
    re.compile(rb"[\r\n]*(?:\d+[A-Z][A-Z_0-9]*|,)+(?:\r?\n|$)|--pipeline-model-parallel-size"),
)
PAGE = OutputKind(
    "a page of Slipstream",
    re.compile(rb"<!doctype html>.*?<title>[^<]*Slipstream</title>", re.DOTALL),
)
PICTURE = OutputKind("an SVG picture", re.compile(rb"<svg\b"))
METRICS = OutputKind("a file of metrics", re.compile(rb"# HELP slipstream_"))
TRACE = OutputKind("a trace of ops", re.compile(rb'\{"displayTimeUnit":'))
JOB = OutputKind("a job file", None)


def require_no_overwriting(params: Iterable[Any], values: Mapping[str, Any]) -> None:
    """Exit 2 if a command's output would replace a file that should be kept.

    Kept are files that the command reads or writes by another option, those of tables, runs and
    checkpoints, and, if it has a `--force` that is not given, files that are neither empty nor
    recognised as such an output.
    `params` are the command's parameters, as click has them, and `values` their values by name.
    """
    # Files are compared by identity in the file system, whatever their names; pipes and devices may
    # be both input and output. A job file that another one extends is read as well.
    arguments = [
        (param, value) for param in params for value in _flatten_texts(values.get(param.name))
    ]
    outputs = [(param, Path(value)) for param, value in arguments if is_output_file(param)]
    inputs = [Path(value) for param, value in arguments if not is_output_file(param)]
    inputs += [
        base for path in inputs if path.suffix == JOB_SUFFIX for base in extended_files(path)
    ]
    for index, (param, path) in enumerate(outputs):
        name = param.opts[0]
        for other, written in outputs[:index]:
            if _is_same_file(path, written, new=True):
                refuse(
                    f"{name} {path}: is also the file of {other.opts[0]}; give each a file of its "
                    "own"
                )
        if any(_is_same_file(path, read) for read in inputs):
            refuse(f"{name} {path}: is read by this command; give another file to write")
        if (owner := _describe_owner(path)) is not None:
            refuse(f"{name} {path}: is a file of {owner}; give another file to write")
        # A command without --force decides itself what it replaces.
        if values.get("force") is False:
            _require_replaceable(name, path, param.metavar)


def _require_replaceable(option: str, path: Path, kind: OutputKind) -> None:
    """Exit 2 if `path`, given with `option`, exists, not empty and not of this kind."""
    try:
        if not path.is_file():
            return
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except (OSError, ValueError):  # opening it to write gives the reason
        return
    if head and (kind.opening is None or not kind.opening.match(head)):
        reason = "" if kind.opening is None else f" and is not {kind.name}"
        refuse(f"{option} {path}: exists already{reason}; --force overwrites it")


def is_output_file(param: Any) -> bool:
    """Return whether a command's parameter, as click has it, names a file to write."""
    return isinstance(param.metavar, OutputKind)


def _flatten_texts(value: Any) -> Iterator[str]:
    """Yield all texts and paths in a parameter's value, also those in lists and tuples."""
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flatten_texts(item)


def _is_same_file(path: Path, other: Path, *, new: bool = False) -> bool:
    """Return whether both paths name one file, which with `new` need not exist yet."""
    try:
        if new and not path.exists() and not other.exists():
            return path.resolve() == other.resolve()
        return path.is_file() and other.is_file() and path.samefile(other)
    except (OSError, ValueError):  # opening it gives the reason
        return False


def _describe_owner(path: Path) -> str | None:
    """Return words for the table, run or checkpoint that has this file; None without one."""
    # A folder is recognised by files that it must have, and the file by its name there.
    try:
        target = path.resolve()
        if not target.is_file():
            return None
        for folder in (target.parent, *target.parent.parents[:2]):
            first = target.relative_to(folder).parts[0]
            if (
                first in TABLE_FILES
                and (folder / "index.json").is_file()
                and ((folder / "entries").is_dir() or (folder / "parts").is_dir())
            ):
                return f"the table {folder}"
            if first in RUN_FILES and (
                (folder / "events.jsonl").is_file() or (folder / "losses.jsonl").is_file()
            ):
                return f"the run {folder}"
        if (target.parent / CHECKPOINT).is_file() and target.name.startswith(
            ("layer-", CHECKPOINT)
        ):
            return f"the checkpoint {target.parent}"
    except (OSError, ValueError):
        pass
    return None
