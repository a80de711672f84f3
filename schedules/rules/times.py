"""Where and when each op runs."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from slipstream.schedules.graph import require_acyclic
from slipstream.schedules.layers import layers_text, total
from slipstream.schedules.memory import memory_profile
from slipstream.schedules.rules.case import Case, Violation, listed
from slipstream.schedules.schedule import COMPUTE_KINDS, LayerRange, Memory, Op, OpKind, Seat


def hosts(case: Case) -> Iterator[Violation]:
    """All ops of a micro-batch at a slice run on one worker, which holds its layers."""
    schedule, ops = case.schedule, case.ops
    fitting: dict[tuple[LayerRange, ...], dict[int, bool]] = {}
    for worker, program in case.programs.items():
        held = schedule.holds(worker)
        fits = fitting.setdefault(held, {})
        for op in program:
            slice = op.slice
            if op.kind not in COMPUTE_KINDS or slice is None or op.pipeline is None or op.microbatch is None:
                continue
            if slice not in fits:
                fits[slice] = case.covers(held, schedule.layers_of(slice))
            if not fits[slice]:
                yield Violation("host", f"{case.text(op)}: worker {worker} holds {listed(held)}, not all of "
                                f"{layers_text(schedule.layers_of(slice))}", op)
            elif op.kind is not OpKind.F and \
                    worker != (first := ops[OpKind.F, slice, op.pipeline, op.microbatch]).worker:
                yield Violation("host", f"{case.text(op)}: its F ran on {first.worker}, which holds the activation", op)


def one_at_a_time(case: Case) -> Iterator[Violation]:
    """A worker runs one op at a time, in the order of its program, from tick 0 on. Where reductions overlap, it reduces
    one range at a time, beside other ops, which run one at a time; O waits for both, and a program is by start."""
    for worker, ops in case.programs.items():
        if ops and ops[0].start_ticks < 0:
            yield Violation("one-at-a-time", f"{case.text(ops[0])} starts at {case.at(ops[0].start_ticks)}, before the "
                            "iteration", ops[0], worker)
        for before, op in _in_turn(ops, overlaps=case.schedule.overlaps):
            if op.start_ticks < before.end_ticks:
                yield Violation("one-at-a-time", f"{case.text(op)} starts at {case.at(op.start_ticks)}, but "
                                f"{case.text(before)}, before it in the program, ends at {case.at(before.end_ticks)}",
                                op, worker)
        if case.schedule.overlaps:
            for before, op in pairwise(ops):
                if op.start_ticks < before.start_ticks:
                    yield Violation("one-at-a-time", f"{case.text(op)} starts at {case.at(op.start_ticks)}, but "
                                    f"{case.text(before)}, before it in the program, at "
                                    f"{case.at(before.start_ticks)}", op, worker)


def _in_turn(ops: Sequence[Op], *, overlaps: bool) -> Iterator[tuple[Op, Op]]:
    """Pairs of ops of a worker, the second of which may not start before the first has ended."""
    if not overlaps:
        yield from pairwise(ops)
        return
    yield from pairwise(op for op in ops if op.kind is not OpKind.A)
    yield from pairwise(op for op in ops if op.kind in (OpKind.A, OpKind.O))


def forward_order(case: Case) -> Iterator[Violation]:
    """F of a slice starts after that of the slice before on the route ends, plus a transfer between workers."""
    ops = case.ops
    for pipeline, microbatch in case.microbatches():
        before = None
        for slice in case.route(pipeline, microbatch):
            op = ops[OpKind.F, slice, pipeline, microbatch]
            if before is not None and op.start_ticks < before.end_ticks + case.hop(before, op):
                yield _too_early(case, "forward-order", before, op)
            before = op


def backward_order(case: Case) -> Iterator[Violation]:
    """I or B starts after that of the next slice of the route, plus a transfer between workers; the last after F."""
    gradient, ops = case.gradient_kind, case.ops
    for pipeline, microbatch in case.microbatches():
        route = case.route(pipeline, microbatch)
        before = ops[OpKind.F, route[-1], pipeline, microbatch]
        for slice in reversed(route):
            op = ops[gradient, slice, pipeline, microbatch]
            if op.start_ticks < before.end_ticks + case.hop(before, op):
                yield _too_early(case, "backward-order", before, op)
            before = op


def weight_order(case: Case) -> Iterator[Violation]:
    """W starts after the I of the same micro-batch and slice."""
    ops = case.ops
    for (kind, slice, pipeline, microbatch), op in ops.items():
        if kind is OpKind.W:
            before = ops[OpKind.I, slice, pipeline, microbatch]
            if op.start_ticks < before.end_ticks + case.hop(before, op):
                yield _too_early(case, "weight-order", before, op)


def _too_early(case: Case, rule: str, before: Op, op: Op) -> Violation:
    hop = case.hop(before, op)
    arrival = f", and its result takes {case.at(hop)} to arrive" if hop else ""
    return Violation(rule, f"{case.text(op)} starts at {case.at(op.start_ticks)}, but {case.text(before)} ends at "
                     f"{case.at(before.end_ticks)}{arrival}", op)


def memory(case: Case) -> Iterator[Violation]:
    """No worker ever holds more than it has room for, beside the weights of its layers."""
    sizes = case.schedule.memory
    if sizes is None:
        return
    for worker, ops in case.programs.items():
        room, remark = _room(case, sizes, case.schedule.seat_of[worker])
        if room < 0:
            yield Violation("memory", f"worker {worker} holds {listed(case.schedule.holds(worker))}, which weigh "
                            f"{-room * sizes.unit:g} more than it has room for", worker=worker)
            continue
        for tick, held in memory_profile(sizes, ops):
            if held > room:
                op = next((op for op in ops if tick in (op.start_ticks, op.end_ticks)), None)
                yield Violation("memory", f"worker {worker} holds {held * sizes.unit:g} at {case.at(tick)}; its "
                                f"capacity is {room * sizes.unit:g}{remark}", op, worker)
                break


def _room(case: Case, sizes: Memory, seat: Seat) -> tuple[int, str]:
    """Room for activations on a worker, and a remark on how it comes about.

    Capacity is what is left beside the layers of a column's own stages: whoever holds others has that much more or
    less.
    """
    if seat.holds is None:
        return sizes.beside(seat.worker, seat.role.column), ""
    capacity, before = sizes.beside(seat.worker, seat.worker.column), sizes.weights_before
    own = total(before, case.schedule.holds_of_column(seat.worker.column))
    held = total(before, seat.holds)
    return capacity + own - held, f", {capacity * sizes.unit:g} + {own * sizes.unit:g} for the layers of its column " \
                                  f"- {held * sizes.unit:g} for those that it holds"


def all_reduce(case: Case) -> Iterator[Violation]:
    """All As of a range of layers start together, when the last backward of any of them has ended, anywhere."""
    schedule, final = case.schedule, case.kinds[-1]
    last_of_slice: dict[int, Op] = {}
    for (kind, slice, _, _), op in case.ops.items():
        if kind is final and (slice not in last_of_slice or op.end_ticks > last_of_slice[slice].end_ticks):
            last_of_slice[slice] = op
    last: dict[LayerRange, Op] = {}
    for slice, op in last_of_slice.items():
        for layers in case.reduced_with(schedule.layers_of(slice)):
            if layers not in last or op.end_ticks > last[layers].end_ticks:
                last[layers] = op
    first: dict[LayerRange, Op] = {}
    for layers, op in (one for reduced in case.reductions.values() for one in reduced):
        together = first.setdefault(layers, op)
        if op.start_ticks != together.start_ticks:
            yield Violation("all-reduce", f"{case.text(op)} starts at {case.at(op.start_ticks)}, but "
                            f"{case.text(together)} at {case.at(together.start_ticks)}; all that hold a layer reduce "
                            "it together", op)
        elif layers in last and op.start_ticks < last[layers].end_ticks:
            yield Violation("all-reduce", f"{case.text(op)} starts at {case.at(op.start_ticks)}, but "
                            f"{case.text(last[layers])} ends at {case.at(last[layers].end_ticks)}", op)


def optimizer(case: Case) -> Iterator[Violation]:
    """Synchronous: no O starts before the last backward of the whole job. Staggered: `closing` says it all."""
    if case.schedule.optimizer != "synchronous" or not case.ops:
        return
    last = max(case.ops.values(), key=lambda op: op.end_ticks)
    for ops in case.programs.values():
        if ops[-1].start_ticks < last.end_ticks:
            yield Violation("optimizer", f"{ops[-1]} starts at {case.at(ops[-1].start_ticks)}, but {case.text(last)} "
                            f"ends at {case.at(last.end_ticks)} and the optimizer is synchronous", ops[-1])


def period(case: Case) -> Iterator[Violation]:
    """The period is the longest busy window of a worker; with a synchronous optimizer, the makespan.

    Were it shorter, a worker's next iteration would start before this one has ended.
    """
    windows = {worker: (ops[0].start_ticks, ops[-1].end_ticks) for worker, ops in case.programs.items() if ops}
    if case.schedule.optimizer == "synchronous":
        begin = min(begin for begin, _ in windows.values())
        windows = {worker: (begin, end) for worker, (_, end) in windows.items()}
    worker = max(windows, key=lambda worker: windows[worker][1] - windows[worker][0])
    begin, end = windows[worker]
    if case.schedule.period_ticks != end - begin:
        yield Violation("period", f"the period is given as {case.at(case.schedule.period_ticks)}, but worker {worker} "
                        f"is busy from {case.at(begin)} to {case.at(end)}: {case.at(end - begin)}", worker=worker)


def bound(case: Case) -> Iterator[Violation]:
    """The lower bound is at most the period, and the status is 'optimal' exactly when they are equal."""
    lower, period = case.schedule.lower_bound_ticks, case.schedule.period_ticks
    if lower > period:
        yield Violation("bound", f"the lower bound, {case.at(lower)}, exceeds the period, {case.at(period)}")
    elif (case.schedule.status == "optimal") != (lower == period):
        yield Violation("bound", f"the status is '{case.schedule.status}' with period {case.at(period)} and lower "
                        f"bound {case.at(lower)}; 'optimal' says that they are equal")


def deadlock(case: Case) -> Iterator[Violation]:
    """Ops, transfers and all-reduces never wait for each other in a circle, however long each really takes.

    By the rules before, whatever waits starts no earlier than what it waits for, and later if that takes any time. So
    only ops without duration can form a circle, and As, which may take time on some of their workers only; and without
    a circle `schedules.graph.transfers` orders the transfers so that they form none either.
    """
    instant = {worker: [op for op in ops if op.end_ticks == op.start_ticks] for worker, ops in case.programs.items()}
    if not any(instant.values()):
        return
    if any(op.end_ticks > op.start_ticks for reduced in case.reductions.values() for _, op in reduced):
        instant = {worker: [op for op in ops if op.end_ticks == op.start_ticks or op.kind is OpKind.A]
                   for worker, ops in case.programs.items()}
    try:
        require_acyclic(case.schedule, instant)
    except ValueError as error:
        yield Violation("deadlock", str(error).removeprefix("deadlock: "))
