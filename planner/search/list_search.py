"""Many list schedules, the best kept: first a grid of dispatch rules, then random steps from the best one.

A step changes the dispatch rule, or who of its peers runs which micro-batches of a dead worker.
"""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple, get_args

import msgspec
import numpy as np

from planner.model.arrays import ProblemArrays
from planner.model.bounds import whole_fill
from planner.model.problem import Problem
from planner.model.solution import Solution
from planner.model.start_times import solution_period
from planner.search.assignment import ASSIGNMENT_RULES, assign
from planner.search.baselines import BASELINES
from planner.search.composition import Composition
from planner.search.list_scheduler import (
    DispatchRule,
    ForwardOrder,
    ListScheduler,
    Rerouted,
    StuckError,
    in_flight,
    shares_of_forward,
)

OPS_PER_SEARCH = 20_000_000
"""Ops that all random steps together may schedule; counted, not timed, so that the same seed gives the same plan."""
QUICK = 20_000
"""Compute ops up to which baselines are tried when the time is over, too."""
FEWEST_STEPS, MOST_STEPS = 8, 1000
GRID_SHARE = 0.6
"""Share of the time for the grid, where the steps after it may change the assignment."""
ASSIGNMENT_STEPS = 0.5
"""Share of the steps that change the assignment."""


class Choice(NamedTuple):
    """An assignment rule and a dispatch rule of the grid."""

    assignment: int
    """Which of `ASSIGNMENT_RULES`."""
    limits: tuple[float, int] | None
    """Slope and extra of the limits in flight; None: no limits, and transfers are ignored."""
    lookahead: float
    make_room: bool


SHORTLIST = tuple(itertools.starmap(Choice, (
    (0, (2.0, 0), 0.0, False), (1, (1.5, 0), 0.5, True), (1, None, 0.0, False), (0, (1.0, 0), 1.0, True),
    (0, (1.25, 0), 0.0, False), (1, (1.0, 0), 0.5, True), (0, (2.0, 1), 0.0, False), (1, (1.25, 1), 0.5, True),
    (0, (1.5, 0), 0.5, False), (0, (1.25, 0), 0.5, False), (1, (1.0, 2), 0.5, True), (0, (1.0, 2), 1.0, True),
    (1, (2.0, 0), 0.0, False), (1, (1.0, 1), 1.0, False))))
"""Of all choices, the fewest whose best was the best of all on 31 jobs with failures and little, more and much memory.
The first is for much memory."""
PATIENT: tuple[tuple[ForwardOrder, float, float, float, float, float], ...] = (
    ("oldest", 0.5, 0.5, 0.5, 0.0, 0.0), ("oldest", 0.5, 0.5, 0.5, 0.5, 4.0),
    ("deepest", 0.0, 1.0, 0.0, 0.0, 0.0), ("oldest", 0.25, 0.5, 0.5, 2.0, 2.0),
    ("deepest", 0.0, 0.25, 0.0, 0.0, 0.0), ("oldest", 0.5, 0.5, 0.0, 2.0, 2.0), ("deepest", 0.25, 0.5, 0.5, 0.0, 0.0),
    ("oldest", 0.25, 0.5, 0.5, 0.0, 0.0), ("deepest", 0.0, 0.5, 0.5, 0.0, 0.0), ("oldest", 0.5, 0.5, 0.5, 2.0, 2.0),
    ("deepest", 0.5, 0.5, 0.5, 2.0, 0.0), ("oldest", 0.25, 0.5, 0.5, -1.0, 4.0),
    ("oldest", 0.0, 0.5, 0.0, 2.0, 2.0), ("oldest", 0.5, 0.5, 0.0, 0.0, 0.0), ("deepest", 0.5, 0.5, 0.0, 0.0, 0.0))
"""Of layouts: `forward_order`, `lookahead`, `fill_wait` as a share of an F, `forward_lookahead`, `advance` and
`gradient_advance` of the best rules of a grid on instances of benchmarks.layers, those that were best most often first.
"""
ADVANCES = (-4.0, -2.0, 0.0, 1.0, 2.0, 4.0)
Tell = Callable[[int], None]


