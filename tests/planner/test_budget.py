"""With counted steps, one seed gives one plan, whatever the machine does meanwhile."""

import sys
import threading
import time

import msgspec
import pytest

from slipstream.planner.budget import STEP_SECONDS, Budget, Clock, StepClock
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_only
from slipstream.schedules.codec import encode
from slipstream.schedules.schedule import Worker
from tests.jobs import grid

JOB = grid(
    3,
    4,
    8,
    times="forward = 10\nbackward_input = 10\nbackward_weight = 10\ntransfer = 1\noptimizer = 5\n",
    more="[memory]\ncapacity = 5\nactivation = 1\nweight_stash = 1\n[placement]\n"
    "layers = [2, 2, 2, 2]\n",
)


def planned(options):
    return encode(plan_only(options, JOB, [Worker(0, 2)]).schedule)


@pytest.mark.parametrize("layers", ["fixed", "move"])
@pytest.mark.parametrize("slices", [True, False], ids=["slices", "whole"])
def test_one_seed_gives_one_plan_also_on_a_busy_machine(layers, slices, monkeypatch):
    # Threads take turns a hundred times as often, one more keeps a core busy, and time jumps with
    # each look at it.
    options = PlanOptions(steps=300_000, layers=layers, slices=slices)
    idle = planned(options)
    over, begin = threading.Event(), time.monotonic()

    def busy():
        while not over.is_set():
            sum(range(1000))

    interval, beside = sys.getswitchinterval(), threading.Thread(target=busy)
    monkeypatch.setattr("slipstream.planner.budget.time.monotonic", lambda: begin + 1e6)
    sys.setswitchinterval(interval / 100)
    beside.start()
    try:
        assert planned(options) == idle
    finally:
        over.set()
        beside.join()
        sys.setswitchinterval(interval)


def test_more_steps_are_a_longer_search():
    """Annealing goes on from list schedules that end some 13 % above the bound."""
    job = grid(
        3,
        8,
        8,
        times="forward = 10\nbackward_input = 10\nbackward_weight = 10\ntransfer = 1\n"
        "optimizer = 5\n",
        more="[memory]\ncapacity = 8\nactivation = 1\nweight_stash = 1\n",
    )
    periods = [
        plan_only(PlanOptions(steps=steps), job, [Worker(0, 4)]).period for steps in (100, 400_000)
    ]
    assert periods[0] > periods[1]


def test_a_thread_beside_counts_for_itself_and_the_latest_of_all_is_gone_on_from():
    clock = StepClock()
    budget = Budget(deadline=1000 * STEP_SECONDS, clock=clock)
    clock.count_steps(100)
    other = budget.fork()
    clock.count_steps(200)
    other.clock.count_steps(500)
    assert clock.steps == 300 and other.clock.steps == 600
    assert other.seconds_left == pytest.approx(400 * STEP_SECONDS)
    budget.join(other)
    assert clock.steps == 600 and budget.with_share(0.5).seconds_left == pytest.approx(
        200 * STEP_SECONDS
    )


def test_seconds_are_those_of_the_machine_and_counted_steps_take_none_of_them():
    clock = Clock()
    budget = Budget(deadline=clock.now() + 1000)
    clock.count_steps(1e15)
    assert 900 < budget.seconds_left <= 1000


def test_a_part_of_the_steps_is_counted_steps_again():
    options = PlanOptions(steps=1000)
    assert options.with_limit(options.limit_seconds / 4).steps == 250 and isinstance(
        options.make_clock(), StepClock
    )
    assert msgspec.structs.replace(options, steps=None).with_limit(2.0).time_limit == 2.0
