"""Oobleck: its templates, and small cases worked out by hand."""

import pytest

from slipstream.planner.simulation.loads import Loads
from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policies.oobleck import stacked_sizes
from slipstream.planner.simulation.policies.oobleck_templates import (
    Template,
    find_template,
    shortest_iteration,
)
from tests.planner.simulation.policies.splits import splits
from tests.planner.simulation.small import gain, job, lose, run, scenario, spans


def formula(times, microbatches):
    """T1 + T2 + T3 as peers state it, for stage times."""
    slowest = max(range(len(times)), key=lambda index: times[index])
    return (
        sum(times)
        + (microbatches - len(times) + slowest - 1) * times[slowest]
        + sum(times[slowest:])
    )


@pytest.mark.parametrize(
    "layers", [(1.0,) * 7, (3.0, 1.0, 1.0, 2.0, 2.0, 1.0), (1.0, 5.0, 1.0, 1.0, 1.0)]
)
@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_oobleck_templates_are_the_best_split(layers, nodes):
    best = min(formula(times, 4 * nodes) for times in splits(layers, nodes))
    assert find_template(layers, nodes).seconds_for(4 * nodes) == pytest.approx(best)


def test_a_bidirectional_model_has_its_layers_once():
    assert Loads(job(order="bidirectional")).layer_seconds == Loads(job()).layer_seconds


def test_oobleck_of_equal_stages_is_1f1b():
    template = find_template((1.0,) * 8, 4)
    assert (
        template.seconds_for(10) == pytest.approx((10 + 3) * 2.0)
        and Loads(job()).layer_seconds == (3 / 8,) * 16
    )


def test_the_batch_is_divided_by_the_speed_of_pipelines():
    full, half = Template(1.0, 0.0), Template(2.0, 0.0)
    assert shortest_iteration({full: 1, half: 1}, 9) == pytest.approx(6.0)
    assert shortest_iteration({full: 2}, 9) == pytest.approx(5.0)


def test_oobleck_splits_the_batch_for_the_shortest_iteration():
    policy = POLICIES["oobleck"](scenario())
    # 2 + 2 + 1 nodes: n, n and m micro-batches of 3 and 6 seconds; 3 (n + 1) = 24 with n = 7, and 6
    # m = 24 with m = 4.
    assert policy.rate([2, 2, 1]) == pytest.approx(18 / (24 + 1))
    assert (
        policy.rate([]) == 0.0
        and stacked_sizes(3, 2, 1) == [3, 2]
        and sum(stacked_sizes(3, 2, 3)) == 3
    )


def test_oobleck_takes_newcomers_at_the_next_failure():
    result = run("oobleck", lose(100.0, 0), gain(300.0, 0), lose(600.0, 5))
    shorter = 18 / 25
    assert spans(result)[:3] == [("RUN", 100.0), ("SWITCH", 7.0), ("LOST", 9 / shorter)]
    # 0 fills in as 5 leaves.
    assert result.switch_count == 2 and result.useful_rates[-1] == pytest.approx(shorter)
