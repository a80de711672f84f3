"""Anneal the pieces of a job: always the one that keeps the others waiting, on two cores where there are two."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import msgspec

from planner.model.problem import Problem
from planner.model.solution import Solution
from planner.progress import Report
from planner.search.anneal import Annealer

CHAINS = 2
"""Annealings of one piece side by side: the compiled loops leave the interpreter to others meanwhile.

Always as many, so that the plan does not depend on the machine.
"""


class Polished(msgspec.Struct, frozen=True):
    """What annealing came to."""

    solutions: list[Solution]
    """On one clock."""
    deadlines: list[int]
    """On the same clock, when all pieces must have done their compute ops, by column."""
    steps: int
    """Orders tried for the piece that is critical in the end."""
    stale: float
    """Share of them since its last better plan."""
    cycles: int
    """Cooling cycles it went through."""


def polish(kernel: ModuleType, problems: Sequence[Problem], solutions: Sequence[Solution], *, goal: int,
           deadline: float, seed: int, cycles: int | None, report: Report, stop: threading.Event) -> Polished:
    """Solutions no worse than those given, after some cooling cycles of every critical piece, or at the deadline.

    `goal` is the period that no plan of the whole can beat.
    """
    crew = _Crew([_Piece(kernel, problem, solution, goal, seed)
                  for problem, solution in zip(problems, solutions, strict=True)])
    tick = problems[0].tick_seconds
    told, slowest = crew.period, 0.0
    with ThreadPoolExecutor(CHAINS - 1) as others:
        while not stop.is_set() and time.monotonic() + slowest < deadline and crew.period > goal:
            began = time.monotonic()
            first, *rest = crew.chains(goal)
            if cycles is not None and first.cycles >= cycles:
                break
            running = [others.submit(chain.run) for chain in rest]
            first.run()
            for chain in running:
                chain.result()
            crew.settle()
            slowest = max(slowest, time.monotonic() - began)
            if crew.period < told:
                told = crew.period
                report(f"annealing: period {told * tick:g} s, bound {goal * tick:g} s")
    return crew.result()


class _Piece:
    """A piece and its chains of annealing."""

    def __init__(self, kernel: ModuleType, problem: Problem, solution: Solution, goal: int, seed: int) -> None:
        self.rounds = self.better = 0
        """Rounds of annealing, and which of them found the last better plan."""
        self._kernel, self._problem, self._start, self._goal, self._seed = kernel, problem, solution, goal, seed
        self.chains: list[Annealer] = []
        self.chain(0)
        self.period = self.best.period

    @property
    def healthy(self) -> bool:
        """Whether no worker is down."""
        return not self._problem.failed

    @property
    def best(self) -> Annealer:
        """The chain with the best plan."""
        return min(self.chains, key=lambda chain: chain.period)

    @property
    def cycles(self) -> int:
        """Cooling cycles done."""
        return self.chains[0].cycles

    def chain(self, number: int) -> Annealer:
        """A chain, begun when it is first asked for."""
        if number == len(self.chains):
            made = Annealer(self._kernel, self._problem, self._start, self._goal, self._seed * CHAINS + number)
            if self.chains:
                made.take(self.best)
            self.chains.append(made)
        return self.chains[number]

    def keep(self, deadlines: Sequence[int]) -> None:
        """From now on keep these deadlines."""
        for chain in self.chains:
            chain.keep(deadlines)
        self.period = self.best.period

    def settle(self) -> None:
        """After a round: who has done a cycle goes on from the best plan of all."""
        self.rounds += 1
        best = self.best
        for chain in self.chains:
            if chain.fresh and chain.period > best.period:
                chain.take(best)
        if best.period < self.period:
            self.period, self.better = best.period, self.rounds


class _Crew:
    """The pieces, which must all keep the same deadlines.

    Where all but one are single healthy pipelines, which have time to spare, that one may shift the deadlines.
    """

    def __init__(self, pieces: list[_Piece]) -> None:
        self.pieces = pieces
        self._busy: list[_Piece] = []
        self._lead: _Piece | None = None
        if len(pieces) == 1:
            self._lead = pieces[0]
            return
        leads = sorted(pieces, key=lambda piece: (piece.healthy, -piece.period))
        choice = [piece.best.deadlines for piece in leads]
        periods = []
        for deadlines in choice:
            self._keep(deadlines, pieces)
            periods.append(self.period)
        best = periods.index(min(periods))
        self._keep(choice[best], pieces)
        if all(piece.healthy for piece in leads[1:]) and best == 0 and leads[0].period == self.period:
            self._lead = leads[0]
            leads[0].chains[0].loosen()

    @staticmethod
    def _keep(deadlines: Sequence[int], pieces: Sequence[_Piece]) -> None:
        for piece in pieces:
            piece.keep(deadlines)

    @property
    def period(self) -> int:
        """Of the whole."""
        return max(piece.period for piece in self.pieces)

    def chains(self, goal: int) -> list[Annealer]:
        """What to anneal next: the longest piece, and beside it the next one if that is nearly as long."""
        order = sorted(self.pieces, key=lambda piece: (-piece.period, piece.rounds))
        self._busy = order[:1]
        if len(order) > 1 and 2 * order[1].period > order[0].period + goal:
            self._busy = order[:CHAINS]
            return [piece.chain(0) for piece in self._busy]
        return [order[0].chain(number) for number in range(CHAINS)]

    def settle(self) -> None:
        """After a round."""
        for piece in self._busy:
            piece.settle()
        if self._lead is None or len(self.pieces) == 1:
            return
        if self._busy != [self._lead]:  # others must be able to rely on the deadlines
            self._keep(self._lead.best.deadlines, self.pieces)
            self._lead = None
        else:
            self._keep(self._lead.best.deadlines, [piece for piece in self.pieces if piece is not self._lead])

    def result(self) -> Polished:
        """The best plans found."""
        deadlines = max(self.pieces, key=lambda piece: piece.period).best.deadlines
        last = max(self.pieces, key=lambda piece: (piece.period, piece.rounds))
        stale = 1 - last.better / last.rounds if last.rounds else 0.0
        return Polished([piece.best.solution() for piece in self.pieces], deadlines,
                        sum(chain.steps for chain in last.chains), stale, last.cycles)
