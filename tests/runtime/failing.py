"""Runs in which workers fail and come back, small enough for tests."""

from collections.abc import Callable

from cli.shared.rebalancing import Rebalancing
from planner.job.file import Job
from planner.options import PlanOptions
from runtime.coordinator.planning import Held, Scheduler, Speeds
from runtime.launch import Resilience, RunOptions, RunResult, run
from runtime.protocol.failure_injection import Action, Injection, Place
from schedules.schedule import BackwardMode, OptimizerMode, Schedule, Worker
from tests.jobs import grid
from tests.runtime.pacing import UntilBack
from tests.runtime.running import assert_same_numbers, judge, schedule_for, tiny

JOB = grid(2, 2, 2, more="optimizer = 1")
WIDE = grid(3, 2, 2, more="optimizer = 1")
CONFIG = tiny(iterations=6)
LONG = tiny(iterations=50)
"""Long enough for a worker to be back before the end, also on a busy machine: `train` takes its time until then."""
TIMEOUT_SECONDS = 2.5
"""Without a heartbeat; shorter, and a busy machine loses workers that are well."""


def planned(job: Job, backward: BackwardMode = "split", optimizer: OptimizerMode = "staggered") -> Scheduler:
    """Schedules for whatever failures."""
    return lambda down: schedule_for(job, [str(worker) for worker in down], backward=backward, optimizer=optimizer)


class Planning(Rebalancing):
    """Plans settled schedules in the run's own process, so that it takes no longer than it must."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, schedule_for(job))
        self.asked: list[tuple[tuple[Worker, ...], Speeds]] = []
        """For settled schedules."""

    def at_once(self, down: tuple[Worker, ...], held: Held, speeds: Speeds) -> Schedule:
        schedule = super().at_once(down, held, speeds)
        assert all(schedule.holds(worker) == layers for worker, layers in held), "nobody needs what it does not hold"
        return schedule

    def settled(self, down: tuple[Worker, ...], held: Held, speeds: Speeds) -> Schedule:
        self.asked.append((down, speeds))
        options = PlanOptions(method="greedy", time_limit=0.3, layers="move", holds=held)
        return self._on_the_spot(options, down, speeds)


def train(injections, fork_server, out, *, job=JOB, config=CONFIG, modes=(),
          progress: Callable[[int, float], None] | None = None, **resilience) -> RunResult:
    """Train with failures and compare with the fault-free run in one process."""
    scheduler, pace = planned(job, *modes), UntilBack(resilience.get("returns", ()))

    def paced(iteration: int, loss: float) -> None:
        if progress is not None:
            progress(iteration, loss)
        pace.progress(iteration, loss)

    given = Resilience(**{"scheduler": scheduler, "heartbeat_timeout_seconds": TIMEOUT_SECONDS,
                          "injections": tuple(injections), **resilience})
    result = run(scheduler(()), config, out=out, fork_server=fork_server, resilience=given, progress=paced,
                 options=RunOptions(notify=pace.notify))
    assert_same_numbers(result, judge(config, job.microbatches, config.training.iterations))
    return result


def at(worker: str, iteration: int, place: Place = "A", action: Action = "kill") -> Injection:
    """A failure."""
    return Injection(Worker.parse(worker), iteration, place, action)


def dead(result: RunResult) -> list[str]:
    """The members that were lost, in order."""
    return [str(worker) for one in result.recoveries for worker in one.dead]


def returned(result: RunResult) -> list[str]:
    """The workers that came in, in order."""
    return [str(worker) for one in result.recoveries for worker in one.returned]
