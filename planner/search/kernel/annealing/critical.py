"""Critical workers and paths: what keeps a window from being shorter."""

from slipstream.planner.search.kernel.annealing.cost import window
from slipstream.planner.search.kernel.annealing.random import below
from slipstream.planner.search.kernel.jit import borrowing, inlined


@inlined
def critical_worker(random, instance, state, timing, goal):
    """A worker with the longest window of some pipeline above the goal, each as likely as the others."""
    pipeline, seen = 0, 0
    for other in range(timing.longest.shape[0]):
        if timing.longest[other] > goal:
            seen += 1
            if below(random, seen) == 0:
                pipeline = other
    worker, seen = instance.members[pipeline, 0], 0
    for number in range(instance.members.shape[1]):
        other = instance.members[pipeline, number]
        if other < 0:
            break
        if state.size[other] and window(instance, state, timing.late, other) == timing.longest[pipeline]:
            seen += 1
            if below(random, seen) == 0:
                worker = other
    return worker


@borrowing
def critical_path(random, instance, state, late, op, within, path):
    """Follow what keeps an op from starting later; the op where the path ends: at a deadline.

    `path` gets the ops that wait for nothing but the next op of their worker, with a latest start `within` (low, high),
    high excluded.
    """
    unit, start, successor, transfer = instance.unit, instance.successors.start, instance.successors.op, \
        instance.successors.transfer
    worker_of, duration, sequence, size, place = state.worker, state.duration, state.sequence, state.size, state.place
    low, high = within
    arcs = 0
    for _ in range(late.shape[0]):  # no path is longer
        worker, after = worker_of[unit[op]], place[op] + 1
        end = late[op] + duration[op]
        own = sequence[worker, after] if after < size[worker] else -1
        if own >= 0 and late[own] != end:
            own = -1
        other = -1
        for arc in range(start[op], start[op + 1]):
            later, slack = successor[arc], late[successor[arc]] - end
            if slack <= transfer[arc] and slack == (transfer[arc] if worker_of[unit[later]] != worker else 0):
                other = later
                break
        if own < 0 and other < 0:
            break
        if other < 0 or (own >= 0 and below(random, 2) == 0):
            if own != other and low <= late[op] < high:
                path.op[arcs] = op
                arcs += 1
            op = own
        else:
            op = other
    path.size[0] = arcs
    return op
