"""Input of all commands: options and files. Each function exits 2 with one line where the input cannot be used."""

import errno
import os
import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from slipstream.cli.shared.console import near, refuse
from slipstream.planner.job.file import Job, JobError, read_job, require_known, workers_of_nodes
from slipstream.schedules.codec import ScheduleError, encode, read
from slipstream.schedules.files import write_atomically
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.tables.file import ENTRIES, INDEX, TableError, entry_file
from slipstream.schedules.tables.table import Table, library, library_names

FEW = 4
"""Choices that are told with `or` between them."""


def parse_workers(option: str, texts: list[str]) -> tuple[Worker, ...]:
    """Workers that an option gives as D.S, sorted, each once."""
    try:
        return tuple(sorted({Worker.parse(text) for text in texts}))
    except ValueError as error:
        refuse(f"{option}: {error}")


def failed_workers(job: Job, workers: list[str] | None, nodes: list[int] | None) -> tuple[Worker, ...]:
    """Workers given as --failed options, and those of the nodes of --failed-node; sorted, each once."""
    try:
        of_nodes = workers_of_nodes(job.nodes, nodes or [], "--failed-node")
        named = parse_workers("--failed", workers or [])
        require_known(named, job, "--failed")
        return tuple(sorted({*named, *of_nodes}))
    except JobError as error:
        refuse(error)


def require_choice(option: str, value: str | None, choices: Collection[str]) -> None:
    """Refuse a value that the option does not know."""
    if value is not None and value not in choices:
        known = " or ".join(choices) if len(choices) <= FEW else f"one of {', '.join(choices)}"
        refuse(f"{option} {value}: expected {known}{near(value, choices)}")


def table_or_refuse(folder: Path, option: str = "") -> Table:
    """The table in a folder, or the one of this name that comes with Slipstream."""
    path = folder if is_there(folder) else library(str(folder))
    if path is None:
        known = library_names()
        hint = near(str(folder), known) or f"; those that come with Slipstream are {', '.join(known)}"
        refuse(f"{option}{folder}: no such folder or table{hint}")
    with suppress(OSError):  # opening it gives the reason
        if path.is_file():
            refuse(f"{option}{folder}: a file; expected the folder of a table, as `slipstream table` writes it")
    try:
        return Table.load(path)
    except TableError as error:
        refuse(f"{option}{error}")


def read_job_or_refuse(path: Path, settings: Sequence[str] | None = None) -> Job:
    """The job in a file, with the keys of --set."""
    try:
        return read_job(path, settings or ())
    except JobError as error:
        is_json = path.suffix == ".json" and is_there(path)
        refuse(f"{error}; a job file is TOML: `slipstream new` writes one" if is_json else error)


def require_trainable_tables(path: Path, job: Job) -> None:
    """Refuse a job whose `[model]` or `[training]` the runtime would refuse: planners read little of them."""
    from slipstream.runtime.config import ConfigError, parse_run_config

    try:
        parse_run_config(job.model, job.training)
    except ConfigError as error:
        refuse(f"{path}: {error}")


def read_schedule_or_refuse(path: Path) -> Schedule:
    """The schedule in a file."""
    try:
        return read(path)
    except ScheduleError as error:
        refuse(as_refused(path, error))


class ScheduleInFile(NamedTuple):
    """A file from the command line, or an entry of a table, and what is in it."""

    path: Path
    schedule: Schedule


def schedules_in(path: Path) -> Iterator[ScheduleInFile]:
    """The schedule in a file, which may be an entry of a table; all of a table where it is the folder of one.

    Raises ScheduleError and TableError, in one line.
    """
    try:
        is_folder, is_entry = path.is_dir(), path.parent.name == ENTRIES and (path.parent.parent / INDEX).is_file()
    except (OSError, ValueError):  # reading it gives the reason
        is_folder = is_entry = False
    if is_folder:
        if not (path / INDEX).is_file():
            raise ScheduleError(f"{path}: a folder, and not that of a table; expected a schedule's file; a run is "
                                f"shown with `slipstream show --run {path}`")
        table = Table.load(path)
        for row in table.rows():
            if row.sha256 is not None:
                yield ScheduleInFile(path / entry_file(row.key), table.decoded(row.key))
    elif is_entry:
        table = Table.load(path.parent.parent)
        for row in table.rows():
            if row.sha256 is not None and Path(entry_file(row.key)).name == path.name:
                yield ScheduleInFile(path, table.decoded(row.key))
                return
        raise TableError(f"{path}: is no entry that the table's {INDEX} names")
    else:
        yield ScheduleInFile(path, read(path))


def as_refused(path: Path, error: ValueError) -> str:
    """What is said of a file that is no schedule."""
    is_job = path.suffix == ".toml" and is_there(path)
    return f"{error}; `slipstream plan {path} --out FILE` makes a schedule of a job" if is_job else str(error)


def is_there(path: Path) -> bool:
    """Whether the path exists. True also where that cannot be found out, so that opening it gives the reason."""
    try:
        return path.exists()
    except OSError:
        return True


def require_writable(path: Path | None) -> None:
    """Refuse a path that no file can be written to, before the work whose result it is to hold.

    It is tried, with a file that is gone at once, in its folder or in the nearest one above that is there.
    """
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


def encoded_or_refuse(schedule: Schedule) -> bytes:
    """The bytes of a schedule's file, which may be too large for one."""
    try:
        return encode(schedule)
    except ScheduleError as error:
        refuse(f"--out: {error}")


def write_or_refuse(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all."""
    try:
        write_atomically(path, data)
    except OSError as error:
        refuse(f"{path}: cannot be written: {error.strerror}")
