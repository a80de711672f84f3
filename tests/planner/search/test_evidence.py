"""Which of plan and bound leaves a gap: told by what was tried."""

import msgspec
import pytest

from slipstream.planner.budget import Budget, Clock
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.search.improvement import (
    describe_gap,
    improve_by_annealing,
    improve_by_list_schedules,
)
from slipstream.planner.search.incumbent import divide_problem
from slipstream.schedules.schedule import Worker
from tests.jobs import grid


@pytest.fixture(scope="module")
def listed():
    """List schedules of a job with little memory: above the bound."""
    problem = build_problem(
        grid(3, 8, 8, more="[memory]\ncapacity = 8\nweight_stash = 1\n"), [Worker(0, 4)]
    )
    incumbent = improve_by_list_schedules(divide_problem(problem), Budget.of_steps(40_000))
    assert incumbent.can_improve
    return incumbent


@pytest.mark.parametrize(
    ("orders", "stale", "cycles", "says"),
    [
        (0, 0.0, 0, "only list schedules were tried"),
        (
            1000,
            0.9,
            2,
            "still improving when the search ended (1,000 orders were tried): try 5 times the "
            "limit;",
        ),
        (1000, 0.4, 9, "still improving when the search ended"),
        (
            1000,
            0.9,
            9,
            "no improvement for the last 18 s (1,000 orders were tried): this is probably "
            "close to the best",
        ),
    ],
)
def test_little_tried_asks_for_more_time_and_much_in_vain_does_not(
    listed, orders, stale, cycles, says
):
    text = describe_gap(
        msgspec.structs.replace(listed, orders=orders, stale=stale, cycles=cycles), Clock(), 20.0
    )
    assert says in text and text.endswith(f"the bound counts {listed.bound.counts}")


def test_annealing_without_time_forgets_nothing(listed):
    tried = msgspec.structs.replace(listed, orders=1000, stale=0.9, cycles=9)
    after = improve_by_annealing(tried, Budget.of_steps(-400_000))
    assert (after.orders, after.stale, after.cycles) == (1000, 0.9, 9)
