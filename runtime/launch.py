"""Starts a run and sees it through: worker processes on this machine, the coordinator, files in a folder.

One node is the usual case. On several, each runs one launcher: that of node 0, here, has the coordinator, which knows
the schedule; those of the others (`runtime.node_agent`) start and end workers as it tells them.
"""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import torch
from msgspec.structs import replace

from runtime.config import ConfigError, RunConfig
from runtime.coordinator.checkpoint_timer import CheckpointCost
from runtime.coordinator.commit_log import CommitLog
from runtime.coordinator.event_log import EventLog, Observer, both
from runtime.coordinator.event_loop import EventLoop, NobodyLeftError
from runtime.coordinator.loss_file import LossFile, Progress, read_losses
from runtime.coordinator.metrics import Work, record_metrics
from runtime.coordinator.planning import Rebalancer, Scheduler, SchedulerAtSpeeds
from runtime.coordinator.recovery import Recovery
from runtime.coordinator.run import Notify, Run
from runtime.coordinator.settling import Settling
from runtime.coordinator.slow_workers import SpeedEvent
from runtime.coordinator.stall_watch import STALL_TIMEOUT_SECONDS
from runtime.device import choose_device, gpu_count
from runtime.errors import RunError as RunError
from runtime.errors import first_line
from runtime.events import LOSSES, Started
from runtime.model.checkpoint import Checkpoint, identity_of, open_checkpoint
from runtime.model.clipping import watches_gradients
from runtime.model.data import load_corpus, load_validation
from runtime.model.digest import combined_digest
from runtime.model.flops import counted
from runtime.model.forms import forms
from runtime.model.holding import state_bytes
from runtime.model.layers import LayeredModel, model_for, parameter_dtype
from runtime.model.parameter_groups import require_matches
from runtime.model.parameters import load_layer
from runtime.model.tensor_codec import TensorError
from runtime.model.worker_group import standing_in
from runtime.processes.fork_server import AdoptedForkServer, ForkServer, adopt
from runtime.processes.launchers import ALONE, GpuShare, LocalProcess, gpu_share
from runtime.processes.process_manager import NodeProcesses, ProcessManager, Return
from runtime.processes.stop_signals import GRACE_SECONDS, RunStopped, StopSignals, stop_signals
from runtime.processes.worker_start import COORDINATOR_TIMEOUT_SECONDS, NodeSettings, seconds_to_hold
from runtime.protocol.authentication import HOW, Secret, new_secret
from runtime.protocol.failure_injection import Injection, Slowdown
from runtime.protocol.rendezvous import Rendezvous, RendezvousError, host_store, listen
from runtime.protocol.setup import JOIN_TIMEOUT_SECONDS, FormSpec, Setup
from runtime.replay.communication import Transport, choose_transport
from runtime.replay.placement import Placement, PlacementError, assign_to_nodes, place
from runtime.run_folder import (
    LeftBehind,
    claim,
    clean_up,
    forget_left_behind,
    leave_behind,
    left_behind,
    locked,
)
from schedules import codec
from schedules.check import check
from schedules.measured_trace import MeasuredTrace, write_measured_trace
from schedules.schedule import Schedule, Worker

HUGGING_FACE = "hugging-face"
"""The folder of a run for its model as transformers reads it, where it is one of transformers."""


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
    coordinator_timeout_seconds: float = COORDINATOR_TIMEOUT_SECONDS
    """How long workers hold still for another node 0 when this one has died; 0: they end."""
    fetch_bytes_per_second: float | None = None
    """How fast a worker that comes in is sent layers by each of the others while they train; None: as fast as it goes.
    """
    checkpoint_every: int | None = 0
    """Iterations from one checkpoint to the next; 0: none; None: such that they cost less than 1 % of the time."""
    resume: Checkpoint | None = None
    """Where to go on from."""
    rebalancer: Rebalancer | None = None
    """Gives the schedule where layers must move, since fewer workers live than there are stages, or may move; None:
    then the run ends."""
    settling: Settling | None = None
    """Whether and how layers move to better schedules after failures; None: they stay as long as they can."""
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
    """Called with the address once node 0 listens there."""
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
    tensorboard: Path | None = None
    """Folder for TensorBoard's files; None: there are none."""
    peak_flops: float | None = None
    """What a worker's device does at its best where `[training] peak_flops` is silent; None: not known."""


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
    forms: tuple[FormSpec, ...]
    """What passes each cut. Found out once, for all workers, and before node 0 listens: it takes seconds."""
    work: Work
    """What an iteration is."""


