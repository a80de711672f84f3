"""Bounds of workers with several stages.

They are never above a plan, monotone in memory, and met by a V.
"""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner.budget import Budget
from slipstream.planner.job.file import Job
from slipstream.planner.model.bounds import exact_bound, lower_bound
from slipstream.planner.model.bounds_chunks import chunk_bounds, most_ticks
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import Problem
from slipstream.planner.plan import plan_job
from slipstream.planner.published.memory_curves import SAME, iterate_points, read_settings
from slipstream.planner.search.cpsat import improve_solution
from slipstream.planner.search.list_scheduler import BASELINES
from slipstream.schedules.schedule import Worker
from tests.jobs import grid

SIZES = [(1, 1, 4), (1, 2, 2), (1, 2, 3), (1, 3, 2), (2, 1, 2), (2, 2, 1)]
"""Pipelines, stages and micro-batches of jobs that CP-SAT plans in a moment."""


@st.composite
def chunked(draw) -> tuple[Job, list[Worker]]:
    """A job with two stages on each worker and scarce memory, and its failed workers."""
    pipelines, stages, count = draw(st.sampled_from(SIZES))
    has_failure = pipelines > 1 and draw(st.booleans())
    failed = [Worker(0, draw(st.integers(0, stages - 1)))] if has_failure else []
    durations = st.lists(st.integers(0, 4), min_size=2 * stages, max_size=2 * stages)
    times = [
        f"{key} = {draw(durations.filter(any))}"
        for key in ("forward", "backward_input", "backward_weight", "all_reduce")
    ]
    times += [f"optimizer = {draw(st.integers(0, 2))}", f"transfer = {draw(st.integers(0, 3))}"]
    activation, stash = draw(st.integers(1, 3)), draw(st.integers(0, 4))
    least = 2 * max(activation, stash)
    capacity = draw(st.integers(least, least + 3 * activation))
    order = draw(st.sampled_from(["v", "interleaved", "linear"]))
    more = (
        f"[placement]\norder = '{order}'\nchunks = 2\n[memory]\ncapacity = {capacity}\n"
        f"activation = {activation}\nweight_stash = {stash}\n"
    )
    return grid(pipelines, stages, count, times="\n".join(times), more=more), failed


@settings(max_examples=60, deadline=None)
@given(
    chunked(),
    st.sampled_from(["split", "fused"]),
    st.sampled_from(["staggered", "synchronous"]),
    st.booleans(),
)
def test_no_bound_is_above_a_plan(case, backward, optimizer, sharing):
    """The plan is CP-SAT's, which is told nothing of the bound."""
    job, failed = case
    problem = build_problem(job, failed, backward=backward, optimizer=optimizer, sharing=sharing)
    hint = BASELINES["recycle"](problem)
    _, period, _ = improve_solution(
        problem, hint, lower_bound=0, budget=Budget.of_steps(100_000), progress=lambda _: None
    )
    bounds = list(chunk_bounds(problem))
    assert bounds
    assert max(bounds)[0] <= period


@st.composite
def large_v(draw, pipelines: int = 1) -> Problem:
    """Draw a V of any size, with times and memory of any kind."""
    stages, count = draw(st.integers(2, 12)), draw(st.integers(1, 40))
    forward, gradient, weight = (draw(st.integers(1, 20)) for _ in range(3))
    activation, stash = draw(st.integers(1, 9)), draw(st.integers(0, 9))
    job = grid(
        pipelines,
        stages,
        count,
        times=f"forward = {forward}\nbackward_input = {gradient}\n"
        f"backward_weight = {weight}\ntransfer = {draw(st.integers(0, 5))}",
        more=f"[placement]\norder = 'v'\nchunks = 2\n[memory]\nactivation = {activation}\n"
        f"weight_stash = {stash}\ncapacity = {2 * max(activation, stash)}\n",
    )
    return build_problem(job)


def with_room(problem: Problem, more: int) -> Problem:
    """Return a copy of a problem in which every worker has this much more memory."""
    workers = {
        worker: msgspec.structs.replace(live, memory=live.memory + more)
        for worker, live in problem.workers.items()
    }
    return msgspec.structs.replace(problem, workers=workers)


@given(large_v())
def test_more_memory_never_raises_a_bound(problem):
    rooms = (0, 1, 2, 5, 10, 50, 200, 10_000)
    bounds = [exact_bound(with_room(problem, more))[0] for more in rooms]
    assert all(before >= after for before, after in pairwise(bounds))


@given(large_v(pipelines=2))
def test_a_bound_for_all_holders_is_no_larger_than_for_own_microbatches(problem):
    shared = msgspec.structs.replace(problem, sharing=True)
    assert max(chunk_bounds(shared))[0] <= max(chunk_bounds(problem))[0]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 4), (2, 6), (3, 6), (4, 8)])
def test_a_v_with_the_memory_of_1f1b_is_proven_optimal(stages, microbatches):
    job = grid(
        1,
        stages,
        microbatches,
        times="forward = 3\nbackward_input = 3\nbackward_weight = 2\ntransfer = 1",
        more=f"[placement]\norder = 'v'\nchunks = 2\n[memory]\ncapacity = {200 * stages}\n"
        "activation = 100\nweight_stash = 43\n",
    )
    plan = plan_job(job, steps=20_000)
    work = 2 * microbatches * (3 + 3 + 2)
    assert plan.schedule.status == "optimal"
    assert plan.period > work


def test_bounds_of_published_settings_are_near_the_published_figures():
    """Bounds of all points of a V are within 5 % below its published period."""
    points = [point for point in iterate_points(read_settings()) if point.placement == "V"]
    for point in points:
        problem = build_problem(point.make_job(), down=True)
        least = lower_bound(problem) * problem.tick_seconds
        assert point.published is not None
        published = point.work / (1 - point.published)
        assert published / 1.05 <= least <= published * (1 + SAME), point.name


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9), st.integers(0, 3)), max_size=3),
    st.integers(0, 20),
)
def test_ops_in_a_room_take_no_longer_than_its_bound(items, room):
    def longest(rest, free):
        if not rest:
            return 0
        size, ticks, largest = rest[0]
        return max(
            ticks * count + longest(rest[1:], free - size * count)
            for count in range(largest + 1)
            if size * count <= free
        )

    assert longest(items, room) <= most_ticks(items, room)
