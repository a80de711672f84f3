"""Time a state of annealing again where a step has changed it, and undo that.

Ops whose latest start may have changed wait in a queue by time, late ones first. An op whose start
did change puts those in the queue that it follows: its predecessors and the op before it on its
worker. So a step costs what it moves, not what the job holds. A log keeps what was before, for
`revert_timing`.
"""

from .chains import BASE, BUCKETS, CHANGED, EXCHANGE, SPAN, TOP, TOUCHED, TRADE, WAITING
from .compiling import jit_borrowing, jit_inlined
from .starts import first_awaiting_reduction, latest_clear_start


@jit_inlined
def _bucket_of(ticks, span):
    """Return the queue's bucket for a time: `ticks` into the `span` that its buckets divide."""
    return min(max(ticks * BUCKETS // span, 0), BUCKETS - 1)


@jit_inlined
def queue_op(queue, late, op):
    """Queue an op whose latest start must be recomputed.

    Nothing happens if the op is queued already, or is -1. The array `late` [op] has the present
    latest starts.
    """
    if op < 0 or queue.queued[op]:
        return
    # Put it before the other ops of its bucket.
    counters = queue.counters
    index = _bucket_of(late[op] - counters[BASE], counters[SPAN])
    queue.queued[op] = 1
    queue.next[op] = queue.bucket[index]
    queue.bucket[index] = op
    counters[WAITING] += 1
    counters[TOP] = max(counters[TOP], index)


@jit_inlined
def touch_pipeline(timing, log, pipeline):
    """Record in the log, once, a pipeline whose busy windows a step may change.

    The log also keeps the pipeline's longest window and excess, as they are in `timing`.
    """
    if not log.marked[pipeline]:
        log.marked[pipeline] = 1
        number = log.counters[TOUCHED]
        log.pipeline[number] = pipeline
        log.longest[number], log.excess[number] = timing.longest[pipeline], timing.excess[pipeline]
        log.counters[TOUCHED] += 1


def _make_retime(interleaved):
    """Return a version of `retime`, for reductions between compute ops or without such."""

    # One version with a test in its loop would be a quarter slower. The function is one long loop
    # on local names, since a call with all these arrays would take longer than its work.
    @jit_borrowing
    def retime_ops(instance, state, timing, queue, log, limits, run):
        unit, group, owner = instance.unit, instance.group, instance.pipeline
        first_successor, successor, transfer = (
            instance.successors.start,
            instance.successors.op,
            instance.successors.transfer,
        )
        first_predecessor, predecessor = instance.predecessors.start, instance.predecessors.op
        worker_of, duration, sequence, size, place = (
            state.worker,
            state.duration,
            state.sequence,
            state.size,
            state.place,
        )
        deadline, late = state.deadline, timing.late
        longest, excess = timing.longest, timing.excess
        kinds, slice_of, awaiting, between, ticks, reduction = (
            instance.kinds,
            instance.slice,
            instance.awaiting,
            instance.between,
            instance.ticks,
            state.begin,
        )
        bucket, link, queued = queue.bucket, queue.next, queue.queued
        counters, changed, before, marked = queue.counters, log.op, log.late, log.marked
        waiting, top, base, span = counters[WAITING], counters[TOP], counters[BASE], counters[SPAN]
        done, touched = log.counters[CHANGED], log.counters[TOUCHED]
        touched_pipeline, longest_before, excess_before = log.pipeline, log.longest, log.excess
        heads, allowed = limits
        row, begin, end = run
        good = True
        while good:
            # The next op: of the changed places, from the last on; then the latest of the queue.
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
            # Its latest start, by the ops that wait for it (`_latest_start`).
            worker, at = worker_of[unit[op]], place[op]
            start = (
                late[sequence[worker, at + 1]] if at + 1 < size[worker] else deadline[group[worker]]
            )
            for arc in range(first_successor[op], first_successor[op + 1]):
                other = successor[arc]
                if late[other] - transfer[arc] < start:  # else it does not matter who runs it
                    start = min(
                        start,
                        late[other] - (transfer[arc] if worker_of[unit[other]] != worker else 0),
                    )
            if interleaved and (op + 1) % kinds == 0:
                start = min(
                    start, first_awaiting_reduction(awaiting, reduction, slice_of[unit[op]])
                )
            start -= duration[op]
            if interleaved:
                start = latest_clear_start(
                    between, ticks, reduction, group[worker], start, duration[op]
                )
            # With a worker's first op, its window changes.
            pipeline = owner[worker]
            if at == 0 and not marked[pipeline]:
                marked[pipeline] = 1
                touched_pipeline[touched] = pipeline
                longest_before[touched], excess_before[touched] = (
                    longest[pipeline],
                    excess[pipeline],
                )
                touched += 1
            if start == late[op]:
                continue
            # Store what was before, for `revert_timing`; a full log refuses the change.
            if done == changed.shape[0]:
                good = False
                break
            changed[done], before[done] = op, late[op]
            done += 1
            late[op] = start
            good = start >= heads[op] - allowed
            # Queue the ops that must end before it.
            arc, last = first_predecessor[op], first_predecessor[op + 1]
            other = sequence[worker, at - 1] if at else -1
            while True:  # the op before it on its worker, then its predecessors
                if other >= 0 and not queued[other]:
                    index = _bucket_of(late[other] - base, span)
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


_RETIME = _make_retime(interleaved=False)
"""Version of `retime` if reductions follow compute."""
_RETIME_INTERLEAVED = _make_retime(interleaved=True)
"""Version of `retime` if reductions may lie between compute ops."""


@jit_inlined
def retime(instance, state, timing, queue, log, limits, run):
    """Recompute the latest starts of changed ops, and of all ops that these affect.

    Changed ops are those in `queue`, and those at places [begin, end) of a worker's order, where
    `run` = (worker, begin, end). Return False if some window becomes too long to be accepted, or if
    the log is full. A window is too long if an op starts more than `allowed` ticks before its head,
    where `limits` = (heads, allowed); the head is the earliest start by which no busy window
    becomes longer.
    """
    if instance.interleaved:
        return _RETIME_INTERLEAVED(instance, state, timing, queue, log, limits, run)
    return _RETIME(instance, state, timing, queue, log, limits, run)


@jit_borrowing
def waits_for_itself(instance, state, timing, queue, op):
    """Return whether an op of zero duration is in a circular wait.

    `retime` does not detect such a wait, all of whose ops start at the same tick; in any other
    circular wait, ops would start earlier and earlier. The queue must be empty.
    """
    unit, first, successor, late = (
        instance.unit,
        instance.successors.start,
        instance.successors.op,
        timing.late,
    )
    worker_of, duration, sequence, size, place = (
        state.worker,
        state.duration,
        state.sequence,
        state.size,
        state.place,
    )
    # Breadth-first over the ops of no duration at the same tick; the empty queue lends its arrays.
    reached, seen = queue.next, queue.queued
    tick, reached[0], count, at = late[op], op, 1, 0
    while at < count and not seen[op]:
        before = reached[at]
        at += 1
        worker, after = worker_of[unit[before]], place[before] + 1
        arc, last = first[before], first[before + 1]
        other = sequence[worker, after] if after < size[worker] else -1
        while True:  # the next op of its worker, then its successors
            if other >= 0 and late[other] == tick and duration[other] == 0 and not seen[other]:
                seen[other] = 1
                reached[count] = other
                count += 1
            if arc == last:
                break
            other = successor[arc]
            arc += 1
    circle = seen[op] == 1
    for number in range(count):
        seen[reached[number]] = 0
    return circle


@jit_inlined
def unmark_pipelines(log):
    """Clear the marks of the pipelines that `log` lists as touched by a move."""
    for number in range(log.counters[TOUCHED]):
        log.marked[log.pipeline[number]] = 0


@jit_inlined
def revert_timing(timing, queue, log):
    """Restore in `timing` what a rejected step of annealing has changed, from `log`.

    Also empty `queue`, which may have ops whose latest start has not been recomputed.
    """
    counters = queue.counters
    # Empty the queue, then restore the values that the log holds, the last change first.
    while counters[WAITING]:
        op = queue.bucket[counters[TOP]]
        if op < 0:
            counters[TOP] -= 1
            continue
        queue.bucket[counters[TOP]] = queue.next[op]
        queue.queued[op] = 0
        counters[WAITING] -= 1
    # An op may have changed twice; the first of its entries has what was before the step.
    for number in range(log.counters[CHANGED] - 1, -1, -1):
        timing.late[log.op[number]] = log.late[number]
    for number in range(log.counters[TOUCHED]):
        pipeline = log.pipeline[number]
        timing.longest[pipeline], timing.excess[pipeline] = log.longest[number], log.excess[number]


# --- Heads ----------------------------------------------------------------------------------------
# A head is how early an op can start if no window is longer than the longest of its pipeline.
#
# An op that has to start before its head makes some window longer by as much, so that most bad
# changes are refused where they are made, before anything that follows from them is timed (heads
# and tails of job-shop search: Taillard 1994).
#
# All heads are found anew now and then (`set_heads`); in between, those of ops that change their
# places.


@jit_borrowing
def _renew_head(instance, state, heads, release, op):
    """Recompute the earliest start of an op from those of the ops before it.

    A worker's first op starts no earlier than its tick in `release`.
    """
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


@jit_inlined
def renew_heads(instance, state, heads, release, move):
    """Recompute the earliest starts `heads` of the ops that `move` has put in other places.

    To be called after the change, and again after the change is undone. `release` has the tick
    before which each worker starts no op.
    """
    if move.kind == EXCHANGE:
        for place in range(move.begin, move.end):
            _renew_head(instance, state, heads, release, state.sequence[move.worker, place])
        return
    for kind in range(instance.kinds):
        _renew_head(instance, state, heads, release, move.unit * instance.kinds + kind)
        if move.kind == TRADE:
            _renew_head(instance, state, heads, release, move.other * instance.kinds + kind)
