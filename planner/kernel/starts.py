"""Compute start times of an order of ops and of its gradient reductions.

The arrays of a problem are here, too.
"""

from typing import NamedTuple

from .compiling import Ints, jit, jit_inlined

FOREVER = 2**61
"""Tick that is later than those of any plan."""


# --- The arrays of a problem ----------------------------------------------------------------------


class Arcs(NamedTuple):
    """Precedences between ops in compressed form.

    The arcs of op i have the numbers start[i] to below start[i + 1].
    """

    start: Ints
    """Number of the first arc of each op, [ops + 1]."""
    op: Ints
    """Number of the op at the other end of the arc, [arc]."""
    transfer: Ints
    """Ticks between the two ops if different workers run them, [arc].

    0 if no tensor passes between them.
    """
    hop: Ints
    """Ticks between the two ops if the workers of `Ops.worker` run them, [arc].

    0 if one worker runs both.
    """


class Ops(NamedTuple):
    """Compute ops of a problem in which a worker is chosen for each unit.

    Workers are given by row, their number among the live workers.
    """

    kinds: int
    """Number of ops of a unit, 2 or 3.

    op = unit * kinds + kind, where kind is 0 for F, 1 for I or B, and 2 for W.
    """
    depth: int
    """Number greater than every value of `position` and `back`."""
    mixed: bool
    """True if a worker may run several slices."""
    unit: Ints
    """Number of the unit to which the op belongs, [op]."""
    slice: Ints
    """Number of the unit's slice, [unit]."""
    position: Ints
    """First layer of the unit's slice, [unit]: how far along its route the unit is."""
    back: Ints
    """Number of the model's layers that follow those of the unit's slice, [unit]."""
    worker: Ints
    """Row of the worker that runs the unit, [unit]."""
    duration: Ints
    """Ticks of the op on the worker that runs it, [op]."""
    predecessors: Arcs
    """Arcs to what each op waits for, except the op before it on its worker."""
    successors: Arcs
    """Arcs to what waits for each op, except the op after it on its worker."""


class Reductions(NamedTuple):
    """Gradient reductions, one for each range of layers that the same groups hold.

    There are none if all reductions of a group follow its compute ops, so that no starts need to be
    chosen (`Problem.times_each_reduction`). Lists of unequal length are padded with -1.
    """

    sharers: Ints
    """Groups that take part in the reduction, [reduction, number]."""
    ticks: Ints
    """Duration of the reduction, [reduction]."""
    awaiting: Ints
    """Reductions of the slice's layers, which wait for its W, [slice, number]."""
    between: Ints
    """Reductions in which the group takes part, [group, number].

    The group's workers compute nothing while such a reduction runs.
    """


# --- Start times of an order, and of the reductions that follow -----------------------------------


@jit
def set_earliest_starts(ops: "Ops", order: Ints, start: Ints, free: Ints) -> None:
    """Fill `start` [op] with the earliest start ticks if workers run their ops in `order`.

    Fill `free` [worker] with the tick at which each worker ends its last op.
    """
    worker, unit, duration = ops.worker, ops.unit, ops.duration
    arc_start, arc_op, arc_hop = ops.predecessors.start, ops.predecessors.op, ops.predecessors.hop
    free[:] = 0
    # In this order, everything that an op waits for has been timed before it.
    for op in order:
        row = worker[unit[op]]
        begin = free[row]
        for arc in range(arc_start[op], arc_start[op + 1]):
            before = arc_op[arc]
            begin = max(begin, start[before] + duration[before] + arc_hop[arc])
        start[op] = begin
        free[row] = begin + duration[op]


@jit_inlined
def first_awaiting_reduction(awaiting: Ints, begin: Ints, number: int) -> int:
    """Return the first tick at which a reduction begins that awaits a slice's W.

    `number` is the slice's; `awaiting` is a field of `Reductions`; `begin` has the tick at which
    each reduction begins.
    """
    first = begin[awaiting[number, 0]]
    for index in range(1, awaiting.shape[1]):
        if awaiting[number, index] >= 0:
            first = min(first, begin[awaiting[number, index]])
    return first


@jit_inlined
def latest_clear_start(
    between: Ints, ticks: Ints, begin: Ints, group: int, start: int, duration: int
) -> int:
    """Return the latest start at which an op overlaps no reduction of its group.

    The result is at most `start`; the op takes `duration` ticks. `between` and `ticks` are fields
    of `Reductions`; `begin` has the tick at which each reduction begins.
    """
    # Each reduction that the op would overlap moves it to before that reduction; then all are
    # looked at again, since the op may now overlap an earlier one.
    number = 0
    while number < between.shape[1] and between[group, number] >= 0:
        tick = begin[between[group, number]]
        if start < tick + ticks[between[group, number]] and tick < start + duration:
            start = tick - duration
            number = 0
        else:
            number += 1
    return start


