"""A search for any placement is checked, and is not below the bound."""

import itertools
import random
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.planner.bound_verifier import proven_bound
from slipstream.planner.job.arrangement import Arrangement, MovableLayers
from slipstream.planner.job.file import JobError, parse_job
from slipstream.planner.job.presets import preset_text
from slipstream.planner.job.toml import job_text
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.placement import bound_over_placements, failure_weights, find_placement
from slipstream.planner.plan import plan_only
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Scope, Worker

QUICK = PlanOptions(steps=60_000)
LIST = PlanOptions(steps=2_000, method="greedy")


def uneven(
    *,
    stages=2,
    layers=(3, 1, 1, 1, 1, 5),
    microbatches=4,
    capacity=None,
    pipelines=1,
    weights=None,
    capacity_of=None,
):
    """Layers with F = I = W as listed.

    A micro-batch holds 1 of each.
    """
    per = -(-len(layers) // stages)
    counts = [min(per, len(layers) - per * stage) for stage in range(stages)]
    ends = list(itertools.accumulate(counts, initial=0))
    sums = [sum(layers[first:end]) for first, end in itertools.pairwise(ends)]
    tables = {
        "pipelines": pipelines,
        "stages": stages,
        "microbatches": microbatches,
        "time": dict.fromkeys(("forward", "backward_input", "backward_weight"), sums),
        "placement": {"layers": counts},
        "layers": {key: list(layers) for key in ("forward", "backward_input", "backward_weight")},
    }
    if capacity is not None:
        tables["memory"] = {"capacity": capacity, "activation": counts, "weight_stash": counts}
        if weights:
            tables["memory"]["weights"] = [weights * count for count in counts]
        if capacity_of:
            tables["memory"]["capacity_of"] = capacity_of
    return job_text(tables, {})


@st.composite
def texts(draw):
    """Small jobs of unlike layers.

    First stages are with or without I; memory, weights, reductions, steps and transfers vary.
    """
    stages = draw(st.integers(1, 3))
    counts = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    total = sum(counts)
    value = st.sampled_from([0, 0.3, 1, 1, 2, 1.7])
    by_layer = {
        key: draw(st.lists(value, min_size=total, max_size=total))
        for key in ("forward", "backward_input", "backward_weight")
    }
    by_layer["forward"][-1] = 1
    if draw(st.booleans()):
        by_layer["backward_input"][: counts[0]] = [0] * counts[0]
    ends = list(itertools.accumulate(counts, initial=0))

    def summed(values):
        return [float(f"{sum(values[first:end]):.12g}") for first, end in itertools.pairwise(ends)]

    tables = {
        "pipelines": draw(st.integers(1, 2)),
        "stages": stages,
        "microbatches": draw(st.integers(1, 4)),
        "time": {
            **{key: summed(values) for key, values in by_layer.items()},
            "optimizer": draw(
                st.lists(st.sampled_from([0, 0.5]), min_size=stages, max_size=stages)
            ),
            "all_reduce": draw(st.sampled_from([0, 0.2])),
            "transfer": draw(st.sampled_from([0, 0.1])),
        },
        "placement": {"layers": counts},
        "layers": dict(by_layer),
    }
    if draw(st.booleans()):
        activations = draw(st.lists(st.sampled_from([0.5, 1, 2]), min_size=total, max_size=total))
        tables["layers"]["activation"] = activations
        tables["memory"] = {
            "capacity": max(summed(activations)) * draw(st.sampled_from([1, 1.5, 3])),
            "activation": summed(activations),
            "weight_stash": draw(st.sampled_from([0, 0.5])),
        }
        if draw(st.booleans()):
            tables["memory"]["weights"] = summed(activations)
        if draw(st.booleans()):
            tables["memory"]["capacity_of"] = {"0.0": max(summed(activations)) + 1}
    return job_text(tables, {})


@st.composite
def arrangements(draw, layers, stages):
    """Any placement of so many layers."""
    chunks = draw(st.integers(1, max(1, layers // stages)))
    orders = [
        "linear",
        "interleaved",
        "v",
        "listed",
        *(["bidirectional"] if stages % 2 == 0 and chunks == 1 else []),
    ]
    order = draw(st.sampled_from(orders))
    if order == "listed":
        order = tuple(draw(st.permutations(list(range(stages)) * chunks)))
    cuts = sorted(
        draw(
            st.lists(
                st.integers(1, layers - 1),
                min_size=stages * chunks - 1,
                max_size=stages * chunks - 1,
                unique=True,
            )
        )
        if layers > 1
        else []
    )
    return Arrangement(
        order=order,
        chunks=chunks,
        counts=tuple(end - first for first, end in itertools.pairwise([0, *cuts, layers])),
    )


@given(texts())
@settings(max_examples=40, deadline=None)
def test_the_given_arrangement_is_the_given_job(text):
    layers = MovableLayers(text)
    again = parse_job(layers.arranged_job_text(layers.own_arrangement))
    assert msgspec.structs.replace(again, layer_values=None) == msgspec.structs.replace(
        layers.job, layer_values=None
    )


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_no_plan_of_any_placement_is_below_the_bound(data):
    """The bound of the widest question, from whichever of its placements it is proven."""
    text = data.draw(texts())
    layers = MovableLayers(text)
    bounds = []
    periods = []
    for arrangement in (
        layers.own_arrangement,
        data.draw(arrangements(layers.layers, layers.job.stages)),
    ):
        try:
            other = layers.arranged_job_text(arrangement)
            options = msgspec.structs.replace(
                LIST, backward=data.draw(st.sampled_from(["split", "fused"]))
            )
            schedule = plan_only(options, parse_job(other), ()).schedule
        except (JobError, NoPlanError):  # no room for the weights, or for a micro-batch
            continue
        bound, below = bound_over_placements(MovableLayers(other), options)
        bounds.append((options.backward, bound.ticks * below.tick_seconds))
        periods.append((options.backward, schedule.seconds(schedule.period_ticks)))
    for (mode, bound), (other_mode, period) in itertools.product(bounds, periods):
        assert mode != other_mode or bound <= period * (1 + 1e-9)


def all_arrangements(layers, stages):
    """Every placement and division of so many layers, up to two virtual stages a worker."""
    for chunks in (1, 2):
        virtual = chunks * stages
        for cuts in itertools.combinations(range(1, layers), virtual - 1):
            counts = tuple(end - first for first, end in itertools.pairwise([0, *cuts, layers]))
            orders = {
                tuple(order) for order in itertools.permutations(list(range(stages)) * chunks)
            }
            for order in [
                *sorted(orders),
                *(["bidirectional"] if chunks == 1 and stages % 2 == 0 else []),
            ]:
                yield Arrangement(order=order, chunks=chunks, counts=counts)


@pytest.mark.parametrize(
    ("layers", "microbatches", "capacity"),
    [
        ((3, 1, 1, 1, 5), 3, None),
        ((1, 1, 1, 4), 4, None),
        ((2, 1, 1, 2), 4, 4),
        ((1, 3, 1, 1, 2), 3, 6),
    ],
)
def test_as_good_as_the_best_of_all_placements(layers, microbatches, capacity):
    text = uneven(layers=layers, microbatches=microbatches, capacity=capacity)
    movable, best = MovableLayers(text), None
    for arrangement in all_arrangements(len(layers), 2):
        try:
            plan = plan_only(LIST, parse_job(movable.arranged_job_text(arrangement)), ())
        except NoPlanError:
            continue
        best = plan.period if best is None else min(best, plan.period)
    found = find_placement(text, QUICK)
    schedule = found.plan.schedule
    assert best is not None and found.plan.period <= best and check(schedule) == []
    assert (
        schedule.scope is Scope.PLACEMENT and schedule.seconds(schedule.lower_bound_ticks) <= best
    )


def test_a_large_head_is_paid_for_by_other_workers():
    """Any placement is faster than uniform stages with a large head.

    The last layer has as much to do as seven others, for which uniform stages wait.
    """
    text = uneven(stages=2, layers=(1,) * 9 + (7,), microbatches=8)
    usual, found = plan_only(LIST, parse_job(text), ()).period, find_placement(text, QUICK)
    assert found.plan.period < 0.8 * usual and found.own_period == pytest.approx(usual)
    assert found.plan.schedule.grid.layers_by_stage != parse_job(text).layers


def test_the_file_says_what_was_planned_and_its_bound_is_proven_again():
    found = find_placement(uneven(capacity=9, weights=2, pipelines=2), QUICK)
    job = parse_job(found.text)
    assert job == found.job and job.pipelines == 2
    schedule = found.plan.schedule
    assert proven_bound(schedule).ticks >= schedule.lower_bound_ticks > 0
    # What the workers have together stays the same: less room where there are more weights.
    given_job = parse_job(uneven(capacity=9, weights=2, pipelines=2))
    copies = job.chains * sum(job.memory.weights[: job.depth])
    assert sum(job.memory.capacity) + copies == sum(given_job.memory.capacity) + sum(
        given_job.memory.weights
    )


def test_weights_leave_less_of_a_memory_of_its_own_too():
    """A worker with a capacity of its own has as much memory in any placement."""
    text = uneven(capacity=9, weights=2, pipelines=2, capacity_of={"1.0": 4, "1.1": 5})
    given_job, found = parse_job(text), find_placement(text, QUICK)
    assert found.job.memory.capacity != given_job.memory.capacity  # the weights have moved

    def own_memory(job):
        weights = [0.0] * job.stages
        for column, amount in zip(job.columns, job.memory.weights, strict=True):
            weights[column] += amount
        return {worker: room + weights[worker.column] for worker, room in job.memory.capacity_of}

    assert own_memory(found.job) == own_memory(given_job)


def test_a_placement_whose_weights_do_not_fit_one_worker_is_refused():
    layers = MovableLayers(uneven(capacity=9, weights=2, capacity_of={"0.0": 1}))
    with pytest.raises(JobError, match=r"worker 0\.0 has no room for the weights"):
        layers.arranged_job_text(Arrangement(order="linear", counts=(4, 2)))
    other = parse_job(layers.arranged_job_text(Arrangement(order="linear", counts=(2, 4))))
    assert other.memory.capacity_of == ((Worker(0, 0), 3.0),)


@pytest.mark.parametrize("capacity_of", [{"0.0": 3}, {"0.1": 3}, {"0.0": 4, "0.1": 4}])
def test_a_pipeline_with_memories_of_their_own_is_placed_within_these(capacity_of):
    text = uneven(capacity=9, weights=2, capacity_of=capacity_of)
    found = find_placement(text, QUICK)
    assert found.plan.period <= plan_only(QUICK, parse_job(text), ()).period


def test_little_memory_limits_every_placement():
    # There is room for one micro-batch of the pipeline's layers: they are held for too long for
    # workers to be busy.
    tight, roomy = (
        uneven(stages=8, layers=(1,) * 16, microbatches=12, capacity=room) for room in (2, 40)
    )
    bound, below = bound_over_placements(MovableLayers(tight), QUICK)
    roomy, _ = bound_over_placements(MovableLayers(roomy), QUICK)
    assert bound.ticks > roomy.ticks and bound.scope is Scope.PLACEMENT
    plan = plan_only(LIST, parse_job(tight), ())
    assert bound.ticks * below.tick_seconds <= plan.period


def test_failures_are_weighed():
    weights = failure_weights(8, 8, 0.1)
    assert sum(weights) == pytest.approx(1) and weights[0] == pytest.approx(0.9**8)
    found = find_placement(
        uneven(pipelines=3, microbatches=6),
        msgspec.structs.replace(QUICK, method="greedy"),
        failures=2,
        down=0.2,
    )
    assert len(found.with_failures) == 2
    assert found.plan.period < found.mean_period <= max(found.with_failures)


def test_whatever_is_recomputed_is_found_with_it():
    text = uneven(stages=2, layers=(1,) * 8, microbatches=8, capacity=5)
    text = (
        text.replace("weight_stash", "recomputed = [0.4, 0.4]\nweight_stash")
        + '\n[training]\nrecompute = "auto"\n'
    )
    found = find_placement(text, QUICK)
    assert found.recomputation is not None and check(found.plan.schedule) == []
    assert parse_job(found.text).training == {"recompute": "auto"}


def test_a_preset_stays_one():
    """A first stage without I keeps having none, whichever layers it has."""
    layers = MovableLayers(preset_text("llama-3-8b"))
    assert layers.input_free
    other = parse_job(layers.arranged_job_text(Arrangement(order="v", chunks=2, counts=(4,) * 8)))
    assert other.time.backward_input[0] == 0 < min(other.time.backward_input[1:])
    assert sum(other.time.backward_input + other.time.backward_weight) == pytest.approx(
        sum(layers.job.time.backward_input + layers.job.time.backward_weight)
    )


def test_the_usual_memory_does_not_count_where_all_workers_have_their_own():
    """Five layers fit into the own memory of both workers of a column, not into the usual one."""
    arrangement, own = Arrangement(order="linear", counts=(1, 5)), {"0.1": 9, "1.1": 8}
    texts = [
        uneven(pipelines=2, capacity=1, weights=1, capacity_of=own_rooms)
        for own_rooms in (own, {"0.1": 9})
    ]
    job = parse_job(MovableLayers(texts[0]).arranged_job_text(arrangement))
    assert job.memory.capacity == (3, 0)
    assert job.memory.capacity_of == ((Worker(0, 1), 7), (Worker(1, 1), 6))
    assert MovableLayers(texts[0]).is_rearrangement(job)
    assert check(plan_only(LIST, job, ()).schedule) == []
    with pytest.raises(JobError, match="workers of column 1 have no room"):
        MovableLayers(texts[1]).arranged_job_text(arrangement)


def test_one_seed_gives_one_pipeline():
    placement, other = (
        find_placement(uneven(pipelines=2, microbatches=6), QUICK) for _ in range(2)
    )
    assert placement.text == other.text and placement.plan.schedule == other.plan.schedule


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_a_job_is_known_with_another_arrangement_and_no_other_job_is(data):
    layers = MovableLayers(data.draw(texts()))
    with suppress(JobError):  # no room for the weights
        other = parse_job(
            layers.arranged_job_text(data.draw(arrangements(layers.layers, layers.job.stages)))
        )
        assert layers.is_rearrangement(other)
        assert not layers.is_rearrangement(
            msgspec.structs.replace(other, pipelines=3, microbatches=(1, 1, 1))
        )


def test_the_plan_is_no_longer_than_what_the_finalists_showed():
    """The last search begins with the best order of those before it."""
    draw = random.Random(3)
    text = uneven(
        stages=4,
        layers=[draw.randint(10, 60) for _ in range(18)],
        microbatches=24,
        capacity=11,
        pipelines=3,
    )
    lines = []
    found = find_placement(text, PlanOptions(steps=120_000, seed=3), progress=lines.append)
    periods = [
        float(line.split()[-2]) for line in lines if ": period " in line and "bound" not in line
    ]
    assert len(periods) > 2 and found.plan.period <= min(periods) * (1 + 1e-5)
