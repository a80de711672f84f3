"""Does a schedule obey every rule? Decided from the schedule alone; nothing here knows how it was made.

One function a rule, listed in `TIERS`. Rules of a later tier take for granted
what the earlier ones establish, so checking stops after the first tier that finds something: a dropped op is reported
once, as dropped.

Pipelines that share no micro-batch with others and run the same programs at the same speed behave the same at every
instant, so one of them stands for all; the same holds for groups of pipelines that do share some. Cost is linear in the
ops of the *different* groups.
"""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice, pairwise

import msgspec

from slipstream.schedules.equal import equal_sets
from slipstream.schedules.graph import programs_of, require_acyclic
from slipstream.schedules.layers import joined_ranges, layers_text
from slipstream.schedules.memory import memory_profile, room
from slipstream.schedules.precedence import OpKey, op_key
from slipstream.schedules.schedule import COMPUTE_KINDS, LayerRange, Op, OpKind, Schedule, Worker

# --- The schedule under check, and what several rules look up in it ---------------------------------------------------


Route = Sequence[int]
"""The slices that a micro-batch passes, in order."""


class Violation(msgspec.Struct, frozen=True):
    """A broken rule: its name, one line with ids and values, and the offending op or worker where there is one."""

    rule: str
    message: str
    op: Op | None = None
    worker: Worker | None = None

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