def run(schedule: Schedule, config: RunConfig, *, out: Path, iterations: int | None = None,
        options: RunOptions = RunOptions(), fork_server: ForkServer | None = None, progress: Progress | None = None,
        resilience: Resilience = Resilience()) -> RunResult:
    """Train by a schedule, from the first iteration or a checkpoint; on node 0 when there are several.

    Writes `schedule.json`, `losses.jsonl`, `metrics.jsonl` and `events.jsonl` (line by line as iterations are committed
    and events happen), `schedules/`, `trace.json`, `parameters/` and `logs/` into `out`. `iterations` replaces those of
    `config`. A `fork_server` may serve several runs, one after the other.

    Where a node 0 has died that wrote to `out`, and workers of its run live, this goes on with them.

    Raises ConfigError or PlacementError when schedule, configuration and machine do not fit, CheckpointError when the
    checkpoint does not, FolderError when another run writes to `out` or has left its results there, OSError when `out`
    cannot be written, RendezvousError when node 0 cannot listen at its address, RunError when failures leave no way to
    go on, and RunStopped, which is a KeyboardInterrupt, after SIGTERM or Ctrl-C. Then no process is left, and the
    losses of the committed iterations are on disk.
    """
    if iterations is not None:
        try:
            config = replace(config, training=replace(config.training, iterations=iterations))
        except ValueError as error:  # a schedule that takes longer
            raise ConfigError(str(error)) from None
    if options.nodes > 1 and options.secret is None:
        raise ConfigError(f"a run on {options.nodes} nodes needs a secret that all of them have: {HOW} on each")
    fit = _prepare(schedule, config, options)
    if resilience.resume is not None:
        open_checkpoint(resilience.resume.path, identity_of(config, fit.model.layers))
    with ExitStack() as stack:
        stop = stack.enter_context(stop_signals())
        stack.enter_context(locked(out, 0))
        launch = _Launch(schedule, config, fit, out, options, resilience, progress, stop)
        behind = left_behind(out)
        if behind is not None:
            try:
                return launch.lead(fork_server, behind)
            except NobodyLeftError as error:
                forget_left_behind(out)
                options.notify(str(error))
        return launch.lead(fork_server)


