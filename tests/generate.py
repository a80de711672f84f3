"""Schedules of whole stages for tests: generated ones, and ones written by hand."""

import random
import re
from collections.abc import Mapping, Sequence

import networkx as nx
import numpy as np
from hypothesis import strategies as st
from msgspec.structs import replace

from slipstream.planner.job.file import Job
from slipstream.planner.loops import kernel_loops
from slipstream.planner.model.arrays import Ints, ProblemArrays, Solution
from slipstream.planner.model.assemble import build_schedule
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import Bound, Problem
from slipstream.planner.model.start_times import solution_period
from slipstream.planner.search.list_scheduler import (
    DispatchRule,
    ListScheduler,
    assign_hosts,
    hosts_in_column,
)
from slipstream.schedules.graph import Collective, Node, dependency_edges
from slipstream.schedules.measured_trace import MeasuredIteration, MeasuredOp
from slipstream.schedules.schedule import (
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
    compute_period_ticks,
)
from tests.jobs import failures, jobs


def compute_earliest(arrays: ProblemArrays, order: Ints) -> Ints:
    """The earliest start tick of every op that the order allows."""
    start, free = np.zeros_like(arrays.ops.duration), np.zeros_like(arrays.group)
    kernel_loops().set_earliest_starts(arrays.ops, order, start, free)
    return start


def op_graph(schedule: Schedule, programs: Mapping[Worker, Sequence[Op]]) -> "nx.DiGraph[Node]":
    """Ops and collectives with their `dependency_edges`, without transfers."""
    graph: nx.DiGraph[Node] = nx.DiGraph()
    for ops in programs.values():
        for op in ops:
            graph.add_node(Collective(schedule.layers_of(op.slice)) if op.kind is OpKind.A else op)
    graph.add_edges_from(dependency_edges(schedule, programs))
    return graph


def list_schedule(
    problem: Problem,
    rule: DispatchRule = DispatchRule(),  # noqa: B008 - frozen
) -> Solution:
    """What the list scheduler makes of a problem."""
    arrays = ProblemArrays(problem, assign_hosts(problem, "least-loaded"))
    order = ListScheduler(arrays).order_ops(rule)
    return arrays.make_solution(order, compute_earliest(arrays, order))


def planned(job: Job, failed: Sequence[Worker] = (), **options) -> Schedule:
    """What the list scheduler makes of a job; `options` as of `build_problem`."""
    problem = build_problem(job, failed, **options)
    return build_schedule(problem, list_schedule(problem), method="greedy")


def by_chance(job: Job, failed: Sequence[Worker], chance: random.Random, **options) -> Schedule:
    """A plan in which chance chooses who runs a stage of each micro-batch.

    It is one of the stage's live holders.
    """
    problem = build_problem(job, failed, sharing=True, **options)
    hosts = {
        unit: chance.choice(hosts_in_column(problem, unit.slice))
        for unit in assign_hosts(problem, "least-loaded")
    }
    arrays = ProblemArrays(problem, hosts)
    order = ListScheduler(arrays).order_ops(DispatchRule())
    solution = arrays.make_solution(order, compute_earliest(arrays, order))
    return build_schedule(problem, solution, method="greedy")


def measured_of(schedule: Schedule, number: int = 0, factor: float = 1.5) -> MeasuredIteration:
    """What a run could have measured: everything `factor` as long as planned."""
    return MeasuredIteration(
        number,
        tuple(
            MeasuredOp(
                op.worker,
                op.kind,
                op.slice,
                op.pipeline,
                op.microbatch,
                schedule.seconds(op.start_ticks) * factor,
                schedule.seconds(op.end_ticks) * factor,
            )
            for op in schedule.all_ops()
        ),
    )


@st.composite
def schedules(draw, **limits) -> Schedule:
    """A valid schedule of any small job, with or without failures, in any mode."""
    job = draw(jobs(**limits))
    problem = build_problem(
        job,
        draw(failures(job)),
        backward=draw(st.sampled_from(["split", "fused"])),
        optimizer=draw(st.sampled_from(["staggered", "synchronous"])),
    )
    rule = DispatchRule(forward_order=draw(st.sampled_from(["deepest", "oldest"])))
    solution = list_schedule(problem, rule)
    bound = Bound(solution_period(solution), problem.bound_scope) if draw(st.booleans()) else None
    return build_schedule(problem, solution, bound=bound, method="greedy")


