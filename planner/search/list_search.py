"""Many list schedules, the best kept: first a grid of dispatch rules, then random steps from the best one.

A step changes the dispatch rule, or who of its peers runs which micro-batches of a dead worker.
"""

import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from slipstream.planner.budget import (
    LIST_SCHEDULE_STEPS,
    LIST_SCHEDULE_STEPS_PER_OP,
    SCHEDULER_STEPS_PER_OP,
    Budget,
)
from slipstream.planner.model.arrays import ProblemArrays
from slipstream.planner.model.problem import Problem
from slipstream.planner.model.solution import Solution
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.params import DEFAULTS, ListParams
from slipstream.planner.search.assignment import ASSIGNMENT_RULES, assign
from slipstream.planner.search.composition import Composition
from slipstream.planner.search.dispatch_rules import changed, grid, shortlist
from slipstream.planner.search.list_scheduler import BASELINES, DispatchRule, ListScheduler, StuckError

RULES, STEPS, ASSIGNMENTS = (
    f"list schedules: {what}" for what in ("dispatch rules", "random steps", "random assignments"))
"""What is tried, for the tally."""
Tell = Callable[[int], None]


class _Tried(NamedTuple):
    """A dispatch rule under an assignment."""

    period: int
    """In ticks, that the rule alone gives."""
    rule: DispatchRule
    scheduler: ListScheduler


class _Best:
    """The best plan so far, and the dispatch rules that random steps start from."""

    def __init__(self, problem: Problem, bound: int, budget: Budget, tell: Tell) -> None:
        self.problem = problem
        self._budget, self._clock = budget, budget.clock
        self._began = self._clock.now()
        self._deadline = max(budget.deadline, self._began + 1e-9)
        self._bound = bound
        self._tell = tell
        self._slowest = 0.0
        self._composition: Composition | None = None
        self.at: _Tried | None = None
        """Where the random steps are."""
        self.period: int | None = None
        self.found: Solution | None = None

    def offer(self, scheduler: ListScheduler, rule: DispatchRule, why: str) -> _Tried | None:
        """Try a dispatch rule, and count that as `why`; go on from it where it is no worse. None: it is stuck."""
        began, before = self._clock.now(), self.period
        self._clock.count(LIST_SCHEDULE_STEPS + LIST_SCHEDULE_STEPS_PER_OP * len(scheduler.arrays.ops.unit))
        try:
            period = scheduler.period(rule)
        except StuckError:
            self._budget.tally.add(why)
            return None
        self._compose(scheduler)
        self._slowest = max(self._slowest, self._clock.now() - began)
        self._take(period, scheduler.solution)
        self._budget.tally.add(why, helped=int(self.period != before))
        tried = _Tried(period, rule, scheduler)
        if self.at is None or period <= self.at.period:
            self.at = tried
        return tried

    def _take(self, period: int, solution: Callable[[], Solution]) -> None:
        """Take a plan if it is better than the best."""
        if self.period is None or period < self.period:
            self.found, self.period = solution(), period
            self._tell(period)

    def _compose(self, scheduler: ListScheduler) -> None:
        """Where sets of pipelines are independent, each may have its own best rule."""
        if not self.problem.assigned or self.problem.optimizer == "synchronous":
            return
        if self._composition is None:
            self._composition = Composition(scheduler.arrays)
        if self._composition.worthwhile and self._composition.offer(scheduler.made[0]):
            period, order, start = self._composition.best()
            self._take(period, lambda: scheduler.arrays.solution(order, start))

    def offer_solution(self, solution: Solution) -> None:
        """Take a plan made elsewhere if it is better."""
        self._take(solution_period(self.problem, solution), lambda: solution)

    @property
    def spent(self) -> float:
        """Share of the time that is over, once there is a plan."""
        return 0.0 if self.period is None else (self._clock.now() - self._began) / (self._deadline - self._began)

    @property
    def closed(self) -> bool:
        """Nothing left to gain."""
        return self.period is not None and self.period <= self._bound

    @property
    def over(self) -> bool:
        """There is a plan, and nothing left to gain, or no time for another try, or told to stop."""
        return self.period is not None and self._budget.end(self.period, self._bound, self._slowest) is not None

    def scheduler(self, arrays: ProblemArrays) -> ListScheduler:
        """A list scheduler of an assignment."""
        self._clock.count(SCHEDULER_STEPS_PER_OP * len(arrays.ops.unit))
        return ListScheduler(arrays)


