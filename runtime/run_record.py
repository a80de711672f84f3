"""Read the history of a run from its folder: events, iterations, and speeds.

A run may have been started several times. All times here are *run seconds*: seconds since the run
began, without the time between the end of one start and the next. Importing this module needs no
torch.
"""

import statistics
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from slipstream.runtime.events import (
    EVENTS,
    FORMAT,
    LOSSES,
    VERSION,
    AnyEvent,
    Iteration,
    OrderGiven,
    RunFinished,
    Started,
    decode_event,
    decode_iteration,
)
from slipstream.schedules.document import Header
from slipstream.schedules.files import read_at_most

MAX_FILE_BYTES = 2**28
"""Largest size of a file that is read, three times that of a million iterations."""
T = TypeVar("T")
_HEADER = msgspec.json.Decoder(Header)


class RunRecordError(ValueError):
    """Error for a folder that cannot be read as a run's folder. The message is one line."""


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """Event of a run and the time at which it occurred."""

    at: float
    """Time of the event, in run seconds."""
    event: AnyEvent


@dataclass(frozen=True, slots=True)
class RecordedIteration:
    """An iteration that was committed, and not undone by a return to a checkpoint."""

    at: float
    """Time of the commit, in run seconds."""
    took: float
    """Seconds since the previous commit; for the first of a start, since its first order."""
    iteration: int
    loss: float | None
    period: float | None
    cost_error: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """One generation, from its order to the next order or the start's end."""

    begin: float
    """Time of the order, in run seconds."""
    end: float
    order: OrderGiven
    committed: tuple[RecordedIteration, ...]
    fault_free_period: float | None

    @property
    def measured_period(self) -> float | None:
        """Median of the iterations' longest busy windows, in seconds; None if unknown.

        The first iteration, which warms up, is left out unless it is the only one.
        """
        periods = [line.period for line in self._without_first if line.period is not None]
        return _median_or_none(periods)

    @property
    def iteration_seconds(self) -> float | None:
        """Median seconds from one commit to the next in this generation; None if unknown.

        The first, which includes the change of members, is left out unless it is the only one.
        """
        return _median_or_none([line.took for line in self._without_first])

    @property
    def planned_share(self) -> float | None:
        """Planned throughput divided by that planned for the full grid; None if unknown."""
        planned = self.order.planned_period
        return self.fault_free_period / planned if self.fault_free_period and planned else None

    @property
    def _without_first(self) -> tuple[RecordedIteration, ...]:
        return self.committed[1:] or self.committed


@dataclass(frozen=True)  # without slots: some of it is computed once
class RunRecord:
    """History of a run, over all its starts."""

    folder: Path
    events: tuple[TimedEvent, ...]
    committed: tuple[RecordedIteration, ...]
    generations: tuple[GenerationRecord, ...]
    seconds: float
    """Duration of the run, summed over all starts."""

    @cached_property
    def starts(self) -> tuple[Started, ...]:
        """Events `Started` of the run, one for each start."""
        return tuple(timed.event for timed in self.events if isinstance(timed.event, Started))

    @property
    def finish_event(self) -> RunFinished | None:
        """Event that ended the run's last start; None if it still runs or was killed."""
        last = self.events[-1].event
        return last if isinstance(last, RunFinished) else None

    @cached_property
    def full_grid_iteration_seconds(self) -> float | None:
        """Median seconds between two commits of a generation with all workers; None if unknown."""
        return _median_or_none(
            [
                line.took
                for generation in self.generations
                if generation.order.phase == "whole"
                for line in generation.committed[1:]
            ]
        )

    @cached_property
    def median_cost_error(self) -> float | None:
        """Median of `cost_error` over iterations; None if no costs are known."""
        return _median_or_none(
            [line.cost_error for line in self.committed if line.cost_error is not None]
        )

    def measured_share(self, generation: GenerationRecord) -> float | None:
        """Return a generation's throughput divided by the full grid's; None if unknown."""
        whole, seconds = self.full_grid_iteration_seconds, generation.iteration_seconds
        return whole / seconds if whole and seconds else None


