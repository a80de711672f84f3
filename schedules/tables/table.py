"""Load a table of schedules, and look up one for failed workers.

    table = Table.load(folder)
    table.verify()                  # optional: check every schedule now, not at its first use
    found = table.lookup({Worker(1, 2)})

Lookups need no solver. Failures that the table does not cover are not planned here.
"""

from collections.abc import Iterable, Mapping
from os import PathLike
from pathlib import Path
from typing import Self

import msgspec

from slipstream.schedules.check import check
from slipstream.schedules.codec import validate
from slipstream.schedules.schedule import Schedule, Seat, Worker
from slipstream.schedules.tables.file import (
    ENTRIES,
    ENTRY_KIND,
    INDEX,
    JOB,
    MAX_PROGRAMS_BYTES,
    PROGRAMS,
    PROGRAMS_KIND,
    Basis,
    EntryDocument,
    Index,
    Programs,
    Row,
    TableEntry,
    TableError,
    decode_entry,
    decompress,
    entry_file,
    read_index,
    read_verified,
)
from slipstream.schedules.tables.pattern import (
    count_key,
    pattern_key,
    pattern_of,
    pipeline_classes,
    roles_key,
    settled_key,
)
from slipstream.schedules.tables.relabel import (
    Nodes,
    missing_layers,
    preload_solver,
    relabel_schedule,
)

LIBRARY = Path(__file__).parents[1] / "library"
"""Folder of the tables of schedules that come with Slipstream, one folder for each."""


class LookupResult(msgspec.Struct, frozen=True, kw_only=True):
    """Schedule for a set of failed workers, and the key of its table entry."""

    key: str
    schedule: Schedule

    @property
    def moves(self) -> tuple[Seat, ...]:
        """Seats in another role; for one of another column, the worker loads layers."""
        return self.schedule.moves

    @property
    def layers_to_load(self) -> int:
        """Number of layers, or stages if unknown, that workers must load in all."""
        return sum(len(missing_layers(self.schedule, seat)) for seat in self.schedule.seats)


