"""Candidates: where they come from, and the best solution of each so far."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from slipstream.planner.budget import SearchEnd
from slipstream.planner.model import assemble
from slipstream.planner.model.arrays import Solution
from slipstream.planner.model.bounds import strongest_bound
from slipstream.planner.model.decompose import Piece, decompose
from slipstream.planner.model.problem import Bound, Problem
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.params import DEFAULTS, PieceParams
from slipstream.schedules.schedule import Schedule


class Incumbent(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """A candidate: the pieces of a problem, the best solution of each so far, and the proven bound; of the best one in
    the end, how the search went.

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
    moved: int = 0
    """Memory of the layers that workers receive; where the job gives no weights, their number."""
    orders: int = 0
    """That annealing tried in its last turn for the piece that was critical in the end;"""
    stale: float = 0.0
    """the share of them since its last better plan;"""
    cycles: int = 0
    """cooling cycles it went through;"""
    gained: float = 0.0
    """seconds by which the plan became shorter."""
    ran: str = ""
    """Of the best when the search is over: what really was tried, in words; what others run has its name."""
    end: SearchEnd = SearchEnd.BOUND
    """Why the search ended."""
    evidence: str = ""
    """What is likely to leave a gap, or nothing."""
    fixed_period: float | None = None
    """Seconds: the best period found with layers in place, where they move in this one."""

    @property
    def seconds(self) -> float:
        """Its period."""
        return self.period * self.problem.tick_seconds

    @property
    def rank(self) -> tuple[float, int, int]:
        """The less the better: of equal periods, the one for which less is moved, and then that with fewer ops."""
        return self.seconds, self.moved, self.problem.operations

    def expected(self, again: float) -> tuple[float, int, int]:
        """As `rank`, of the period that is expected of more annealing, which gains again what it gained in its last
        turn so often."""
        return max(0.0, self.seconds - again * self.gained), *self.rank[1:]

    @property
    def operations(self) -> int:
        """Compute ops of all pieces, each once, however many pipelines are like it."""
        return sum(piece.problem.operations for piece in self.pieces)

    @property
    def open(self) -> bool:
        """Whether a better plan may exist."""
        return self.period > self.bound.ticks

    def target(self, index: int) -> int:
        """The period below which a piece need not go: the bound, or those of the others."""
        return max([self.bound.ticks, *self.periods[:index], *self.periods[index + 1:]])

    def with_solutions(self, solutions: Sequence[Solution], periods: Sequence[int],
                       deadlines: Sequence[int] | None = None) -> "Incumbent":
        """Other solutions of all pieces, with the period of each; on one clock where they have these deadlines."""
        whole = periods[0] if len(self.pieces) == 1 else \
            assemble.period(self.problem, solutions, deadlines)
        return msgspec.structs.replace(self, solutions=tuple(solutions), periods=tuple(periods), period=whole,
                                       deadlines=deadlines)

    def with_piece(self, index: int, solution: Solution, period: int) -> "Incumbent":
        """Another solution of one piece, on a clock of its own, unless the whole is longer with it."""
        solutions, periods = list(self.solutions), list(self.periods)
        solutions[index], periods[index] = solution, period
        found = self.with_solutions(solutions, periods)
        return found if found.period <= self.period else self

    def schedule(self, method: str = "") -> Schedule:
        """Its schedule, with the bound; made by this method, by default by what was tried."""
        return assemble.build_schedule(self.problem, list(zip(self.pieces, self.solutions, strict=True)),
                                       method=method or self.ran, bound=self.bound, deadlines=self.deadlines)


class Solved(msgspec.Struct, frozen=True, eq=False):
    """A piece and its best solution, of a search that is over."""

    problem: Problem
    solution: Solution
    period: int


def with_solved(known: Incumbent, solved: Sequence[Solved]) -> Incumbent:
    """The candidate with what is known of its pieces, where that is shorter."""
    for index, piece in enumerate(known.pieces):
        for one in solved:
            if one.period < known.periods[index] and one.problem == piece.problem:
                known = known.with_piece(index, one.solution, one.period)
    return known


def divided(problem: Problem, bound: Bound | None = None, *, shedding: bool = True, moved: int = 0,
            params: PieceParams = DEFAULTS.pieces) -> Incumbent:
    """The pieces, with a bound; by default, the strongest that is proven. `moved`: see `Incumbent`.

    Where live workers have equal time, each keeps its own micro-batches: a choice of hosts for all of them widens the
    search more than it gains (measured: with it, plans of benchmarks.quality with capacity S were up to 4 % longer).
    With `shedding` and few micro-batches, live workers of stages that have lost one may hand on theirs.
    """
    few = max(problem.grid.microbatches) < params.few * problem.grid.depth
    searched = problem if problem.unequal_time or problem.assigned else \
        msgspec.structs.replace(problem, sharing=False, shedding=shedding and few and problem.sharing)
    return Incumbent(problem=problem, pieces=decompose(searched, params), bound=bound or strongest_bound(problem),
                     moved=moved)


def ordered(problem: Problem, pieces: Sequence[Piece], order: Callable[[Problem], Solution], bound: Bound | None = None,
            ran: str = "") -> Incumbent:
    """The solutions that a rule makes of these pieces, each by itself."""
    solutions = [order(piece.problem) for piece in pieces]
    return Incumbent(problem=problem, pieces=tuple(pieces), bound=bound or Bound(0, problem.scope), ran=ran) \
        .with_solutions(solutions, [solution_period(solution) for solution in solutions])


# --- What a search may choose from ------------------------------------------------------------------------------------


Layouts = Callable[[float], Iterator[Incumbent]]
"""Candidates, the most promising first, without solutions; each is made when it is asked for. Called with
`largest_fine`: see `planner.layout.candidates`. Raises LookupError where there is none."""


class Proposals(msgspec.Struct, frozen=True, kw_only=True):
    """Of one question. Alone, a problem is its only candidate."""

    first: Problem | None
    """With layers in place; None where that has no plan."""
    bound: Bound | None = None
    """In its ticks, where it must hold for the layouts, too."""
    layouts: Layouts | None = None
    units: int = 0
    """Micro-batches at stages."""
    moving: bool = False
    """Whether layers may move."""