@dataclass(frozen=True, slots=True)
class _Launch:
    """A run whose folder is locked."""

    schedule: Schedule
    config: RunConfig
    fit: _Fit
    out: Path
    options: RunOptions
    resilience: Resilience
    progress: Progress | None
    stop: StopSignals

    def lead(self, fork_server: ForkServer | None, behind: LeftBehind | None = None) -> RunResult:
        """See the run through; with what a node 0 has left that has died, go on with its workers.

        Raises NobodyLeftError where none of them lives.
        """
        config, options, out, resume = self.config, self.options, self.out, self.resilience.resume
        first = (0 if resume is None else resume.iteration) if behind is None else behind.first_iteration
        with ExitStack() as stack:
            adopted = self._adopt(stack, behind)
            listener, opened = self._listen(behind)
            stack.callback(listener.close)
            if behind is None:
                claim(out, resume, config, force=options.force)
                codec.write(self.schedule, out / "schedule.json")
            stack.callback(clean_up, out)
            fork_server = adopted or fork_server or stack.enter_context(ForkServer())
            store, store_address = host_store(Rendezvous(opened.host, 0))
            options.announce(opened)
            log = CommitLog(self.schedule.job, first_iteration=first, skips=config.training.skip_nonfinite,
                            validates=watches_gradients(config.training))
            losses = None if behind is None else read_losses(out / LOSSES, first)
            begins = first + len(losses or ())
            metrics = stack.enter_context(record_metrics(out, begins, config.training, self.fit.work,
                                                         options.tensorboard))
            event_log = stack.enter_context(EventLog(out, lambda: log.next_iteration,
                                                     both(metrics.observe, options.observe)))
            event_log.write(_started(self.schedule, config, options))
            settings = self._settings(behind, adopted)
            left = self._left(opened, first, settings, fork_server, behind)
            setup = replace(_setup(self.schedule, config, self.fit, store_address, options, self.resilience),
                            first_iteration=first, epoch=left.epoch)
            alive = [] if adopted is None else [Worker.parse(name) for name in adopted.names()]
            events = EventLoop(
                self._run(setup, settings, behind, losses, alive), log,
                stack.enter_context(LossFile(out / LOSSES, begins, self.progress, metrics)),
                self._processes(fork_server, opened, settings, alive if behind is not None else None), event_log)
            leave_behind(out, left)
            stack.callback(forget_left_behind, out)
            with events.processes.running(found=behind is not None):
                asyncio.run(events.serve(listener, self.stop))
            del store
            if events.stopped:
                number = self.stop.received or signal.SIGTERM
                raise RunStopped(number, f"interrupted by {number.name}" + (
                    f", and not ended within {options.grace_seconds:g} s" if events.out_of_time else ""))
            write_measured_trace(log.trace(), out / "trace.json")
            if config.model.hugging_face is not None:
                self._export()
        return _result(self.schedule, first, log, events, out)

    def _export(self) -> None:
        """Write the model as transformers reads it. Where that fails, the layers' own files are there."""
        from runtime.model.hugging_face.configuration import folder_of, read_config
        from runtime.model.hugging_face.export import export

        model = self.config.model
        assert model.hugging_face is not None
        try:
            export(read_config(model), partial(load_layer, self.out), self.out / HUGGING_FACE,
                   folder_of(model.hugging_face))
        except (ConfigError, TensorError, OSError) as error:
            self.options.notify(f"{self.out / HUGGING_FACE} cannot be written: {first_line(error)}")

    def _adopt(self, stack: ExitStack, behind: LeftBehind | None) -> AdoptedForkServer | None:
        """The workers of this machine that live. Raises NobodyLeftError where no others may."""
        if behind is None:
            return None
        adopted = None if behind.fork_server is None else adopt(behind.fork_server)
        if adopted is not None:
            stack.callback(adopted.close)
        elif self.options.nodes == 1:
            raise NobodyLeftError("the workers of the run that was led here before are gone")
        return adopted

    def _listen(self, behind: LeftBehind | None) -> tuple[socket.socket, Rendezvous]:
        """Listen; where workers look for a coordinator, if it can be there. Raises RendezvousError."""
        wanted = self.options.rendezvous
        if behind is not None and (wanted is None or wanted.port == 0):
            try:
                return listen(behind.coordinator)
            except RendezvousError as error:
                raise NobodyLeftError(f"the workers of the run that was led here before cannot be met: {error}"
                                      ) from None
        return listen(wanted)

    def _settings(self, behind: LeftBehind | None, adopted: AdoptedForkServer | None) -> NodeSettings:
        resume, given = self.resilience.resume, self.options.secret
        own = new_secret() if adopted is None else Secret(bytes.fromhex(adopted.note))
        path = None if resume is None else str(resume.path.resolve())
        seconds = seconds_to_hold(self.config, self.resilience.coordinator_timeout_seconds)
        return NodeSettings(config=self.config, secret=given or own, out=str(self.out.resolve()),
                            resume=path if behind is None else behind.resume,
                            coordinator_timeout_seconds=seconds)

    def _left(self, opened: Rendezvous, first: int, settings: NodeSettings, fork_server: ForkServer,
              behind: LeftBehind | None) -> LeftBehind:
        """What this node 0 leaves, should it die."""
        epoch = max(time.time_ns(), 0 if behind is None else behind.epoch + 1)
        seconds = settings.coordinator_timeout_seconds
        return LeftBehind(epoch=epoch, coordinator=opened, first_iteration=first, resume=settings.resume,
                          fork_server=fork_server.hold(seconds, settings.secret.hex()) if seconds else None)

    def _run(self, setup: Setup, settings: NodeSettings, behind: LeftBehind | None, losses: Sequence[float] | None,
             alive: Sequence[Worker]) -> Run:
        options, resilience = self.options, self.resilience
        return Run(schedule=self.schedule, scheduler=resilience.scheduler, shares=self.fit.shares,
                   injections=resilience.injections, slowdowns=resilience.slowdowns, at_speeds=resilience.at_speeds,
                   setup=setup, out=self.out, config=self.config, rebalancer=resilience.rebalancer,
                   settling=resilience.settling,
                   layer_bytes=() if resilience.settling is None else state_bytes(self.fit.model, self.config.training),
                   secret=settings.secret, notify=options.notify, grace_seconds=options.grace_seconds,
                   join_timeout_seconds=resilience.join_timeout_seconds,
                   stall_timeout_seconds=resilience.stall_timeout_seconds, behind=behind, losses=losses,
                   gone=[worker for worker in self.fit.shares[0] if worker not in alive])

    def _processes(self, fork_server: ForkServer, opened: Rendezvous, settings: NodeSettings,
                   alive: Sequence[Worker] | None) -> ProcessManager:
        """`alive` are the workers here that have been found; None: all are to be started."""
        fit = self.fit
        places = {worker: node for node, share in enumerate(fit.shares) for worker in share}
        local = NodeProcesses(fork_server, opened, fit.shares[0], gpu_count(fit.device), settings, fit.gpus.first)
        there = places if alive is None else alive
        return ProcessManager(local, places, self.resilience.returns,
                              [worker for worker in self.schedule.grid.workers() if worker not in there])


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
                     recoveries=tuple(events.recoveries), notes=tuple(events.news.notes),
                     speed_events=tuple(events.news.speed_events), speed_periods_seconds=tuple(
                         log.measured_period_seconds(event.iteration, end.iteration if end else None)
                         for event, end in zip_longest(events.news.speed_events, events.news.speed_events[1:])),
                     checkpoints=events.news.checkpoints.costs)


