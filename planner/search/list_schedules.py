"""Many list schedules, the best kept: first a grid of policies, then random steps from the best one."""

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import get_args

import msgspec

from planner.model.arrays import Dense, solution_period
from planner.model.problem import Problem
from planner.model.solution import Solution
from planner.search.assignment import DEALINGS, deal
from planner.search.baselines import BASELINES
from planner.search.compiled import listing
from planner.search.compiled_lister import CompiledLister, Lister, lister
from planner.search.list_scheduler import ForwardOrder, Guests, Policy, in_flight

OPS_PER_SEARCH, OPS_COMPILED = 600_000, 20_000_000
"""Ops that all random steps together may schedule; counted, not timed, so that the same seed gives the same plan."""
QUICK = 20_000
"""Compute ops that take a list scheduler no time worth mentioning."""
FEWEST_STEPS, MOST_STEPS = 8, 1000

SHORTLIST: tuple[tuple[int, tuple[float, int] | None, float, bool], ...] = (
    (0, (2.0, 0), 0.0, False), (1, (1.5, 0), 0.5, True), (1, None, 0.0, False), (0, (1.0, 0), 1.0, True),
    (0, (1.25, 0), 0.0, False), (1, (1.0, 0), 0.5, True), (0, (2.0, 1), 0.0, False), (1, (1.25, 1), 0.5, True),
    (0, (1.5, 0), 0.5, False), (0, (1.25, 0), 0.5, False), (1, (1.0, 2), 0.5, True), (0, (1.0, 2), 1.0, True),
    (1, (2.0, 0), 0.0, False), (1, (1.0, 1), 1.0, False))
"""(dealing, (slope, extra) of the limits in flight, patience, room): of all pairs of the grid and the dealings, the
fewest whose best was the best of all on 31 jobs with failures and little, more and much memory. The first is for much.
"""
Tell = Callable[[int], None]


class _Best:
    """The best order so far, and the policy that made it."""

    def __init__(self, problem: Problem, bound: int, deadline: float, tell: Tell,
                 stop: threading.Event) -> None:
        self.problem = problem
        self._deadline = deadline
        self._stop = stop
        self._bound = bound
        self._tell = tell
        self._slowest = 0.0
        self.policy = Policy()
        self.lister: Lister | None = None
        self.period: int | None = None
        self.found: Solution | None = None

    def offer(self, lister: Lister, policy: Policy) -> bool:
        """Try a policy; whether it is better than, or as good as, the best so far."""
        began = time.monotonic()
        period = lister.period(policy)
        self._slowest = max(self._slowest, time.monotonic() - began)
        if self.period is not None and period > self.period:
            return False
        if self.period is None or period < self.period:
            self.found = lister.solution()
            self._tell(period)
        self.policy, self.lister, self.period = policy, lister, period
        return True

    def offer_solution(self, solution: Solution) -> None:
        """Take a plan made elsewhere if it is better."""
        period = solution_period(self.problem, solution)
        if self.period is None or period < self.period:
            self.found, self.period = solution, period
            self._tell(period)

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

    With its period in ticks.
    `tell` hears the period, in ticks, of each better one.
    """
    best = _Best(problem, bound, deadline, tell, stop)
    _try_grid(best)
    _step_at_random(best, random.Random(seed))
    assert best.found is not None and best.period is not None
    return best.found, best.period


def _try_grid(best: _Best) -> None:
    """Every policy of the grid under every dealing, as long as there is time; and what others run."""
    problem = best.problem
    listers = _Listers(problem)
    for index, policy in _shortlist(problem):
        made = listers.get(index)
        if made:
            best.offer(made, policy)
        if best.over:
            break
    for policy in _grid(problem) if not best.over else ():
        for index in range(len(DEALINGS)):
            made = listers.get(index)
            if made:
                best.offer(made, policy)
            if best.over:
                break
        if best.over:
            break
    if not best.over or (not best.closed and problem.operations <= QUICK):
        for baseline in BASELINES.values():
            best.offer_solution(baseline(problem))


class _Listers:
    """A list scheduler for each dealing, made when it is asked for: a first plan needs but one."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._made: list[Lister | None] = []

    def get(self, index: int) -> Lister | None:
        """That of a dealing; None where it deals as another one before."""
        while index >= len(self._made):
            number = len(self._made)
            hosts = deal(self._problem, DEALINGS[number]) if number == 0 or self._problem.failed else None
            known = [made.dense.hosts for made in self._made if made]
            new = hosts is not None and hosts not in known
            self._made.append(lister(listing(), Dense(self._problem, hosts)) if new and hosts is not None else None)
        return self._made[index]


