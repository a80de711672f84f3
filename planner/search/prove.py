"""CP-SAT improves small pieces, and proves them optimal."""

import msgspec

from slipstream.planner.bound import Bound
from slipstream.planner.budget import Budget
from slipstream.planner.model.problem import Problem
from slipstream.planner.params import CpSatParams
from slipstream.planner.search.incumbent import Incumbent
from slipstream.schedules.scope import Scope


def provable(known: Incumbent, params: CpSatParams) -> list[int]:
    """The numbers of the pieces that are small enough. CP-SAT knows layers held by column only."""
    return [index for index, piece in enumerate(known.pieces)
            if piece.problem.routes is None and _options(piece.problem) <= params.largest_proof]


def prove(known: Incumbent, budget: Budget, params: CpSatParams) -> Incumbent:
    """Better solutions of small pieces, the longest first, and perhaps a better bound."""
    for index in sorted(provable(known, params), key=known.periods.__getitem__, reverse=True):
        if known.periods[index] > known.target(index) and not budget.stopped:
            known = _prove_piece(known, index, budget.share(params.proof_share), params)
    return known


def _prove_piece(known: Incumbent, index: int, budget: Budget, params: CpSatParams) -> Incumbent:
    from slipstream.planner.search.cpsat.model import improve  # the solver takes a third of a second to load

    problem, period, target = _asked(known, index, params), known.periods[index], known.target(index)

    def report(ticks: int) -> None:
        if ticks < period and len(known.pieces) == 1:  # the hint itself is no news
            budget.progress.found("CP-SAT", ticks * problem.tick_seconds, known.bound.ticks * problem.tick_seconds)

    result = improve(problem, known.solutions[index], lower_bound=target, budget=budget, progress=report)
    budget.tally.add("CP-SAT: from the best plan", helped=int(result.period_ticks < period))
    found = known
    if result.period_ticks < period:
        found = found.with_piece(index, result.solution, result.period_ticks)
    proven = Bound(result.lower_bound_ticks, Scope.STAGES if problem.sharing else Scope.OWN, "what CP-SAT proved")
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
    return shared if len(known.pieces) == 1 and _options(shared) <= params.largest_proof else problem


def _options(problem: Problem) -> int:
    """Compute ops, counted once per possible host."""
    return sum(len(problem.hosts(unit.slice, unit.pipeline)) for unit in problem.units()) * len(problem.kinds)
