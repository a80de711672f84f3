"""Starts a run and sees it through: worker processes on this machine, the coordinator, files in a folder.

One node is the usual case. On several, each runs one launcher: that of node 0 (`run`) is the coordinator, which knows
the schedule; those of the others (`join`) are node agents, which start and end workers as it tells them.
"""

import asyncio
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from runtime.config import ConfigError, RunConfig
from runtime.coordinator.commit_log import CommitLog
from runtime.coordinator.event_loop import EventLoop, Notify, Run
from runtime.coordinator.loss_file import LossFile, Progress
from runtime.coordinator.planning import RunError as RunError
from runtime.coordinator.planning import Scheduler
from runtime.coordinator.recovery import Recovery
from runtime.device import choose_device
from runtime.model.checkpoint import Checkpoint, CheckpointError, identity_of, latest, open_checkpoint
from runtime.model.clipping import watches_gradients
from runtime.model.data import load_corpus
from runtime.model.digest import combined_digest
from runtime.model.layers import LayeredModel, model_for, parameter_dtype
from runtime.model.stage import boundaries
from runtime.processes.fork_server import ForkServer, ForkServerError
from runtime.processes.launchers import ALONE, LocalProcess, gpu_share
from runtime.processes.process_manager import NodeProcesses, ProcessManager, Return
from runtime.processes.start_limit import StartLimit, StartLimitError
from runtime.processes.worker_start import NodeSettings
from runtime.protocol import to_node_agent
from runtime.protocol.authentication import HOW, Secret, new_secret
from runtime.protocol.channel import Channel
from runtime.protocol.failure_injection import Injection
from runtime.protocol.rendezvous import Rendezvous, RendezvousError, host_store, listen
from runtime.protocol.setup import JOIN_TIMEOUT, BoundarySpec, Setup
from runtime.protocol.to_coordinator import Ended, JoinNode
from runtime.protocol.to_node_agent import KillWorker, NodeSetup, RunEnded, StartWorker, ToNodeAgent
from runtime.replay.communication import Transport, choose_transport
from runtime.replay.placement import PlacementError, assign_to_nodes, layer_ranges
from schedules import codec
from schedules.check import check
from schedules.measured_trace import MeasuredTrace, write_measured_trace
from schedules.schedule import Schedule, Worker

Ranges = Sequence[tuple[int, int]]
"""Half-open range of layers of each stage."""


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
    notes: tuple[str, ...]
    """What went wrong and was survived besides, such as checkpoints that could not be written."""
    trace: MeasuredTrace
    out: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Resilience:
    """How a run deals with failures."""

    scheduler: Scheduler | None = None
    """Gives the schedule for other failures, in a thread of its own; None: the first failure ends the run."""
    heartbeat_timeout_seconds: float = 5.0
    """A worker that shows no sign of life for so long is given up."""
    fetch_bytes_per_second: float | None = None
    """How fast a worker that comes in is sent layers by each of the others while they train; None: as fast as it goes.
    """
    checkpoints: Path | None = None
    """Folder to save checkpoints in."""
    checkpoint_every: int = 0
    """Iterations from one checkpoint to the next; 0: none."""
    resume: Checkpoint | None = None
    """Where to go on from."""
    injections: tuple[Injection, ...] = ()
    """Failures on purpose."""
    returns: tuple[Return, ...] = ()
    """Workers to start again once they are dead."""


