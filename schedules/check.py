"""Does a schedule obey every rule? Decided from the schedule alone; nothing here knows how it was made.

One function a rule, in the visible lists below. Rules of a later tier take for granted what the earlier ones
establish, so checking stops after the first tier that finds something: a dropped op is reported once, as dropped.

Pipelines that share no micro-batch with others and run the same programs at the same speed behave the same at every
instant, so one of them stands for all; the same holds for groups of pipelines that do share some. Cost is linear in the
ops of the *different* groups.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import islice, pairwise

import msgspec

from schedules.equal import equal_groups
from schedules.graph import programs_of, require_acyclic
from schedules.memory import memory_profile
from schedules.precedence import OpKey, op_key
from schedules.schedule import COMPUTE_KINDS, Op, OpKind, Schedule, Worker

MAX_VIOLATIONS = 100
"""Reported per rule: a schedule with more is broken enough."""


class Violation(msgspec.Struct, frozen=True):
    """A broken rule: its name, one line with ids and values, and the offending op or worker where there is one."""

    rule: str
    message: str
    op: Op | None = None
    worker: Worker | None = None

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


def check(schedule: Schedule) -> list[Violation]:
    """Every violation of the first tier of rules that is broken; empty for a valid schedule.

    At most MAX_VIOLATIONS a rule. The schedule must have the form that `schedules.codec` asks of a file: each index
    in it points at something.
    """
    case = _Case(schedule)
    for tier in TIERS:
        found = [violation for rule in tier for violation in islice(rule(case), MAX_VIOLATIONS)]
        if found:
            return found
    return []


class _Case(msgspec.Struct, frozen=True, dict=True):
    """The schedule under check, and what several rules look up in it."""

    schedule: Schedule

    @cached_property
    def pipelines(self) -> tuple[int, ...]:
        """The pipelines to look at: one group of each set that behaves the same."""
        return tuple(sorted(pipeline for group in equal_groups(self.schedule) for pipeline in group))

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

    @property
    def kinds(self) -> tuple[OpKind, ...]:
        """The ops of one micro-batch at one stage."""
        split = self.schedule.backward == "split"
        return (OpKind.F, OpKind.I, OpKind.W) if split else (OpKind.F, OpKind.B)

    @property
    def gradient_kind(self) -> OpKind:
        """The op that produces the gradient for the stage before."""
        return self.kinds[1]

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The virtual stages of each column."""
        held: list[list[int]] = [[] for _ in range(self.schedule.grid.columns)]
        for index, stage in enumerate(self.schedule.grid.stages):
            held[stage.column].append(index)
        return tuple(map(tuple, held))

    def hop(self, before: Op, after: Op) -> int:
        """Ticks on the way from one op to the next: none within a worker."""
        return 0 if before.worker == after.worker else self.schedule.times.transfer

    def at(self, ticks: int) -> str:
        """A time or duration for a message."""
        return f"{ticks} ticks ({self.schedule.seconds(ticks):g} s)"


# --- Tier 1: who works ------------------------------------------------------------------------------------------------


def _live_workers(case: _Case) -> Iterator[Violation]:
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


def _roles(case: _Case) -> Iterator[Violation]:
    """Roles are distinct and in the grid, and every column is played by somebody."""
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
    for column in sorted(set(range(grid.columns)) - {role.column for role in played}):
        yield Violation("roles", f"no live worker plays column {column}: its stages {_listed(case.stages_of[column])} "
                        "have no parameters left")


# --- Tier 2: what each worker runs ------------------------------------------------------------------------------------


