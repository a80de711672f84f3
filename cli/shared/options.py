"""Define arguments and options that several commands take, and read what they name.

A function that reads exits 2 with one line if the input cannot be used; `read_schedules` raises.
"""

import errno
import inspect
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from slipstream.cli.shared.console import complete_from, err, refuse, suggest
from slipstream.cli.shared.outputs import SCHEDULE
from slipstream.planner.job.file import Job, JobError, read_job, require_workers, workers_of_nodes
from slipstream.schedules.codec import ScheduleError, encode, read
from slipstream.schedules.files import write_atomically
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.tables.file import ENTRIES, INDEX, TableError, entry_file
from slipstream.schedules.tables.table import Table, library, library_names

PLANNED = "The schedule"
"""Title, in the help of several commands, of the options on what is planned."""
SEARCH = "The search"
"""Title, in the help of several commands, of the options that steer a search."""
ANSWER = "The answer"
"""Title, in the help of several commands, of the options on the output."""
PLACEMENTS = ("given", "any")
"""Values of --placement."""

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job file (TOML).")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help=(
            "A key of the job file, such as training.learning_rate, with another value; may be "
            "repeated."
        ),
    ),
]
ScheduleFile = Annotated[
    Path,
    typer.Argument(metavar="FILE", help=("A schedule file, as `slipstream plan --out` writes it.")),
]
ScheduleFiles = Annotated[
    list[Path],
    typer.Argument(
        metavar="FILE...", help=("Schedule files, entries of a table, or the folder of one.")
    ),
]
Failed = Annotated[
    list[str] | None,
    typer.Option(
        "--failed",
        rich_help_panel=PLANNED,
        metavar="D.S",
        help=("A worker that is down, as PIPELINE.STAGE; may be repeated."),
    ),
]
FailedNode = Annotated[
    list[int] | None,
    typer.Option(
        "--failed-node",
        rich_help_panel=PLANNED,
        metavar="N",
        min=0,
        help=(
            "A node (machine) that is down, with all of its workers by [topology] of the job "
            "file, from 0; may be repeated."
        ),
    ),
]
Backward = Annotated[
    str | None,
    typer.Option(
        "--backward",
        rich_help_panel=PLANNED,
        metavar="split|fused",
        autocompletion=complete_from("split", "fused"),
        help=(
            "split: gradients of the weights are computed by ops of their own, which fill "
            "bubbles; fused: together with the gradients of the input. Default: split; fused for "
            "1f1b."
        ),
    ),
]
Optimizer = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        rich_help_panel=PLANNED,
        metavar="staggered|synchronous",
        autocompletion=complete_from("staggered", "synchronous"),
        help=(
            "staggered: a stage steps as soon as its own gradients are reduced; synchronous: all "
            "stages wait for the last. Default: staggered; synchronous for 1f1b."
        ),
    ),
]
ExecutorName = Annotated[
    str | None,
    typer.Option(
        "--executor",
        rich_help_panel=SEARCH,
        metavar="mpi|dask://HOST:PORT",
        help=(
            "What plans instead of --jobs processes of this machine: processes of MPI, if this "
            "command is started by `mpirun -n N python -m mpi4py.futures`, or the workers of a "
            "Dask cluster."
        ),
    ),
]
MethodName = Annotated[
    str,
    typer.Option(
        "--method",
        rich_help_panel=PLANNED,
        metavar="cp-sat|greedy|1f1b|recycle",
        autocompletion=complete_from("cp-sat", "greedy", "1f1b", "recycle"),
        help=(
            "cp-sat: list schedules, annealing, and CP-SAT where that is small enough (the answer "
            "says what really ran); greedy: list schedules only; to compare with, 1f1b: the usual "
            "schedule, and recycle: 1F1B order with re-routed work in its bubbles."
        ),
    ),
]
TimeLimit = Annotated[
    float,
    typer.Option(
        "--time-limit",
        rich_help_panel=SEARCH,
        metavar="SEC",
        min=0.01,
        max=7 * 86400,
        help=(
            "Seconds to search at most; plan without --json takes up to a quarter more for "
            "comparisons. How good the plan is then depends on the machine and its load; see "
            "--steps."
        ),
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        rich_help_panel=SEARCH,
        metavar="N",
        min=0,
        max=10**15,
        help=(
            "Search for so many counted steps in place of seconds: then one seed gives one plan, "
            "on any machine, at any load. A core makes about 400,000 a second. What only some "
            "plans may do, as --layers move, never makes one longer: one without it is searched "
            "for with N steps more where it may be shorter."
        ),
    ),
]
Params = Annotated[
    Path | None,
    typer.Option(
        "--params",
        rich_help_panel=SEARCH,
        metavar="FILE",
        help=(
            "A TOML file of what steers the search, in place of the usual values: see "
            "planner/params.py."
        ),
    ),
]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        rich_help_panel=ANSWER,
        help=(
            "Also print how often each technique of the search was tried, and how often it helped."
        ),
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        rich_help_panel=SEARCH,
        metavar="N",
        min=0,
        max=2**31 - 1,
        help=("Seed of every random choice."),
    ),
]
Placement = Annotated[
    str,
    typer.Option(
        "--placement",
        rich_help_panel=PLANNED,
        metavar="given|any",
        autocompletion=complete_from(*PLACEMENTS),
        help=(
            "any: also find the virtual stages, the layers of each and the worker that holds it, "
            "in place of [placement] of the job file."
        ),
    ),
]
ShareDown = Annotated[
    float,
    typer.Option(
        "--share-down",
        rich_help_panel=PLANNED,
        metavar="SHARE",
        min=1e-6,
        max=0.5,
        help="With --placement any, where failures count: the share of workers that "
        "are down in the mean.",
    ),
]
OutFile = Annotated[
    Path | None,
    typer.Option(
        "--out",
        rich_help_panel=ANSWER,
        metavar=SCHEDULE,
        help="Write the schedule to this file.",
    ),
]
Force = Annotated[
    bool,
    typer.Option(
        "--force", rich_help_panel=ANSWER, help=("Overwrite files that exist, whatever they are.")
    ),
]
Json = Annotated[
    bool, typer.Option("--json", rich_help_panel=ANSWER, help="Print one JSON object.")
]