def run(schedule: Schedule, config: RunConfig, *, out: Path, iterations: int | None = None, nodes: int = 1,
        rendezvous: Rendezvous | None = None, announce: Callable[[Rendezvous], None] | None = None,
        secret: Secret | None = None, local: LocalProcess = ALONE, traced: int = 3,
        fork_server: ForkServer | None = None, progress: Progress | None = None, notify: Notify | None = None,
        resilience: Resilience = Resilience()) -> RunResult:
    """Train by a schedule, from the first iteration or a checkpoint; on node 0 when there are several.

    Writes `schedule.json`, `losses.jsonl` (line by line as iterations are committed), `trace.json`, `parameters/` and
    `logs/` into `out`. The trace holds the last `traced` iterations. A `fork_server` may serve several runs, one
    after the other. `announce` is called with the meeting point once it is open; `local` says which of the processes
    that share this machine this is. All nodes have the same `secret` (`runtime.protocol.authentication`); where there
    is one node, it makes one.

    Raises ConfigError or PlacementError when schedule, configuration and machine do not fit, CheckpointError when the
    checkpoint does not, OSError when `out` cannot be written, RendezvousError when `rendezvous` cannot be opened, and
    RunError when failures leave no way to go on; then no process is left, and the losses of the committed iterations
    are on disk.
    """
    if nodes > 1 and secret is None:
        raise ConfigError(f"a run on {nodes} nodes needs a secret that all of them have: {HOW} on each")
    device, model, ranges = _prepare(schedule, config)
    first = 0 if resilience.resume is None else resilience.resume.iteration
    _check_checkpoints(resilience, identity_of(config, model.layers), first)
    workers = [seat.worker for seat in schedule.seats]
    shares = assign_to_nodes(workers, nodes)
    gpus = gpu_share([len(share) for share in shares], 0, local)
    transport = choose_transport(config.training.backend, device, gpus.workers, _gpus(device))
    _clear(out, "parameters/layer-*.*", "logs/worker-*.log", "trace.json")
    codec.write(schedule, out / "schedule.json")
    with ExitStack() as stack:
        fork_server = fork_server or stack.enter_context(ForkServer())
        listener, opened = listen(rendezvous)
        stack.callback(listener.close)
        store, store_address = host_store(Rendezvous(opened.host, 0))
        if announce is not None:
            announce(opened)
        settings = NodeSettings(
            config=config, secret=secret or new_secret(), out=str(out),
            resume=None if resilience.resume is None else str(resilience.resume.path.resolve()),
            checkpoints=None if resilience.checkpoints is None else str(resilience.checkpoints.resolve()))
        setup = _setup(schedule, config, model, ranges, device, transport, resilience, first=first, nodes=nodes,
                       store=store_address, traced=traced,
                       iterations=config.training.iterations if iterations is None else iterations)
        log = CommitLog(schedule.job, first_iteration=first, skips=config.training.skip_nonfinite,
                        validates=watches_gradients(config.training))
        processes = NodeProcesses(fork_server, opened, shares[0], _gpus(device), settings, gpus.first)
        manager = ProcessManager(processes, {worker: node for node, share in enumerate(shares) for worker in share},
                                 resilience.returns,
                                 [worker for worker in schedule.grid.workers() if worker not in workers])
        events = EventLoop(
            Run(schedule=schedule, scheduler=resilience.scheduler, setup=setup, shares=shares,
                injections=resilience.injections, out=out, config=config, secret=settings.secret,
                notify=notify or (lambda _: None)),
            log, stack.enter_context(LossFile(out / "losses.jsonl", first, progress)), manager)
        with _running(fork_server, processes):
            asyncio.run(events.serve(listener))
        del store
    trace = log.trace()
    write_measured_trace(trace, out / "trace.json")
    return RunResult(first_iteration=first, losses=tuple(log.losses), parameter_digest=combined_digest(log.digests),
                     trace=trace, out=out, measured_period_seconds=log.measured_period_seconds(),
                     planned_period_seconds=schedule.seconds(schedule.period_ticks),
                     recoveries=tuple(events.recoveries), notes=tuple(events.notes))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJob:
    """What a node runs that is not node 0: its own job file and command line say so, and nothing that it is sent."""

    config: RunConfig
    workers: Sequence[Worker]
    """All of the job: no other is started."""
    secret: Secret
    resume: Checkpoint | None = None
    """One of the checkpoints beside which that is where node 0 goes on from."""
    checkpoints: Path | None = None
    """Folder to save checkpoints in."""