class Table:
    """Schedules planned ahead for failures, read from a folder with verified digests."""

    def __init__(
        self, folder: Path, index: Index, programs: Programs, entries: Mapping[str, TableEntry]
    ) -> None:
        self.folder = folder
        self.index = index
        self._programs = programs.programs
        self._entries = entries
        self._classes = pipeline_classes(index.basis.grid, index.basis.times, index.basis.memory)
        self._checked: dict[str, Schedule] = {}

    @classmethod
    def load(cls, folder: str | PathLike[str]) -> Self:
        """Read a table's folder. Raises TableError if a file is missing, malformed or changed."""
        preload_solver()
        folder = Path(folder)
        index = read_index(folder)
        _validate_basis(index.basis, folder / INDEX)
        entries = {
            row.key: _read_entry(folder, row) for row in index.entries if row.sha256 is not None
        }
        path = folder / PROGRAMS
        packed = read_verified(path, index.programs_sha256, MAX_PROGRAMS_BYTES)
        programs = PROGRAMS_KIND.decode(decompress(packed, str(path)), str(path))
        return cls(folder, index, programs, entries)

    @property
    def basis(self) -> Basis:
        """Values that all entries share: the job and the options of planning."""
        return self.index.basis

    def rows(self) -> tuple[Row, ...]:
        """Return the rows of the table's index, those for numbers of failures first."""
        return self.index.entries

    def job_text(self) -> bytes:
        """Return the job file that the table was made from. Raises TableError."""
        return read_verified(self.folder / JOB, self.index.job_sha256)

    @property
    def program_texts(self) -> tuple[msgspec.Raw, ...]:
        """Programs of all entries of the table, as JSON text, by number."""
        return self._programs

    def stored_entry(self, key: str) -> TableEntry:
        """Return an entry, such as count-2, undecoded. Raises KeyError without one or a plan."""
        return self._entries[key]

    def checked_schedule(self, key: str) -> Schedule:
        """Return the schedule that the table stores under this key, after the checker passed it.

        A key is such as count-2, for two failures. Raises TableError, or KeyError for an unknown
        key.
        """
        if key not in self._checked:
            self._checked[key] = self._decode_checked(key)
        return self._checked[key]

    def verify(self) -> None:
        """Decode and check all entries now. Raises TableError for one that is wrong."""
        for key in self._entries:
            self.checked_schedule(key)

    def lookup(
        self,
        failed: Iterable[Worker],
        *,
        settled: bool = False,
        roles_move: bool = False,
        held_elsewhere: bool = False,
        nodes: Nodes = (),
        checked: bool = True,
    ) -> LookupResult | None:
        """Return the schedule with the shortest period for exactly these failed workers.

        None if the table has none. By default, only schedules in which no worker loads a layer are
        considered. If the entry for the exact failure pattern and the one for the number of
        failures have equal periods, the former is used, because it moves no worker. If several slow
        workers are down, the best of the entries for each of them is used. The result is valid
        because the stored schedule is checked at first use and `relabel_schedule` keeps every rule.

        Raises ValueError for a worker outside the grid, and TableError for an entry that cannot be
        used.

        Parameters
        ----------
        failed
            Workers that are down.
        settled
            Return the schedule to reach eventually, for which any layers may move.
        roles_move
            Let live workers take over roles of other stages, whose layers they load first.
        held_elsewhere
            As `roles_move`, even if a column has no live worker left: its layers come from
            elsewhere.
        nodes
            Workers of each machine. If roles move, the holders of a stage are spread over machines.
        checked
            False skips the checker, for callers that check the result themselves.
        """
        down = set(failed)
        for worker in sorted(down - set(self.basis.grid.workers())):
            raise ValueError(
                f"the job has no worker {worker}; its grid is {self.basis.grid.pipelines} "
                f"pipelines x {self.basis.grid.columns} stages"
            )
        keys = [
            pattern_key(pattern_of(down, self._classes), self._classes),
            *(
                count_key(len(down), worker)
                for worker in sorted(down & self.basis.times.per_mille_of.keys())
            ),
            count_key(len(down)),
        ]
        keys.append(roles_key(keys[0]))
        if settled:
            keys += [settled_key(key) for key in keys]
        stored_keys = sorted(
            (key for key in keys if key in self._entries), key=self._period_seconds
        )
        for key in stored_keys:
            stored = self.checked_schedule(key) if checked else self.unchecked_schedule(key)
            schedule = relabel_schedule(stored, down, held_elsewhere=held_elsewhere, nodes=nodes)
            if schedule is None:
                continue
            result = LookupResult(key=key, schedule=schedule)
            if settled or roles_move or held_elsewhere or not result.layers_to_load:
                return result
        return None

    def _period_seconds(self, key: str) -> float:
        """Return the period of the entry with this key, in seconds."""
        entry = self._entries[key]
        return entry.period_ticks * entry.tick_seconds(self.basis)

    def unchecked_schedule(self, key: str) -> Schedule:
        """Return the schedule that the table stores under this key, with its rules unchecked.

        A key is such as count-2, for two failures. Raises TableError, or KeyError for an unknown
        key.
        """
        return decode_entry(self._entries[key], self.basis, self._programs)

    def _decode_checked(self, key: str) -> Schedule:
        """Decode and check the schedule that the table stores under this key."""
        schedule = self.unchecked_schedule(key)
        violations = check(schedule)
        if violations:
            raise TableError(
                f"{self.folder / entry_file(key)}: the schedule breaks a rule: {violations[0]}"
            )
        return schedule


def library_names() -> tuple[str, ...]:
    """Return the names of the tables of schedules that come with Slipstream."""
    return tuple(sorted(path.parent.name for path in LIBRARY.glob(f"*/{INDEX}")))


def library(name: str) -> Path | None:
    """Return the folder of a table that comes with Slipstream; None for an unknown name."""
    return LIBRARY / name if name in library_names() else None


def _validate_basis(basis: Basis, path: Path) -> None:
    """Raise TableError unless the values that all entries share are valid."""
    empty = Schedule(
        job=basis.job,
        tick_seconds=basis.tick_seconds,
        grid=basis.grid,
        times=basis.times,
        memory=basis.memory,
        backward=basis.backward,
        optimizer=basis.optimizer,
        failed=(),
        seats=(),
        programs=(),
        period_ticks=0,
        lower_bound_ticks=0,
        status="optimal",
        method=basis.method,
    )
    try:
        validate(empty)
    except ValueError as error:
        raise TableError(f"{path}: {str(error)[:300]}") from None


def _read_entry(folder: Path, row: Row) -> EntryDocument:
    """Read the file of the entry that this row of a table's index describes. Raises TableError."""
    path = folder / entry_file(row.key)
    if path.parent != folder / ENTRIES:
        raise TableError(f"{folder / INDEX}: {row.key[:80]!r} is not the key of an entry")
    entry = ENTRY_KIND.decode(read_verified(path, row.sha256), str(path))
    if (entry.key, entry.failed, len(entry.failed)) != (row.key, row.failed, row.failures):
        raise TableError(
            f"{path}: holds entry {entry.key[:80]!r}, not the one that the index names"
        )
    return entry
