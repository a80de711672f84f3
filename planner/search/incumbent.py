"""Candidates of a search: where they come from, and the best solution found for each."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from slipstream.planner.budget import SearchEnd
from slipstream.planner.model import assemble
from slipstream.planner.model.arrays import ProblemArrays, Solution, to_ints
from slipstream.planner.model.bounds import strongest_bound
from slipstream.planner.model.decompose import Piece, decompose, make_whole_piece
from slipstream.planner.model.problem import Bound, Problem, Unit
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.params import DEFAULTS, PieceParams
from slipstream.schedules.precedence import OpKey
from slipstream.schedules.schedule import Schedule, Worker


class Incumbent(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Candidate of a search: a problem, solutions, a bound, in ticks, and the search's course."""

    problem: Problem
    pieces: tuple[Piece, ...]
    bound: Bound
    """Proven lower bound on the period of the whole problem."""
    solutions: tuple[Solution, ...] = ()
    """Best solution of each subproblem so far; empty before the list schedules are made."""
    periods: tuple[int, ...] = ()
    """Period, in ticks, of each subproblem's best solution."""
    period: int = 0
    """Ticks of the whole, which may exceed each of `periods` on one clock."""
    deadlines: Sequence[int] | None = None
    """Ticks by which groups end compute; None unless annealing put all on one clock."""
    moved: int = 0
    """Memory units of the layers that workers receive; without weights, their number."""
    orders: int = 0
    """Number of orders that the last annealing tried for the subproblem longest at its end."""
    stale: float = 0.0
    """Share of `orders` that were tried after the last improvement."""
    cycles: int = 0
    """Number of cooling cycles of the last annealing."""
    gained: float = 0.0
    """Seconds by which the last annealing shortened the plan."""
    ran: str = ""
    """Techniques that the search used, in words, or the name of the baseline method."""
    end: SearchEnd = SearchEnd.BOUND
    """Reason why the search ended; set for the best candidate only."""
    evidence: str = ""
    """Words that explain a period above the bound; empty without a gap."""
    fixed_period: float | None = None
    """Period in seconds of the best candidate in place; None if no layers move."""

    @property
    def period_seconds(self) -> float:
        """Period of the whole problem, in seconds."""
        return self.period * self.problem.tick_seconds

    @property
    def rank(self) -> tuple[float, int, int]:
        """Sort key, best first: (period in seconds, memory of moved layers, ops)."""
        return self.period_seconds, self.moved, self.problem.operation_count

    def expected_rank(self, again: float) -> tuple[float, int, int]:
        """Return `rank` if more annealing gained `again` times as much as the last."""
        return max(0.0, self.period_seconds - again * self.gained), *self.rank[1:]

    @property
    def operation_count(self) -> int:
        """Number of compute ops of all subproblems. One whose solution several sets of pipelines
        run by counts once."""
        return sum(piece.problem.operation_count for piece in self.pieces)

    @property
    def can_improve(self) -> bool:
        """True if the period is above the proven bound: a shorter plan may exist."""
        return self.period > self.bound.ticks

    def target_period(self, index: int) -> int:
        """Return a period, in ticks, below which a subproblem does not shorten the whole.

        It is the bound, or the longest period of another subproblem.
        """
        return max([self.bound.ticks, *self.periods[:index], *self.periods[index + 1:]])

    def with_solutions(self, solutions: Sequence[Solution], periods: Sequence[int],
                       deadlines: Sequence[int] | None = None) -> "Incumbent":
        """Return a copy of the candidate with other solutions, and their periods in ticks.

        If given, `deadlines` has the tick by which each group ends compute, and the start ticks of
        all solutions are on the same clock as these.
        """
        whole = periods[0] if len(self.pieces) == 1 else \
            assemble.compute_period(self.problem, solutions, deadlines)
        return msgspec.structs.replace(self, solutions=tuple(solutions), periods=tuple(periods), period=whole,
                                       deadlines=deadlines)

    def with_piece(self, index: int, solution: Solution, period: int) -> "Incumbent":
        """Return a copy with another solution, of `period` ticks, unless the whole gets longer."""
        solutions, periods = list(self.solutions), list(self.periods)
        solutions[index], periods[index] = solution, period
        candidate = self.with_solutions(solutions, periods)
        return candidate if candidate.period <= self.period else self

    def make_schedule(self, method: str = "") -> Schedule:
        """Build the schedule, with its bound and `method` or, if empty, the techniques in `ran`."""
        return assemble.build_schedule(self.problem, list(zip(self.pieces, self.solutions, strict=True)),
                                       method=method or self.ran, bound=self.bound, deadlines=self.deadlines)


