"""Improve candidates by list schedules and by annealing, and small subproblems by CP-SAT."""

import msgspec

from slipstream.planner.budget import Budget, Clock
from slipstream.planner.model.arrays import Solution
from slipstream.planner.model.assumptions import is_provable_by_search, pieces_are_independent
from slipstream.planner.model.problem import Bound, Problem
from slipstream.planner.params import DEFAULTS, AnnealingParams, CpSatParams, ListParams, SearchParams
from slipstream.planner.search.incumbent import Incumbent, join_pieces
from slipstream.planner.search.list_search import search_list_schedules
from slipstream.schedules.schedule import Scope

# --- List schedules ---------------------------------------------------------------------------------------------------


def improve_by_list_schedules(known: Incumbent, budget: Budget, params: ListParams = DEFAULTS.lists,
                              steps: int | None = None) -> Incumbent:
    """Try many list schedules of each subproblem; return the candidate with the best.

    At most `steps` dispatch rules of each subproblem are drawn at random (None: `most_steps` of
    `params`). The search for a subproblem ends when its period is at most the longest one found for
    another. If there are several subproblems, only the final period of the whole is reported as
    progress.
    """
    candidate = _search_each_piece(known, budget, params, params.most_steps if steps is None else steps)
    if len(known.pieces) > 1:
        _report_period("list scheduler", candidate.period, known, budget)
    return candidate


def _report_period(method: str, period: int, known: Incumbent, budget: Budget) -> None:
    seconds, bound = (ticks * known.problem.tick_seconds for ticks in (period, known.bound.ticks))
    budget.progress.report_plan(method, seconds, bound)


def _search_each_piece(known: Incumbent, budget: Budget, params: ListParams, steps: int) -> Incumbent:
    order = sorted(range(len(known.pieces)), key=lambda index: known.pieces[index].problem.operation_count)
    results: dict[int, tuple[Solution, int]] = {}
    longest = 0
    for number, index in enumerate(order):
        problem = known.pieces[index].problem
        remaining = sum(known.pieces[other].problem.operation_count for other in order[number:])
        piece_budget = budget.with_share(problem.operation_count / remaining)
        results[index] = search_list_schedules(
            problem, max(known.bound.ticks, longest), piece_budget, params, steps,
            lambda period: _report_period("list scheduler", period, known, budget) if len(order) == 1 else None)
        longest = max(longest, results[index][1])
    solutions, periods = zip(*(results[index] for index in range(len(order))), strict=True)
    return known.with_solutions(solutions, periods)


# --- Annealing, and CP-SAT --------------------------------------------------------------------------------------------


def improve_by_annealing(known: Incumbent, budget: Budget, params: AnnealingParams = DEFAULTS.annealing,
                         cycles: int | None = None) -> Incumbent:
    """Anneal for `cycles` (None: to the budget's end); return the candidate, no worse."""
    begin = params.begin_seconds * known.operation_count
    if budget.end_reason(known.period, known.bound.ticks, begin):
        return known
    from slipstream.planner.search.annealing import anneal_pieces  # numba takes a third of a second to load

    best = known

    def report_if_better(made: Incumbent) -> None:
        nonlocal best
        if made.period < best.period:
            best = made
            _report_period("annealing", made.period, known, budget)

    done = anneal_pieces(known, budget, params, cycles, report_if_better)
    report_if_better(done)
    return msgspec.structs.replace(best, orders=done.orders, stale=done.stale, cycles=done.cycles) if done.orders \
        else best


def find_provable_pieces(known: Incumbent, params: CpSatParams) -> list[int]:
    """Return the indices of subproblems, in place, that are small enough for CP-SAT."""
    return [index for index, piece in enumerate(known.pieces)
            if is_provable_by_search(piece.problem) and piece.problem.host_operation_count <= params.largest_proof]


