"""ElasWave, Malleus and ResiHP: layers by the number and the speed of workers."""

import pytest

from slipstream.planner.simulation.availability_trace import Change
from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policies.uneven_pipelines import divide_by_speed
from slipstream.planner.simulation.policy_runs import simulate_policy
from tests.planner.simulation.policies.splits import splits
from tests.planner.simulation.small import WHOLE, lose, run, scenario, spans, trace


@pytest.mark.parametrize("factors", [(1.0, 1.0, 1.0), (1.0, 2.0, 1.0), (1.5, 1.0), (3.0,)])
def test_layers_are_cut_by_the_speed_of_each_node(factors):
    layers = (1.0, 2.0, 1.0, 1.0, 3.0, 1.0)
    stage_times = []
    for times in splits(layers, len(factors)):
        stage_times.append(max(time * factor for time, factor in zip(times, factors, strict=True)))
    best = min(stage_times)
    assert divide_by_speed(layers, factors).step == pytest.approx(best)


def test_a_node_that_is_far_too_slow_gets_no_layer():
    assert divide_by_speed((1.0,) * 4, (1.0, 50.0)).step == pytest.approx(4.0)
    with pytest.raises(ValueError, match="no nodes"):
        divide_by_speed((1.0,), ())


def test_elaswave_gives_a_stage_with_fewer_replicas_fewer_layers():
    """Two of three replicas take 6 layers of 9/16 s, three take 10.

    The job has 3 x 2 workers, and 8 layers of 3/8 s a stage.
    """
    policy = POLICIES["elaswave"](scenario())
    now = 6 * 9 / 16 + 10 * 3 / 8 + 5 * 10 * 3 / 8
    assert policy.rate((1, 0)) == pytest.approx(WHOLE * (21 + 1) / (now + 1))
    result = simulate_policy(policy, trace(lose(100.0, 0)))
    old = 18 / (21 * 1.5 + 1)
    assert result.useful_rates[-1] == pytest.approx(policy.rate((1, 0)))
    assert spans(result)[1:5] == [
        ("SWITCH", 2.0),
        ("LOST", 3.0),
        ("SWITCH", 2.0),
        ("LOST", (9 - 3 * old) / result.useful_rates[-1]),
    ]


def test_malleus_and_resihp_cut_the_broken_pipeline():
    for name in ("malleus", "resihp"):
        policy = POLICIES[name](scenario())
        # 2 + 2 + 1 nodes: 7, 7 and 4 micro-batches of 3, 3 and 6 seconds.
        assert policy.steady_rate(1) == pytest.approx(18 / 25)
        result = simulate_policy(policy, trace(lose(100.0, 0)))
        assert result.useful_rates[-1] == pytest.approx(18 / 25) and ("LOAD", 3.0) in spans(result)
        assert 18 / 31 < run(name, Change(100.0, slowed=((0, 2.0),))).useful_rates[-1] < WHOLE


def test_resihp_goes_on_with_the_gpus_that_are_left_and_malleus_with_a_power_of_two():
    gpus = {}
    for name in ("malleus", "resihp"):
        gpus[name] = [POLICIES[name].alive_gpus(alive, 8) for alive in range(9)]
    assert gpus == {"malleus": [0, 1, 2, 2, 4, 4, 4, 4, 8], "resihp": list(range(9))}
