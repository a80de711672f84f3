"""Answers ahead: schedules for the failures that may come next, planned and divided while all train and nobody waits.

Pipelines that are alike may change places (`schedules.tables.pattern`). So a few answers do for the death of any
worker: one for each stage, and for each set of stages that share a machine; for each of them once more beside
pipelines that have lost workers before. They are found in processes that give way to all others, the likeliest first.
What is left to do at a failure is to give pipelines other numbers.
"""

import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator

import msgspec

from slipstream.runtime.coordinator.planning.background import Background
from slipstream.runtime.coordinator.planning.schedule_finder import Divide, Scheduler
from slipstream.runtime.failure_domains import FailureDomains
from slipstream.schedules.parts import Parts
from slipstream.schedules.schedule import NoScheduleError, Schedule, Worker
from slipstream.schedules.tables.pattern import Pattern, columns_by_pipeline, dead_column, pattern_of, pipeline_classes
from slipstream.schedules.tables.relabel import preload, relabel, renumbering

MOST = 64
"""Failures that are planned for ahead of them, and the answers that are kept: of 4,096 workers, some 1 MB each."""

Failure = tuple[Worker, ...]


class Answer(msgspec.Struct, frozen=True):
    """An answer."""

    schedule: Schedule
    parts: Parts


_KEPT = msgspec.msgpack.Decoder(Answer)


class AheadOfFailures:
    """Plans for what may fail next, and answers when it does.

    Parameters
    ----------
    first
        The schedule that the run began with.
    scheduler
        What to ask.
    background
        Where it is asked.
    domains
        Which workers fail together.
    divided
        What divides schedules among their workers.
    """

    def __init__(self, first: Schedule, scheduler: Scheduler, background: Background, domains: FailureDomains,
                 divided: Divide) -> None:
        self._speeds = first.times.per_mille_of
        self._classes = pipeline_classes(first.grid, first.times, first.memory)
        self._scheduler, self._background, self._domains, self._divided = scheduler, background, domains, divided
        self._known: dict[Pattern, bytes | None] = {}
        """Each as `Answer`, compressed; None: there is no answer, or it is being found."""
        self._next: dict[Pattern, Failure] = {}
        self._busy = False
        preload()

    def known(self, down: Failure) -> tuple[Schedule, Parts] | None:
        """The schedule for these workers being down, divided: an answer that is known, fitted to them."""
        found = self._known.get(pattern_of(down, self._classes))
        if found is None:
            return None
        kept = _KEPT.decode(zlib.decompress(found))
        fitted, numbers = relabel(kept.schedule, down), renumbering(kept.schedule, down)
        return None if fitted is None else (fitted, self._divided(fitted, (kept.parts, numbers)))

    def look(self, schedule: Schedule) -> None:
        """All train by this schedule from now on. At other speeds, or where layers have moved, others are asked."""
        asked = schedule.times.per_mille_of == self._speeds and not any(map(schedule.holds_others, schedule.seats))
        chances: Counter[Pattern] = Counter()
        failures: dict[Pattern, Failure] = {}
        for together, chance in self._likely(schedule) if asked else ():
            failure = tuple(sorted({*schedule.failed, *together}))
            pattern = pattern_of(failure, self._classes)
            if len(failure) > len(schedule.failed) and dead_column(failure, schedule.grid) is None:
                chances[pattern] += chance
                failures[pattern] = failure
        self._next = {pattern: failures[pattern] for pattern, _ in chances.most_common(MOST)}
        self._go_on()

    def _likely(self, schedule: Schedule) -> Iterator[tuple[Failure, int]]:
        """Who may fail next, one of each kind or more, and how many workers or machines may be the ones."""
        lost = columns_by_pipeline(schedule.failed)
        alike: dict[object, list[int]] = defaultdict(list)
        for pipeline, kind in enumerate(self._classes):
            alike[kind, lost.get(pipeline)].append(pipeline)
        for pipelines in alike.values():
            yield from (((Worker(pipelines[0], column),), len(pipelines)) for column in range(schedule.grid.columns))
        yield from ((together, 1) for together in self._domains.domains)

    def _go_on(self) -> None:
        if self._busy:
            return
        pattern = next((one for one in self._next if one not in self._known), None)
        if pattern is None:
            return
        failure, self._busy = self._next[pattern], True

        def found(answer: bytes | BaseException) -> None:
            self._busy = False
            self._known[pattern] = None if isinstance(answer, BaseException) else answer
            while len(self._known) > MOST:
                del self._known[next(one for one in self._known if one not in self._next)]
            self._go_on()

        self._background(lambda: self._kept(self._scheduler(failure)), found, awaited=False)

    def _kept(self, schedule: Schedule) -> bytes:
        if schedule.moves or not all(map(schedule.holds_of, schedule.seats)):
            raise NoScheduleError("it can be fitted to no other workers")
        return zlib.compress(msgspec.msgpack.encode(Answer(schedule, self._divided(schedule))), 1)
