"""Improve candidates by list schedules and by annealing, and small subproblems by CP-SAT."""

import msgspec

from slipstream.planner.budget import Budget, Clock
from slipstream.planner.model.arrays import Solution
from slipstream.planner.model.assumptions import is_provable_by_search, pieces_are_independent
from slipstream.planner.model.problem import Bound, Problem
from slipstream.planner.params import (
    DEFAULTS,
    AnnealingParams,
    CpSatParams,
    ListParams,
    SearchParams,
)
from slipstream.planner.search.incumbent import Incumbent, join_pieces
from slipstream.planner.search.list_search import search_list_schedules
from slipstream.schedules.schedule import Scope

# --- List schedules -------------------------------------------------------------------------------


def improve_by_list_schedules(
    candidate: Incumbent,
    budget: Budget,
    params: ListParams = DEFAULTS.lists,
    steps: int | None = None,
) -> Incumbent:
    """Try many list schedules of each subproblem; return the candidate with the best of each.

    Its plan may be longer than before. At most `steps` random changes of the rules are tried for
    each subproblem (None: `most_steps` of `params`). The search for a subproblem ends once its
    period is no longer than the bound or the longest of the smaller subproblems before it. Raises
    StuckError if all schedules of a subproblem get stuck.
    """
    # A subproblem's period says little about the whole: of several, only the whole is reported.
    improved = _search_each_piece(
        candidate, budget, params, params.most_steps if steps is None else steps
    )
    if len(candidate.pieces) > 1:
        _report_period("list scheduler", improved.period, candidate, budget)
    return improved


def _report_period(method: str, period: int, candidate: Incumbent, budget: Budget) -> None:
    seconds, bound = (
        ticks * candidate.problem.tick_seconds for ticks in (period, candidate.bound.ticks)
    )
    budget.progress.report_plan(method, seconds, bound)


def _search_each_piece(
    candidate: Incumbent, budget: Budget, params: ListParams, steps: int
) -> Incumbent:
    # Small ones first, each with a share of the time by its ops.
    sizes = [piece.problem.operation_count for piece in candidate.pieces]
    order = sorted(range(len(sizes)), key=sizes.__getitem__)
    results: dict[int, tuple[Solution, int]] = {}
    longest = 0

    def report(period: int) -> None:
        if len(order) == 1:
            _report_period("list scheduler", period, candidate, budget)

    for number, index in enumerate(order):
        problem = candidate.pieces[index].problem
        remaining = sum(sizes[other] for other in order[number:])
        piece_budget = budget.with_share(sizes[index] / remaining)
        results[index] = search_list_schedules(
            problem,
            max(candidate.bound.ticks, longest),
            piece_budget,
            params,
            steps,
            report,
        )
        longest = max(longest, results[index][1])
    solutions, periods = zip(*(results[index] for index in range(len(order))), strict=True)
    return candidate.with_solutions(solutions, periods)


# --- Annealing, and CP-SAT ------------------------------------------------------------------------


def improve_by_annealing(
    candidate: Incumbent,
    budget: Budget,
    params: AnnealingParams = DEFAULTS.annealing,
    cycles: int | None = None,
) -> Incumbent:
    """Anneal for `cycles` cooling cycles (None: no limit); return the best candidate.

    Annealing ends before that at the bound, or with the budget. Return `candidate` itself if its
    period is at the bound, or if too little time is left to begin.
    """
    begin = params.begin_seconds * candidate.operation_count
    if budget.end_reason(candidate.period, candidate.bound.ticks, begin):
        return candidate
    # Numba takes a third of a second to load.
    from slipstream.planner.search.annealing import anneal_pieces

    best = candidate

    def report_if_better(annealed: Incumbent) -> None:
        nonlocal best
        if annealed.period < best.period:
            best = annealed
            _report_period("annealing", annealed.period, candidate, budget)

    # Joined subproblems may have been shorter earlier than at the end.
    last = anneal_pieces(candidate, budget, params, cycles, report_if_better)
    report_if_better(last)
    if not last.orders:
        return best
    return msgspec.structs.replace(best, orders=last.orders, stale=last.stale, cycles=last.cycles)


def find_provable_pieces(candidate: Incumbent, params: CpSatParams) -> list[int]:
    """Return the indices of the subproblems that CP-SAT may solve: small, layers in place."""
    return [
        index
        for index, piece in enumerate(candidate.pieces)
        if is_provable_by_search(piece.problem)
        and piece.problem.host_operation_count <= params.largest_proof
    ]


