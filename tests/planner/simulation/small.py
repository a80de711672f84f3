"""Small jobs and traces with numbers that can be checked by hand."""

import functools

import pytest

from slipstream.planner.job.file import parse_job
from slipstream.planner.simulation.availability_trace import AvailabilityTrace, Change
from slipstream.planner.simulation.costs import Costs
from slipstream.planner.simulation.failure_models import FailureKind, FailureModel
from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy import Cause, Scenario
from slipstream.planner.simulation.policy_runs import simulate_policy
from slipstream.planner.simulation.throughput import Throughputs

COSTS = Costs(
    parameters=1e9,
    switch_seconds=2.0,
    load_seconds=3.0,
    restart_seconds=50.0,
    checkpoint_seconds=10.0,
    oobleck_seconds=7.0,
    bamboo_seconds=20.0,
)
WHOLE = 18 / 22
"""Samples a second of 1F1B, which takes 22 seconds.

3 pipelines x 2 stages x 6 micro-batches of three slots: (6 + 1) x 3 + 1 = 22 seconds.
"""


def job(pipelines=3, stages=2, microbatches=6, optimizer=1, order="linear"):
    return parse_job(
        f'name = "small"\npipelines = {pipelines}\nstages = {stages}\n'
        f"microbatches = {microbatches}\n"
        f"[time]\nforward = 1\nbackward_input = 1\nbackward_weight = 1\noptimizer = {optimizer}\n"
        f'[placement]\norder = "{order}"\n'
    )


@functools.cache
def throughputs(**shape):
    """Of a small job. What has been planned is kept for all tests."""
    return Throughputs(job(**shape))


def scenario(between=1000.0, costs=COSTS, **shape):
    return Scenario(throughputs(**shape), costs, between)


def trace(*changes, workers=6, seconds=1000.0, live=None):
    return AvailabilityTrace(
        name="made",
        places=workers,
        live=tuple(range(workers)) if live is None else live,
        changes=tuple(changes),
        length_seconds=seconds,
    )


def lose(seconds, *machines):
    return Change(seconds, removed=machines)


def gain(seconds, *machines):
    return Change(seconds, added=machines)


def slow(seconds, machine, factor):
    return Change(seconds, slowed=((machine, factor),))


class InPlace(POLICIES["slipstream"]):
    """Slipstream before layers have moved, for numbers that can be checked by hand."""

    name = "slipstream"
    moves_layers = False


def run(name, *changes, **how):
    kind = InPlace if name == "in-place" else POLICIES[name]
    policy = kind(scenario(**how.pop("scenario", {})))
    return simulate_policy(policy, trace(*changes, **how))


def spans(result):
    """[(cause, seconds)] of a run."""
    return [
        (list(Cause)[number].name, pytest.approx(float(seconds)))
        for number, seconds in zip(
            result.cause_indices, result.seconds[1:] - result.seconds[:-1], strict=True
        )
    ]


def failing(mtbf, *more, **kind):
    """Single machines that fail once in so many hours each.

    `more` are pairs (machines of a domain, hours).
    """
    return FailureModel(
        name="made",
        kinds=tuple(
            FailureKind(cause=f"{size}", gpus=size, mtbf_hours=hours, **kind)
            for size, hours in [(1, mtbf), *more]
        ),
    )
