"""Simulated annealing over the orders of all workers: small changes where the plan is critical, timed anew each time.

A state is the order of ops on every worker and who hosts what. A step exchanges two neighbouring groups of ops of a
worker (mostly at an arc of a critical path, as in job-shop search: van Laarhoven et al. 1992, Nowicki and Smutnicki
1996), lets two units of a stage trade places, or moves a unit to another host. Memory on a worker depends on its order
alone, so that a step is checked by one walk through its few ops. The codes are those of `planner.dense`.

All in one file: numba keeps compiled code by file, and would not notice changes elsewhere.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Fixed(NamedTuple):
    """What annealing never changes. Indices: u unit, l lane (a live role), g group, s stage."""

    kinds: int
    transfer: int
    synchronous: bool
    stage: Ints
    """[u]"""
    unit: Ints
    """[op]"""
    source: Ints
    """[op] whose tensor it needs, or W's I; -1 for none"""
    taker: Ints
    """[op] who needs its tensor; -1 for none"""
    weight: Ints
    """[op] an I's own W; -1 for other ops, and fused"""
    waits: Ints
    """[op] 1 with a source, else 0"""
    group: Ints
    """[l] number of the workers that reduce gradients together"""
    tail: Ints
    """[l] ticks of all-reduces and step"""
    step: Ints
    """[l] of the step alone"""
    capacity: Ints
    """[l], -1: unlimited"""
    holds: Ints
    """[op] memory that its worker holds more, from the op's start (F) or end on"""
    free: Ints
    """units with a choice of host"""
    choices: Ints
    """[s, number] lanes that may run a stage; -1 behind the last"""
    cost: Ints
    """[kind, s, l] ticks of an op"""


class Orders(NamedTuple):
    """A state: who runs what, in which order."""

    lane: Ints
    """[u]"""
    length: Ints
    """[op]"""
    sequence: Ints
    """[l, place] ops"""
    size: Ints
    """[l]"""
    place: Ints
    """[op]"""


class Clock(NamedTuple):
    """The timing of a state."""

    order: Ints
    """all ops, each after what it waits for"""
    head: Ints
    """[op] earliest start"""
    late: Ints
    """[op] latest start before the ends of the groups"""
    first: Ints
    """[l] latest start of a lane's first op"""
    end: Ints
    """[g] earliest end of a group's last op"""


class Scratch(NamedTuple):
    """Room to work in."""

    waiting: Ints
    """[op]"""
    stack: Ints
    """[op]"""
    group: Ints
    """[place]"""


class Chosen(NamedTuple):
    """How to anneal; temperatures in ticks."""

    hot: float
    cold: float
    pull: float
    """Weight of the mean excess of all windows over the goal, beside the longest window."""
    goal: int
    """A period with which the search ends."""


GROUP = 6
"""Most ops in a group that changes place."""


@njit(cache=True, nogil=True)
def _random(state):
    """The next 53 random bits (xorshift64, Marsaglia 2003)."""
    x = state[0]
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    state[0] = x
    return np.int64(x >> np.uint64(11))


@njit(cache=True, nogil=True)
def _below(state, bound):
    return _random(state) % bound


@njit(cache=True, nogil=True)
def _uniform(state):
    return _random(state) / 9007199254740992.0


@njit(cache=True, nogil=True)
def _earliest(fixed, orders, scratch, clock):
    """Fill order, head and end of the clock; whether no ops wait for each other in a circle."""
    unit, waits, taker, weight, group = fixed.unit, fixed.waits, fixed.taker, fixed.weight, fixed.group
    lane, length, sequence, count, place = orders.lane, orders.length, orders.sequence, orders.size, orders.place
    waiting, stack, order, head, last = scratch.waiting, scratch.stack, clock.order, clock.head, clock.end
    last[:] = 0
    top = 0
    for op in range(length.shape[0]):
        head[op] = 0
        waiting[op] = waits[op] + (place[op] > 0)
        if waiting[op] == 0:
            stack[top] = op
            top += 1
    done = 0
    while top > 0:
        top -= 1
        op = stack[top]
        order[done] = op
        done += 1
        worker = lane[unit[op]]
        end = head[op] + length[op]
        after = place[op] + 1
        if after < count[worker]:
            other = sequence[worker, after]
            head[other] = max(head[other], end)
            waiting[other] -= 1
            if waiting[other] == 0:
                stack[top] = other
                top += 1
        else:
            last[group[worker]] = max(last[group[worker]], end)
        other = taker[op]
        if other >= 0:
            there = end + (fixed.transfer if lane[unit[other]] != worker else 0)
            head[other] = max(head[other], there)
            waiting[other] -= 1
            if waiting[other] == 0:
                stack[top] = other
                top += 1
        other = weight[op]
        if other >= 0:
            head[other] = max(head[other], end)
            waiting[other] -= 1
            if waiting[other] == 0:
                stack[top] = other
                top += 1
    return done == length.shape[0]


