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
from tests.jobs import jobs

QUICK = PlanOptions(steps=2_000_000)


def job(stages: int, microbatches: int, capacity: float, *, pipelines: int = 1, first: float = 1.0) -> Job:
    """F = I = W = 1, activation 1, of four layers a stage; computed again each holds 0.05."""
    others = [1] * (stages - 1)
    return parse_job(f"pipelines = {pipelines}\nstages = {stages}\nmicrobatches = {microbatches}\n"
                     f"[placement]\nlayers = 4\n[time]\nforward = 1\nbackward_input = {[first, *others]}\n"
                     f"backward_weight = {[2 - first, *others]}\n"
                     f"[memory]\ncapacity = {capacity}\nactivation = 1\nweight_stash = 0.1\nrecomputed = 0.05\n")


@pytest.mark.parametrize("first", [1.0, 0.0])
def test_tight_memory_is_where_it_wins(first):
    """Room for 1.6 of 4 micro-batches: the pipeline idles for want of memory, and the second forward fills that."""
    tight = job(4, 12, 1.6, pipelines=2, first=first)
    chosen = choose_recomputation(tight, QUICK)
    assert chosen.stages and chosen.without is not None and chosen.period < 0.95 * chosen.without
    assert chosen.layers == tuple(layer for stage in chosen.stages for layer in range(4 * stage, 4 * stage + 4))
    better, plain = (plan_job(one, method="greedy").schedule for one in (chosen.job, tight))
    assert check(better) == [] and better.period_ticks * better.tick_seconds < plain.period_ticks * plain.tick_seconds


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


def test_what_is_not_measured_is_asked_for():
    text = "pipelines = 1\nstages = 2\nmicrobatches = 2\n[time]\nforward = 1\nbackward_input = 1\nbackward_weight = 1\n"
    for memory in ("", "[memory]\ncapacity = 2\n"):
        with pytest.raises(JobError, match=r"memory\.recomputed is missing \(memory of a micro-batch then\); `slip"):
            choose_recomputation(parse_job(text + memory), QUICK)


@pytest.mark.parametrize("capacity", [1.2, 1.8, 2.5])
def test_no_other_stages_are_much_better(capacity):
    """Against list schedules of all sets of three stages."""
    tight = job(3, 8, capacity)
    every = chain.from_iterable(combinations(range(3), count) for count in range(4))
    periods = [plan_job(with_recomputation(tight, stages), method="greedy").period for stages in every]
    assert choose_recomputation(tight, QUICK).period <= 1.02 * min(periods)


@settings(max_examples=30, deadline=None)
@given(jobs(memory=True), st.data())
def test_work_and_memory_of_what_is_computed_again(given_job, data):
    """A forward more for each chosen stage; what is held is less, as is the room. Layers still add up to stages."""
    stages = data.draw(st.sets(st.integers(0, given_job.depth - 1)))
    known = replace(given_job, memory=replace(given_job.memory, recomputed=(0.5,) * len(given_job.columns)))
    again = with_recomputation(known, stages)
    for place in range(len(known.columns)):
        more = sum(getattr(again.time, key)[place] - getattr(known.time, key)[place]
                   for key in ("backward_input", "backward_weight"))
        chosen = place % known.depth in stages
        assert more == (known.time.forward[place] if chosen else 0)
        assert again.memory.activation[place] == (0.5 if chosen else known.memory.activation[place])
    assert all(less <= room for less, room in zip(again.memory.capacity, known.memory.capacity, strict=True))
    assert sum(layer_costs(again).backward_input) == sum(map(int, again.time.backward_input[:known.depth]))
