"""Workers that really compute longer are found and relieved, with the numbers of one process all the same."""

import time

import pytest
import torch

from benchmarks.sleeping import MODEL, TRAINING, sleeping
from cli.shared.failure_schedules import scheduler_at_speeds
from runtime.config import parse_run_config
from runtime.coordinator import slow_detector, slow_workers
from runtime.coordinator.settling import Settling
from runtime.events import (
    EVENTS,
    Failed,
    HandedOver,
    LeftOut,
    OrderGiven,
    Recovered,
    SettlingChosen,
    Slowed,
    WentBack,
    decode,
)
from runtime.protocol.failure_injection import Slowdown, factor_at
from runtime.worker.slowed_recorder import lasting
from schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import TIMEOUT_SECONDS, Planning, at, dead, train
from tests.runtime.running import judge, schedule_for

JOB = grid(3, 2, 4, more="optimizer = 1")
SLOW = Worker(1, 1)
CONFIG, SHORT = (parse_run_config({**MODEL, "blocks": 2}, {**TRAINING, "iterations": number, "dtype": "float64"})
                 for number in (70, 35))
OP_SECONDS = 0.006
"""Ops that sleep: other processes on this machine make none of them much longer than another."""
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    """Each iteration is an observation, although it takes milliseconds."""
    monkeypatch.setattr(slow_detector, "OBSERVATION_SECONDS", 0.0)


def slowed(slowdowns, out, injections=(), config=CONFIG, **resilience):
    """Train with workers that are slow, and compare with one process. A fork server of its own knows of the sleeps."""
    with sleeping(0, 0, 0, 0):
        judge(config, JOB.microbatches, config.training.iterations)
    with sleeping(OP_SECONDS, OP_SECONDS, OP_SECONDS, OP_SECONDS):
        return train(injections, None, out, job=JOB, config=config,
                     slowdowns=tuple(Slowdown(SLOW, iteration, factor) for iteration, factor in slowdowns),
                     **{"heartbeat_timeout_seconds": 4 * TIMEOUT_SECONDS,
                        "at_speeds": scheduler_at_speeds(JOB, schedule_for(JOB), None), **resilience})


def changes_of(result):
    return [(event, change) for event in result.speed_events for change in event.changes if change.worker == SLOW]


def test_work_is_shed_and_given_back(tmp_path):
    result = slowed([(15, 2.2), (40, 1.0)], tmp_path)
    found = changes_of(result)
    event, change = next((event, change) for event, change in found if change.factor > 1)
    assert change.since >= 1 and event.planned_seconds < event.present_seconds and event.changed
    assert str(event).startswith(f"worker {SLOW} takes ") and "instead of" in str(event)
    assert any(change.factor == 1.0 for _, change in found)
    assert not any(one.dead for one in result.recoveries), "no recovery: it changes between two iterations"
    told = [decode(line) for line in (tmp_path / EVENTS).read_bytes().splitlines()]
    assert any(isinstance(one, Slowed) and one.worker == SLOW for one in told)
    assert any(isinstance(one, Recovered) and one.worker == SLOW for one in told)


def test_one_that_is_left_out_comes_back_once_it_has_measured_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(slow_workers, "FIRST_PAUSE_SECONDS", 0.2)
    result = slowed([(15, 20.0), (28, 1.0)], tmp_path)
    events = [event for event in result.speed_events if SLOW in event.left_out]
    assert events and "is left out from iteration" in str(events[0])
    back = next(one for one in result.recoveries if SLOW in one.returned)
    assert back.iteration > events[0].iteration
    told = [decode(line) for line in (tmp_path / EVENTS).read_bytes().splitlines()]
    assert any(isinstance(one, LeftOut) and one.worker == SLOW for one in told)


def test_a_death_meanwhile_is_planned_for_with_the_speeds_that_are_known(tmp_path):
    asked = []
    plan = scheduler_at_speeds(JOB, schedule_for(JOB), None)

    def at_speeds(down, speeds):
        asked.append((down, dict(speeds)))
        return plan(down, speeds)

    result = slowed([(15, 2.2)], tmp_path, [at("2.0", 50, "A")], at_speeds=at_speeds)
    assert dead(result) == ["2.0"]
    assert any(down == (Worker(2, 0),) and SLOW in speeds for down, speeds in asked)


def test_layers_move_to_the_others_and_back_once_it_has_recovered(tmp_path):
    """First work is shed, then it settles for these speeds; and for the usual ones again."""
    job, slow = grid(2, 2, 4, more="optimizer = 1\n[placement]\nlayers = [4, 4]"), Worker(1, 0)
    config = parse_run_config({**MODEL, "blocks": 8}, {**TRAINING, "iterations": 70, "dtype": "float64"})
    with sleeping(0, 0, 0, 0):
        judge(config, job.microbatches, 70)
    with sleeping(*4 * [OP_SECONDS / 4]):
        train([], None, tmp_path, job=job, config=config, heartbeat_timeout_seconds=4 * TIMEOUT_SECONDS,
              slowdowns=(Slowdown(slow, 8, 3.0), Slowdown(slow, 45, 1.0)), rebalancer=Planning(job),
              at_speeds=scheduler_at_speeds(job, schedule_for(job), None), settling=Settling())
    told = [decode(line) for line in (tmp_path / EVENTS).read_bytes().splitlines()]
    kinds = [type(one) for one in told]
    orders = [one for one in told if isinstance(one, OrderGiven)]
    chosen = next(one for one in told if isinstance(one, SettlingChosen) and one.settles)
    assert "settled" in [one.phase for one in orders] and chosen.settled_period < chosen.present_period
    assert kinds.index(Slowed) < told.index(chosen) < kinds.index(HandedOver) < kinds.index(Recovered)
    assert orders[-1].phase == "whole" and orders[-1].schedule == orders[0].schedule
    assert not {Failed, WentBack} & set(kinds)


def test_without_a_scheduler_for_speeds_they_are_told_of(tmp_path):
    result = slowed([(15, 4.0)], tmp_path, config=SHORT, at_speeds=None)
    event, change = changes_of(result)[0]
    assert change.factor > 1 and not event.changed and "goes on by the same schedule" in str(event)


def test_a_model_with_dropout_has_the_same_numbers_with_shed_work(fork_server, tmp_path):
    job = grid(3, 2, 4, more=f'optimizer = 1\nslow = {{"{SLOW}" = 2.0}}')
    assert schedule_for(job).shed > 0
    train([], fork_server, tmp_path, job=job, slowdowns=(Slowdown(SLOW, 0, 2.0),))


def test_a_slowdown_lasts_until_the_next():
    slowdowns = [Slowdown(SLOW, 10, 1.0), Slowdown(SLOW, 4, 2.0)]
    assert [factor_at(slowdowns, iteration) for iteration in (0, 3, 4, 9, 10, 99)] == [1, 1, 2, 2, 1, 1]


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_what_computes_computes_longer_and_what_sleeps_sleeps_longer(factor):
    with lasting(factor, CPU):
        began = time.thread_time()  # within, so that what lasts longer is at least this
        while time.thread_time() - began < 0.02:
            pass
    assert 0.02 * factor <= time.thread_time() - began < 0.02 * factor + 0.02
    began, busy = time.perf_counter(), time.thread_time()
    with lasting(factor, CPU):
        time.sleep(0.02)
    assert time.perf_counter() - began >= 0.02 * factor * 0.99 and time.thread_time() - busy < 0.01
