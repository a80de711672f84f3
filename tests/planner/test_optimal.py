"""Tiny problems against the true optimum."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.bounds import lower_bound
from planner.plan import plan_job
from planner.problem import build_problem
from schedules.schedule import Worker
from tests.jobs import grid
from tests.planner.brute_force import optimal_period


@st.composite
def tiny(draw):
    """A job small enough to enumerate, its failures and modes."""
    backward = draw(st.sampled_from(["split", "fused"]))
    optimizer = draw(st.sampled_from(["staggered", "synchronous"]))
    pipelines, stages, counts, failed = draw(st.sampled_from([
        (1, 1, 2, []), (1, 2, 2, []), (1, 3, 1, []), (2, 2, 1, ["1.0"]), (2, 2, 1, ["0.1"]), (3, 2, 1, ["2.1"]),
        (2, 1, 1, ["0.0"]), (3, 2, 1, ["0.0", "1.1"]), (2, 3, 1, ["1.1"])]))
    both_ways = stages == 2 and draw(st.booleans())
    memory = draw(st.sampled_from(["", f"[memory]\ncapacity = {1 + both_ways}\nweight_stash = 1\n",
                                   f"[memory]\ncapacity = {3 + both_ways}\nactivation = 2\nweight_stash = 1\n"]))
    # Enumeration counts the memory of a forward that takes no time; half-open intervals do not.
    least = {"forward": 1 if memory else 0, "backward_input": 0, "backward_weight": 0, "optimizer": 0}
    times = "\n".join(f"{key} = {draw(st.lists(st.integers(low, 3), min_size=stages, max_size=stages).filter(any))}"
                      for key, low in least.items())
    times += f"\nall_reduce = {draw(st.integers(0, 1))}\ntransfer = {draw(st.integers(0, 2))}"
    placement = "[placement]\norder = 'bidirectional'\n" if both_ways else ""
    job = grid(pipelines, stages, counts, times=times, more=memory + placement)
    return job, [Worker.parse(name) for name in failed], backward, optimizer


@settings(max_examples=40)
@given(tiny())
def test_cp_sat_finds_the_true_optimum(case):
    job, failed, backward, optimizer = case
    problem = build_problem(job, failed, backward=backward, optimizer=optimizer)
    optimum = optimal_period(problem)
    assert lower_bound(problem) <= optimum
    plan = plan_job(job, failed, backward=backward, optimizer=optimizer)
    assert plan.schedule.status == "optimal"
    assert plan.schedule.period_ticks == plan.schedule.lower_bound_ticks == optimum


@pytest.mark.parametrize(("capacity", "optimum"), [(1, 6), (2, 6)])
def test_two_microbatches_on_one_worker(capacity, optimum):
    problem = build_problem(grid(1, 1, 2, more=f"[memory]\ncapacity = {capacity}\nweight_stash = 1\n"))
    assert optimal_period(problem) == optimum


@pytest.mark.parametrize(("stages", "microbatches", "capacity", "optimum"), [(2, 2, 1, 10), (2, 2, 2, 7), (3, 1, 1, 7)])
def test_round_trips_with_little_memory(stages, microbatches, capacity, optimum):
    """Room for one: every micro-batch makes its round trip alone, and the bound counts the first and the last."""
    problem = build_problem(grid(1, stages, microbatches, more=f"[memory]\ncapacity = {capacity}\nweight_stash = 1\n"))
    assert lower_bound(problem) <= optimal_period(problem) == optimum
    if capacity == 1:
        assert lower_bound(problem) == optimum
