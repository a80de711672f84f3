"""Run record: what a run's folder says about its course: events, iterations, and how fast each order was.

A run may have been started several times. All times here are *run seconds*: those of its starts, one after the other,
without the time between them. Importing this needs no torch.
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
    Finished,
    Iteration,
    Kind,
    OrderGiven,
    Started,
    decode,
    decode_iteration,
)
from slipstream.schedules.document import Header
from slipstream.schedules.files import read_at_most

MAX_BYTES = 2**28
"""Of each file: a million iterations take a third of this."""
T = TypeVar("T")
_HEADER = msgspec.json.Decoder(Header)


class RunRecordError(ValueError):
    """The folder cannot be read as that of a run. The message is one line."""


@dataclass(frozen=True, slots=True)
class Happened:
    """An event."""

    at: float
    """Run seconds."""
    event: Kind


@dataclass(frozen=True, slots=True)
class CommittedIteration:
    """An iteration that was committed and never given up."""

    at: float
    """Run seconds."""
    took: float
    """Since the one before was committed, or since the first order of its start: with what was lost between them."""
    iteration: int
    loss: float | None
    period: float | None
    cost_error: float | None = None


@dataclass(frozen=True, slots=True)
class Stretch:
    """The time from one order to the next, or to the end of its start of the run."""

    begin: float
    """Run seconds."""
    end: float
    order: OrderGiven
    committed: tuple[CommittedIteration, ...]
    fault_free_period: float | None

    @property
    def measured_period(self) -> float | None:
        """Median over iterations of the longest busy window, without the first one, which warms up."""
        return _median([one.period for one in self._warm if one.period is not None])

    @property
    def iteration_seconds(self) -> float | None:
        """Median from one commit to the next, without the first one, which has a change of members before it."""
        return _median([one.took for one in self._warm])

    @property
    def planned_share(self) -> float | None:
        """Of the fault-free throughput, as planned."""
        planned = self.order.planned_period
        return self.fault_free_period / planned if self.fault_free_period and planned else None

    @property
    def _warm(self) -> tuple[CommittedIteration, ...]:
        return self.committed[1:] or self.committed


@dataclass(frozen=True)  # without slots: some of it is computed once
class RunRecord:
    """The course of a run."""

    folder: Path
    events: tuple[Happened, ...]
    committed: tuple[CommittedIteration, ...]
    stretches: tuple[Stretch, ...]
    seconds: float
    """The sum over all starts."""

    @cached_property
    def starts(self) -> tuple[Started, ...]:
        """Each start of the run."""
        return tuple(one.event for one in self.events if isinstance(one.event, Started))

    @property
    def finished(self) -> Finished | None:
        """How its last start ended; None: it goes on, or was killed."""
        last = self.events[-1].event
        return last if isinstance(last, Finished) else None

    @cached_property
    def whole_seconds(self) -> float | None:
        """Median of an iteration, measured while all workers took part."""
        return _median([one.took for stretch in self.stretches if stretch.order.phase == "whole"
                        for one in stretch.committed[1:]])

    @cached_property
    def cost_error(self) -> float | None:
        """How far the costs of samples were from what their ops took: the median of iterations; None: none are known.
        """
        return _median([one.cost_error for one in self.committed if one.cost_error is not None])

    def measured_share(self, stretch: Stretch) -> float | None:
        """Of the throughput measured with all workers; None: it was not."""
        whole, seconds = self.whole_seconds, stretch.iteration_seconds
        return whole / seconds if whole and seconds else None


def read_run(folder: Path) -> RunRecord:
    """Raises RunRecordError."""
    events = _events(folder)
    begins = [one for one in events if isinstance(one, Started)]
    iterations = [(one, one.time) for one in _iterations(folder) if one.time is not None]
    times = [one.time for one in begins]
    lengths = [0.0] * len(begins)
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
    happened = tuple(Happened(offsets[start] + event.seconds, event)
                     for event, start in zip(events, owners, strict=True))
    ends = [*offsets[1:-1], offsets[-1]]
    orders = [(one.at, ends[owner], one.event) for one, owner in zip(happened, owners, strict=True)
              if isinstance(one.event, OrderGiven)]
    begun = {bisect_right(offsets, at, hi=len(begins)) - 1: at for at, _, _ in reversed(orders)}
    committed = _committed([(one, offsets[start] + max(0.0, round(time - times[start], 3)), start)
                            for (one, time), start in zip(iterations, starts_of, strict=True)], offsets, begun)
    fault_free = next((one.fault_free_period for one in reversed(begins) if one.fault_free_period), None)
    return RunRecord(folder, happened, committed, _stretches(orders, committed, fault_free), offsets[-1])


def _committed(placed: Sequence[tuple[Iteration, float, int]], offsets: Sequence[float],
               begun: dict[int, float]) -> tuple[CommittedIteration, ...]:
    """`placed` are iterations, each with its run seconds and its start; `begun`: the first order of each start."""
    found, last, last_start = list[CommittedIteration](), 0.0, -1
    for one, at, start in placed:
        before = last if start == last_start else begun.get(start, offsets[start])
        found.append(CommittedIteration(at, max(0.0, at - before), one.iteration, one.loss, one.period, one.cost_error))
        last, last_start = at, start
    return tuple(found)


def _stretches(orders: Sequence[tuple[float, float, OrderGiven]], committed: Sequence[CommittedIteration],
               fault_free: float | None) -> tuple[Stretch, ...]:
    ends = [min(end, following[0]) for (_, end, _), following in pairwise(orders)] + [end for _, end, _ in orders[-1:]]
    times = [one.at for one in committed]
    return tuple(
        Stretch(begin, end, order, tuple(committed[bisect_right(times, begin):bisect_right(times, end)]), fault_free)
        for (begin, _, order), end in zip(orders, ends, strict=True))


def _events(folder: Path) -> list[Kind]:
    path = folder / EVENTS
    if not folder.is_dir():
        raise RunRecordError(f"{folder}: no folder is there; give the --out of slipstream train")
    if not path.exists():
        why = "its run is of a version that recorded none" if (folder / LOSSES).exists() else \
            "give the --out of slipstream train"
        raise RunRecordError(f"{folder}: no {EVENTS} is there: {why}")
    events = _lines(path, _event)
    if not events or not isinstance(events[0], Started):
        raise RunRecordError(f"{path}: its first line is not an event of kind 'started'")
    return events


def _event(line: bytes) -> Kind:
    header = _HEADER.decode(line)
    if header.format == FORMAT and header.version is not None and header.version > VERSION:
        raise RunRecordError(f"of version {header.version}; this Slipstream reads version {VERSION}: take a newer one")
    return decode(line)


def _iterations(folder: Path) -> list[Iteration]:
    path = folder / LOSSES
    return _lines(path, decode_iteration) if path.exists() else []


def _lines(path: Path, read: Callable[[bytes], T]) -> list[T]:
    lines = read_at_most(path, MAX_BYTES, RunRecordError).split(b"\n")
    if lines.pop():
        raise RunRecordError(f"{path}: line {len(lines) + 1}, the last one, is cut off; remove it, or start the run "
                             "again with --resume, which does so")
    found = []
    for number, line in enumerate(lines, 1):
        try:
            found.append(read(line))
        except (msgspec.MsgspecError, RunRecordError) as error:
            raise RunRecordError(f"{path}: line {number}: {error}") from None
    return found


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
