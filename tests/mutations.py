"""Single mutations of a valid schedule, each of which breaks a rule.

The rule is what the mutation's name says.

Those of `MUTATIONS` suit any schedule, those of `GENERAL` one whose workers hold layers of their
own (`tests.general`), and name the rule that is broken.
"""

from collections.abc import Callable

from hypothesis import assume
from hypothesis import strategies as st
from msgspec.structs import replace

from slipstream.schedules.layers import merge_ranges
from slipstream.schedules.precedence import op_key, producer_keys
from slipstream.schedules.schedule import (
    COMPUTE_KINDS,
    LayerRange,
    Op,
    OpKind,
    Schedule,
    Seat,
    Worker,
    compute_period_ticks,
)
from tests.generate import Programs, programs, with_programs


def _pick(draw, schedule: Schedule, wanted: Callable[[Op], bool]) -> tuple[Programs, Worker, int]:
    ops = programs(schedule)
    places = [
        (worker, index)
        for worker, program in ops.items()
        for index, op in enumerate(program)
        if wanted(op)
    ]
    assume(places)
    return ops, *draw(st.sampled_from(places))


def _is_compute(op: Op) -> bool:
    return op.kind in COMPUTE_KINDS


def _lasts(op: Op) -> bool:
    return op.end_ticks > op.start_ticks


def _insert(program: list[Op], op: Op, draw) -> None:
    """Insert an op where its start belongs, or at the end.

    A file may have either.
    """
    if draw(st.booleans()):
        program.insert(
            next(
                (
                    index
                    for index, other in enumerate(program)
                    if other.start_ticks >= op.start_ticks
                ),
                len(program),
            ),
            op,
        )
    else:
        program.insert(
            next(index for index, other in enumerate(program) if not _is_compute(other)), op
        )


def _retimed(
    draw, schedule: Schedule, ops: Programs, worker: Worker, index: int, start: int
) -> Schedule:
    op = ops[worker].pop(index)
    moved = replace(op, start_ticks=start, end_ticks=start + op.end_ticks - op.start_ticks)
    if _is_compute(op):
        _insert(ops[worker], moved, draw)
    else:
        ops[worker].insert(index, moved)
    return _measured(schedule, ops)


def _measured(schedule: Schedule, ops: Programs) -> Schedule:
    """The period follows, so that it is not what gives a mutation away."""
    flat = [op for program in ops.values() for op in program]
    period = compute_period_ticks(flat)
    if schedule.optimizer == "synchronous":
        end = max(op.end_ticks for op in flat)
        period = end - min(op.start_ticks for op in flat)
    return with_programs(
        schedule,
        ops,
        period_ticks=period,
        lower_bound_ticks=0,
        status="optimal" if period == 0 else "feasible",
    )


def moved_to_another_worker(draw, schedule):
    assume(len(schedule.seats) > 1)
    ops, worker, index = _pick(draw, schedule, lambda op: True)
    other = draw(st.sampled_from([seat.worker for seat in schedule.seats if seat.worker != worker]))
    op = ops[worker].pop(index)
    if _is_compute(op):
        _insert(ops[other], replace(op, worker=other), draw)
    else:
        ops[other].append(replace(op, worker=other))
    return _measured(schedule, ops)


def rehosted_at_the_same_time(draw, schedule):
    """Move all ops of a micro-batch at a slice to a worker without it."""
    ops, worker, index = _pick(draw, schedule, lambda op: op.kind is OpKind.F)
    unit = op_key(ops[worker][index])[1:]
    first, end = schedule.layers_of(unit[0])
    others = []
    for seat in schedule.seats:
        held_layers = schedule.held_layers(seat.worker)
        if not any(low <= first and end <= high for low, high in held_layers):
            others.append(seat.worker)
    assume(others)
    other = draw(st.sampled_from(others))
    taken = [op for op in ops[worker] if _is_compute(op) and op_key(op)[1:] == unit]
    ops[worker] = [op for op in ops[worker] if op not in taken]
    ops[other] = sorted(
        [*ops[other], *(replace(op, worker=other) for op in taken)],
        key=lambda op: (not _is_compute(op), op.start_ticks),
    )
    return _measured(schedule, ops)


def dropped(draw, schedule):
    ops, worker, index = _pick(draw, schedule, lambda op: True)
    assume(len(ops[worker]) > 1)
    ops[worker].pop(index)
    return _measured(schedule, ops)


def doubled(draw, schedule):
    ops, worker, index = _pick(draw, schedule, lambda op: True)
    later = draw(st.integers(0, 3))
    op = ops[worker][index]
    ops[worker].insert(
        index + 1, replace(op, start_ticks=op.start_ticks + later, end_ticks=op.end_ticks + later)
    )
    return _measured(schedule, ops)


