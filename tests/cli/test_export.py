import itertools
import json
import re

import msgspec
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.exporters import ExportError
from slipstream.cli.exporters.torch_csv import write_order
from slipstream.cli.exporters.torch_rows import write_rows
from slipstream.planner.plan import plan_job
from slipstream.schedules import codec
from slipstream.schedules.schedule import OpKind, Worker
from tests import general
from tests.generate import SHED, by_hand
from tests.jobs import grid

JOB = """pipelines = 2
stages = 2
microbatches = 3
[time]
forward = 1
backward_input = 1
backward_weight = 1
"""


@pytest.fixture
def files(tmp_path):
    """A job, its whole schedule, and one with a dead worker."""
    job = grid(2, 2, 3)
    (tmp_path / "job.toml").write_text(JOB)
    codec.write(plan_job(job, method="greedy").schedule, tmp_path / "whole.json")
    codec.write(plan_job(job, [Worker(1, 0)], method="greedy").schedule, tmp_path / "broken.json")
    return tmp_path


def slipstream(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_an_order_is_written(files):
    written = slipstream(
        "export", files / "whole.json", "--to", "torch-csv", "--out", files / "order.csv"
    )
    assert written.exit_code == 0 and written.stdout == ""
    assert (files / "order.csv").read_text() == slipstream("export", files / "whole.json").stdout
    full = json.loads(
        slipstream("export", files / "whole.json", "--communication", "--json").stdout
    )
    assert (
        full["format"] == "compute_comms"
        and "1RECV_F0" in full["csv"]
        and "0REDUCE_GRAD" in full["csv"]
    )


def test_what_torch_cannot_run_is_answered_no(files):
    done = slipstream("export", files / "broken.json")
    assert done.exit_code == 1 and done.stdout == ""
    assert "worker 0.0 also runs micro-batch 1.0, of another pipeline" in done.stderr
    done = slipstream("export", files / "broken.json", "--pipeline", 1)
    assert done.exit_code == 1 and "worker 1.0 is down" in done.stderr


def test_rows_of_all_pipelines_are_written_where_they_share_microbatches(files):
    """Numbers 0 to 2 are of pipeline 0, and 3 to 5 of pipeline 1.

    Worker 1.0 is down.
    """
    done = slipstream("export", files / "broken.json", "--communication", "--json")
    answer = json.loads(done.stdout)
    rows = answer["csv"].splitlines()
    assert (answer["format"], answer["pipeline"], rows[2]) == ("compute_comms", None, "") and len(
        rows
    ) == 4
    assert (
        "0SEND_F5" in rows[0].split(",")
        and "1RECV_F5" in rows[3].split(",")
        and "a row for each" in done.stderr
    )
    alone = slipstream("export", files / "whole.json", "--communication").stdout
    both = slipstream("export", files / "whole.json", "--communication", "--all-pipelines").stdout
    assert len(alone.splitlines()) == 2 and len(both.splitlines()) == 4
    for arguments in ((), ("--communication", "--pipeline", 0)):
        refused = slipstream("export", files / "broken.json", *arguments)
        assert (
            refused.exit_code == 1
            and "or give --communication without --pipeline" in refused.stderr
        )


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (
            general.layers_moved(),
            "worker 1.0 holds layers of its own choice (0-2), not those of its stages; rows "
            "name whole"
            " stages: plan with --layers fixed",
        ),
        (
            replace(
                general.floating_layer(),
                seats=tuple(replace(seat, holds=None) for seat in general.floating_layer().seats),
            ),
            "layers 0 to 2) on 0.0 is not a whole stage; rows name whole stages: plan a job "
            "without [placement] layers",
        ),
    ],
)
def test_rows_of_other_layers_than_stages_are_refused(schedule, says):
    with pytest.raises(ExportError, match=re.escape(says)) as refused:
        write_rows(schedule)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["export", "whole.json", "--to", "onnx"],
            "--to onnx: expected torch-csv or torchtitan or megatron or hugging-face",
        ),
        (
            ["export", "whole.json", "--pipeline", "2"],
            "--pipeline 2: the schedule has pipelines 0 to 1",
        ),
        (["export", "job.toml"], "job.toml: no readable schedule"),
        (
            ["export", "whole.json", "--all-pipelines"],
            "--all-pipelines: only with --communication, and without --pipeline",
        ),
        (
            ["export", "whole.json", "--communication", "--all-pipelines", "--pipeline", "1"],
            "--all-pipelines: only with",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, says, files, monkeypatch):
    monkeypatch.chdir(files)
    done = slipstream(*arguments)
    assert done.exit_code == 2 and done.stdout == ""
    assert says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("schedule", "pipeline", "says"),
    [
        (
            by_hand(SHED),
            0,
            "stage 0 of micro-batch 0.1 is shed to worker 1.0, of another pipeline; torch's "
            "runtime knows",
        ),
        (
            by_hand(SHED),
            1,
            "worker 1.0 also runs micro-batch 0.1, of another pipeline; torch's runtime knows one",
        ),
        (general.layers_moved(), 1, "worker 1.1 is down"),
    ],
)
def test_shed_microbatches_are_answered_no(tmp_path, schedule, pipeline, says):
    codec.write(schedule, tmp_path / "plan.json")
    done = slipstream("export", tmp_path / "plan.json", "--pipeline", pipeline)
    assert done.exit_code == 1 and says in done.stderr and done.stderr.count("\n") == 1


