"""Load a table of schedules, and look up the schedule for failed workers.

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
"""Folder of the tables that come with Slipstream, with a folder for each."""


class LookupResult(msgspec.Struct, frozen=True, kw_only=True):
    """Schedule for a set of failed workers, and the key of its table entry."""

    key: str
    schedule: Schedule

    @property
    def moves(self) -> tuple[Seat, ...]:
        """Seats of workers that play another role than their own.

        If the role is in another column, the worker must load layers.
        """
        return self.schedule.moves

    @property
    def layers_to_load(self) -> int:
        """Number of layers that workers must load, summed over all workers.

        A stage counts as one layer if the job does not say how many it has.
        """
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
        """Read a table's folder. Raises TableError if a file is missing, malformed or changed.

        The job file is read only by `job_text`.
        """
        # Now, because a lookup is urgent.
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
        """Return the rows of the table's index; those for numbers of failures come first."""
        return self.index.entries

    def job_text(self) -> bytes:
        """Return the job file that the table was made from.

        Raises TableError if the file is missing or changed.
        """
        return read_verified(self.folder / JOB, self.index.job_sha256)

    @property
    def program_texts(self) -> tuple[msgspec.Raw, ...]:
        """Programs of all entries, as JSON texts, by number."""
        return self._programs

    def stored_entry(self, key: str) -> TableEntry:
        """Return the entry with a key such as `count-2`, in the form that is stored.

        Raises KeyError if there is none, or if it has no plan.
        """
        return self._entries[key]

    def checked_schedule(self, key: str) -> Schedule:
        """Return the schedule with a key such as `count-2`, after the checker has passed it.

        Raises TableError if the schedule cannot be used, or KeyError if the key is unknown or has
        no plan.
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
        """Return the shortest schedule for these failed workers; None if there is none.

        By default, only schedules in which no worker loads a layer are considered. The result is
        valid: unless `checked` is False, the stored schedule is checked at its first use, and
        `relabel_schedule` keeps every rule.

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
            As `roles_move`, even if a column has no live worker left: its layers are then loaded
            from workers of other columns, or from a checkpoint.
        nodes
            Workers of each machine; if roles move, holders of a stage are spread over machines.
        checked
            False skips the checker, for callers that check the result themselves.
        """
        down = set(failed)
        for worker in sorted(down - set(self.basis.grid.workers())):
            raise ValueError(
                f"the job has no worker {worker}; its grid is {self.basis.grid.pipelines} "
                f"pipelines x {self.basis.grid.columns} stages"
            )
        # Entries that may fit: for the pattern, for the number of failures with each slow worker
        # that is down, for the number of failures with usual workers only.
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
        # The sort is stable: of equal periods, the entry for the pattern is first, and moves no
        # worker.
        stored_keys = sorted(
            (key for key in keys if key in self._entries), key=self._period_seconds
        )
        for key in stored_keys:
            stored = self.checked_schedule(key) if checked else self.unchecked_schedule(key)
            schedule = relabel_schedule(stored, down, held_elsewhere=held_elsewhere, nodes=nodes)
            if schedule is None:
                continue
            result = LookupResult(key=key, schedule=schedule)
            # A schedule that needs layers loaded is allowed only where the caller says so.
            if settled or roles_move or held_elsewhere or not result.layers_to_load:
                return result
        return None

    def _period_seconds(self, key: str) -> float:
        entry = self._entries[key]
        return entry.period_ticks * entry.tick_seconds(self.basis)

    def unchecked_schedule(self, key: str) -> Schedule:
        """Return the schedule with a key such as `count-2`, without checking its rules.

        Raises TableError if the entry is malformed, or KeyError if the key is unknown or has no
        plan.
        """
        return decode_entry(self._entries[key], self.basis, self._programs)

    def _decode_checked(self, key: str) -> Schedule:
        """Decode the schedule under this key. Raises TableError if it is no valid schedule."""
        schedule = self.unchecked_schedule(key)
        violations = check(schedule)
        if violations:
            raise TableError(
                f"{self.folder / entry_file(key)}: the schedule breaks a rule: {violations[0]}"
            )
        return schedule


def library_names() -> tuple[str, ...]:
    """Return the names of the tables that come with Slipstream, sorted."""
    return tuple(sorted(path.parent.name for path in LIBRARY.glob(f"*/{INDEX}")))


def library(name: str) -> Path | None:
    """Return the folder of a table that comes with Slipstream; None for an unknown name."""
    return LIBRARY / name if name in library_names() else None


def _validate_basis(basis: Basis, path: Path) -> None:
    """Raise TableError unless the values that all entries share are valid."""
    # A schedule without seats is valid if what it shares with all entries is.
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
    """Read the entry of this row of a table's index. Raises TableError."""
    path = folder / entry_file(row.key)
    # A key from the file could lead out of the folder.
    if path.parent != folder / ENTRIES:
        raise TableError(f"{folder / INDEX}: {row.key[:80]!r} is not the key of an entry")
    entry = ENTRY_KIND.decode(read_verified(path, row.sha256), str(path))
    if (entry.key, entry.failed, len(entry.failed)) != (row.key, row.failed, row.failures):
        raise TableError(
            f"{path}: holds entry {entry.key[:80]!r}, not the one that the index names"
        )
    return entry
