"""The public names of `import slipstream` do what they say.

Importing them costs no more than is asked for.
"""

import gc
import pydoc
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import slipstream
from tests.patience import SECONDS
from tests.runtime.running import tiny_text

ROOT = Path(__file__).parents[1]


@pytest.fixture
def job(tmp_path):
    (tmp_path / "job.toml").write_text(tiny_text(pipelines=2, iterations=20))
    return slipstream.load(tmp_path / "job.toml")


def test_a_job_is_planned_checked_written_and_read(job, tmp_path):
    plan = slipstream.plan(job, failed=["1.0"], options=slipstream.PlanOptions(steps=1000))
    assert plan.schedule.failed == (slipstream.Worker(1, 0),)
    assert slipstream.check(plan.schedule) == []
    slipstream.write(plan.schedule, str(tmp_path / "plan.json"))
    assert slipstream.read(tmp_path / "plan.json") == plan.schedule


@pytest.mark.parametrize(
    ("failed", "error"),
    [
        (["2.0"], slipstream.JobError),
        (["two"], ValueError),
        (["0.0", "1.0"], slipstream.NoPlanError),
    ],
)
def test_what_cannot_be_planned(failed, error, job):
    with pytest.raises(error):
        slipstream.plan(job, failed)


def test_a_job_may_be_the_path_of_its_file(job, tmp_path):
    options = slipstream.PlanOptions(steps=1000)
    assert (
        slipstream.plan(str(tmp_path / "job.toml"), "1.0", options).schedule
        == slipstream.plan(job, "1.0", options).schedule
    )
    with pytest.raises(
        TypeError, match=r"^expected a job, as slipstream\.load gives one, .* got a dict$"
    ):
        slipstream.plan({}, "1.0", options)


def test_what_is_no_schedule_is_refused_in_one_line(tmp_path):
    with pytest.raises(
        TypeError, match=r"^expected a schedule, as slipstream\.read gives one; got a str$"
    ):
        slipstream.check("x")
    (tmp_path / "none.json").write_text("{}")
    with pytest.raises(slipstream.ScheduleError):
        slipstream.read(tmp_path / "none.json")


def test_a_job_is_trained_by_the_schedule_that_is_given(job, tmp_path):
    first = slipstream.plan(
        job, failed=["1.0"], options=slipstream.PlanOptions(steps=1000)
    ).schedule
    frozen = gc.get_freeze_count()
    result = slipstream.train(job, out=tmp_path / "run", schedule=first, iterations=3)
    assert gc.get_freeze_count() == frozen  # libraries complain at exit of what is not collected
    assert len(result.losses) == 3
    assert slipstream.read(tmp_path / "run" / "schedule.json") == first


def test_policies_are_simulated_over_a_trace(job, tmp_path):
    (tmp_path / "trace.csv").write_text(
        "0,add,a\n0,add,b\n0,add,c\n0,add,d\n3600000,remove,a\n7200000,add,a\n9000000,remove,b\n"
    )
    comparison = slipstream.simulate(
        job, tmp_path / "trace.csv", ["slipstream", "checkpoint-restart"]
    )
    rates = comparison.mean_throughputs()
    assert (
        set(rates) == {"slipstream", "checkpoint-restart"}
        and rates["slipstream"] > rates["checkpoint-restart"] > 0
    )


@pytest.mark.parametrize("name", slipstream.__all__)
def test_public_names_are_documented(name):
    assert getattr(slipstream, name).__doc__ and name in dir(slipstream)


def test_what_is_not_there():
    with pytest.raises(AttributeError, match="has no attribute 'zebra'"):
        slipstream.zebra  # noqa: B018


def test_importing_the_door_imports_neither_torch_nor_the_solver():
    code = (
        "import sys, slipstream; slipstream.Worker, slipstream.check; "
        "print([name for name in ('torch', 'ortools', 'numba') if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert done.stdout == "[]\n"


# --- What a first user types ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": "mov"}, "layers is 'mov'; expected one of 'fixed', 'move'"),
        ({"method": "foo"}, "method is 'foo'"),
        ({"steps": -1}, "steps is -1; expected a whole number"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"time_limit": float("nan")}, "time_limit is nan; expected a finite number"),
        ({"time_limit": "10"}, "is '10'"),
        ({"backward": "whole"}, "backward is 'whole'"),
        ({"optimizer": 1}, "optimizer is 1"),
    ],
)
def test_options_that_are_none_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        slipstream.PlanOptions(**options)


@pytest.mark.parametrize(
    "failed", ["1.0", [(1, 0)], slipstream.Worker(1, 0), (slipstream.Worker(1, 0),), ["1.0"]]
)
def test_a_plan_is_a_line_and_in_a_notebook_a_picture(failed, job):
    plan = slipstream.plan(job, failed, slipstream.PlanOptions(steps=100))
    assert (
        len(repr(plan)) < 200
        and "1.0 down, period" in repr(plan)
        and "2 pipelines x" in repr(plan.schedule)
    )
    assert isinstance(plan, slipstream.Plan)
    shown = plan._repr_html_()
    assert shown.startswith("<p>Plan(") and "<svg" in shown and "</svg>" in shown


@pytest.mark.parametrize(
    ("failed", "says"),
    [
        ([(1,)], r"\(1,\) is not a worker"),
        ([7], "7 is not a worker"),
        ("9.0", "^failed: the job has no worker 9.0"),
        ([("1", 0)], "not a worker"),
    ],
)
def test_errors_of_the_library_speak_of_no_options(failed, says, job):
    with pytest.raises(ValueError, match=says) as refused:
        slipstream.plan(job, failed)
    assert "--" not in str(refused.value)


def test_a_table_is_read_by_the_name_of_its_folder():
    folder = Path(slipstream.__file__).parent / "schedules" / "library" / "gpt-1.5b"
    assert slipstream.Table.load(str(folder)).lookup(()) is not None


def test_the_module_shows_what_is_public():
    assert (
        slipstream.__version__
        == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    )
    assert [name for name in dir(slipstream) if not name.startswith("__")] == sorted(
        slipstream.__all__
    )
    shown = pydoc.plain(pydoc.render_doc(slipstream))
    assert max(map(len, shown.splitlines())) < 1500 and "fewest_steps" not in shown
