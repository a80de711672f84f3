"""Systems of others in the benchmark: a table of throughputs, or a policy in Python.

A table is a JSON file. For each case of the benchmark it says, by what is down, how many samples a second the system
trains, and how long it stands still to get there:

    {"format": "slipstream-entry-1", "name": "mine", "title": "...", "source": "...",
     "cases": {"spot-24": [{"down": 0, "samples_per_second": 11.3, "pause_seconds": 0},
                           {"down": 1, "samples_per_second": 10.9, "pause_seconds": 20},
                           {"down": [0, 0, 1, 1], "samples_per_second": 10.0, "pause_seconds": 30}]}}

`down` is a number of workers, or one number for each stage; the latter counts where it fits exactly. For a number that
has no row, that of the next larger one counts, for live workers may idle; beyond the largest nothing is trained.

A policy in Python is a class that inherits `Entry` and is found by its entry point, group `slipstream.policies`. It is
told what is down, and nothing that the table form or our own policies are not told.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import msgspec

from slipstream.cli.fleet.availability_trace import Change
from slipstream.cli.fleet.loads import DownByStage
from slipstream.cli.fleet.policy import Cause, Phase, Policy, RatedByStage, Scenario
from slipstream.schedules.files import read_at_most

Content = TypeVar("Content")
GROUP = "slipstream.policies"
MAX_BYTES = 64 * 2**20


class EntryError(ValueError):
    """An entry cannot be used. The message is one line."""


class Entry(RatedByStage):
    """A system that trains at a rate that depends on what is down, and pauses when that changes.

    A failure also costs half an iteration, as for all others. Where nothing can be trained (a rate of 0), it waits, and
    goes on from a checkpoint. Override `rate`, and `pause` where a change costs time.
    """

    source = "an entry of others"

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._live: set[int] = set()

    def pause(self, down: DownByStage) -> float:  # noqa: ARG002
        """Seconds in which nothing is trained, to get to where so many are down."""
        return 0.0

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Train with those who are there."""
        self._live = set(live)
        return self.resume_training(self.rate(self._down()))

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> Sequence[Phase]:
        """Pause, redo what was lost, train on."""
        self._live = self._live - set(change.removed) | set(change.added)
        down = self._down()
        return self.go_on(self.rate(down), remaining, Phase(Cause.SWITCH, self.pause(down)),
                          worker_died=bool(change.removed))

    def _down(self) -> DownByStage:
        """Machine m has stage m mod S, as in the grid."""
        stages = self.scenario.stages
        live = [0] * stages
        for machine in self._live:
            live[machine % stages] += 1
        return tuple(self.scenario.pipelines - count for count in live)


class EntryRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One row of a table."""

    down: int | list[int]
    samples_per_second: float
    pause_seconds: float = 0.0


class EntryTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An entry as a file."""

    format: Literal["slipstream-entry-1"]
    name: str
    title: str
    source: str
    cases: dict[str, list[EntryRow]]


class _TableEntry(Entry):
    """A system of which a table is known."""

    rows: ClassVar[Mapping[int | DownByStage, EntryRow]]

    def _row(self, down: DownByStage) -> EntryRow | None:
        if down in self.rows:
            return self.rows[down]
        counts = [key for key in self.rows if isinstance(key, int) and key >= sum(down)]
        return self.rows[min(counts)] if counts else None

    def rate(self, down: DownByStage) -> float:
        """As the table says."""
        row = self._row(down)
        return row.samples_per_second if row else 0.0

    def pause(self, down: DownByStage) -> float:
        """As the table says."""
        row = self._row(down)
        return row.pause_seconds if row else 0.0


def decoded(path: Path, decoder: msgspec.json.Decoder[Content], expected: str) -> Content:
    """What is in a JSON file. Raises EntryError, whose message names the file and says what was expected."""
    data = read_at_most(path, MAX_BYTES, EntryError)
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EntryError(f"{path}: {error}; expected {expected}") from None


_TABLE = msgspec.json.Decoder(EntryTable)


def read_entry(path: Path) -> EntryTable:
    """Read a table. Raises EntryError, whose message names the file and what is wrong."""
    table = decoded(path, _TABLE, "the form slipstream-entry-1 (docs/benchmark.md)")
    for case, rows in table.cases.items():
        if not rows:
            raise EntryError(f"{path}: cases.{case}: no rows; expected one at least, for `down` 0")
        for number, row in enumerate(rows):
            counts = row.down if isinstance(row.down, list) else [row.down]
            if min([0, *counts, row.samples_per_second, row.pause_seconds]) < 0:
                raise EntryError(f"{path}: cases.{case}[{number}]: expected nothing below 0")
            if row.down in [other.down for other in rows[:number]]:
                raise EntryError(f"{path}: cases.{case}[{number}]: a second row for `down` {row.down}; expected one")
    return table


def table_policy(table: EntryTable, case: str, stages: int) -> type[Policy] | None:
    """The policy that a table describes for a case; None where it has none. Raises EntryError for other stages."""
    rows = table.cases.get(case)
    if rows is None:
        return None
    found: dict[int | DownByStage, EntryRow] = {}
    for row in rows:
        if isinstance(row.down, list) and len(row.down) != stages:
            raise EntryError(f"{table.name}: cases.{case}: down has {len(row.down)} numbers; expected one for each of "
                             f"{stages} stages")
        found[tuple(row.down) if isinstance(row.down, list) else row.down] = row
    return type("TableEntry", (_TableEntry,), {
        "name": table.name, "title": table.title, "source": table.source, "rows": found,
        "assumptions": "as its table says; a failure also costs half an iteration"})


def installed_policy(name: str) -> type[Policy] | None:
    """The policy of an installed package, by the name of its entry point; None where there is none.

    Raises EntryError where it cannot be imported or is no policy.
    """
    for point in entry_points(group=GROUP, name=name):
        try:
            kind = point.load()
        except Exception as error:  # code of others: whatever it raises, the user is told where
            raise EntryError(f"{name}: {point.value} cannot be imported: {type(error).__name__}: {error}") from None
        if not (isinstance(kind, type) and issubclass(kind, Policy)):
            raise EntryError(f"{name}: {point.value} is no policy; expected a class that inherits "
                             "slipstream.cli.fleet.Entry")
        return kind
    return None
