"""Slipstream is never behind a policy that it could follow.

The traces are of spot instances, for every preset.

However little time its plans have: here, as on a machine that is busy with everything else, next to
none, so that all but the first list schedules and the first layout of each are left out. With more
time it only gains.
"""

import random
from functools import cache

import pytest

from slipstream.planner.job.file import parse_job
from slipstream.planner.job.presets import preset_names, preset_text
from slipstream.planner.simulation.availability_trace import fit_to_job
from slipstream.planner.simulation.costs import costs_for
from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy import Cause
from slipstream.planner.simulation.policy_runs import compare_policies
from slipstream.planner.simulation.synthetic_trace import draw_trace
from slipstream.planner.simulation.throughput import Throughputs
from slipstream.planner.simulation.trace_file import parse_availability_trace
from tests.planner.simulation.small import failing, job

LARGE = ("gpt-14.6b", "gpt-28.3b", "llama-3-70b")
"""Presets of which a plan takes a second: a shorter trace.

`benchmarks.traces` has long ones for all.
"""
FOLLOWED = ("recycle", "torchft", "checkpoint-restart")


@cache
def throughputs(name, seconds=0.0):
    """What is planned, in so many seconds each, is kept for all tests."""
    return Throughputs(parse_job(preset_text(name)), plan_seconds=seconds, settle_seconds=seconds)


def spot_trace(seed, workers, hours=4):
    """A trace in which several machines come or go at one instant.

    That happens every minute or so, down to a third of the fleet and up again.
    """
    draw, live, fresh, clock, lines = random.Random(seed), [], 0, 0, []
    target = workers
    while clock < hours * 3600:
        if draw.random() < 0.15:
            target = draw.randint(workers // 3, workers)
        count = min(draw.randint(1, 6), abs(target - len(live)) or 1)
        if clock == 0:
            count, coming = workers * 2 // 3, True
        else:
            coming = len(live) < target
        for _ in range(count):
            if coming and len(live) < workers:
                live.append(fresh)
                lines.append(f"{clock * 1000},add,node{fresh}")
                fresh += 1
            elif not coming and live:
                lines.append(f"{clock * 1000},remove,node{live.pop(draw.randrange(len(live)))}")
        clock += draw.choice((60, 60, 120, 300, 900))
    return parse_availability_trace("\n".join(lines), "spot")


def result_for(planned, trace, parameters=6.7e9, kinds=("slipstream", *FOLLOWED)):
    fitted = fit_to_job(trace, planned.workers)
    return compare_policies(
        [POLICIES[kind] for kind in kinds],
        planned,
        costs_for(parameters, planned.job.stages),
        fitted,
    )


@pytest.mark.parametrize(
    ("name", "seconds"), [*((name, 0.0) for name in preset_names()), ("gpt-1.5b", 0.1)]
)
def test_on_spot_traces(name, seconds):
    trace = spot_trace(1, 32, hours=0.2 if name in LARGE else 0.4)
    assert trace.machine_losses and any(change.added for change in trace.changes)
    result = result_for(throughputs(name, seconds), trace)
    ours, others = (
        result.runs["slipstream"].throughput,
        {kind: result.runs[kind].throughput for kind in FOLLOWED},
    )
    assert ours >= max(others.values()), others


def test_a_stage_is_lost_when_recycle_loses_it_and_never_else():
    # The same machines are in the same stages, so that only the throughput differs, which is never
    # less.
    lost, planned = 0, Throughputs(job(pipelines=3, stages=4), plan_seconds=0.0, settle_seconds=0.0)
    for seed in range(10):
        result = result_for(
            planned, spot_trace(seed, planned.workers, hours=6), kinds=("slipstream", "recycle")
        )
        ours, theirs = result.runs["slipstream"], result.runs["recycle"]
        restarts = [
            run.seconds[:-1][run.cause_indices == list(Cause).index(Cause.RESTART)].tolist()
            for run in (ours, theirs)
        ]
        assert restarts[0] == restarts[1] and ours.throughput >= theirs.throughput, seed
        lost += len(restarts[0])
    assert lost > 100, "traces need checkpoints"


@pytest.mark.parametrize("seed", range(2))
def test_on_drawn_traces(seed):
    workers = throughputs("gpt-6.2b").workers
    trace = draw_trace(failing(40, (8, 60), repair_hours=3), workers, 1, seed)
    result = result_for(throughputs("gpt-6.2b"), trace)
    assert result.runs["slipstream"].throughput == max(
        result.runs[kind].throughput for kind in result.runs
    )
