"""Where the planner has activations computed again: where memory is tight, and nowhere else."""

from itertools import chain, combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from slipstream.planner.job.file import Job, JobError, parse_job
from slipstream.planner.job.layers import layer_costs
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_job
from slipstream.planner.recompute import choose_recomputation, with_recomputation
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Worker
from tests.jobs import jobs

QUICK = PlanOptions(steps=2_000_000)


def job(
    stages: int, microbatches: int, capacity: float, *, pipelines: int = 1, first: float = 1.0
) -> Job:
    """A job with F = I = W = 1 and activation 1.

    A stage has four layers; computed again each holds 0.05.
    """
    others = [1] * (stages - 1)
    return parse_job(
        f"pipelines = {pipelines}\nstages = {stages}\nmicrobatches = {microbatches}\n"
        f"[placement]\nlayers = 4\n[time]\nforward = 1\nbackward_input = {[first, *others]}\n"
        f"backward_weight = {[2 - first, *others]}\n"
        f"[memory]\ncapacity = {capacity}\nactivation = 1\nweight_stash = 0.1\nrecomputed = 0.05\n"
    )


@pytest.mark.parametrize("first", [1.0, 0.0])
def test_tight_memory_is_where_it_wins(first):
    """Recomputation wins where memory is tight.

    With room for 1.6 of 4 micro-batches the pipeline idles for want of memory, and the second
    forward fills that.
    """
    tight = job(4, 12, 1.6, pipelines=2, first=first)
    chosen = choose_recomputation(tight, QUICK)
    assert chosen.stages and chosen.without is not None and chosen.period < 0.95 * chosen.without
    assert chosen.layers == tuple(
        layer for stage in chosen.stages for layer in range(4 * stage, 4 * stage + 4)
    )
    better, plain = (plan_job(variant, method="greedy").schedule for variant in (chosen.job, tight))
    assert (
        check(better) == []
        and better.period_ticks * better.tick_seconds < plain.period_ticks * plain.tick_seconds
    )


def test_with_enough_memory_nothing_is_computed_again():
    chosen = choose_recomputation(job(4, 12, 12), QUICK)
    assert (chosen.stages, chosen.job, chosen.period) == ((), job(4, 12, 12), chosen.without)


def test_where_nothing_fits_without():
    small = job(3, 6, 0.9)
    with pytest.raises(NoPlanError, match="one micro-batch needs 1 there"):
        plan_job(small, method="greedy")
    chosen = choose_recomputation(small, QUICK)
    assert chosen.stages == (0, 1, 2) and chosen.without is None
    assert check(plan_job(chosen.job, method="greedy").schedule) == []


def test_where_nothing_fits_at_all():
    with pytest.raises(NoPlanError, match="a worker of stage 0 has room for 0"):
        choose_recomputation(job(2, 4, 0.2), QUICK)


def with_own_rooms(given: Job, room: float, pipelines: int) -> Job:
    """The job in which the workers of the first pipelines have a room of their own."""
    workers = [
        Worker(number, stage) for number in range(pipelines) for stage in range(given.stages)
    ]
    rooms = tuple((worker, room) for worker in workers)
    return replace(given, memory=replace(given.memory, capacity_of=rooms))


def test_rooms_that_all_workers_have_count_in_place_of_the_usual_one():
    small = choose_recomputation(with_own_rooms(job(3, 6, 12, pipelines=2), 0.9, 2), QUICK)
    assert small.stages == (0, 1, 2) and small.without is None
    large = choose_recomputation(with_own_rooms(job(2, 4, 0.2, pipelines=2), 12, 2), QUICK)
    assert large.stages == () and large.without is not None


def test_single_workers_with_room_run_all():
    """No pipeline of the usual rooms has a plan, but one pipeline can run all micro-batches."""
    chosen = choose_recomputation(with_own_rooms(job(2, 4, 0.2, pipelines=2), 12, 1), QUICK)
    assert chosen.stages == () and chosen.period == chosen.without
    assert check(plan_job(chosen.job, method="greedy").schedule) == []


def test_what_is_not_measured_is_asked_for():
    text = (
        "pipelines = 1\nstages = 2\nmicrobatches = 2\n[time]\nforward = 1\n"
        "backward_input = 1\nbackward_weight = 1\n"
    )
    for memory in ("", "[memory]\ncapacity = 2\n"):
        with pytest.raises(
            JobError, match=r"memory\.recomputed is missing \(memory of a micro-batch then\); `slip"
        ):
            choose_recomputation(parse_job(text + memory), QUICK)


@pytest.mark.parametrize("capacity", [1.2, 1.8, 2.5])
def test_no_other_stages_are_much_better(capacity):
    """Against list schedules of all sets of three stages."""
    tight = job(3, 8, capacity)
    every = chain.from_iterable(combinations(range(3), count) for count in range(4))
    periods = [
        plan_job(with_recomputation(tight, stages), method="greedy").period for stages in every
    ]
    assert choose_recomputation(tight, QUICK).period <= 1.02 * min(periods)


@settings(max_examples=30, deadline=None)
@given(jobs(memory=True), st.data())
def test_work_and_memory_of_what_is_computed_again(given_job, data):
    """Recomputation takes one more forward for each chosen stage.

    What is held is less, as is the room.

    Layers still add up to stages.
    """
    stages = data.draw(st.sets(st.integers(0, given_job.depth - 1)))
    job = replace(
        given_job, memory=replace(given_job.memory, recomputed=(0.5,) * len(given_job.columns))
    )
    again = with_recomputation(job, stages)
    for place in range(len(job.columns)):
        more = sum(
            getattr(again.time, key)[place] - getattr(job.time, key)[place]
            for key in ("backward_input", "backward_weight")
        )
        chosen = place % job.depth in stages
        assert more == (job.time.forward[place] if chosen else 0)
        assert again.memory.activation[place] == (0.5 if chosen else job.memory.activation[place])
    assert all(
        less <= room for less, room in zip(again.memory.capacity, job.memory.capacity, strict=True)
    )
    assert sum(layer_costs(again).backward_input) == sum(
        map(int, again.time.backward_input[: job.depth])
    )
