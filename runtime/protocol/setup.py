"""What a worker must know before its first order."""

from typing import Literal

import msgspec
import torch

from runtime.model.stage import Boundary
from runtime.protocol.failure_injection import Injection
from runtime.protocol.rendezvous import Rendezvous
from runtime.replay.communication import Transport

JOIN_TIMEOUT_SECONDS = 600.0
"""For all workers to be there: on several machines, people start them."""


class BoundarySpec(msgspec.Struct, frozen=True, array_like=True):
    """A `runtime.model.stage.Boundary` as JSON: shape and dtype of what a stage takes, and of what it gives."""

    input_shape: tuple[int, ...]
    input_dtype: str
    output_shape: tuple[int, ...]
    output_dtype: str

    @classmethod
    def of(cls, boundary: Boundary) -> "BoundarySpec":
        """Write a boundary."""
        return cls(boundary.input_shape, str(boundary.input_dtype), boundary.output_shape, str(boundary.output_dtype))

    def boundary(self) -> Boundary:
        """Read it again."""
        return Boundary(self.input_shape, _dtype(self.input_dtype), self.output_shape, _dtype(self.output_dtype))


class Setup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The answer to `JoinWorker`: what a worker must know besides the schedule. It prepares, and is `Ready`.

    It names no code and no paths: those are in the `NodeSettings` that the worker's own launcher has given it.
    """

    epoch: int = 0
    """Of the coordinator: one that is started later has a higher one, and nobody follows a lower one any more."""
    forget: bool = False
    """Whether a worker is too late with what it holds: the others have gone on without it."""
    first_iteration: int
    iterations: int
    """One after the last."""
    traced: int
    """How many iterations, the last ones, report when their ops ran."""
    nodes: int
    transport: Transport
    device: Literal["cpu", "cuda"]
    store: Rendezvous
    """torch's key-value store, where process groups find each other."""
    columns: tuple[int, ...]
    """Of the worker that holds each stage."""
    ranges: tuple[tuple[int, int], ...]
    """Half-open range of layers of each stage."""
    boundaries: tuple[BoundarySpec, ...]
    """Of each stage."""
    loss_scale: float
    heartbeat_timeout_seconds: float
    fetch_bytes_per_second: float | None = None
    """How fast a layer goes to each worker that fetches it while all train, at most."""
    checkpoint_every: int | None = None
    """Iterations from one checkpoint to the next; None: the coordinator says when (`Acknowledged`)."""
    injections: tuple[tuple[int, Injection], ...] = ()
    """This worker's failures on purpose that have not happened yet, by their index among all."""


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
