"""The best that a search has found so far, passed from step to step."""

from collections.abc import Sequence

import msgspec

from slipstream.planner.bound import Bound
from slipstream.planner.model import assemble
from slipstream.planner.model.decompose import Piece
from slipstream.planner.model.problem import Problem
from slipstream.planner.model.solution import Solution
from slipstream.schedules.scope import Scope


class AnnealingEffort(msgspec.Struct, frozen=True):
    """How hard annealing has looked for a better plan of the piece that is critical."""

    steps: int
    """Orders tried."""
    stale: float
    """Share of them since the last better plan."""
    cycles: int
    """Cooling cycles."""


class Incumbent(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A candidate: the pieces of a problem, the best solution of each so far, and the proven bound.

    Periods are in ticks.
    """

    problem: Problem
    pieces: tuple[Piece, ...]
    bound: Bound
    """No plan of the whole has a shorter period."""
    solutions: tuple[Solution, ...] = ()
    """By piece; empty until the list schedules are made."""
    periods: tuple[int, ...] = ()
    """Of each piece by itself."""
    period: int = 0
    """Of the whole, its pieces on one clock: may be longer than theirs."""
    deadlines: Sequence[int] | None = None
    """Where annealing has put all pieces on one clock: when their compute ops must be done, by column."""
    annealing: AnnealingEffort | None = None
    moved: int = 0
    """Memory of the layers that workers receive; where the job gives no weights, their number."""
    least: Bound = Bound(0, Scope.ORDER)
    """No order of its routes has a shorter period (`planner.model.layout_bound`)."""
    gained: float = 0.0
    """Seconds, by annealing in its last turn."""

    @property
    def seconds(self) -> float:
        """Its period."""
        return self.period * self.problem.tick_seconds

    @property
    def least_seconds(self) -> float:
        """What no order of its routes is shorter than."""
        return self.least.ticks * self.problem.tick_seconds

    @property
    def rank(self) -> tuple[float, int, int]:
        """The less the better: of equal periods, the one for which less is moved, and then that with fewer ops."""
        return self.seconds, self.moved, self.problem.operations

    def expected(self, again: float) -> tuple[float, int, int]:
        """As `rank`, of the period that is expected of more annealing, which gains again what it gained in its last
        turn so often: no less than its own bound."""
        least = min(self.seconds, self.least_seconds)
        return max(least, self.seconds - again * self.gained), *self.rank[1:]

    @property
    def operations(self) -> int:
        """Compute ops of all pieces, each once, however many pipelines are like it."""
        return sum(piece.problem.operations for piece in self.pieces)

    @property
    def open(self) -> bool:
        """Whether a better plan may exist."""
        return self.period > self.bound.ticks

    @property
    def longest(self) -> int:
        """The number of the first piece with the longest period."""
        return self.periods.index(max(self.periods))

    def target(self, index: int) -> int:
        """The period below which a piece need not go: the bound, or those of the others."""
        return max([self.bound.ticks, *self.periods[:index], *self.periods[index + 1:]])

    def with_solutions(self, solutions: Sequence[Solution], periods: Sequence[int],
                       deadlines: Sequence[int] | None = None) -> "Incumbent":
        """Other solutions of all pieces, with the period of each; on one clock where they have these deadlines."""
        whole = periods[0] if len(self.pieces) == 1 else \
            assemble.period(self.problem, list(zip(self.pieces, solutions, strict=True)), deadlines)
        return msgspec.structs.replace(self, solutions=tuple(solutions), periods=tuple(periods), period=whole,
                                       deadlines=deadlines)

    def with_piece(self, index: int, solution: Solution, period: int) -> "Incumbent":
        """Another solution of one piece, on a clock of its own, unless the whole is longer with it."""
        solutions, periods = list(self.solutions), list(self.periods)
        solutions[index], periods[index] = solution, period
        found = self.with_solutions(solutions, periods)
        return found if found.period <= self.period else self
