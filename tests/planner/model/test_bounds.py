"""Bounds of one pipeline are never above the optimum, and met where they should be."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner.budget import Budget
from slipstream.planner.model.arrays import ProblemArrays
from slipstream.planner.model.bounds import lower_bound
from slipstream.planner.model.bounds_layouts import fixed_bound
from slipstream.planner.model.bounds_passage import compute_whole_fill
from slipstream.planner.model.bounds_stage import StageShares
from slipstream.planner.model.from_job import build_layered_problem, build_problem
from slipstream.planner.model.problem import Problem
from slipstream.planner.plan import plan_job
from slipstream.planner.search.cpsat import improve_solution
from slipstream.planner.search.engine import find_best_candidate
from slipstream.planner.search.list_scheduler import (
    BASELINES,
    DispatchRule,
    ListScheduler,
    assign_hosts,
)
from slipstream.schedules.schedule import Worker
from tests.jobs import grid

# Forward, backward_input, backward_weight, transfer in ms; activation, stash: Qi et al., ICLR 2024.
PAPER = {
    "1.5B": (18.522, 18.086, 9.337, 0.601, 201216, 73728),
    "6.2B": (29.802, 29.428, 19.53, 0.577, 303104, 131072),
    "14.6B": (11.347, 11.248, 8.132, 0.377, 378880, 163840),
    "28.3B": (10.419, 10.207, 7.715, 0.408, 454656, 196608),
}


@st.composite
def small(draw):
    """A job of one or two pipelines with scarce memory, and its failures.

    It is small enough for CP-SAT to prove its optimum.
    """
    pipelines, stages, count = draw(
        st.sampled_from([(1, 1, 5), (1, 2, 3), (1, 2, 4), (1, 3, 3), (2, 2, 2), (3, 2, 2)])
    )
    failed = (
        [Worker(0, draw(st.integers(0, stages - 1)))]
        if pipelines > 1 and draw(st.booleans())
        else []
    )
    times = "\n".join(
        f"{key} = {draw(st.lists(st.integers(1, 4), min_size=stages, max_size=stages))}"
        for key in ("forward", "backward_input", "backward_weight")
    )
    times += f"\noptimizer = 1\ntransfer = {draw(st.integers(0, 2))}"
    activation, stash = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    least = max(activation, stash)
    capacity = draw(st.integers(least, least + 2 * activation))
    memory = f"[memory]\ncapacity = {capacity}\nactivation = {activation}\nweight_stash = {stash}\n"
    return grid(pipelines, stages, count, times=times, more=memory), failed


@settings(max_examples=60, deadline=None)
@given(
    small(),
    st.sampled_from(["split", "fused"]),
    st.sampled_from(["staggered", "synchronous"]),
    st.booleans(),
)
def test_no_bound_is_above_the_optimum(case, backward, optimizer, sharing):
    """The optimum is CP-SAT's, which is told nothing of the bound."""
    job, failed = case
    problem = build_problem(
        job, failed, backward=backward, optimizer=optimizer, sharing=sharing and bool(failed)
    )
    hint = BASELINES["recycle"](problem)
    _, period, _ = improve_solution(
        problem, hint, lower_bound=0, budget=Budget.of_steps(200_000), progress=lambda _: None
    )
    assert lower_bound(problem) <= period