@njit(cache=True, nogil=True)
def _latest(fixed, orders, clock):
    """Fill late and first of the clock."""
    unit, taker, weight, group = fixed.unit, fixed.taker, fixed.weight, fixed.group
    lane, length, sequence, count, place = orders.lane, orders.length, orders.sequence, orders.size, orders.place
    order, late, first, last = clock.order, clock.late, clock.first, clock.end
    for index in range(length.shape[0] - 1, -1, -1):
        op = order[index]
        worker = lane[unit[op]]
        after = place[op] + 1
        end = late[sequence[worker, after]] if after < count[worker] else last[group[worker]]
        other = taker[op]
        if other >= 0:
            end = min(end, late[other] - (fixed.transfer if lane[unit[other]] != worker else 0))
        other = weight[op]
        if other >= 0:
            end = min(end, late[other])
        late[op] = end - length[op]
        if after == 1:
            first[worker] = late[op]


@njit(cache=True, nogil=True)
def _window(fixed, clock, lane, ready):
    """The busy window of a lane; synchronous: when its step ends, `ready` being the end of all compute."""
    close = clock.end[fixed.group[lane]] + fixed.tail[lane]
    if fixed.synchronous:
        return max(close, ready + fixed.step[lane])
    return close - clock.first[lane]


@njit(cache=True, nogil=True)
def evaluate(fixed, orders, scratch, clock, chosen):
    """Time a state: its period (-1 if it has a circle), and what annealing minimises."""
    if not _earliest(fixed, orders, scratch, clock):
        return -1, 0.0
    if not fixed.synchronous:
        _latest(fixed, orders, clock)
    ready = clock.end.max()
    worst, lanes, excess = 0, 0, 0
    for lane in range(orders.size.shape[0]):
        if orders.size[lane]:
            window = _window(fixed, clock, lane, ready)
            worst = max(worst, window)
            excess += max(0, window - chosen.goal)
            lanes += 1
    return worst, worst + chosen.pull * excess / lanes


@njit(cache=True, nogil=True)
def _critical_lane(state, fixed, orders, clock, period):
    """One of the lanes whose window is the period."""
    ready = clock.end.max()
    chosen, seen = 0, 0
    for lane in range(orders.size.shape[0]):
        if orders.size[lane] and _window(fixed, clock, lane, ready) == period:
            seen += 1
            if _below(state, seen) == 0:
                chosen = lane
    return chosen


@njit(cache=True, nogil=True)
def _arc_onwards(state, fixed, orders, late, op):
    """Follow what keeps an op from starting later; a random op of the path whose worker's next op is what it awaits."""
    unit, taker, weight, transfer = fixed.unit, fixed.taker, fixed.weight, fixed.transfer
    lane, length, sequence, count, place = orders.lane, orders.length, orders.sequence, orders.size, orders.place
    chosen, arcs = -1, 0
    while True:
        worker = lane[unit[op]]
        end = late[op] + length[op]
        after = place[op] + 1
        own = sequence[worker, after] if after < count[worker] else -1
        if own >= 0 and late[own] != end:
            own = -1
        other = taker[op]
        if other >= 0 and late[other] - (transfer if lane[unit[other]] != worker else 0) != end:
            other = -1
        if other < 0 and weight[op] >= 0 and late[weight[op]] == end:
            other = weight[op]
        if own < 0 and other < 0:
            return chosen
        if other < 0 or (own >= 0 and _below(state, 2) == 0):
            if own != other:
                arcs += 1
                if _below(state, arcs) == 0:
                    chosen = op
            op = own
        else:
            op = other


@njit(cache=True, nogil=True)
def _arc_backwards(state, fixed, orders, head, op):
    """Follow what keeps an op from starting earlier; some op of the path that keeps its worker's next one waiting."""
    unit, source, transfer = fixed.unit, fixed.source, fixed.transfer
    lane, length, sequence, place = orders.lane, orders.length, orders.sequence, orders.place
    chosen, arcs = -1, 0
    while op >= 0:
        worker = lane[unit[op]]
        before = sequence[worker, place[op] - 1] if place[op] > 0 else -1
        if before >= 0 and head[before] + length[before] != head[op]:
            before = -1
        other = source[op]
        if other >= 0 and head[other] + length[other] + (transfer if lane[unit[other]] != worker else 0) != head[op]:
            other = -1
        if other < 0 or (before >= 0 and _below(state, 2) == 0):
            if before >= 0 and before != other:
                arcs += 1
                if _below(state, arcs) == 0:
                    chosen = before
            op = before
        else:
            op = other
    return chosen


