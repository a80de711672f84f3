"""Run node 0 for fake workers, without processes or a model.

    python -m benchmarks.scale.node_0 WORKERS FOLDER [--behind PORT] [--table DIR] [--plan-then]
                                      [--heartbeat-timeout SEC]

Event loop, commit log, planning and files are those of any run. It appends events to
FOLDER/marks.jsonl, each with time.monotonic.
"""

import argparse
import asyncio
import contextlib
import cProfile
import json
import os
import resource
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast
from unittest import mock

from benchmarks.scale.shapes import (
    ELEMENTS,
    LAYERS_A_STAGE,
    SECRET,
    first_schedule,
    job_of,
    shares_of,
)
from slipstream.planner.failures import FailurePlanner
from slipstream.runtime.config import ModelConfig, RunConfig
from slipstream.runtime.coordinator import event_loop
from slipstream.runtime.coordinator.decisions.commit_log import CommitLog
from slipstream.runtime.coordinator.decisions.run_state import RunFacts
from slipstream.runtime.coordinator.event_loop import EventLoop
from slipstream.runtime.coordinator.planning.schedule_finder import (
    Rebalancer,
    Scheduler,
    SchedulerAtSpeeds,
)
from slipstream.runtime.coordinator.records.metrics import IterationWork, MetricsBuilder
from slipstream.runtime.coordinator.records.run_log import RunLog, read_losses
from slipstream.runtime.coordinator.run_options import Resilience, RunOptions, RunRequest
from slipstream.runtime.coordinator.run_spec import RunSpec
from slipstream.runtime.events import Event
from slipstream.runtime.failure_domains import find_domains
from slipstream.runtime.placement import Placement
from slipstream.runtime.processes.process_manager import NodeProcesses, ProcessManager
from slipstream.runtime.processes.stop_signals import StopSignals
from slipstream.runtime.protocol.rendezvous import LOOPBACK, Rendezvous, open_listener
from slipstream.runtime.protocol.setup import (
    CommonSettings,
    FormSpec,
    WorkerResilience,
    WorkerSetup,
)
from slipstream.runtime.run_folder import TakeoverRecord
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.tables.table import Table

MARKS = "marks.jsonl"


class Marks:
    """Events at node 0, for the process that measures."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / MARKS).open("a", buffering=1)

    def __call__(self, what: str, **more: object) -> None:
        """Write an event that happens now."""
        self._file.write(json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n")

    def event(self, event: Event) -> None:
        """Write an event of the run."""
        self(
            type(event).__name__,
            took=getattr(event, "took", None),
            error=getattr(event, "error", None),
        )


class NoProcesses:
    """Replacement of node 0's processes, which starts and ends nothing."""

    def __init__(self) -> None:
        self._readable, self._writable = os.pipe()

    def fileno(self) -> int:
        """Return a descriptor for a selector that is never readable."""
        return self._readable

    def poll(self) -> list[object]:
        """Return no ended process."""
        return []

    def execute_command(self, command: object) -> None:
        """Ignore requests to start or kill processes."""

    def run_workers(self, **_: object) -> contextlib.AbstractContextManager[None]:
        """Return no process."""
        return contextlib.nullcontext()


def setup_of(schedule: Schedule, nodes: int, domains: tuple, timeout: float) -> WorkerSetup:
    """Return the setup message of workers."""
    grid, placement = schedule.grid, Placement(range(schedule.grid.layer_count + 1))
    common = CommonSettings(
        iterations=10**7,
        traced=0,
        nodes=nodes,
        transport="gloo",
        device="cpu",
        cuts=placement.cuts,
        columns=tuple(
            tuple(sorted(placement.layers_in_column(grid, column)))
            for column in range(grid.columns)
        ),
        forms=tuple(FormSpec((((1, 4096, 4096), "torch.bfloat16"),)) for _ in placement.cuts),
        failure_domains=domains,
        microbatches=grid.microbatches,
        resilience=WorkerResilience(
            heartbeat_timeout_seconds=timeout, checkpoint_every=None, verify_every=0
        ),
    )
    return WorkerSetup(
        common=common, first_iteration=0, store=Rendezvous(LOOPBACK, 1), epoch=time.time_ns()
    )