def join(rendezvous: Rendezvous, job: NodeJob, *, node: int, nodes: int, out: Path,
         fork_server: ForkServer | None = None, local: LocalProcess = ALONE) -> None:
    """Take part in the run that node 0 leads, with this node's share of the workers.

    Into `out` go the logs of its workers, and the parameters of layers that they write. Raises RendezvousError when
    node 0 cannot be reached or has another secret, ConfigError when its job or this machine do not fit, RunError when
    the run fails.
    """
    channel: Channel[ToNodeAgent] = Channel(rendezvous, job.secret, JoinNode(node), to_node_agent.decode,
                                            JOIN_TIMEOUT.total_seconds())
    with closing(channel):
        setup = channel.wait_for(NodeSetup)
        if len(setup.shares) != nodes:
            raise ConfigError(f"--nodes is {nodes} here and {len(setup.shares)} at node 0; expected the same")
        settings = _own_settings(job, setup, out)
        cards, gpus = _gpus(setup.device), gpu_share(setup.shares, node, local)
        if setup.device == "cuda" and (cards == 0 or (setup.transport == "nccl" and cards < gpus.workers)):
            raise ConfigError(f"node {node} has {cards} GPUs for {gpus.workers} workers; {setup.transport} needs more")
        _clear(out, "parameters/layer-*.*")  # the folder may be shared with node 0, whose workers have logs there
        with ExitStack() as stack:
            fork_server = fork_server or stack.enter_context(ForkServer())
            processes = NodeProcesses(fork_server, rendezvous, setup.workers, cards, settings, gpus.first)
            with _running(fork_server, processes):
                error = _serve_coordinator(channel, processes, setup.workers)
    if error is not None:
        raise RunError(error)


def _own_settings(job: NodeJob, setup: NodeSetup, out: Path) -> NodeSettings:
    """What the workers here are given. Raises ConfigError where node 0 runs another job."""
    for table in ("model", "training"):
        ours, theirs = getattr(job.config, table), getattr(setup.config, table)
        for key in ours.__struct_fields__:
            if getattr(ours, key) != getattr(theirs, key):
                raise ConfigError(f"{table}.{key} is {getattr(ours, key)!r} here and {getattr(theirs, key)!r} at node "
                                  "0; start every node with the same job file and options")
    strange = set(setup.workers) - set(job.workers)
    if strange:
        raise ConfigError(f"node 0 has a worker {min(strange)}, which the job here has not; start every node with the "
                          "same job file")
    if setup.first_iteration and job.resume is None:
        raise ConfigError(f"node 0 goes on from iteration {setup.first_iteration}; start every node with --resume")
    path = None
    if setup.first_iteration and job.resume is not None:
        path = job.resume.path
        if job.resume.iteration != setup.first_iteration:  # a newer one has come into being meanwhile
            path = path.parent / f"iteration-{setup.first_iteration}"
    return NodeSettings(config=job.config, secret=job.secret, out=str(out),
                        resume=None if path is None else str(path.resolve()),
                        checkpoints=None if job.checkpoints is None else str(job.checkpoints.resolve()))


