"""What slow machines, and machines that lost some of their GPUs, cost under each policy."""

import msgspec
import pytest

from slipstream.planner.simulation.availability_trace import Change
from slipstream.planner.simulation.failure_models import SlowKind
from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy_runs import compare_policies, simulate_policy
from slipstream.planner.simulation.settled import SlowWorkerCount
from slipstream.planner.simulation.synthetic_trace import draw_slow_times, draw_trace
from tests.planner.simulation.small import (
    COSTS,
    WHOLE,
    InPlace,
    failing,
    gain,
    lose,
    run,
    scenario,
    slow,
    spans,
    trace,
)


def test_who_does_not_balance_waits_for_the_slowest():
    for name in ("recycle", "oobleck", "torchft", "bamboo", "elaswave"):
        result = run(name, slow(500.0, 1, 2.0))
        assert result.throughput == pytest.approx(0.75 * result.fault_free_rate), name
    both = run(
        "recycle",
        slow(100.0, 1, 2.0),
        slow(200.0, 3, 1.5),
        slow(300.0, 1, 1.0),
        slow(400.0, 3, 1.0),
    )
    assert both.useful_rates / both.fault_free_rate == pytest.approx(
        [1.0, 1 / 2, 1 / 2, 1 / 1.5, 1.0]
    )


def test_lost_work_is_redone_as_slowly():
    result = run("recycle", slow(50.0, 1, 2.0), lose(100.0, 0))
    assert ("LOST", pytest.approx(2 * 9 / (18 / 28))) in spans(result)


def test_a_slow_worker_that_leaves_slows_nobody():
    result = run("recycle", slow(50.0, 0, 2.0), lose(100.0, 0), gain(500.0, 0))
    assert result.useful_rates[-1] == pytest.approx(WHOLE)


def test_slipstream_leaves_out_who_is_too_slow():
    """Five workers are faster than six of which one is too slow.

    They make 18 / 28 samples a second; six of which one takes 1.2 times as long, 18 / 19 / 1.2.
    """
    waits = run("in-place", slow(500.0, 0, 1.2))
    assert waits.useful_rates[-1] == pytest.approx(18 / 19 / 1.2) and waits.switch_count == 0
    without = run("in-place", slow(500.0, 0, 3.0), slow(700.0, 0, 1.0))
    assert spans(without) == [
        ("RUN", 500.0),
        ("SWITCH", 2.0),
        ("RUN", 198.0),
        ("SWITCH", 2.0),
        ("RUN", 298.0),
    ]
    assert without.useful_rates == pytest.approx([18 / 19, 0, 18 / 28, 0, 18 / 19])
    dead = run("in-place", slow(500.0, 0, 3.0), lose(600.0, 0))
    assert dead.useful_rates[-1] == pytest.approx(18 / 28)


def test_slipstream_is_ahead_of_who_waits_where_workers_are_slow():
    small = scenario(pipelines=4, stages=3)
    whole = draw_trace(failing(30, repair_hours=1), 12, 2, 5)
    trace_ = draw_slow_times(whole, [SlowKind(cause="slow", share=0.5, hours=0.4, factor=1.57)], 3)
    result = compare_policies(
        [POLICIES[name] for name in ("slipstream", "recycle", "work-conserving")],
        small.throughputs,
        COSTS,
        trace_,
    )
    ours, recycle, limit = (run.throughput for run in result.runs.values())
    assert recycle < ours <= limit


def test_layers_move_away_from_a_slow_worker():
    """The plan for one of twelve at half speed is fastest.

    It is faster than that of eleven, and than to wait for it.
    """
    small = scenario(pipelines=4, stages=3)
    result = simulate_policy(
        POLICIES["slipstream"](small),
        trace(slow(500.0, 0, 2.0), slow(5e5, 0, 1.0), workers=12, seconds=1e6),
    )
    rate = {phase.rate for phase in result.phases}
    at_half = small.throughputs.rebalanced_answer(0, SlowWorkerCount(1, 2.0))[0]
    assert (
        at_half > max(small.throughputs.rebalanced_answer(1)[0], result.fault_free_rate / 2)
        and at_half in rate
    )
    assert (
        at_half <= small.throughputs.work_conserving_rate(11.5)
        and result.useful_rates[-1] == result.fault_free_rate
    )


def test_a_worker_that_lost_a_gpu_goes_on_or_is_down():
    def of_four(name):
        policy = POLICIES[name](scenario())
        changes = (Change(500.0, gpus=((0, 3),)), Change(800.0, gpus=((0, 4),)))
        return simulate_policy(policy, msgspec.structs.replace(trace(*changes), gpus_per_worker=4))

    assert [InPlace.alive_gpus(alive, 8) for alive in range(9)] == [0] * 8 + [8]
    assert of_four("work-conserving").useful_rates[1] == pytest.approx(18 / (18 * 6 / 5.75 + 1))
    ours = of_four("slipstream")
    assert ("SWITCH", 2.0) in spans(ours) and "LOST" in dict(spans(ours)), (
        "it stops as for any failure"
    )
    recycle = of_four("recycle")
    assert recycle.useful_rates[-1] == pytest.approx(WHOLE) and recycle.switch_count == 2
    assert 18 / 28 in [pytest.approx(rate) for rate in recycle.useful_rates]