def _shortlist(problem: Problem) -> Iterator[tuple[int, Policy]]:
    """(dealing, policy) pairs of the grid that together come close to the best of it."""
    for dealing, limits, patience, room in SHORTLIST:
        if limits is None:
            yield dealing, Policy(ignore_transfers=True)
            continue
        slope, extra = limits
        yield dealing, Policy(patience=patience, forward_patience=float(slope == 2.0 and not extra),
                              make_room=room and problem.memory is not None and problem.backward == "split",
                              in_flight=in_flight(problem, slope, extra))


def _grid(problem: Problem) -> Iterator[Policy]:
    """Policies that are the best somewhere; those that most often are come first."""
    rooms = (False, True) if problem.memory and problem.backward == "split" else (False,)
    orders: tuple[ForwardOrder, ...] = get_args(ForwardOrder)
    turns: tuple[Guests, ...] = ("in turn", "first") if problem.failed else ("in turn",)
    for ignore, order, room, guests in itertools.product((True, False), orders, rooms, turns):
        yield Policy(forward_order=order, ignore_transfers=ignore, make_room=room, guests=guests)
    modes = ((False, 0.0), (False, 1.0), (True, 0.0))
    for slope, extra, patience, (ignore, forward_patience), room in itertools.product(
            (1.0, 2.0, 1.5, 0.75, 1.25, 0.5, 3.0), (0, 1, 2), (0.0, 0.5, 1.0), modes, rooms):
        yield Policy(patience=patience, forward_patience=forward_patience, ignore_transfers=ignore, make_room=room,
                     in_flight=in_flight(problem, slope, extra))


def _step_at_random(best: _Best, random: random.Random) -> None:
    """Change the best policy a little, again and again; keep what is no worse."""
    assert best.lister is not None
    ops = len(best.lister.dense.length)
    budget = OPS_COMPILED if isinstance(best.lister, CompiledLister) else OPS_PER_SEARCH
    for _ in range(min(MOST_STEPS, max(FEWEST_STEPS, budget // ops))):
        if best.over:
            return
        best.offer(best.lister, _changed(best.problem, best.policy, random))


def _changed(problem: Problem, policy: Policy, random: random.Random) -> Policy:
    """A neighbour: other limits on some stages, or another patience, or blind to transfers or not."""
    stages = len(problem.grid.stages)
    what = random.random()
    if what < 0.15:
        return msgspec.structs.replace(policy, patience=random.choice((0.0, 0.25, 0.5, 0.75, 1.0)))
    if what < 0.25:
        return msgspec.structs.replace(policy, ignore_transfers=not policy.ignore_transfers)
    if what < 0.35:
        return msgspec.structs.replace(policy, forward_patience=random.choice((0.0, 0.25, 0.5, 0.75, 1.0)))
    if what < 0.4:
        return msgspec.structs.replace(policy, make_room=not policy.make_room)
    if what < 0.43 and problem.failed:
        return msgspec.structs.replace(policy, guests=random.choice(get_args(Guests)))
    if what < 0.5 and problem.failed:
        return msgspec.structs.replace(policy, load_share=random.choice((0.0, 0.5, 1.0, 1.5, 2.0)))
    limits = list(policy.in_flight or in_flight(problem, 2.0, 0))
    first = random.randrange(stages)
    step = random.choice((-2, -1, 1, 2))
    for stage in range(first, random.randrange(first, stages) + 1):
        limits[stage] = max(1, limits[stage] + step)
    return msgspec.structs.replace(policy, in_flight=tuple(limits))