def _serve_coordinator(channel: Channel[ToNodeAgent], processes: NodeProcesses,
                       workers: Sequence[Worker]) -> str | None:
    """Node agent: do what the coordinator says and tell it which workers here end, until the run has.

    How it ended: None, or why it failed. Raises RunError when node 0 is gone, ForkServerError when the workers are.
    """
    limit = StartLimit(workers)
    with selectors.DefaultSelector() as selector:
        selector.register(channel, selectors.EVENT_READ)
        selector.register(processes, selectors.EVENT_READ)
        try:
            heard = time.monotonic()
            while True:
                pause = to_node_agent.SILENT_SECONDS - (time.monotonic() - heard)
                if pause <= 0:
                    raise RunError(f"node 0 is gone: it has said nothing for {to_node_agent.SILENT_SECONDS:.0f} s")
                ready = [] if channel.pending else [key.fileobj for key, _ in selector.select(pause)]
                heard = time.monotonic() if channel.pending or channel in ready else heard
                if processes in ready:
                    for ended in processes.poll():
                        channel.send(ended)
                for message in channel.read() if channel.pending or channel in ready else ():
                    match message:
                        case RunEnded():
                            return message.error
                        case StartWorker():
                            limit.require(message.worker)
                            processes.do(message)
                        case KillWorker():
                            processes.do(message)
        except (RendezvousError, StartLimitError) as error:
            raise RunError(str(error)) from None
        except ForkServerError:
            with suppress(RendezvousError):  # node 0 would miss them anyway, but later
                for worker in workers:
                    channel.send(Ended(worker, -signal.SIGKILL))
            raise


@contextmanager
def _running(fork_server: ForkServer, processes: NodeProcesses) -> Iterator[None]:
    """Worker processes on this machine; none is left at the end. Raises RunError."""
    try:
        processes.start_all()
        yield
    except ForkServerError as error:
        raise RunError(str(error)) from None
    finally:
        fork_server.kill_all()


def _setup(schedule: Schedule, config: RunConfig, model: LayeredModel, ranges: Ranges,
           device: Literal["cpu", "cuda"], transport: Transport, resilience: Resilience, *, store: Rendezvous,
           first: int, iterations: int, nodes: int, traced: int) -> Setup:
    """What the workers must know. Shapes are found out once, here, for all of them."""
    return Setup(
        first_iteration=first, iterations=iterations, traced=traced, nodes=nodes, transport=transport,
        device=device, store=store, columns=tuple(stage.column for stage in schedule.grid.stages),
        ranges=tuple(ranges), boundaries=tuple(BoundarySpec.of(one) for one in boundaries(model, ranges, config)),
        loss_scale=1 / schedule.grid.total_microbatches,
        heartbeat_timeout_seconds=resilience.heartbeat_timeout_seconds,
        checkpoint_every=resilience.checkpoint_every, fetch_bytes_per_second=resilience.fetch_bytes_per_second)


def _check_checkpoints(resilience: Resilience, identity: Mapping[str, object], first: int) -> None:
    """Raises CheckpointError where going on from a checkpoint, or saving new ones, would not do what is expected."""
    if resilience.resume is not None:
        open_checkpoint(resilience.resume.path, identity)
    if resilience.checkpoints is not None and resilience.checkpoint_every:
        newest = latest(resilience.checkpoints)
        if newest is not None and newest.iteration > first:
            raise CheckpointError(f"{resilience.checkpoints}: holds a checkpoint of iteration {newest.iteration} "
                                  "already; go on from it with --resume, or save to another folder")


def _prepare(schedule: Schedule, config: RunConfig) -> tuple[Literal["cpu", "cuda"], LayeredModel, Ranges]:
    """Check that schedule, configuration and machine fit.

    The kind of device to compute on, the model there, and the layers of each stage.
    """
    violations = check(schedule)
    if violations:
        raise PlacementError(f"the schedule breaks a rule: {violations[0]}")
    training = config.training
    device = choose_device(training.device)
    model = model_for(config.model, training.seed, parameter_dtype(training.dtype), torch.device(device))
    ranges = layer_ranges(schedule, model.layers)
    load_corpus(config)
    return device, model, ranges


def _gpus(device: str) -> int:
    return torch.cuda.device_count() if device == "cuda" else 0


def _clear(out: Path, *patterns: str) -> None:
    """Make the folder, and remove what an earlier run left there under names that this one may not overwrite."""
    out.mkdir(parents=True, exist_ok=True)
    for pattern in patterns:
        for path in out.glob(pattern):
            path.unlink(missing_ok=True)
