"""Starts a run and sees it through: worker processes on this machine, reports from all of them, files in a folder.

One node is the usual case. On several, each runs one launcher: node 0 (`run`) hosts the meeting point and knows the
schedule, the others (`join`) are told there what they need.
"""

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistError

from runtime.comm import choose_transport
from runtime.config import ConfigError, RunConfig
from runtime.data import load_corpus
from runtime.digest import combined_digest
from runtime.layers import model_for, parameter_dtype
from runtime.ledger import Ledger
from runtime.membership import Lighthouse
from runtime.nursery import Birth, Nursery, NurseryError
from runtime.placement import PlacementError, deal_to_nodes, layer_ranges
from runtime.rendezvous import Rendezvous, RendezvousError, connect_store, host_store
from runtime.report import Left, push
from runtime.watch import POLL_SECONDS, LossLog, Progress, Watch
from runtime.watch import RunError as RunError
from runtime.worker import JOIN_TIMEOUT, SCHEDULE_KEY, SETUP_KEY, Setup
from schedules import codec
from schedules.check import check
from schedules.schedule import Schedule, Worker
from schedules.trace import Trace, write_trace

LEAVE_SECONDS = 10.0
OUTCOME_KEY = "outcome"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a run leaves. Its folder `out` holds the same, and the parameters (`runtime.parameters`)."""

    losses: tuple[float, ...]
    """Mean over all micro-batches, one an iteration."""
    parameter_digest: str
    """`runtime.digest` of all parameters after the last iteration."""
    measured_period_seconds: float | None
    """Median over iterations of the longest busy window of any worker; None without iterations."""
    planned_period_seconds: float
    trace: Trace
    out: Path


class Outcome(msgspec.Struct, frozen=True):
    """How a run ended, for the launchers of the other nodes."""

    error: str | None


def run(schedule: Schedule, config: RunConfig, *, out: Path, iterations: int | None = None, nodes: int = 1,
        rendezvous: Rendezvous | None = None, traced: int = 3, nursery: Nursery | None = None,
        progress: Progress | None = None) -> RunResult:
    """Train by a schedule, from the first iteration; on node 0 when there are several.

    Writes `schedule.json`, `losses.jsonl` (line by line as iterations end), `trace.json`, `parameters/` and `logs/`
    into `out`. The trace holds the last `traced` iterations. A `nursery` may serve several runs, one after the other.

    Raises ConfigError or PlacementError when schedule, configuration and machine do not fit, OSError when `out` cannot
    be written, RendezvousError when `rendezvous` cannot be opened, and RunError when a worker fails; then no process is
    left, and the losses of the committed iterations are on disk.
    """
    device = _prepare(schedule, config)
    workers = [seat.worker for seat in schedule.seats]
    here = deal_to_nodes(workers, nodes)[0]
    transport = choose_transport(config.training.backend, device, max(len(here), 1), _cards(device))
    _clear(out, "parameters/layer-*.pt", "logs/worker-*.log", "trace.json")
    codec.write(schedule, out / "schedule.json")
    with ExitStack() as stack:
        nursery = nursery or stack.enter_context(Nursery())
        store, opened = host_store(rendezvous)
        lighthouse = Lighthouse(opened.host, len(workers))
        stack.callback(lighthouse.close)
        setup = Setup(config=config, iterations=config.training.iterations if iterations is None else iterations,
                      traced=traced, nodes=nodes, transport=transport, device=device, lighthouse=lighthouse.url)
        losses = stack.enter_context((out / "losses.jsonl").open("w"))
        watch = Watch(schedule, store, nursery, out, LossLog(losses, progress),
                      skips=config.training.skip_nonfinite)
        store.set(SCHEDULE_KEY, codec.encode(schedule).decode())
        store.set(SETUP_KEY, msgspec.json.encode(setup).decode())
        with _telling_others(store, watch, nodes), _workers(nursery, here, opened, device, out):
            watch.until_complete()
    return _result(schedule, watch.ledger, out)


def join(rendezvous: Rendezvous, *, node: int, nodes: int, out: Path, nursery: Nursery | None = None) -> None:
    """Take part in the run that node 0 leads, with this node's share of the workers.

    Into `out` go the logs of its workers, and the parameters of layers whose first worker is here. Raises
    RendezvousError when node 0 cannot be reached, ConfigError when this machine does not fit, RunError when the run
    fails.
    """
    store = connect_store(rendezvous, JOIN_TIMEOUT)
    try:
        setup = msgspec.json.decode(store.get(SETUP_KEY), type=Setup)
        schedule = codec.decode(store.get(SCHEDULE_KEY))
    except DistError as error:
        raise RendezvousError(f"node 0 at {rendezvous} told nothing of a run: {error}") from None
    if setup.nodes != nodes:
        raise ConfigError(f"--nodes is {nodes} here and {setup.nodes} at node 0; expected the same")
    here = deal_to_nodes([seat.worker for seat in schedule.seats], nodes)[node]
    cards = _cards(setup.device)
    if setup.device == "cuda" and (cards == 0 or (setup.transport == "nccl" and cards < len(here))):
        raise ConfigError(f"node {node} has {cards} GPUs for its {len(here)} workers; {setup.transport} needs more")
    _clear(out, "parameters/layer-*.pt")  # the folder may be shared with node 0, whose workers have logs there
    with ExitStack() as stack:
        nursery = nursery or stack.enter_context(Nursery())
        with _workers(nursery, here, rendezvous, setup.device, out):
            outcome = _follow(store, nursery)
    push(store, Left(node))
    if outcome.error is not None:
        raise RunError(outcome.error)


@contextmanager
def _workers(nursery: Nursery, workers: list[Worker], rendezvous: Rendezvous, device: str, out: Path) -> Iterator[None]:
    """Worker processes on this machine, cards dealt in turn; none is left at the end. Raises RunError."""
    cards = _cards(device)
    try:
        for index, worker in enumerate(workers):
            nursery.fork(Birth(worker, rendezvous, index % cards if cards else None, str(out)))
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
        deadline = time.monotonic() + LEAVE_SECONDS
        while len(watch.left) < nodes - 1 and time.monotonic() < deadline:
            watch.listen(POLL_SECONDS)


def _follow(store: TCPStore, nursery: Nursery) -> Outcome:
    """Pass on which workers here end, until node 0 says how the run ended. Raises RunError when it is gone."""
    try:
        while not store.check([OUTCOME_KEY]):
            for ended in nursery.poll(5 * POLL_SECONDS):
                push(store, ended)
        return msgspec.json.decode(store.get(OUTCOME_KEY), type=Outcome)
    except (DistError, RendezvousError):
        raise RunError("node 0 is gone") from None


def _prepare(schedule: Schedule, config: RunConfig) -> Literal["cpu", "cuda"]:
    """Check that schedule, configuration and machine fit; the kind of device to compute on."""
    violations = check(schedule)
    if violations:
        raise PlacementError(f"the schedule breaks a rule: {violations[0]}")
    training = config.training
    model = model_for(config.model, training.seed, parameter_dtype(training.dtype), torch.device("meta"))
    layer_ranges(schedule, model.layers)
    load_corpus(config)
    has_cards = torch.cuda.is_available()
    if training.device == "cuda" and not has_cards:
        raise ConfigError("training.device is 'cuda', but torch finds no GPU here")
    return "cuda" if has_cards and training.device != "cpu" else "cpu"


def _cards(device: str) -> int:
    return torch.cuda.device_count() if device == "cuda" else 0


def _clear(out: Path, *patterns: str) -> None:
    """Make the folder, and remove what an earlier run left there under names that this one may not overwrite."""
    out.mkdir(parents=True, exist_ok=True)
    for pattern in patterns:
        for path in out.glob(pattern):
            path.unlink(missing_ok=True)


def _result(schedule: Schedule, ledger: Ledger, out: Path) -> RunResult:
    trace = ledger.trace()
    write_trace(trace, out / "trace.json")
    return RunResult(losses=tuple(ledger.losses), parameter_digest=combined_digest(ledger.digests),
                     measured_period_seconds=ledger.measured_period_seconds(),
                     planned_period_seconds=schedule.seconds(schedule.period_ticks), trace=trace, out=out)