def search(problem: Problem, bound: int, budget: Budget, params: ListParams = DEFAULTS.lists, steps: int | None = None,
           tell: Tell = lambda _: None) -> tuple[Solution, int]:
    """The best of many list schedules within the budget; at least one.

    With its period in ticks. `tell` is called with the period, in ticks, of each better one. `steps`: at random, at
    most. Raises StuckError where all get stuck.
    """
    best = _Best(problem, bound, budget, tell)
    starts = _try_grid(best, params)
    if best.found is None:
        raise StuckError
    most = max(params.fewest_steps, params.most_ops // problem.operations)
    most = min(params.most_steps if steps is None else steps, most)
    _random_steps(best, starts, random.Random(budget.seed), most, params)
    assert best.found is not None and best.period is not None
    return best.found, best.period


def _try_grid(best: _Best, params: ListParams) -> Sequence[_Tried]:
    """Every dispatch rule of the grid under every assignment, as long as there is time; and what others run.

    The best few, from which random steps start.

    With routes only the shortlist, if it does not get stuck: random steps from there find more in the same time.
    """
    problem = best.problem
    schedulers, exchanging, over = _Schedulers(best), _can_exchange(problem), False
    others: Iterable[tuple[int, DispatchRule]] = (
        (index, rule) for rule in grid(problem) for index in range(len(ASSIGNMENT_RULES)))
    if problem.assigned:
        others = itertools.takewhile(lambda _: best.found is None, others)
    tried: list[_Tried] = []
    for index, rule in itertools.chain(shortlist(problem), others):
        if (scheduler := schedulers.get(index)) and (one := best.offer(scheduler, rule, RULES)):
            tried.append(one)
        if over := best.over or (exchanging and best.spent > params.grid_share):
            break
    if best.found is None or (not problem.assigned and (
            not over or (not best.closed and problem.operations <= params.largest_untimed))):
        for baseline in BASELINES.values():
            with suppress(StuckError):
                best.offer_solution(baseline(problem))
    return sorted(tried, key=lambda one: one.period)[:params.starts]


class _Schedulers:
    """A list scheduler for each assignment rule, made when it is asked for: a first plan needs but one."""

    def __init__(self, best: _Best) -> None:
        self._best, self._problem = best, best.problem
        self._made: list[ListScheduler | None] = []

    def get(self, index: int) -> ListScheduler | None:
        """The scheduler of an assignment rule; None where an earlier rule gives the same assignment."""
        while index >= len(self._made):
            self._made.append(self._new(len(self._made)))
        return self._made[index]

    def _new(self, index: int) -> ListScheduler | None:
        problem, rule = self._problem, ASSIGNMENT_RULES[index]
        if index and (problem.assigned or (not problem.failed and rule != "by-speed")):
            return None
        if rule == "by-speed" and not problem.unequal_time:
            return None
        hosts = assign(self._problem, ASSIGNMENT_RULES[index])
        if any(hosts == made.arrays.hosts for made in self._made if made):
            return None
        return self._best.scheduler(ProblemArrays(self._problem, hosts))


def _random_steps(best: _Best, starts: Sequence[_Tried], random: random.Random, steps: int, params: ListParams) -> None:
    """Small changes of a dispatch rule, or of its assignment, again and again; those that are no worse are kept.

    Where nothing is better for long, they start again from one of the best rules (random restarts): how far they come
    is decided by the first of them more than by how many follow.
    """
    if best.at is None:  # what others run does not get stuck, ours does
        return
    exchanging = _can_exchange(best.problem)
    before, stale, stale_starts = best.period, 0, 0
    for _ in range(steps):
        if best.over or stale_starts == params.stale_starts:
            return
        at = best.at
        if exchanging and random.random() < params.assignment_steps:
            best.offer(best.scheduler(_exchanged(at.scheduler.arrays, random)), at.rule, ASSIGNMENTS)
        else:
            best.offer(at.scheduler, changed(best.problem, at.rule, random, params), STEPS)
        stale = 0 if best.at.period != at.period else stale + 1
        if stale == params.stale_steps:
            stale_starts = 0 if best.period != before else stale_starts + 1
            before, stale = best.period, 0
            best.at = random.choice(starts)


def _can_exchange(problem: Problem) -> bool:
    """Whether other assignments are worth a try: with one broken pipeline they are much the same."""
    return not problem.assigned and len({worker.pipeline for worker in problem.failed}) > 1


def _exchanged(arrays: ProblemArrays, random: random.Random) -> ProblemArrays:
    """The re-routed micro-batches of a stage, or of all, exchange their workers, so that all keep their loads.

    Over all of the iteration, or neighbours only: the one finds other pairs of pipelines, the other a better order.
    """
    slices = arrays.ops.slice
    rerouted: dict[int, list[int]] = {}
    for unit in np.flatnonzero(arrays.ops.worker != arrays.home).tolist():
        rerouted.setdefault(int(slices[unit]), []).append(unit)
    if not rerouted:
        return arrays
    chosen = list(rerouted.values()) if random.random() < 0.5 else [random.choice(list(rerouted.values()))]
    neighbours = random.random() < 0.5
    hosts = arrays.ops.worker.copy()
    for units in chosen:  # by pipeline, then micro-batch
        workers = hosts[units].tolist()
        if not neighbours:
            random.shuffle(workers)
        for place in range(len(workers) - 1 if neighbours else 0):
            if random.random() < 0.5:
                workers[place:place + 2] = reversed(workers[place:place + 2])
        hosts[units] = workers
    return arrays.assigned(hosts)
