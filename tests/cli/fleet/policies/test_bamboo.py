"""Bamboo, against small cases worked out by hand."""

import pytest

from cli.fleet.policies import POLICIES
from cli.fleet.simulation import simulate
from tests.cli.fleet.small import COSTS, lose, run, scenario, spans, trace


def test_bamboo_runs_at_two_thirds_while_a_worker_carries_two_stages():
    """40 workers: one that carries is 2.5 %, so pipelines stay; three are 7.5 %, and new ones are formed."""
    shape = {"pipelines": 10, "stages": 4}
    policy = POLICIES["bamboo"](scenario(**shape))
    result = simulate(policy, trace(lose(100.0, 5), lose(200.0, 30), lose(300.0, 17), workers=40))
    whole = policy.fault_free_rate
    assert result.rate[result.cause == 0][:3] == pytest.approx([whole, whole / 1.5, whole / 1.5])
    assert ("SWITCH", 20.0) in spans(result)
    assert result.rate[-1] == pytest.approx(COSTS.bamboo_fault_free_share * policy.throughputs.one_f_one_b(9))


def test_bamboo_neighbours_that_die_together_cost_a_rendezvous_more():
    result = run("bamboo", lose(100.0, 0, 1))
    assert ("SWITCH", 50.0) in spans(result)


def test_bamboo_fills_up_from_spares():
    policy = POLICIES["bamboo"](scenario(pipelines=2, stages=2))
    result = simulate(policy, trace(lose(100.0, 0), lose(400.0, 2), workers=4))
    # Three left: one pipeline and a spare. The spare takes the place of the next that dies.
    assert result.rate[-1] == pytest.approx(COSTS.bamboo_fault_free_share * policy.throughputs.one_f_one_b(1))
