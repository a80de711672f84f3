"""Schedules in PyTorch's own pipeline runtime, and its schedules here."""

import csv
import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import assume, given, settings

from slipstream.cli.exporters import ExportError
from slipstream.cli.exporters.torch_csv import write_order
from slipstream.planner.job.profiler_trace import ProfilerTraceError, read_ranges, stage_times
from slipstream.planner.plan import plan_job
from slipstream.schedules.precedence import op_key
from slipstream.schedules.schedule import COMPUTE_KINDS, OpKind, Worker
from tests.generate import schedules
from tests.interop.running import run_ranks
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
    """Torch runs linear and V-shaped orders, with its communication and with ours.

    The ranks themselves compare gradients with one process.
    """
    assert (folder / "rank2.json.gz").exists()


def test_profiles_of_torch_give_stage_times(folder):
    ranges = [range_ for rank in range(3) for range_ in read_ranges(folder / f"rank{rank}.json.gz")]
    kinds = Counter((range_.kind, range_.stage) for range_ in ranges)
    assert kinds == {
        (kind, stage): 4 for kind in (OpKind.F, OpKind.I, OpKind.W) for stage in range(3)
    }
    times, microbatches, whole = stage_times(ranges, "trace")
    assert microbatches == 4 and not whole
    for values in times.values():
        assert len(values) == 3 and all(0 < value < 60 for value in values)
    with pytest.raises(
        ProfilerTraceError,
        match="no F of stage 0, but ops of stage 2; give the traces of all ranks",
    ):
        stage_times(read_ranges(folder / "rank2.json.gz"), "rank2.json.gz")


def compute_ops(text: str) -> list[list[tuple[OpKind, int, int]]]:
    """Kind, stage and micro-batch of each rank's compute ops."""
    rows = []
    for cells in csv.reader(text.splitlines()):
        ops = [re.fullmatch(r"(\d+)([FIBW])(\d+)", cell) for cell in cells]
        rows.append([(OpKind(op[2]), int(op[1]), int(op[3])) for op in ops if op is not None])
    return rows


@settings(max_examples=40)
@given(schedules(max_chunks=2))
def test_an_order_comes_back_as_it_was_written(schedule):
    assume(schedule.grid.chains == 1)
    whole = []
    for pipeline in range(schedule.grid.pipelines):
        roles = [Worker(pipeline, column) for column in range(schedule.grid.columns)]
        seats = [seat for seat in schedule.seats if seat.role.pipeline == pipeline]
        ops = [op for seat in seats for op in schedule.programs[seat.program]]
        is_alone = all(op.pipeline is None for op in ops)
        if is_alone and all(role in schedule.player_of for role in roles):
            whole.append(pipeline)
    for pipeline in range(schedule.grid.pipelines):
        if pipeline not in whole:
            with pytest.raises(ExportError, match="torch's runtime"):
                write_order(schedule, pipeline)
            continue
        for communication in (False, True):
            rows = compute_ops(write_order(schedule, pipeline, communication=communication))
            for column, row in enumerate(rows):
                machine = schedule.player_of[Worker(pipeline, column)]
                keys = [op_key(op) for op in schedule.ops(machine) if op.kind in COMPUTE_KINDS]
                assert [(kind, stage, microbatch) for kind, stage, _, microbatch in keys] == row


def test_torch_cannot_run_both_directions():
    job = grid(1, 2, 2, more="[placement]\norder = 'bidirectional'\n")
    with pytest.raises(ExportError, match="bidirectional"):
        order_of(job)