class _Best:
    """The best plan so far, and the dispatch rule that random steps start from."""

    def __init__(self, problem: Problem, bound: int, deadline: float, tell: Tell,
                 stop: threading.Event) -> None:
        self.problem = problem
        self._began, self._deadline = time.monotonic(), max(deadline, time.monotonic() + 1e-9)
        self._stop = stop
        self._bound = bound
        self._tell = tell
        self._slowest = 0.0
        self._composition: Composition | None = None
        self.rule = DispatchRule()
        self.scheduler: ListScheduler | None = None
        self.rule_period: int | None = None
        """The period that the rule alone gives."""
        self.period: int | None = None
        self.found: Solution | None = None

    def offer(self, scheduler: ListScheduler, rule: DispatchRule) -> None:
        """Try a dispatch rule; keep it where it is no worse than the best so far."""
        began = time.monotonic()
        try:
            period = scheduler.period(rule)
        except StuckError:
            return
        self._compose(scheduler)
        self._slowest = max(self._slowest, time.monotonic() - began)
        if self.rule_period is not None and period > self.rule_period:
            return
        if self.period is None or period < self.period:
            self.found, self.period = scheduler.solution(), period
            self._tell(period)
        self.rule, self.scheduler, self.rule_period = rule, scheduler, period

    def _compose(self, scheduler: ListScheduler) -> None:
        """Where sets of pipelines are independent, each may have its own best rule."""
        if self.problem.routes is None or self.problem.optimizer == "synchronous":
            return
        if self._composition is None:
            self._composition = Composition(scheduler.arrays)
        if self._composition.worthwhile and self._composition.offer(scheduler.made[0]):
            period, order, start = self._composition.best()
            if self.period is None or period < self.period:
                self.found, self.period = scheduler.arrays.solution(order, start), period
                self._tell(period)

    def offer_solution(self, solution: Solution) -> None:
        """Take a plan made elsewhere if it is better."""
        period = solution_period(self.problem, solution)
        if self.period is None or period < self.period:
            self.found, self.period = solution, period
            self._tell(period)

    @property
    def spent(self) -> float:
        """Share of the time that is over, once there is a plan."""
        return 0.0 if self.period is None else (time.monotonic() - self._began) / (self._deadline - self._began)

    @property
    def closed(self) -> bool:
        """Nothing left to gain."""
        return self.period is not None and self.period <= self._bound

    @property
    def over(self) -> bool:
        """Nothing left to gain, or no time for another try, or told to stop."""
        return self.closed or (self.period is not None and (
            self._stop.is_set() or time.monotonic() + self._slowest > self._deadline))


def search(problem: Problem, bound: int, deadline: float, seed: int, tell: Tell,
           stop: threading.Event) -> tuple[Solution, int]:
    """The best of many list schedules until the deadline (a time.monotonic()) or until told to stop; at least one.

    With its period in ticks. `tell` is called with the period, in ticks, of each better one. Raises StuckError where
    all get stuck.
    """
    best = _Best(problem, bound, deadline, tell, stop)
    _try_grid(best)
    if best.found is None:
        raise StuckError
    _step_at_random(best, random.Random(seed))
    assert best.found is not None and best.period is not None
    return best.found, best.period


def _try_grid(best: _Best) -> None:
    """Every dispatch rule of the grid under every assignment, as long as there is time; and what others run."""
    problem = best.problem
    schedulers, exchanging, over = _Schedulers(problem), _can_exchange(problem), False
    grid = ((index, rule) for rule in _grid(problem) for index in range(len(ASSIGNMENT_RULES)))
    for index, rule in itertools.chain(_shortlist(problem), grid):
        if scheduler := schedulers.get(index):
            best.offer(scheduler, rule)
        if over := best.over or (exchanging and best.spent > GRID_SHARE):
            break
    if not over or (not best.closed and problem.operations <= QUICK):
        for baseline in BASELINES.values():
            with suppress(StuckError):
                best.offer_solution(baseline(problem))


class _Schedulers:
    """A list scheduler for each assignment rule, made when it is asked for: a first plan needs but one."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._made: list[ListScheduler | None] = []

    def get(self, index: int) -> ListScheduler | None:
        """The scheduler of an assignment rule; None where an earlier rule gives the same assignment."""
        while index >= len(self._made):
            self._made.append(self._new(len(self._made)))
        return self._made[index]

    def _new(self, index: int) -> ListScheduler | None:
        problem, rule = self._problem, ASSIGNMENT_RULES[index]
        if index and (problem.routes is not None or (not problem.failed and rule != "by-speed")):
            return None
        if rule == "by-speed" and not problem.unequal_time:
            return None
        hosts = assign(self._problem, ASSIGNMENT_RULES[index])
        if any(hosts == made.arrays.hosts for made in self._made if made):
            return None
        return ListScheduler(ProblemArrays(self._problem, hosts))


def _shortlist(problem: Problem) -> Iterator[tuple[int, DispatchRule]]:
    """(assignment rule, dispatch rule): what the fill bound says, then what comes close to the grid's best."""
    if fill := whole_fill(problem):
        wait = tuple(ticks + 1 for ticks in fill.idle)
        for lookahead in (0.0, 1.0, 0.5):
            yield 0, DispatchRule(fill_wait=wait, lookahead=lookahead)
    if problem.routes is not None:
        for order, before, first, after, advance, gradient_advance in PATIENT:
            yield 0, DispatchRule(forward_order=order, lookahead=before, fill_wait=shares_of_forward(problem, first),
                                  forward_lookahead=after, advance=advance, gradient_advance=gradient_advance)
    for assignment, limits, lookahead, make_room in SHORTLIST:
        rule = DispatchRule(ignore_transfers=True)
        if limits is not None:
            slope, extra = limits
            rule = DispatchRule(
                lookahead=lookahead, forward_lookahead=float(slope == 2.0 and not extra),
                make_room=make_room and problem.memory is not None and problem.backward == "split",
                in_flight=in_flight(problem, slope, extra))
        if problem.routes is None and problem.unequal_time:
            yield ASSIGNMENT_RULES.index("by-speed"), rule
        yield 0 if problem.routes is not None else assignment, rule