class Case(msgspec.Struct, frozen=True, dict=True):
    """The schedule under check, and what several rules look up in it."""

    schedule: Schedule
    forwards: bool = False
    """Whether it is to have forwards alone."""

    @cached_property
    def pipelines(self) -> tuple[int, ...]:
        """The pipelines to look at: one group of each set that behaves the same."""
        return tuple(sorted(pipeline for equal in equal_sets(self.schedule) for pipeline in equal[0]))

    @cached_property
    def programs(self) -> Mapping[Worker, list[Op]]:
        """The ops of each worker whose role lies in `pipelines`, in program order."""
        return programs_of(self.schedule, self.pipelines)

    @cached_property
    def ops(self) -> Mapping[OpKey, Op]:
        """The compute ops, by what they compute. Each is there exactly once from the second tier on."""
        return {op_key(op): op for op in self.compute()}

    def compute(self) -> Iterator[Op]:
        """All compute ops, worker by worker."""
        return (op for ops in self.programs.values() for op in ops if op.kind in COMPUTE_KINDS)

    @cached_property
    def reductions(self) -> Mapping[Worker, list[tuple[LayerRange, Op]]]:
        """The As of each worker, with the layers whose gradients they sum."""
        layers = self.schedule.layers_by_slice
        return {worker: [(layers[op.slice], op) for op in ops if op.kind is OpKind.A and op.slice is not None]
                for worker, ops in self.programs.items()}

    @property
    def kinds(self) -> tuple[OpKind, ...]:
        """The ops of one micro-batch at one slice."""
        if self.forwards:
            return (OpKind.F,)
        split = self.schedule.backward == "split"
        return (OpKind.F, OpKind.I, OpKind.W) if split else (OpKind.F, OpKind.B)

    @property
    def gradient_kind(self) -> OpKind:
        """The op that produces the gradient for the slice before."""
        return self.kinds[1]

    def microbatches(self) -> Iterator[tuple[int, int]]:
        """Every micro-batch of `pipelines`: its pipeline and its number."""
        for pipeline in self.pipelines:
            for microbatch in range(self.schedule.grid.microbatches[pipeline]):
                yield pipeline, microbatch

    @cached_property
    def whole_stages(self) -> bool:
        """Whether every micro-batch runs every op once along its own chain of stages, and nothing else runs."""
        grid, kinds = self.schedule.grid, self.kinds
        expected = ((kind, stage, pipeline, microbatch) for pipeline, microbatch in self.microbatches()
                    for stage in grid.path(microbatch) for kind in kinds)
        count = sum(grid.microbatches[pipeline] for pipeline in self.pipelines) * grid.depth * len(kinds)
        return all(map(self.ops.__contains__, expected)) and sum(1 for _ in self.compute()) == len(self.ops) == count

    @cached_property
    def routes(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """The slices whose F each micro-batch (pipeline, number) runs, in the order of their layers."""
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for kind, slice, pipeline, microbatch in self.ops:
            if kind is OpKind.F:
                found[pipeline, microbatch].append(slice)
        layers = self.schedule.layers_by_slice
        return {microbatch: tuple(sorted(slices, key=lambda slice: layers[slice]))
                for microbatch, slices in found.items()}

    def route(self, pipeline: int, microbatch: int) -> Route:
        """The route of a micro-batch; it tiles all layers from the second tier on."""
        if self.whole_stages:
            return self.schedule.grid.path(microbatch)
        return self.routes.get((pipeline, microbatch), ())

    @cached_property
    def reduced_ranges(self) -> list[LayerRange]:
        """The layers of all As, each range once, ascending. They are disjoint from the third tier on."""
        return sorted({layers for reduced in self.reductions.values() for layers, _ in reduced})

    def reduced_with(self, layers: LayerRange) -> Iterator[LayerRange]:
        """The ranges among `reduced_ranges` that share a layer with these; for disjoint ranges."""
        ranges = self.reduced_ranges
        for index in range(max(0, bisect_left(ranges, (layers[0], 0)) - 1), len(ranges)):
            if ranges[index][0] >= layers[1]:
                return
            if ranges[index][1] > layers[0]:
                yield ranges[index]

    def covers(self, held: Sequence[LayerRange], layers: LayerRange) -> bool:
        """Whether ascending ranges that do not touch have all these layers."""
        return any(first <= layers[0] and layers[1] <= end for first, end in held)

    def hop(self, before: Op, after: Op) -> int:
        """Ticks on the way from one op to the next: none within a worker."""
        return 0 if before.worker == after.worker else self.schedule.times.transfer

    def text(self, op: Op) -> str:
        """An op for a message."""
        return self.schedule.op_text(op)

    def at(self, ticks: int) -> str:
        """A time or duration for a message."""
        return f"{ticks} ticks ({self.schedule.seconds(ticks):g} s)"


def listed(ranges: Sequence[LayerRange]) -> str:
    """Layers for a message: `layers 0 to 3, layer 6`."""
    return ", ".join(layers_text(layers) for layers in joined_ranges(ranges)) or "no layer"


# --- Who works, and who holds which layers ----------------------------------------------------------------------------


def live_workers(case: Case) -> Iterator[Violation]:
    """Every worker of the grid is either failed or has exactly one seat."""
    grid, seats = case.schedule.grid, Counter(seat.worker for seat in case.schedule.seats)
    failed = set(case.schedule.failed)
    for worker in sorted(set(seats) - set(grid.workers())):
        yield Violation("live-workers", f"worker {worker} is not in the grid of {grid.pipelines} pipelines x "
                        f"{grid.columns} columns", worker=worker)
    for worker in grid.workers():
        if worker in failed and seats[worker]:
            yield Violation("live-workers", f"worker {worker} has failed but has a program", worker=worker)
        elif worker not in failed and seats[worker] != 1:
            yield Violation("live-workers", f"live worker {worker} has {seats[worker]} programs; expected 1",
                            worker=worker)


def roles(case: Case) -> Iterator[Violation]:
    """Roles are distinct and in the grid."""
    grid, played = case.schedule.grid, set[Worker]()
    for seat in case.schedule.seats:
        role = seat.role
        if not (0 <= role.pipeline < grid.pipelines and 0 <= role.column < grid.columns):
            yield Violation("roles", f"worker {seat.worker} plays role {role}, which is not in the grid",
                            worker=seat.worker)
        elif role in played:
            yield Violation("roles", f"worker {seat.worker} plays role {role}, which another worker plays already",
                            worker=seat.worker)
        played.add(role)


def holders(case: Case) -> Iterator[Violation]:
    """Every layer is held by a live worker."""
    schedule = case.schedule
    columns = range(schedule.grid.columns)
    held = joined_ranges({layers for seat in schedule.seats if seat.holds is not None or seat.role.column in columns
                          for layers in schedule.holds_of(seat)})
    reached = 0
    for first, end in (*held, (schedule.grid.layer_count, schedule.grid.layer_count)):
        if first > reached:
            yield Violation("holders", f"no live worker holds {_layers(case, (reached, first))}: no parameters of them "
                            "are left")
        reached = end


def _layers(case: Case, layers: LayerRange) -> str:
    """Layers for a message, with the stages that they make up."""
    grid = case.schedule.grid
    stages = [str(stage) for stage, (first, end) in enumerate(grid.layers_by_stage[:grid.depth])
              if layers[0] <= first and end <= layers[1]]
    named = f" (stage{'s' if len(stages) > 1 else ''} {', '.join(stages)})" if stages else ""
    return layers_text(layers) + named


# --- What each worker runs --------------------------------------------------------------------------------------------


def each_once(case: Case) -> Iterator[Violation]:
    """Each micro-batch passes every layer once, by slices that tile them; F, I and W (or F and B) of each run once."""
    if case.whole_stages:
        return
    yield from _foreign_ops(case)
    tiling: dict[Route, str] = {}
    for pipeline, microbatch in case.microbatches():
        route = case.route(pipeline, microbatch)
        if route not in tiling:
            tiling[route] = _not_tiled(case, route)
        if tiling[route]:
            yield Violation("each-once", f"micro-batch {pipeline}.{microbatch}: {tiling[route]}")
        for slice in route:
            for kind in case.kinds:
                if (kind, slice, pipeline, microbatch) not in case.ops:
                    yield Violation("each-once", f"{kind}(micro-batch {pipeline}.{microbatch}, "
                                    f"{case.schedule.slice_text(slice)}) is run by nobody")


def _foreign_ops(case: Case) -> Iterator[Violation]:
    """Ops that no micro-batch needs."""
    schedule, kinds, seen = case.schedule, case.kinds, dict[OpKey, Op]()
    for op in case.compute():
        kind, slice, pipeline, microbatch = key = op_key(op)
        if kind not in kinds:
            yield Violation("each-once", f"{case.text(op)}: a schedule with {schedule.backward} backward has no "
                            f"{kind}", op)
        elif not 0 <= microbatch < schedule.grid.microbatches[pipeline]:
            yield Violation("each-once", f"{case.text(op)}: pipeline {pipeline} has only "
                            f"{schedule.grid.microbatches[pipeline]} micro-batches", op)
        elif (OpKind.F, slice, pipeline, microbatch) not in case.ops:
            yield Violation("each-once", f"{case.text(op)}: the micro-batch runs no F there", op)
        elif key in seen:
            yield Violation("each-once", f"{case.text(op)} at {case.at(op.start_ticks)} runs a second time; it ran on "
                            f"{seen[key].worker} at {case.at(seen[key].start_ticks)}", op)
        seen.setdefault(key, op)


def _not_tiled(case: Case, route: Route) -> str:
    """Where the slices of a route leave a layer out or pass one twice, in words; empty where they tile all layers."""
    reached, before = 0, None
    for slice in route:
        first, end = case.schedule.layers_of(slice)
        if first > reached:
            return f"nobody runs F of {layers_text((reached, first))}"
        if first < reached:
            assert before is not None
            twice = layers_text((first, min(end, reached)))
            return f"F of {twice} runs in {case.schedule.slice_text(before)} and in {case.schedule.slice_text(slice)}"
        reached, before = end, slice
    layers = case.schedule.grid.layer_count
    return f"nobody runs F of {layers_text((reached, layers))}" if reached < layers else ""


def closing(case: Case) -> Iterator[Violation]:
    """The As of a live worker tile exactly the layers that it holds; it runs one O, its last op."""
    for worker, ops in case.programs.items():
        yield from _reductions_of(case, worker)
        steps = [op for op in ops if op.kind is OpKind.O]
        if len(steps) != 1:
            yield Violation("closing", f"worker {worker} runs O {len(steps)} times; expected 1", worker=worker)
        elif ops[-1] is not steps[0]:
            yield Violation("closing", f"{case.text(ops[-1])} comes after {steps[0]}, which ends the iteration",
                            ops[-1], worker)


def only_forwards(case: Case) -> Iterator[Violation]:
    """Forwards alone: nobody runs an A or an O."""
    for worker, ops in case.programs.items():
        other = next((op for op in ops if op.kind in (OpKind.A, OpKind.O)), None)
        if other is not None:
            yield Violation("only-forwards", f"{case.text(other)} is among forwards alone", other, worker)


def _reductions_of(case: Case, worker: Worker) -> Iterator[Violation]:
    """The As of one worker."""
    held, ranges = case.schedule.holds(worker), sorted(case.reductions[worker], key=lambda reduced: reduced[0])
    if held == tuple(layers for layers, _ in ranges):
        return
    for (before, one), (after, other) in pairwise(ranges):
        if after[0] < before[1]:
            yield Violation("closing", f"worker {worker} runs {_reduction(case, one)} and {_reduction(case, other)}; "
                            f"expected one A of {layers_text((after[0], min(after[1], before[1])))}", other, worker)
    for layers, op in ranges:
        if not case.covers(held, layers):
            yield Violation("closing", f"worker {worker} runs {_reduction(case, op)}, but holds {listed(held)}", op,
                            worker)
    missing = _without(held, [layers for layers, _ in ranges])
    if missing:
        yield Violation("closing", f"worker {worker} runs no A of {listed(missing)}; it holds {listed(held)}",
                        worker=worker)


def _reduction(case: Case, op: Op) -> str:
    assert op.slice is not None
    return f"A({case.schedule.slice_text(op.slice)})"


def _without(ranges: Sequence[LayerRange], others: Sequence[LayerRange]) -> list[LayerRange]:
    """The layers of `ranges` that are in none of the others. Both ascending; `ranges` do not touch."""
    left, gone = [], joined_ranges(others)
    for first, end in ranges:
        for low, high in gone:
            if low < end and first < high:
                if first < low:
                    left.append((first, low))
                first = max(first, high)
        if first < end:
            left.append((first, end))
    return left


def reduced_together(case: Case) -> Iterator[Violation]:
    """Whoever holds any layer of an A's range runs an A with exactly that range: all As of a layer are of one range."""
    one_of: dict[LayerRange, Op] = {}
    for reduced in case.reductions.values():
        for layers, op in reduced:
            one_of.setdefault(layers, op)
    for before, after in pairwise(case.reduced_ranges):
        if after[0] < before[1]:
            op, other = one_of[after], one_of[before]
            shared = layers_text((after[0], min(after[1], before[1])))
            yield Violation("reduced-together", f"{case.text(op)} and {case.text(other)} both reduce {shared}, but not "
                            "the same layers; all that hold a layer reduce it in one range", op)


# --- Where and when each op runs --------------------------------------------------------------------------------------


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
        seat = case.schedule.seat_of[worker]
        free = room(case.schedule, seat) or 0
        if free < 0:
            yield Violation("memory", f"worker {worker} holds {listed(case.schedule.holds(worker))}, which weigh "
                            f"{-free * sizes.unit:g} more than it has room for", worker=worker)
            continue
        for tick, held in memory_profile(sizes, ops):
            if held > free:
                op = next((op for op in ops if tick in (op.start_ticks, op.end_ticks)), None)
                remark = "" if seat.holds is None else f" beside {listed(seat.holds)}"
                yield Violation("memory", f"worker {worker} holds {held * sizes.unit:g} at {case.at(tick)}; its "
                                f"capacity is {free * sizes.unit:g}{remark}", op, worker)
                break


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


# --- All rules --------------------------------------------------------------------------------------------------------


MAX_VIOLATIONS = 100
"""Reported per rule: a schedule with more is broken enough."""

Rule = Callable[[Case], Iterator[Violation]]
TIERS: tuple[tuple[Rule, ...], ...] = (
    (live_workers, roles, holders),
    (each_once, closing, reduced_together),
    (hosts, one_at_a_time, forward_order, backward_order, weight_order, memory,
     all_reduce, optimizer, period, bound),
    (deadlock,),
)
FORWARD_TIERS: tuple[tuple[Rule, ...], ...] = (
    (live_workers, roles, holders),
    (each_once, only_forwards),
    (hosts, one_at_a_time, forward_order, period, bound),
    (deadlock,),
)
"""Those of forwards alone (`schedules.forwards`)."""


def check(schedule: Schedule, *, forwards: bool = False) -> list[Violation]:
    """Every violation of the first tier of rules that is broken; empty for a valid schedule.

    `forwards`: it is to have forwards alone, as validation runs them. At most MAX_VIOLATIONS a rule. The schedule must
    have the form that `schedules.codec` asks of a file: each index in it points at something.
    """
    case = Case(schedule, forwards)
    for tier in FORWARD_TIERS if forwards else TIERS:
        found = [violation for rule in tier for violation in islice(rule(case), MAX_VIOLATIONS)]
        if found:
            return found
    return []
