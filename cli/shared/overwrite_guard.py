"""Prevent a command from overwriting what it reads, or a file of a table, run or checkpoint."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slipstream.cli.shared.console import refuse
from slipstream.planner.job.file import extended_files

OUTPUT_FILES = ("--out", "--job-out", "--html", "--perfetto", "--svg")
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


def require_no_overwriting(params: Iterable[Any], values: Mapping[str, Any]) -> None:
    """Exit 2 if an output of a command is also an input, another output, or a file of a table, run or checkpoint.

    The command's parameters are `params`, as click has them, and `values` maps their names to their values. Files are
    compared by identity in the file system, whatever their names. Pipes and devices may be both input and output.
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
