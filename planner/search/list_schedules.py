"""A solution of every piece of a candidate by the list schedulers."""

import contextlib

import msgspec

from slipstream.planner.budget import Budget
from slipstream.planner.model import assemble
from slipstream.planner.model.decompose import joined_pieces
from slipstream.planner.model.problem import Unit
from slipstream.planner.model.solution import Solution
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.params import DEFAULTS, ListParams
from slipstream.planner.search.incumbent import Incumbent
from slipstream.planner.search.list_scheduler import StuckError
from slipstream.planner.search.list_search import search
from slipstream.schedules.precedence import OpKey
from slipstream.schedules.schedule import Worker


def list_schedules(known: Incumbent, budget: Budget, params: ListParams = DEFAULTS.lists,
                   steps: int | None = None) -> Incumbent:
    """The best of many list schedules of each piece. No piece need be shorter than the longest one.

    Where the period of a piece is not that of the whole, only the latter is reported, in the end. Pieces of a layout
    reduce gradients at times that each would choose otherwise: as one they are ordered, and annealed, for the same
    times. `steps`: at random, of each piece at most.
    """
    steps = params.most_steps if steps is None else steps
    ops = known.operations
    join = _separate(known) and ops <= params.largest_joined
    found = _each_alone(known, budget.share(params.piece_share) if join else budget, params, steps)
    if len(known.pieces) > 1:
        _report(found.period, known, budget)
    join = join and found.open and (ops <= params.usually_joined or found.period != max(found.periods))
    join = join and (budget.seconds > 0 or ops <= params.quickly_joined)
    return _on_one_clock(found, budget, params, steps) if join else found


def on_one_clock(known: Incumbent, params: ListParams) -> Incumbent:
    """The same plan with all pieces of a layout as one, where there are several and they are not too large for that."""
    small = known.operations <= params.usually_joined
    return _as_one_piece(known) if _separate(known) and small and known.open else known


def _separate(known: Incumbent) -> bool:
    """Whether there are several pieces, of a layout, that can be put on one clock."""
    return len(known.pieces) > 1 and known.problem.assigned and known.problem.grid.chains == 1


def _report(period: int, known: Incumbent, budget: Budget) -> None:
    ticks, bound = (number * known.problem.tick_seconds for number in (period, known.bound.ticks))
    budget.progress.found("list scheduler", ticks, bound)


def _each_alone(known: Incumbent, budget: Budget, params: ListParams, steps: int) -> Incumbent:
    order = sorted(range(len(known.pieces)), key=lambda index: known.pieces[index].problem.operations)
    found: dict[int, tuple[Solution, int]] = {}
    longest = 0
    for number, index in enumerate(order):
        problem = known.pieces[index].problem
        left = sum(known.pieces[other].problem.operations for other in order[number:])
        part = budget.share(problem.operations / left)
        found[index] = search(problem, max(known.bound.ticks, longest), part, params, steps,
                              lambda period: _report(period, known, budget) if len(order) == 1 else None)
        longest = max(longest, found[index][1])
    solutions, periods = zip(*(found[index] for index in range(len(order))), strict=True)
    return known.with_solutions(solutions, periods)


def _on_one_clock(known: Incumbent, budget: Budget, params: ListParams, steps: int) -> Incumbent:
    """All pieces as one, with the better of their own plans and of list schedules of the whole."""
    best = _as_one_piece(known)
    if budget.seconds <= 0:
        return best
    with contextlib.suppress(StuckError):
        other, ticks = search(best.pieces[0].problem, known.bound.ticks, budget, params, steps)
        found = best.with_solutions([other], [ticks])
        if found.period < best.period:
            best = found
            _report(best.period, known, budget)
    return best


def _as_one_piece(known: Incumbent) -> Incumbent:
    """All pieces as one, with their own plans."""
    piece, solution = joined_pieces(known.problem, known.pieces), _together(known)
    empty = msgspec.structs.replace(known, pieces=(piece,))
    return empty.with_solutions([solution], [solution_period(piece.problem, solution)])


def _together(known: Incumbent) -> Solution:
    """The solutions of all pieces as one of the joined piece."""
    hosts: dict[Unit, Worker] = {}
    starts: dict[OpKey, int] = {}
    first = 0
    for one in assemble.align(known.problem, list(zip(known.pieces, known.solutions, strict=True)), known.deadlines):
        own = one.arrays.solution(one.order, one.start)
        hosts |= {Unit(slice_, first + pipeline, microbatch): Worker(first + worker.pipeline, worker.column)
                  for (slice_, pipeline, microbatch), worker in own.hosts.items()}
        starts |= {(kind, slice_, first + pipeline, microbatch): start
                   for (kind, slice_, pipeline, microbatch), start in own.starts.items()}
        first += one.piece.problem.grid.pipelines
    return Solution(hosts=hosts, starts=starts)