def test_layers_of_ones_own_are_answered_no(tmp_path):
    """One pipeline, nobody down: layer 2 is held by both and cut for each micro-batch."""
    codec.write(general.floating_layer(), tmp_path / "plan.json")
    done = slipstream("export", tmp_path / "plan.json")
    assert done.exit_code == 1
    assert (
        "worker 0.0 holds layers of its own choice (0-2), not those of its stage; torch's runtime"
        in done.stderr
    )


def test_microbatches_that_are_not_cut_at_the_stages_cannot_be_written():
    schedule = general.floating_layer()
    plain = replace(schedule, seats=tuple(replace(seat, holds=None) for seat in schedule.seats))
    with pytest.raises(
        ExportError, match=r"0\.1 is not cut at the stages: layers 0 to 2 run as one slice"
    ):
        write_order(plain)


def test_workers_of_several_devices_are_so_in_torchtitan(files):
    done = slipstream(
        "export",
        files / "whole.json",
        files / "titan",
        "--to",
        "torchtitan",
        "--tensor-parallel",
        2,
    )
    assert done.exit_code == 0 and "--nproc-per-node 8 " in done.stderr
    assert "--parallelism.tensor_parallel_degree 2 " in (files / "titan" / "flags").read_text()
    export = slipstream("export", files / "whole.json", files / "one", "--to", "torchtitan")
    assert (
        export.exit_code == 0
        and "of more with --tensor-parallel" in export.stderr
        and "--nproc-per-node 4 " in export.stderr
    )
    refused = slipstream("export", files / "whole.json", "--tensor-parallel", 2)
    assert (
        refused.exit_code == 2 and "--tensor-parallel: only with --to torchtitan" in refused.stderr
    )
    refused = slipstream(
        "export", files, files / "two", "--to", "torchtitan", "--tensor-parallel", 2
    )
    assert refused.exit_code == 2 and "--tensor-parallel: only with a schedule" in refused.stderr


V = grid(
    2,
    2,
    3,
    times="forward = [1, 2, 1, 2]\nbackward_input = 1\nbackward_weight = 1\nslow = {'0.0' = 2}\n",
    more="[placement]\norder = 'v'\nchunks = 2\n",
)


def with_merged_stages(schedule):
    """The same order with two stages of a V as one slice.

    They are stages 1 and 2, which one worker has.
    """
    times = schedule.times
    longer = {
        name: (*values, values[1] + values[2])
        for name in ("forward", "backward_input", "backward_weight", "all_reduce")
        for values in [getattr(times, name)]
    }
    first, second = (OpKind.F, 1), (OpKind.F, 2)
    programs = []
    for program in schedule.programs:
        merged = []
        for op in program:
            if (op.kind, op.slice) in (first, (OpKind.I, 2), (OpKind.W, 2)):
                merged.append(replace(op, slice=4))
            elif (op.kind, op.slice) not in (second, (OpKind.I, 1), (OpKind.W, 1)):
                merged.append(op)
        programs.append(tuple(merged))
    return replace(
        schedule, slices=((1, 3),), times=replace(times, **longer), programs=tuple(programs)
    )


def test_stages_that_one_worker_runs_as_one_slice_are_written_as_stages():
    """A plan with all workers alive is exported.

    It was refused, with the advice to export a plan with all workers alive.
    """
    order = write_order(
        with_merged_stages(
            plan_job(
                msgspec.structs.replace(V, time=msgspec.structs.replace(V.time, slow=())),
                method="greedy",
            ).schedule
        )
    )
    rows = [row.split(",") for row in order.splitlines()]
    names = itertools.product(range(4), "FIW", range(3))
    expected = sorted(f"{stage}{kind}{number}" for stage, kind, number in names)
    assert sorted(cell for row in rows for cell in row) == expected
    places = {cell: place for row in rows for place, cell in enumerate(row)}
    assert all(
        places[f"1F{number}"] + 1 == places[f"2F{number}"]
        and places[f"2I{number}"] + 1 == places[f"1I{number}"]
        for number in range(3)
    )


def test_the_remedy_is_one_for_a_plan_with_all_workers_alive():
    schedule = plan_job(V, method="greedy", steps=20_000).schedule
    assert not schedule.failed and schedule.shed
    with pytest.raises(ExportError, match="--method 1f1b, which keeps every micro-batch"):
        write_order(schedule)
    assert write_order(plan_job(V, method="1f1b").schedule)
