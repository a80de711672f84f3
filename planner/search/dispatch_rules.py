"""Dispatch rules that are worth a try: a shortlist, a grid, and random neighbours of a rule."""

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple, get_args

import msgspec

from slipstream.planner.model.bounds import whole_fill
from slipstream.planner.model.problem import Problem
from slipstream.planner.params import ListParams
from slipstream.planner.search.assignment import ASSIGNMENT_RULES
from slipstream.planner.search.list_scheduler import (
    DispatchRule,
    ForwardOrder,
    Places,
    Rerouted,
    in_flight,
    shares_of_forward,
)


class Choice(NamedTuple):
    """An assignment rule and a dispatch rule of the grid."""

    assignment: int
    """Which of `ASSIGNMENT_RULES`."""
    limits: tuple[float, int] | None
    """Slope and extra of the limits in flight; None: no limits, and transfers are ignored."""
    lookahead: float
    make_room: bool


SHORTLIST = tuple(itertools.starmap(Choice, (
    (0, (2.0, 0), 0.0, False), (1, (1.5, 0), 0.5, True), (1, None, 0.0, False), (0, (1.0, 0), 1.0, True),
    (0, (1.25, 0), 0.0, False), (1, (1.0, 0), 0.5, True), (0, (2.0, 1), 0.0, False), (1, (1.25, 1), 0.5, True),
    (0, (1.5, 0), 0.5, False), (0, (1.25, 0), 0.5, False), (1, (1.0, 2), 0.5, True), (0, (1.0, 2), 1.0, True),
    (1, (2.0, 0), 0.0, False), (1, (1.0, 1), 1.0, False))))
"""Of all choices, the fewest whose best was the best of all on 31 jobs with failures and little, more and much memory.
The first is for much memory."""
PATIENT: tuple[tuple[ForwardOrder, float, float, float, float, float], ...] = (
    ("oldest", 0.5, 0.5, 0.5, 0.0, 0.0), ("oldest", 0.5, 0.5, 0.5, 0.5, 4.0),
    ("deepest", 0.0, 1.0, 0.0, 0.0, 0.0), ("oldest", 0.25, 0.5, 0.5, 2.0, 2.0),
    ("deepest", 0.0, 0.25, 0.0, 0.0, 0.0), ("oldest", 0.5, 0.5, 0.0, 2.0, 2.0), ("deepest", 0.25, 0.5, 0.5, 0.0, 0.0),
    ("oldest", 0.25, 0.5, 0.5, 0.0, 0.0), ("deepest", 0.0, 0.5, 0.5, 0.0, 0.0), ("oldest", 0.5, 0.5, 0.5, 2.0, 2.0),
    ("deepest", 0.5, 0.5, 0.5, 2.0, 0.0), ("oldest", 0.25, 0.5, 0.5, -1.0, 4.0),
    ("oldest", 0.0, 0.5, 0.0, 2.0, 2.0), ("oldest", 0.5, 0.5, 0.0, 0.0, 0.0), ("deepest", 0.5, 0.5, 0.0, 0.0, 0.0))
"""Of layouts: `forward_order`, `lookahead`, `fill_wait` as a share of an F, `forward_lookahead`, `advance` and
`gradient_advance` of the best rules of a grid on instances of benchmarks.layers, those that were best most often first.
"""
LOAD_SHARES = (0.0, 0.5, 1.0, 1.5, 2.0)
PLACES = (-4.0, -2.0, -1.0, -0.5, 0.5, 1.0, 2.0, 4.0)
EIGHTHS, ADVANCES = 8, (-32, 48)
"""Shares, and advances from the first of these to the second, are drawn in eighths."""


def shortlist(problem: Problem) -> Iterator[tuple[int, DispatchRule]]:
    """(assignment rule, dispatch rule): what the fill bound says, then what comes close to the grid's best."""
    if fill := whole_fill(problem):
        wait = tuple(ticks + 1 for ticks in fill.idle)
        for lookahead in (0.0, 1.0, 0.5):
            yield 0, DispatchRule(fill_wait=wait, lookahead=lookahead)
    if problem.assigned:
        for order, before, first, after, advance, gradient_advance in PATIENT:
            yield 0, DispatchRule(forward_order=order, lookahead=before, fill_wait=shares_of_forward(problem, first),
                                  forward_lookahead=after, advance=advance, gradient_advance=gradient_advance)
    for assignment, limits, lookahead, make_room in SHORTLIST:
        rule = DispatchRule(ignore_transfers=True)
        if limits is not None:
            slope, extra = limits
            rule = DispatchRule(
                lookahead=lookahead, forward_lookahead=float(slope == 2.0 and not extra),
                make_room=make_room and problem.memory is not None and problem.backward == "split",
                in_flight=in_flight(problem, slope, extra))
        if problem.unequal_time:
            yield ASSIGNMENT_RULES.index("by-speed"), rule
        yield 0 if problem.assigned else assignment, rule


