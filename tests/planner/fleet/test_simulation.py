"""What a simulation keeps: spans, switches, throughput over time, and what is finished after Ctrl-C."""

import numpy as np
import pytest

from planner.fleet.policies import POLICIES
from planner.fleet.simulation import compare, simulate, throughputs_over_traces
from tests.planner.fleet.small import COSTS, gain, lose, scenario, trace

KINDS = [POLICIES[name] for name in ("fault-scaled", "torchft", "work-conserving")]


def interrupt_after(count):
    def progress(done, _total):
        if done == count:
            raise KeyboardInterrupt

    return progress


def test_throughput_in_bins_adds_up_to_the_mean():
    run = simulate(POLICIES["torchft"](scenario()), trace(lose(100.0, 0), gain(300.0, 0)))
    edges = np.linspace(0.0, run.length_seconds, 11)
    assert run.binned(edges).mean() == pytest.approx(run.throughput)
    assert run.binned(np.array([0.0, 100.0]))[0] == pytest.approx(run.fault_free_rate)


def test_changes_at_or_after_the_end_are_not_simulated():
    whole = simulate(POLICIES["torchft"](scenario()), trace())
    late = simulate(POLICIES["torchft"](scenario()), trace(lose(1000.0, 0)))
    assert late.throughput == whole.throughput and late.switches == 0


def test_after_ctrl_c_the_policies_that_were_finished_are_kept():
    one = scenario()
    result = compare(KINDS, one.throughputs, COSTS, trace(), interrupt_after(2))
    assert list(result.runs) == ["fault-scaled", "torchft"]
    assert result.best_rate == result.runs["torchft"].fault_free_rate, "reference lines do not count"


def test_after_ctrl_c_the_traces_that_were_finished_are_kept():
    one, traces = scenario(), [trace(), trace(lose(100.0, 0)), trace()]
    values = throughputs_over_traces(KINDS, one.throughputs, COSTS, traces, interrupt_after(2))
    assert {name: len(column) for name, column in values.items()} == {kind.name: 2 for kind in KINDS}