@njit(cache=True, nogil=True)
def _last_op(state, fixed, orders, clock, lane):
    """The op with which the window of a lane closes: one of its group, or of the whole job when that holds it up."""
    group = fixed.group[lane]
    ready = clock.end.max()
    whole = fixed.synchronous and ready + fixed.step[lane] > clock.end[group] + fixed.tail[lane]
    chosen, seen = -1, 0
    for other in range(orders.size.shape[0]):
        if orders.size[other] == 0 or not (whole or fixed.group[other] == group):
            continue
        op = orders.sequence[other, orders.size[other] - 1]
        if clock.head[op] + orders.length[op] == (ready if whole else clock.end[group]):
            seen += 1
            if _below(state, seen) == 0:
                chosen = op
    return chosen


@njit(cache=True, nogil=True)
def _critical_arc(state, fixed, orders, clock, period):
    """A random op on a critical path that holds up the next op of its worker, -1 if there is none."""
    lane = _critical_lane(state, fixed, orders, clock, period)
    if not fixed.synchronous and _below(state, 2) == 0:
        return _arc_onwards(state, fixed, orders, clock.late, orders.sequence[lane, 0])
    return _arc_backwards(state, fixed, orders, clock.head, _last_op(state, fixed, orders, clock, lane))


@njit(cache=True, nogil=True)
def _exchange(orders, scratch, lane, begin, middle, end):
    """Let the groups [begin, middle) and [middle, end) of a lane change places."""
    row = orders.sequence[lane]
    size = middle - begin
    for index in range(size):
        scratch.group[index] = row[begin + index]
    for index in range(middle, end):
        row[index - size] = row[index]
    for index in range(size):
        row[end - size + index] = scratch.group[index]
    for index in range(begin, end):
        orders.place[row[index]] = index


@njit(cache=True, nogil=True)
def _fits(fixed, orders, lane, end):
    """Whether the ops of a lane before place `end` keep its capacity."""
    capacity = fixed.capacity[lane]
    if capacity < 0:
        return True
    sequence, holds = orders.sequence, fixed.holds
    used = 0
    for place in range(end):
        used += holds[sequence[lane, place]]
        if used > capacity:
            return False
    return True


@njit(cache=True, nogil=True)
def _trade(fixed, orders, unit, other):
    """Let two units of one stage trade workers and places."""
    lane, other_lane = orders.lane[unit], orders.lane[other]
    for kind in range(fixed.kinds):
        op, twin = unit * fixed.kinds + kind, other * fixed.kinds + kind
        place, twin_place = orders.place[op], orders.place[twin]
        orders.sequence[lane, place], orders.sequence[other_lane, twin_place] = twin, op
        orders.place[op], orders.place[twin] = twin_place, place
        orders.length[op], orders.length[twin] = orders.length[twin], orders.length[op]
    orders.lane[unit], orders.lane[other] = other_lane, lane


@njit(cache=True, nogil=True)
def _partner(state, fixed, orders, unit):
    """A unit to trade with: another one with the same choice of hosts, or one of the same lane; -1 for none."""
    if _below(state, 3) == 0:
        lane = orders.lane[unit]
        other = orders.sequence[lane, _below(state, orders.size[lane])] // fixed.kinds
    else:
        other = fixed.free[_below(state, fixed.free.shape[0])]
    return other if other != unit and fixed.stage[other] == fixed.stage[unit] else -1


@njit(cache=True, nogil=True)
def _remove(orders, op, lane):
    """Take an op out of a lane."""
    row = orders.sequence[lane]
    for index in range(orders.place[op], orders.size[lane] - 1):
        row[index] = row[index + 1]
        orders.place[row[index]] = index
    orders.size[lane] -= 1


@njit(cache=True, nogil=True)
def _insert(orders, op, lane, place):
    """Put an op into a lane, before the one that is at this place."""
    row = orders.sequence[lane]
    for index in range(orders.size[lane], place, -1):
        row[index] = row[index - 1]
        orders.place[row[index]] = index
    row[place] = op
    orders.place[op] = place
    orders.size[lane] += 1


@njit(cache=True, nogil=True)
def _move(fixed, orders, unit, lane, places):
    """Have another worker run a unit, its ops at these places in their order; `places` becomes where they were."""
    kinds, old, stage = fixed.kinds, orders.lane[unit], fixed.stage[unit]
    before = orders.place[unit * kinds:(unit + 1) * kinds].copy()
    for kind in range(kinds):
        _remove(orders, unit * kinds + kind, old)
    for kind in range(kinds):
        _insert(orders, unit * kinds + kind, lane, places[kind])
        orders.length[unit * kinds + kind] = fixed.cost[kind, stage, lane]
    orders.lane[unit] = lane
    places[:] = before