def onto_another_op(draw, schedule):
    ops, worker, index = _pick(draw, schedule, _lasts)
    others = [op for op in ops[worker] if _lasts(op) and op != ops[worker][index]]
    assume(others)
    return _retimed(draw, schedule, ops, worker, index, draw(st.sampled_from(others)).start_ticks)


def before_its_input(draw, schedule):
    ops, worker, index = _pick(draw, schedule, _is_compute)
    by_key = {op_key(op): op for program in ops.values() for op in program if _is_compute(op)}
    op = ops[worker][index]
    inputs = [
        by_key[key]
        for key in producer_keys(op_key(op), schedule.route_of(op.pipeline, op.microbatch))
        if key in by_key
    ]
    assume(inputs)
    hop = schedule.times.transfer if inputs[0].worker != worker else 0
    start = inputs[0].end_ticks + hop - draw(st.integers(1, 4))
    assume(start >= 0)
    return _retimed(draw, schedule, ops, worker, index, start)


def before_the_iteration(draw, schedule):
    ops, worker, index = _pick(draw, schedule, _is_compute)
    return _retimed(draw, schedule, ops, worker, index, -draw(st.integers(1, 4)))


def closing_op_earlier(draw, schedule):
    ops, worker, index = _pick(draw, schedule, lambda op: not _is_compute(op))
    return _retimed(draw, schedule, ops, worker, index, ops[worker][index].start_ticks - 1)


def all_reduce_later_on_one_worker(draw, schedule):
    ops, worker, index = _pick(draw, schedule, lambda op: op.kind is OpKind.A)
    layers = schedule.layers_of(ops[worker][index].slice)
    assume(
        sum(
            op.kind is OpKind.A and schedule.layers_of(op.slice) == layers
            for op in schedule.all_ops()
        )
        > 1
    )
    for later in range(index, len(ops[worker])):
        op = ops[worker][later]
        ops[worker][later] = replace(op, start_ticks=op.start_ticks + 1, end_ticks=op.end_ticks + 1)
    return _measured(schedule, ops)


def other_microbatch(draw, schedule):
    ops, worker, index = _pick(draw, schedule, _is_compute)
    op = ops[worker][index]
    ops[worker][index] = replace(op, microbatch=op.microbatch + draw(st.sampled_from([-1, 1])))
    assume(ops[worker][index].microbatch >= 0)
    return with_programs(schedule, ops)


def other_slice(draw, schedule):
    ops, worker, index = _pick(draw, schedule, lambda op: op.kind is not OpKind.O)
    layers = schedule.layers_of(ops[worker][index].slice)
    others = [slice for slice, other in enumerate(schedule.layers_by_slice) if other != layers]
    assume(others)
    ops[worker][index] = replace(ops[worker][index], slice=draw(st.sampled_from(others)))
    return with_programs(schedule, ops)


def other_kind(draw, schedule):
    ops, worker, index = _pick(draw, schedule, _is_compute)
    op = ops[worker][index]
    ops[worker][index] = replace(op, kind=draw(st.sampled_from(sorted(COMPUTE_KINDS - {op.kind}))))
    return with_programs(schedule, ops)


def other_period(draw, schedule):
    return replace(
        schedule,
        period_ticks=max(0, schedule.period_ticks + draw(st.sampled_from([-3, -1, 1, 3]))),
        lower_bound_ticks=0,
        status="feasible",
    )


def other_bound(draw, schedule):
    wrong = [
        ("optimal", schedule.period_ticks - 1),
        ("feasible", schedule.period_ticks),
        ("optimal", schedule.period_ticks + 1),
        ("feasible", schedule.period_ticks + 1),
    ]
    status, bound = draw(st.sampled_from(wrong))
    assume(bound >= 0)
    return replace(schedule, status=status, lower_bound_ticks=bound)


def other_failures(draw, schedule):
    worker = draw(st.sampled_from(list(schedule.grid.workers())))
    return replace(schedule, failed=tuple(sorted(set(schedule.failed) ^ {worker})))


def seat_removed(draw, schedule):
    gone = draw(st.sampled_from(schedule.seats))
    return replace(schedule, seats=tuple(seat for seat in schedule.seats if seat != gone))


def role_doubled(draw, schedule):
    assume(len(schedule.seats) > 1)
    first, second = draw(st.permutations(schedule.seats))[:2]
    changed = replace(first, role=second.role)
    seats = list(schedule.seats)
    seats[seats.index(first)] = changed
    return replace(schedule, seats=tuple(seats))


