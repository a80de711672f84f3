"""Schedules in PyTorch's own pipeline runtime, and its schedules here."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given, settings

from slipstream.planner.job.file import JobError, parse_job
from slipstream.planner.job.profiler_trace import ProfilerTraceError, read_ranges, stage_times
from slipstream.planner.judge import judge_order
from slipstream.planner.plan import plan_job
from slipstream.schedules.check import check
from slipstream.schedules.precedence import op_key
from slipstream.schedules.schedule import COMPUTE_KINDS, OpKind, Worker
from slipstream.schedules.torchcsv import TorchCsvError, read_order, write_order
from tests.generate import schedules
from tests.interop.running import run_ranks
from tests.interop.torch_orders import SIZES
from tests.jobs import grid

TIMEOUT_SECONDS = 300
V_SHAPE = "[placement]\nchunks = 2\norder = 'v'\n"


def order_of(job, **how) -> tuple[str, str]:
    schedule = plan_job(job, **{"method": "greedy", **how}).schedule
    return write_order(schedule), write_order(schedule, communication=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Where three ranks of torch's runtime have run our orders."""
    folder = tmp_path_factory.mktemp("torch")
    for name, job in (("linear", grid(1, 3, 4)), ("v", grid(1, 2, 4, more=V_SHAPE))):
        simple, full = order_of(job)
        (folder / f"{name}.csv").write_text(simple)
        (folder / f"{name}-comms.csv").write_text(full)
    run_ranks("tests.interop.ranks", 3, str(folder), seconds=TIMEOUT_SECONDS)
    return folder


@pytest.mark.slow
def test_torch_runs_our_orders_with_the_gradients_of_one_process(folder):
    """Linear and V-shaped, with torch's communication and with ours; the ranks themselves compare."""
    assert (folder / "rank2.json.gz").exists()


def test_profiles_of_torch_give_stage_times(folder):
    ranges = [one for rank in range(3) for one in read_ranges(folder / f"rank{rank}.json.gz")]
    kinds = Counter((one.kind, one.stage) for one in ranges)
    assert kinds == {(kind, stage): 4 for kind in (OpKind.F, OpKind.I, OpKind.W) for stage in range(3)}
    times, microbatches, whole = stage_times(ranges, "trace")
    assert microbatches == 4 and not whole
    assert all(len(values) == 3 and all(0 < value < 60 for value in values) for values in times.values())
    with pytest.raises(ProfilerTraceError, match="no F of stage 0, but ops of stage 2; give the traces of all ranks"):
        stage_times(read_ranges(folder / "rank2.json.gz"), "rank2.json.gz")


@pytest.fixture(scope="module")
def orders(tmp_path_factory) -> Path:
    """Where torch's own schedules have written their orders."""
    orders = tmp_path_factory.mktemp("orders")
    subprocess.run([sys.executable, "-m", "tests.interop.torch_orders", str(orders)], check=True,
                   timeout=TIMEOUT_SECONDS, capture_output=True)
    return orders


ORDERS = {"Schedule1F1B": "linear", "ScheduleInterleaved1F1B": "interleaved",
          "ScheduleInterleavedZeroBubble": "interleaved", "ScheduleZBVZeroBubble": "v", "ScheduleDualPipeV": "v"}


@pytest.mark.parametrize(("kind", "ranks", "chunks", "microbatches"), [
    (kind.__name__, *size) for kind, sizes in SIZES.items() for size in sizes])
def test_orders_of_torch_are_timed_and_judged(kind, ranks, chunks, microbatches, orders):
    """With communication and without they are one schedule, no shorter than a quick plan of ours."""
    job = grid(2, ranks, microbatches, times="forward = 10\nbackward_input = 11\nbackward_weight = 9\ntransfer = 1",
               more=f"[placement]\nchunks = {chunks}\norder = '{ORDERS[kind]}'\n")
    files = list(orders.glob(f"{kind}-{ranks}-{chunks}-{microbatches}-*.csv"))
    judged = [judge_order(job, read_order(file.read_text(), file.name), file.name) for file in files]
    assert len(files) == (1 if kind == "Schedule1F1B" else 2) and not any(one.violations for one in judged)
    first, last = (judged[index].plan.schedule for index in (0, -1))
    assert first == last
    best = plan_job(job, method="greedy", time_limit=100).schedule  # its steps end far sooner
    assert best.lower_bound_ticks <= best.period_ticks <= first.period_ticks
    fused = kind in ("Schedule1F1B", "ScheduleInterleaved1F1B")
    assert first.backward == ("fused" if fused else "split")
    assert len(list(first.all_ops())) == len(list(plan_job(job, method="greedy", backward=first.backward)
                                                   .schedule.all_ops()))


