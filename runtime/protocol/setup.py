"""What a worker must know before its first order."""

from typing import Literal

import msgspec
import torch

from slipstream.runtime.model.microbatch import FROM_THE_START, SamplesRead
from slipstream.runtime.model.passed import Form, TensorForm, TupleForm
from slipstream.runtime.protocol.failure_injection import Injection, Slowdown
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.replay.transport import Transport
from slipstream.schedules.schedule import Worker

JOIN_TIMEOUT_SECONDS = 600.0
"""For all workers to be there: on several machines, people start them."""


VERIFY_EVERY = 50
"""Iterations: where it was measured, on CPUs, a comparison took 1.7 to 8 % of one."""


class FormSpec(msgspec.Struct, frozen=True, array_like=True):
    """A `runtime.model.passed.Form` as JSON."""

    tensors: tuple[tuple[tuple[int, ...], str], ...]
    """Shape and dtype of each."""
    fields: tuple[str, ...] | None = None
    """Of a tuple, its names; None where it is one tensor."""

    @classmethod
    def of(cls, form: Form) -> "FormSpec":
        """Write a form."""
        tensors = (form,) if isinstance(form, TensorForm) else form.tensors
        return cls(tuple((one.shape, str(one.dtype)) for one in tensors),
                   None if isinstance(form, TensorForm) else form.fields)

    def form(self) -> Form:
        """Read it again."""
        tensors = tuple(TensorForm(shape, _dtype(dtype)) for shape, dtype in self.tensors)
        return tensors[0] if self.fields is None else TupleForm(tensors, self.fields)


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to `JoinWorker`: what a worker must know besides the schedule. It prepares, and is `Ready`.

    It names no code and no paths: those are in the `NodeSettings` that the worker's own launcher has given it.
    """

    epoch: int = 0
    """Of the coordinator: one that is started later has a higher one, and nobody follows a lower one any more."""
    forget: bool = False
    """Whether a worker is too late with what it holds: the others have gone on without it."""
    first_iteration: int
    read: SamplesRead = FROM_THE_START
    """What was read before an iteration of this run, where runs on other grids have read it."""
    iterations: int
    """One after the last."""
    traced: int
    """How many iterations, the last ones, report when their ops ran."""
    nodes: int
    transport: Transport
    device: Literal["cpu", "cuda"]
    store: Rendezvous
    """torch's key-value store, where process groups find each other."""
    cuts: tuple[int, ...]
    """Where the schedules' layers lie in the model (`runtime.replay.placement.Placement`)."""
    columns: tuple[tuple[int, ...], ...]
    """The layers of the model that the stages of each column have."""
    forms: tuple[FormSpec, ...]
    """Of what passes at each cut."""
    data: FormSpec | None = None
    """Of every micro-batch that the data give; None: whatever they are."""
    failure_domains: tuple[tuple[Worker, ...], ...] = ()
    """Which workers share a machine (`runtime.failure_domains`), where state is sharded."""
    loss_scale: float
    microbatches: tuple[int, ...] = (1,)
    """Of each pipeline in an iteration."""
    heartbeat_timeout_seconds: float
    fetch_bytes_per_second: float | None = None
    """How fast a layer goes to each worker that fetches it while all train, at most."""
    checkpoint_every: int | None = None
    """Iterations from one checkpoint to the next; None: the coordinator says when (`Acknowledged`)."""
    verify_every: int = 0
    """Iterations from one comparison of copies to the next, besides those that are made anyway; 0: no others."""
    injections: tuple[tuple[int, Injection], ...] = ()
    """This worker's failures on purpose that have not happened yet, by their index among all."""
    slowdowns: tuple[Slowdown, ...] = ()
    """This worker's."""


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
