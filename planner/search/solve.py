"""From a problem to the best solution found in the time given: bounds, list schedulers, annealing, CP-SAT."""

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal, get_args

import msgspec

from planner.interrupt import interruptible
from planner.model.bounds import lower_bound, strongest_bound
from planner.model.decompose import Piece, decompose, undivided
from planner.model.problem import Problem
from planner.model.solution import Solution
from planner.model.start_times import solution_period
from planner.progress import Report
from planner.search.anneal_pieces import Polished, polish
from planner.search.baselines import BASELINES
from planner.search.compiled import annealing
from planner.search.cpsat.finder import Finder
from planner.search.list_search import search

Method = Literal["cp-sat", "greedy", "1f1b", "recycle"]
METHODS: tuple[Method, ...] = get_args(Method)
LARGEST_MODEL = 1500
"""Compute ops, counted once per possible host, up to which CP-SAT proves more than annealing gains."""
LARGEST_MODEL_ALONE = 20_000
"""The same while annealing is not compiled yet."""
LARGEST_BASELINE = 200_000
"""Compute ops up to which a baseline deals the micro-batches of the dead among all pipelines, not in groups."""
STALE = 0.5
"""Share of annealing without a better plan from which on more of it hardly helps."""
FEWEST_CYCLES = 3
"""Cooling cycles without which the plan is the likely cause of a gap."""
FINISH_SECONDS, FINISH_SHARE = 15e-6, 0.4
"""What is set aside to put a plan together and check it: seconds for each op, at most this share of the time."""
SEARCH_SHARE, FIND_SHARE, PROOF_SHARE = 0.3, 0.6, 0.6
"""Shares of the time that list schedulers may take, when more follows; that CP-SAT then has of the rest to look for a
plan of its own, beside the annealing; and of the rest of that, to prove a plan optimal."""
LARGEST_FIND, MOST_MICROBATCHES = 4000, 12
"""Compute ops, and micro-batches of a pipeline, up to which CP-SAT finds plans that annealing does not."""


class Solved(msgspec.Struct, frozen=True):
    """The solved pieces of a problem, with the bound proven on the way."""

    pieces: Sequence[tuple[Piece, Solution]]
    lower_bound_ticks: int
    interrupted: bool = False
    deadlines: Sequence[int] | None = None
    """Where all pieces are on one clock: when their compute ops must be done, by column."""
    evidence: str = ""
    """What the bound counts, how hard a better plan was looked for, and so which of them leaves a gap."""


def solve(problem: Problem, method: Method, deadline: float, seed: int, report: Report,
          stop: threading.Event | None = None) -> Solved:
    """The best that the method finds until the deadline (a time.monotonic()), or until `stop` is set.

    Without `stop`, Ctrl-C ends the search.
    """
    if stop is None:
        with interruptible() as event:
            return solve(problem, method, deadline, seed, report, event)
    if method in BASELINES:
        return _baseline(problem, method, stop)
    effort = _Effort(problem, deadline, seed, report, stop)
    effort.list_schedules(SEARCH_SHARE if method == "cp-sat" else 1.0)
    if method == "cp-sat":
        effort.improve()
    return Solved(list(zip(effort.pieces, effort.solutions, strict=True)), effort.proven, stop.is_set(),
                  effort.deadlines, effort.evidence())


def _baseline(problem: Problem, method: str, stop: threading.Event) -> Solved:
    divide = not problem.failed or problem.operations > LARGEST_BASELINE
    pieces = decompose(problem) if divide else (undivided(problem),)
    return Solved([(piece, BASELINES[method](piece.problem)) for piece in pieces], lower_bound(problem), stop.is_set())


