"""What a simulation keeps: spans, switches, throughput over time, and what is finished after
Ctrl-C.
"""

import numpy as np
import pytest

from examples.fleet_policy import WholePipelines
from slipstream.planner.simulation.availability_trace import group_gpus
from slipstream.planner.simulation.entry import EntryRow, EntryTable, make_table_policy
from slipstream.planner.simulation.failure_models import SLOW_MODELS
from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy import Scenario
from slipstream.planner.simulation.policy_runs import (
    compare_policies,
    simulate_policy,
    simulate_traces,
)
from slipstream.planner.simulation.synthetic_trace import draw_slow_times, draw_trace
from slipstream.planner.simulation.throughput import Throughputs
from tests.planner.simulation.small import (
    COSTS,
    WHOLE,
    failing,
    gain,
    job,
    lose,
    scenario,
    trace,
)

KINDS = [POLICIES[name] for name in ("fault-scaled", "torchft", "work-conserving")]


def interrupt_after(count):
    def progress(done, _total):
        if done == count:
            raise KeyboardInterrupt

    return progress


def test_throughput_in_bins_adds_up_to_the_mean():
    run = simulate_policy(POLICIES["torchft"](scenario()), trace(lose(100.0, 0), gain(300.0, 0)))
    edges = np.linspace(0.0, run.length_seconds, 11)
    assert run.mean_rates_between(edges).mean() == pytest.approx(run.throughput)
    assert run.mean_rates_between(np.array([0.0, 100.0]))[0] == pytest.approx(run.fault_free_rate)


def test_changes_at_or_after_the_end_are_not_simulated():
    whole = simulate_policy(POLICIES["torchft"](scenario()), trace())
    late = simulate_policy(POLICIES["torchft"](scenario()), trace(lose(1000.0, 0)))
    assert late.throughput == whole.throughput and late.switch_count == 0


def test_after_ctrl_c_the_policies_that_were_finished_are_kept():
    small = scenario()
    result = compare_policies(KINDS, small.throughputs, COSTS, trace(), interrupt_after(2))
    assert list(result.runs) == ["fault-scaled", "torchft"]
    assert result.best_rate == result.runs["torchft"].fault_free_rate, (
        "reference lines do not count"
    )


def test_a_policy_of_another_system_is_compared():
    table = EntryTable(
        "slipstream-entry-1", "mine", "T", "S", {"small": [EntryRow(down=0, samples_per_second=9)]}
    )
    mine, small = make_table_policy(table, "small", 2), scenario()
    result = compare_policies([*KINDS, mine, WholePipelines], small.throughputs, COSTS, trace())
    assert list(result.runs)[-2:] == ["mine", "whole-pipelines"]
    assert result.best_rate == 9 and result.goodput("mine") == 1
    assert result.goodput("whole-pipelines") == pytest.approx(WHOLE / 9)
    assert result.goodput("fault-scaled") is None


def test_after_ctrl_c_the_traces_that_were_finished_are_kept():
    small, traces = scenario(), [trace(), trace(lose(100.0, 0)), trace()]
    values = simulate_traces(KINDS, small.throughputs, COSTS, traces, interrupt_after(2))
    counts = {name: len(column) for name, column in values.items()}
    assert counts == {kind.name: 2 for kind in KINDS}


PLANS = ("planned", "in place", "round robin", "settled")


class _Forgetful(Throughputs):
    """Finds what policies ask for anew each time, but for plans."""

    def compute_once(self, key, find):
        return find()

    def _plan_once(self, key, find):
        return super()._plan_once(key, find) if key[0] in PLANS else find()


def test_what_policies_keep_and_share_changes_no_digit():
    """Policies with shared figures give each digit that they give alone.

    Many traces run at once, against each policy by itself with figures that are found anew: with
    slow and partly failed machines, and with all gone for a while.
    """
    rates = failing(10, repair_hours=4)
    traces = [draw_trace(rates, 6, 2, seed) for seed in range(3)]
    traces += [
        draw_slow_times(traces[0], SLOW_MODELS["greyhound"], 1),
        trace(lose(100.0, *range(6)), gain(200.0, 0, 3)),
    ]
    traces += [group_gpus(draw_trace(rates, 24, 2, seed), 4) for seed in range(2)]
    kept = Throughputs(job(), plan_seconds=0.01, settle_seconds=0.01)
    forgetful = _Forgetful(job())
    simulate_traces(list(POLICIES.values()), kept, COSTS, traces)
    # What list schedules find depends on the time they have: both go by the same plans.
    forgetful._plans = {key: value for key, value in kept._plans.items() if key[0] in PLANS}
    found = simulate_traces(list(POLICIES.values()), kept, COSTS, traces)
    for name, kind in POLICIES.items():
        for index, trace_ in enumerate(traces):
            alone = simulate_policy(
                kind(Scenario(forgetful, COSTS, trace_.seconds_between_failures)), trace_
            )
            assert found[name][index] == alone.throughput, (name, index)
