"""What holds of every policy.

Each has small cases of its own, worked out by hand, in `policies/`.
"""

import math

import pytest

from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy import Cause, CheckpointTimes, Phase, PhaseHistory
from slipstream.planner.simulation.policy_runs import Comparison, compare_policies
from slipstream.planner.simulation.synthetic_trace import draw_trace
from tests.planner.simulation.small import COSTS, WHOLE, failing, lose, run, scenario, trace


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_says_what_it_assumes_and_runs_whole_at_its_rate(name):
    kind = POLICIES[name]
    result = run(name)
    assert kind.name == name and kind.title and kind.assumptions
    pause = COSTS.checkpoint_seconds
    interval = math.sqrt(2 * pause * 1000)
    share = interval / (interval + pause) if kind.pauses else 1.0
    assert result.throughput == pytest.approx(result.fault_free_rate * share)


@pytest.mark.parametrize(
    ("name", "rate"),
    [
        ("slipstream", 18 / 19),
        ("slipstream-fixed", 18 / 19),
        ("recycle", WHOLE),
        ("oobleck", WHOLE),
        ("bamboo", WHOLE * 13.41 / 20.55),
        ("torchft", WHOLE),
        ("checkpoint-restart", WHOLE),
        ("elaswave", WHOLE),
        ("malleus", WHOLE),
        ("resihp", WHOLE),
        ("ft-hsdp", WHOLE),
        ("fault-scaled", WHOLE),
        ("work-conserving", 18 / 19),
    ],
)
def test_rates_with_all_workers_alive(name, rate):
    assert run(name).fault_free_rate == pytest.approx(rate)


def test_reference_lines():
    half = run("fault-scaled", lose(500.0, 0, 1, 2))
    assert half.throughput == pytest.approx(WHOLE * 0.75)
    limit = run("work-conserving", lose(500.0, 0, 1, 2))
    assert limit.useful_rates[-1] == pytest.approx(18 / (18 * 6 / 3 + 1))
    both_ways = scenario(order="bidirectional").throughputs
    assert both_ways.work_conserving_rate(3) == pytest.approx(18 / (18 * 6 / 3 + 1)), (
        "the same work"
    )


@pytest.mark.parametrize(
    ("seed", "order"), [(0, "linear"), (1, "linear"), (2, "linear"), (0, "bidirectional")]
)
def test_no_policy_beats_the_work_conserving_limit_and_time_adds_up(seed, order):
    small = scenario(pipelines=4, order=order)
    trace_ = draw_trace(failing(6, (2, 30), repair_hours=2), 8, 2, seed)
    result = compare_policies(list(POLICIES.values()), small.throughputs, COSTS, trace_)
    limit = result.runs["work-conserving"].throughput
    for ran in result.runs.values():
        assert (
            0 <= ran.throughput <= limit * (1 + 1e-9) and ran.seconds[-1] == trace_.length_seconds
        )
        assert all(ran.seconds[1:] > ran.seconds[:-1])
        if not POLICIES[ran.policy].is_reference:
            lost = ran.seconds_lost(result.best_rate)
            assert min(lost.values()) > -1e-6
            assert sum(lost.values()) == pytest.approx(
                ran.length_seconds * (1 - ran.throughput / result.best_rate)
            )


def test_what_is_reported_of_a_run():
    result = run("in-place", lose(100.0, 0), lose(500.0, 3))
    stalls = [2 + 9 / rate for rate in (18 / 28, 18 / 28)]
    assert result.seconds_to_recover == pytest.approx(sum(stalls) / 2)
    assert result.ettr == pytest.approx(1 - sum(stalls) / 1000)
    assert run("in-place").seconds_to_recover == 0.0 and run("in-place").ettr == 1.0
    pauses = run("checkpoint-restart")
    assert pauses.ettr == pytest.approx(pauses.throughput / pauses.fault_free_rate)
    runs = {"checkpoint-restart": pauses, "fault-scaled": run("fault-scaled")}
    compared = Comparison(trace=trace(), runs=runs, best_rate=18 / 19)
    assert compared.goodput("checkpoint-restart") == pytest.approx(pauses.throughput / (18 / 19))
    assert compared.goodput("fault-scaled") is None


def test_checkpoints_count_what_is_beyond_the_last():
    spans = PhaseHistory()
    kept = CheckpointTimes(spans, 100.0, 10.0)

    def train(begin, end, rate):
        spans.record_until(
            [Phase(Cause.SWITCH, begin - spans.seconds[-1]), Phase(Cause.RUN, rate=rate)], end
        )

    assert (
        kept.return_to_last() == 0.0
        and kept.next_after(30.0) == 110.0
        and kept.next_after(110.0) == 220.0
    )
    train(0.0, 30.0, 2.0)
    train(40.0, 105.0, 1.0)
    assert kept.samples_since_stall == 65.0
    kept.record_discarded(20.0)
    assert kept.return_to_last() == pytest.approx(60 + 60 - 20) and kept.return_to_last() == 0.0
    train(200.0, 230.0, 3.0)  # one is complete at 220
    assert kept.return_to_last() == pytest.approx(30.0)
    train(300.0, 1000.0, 3.0)  # and at 990
    assert kept.return_to_last() == pytest.approx(30.0)


def test_phases_have_a_cause():
    assert Phase(Cause.WAIT).seconds == math.inf