def read_run(folder: Path) -> RunRecord:
    """Read the history of a run from its folder. Raises RunRecordError.

    Iterations without a time, of earlier versions, are left out.
    """
    events = _read_events(folder)
    starts = [entry for entry in events if isinstance(entry, Started)]
    iterations = [
        (entry, entry.time) for entry in _read_iterations(folder) if entry.time is not None
    ]
    # The length of each start, and the start of each event. The first event is a `Started`.
    times = [entry.time for entry in starts]
    lengths = [0.0] * len(starts)
    start = -1
    owners = []
    for event in events:
        start += isinstance(event, Started)
        owners.append(start)
        lengths[start] = max(lengths[start], event.seconds)
    # Iterations have no number of their start, but the time of their commit tells it.
    starts_of = [max(0, bisect_right(times, time) - 1) for _, time in iterations]
    for (_, time), start in zip(iterations, starts_of, strict=True):
        lengths[start] = max(lengths[start], round(time - times[start], 3))

    # From here on, all times are run seconds.
    offsets = list(accumulate(lengths, initial=0.0))
    timed_events = tuple(
        TimedEvent(offsets[start] + event.seconds, event)
        for event, start in zip(events, owners, strict=True)
    )
    orders = [
        _TimedOrder(timed.at, offsets[start + 1], timed.event)
        for timed, start in zip(timed_events, owners, strict=True)
        if isinstance(timed.event, OrderGiven)
    ]
    # The first iteration of a start is timed from the start's first order.
    first_orders = dict[int, float]()
    for order in orders:
        start = bisect_right(offsets, order.begin, hi=len(starts)) - 1
        first_orders.setdefault(start, order.begin)
    commits = [
        _Commit(line, offsets[start] + max(0.0, round(time - times[start], 3)), start)
        for (line, time), start in zip(iterations, starts_of, strict=True)
    ]
    committed = _build_committed(commits, offsets, first_orders)
    # The newest known period with all workers holds for all generations.
    periods = (entry.fault_free_period for entry in reversed(starts) if entry.fault_free_period)
    generations = _build_generations(orders, committed, next(periods, None))
    return RunRecord(folder, timed_events, committed, generations, offsets[-1])


class _TimedOrder(NamedTuple):
    begin: float
    """Time of the order, in run seconds."""
    end_of_start: float
    """End of the start in which the order was given, in run seconds."""
    order: OrderGiven


class _Commit(NamedTuple):
    line: Iteration
    at: float
    """Time of the commit, in run seconds."""
    start: int
    """Index of the start in which the iteration ran."""


def _build_committed(
    commits: Sequence[_Commit], offsets: Sequence[float], first_orders: Mapping[int, float]
) -> tuple[RecordedIteration, ...]:
    committed, last, last_start = list[RecordedIteration](), 0.0, -1
    for line, at, start in commits:
        # The first iteration of a start began with that start's first order.
        before = last if start == last_start else first_orders.get(start, offsets[start])
        took = max(0.0, at - before)
        committed.append(
            RecordedIteration(at, took, line.iteration, line.loss, line.period, line.cost_error)
        )
        last, last_start = at, start
    return tuple(committed)


def _build_generations(
    orders: Sequence[_TimedOrder],
    committed: Sequence[RecordedIteration],
    fault_free: float | None,
) -> tuple[GenerationRecord, ...]:
    # An order ends with the next one, or with the start in which it was given.
    ends = [order.end_of_start for order in orders]
    for index, following in enumerate(orders[1:]):
        ends[index] = min(ends[index], following.begin)
    # Commits ascend in time, so each generation has consecutive ones.
    times = [line.at for line in committed]
    generations = []
    for (begin, _, order), end in zip(orders, ends, strict=True):
        lines = tuple(committed[bisect_right(times, begin) : bisect_right(times, end)])
        generations.append(GenerationRecord(begin, end, order, lines, fault_free))
    return tuple(generations)


def _read_events(folder: Path) -> list[AnyEvent]:
    # The message depends on what is there: no folder, no run, or a run of an earlier version.
    path = folder / EVENTS
    if not folder.is_dir():
        raise RunRecordError(f"{folder}: no such folder; give the --out folder of slipstream train")
    if not path.exists():
        why = "give the --out of slipstream train"
        if (folder / LOSSES).exists():
            why = "its run is of a version that recorded none"
        raise RunRecordError(f"{folder}: no {EVENTS} is there: {why}")
    events = _read_lines(path, _decode_line)
    if not events or not isinstance(events[0], Started):
        raise RunRecordError(f"{path}: its first line is not an event of kind 'started'")
    return events


def _decode_line(line: bytes) -> AnyEvent:
    # The first line of each start has the version; a newer one may have other events.
    header = _HEADER.decode(line)
    if header.format == FORMAT and header.version is not None and header.version > VERSION:
        raise RunRecordError(
            f"is of version {header.version}, this Slipstream reads {VERSION}: use a newer "
            "Slipstream"
        )
    return decode_event(line)


def _read_iterations(folder: Path) -> list[Iteration]:
    path = folder / LOSSES
    return _read_lines(path, decode_iteration) if path.exists() else []


def _read_lines(path: Path, read: Callable[[bytes], T]) -> list[T]:
    # A complete file ends with a line feed. A killed run may have written half a line.
    lines = read_at_most(path, MAX_FILE_BYTES, RunRecordError).split(b"\n")
    if lines.pop():
        raise RunRecordError(
            f"{path}: line {len(lines) + 1}, the last one, is cut off; remove it, or start the run "
            "again with --resume, which does so"
        )
    parsed = []
    for number, line in enumerate(lines, 1):
        try:
            parsed.append(read(line))
        except (msgspec.MsgspecError, RunRecordError) as error:
            raise RunRecordError(f"{path}: line {number}: {error}") from None
    return parsed


def _median_or_none(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
