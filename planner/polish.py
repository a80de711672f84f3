"""Anneal the pieces of a job: always the one that keeps the others waiting."""

import threading
import time
from collections.abc import Sequence
from types import ModuleType

import msgspec

from planner.anneal import Annealer
from planner.dense import solution_period
from planner.problem import Problem
from planner.report import Report
from planner.solution import Solution


class Polished(msgspec.Struct, frozen=True):
    """What annealing came to."""

    solutions: list[Solution]
    steps: int
    """Orders tried for the piece that is critical in the end."""
    stale: float
    """Share of them since its last better plan."""


def polish(kernel: ModuleType, problems: Sequence[Problem], solutions: Sequence[Solution], *, goal: int,
           deadline: float, seed: int, cycles: int | None, report: Report, stop: threading.Event) -> Polished:
    """Solutions no worse than those given, after some cooling cycles of every critical piece, or at the deadline.

    `goal` is the period that no plan of the whole can beat.
    """
    pieces = [_Piece(kernel, problem, solution, goal, seed)
              for problem, solution in zip(problems, solutions, strict=True)]
    tick = problems[0].tick_seconds
    told = max(piece.period for piece in pieces)
    slowest = 0.0
    while not stop.is_set() and time.monotonic() + slowest < deadline:
        worst = max(piece.period for piece in pieces)
        # Of several that are equally long, each in turn: all must become shorter.
        piece = min((piece for piece in pieces if piece.period == worst), key=lambda piece: piece.slices)
        if worst <= goal or (cycles is not None and piece.cycles >= cycles):
            break
        if worst < told:
            report(f"annealing: period {worst * tick:g} s, bound {goal * tick:g} s")
            told = worst
        began = time.monotonic()
        piece.run()
        slowest = max(slowest, time.monotonic() - began)
    last = max(pieces, key=lambda piece: (piece.period, piece.slices))
    return Polished([piece.solution() for piece in pieces], last.steps,
                    1 - last.better / last.slices if last.slices else 0.0)


class _Piece:
    """A piece, and its annealing once it is the critical one."""

    def __init__(self, kernel: ModuleType, problem: Problem, solution: Solution, goal: int, seed: int) -> None:
        self.slices = self.better = 0
        """Slices of annealing, and which of them found the last better plan."""
        self.period = solution_period(problem, solution)
        self._start = (kernel, problem, solution, goal, seed)
        self._annealer: Annealer | None = None

    @property
    def cycles(self) -> int:
        """Cooling cycles done."""
        return self._annealer.cycles if self._annealer else 0

    def run(self) -> None:
        """One slice of annealing."""
        if self._annealer is None:
            self._annealer = Annealer(*self._start)
        self._annealer.run()
        self.slices += 1
        if self._annealer.period < self.period:
            self.period, self.better = self._annealer.period, self.slices

    @property
    def steps(self) -> int:
        """Steps of annealing."""
        return self._annealer.steps if self._annealer else 0

    def solution(self) -> Solution:
        """The best found, or the one given."""
        _, problem, given, _, _ = self._start
        if self._annealer is None or self._annealer.period >= solution_period(problem, given):
            return given
        return self._annealer.solution()
