"""Runs of ops in a worker's order that change places."""

from planner.search.kernel.annealing.arrays import LARGEST_RUN
from planner.search.kernel.annealing.random import below
from planner.search.kernel.jit import inlined


@inlined
def run_length(random):
    """Ops in a run, few ones more often."""
    size = 1
    while size < LARGEST_RUN and below(random, 3) == 0:
        size += 1
    return size


@inlined
def exchange_runs(state, run, worker, begin, middle, end):
    """Let the runs [begin, middle) and [middle, end) of a worker change places."""
    row, size = state.sequence[worker], middle - begin
    for index in range(size):
        run[index] = row[begin + index]
    for index in range(middle, end):
        row[index - size] = row[index]
    for index in range(size):
        row[end - size + index] = run[index]
    for index in range(begin, end):
        state.place[row[index]] = index


@inlined
def keeps_capacity(instance, state, worker, end):
    """Whether the ops of a worker before place `end` keep its capacity."""
    capacity = instance.capacity[worker]
    if capacity < 0:
        return True
    sequence, holds, used = state.sequence, instance.holds, 0
    for place in range(end):
        used += holds[sequence[worker, place]]
        if used > capacity:
            return False
    return True
