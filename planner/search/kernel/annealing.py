"""Simulated annealing over the orders of all workers: small changes where the plan is critical, timed anew each time.

A state is the order of ops on every worker, who hosts what, and when each group of workers must be done (its deadline).
Every op starts as late as these allow: a window is then as short as the order permits. A step exchanges two
neighbouring groups of ops of a worker (mostly at an arc of a critical path, as in job-shop search: van Laarhoven et al.
1992, Nowicki and Smutnicki 1996), lets two units of a stage trade places, moves a unit to another host, or shifts a
deadline. Memory on a worker depends on its order alone, so that a step is checked by one walk through its few ops.

Only what a step changes is timed anew: ops whose latest start may have changed wait in buckets by time, late ones
first, and each that did change calls those that it follows. So a step costs what it moves, not what the job holds, and
pipelines that hardly touch are annealed side by side: the cost adds up over them what the longest window of each
exceeds the goal by. The codes are those of `planner.model.arrays`.

All in one file: numba keeps compiled code by file, and would not notice changes elsewhere.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class Fixed(NamedTuple):
    """What annealing never changes. Indices: u unit, l lane (a live role), g group, s stage, p pipeline."""

    kinds: int
    transfer: int
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
    group: Ints
    """[l] number of the workers that reduce gradients together"""
    tail: Ints
    """[l] ticks from the deadline of its group to the end of its window"""
    pipeline: Ints
    """[l]"""
    lanes: Ints
    """[p, number] lanes of a pipeline; -1 behind the last"""
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
    """A state: who runs what, in which order, until when."""

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
    deadline: Ints
    """[g]"""


class Clock(NamedTuple):
    """The timing of a state."""

    late: Ints
    """[op] latest start before the deadlines"""
    worst: Ints
    """[p] its longest window"""
    excess: Ints
    """[p] what all its windows together exceed the goal by"""


class Scratch(NamedTuple):
    """Room to work in."""

    waiting: Ints
    """[op]"""
    stack: Ints
    """[op]"""
    order: Ints
    """[op] all ops, each after what it waits for"""
    head: Ints
    """[op] earliest start"""
    group: Ints
    """[place]"""
    bucket: Ints
    """first op that waits in each bucket, -1 for none"""
    link: Ints
    """[op] the next one in its bucket"""
    queued: Ints
    """[op] 1 while it waits"""
    changed: Ints
    """ops, in the order in which they changed"""
    before: Ints
    """their latest starts before that"""
    touched: Ints
    """pipelines whose windows may have changed"""
    was: Ints
    """[2, number] their worst and excess before"""
    mark: Ints
    """[p] 1 if touched"""
    counts: Ints
    """[QUEUED, TOP, CHANGED, TOUCHED]; [BASE, SPAN]: the ticks that the buckets divide"""


class Chosen(NamedTuple):
    """How to anneal; temperatures in ticks."""

    hot: float
    cold: float
    pull: float
    """Weight of the mean excess of a pipeline's windows over the goal, beside its longest window."""
    goal: int
    """A period with which the search ends."""
    scale: float
    """Mean ticks of an op."""
    shifts: int
    """One in so many steps shifts a deadline; 0: none."""
    low: int
    """Only ops that start at this tick or later"""
    high: int
    """and before this one change their places."""


GROUP = 6
"""Most ops in a group that changes place."""
BUCKETS = 1024
QUEUED, TOP, CHANGED, TOUCHED, BASE, SPAN, COUNTS = range(7)


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
def _sorted(fixed, orders, scratch):
    """Fill order and head; whether no ops wait for each other in a circle."""
    unit, source, taker, weight = fixed.unit, fixed.source, fixed.taker, fixed.weight
    lane, length, sequence, count, place = orders.lane, orders.length, orders.sequence, orders.size, orders.place
    waiting, stack, order, head = scratch.waiting, scratch.stack, scratch.order, scratch.head
    top = 0
    for op in range(length.shape[0]):
        head[op] = 0
        waiting[op] = (source[op] >= 0) + (place[op] > 0)
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
        other = sequence[worker, after] if after < count[worker] else -1
        if other >= 0:
            head[other] = max(head[other], end)
            waiting[other] -= 1
            if waiting[other] == 0:
                stack[top] = other
                top += 1
        other = taker[op]
        if other >= 0:
            head[other] = max(head[other], end + (fixed.transfer if lane[unit[other]] != worker else 0))
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
def set_deadlines(fixed, orders, scratch):
    """Let every group be done as early as its orders allow. False if ops wait for each other in a circle."""
    if not _sorted(fixed, orders, scratch):
        return False
    orders.deadline[:] = 0
    for lane in range(orders.size.shape[0]):
        if orders.size[lane]:
            op = orders.sequence[lane, orders.size[lane] - 1]
            group = fixed.group[lane]
            orders.deadline[group] = max(orders.deadline[group], scratch.head[op] + orders.length[op])
    return True


