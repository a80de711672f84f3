"""Define what all commands share: the layout of help, and what outputs may overwrite.

The help shows options in groups, one or two lines for each option, readable at 80 columns. The
group of an option is its `rich_help_panel`. The metavar (SEC, FILE, N) tells the kind of its value.
The valid range is not shown; the error for a value outside of it states it.

An output never replaces what the command reads, nor a file of a table, run or checkpoint. It
replaces another file only if that is of the kind that the option writes (`REPLACEABLE`), or if
--force is given: a file that the same command wrote before is written again, and a job file is not.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from typer.core import TyperCommand

from slipstream.cli.shared.console import refuse
from slipstream.planner.job.file import extended_files
from slipstream.schedules.codec import FORMAT

DEFAULT_GROUP = "Options"
"""Title of the group of options that name no group in the help."""
_OPTION = re.compile(r"--[a-z][a-z0-9-]*")
HARD_HYPHEN = "\N{NON-BREAKING HYPHEN}"
"""Character for options' hyphens while lines are broken, so that none is cut."""
EXAMPLES = {
    "new": ("slipstream new --preset llama-3-8b --out job.toml",
            "slipstream new --model config.json --gpu h100 --stages 4 --out job.toml"),
    "plan": ("slipstream plan job.toml --failed 2.1 --out broken.json",
             "slipstream plan job.toml --failed 2.1 --layers move --steps 2000000"),
    "table": ("slipstream table job.toml --max-failures 4 --out table",
              "slipstream table job.toml --max-failures 2 --steps 100000 --out table"),
    "lookup": ("slipstream lookup table --failed 2.1 --out broken.json",
               "slipstream lookup table --failed 2.1 --failed 0.3 --settled"),
    "check": ("slipstream check broken.json", "slipstream check --bound broken.json"),
    "show": ("slipstream show broken.json --html broken.html", "slipstream show --run run --html run.html"),
    "export": ("slipstream export plan.json --to torch-csv --out plan.csv",
               "slipstream export run/checkpoints/iteration-100 --to hugging-face --out model"),
    "profile": ("slipstream profile --job job.toml --out measured.toml", "slipstream profile --json"),
    "train": ("slipstream train job.toml --kill 1.1@5 --return 1.1@12 --out run",
              "slipstream train job.toml --resume run --iterations 100 --out run"),
    "simulate": ("slipstream simulate job.toml --failed 2.1",
                 "slipstream simulate job.toml --days 30 --preset llama-3 --html report.html"),
    "reproduce": ("slipstream reproduce failure-cost", "slipstream reproduce unlike-layers --no-picture --out tables"),
    "jitter": ("slipstream jitter broken.json", "slipstream jitter plan.json --lengths lengths.txt"),
    "doctor": ("slipstream doctor", "slipstream doctor --json"),
    "demo": ("slipstream demo", "slipstream demo --short --out out/demo"),
}
"""Two examples of each command, which end its help."""
MAX_NAME_WIDTH = 24
"""Maximum width of option names, in characters. A longer name has a line of its own."""


class Command(TyperCommand):
    """Typer command with options by group, which refuses to overwrite its own input."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the usage, what the command does, its options, and two examples."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        write_options(self.get_params(ctx), formatter)
        with formatter.section("Examples"):
            for example in EXAMPLES.get(self.name or "", ()):
                formatter.write(f"  {example}\n")

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Exits 2 if one of its outputs would overwrite what it must not."""
        require_no_overwriting(self.name or "", self.get_params(ctx), ctx.params)
        return super().invoke(ctx)


def write_options(params: list[Any], formatter: Any) -> None:
    """Write a section for each group of options, as they first come; without one, last."""
    groups: dict[str, dict[str, str]] = {}
    for param in params:
        group = "Arguments" if param.param_type_name == "argument" else param.rich_help_panel or DEFAULT_GROUP
        groups.setdefault(group, {})[_format_name(param)] = _explain_option(param)
    others = groups.pop(DEFAULT_GROUP, {})
    for group, options in (groups | {DEFAULT_GROUP: others}).items():
        write_section(group, options, formatter)


def write_section(title: str, rows: Mapping[str, str], formatter: Any) -> None:
    """Write a section of the help to `formatter`: a title, and names with their explanations."""
    with formatter.section(title):
        formatter.write_dl([(name, _OPTION.sub(lambda option: option[0].replace("-", HARD_HYPHEN), text))
                            for name, text in rows.items()], col_max=MAX_NAME_WIDTH)
    formatter.buffer[:] = [text.replace(HARD_HYPHEN, "-") for text in formatter.buffer]


def _format_name(param: Any) -> str:
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper())
    return ", ".join(sorted(param.opts, key=len)) + (f" {param.metavar}" if param.metavar else "")


def _explain_option(param: Any) -> str:
    default = param.default
    if not param.show_default or default is None or callable(default) or isinstance(default, bool):
        return param.help or ""
    return f"{param.help} [{f'{default:g}' if isinstance(default, float) else default}]"


OUTPUT_FILES = ("--out", "--job-out", "--html", "--perfetto", "--svg", "--prometheus")
"""Options that name a file to write."""
OUTPUT_FOLDERS = ("--out", "--tensorboard")
"""Options that name a folder to write to. The command itself decides about the folder's
contents."""
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
"""Kind of file that an option replaces without --force; none for a job file."""


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
    """Exit 2 if a file that is not empty is of another kind than `kind`."""
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
    """Return whether a command's parameter, as click has it, names a file it writes."""
    return param.opts[0] in OUTPUT_FILES and param.metavar != FOLDER_METAVAR


def _flatten_texts(value: Any) -> Iterator[str]:
    """Yield all texts and paths in a parameter's value, list or tuple."""
    if isinstance(value, str | Path):
        yield str(value)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _flatten_texts(item)


def _is_same_file(one: Path, other: Path, *, new: bool = False) -> bool:
    """Return whether both names denote one regular file; with `new`, also a future one."""
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
