"""Schedules of a run while workers go on as half their processes keep to the memory that is left."""

import json

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.shared.degraded_workers import may_degrade, with_less_room
from slipstream.planner.degraded import with_degraded
from slipstream.planner.failures import has_room
from slipstream.planner.job.file import parse_job
from slipstream.planner.plan import plan_job
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.coordinator.planning import NoScheduleError
from slipstream.schedules.check import check
from slipstream.schedules.memory import memory_peaks, room
from slipstream.schedules.schedule import Worker

TEXT = """
pipelines = 2
stages = 2
microbatches = 4
[time]
forward = 1
backward_input = 1
backward_weight = 1
[memory]
capacity = 4
weights = 1
[placement]
layers = [2, 2]
[training]
tensor_parallel = 2
degraded_ranks = true
"""
JOB = parse_job(TEXT)
SLOW = Worker(1, 0)
ROOM = (4 + 1) / 2 - 1


def test_all_that_is_asked_in_a_run_keeps_to_it():
    first = plan_job(JOB, method="greedy").schedule
    assert has_room(JOB, first) and not has_room(with_degraded(JOB, [SLOW]), first)
    scheduler, at_speeds, rebalancer = with_less_room(JOB, first, None)((SLOW,))
    assert scheduler is not None and at_speeds is not None and rebalancer is not None
    held = tuple((worker, first.holds(worker)) for worker in first.grid.workers())
    speeds = ((SLOW, 2.0),)
    for found in (scheduler(()), scheduler((Worker(0, 1),)), at_speeds((), speeds),
                  rebalancer.at_once((), held, speeds)):
        assert memory_peaks(found)[SLOW] * found.memory.unit <= ROOM


@pytest.mark.parametrize(("weights", "others"), [("1", ()), ("[1.5, 1]", ()), ("[1, 1.5]", ()), ("[3, 1]", ()),
                                                 ("[3, 1]", (Worker(0, 1),))])
def test_where_a_stage_is_lost_its_role_fits_it(weights, others):
    """All workers of stage 0 are down, and others take these roles over: one with half a device does what it can."""
    job, degraded = parse_job(TEXT.replace("weights = 1", f"weights = {weights}")), Worker(1, 1)
    first = plan_job(job, method="greedy").schedule
    (scheduler, *_), down = with_less_room(job, first, None)((*others, degraded)), (Worker(0, 0), Worker(1, 0))
    if others:
        with pytest.raises(NoScheduleError, match="no live worker"):
            scheduler(down)
        return
    found = scheduler(down)
    role, held = found.seat_of[degraded].role.column, job.memory.weights
    own_room = (4 + held[1]) / 2 - held[role]
    assert memory_peaks(found)[degraded] * found.memory.unit <= own_room < 4 and check(found) == []
    assert own_room - found.memory.unit < room(found, found.seat_of[degraded]) * found.memory.unit <= own_room


def test_what_a_table_has_fits_whoever_has_the_role():
    """The roles of stage 0 are heavier than those of stage 1, where both workers come from."""
    first = plan_job(JOB, method="greedy").schedule
    moved = with_less_room(JOB, first, None)((Worker(1, 1),))[0]((Worker(0, 0), Worker(1, 0)))
    heavy = parse_job(TEXT.replace("weights = 1", "weights = [4, 1]").replace("capacity = 4", "capacity = [6, 9]"))
    assert {seat.worker: has_room(with_degraded(heavy, [seat.worker]), moved) for seat in moved.seats} == {
        seat.worker: seat.role.column == 1 for seat in moved.seats}


@pytest.mark.parametrize(("capacity", "columns"), [("4", {0, 1}), ("[4, 2]", {0})])
def test_who_has_no_room_for_it_is_told(capacity, columns):
    job, told = parse_job(TEXT.replace("capacity = 4", f"capacity = {capacity}")), []
    assert may_degrade(job, parse_run_config({}, dict(job.training)), told.append) == columns
    assert [line.split(" that")[0] for line in told] == [f"workers of stage {one}" for one in {0, 1} - columns]
    assert may_degrade(job, parse_run_config({}, {}), told.append) == set() and len(told) == 2 - len(columns)


def plan(tmp_path, text, *arguments):
    (tmp_path / "job.toml").write_text(text)
    return CliRunner().invoke(app, ["plan", str(tmp_path / "job.toml"), "--method", "greedy", *arguments])


def test_plan_takes_them_for_slow_workers_with_less_room(tmp_path):
    usual, degraded, measured = (json.loads(plan(tmp_path, text, "--json", *more).stdout) for text, more in (
        (TEXT, []), (TEXT, ["--degraded", "1.0"]),
        (TEXT.replace("[memory]", "slow = {'1.0' = 1.5}\n[memory]"), ["--degraded", "1.0"])))
    assert usual["lower_bound"] < measured["lower_bound"] < degraded["lower_bound"]
    assert usual["period"] < measured["period"] <= degraded["period"]


@pytest.mark.parametrize(("text", "arguments", "code", "says"), [
    (TEXT, ["--degraded", "2.0"], 2, "--degraded: the job has no worker 2.0"),
    (TEXT, ["--degraded", "1.0", "--failed", "1.0"], 2, "--degraded: worker 1.0 is down"),
    (TEXT, ["--degraded", "1.0", "--normalise"], 2, "--degraded: with --normalise"),
    (TEXT.replace("parallel = 2", "parallel = 1"), ["--degraded", "1.0"], 2,
     "--degraded: a worker of the job is 1 process"),
    (TEXT.replace("capacity = 4", "capacity = 1"), ["--degraded", "1.0"], 1,
     "worker 1.0 cannot go on as half its ranks"),
])
def test_what_cannot_be_is_said_in_one_line(text, arguments, code, says, tmp_path):
    done = plan(tmp_path, text, *arguments)
    assert done.exit_code == code and says in done.stderr.replace("\n", " ") and not done.stdout
