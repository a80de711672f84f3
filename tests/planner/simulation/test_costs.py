"""What failures cost, by the size of the model."""

import math

import pytest

from slipstream.planner.simulation.costs import BAMBOO_SECONDS, costs_for, interpolate_by_size


@pytest.mark.parametrize(
    ("parameters", "seconds"), [(3.5e8, 3.0), (2.7e9, 6.0), (6.7e9, 10.0), (1e12, 10.0)]
)
def test_published_reconfiguration_times(parameters, seconds):
    assert costs_for(parameters).oobleck_seconds == seconds


def test_costs_between_published_sizes_grow_with_the_logarithm():
    middle = math.sqrt(350e6 * 6.7e9)
    assert interpolate_by_size(BAMBOO_SECONDS, middle) == pytest.approx((12.5 + 450) / 2)
    assert costs_for(6.7e9).restart_seconds == 701.0 and costs_for(
        6.7e9, 4
    ).load_seconds == pytest.approx(2.345)