@njit(cache=True, nogil=True)
def _other_lane(state, fixed, orders, unit):
    """Another worker that may run a unit and has room in its row; -1 for none."""
    choices = fixed.choices[fixed.stage[unit]]
    count = 0
    while count < choices.shape[0] and choices[count] >= 0:
        count += 1
    lane = choices[_below(state, count)]
    full = orders.size[lane] + fixed.kinds > orders.sequence.shape[1]
    return -1 if full or lane == orders.lane[unit] else lane


@njit(cache=True, nogil=True)
def _places_at(fixed, orders, clock, unit, lane, places):
    """Where the ops of a unit fit into another lane by the time at which they run now."""
    times = clock.head if fixed.synchronous else clock.late
    row, place = orders.sequence[lane], 0
    for kind in range(fixed.kinds):
        while place < orders.size[lane] and times[row[place]] < times[unit * fixed.kinds + kind]:
            place += 1
        places[kind] = place + kind


@njit(cache=True, nogil=True)
def _size(state):
    """Ops in a group, small ones more often."""
    size = 1
    while size < GROUP and _below(state, 3) == 0:
        size += 1
    return size


@njit(cache=True, nogil=True)
def _groups(state, fixed, orders, clock, period):
    """Two neighbouring groups of a lane: (lane, begin, middle, end); lane -1 where they must not change places."""
    if _below(state, 5):
        op = _critical_arc(state, fixed, orders, clock, period)
        if op < 0:
            return -1, 0, 0, 0
        middle = orders.place[op] + 1
        if _below(state, 4) == 0:
            middle += _below(state, 3) - 1
    else:
        op = _below(state, orders.length.shape[0])
        middle = orders.place[op]
    lane = orders.lane[op // fixed.kinds]
    begin, end = middle - _size(state), middle + _size(state)
    if begin < 0 or end > orders.size[lane]:
        return -1, 0, 0, 0
    for place in range(begin, middle):
        for twin in range(middle, end):
            if orders.sequence[lane, place] // fixed.kinds == orders.sequence[lane, twin] // fixed.kinds:
                return -1, 0, 0, 0
    return lane, begin, middle, end


@njit(cache=True, nogil=True)
def _copy_orders(source, target):
    target.lane[:] = source.lane
    target.length[:] = source.length
    target.sequence[:] = source.sequence
    target.size[:] = source.size
    target.place[:] = source.place


@njit(cache=True, nogil=True)
def _copy_clock(source, target):
    target.order[:] = source.order
    target.head[:] = source.head
    target.late[:] = source.late
    target.first[:] = source.first
    target.end[:] = source.end


@njit(cache=True, nogil=True)
def anneal(fixed, orders, best, best_period, clock, trial, scratch, state, chosen, begin, end, cycle):
    """Run steps `begin` to `end` of a cycle of `cycle` steps, `best` being kept up to date; the period of `best`."""
    period, cost = evaluate(fixed, orders, scratch, clock, chosen)
    places = np.zeros(fixed.kinds, np.int64)
    for step in range(begin, end):
        if best_period <= chosen.goal:
            break
        unit, other, old = -1, -1, -1
        lane, first, middle, last = -1, 0, 0, 0
        dice = _below(state, 24) if fixed.free.shape[0] else 24
        if dice < 2:
            unit = fixed.free[_below(state, fixed.free.shape[0])]
            other = _partner(state, fixed, orders, unit)
            if other < 0:
                continue
            _trade(fixed, orders, unit, other)
            fits = True
        elif dice < 3:
            unit = fixed.free[_below(state, fixed.free.shape[0])]
            target = _other_lane(state, fixed, orders, unit)
            if target < 0:
                continue
            old = orders.lane[unit]
            _places_at(fixed, orders, clock, unit, target, places)
            _move(fixed, orders, unit, target, places)
            fits = _fits(fixed, orders, target, orders.size[target])
        else:
            lane, first, middle, last = _groups(state, fixed, orders, clock, period)
            if lane < 0:
                continue
            _exchange(orders, scratch, lane, first, middle, last)
            fits = _fits(fixed, orders, lane, last)
        accepted = False
        if fits:
            tried, price = evaluate(fixed, orders, scratch, trial, chosen)
            if tried >= 0:
                heat = chosen.hot * (chosen.cold / chosen.hot) ** (step / cycle)
                accepted = price <= cost or _uniform(state) < math.exp((cost - price) / heat)
        if accepted:
            period, cost = tried, price
            _copy_clock(trial, clock)
            if period < best_period:
                best_period = period
                _copy_orders(orders, best)
        elif lane >= 0:
            _exchange(orders, scratch, lane, first, first + last - middle, last)
        elif old >= 0:
            _move(fixed, orders, unit, old, places)
        else:
            _trade(fixed, orders, unit, other)
    return best_period
