"""Critical workers and paths: what keeps a window from being shorter."""

from planner.search.kernel.annealing.cost import window
from planner.search.kernel.annealing.random import below
from planner.search.kernel.jit import jit


@jit
def critical_worker(chain, goal):
    """A worker with the longest window of some pipeline above the goal, each as likely as the others."""
    instance, state, timing = chain.instance, chain.state, chain.timing
    pipeline, seen = 0, 0
    for other in range(timing.longest.shape[0]):
        if timing.longest[other] > goal:
            seen += 1
            if below(chain.random, seen) == 0:
                pipeline = other
    worker, seen = instance.members[pipeline, 0], 0
    for number in range(instance.members.shape[1]):
        other = instance.members[pipeline, number]
        if other < 0:
            break
        if state.size[other] and window(instance, state, timing.late, other) == timing.longest[pipeline]:
            seen += 1
            if below(chain.random, seen) == 0:
                worker = other
    return worker


@jit
def _tight_successor(instance, state, late, op, end):
    """The first op whose need of this one's result keeps it from ending later than `end`; -1 for none."""
    ops, successors = instance.ops, instance.ops.successors
    for arc in range(successors.start[op], successors.start[op + 1]):
        later = successors.op[arc]
        away = successors.tensor[arc] and state.worker[ops.unit[later]] != state.worker[ops.unit[op]]
        if late[later] - (ops.transfer if away else 0) == end:
            return later
    return -1


@jit
def critical_path(chain, op, low, high):
    """Follow what keeps an op from starting later: (op, last).

    `op` is a random one of the path's ops that wait for nothing but the next op of their worker, with a latest start
    from `low` to below `high`; -1 for none. `last` is where the path ends: at a deadline.
    """
    instance, state, late = chain.instance, chain.state, chain.timing.late
    chosen, arcs = -1, 0
    while True:
        worker, after = state.worker[instance.ops.unit[op]], state.place[op] + 1
        end = late[op] + state.duration[op]
        own = state.sequence[worker, after] if after < state.size[worker] else -1
        if own >= 0 and late[own] != end:
            own = -1
        other = _tight_successor(instance, state, late, op, end)
        if own < 0 and other < 0:
            return chosen, op
        if other < 0 or (own >= 0 and below(chain.random, 2) == 0):
            if own != other and low <= late[op] < high:
                arcs += 1
                if below(chain.random, arcs) == 0:
                    chosen = op
            op = own
        else:
            op = other