def improve_by_cpsat(candidate: Incumbent, budget: Budget, params: CpSatParams) -> Incumbent:
    """Improve the small subproblems by CP-SAT, longest first; return the candidate.

    The bound of the result may be larger, too.
    """
    # A subproblem that is shorter than another need not be improved.
    for index in sorted(
        find_provable_pieces(candidate, params), key=candidate.periods.__getitem__, reverse=True
    ):
        if candidate.periods[index] > candidate.target_period(index) and not budget.is_stopped:
            candidate = _prove_piece(
                candidate, index, budget.with_share(params.proof_share), params
            )
    return candidate


def _prove_piece(
    candidate: Incumbent, index: int, budget: Budget, params: CpSatParams
) -> Incumbent:
    from slipstream.planner.search import cpsat  # the solver takes a third of a second to load

    problem = _proof_problem(candidate, index, params)
    period, target = candidate.periods[index], candidate.target_period(index)

    def report(ticks: int) -> None:
        if ticks < period and len(candidate.pieces) == 1:  # the hint itself is not reported
            _report_period("CP-SAT", ticks, candidate, budget)

    solution, after, bound = cpsat.improve_solution(
        problem,
        candidate.solutions[index],
        lower_bound=target,
        budget=budget,
        progress=report,
        params=params,
    )
    budget.tally.count_uses("CP-SAT: from the best plan", helped=int(after < period))
    improved = candidate.with_piece(index, solution, after) if after < period else candidate
    # The bound of a subproblem holds for the whole if it was searched down to the whole's bound.
    proven = Bound(bound, Scope.STAGES if problem.sharing else Scope.OWN, cpsat.BOUND_DESCRIPTION)
    alone = len(candidate.pieces) == 1 or pieces_are_independent(problem)
    if proven.scope is candidate.bound.scope and target == candidate.bound.ticks and alone:
        improved = msgspec.structs.replace(improved, bound=candidate.bound | proven)
    return improved


def _proof_problem(candidate: Incumbent, index: int, params: CpSatParams) -> Problem:
    # A single small subproblem gets the freedom of the whole, so that its bound holds there.
    problem = candidate.pieces[index].problem
    shared = msgspec.structs.replace(problem, sharing=candidate.problem.sharing)
    is_small = len(candidate.pieces) == 1 and shared.host_operation_count <= params.largest_proof
    return shared if is_small else problem


def improve_candidate(candidate: Incumbent, budget: Budget, params: SearchParams) -> Incumbent:
    """Anneal a candidate until bound or budget ends it; return the best candidate.

    If some subproblems are small enough, CP-SAT improves them after a short annealing.
    """
    if not find_provable_pieces(candidate, params.cp_sat):
        return improve_by_annealing(candidate, budget, params.annealing)
    # A short annealing for CP-SAT's hint, then each subproblem, then all as one.
    candidate = improve_by_annealing(candidate, budget, params.annealing, params.cp_sat.hint_cycles)
    candidate = improve_by_cpsat(candidate, budget, params.cp_sat)
    if (
        len(candidate.pieces) > 1
        and candidate.can_improve
        and candidate.problem.sharing
        and candidate.problem.host_operation_count <= params.cp_sat.largest_proof
    ):
        joined = improve_by_cpsat(join_pieces(candidate), budget, params.cp_sat)
        if joined.period < candidate.period or joined.bound.ticks > candidate.bound.ticks:
            candidate = joined
    return improve_by_annealing(candidate, budget, params.annealing)


# --- Where the period is above the bound: whether more time is likely to help ---------------------


STALE_SHARE = 0.5
"""Fraction of a search without improvement from which on more time hardly helps."""
MIN_CYCLES = 3
"""Number of cooling cycles after which a gap is probably due to the bound."""


def describe_gap(candidate: Incumbent, clock: Clock, seconds: float) -> str:
    """Return words that explain why a candidate's period is above the proven bound.

    They suppose that it is. They say whether a longer search may find a better plan, and what the
    bound counts. The search took `seconds` of `clock`, which measures time or counts steps.
    """
    # The longer a search has found nothing, the likelier is the gap one of the bound.
    bound = f"the bound counts {candidate.bound.counts}"
    if not candidate.orders:
        return (
            f"only list schedules were tried, and a longer search may find a better plan; {bound}"
        )
    tried = f"{candidate.orders:,} orders were tried"
    if candidate.stale > STALE_SHARE and candidate.cycles >= MIN_CYCLES:
        duration = clock.format_duration(candidate.stale * seconds)
        return (
            f"no improvement for the last {duration} ({tried}): this is "
            f"probably close to the best, and the bound a little low; {bound}"
        )
    return (
        f"the plan was still improving when the search ended ({tried}): try 5 times the limit; "
        f"{bound}"
    )
