"""Other systems in the benchmark: a table of throughputs, or a policy in Python.

A table is a JSON file. For each case of the benchmark and each number of dead workers, it gives the
samples per second that the system trains and the time that it pauses to reach this state:

    {"format": "slipstream-entry-1", "name": "mine", "title": "...", "source": "...",
     "cases": {"spot-24": [
         {"down": 0, "samples_per_second": 11.3, "pause_seconds": 0},
         {"down": 1, "samples_per_second": 10.9, "pause_seconds": 20},
         {"down": [0, 0, 1, 1], "samples_per_second": 10.0, "pause_seconds": 30}]}}

The key `down` is a number of workers, or one number for each stage; the latter is used if it fits
exactly. A number without a row has the values of the next larger one, because live workers may
idle; beyond the largest one nothing is trained.

A policy in Python is a class that inherits `Entry` and is found by its entry point in the group
`slipstream.policies`. It receives the same information about failures as the table form and our own
policies.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import msgspec

from slipstream.planner.simulation.availability_trace import Change
from slipstream.planner.simulation.loads import DownByStage
from slipstream.planner.simulation.policy import Cause, Phase, Policy, RatedByStage, Scenario
from slipstream.schedules.files import read_at_most

Content = TypeVar("Content")
ENTRY_POINT_GROUP = "slipstream.policies"
MAX_BYTES = 64 * 2**20


class EntryError(ValueError):
    """One-line error for a table or policy of another system that cannot be used."""


class Entry(RatedByStage):
    """Base class for another system's policy: it must define `rate`, and may define `pause`.

    The rate follows from the dead workers of each stage, and the system may pause when they change.
    A failure while it trains also costs up to half an iteration. At a rate of 0, the system waits,
    and resumes from a checkpoint.
    """

    source = "an entry of others"

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._live: set[int] = set()

    def pause(self, down: DownByStage) -> float:  # noqa: ARG002
        """Return the seconds to pause before training with `down` dead workers by stage.

        The default is no pause.
        """
        return 0.0

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Return the phases from the start of a trace, on the machines in `live`."""
        self._live = set(live)
        return self.resume_training(self.rate(self._count_down_by_stage()))

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> Sequence[Phase]:
        """Return the phases after a change: a pause, redoing lost samples, then training.

        At a rate of 0, the job waits; after that, it restarts from the checkpoint instead.
        """
        self._live = self._live - set(change.removed) | set(change.added)
        down = self._count_down_by_stage()
        return self.resume_after_change(
            self.rate(down),
            remaining,
            Phase(Cause.SWITCH, self.pause(down)),
            worker_died=bool(change.removed),
        )

    def _count_down_by_stage(self) -> DownByStage:
        stages = self.scenario.stages
        live = [0] * stages
        for machine in self._live:
            live[machine % stages] += 1
        return tuple(self.scenario.pipelines - count for count in live)


class EntryRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Throughput and pause of another system for certain numbers of dead workers.

    The field `down` is their number in all, or a list with the number of each stage.
    """

    down: int | list[int]
    samples_per_second: float
    pause_seconds: float = 0.0


class EntryTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of the file that describes another system for the benchmark.

    The field `cases` has rows by the name of a case, such as spot-24: a job with a trace.
    """

    format: Literal["slipstream-entry-1"]
    name: str
    title: str
    source: str
    cases: dict[str, list[EntryRow]]


class _TableEntry(Entry):
    """Policy of another system whose throughputs and pauses are those of a table."""

    rows: ClassVar[Mapping[int | DownByStage, EntryRow]]

    def _find_row(self, down: DownByStage) -> EntryRow | None:
        if down in self.rows:
            return self.rows[down]
        # A row for more dead workers holds as well, because live workers may idle.
        counts = [key for key in self.rows if isinstance(key, int) and key >= sum(down)]
        return self.rows[min(counts)] if counts else None

    def rate(self, down: DownByStage) -> float:
        """Return the samples per second in the table's row for `down`. 0 without a row."""
        row = self._find_row(down)
        return row.samples_per_second if row else 0.0

    def pause(self, down: DownByStage) -> float:
        """Return the pause in seconds in the table's row for `down`. 0 without a row."""
        row = self._find_row(down)
        return row.pause_seconds if row else 0.0


def decode_json_file(path: Path, decoder: msgspec.json.Decoder[Content], expected: str) -> Content:
    """Return a JSON file's contents.

    Raises EntryError that names the file if it cannot be read, is too large, or lacks the
    `expected` form.
    """
    data = read_at_most(path, MAX_BYTES, EntryError)
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EntryError(f"{path}: {error}; expected {expected}") from None


_TABLE = msgspec.json.Decoder(EntryTable)


def read_entry(path: Path) -> EntryTable:
    """Read the file that states another system's throughput for the benchmark.

    Raises EntryError that names the file if it cannot be read, has another form, a case without
    rows, a negative value, or two rows of a case for the same `down`.
    """
    table = decode_json_file(path, _TABLE, "the form slipstream-entry-1 (docs/benchmark.md)")
    for case, rows in table.cases.items():
        if not rows:
            raise EntryError(f"{path}: cases.{case}: no rows; expected at least one, for `down` 0")
        # Values below 0 and a second row for the same workers would make a policy's rate ambiguous.
        for number, row in enumerate(rows):
            counts = row.down if isinstance(row.down, list) else [row.down]
            if min([0, *counts, row.samples_per_second, row.pause_seconds]) < 0:
                raise EntryError(
                    f"{path}: cases.{case}[{number}]: a negative value; expected at least 0"
                )
            if row.down in [other.down for other in rows[:number]]:
                raise EntryError(
                    f"{path}: cases.{case}[{number}]: a second row for `down` {row.down}; expected "
                    "one"
                )
    return table


def make_table_policy(table: EntryTable, case: str, stages: int) -> type[Policy] | None:
    """Return a policy class with a table's throughputs and pauses for the named case.

    None if the table has no rows for that case. Raises EntryError if a row lists another number of
    stages than `stages`.
    """
    rows = table.cases.get(case)
    if rows is None:
        return None
    row_by_down: dict[int | DownByStage, EntryRow] = {}
    for row in rows:
        if isinstance(row.down, list) and len(row.down) != stages:
            raise EntryError(
                f"{table.name}: cases.{case}: down has {len(row.down)} numbers; expected one for "
                f"each of {stages} stages"
            )
        row_by_down[tuple(row.down) if isinstance(row.down, list) else row.down] = row
    # A class of its own, since policies are named and made by their class.
    return type(
        "TableEntry",
        (_TableEntry,),
        {
            "name": table.name,
            "title": table.title,
            "source": table.source,
            "rows": row_by_down,
            "assumptions": "rates and pauses of its table; a failure also costs half an iteration",
        },
    )


def load_installed_policy(name: str) -> type[Policy] | None:
    """Return the policy class that an installed package registers as entry point `name`.

    None if no package registers that name. Raises EntryError if the class cannot be imported or is
    not a policy.
    """
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            policy_class = point.load()
        except Exception as error:  # third-party code may raise anything; name its origin
            raise EntryError(
                f"{name}: {point.value} cannot be imported: {type(error).__name__}: {error}"
            ) from None
        if not (isinstance(policy_class, type) and issubclass(policy_class, Policy)):
            raise EntryError(
                f"{name}: {point.value} is not a policy; expected a class that inherits "
                "slipstream.planner.simulation.Entry"
            )
        return policy_class
    return None
