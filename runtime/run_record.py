"""Read the history of a run from its folder: events, iterations, and speeds.

A run may have been started several times. All times here are *run seconds*, which count the time of
all starts, one after the other, without the time between them. Importing this module needs no
torch.
"""

import statistics
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TypeVar

import msgspec

from slipstream.runtime.events import (
    EVENTS,
    FORMAT,
    LOSSES,
    VERSION,
    AnyEvent,
    Finished,
    Iteration,
    OrderGiven,
    Started,
    decode_event,
    decode_iteration,
)
from slipstream.schedules.document import Header
from slipstream.schedules.files import read_at_most

MAX_FILE_BYTES = 2**28
"""Largest size of each file that is read. A million iterations take a third of it."""
T = TypeVar("T")
_HEADER = msgspec.json.Decoder(Header)


class RunRecordError(ValueError):
    """Error for a folder that cannot be read as that of a run. The message is one line."""


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """Event of a run and the time at which it occurred."""

    at: float
    """Time of the event, in run seconds."""
    event: AnyEvent


@dataclass(frozen=True, slots=True)
class CommittedIteration:
    """An iteration that was committed and not discarded later."""

    at: float
    """Time of the commit, in run seconds."""
    took: float
    """Seconds since the commit before or, for a start's first, since its first order."""
    iteration: int
    loss: float | None
    period: float | None
    cost_error: float | None = None


@dataclass(frozen=True, slots=True)
class GenerationRecord:
    """One generation: from an order to the next one, or the run's end."""

    begin: float
    """Time of the order, in run seconds."""
    end: float
    order: OrderGiven
    committed: tuple[CommittedIteration, ...]
    fault_free_period: float | None

    @property
    def measured_period(self) -> float | None:
        """Median seconds of the longest busy windows of this generation; None if unknown. The first
        iteration, which warms up, is left out unless it is the only one."""
        return _median_or_none([line.period for line in self._without_first if line.period is not None])

    @property
    def iteration_seconds(self) -> float | None:
        """Median seconds from one commit to the next in this generation; None if unknown. The first
        iteration, which includes the change of members, is left out unless it is the only one."""
        return _median_or_none([line.took for line in self._without_first])

    @property
    def planned_share(self) -> float | None:
        """Planned throughput as a share of that with all workers; None if either is unknown."""
        planned = self.order.planned_period
        return self.fault_free_period / planned if self.fault_free_period and planned else None

    @property
    def _without_first(self) -> tuple[CommittedIteration, ...]:
        return self.committed[1:] or self.committed


@dataclass(frozen=True)  # without slots: some of it is computed once
class RunRecord:
    """History of a run, over all its starts."""

    folder: Path
    events: tuple[TimedEvent, ...]
    committed: tuple[CommittedIteration, ...]
    stretches: tuple[GenerationRecord, ...]
    seconds: float
    """Duration of the run, summed over all starts."""

    @cached_property
    def starts(self) -> tuple[Started, ...]:
        """`Started` events of the run, one for each start."""
        return tuple(timed.event for timed in self.events if isinstance(timed.event, Started))

    @property
    def finish_event(self) -> Finished | None:
        """Event that ended the run's last start; None if it still runs or was killed."""
        last = self.events[-1].event
        return last if isinstance(last, Finished) else None

    @cached_property
    def full_grid_iteration_seconds(self) -> float | None:
        """Median seconds between commits while all workers had their own roles, if they ever
        did."""
        return _median_or_none([line.took for stretch in self.stretches if stretch.order.phase == "whole"
                                for line in stretch.committed[1:]])

    @cached_property
    def median_cost_error(self) -> float | None:
        """Median of `cost_error` over iterations; None if no costs are known."""
        return _median_or_none([line.cost_error for line in self.committed if line.cost_error is not None])

    def measured_share(self, stretch: GenerationRecord) -> float | None:
        """Return a generation's throughput as a share of that with all workers, if measured."""
        whole, seconds = self.full_grid_iteration_seconds, stretch.iteration_seconds
        return whole / seconds if whole and seconds else None


