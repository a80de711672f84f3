"""A change that annealing tries: ops of one kind of a micro-batch are shifted along its route.

What one slice of a route gains alone is lost at the next. It matters most where micro-batches visit several pipelines.
"""

from planner.search.kernel.annealing.arrays import ALONG, NEVER, Move
from planner.search.kernel.annealing.critical import critical_path, critical_worker
from planner.search.kernel.annealing.random import below
from planner.search.kernel.annealing.runs import exchange_runs, keeps_capacity, run_length
from planner.search.kernel.jit import inlined, jit


@jit
def propose_along(random, instance, state, timing, cycle, run, shifted):
    """Shift the ops of one kind of a micro-batch, or of a part of its route, by some places; NEVER where none can."""
    worker = critical_worker(random, instance, state, timing, cycle.goal)
    op, _ = critical_path(random, instance, state, timing.late, state.sequence[worker, 0], (cycle.low, cycle.high))
    if op < 0:
        return NEVER
    if below(random, 2) == 0:
        op = state.sequence[state.worker[instance.unit[op]], state.place[op] + 1]
    unit = instance.unit[op]
    kind, part = op - unit * instance.kinds, below(random, 3)
    first, end = instance.route[unit, 0], instance.route[unit, 1]
    if part == 1:
        first = unit
    elif part == 2:
        end = unit + 1
    places, later, count = run_length(random), below(random, 2) == 0, 0
    for other in range(first, end):
        if _shift_op(instance, state, run, other * instance.kinds + kind, places, later, shifted[count]):
            count += 1
    return Move(ALONG, -1, count, -1, 0, 0, 0) if count else NEVER


@inlined
def _shift_op(instance, state, run, op, places, later, shifted):
    """Shift an op by some places, as far as it passes no other of its micro-batch; False where it stays."""
    unit = instance.unit[op]
    worker, place = state.worker[unit], state.place[op]
    first, end = instance.route[unit, 0], instance.route[unit, 1]
    row, step, passed = state.sequence[worker], 1 if later else -1, 0
    while passed < places:
        at = place + (passed + 1) * step
        if at < 0 or at >= state.size[worker] or first <= instance.unit[row[at]] < end:
            break
        passed += 1
    if passed == 0:
        return False
    begin, middle, after = (place, place + 1, place + 1 + passed) if later else (place - passed, place, place + 1)
    exchange_runs(state, run, worker, begin, middle, after)
    shifted[0], shifted[1], shifted[2], shifted[3] = worker, begin, middle, after
    return True


@jit
def keep_capacity_along(instance, state, move, shifted):
    """Whether all workers of a route keep their capacity."""
    good = True
    for number in range(move.other):
        good = good and keeps_capacity(instance, state, shifted[number, 0], shifted[number, 3])
    return good