class SolvedPiece(msgspec.Struct, frozen=True, eq=False):
    """Subproblem with its best solution and period, from a search that has ended."""

    problem: Problem
    solution: Solution
    period: int


def with_solved_pieces(known: Incumbent, solved: Sequence[SolvedPiece]) -> Incumbent:
    """Return a copy of the candidate with shorter solutions of equal subproblems from `solved`."""
    for index, piece in enumerate(known.pieces):
        for earlier in solved:
            if earlier.period < known.periods[index] and earlier.problem == piece.problem:
                known = known.with_piece(index, earlier.solution, earlier.period)
    return known


def divide_problem(problem: Problem, bound: Bound | None = None, *, shedding: bool = True, moved: int = 0,
                   params: PieceParams = DEFAULTS.pieces) -> Incumbent:
    """Divide a problem into subproblems, and return them as a candidate (`Incumbent`) without
    solutions.

    The candidate stores `bound`, a lower bound on its period (None: the strongest proven one), and
    `moved`, the memory units of the layers that workers receive for it (their number if the job
    gives no weights).

    In the subproblems, live workers run all micro-batches of their own pipelines, and only those of
    failed workers may go to any peer: a free choice for all widens the search more than it gains
    (measured in benchmarks.quality, with memory for as many activations as there are stages: plans
    became up to 4 % longer). A problem that allows a free choice keeps it if live workers of a
    stage would otherwise take different times. With `shedding` and few micro-batches, live workers
    of a stage that lost a worker may hand on their own, too.
    """
    few = max(problem.grid.microbatches) < params.few * problem.grid.depth
    searched = problem if problem.has_unequal_time or problem.assigned else \
        msgspec.structs.replace(problem, sharing=False, shedding=shedding and few and problem.sharing)
    return Incumbent(problem=problem, pieces=decompose(searched, params), bound=bound or strongest_bound(problem),
                     moved=moved)


def order_pieces(problem: Problem, pieces: Sequence[Piece], order: Callable[[Problem], Solution],
                 bound: Bound | None = None, ran: str = "") -> Incumbent:
    """Return a candidate in which the function `order` has solved each subproblem by itself.

    If `bound` is None, the bound is 0. `ran` is the name of the method.
    """
    solutions = [order(piece.problem) for piece in pieces]
    return Incumbent(problem=problem, pieces=tuple(pieces), bound=bound or Bound(0, problem.bound_scope), ran=ran) \
        .with_solutions(solutions, [solution_period(solution) for solution in solutions])


def join_pieces(known: Incumbent) -> Incumbent:
    """Return a copy of a candidate in place with the same plan as one solution."""
    problem, hosts, starts, keys = known.problem, dict[Unit, Worker](), dict[OpKey, int](), list[OpKey]()
    aligned = assemble.align_pieces(problem, known.solutions, known.deadlines)
    for piece, solution in zip(known.pieces, aligned, strict=True):
        for copy in piece.copies:
            for (kind, stage, *named), start in solution.start_by_key.items():
                key = kind, stage, *piece.original_microbatch(copy, *named)
                host = solution.hosts[Unit(stage, *named)]
                hosts[Unit(*key[1:])] = Worker(copy[host.pipeline], host.column)
                starts[key] = start
                keys.append(key)
    arrays = ProblemArrays(problem, hosts)
    number = {key: op for op, key in enumerate(arrays.iterate_op_keys())}
    joined = arrays.make_solution(to_ints([number[key] for key in keys]), to_ints([starts[key] for key in number]))
    return msgspec.structs.replace(known, pieces=(make_whole_piece(problem),)) \
        .with_solutions([joined], [solution_period(joined)])


# --- What a search may choose from ------------------------------------------------------------------------------------


LayoutSource = Callable[[float], Iterator[Incumbent]]
"""Function that yields a candidate without solutions for each layout.

They come on demand, the most promising first. Its argument is `largest_fine`, see
`planner.layout.candidates`. Raises LookupError if there are no candidates.
"""


class CandidateSource(msgspec.Struct, frozen=True, kw_only=True):
    """Candidates of a search: the problem in place, and a source of layouts if allowed."""

    first: Problem | None
    """Problem with layers in place; None if that has no plan."""
    bound: Bound | None = None
    """Lower bound of all candidates, in ticks of `first`; None: the strongest of `first`."""
    layouts: LayoutSource | None = None
    layered: Problem | None = None
    """Problem of single layers from which layouts are made; None if no layouts are allowed."""
    layered_bound: Bound | None = None
    """Lower bound, in ticks of `layered`, for all layouts."""
    units: int = 0
    """Number of units of the problem, to estimate the time of a layout."""
    moving: bool = False
    """True if layers may move in the layouts."""
