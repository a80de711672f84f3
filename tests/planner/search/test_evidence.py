"""Which of plan and bound leaves a gap: told by what was tried."""


import msgspec
import pytest

from slipstream.planner.budget import Budget, Clock
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.search.improve import anneal, list_schedules
from slipstream.planner.search.incumbent import Annealed, divided, evidence
from slipstream.schedules.schedule import Worker
from tests.jobs import grid


@pytest.fixture(scope="module")
def listed():
    """List schedules of a job with little memory: above the bound."""
    problem = build_problem(grid(3, 8, 8, more="[memory]\ncapacity = 8\nweight_stash = 1\n"), [Worker(0, 4)])
    known = list_schedules(divided(problem), Budget.of_steps(40_000))
    assert known.open
    return known


def annealed(steps, stale, cycles):
    return Annealed((), (), steps, stale, cycles)


@pytest.mark.parametrize(("effort", "says"), [
    (None, "only list schedules were tried"), (annealed(0, 0.0, 0), "only list schedules were tried"),
    (annealed(1000, 0.9, 2), "still improving when the time was up (1,000 orders were tried): try "
                             "5 times the limit;"),
    (annealed(1000, 0.4, 9), "still improving when the time was up"),
    (annealed(1000, 0.9, 9), "no improvement for the last 18 s (1,000 orders were tried): this is probably "
                             "close to the best")])
def test_little_tried_asks_for_more_time_and_much_in_vain_does_not(listed, effort, says):
    text = evidence(msgspec.structs.replace(listed, annealed=effort), Clock(), 20.0)
    assert says in text and text.endswith(f"the bound counts {listed.bound.counts}")


def test_annealing_without_time_forgets_nothing(listed):
    tried = msgspec.structs.replace(listed, annealed=annealed(1000, 0.9, 9))
    assert anneal(tried, Budget.of_steps(-400_000)).annealed == tried.annealed
