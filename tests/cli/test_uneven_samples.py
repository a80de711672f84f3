"""`slipstream jitter --lengths`, and `new --trace` and `jitter` with files of StragglerAnalysis:
made here, small.
"""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.trace_alarms import found_slow
from slipstream.cli.app import app
from slipstream.planner.job.file import read_job
from slipstream.planner.job.straggler_trace import read_straggler_trace
from slipstream.planner.plan import plan_job
from slipstream.schedules.codec import write
from tests.jobs import grid

pytestmark = pytest.mark.usefixtures("counted_steps")
pyarrow = pytest.importorskip(
    "pyarrow", reason="pyarrow is not installed: pip install -e '.[parquet]'"
)


def slipstream(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def trace(path, *, slow=1.0, without=None, chunk=0, steps=(5, 9)):
    """A trace of 3 pipelines x 2 stages x 4 micro-batches.

    Forward takes 1 s, backward 2 s times a sample's length.

    Op after op without waiting; 0.5 s before the first and 0.75 s after the last. A tensor takes
    0.01 s.
    """
    from pyarrow import parquet

    random, rows = np.random.default_rng(0), []
    for step in steps:
        # Others have the same in another order: nobody is slow by them.
        of_pipeline = random.lognormal(-0.3, 0.8, 4)
        length = np.stack([np.roll(of_pipeline, pipeline) for pipeline in range(3)])
        for pipeline in range(3):
            for stage in range(2):
                factor, at = slow if (pipeline, stage) == (1, 0) else 1.0, 0.5
                rows.append((pipeline, stage, step, "params-all-gather", 0.0, 0.5, -1, 0))
                for index in range(4):
                    for kind, seconds in (("forward-compute", 1.0), ("backward-compute", 2.0)):
                        took = factor * seconds * length[pipeline, index]
                        rows.append((pipeline, stage, step, kind, at, took, index, chunk))
                        at += took
                    sends = "forward-send" if stage == 0 else "forward-recv"
                    rows.append(
                        (
                            pipeline,
                            stage,
                            step,
                            sends,
                            at,
                            0.01 if (index + stage) % 2 else 0.3,
                            -1,
                            0,
                        )
                    )
                # All pipelines have the same samples.
                longest = 12.0 * length.mean() * max(slow, 1.0)
                rows.append((pipeline, stage, step, "optimizer", 0.5 + longest, 0.75, 0, 0))
    names = ("dp_rank", "stage", "step", "optype", "start_ts", "duration", "mb_id", "mc")
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    if without is not None:
        del columns[without]
    parquet.write_table(
        pyarrow.table({name: list(values) for name, values in columns.items()}), path
    )


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(
        plan_job(
            grid(
                3, 2, 4, times="forward = 1\nbackward_input = 1\nbackward_weight = 1\noptimizer = 1"
            ),
            method="greedy",
        ).schedule,
        tmp_path / "plan.json",
    )
    return tmp_path


def test_a_job_from_a_trace(here):
    trace(here / "t.parquet", slow=2.4)
    assert slipstream("new", "--trace", "t.parquet").exit_code == 0
    job = read_job(here / "job.toml")
    assert (job.pipelines, job.stages, job.microbatches) == (3, 2, (4, 4, 4))
    assert (
        job.time.backward_input
        == job.time.backward_weight
        == pytest.approx(job.time.forward, rel=1e-3)
    )
    # All before the first and after the last.
    assert job.time.optimizer == pytest.approx([1.25] * 2)
    assert job.time.transfer == pytest.approx(0.01)  # the other end waits
    assert slipstream("new", "--trace", "t.parquet", "--transfer", 0.5, "--force").exit_code == 0
    assert read_job(here / "job.toml").time.transfer == 0.5
    ((worker, factor),) = job.time.slow
    assert str(worker) == "1.0" and factor == pytest.approx(2.4, rel=1e-2)


def test_what_unequal_samples_cost_and_dealing_gives_back(here):
    lines = [f"{'500 ' * (4 - number % 4)}{2000 * (number % 4) + 1}\n" for number in range(60)]
    (here / "lengths").write_text("".join(lines))
    found = json.loads(
        slipstream(
            "jitter", "plan.json", "--lengths", "lengths", "--attention", 0.6, "--json"
        ).stdout
    )
    assert found["iterations"] == 5 and found["planned"] < found["as_they_come"]
    assert [row["swaps"] for row in found["dealt"]] == [1, 100, 300, 1000, 3000, 6000, 10000, 30000]
    assert found["dealt"][-1]["mean"] < found["as_they_come"]
    trace(here / "t.parquet")
    found = json.loads(slipstream("jitter", "plan.json", "--lengths", "t.parquet", "--json").stdout)
    assert found["iterations"] == 2 and found["dealt"][-1]["mean"] < 0.98 * found["as_they_come"]
    assert (
        "costs known to 10 %" in slipstream("jitter", "plan.json", "--lengths", "t.parquet").stdout
    )


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("1 2\nx\n", [], "line 2 is 'x'; expected the lengths"),
        ("3 -1\n", [], "line 1 is '3 -1'"),
        ("", [], "no sample"),
        (
            "100\n200\n",
            ["--context", 150],
            "line 2: a document has 200 tokens; expected at most 150",
        ),
        ("100 100\n", ["--context", 150], "line 1: documents have 200 tokens together"),
        ("1\n2\n", [], "lengths: 2 samples; expected at least 12"),
    ],
)
def test_bad_lengths_exit_2(here, text, options, says):
    (here / "lengths").write_text(text)
    result = slipstream("jitter", "plan.json", "--lengths", "lengths", *options)
    assert (
        result.exit_code == 2
        and says in " ".join(result.stderr.split())
        and "Traceback" not in result.stderr
    )


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"without": "stage"}, "not a trace of StragglerAnalysis"),
        ({"chunk": 1}, "workers have several stages each"),
    ],
)
def test_bad_traces_exit_2(here, values, says):
    trace(here / "t.parquet", **values)
    for command in (
        ["new", "--trace", "t.parquet"],
        ["jitter", "plan.json", "--lengths", "t.parquet"],
    ):
        result = slipstream(*command)
        assert result.exit_code == 2 and says in " ".join(result.stderr.split())
    (here / "t.parquet").write_bytes(b"none")
    assert slipstream("new", "--trace", "t.parquet").exit_code == 2


@pytest.mark.parametrize("slow", [1.0, 2.4])
def test_a_trace_has_its_slow_worker_found_within_five_iterations_and_no_other(here, slow):
    trace(here / "t.parquet", slow=slow, steps=range(12))
    found = found_slow(read_straggler_trace(here / "t.parquet"))
    slow_workers = [str(detection.worker) for detection in found]
    assert slow_workers == (["1.0"] if slow > 1 else [])
    assert all(
        detection.since + detection.iterations <= 5
        and detection.factor == pytest.approx(slow, rel=0.15)
        for detection in found
    )