@njit(cache=True, nogil=True)
def _latest(fixed, orders, late, op):
    """The latest start of an op, given those of the ops after it."""
    worker = orders.lane[fixed.unit[op]]
    after = orders.place[op] + 1
    own = orders.sequence[worker, after] if after < orders.size[worker] else -1
    end = late[own] if own >= 0 else orders.deadline[fixed.group[worker]]
    other = fixed.taker[op]
    if other >= 0:
        end = min(end, late[other] - (fixed.transfer if orders.lane[fixed.unit[other]] != worker else 0))
    other = fixed.weight[op]
    if other >= 0:
        end = min(end, late[other])
    return end - orders.length[op]


@njit(cache=True, nogil=True)
def _window(fixed, orders, late, lane):
    """The busy window of a lane; 0 if it runs nothing."""
    if orders.size[lane] == 0:
        return 0
    return orders.deadline[fixed.group[lane]] + fixed.tail[lane] - late[orders.sequence[lane, 0]]


@njit(cache=True, nogil=True)
def _measure(fixed, orders, clock, chosen, pipeline):
    """Fill worst and excess of a pipeline."""
    worst, excess = 0, 0
    for number in range(fixed.lanes.shape[1]):
        lane = fixed.lanes[pipeline, number]
        if lane < 0:
            break
        window = _window(fixed, orders, clock.late, lane)
        worst = max(worst, window)
        excess += max(0, window - chosen.goal)
    clock.worst[pipeline], clock.excess[pipeline] = worst, excess


@njit(cache=True, nogil=True)
def _price(fixed, clock, chosen, pipeline):
    """What annealing minimises, of one pipeline."""
    return max(0, clock.worst[pipeline] - chosen.goal) + chosen.pull * clock.excess[pipeline] / fixed.lanes.shape[1]


@njit(cache=True, nogil=True)
def _prices(fixed, clock, chosen):
    total = 0.0
    for pipeline in range(clock.worst.shape[0]):
        total += _price(fixed, clock, chosen, pipeline)
    return total


@njit(cache=True, nogil=True)
def evaluate(fixed, orders, scratch, clock, chosen):
    """Time a state from scratch: its period; -1 if ops wait for each other in a circle."""
    if not _sorted(fixed, orders, scratch):
        return -1
    for index in range(orders.length.shape[0] - 1, -1, -1):
        op = scratch.order[index]
        clock.late[op] = _latest(fixed, orders, clock.late, op)
    for pipeline in range(clock.worst.shape[0]):
        _measure(fixed, orders, clock, chosen, pipeline)
    return clock.worst.max()


@njit(cache=True, nogil=True)
def _call(scratch, late, op):
    """Have an op looked at."""
    if op < 0 or scratch.queued[op]:
        return
    count = scratch.counts
    index = (late[op] - count[BASE]) * BUCKETS // count[SPAN]
    index = min(max(index, 0), BUCKETS - 1)
    scratch.queued[op] = 1
    scratch.link[op] = scratch.bucket[index]
    scratch.bucket[index] = op
    count[QUEUED] += 1
    count[TOP] = max(count[TOP], index)


@njit(cache=True, nogil=True)
def _before(orders, op, lane):
    """The op before another one on its lane; -1 for none."""
    return orders.sequence[lane, orders.place[op] - 1] if orders.place[op] else -1


@njit(cache=True, nogil=True)
def _touch(clock, scratch, pipeline):
    if not scratch.mark[pipeline]:
        scratch.mark[pipeline] = 1
        number = scratch.counts[TOUCHED]
        scratch.touched[number] = pipeline
        scratch.was[0, number], scratch.was[1, number] = clock.worst[pipeline], clock.excess[pipeline]
        scratch.counts[TOUCHED] += 1


