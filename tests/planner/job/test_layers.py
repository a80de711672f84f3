"""The costs of layers add up exactly to those of their stages.

It does not matter how they are divided.
"""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.planner.job.file import JobError, parse_job
from slipstream.planner.job.layers import (
    MOST_PARTS,
    ExactLayerCosts,
    layer_costs,
    limited_ratio,
    memory_ratio,
)

TIME = (
    "[time]\nforward = 0.0297\nbackward_input = [0, 0.0294]\nbackward_weight = 0.0199\n"
    "optimizer = 0.01\n"
)
GOOD = "pipelines = 2\nstages = 2\nmicrobatches = 4\n" + TIME


def test_without_layers_each_stage_is_one():
    costs = layer_costs(parse_job(GOOD))
    assert costs.forward == (Fraction(297, 10_000),) * 2 and costs.backward_input == (
        0,
        Fraction(294, 10_000),
    )
    assert costs.activation == costs.weights == (0, 0)


def test_stages_are_divided_evenly_or_as_the_job_says():
    text = (
        GOOD
        + "[memory]\ncapacity = 9\nactivation = 3\nweights = [9, 8]\n[placement]\nlayers = [3, 2]\n"
    )
    costs = layer_costs(parse_job(text))
    assert costs.activation == (1, 1, 1, Fraction(3, 2), Fraction(3, 2)) and costs.weights == (
        3,
        3,
        3,
        4,
        4,
    )
    costs = layer_costs(
        parse_job(text + "[layers]\nactivation = [1, 2, 3, 0, 0]\nweights = [1, 1, 7, 3, 1]\n")
    )
    assert costs.activation == (Fraction(1, 2), 1, Fraction(3, 2), Fraction(3, 2), Fraction(3, 2))
    assert costs.weights == (1, 1, 7, 6, 2)
    assert costs.forward == (*[Fraction(99, 10_000)] * 3, *[Fraction(297, 20_000)] * 2)


def test_both_directions_of_a_pipeline_have_the_same_layers():
    job = parse_job(GOOD + "[placement]\norder = 'bidirectional'\nlayers = [2, 1]\n")
    assert len(layer_costs(job).forward) == 3


@given(st.data())
def test_layers_add_up_to_their_stages(data):
    counts = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=2))
    values = data.draw(st.lists(st.floats(0, 10), min_size=sum(counts), max_size=sum(counts)))
    costs = layer_costs(
        parse_job(f"{GOOD}[placement]\nlayers = {counts}\n[layers]\nforward = {values}\n")
    )
    for key in ExactLayerCosts.__struct_fields__:
        assert len(getattr(costs, key)) == sum(counts)
    assert (
        sum(costs.forward[: counts[0]]) == sum(costs.forward[counts[0] :]) == Fraction(297, 10_000)
    )


def test_a_stage_without_layers_cannot_be_divided():
    with pytest.raises(JobError, match=r"placement\.layers gives stage 1 no layer"):
        layer_costs(parse_job(GOOD + "[placement]\nlayers = [3, 0]\n"))


def test_a_ratio_of_units_of_memory_is_never_too_small():
    """Ratios of units of memory are rounded up.

    Rounded to the nearest, 2 / 2^40 of a layer's unit took a stage of 1e-11 for less than its
    layers.
    """
    rough, fine = 1e-11, 2 / 2**40
    exact = Fraction(rough) / Fraction(fine)
    assert (
        limited_ratio(rough, fine)
        < exact
        < memory_ratio(rough, fine)
        < exact + Fraction(1, MOST_PARTS)
    )
    assert memory_ratio(rough, fine).denominator <= MOST_PARTS
    assert memory_ratio(0.3, 0.1) == 3
    # With heavy weights, the unit of layers may be the larger one.
    for parts in (1234579, 1234591, 1234603):
        rough, fine = parts * 1e-18, 1e-10
        exact = Fraction(rough) / Fraction(fine)
        assert limited_ratio(rough, fine) < exact < memory_ratio(rough, fine)
        assert memory_ratio(rough, fine) < exact * (1 + Fraction(1, MOST_PARTS))
        assert memory_ratio(rough, fine).numerator <= MOST_PARTS
    assert memory_ratio(0.1, 0.3) == Fraction(1, 3)