def test_schedule_1f1b_is_that_of_the_baseline(orders):
    """Its last rank, whose forwards torch numbers from 1, has them from 0."""
    rows = read_order((orders / "Schedule1F1B-4-1-8-comms.csv").read_text())
    assert [str(action) for action in rows[-1][:4]] == ["3F0", "3B0", "3F1", "3B1"]
    job = grid(1, 4, 8)
    usual = plan_job(job, method="1f1b").schedule
    assert judge_order(job, rows, "order", optimizer="synchronous").plan.schedule.period_ticks == usual.period_ticks


@settings(max_examples=40)
@given(schedules(max_chunks=2))
def test_an_order_comes_back_as_it_was_written(schedule):
    assume(schedule.grid.chains == 1)
    whole = [pipeline for pipeline in range(schedule.grid.pipelines)
             if all(Worker(pipeline, column) in schedule.player_of for column in range(schedule.grid.columns))
             and not any(op.pipeline is not None for seat in schedule.seats if seat.role.pipeline == pipeline
                         for op in schedule.programs[seat.program])]
    for pipeline in range(schedule.grid.pipelines):
        if pipeline not in whole:
            with pytest.raises(TorchCsvError, match="torch's runtime"):
                write_order(schedule, pipeline)
            continue
        for communication in (False, True):
            rows = read_order(write_order(schedule, pipeline, communication=communication))
            for column, row in enumerate(rows):
                machine = schedule.player_of[Worker(pipeline, column)]
                keys = [op_key(op) for op in schedule.ops(machine) if op.kind in COMPUTE_KINDS]
                assert [(kind, stage, microbatch) for kind, stage, _, microbatch in keys] == row


def test_what_was_exported_keeps_its_period():
    job = grid(2, 3, 5, times="forward = 2\nbackward_input = 3\nbackward_weight = 1\ntransfer = 1\noptimizer = 4")
    for backward in ("split", "fused"):
        for optimizer in ("staggered", "synchronous"):
            schedule = plan_job(job, backward=backward, optimizer=optimizer, method="greedy").schedule
            judged = judge_order(job, read_order(write_order(schedule)), "order", optimizer=optimizer)
            assert judged.plan.schedule.period_ticks <= schedule.period_ticks
            assert check(judged.plan.schedule) == [] == judged.violations


def test_torch_cannot_run_both_directions():
    job = grid(1, 2, 2, more="[placement]\norder = 'bidirectional'\n")
    with pytest.raises(TorchCsvError, match="bidirectional"):
        order_of(job)
    with pytest.raises(JobError, match="the job's pipelines run both ways"):
        judge_order(job, read_order("0F0,0B0\n1F0,1B0\n"), "order")


GOOD = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1W0,1F1,1I1,1W1\n"


@pytest.mark.parametrize(("text", "says"), [
    ("", "holds no action"),
    ("0F0,zebra\n", "line 1: 'zebra' is not an action"),
    (GOOD.splitlines()[0], "has 1 ranks; the job has 2 stages"),
    (GOOD.replace("1F0", "1F7"), "1F0 is missing"),
    (GOOD.replace("0W1", "0W0"), "0W0 is there 2 times"),
    (GOOD.replace("\n1F0", ",0F2\n1F0"), "0F2 is too much"),
    (GOOD.replace("0F0", "1F0"), "stage 1 is on ranks 0 and 1"),
    ("1F0,1I0,1W0\n0F0,0I0,0W0\n", r"its stages are on ranks \[1, 0\], the job's on \[0, 1\]; say so in the job file"),
    (GOOD.replace("0F0,0F1,0I0", "0I0,0F0,0F1"), "waits in a circle: rank 0 never gets to 0I0"),
])
def test_orders_that_are_none_for_the_job_are_refused(text, says):
    with pytest.raises((TorchCsvError, JobError), match=says):
        judge_order(grid(1, 2, 2), read_order(text, "order.csv"), "order.csv")


def test_too_much_memory_is_found_by_the_checker():
    job = parse_job("pipelines = 1\nstages = 2\nmicrobatches = 2\n[time]\nforward = 1\nbackward_input = 1\n"
                    "backward_weight = 1\n[memory]\ncapacity = 1\n")
    judged = judge_order(job, read_order(GOOD), "order")
    assert [violation.rule for violation in judged.violations] == ["memory"]


def test_pairs_to_be_overlapped_run_one_after_the_other():
    rows = read_order("0F0,0F1,0SEND_F0,(0F2;0B0)OVERLAP_F_B,0B1,0B2,0REDUCE_GRAD\n")
    assert [str(action) for action in rows[0]] == ["0F0", "0F1", "0F2", "0B0", "0B1", "0B2"]
    assert rows[0][3].kind is OpKind.B