def microbatches_changed(draw, schedule):
    counts = list(schedule.grid.microbatches)
    index = draw(st.integers(0, len(counts) - 1))
    counts[index] += draw(st.sampled_from([-1, 1]))
    assume(counts[index] >= 0)
    return replace(schedule, grid=replace(schedule.grid, microbatches=tuple(counts)))


MUTATIONS = (
    moved_to_another_worker,
    rehosted_at_the_same_time,
    dropped,
    doubled,
    onto_another_op,
    before_its_input,
    before_the_iteration,
    closing_op_earlier,
    all_reduce_later_on_one_worker,
    other_microbatch,
    other_slice,
    other_kind,
    other_period,
    other_bound,
    other_failures,
    seat_removed,
    role_doubled,
    microbatches_changed,
)


# --- Slices, layers held and routes ---------------------------------------------------------------


def _with_slice(schedule: Schedule, layers: LayerRange) -> tuple[Schedule, int]:
    """Add a slice of these layers to the schedule, and return its number.

    It takes as long as the first one.
    """
    times, memory = schedule.times, schedule.memory
    longer = {
        name: (*getattr(times, name), getattr(times, name)[0])
        for name in ("forward", "backward_input", "backward_weight", "all_reduce")
    }
    if memory is not None:
        memory = replace(
            memory,
            activation=(*memory.activation, memory.activation[0]),
            weight_stash=(*memory.weight_stash, memory.weight_stash[0]),
        )
    extended = replace(
        schedule, slices=(*schedule.slices, layers), times=replace(times, **longer), memory=memory
    )
    return extended, len(schedule.layers_by_slice)


def _with_seat(schedule: Schedule, seat: Seat) -> Schedule:
    workers = [other.worker for other in schedule.seats]
    seats = list(schedule.seats)
    seats[workers.index(seat.worker)] = seat
    return replace(schedule, seats=tuple(seats))


def _picked_seat(draw, schedule: Schedule, wanted: Callable[[Seat], bool]) -> Seat:
    seats = [seat for seat in schedule.seats if seat.holds is not None and wanted(seat)]
    assume(seats)
    return draw(st.sampled_from(seats))


def slice_shifted_by_a_layer(draw, schedule):
    """Shift the layers of all ops of a micro-batch at a slice by one.

    One end moves or both do, so that the route does not tile.
    """
    ops, worker, index = _pick(draw, schedule, lambda op: op.kind is OpKind.F)
    (_, slice, *microbatch), layers = (
        op_key(ops[worker][index]),
        schedule.layers_of(ops[worker][index].slice),
    )
    first, end = (
        at + by
        for at, by in zip(
            layers,
            draw(st.sampled_from([(1, 1), (-1, -1), (0, 1), (-1, 0), (0, -1), (1, 0)])),
            strict=True,
        )
    )
    assume(0 <= first < end <= schedule.grid.layer_count)
    schedule, shifted = _with_slice(schedule, (first, end))
    ops = {at: list(program) for at, program in ops.items()}
    for program in ops.values():
        for index, op in enumerate(program):
            if op.slice == slice and [op.pipeline, op.microbatch] == microbatch:
                program[index] = replace(op, slice=shifted)
    return with_programs(schedule, ops)


def slice_more_that_overlaps(draw, schedule):
    """A micro-batch runs a further slice, all of whose layers it has passed already."""
    ops, worker, index = _pick(draw, schedule, lambda op: op.kind is OpKind.F)
    op = ops[worker][index]
    first = draw(st.integers(0, schedule.grid.layer_count - 1))
    schedule, more = _with_slice(
        schedule, (first, draw(st.integers(first + 1, schedule.grid.layer_count)))
    )
    for kind in ("F", "I", "W") if schedule.backward == "split" else ("F", "B"):
        _insert(ops[worker], replace(op, kind=OpKind(kind), slice=more), draw)
    return with_programs(schedule, ops)


def route_through_one_that_does_not_hold_it(draw, schedule):
    return rehosted_at_the_same_time(draw, schedule)


def layer_that_nobody_reduces(draw, schedule):
    ops, worker, index = _pick(draw, schedule, lambda op: op.kind is OpKind.A)
    layers = schedule.layers_of(ops[worker][index].slice)
    for at, program in ops.items():
        ops[at] = [
            op
            for op in program
            if op.kind is not OpKind.A or schedule.layers_of(op.slice) != layers
        ]
    return _measured(schedule, ops)


def holder_left_out_of_a_reduction(draw, schedule):
    ops, worker, index = _pick(draw, schedule, lambda op: op.kind is OpKind.A)
    del ops[worker][index]
    return _measured(schedule, ops)