def _each_once(case: _Case) -> Iterator[Violation]:
    """Each micro-batch runs F and its backward (I and W, or B) exactly once at every stage."""
    schedule, kinds = case.schedule, case.kinds
    expected = ((kind, stage, pipeline, microbatch) for pipeline in case.pipelines
                for microbatch in range(schedule.grid.microbatches[pipeline])
                for stage in schedule.grid.path(microbatch) for kind in kinds)
    if all(map(case.ops.__contains__, expected)) and sum(1 for _ in case.compute()) == len(case.ops) == sum(
            schedule.grid.microbatches[pipeline] for pipeline in case.pipelines) * schedule.grid.depth * len(kinds):
        return  # all are there, and nothing else: the rest is for those who want to know what is wrong
    seen: dict[OpKey, Op] = {}
    for op in case.compute():
        key = (_, stage, pipeline, microbatch) = op_key(op)
        if op.kind not in kinds:
            yield Violation("each-once", f"{op}: a schedule with {schedule.backward} backward has no {op.kind}", op)
        elif not 0 <= microbatch < schedule.grid.microbatches[pipeline]:
            yield Violation("each-once", f"{op}: pipeline {pipeline} has only "
                            f"{schedule.grid.microbatches[pipeline]} micro-batches", op)
        elif stage not in (path := schedule.grid.path(microbatch)):
            yield Violation("each-once", f"{op}: the micro-batch goes along stages {path[0]} to {path[-1]}", op)
        elif key in seen:
            yield Violation("each-once", f"{op} at {case.at(op.start_ticks)} runs a second time; it ran on "
                            f"{seen[key].worker} at {case.at(seen[key].start_ticks)}", op)
        seen.setdefault(key, op)
    for pipeline in case.pipelines:
        for microbatch in range(schedule.grid.microbatches[pipeline]):
            for stage in schedule.grid.path(microbatch):
                for kind in kinds:
                    if (kind, stage, pipeline, microbatch) not in seen:
                        yield Violation("each-once", f"{kind}(micro-batch {pipeline}.{microbatch}, stage {stage}) is "
                                        "run by nobody")


def _closing(case: _Case) -> Iterator[Violation]:
    """Every live worker runs one A for each of its stages and one O, its last op."""
    for worker, ops in case.programs.items():
        held = case.stages_of[case.schedule.seat_of[worker].role.column]
        reduced = Counter(op.slice for op in ops if op.kind is OpKind.A)
        for stage in sorted(set(held) | {stage for stage in reduced if stage is not None}):
            expected = 1 if stage in held else 0
            if reduced[stage] != expected:
                yield Violation("closing", f"worker {worker} runs A(stage {stage}) {reduced[stage]} times; "
                                f"expected {expected}, for it holds stages {_listed(held)}", worker=worker)
        steps = [op for op in ops if op.kind is OpKind.O]
        if len(steps) != 1:
            yield Violation("closing", f"worker {worker} runs O {len(steps)} times; expected 1", worker=worker)
        elif ops[-1] is not steps[0]:
            yield Violation("closing", f"{ops[-1]} comes after {steps[0]}, which ends the iteration", ops[-1], worker)


# --- Tier 3: where and when -------------------------------------------------------------------------------------------


def _hosts(case: _Case) -> Iterator[Violation]:
    """All ops of a micro-batch at a stage run on one worker that holds it: its own if alive, else one peer."""
    schedule, ops = case.schedule, case.ops
    column_of = [stage.column for stage in schedule.grid.stages]
    role_of = {worker: schedule.seat_of[worker].role for worker in case.programs}
    owners = [[schedule.player_of.get(Worker(pipeline, column)) for pipeline in range(schedule.grid.pipelines)]
              for column in range(schedule.grid.columns)]
    for (kind, stage, pipeline, microbatch), op in ops.items():
        column, worker = column_of[stage], op.worker
        own = owners[column][pipeline]
        if role_of[worker].column != column:
            yield Violation("host", f"{op}: a worker of column {role_of[worker].column} does not hold stage {stage}, "
                            f"which is in column {column}", op)
        elif own is not None and worker != own:
            yield Violation("host", f"{op}: its own worker {own} is alive and should run it", op)
        elif kind is not OpKind.F and worker != (first := ops[OpKind.F, stage, pipeline, microbatch]).worker:
            yield Violation("host", f"{op}: its F ran on {first.worker}, which holds the activation", op)


