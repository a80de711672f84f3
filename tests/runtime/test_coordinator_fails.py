"""An error in the coordinator that nobody has thought of.

The workers live on, and it is started again.
"""

import pytest

from slipstream.runtime import launch
from slipstream.runtime.coordinator.decisions import transition
from slipstream.runtime.errors import RunError
from slipstream.runtime.launch import run
from slipstream.schedules.schedule import Worker
from tests.runtime.failing import CONFIG, JOB, at, planned, train
from tests.runtime.running import losses_in, schedule_for


def failing(monkeypatch, times, after=2):
    """So often, once in each of its lives, while a report is handled."""
    acknowledged, failures_left = transition.Acknowledged, [times]

    def acknowledge(order, iteration, **more):
        if iteration >= after and failures_left[0]:
            failures_left[0] -= 1
            raise KeyError("nobody has thought of this")
        return acknowledged(order, iteration, **more)

    monkeypatch.setattr(transition, "Acknowledged", acknowledge)
    return failures_left


def test_workers_live_on_while_it_is_started_again_and_the_numbers_are_the_same(
    monkeypatch, fork_server, tmp_path
):
    failures_left, pids = failing(monkeypatch, 2), []
    result = train(
        [at("1.0", 4)],
        fork_server,
        tmp_path,
        observe=lambda event: pids.append(dict(fork_server.pids)),
    )
    assert failures_left == [0] and len(losses_in(tmp_path)) == CONFIG.training.iterations
    first = next(processes for processes in pids if len(processes) == 4)
    assert all(processes.get("0.0") in (None, first["0.0"]) for processes in pids), (
        "nobody was started again"
    )
    assert (
        not (tmp_path / ".running.json").exists()
        and fork_server.pids == {}
        and result.parameter_digest
    )


def test_a_planner_that_fails_is_asked_once_more(fork_server, tmp_path):
    """As where the system has killed it for want of memory."""
    failed, plan = [], planned(JOB)

    def scheduler(down):
        if not failed:
            failed.append(down)
            raise MemoryError
        return plan(down)

    train([at("1.0", 2)], fork_server, tmp_path, scheduler=scheduler)
    assert failed == [(Worker(1, 0),)]


def test_one_that_never_plans_ends_the_run_with_a_line(monkeypatch, fork_server, tmp_path):
    monkeypatch.setattr(launch, "MAX_RESTARTS", 1)
    asked = []

    def scheduler(down):
        asked.append(down)
        raise MemoryError

    with pytest.raises(RunError, match=r"^the planner failed: MemoryError"):
        train([at("1.0", 2)], fork_server, tmp_path, scheduler=scheduler)
    assert len(asked) == 2 and fork_server.pids == {}


def test_one_that_fails_again_and_again_ends_the_run_with_its_error(
    monkeypatch, fork_server, tmp_path
):
    monkeypatch.setattr(launch, "MAX_RESTARTS", 1)
    failing(monkeypatch, 100, after=0)
    with pytest.raises(KeyError, match="nobody has thought of this"):
        run(schedule_for(JOB), CONFIG, out=tmp_path, fork_server=fork_server)
    assert fork_server.pids == {} and not (tmp_path / ".running.json").exists()