def _grid(problem: Problem) -> Iterator[DispatchRule]:
    """Dispatch rules that are the best somewhere; those that most often are come first."""
    rooms = (False, True) if problem.memory and problem.backward == "split" else (False,)
    orders: tuple[ForwardOrder, ...] = get_args(ForwardOrder)
    turns: tuple[Rerouted, ...] = ("in turn", "first") if problem.failed else ("in turn",)
    for ignore, order, room, rerouted in itertools.product((True, False), orders, rooms, turns):
        yield DispatchRule(forward_order=order, ignore_transfers=ignore, make_room=room, rerouted=rerouted)
    modes = ((False, 0.0), (False, 1.0), (True, 0.0))
    for slope, extra, lookahead, (ignore, forward_lookahead), room in itertools.product(
            (1.0, 2.0, 1.5, 0.75, 1.25, 0.5, 3.0), (0, 1, 2), (0.0, 0.5, 1.0), modes, rooms):
        yield DispatchRule(lookahead=lookahead, forward_lookahead=forward_lookahead, ignore_transfers=ignore,
                           make_room=room, in_flight=in_flight(problem, slope, extra))


def _step_at_random(best: _Best, random: random.Random) -> None:
    """Change the best dispatch rule or assignment a little, again and again; keep what is no worse."""
    if best.scheduler is None:  # what others run does not get stuck, ours does
        return
    ops = best.problem.operations
    for _ in range(min(MOST_STEPS, max(FEWEST_STEPS, OPS_PER_SEARCH // ops))):
        if best.over:
            return
        if _can_exchange(best.problem) and random.random() < ASSIGNMENT_STEPS:
            best.offer(ListScheduler(_exchanged(best.scheduler.arrays, random)), best.rule)
        else:
            best.offer(best.scheduler, _changed(best.problem, best.rule, random))


def _can_exchange(problem: Problem) -> bool:
    """Whether other assignments are worth a try: with one broken pipeline they are much the same."""
    return problem.routes is None and len({worker.pipeline for worker in problem.failed}) > 1


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
    changed = arrays.ops.worker.copy()
    for units in chosen:  # by pipeline, then micro-batch
        workers = changed[units].tolist()
        if not neighbours:
            random.shuffle(workers)
        for place in range(len(workers) - 1 if neighbours else 0):
            if random.random() < 0.5:
                workers[place:place + 2] = reversed(workers[place:place + 2])
        changed[units] = workers
    return arrays.assigned(changed)


def _changed(problem: Problem, rule: DispatchRule, random: random.Random) -> DispatchRule:
    """A neighbour: other limits on some stages, or another lookahead, or blind to transfers or not."""
    stages = len(problem.grid.stages)
    what = random.random()
    if what < 0.15:
        return msgspec.structs.replace(rule, lookahead=random.choice((0.0, 0.25, 0.5, 0.75, 1.0)))
    if what < 0.25:
        return msgspec.structs.replace(rule, ignore_transfers=not rule.ignore_transfers)
    if what < 0.35:
        share = random.choice((0.0, 0.25, 0.5, 0.75, 1.0))
        if random.random() < 0.5:
            return msgspec.structs.replace(rule, forward_lookahead=share)
        return msgspec.structs.replace(rule, fill_wait=shares_of_forward(problem, share))
    if what < 0.4:
        return msgspec.structs.replace(rule, make_room=not rule.make_room)
    if what < 0.6 and problem.routes is not None:
        if random.random() < 0.5:
            return msgspec.structs.replace(rule, advance=random.choice(ADVANCES))
        return msgspec.structs.replace(rule, gradient_advance=random.choice(ADVANCES))
    if what < 0.43 and problem.failed:
        return msgspec.structs.replace(rule, rerouted=random.choice(get_args(Rerouted)))
    if what < 0.5 and problem.failed:
        return msgspec.structs.replace(rule, load_share=random.choice((0.0, 0.5, 1.0, 1.5, 2.0)))
    limits = list(rule.in_flight or in_flight(problem, 2.0, 0))
    first = random.randrange(stages)
    step = random.choice((-2, -1, 1, 2))
    for stage in range(first, random.randrange(first, stages) + 1):
        limits[stage] = max(1, limits[stage] + step)
    return msgspec.structs.replace(rule, in_flight=tuple(limits))
