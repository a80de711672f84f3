"""Plan schedules for likely next failures while all train and no worker waits.

Pipelines that are equivalent may change places (`schedules.tables.pattern`). So a few plans cover
the death of any worker: one for each stage and one for each set of stages that share a machine, and
each of these again for a pipeline that has lost workers before. The likeliest are made first, in
processes of low priority. At a failure, only the pipelines are renumbered.
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
from slipstream.schedules.tables.pattern import (
    Pattern,
    columns_by_pipeline,
    dead_column,
    pattern_of,
    pipeline_classes,
)
from slipstream.schedules.tables.relabel import preload_solver, relabel_schedule, renumber_pipelines

MAX_PRECOMPUTED = 64
"""Largest number of plans kept for likely failures. Each takes 1 MB for 4,096 workers."""

DownWorkers = tuple[Worker, ...]
"""Workers that are down, sorted."""


class PrecomputedPlan(msgspec.Struct, frozen=True):
    """Schedule planned before the failure, with what each worker must know of it."""

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
        Planner that makes the plan for each likely failure.
    background
        Function that runs the planner.
    domains
        Failure domains of the run.
    divided
        Function that divides a schedule into what each worker must know of it.
    """

    def __init__(
        self,
        first: Schedule,
        scheduler: Scheduler,
        background: BackgroundRunner,
        domains: FailureDomains,
        divided: ScheduleDivider,
    ) -> None:
        self._speeds = first.times.per_mille_of
        self._classes = pipeline_classes(first.grid, first.times, first.memory)
        self._scheduler = scheduler
        self._background = background
        self._domains = domains
        self._divided = divided
        self._plans: dict[Pattern, bytes | None] = {}
        """Compressed `PrecomputedPlan` for each pattern of failures; None: no plan was found."""
        self._next: dict[Pattern, DownWorkers] = {}
        self._busy = False
        preload_solver()

    def find_plan(self, down: DownWorkers) -> tuple[Schedule, DividedSchedule] | None:
        """Return the schedule without the `down` workers, and its shares; None if no plan fits."""
        data = self._plans.get(pattern_of(down, self._classes))
        if data is None:
            return None
        # The plan is for a failure of the same pattern, so only its pipelines' numbers differ.
        plan = _PLAN_DECODER.decode(zlib.decompress(data))
        fitted = relabel_schedule(plan.schedule, down)
        if fitted is None:
            return None
        numbers = renumber_pipelines(plan.schedule, down)
        return fitted, self._divided(fitted, (plan.parts, numbers))

    def precompute_for(self, schedule: Schedule) -> None:
        """Plan in the background for likely failures of workers of the current `schedule`.

        Nothing new is planned if its speeds or layers are not those of the first schedule.
        """
        # Pipelines are interchangeable only while speeds and layers are those of the first one.
        may_plan = schedule.times.per_mille_of == self._speeds and not any(
            map(schedule.has_moved_layers, schedule.seats)
        )
        chances: Counter[Pattern] = Counter()
        failures: dict[Pattern, DownWorkers] = {}
        # Add up how likely each pattern is, if each stage keeps a live worker.
        for together, chance in self._likely_failures(schedule) if may_plan else ():
            failure = tuple(sorted({*schedule.failed, *together}))
            pattern = pattern_of(failure, self._classes)
            if len(failure) > len(schedule.failed) and dead_column(failure, schedule.grid) is None:
                chances[pattern] += chance
                failures[pattern] = failure
        # Begin with the likeliest; a plan that has begun is finished all the same.
        self._next = {
            pattern: failures[pattern] for pattern, _ in chances.most_common(MAX_PRECOMPUTED)
        }
        self._plan_next_failure()

    def _likely_failures(self, schedule: Schedule) -> Iterator[tuple[DownWorkers, int]]:
        # Pipelines are equivalent if they are of one class and have lost the same columns. A single
        # worker weighs as much as it has equivalent pipelines, a failure domain 1.
        lost = columns_by_pipeline(schedule.failed)
        equivalent: dict[object, list[int]] = defaultdict(list)
        for pipeline, kind in enumerate(self._classes):
            equivalent[kind, lost.get(pipeline)].append(pipeline)
        for pipelines in equivalent.values():
            yield from (
                ((Worker(pipelines[0], column),), len(pipelines))
                for column in range(schedule.grid.columns)
            )
        yield from ((together, 1) for together in self._domains.domains)

    def _plan_next_failure(self) -> None:
        # One plan at a time: `store_plan` begins the next.
        if self._busy:
            return
        pattern = next(
            (candidate for candidate in self._next if candidate not in self._plans), None
        )
        if pattern is None:
            return
        failure, self._busy = self._next[pattern], True

        def store_plan(answer: bytes | BaseException) -> None:
            # A failure without a plan is stored, too, so that it is not planned again.
            self._busy = False
            self._plans[pattern] = None if isinstance(answer, BaseException) else answer
            # Forget the oldest plans that are no longer likely.
            while len(self._plans) > MAX_PRECOMPUTED:
                del self._plans[
                    next(candidate for candidate in self._plans if candidate not in self._next)
                ]
            self._plan_next_failure()

        self._background(
            lambda: self._compress_plan(self._scheduler(failure)), store_plan, awaited=False
        )

    def _compress_plan(self, schedule: Schedule) -> bytes:
        # If workers have other roles or hold nothing, the schedule fits these failures alone.
        if schedule.moves or not all(map(schedule.held_layers_of_seat, schedule.seats)):
            raise NoScheduleError("it can be fitted to no other workers")
        return zlib.compress(
            msgspec.msgpack.encode(PrecomputedPlan(schedule, self._divided(schedule))), 1
        )
