"""Derive a schedule of forwards only, as validation needs, from one for training.

Each forward stays on its worker. So workers that can train with a schedule can also evaluate with
it, whichever workers are down, and wherever layers are. Without backwards, no forward waits for
memory or for a gradient. Of the forwards whose input has arrived, a list schedule starts the one
with the most layers to go. The order of the training schedule is used if it is faster.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from msgspec.structs import replace

from slipstream.schedules.graph import place_as_early
from slipstream.schedules.precedence import op_key, producer_keys
from slipstream.schedules.schedule import (
    Op,
    OpKind,
    Program,
    ProgramOp,
    Schedule,
    Seat,
    Worker,
    compute_period_ticks,
)


def schedule_forwards(schedule: Schedule) -> Schedule:
    """Return a schedule of only the forwards of a training schedule, on the same workers.

    The result obeys the rules of `schedules.check.check` with `forwards=True`, and its memory is
    unlimited. Its lower bound follows from the work: the busiest live worker has at least an even
    share of all forwards.
    """
    # Ops without duration may start at the same tick, so layers decide which comes first.
    planned = sorted(
        (op for op in schedule.all_ops() if op.kind is OpKind.F),
        key=lambda op: (op.start_ticks, op.end_ticks, schedule.layers_by_slice[op.slice or 0]),
    )
    quickest = min(
        _list_schedule(schedule, planned),
        list(place_as_early(schedule, planned).values()),
        key=_makespan_and_period,
    )
    # The forwards get new starts; workers, roles and held layers stay.
    moved: dict[Worker, list[Op]] = {seat.worker: [] for seat in schedule.seats}
    for op in quickest:
        moved[op.worker].append(op)
    seats, programs = _store_programs(schedule, moved)
    # Without gradients, the backward and the optimizer mode mean nothing, and memory limits
    # nothing.
    ticks = compute_period_ticks(quickest)
    least = min(ticks, _work_bound(schedule, planned))
    return replace(
        schedule,
        seats=seats,
        programs=programs,
        memory=None,
        backward="fused",
        optimizer="staggered",
        period_ticks=ticks,
        lower_bound_ticks=least,
        status="optimal" if least == ticks else "feasible",
        method="forwards",
    )


def _makespan_and_period(ops: Iterable[Op]) -> tuple[int, int]:
    """Return, in ticks, the end of the last op and the longest busy window."""
    ops = list(ops)
    return max((op.end_ticks for op in ops), default=0), compute_period_ticks(ops)


def _list_schedule(schedule: Schedule, planned: Sequence[Op]) -> list[Op]:
    """Return the forwards `planned` on the same workers, timed anew by a list schedule."""
    after = _successors_on_route(schedule, planned)
    begins = set(range(len(planned))) - set(after.values())
    # An event is a tick and what happens then: `number`, the input of this op arrives; `~number`,
    # the op ends.
    events = [(0, number) for number in begins]
    heapify(events)
    ready: dict[Worker, list[tuple[object, int]]] = defaultdict(list)
    busy_until: dict[Worker, int] = defaultdict(int)
    listed: list[Op] = []
    while events:
        tick = events[0][0]
        concerned: dict[Worker, None] = {}
        while events and events[0][0] == tick:
            number = heappop(events)[1]
            op = planned[max(number, ~number)]
            concerned[op.worker] = None
            if number >= 0:
                # The op at the lowest layers has the most layers to go.
                urgency = (schedule.layers_by_slice[op.slice or 0], op.microbatch, op.pipeline)
                heappush(ready[op.worker], (urgency, number))
        # All events of a tick come first, so that a worker chooses among all ops whose input is
        # there.
        for worker in concerned:
            if busy_until[worker] > tick or not ready[worker]:
                continue
            number = heappop(ready[worker])[1]
            op = planned[number]
            end = busy_until[worker] = tick + op.end_ticks - op.start_ticks
            listed.append(replace(op, start_ticks=tick, end_ticks=end))
            heappush(events, (end, ~number))
            if number in after:
                hop = schedule.times.transfer if planned[after[number]].worker != worker else 0
                heappush(events, (end + hop, after[number]))
    return listed


def _successors_on_route(schedule: Schedule, planned: Sequence[Op]) -> dict[int, int]:
    """Return the number of each F's successor on its route, by number in `planned`."""
    number = {op_key(op): index for index, op in enumerate(planned)}
    return {
        number[before]: index
        for index, op in enumerate(planned)
        for before in producer_keys(
            op_key(op), schedule.route_of(op.pipeline or 0, op.microbatch or 0)
        )
    }


def _store_programs(
    schedule: Schedule, moved: dict[Worker, list[Op]]
) -> tuple[tuple[Seat, ...], tuple[Program, ...]]:
    """Return the seats and programs by which live workers run the ops in `moved`."""
    number: dict[Program, int] = {}
    seats = []
    for seat in schedule.seats:
        program = []
        for op in moved[seat.worker]:
            # A program names a pipeline only where it differs from the role's, so that programs can
            # be shared.
            foreign = None if op.pipeline == seat.role.pipeline else op.pipeline
            program.append(ProgramOp(op.kind, op.slice, op.microbatch, op.start_ticks, foreign))
        seats.append(replace(seat, program=number.setdefault(tuple(program), len(number))))
    return tuple(seats), tuple(number)


def _work_bound(schedule: Schedule, forwards: list[Op]) -> int:
    """Return all forwards' ticks at the highest speed, divided by the number of live workers."""
    # At any other speed, the same work takes longer.
    quickest = min(schedule.times.per_mille_of.get(seat.worker, 1000) for seat in schedule.seats)
    work = sum(schedule.times.forward[op.slice or 0] * quickest for op in forwards)
    return -(-work // (1000 * len(schedule.seats)))
