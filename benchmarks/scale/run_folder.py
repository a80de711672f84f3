"""Measure the files of a long run of thousands of workers.

    python -m benchmarks.scale.run_folder [--workers 4096] [--iterations 10000] [--every 100]
                                          [--out DIR]

Measures their size, and the time to show the run's page. Writes a run's folder as node 0 does, with
schedules that are planned for it: every so many iterations a machine of eight workers fails, the
others continue at once, layers move while all train, a worker is slow for a while, and the machine
comes back. Iterations take 5 s, 10 s at once and 6 s settled, with a spread of 1 %. Nothing
computes them. Then `slipstream show --run` reads the folder: for the terminal, as JSON, and as a
page.
"""

import argparse
import hashlib
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from benchmarks.scale.shapes import job_of, shares_of
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_only
from slipstream.runtime.coordinator.decisions.effects import DIGEST_CHARACTERS
from slipstream.runtime.events import (
    EVENTS,
    LOSSES,
    METRICS,
    SCHEDULES,
    CheckpointWritten,
    Event,
    Failed,
    FetchBegun,
    FetchProgressed,
    HandedOver,
    Iteration,
    Joined,
    Metrics,
    NodeLost,
    OrderGiven,
    Phase,
    PlanAnswered,
    PlanAsked,
    Recovered,
    Resumed,
    RunFinished,
    Slowed,
    Started,
    encode,
)
from slipstream.schedules import codec
from slipstream.schedules.schedule import Worker

SECONDS: dict[Phase, float] = {"whole": 5.0, "at once": 10.0, "settled": 6.0}
PLANS = 8
"""Number of different schedules with a machine down. Machines fail in turns."""


class Folder:
    """Writer of events and iterations at given times."""

    def __init__(self, folder: Path, workers: int, iterations: int, every: int) -> None:
        self.folder, self.iterations, self.every = folder, iterations, every
        self.job = job_of(workers)
        self.all = [
            Worker(pipeline, stage)
            for pipeline in range(self.job.pipelines)
            for stage in range(self.job.stages)
        ]
        self.at, self.iteration, self.order = 0.0, 0, 0
        self.random = random.Random(1)
        (folder / SCHEDULES).mkdir(parents=True)

    def write(self) -> None:
        """Write the whole folder."""
        machines = shares_of(self.all)[:: max(1, len(self.all) // 8 // PLANS)][:PLANS]
        whole = self.planned(())
        degraded = [self.planned(machine) for machine in machines]
        with (
            (self.folder / EVENTS).open("wb") as self.events,
            (self.folder / LOSSES).open("wb") as self.losses,
            (self.folder / METRICS).open("wb") as self.metrics,
        ):
            self.tell(
                Started(
                    job=self.job.name,
                    workers=len(self.all),
                    iterations=self.iterations,
                    samples=sum(self.job.microbatches),
                    fault_free_period=SECONDS["whole"],
                )
            )
            self.ordered(whole, "whole", len(self.all))
            while self.iteration < self.iterations:
                self.commit(self.every // 2, "whole")
                number = self.iteration // self.every % len(machines)
                for event in self.failure(machines[number], whole, degraded[number]):
                    self.tell(event)
            self.tell(RunFinished())

    def planned(self, down: tuple[Worker, ...] | list[Worker]) -> str:
        """Plan a schedule, write it, and return its digest."""
        made = plan_only(PlanOptions(method="greedy", steps=10_000), self.job, down)
        data = codec.encode(made.schedule)
        digest = hashlib.sha256(data).hexdigest()[:DIGEST_CHARACTERS]
        (self.folder / SCHEDULES / f"{digest}.json").write_bytes(data)
        return digest

    def failure(self, machine: list[Worker], whole: str, degraded: str) -> Iterator[Event]:
        """Write the failure and return of a machine, with the iterations in between."""
        down, live = tuple(machine), len(self.all) - len(machine)
        for worker in machine:
            yield Failed(worker=worker, reason="its process was killed by SIGKILL")
        yield NodeLost(node=self.all.index(machine[0]) // len(machine), workers=down)
        yield PlanAsked(down=down, phase="at once")
        self.at += 0.4
        yield PlanAnswered(down=down, phase="at once", took=0.4)
        self.ordered(degraded, "at once", live)
        yield Resumed(pause=0.5, live=live)
        yield FetchBegun(
            fetch=self.order, purpose="settle", layers=64, workers=tuple(self.all[:64])
        )
        for done in range(64):
            yield FetchProgressed(fetch=self.order, share=(done + 1) / 64)
        self.commit(self.every // 10, "at once")
        yield HandedOver(fetch=self.order, order=self.order + 1)
        self.ordered(degraded, "settled", live)
        slow = self.random.choice([worker for worker in self.all if worker not in machine])
        yield Slowed(worker=slow, factor=1.4)
        self.commit(self.every // 2 - self.every // 10, "settled")
        yield Recovered(worker=slow)
        yield CheckpointWritten(checkpoint=self.iteration, took=12.0)
        for worker in machine:
            yield Joined(worker=worker)
        self.ordered(whole, "whole", len(self.all))

    def ordered(self, digest: str, phase: Phase, live: int) -> None:
        """Write an order."""
        self.order += 1
        self.tell(
            OrderGiven(
                order=self.order,
                schedule=digest,
                live=live,
                planned_period=SECONDS[phase],
                phase=phase,
            )
        )

    def commit(self, count: int, phase: Phase) -> None:
        """Write a number of iterations."""
        for _ in range(min(count, self.iterations - self.iteration)):
            period = SECONDS[phase] * self.random.gauss(1, 0.01)
            self.at += period
            loss, now = round(11 * (self.iteration + 1) ** -0.1, 6), round(1.8e9 + self.at, 3)
            self.losses.write(
                encode(
                    Iteration(
                        iteration=self.iteration, loss=loss, period=round(period, 6), time=now
                    )
                )
                + b"\n"
            )
            self.metrics.write(
                encode(
                    Metrics(
                        iteration=self.iteration,
                        loss=loss,
                        validation_loss=None,
                        gradient_norm=1.0,
                        learning_rate=1e-4,
                        tokens_per_second=1e6,
                        mfu=0.4,
                        live=len(self.all),
                        phase=phase,
                        recoveries=self.order,
                        time=now,
                    )
                )
                + b"\n"
            )
            self.iteration += 1

    def tell(self, event: Event) -> None:
        """Write an event, a millisecond after the previous one."""
        self.at += 0.001
        self.events.write(
            encode(
                replace(
                    event,
                    time=round(1.8e9 + self.at, 3),
                    seconds=round(self.at, 3),
                    iteration=self.iteration,
                )
            )
            + b"\n"
        )


def timed(*command: str) -> tuple[float, int]:
    """Return the CPU seconds of a command, and the bytes that it printed.

    Raises CalledProcessError.
    """
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        printed = len(process.stdout.read())
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return used.ru_utime + used.ru_stime, printed


def main() -> None:
    """Write a folder, and show it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4096)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or Path(temporary) / "run"
        Folder(out, options.workers, options.iterations, options.every).write()
        for path in sorted(out.rglob("*.json*")):
            print(f"{path.relative_to(out)}: {path.stat().st_size / 1e6:.2f} MB")
        show = [sys.executable, "-m", "slipstream", "show", "--run", str(out)]
        page = out / "page.html"
        for name, more in (
            ("terminal", []),
            ("--json", ["--json"]),
            ("page", ["--html", str(page)]),
        ):
            cpu, printed = timed(*show, *more)
            print(f"{name}: {cpu:.2f} s of CPU, {printed:,} bytes printed")
        print(f"page: {page.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
