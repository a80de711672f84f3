"""Prevent a command from overwriting what is not its own to replace.

This module has the rule for all commands. An output never replaces what the command reads, nor a file of a table, run
or checkpoint. It replaces another file only if that is of the kind that the option writes (`REPLACEABLE`), or if
--force is given: a file that the same command wrote before is written again, and a job file is not.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.cli.shared.console import refuse
from slipstream.planner.job.file import extended_files
from slipstream.schedules.codec import FORMAT

OUTPUT_FILES = ("--out", "--job-out", "--html", "--perfetto", "--svg", "--prometheus")
"""Options that name a file to write."""
OUTPUT_FOLDERS = ("--out", "--tensorboard")
"""Options that name a folder to write to. The command itself decides about the folder's contents."""
FOLDER_METAVAR = "DIR"
"""Metavar (kind of value in the help) of options that take a folder."""
TABLE_FILES = frozenset({"index.json", "index.md", "job.toml", "programs.json.gz", "entries", "parts"})
RUN_FILES = frozenset({"schedule.json", ".running.json", "losses.jsonl", "metrics.jsonl", "events.jsonl", "schedules",
                       "trace.json", "parameters", "hugging-face", "checkpoints", "logs"})
JOB_SUFFIX = ".toml"
CHECKPOINT = "manifest.json"
HEAD_BYTES = 4096
"""Number of bytes at the beginning of a file by which its kind is recognised."""


class OutputKind(NamedTuple):
    """Kind of file that an option writes."""

    name: str
    """The kind with its article, as in messages."""
    opening: re.Pattern[bytes]
    """What matches at the beginning of every file of this kind."""


SCHEDULE = OutputKind("a schedule", re.compile(rb'\{"format":"%s"' % FORMAT.encode()))
ORDER = OutputKind("an order of ops", re.compile(
    rb"[\r\n]*(?:\d+[A-Z][A-Z_0-9]*|,)+(?:\r?\n|$)|--pipeline-model-parallel-size"))
PAGE = OutputKind("a page of Slipstream", re.compile(rb"<!doctype html>.*?<title>[^<]*Slipstream</title>", re.DOTALL))
PICTURE = OutputKind("an SVG picture", re.compile(rb"<svg\b"))
METRICS = OutputKind("a file of metrics", re.compile(rb"# HELP slipstream_"))
TRACE = OutputKind("a trace of ops", re.compile(rb'\{"displayTimeUnit":'))
REPLACEABLE = {"--html": PAGE, "--svg": PICTURE, "--perfetto": TRACE, "--prometheus": METRICS, "plan --out": SCHEDULE,
               "lookup --out": SCHEDULE, "export --out": ORDER}
"""Kind of file that an option, or the option of a command, replaces without --force; none for a job file."""


def require_no_overwriting(command: str, params: Iterable[Any], values: Mapping[str, Any]) -> None:
    """Exit 2 if an output of a command would overwrite what it must not.

    The command's parameters are `params`, as click has them, and `values` maps their names to their
    values. Files are compared by identity in the file system, whatever their names. Pipes and
    devices may be both input and output. A command without --force decides itself what it replaces.
    """
    given = [(param, value) for param in params for value in _flatten_texts(values.get(param.name))]
    outputs = [(param, Path(value)) for param, value in given if is_output_file(param)]
    inputs = [Path(value) for param, value in given if not is_output_file(param)]
    inputs += [base for path in inputs if path.suffix == JOB_SUFFIX for base in extended_files(path)]
    for index, (param, path) in enumerate(outputs):
        name = param.opts[0]
        for other, written in outputs[:index]:
            if _is_same_file(path, written, new=True):
                refuse(f"{name} {path}: is also the file of {other.opts[0]}; give each a file of its own")
        if any(_is_same_file(path, read) for read in inputs):
            refuse(f"{name} {path}: is read by this command; give another file to write")
        if (owner := _describe_owner(path)) is not None:
            refuse(f"{name} {path}: is a file of {owner}; give another file to write")
        if values.get("force") is False:
            _require_replaceable(name, path, REPLACEABLE.get(f"{command} {name}", REPLACEABLE.get(name)))


def _require_replaceable(option: str, path: Path, kind: OutputKind | None) -> None:
    """Exit 2 if a file exists that is not of this kind; None: whatever it is. Empty files may be replaced."""
    try:
        if not path.is_file():
            return
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except (OSError, ValueError):  # opening it to write gives the reason
        return
    if head and (kind is None or not kind.opening.match(head)):
        reason = "" if kind is None else f" and is not {kind.name}"
        refuse(f"{option} {path}: exists already{reason}; --force overwrites it")


def is_output_file(param: Any) -> bool:
    """Return whether a parameter of a command, as click has it, names a file that the command writes."""
    return param.opts[0] in OUTPUT_FILES and param.metavar != FOLDER_METAVAR


def _flatten_texts(value: Any) -> Iterator[str]:
    """Yield all texts and paths in the value of a parameter, which may be a list or a tuple."""
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flatten_texts(item)


def _is_same_file(one: Path, other: Path, *, new: bool = False) -> bool:
    """Return whether both names denote one regular file; with `new`, also one that does not exist yet."""
    try:
        if new and not one.exists() and not other.exists():
            return one.resolve() == other.resolve()
        return one.is_file() and other.is_file() and one.samefile(other)
    except (OSError, ValueError):  # opening it gives the reason
        return False


def _describe_owner(path: Path) -> str | None:
    """Describe the table, run or checkpoint that a file is part of. None if it is part of none."""
    try:
        target = path.resolve()
        if not target.is_file():
            return None
        for folder in (target.parent, *target.parent.parents[:2]):
            first = target.relative_to(folder).parts[0]
            if first in TABLE_FILES and (folder / "index.json").is_file() and (
                    (folder / "entries").is_dir() or (folder / "parts").is_dir()):
                return f"the table {folder}"
            if first in RUN_FILES and ((folder / "events.jsonl").is_file() or (folder / "losses.jsonl").is_file()):
                return f"the run {folder}"
        if (target.parent / CHECKPOINT).is_file() and target.name.startswith(("layer-", CHECKPOINT)):
            return f"the checkpoint {target.parent}"
    except (OSError, ValueError):
        pass
    return None
