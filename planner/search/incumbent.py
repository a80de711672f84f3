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
    """Candidate of a search: a problem with its subproblems, their best solutions and a bound.

    The fields from `orders` on record the course of the search.
    """

    problem: Problem
    pieces: tuple[Piece, ...]
    bound: Bound
    """Proven lower bound on the period of the whole problem."""
    solutions: tuple[Solution, ...] = ()
    """Best solution of each subproblem so far; empty before the list schedules are made."""
    periods: tuple[int, ...] = ()
    """Period, in ticks, of each subproblem's best solution."""
    period: int = 0
    """Period of the whole problem, in ticks; it may exceed each of `periods`."""
    deadlines: Sequence[int] | None = None
    """Ticks by which groups must end compute, if annealing set them; else None.

    If `Problem.anneals_reductions`, they are the ticks at which reductions begin instead.
    With deadlines, the start ticks of all solutions are on the same clock.
    """
    moved: int = 0
    """Memory units of the layers that workers receive; their number if weights are unknown."""
    orders: int = 0
    """Number of orders that the last annealing tried for its longest subproblem."""
    stale: float = 0.0
    """Share of the last annealing's rounds after its last improvement."""
    cycles: int = 0
    """Number of cooling cycles of the last annealing."""
    gained: float = 0.0
    """Seconds by which the last annealing shortened the plan."""
    ran: str = ""
    """Techniques that the search used, in words, or the name of its method."""
    end: SearchEnd = SearchEnd.BOUND
    """Reason why the search ended; set for the best candidate only."""
    evidence: str = ""
    """Words that explain a period above the bound; empty for a baseline method.

    They are set without a gap, too, and mean nothing then.
    """
    fixed_period: float | None = None
    """Period in seconds of the best candidate in place.

    None if there is none, or if no layers move.
    """

    @property
    def period_seconds(self) -> float:
        """Period of the whole problem, in seconds."""
        return self.period * self.problem.tick_seconds

    @property
    def rank(self) -> tuple[float, int, int]:
        """Key that sorts the best first: period in seconds, memory of moved layers, ops."""
        return self.period_seconds, self.moved, self.problem.operation_count

    def expected_rank(self, again: float) -> tuple[float, int, int]:
        """Return the `rank` expected after more annealing.

        That annealing is assumed to gain `again` times the seconds that the last one gained.
        """
        return max(0.0, self.period_seconds - again * self.gained), *self.rank[1:]

    @property
    def operation_count(self) -> int:
        """Number of compute ops of all subproblems; of equal ones, only one counts."""
        return sum(piece.problem.operation_count for piece in self.pieces)

    @property
    def can_improve(self) -> bool:
        """True if the period is above the proven bound: a shorter plan may exist."""
        return self.period > self.bound.ticks

    def target_period(self, index: int) -> int:
        """Return the period, in ticks, below which shortening subproblem `index` gains nothing.

        This is the bound or, if longer, the longest period of another subproblem.
        """
        return max([self.bound.ticks, *self.periods[:index], *self.periods[index + 1 :]])

    def with_solutions(
        self,
        solutions: Sequence[Solution],
        periods: Sequence[int],
        deadlines: Sequence[int] | None = None,
    ) -> "Incumbent":
        """Return a copy of the candidate with other solutions, and their periods in ticks.

        If given, `deadlines` has the tick by which each group must end compute (or at which each
        reduction begins, if `Problem.anneals_reductions`), and the start ticks of all solutions are
        on its clock. None: the copy has no deadlines.
        """
        # Subproblems share reductions, and so a clock: together they can take longer than alone.
        whole = periods[0]
        if len(self.pieces) > 1:
            whole = assemble.compute_period(self.problem, solutions, deadlines)
        return msgspec.structs.replace(
            self,
            solutions=tuple(solutions),
            periods=tuple(periods),
            period=whole,
            deadlines=deadlines,
        )

    def with_piece(self, index: int, solution: Solution, period: int) -> "Incumbent":
        """Return a copy in which subproblem `index` has another solution with this period.

        The period is in ticks; the copy has no deadlines. If the period of the whole would get
        longer, returns `self` instead.
        """
        solutions, periods = list(self.solutions), list(self.periods)
        solutions[index], periods[index] = solution, period
        candidate = self.with_solutions(solutions, periods)
        return candidate if candidate.period <= self.period else self

    def make_schedule(self, method: str = "") -> Schedule:
        """Build the schedule, which records the bound and `method`, or `ran` if that is empty."""
        return assemble.build_schedule(
            self.problem,
            list(zip(self.pieces, self.solutions, strict=True)),
            method=method or self.ran,
            bound=self.bound,
            deadlines=self.deadlines,
        )


class SolvedPiece(msgspec.Struct, frozen=True, eq=False):
    """Subproblem with its best solution and period in ticks, from a search that has ended."""

    problem: Problem
    solution: Solution
    period: int


def with_solved_pieces(candidate: Incumbent, solved: Sequence[SolvedPiece]) -> Incumbent:
    """Return a copy of the candidate with shorter solutions of equal subproblems in `solved`."""
    for index, piece in enumerate(candidate.pieces):
        for earlier in solved:
            if earlier.period < candidate.periods[index] and earlier.problem == piece.problem:
                candidate = candidate.with_piece(index, earlier.solution, earlier.period)
    return candidate