def _setup(schedule: Schedule, config: RunConfig, fit: _Fit, store: Rendezvous, options: RunOptions,
           resilience: Resilience) -> Setup:
    """What the workers must know."""
    grid = schedule.grid
    return Setup(
        first_iteration=0 if resilience.resume is None else resilience.resume.iteration,
        iterations=config.training.iterations, traced=options.traced, nodes=options.nodes, transport=fit.transport,
        device=fit.device, store=store, cuts=fit.placement.cuts,
        columns=tuple(tuple(sorted(fit.placement.held_in_column(grid, column))) for column in range(grid.columns)),
        forms=fit.forms,
        microbatches=grid.microbatches, loss_scale=1 / grid.total_microbatches,
        heartbeat_timeout_seconds=resilience.heartbeat_timeout_seconds,
        checkpoint_every=resilience.checkpoint_every, fetch_bytes_per_second=resilience.fetch_bytes_per_second)


def _prepare(schedule: Schedule, config: RunConfig, options: RunOptions) -> _Fit:
    """Check that schedule, configuration and machine fit. Raises PlacementError and ConfigError."""
    violations = check(schedule)
    if violations:
        raise PlacementError(f"the schedule breaks a rule: {violations[0]}")
    training = config.training
    device, ranks = choose_device(training.device), training.tensor_parallel
    with standing_in(ranks):
        model = model_for(config.model, training.seed, parameter_dtype(training.dtype), torch.device(device))
        with counted() as flops:
            at_layer = forms(model, config)
    placement = place(schedule.grid, model.layers)
    require_matches(model, training)
    load_corpus(config, schedule.grid.microbatches)
    load_validation(config, schedule.grid.microbatches)
    shares = assign_to_nodes([seat.worker for seat in schedule.seats], options.nodes)
    gpus = gpu_share([len(share) * ranks for share in shares], 0, options.local)
    microbatches = schedule.grid.total_microbatches
    return _Fit(device, model, placement, shares, gpus,
                choose_transport(training.backend, device, gpus.workers, gpu_count(device)),
                tuple(FormSpec.of(at_layer[cut]) for cut in placement.cuts),
                Work(tokens=training.batch * config.model.context * microbatches, flops=flops.training(microbatches),
                     peak_flops=training.peak_flops or options.peak_flops))
