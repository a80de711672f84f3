"""Candidates: where they come from, the best solution of each so far, and how it is improved: by list schedules, by
annealing, small pieces proven optimal by CP-SAT."""

from collections.abc import Callable, Iterator, Sequence

import msgspec

from slipstream.planner.budget import Budget, Clock, End
from slipstream.planner.model import assemble
from slipstream.planner.model.arrays import Solution
from slipstream.planner.model.bounds import strongest_bound
from slipstream.planner.model.decompose import Piece, decompose
from slipstream.planner.model.problem import Bound, Problem
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.params import DEFAULTS, AnnealingParams, CpSatParams, ListParams, PieceParams, SearchParams
from slipstream.planner.search.list_search import search
from slipstream.schedules.schedule import Schedule, Scope


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
    end: End = End.BOUND
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


# --- List schedules ---------------------------------------------------------------------------------------------------


def list_schedules(known: Incumbent, budget: Budget, params: ListParams = DEFAULTS.lists,
                   steps: int | None = None) -> Incumbent:
    """The best of many list schedules of each piece. No piece need be shorter than the longest one.

    Where the period of a piece is not that of the whole, only the latter is reported, in the end. `steps`: at random,
    of each piece at most.
    """
    found = _each_alone(known, budget, params, params.most_steps if steps is None else steps)
    if len(known.pieces) > 1:
        _report("list scheduler", found.period, known, budget)
    return found


def _report(method: str, period: int, known: Incumbent, budget: Budget) -> None:
    seconds, bound = (ticks * known.problem.tick_seconds for ticks in (period, known.bound.ticks))
    budget.progress.found(method, seconds, bound)


def _each_alone(known: Incumbent, budget: Budget, params: ListParams, steps: int) -> Incumbent:
    order = sorted(range(len(known.pieces)), key=lambda index: known.pieces[index].problem.operations)
    found: dict[int, tuple[Solution, int]] = {}
    longest = 0
    for number, index in enumerate(order):
        problem = known.pieces[index].problem
        left = sum(known.pieces[other].problem.operations for other in order[number:])
        part = budget.share(problem.operations / left)
        found[index] = search(
            problem, max(known.bound.ticks, longest), part, params, steps,
            lambda period: _report("list scheduler", period, known, budget) if len(order) == 1 else None)
        longest = max(longest, found[index][1])
    solutions, periods = zip(*(found[index] for index in range(len(order))), strict=True)
    return known.with_solutions(solutions, periods)


# --- Annealing, and CP-SAT --------------------------------------------------------------------------------------------


def anneal(known: Incumbent, budget: Budget, params: AnnealingParams = DEFAULTS.annealing,
           cycles: int | None = None) -> Incumbent:
    """Better solutions, after so many cooling cycles of every critical piece; None: for all of the time."""
    begin = params.begin_seconds * known.operations
    if budget.end(known.period, known.bound.ticks, begin):
        return known
    from slipstream.planner.search.annealing import anneal_pieces  # numba takes a third of a second to load

    best = known

    def tell(made: Incumbent) -> None:
        nonlocal best
        if made.period < best.period:
            best = made
            _report("annealing", made.period, known, budget)

    done = anneal_pieces(known, budget, params, cycles, tell)
    tell(done)
    return msgspec.structs.replace(best, orders=done.orders, stale=done.stale, cycles=done.cycles) if done.orders \
        else best


def provable(known: Incumbent, params: CpSatParams) -> list[int]:
    """The numbers of the pieces that are small enough. CP-SAT knows layers held by column only."""
    return [index for index, piece in enumerate(known.pieces)
            if not piece.problem.assigned and options(piece.problem) <= params.largest_proof]


def prove(known: Incumbent, budget: Budget, params: CpSatParams) -> Incumbent:
    """Better solutions of small pieces, the longest first, and perhaps a better bound."""
    for index in sorted(provable(known, params), key=known.periods.__getitem__, reverse=True):
        if known.periods[index] > known.target(index) and not budget.stopped:
            known = _prove_piece(known, index, budget.share(params.proof_share), params)
    return known


def _prove_piece(known: Incumbent, index: int, budget: Budget, params: CpSatParams) -> Incumbent:
    from slipstream.planner.search import cpsat  # the solver takes a third of a second to load

    problem, period, target = _asked(known, index, params), known.periods[index], known.target(index)

    def report(ticks: int) -> None:
        if ticks < period and len(known.pieces) == 1:  # the hint itself is no news
            _report("CP-SAT", ticks, known, budget)

    solution, after, bound = cpsat.improve(problem, known.solutions[index], lower_bound=target, budget=budget,
                                           progress=report, params=params)
    budget.tally.add("CP-SAT: from the best plan", helped=int(after < period))
    found = known.with_piece(index, solution, after) if after < period else known
    proven = Bound(bound, Scope.STAGES if problem.sharing else Scope.OWN, cpsat.PROVED)
    # Its workers in any plan of the whole run a plan of this piece, if the ops of others are left out. Unless some of
    # theirs might go to workers of other pieces.
    alone = len(known.pieces) == 1 or not (problem.sharing or problem.failed)
    if proven.scope is known.bound.scope and target == known.bound.ticks and alone:
        found = msgspec.structs.replace(found, bound=known.bound | proven)
    return found


def _asked(known: Incumbent, index: int, params: CpSatParams) -> Problem:
    """The problem of a piece: with any choice of hosts that the whole allows, where that is small enough."""
    problem = known.pieces[index].problem
    shared = msgspec.structs.replace(problem, sharing=known.problem.sharing)
    return shared if len(known.pieces) == 1 and options(shared) <= params.largest_proof else problem


def options(problem: Problem) -> int:
    """Compute ops, counted once per possible host."""
    return sum(len(problem.hosts(unit.slice, unit.pipeline)) for unit in problem.units()) * len(problem.kinds)


def improve(known: Incumbent, budget: Budget, params: SearchParams) -> Incumbent:
    """Annealing; of what is small enough a little, then CP-SAT from the best so far, and annealing for the rest."""
    if not provable(known, params.cp_sat):
        return anneal(known, budget, params.annealing)
    known = anneal(known, budget, params.annealing, params.cp_sat.hint_cycles)
    return anneal(prove(known, budget, params.cp_sat), budget, params.annealing)


# --- Where the period is above the bound: whether more time is likely to help -----------------------------------------


STALE = 0.5
"""Share of annealing without a better plan from which on more of it hardly helps."""
FEWEST_CYCLES = 3
"""Cooling cycles without which the plan is the likely cause of a gap."""


def evidence(known: Incumbent, clock: Clock, seconds: float) -> str:
    """How hard a better plan was looked for in so many seconds, whether more time may help, and what the bound counts.
    """
    bound = f"the bound counts {known.bound.counts}"
    if not known.orders:
        return f"only list schedules were tried, and a longer search may find a better plan; {bound}"
    tried = f"{known.orders:,} orders were tried"
    if known.stale > STALE and known.cycles >= FEWEST_CYCLES:
        return f"no improvement for the last {clock.described(known.stale * seconds)} ({tried}): this is probably " \
               f"close to the best, and the bound a little low; {bound}"
    return f"still improving when the time was up ({tried}): try 5 times the limit; {bound}"
