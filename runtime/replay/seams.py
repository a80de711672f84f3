"""Describe, as interfaces, what replays a program is given.

A worker's layers (`Slices`, `Runner`), their state (`State`), sums over the holders of layers
(`Reducer`), optimizer steps (`Steps`), samples (`Feed`), a transport (`Transport`) and a recorder
(`OpRecorder`). docs/library.md has a section on each. Runs implement them in `runtime.computing`,
`runtime.state`, `runtime.data` and `runtime.worker`; a loop of a user's own in `runtime.own_loop`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.runtime.replay.layer_values import Value
from slipstream.runtime.replay.microbatch import Microbatch
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Op, Worker

Batch = tuple[Tensor, ...]
"""Data of a micro-batch, on the device that computes: input, target, and others."""
Feed = Callable[[Microbatch], Batch]
"""Function that returns the data of a micro-batch, on the device that computes."""


class Runner(Protocol):
    """Runner of the ops of one slice, such as `runtime.computing.slices.SliceRunner`."""

    @property
    def first(self) -> bool:
        """True if the slice begins with layer 0."""

    @property
    def last(self) -> bool:
        """True if the slice ends with the last layer."""

    @property
    def reads_batch(self) -> bool:
        """True if F needs the data of the micro-batch."""

    def forward(self, microbatch: Microbatch, value: Value, target: Tensor | None = None, batch: Batch | None = None, *,
                split: bool) -> Value | None:
        """Run F and return the activation to send on. The last slice returns None, and keeps its
        loss."""

    def backward(self, microbatch: Microbatch, gradient: Value | None) -> Value | None:
        """Run B and return the gradient of the slice's input; None on the first slice."""

    def backward_input(self, microbatch: Microbatch, gradient: Value | None) -> Value | None:
        """Run I and return the gradient of the slice's input; None on the first slice."""

    def backward_weight(self, microbatch: Microbatch) -> None:
        """Run W."""

    def drop_microbatch(self, microbatch: Microbatch) -> None:
        """Drop a micro-batch whose F has been run and whose backward will not be."""


class State(Protocol):
    """Gradients of the layers that a worker holds, as they are summed."""

    @property
    def shared_gradients(self) -> Mapping[str, Any]:
        """Gradients of each parameter that layers share; keys are `LAYER.NAME` in the first of
        them."""

    def gradients_to_sum(self, what: LayerRange | str) -> list[Tensor]:
        """Return the gradients of layers or a shared parameter, to be summed in place."""


class Reducer(Protocol):
    """Sums of gradients over the holders of layers, and what follows a step.

    `runtime.replay.executor.WholeReducer` is for holders that keep all state of their layers,
    `runtime.state.part_exchange.PartReducer` for those that keep a part. All methods except the
    last raise CommunicationError.
    """

    def sum_gradients(self, layers: LayerRange) -> None:
        """Sum the gradients of a range of layers over the workers that hold it."""

    def wait_until_unread(self) -> None:
        """Wait until no other worker reads this worker's gradients."""

    def gather_parameters(self, iteration: int) -> None:
        """Get the parameters that other workers have stepped in an iteration."""

    def mark_gathered(self, iteration: int) -> None:
        """Mark the parameters as those after an iteration: a commit point has been reached."""


class Slices(Protocol):
    """Runners of a worker's slices, such as `runtime.computing.slices.WorkerSlices`."""

    @property
    def runners(self) -> Mapping[int, Runner]:
        """Runner of each slice, by its number."""

    @property
    def layers(self) -> Mapping[int, LayerRange]:
        """Half-open range of the model's layers of each slice, by its number."""

    @property
    def holding(self) -> State:
        """State of the layers that the worker holds."""

    def take_loss(self) -> float:
        """Return this worker's share of the mean loss of the micro-batches since the last call."""

    def discard_iteration(self) -> None:
        """Drop all micro-batches in flight, the losses and the gradients."""


class Steps(Protocol):
    """Optimizer steps of a worker, such as `runtime.state.steps.StepController`."""

    @property
    def iteration(self) -> int:
        """Iteration whose step is being made, or was made last."""

    @property
    def is_final(self) -> bool:
        """True if the last step is made or skipped for good."""

    @property
    def is_void(self) -> bool:
        """True if the last step was guessed wrong, so that what workers compute is void."""

    @property
    def validated(self) -> tuple[int, float | None] | None:
        """Last iteration whose step is known to be right, with its factor, if any."""

    def validate_if_arrived(self) -> None:
        """Check the last step if what it depends on has arrived."""

    def validate(self) -> None:
        """Wait for what the last step depends on, and check it."""

    def leave_void_state(self) -> None:
        """Treat what workers compute as valid again."""

    def step(self, iteration: int, loss: float, until_unread: Callable[[], None]) -> None:
        """Run O; `until_unread` waits until no other worker reads this worker's gradients."""

    def when_validated(self, call: Callable[[], None]) -> None:
        """Call a function as soon as the last step is final."""


class Outgoing(Protocol):
    """A tensor that is being sent."""

    @property
    def target(self) -> Worker:
        """Worker that receives it."""

    def wait(self) -> None:
        """Wait until the tensor may be freed. Raises CommunicationError."""


class Incoming(Protocol):
    """A tensor that is being received."""

    def wait_for_tensor(self) -> Tensor:
        """Wait for the tensor; return it where this worker computes. Raises CommunicationError."""


class Transport(Protocol):
    """Transfers and sums of one worker, such as `GenerationSession`. All methods may raise
    CommunicationError."""

    @property
    def device(self) -> torch.device:
        """Device that computes."""

    @property
    def ordered(self) -> bool:
        """True if transfers are matched by their order instead of a tag."""

    def send(self, tensor: Tensor, target: Worker, tag: int) -> Outgoing:
        """Start to send a tensor to a worker."""

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: Worker, tag: int) -> Incoming:
        """Start to receive a tensor from a worker."""

    def sum_over_sharers(self, what: LayerRange | str, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all workers that hold layers or a parameter."""

    def reduce_in_background(self, reduce: Callable[[], None]) -> None:
        """Call `reduce`, which sums gradients, concurrently with compute, in order."""

    def wait_for_reductions(self) -> None:
        """Wait for all concurrent reductions, and raise the error of any."""

    def waiting_for_device(self) -> AbstractContextManager[None]:
        """Return a context within which this thread waits for the device."""

    def reach_commit_point(self) -> None:
        """Wait for the device, and raise CommunicationError unless all results are good."""


class OpRecorder(Protocol):
    """Recorder of when ops ran, such as `runtime.replay.recorder.Recorder`."""

    def record_op(self, op: Op) -> AbstractContextManager[None]:
        """Return a context within which an op runs."""

    def restart_iteration(self) -> None:
        """Discard what was recorded of the present iteration, which begins again."""