@given(
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(1, 40),
    st.integers(1, 9),
    *[st.integers(1, 5)] * 2,
)
def test_no_more_is_left_than_memory_holds(activation, stash, capacity, count, gradient, weight):
    room = min(count, capacity // activation)
    if not room:
        return
    exact = max(
        x * gradient + (x + y) * weight
        for x in range(1, room + 1)
        for y in range(count - x + 1)
        if x * activation + y * stash <= capacity
    )
    shares = StageShares(
        parts=1,
        forward=1,
        gradient=gradient,
        weight=weight,
        round_trip=0,
        activation=activation,
        stash=stash,
        room=capacity,
        most=count,
    )
    remaining = shares.max_remaining_work(count)
    assert exact <= remaining <= exact + weight + gradient


@pytest.mark.parametrize("room", [1, 2])
@pytest.mark.parametrize(
    ("model", "stages", "microbatches"),
    [("6.2B", 8, 32), ("14.6B", 16, 48), ("28.3B", 32, 96), ("28.3B", 32, 128), ("28.3B", 32, 256)],
)
def test_one_list_schedule_meets_the_bound_at_published_settings(model, stages, microbatches, room):
    """List schedules of published settings are optimal.

    With p activations the published heuristic is, too; with 2p it is not.
    """
    forward, gradient, weight, transfer, activation, stash = PAPER[model]
    job = grid(
        1,
        stages,
        microbatches,
        times=f"forward = {forward}\nbackward_input = {gradient}\nbackward_weight = {weight}\n"
        f"transfer = {transfer}",
        more=f"[memory]\ncapacity = {room * stages * activation}\nactivation = {activation}\n"
        f"weight_stash = {stash}\n",
    )
    problem = build_problem(job)
    fill = compute_whole_fill(problem)
    assert fill is not None
    scheduler = ListScheduler(ProblemArrays(problem, assign_hosts(problem, "least-loaded")))
    wait = tuple(ticks + 1 for ticks in fill.idle)
    period = scheduler.evaluate_rule(DispatchRule(fill_wait=wait, lookahead=float(room == 1)))
    assert period == lower_bound(problem)
    solved = find_best_candidate(problem, "greedy", Budget.of_steps(12_000_000))
    assert (
        solved.bound.ticks
        == period
        == max(
            problem.ticks_after_group(worker) + _end(solved, worker)
            for worker in problem.live_workers
        )
    )


def _end(solved, worker):
    """Ticks from the first op of a worker to the end of its last."""
    (solution,) = solved.solutions
    spans = [
        (start, start + solved.problem.op_ticks(key.kind, key.slice, worker))
        for key, start in solution.start_by_key.items()
        if key.slice == worker.column
    ]
    first = min(start for start, _ in spans)
    return max(end for _, end in spans) - first


def test_a_worker_may_run_one_more_forward_so_that_no_other_waits_longer():
    """One more F on a worker leaves others less idle.

    Eight stages, F = 30, I and its two transfers 31: the last of eight round trips would leave 7
    ticks idle.

    One more F at the fifth stage from the end, 27 ticks late, leaves at most 3 anywhere.
    """
    job = grid(
        1,
        8,
        32,
        times="forward = 30\nbackward_input = 30\nbackward_weight = 20\ntransfer = 0.5",
        more="[memory]\ncapacity = 16\nactivation = 1\nweight_stash = 0.4\n",
    )
    problem = build_problem(job)
    fill = compute_whole_fill(problem)
    assert fill is not None and fill.period * problem.tick_seconds == 32 * 80 + 3


def test_where_a_stage_has_fewer_workers_some_first_gradient_is_late():
    """Two of twelve first micro-batches meet on one worker of stage 3.

    It has eleven workers; the bound is one F more than 329.
    """
    times = "forward = 10\nbackward_input = 10\nbackward_weight = 10\ntransfer = 1\noptimizer = 5"
    job = grid(
        12, 8, 8, times=times, more="[memory]\ncapacity = 16\nactivation = 1\nweight_stash = 1\n"
    )
    plan = plan_job(job, [Worker(1, 3)], steps=800_000)
    assert plan.schedule.period_ticks == plan.schedule.lower_bound_ticks == 339


def test_the_work_for_a_bound_grows_with_the_workers_and_not_with_their_square(monkeypatch):
    """As where each of thousands of workers asked for the fastest of them all."""
    asked = Counter()
    slowness = Problem.slowness
    monkeypatch.setattr(
        Problem, "slowness", lambda self, worker: asked.update([worker]) or slowness(self, worker)
    )
    calls = []
    for pipelines in (50, 200):
        more = "[memory]\ncapacity = 30\nweights = 1\n[placement]\nlayers = [2, 2, 2]\n"
        problem = build_layered_problem(grid(pipelines, 3, 2, more=more), [Worker(0, 1)])
        asked.clear()
        fixed_bound(problem)
        calls.append(asked.total())
    assert calls[1] <= 5 * calls[0]
