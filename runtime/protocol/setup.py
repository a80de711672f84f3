"""Settings that a worker needs before its first order."""

from typing import Literal

import msgspec

from slipstream.runtime.protocol.failure_injection import Injection, Slowdown
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.replay.microbatch import NOTHING_READ, SamplesRead
from slipstream.runtime.replay.transport import TransportName
from slipstream.schedules.schedule import Worker

JOIN_TIMEOUT_SECONDS = 600.0
"""Default number of seconds within which all workers must join: people may start them by hand on several machines."""


VERIFY_EVERY = 50
"""Default number of iterations between comparisons of copies. On CPUs, a comparison took 1.7 to 8 % of an iteration."""


class FormSpec(msgspec.Struct, frozen=True, array_like=True):
    """JSON form of a `runtime.replay.layer_values.Form` (`form_codec`): the shapes and dtypes of a value that is passed
    between layers."""

    tensors: tuple[tuple[tuple[int, ...], str], ...]
    """Shape and dtype of each tensor of the value."""
    fields: tuple[str, ...] | None = None
    """Field names of a tuple. None: the form is a single tensor."""


class WorkerSetup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answer to `JoinWorker`: settings of a worker besides the schedule. The worker prepares, and then sends `Ready`.

    The answer names no code and no paths: those are in the `NodeSettings` that the worker's own launcher has given it.
    """

    epoch: int = 0
    """Number of the coordinator that sends this: the time at which it was started, in nanoseconds, or more.

    A coordinator that is started later has a higher number. Workers and node agents follow no coordinator whose number
    is not higher than that of the last one.
    """
    forget: bool = False
    """True if the worker's state is out of date, because the others have continued without it."""
    first_iteration: int
    read: SamplesRead = NOTHING_READ
    """Number of samples that earlier runs read before some iteration; needed if they read other numbers of samples in
    each iteration than this run."""
    iterations: int
    """Number of iterations of the whole run, including those before `first_iteration`."""
    traced: int
    """Number of last iterations of the run in which workers report when each op ran."""
    nodes: int
    transport: TransportName
    device: Literal["cpu", "cuda"]
    store: Rendezvous
    """Address of torch's key-value store, where process groups find each other."""
    cuts: tuple[int, ...]
    """First layer of the model in each layer of the schedules, and then the number of the model's layers
    (`runtime.placement.Placement`)."""
    columns: tuple[tuple[int, ...], ...]
    """Layers of the model that the stages of each column hold."""
    forms: tuple[FormSpec, ...]
    """Forms of the values that are passed at each of `cuts`, from one layer of the schedules to the next."""
    data: FormSpec | None = None
    """Form of every micro-batch of the data. None: not checked."""
    failure_domains: tuple[tuple[Worker, ...], ...] = ()
    """Groups of workers that share a machine, which sharded state takes into account (`runtime.failure_domains`)."""
    loss_scale: float
    microbatches: tuple[int, ...] = (1,)
    """Number of micro-batches of each pipeline in an iteration."""
    heartbeat_timeout_seconds: float
    fetch_bytes_per_second: float | None = None
    """Largest rate in bytes per second at which layers are sent to each worker that fetches them while all train; None:
    not limited."""
    checkpoint_every: int | None = None
    """Number of iterations from one checkpoint to the next. None: the coordinator decides (`Acknowledged`)."""
    verify_every: int = 0
    """Number of iterations from one comparison of the workers' copies of equal state to the next, besides those that
    are always made. 0: no others."""
    injections: tuple[tuple[int, Injection], ...] = ()
    """Failures on purpose of this worker that have not happened yet, each with its index among all failures of the
    run."""
    slowdowns: tuple[Slowdown, ...] = ()
    """Slowdowns of this worker's ops on purpose."""
    first_samples: dict[str, str] = {}
    """Digest of the first samples that node 0 has read, by the name that it has in the run's identity."""
    fused_layers: tuple[int, ...] = ()
    """Layers whose backward must not be divided into I and W: their gradients would not be autograd's own."""
