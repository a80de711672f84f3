"""What a new coordinator knows from the events of the one that has died."""

import time

import pytest

from slipstream.runtime.coordinator.decisions.commit_log import CommitLog
from slipstream.runtime.coordinator.decisions.effects import ScheduleRequest
from slipstream.runtime.coordinator.decisions.failover import (
    EMPTY_JOURNAL,
    RejoiningPhase,
    read_journal,
)
from slipstream.runtime.coordinator.decisions.orders import record_losses
from slipstream.runtime.coordinator.decisions.rebalancing import MoveCost
from slipstream.runtime.coordinator.decisions.recoveries import RecoveryClock
from slipstream.runtime.coordinator.decisions.run_state import (
    RunRules,
    TransitionBuilder,
    build_initial_state,
)
from slipstream.runtime.coordinator.decisions.transition import TimePassed, apply_event
from slipstream.runtime.coordinator.records import run_log
from slipstream.runtime.coordinator.records.run_log import RunLog
from slipstream.runtime.events import (
    CheckpointWritten,
    CoordinatorRestarted,
    Failed,
    Joined,
    NodeLost,
    Noted,
    OrderGiven,
    Recovered,
    Resumed,
    Slowed,
)
from slipstream.runtime.failure_domains import NO_SHARED_DOMAINS, FailureDomains
from slipstream.runtime.protocol.to_coordinator import Ready, RecoveryReport
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.coordinator.clock import Clock
from tests.runtime.coordinator.driving import prepared
from tests.runtime.coordinator.holding import holding, partition
from tests.runtime.running import schedule_for

WORKERS = ONE, OTHER, THIRD, FOURTH = [
    Worker(pipeline, column) for pipeline in range(2) for column in range(2)
]
BEGINS = OrderGiven(order=1, schedule="0" * 16, live=4, planned_period=1.0, phase="whole")
AGO = 100.0


@pytest.fixture
def journal(tmp_path, monkeypatch):
    """What is read of events of some time ago."""
    clock = Clock()
    clock.time = lambda: time.time() - AGO
    monkeypatch.setattr(run_log, "time", clock)

    def read(*happened, domains=NO_SHARED_DOMAINS):
        with RunLog(tmp_path) as log:
            for event in happened:
                log.write(event)
        return read_journal(tmp_path, domains)

    return read


def test_without_events_nothing_is_known(journal, tmp_path):
    nothing = read_journal(tmp_path / "nothing", NO_SHARED_DOMAINS)
    assert nothing == journal() == EMPTY_JOURNAL


def test_a_run_in_the_same_folder_begins_with_nothing(journal):
    before = (
        Slowed(worker=ONE, factor=2.0),
        Failed(worker=ONE, reason="x"),
        CheckpointWritten(checkpoint=3, took=0.5),
    )
    found = journal(BEGINS, *before, BEGINS, Noted(text="x"))
    assert (found.failures, found.speeds, found.checkpoint) == (
        0,
        {},
        None,
    ) and found.began is not None


def test_what_is_known_of_a_worker_is_forgotten_when_it_goes_or_comes_in_again(journal):
    slow = [Slowed(worker=worker, factor=2.0) for worker in WORKERS]
    found = journal(
        BEGINS, *slow, Failed(worker=ONE, reason="x"), Joined(worker=OTHER), Recovered(worker=THIRD)
    )
    assert found.speeds == {THIRD: 1.0, FOURTH: 2.0}


def failed(*workers):
    return [Failed(worker=worker, reason="x") for worker in workers]


MACHINES = FailureDomains([(ONE, OTHER), (THIRD, FOURTH)])
LOST = NodeLost(node=0, workers=(ONE, OTHER))
ALL_BEGAN = Resumed(pause=1.0, live=2)
RESTARTED = CoordinatorRestarted(live=2)


@pytest.mark.parametrize(
    ("happened", "failures"),
    [
        pytest.param([*failed(ONE, OTHER), LOST], 1, id="all of its workers"),
        pytest.param([*failed(ONE), LOST], 1, id="the other one was never there"),
        pytest.param([*failed(ONE), ALL_BEGAN, *failed(OTHER), LOST], 2, id="one, later the other"),
        pytest.param(
            [*failed(ONE), RESTARTED, *failed(OTHER)], 2, id="the second one after node 0"
        ),
        pytest.param([*failed(THIRD, ONE, FOURTH)], 2, id="two machines in one recovery"),
        pytest.param([*failed(ONE, ONE), ALL_BEGAN, *failed(ONE)], 2, id="the same one again"),
    ],
)
def test_a_machine_fails_once_in_a_recovery_as_for_the_one_before(journal, happened, failures):
    assert journal(BEGINS, *happened, domains=MACHINES).failures == failures
    # The coordinator that wrote these events has counted alike.
    rules = RunRules(
        first=prepared(schedule_for(grid(2, 2, 2))),
        iterations=range(100),
        partition=partition([0, 2, 4]),
        move_cost=MoveCost([1] * 4, None),
        domains=MACHINES,
    )
    step = TransitionBuilder(rules, build_initial_state(rules, CommitLog(), 0.0), 0.0)
    for event in happened:
        if isinstance(event, Failed):
            record_losses(step, [(event.worker, event.reason)], 0.0)
        elif event is ALL_BEGAN:
            step.update_state(recovery=step.state.recovery.with_end(1, 2, 1.0))
        elif event is RESTARTED:
            step.update_state(recovery=RecoveryClock())
    assert step.state.rebalancing.failures == failures


def test_it_goes_on_as_the_one_before_would_have(journal):
    found = journal(
        BEGINS,
        Slowed(worker=ONE, factor=1.98),
        Failed(worker=FOURTH, reason="x"),
        CheckpointWritten(checkpoint=3, took=0.5),
        CheckpointWritten(checkpoint=6, took=1.5),
    )
    rules = RunRules(
        first=prepared(schedule_for(grid(2, 2, 2))),
        iterations=range(100),
        partition=partition([0, 2, 4]),
        plans_for_speeds=True,
        move_cost=MoveCost([1] * 4, None),
        automatic_checkpoints=True,
    )
    at = time.monotonic()
    state = build_initial_state(
        rules,
        CommitLog(),
        at,
        RejoiningPhase(
            losses=(1.0,) * 8,
            first=0,
            gone=frozenset({FOURTH}),
            expected=frozenset(WORKERS),
            grid=frozenset(WORKERS),
            began=at,
        ),
        found,
    )
    assert state.rebalancing.failures == 1 and AGO - 1 < at - state.rebalancing.began < AGO + 60
    assert state.checkpoints.newest == 6 and AGO - 1 < at - state.checkpoints.began < AGO + 60
    for worker in WORKERS[:3]:
        report = RecoveryReport(
            4,
            (FOURTH,),
            7,
            holding((2 * worker.column, 2 * worker.column + 2)),
            None,
            pending=False,
        )
        state, _ = apply_event(rules, state, Ready(worker, (("127.0.0.1", 1),), known=report), at)
    state, effects = apply_event(rules, state, TimePassed(), at)
    asked = [effect for effect in effects if isinstance(effect, ScheduleRequest)]
    assert [(request.down, request.speeds) for request in asked] == [((FOURTH,), ((ONE, 2.0),))]