@njit(cache=True, nogil=True)
def _settle(fixed, orders, clock, scratch, chosen, allowed, row, begin, end):
    """Time anew the ops at places [begin, end) of a lane, those that were called, and all that follow from them.

    False where some window becomes too long. One long loop on local names: calls with all these arrays would take
    longer than what they do.
    """
    unit, source, taker, weight, transfer = fixed.unit, fixed.source, fixed.taker, fixed.weight, fixed.transfer
    group, tail, owner, goal = fixed.group, fixed.tail, fixed.pipeline, chosen.goal
    lane, length, sequence, size, place = orders.lane, orders.length, orders.sequence, orders.size, orders.place
    deadline, late, worst, excess = orders.deadline, clock.late, clock.worst, clock.excess
    bucket, link, queued, changed = scratch.bucket, scratch.link, scratch.queued, scratch.changed
    before, count, mark, touched, was = scratch.before, scratch.counts, scratch.mark, scratch.touched, scratch.was
    waiting, top, done, base, span = count[QUEUED], count[TOP], count[CHANGED], count[BASE], count[SPAN]
    good = True
    while good:
        if end > begin:
            end -= 1
            op = sequence[row, end]
        elif waiting:
            while bucket[top] < 0:
                top -= 1
            op = bucket[top]
            bucket[top] = link[op]
            queued[op] = 0
            waiting -= 1
        else:
            break
        worker = lane[unit[op]]
        at = place[op]
        start = late[sequence[worker, at + 1]] if at + 1 < size[worker] else deadline[group[worker]]
        other = taker[op]
        if other >= 0:
            start = min(start, late[other] - (transfer if lane[unit[other]] != worker else 0))
        other = weight[op]
        if other >= 0:
            start = min(start, late[other])
        start -= length[op]
        pipeline = owner[worker]
        if at == 0 and not mark[pipeline]:
            mark[pipeline] = 1
            number = count[TOUCHED]
            touched[number], was[0, number], was[1, number] = pipeline, worst[pipeline], excess[pipeline]
            count[TOUCHED] = number + 1
        if start == late[op]:
            continue
        if done == changed.shape[0]:
            good = False
            break
        changed[done], before[done] = op, late[op]
        done += 1
        late[op] = start
        good = deadline[group[worker]] + tail[worker] - start <= max(worst[pipeline], goal) + allowed
        other = sequence[worker, at - 1] if at else -1
        for turn in range(2):
            if turn:
                other = source[op]
            if other >= 0 and not queued[other]:
                index = min(max((late[other] - base) * BUCKETS // span, 0), BUCKETS - 1)
                queued[other] = 1
                link[other] = bucket[index]
                bucket[index] = other
                waiting += 1
                top = max(top, index)
    count[QUEUED], count[TOP], count[CHANGED] = waiting, top, done
    return good


@njit(cache=True, nogil=True)
def _forget(scratch):
    """Nobody is called any more."""
    count = scratch.counts
    while count[QUEUED]:
        op = scratch.bucket[count[TOP]]
        if op < 0:
            count[TOP] -= 1
            continue
        scratch.bucket[count[TOP]] = scratch.link[op]
        scratch.queued[op] = 0
        count[QUEUED] -= 1


@njit(cache=True, nogil=True)
def _revert(clock, scratch):
    """The timing as it was before the step."""
    count = scratch.counts
    for number in range(count[CHANGED] - 1, -1, -1):
        clock.late[scratch.changed[number]] = scratch.before[number]
    for number in range(count[TOUCHED]):
        pipeline = scratch.touched[number]
        clock.worst[pipeline], clock.excess[pipeline] = scratch.was[0, number], scratch.was[1, number]


@njit(cache=True, nogil=True)
def _critical_lane(state, fixed, orders, clock, chosen):
    """A lane with the longest window of some pipeline above the goal."""
    pipeline, seen = 0, 0
    for other in range(clock.worst.shape[0]):
        if clock.worst[other] > chosen.goal:
            seen += 1
            if _below(state, seen) == 0:
                pipeline = other
    lane, seen = fixed.lanes[pipeline, 0], 0
    for number in range(fixed.lanes.shape[1]):
        other = fixed.lanes[pipeline, number]
        if other < 0:
            break
        if orders.size[other] and _window(fixed, orders, clock.late, other) == clock.worst[pipeline]:
            seen += 1
            if _below(state, seen) == 0:
                lane = other
    return lane


@njit(cache=True, nogil=True)
def _critical_path(state, fixed, orders, late, op, low, high):
    """Follow what keeps an op from starting later: (op, last) with `op` a random one of the path, from `low` to `high`,
    whose worker's next op is what it awaits, -1 for none; `last` where the path ends.
    """
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
            return chosen, op
        if other < 0 or (own >= 0 and _below(state, 2) == 0):
            if own != other and low <= late[op] < high:
                arcs += 1
                if _below(state, arcs) == 0:
                    chosen = op
            op = own
        else:
            op = other


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
def _within(fixed, clock, chosen, unit):
    """Whether some op of a unit may change its place."""
    first, last = unit * fixed.kinds, (unit + 1) * fixed.kinds - 1
    return clock.late[first] < chosen.high and clock.late[last] >= chosen.low


@njit(cache=True, nogil=True)
def _partner(state, fixed, orders, unit):
    """A unit to trade with: another one with the same choice of hosts, or one of the same lane; -1 for none."""
    if _below(state, 3) == 0:
        lane = orders.lane[unit]
        other = fixed.unit[orders.sequence[lane, _below(state, orders.size[lane])]]
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
def _places_at(fixed, orders, late, unit, lane, places):
    """Where the ops of a unit fit into another lane by the time at which they run now."""
    row, place = orders.sequence[lane], 0
    for kind in range(fixed.kinds):
        while place < orders.size[lane] and late[row[place]] < late[unit * fixed.kinds + kind]:
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
def _groups(state, fixed, orders, clock, chosen):
    """Two neighbouring groups of a lane: (lane, begin, middle, end); lane -1 where they must not change places."""
    if _below(state, 5):
        lane = _critical_lane(state, fixed, orders, clock, chosen)
        op, _ = _critical_path(state, fixed, orders, clock.late, orders.sequence[lane, 0], chosen.low, chosen.high)
        if op < 0:
            return -1, 0, 0, 0
        middle = orders.place[op] + 1
        if _below(state, 4) == 0:
            middle += _below(state, 3) - 1
    else:
        op = _below(state, orders.length.shape[0])
        if clock.late[op] < chosen.low or clock.late[op] >= chosen.high:
            return -1, 0, 0, 0
        middle = orders.place[op]
    lane = orders.lane[fixed.unit[op]]
    begin, end = middle - _size(state), middle + _size(state)
    if begin < 0 or end > orders.size[lane]:
        return -1, 0, 0, 0
    for place in range(begin, middle):
        for twin in range(middle, end):
            if fixed.unit[orders.sequence[lane, place]] == fixed.unit[orders.sequence[lane, twin]]:
                return -1, 0, 0, 0
    return lane, begin, middle, end


@njit(cache=True, nogil=True)
def _time_exchange(fixed, orders, clock, scratch, chosen, allowed, lane, begin, end):
    """Time two groups that changed places."""
    if begin:
        _call(scratch, clock.late, orders.sequence[lane, begin - 1])
    return _settle(fixed, orders, clock, scratch, chosen, allowed, lane, begin, end)


@njit(cache=True, nogil=True)
def _call_around(fixed, orders, clock, scratch, unit):
    """Call the ops of a unit that came to another lane, and those that they follow there."""
    lane = orders.lane[unit]
    _touch(clock, scratch, fixed.pipeline[lane])
    for kind in range(fixed.kinds):
        op = unit * fixed.kinds + kind
        _call(scratch, clock.late, op)
        _call(scratch, clock.late, fixed.source[op])
        _call(scratch, clock.late, _before(orders, op, lane))


@njit(cache=True, nogil=True)
def _call_left(fixed, orders, clock, scratch, lane, places):
    """Call the ops behind which those of a unit were taken away from these places of a lane."""
    _touch(clock, scratch, fixed.pipeline[lane])
    for kind in range(fixed.kinds):
        place = places[kind] - kind - 1
        if 0 <= place < orders.size[lane]:
            _call(scratch, clock.late, orders.sequence[lane, place])


@njit(cache=True, nogil=True)
def _copy_orders(source, target):
    target.lane[:] = source.lane
    target.length[:] = source.length
    target.sequence[:] = source.sequence
    target.size[:] = source.size
    target.place[:] = source.place
    target.deadline[:] = source.deadline


@njit(cache=True, nogil=True)
def _copy_clock(source, target):
    target.late[:] = source.late
    target.worst[:] = source.worst
    target.excess[:] = source.excess


@njit(cache=True, nogil=True)
def _shift(state, fixed, orders, clock, trial, scratch, chosen, cost, allowance):
    """Shift the deadline of a group on a critical path, or that of the group whose window it fills; the new cost."""
    lane = _critical_lane(state, fixed, orders, clock, chosen)
    _, last = _critical_path(state, fixed, orders, clock.late, orders.sequence[lane, 0], 0, 0)
    group, other = fixed.group[lane], fixed.group[orders.lane[fixed.unit[last]]]
    ticks = 1 + _below(state, 1 + int(chosen.scale))
    if _below(state, 2) == 0:
        group, ticks = other, -ticks
    orders.deadline[group] -= ticks
    evaluate(fixed, orders, scratch, trial, chosen)
    price = _prices(fixed, trial, chosen)
    if price > cost + allowance:
        orders.deadline[group] += ticks
        return cost
    _copy_clock(trial, clock)
    return price


@njit(cache=True, nogil=True)
def _keep(fixed, orders, best, record, trial, scratch, chosen, cost):
    """Note the best state so far, timed from scratch to be sure."""
    period = evaluate(fixed, orders, scratch, trial, chosen)
    if 0 <= period <= record[0]:
        record[0], record[1] = period, int(cost * 1000)
        _copy_orders(orders, best)


@njit(cache=True, nogil=True)
def anneal(fixed, orders, best, record, clock, trial, scratch, state, chosen, begin, end, cycle):
    """Run steps `begin` to `end` of a cycle of `cycle` steps.

    `best` is kept up to date; `record` holds its period and its cost in thousandths of a tick.
    """
    evaluate(fixed, orders, scratch, clock, chosen)
    cost = _prices(fixed, clock, chosen)
    count = scratch.counts
    places = np.zeros(fixed.kinds, np.int64)
    for step in range(begin, end):
        if record[0] <= chosen.goal:
            break
        allowance = -chosen.hot * (chosen.cold / chosen.hot) ** (step / cycle) * math.log(1.0 - _uniform(state))
        allowed = allowance + chosen.scale
        unit, other, old = -1, -1, -1
        lane, first, middle, last = -1, 0, 0, 0
        dice = _below(state, 24) if fixed.free.shape[0] else 24
        count[CHANGED], count[TOUCHED] = 0, 0
        fits = timed = False
        if chosen.shifts and _below(state, chosen.shifts) == 0:
            cost = _shift(state, fixed, orders, clock, trial, scratch, chosen, cost, allowance)
            fits = timed = True
        elif dice < 2:
            unit = fixed.free[_below(state, fixed.free.shape[0])]
            other = _partner(state, fixed, orders, unit)
            if other < 0 or not _within(fixed, clock, chosen, unit):
                continue
            _trade(fixed, orders, unit, other)
            fits = True
            _call_around(fixed, orders, clock, scratch, unit)
            _call_around(fixed, orders, clock, scratch, other)
        elif dice < 3:
            unit = fixed.free[_below(state, fixed.free.shape[0])]
            target = _other_lane(state, fixed, orders, unit)
            if target < 0 or not _within(fixed, clock, chosen, unit):
                continue
            old = orders.lane[unit]
            _places_at(fixed, orders, clock.late, unit, target, places)
            _move(fixed, orders, unit, target, places)
            fits = _fits(fixed, orders, target, orders.size[target])
            if fits:
                _call_around(fixed, orders, clock, scratch, unit)
                _call_left(fixed, orders, clock, scratch, old, places)
        else:
            lane, first, middle, last = _groups(state, fixed, orders, clock, chosen)
            if lane < 0:
                continue
            _exchange(orders, scratch, lane, first, middle, last)
            fits = _fits(fixed, orders, lane, last)
            if fits:
                timed = _time_exchange(fixed, orders, clock, scratch, chosen, allowed, lane, first, last)
        if unit >= 0 and fits:
            timed = _settle(fixed, orders, clock, scratch, chosen, allowed, 0, 0, 0)
        accepted = False
        price = cost
        if fits and timed:
            for number in range(count[TOUCHED]):
                pipeline = scratch.touched[number]
                price -= _price(fixed, clock, chosen, pipeline)
                _measure(fixed, orders, clock, chosen, pipeline)
                price += _price(fixed, clock, chosen, pipeline)
            accepted = price <= cost + allowance
        for number in range(count[TOUCHED]):
            scratch.mark[scratch.touched[number]] = 0
        if accepted:
            cost = price
            # As long a period at a lower cost is worth keeping, if it is so by more than the copy takes.
            longest = clock.worst.max()
            if longest < record[0] or (longest == record[0] and (cost + chosen.scale) * 1000 < record[1] * 0.97):
                _keep(fixed, orders, best, record, trial, scratch, chosen, cost)
            continue
        _forget(scratch)
        _revert(clock, scratch)
        if lane >= 0:
            _exchange(orders, scratch, lane, first, first + last - middle, last)
        elif old >= 0:
            _move(fixed, orders, unit, old, places)
        elif unit >= 0:
            _trade(fixed, orders, unit, other)
    if end == cycle and record[0] > chosen.goal and (
            clock.worst.max(), cost * 1000) < (record[0], float(record[1])):
        _keep(fixed, orders, best, record, trial, scratch, chosen, cost)