Programs = dict[Worker, list[Op]]


def share_programs(
    ops: Mapping[Worker, Sequence[Op]], seats: Mapping[Worker, Seat]
) -> tuple[tuple[Seat, ...], tuple[Program, ...]]:
    """Store each distinct program once.

    `ops` by physical worker in program order, `seats` with role and holdings.

    The result is canonical: seats sorted by worker, programs in the order of their first use.
    """
    index: dict[Program, int] = {}
    numbered = []
    for worker in sorted(ops):
        program = tuple(_stored(op, seats[worker].role.pipeline) for op in ops[worker])
        numbered.append(replace(seats[worker], program=index.setdefault(program, len(index))))
    return tuple(numbered), tuple(index)


def _stored(op: Op, own_pipeline: int) -> ProgramOp:
    pipeline = None if op.pipeline == own_pipeline else op.pipeline
    return ProgramOp(op.kind, op.slice, op.microbatch, op.start_ticks, pipeline)


def programs(schedule: Schedule) -> Programs:
    return {seat.worker: schedule.ops(seat.worker) for seat in schedule.seats}


def with_programs(schedule: Schedule, ops: Mapping[Worker, list[Op]], **changes) -> Schedule:
    seats, stored = share_programs(ops, schedule.seat_of)
    return replace(schedule, seats=seats, programs=stored, **changes)


# --- By hand --------------------------------------------------------------------------------------

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
SHED = {  # worker 0.0 is alive; 1.0 runs one of its micro-batches all the same
    "0.0": "F0@0 I0@3 W0@4 A@9 O@10",
    "0.1": "F0@1 I0@2 F1@3 I1@4 W0@5 W1@6 A@7 O@8",
    "1.0": "F0@0 F0.1@1 F1@2 I0@3 W0@4 I0.1@5 W0.1@6 I1@7 W1@8 A@9 O@10",
    "1.1": "F0@1 I0@2 W0@3 F1@4 I1@5 W1@6 A@7 O@8",
}
_TOKEN = re.compile(r"([FIWBAO])(?:(\d+)\.)?(\d+)?(?:s(\d+))?@(-?\d+)")


def by_hand(
    lines: Mapping[str, str],
    *,
    columns: tuple[int, ...] = (0, 1),
    microbatches: int = 2,
    time: int = 1,
    **changes,
) -> Schedule:
    """A schedule from programs such as `F0@0 F1.3@2 A@7 O@8`: kind, [pipeline.]micro-batch, [s
    stage,] start.

    Two pipelines; `columns` gives the worker column of each stage. Every op takes `time` ticks, a
    transfer 0.
    """
    width = max(columns) + 1
    grid = Grid(
        pipelines=2,
        columns=width,
        microbatches=(microbatches,) * 2,
        stages=tuple(VirtualStage(column=column) for column in columns),
    )
    per_stage = (time,) * len(columns)
    times = Times(
        forward=per_stage,
        backward_input=per_stage,
        backward_weight=per_stage,
        all_reduce=per_stage,
        optimizer=(time,) * width,
        transfer=0,
    )
    ops = {}
    for name, line in lines.items():
        worker = Worker.parse(name)
        ops[worker] = [_op(worker, token, times) for token in line.split()]
    seats, stored = share_programs(ops, {worker: Seat(worker, worker, 0) for worker in ops})
    schedule = Schedule(
        job="by hand",
        tick_seconds=0.5,
        grid=grid,
        times=times,
        memory=None,
        backward="split",
        optimizer="staggered",
        failed=tuple(sorted(set(grid.workers()) - set(ops))),
        seats=seats,
        programs=stored,
        period_ticks=compute_period_ticks(op for line in ops.values() for op in line),
        lower_bound_ticks=1,
        status="feasible",
        method="hand",
    )
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
