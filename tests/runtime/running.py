"""Runs small enough for tests, and the judge of their numbers."""

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from planner.job import Job
from planner.plan import plan_job
from runtime.config import RunConfig, parse_run_config
from runtime.launch import RunResult
from runtime.model.parameters import load_parameters
from runtime.reference import ReferenceResult, reference_run
from schedules.schedule import BackwardMode, OptimizerMode, Schedule, Worker

ITERATIONS = 20


def tiny(**training: object) -> RunConfig:
    """A GPT of 4 layers in float64."""
    model = {"blocks": 2, "width": 16, "heads": 2, "context": 16, "dropout": 0.1}
    return parse_run_config(model, {"batch": 1, "dtype": "float64", "device": "cpu", "iterations": ITERATIONS},
                            **training)


def schedule_for(job: Job, failed: Sequence[str] = (), *, backward: BackwardMode = "split",
                 optimizer: OptimizerMode = "staggered") -> Schedule:
    """A plan by the list scheduler: quick, and the runtime does not care how good it is."""
    return plan_job(job, [Worker.parse(name) for name in failed], backward=backward, optimizer=optimizer,
                    method="greedy").schedule


@functools.cache
def judge(config: RunConfig, microbatches: tuple[int, ...], iterations: int = ITERATIONS) -> ReferenceResult:
    """The same training in one process; computed once."""
    return reference_run(config, microbatches, iterations)


def assert_same_numbers(result: RunResult, reference: ReferenceResult, tolerance: float = 1e-9) -> None:
    """Losses of all iterations and the final parameters agree."""
    assert len(result.losses) == len(reference.losses)
    for ours, theirs in zip(result.losses, reference.losses, strict=True):
        assert abs(ours - theirs) <= tolerance
    parameters = load_parameters(result.out)
    assert parameters.keys() == reference.parameters.keys()
    for name, theirs in reference.parameters.items():
        torch.testing.assert_close(parameters[name], theirs, rtol=0, atol=tolerance)


def log_of(out: Path) -> str:
    """What the workers printed."""
    return "".join(path.read_text() for path in sorted((out / "logs").glob("*.log")))
