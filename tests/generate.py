"""Schedules for tests: generated ones, single mutations of them that break a rule, and ones written by hand."""

import re
from collections.abc import Callable, Mapping, Sequence

from hypothesis import assume
from hypothesis import strategies as st
from msgspec.structs import replace

from planner.job.file import Job
from planner.model.arrays import ProblemArrays
from planner.model.assemble import build_schedule
from planner.model.problem import Problem, build_problem
from planner.model.solution import Solution
from planner.model.start_times import earliest, solution_period
from planner.search.assignment import assign
from planner.search.list_scheduler import DispatchRule, ListScheduler
from schedules.measured_trace import MeasuredIteration, MeasuredOp
from schedules.precedence import op_key, producers
from schedules.schedule import (
    COMPUTE_KINDS,
    Grid,
    Op,
    OpKind,
    Program,
    ProgramOp,
    Schedule,
    Seat,
    Times,
    VirtualStage,
    Worker,
    period_ticks,
)
from tests.jobs import failures, jobs


def list_schedule(problem: Problem, rule: DispatchRule = DispatchRule()) -> Solution:  # noqa: B008 - frozen
    """What the list scheduler makes of a problem."""
    arrays = ProblemArrays(problem, assign(problem, "least-loaded"))
    order = ListScheduler(arrays).order(rule)
    return arrays.solution(order, earliest(arrays, order))


def planned(job: Job, failed: Sequence[Worker] = (), **options) -> Schedule:
    """What the list scheduler makes of a job; `options` as of `build_problem`."""
    problem = build_problem(job, failed, **options)
    return build_schedule(problem, list_schedule(problem), lower_bound=1, method="greedy")


def measured_of(schedule: Schedule, number: int = 0, factor: float = 1.5) -> MeasuredIteration:
    """What a run could have measured: everything `factor` as long as planned."""
    return MeasuredIteration(number, tuple(
        MeasuredOp(op.worker, op.kind, op.slice, op.pipeline, op.microbatch, schedule.seconds(op.start_ticks) * factor,
                   schedule.seconds(op.end_ticks) * factor) for op in schedule.all_ops()))


@st.composite
def schedules(draw, **limits) -> Schedule:
    """A valid schedule of any small job, with or without failures, in any mode."""
    job = draw(jobs(**limits))
    problem = build_problem(job, draw(failures(job)), backward=draw(st.sampled_from(["split", "fused"])),
                            optimizer=draw(st.sampled_from(["staggered", "synchronous"])))
    rule = DispatchRule(forward_order=draw(st.sampled_from(["deepest", "oldest"])))
    solution = list_schedule(problem, rule)
    bound = solution_period(problem, solution) if draw(st.booleans()) else 0
    return build_schedule(problem, solution, lower_bound=bound, method="greedy")


Programs = dict[Worker, list[Op]]


def share_programs(ops: Mapping[Worker, Sequence[Op]], roles: Mapping[Worker, Worker]) -> \
        tuple[tuple[Seat, ...], tuple[Program, ...]]:
    """Store each distinct program once. `ops` by physical worker in program order, `roles` the role of each.

    The result is canonical: seats sorted by worker, programs in the order of their first use.
    """
    index: dict[Program, int] = {}
    seats = []
    for worker in sorted(ops):
        role = roles[worker]
        program = tuple(_stored(op, role.pipeline) for op in ops[worker])
        seats.append(Seat(worker, role, index.setdefault(program, len(index))))
    return tuple(seats), tuple(index)


def _stored(op: Op, own: int) -> ProgramOp:
    pipeline = None if op.pipeline == own else op.pipeline
    return ProgramOp(op.kind, op.slice, op.microbatch, op.start_ticks, pipeline)


def programs(schedule: Schedule) -> Programs:
    return {seat.worker: schedule.ops(seat.worker) for seat in schedule.seats}


def with_programs(schedule: Schedule, ops: Mapping[Worker, list[Op]], **changes) -> Schedule:
    roles = {seat.worker: seat.role for seat in schedule.seats}
    seats, stored = share_programs(ops, roles)
    return replace(schedule, seats=seats, programs=stored, **changes)