def holder_reduces_in_other_ranges(draw, schedule):
    """One of several holders reduces two ranges of layers one by one.

    The others reduce them together.
    """

    def wanted(op: Op) -> bool:
        layers = schedule.layers_of(op.slice) if op.kind is OpKind.A else (0, 0)
        alike = [
            op
            for op in schedule.all_ops()
            if op.kind is OpKind.A and schedule.layers_of(op.slice) == layers
        ]
        return layers[1] - layers[0] > 1 and len(alike) > 1

    ops, worker, index = _pick(draw, schedule, wanted)
    op = ops[worker][index]
    first, end = schedule.layers_of(op.slice)
    cut = draw(st.integers(first + 1, end - 1))
    schedule, shifted = _with_slice(schedule, (first, cut))
    schedule, right = _with_slice(schedule, (cut, end))
    ops[worker][index : index + 1] = [replace(op, slice=shifted), replace(op, slice=right)]
    return with_programs(schedule, ops)


def weights_over_the_room(draw, schedule):
    """Raise a layer's weight until a holder has no room left.

    It has others of its column beside it.
    """
    assume(schedule.memory is not None)
    seat = _picked_seat(draw, schedule, lambda seat: bool(_foreign_layers(schedule, seat)))
    weights = list(schedule.memory.weights)
    weights[draw(st.sampled_from(_foreign_layers(schedule, seat)))] += (
        1 + sum(weights) + sum(schedule.memory.capacity)
    )
    return replace(schedule, memory=replace(schedule.memory, weights=tuple(weights)))


def _foreign_layers(schedule: Schedule, seat: Seat) -> list[int]:
    column_layers = {
        layer
        for layers in schedule.held_layers_of_column(seat.worker.column)
        for layer in range(*layers)
    }
    return [
        layer
        for layers in seat.holds or ()
        for layer in range(*layers)
        if layer not in column_layers
    ]


def layer_dropped_by_its_holder(draw, schedule):
    seat = _picked_seat(draw, schedule, lambda seat: bool(seat.holds))
    dropped = draw(st.sampled_from([layer for layers in seat.holds for layer in range(*layers)]))
    rest = merge_ranges(
        (layer, layer + 1) for layers in seat.holds for layer in range(*layers) if layer != dropped
    )
    return _with_seat(schedule, replace(seat, holds=rest))


def layer_held_that_it_does_not_reduce(draw, schedule):
    layers = schedule.grid.layer_count
    seat = _picked_seat(draw, schedule, lambda seat: seat.holds != ((0, layers),))
    layers_held = {layer for first, end in seat.holds for layer in range(first, end)}
    more = draw(st.sampled_from(sorted(set(range(layers)) - layers_held)))
    return _with_seat(schedule, replace(seat, holds=merge_ranges([*seat.holds, (more, more + 1)])))


def layer_that_nobody_holds(draw, schedule):
    lost = draw(st.integers(0, schedule.grid.layer_count - 1))
    seats = []
    for seat in schedule.seats:
        layers_held = {
            layer for layers in schedule.held_layers_of_seat(seat) for layer in range(*layers)
        }
        rest = sorted(layers_held - {lost})
        seats.append(replace(seat, holds=merge_ranges((layer, layer + 1) for layer in rest)))
    return replace(schedule, seats=tuple(seats))


def optimizer_longer_than_its_room(draw, schedule):
    """O takes the sum over the layers held; it ends after the period now."""
    seat = _picked_seat(draw, schedule, lambda seat: bool(seat.holds))
    steps = list(schedule.times.optimizer_of_layer)
    steps[draw(st.sampled_from(seat.holds))[0]] += schedule.period_ticks + 1
    return replace(schedule, times=replace(schedule.times, optimizer_of_layer=tuple(steps)))


def op_of_a_worker_that_has_failed(draw, schedule):
    seat = draw(st.sampled_from(schedule.seats))
    return replace(schedule, failed=tuple(sorted({*schedule.failed, seat.worker})))


GENERAL = {
    slice_shifted_by_a_layer: "each-once",
    slice_more_that_overlaps: "each-once",
    route_through_one_that_does_not_hold_it: "host",
    layer_that_nobody_reduces: "closing",
    holder_left_out_of_a_reduction: "closing",
    holder_reduces_in_other_ranges: "reduced-together",
    weights_over_the_room: "memory",
    layer_dropped_by_its_holder: None,  # holders, closing or host
    layer_held_that_it_does_not_reduce: "closing",
    layer_that_nobody_holds: "holders",
    optimizer_longer_than_its_room: "period",
    op_of_a_worker_that_has_failed: "live-workers",
}
"""Each with the rule that it breaks."""
