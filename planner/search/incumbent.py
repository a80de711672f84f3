"""Candidates: where they come from, the best solution of each so far, and what is known of the gap that is left."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from slipstream.planner.budget import Clock
from slipstream.planner.model import assemble
from slipstream.planner.model.bounds import strongest_bound
from slipstream.planner.model.decompose import Piece, decompose
from slipstream.planner.model.problem import Bound, Problem, Solution


class Annealed(msgspec.Struct, frozen=True):
    """What annealing came to."""

    solutions: Sequence[Solution]
    """On one clock."""
    deadlines: Sequence[int]
    """On the same clock, when all pieces must have done their compute ops, by column."""
    steps: int
    """Orders tried for the piece that is critical in the end."""
    stale: float
    """Share of them since its last better plan."""
    cycles: int
    """Cooling cycles it went through."""


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
    annealed: Annealed | None = None
    """The last that annealing came to."""
    moved: int = 0
    """Memory of the layers that workers receive; where the job gives no weights, their number."""
    gained: float = 0.0
    """Seconds, by annealing in its last turn."""

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


FEW = 2
"""Micro-batches for each stage below which one more of them on a worker delays all of its pipeline's others."""


def divided(problem: Problem, bound: Bound | None = None, *, shedding: bool = True, moved: int = 0) -> Incumbent:
    """The pieces, with a bound; by default, the strongest that is proven. `moved`: see `Incumbent`.

    Where live workers have equal time, each keeps its own micro-batches: a choice of hosts for all of them widens the
    search more than it gains (measured: with it, plans of benchmarks.quality with capacity S were up to 4 % longer).
    With `shedding` and few micro-batches, live workers of stages that have lost one may hand on theirs.
    """
    few = max(problem.grid.microbatches) < FEW * problem.grid.depth
    searched = problem if problem.unequal_time or problem.assigned else \
        msgspec.structs.replace(problem, sharing=False, shedding=shedding and few and problem.sharing)
    return Incumbent(problem=problem, pieces=decompose(searched), bound=bound or strongest_bound(problem), moved=moved)


# --- Where the period is above the bound: whether more time is likely to help -----------------------------------------


STALE = 0.5
"""Share of annealing without a better plan from which on more of it hardly helps."""
FEWEST_CYCLES = 3
"""Cooling cycles without which the plan is the likely cause of a gap."""


def evidence(known: Incumbent, clock: Clock, seconds: float) -> str:
    """How hard a better plan was looked for in so many seconds, whether more time may help, and what the bound counts.
    """
    bound = f"the bound counts {known.bound.counts}"
    if known.annealed is None or not known.annealed.steps:
        return f"only list schedules were tried, and a longer search may find a better plan; {bound}"
    steps, stale = known.annealed.steps, known.annealed.stale
    tried = f"{steps:,} orders were tried"
    if stale > STALE and known.annealed.cycles >= FEWEST_CYCLES:
        return f"no improvement for the last {clock.described(stale * seconds)} ({tried}): this is probably close to " \
               f"the best, and the bound a little low; {bound}"
    return f"still improving when the time was up ({tried}): try 5 times the limit; {bound}"


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
