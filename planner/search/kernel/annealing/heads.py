"""Heads: how early each op can start if no window is longer than the longest of its pipeline.

An op that has to start before its head makes some window longer by as much, so that most bad changes are refused where
they are made, before anything that follows from them is timed (heads and tails of job-shop search: Taillard 1994).

All heads are found anew now and then (`timing.set_heads`); in between, those of ops that change their places.
"""

from slipstream.planner.search.kernel.annealing.arrays import EXCHANGE, TRADE
from slipstream.planner.search.kernel.jit import borrowing, inlined

OPS_PER_STEP = 8
"""All heads are found anew once in so many steps: an op for each of these takes no longer than the steps themselves."""


@borrowing
def _renew(instance, state, heads, release, op):
    """The head of an op, by those of the op before it on its worker and of what it waits for."""
    duration, predecessors = state.duration, instance.predecessors
    worker, place = state.worker[instance.unit[op]], state.place[op]
    head = release[worker]
    if place:
        before = state.sequence[worker, place - 1]
        head = heads[before] + duration[before]
    for arc in range(predecessors.start[op], predecessors.start[op + 1]):
        before = predecessors.op[arc]
        hop = predecessors.transfer[arc] if state.worker[instance.unit[before]] != worker else 0
        head = max(head, heads[before] + duration[before] + hop)
    heads[op] = head


@inlined
def renew(instance, state, heads, release, move):
    """The heads of the ops that a change, or its undoing, has put in other places."""
    if move.kind == EXCHANGE:
        for place in range(move.begin, move.end):
            _renew(instance, state, heads, release, state.sequence[move.worker, place])
        return
    for kind in range(instance.kinds):
        _renew(instance, state, heads, release, move.unit * instance.kinds + kind)
        if move.kind == TRADE:
            _renew(instance, state, heads, release, move.other * instance.kinds + kind)
