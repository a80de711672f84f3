"""A changed state timed where it changed.

Ops whose latest start may have changed wait in a queue by time, late ones first. Each that did change calls those that
it follows: its predecessors and the op before it on its worker. So a step costs what it moves, not what the job holds.
A log keeps what was before, for `revert`.
"""

from planner.search.kernel.annealing.arrays import BASE, BUCKETS, CHANGED, SPAN, TOP, TOUCHED, WAITING
from planner.search.kernel.annealing.timing import latest
from planner.search.kernel.jit import jit


@jit
def call(queue, late, op):
    """Have an op looked at."""
    if op < 0 or queue.queued[op]:
        return
    counters = queue.counters
    index = (late[op] - counters[BASE]) * BUCKETS // counters[SPAN]
    index = min(max(index, 0), BUCKETS - 1)
    queue.queued[op] = 1
    queue.next[op] = queue.bucket[index]
    queue.bucket[index] = op
    counters[WAITING] += 1
    counters[TOP] = max(counters[TOP], index)


@jit
def touch(timing, log, pipeline):
    """Note that the windows of a pipeline may change."""
    if not log.marked[pipeline]:
        log.marked[pipeline] = 1
        number = log.counters[TOUCHED]
        log.pipeline[number] = pipeline
        log.longest[number], log.excess[number] = timing.longest[pipeline], timing.excess[pipeline]
        log.counters[TOUCHED] += 1


@jit
def _pop(queue):
    """Take an op of the latest bucket that has some."""
    counters = queue.counters
    while queue.bucket[counters[TOP]] < 0:
        counters[TOP] -= 1
    op = queue.bucket[counters[TOP]]
    queue.bucket[counters[TOP]] = queue.next[op]
    queue.queued[op] = 0
    counters[WAITING] -= 1
    return op


@jit
def retime(chain, cycle, allowed, run):
    """Time anew the ops at places [begin, end) of a worker, `run` = (worker, begin, end), those in the queue, and all
    that follow from them. False where some window becomes too long to be accepted.
    """
    instance, state, timing, queue, log = chain.instance, chain.state, chain.timing, chain.queue, chain.log
    late, predecessors, counters = timing.late, instance.ops.predecessors, log.counters
    row, begin, end = run
    while end > begin or queue.counters[WAITING]:
        if end > begin:
            end -= 1
            op = state.sequence[row, end]
        else:
            op = _pop(queue)
        worker, place = state.worker[instance.ops.unit[op]], state.place[op]
        pipeline = instance.pipeline[worker]
        if place == 0:
            touch(timing, log, pipeline)
        start = latest(instance, state, late, op)
        if start == late[op]:
            continue
        if counters[CHANGED] == log.op.shape[0]:
            return False
        log.op[counters[CHANGED]], log.late[counters[CHANGED]] = op, late[op]
        counters[CHANGED] += 1
        late[op] = start
        window = state.deadline[instance.group[worker]] + instance.tail[worker] - start
        if window > max(timing.longest[pipeline], cycle.goal) + allowed:
            return False
        if place:
            call(queue, late, state.sequence[worker, place - 1])
        for arc in range(predecessors.start[op], predecessors.start[op + 1]):
            call(queue, late, predecessors.op[arc])
    return True


@jit
def unmark(log):
    """The step is over for the pipelines that it touched."""
    for number in range(log.counters[TOUCHED]):
        log.marked[log.pipeline[number]] = 0


@jit
def revert(timing, queue, log):
    """The timing as it was before the step, and nobody in the queue."""
    while queue.counters[WAITING]:
        _pop(queue)
    for number in range(log.counters[CHANGED] - 1, -1, -1):
        timing.late[log.op[number]] = log.late[number]
    for number in range(log.counters[TOUCHED]):
        pipeline = log.pipeline[number]
        timing.longest[pipeline], timing.excess[pipeline] = log.longest[number], log.excess[number]