def take_request(command: Callable[..., None]) -> Callable[..., None]:
    """Return `command` with an option for each field of its last parameter, a struct.

    When the result is called, the struct is made from the options, and passed to `command`.
    """
    # typer reads the options of a command from the signature of its function.
    signature = inspect.signature(command)
    *others, request = signature.parameters.values()
    fields = inspect.signature(request.annotation).parameters
    signature = signature.replace(parameters=[*others, *fields.values()])

    @wraps(command)
    def call_with_request(*positional: Any, **named: Any) -> None:
        arguments = signature.bind(*positional, **named).arguments
        options = {name: arguments.pop(name) for name in fields if name in arguments}
        command(**arguments, **{request.name: request.annotation(**options)})

    call_with_request.__signature__ = signature  # type: ignore[attr-defined]  # typer reads it
    return call_with_request


MAX_OR_CHOICES = 4
"""Largest number of choices that an error lists with `or` between them."""
LONGEST_USUAL_SECONDS = 10.0
"""Time of a stage's forward so long that milliseconds may have been meant."""


def parse_workers(option: str, texts: list[str]) -> tuple[Worker, ...]:
    """Return the workers that an option names by texts D.S, sorted, each once.

    Exits 2 if a text is malformed; the message begins with `option`.
    """
    try:
        return tuple(sorted({Worker.parse(text) for text in texts}))
    except ValueError as error:
        # --kill accepts nodeN, which users try with --failed as well.
        is_node = option == "--failed" and any(text.startswith("node") for text in texts)
        refuse(f"{option}: {error}" + "; all workers of node N: --failed-node N" * is_node)


def failed_workers(
    job: Job, workers: list[str] | None, nodes: list[int] | None
) -> tuple[Worker, ...]:
    """Return the workers that --failed and --failed-node name, sorted, each once.

    Exits 2 for a malformed text, and a worker or node that the job does not have.
    """
    try:
        of_nodes = workers_of_nodes(job.nodes, nodes or [], "--failed-node")
        named = parse_workers("--failed", workers or [])
        require_workers(named, job, "--failed")
        return tuple(sorted({*named, *of_nodes}))
    except JobError as error:
        refuse(error)


def require_choice(option: str, value: str | None, choices: Collection[str]) -> None:
    """Exit 2 if a value, unless None, is not among the choices of its option."""
    if value is not None and value not in choices:
        expected = (
            " or ".join(choices)
            if len(choices) <= MAX_OR_CHOICES
            else f"one of {', '.join(choices)}"
        )
        refuse(f"{option} {value}: expected {expected}{suggest(value, choices)}")


def load_table_or_refuse(folder: Path, option: str = "") -> Table:
    """Return the table in `folder`, or the one that Slipstream includes by that name.

    Exits 2 if no such table can be used; the message begins with `option`, such as "--table: ".
    """
    path = folder if may_exist(folder) else library(str(folder))
    if path is None:
        names = library_names()
        hint = (
            suggest(str(folder), names)
            or f"; those that come with Slipstream are {', '.join(names)}"
        )
        refuse(f"{option}{folder}: no such folder or table{hint}")
    with suppress(OSError):  # opening it gives the reason
        if path.is_file():
            refuse(
                f"{option}{folder}: a file; expected the folder of a table, as `slipstream table` "
                "writes it"
            )
    from slipstream.planner.tables.folder import PARTS

    # An unfinished table has no index yet: say how to finish it.
    with suppress(OSError):
        if path.is_dir() and not (path / INDEX).exists():
            finished = len(list((path / PARTS).glob("*")))
            refuse(
                f"{option}{folder}: "
                + (
                    f"the table is not finished: {finished} of its entries are there, and the "
                    "`slipstream table` command that began it continues from there"
                    if finished
                    else f"holds no {INDEX}; expected the folder of a table, as `slipstream table` "
                    "writes it"
                )
            )
    try:
        return Table.load(path)
    except TableError as error:
        refuse(f"{option}{error}")


