"""Bamboo, against small cases worked out by hand, and against its published points."""

import pytest

from benchmarks.figures import published
from slipstream.planner.simulation.costs import costs_for
from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy import Scenario
from slipstream.planner.simulation.policy_runs import simulate_policy
from slipstream.planner.simulation.throughput import Throughputs
from tests.planner.simulation.small import COSTS, lose, run, scenario, spans, trace


def test_bamboo_goes_on_with_dead_workers_covered():
    """One covered of 40 workers leaves pipelines as they are, three do not.

    One is 2.5 %; three are 7.5 %, and new pipelines are formed.
    """
    policy = POLICIES["bamboo"](scenario(pipelines=10, stages=4))
    result = simulate_policy(
        policy, trace(lose(100.0, 5), lose(200.0, 30), lose(300.0, 17), workers=40)
    )
    whole = policy.fault_free_rate
    assert result.useful_rates[result.cause_indices == 0] == pytest.approx(
        [whole, whole * 39 / 40, whole * 38 / 40, whole * 37 / 40]
    )
    assert [span for span in spans(result) if span[0] == "SWITCH"] == [
        ("SWITCH", 2.0),
        ("SWITCH", 2.0),
        ("SWITCH", 20.0),
    ]


def test_bamboo_neighbours_that_die_together_cost_a_rendezvous_more():
    result = run("bamboo", lose(100.0, 0, 1))
    assert ("SWITCH", 50.0) in spans(result)


def test_bamboo_covers_every_second_stage_at_most():
    policy = POLICIES["bamboo"](scenario(pipelines=2, stages=2))
    result = simulate_policy(
        policy, trace(lose(100.0, 0), lose(400.0, 2), lose(700.0, 1, 3), workers=4)
    )
    assert result.useful_rates[result.cause_indices == 0][-1] == pytest.approx(
        policy.fault_free_rate / 2
    )
    assert result.useful_rates[-1] == 0.0 and COSTS.bamboo_seconds == 20.0


def test_bamboo_is_as_published():
    """The points of 350M, and the average over the trace, within 5 %."""
    throughputs = Throughputs(published.published_job("350M", published.NOMINAL))
    costs = costs_for(published.PARAMETERS["350M"], published.STAGES)
    policy = POLICIES["bamboo"](Scenario(throughputs, costs, 3600.0))
    off = [
        abs(policy.steady_rate(failures) / there - 1)
        for failures, there in enumerate(published.BAMBOO_350M_MAX)
    ]
    assert sum(off) / len(off) < 0.05 and max(off[:8]) < 0.03
    means = []
    for seed in range(5):
        trace_ = published.published_trace(seed)
        kind = POLICIES["bamboo"](Scenario(throughputs, costs, trace_.seconds_between_failures))
        means.append(simulate_policy(kind, trace_).throughput)
    assert sum(means) / 5 == pytest.approx(published.AVERAGES["350M"]["bamboo"], rel=0.05)