def _one_at_a_time(case: _Case) -> Iterator[Violation]:
    """A worker runs one op at a time, in the order of its program, from tick 0 on."""
    for worker, ops in case.programs.items():
        if ops and ops[0].start_ticks < 0:
            yield Violation("one-at-a-time", f"{ops[0]} starts at {case.at(ops[0].start_ticks)}, before the iteration",
                            ops[0], worker)
        for before, op in pairwise(ops):
            if op.start_ticks < before.end_ticks:
                yield Violation("one-at-a-time", f"{op} starts at {case.at(op.start_ticks)}, but {before}, before it "
                                f"in the program, ends at {case.at(before.end_ticks)}", op, worker)


def _forward_order(case: _Case) -> Iterator[Violation]:
    """F(s) starts after F(s - 1) ends, plus a transfer between different workers."""
    ops, depth = case.ops, case.schedule.grid.depth
    for (kind, stage, pipeline, microbatch), op in ops.items():
        if kind is OpKind.F and stage % depth:
            before = ops[kind, stage - 1, pipeline, microbatch]
            if op.start_ticks < before.end_ticks + case.hop(before, op):
                yield _too_early(case, "forward-order", before, op)


def _backward_order(case: _Case) -> Iterator[Violation]:
    """I(s) or B(s) starts after that of s + 1 ends, plus a transfer between different workers; the last after its F."""
    gradient, ops, depth = case.gradient_kind, case.ops, case.schedule.grid.depth
    for (kind, stage, pipeline, microbatch), op in ops.items():
        if kind is not gradient:
            continue
        last = (stage + 1) % depth == 0
        before = ops[OpKind.F, stage, pipeline, microbatch] if last else ops[gradient, stage + 1, pipeline, microbatch]
        if op.start_ticks < before.end_ticks + case.hop(before, op):
            yield _too_early(case, "backward-order", before, op)


def _weight_order(case: _Case) -> Iterator[Violation]:
    """W starts after the I of the same micro-batch and stage."""
    ops = case.ops
    for (kind, stage, pipeline, microbatch), op in ops.items():
        if kind is OpKind.W:
            before = ops[OpKind.I, stage, pipeline, microbatch]
            if op.start_ticks < before.end_ticks + case.hop(before, op):
                yield _too_early(case, "weight-order", before, op)


def _too_early(case: _Case, rule: str, before: Op, op: Op) -> Violation:
    hop = case.hop(before, op)
    arrival = f", and its result takes {case.at(hop)} to arrive" if hop else ""
    return Violation(rule, f"{op} starts at {case.at(op.start_ticks)}, but {before} ends at "
                     f"{case.at(before.end_ticks)}{arrival}", op)


def _memory(case: _Case) -> Iterator[Violation]:
    """No worker ever holds more than the capacity of the column it plays."""
    memory = case.schedule.memory
    if memory is None:
        return
    for worker, ops in case.programs.items():
        capacity = memory.capacity[case.schedule.seat_of[worker].role.column]
        for tick, held in memory_profile(memory, ops):
            if held > capacity:
                op = next((op for op in ops if tick in (op.start_ticks, op.end_ticks)), None)
                yield Violation("memory", f"worker {worker} holds {held * memory.unit:g} at {case.at(tick)}; its "
                                f"capacity is {capacity * memory.unit:g}", op, worker)
                break