@contextlib.contextmanager
def profiled(path: Path | None) -> Iterator[None]:
    """Profile from SIGUSR1 on, and write the profile when this process is told to end."""
    profile = cProfile.Profile(time.thread_time)

    def end(*_: object) -> None:
        if path is not None:
            profile.disable()
            profile.dump_stats(path)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGUSR1, lambda *_: profile.enable())
    yield


@contextlib.contextmanager
def leading(
    first: Schedule,
    folder: Path,
    mark: Marks,
    local: NodeProcesses,
    *,
    behind: Rendezvous | None,
    timeout: float,
    scheduler: Scheduler,
    at_speeds: SchedulerAtSpeeds | None = None,
    rebalancer: Rebalancer | None = None,
    faults_per_hour: int = 0,
    absent: Sequence[Worker] = (),
) -> Iterator[EventLoop]:
    """Yield what leads a run, or continues one whose node 0 has died.

    The argument `timeout` is the time, in seconds, without a sign of life after which a worker is
    given up. `absent` are workers of this node that have died before.
    """
    shares = shares_of([seat.worker for seat in first.seats])
    domains = find_domains(first.grid, shares, 1, ())
    left = (
        None
        if behind is None
        else TakeoverRecord(
            epoch=1, coordinator=behind, first_iteration=0, resume=None, fork_server=None
        )
    )
    losses = None if behind is None else read_losses(folder, 0)
    config = RunConfig(model=ModelConfig(blocks=LAYERS_A_STAGE * first.grid.columns - 2))
    request = RunRequest(
        schedule=first,
        config=config,
        out=folder,
        options=RunOptions(secret=SECRET, notify=lambda news: mark("told", text=str(news)[:300])),
        resilience=Resilience(scheduler=scheduler, at_speeds=at_speeds, rebalancer=rebalancer),
    )
    run = RunSpec(
        request=request,
        setup=setup_of(first, len(shares), domains.domains, timeout),
        facts=RunFacts(
            shares=shares, elements=[ELEMENTS] * first.grid.layer_count, whole_schedules=False
        ),
        behind=left,
        losses=losses,
    )
    places = {worker: node for node, share in enumerate(shares) for worker in share}
    with contextlib.ExitStack() as stack:
        metrics = MetricsBuilder(
            config.training, IterationWork(tokens=1, flops=1.0, peak_flops=None)
        )
        log = stack.enter_context(
            RunLog(
                folder,
                len(losses or ()),
                metrics=metrics,
                observer=mark.event,
                progress=lambda iteration, _: mark("committed", iteration=iteration),
            )
        )
        yield EventLoop(
            run,
            CommitLog(job=first.job),
            ProcessManager(local, places, absent=absent, faults_per_hour=faults_per_hour),
            log,
        )


def main() -> None:
    """Serve until told to end."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workers", type=int)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--behind", type=int, help="the port of a node 0 that has died")
    parser.add_argument("--table", type=Path)
    parser.add_argument("--plan-then", action="store_true", help="plan nothing ahead of failures")
    parser.add_argument("--heartbeat-timeout", type=float, default=5.0)
    parser.add_argument("--profile", type=Path)
    options = parser.parse_args()
    then = (
        mock.patch.object(event_loop, "FEW", options.workers)
        if options.plan_then
        else contextlib.nullcontext()
    )
    mark = Marks(options.folder)
    job = job_of(options.workers)
    first = first_schedule(job, options.folder)
    planner = FailurePlanner(
        job, first, None if options.table is None else Table.load(options.table)
    )
    behind = None if options.behind is None else Rendezvous(LOOPBACK, options.behind)
    with (
        then,
        profiled(options.profile),
        leading(
            first,
            options.folder,
            mark,
            cast(NodeProcesses, NoProcesses()),
            behind=behind,
            scheduler=planner.after,
            at_speeds=planner.at_speeds,
            rebalancer=planner,
            timeout=options.heartbeat_timeout,
        ) as events,
    ):

        async def serve() -> None:
            listener, address = open_listener(behind)
            mark(
                "listens",
                port=address.port,
                pid=os.getpid(),
                megabytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            )
            await events.serve(listener, StopSignals())

        asyncio.run(serve())


if __name__ == "__main__":
    main()