def divide_problem(
    problem: Problem,
    bound: Bound | None = None,
    *,
    shedding: bool = True,
    moved: int = 0,
    params: PieceParams = DEFAULTS.pieces,
) -> Incumbent:
    """Divide a problem into subproblems; return a candidate without solutions.

    In the subproblems, live workers run all micro-batches of their own pipelines, and only those of
    workers that are down or lack room may go to any peer. If live workers of a stage would then
    take different times, or if the problem has a layout, the subproblems have the freedom of the
    problem instead.

    Parameters
    ----------
    problem
        Problem to divide.
    bound
        Lower bound on the period of the candidate; None: the strongest proven one.
    shedding
        Whether, with few micro-batches, live workers of a stage that lost a worker may shed their
        own, too.
    moved
        Memory units of the layers that workers receive for the candidate; their number if the job
        states no weights.
    params
        Parameters of the division.
    """
    few = max(problem.grid.microbatches) < params.few * problem.grid.depth
    searched = problem
    # A free choice for all widens the search more than it gains: in benchmarks.quality, with memory
    # for as many activations as there are stages, plans became up to 4 % longer.
    if not problem.has_unequal_time and not problem.assigned:
        searched = msgspec.structs.replace(
            problem, sharing=False, shedding=shedding and few and problem.sharing
        )
    return Incumbent(
        problem=problem,
        pieces=decompose(searched, params),
        bound=bound or strongest_bound(problem),
        moved=moved,
    )


def order_pieces(
    problem: Problem,
    pieces: Sequence[Piece],
    order: Callable[[Problem], Solution],
    bound: Bound | None = None,
    ran: str = "",
) -> Incumbent:
    """Return a candidate whose subproblems are solved one by one, by the function `order`.

    Parameters
    ----------
    problem
        Problem of the whole.
    pieces
        Its subproblems.
    order
        Function that solves a subproblem; its errors pass.
    bound
        Lower bound on the period of the whole; None: 0.
    ran
        Name of the method.
    """
    solutions = [order(piece.problem) for piece in pieces]
    return Incumbent(
        problem=problem, pieces=tuple(pieces), bound=bound or Bound(0, problem.bound_scope), ran=ran
    ).with_solutions(solutions, [solution_period(solution) for solution in solutions])


def join_pieces(candidate: Incumbent) -> Incumbent:
    """Return a copy of the candidate whose only subproblem is the whole problem.

    The plan stays the same. Layers must be in place.
    """
    problem, hosts = candidate.problem, dict[Unit, Worker]()
    starts, keys = dict[OpKey, int](), list[OpKey]()
    # Each copy of a subproblem runs its ops under the names of the whole.
    aligned = assemble.align_pieces(problem, candidate.solutions, candidate.deadlines)
    for piece, solution in zip(candidate.pieces, aligned, strict=True):
        for copy in piece.copies:
            for (kind, *numbers), start in solution.start_by_key.items():
                part = Unit(*numbers)
                batch = piece.original_microbatch(copy, part.pipeline, part.microbatch)
                unit = Unit(part.slice, *batch)
                host = solution.hosts[part]
                hosts[unit] = Worker(copy[host.pipeline], host.column)
                key = OpKey(kind, *unit)
                starts[key] = start
                keys.append(key)
    # Ops in the order of the subproblems, which have no worker in common.
    arrays = ProblemArrays(problem, hosts)
    number = {key: op for op, key in enumerate(arrays.iterate_op_keys())}
    order = to_ints([number[key] for key in keys])
    joined = arrays.make_solution(order, to_ints([starts[key] for key in number]))
    return msgspec.structs.replace(candidate, pieces=(make_whole_piece(problem),)).with_solutions(
        [joined], [solution_period(joined)]
    )


# --- What a search may choose from ----------------------------------------------------------------


LayoutSource = Callable[[float], Iterator[Incumbent]]
"""Function that yields a candidate without solutions for each layout, the most promising first.

Candidates are made on demand. The argument is the largest number of slices of all micro-batches
for which layouts with short slices are made. The iterator raises LookupError if there are none.
"""


class CandidateSource(msgspec.Struct, frozen=True, kw_only=True):
    """Source of a search's candidates: the problem in place, and other layouts if allowed."""

    first: Problem | None
    """Problem with layers in place; None if it is no candidate."""
    bound: Bound | None = None
    """Lower bound for all candidates, in ticks of `first`; None: the strongest of `first`."""
    layouts: LayoutSource | None = None
    """Source of the other layouts; None if `first` is the only candidate."""
    layered: Problem | None = None
    """Problem of single layers from which layouts are made; None if no layouts are allowed."""
    layered_bound: Bound | None = None
    """Lower bound, in ticks of `layered`, for all layouts; None if no layouts are allowed."""
    units: int = 0
    """Number of micro-batches times stages, to estimate the time that a layout takes."""
    moving: bool = False
    """True if layers may move in the layouts."""
