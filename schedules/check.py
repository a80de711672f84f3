"""Check a schedule against all rules, from the schedule alone.

How the schedule was made does not matter. Each rule has a function, and `TIERS` lists the rules in
tiers. Rules of a later tier rely on those of earlier tiers, so checking stops after the first tier
with a violation: a dropped op is reported once, as dropped.

Pipelines that share no micro-batch with others, and run the same programs at the same speed, behave
identically, so one of them is checked for all. Equal groups of pipelines that share micro-batches
are treated alike. The cost is linear in the number of ops of the *different* groups.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice, pairwise

import msgspec

from slipstream.schedules.graph import programs_of, require_acyclic
from slipstream.schedules.layers import layers_text, merge_ranges
from slipstream.schedules.memory import activation_room, memory_profile
from slipstream.schedules.precedence import OpKey, op_key
from slipstream.schedules.schedule import COMPUTE_KINDS, LayerRange, Op, OpKind, Schedule, Worker
from slipstream.schedules.symmetry import find_equal_groups

# --- The schedule under check, and what several rules look up in it -------------------------------


Route = Sequence[int]
"""Slices that a micro-batch passes, in order."""


class Violation(msgspec.Struct, frozen=True):
    """Place where a schedule breaks a rule, with a message of one line.

    `op` and `worker` are None where they do not apply.
    """

    rule: str
    message: str
    op: Op | None = None
    worker: Worker | None = None

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


class CheckContext(msgspec.Struct, frozen=True, dict=True):
    """Schedule that is being checked, with values that several rules look up."""

    schedule: Schedule
    forwards: bool = False
    """True if the schedule must have forwards only."""

    @cached_property
    def pipelines(self) -> tuple[int, ...]:
        """Pipelines to check, ascending: of groups that behave identically, only one.

        A group is pipelines that share micro-batches.
        """
        return tuple(
            sorted(pipeline for equal in find_equal_groups(self.schedule) for pipeline in equal[0])
        )

    @cached_property
    def programs(self) -> Mapping[Worker, list[Op]]:
        """Ops of each worker whose role is in one of `pipelines`, in program order."""
        return programs_of(self.schedule, self.pipelines)

    @cached_property
    def ops(self) -> Mapping[OpKey, Op]:
        """Compute ops by key; the last of several with one key, which `check_each_once` reports."""
        return {op_key(op): op for op in self.compute_ops()}

    def compute_ops(self) -> Iterator[Op]:
        """Iterate over the compute ops of the pipelines to check, worker by worker."""
        return (op for ops in self.programs.values() for op in ops if op.kind in COMPUTE_KINDS)

    @cached_property
    def reductions(self) -> Mapping[Worker, list[tuple[LayerRange, Op]]]:
        """All-reduces of each worker in `programs`, in order, as pairs (layers, op)."""
        layers = self.schedule.layers_by_slice
        reductions: dict[Worker, list[tuple[LayerRange, Op]]] = {}
        for worker, ops in self.programs.items():
            reductions[worker] = [
                (layers[op.slice], op) for op in ops if op.kind is OpKind.A and op.slice is not None
            ]
        return reductions

    @property
    def op_kinds(self) -> tuple[OpKind, ...]:
        """Kinds of op at each slice: F, I, W; or F, B; or F alone."""
        if self.forwards:
            return (OpKind.F,)
        split = self.schedule.backward == "split"
        return (OpKind.F, OpKind.I, OpKind.W) if split else (OpKind.F, OpKind.B)

    @property
    def gradient_kind(self) -> OpKind:
        """Kind of op that makes the gradient for the previous slice: I or B.

        Forwards only (`forwards`) have none; no rule for them asks.
        """
        return self.op_kinds[1]

    def microbatches(self) -> Iterator[tuple[int, int]]:
        """Iterate over all micro-batches of `pipelines`, as pairs (pipeline, number)."""
        for pipeline in self.pipelines:
            for microbatch in range(self.schedule.grid.microbatches[pipeline]):
                yield pipeline, microbatch

    @cached_property
    def has_only_stage_routes(self) -> bool:
        """True if all micro-batches pass whole stages and no compute op is missing or repeated."""
        grid, kinds = self.schedule.grid, self.op_kinds
        expected = (
            (kind, stage, pipeline, microbatch)
            for pipeline, microbatch in self.microbatches()
            for stage in grid.stages_of_microbatch(microbatch)
            for kind in kinds
        )
        count = (
            sum(grid.microbatches[pipeline] for pipeline in self.pipelines)
            * grid.depth
            * len(kinds)
        )
        # All expected ops are there; the count says that there are no others, and none twice.
        return (
            all(map(self.ops.__contains__, expected))
            and sum(1 for _ in self.compute_ops()) == len(self.ops) == count
        )

    @cached_property
    def routes(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """Slices at which each micro-batch (pipeline, number) runs F, sorted by layers."""
        visited: dict[tuple[int, int], list[int]] = defaultdict(list)
        for kind, slice, pipeline, microbatch in self.ops:
            if kind is OpKind.F:
                visited[pipeline, microbatch].append(slice)
        layers = self.schedule.layers_by_slice
        return {
            microbatch: tuple(sorted(slices, key=lambda slice: layers[slice]))
            for microbatch, slices in visited.items()
        }

    def route_of(self, pipeline: int, microbatch: int) -> Route:
        """Return the slices at which a micro-batch runs F, sorted by layers.

        The result is empty if the micro-batch runs no F. After `check_each_once` has passed, the
        slices cover all layers, each once.
        """
        if self.has_only_stage_routes:
            return self.schedule.grid.stages_of_microbatch(microbatch)
        return self.routes.get((pipeline, microbatch), ())

    @cached_property
    def reduced_ranges(self) -> list[LayerRange]:
        """Different ranges of layers that are all-reduced, ascending.

        After `check_reduced_together` has passed, no two ranges share a layer.
        """
        return sorted({layers for reduced in self.reductions.values() for layers, _ in reduced})

    def reduced_ranges_sharing(self, layers: LayerRange) -> Iterator[LayerRange]:
        """Iterate over the `reduced_ranges` that share a layer with `layers`.

        No two of the `reduced_ranges` may share a layer.
        """
        ranges = self.reduced_ranges
        # The range before the first that begins later may still reach into `layers`.
        for index in range(max(0, bisect_left(ranges, (layers[0], 0)) - 1), len(ranges)):
            if ranges[index][0] >= layers[1]:
                return
            if ranges[index][1] > layers[0]:
                yield ranges[index]

    def covers_layers(self, ranges: Sequence[LayerRange], layers: LayerRange) -> bool:
        """Return whether a single one of `ranges` contains all of `layers`.

        The ranges must be ascending and must not touch.
        """
        return any(first <= layers[0] and layers[1] <= end for first, end in ranges)

    def transfer_ticks(self, before: Op, after: Op) -> int:
        """Return the ticks of a transfer between two ops: 0 on one worker."""
        return 0 if before.worker == after.worker else self.schedule.times.transfer

    def op_text(self, op: Op) -> str:
        """Return text that names an op in a message."""
        return self.schedule.op_text(op)

    def time_text(self, ticks: int) -> str:
        """Return a time or duration as text, in ticks and in seconds."""
        return f"{ticks} ticks ({self.schedule.seconds(ticks):g} s)"


def ranges_text(ranges: Sequence[LayerRange]) -> str:
    """Return text that names layers: `layers 0 to 3, layer 6`, or `no layer`."""
    return ", ".join(layers_text(layers) for layers in merge_ranges(ranges)) or "no layer"


# --- Who works, and who holds which layers --------------------------------------------------------


def check_live_workers(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation for each live worker without a seat, or with several.

    Also yield one for each worker with a seat that has failed or is outside the grid.
    """
    grid, seats = case.schedule.grid, Counter(seat.worker for seat in case.schedule.seats)
    failed = set(case.schedule.failed)
    # A schedule from code may name any worker; one from a file is checked by the codec.
    for worker in sorted(set(seats) - set(grid.workers())):
        yield Violation(
            "live-workers",
            f"worker {worker} is not in the grid of {grid.pipelines} pipelines x "
            f"{grid.columns} columns",
            worker=worker,
        )
    for worker in grid.workers():
        # All workers that have not failed must take part, once each, and no others.
        if worker in failed and seats[worker]:
            yield Violation(
                "live-workers", f"worker {worker} has failed but has a program", worker=worker
            )
        elif worker not in failed and seats[worker] != 1:
            yield Violation(
                "live-workers",
                f"live worker {worker} has {seats[worker]} programs; expected 1",
                worker=worker,
            )


