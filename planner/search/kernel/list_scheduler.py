"""`planner.search.list_scheduler`, op for op the same, and the timing of `planner.model.arrays`, compiled.

Every worker has five heaps: forwards, gradients and weights that may run, and when those that are known to come arrive.
They lie in one array; a key is a rank that is different for every unit, with the unit as its remainder.
"""

import numpy as np

from planner.search.kernel.jit import jit

FORWARD, BACKWARD, WEIGHT, ARRIVAL, GRADIENT, HEAPS = 0, 1, 2, 3, 4, 5
READY_F, READY_I, END = 0, 1, 2
BUSY, USED, TOUCHED, FIELDS = 0, 1, 2, 3


@jit
def _push(heap, base, size, key):
    """Put a key on the heap that begins at `base`."""
    at = size
    while at > 0:
        above = (at - 1) // 2
        if heap[base + above] <= key:
            break
        heap[base + at] = heap[base + above]
        at = above
    heap[base + at] = key


@jit
def _pop(heap, base, size):
    """Take the least key from the heap that begins at `base`."""
    least, key = heap[base], heap[base + size - 1]
    last = size - 1
    at = 0
    while 2 * at + 1 < last:
        below = 2 * at + 1
        if below + 1 < last and heap[base + below + 1] < heap[base + below]:
            below += 1
        if heap[base + below] >= key:
            break
        heap[base + at] = heap[base + below]
        at = below
    heap[base + at] = key
    return least


@jit
def _add(heap, base, size, lane, which, key):
    _push(heap, base[lane, which], size[lane, which], key)
    size[lane, which] += 1


@jit
def _take(heap, base, size, lane, which):
    key = _pop(heap, base[lane, which], size[lane, which])
    size[lane, which] -= 1
    return key


@jit
def _fits(state, flight, limits, capacity, need, lane, stage):
    """Whether an F of a stage may start on a lane."""
    return flight[lane, stage] < limits[lane, stage] and state[lane, USED] + need[stage] <= capacity[lane]


@jit
def _forward(heap, base, size, state, flight, limits, capacity, need, stage, lane, mixed, spare):
    """The most urgent forward with room, taken from its heap; -1 if none has. One try where all are of one stage."""
    units = stage.shape[0]
    skipped, found = 0, -1
    while size[lane, FORWARD] and found < 0 and (mixed or not skipped):
        key = _take(heap, base, size, lane, FORWARD)
        if _fits(state, flight, limits, capacity, need, lane, stage[key % units]):
            found = key % units
        else:
            spare[skipped] = key
            skipped += 1
    for index in range(skipped):
        _add(heap, base, size, lane, FORWARD, spare[index])
    return found


@jit
def _comes(heap, base, size, lane, which, clock, share, length):
    """Whether something more urgent arrives before this share of an op would be done."""
    return share > 0 and size[lane, which] > 0 and heap[base[lane, which]] - clock < share * length


