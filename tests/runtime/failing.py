"""Runs in which workers fail and come back, small enough for tests."""

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from slipstream.planner.failures import FailurePlanner, with_speeds
from slipstream.planner.job.file import Job
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_only
from slipstream.runtime.checkpoints.checkpoint import load_layers, open_latest
from slipstream.runtime.config import RunConfig
from slipstream.runtime.coordinator.decisions.recoveries import Recovery
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedEvent
from slipstream.runtime.coordinator.planning.schedule_finder import Scheduler
from slipstream.runtime.events import Event
from slipstream.runtime.launch import Resilience, RunOptions, RunResult, run
from slipstream.runtime.processes.fork_server import ForkServer
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.processes.stop_signals import RunStopped
from slipstream.runtime.protocol.failure_injection import Action, Injection, Place
from slipstream.schedules.schedule import (
    BackwardMode,
    HeldLayers,
    OptimizerMode,
    Schedule,
    Speeds,
    Worker,
)
from tests.jobs import grid
from tests.runtime.pacing import UntilBack
from tests.runtime.running import assert_same_numbers, judge, losses_in, schedule_for, tiny

JOB = grid(2, 2, 2, more="optimizer = 1")
WIDE = grid(3, 2, 2, more="optimizer = 1")
CONFIG = tiny(iterations=6)
LONG = tiny(iterations=50)
"""Long enough for a worker to be back before the end.

It is so on a busy machine, too: `train` takes its time until then.
"""
TIMEOUT_SECONDS = 30.0
"""Seconds without a heartbeat, where nobody falls silent.

No worker that is well is lost, however busy the machine is.
"""
SILENT_SECONDS = 10.0
"""Without a heartbeat, where somebody is stopped, and all wait for so long."""
GRACE_SECONDS = 120.0
"""To write a last checkpoint."""


def planned(
    job: Job, backward: BackwardMode = "split", optimizer: OptimizerMode = "staggered"
) -> Scheduler:
    """Schedules for whatever failures."""
    return lambda down: schedule_for(
        job, [str(worker) for worker in down], backward=backward, optimizer=optimizer
    )


class Planning(FailurePlanner):
    """Plans settled schedules by the first way.

    So it takes no longer than it must.
    """

    def __init__(self, job: Job) -> None:
        super().__init__(job, schedule_for(job))
        self.asked: list[tuple[tuple[Worker, ...], Speeds]] = []
        """For settled schedules."""

    def plan_at_once(self, down: tuple[Worker, ...], held: HeldLayers, speeds: Speeds) -> Schedule:
        schedule = super().plan_at_once(down, held, speeds)
        assert all(schedule.held_layers(worker) == layers for worker, layers in held), (
            "nobody needs what it does not hold"
        )
        return schedule

    def plan_rebalanced(
        self, down: tuple[Worker, ...], held: HeldLayers, speeds: Speeds
    ) -> Schedule:
        self.asked.append((down, speeds))
        options = PlanOptions(method="greedy", steps=40_000, layers="move", holds=held)
        return plan_only(
            options, with_speeds(self._job, speeds) if speeds else self._job, down
        ).schedule


def train(
    injections,
    fork_server,
    out,
    *,
    job=JOB,
    config=CONFIG,
    modes=(),
    progress: Callable[[int, float], None] | None = None,
    observe: Callable[[Event], None] = lambda _: None,
    **resilience,
) -> RunResult:
    """Train with failures and compare with the fault-free run in one process."""
    scheduler, pace = planned(job, *modes), UntilBack(resilience.get("returns", ()))

    def paced(iteration: int, loss: float) -> None:
        if progress is not None:
            progress(iteration, loss)
        pace.progress(iteration, loss)

    def seen(event: Event) -> None:
        observe(event)
        pace.observe(event)

    result = run(
        scheduler(()),
        config,
        out=out,
        fork_server=fork_server,
        progress=paced,
        resilience=against(injections, **{"scheduler": scheduler, **resilience}),
        options=RunOptions(notify=pace.notify, observe=seen),
    )
    assert_same_numbers(result, judge(config, job.microbatches, config.training.iterations))
    return result