def check_roles(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation for each seat whose role is outside the grid, or taken already."""
    grid, played = case.schedule.grid, set[Worker]()
    for seat in case.schedule.seats:
        role = seat.role
        if not (0 <= role.pipeline < grid.pipelines and 0 <= role.column < grid.columns):
            yield Violation(
                "roles",
                f"worker {seat.worker} plays role {role}, which is not in the grid",
                worker=seat.worker,
            )
        elif role in played:
            yield Violation(
                "roles",
                f"worker {seat.worker} plays role {role}, which another worker plays already",
                worker=seat.worker,
            )
        # Later seats are to blame if two have the same role.
        played.add(role)


def check_holders(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation for each range of layers that no live worker holds."""
    schedule = case.schedule
    columns = range(schedule.grid.columns)
    # A role outside the grid has no layers; `check_roles` reports it.
    ranges = merge_ranges(
        {
            layers
            for seat in schedule.seats
            if seat.holds is not None or seat.role.column in columns
            for layers in schedule.held_layers_of_seat(seat)
        }
    )
    reached = 0
    # The empty range at the end of the model reveals a gap before it.
    for first, end in (*ranges, (schedule.grid.layer_count, schedule.grid.layer_count)):
        if first > reached:
            yield Violation(
                "holders",
                f"no live worker holds {_layers_and_stages_text(case, (reached, first))}: the "
                "parameters are lost",
            )
        reached = end


def _layers_and_stages_text(case: CheckContext, layers: LayerRange) -> str:
    """Return text that names layers, with the stages that lie wholly within them."""
    grid = case.schedule.grid
    stages = [
        str(stage)
        for stage, (first, end) in enumerate(grid.layers_by_stage[: grid.depth])
        if layers[0] <= first and end <= layers[1]
    ]
    if not stages:
        return layers_text(layers)
    plural = "s" if len(stages) > 1 else ""
    return f"{layers_text(layers)} (stage{plural} {', '.join(stages)})"


# --- What each worker runs ------------------------------------------------------------------------


def check_each_once(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation for each compute op that is missing, not expected, or run twice.

    The slices of each micro-batch must cover all layers once. At each slice, F, I and W (or F and
    B, or F alone) must run once.
    """
    # Most schedules: nothing is cut, nothing is missing.
    if case.has_only_stage_routes:
        return
    yield from _check_foreign_ops(case)
    # Many micro-batches share a route, so each route is judged once.
    tiling: dict[Route, str] = {}
    for pipeline, microbatch in case.microbatches():
        route = case.route_of(pipeline, microbatch)
        if route not in tiling:
            tiling[route] = _describe_untiled(case, route)
        if tiling[route]:
            yield Violation("each-once", f"micro-batch {pipeline}.{microbatch}: {tiling[route]}")
        for slice in route:
            for kind in case.op_kinds:
                if (kind, slice, pipeline, microbatch) not in case.ops:
                    yield Violation(
                        "each-once",
                        f"{kind}(micro-batch {pipeline}.{microbatch}, "
                        f"{case.schedule.slice_text(slice)}) is not run by any worker",
                    )


def _check_foreign_ops(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation for each compute op that is not expected, or repeated."""
    schedule, kinds, seen = case.schedule, case.op_kinds, dict[OpKey, Op]()
    for op in case.compute_ops():
        kind, slice, pipeline, microbatch = key = op_key(op)
        if kind not in kinds:
            yield Violation(
                "each-once",
                f"{case.op_text(op)}: a schedule with {schedule.backward} backward has no {kind}",
                op,
            )
        elif not 0 <= microbatch < schedule.grid.microbatches[pipeline]:
            yield Violation(
                "each-once",
                f"{case.op_text(op)}: pipeline {pipeline} has only "
                f"{schedule.grid.microbatches[pipeline]} micro-batches",
                op,
            )
        # Routes are read off the F, so ops elsewhere belong to no route.
        elif (OpKind.F, slice, pipeline, microbatch) not in case.ops:
            yield Violation("each-once", f"{case.op_text(op)}: the micro-batch runs no F there", op)
        elif key in seen:
            yield Violation(
                "each-once",
                f"{case.op_text(op)} at {case.time_text(op.start_ticks)} runs a second time; it "
                f"ran on {seen[key].worker} at {case.time_text(seen[key].start_ticks)}",
                op,
            )
        # The first op with this key stands; later ones repeat it.
        seen.setdefault(key, op)


def _describe_untiled(case: CheckContext, route: Route) -> str:
    """Describe where a route skips a layer or passes one twice; empty if nowhere."""
    reached, before = 0, None
    for slice in route:
        first, end = case.schedule.layers_of(slice)
        if first > reached:
            return f"no worker runs F of {layers_text((reached, first))}"
        if first < reached:
            assert before is not None
            twice = layers_text((first, min(end, reached)))
            return (
                f"F of {twice} runs in {case.schedule.slice_text(before)} and in "
                f"{case.schedule.slice_text(slice)}"
            )
        reached, before = end, slice
    layers = case.schedule.grid.layer_count
    return f"no worker runs F of {layers_text((reached, layers))}" if reached < layers else ""


def check_closing(case: CheckContext) -> Iterator[Violation]:
    """Yield violations for each live worker that ends an iteration wrongly.

    A worker must all-reduce its held layers, once each and no others. Its last op must be its only
    optimizer step.
    """
    for worker, ops in case.programs.items():
        yield from _check_reductions_of(case, worker)
        steps = [op for op in ops if op.kind is OpKind.O]
        if len(steps) != 1:
            yield Violation(
                "closing", f"worker {worker} runs O {len(steps)} times; expected 1", worker=worker
            )
        elif ops[-1] is not steps[0]:
            yield Violation(
                "closing",
                f"{case.op_text(ops[-1])} comes after {steps[0]}, which ends the iteration",
                ops[-1],
                worker,
            )


def check_only_forwards(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation for each worker with an all-reduce or optimizer step."""
    for worker, ops in case.programs.items():
        other = next((op for op in ops if op.kind in (OpKind.A, OpKind.O)), None)
        if other is not None:
            yield Violation(
                "only-forwards", f"{case.op_text(other)} is among forwards alone", other, worker
            )


def _check_reductions_of(case: CheckContext, worker: Worker) -> Iterator[Violation]:
    """Yield violations where a worker's all-reduces do not match its held layers."""
    ranges = case.schedule.held_layers(worker)
    reductions = sorted(case.reductions[worker], key=lambda reduced: reduced[0])
    if ranges == tuple(layers for layers, _ in reductions):
        return
    # The lists differ: say which layers are reduced twice, which are not held, which are left out.
    for (before, left), (after, right) in pairwise(reductions):
        if after[0] < before[1]:
            yield Violation(
                "closing",
                f"worker {worker} runs {_reduction_text(case, left)} and "
                f"{_reduction_text(case, right)}; "
                f"expected one A of {layers_text((after[0], min(after[1], before[1])))}",
                right,
                worker,
            )
    for layers, op in reductions:
        # A worker has no gradients of layers that it does not hold.
        if not case.covers_layers(ranges, layers):
            yield Violation(
                "closing",
                f"worker {worker} runs {_reduction_text(case, op)}, but holds "
                f"{ranges_text(ranges)}",
                op,
                worker,
            )
    # Without these reductions, its parameters would differ from those of its peers.
    missing = _subtract_ranges(ranges, [layers for layers, _ in reductions])
    if missing:
        yield Violation(
            "closing",
            f"worker {worker} runs no A of {ranges_text(missing)}; it holds {ranges_text(ranges)}",
            worker=worker,
        )


def _reduction_text(case: CheckContext, op: Op) -> str:
    assert op.slice is not None
    return f"A({case.schedule.slice_text(op.slice)})"


def _subtract_ranges(
    ranges: Sequence[LayerRange], others: Sequence[LayerRange]
) -> list[LayerRange]:
    """Return the layers of `ranges` that are in none of `others`, as ranges."""
    kept, removed = [], merge_ranges(others)
    for first, end in ranges:
        for low, high in removed:
            if low < end and first < high:
                if first < low:
                    kept.append((first, low))
                first = max(first, high)
        if first < end:
            kept.append((first, end))
    return kept


def check_reduced_together(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation for each all-reduced range of layers that overlaps the one before.

    All holders of a layer must reduce it as part of the same range. Ranges are compared in
    ascending order.
    """
    first_op: dict[LayerRange, Op] = {}
    for reduced in case.reductions.values():
        for layers, op in reduced:
            first_op.setdefault(layers, op)
    for before, after in pairwise(case.reduced_ranges):
        if after[0] < before[1]:
            op, other = first_op[after], first_op[before]
            shared = layers_text((after[0], min(after[1], before[1])))
            yield Violation(
                "reduced-together",
                f"{case.op_text(op)} and {case.op_text(other)} both reduce {shared}, but not "
                "the same layers; expected all holders of a layer to reduce it in one range",
                op,
            )


# --- Where and when each op runs ------------------------------------------------------------------


def check_hosts(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation for each compute op on a worker that cannot run it.

    The worker must hold the layers of the op's slice. For I, W and B, it must also have run the F
    of the same micro-batch and slice.
    """
    schedule, ops = case.schedule, case.ops
    # Workers with equal layers share the answers by slice.
    fitting: dict[tuple[LayerRange, ...], dict[int, bool]] = {}
    for worker, program in case.programs.items():
        ranges = schedule.held_layers(worker)
        fits = fitting.setdefault(ranges, {})
        for op in program:
            slice = op.slice
            if (
                op.kind not in COMPUTE_KINDS
                or slice is None
                or op.pipeline is None
                or op.microbatch is None
            ):
                continue
            if slice not in fits:
                fits[slice] = case.covers_layers(ranges, schedule.layers_of(slice))
            # F, I and W all need the parameters.
            if not fits[slice]:
                yield Violation(
                    "host",
                    f"{case.op_text(op)}: worker {worker} holds {ranges_text(ranges)}, not all of "
                    f"{layers_text(schedule.layers_of(slice))}",
                    op,
                )
            # I and W need what F has kept on its worker.
            elif (
                op.kind is not OpKind.F
                and worker
                != (first := ops[OpKey(OpKind.F, slice, op.pipeline, op.microbatch)]).worker
            ):
                yield Violation(
                    "host",
                    f"{case.op_text(op)}: its F ran on {first.worker}, which holds the activation",
                    op,
                )


def check_one_at_a_time(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation for each op that overlaps another op of its worker.

    The first op starts at tick 0 or later, and every other op at the end of the previous one in the
    program, or later. If reductions overlap with compute, a worker runs one reduction and one other
    op at a time. O then waits for both, and the ops of a program are ordered by start.
    """
    for worker, ops in case.programs.items():
        if ops and ops[0].start_ticks < 0:
            yield Violation(
                "one-at-a-time",
                f"{case.op_text(ops[0])} starts at {case.time_text(ops[0].start_ticks)}, before "
                "the iteration",
                ops[0],
                worker,
            )
        # Ops that use the same resource, compute or links, follow one another.
        for before, op in _sequential_pairs(ops, overlaps=case.schedule.has_overlap):
            if op.start_ticks < before.end_ticks:
                yield Violation(
                    "one-at-a-time",
                    f"{case.op_text(op)} starts at {case.time_text(op.start_ticks)}, but "
                    f"{case.op_text(before)}, before it in the program, ends at "
                    f"{case.time_text(before.end_ticks)}",
                    op,
                    worker,
                )
        # A reduction may overlap the next op, but must not be listed after ops that start later.
        if case.schedule.has_overlap:
            for before, op in pairwise(ops):
                if op.start_ticks < before.start_ticks:
                    yield Violation(
                        "one-at-a-time",
                        f"{case.op_text(op)} starts at {case.time_text(op.start_ticks)}, but "
                        f"{case.op_text(before)}, before it in the program, at "
                        f"{case.time_text(before.start_ticks)}",
                        op,
                        worker,
                    )


def _sequential_pairs(ops: Sequence[Op], *, overlaps: bool) -> Iterator[tuple[Op, Op]]:
    """Iterate over neighbouring ops that must not overlap; A may overlap compute if `overlaps`."""
    if not overlaps:
        yield from pairwise(ops)
        return
    # Reductions run beside other ops, except for O, which belongs to both sequences.
    yield from pairwise(op for op in ops if op.kind is not OpKind.A)
    yield from pairwise(op for op in ops if op.kind in (OpKind.A, OpKind.O))


def check_forward_order(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation for each F that starts before its input has arrived.

    The input comes from F at the previous slice of the route.
    """
    ops = case.ops
    for pipeline, microbatch in case.microbatches():
        before = None
        for slice in case.route_of(pipeline, microbatch):
            op = ops[OpKey(OpKind.F, slice, pipeline, microbatch)]
            if before is not None and op.start_ticks < before.end_ticks + case.transfer_ticks(
                before, op
            ):
                yield _early_start_violation(case, "forward-order", before, op)
            before = op


def check_backward_order(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation for each I (or B) that starts before its gradient has arrived.

    The gradient comes from the I (or B) at the next slice of the route. At the last slice, I (or B)
    waits for F instead.
    """
    gradient, ops = case.gradient_kind, case.ops
    for pipeline, microbatch in case.microbatches():
        route = case.route_of(pipeline, microbatch)
        before = ops[OpKey(OpKind.F, route[-1], pipeline, microbatch)]
        for slice in reversed(route):
            op = ops[OpKey(gradient, slice, pipeline, microbatch)]
            if op.start_ticks < before.end_ticks + case.transfer_ticks(before, op):
                yield _early_start_violation(case, "backward-order", before, op)
            before = op


def check_weight_order(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation for each W that starts before its I has ended."""
    ops = case.ops
    for (kind, slice, pipeline, microbatch), op in ops.items():
        if kind is OpKind.W:
            before = ops[OpKey(OpKind.I, slice, pipeline, microbatch)]
            if op.start_ticks < before.end_ticks + case.transfer_ticks(before, op):
                yield _early_start_violation(case, "weight-order", before, op)


def _early_start_violation(case: CheckContext, rule: str, before: Op, op: Op) -> Violation:
    """Return the violation of `rule` by `op`, which should wait for `before`."""
    hop = case.transfer_ticks(before, op)
    arrival = f", and its result takes {case.time_text(hop)} to arrive" if hop else ""
    return Violation(
        rule,
        f"{case.op_text(op)} starts at {case.time_text(op.start_ticks)}, but "
        f"{case.op_text(before)} ends at {case.time_text(before.end_ticks)}{arrival}",
        op,
    )


def check_memory(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation for each worker that needs more memory than it has.

    The first tick at which micro-batches exceed the room is reported, unless weights alone do.
    """
    sizes = case.schedule.memory
    if sizes is None:
        return
    for worker, ops in case.programs.items():
        seat = case.schedule.seat_of[worker]
        # The weights alone may be too much; no op then helps to say where.
        free = activation_room(case.schedule, seat) or 0
        if free < 0:
            yield Violation(
                "memory",
                f"worker {worker} holds {ranges_text(case.schedule.held_layers(worker))}, which "
                f"weigh {-free * sizes.unit:g} more than it has room for",
                worker=worker,
            )
            continue
        # Later excesses mostly follow from the first.
        for tick, amount in memory_profile(sizes, ops):
            if amount > free:
                op = next((op for op in ops if tick in (op.start_ticks, op.end_ticks)), None)
                remark = "" if seat.holds is None else f" with {ranges_text(seat.holds)} held"
                yield Violation(
                    "memory",
                    f"worker {worker} holds {amount * sizes.unit:g} at {case.time_text(tick)}; its "
                    f"capacity is {free * sizes.unit:g}{remark}",
                    op,
                    worker,
                )
                break


def check_all_reduce(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation for each A that starts too early or alone.

    On all workers, the A of a range of layers must start together, after the last backward of these
    layers on any worker.
    """
    schedule, final = case.schedule, case.op_kinds[-1]
    # The last backward of each slice, then of each range of layers that is reduced.
    last_of_slice: dict[int, Op] = {}
    for (kind, slice, _, _), op in case.ops.items():
        if kind is final and (
            slice not in last_of_slice or op.end_ticks > last_of_slice[slice].end_ticks
        ):
            last_of_slice[slice] = op
    last: dict[LayerRange, Op] = {}
    for slice, op in last_of_slice.items():
        for layers in case.reduced_ranges_sharing(schedule.layers_of(slice)):
            if layers not in last or op.end_ticks > last[layers].end_ticks:
                last[layers] = op
    # All reductions of a range start with the first one seen, after that backward.
    first: dict[LayerRange, Op] = {}
    for layers, op in (reduction for reduced in case.reductions.values() for reduction in reduced):
        together = first.setdefault(layers, op)
        if op.start_ticks != together.start_ticks:
            yield Violation(
                "all-reduce",
                f"{case.op_text(op)} starts at {case.time_text(op.start_ticks)}, but "
                f"{case.op_text(together)} at {case.time_text(together.start_ticks)}; all that "
                "hold a layer reduce together",
                op,
            )
        elif layers in last and op.start_ticks < last[layers].end_ticks:
            yield Violation(
                "all-reduce",
                f"{case.op_text(op)} starts at {case.time_text(op.start_ticks)}, but "
                f"{case.op_text(last[layers])} ends at {case.time_text(last[layers].end_ticks)}",
                op,
            )


def check_optimizer(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation for each O of a synchronous optimizer that starts too early.

    O must follow the last backward of the whole job. For a staggered optimizer, `check_closing`
    suffices.
    """
    if case.schedule.optimizer != "synchronous" or not case.ops:
        return
    last = max(case.ops.values(), key=lambda op: op.end_ticks)
    for ops in case.programs.values():
        if ops[-1].start_ticks < last.end_ticks:
            yield Violation(
                "optimizer",
                f"{ops[-1]} starts at {case.time_text(ops[-1].start_ticks)}, but "
                f"{case.op_text(last)} "
                f"ends at {case.time_text(last.end_ticks)} and the optimizer is synchronous",
                ops[-1],
            )


def check_period(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation unless the period is the time that the ops take.

    That time is the longest busy window of a worker or, with a synchronous optimizer, the makespan.
    In a shorter period, a worker would start the next iteration before the end of this one. Without
    any ops, the period is 0.
    """
    windows = {
        worker: (ops[0].start_ticks, ops[-1].end_ticks)
        for worker, ops in case.programs.items()
        if ops
    }
    # Forwards of a grid without micro-batches: no worker has anything to do.
    if not windows:
        if case.schedule.period_ticks:
            yield Violation(
                "period",
                f"the period is given as {case.time_text(case.schedule.period_ticks)}, but no "
                "worker has ops",
            )
        return
    # All workers then start together.
    if case.schedule.optimizer == "synchronous":
        start = min(start for start, _ in windows.values())
        windows = {worker: (start, end) for worker, (_, end) in windows.items()}
    # The busiest worker decides; all others then fit.
    worker = max(windows, key=lambda worker: windows[worker][1] - windows[worker][0])
    start, end = windows[worker]
    if case.schedule.period_ticks != end - start:
        yield Violation(
            "period",
            f"the period is given as {case.time_text(case.schedule.period_ticks)}, but worker "
            f"{worker} is busy from {case.time_text(start)} to {case.time_text(end)}: "
            f"{case.time_text(end - start)}",
            worker=worker,
        )


def check_bound(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation if the lower bound contradicts the period or the status.

    The bound must not exceed the period. It must equal the period if the status is 'optimal', and
    only then.
    """
    lower, period = case.schedule.lower_bound_ticks, case.schedule.period_ticks
    if lower > period:
        yield Violation(
            "bound",
            f"the lower bound, {case.time_text(lower)}, exceeds the period, "
            f"{case.time_text(period)}",
        )
    # The status says no more and no less than that period and bound meet.
    elif (case.schedule.status == "optimal") != (lower == period):
        yield Violation(
            "bound",
            f"the status is '{case.schedule.status}' with period {case.time_text(period)} and "
            f"lower bound {case.time_text(lower)}; 'optimal' says that they are equal",
        )


def check_deadlock(case: CheckContext) -> Iterator[Violation]:
    """Yield a violation if ops wait for each other in a circle.

    Transfers and all-reduces count, however long they really take.
    """
    # By the rules checked before, an op starts no earlier than what it waits for, and later if that
    # takes any time. A circle can therefore only consist of ops without duration, and of
    # all-reduces, which may take time on only some of their workers. If there is no circle of ops,
    # `schedules.graph.order_transfers` finds an order of transfers that adds none.
    instant = _select_ops(case, lambda op: op.end_ticks == op.start_ticks)
    if not any(instant.values()):
        return
    # All-reduces join them only if some take time: those without are there already.
    if any(
        op.end_ticks > op.start_ticks for reduced in case.reductions.values() for _, op in reduced
    ):
        instant = _select_ops(
            case, lambda op: op.end_ticks == op.start_ticks or op.kind is OpKind.A
        )
    try:
        require_acyclic(case.schedule, instant)
    except ValueError as error:
        yield Violation("deadlock", str(error).removeprefix("deadlock: "))


def _select_ops(case: CheckContext, is_wanted: Callable[[Op], bool]) -> dict[Worker, list[Op]]:
    """Return each worker's ops for which `is_wanted` is true, in program order."""
    return {worker: list(filter(is_wanted, ops)) for worker, ops in case.programs.items()}


# --- All rules ------------------------------------------------------------------------------------


MAX_VIOLATIONS = 100
"""Largest number of violations that are reported per rule."""

Rule = Callable[[CheckContext], Iterator[Violation]]
TIERS: tuple[tuple[Rule, ...], ...] = (
    (check_live_workers, check_roles, check_holders),
    (check_each_once, check_closing, check_reduced_together),
    (
        check_hosts,
        check_one_at_a_time,
        check_forward_order,
        check_backward_order,
        check_weight_order,
        check_memory,
        check_all_reduce,
        check_optimizer,
        check_period,
        check_bound,
    ),
    (check_deadlock,),
)
FORWARD_TIERS: tuple[tuple[Rule, ...], ...] = (
    (check_live_workers, check_roles, check_holders),
    (check_each_once, check_only_forwards),
    (check_hosts, check_one_at_a_time, check_forward_order, check_period, check_bound),
    (check_deadlock,),
)
"""Rules, in tiers, for schedules of forwards only (`schedules.forwards`)."""


def check(schedule: Schedule, *, forwards: bool = False) -> list[Violation]:
    """Return the rules that a schedule breaks, as violations; none if it is valid.

    Only the first tier of rules (`TIERS`) with a violation is reported, with at most MAX_VIOLATIONS
    per rule. If `forwards` is true, the schedule must have no ops but F, as for the validation of a
    model. All indices must be valid, as `schedules.codec` ensures for a file. Raises TypeError for
    anything but a schedule.
    """
    if not isinstance(schedule, Schedule):
        raise TypeError(
            f"expected a schedule, as slipstream.read gives one; got a {type(schedule).__name__}"
        )
    case = CheckContext(schedule, forwards)
    for tier in FORWARD_TIERS if forwards else TIERS:
        violations = [
            violation for rule in tier for violation in islice(rule(case), MAX_VIOLATIONS)
        ]
        if violations:
            return violations
    return []
