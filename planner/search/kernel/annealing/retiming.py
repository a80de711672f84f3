"""A changed state timed where it changed.

Ops whose latest start may have changed wait in a queue by time, late ones first. Each that did change calls those that
it follows: its predecessors and the op before it on its worker. So a step costs what it moves, not what the job holds.
A log keeps what was before, for `revert`.
"""

from slipstream.planner.search.kernel.annealing.arrays import BASE, BUCKETS, CHANGED, SPAN, TOP, TOUCHED, WAITING
from slipstream.planner.search.kernel.jit import borrowing, inlined
from slipstream.planner.search.kernel.start_times import clear_of, first_awaiting


@inlined
def _bucket(ticks, span):
    """The bucket of a time, `ticks` after the first one."""
    return min(max(ticks * BUCKETS // span, 0), BUCKETS - 1)


@inlined
def call(queue, late, op):
    """Have an op looked at."""
    if op < 0 or queue.queued[op]:
        return
    counters = queue.counters
    index = _bucket(late[op] - counters[BASE], counters[SPAN])
    queue.queued[op] = 1
    queue.next[op] = queue.bucket[index]
    queue.bucket[index] = op
    counters[WAITING] += 1
    counters[TOP] = max(counters[TOP], index)


@inlined
def touch(timing, log, pipeline):
    """Note that the windows of a pipeline may change."""
    if not log.marked[pipeline]:
        log.marked[pipeline] = 1
        number = log.counters[TOUCHED]
        log.pipeline[number] = pipeline
        log.longest[number], log.excess[number] = timing.longest[pipeline], timing.excess[pipeline]
        log.counters[TOUCHED] += 1


def _retiming(interleaved):
    """`retime`, where reductions may lie between compute ops or not: compiled for each, as the loop is a quarter slower
    when it asks.

    The rule is that of `timing._latest`; one long loop on local names, as a call with all these arrays would take
    longer than what it does.
    """

    @borrowing
    def retime_ops(instance, state, timing, queue, log, limits, run):
        unit, group, owner = instance.unit, instance.group, instance.pipeline
        first_successor, successor, transfer = instance.successors.start, instance.successors.op, \
            instance.successors.transfer
        first_predecessor, predecessor = instance.predecessors.start, instance.predecessors.op
        worker_of, duration, sequence, size, place = state.worker, state.duration, state.sequence, state.size, \
            state.place
        deadline, late = state.deadline, timing.late
        longest, excess = timing.longest, timing.excess
        kinds, slice_of, awaiting, between, reduction = instance.kinds, instance.slice, instance.awaiting, \
            instance.between, state.begin
        bucket, link, queued = queue.bucket, queue.next, queue.queued
        counters, changed, before, marked = queue.counters, log.op, log.late, log.marked
        waiting, top, base, span = counters[WAITING], counters[TOP], counters[BASE], counters[SPAN]
        done, touched = log.counters[CHANGED], log.counters[TOUCHED]
        touched_pipeline, longest_before, excess_before = log.pipeline, log.longest, log.excess
        heads, allowed = limits
        row, begin, end = run
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
            worker, at = worker_of[unit[op]], place[op]
            start = late[sequence[worker, at + 1]] if at + 1 < size[worker] else deadline[group[worker]]
            for arc in range(first_successor[op], first_successor[op + 1]):
                other = successor[arc]
                if late[other] - transfer[arc] < start:  # else it does not matter who runs it
                    start = min(start, late[other] - (transfer[arc] if worker_of[unit[other]] != worker else 0))
            if interleaved and (op + 1) % kinds == 0:
                start = min(start, first_awaiting(awaiting, reduction, slice_of[unit[op]]))
            start -= duration[op]
            if interleaved:
                start = clear_of(between, reduction, group[worker], start, duration[op])
            pipeline = owner[worker]
            if at == 0 and not marked[pipeline]:
                marked[pipeline] = 1
                touched_pipeline[touched] = pipeline
                longest_before[touched], excess_before[touched] = longest[pipeline], excess[pipeline]
                touched += 1
            if start == late[op]:
                continue
            if done == changed.shape[0]:
                good = False
                break
            changed[done], before[done] = op, late[op]
            done += 1
            late[op] = start
            good = start >= heads[op] - allowed
            arc, last = first_predecessor[op], first_predecessor[op + 1]
            other = sequence[worker, at - 1] if at else -1
            while True:  # the op before it on its worker, then its predecessors
                if other >= 0 and not queued[other]:
                    index = _bucket(late[other] - base, span)
                    queued[other] = 1
                    link[other] = bucket[index]
                    bucket[index] = other
                    waiting += 1
                    top = max(top, index)
                if arc == last:
                    break
                other = predecessor[arc]
                arc += 1
        counters[WAITING], counters[TOP] = waiting, top
        log.counters[CHANGED], log.counters[TOUCHED] = done, touched
        return good

    return retime_ops


_RETIME, _RETIME_INTERLEAVED = _retiming(interleaved=False), _retiming(interleaved=True)


@inlined
def retime(instance, state, timing, queue, log, limits, run):
    """Time anew the ops at places [begin, end) of a worker, those in the queue, and all that follow from them.

    `run` is (worker, begin, end). False where some window becomes too long to be accepted: with `limits` = (heads,
    allowed), an op starts before its head by more than `allowed`.
    """
    if instance.interleaved:
        return _RETIME_INTERLEAVED(instance, state, timing, queue, log, limits, run)
    return _RETIME(instance, state, timing, queue, log, limits, run)


@borrowing
def waits_for_itself(instance, state, timing, queue, op):
    """Whether an op without duration waits for itself. The queue must be empty.

    `retime` cannot tell: in a circle of such ops all start at once. In any other circle they would ever start earlier.
    """
    unit, first, successor, late = instance.unit, instance.successors.start, instance.successors.op, timing.late
    worker_of, duration, sequence, size, place = state.worker, state.duration, state.sequence, state.size, state.place
    found, seen = queue.next, queue.queued
    tick, found[0], count, at = late[op], op, 1, 0
    while at < count and not seen[op]:
        before = found[at]
        at += 1
        worker, after = worker_of[unit[before]], place[before] + 1
        arc, last = first[before], first[before + 1]
        other = sequence[worker, after] if after < size[worker] else -1
        while True:  # the next op of its worker, then its successors
            if other >= 0 and late[other] == tick and duration[other] == 0 and not seen[other]:
                seen[other] = 1
                found[count] = other
                count += 1
            if arc == last:
                break
            other = successor[arc]
            arc += 1
    circle = seen[op] == 1
    for number in range(count):
        seen[found[number]] = 0
    return circle


@inlined
def unmark(log):
    """The step is over for the pipelines that it touched."""
    for number in range(log.counters[TOUCHED]):
        log.marked[log.pipeline[number]] = 0


@inlined
def revert(timing, queue, log):
    """The timing as it was before the step, and nobody in the queue."""
    counters = queue.counters
    while counters[WAITING]:
        op = queue.bucket[counters[TOP]]
        if op < 0:
            counters[TOP] -= 1
            continue
        queue.bucket[counters[TOP]] = queue.next[op]
        queue.queued[op] = 0
        counters[WAITING] -= 1
    for number in range(log.counters[CHANGED] - 1, -1, -1):
        timing.late[log.op[number]] = log.late[number]
    for number in range(log.counters[TOUCHED]):
        pipeline = log.pipeline[number]
        timing.longest[pipeline], timing.excess[pipeline] = log.longest[number], log.excess[number]