def _all_reduce(case: _Case) -> Iterator[Violation]:
    """The As of a stage and its copies start together, when the last backward there has ended on every worker."""
    original, last = case.schedule.grid.original, dict[int, Op]()
    final, depth = case.kinds[-1], case.schedule.grid.depth
    for (kind, stage, _, _), op in case.ops.items():
        if kind is final:
            one = stage % depth
            if one not in last or op.end_ticks > last[one].end_ticks:
                last[one] = op
    first: dict[int, Op] = {}
    for op in (op for ops in case.programs.values() for op in ops if op.kind is OpKind.A):
        assert op.slice is not None
        one = original(op.slice)
        together = first.setdefault(one, op)
        if op.start_ticks != together.start_ticks:
            yield Violation("all-reduce", f"{op} starts at {case.at(op.start_ticks)}, but {together} at "
                            f"{case.at(together.start_ticks)}; a stage's workers reduce together", op)
        elif one in last and op.start_ticks < last[one].end_ticks:
            yield Violation("all-reduce", f"{op} starts at {case.at(op.start_ticks)}, but {last[one]} ends at "
                            f"{case.at(last[one].end_ticks)}", op)


def _optimizer(case: _Case) -> Iterator[Violation]:
    """Synchronous: no O starts before the last backward of the whole job. Staggered: `_closing` says it all."""
    if case.schedule.optimizer != "synchronous" or not case.ops:
        return
    last = max(case.ops.values(), key=lambda op: op.end_ticks)
    for ops in case.programs.values():
        if ops[-1].start_ticks < last.end_ticks:
            yield Violation("optimizer", f"{ops[-1]} starts at {case.at(ops[-1].start_ticks)}, but {last} ends at "
                            f"{case.at(last.end_ticks)} and the optimizer is synchronous", ops[-1])


def _period(case: _Case) -> Iterator[Violation]:
    """The period is the longest busy window of a worker; with a synchronous optimizer, the makespan.

    Were it shorter, a worker's next iteration would start before this one has ended.
    """
    windows = {worker: (ops[0].start_ticks, ops[-1].end_ticks) for worker, ops in case.programs.items()}
    if case.schedule.optimizer == "synchronous":
        begin = min(begin for begin, _ in windows.values())
        windows = {worker: (begin, end) for worker, (_, end) in windows.items()}
    worker = max(windows, key=lambda worker: windows[worker][1] - windows[worker][0])
    begin, end = windows[worker]
    if case.schedule.period_ticks != end - begin:
        yield Violation("period", f"the period is given as {case.at(case.schedule.period_ticks)}, but worker {worker} "
                        f"is busy from {case.at(begin)} to {case.at(end)}: {case.at(end - begin)}", worker=worker)


def _bound(case: _Case) -> Iterator[Violation]:
    """The lower bound is at most the period, and the status is 'optimal' exactly when they are equal."""
    bound, period = case.schedule.lower_bound_ticks, case.schedule.period_ticks
    if bound > period:
        yield Violation("bound", f"the lower bound, {case.at(bound)}, exceeds the period, {case.at(period)}")
    elif (case.schedule.status == "optimal") != (bound == period):
        yield Violation("bound", f"the status is '{case.schedule.status}' with period {case.at(period)} and lower "
                        f"bound {case.at(bound)}; 'optimal' says that they are equal")


def _deadlock(case: _Case) -> Iterator[Violation]:
    """Ops, transfers and all-reduces never wait for each other in a circle, however long each really takes.

    By the rules before, whatever waits starts no earlier than what it waits for, and later if that takes any time. So
    only ops without duration can form a circle; and without one, `schedules.graph.transfers` orders the transfers so
    that they form none either.
    """
    instant = {worker: [op for op in ops if op.end_ticks == op.start_ticks] for worker, ops in case.programs.items()}
    if not any(instant.values()):
        return
    try:
        require_acyclic(case.schedule, instant)
    except ValueError as error:
        yield Violation("deadlock", str(error).removeprefix("deadlock: "))


def _listed(stages: tuple[int, ...]) -> str:
    return ", ".join(map(str, stages)) or "none"


Rule = Callable[[_Case], Iterator[Violation]]
TIERS: tuple[tuple[Rule, ...], ...] = (
    (_live_workers, _roles),
    (_each_once, _closing),
    (_hosts, _one_at_a_time, _forward_order, _backward_order, _weight_order, _memory, _all_reduce, _optimizer, _period,
     _bound),
    (_deadlock,),
)