def read_run(folder: Path) -> RunRecord:
    """Read the history of a run from its folder. Raises RunRecordError."""
    events = _read_events(folder)
    starts = [entry for entry in events if isinstance(entry, Started)]
    iterations = [(entry, entry.time) for entry in _read_iterations(folder) if entry.time is not None]
    times = [entry.time for entry in starts]
    lengths = [0.0] * len(starts)
    start = -1
    owners = []
    for event in events:
        start += isinstance(event, Started)
        owners.append(start)
        lengths[start] = max(lengths[start], event.seconds)
    starts_of = [max(0, bisect_right(times, time) - 1) for _, time in iterations]
    for (_, time), start in zip(iterations, starts_of, strict=True):
        lengths[start] = max(lengths[start], round(time - times[start], 3))
    offsets = list(accumulate(lengths, initial=0.0))
    happened = tuple(TimedEvent(offsets[start] + event.seconds, event)
                     for event, start in zip(events, owners, strict=True))
    ends = [*offsets[1:-1], offsets[-1]]
    orders = [(entry.at, ends[owner], entry.event) for entry, owner in zip(happened, owners, strict=True)
              if isinstance(entry.event, OrderGiven)]
    begun = {bisect_right(offsets, at, hi=len(starts)) - 1: at for at, _, _ in reversed(orders)}
    committed = _build_committed([(entry, offsets[start] + max(0.0, round(time - times[start], 3)), start)
                                  for (entry, time), start in zip(iterations, starts_of, strict=True)], offsets, begun)
    fault_free = next((entry.fault_free_period for entry in reversed(starts) if entry.fault_free_period), None)
    return RunRecord(folder, happened, committed, _build_generations(orders, committed, fault_free), offsets[-1])


def _build_committed(placed: Sequence[tuple[Iteration, float, int]], offsets: Sequence[float],
                     begun: dict[int, float]) -> tuple[CommittedIteration, ...]:
    """Return the committed iterations with the seconds since the commit before each."""
    # For the first of a start, they are since that start's first order. All times are run seconds.
    # `placed` has tuples (iteration, time of its commit, index of the start in which it ran),
    # `offsets` the time of each start, and `begun` the time of the first order of each start, by
    # index.
    found, last, last_start = list[CommittedIteration](), 0.0, -1
    for one, at, start in placed:
        before = last if start == last_start else begun.get(start, offsets[start])
        found.append(CommittedIteration(at, max(0.0, at - before), one.iteration, one.loss, one.period, one.cost_error))
        last, last_start = at, start
    return tuple(found)


def _build_generations(orders: Sequence[tuple[float, float, OrderGiven]], committed: Sequence[CommittedIteration],
                       fault_free: float | None) -> tuple[GenerationRecord, ...]:
    ends = [min(end, following[0]) for (_, end, _), following in pairwise(orders)] + [end for _, end, _ in orders[-1:]]
    times = [line.at for line in committed]
    return tuple(
        GenerationRecord(begin, end, order, tuple(committed[bisect_right(times, begin):bisect_right(times, end)]),
                         fault_free)
        for (begin, _, order), end in zip(orders, ends, strict=True))


def _read_events(folder: Path) -> list[AnyEvent]:
    path = folder / EVENTS
    if not folder.is_dir():
        raise RunRecordError(f"{folder}: no such folder; give the --out folder of slipstream train")
    if not path.exists():
        why = "its run is of a version that recorded none" if (folder / LOSSES).exists() else \
            "give the --out of slipstream train"
        raise RunRecordError(f"{folder}: no {EVENTS} is there: {why}")
    events = _read_lines(path, _decode_line)
    if not events or not isinstance(events[0], Started):
        raise RunRecordError(f"{path}: its first line is not an event of kind 'started'")
    return events


def _decode_line(line: bytes) -> AnyEvent:
    header = _HEADER.decode(line)
    if header.format == FORMAT and header.version is not None and header.version > VERSION:
        raise RunRecordError(f"is of version {header.version}, this Slipstream reads {VERSION}: use a newer Slipstream")
    return decode_event(line)


def _read_iterations(folder: Path) -> list[Iteration]:
    path = folder / LOSSES
    return _read_lines(path, decode_iteration) if path.exists() else []


def _read_lines(path: Path, read: Callable[[bytes], T]) -> list[T]:
    lines = read_at_most(path, MAX_FILE_BYTES, RunRecordError).split(b"\n")
    if lines.pop():
        raise RunRecordError(f"{path}: line {len(lines) + 1}, the last one, is cut off; remove it, or start the run "
                             "again with --resume, which does so")
    parsed = []
    for number, line in enumerate(lines, 1):
        try:
            parsed.append(read(line))
        except (msgspec.MsgspecError, RunRecordError) as error:
            raise RunRecordError(f"{path}: line {number}: {error}") from None
    return parsed


def _median_or_none(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
