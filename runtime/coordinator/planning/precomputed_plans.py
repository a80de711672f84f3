"""Plan schedules for likely next failures while all train and no worker waits.

Pipelines that are equivalent may change places (`schedules.tables.pattern`). So a few plans cover
the death of any worker: one for each stage and one for each set of stages that share a machine, and
each of them again combined with pipelines that have lost workers before. They are made in processes
of low priority, the likeliest first. At a failure, only the pipelines are renumbered.
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator

import msgspec

from slipstream.runtime.coordinator.planning.background import BackgroundRunner
from slipstream.runtime.coordinator.planning.schedule_finder import ScheduleDivider, Scheduler
from slipstream.runtime.failure_domains import FailureDomains
from slipstream.schedules.schedule import NoScheduleError, Schedule, Worker
from slipstream.schedules.shares import DividedSchedule
from slipstream.schedules.tables.pattern import Pattern, columns_by_pipeline, dead_column, pattern_of, pipeline_classes
from slipstream.schedules.tables.relabel import preload_solver, relabel_schedule, renumber_pipelines

MAX_PRECOMPUTED = 64
"""Failures that are planned in advance, and plans kept. Each takes 1 MB for 4,096 workers."""

DownWorkers = tuple[Worker, ...]
"""Workers that are down, sorted."""


class PrecomputedPlan(msgspec.Struct, frozen=True):
    """Precomputed schedule with each worker's share, as `FailurePrecomputer` stores it."""

    schedule: Schedule
    parts: DividedSchedule


_PLAN_DECODER = msgspec.msgpack.Decoder(PrecomputedPlan)


class FailurePrecomputer:
    """Planner of schedules for likely next failures, which returns them when those happen.

    Parameters
    ----------
    first
        The schedule that the run began with. Plans are made only while speeds are as in it, and no
        layers have moved.
    scheduler
        Planner that is called for each failure.
    background
        Function that runs the planner.
    domains
        Failure domains: groups of workers that fail together.
    divided
        Function that divides a schedule into what each worker must know of it.
    """

    def __init__(self, first: Schedule, scheduler: Scheduler, background: BackgroundRunner, domains: FailureDomains,
                 divided: ScheduleDivider) -> None:
        self._speeds = first.times.per_mille_of
        self._classes = pipeline_classes(first.grid, first.times, first.memory)
        self._scheduler, self._background, self._domains, self._divided = scheduler, background, domains, divided
        self._known: dict[Pattern, bytes | None] = {}
        """Plan for each pattern of failures, as a compressed `PrecomputedPlan`. None: there is no
        plan, or it is being made.

        Sets of failed workers have the same pattern if they differ only in the numbers of
        equivalent pipelines.
        """
        self._next: dict[Pattern, DownWorkers] = {}
        self._busy = False
        preload_solver()

    def find_plan(self, down: DownWorkers) -> tuple[Schedule, DividedSchedule] | None:
        """Return a precomputed schedule without the `down` workers, and its shares, if any.

        The plan may have been made for workers of equivalent pipelines; then its pipelines are
        renumbered.
        """
        data = self._known.get(pattern_of(down, self._classes))
        if data is None:
            return None
        answer = _PLAN_DECODER.decode(zlib.decompress(data))
        fitted, numbers = relabel_schedule(answer.schedule, down), renumber_pipelines(answer.schedule, down)
        return None if fitted is None else (fitted, self._divided(fitted, (answer.parts, numbers)))

    def precompute_for(self, schedule: Schedule) -> None:
        """Plan for likely next failures while all train by this schedule. Does nothing if speeds
        have changed or layers have moved since the run began."""
        may_plan = schedule.times.per_mille_of == self._speeds \
            and not any(map(schedule.has_moved_layers, schedule.seats))
        chances: Counter[Pattern] = Counter()
        failures: dict[Pattern, DownWorkers] = {}
        for together, chance in self._likely_failures(schedule) if may_plan else ():
            failure = tuple(sorted({*schedule.failed, *together}))
            pattern = pattern_of(failure, self._classes)
            if len(failure) > len(schedule.failed) and dead_column(failure, schedule.grid) is None:
                chances[pattern] += chance
                failures[pattern] = failure
        self._next = {pattern: failures[pattern] for pattern, _ in chances.most_common(MAX_PRECOMPUTED)}
        self._plan_next_failure()

    def _likely_failures(self, schedule: Schedule) -> Iterator[tuple[DownWorkers, int]]:
        """Yield sets of workers that may fail next, with weights."""
        # A single worker weighs as much as it has equivalent pipelines, a failure domain 1.
        lost = columns_by_pipeline(schedule.failed)
        equivalent: dict[object, list[int]] = defaultdict(list)
        for pipeline, kind in enumerate(self._classes):
            equivalent[kind, lost.get(pipeline)].append(pipeline)
        for pipelines in equivalent.values():
            yield from (((Worker(pipelines[0], column),), len(pipelines)) for column in range(schedule.grid.columns))
        yield from ((together, 1) for together in self._domains.domains)

    def _plan_next_failure(self) -> None:
        if self._busy:
            return
        pattern = next((candidate for candidate in self._next if candidate not in self._known), None)
        if pattern is None:
            return
        failure, self._busy = self._next[pattern], True

        def found(answer: bytes | BaseException) -> None:
            self._busy = False
            self._known[pattern] = None if isinstance(answer, BaseException) else answer
            while len(self._known) > MAX_PRECOMPUTED:
                del self._known[next(candidate for candidate in self._known if candidate not in self._next)]
            self._plan_next_failure()

        self._background(lambda: self._compress_plan(self._scheduler(failure)), found, awaited=False)

    def _compress_plan(self, schedule: Schedule) -> bytes:
        if schedule.moves or not all(map(schedule.held_layers_of_seat, schedule.seats)):
            raise NoScheduleError("it can be fitted to no other workers")
        return zlib.compress(msgspec.msgpack.encode(PrecomputedPlan(schedule, self._divided(schedule))), 1)