def against(injections: Sequence[Injection], **more) -> Resilience:
    """What a run is given for these failures."""
    silent = any(injection.action == "stop" for injection in injections)
    return Resilience(
        **{
            "heartbeat_timeout_seconds": SILENT_SECONDS if silent else TIMEOUT_SECONDS,
            "injections": tuple(injections),
            **more,
        }
    )


class Told:
    """What a run has told so far. `happened` is asked after each iteration."""

    def __init__(self, happened: Callable[["Told"], object]) -> None:
        self._happened, self._stopping = happened, False
        self.events: list[Event] = []
        self.recoveries: list[Recovery] = []
        self.speed_events: list[SpeedEvent] = []

    def of(self, kind: type[Event], worker: Worker | None = None) -> list[Event]:
        """The events of a kind; of a worker."""
        return [
            event
            for event in self.events
            if isinstance(event, kind) and worker in (None, getattr(event, "worker", None))
        ]

    def notify(self, news: object) -> None:
        if isinstance(news, Recovery):
            self.recoveries.append(news)
        elif isinstance(news, SpeedEvent):
            self.speed_events.append(news)

    def progress(self, *_: object) -> None:
        if not self._stopping and self._happened(self):
            self._stopping = True
            os.kill(os.getpid(), signal.SIGTERM)


def train_until(
    happened: Callable[[Told], object],
    fork_server: ForkServer,
    out: Path,
    *,
    job: Job = JOB,
    config=CONFIG,
    injections: Sequence[Injection] = (),
    **resilience,
) -> Told:
    """Train until something has happened, and compare with one process.

    The losses and the last checkpoint are compared.

    It fails where that has not happened within the iterations of `config`: many, as nobody knows
    how busy the machine is, and no more are run than are needed.
    """
    scheduler, log = planned(job), Told(happened)
    resilience_ = against(
        injections, **{"scheduler": scheduler, "checkpoint_every": None, **resilience}
    )
    with pytest.raises(RunStopped):
        run(
            scheduler(()),
            config,
            out=out,
            fork_server=fork_server,
            resilience=resilience_,
            progress=log.progress,
            options=RunOptions(
                notify=log.notify, observe=log.events.append, grace_seconds=GRACE_SECONDS
            ),
        )
    assert_same_so_far(out, job, config)
    return log


def assert_same_so_far(out: Path, job: Job, config: RunConfig) -> None:
    """A run that was ended has the numbers of one process.

    They are its losses, and the parameters of its last checkpoint.
    """
    losses, checkpoint = losses_in(out), open_latest(out / "checkpoints")
    assert checkpoint is not None and checkpoint.iteration == len(losses)
    reference = judge(config, job.microbatches, len(losses))
    assert losses == pytest.approx(reference.losses, rel=0, abs=1e-9)
    layers = {int(name.partition(".")[0]) for name in reference.parameters}
    found = {
        f"{layer}.{name.removeprefix('model.')}": tensor
        for layer, state in load_layers(checkpoint, layers).items()
        for name, tensor in state.items()
        if name.startswith("model.")
    }
    for name, theirs in reference.parameters.items():
        torch.testing.assert_close(found[name], theirs, rtol=0, atol=1e-9)


def at(worker: str, iteration: int, place: Place = "A", action: Action = "kill") -> Injection:
    """A failure."""
    return Injection(Worker.parse(worker), iteration, place, action)


KILLS = [at("0.0", 2, "O"), at("2.1", 4, "A"), at("1.0", 56, "stepped"), at("1.1", 57, 2)]
BACK = (Return(Worker(0, 0), 3), Return(Worker(2, 1), 5))
KILLS_ITERATIONS = 62
"""Iterations that a run has for deaths at several places.

Two of them come once both workers are back.
"""


def dead(result: RunResult) -> list[str]:
    """The members that were lost, in order.

    Why is printed, and seen where a test fails.
    """
    print(*(reason for recovery in result.recoveries for reason in recovery.reasons), sep="\n")
    return [str(worker) for recovery in result.recoveries for worker in recovery.dead]


def returned(result: RunResult) -> list[str]:
    """The workers that came in, in order."""
    return [str(worker) for recovery in result.recoveries for worker in recovery.returned]
