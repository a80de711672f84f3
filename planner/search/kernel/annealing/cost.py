"""Windows, and what annealing minimises.

The window of a worker l of reduce group g(l) lasts from the latest start of its first op to the end of its iteration:

    window(l) = end[g(l)] + tail[l] - late[first op of l];   0 if it runs nothing.

With the goal G of the cooling cycle (a period), the cost of pipeline p with n(p) workers, where n is the most that any
pipeline has, is

    cost(p) = max(0, max_l window(l) - G) + pull * sum_l max(0, window(l) - G) / n,      l in p,

and that of the state is the sum of cost(p) over all pipelines. The first term alone would be flat where several windows
are the longest, and a maximum over all pipelines would not tell of any other pipeline's progress. As a sum over
pipelines, the cost changes by what a step changes.
"""

from slipstream.planner.search.kernel.annealing.arrays import TOUCHED
from slipstream.planner.search.kernel.jit import borrowing, inlined


@inlined
def window(instance, state, late, worker):
    """The busy window of a worker, in ticks."""
    if state.size[worker] == 0:
        return 0
    return state.end[instance.group[worker]] + instance.tail[worker] - late[state.sequence[worker, 0]]


@inlined
def measure(instance, state, timing, goal, pipeline):
    """Fill in the longest window and the excess of a pipeline."""
    longest, excess = 0, 0
    for number in range(instance.members.shape[1]):
        worker = instance.members[pipeline, number]
        if worker < 0:
            break
        ticks = window(instance, state, timing.late, worker)
        longest = max(longest, ticks)
        excess += max(0, ticks - goal)
    timing.longest[pipeline], timing.excess[pipeline] = longest, excess


@inlined
def _cost_of(instance, timing, cycle, pipeline):
    """The cost of a pipeline as measured, in ticks."""
    return max(0, timing.longest[pipeline] - cycle.goal) + \
        cycle.pull * timing.excess[pipeline] / instance.members.shape[1]


@borrowing
def cost(instance, timing, cycle):
    """The cost of a state as timed, in ticks."""
    total = 0.0
    for pipeline in range(timing.longest.shape[0]):
        total += _cost_of(instance, timing, cycle, pipeline)
    return total


@inlined
def cost_after(instance, state, timing, log, cycle, before):
    """The cost after a step that touched the pipelines in the log, in ticks; they are measured anew."""
    total = before
    for number in range(log.counters[TOUCHED]):
        pipeline = log.pipeline[number]
        total -= _cost_of(instance, timing, cycle, pipeline)
        measure(instance, state, timing, cycle.goal, pipeline)
        total += _cost_of(instance, timing, cycle, pipeline)
    return total
