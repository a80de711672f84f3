"""Forwards alone, by any schedule.

They pass the checker, and take no longer than they must.
"""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slipstream.planner.plan import plan_job
from slipstream.schedules.check import check
from slipstream.schedules.forwards import schedule_forwards
from slipstream.schedules.schedule import OpKind, ProgramOp, Worker
from tests.jobs import failures, grid, jobs


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_plan_has_valid_forwards(data) -> None:
    job = data.draw(jobs())
    failed = data.draw(failures(job))
    schedule = plan_job(job, failed, method="greedy", steps=400_000).schedule
    alone = schedule_forwards(schedule)
    assert check(alone, forwards=True) == [] and check(alone) != []
    assert sorted(map(name, alone.all_ops())) == sorted(
        name(op) for op in schedule.all_ops() if op.kind is OpKind.F
    )
    assert (
        fill_and_work(alone)
        <= last_end(alone)
        <= 1.25 * fill_and_work(alone) + max(alone.times.forward)
    )


def name(op):
    return op.kind, op.slice, op.pipeline, op.microbatch, op.worker


def last_end(alone) -> int:
    return max((op.end_ticks for op in alone.all_ops()), default=0)


def fill_and_work(alone) -> int:
    """The ticks that no schedule of these forwards on these workers undercuts.

    For some worker they are the way to its first forward, all of its forwards, and the way from its
    last one to the end.
    """
    ops = sorted(alone.all_ops(), key=lambda op: op.start_ticks)
    before, after = defaultdict(dict), defaultdict(dict)
    for ways, row in ((before, ops), (after, ops[::-1])):
        of_microbatch = defaultdict(list)
        for op in row:
            way = 0
            if of_microbatch[op.pipeline, op.microbatch]:
                near = of_microbatch[op.pipeline, op.microbatch][-1]
                way = (
                    ways[near.worker][near]
                    + near.end_ticks
                    - near.start_ticks
                    + (alone.times.transfer if near.worker != op.worker else 0)
                )
            ways[op.worker][op] = way
            of_microbatch[op.pipeline, op.microbatch].append(op)
    ways = []
    for worker, ops in before.items():
        work = sum(op.end_ticks - op.start_ticks for op in ops)
        ways.append(min(ops.values()) + work + min(after[worker].values()))
    return max(ways, default=0)


@pytest.mark.parametrize(
    "placement",
    [
        "order = 'linear'",
        "order = 'v'\nchunks = 2",
        "order = 'interleaved'\nchunks = 2",
        "order = 'bidirectional'",
    ],
)
@pytest.mark.parametrize("failed", [[], ["1.2"], ["0.0", "2.3"]])
def test_they_take_little_more_than_filling_and_their_work(placement, failed) -> None:
    job = grid(
        3,
        4,
        12,
        times="forward = 10\nbackward_input = 9\nbackward_weight = 8\ntransfer = 1",
        more=f"[placement]\n{placement}\n",
    )
    alone = schedule_forwards(
        plan_job(
            job, [Worker.parse(name) for name in failed], method="greedy", steps=400_000
        ).schedule
    )
    assert last_end(alone) <= 1.02 * fill_and_work(alone)


@pytest.mark.parametrize("failed", [[], ["1.2"], ["0.0", "2.3"]])
def test_their_period_is_the_work_of_the_busiest_worker(failed) -> None:
    # Of 3 x 4 workers, with 6 micro-batches each, one runs 6 forwards, and for the others its share
    # of a dead peer's 6.
    schedule = plan_job(
        grid(3, 4, 6), [Worker.parse(name) for name in failed], method="greedy"
    ).schedule
    alone = schedule_forwards(schedule)
    load = max(len(program) for program in alone.programs)
    assert alone.period_ticks == load * schedule.times.forward[0]
    assert (alone.status == "optimal") == (not failed)
    assert alone.lower_bound_ticks == -(-72 * schedule.times.forward[0] // len(schedule.seats))
    assert load <= 9


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda ops: ops[:-1], "each-once"),
        (lambda ops: (*ops, ProgramOp(OpKind.O, None, None, 99)), "only-forwards"),
        (lambda ops: (*ops, ProgramOp(OpKind.B, 3, 0, 99)), "each-once"),
        (
            lambda ops: tuple(replace(op, start_ticks=op.start_ticks - 1) for op in ops),
            "forward-order",
        ),
        (lambda ops: (replace(ops[0], start_ticks=ops[1].start_ticks), *ops[1:]), "one-at-a-time"),
    ],
)
def test_what_is_wrong_is_found(change, rule) -> None:
    alone = schedule_forwards(plan_job(grid(2, 4, 3), method="greedy").schedule)
    last = alone.seat_of[Worker(0, 3)].program
    programs = list(alone.programs)
    programs[last] = change(programs[last])
    broken = replace(alone, programs=tuple(programs))
    assert rule in {violation.rule for violation in check(broken, forwards=True)}