@jit
def set_latest_starts(
    ops: "Ops",
    order: Ints,
    start: Ints,
    free: Ints,
    group: Ints,
    reductions: "Reductions",
    begin: Ints,
) -> None:
    """Fill `start` [op] with the latest start ticks if workers run their ops in `order`.

    `free` [worker] has, on entry, the ticks by which workers must have run their ops; on return,
    the starts of their first ops. `group` has the number of each worker's group. `begin` has the
    ticks at which reductions begin if they may lie between compute ops; else it is empty.
    """
    interleaved = begin.shape[0] > 0
    worker, unit, duration = ops.worker, ops.unit, ops.duration
    arc_start, arc_op, arc_hop = ops.successors.start, ops.successors.op, ops.successors.hop
    # Backwards, everything that waits for an op has been timed before it.
    for op in order[::-1]:
        row = worker[unit[op]]
        end = free[row]
        for arc in range(arc_start[op], arc_start[op + 1]):
            end = min(end, start[arc_op[arc]] - arc_hop[arc])
        # A W ends before the first reduction of its layers begins.
        if interleaved and (op + 1) % ops.kinds == 0:
            end = min(
                end, first_awaiting_reduction(reductions.awaiting, begin, ops.slice[unit[op]])
            )
        start[op] = end - duration[op]
        if interleaved:
            start[op] = latest_clear_start(
                reductions.between, reductions.ticks, begin, group[row], start[op], duration[op]
            )
        free[row] = start[op]


@jit
def run_reductions(sharers: Ints, ticks: Ints, end: Ints, begin: Ints, turn: Ints) -> None:
    """Schedule all reductions, one at a time on each group.

    A reduction runs at once on all groups that share it. The next one is always the one that can
    begin first; of equals, that of the later layers. `end` [group] has, on entry, the end of each
    group's compute ops; on return, the end of its last reduction. Fill `begin` [reduction] with
    start ticks, and `turn` with the reductions in their order. `sharers` and `ticks` are fields of
    `Reductions`.
    """
    for number in range(turn.shape[0]):
        turn[number] = number
    for number in range(turn.shape[0]):
        # Of those that are left, the one that can begin first goes next.
        first = number
        for place in range(number, turn.shape[0]):
            reduction, other = turn[place], turn[first]
            begin[reduction] = _last_end(sharers, end, reduction)
            if begin[reduction] < begin[other] or (
                begin[reduction] == begin[other] and reduction > other
            ):
                first = place
        reduction = turn[first]
        turn[first], turn[number] = turn[number], reduction
        _set_ends(sharers, end, reduction, begin[reduction] + ticks[reduction])


@jit_inlined
def _last_end(sharers: Ints, end: Ints, reduction: int) -> int:
    """Return the latest end of the groups that share a reduction, its earliest start."""
    last = end[sharers[reduction, 0]]
    for index in range(1, sharers.shape[1]):
        if sharers[reduction, index] >= 0:
            last = max(last, end[sharers[reduction, index]])
    return last


@jit_inlined
def _set_ends(sharers: Ints, end: Ints, reduction: int, tick: int) -> None:
    for index in range(sharers.shape[1]):
        if sharers[reduction, index] >= 0:
            end[sharers[reduction, index]] = tick


@jit
def set_latest_compute_ends(sharers: Ints, ticks: Ints, turn: Ints, end: Ints) -> None:
    """Turn the ticks by which groups must end into those by which their compute must.

    `end` [group] has, on entry, the ticks by which the group's reductions must have ended; on
    return, those by which its compute ops must. Reductions keep the order `turn`; `sharers` and
    `ticks` are fields of `Reductions`.
    """
    # The last reduction first: it must end in time for all groups that share it.
    for number in range(turn.shape[0] - 1, -1, -1):
        reduction = turn[number]
        last = end[sharers[reduction, 0]]
        for index in range(1, sharers.shape[1]):
            if sharers[reduction, index] >= 0:
                last = min(last, end[sharers[reduction, index]])
        _set_ends(sharers, end, reduction, last - ticks[reduction])


@jit
def delay_deadlines(
    sharers: Ints, ticks: Ints, deadline: Ints, end: Ints, begin: Ints, turn: Ints
) -> None:
    """Make the deadlines of compute ops, `deadline` [group], as late as possible.

    No reduction ends later than before. If later deadlines would change the order of reductions and
    make some end later, the deadlines stay as they are. The arrays `end`, `begin` and `turn` are
    filled as by `run_reductions`.
    """
    # Forward: when reductions end by these deadlines. Backward: how late compute may then end.
    end[:] = deadline
    run_reductions(sharers, ticks, end, begin, turn)
    late = end.copy()
    set_latest_compute_ends(sharers, ticks, turn, late)
    # Forward again: does any reduction end later?
    after = late.copy()
    run_reductions(sharers, ticks, after, begin, turn)
    for group in range(end.shape[0]):
        if after[group] > end[group]:
            end[:] = deadline
            run_reductions(sharers, ticks, end, begin, turn)
            return
    deadline[:] = late
    end[:] = after