class _Effort:
    """The pieces of a problem, and the best solution of each so far."""

    def __init__(self, problem: Problem, deadline: float, seed: int, report: Report, stop: threading.Event) -> None:
        self.pieces = decompose(problem)
        self.solutions: list[Solution] = []
        self._periods: list[int] = []
        self.proven, self._counts = strongest_bound(problem)
        self._annealed: Polished | None = None
        self.deadlines: Sequence[int] | None = None
        self._tick = problem.tick_seconds
        ops = sum(piece.problem.operations for piece in self.pieces)
        self._deadline = deadline - min(FINISH_SHARE * (deadline - time.monotonic()), FINISH_SECONDS * ops)
        self._seed = seed
        self._report = report
        self._stop = stop

    def list_schedules(self, share: float) -> None:
        """A solution for every piece. What one cannot avoid, the others need not beat.

        The smallest pieces first: so better periods of the largest ones are those of the whole.
        """
        target, told = self.proven, 2**62
        until = time.monotonic() + share * (self._deadline - time.monotonic())
        order = sorted(range(len(self.pieces)), key=lambda index: _work(self.pieces[index]))
        found: dict[int, tuple[Solution, int]] = {}

        def tell(period: int) -> None:
            nonlocal told
            if len(found) == len(order) - 1 and max(longest, period) < told:
                told = max(longest, period)
                self._report(f"list scheduler: period {told * self._tick:g} s, bound {self.proven * self._tick:g} s")

        longest = 0
        for number, index in enumerate(order):
            piece = self.pieces[index]
            part = _work(piece) / sum(_work(self.pieces[other]) for other in order[number:])
            now = time.monotonic()
            found[index] = search(piece.problem, target, now + part * (until - now), self._seed, tell, self._stop)
            longest = max(longest, found[index][1])
            target = max(target, longest)
        self.solutions = [found[index][0] for index in range(len(order))]
        self._periods = [found[index][1] for index in range(len(order))]

    def improve(self) -> None:
        """Anneal what is critical; have CP-SAT prove small pieces optimal."""
        kernel = annealing()
        largest = LARGEST_MODEL if kernel else LARGEST_MODEL_ALONE
        exact = [index for index, piece in enumerate(self.pieces) if _options(piece.problem) <= largest]
        with self._finder() or nullcontext() as finder:
            if kernel and self._open:
                # All of the time where CP-SAT has nothing to do; else just enough for a good hint.
                self._polish(finder.deadline if finder else self._deadline, cycles=3 if exact else None)
            if finder:
                self._take(finder)
        for index in sorted(exact, key=self._periods.__getitem__, reverse=True):
            self._solve_exactly(index, PROOF_SHARE if kernel else 1.0)
        if kernel and self._open and (exact or finder):
            self._polish(self._deadline, cycles=None)

    def _finder(self) -> Finder | None:
        """CP-SAT at work on the longest piece, if it is of a kind where that pays."""
        index = self._periods.index(max(self._periods))
        problem, counts = self.pieces[index].problem, self.pieces[index].problem.grid.microbatches
        if not self._open or not problem.failed or problem.operations > LARGEST_FIND or max(counts) > MOST_MICROBATCHES:
            return None
        now = time.monotonic()
        return Finder(problem, self._periods[index] - 1, lower_bound=self._target(index),
                      deadline=now + FIND_SHARE * (self._deadline - now), seed=self._seed)

    def _take(self, finder: Finder) -> None:
        """Go on from the finder's plan where it is the better one."""
        found = finder.result(self._stop, wanted=self._open)
        index = next(index for index, piece in enumerate(self.pieces) if piece.problem is finder.problem)
        if found and (period := solution_period(finder.problem, found)) < self._periods[index]:
            self.solutions[index], self._periods[index], self.deadlines = found, period, None
            self._report(f"CP-SAT: period {max(self._periods) * self._tick:g} s")

    def _target(self, index: int) -> int:
        """The period below which a piece need not go: the bound, or those of the others."""
        return max([self.proven, *self._periods[:index], *self._periods[index + 1:]])

    @property
    def _open(self) -> bool:
        return max(self._periods) > self.proven and not self._stop.is_set()

    def _polish(self, deadline: float, cycles: int | None) -> None:
        kernel = annealing()
        assert kernel is not None
        self._annealed = polish(kernel, [piece.problem for piece in self.pieces], self.solutions, goal=self.proven,
                                deadline=deadline, seed=self._seed, cycles=cycles, report=self._report,
                                stop=self._stop)
        self.solutions, self.deadlines = self._annealed.solutions, self._annealed.deadlines
        self._periods = [solution_period(piece.problem, solution)
                         for piece, solution in zip(self.pieces, self.solutions, strict=True)]

    def evidence(self) -> str:
        """Which of plan and bound leaves a gap, and why that is likely."""
        bound = f"the bound counts {self._counts}"
        if self._annealed is None or not self._annealed.steps:
            return f"{bound}; the plan is the best of list schedules only, so look for the gap there"
        steps, stale = self._annealed.steps, self._annealed.stale
        found = f"{steps:,} orders were tried, the last {stale:.0%} of them without a better plan"
        settled = stale > STALE and self._annealed.cycles >= FEWEST_CYCLES
        blamed = "the gap is likely the bound's, unless a better plan differs in many orders at once" if settled else \
            "the gap is likely the plan's: more time may help"
        return f"{bound}; {found}: {blamed}"

    def _solve_exactly(self, index: int, share: float) -> None:
        """Let CP-SAT work on a piece unless it is good enough already."""
        problem = self.pieces[index].problem
        target, period = self._target(index), self._periods[index]
        if period <= target or self._stop.is_set():
            return
        from planner.search.cpsat.model import improve  # the solver takes a third of a second to load

        def tell(ticks: int) -> None:
            if ticks < period:  # the hint itself is no news
                self._report(f"CP-SAT: period {ticks * self._tick:g} s")

        now = time.monotonic()
        result = improve(problem, self.solutions[index], lower_bound=target, deadline=now + share *
                         (self._deadline - now), seed=self._seed, report=tell, stop=self._stop)
        if result.period_ticks < period:
            self.solutions[index], self._periods[index], self.deadlines = result.solution, result.period_ticks, None
        if target == self.proven and (len(self.pieces) == 1 or not problem.failed):
            # Without the ops of others, its workers in any plan of the whole run a plan of this piece.
            if result.lower_bound_ticks > self.proven:
                self._counts = "what CP-SAT proved"
            self.proven = result.lower_bound_ticks


def _work(piece: Piece) -> int:
    """Roughly what a piece takes to solve."""
    return piece.problem.operations


def _options(problem: Problem) -> int:
    """Compute ops, counted once per possible host."""
    return sum(len(problem.hosts(unit.stage, unit.pipeline)) for unit in problem.units()) * len(problem.kinds)
