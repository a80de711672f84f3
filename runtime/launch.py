"""Starts a run and sees it through: worker processes on this machine, reports from all of them, files in a folder.

One node is the usual case. On several, each runs one launcher: node 0 (`run`) hosts the meeting point and knows the
schedule, the others (`join`) are told there what they need.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TextIO

import msgspec
import torch
from msgspec.structs import replace
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from runtime.config import ConfigError, RunConfig
from runtime.coordinator.commit_log import Ledger
from runtime.coordinator.coordinator import Conductor, Recovery, Scheduler
from runtime.coordinator.coordinator import RunError as RunError
from runtime.coordinator.event_loop import POLL_SECONDS, LossLog, Progress, Tell, Watch
from runtime.coordinator.membership import Lighthouse
from runtime.device import choose_device
from runtime.model.checkpoint import Checkpoint, CheckpointError, identity_of, latest, open_checkpoint
from runtime.model.clipping import watches_gradients
from runtime.model.data import load_corpus
from runtime.model.digest import combined_digest
from runtime.model.layers import LayeredModel, model_for, parameter_dtype
from runtime.model.stage import boundaries
from runtime.processes.fork_server import Nursery, NurseryError
from runtime.processes.launchers import ALONE, LocalProcess, gpu_share
from runtime.processes.process_manager import Crew, Hands, Return, next_command
from runtime.protocol.failure_injection import Injection
from runtime.protocol.rendezvous import Rendezvous, RendezvousError, connect_store, host_store
from runtime.protocol.reports import Ended, Left, push
from runtime.protocol.setup import JOIN_TIMEOUT, SETUP_KEY, Form, Setup
from runtime.replay.communication import Transport, choose_transport
from runtime.replay.placement import PlacementError, deal_to_nodes, layer_ranges
from schedules import codec
from schedules.check import check
from schedules.measured_trace import MeasuredTrace, write_measured_trace
from schedules.schedule import Schedule

QUIET_SECONDS = 2.0
"""The launcher of another node that is silent for so long, when a run ends, is gone."""
OUTCOME_KEY = "outcome"
FOUNDING_KEY = "schedule"
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


class Outcome(msgspec.Struct, frozen=True):
    """How a run ended, for the launchers of the other nodes."""

    error: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Resilience:
    """How a run deals with failures."""

    scheduler: Scheduler | None = None
    """Gives the schedule for other failures; None: the first failure ends the run."""
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
        local: LocalProcess = ALONE, traced: int = 3, nursery: Nursery | None = None,
        progress: Progress | None = None, tell: Tell | None = None,
        resilience: Resilience = Resilience()) -> RunResult:
    """Train by a schedule, from the first iteration or a checkpoint; on node 0 when there are several.

    Writes `schedule.json`, `losses.jsonl` (line by line as iterations are committed), `trace.json`, `parameters/` and
    `logs/` into `out`. The trace holds the last `traced` iterations. A `nursery` may serve several runs, one after the
    other. `announce` is called with the meeting point once it is open; `local` says which of the
    processes that share this machine this is.

    Raises ConfigError or PlacementError when schedule, configuration and machine do not fit, CheckpointError when the
    checkpoint does not, OSError when `out` cannot be written, RendezvousError when `rendezvous` cannot be opened, and
    RunError when failures leave no way to go on; then no process is left, and the losses of the committed iterations
    are on disk.
    """
    device, model, ranges = _prepare(schedule, config)
    first = 0 if resilience.resume is None else resilience.resume.iteration
    _check_checkpoints(resilience, identity_of(config, model.layers), first)
    workers = [seat.worker for seat in schedule.seats]
    dealt = deal_to_nodes(workers, nodes)
    gpus = gpu_share([len(share) for share in dealt], 0, local)
    transport = choose_transport(config.training.backend, device, gpus.workers, _cards(device))
    _clear(out, "parameters/layer-*.pt", "logs/worker-*.log", "trace.json")
    codec.write(schedule, out / "schedule.json")
    with ExitStack() as stack:
        nursery = nursery or stack.enter_context(Nursery())
        setup = _setup(schedule, config, model, ranges, device, transport, resilience, first=first, nodes=nodes,
                       traced=traced, iterations=config.training.iterations if iterations is None else iterations)
        store, opened = host_store(rendezvous)
        if announce is not None:
            announce(opened)
        lighthouse = Lighthouse(opened.host, len(workers))
        stack.callback(lighthouse.close)
        store.set(SETUP_KEY, msgspec.json.encode(replace(setup, lighthouse=lighthouse.url)).decode())
        ledger = Ledger(schedule.job, first_iteration=first, skips=config.training.skip_nonfinite,
                        validates=watches_gradients(config.training))
        conductor = Conductor(schedule, resilience.scheduler, store, ledger, ranges=setup.ranges,
                              iterations=range(first, max(first, setup.iterations)))
        losses = stack.enter_context(_loss_file(out / "losses.jsonl", first))
        hands = Hands(nursery, opened, dealt[0], _cards(device), out, gpus.first)
        crew = Crew(hands, store, {worker: node for node, share in enumerate(dealt) for worker in share},
                    resilience.returns, [worker for worker in schedule.grid.workers() if worker not in workers])
        watch = Watch(conductor, ledger, store, crew, out, LossLog(losses, progress),
                      heartbeat_timeout_seconds=resilience.heartbeat_timeout_seconds, injections=resilience.injections,
                      tell=tell)
        store.set(FOUNDING_KEY, codec.encode(schedule).decode())
        with _telling_others(store, watch, nodes), _processes(nursery, hands):
            watch.until_left()
    trace = ledger.trace()
    write_measured_trace(trace, out / "trace.json")
    return RunResult(first_iteration=first, losses=tuple(ledger.losses),
                     parameter_digest=combined_digest(ledger.digests), trace=trace, out=out,
                     measured_period_seconds=ledger.measured_period_seconds(),
                     planned_period_seconds=schedule.seconds(schedule.period_ticks),
                     recoveries=tuple(conductor.recoveries), notes=tuple(watch.notes))


def join(rendezvous: Rendezvous, *, node: int, nodes: int, out: Path, nursery: Nursery | None = None,
         local: LocalProcess = ALONE) -> None:
    """Take part in the run that node 0 leads, with this node's share of the workers.

    Into `out` go the logs of its workers, and the parameters of layers that they write. Raises RendezvousError when
    node 0 cannot be reached, ConfigError when this machine does not fit, RunError when the run fails.
    """
    store = connect_store(rendezvous, JOIN_TIMEOUT)
    try:
        schedule = codec.decode(store.get(FOUNDING_KEY))
        setup = msgspec.json.decode(store.get(SETUP_KEY), type=Setup)
    except DistError as error:
        raise RendezvousError(f"node 0 at {rendezvous} told nothing of a run: {error}") from None
    if setup.nodes != nodes:
        raise ConfigError(f"--nodes is {nodes} here and {setup.nodes} at node 0; expected the same")
    dealt = deal_to_nodes([seat.worker for seat in schedule.seats], nodes)
    here, gpus = dealt[node], gpu_share([len(share) for share in dealt], node, local)
    cards = _cards(setup.device)
    if setup.device == "cuda" and (cards == 0 or (setup.transport == "nccl" and cards < gpus.workers)):
        raise ConfigError(f"node {node} has {cards} GPUs for {gpus.workers} workers; {setup.transport} needs more")
    _clear(out, "parameters/layer-*.pt")  # the folder may be shared with node 0, whose workers have logs there
    with ExitStack() as stack:
        nursery = nursery or stack.enter_context(Nursery())
        hands = Hands(nursery, rendezvous, here, cards, out, gpus.first)
        try:
            with _processes(nursery, hands):
                outcome = _follow(store, node, hands)
        except RunError:
            # Node 0 would miss them anyway, but later.
            with suppress(RendezvousError):
                for worker in here:
                    push(store, Ended(worker, -signal.SIGKILL))
            raise
    push(store, Left(node))
    if outcome.error is not None:
        raise RunError(outcome.error)


@contextmanager
def _processes(nursery: Nursery, hands: Hands) -> Iterator[None]:
    """Worker processes on this machine; none is left at the end. Raises RunError."""
    try:
        hands.start()
        yield
    except NurseryError as error:
        raise RunError(str(error)) from None
    finally:
        nursery.kill_all()


@contextmanager
def _telling_others(store: TCPStore, watch: Watch, nodes: int) -> Iterator[None]:
    """Let the launchers of the other nodes know how the run ends, and wait a moment until they do."""
    error: str | None = "node 0 ended the run"
    try:
        yield
        error = None
    except RunError as failed:
        error = str(failed)
        raise
    finally:
        store.set(OUTCOME_KEY, msgspec.json.encode(Outcome(error)).decode())
        present, counts, looked = set(range(1, nodes)), dict.fromkeys(range(1, nodes), -1), -math.inf
        while present - watch.left:
            now = time.monotonic()
            if now - looked > QUIET_SECONDS:
                # Who has not been heard of since the last look is gone, and will not say that it leaves.
                before, counts = counts, {node: store.add(_node_key(node), 0) for node in present}
                present, looked = {node for node in present if counts[node] != before[node]}, now
            watch.listen_for_leaving()
            time.sleep(POLL_SECONDS)


def _follow(store: TCPStore, node: int, hands: Hands) -> Outcome:
    """Do what node 0 commands and pass on which workers here end, until it says how the run ended.

    Raises RunError when node 0 is gone.
    """
    try:
        while not store.check([OUTCOME_KEY]):
            store.add(_node_key(node), 1)
            while (command := next_command(store, node)) is not None:
                hands.do(command)
            for ended in hands.poll(POLL_SECONDS):
                push(store, ended)
        return msgspec.json.decode(store.get(OUTCOME_KEY), type=Outcome)
    except (DistError, RendezvousError):
        raise RunError("node 0 is gone") from None


def _node_key(node: int) -> str:
    """Counts up for as long as the launcher of a node is there."""
    return f"beat/node-{node}"


def _setup(schedule: Schedule, config: RunConfig, model: LayeredModel, ranges: Ranges,
           device: Literal["cpu", "cuda"], transport: Transport, resilience: Resilience, *, first: int, iterations: int,
           nodes: int, traced: int) -> Setup:
    """What the workers must know, but for the lighthouse. Shapes are found out once, here, for all of them."""
    return Setup(
        config=config, first_iteration=first, iterations=iterations, traced=traced, nodes=nodes, transport=transport,
        device=device, lighthouse="", columns=tuple(stage.column for stage in schedule.grid.stages),
        ranges=tuple(ranges), forms=tuple(Form.of(one) for one in boundaries(model, ranges, config)),
        loss_scale=1 / schedule.grid.total_microbatches,
        heartbeat_timeout_seconds=resilience.heartbeat_timeout_seconds,
        resume=None if resilience.resume is None else str(resilience.resume.path.resolve()),
        checkpoints=None if resilience.checkpoints is None else str(resilience.checkpoints.resolve()),
        checkpoint_every=resilience.checkpoint_every, fetch_bytes_per_second=resilience.fetch_bytes_per_second,
        injections=resilience.injections)


def _check_checkpoints(resilience: Resilience, identity: Mapping[str, object], first: int) -> None:
    """Raises CheckpointError where going on from a checkpoint, or saving new ones, would not do what is expected."""
    if resilience.resume is not None:
        open_checkpoint(resilience.resume.path, identity)
    if resilience.checkpoints is not None and resilience.checkpoint_every:
        newest = latest(resilience.checkpoints)
        if newest is not None and newest.iteration > first:
            raise CheckpointError(f"{resilience.checkpoints}: holds a checkpoint of iteration {newest.iteration} "
                                  "already; go on from it with --resume, or save to another folder")


def _loss_file(path: Path, first: int) -> TextIO:
    """Where losses go: a new file, or below those of the iterations that came before."""
    kept = []
    if first and path.exists():
        for line in path.read_text().splitlines():
            with suppress(msgspec.DecodeError, KeyError, TypeError):
                if msgspec.json.decode(line)["iteration"] < first:
                    kept.append(line + "\n")
    file = path.open("w")
    file.writelines(kept)
    file.flush()
    return file


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


def _cards(device: str) -> int:
    return torch.cuda.device_count() if device == "cuda" else 0


def _clear(out: Path, *patterns: str) -> None:
    """Make the folder, and remove what an earlier run left there under names that this one may not overwrite."""
    out.mkdir(parents=True, exist_ok=True)
    for pattern in patterns:
        for path in out.glob(pattern):
            path.unlink(missing_ok=True)
