"""Settings that processes are told before the first order: common ones, and a worker's own."""

from dataclasses import dataclass, fields
from typing import Literal

import msgspec

from slipstream.runtime.protocol.failure_injection import Injection, Slowdown
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.replay.microbatch import NOTHING_READ, SamplesRead
from slipstream.runtime.replay.transport import TransportName
from slipstream.schedules.schedule import Worker

JOIN_TIMEOUT_SECONDS = 600.0
"""Seconds within which all workers must join: people may start them by hand."""


VERIFY_EVERY = 50
"""Iterations between comparisons of copies. On CPUs, one took 1.7 to 8 % of an iteration."""


class FormSpec(msgspec.Struct, frozen=True, array_like=True):
    """JSON form of a `runtime.replay.layer_values.Form`, which `form_codec` converts."""

    tensors: tuple[tuple[tuple[int, ...], str], ...]
    """Shape and dtype of each tensor of the value."""
    fields: tuple[str, ...] | None = None
    """Field names of a tuple. None: the form is a single tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResilience:
    """Those options for how a run deals with failures that its workers are told."""

    heartbeat_timeout_seconds: float = 5.0
    """Seconds without a heartbeat after which a worker counts as dead."""
    fetch_bytes_per_second: float | None = None
    """Bytes per second at which each worker sends layers while it trains; None: unlimited."""
    checkpoint_every: int | None = 0
    """Iterations between checkpoints; 0: none; None: for less than 1 % of the time."""
    verify_every: int = VERIFY_EVERY
    """Iterations between comparisons of copies. 0: only at the start of an order, at a checkpoint,
    and before the last step."""

    def select_for_workers(self) -> "WorkerResilience":
        """Return these options alone, without what a subclass adds to them."""
        return WorkerResilience(**{option.name: getattr(self, option.name) for option in fields(WorkerResilience)})


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all processes of a run are told alike, besides its schedule. They name no code
    and no paths: those are in the `NodeSettings` that each process's own launcher has given it."""

    iterations: int
    """Iterations of the whole run, including those before it was resumed."""
    traced: int
    """Number of last iterations of the run in which workers report when each op ran."""
    nodes: int
    transport: TransportName
    device: Literal["cpu", "cuda"]
    cuts: tuple[int, ...]
    """First layer of the model in each layer of the schedules, then the model's layers
    (`Placement`)."""
    columns: tuple[tuple[int, ...], ...]
    """Layers of the model that the stages of each column hold."""
    forms: tuple[FormSpec, ...]
    """Forms of the values at each of `cuts`, computed once for all, as it takes seconds."""
    data: FormSpec | None = None
    """Form of every micro-batch of the data. None: not checked."""
    failure_domains: tuple[tuple[Worker, ...], ...] = ()
    """Groups of workers that share a machine (`runtime.failure_domains`)."""
    microbatches: tuple[int, ...] = (1,)
    """Number of micro-batches of each pipeline in an iteration."""
    resilience: WorkerResilience = WorkerResilience()
    first_samples: dict[str, str] = {}
    """Digest of node 0's first samples, by their name in the run's identity."""
    fused_layers: tuple[int, ...] = ()
    """Layers whose backward must not be divided into I and W (`runtime.computing.trial`)."""


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to `JoinWorker`: settings of a worker besides the schedule. The worker prepares, and
    then sends `Ready`."""

    common: CommonSettings
    epoch: int = 0
    """Number of the coordinator: the time at which it was started, in nanoseconds, or more.

    One that is started later has a higher number. Workers and node agents follow no coordinator
    whose number is not higher than that of the last one.
    """
    forget: bool = False
    """True if the worker's state is out of date, because the others continued without it."""
    first_iteration: int
    read: SamplesRead = NOTHING_READ
    """Samples that earlier runs read before some iteration, if they read other numbers of them."""
    store: Rendezvous
    """Address of torch's key-value store, where process groups find each other."""
    injections: tuple[tuple[int, Injection], ...] = ()
    """Failures on purpose of this worker yet to happen, by index in the run."""
    slowdowns: tuple[Slowdown, ...] = ()
    """Slowdowns of this worker's ops on purpose."""