def improve_by_cpsat(known: Incumbent, budget: Budget, params: CpSatParams) -> Incumbent:
    """Improve small subproblems by CP-SAT, longest first; the bound may rise."""
    for index in sorted(find_provable_pieces(known, params), key=known.periods.__getitem__, reverse=True):
        if known.periods[index] > known.target_period(index) and not budget.is_stopped:
            known = _prove_piece(known, index, budget.with_share(params.proof_share), params)
    return known


def _prove_piece(known: Incumbent, index: int, budget: Budget, params: CpSatParams) -> Incumbent:
    from slipstream.planner.search import cpsat  # the solver takes a third of a second to load

    problem, period, target = _proof_problem(known, index, params), known.periods[index], known.target_period(index)

    def report(ticks: int) -> None:
        if ticks < period and len(known.pieces) == 1:  # the hint itself is not reported
            _report_period("CP-SAT", ticks, known, budget)

    solution, after, bound = cpsat.improve_solution(problem, known.solutions[index], lower_bound=target, budget=budget,
                                                    progress=report, params=params)
    budget.tally.count_uses("CP-SAT: from the best plan", helped=int(after < period))
    candidate = known.with_piece(index, solution, after) if after < period else known
    proven = Bound(bound, Scope.STAGES if problem.sharing else Scope.OWN, cpsat.BOUND_DESCRIPTION)
    alone = len(known.pieces) == 1 or pieces_are_independent(problem)
    if proven.scope is known.bound.scope and target == known.bound.ticks and alone:
        candidate = msgspec.structs.replace(candidate, bound=known.bound | proven)
    return candidate


def _proof_problem(known: Incumbent, index: int, params: CpSatParams) -> Problem:
    """Return the problem that CP-SAT is to solve for a subproblem."""
    problem = known.pieces[index].problem
    shared = msgspec.structs.replace(problem, sharing=known.problem.sharing)
    return shared if len(known.pieces) == 1 and shared.host_operation_count <= params.largest_proof else problem


def improve_candidate(known: Incumbent, budget: Budget, params: SearchParams) -> Incumbent:
    """Anneal a candidate until the budget ends, with CP-SAT on small subproblems in between."""
    if not find_provable_pieces(known, params.cp_sat):
        return improve_by_annealing(known, budget, params.annealing)
    known = improve_by_annealing(known, budget, params.annealing, params.cp_sat.hint_cycles)
    known = improve_by_cpsat(known, budget, params.cp_sat)
    if len(known.pieces) > 1 and known.can_improve and known.problem.sharing \
            and known.problem.host_operation_count <= params.cp_sat.largest_proof:
        joined = improve_by_cpsat(join_pieces(known), budget, params.cp_sat)
        known = joined if joined.period < known.period or joined.bound.ticks > known.bound.ticks else known
    return improve_by_annealing(known, budget, params.annealing)


# --- Where the period is above the bound: whether more time is likely to help -----------------------------------------


STALE_SHARE = 0.5
"""Share of annealing without improvement, above which `describe_gap` says that more annealing
hardly helps."""
MIN_CYCLES = 3
"""Number of cooling cycles after which a gap is probably due to the bound."""


def describe_gap(known: Incumbent, clock: Clock, seconds: float) -> str:
    """Return words that explain why a candidate's period is above the proven bound.

    They say whether a longer search may find a better plan, and what the bound counts. The search
    took `seconds` on its clock.
    """
    bound = f"the bound counts {known.bound.counts}"
    if not known.orders:
        return f"only list schedules were tried, and a longer search may find a better plan; {bound}"
    tried = f"{known.orders:,} orders were tried"
    if known.stale > STALE_SHARE and known.cycles >= MIN_CYCLES:
        return f"no improvement for the last {clock.format_duration(known.stale * seconds)} ({tried}): this is " \
               f"probably close to the best, and the bound a little low; {bound}"
    return f"the plan was still improving when the search ended ({tried}): try 5 times the limit; {bound}"
