"""Settings that a process gets before its first order: the run's, and its own."""

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
"""Iterations between comparisons of state copies. On CPUs, one takes 1.7 to 8 % of an iteration."""


class FormSpec(msgspec.Struct, frozen=True, array_like=True):
    """Shapes and dtypes of a value that layers pass on, as JSON (`form_codec` converts them)."""

    tensors: tuple[tuple[tuple[int, ...], str], ...]
    """Shape and dtype of each tensor of the value."""
    fields: tuple[str, ...] | None = None
    """Field names of a tuple. None: the form is a single tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResilience:
    """Options for dealing with failures that a run's workers need to know."""

    heartbeat_timeout_seconds: float = 5.0
    """Seconds without a heartbeat after which a worker counts as dead."""
    fetch_bytes_per_second: float | None = None
    """Bytes per second at which each worker sends layers while it trains; None: unlimited."""
    checkpoint_every: int | None = 0
    """Iterations between checkpoints; 0: none; None: as many as cost under 1 % of time."""
    verify_every: int = VERIFY_EVERY
    """Iterations between comparisons of state copies; 0: only at order starts, saves and end."""

    def select_for_workers(self) -> "WorkerResilience":
        """Return these options as a plain `WorkerResilience`, without a subclass's own options."""
        return WorkerResilience(
            **{option.name: getattr(self, option.name) for option in fields(WorkerResilience)}
        )


class CommonSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all processes of a run share; they name no code and no paths."""

    iterations: int
    """Iterations of the whole run, including those before it was resumed."""
    traced: int
    """How many of the run's last iterations are traced: workers report when each op ran."""
    nodes: int
    transport: TransportName
    device: Literal["cpu", "cuda"]
    cuts: tuple[int, ...]
    """First model layer of each layer of the schedule, then the model's layer count."""
    columns: tuple[tuple[int, ...], ...]
    """Model layers of each column's stages, by column."""
    forms: tuple[FormSpec, ...]
    """Forms, by cut, of the layer's input there; at the last cut, of the output."""
    data: FormSpec | None = None
    """Shapes and dtypes of every micro-batch of the data. None: not checked."""
    failure_domains: tuple[tuple[Worker, ...], ...] = ()
    """Groups of workers that share a machine (`runtime.failure_domains`)."""
    microbatches: tuple[int, ...] = (1,)
    """Number of micro-batches in an iteration, by pipeline."""
    resilience: WorkerResilience = WorkerResilience()
    first_samples: dict[str, str] = {}
    """Digest of node 0's first samples, by its key in the run's identity."""
    fused_layers: tuple[int, ...] = ()
    """Layers whose backward must not be divided into I and W (`runtime.computing.trial`)."""


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to `JoinWorker`: settings by which the worker prepares, before it sends `Ready`."""

    common: CommonSettings
    epoch: int = 0
    """Epoch of the coordinator: its start in nanoseconds, but above its predecessor's epoch."""
    forget: bool = False
    """True if the worker must drop its state, because the others continued without it."""
    first_iteration: int
    read: SamplesRead = NOTHING_READ
    """Samples that runs on other grids have read, from which their count goes on."""
    store: Rendezvous
    """Address of torch's key-value store, where process groups find each other."""
    injections: tuple[tuple[int, Injection], ...] = ()
    """This worker's failures on purpose still to come, by index in the run's list."""
    slowdowns: tuple[Slowdown, ...] = ()
    """Slowdowns on purpose of this worker's ops."""