# --- Mutations: each breaks exactly what its name says ----------------------------------------------------------------


def _pick(draw, schedule: Schedule, wanted: Callable[[Op], bool]) -> tuple[Programs, Worker, int]:
    ops = programs(schedule)
    places = [(worker, index) for worker, program in ops.items() for index, op in enumerate(program) if wanted(op)]
    assume(places)
    return ops, *draw(st.sampled_from(places))


def _is_compute(op: Op) -> bool:
    return op.kind in COMPUTE_KINDS


def _lasts(op: Op) -> bool:
    return op.end_ticks > op.start_ticks


def _insert(program: list[Op], op: Op, draw) -> None:
    """Where its start belongs, or at the end of the compute ops: a file may have either."""
    if draw(st.booleans()):
        program.insert(next((index for index, other in enumerate(program) if other.start_ticks >= op.start_ticks),
                            len(program)), op)
    else:
        program.insert(next(index for index, other in enumerate(program) if not _is_compute(other)), op)


def _retimed(draw, schedule: Schedule, ops: Programs, worker: Worker, index: int, start: int) -> Schedule:
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
    period = period_ticks(flat)
    if schedule.optimizer == "synchronous":
        period = max(op.end_ticks for op in flat) - min(op.start_ticks for op in flat)
    return with_programs(schedule, ops, period_ticks=period, lower_bound_ticks=0,
                         status="optimal" if period == 0 else "feasible")


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
    """All ops of a micro-batch at a stage go to a worker that does not hold the stage, or is not its own."""
    ops, worker, index = _pick(draw, schedule, lambda op: op.kind is OpKind.F)
    unit = op_key(ops[worker][index])[1:]
    pipeline, column = unit[1], schedule.grid.stages[unit[0]].column
    rerouted = Worker(pipeline, column) not in schedule.player_of
    others = [seat.worker for seat in schedule.seats
              if seat.worker != worker and not (rerouted and seat.role.column == column)]
    assume(others)
    other = draw(st.sampled_from(others))
    taken = [op for op in ops[worker] if _is_compute(op) and op_key(op)[1:] == unit]
    ops[worker] = [op for op in ops[worker] if op not in taken]
    ops[other] = sorted([*ops[other], *(replace(op, worker=other) for op in taken)],
                        key=lambda op: (not _is_compute(op), op.start_ticks))
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
    ops[worker].insert(index + 1, replace(op, start_ticks=op.start_ticks + later, end_ticks=op.end_ticks + later))
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
    inputs = [by_key[key] for key in producers(op_key(op), schedule.path(*op_key(op)[2:])) if key in by_key]
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
    column = schedule.seat_of[worker].role.column
    assume(sum(seat.role.column == column for seat in schedule.seats) > 1)
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


def other_stage(draw, schedule):
    ops, worker, index = _pick(draw, schedule, lambda op: op.kind is not OpKind.O)
    stages = [stage for stage in range(len(schedule.grid.stages)) if stage != ops[worker][index].slice]
    assume(stages)
    ops[worker][index] = replace(ops[worker][index], slice=draw(st.sampled_from(stages)))
    return with_programs(schedule, ops)


def other_kind(draw, schedule):
    ops, worker, index = _pick(draw, schedule, _is_compute)
    op = ops[worker][index]
    ops[worker][index] = replace(op, kind=draw(st.sampled_from(sorted(COMPUTE_KINDS - {op.kind}))))
    return with_programs(schedule, ops)


def other_period(draw, schedule):
    return replace(schedule, period_ticks=max(0, schedule.period_ticks + draw(st.sampled_from([-3, -1, 1, 3]))),
                   lower_bound_ticks=0, status="feasible")


def other_bound(draw, schedule):
    wrong = [("optimal", schedule.period_ticks - 1), ("feasible", schedule.period_ticks),
             ("optimal", schedule.period_ticks + 1), ("feasible", schedule.period_ticks + 1)]
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
    return replace(schedule, seats=tuple(changed if seat == first else seat for seat in schedule.seats))


