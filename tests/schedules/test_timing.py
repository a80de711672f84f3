"""Replays of schedules under noise."""

import numpy as np
import pytest

from slipstream.planner.plan import plan_job
from slipstream.schedules.schedule import Worker
from slipstream.schedules.timing import BATCH, Noise, replay_with_noise
from tests.jobs import grid
from tests.lines_run import lines_run

pytestmark = pytest.mark.usefixtures("counted_steps")

ONES = "forward = 1\nbackward_input = 1\nbackward_weight = 1\noptimizer = 3\n"


def schedule(failed=(), **how):
    return plan_job(
        grid(3, 4, 6, times=ONES), failed, method="greedy", steps=400_000, **how
    ).schedule


@pytest.mark.parametrize("failed", [[], [Worker(1, 2)]])
@pytest.mark.parametrize("optimizer", ["staggered", "synchronous"])
def test_without_noise_the_period_is_at_most_the_planned_one(failed, optimizer):
    schedule_ = schedule(failed, optimizer=optimizer)
    periods = replay_with_noise(schedule_, Noise(), replays=3)
    assert periods.shape == (3,) and np.ptp(periods) == 0
    if optimizer == "staggered":
        assert periods[0] <= schedule_.period_ticks + 1e-9 and periods[0] >= 21
    else:  # the plan keeps all workers from starting before the last has stepped; a replay does not
        assert periods[0] <= schedule_.period_ticks + 1e-9


def test_a_proven_bound_holds_for_replays_too():
    schedule_ = schedule([Worker(1, 2)])
    assert schedule_.status == "optimal"
    assert replay_with_noise(schedule_, Noise(), replays=1, iterations=9)[0] == pytest.approx(
        schedule_.period_ticks
    )


def test_twice_as_long_ops_take_twice_as_long():
    schedule_ = plan_job(
        grid(3, 4, 6, times=ONES.replace("= 3", "= 0")), method="greedy", steps=400_000
    ).schedule
    slow = Noise(slow=dict.fromkeys(schedule_.grid.workers(), 2.0))
    assert replay_with_noise(schedule_, slow, replays=1)[0] == pytest.approx(
        2 * replay_with_noise(schedule_, Noise(), replays=1)[0]
    )


def test_a_straggler_slows_all_by_what_it_lacks():
    schedule_ = schedule()
    slow = replay_with_noise(schedule_, Noise(slow={Worker(0, 0): 2.0}), replays=1, iterations=6)[0]
    assert slow == pytest.approx(6 * 3 * 2 + 3)


def test_noise_costs_more_the_larger_it_is_and_the_same_seed_the_same():
    schedule_ = schedule([Worker(1, 2)])
    means = [
        replay_with_noise(schedule_, Noise(spread=spread), replays=300).mean()
        for spread in (0.0, 0.05, 0.2)
    ]
    assert means[0] < means[1] < means[2] < 1.5 * means[0]
    same = [replay_with_noise(schedule_, Noise(spread=0.1), replays=5, seed=3) for _ in range(2)]
    assert (same[0] == same[1]).all() and len(set(same[0])) == 5


def test_replays_advance_together():
    """A thousand are no more steps than one: ten thousand take two seconds."""
    schedule_ = schedule([Worker(1, 2)])
    replay_with_noise(
        schedule_, Noise(spread=0.05), replays=1
    )  # what is worked out once for a schedule
    lines_of_one, lines_of_many = (
        lines_run(
            lambda count=count: replay_with_noise(schedule_, Noise(spread=0.05), replays=count)
        )
        for count in (1, BATCH)
    )
    assert lines_of_one == lines_of_many > 100
    found = replay_with_noise(schedule_, Noise(spread=0.05), replays=5 * BATCH + 1)
    assert len(found) == 5 * BATCH + 1 == len(set(found))


@pytest.mark.parametrize(
    ("noise", "says"),
    [
        (Noise(spread=-1), "noise of -1"),
        (Noise(slow={Worker(1, 2): 2.0}), "no live worker 1.2"),
        (Noise(slow={Worker(0, 0): 0.0}), "worker 0.0 slower by a factor of 0"),
    ],
)
def test_noise_that_makes_no_sense_is_refused(noise, says):
    with pytest.raises(ValueError, match=says):
        replay_with_noise(schedule([Worker(1, 2)]), noise)