def grid(problem: Problem) -> Iterator[DispatchRule]:
    """Dispatch rules that are the best somewhere; those that most often are come first."""
    rooms = (False, True) if problem.memory and problem.backward == "split" else (False,)
    orders: tuple[ForwardOrder, ...] = get_args(ForwardOrder)
    turns: tuple[Rerouted, ...] = ("in turn", "first") if problem.failed else ("in turn",)
    for ignore, order, room, rerouted in itertools.product((True, False), orders, rooms, turns):
        yield DispatchRule(forward_order=order, ignore_transfers=ignore, make_room=room, rerouted=rerouted)
    modes = ((False, 0.0), (False, 1.0), (True, 0.0))
    for slope, extra, lookahead, (ignore, forward_lookahead), room in itertools.product(
            (1.0, 2.0, 1.5, 0.75, 1.25, 0.5, 3.0), (0, 1, 2), (0.0, 0.5, 1.0), modes, rooms):
        yield DispatchRule(lookahead=lookahead, forward_lookahead=forward_lookahead, ignore_transfers=ignore,
                           make_room=room, in_flight=in_flight(problem, slope, extra))


def changed(problem: Problem, rule: DispatchRule, random: random.Random, params: ListParams) -> DispatchRule:
    """A neighbour of a rule: one thing is changed, or two."""
    rule = _changed_once(problem, rule, random, params)
    return _changed_once(problem, rule, random, params) if random.random() < params.changes_twice else rule


def _changed_once(problem: Problem, rule: DispatchRule, random: random.Random, params: ListParams) -> DispatchRule:
    which = params.changes_of_layouts if problem.assigned else params.changes
    if not (problem.failed or problem.assigned):
        which = tuple(one for one in which if one[0] not in ("load_share", "rerouted")) or which
    names, weights = zip(*which, strict=True)
    name = random.choices(names, weights)[0]
    return msgspec.structs.replace(rule, **{name: _drawn(problem, rule, name, random)})


def _drawn(problem: Problem, rule: DispatchRule, name: str, random: random.Random) -> object:
    """Another value of this field of a rule."""
    if name in ("places", "gradient_places"):
        return _with_other_place(problem, getattr(rule, name), random)
    if name in ("advance", "gradient_advance"):
        return random.randint(*ADVANCES) / EIGHTHS
    if name in ("lookahead", "forward_lookahead"):
        return random.randint(0, EIGHTHS) / EIGHTHS
    if name == "fill_wait":
        return _other_waits(problem, rule, random)
    if name == "in_flight":
        return _other_limits(problem, rule, random)
    if name == "load_share":
        return random.choice(LOAD_SHARES)
    if name == "rerouted":
        return random.choice(get_args(Rerouted))
    return not getattr(rule, name)


def _other_limits(problem: Problem, rule: DispatchRule, random: random.Random) -> tuple[int, ...]:
    """More or fewer micro-batches in flight on some consecutive stages."""
    stages = len(problem.grid.stages)
    limits = list(rule.in_flight or in_flight(problem, 2.0, 0))
    first = random.randrange(stages)
    step = random.choice((-2, -1, 1, 2))
    for stage in range(first, random.randrange(first, stages) + 1):
        limits[stage] = max(1, limits[stage] + step)
    return tuple(limits)


def _with_other_place(problem: Problem, places: Sequence[Places], random: random.Random) -> tuple[Places, ...]:
    """Another place for one micro-batch."""
    counts = problem.grid.microbatches
    pipeline = random.choices(range(len(counts)), counts)[0]
    microbatch = random.randrange(counts[pipeline])
    known = {(one.pipeline, one.microbatch): one.places for one in places}
    known[pipeline, microbatch] = known.get((pipeline, microbatch), 0.0) + random.choice(PLACES)
    return tuple(Places(*who, more) for who, more in sorted(known.items()) if more)


def _other_waits(problem: Problem, rule: DispatchRule, random: random.Random) -> tuple[int, ...]:
    """Another wait for the first gradient, of all slices or of some consecutive ones."""
    waits = list(rule.fill_wait or shares_of_forward(problem, rule.forward_lookahead))
    first, end = 0, len(waits)
    if random.random() < 0.5:
        first = random.randrange(end)
        end = random.randrange(first, end) + 1
    waits[first:end] = shares_of_forward(problem, random.randint(0, EIGHTHS) / EIGHTHS)[first:end]
    return tuple(waits)
