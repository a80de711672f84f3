"""Starts a run and sees it through: worker processes on this machine, the coordinator, files in a folder.

One node is the usual case. On several, each runs one launcher: that of node 0, here, has the coordinator, which knows
the schedule; those of the others (`runtime.node_agent`) start and end workers as it tells them.
"""

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import torch
from msgspec.structs import replace

from runtime.config import ConfigError, RunConfig
from runtime.coordinator.checkpoint_timer import CheckpointCost
from runtime.coordinator.commit_log import CommitLog
from runtime.coordinator.event_log import EventLog, Observer
from runtime.coordinator.event_loop import EventLoop
from runtime.coordinator.loss_file import LossFile, Progress
from runtime.coordinator.planning import Scheduler, SchedulerAtSpeeds
from runtime.coordinator.recovery import Recovery
from runtime.coordinator.run import Notify, Run
from runtime.coordinator.slow_workers import SpeedEvent
from runtime.coordinator.stall_watch import STALL_TIMEOUT_SECONDS
from runtime.device import choose_device, gpu_count
from runtime.errors import RunError as RunError
from runtime.events import LOSSES, Started
from runtime.model.checkpoint import Checkpoint, identity_of, open_checkpoint
from runtime.model.clipping import watches_gradients
from runtime.model.data import load_corpus
from runtime.model.digest import combined_digest
from runtime.model.layers import LayeredModel, model_for, parameter_dtype
from runtime.model.slices import forms
from runtime.processes.fork_server import ForkServer
from runtime.processes.launchers import ALONE, GpuShare, LocalProcess, gpu_share
from runtime.processes.process_manager import NodeProcesses, ProcessManager, Return
from runtime.processes.stop_signals import GRACE_SECONDS, RunStopped, stop_signals
from runtime.processes.worker_start import NodeSettings
from runtime.protocol.authentication import HOW, Secret, new_secret
from runtime.protocol.failure_injection import Injection, Slowdown
from runtime.protocol.rendezvous import Rendezvous, host_store, listen
from runtime.protocol.setup import JOIN_TIMEOUT_SECONDS, FormSpec, Setup
from runtime.replay.communication import Transport, choose_transport
from runtime.replay.placement import Placement, PlacementError, assign_to_nodes, place
from runtime.run_folder import claim, clean_up, locked
from schedules import codec
from schedules.check import check
from schedules.measured_trace import MeasuredTrace, write_measured_trace
from schedules.schedule import Schedule, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run leaves. Its folder `out` holds the same, and the parameters (`runtime.model.parameters`)."""

    first_iteration: int
    """0, or that of the checkpoint that the run went on from."""
    losses: tuple[float, ...]
    """Mean over all micro-batches, one an iteration."""
    parameter_digest: str
    """`runtime.model.digest` of all parameters after the last iteration."""
    measured_period_seconds: float | None
    """Median over iterations of the longest busy window of any worker; None without iterations."""
    planned_period_seconds: float
    """Of the first schedule."""
    recoveries: tuple[Recovery, ...]
    speed_events: tuple[SpeedEvent, ...]
    """Slow workers that were found, and what was done."""
    speed_periods_seconds: tuple[float | None, ...]
    """As `measured_period_seconds`, of the iterations from each of them to the next."""
    notes: tuple[str, ...]
    """What went wrong and was survived besides, such as checkpoints that could not be written."""
    checkpoints: tuple[CheckpointCost, ...]
    """What those have cost that were written while training went on."""
    trace: MeasuredTrace
    out: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Resilience:
    """How a run deals with failures."""

    scheduler: Scheduler | None = None
    """Gives the schedule for other failures, in a thread of its own; None: the first failure ends the run."""
    at_speeds: SchedulerAtSpeeds | None = None
    """Gives the schedule where workers are slow, and for failures then; None: they are told of, and that is all."""
    heartbeat_timeout_seconds: float = 5.0
    """A worker that shows no sign of life for so long is given up."""
    join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS
    """How long workers are waited for before the first iteration."""
    stall_timeout_seconds: float = STALL_TIMEOUT_SECONDS
    """When nothing has been committed for so long, it is said who waits for what."""
    fetch_bytes_per_second: float | None = None
    """How fast a worker that comes in is sent layers by each of the others while they train; None: as fast as it goes.
    """
    checkpoint_every: int | None = 0
    """Iterations from one checkpoint to the next; 0: none; None: such that they cost less than 1 % of the time."""
    resume: Checkpoint | None = None
    """Where to go on from."""
    injections: tuple[Injection, ...] = ()
    """Failures on purpose."""
    slowdowns: tuple[Slowdown, ...] = ()
    """Workers that are slow on purpose."""
    returns: tuple[Return, ...] = ()
    """Workers to start again once they are dead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Where a run takes place, and what is told about it."""

    nodes: int = 1
    rendezvous: Rendezvous | None = None
    """Where node 0 listens; None: on loopback."""
    announce: Callable[[Rendezvous], None] = lambda _: None
    """Called with the meeting point once it is open."""
    local: LocalProcess = ALONE
    """Which of the processes that share this machine this is."""
    secret: Secret | None = None
    """What all nodes know (`runtime.protocol.authentication`); None: there is one node, and it makes one."""
    traced: int = 3
    """How many iterations, the last ones, `trace.json` holds."""
    force: bool = False
    """Remove what another run has left in the folder, instead of refusing to write there."""
    grace_seconds: float = GRACE_SECONDS
    """How long the run may go on after SIGTERM or Ctrl-C: it ends at the next iteration, with a checkpoint."""
    notify: Notify = lambda _: None
    observe: Observer = lambda _: None
    """Called with each event of the run (`runtime.events`)."""
    fault_free_seconds: float | None = None
    """Planned period with all workers, where the first schedule is not of all of them; None: nobody has planned it."""


@dataclass(frozen=True, slots=True)
class _Fit:
    """What schedule, configuration and machine make together."""

    device: Literal["cpu", "cuda"]
    model: LayeredModel
    placement: Placement
    shares: Sequence[Sequence[Worker]]
    """The workers of each node that are there from the start."""
    gpus: GpuShare
    transport: Transport


def run(schedule: Schedule, config: RunConfig, *, out: Path, iterations: int | None = None,
        options: RunOptions = RunOptions(), fork_server: ForkServer | None = None, progress: Progress | None = None,
        resilience: Resilience = Resilience()) -> RunResult:
    """Train by a schedule, from the first iteration or a checkpoint; on node 0 when there are several.

    Writes `schedule.json`, `losses.jsonl` and `events.jsonl` (line by line as iterations are committed and events
    happen), `schedules/`, `trace.json`, `parameters/` and `logs/` into `out`. `iterations` replaces those of
    `config`. A `fork_server` may serve several runs, one after the other.

    Raises ConfigError or PlacementError when schedule, configuration and machine do not fit, CheckpointError when the
    checkpoint does not, FolderError when another run writes to `out` or has left its results there, OSError when `out`
    cannot be written, RendezvousError when the meeting point cannot be opened, RunError when failures leave no way to
    go on, and RunStopped, which is a KeyboardInterrupt, after SIGTERM or Ctrl-C. Then no process is left, and the
    losses of the committed iterations are on disk.
    """
    if iterations is not None:
        config = replace(config, training=replace(config.training, iterations=iterations))
    if options.nodes > 1 and options.secret is None:
        raise ConfigError(f"a run on {options.nodes} nodes needs a secret that all of them have: {HOW} on each")
    fit = _prepare(schedule, config, options)
    first = 0 if resilience.resume is None else resilience.resume.iteration
    if resilience.resume is not None:
        open_checkpoint(resilience.resume.path, identity_of(config, fit.model.layers))
    with ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        stack.enter_context(locked(out, 0))
        listener, opened = listen(options.rendezvous)
        stack.callback(listener.close)
        claim(out, resilience.resume, config, force=options.force)
        stack.callback(clean_up, out)
        codec.write(schedule, out / "schedule.json")
        fork_server = fork_server or stack.enter_context(ForkServer())
        store, store_address = host_store(Rendezvous(opened.host, 0))
        options.announce(opened)
        log = CommitLog(schedule.job, first_iteration=first, skips=config.training.skip_nonfinite,
                        validates=watches_gradients(config.training))
        event_log = stack.enter_context(EventLog(out, lambda: log.next_iteration, options.observe))
        event_log.write(_started(schedule, config, options))
        settings = NodeSettings(
            config=config, secret=options.secret or new_secret(), out=str(out.resolve()),
            resume=None if resilience.resume is None else str(resilience.resume.path.resolve()))
        processes = NodeProcesses(fork_server, opened, fit.shares[0], gpu_count(fit.device), settings, fit.gpus.first)
        places = {worker: node for node, share in enumerate(fit.shares) for worker in share}
        events = EventLoop(
            Run(schedule=schedule, scheduler=resilience.scheduler, shares=fit.shares, injections=resilience.injections,
                slowdowns=resilience.slowdowns, at_speeds=resilience.at_speeds,
                setup=_setup(schedule, config, fit, store_address, options, resilience), out=out, config=config,
                secret=settings.secret,
                notify=options.notify, grace_seconds=options.grace_seconds,
                join_timeout_seconds=resilience.join_timeout_seconds,
                stall_timeout_seconds=resilience.stall_timeout_seconds),
            log, stack.enter_context(LossFile(out / LOSSES, first, progress)),
            ProcessManager(processes, places, resilience.returns,
                           [worker for worker in schedule.grid.workers() if worker not in places]),
            event_log)
        with processes.running():
            asyncio.run(events.serve(listener, stop))
        del store
        if events.stopped:
            number = stop.received or signal.SIGTERM
            raise RunStopped(number, f"interrupted by {number.name}" + (
                f", and not ended within {options.grace_seconds:g} s" if events.out_of_time else ""))
        write_measured_trace(log.trace(), out / "trace.json")
    return _result(schedule, first, log, events, out)


def _started(schedule: Schedule, config: RunConfig, options: RunOptions) -> Started:
    whole = len(schedule.seats) == schedule.grid.pipelines * schedule.grid.columns
    planned = schedule.seconds(schedule.period_ticks) if whole else None
    return Started(job=schedule.job, workers=schedule.grid.pipelines * schedule.grid.columns,
                   iterations=config.training.iterations,
                   samples=config.training.batch * schedule.grid.total_microbatches,
                   fault_free_period=planned or options.fault_free_seconds)


def _result(schedule: Schedule, first: int, log: CommitLog, events: EventLoop, out: Path) -> RunResult:
    return RunResult(first_iteration=first, losses=tuple(log.losses), parameter_digest=combined_digest(log.digests),
                     trace=log.trace(), out=out, measured_period_seconds=log.measured_period_seconds(),
                     planned_period_seconds=schedule.seconds(schedule.period_ticks),
                     recoveries=tuple(events.recoveries), notes=tuple(events.notes),
                     speed_events=tuple(events.speed_events), speed_periods_seconds=tuple(
                         log.measured_period_seconds(event.iteration, end.iteration if end else None)
                         for event, end in zip_longest(events.speed_events, events.speed_events[1:])),
                     checkpoints=events.checkpoints.costs)


def _setup(schedule: Schedule, config: RunConfig, fit: _Fit, store: Rendezvous, options: RunOptions,
           resilience: Resilience) -> Setup:
    """What the workers must know. Shapes are found out once, here, for all of them."""
    grid, at_layer = schedule.grid, forms(fit.model, config)
    return Setup(
        first_iteration=0 if resilience.resume is None else resilience.resume.iteration,
        iterations=config.training.iterations, traced=options.traced, nodes=options.nodes, transport=fit.transport,
        device=fit.device, store=store, cuts=fit.placement.cuts,
        columns=tuple(tuple(sorted(fit.placement.held_in_column(grid, column))) for column in range(grid.columns)),
        forms=tuple(FormSpec.of(at_layer[cut]) for cut in fit.placement.cuts),
        loss_scale=1 / grid.total_microbatches,
        heartbeat_timeout_seconds=resilience.heartbeat_timeout_seconds,
        checkpoint_every=resilience.checkpoint_every, fetch_bytes_per_second=resilience.fetch_bytes_per_second)


def _prepare(schedule: Schedule, config: RunConfig, options: RunOptions) -> _Fit:
    """Check that schedule, configuration and machine fit. Raises PlacementError and ConfigError."""
    violations = check(schedule)
    if violations:
        raise PlacementError(f"the schedule breaks a rule: {violations[0]}")
    training = config.training
    device = choose_device(training.device)
    model = model_for(config.model, training.seed, parameter_dtype(training.dtype), torch.device(device))
    placement = place(schedule.grid, model.layers)
    load_corpus(config)
    shares = assign_to_nodes([seat.worker for seat in schedule.seats], options.nodes)
    gpus = gpu_share([len(share) for share in shares], 0, options.local)
    return _Fit(device, model, placement, shares, gpus,
                choose_transport(training.backend, device, gpus.workers, gpu_count(device)))