@jit
def list_order(kinds, mixed, lane, place, stage, last, rank, length, hop, hold, stash, need, capacity, limits, patience,
               forward_patience, deepest, eager, make_room, base, order):
    """Fill `order` with the ops in the order in which they start; how many."""
    units, lanes = lane.shape[0], base.shape[0]
    heap, size = np.zeros(base[lanes - 1, HEAPS], np.int64), np.zeros((lanes, HEAPS), np.int64)
    state, flight = np.zeros((lanes, FIELDS), np.int64), np.zeros(limits.shape, np.int64)
    events, waiting = np.zeros(3 * units + 3, np.int64), 0
    touched, spare = np.zeros(lanes, np.int64), np.zeros(units, np.int64)
    ops, depth, span, done = units * kinds, last + 1, rank.max() + 1, 0
    for unit in range(units):
        if place[unit] == 0:
            _push(events, 0, waiting, READY_F * ops + unit)
            waiting += 1
    while waiting:
        clock = events[0] // (3 * ops)
        some = 0
        while waiting and events[0] // (3 * ops) == clock:
            key = _pop(events, 0, waiting)
            waiting -= 1
            what, code = key // ops % 3, key % ops
            unit = code // kinds if what == END else code
            worker = lane[unit]
            if not state[worker, TOUCHED]:
                state[worker, TOUCHED] = 1
                touched[some] = worker
                some += 1
            if what == END:
                state[worker, BUSY] = 0
                kind = code % kinds
                if kind == 2:
                    state[worker, USED] -= stash[stage[unit]]
                elif kind == 1:
                    state[worker, USED] += stash[stage[unit]] - hold[stage[unit]]
                    flight[worker, stage[unit]] -= 1
                    if kinds == 3:
                        _add(heap, base, size, worker, WEIGHT, (rank[unit] * depth + place[unit]) * units + unit)
                continue
            if size[worker, ARRIVAL] and heap[base[worker, ARRIVAL]] <= clock:
                _take(heap, base, size, worker, ARRIVAL)
            if what == READY_I:
                _take(heap, base, size, worker, GRADIENT)
                _add(heap, base, size, worker, BACKWARD, (rank[unit] * depth + place[unit]) * units + unit)
            else:
                back = last - place[unit]
                first = back * span + rank[unit] if deepest else rank[unit] * depth + back
                _add(heap, base, size, worker, FORWARD, first * units + unit)
        for index in range(some):
            worker = touched[index]
            state[worker, TOUCHED] = 0
            while not state[worker, BUSY]:
                op = _pick(heap, base, size, state, flight, limits, capacity, need, hold, stage, worker, mixed, spare,
                           kinds, length, clock, patience, forward_patience, eager, make_room)
                if op < 0:
                    break
                order[done] = op
                done += 1
                unit, kind = op // kinds, op % kinds
                end = clock + length[op]
                state[worker, BUSY] = 1
                _push(events, 0, waiting, (end * 3 + END) * ops + op)
                waiting += 1
                taker, when = -1, end
                if kind == 0:
                    state[worker, USED] += hold[stage[unit]]
                    flight[worker, stage[unit]] += 1
                    if place[unit] < last:
                        taker, when = unit + 1, end + hop[unit]
                    else:
                        taker = unit
                elif kind == 1 and place[unit]:
                    taker, when = unit - 1, end + hop[unit - 1]
                if taker >= 0:
                    gradient = kind == 1 or taker == unit
                    _push(events, 0, waiting, (when * 3 + (READY_I if gradient else READY_F)) * ops + taker)
                    waiting += 1
                    _add(heap, base, size, lane[taker], ARRIVAL, when)
                    if gradient:
                        _add(heap, base, size, lane[taker], GRADIENT, when)
    return done


@jit
def _pick(heap, base, size, state, flight, limits, capacity, need, hold, stage, lane, mixed, spare, kinds, length,
          clock, patience, forward_patience, eager, make_room):
    """The most urgent op that may run; -1 for none."""
    units = stage.shape[0]
    if size[lane, WEIGHT]:
        stuck = False
        if make_room and size[lane, FORWARD]:
            stuck = state[lane, USED] + hold[stage[heap[base[lane, FORWARD]] % units]] > capacity[lane]
        if eager or stuck:
            return _take(heap, base, size, lane, WEIGHT) % units * kinds + 2
    if size[lane, BACKWARD]:
        return _take(heap, base, size, lane, BACKWARD) % units * kinds + 1
    if size[lane, FORWARD]:
        first = heap[base[lane, FORWARD]] % units * kinds
        if _comes(heap, base, size, lane, GRADIENT, clock, forward_patience, length[first]):
            return -1
        unit = _forward(heap, base, size, state, flight, limits, capacity, need, stage, lane, mixed, spare)
        if unit >= 0:
            return unit * kinds
    if size[lane, WEIGHT]:
        op = heap[base[lane, WEIGHT]] % units * kinds + 2
        if not _comes(heap, base, size, lane, ARRIVAL, clock, patience, length[op]):
            _take(heap, base, size, lane, WEIGHT)
            return op
    return -1


@jit
def earliest(kinds, lane, place, last, length, hop, order, start, free):
    """Fill `start` with the earliest start ticks that an order allows."""
    free[:] = 0
    for index in range(order.shape[0]):
        op = order[index]
        unit, kind = op // kinds, op % kinds
        begin = free[lane[unit]]
        if kind == 0:
            if place[unit]:
                begin = max(begin, start[op - kinds] + length[op - kinds] + hop[unit - 1])
        elif kind == 2 or place[unit] == last:
            begin = max(begin, start[op - 1] + length[op - 1])
        else:
            begin = max(begin, start[op + kinds] + length[op + kinds] + hop[unit])
        start[op] = begin
        free[lane[unit]] = begin + length[op]


@jit
def latest(kinds, lane, place, last, length, hop, order, start, free):
    """Fill `start` with the latest start ticks that an order and the ends of all lanes, in `free`, allow."""
    for index in range(order.shape[0] - 1, -1, -1):
        op = order[index]
        unit, kind = op // kinds, op % kinds
        end = free[lane[unit]]
        if kind == 0:
            taker = op + 1 if place[unit] == last else op + kinds
            end = min(end, start[taker] - hop[unit])
        elif kind == 1:
            if place[unit]:
                end = min(end, start[op - kinds] - hop[unit - 1])
            if kinds == 3:
                end = min(end, start[op + 1])
        start[op] = free[lane[unit]] = end - length[op]