def read_job_or_refuse(path: Path, settings: Sequence[str] | None = None) -> Job:
    """Return the job in a file, with the keys of --set applied. Exits 2 if it cannot be read.

    Prints a note on stderr if a forward takes `LONGEST_USUAL_SECONDS` or more.
    """
    try:
        job = read_job(path, settings or ())
    except JobError as error:
        is_json = path.suffix == ".json" and may_exist(path)
        refuse(f"{error}; a job file is TOML: `slipstream new` writes one" if is_json else error)
    longest = max(job.time.forward)
    if longest >= LONGEST_USUAL_SECONDS:
        err.print(
            f"{path}: a forward takes {longest:g} s: times are in seconds, not in milliseconds",
            style="yellow",
            soft_wrap=True,
        )
    return job


def require_trainable_tables(path: Path, job: Job) -> None:
    """Exit 2 if the runtime would reject the job's `[model]` or `[training]`.

    The message begins with the job's `path`.
    """
    # The planner does not read these tables.
    from slipstream.runtime.config import ConfigError, parse_run_config

    try:
        parse_run_config(job.model, job.training)
    except ConfigError as error:
        refuse(f"{path}: {error}")


def read_schedule_or_refuse(path: Path) -> Schedule:
    """Return the schedule in a file. Exits 2 if it cannot be read."""
    try:
        return read(path)
    except ScheduleError as error:
        refuse(refusal_text(path, error))


class ScheduleInFile(NamedTuple):
    """Schedule that was read, and its file, which may be a table's entry."""

    path: Path
    schedule: Schedule


def read_schedules(path: Path) -> Iterator[ScheduleInFile]:
    """Yield the schedule in a file or table entry, or all of a table's folder.

    Their rules are not checked. A table's entries without a plan are left out. Raises ScheduleError
    and TableError with one-line messages.
    """
    # A table's entry needs the index beside it, as it holds no programs of its own.
    try:
        is_folder, is_entry = (
            path.is_dir(),
            path.parent.name == ENTRIES and (path.parent.parent / INDEX).is_file(),
        )
    except (OSError, ValueError):  # reading it gives the reason
        is_folder = is_entry = False
    if is_folder:
        if not (path / INDEX).is_file():
            raise ScheduleError(
                f"{path}: a folder, and not that of a table; expected a schedule's file; a run is "
                f"shown with `slipstream show --run {path}`"
            )
        table = Table.load(path)
        for row in table.rows():
            if row.sha256 is not None:
                yield ScheduleInFile(path / entry_file(row.key), table.unchecked_schedule(row.key))
    elif is_entry:
        table = Table.load(path.parent.parent)
        for row in table.rows():
            if row.sha256 is not None and Path(entry_file(row.key)).name == path.name:
                yield ScheduleInFile(path, table.unchecked_schedule(row.key))
                return
        raise TableError(f"{path}: is no entry that the table's {INDEX} names")
    else:
        yield ScheduleInFile(path, read(path))


def refusal_text(path: Path, error: ValueError) -> str:
    """Return an error's message about a file that was read as a schedule.

    If the file is a job, the message adds how to make a schedule of it.
    """
    is_job = path.suffix == ".toml" and may_exist(path)
    return (
        f"{error}; `slipstream plan {path} --out FILE` makes a schedule of a job"
        if is_job
        else str(error)
    )


def may_exist(path: Path) -> bool:
    """Return whether a path exists, or may exist because the system cannot tell."""
    try:
        return path.exists()
    except OSError:
        return True  # opening it gives the reason


def require_writable(path: Path | None) -> None:
    """Exit 2 if no file can be written to `path`; None: check nothing.

    The check creates a temporary file in the path's nearest existing parent, unless the path is a
    pipe or device.
    """
    # To be known before long work, not after it.
    if path is None:
        return
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not path.is_file():
            return  # a pipe or a device
        target = path.resolve()
        with tempfile.TemporaryFile(dir=next(place for place in target.parents if place.exists())):
            pass
    except OSError as error:
        refuse(f"{path}: cannot be written: {error.strerror}")


def encode_or_refuse(schedule: Schedule) -> bytes:
    """Return the bytes of a schedule's file. Exits 2 if the schedule is too large for one."""
    try:
        return encode(schedule)
    except ScheduleError as error:
        refuse(f"--out: {error}")


def write_or_refuse(path: Path, data: bytes) -> None:
    """Write a file and its folders, whole or not at all. Exits 2 if it cannot be written."""
    try:
        write_atomically(path, data)
    except OSError as error:
        refuse(f"{path}: cannot be written: {error.strerror}")