def microbatches_changed(draw, schedule):
    counts = list(schedule.grid.microbatches)
    index = draw(st.integers(0, len(counts) - 1))
    counts[index] += draw(st.sampled_from([-1, 1]))
    return replace(schedule, grid=replace(schedule.grid, microbatches=tuple(counts)))


MUTATIONS = (moved_to_another_worker, rehosted_at_the_same_time, dropped, doubled, onto_another_op, before_its_input,
             before_the_iteration, closing_op_earlier, all_reduce_later_on_one_worker, other_microbatch, other_stage,
             other_kind, other_period, other_bound, other_failures, seat_removed, role_doubled, microbatches_changed)


# --- By hand ----------------------------------------------------------------------------------------------------------

HEALTHY = {
    "0.0": "F0@0 F1@1 I0@3 W0@4 I1@5 W1@6 A@7 O@8",
    "0.1": "F0@1 I0@2 F1@3 I1@4 W0@5 W1@6 A@7 O@8",
    "1.0": "F0@0 F1@1 I0@3 W0@4 I1@5 W1@6 A@7 O@8",
    "1.1": "F0@1 I0@2 F1@3 I1@4 W0@5 W1@6 A@7 O@8",
}
BROKEN = {  # worker 1.1 is down
    "0.0": "F0@0 F1@1 I0@4 I1@8 W0@9 W1@10 A@11 O@12",
    "0.1": "F0@1 F1.0@2 I0@3 I1.0@4 F1@5 F1.1@6 I1@7 I1.1@8 W0@9 W1@10 W1.0@11 W1.1@12 A@13 O@14",
    "1.0": "F0@0 F1@1 I0@5 W0@6 I1@9 W1@10 A@11 O@12",
}
_TOKEN = re.compile(r"([FIWBAO])(?:(\d+)\.)?(\d+)?(?:s(\d+))?@(-?\d+)")


def by_hand(lines: Mapping[str, str], *, columns: tuple[int, ...] = (0, 1), microbatches: int = 2, time: int = 1,
            **changes) -> Schedule:
    """A schedule from programs such as `F0@0 F1.3@2 A@7 O@8`: kind, [pipeline.]micro-batch, [s stage,] start.

    Two pipelines; `columns` gives the worker column of each stage. Every op takes `time` ticks, a transfer 0.
    """
    width = max(columns) + 1
    grid = Grid(pipelines=2, columns=width, microbatches=(microbatches,) * 2,
                stages=tuple(VirtualStage(column=column) for column in columns))
    per_stage = (time,) * len(columns)
    times = Times(forward=per_stage, backward_input=per_stage, backward_weight=per_stage, all_reduce=per_stage,
                  optimizer=(time,) * width, transfer=0)
    ops = {Worker.parse(name): [_op(Worker.parse(name), token, times) for token in line.split()]
           for name, line in lines.items()}
    seats, stored = share_programs(ops, {worker: worker for worker in ops})
    schedule = Schedule(job="by hand", tick_seconds=0.5, grid=grid, times=times, memory=None, backward="split",
                        optimizer="staggered", failed=tuple(sorted(set(grid.workers()) - set(ops))), seats=seats,
                        programs=stored, period_ticks=period_ticks(op for line in ops.values() for op in line),
                        lower_bound_ticks=1, status="feasible", method="hand")
    return replace(schedule, **changes)


def _op(worker: Worker, token: str, times: Times) -> Op:
    match = _TOKEN.fullmatch(token)
    assert match, token
    kind = OpKind(match[1])
    stage = None if kind is OpKind.O else int(match[4] or worker.column)
    microbatch = None if match[3] is None else int(match[3])
    pipeline = None if microbatch is None else int(match[2] or worker.pipeline)
    length = times.duration_ticks(kind, worker.column if stage is None else stage, worker)
    return Op(kind, stage, pipeline, microbatch, worker, int(match[5]), int(match[5]) + length)
