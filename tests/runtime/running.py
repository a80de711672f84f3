"""Runs small enough for tests, and the judge of their numbers."""

import contextlib
import functools
import json
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from slipstream.planner.job.file import Job, parse_job
from slipstream.planner.plan import plan_job
from slipstream.runtime.checkpoints.checkpoint import load_layers, open_latest
from slipstream.runtime.checkpoints.parameters import load_parameters
from slipstream.runtime.config import RunConfig, parse_run_config
from slipstream.runtime.events import EVENTS, METRICS, Metrics, decode_metrics
from slipstream.runtime.launch import RunResult
from slipstream.runtime.protocol.authentication import SECRET_VARIABLE
from slipstream.runtime.run_folder import CHECKPOINTS
from slipstream.runtime.tools.reference import ReferenceResult, reference_run
from slipstream.schedules.schedule import BackwardMode, OptimizerMode, Schedule, Worker

ITERATIONS = 20
ROOT = Path(__file__).parents[2]
"""Where the packages are."""


def tiny(**training: object) -> RunConfig:
    """A GPT of 4 layers in float64."""
    model = {"blocks": 2, "width": 16, "heads": 2, "context": 16, "dropout": 0.1}
    return parse_run_config(
        model,
        {"batch": 1, "dtype": "float64", "device": "cpu", "iterations": ITERATIONS},
        **training,
    )


def parallel(model: str, ranks: int, **training: object) -> RunConfig:
    """One of `tests.runtime.exact_parallel`, with workers of so many ranks."""
    return parse_run_config(
        {"name": model, "blocks": 2, "width": 8, "context": 8},
        {"batch": 1, "dtype": "float64", "device": "cpu", "tensor_parallel": ranks, **training},
    )


def schedule_for(
    job: Job,
    failed: Sequence[str] = (),
    *,
    backward: BackwardMode = "split",
    optimizer: OptimizerMode = "staggered",
) -> Schedule:
    """A plan by the list scheduler.

    It is quick, and the runtime does not care how good it is.
    """
    return plan_job(
        job,
        [Worker.parse(name) for name in failed],
        backward=backward,
        optimizer=optimizer,
        method="greedy",
    ).schedule


@functools.cache
def judge(
    config: RunConfig, microbatches: tuple[int, ...], iterations: int = ITERATIONS
) -> ReferenceResult:
    """The same training in one process; computed once."""
    return reference_run(config, microbatches, iterations)


def assert_same_numbers(
    result: RunResult, reference: ReferenceResult, tolerance: float = 1e-9
) -> None:
    """Losses of all iterations and the final parameters agree."""
    assert len(result.losses) == len(reference.losses)
    for ours, theirs in zip(result.losses, reference.losses, strict=True):
        assert abs(ours - theirs) <= tolerance
    parameters = load_parameters(result.out)
    assert parameters.keys() == reference.parameters.keys()
    for name, theirs in reference.parameters.items():
        torch.testing.assert_close(parameters[name], theirs, rtol=0, atol=tolerance)


def assert_same_masters(
    result: RunResult,
    config: RunConfig,
    microbatches: tuple[int, ...],
    iterations: int,
    *,
    share: float,
    rounding: float = 1e-3,
) -> None:
    """Losses and the float32 master weights of the last checkpoint agree.

    Weights are off by such a share of the way that they have gone at most, losses by `rounding` of
    their value.
    """
    reference, first = judge(config, microbatches, iterations), judge(config, microbatches, 0)
    assert result.losses == pytest.approx(reference.losses, rel=rounding)
    newest = open_latest(result.out / CHECKPOINTS)
    assert newest is not None and newest.iteration == iterations
    states = load_layers(
        newest, range(1 + max(int(name.partition(".")[0]) for name in reference.masters))
    )
    ours = {
        name: states[int(layer)][f"model.{of}"]
        for name in reference.masters
        for layer, _, of in [name.partition(".")]
    }
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}
    distances = []
    for masters, other in ((ours, reference.masters), (reference.masters, first.masters)):
        squares = sum(
            float((masters[name] - other[name]).square().sum()) for name in reference.masters
        )
        distances.append(squares**0.5)
    off, gone = distances
    assert off <= share * gone


def tiny_text(pipelines: int, iterations: int) -> str:
    """A job file of two stages that trains like `tiny`."""
    return f"""
        pipelines = {pipelines}
        stages = 2
        microbatches = 2
        [time]
        forward = 1
        backward_input = 1
        backward_weight = 1
        [model]
        blocks = 2
        width = 16
        heads = 2
        context = 16
        dropout = 0.1
        [training]
        batch = 1
        dtype = "float64"
        device = "cpu"
        iterations = {iterations}
        """


def judge_of_text(text: str) -> ReferenceResult:
    """What training by a job file must give."""
    job = parse_job(text)
    config = parse_run_config(job.model, job.training)
    return judge(config, job.microbatches, config.training.iterations)


def command_environment() -> dict[str, str]:
    """For commands that are run elsewhere, and share this machine."""
    return {**os.environ, "PYTHONPATH": str(ROOT), SECRET_VARIABLE: "0123456789abcdef"}


def losses_in(out: Path) -> list[float]:
    """Those that a run has written, so far."""
    path = out / "losses.jsonl"
    if not path.exists():
        return []
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


def joined(out: Path) -> list[str]:
    """Who has come in."""
    events = map(json.loads, (out / EVENTS).read_text().splitlines())
    return ["{}.{}".format(*event["worker"]) for event in events if event["event"] == "joined"]


def metrics_in(out: Path) -> list[Metrics]:
    """The metrics that a run has written so far.

    Each iteration has them once, none is missing, as in the losses.
    """
    found = [decode_metrics(line) for line in (out / METRICS).read_bytes().splitlines()]
    assert [(metrics.iteration, metrics.loss) for metrics in found] == list(
        enumerate(losses_in(out))
    )
    return found


def assert_same_evaluations(out: Path, reference: ReferenceResult, tolerance: float = 1e-9) -> None:
    """The validation losses that a run has written are those of one process.

    They come after the same iterations.
    """
    ours = {
        metrics.iteration: metrics.validation_loss
        for metrics in metrics_in(out)
        if metrics.validation_loss is not None
    }
    assert ours.keys() == reference.evaluations.keys()
    for iteration, theirs in reference.evaluations.items():
        assert abs(ours[iteration] - theirs) <= tolerance


_HELD_PORTS: list[socket.socket] = []


def free_port() -> int:
    """A port of this machine that nobody listens on.

    The system gives it to nobody else while this process lives: it stays bound, in a way that still
    lets one listen there.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", 0))
    _HELD_PORTS.append(listener)
    port: int = listener.getsockname()[1]
    return port


def wait_until_gone(pids: Sequence[int]) -> None:
    """Wait a moment until processes have ended."""
    deadline = time.monotonic() + 60
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "workers are still there"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether the process runs: one that waits for its parent to notice does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    # The latter where it ends between opening and reading.
    except (FileNotFoundError, ProcessLookupError):
        return False


def children(pid: int) -> list[int]:
    """The processes that a process has started; none where it has ended."""
    with contextlib.suppress(OSError):
        return [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    return []


def below(pid: int) -> list[int]:
    """A process's children, and theirs."""
    return [process for child in children(pid) for process in (child, *below(child))]


def log_of(out: Path) -> str:
    """What the workers printed."""
    return "".join(path.read_text() for path in sorted((out / "logs").glob("*.log")))
