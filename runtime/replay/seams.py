"""Define the interfaces through which an executor reaches layers, steps, data and transfers.

docs/library.md has a section on each. `runtime.computing`, `runtime.state`, `runtime.data` and
`runtime.worker` implement them for runs, and `runtime.own_loop` for a user's own loop.
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
"""Tensors of a micro-batch, on the device that computes: input, target, and any others."""
Feed = Callable[[Microbatch], Batch]
"""Function that returns the tensors of a micro-batch, on the device that computes."""


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

    def forward(
        self,
        microbatch: Microbatch,
        value: Value,
        target: Tensor | None = None,
        batch: Batch | None = None,
        *,
        split: bool,
    ) -> Value | None:
        """Run F on the input `value`; return the activation to send on.

        On the first slice, `value` is the first tensor of the data. `batch` has all data there and
        where `reads_batch`, else it is None. The last slice returns None, and keeps the loss, which
        it computes with `target`. `split` is True if I and W follow instead of B.
        """

    def backward(self, microbatch: Microbatch, gradient: Value | None) -> Value | None:
        """Run B; return the gradient of the slice's input, or None on the first slice.

        `gradient` is with respect to the slice's output; None on the last slice.
        """

    def backward_input(self, microbatch: Microbatch, gradient: Value | None) -> Value | None:
        """Run I; argument and result are as for `backward`."""

    def backward_weight(self, microbatch: Microbatch) -> None:
        """Run W: add a micro-batch's weight gradients to those of earlier micro-batches."""

    def drop_microbatch(self, microbatch: Microbatch) -> None:
        """Drop what F has kept of a micro-batch whose backward will not be run."""


class State(Protocol):
    """Access to the gradients of the layers that a worker holds, for summing them."""

    @property
    def shared_gradients(self) -> Mapping[str, Any]:
        """Gradients of each parameter that several layers share, by its first name `LAYER.NAME`."""

    def gradients_to_sum(self, what: LayerRange | str) -> list[Tensor]:
        """Return the gradients of layers, or of a shared parameter, to sum in place."""


class Reducer(Protocol):
    """Communication about a worker's layers: sums of gradients, and parameters after steps.

    `runtime.replay.executor.WholeReducer` is for workers that hold the whole state of their layers,
    `runtime.state.part_exchange.PartReducer` for workers that hold parts. All methods except
    `mark_gathered` may raise CommunicationError.
    """

    def sum_gradients(self, layers: LayerRange) -> None:
        """Sum the gradients of a range of layers over the workers that hold it.

        The sums replace the gradients of all parameters in the range that this worker steps.
        """

    def wait_until_unread(self) -> None:
        """Wait until no other worker still reads this worker's gradients."""

    def gather_parameters(self, iteration: int) -> None:
        """Copy to this worker the parameters that others have stepped in an iteration."""

    def mark_gathered(self, iteration: int) -> None:
        """Mark gathered parameters as current after `iteration`; call it after a commit point."""


class Slices(Protocol):
    """Runners of a worker's slices, such as `runtime.computing.slices.WorkerSlices`."""

    @property
    def runners(self) -> Mapping[int, Runner]:
        """Runner of each slice, by its number."""

    @property
    def layers(self) -> Mapping[int, LayerRange]:
        """Range of the model's layers in each slice, end exclusive, by the slice's number."""

    @property
    def holding(self) -> State:
        """State of the layers that the worker holds."""

    def take_loss(self) -> float:
        """Return this worker's summand of the mean loss over micro-batches since the last call."""

    def discard_iteration(self) -> None:
        """Drop all micro-batches in flight, the losses and the gradients."""


class Steps(Protocol):
    """Optimizer steps of a worker, such as `runtime.state.steps.StepController`."""

    @property
    def iteration(self) -> int:
        """Iteration whose step is being made, or was made last."""

    @property
    def is_final(self) -> bool:
        """True if the last step is known to be right, and will not be undone."""

    @property
    def is_void(self) -> bool:
        """True if the last step was guessed wrongly, so results since then do not count."""

    @property
    def validated(self) -> tuple[int, float | None] | None:
        """Last iteration whose step is known to be right, and its step factor.

        The step factor is None if the step was skipped. Instead of a pair, None means that no step
        is known to be right yet.
        """

    def validate_if_arrived(self) -> None:
        """Do as `validate` if the sums have arrived, else nothing. Raises CommunicationError."""

    def validate(self) -> None:
        """Wait for the sums that the last step depends on, and check what it guessed.

        A step on a wrong guess is corrected, and sets `is_void`. Raises CommunicationError.
        """

    def leave_void_state(self) -> None:
        """Set `is_void` to False, as all workers now have the corrected parameters."""

    def step(self, iteration: int, loss: float, until_unread: Callable[[], None]) -> None:
        """Run O of an iteration; `loss` is this worker's summand of its mean loss.

        The function `until_unread` waits until no other worker reads this worker's gradients.
        """

    def when_validated(self, call: Callable[[], None]) -> None:
        """Call a function when the last step is known to be right: now, or later.

        A step on a wrong guess is corrected first.
        """


class Outgoing(Protocol):
    """A tensor that is being sent."""

    @property
    def target(self) -> Worker:
        """Worker that receives the tensor."""

    def wait(self) -> None:
        """Wait until the tensor may be freed. Raises CommunicationError."""


class Incoming(Protocol):
    """A tensor that is being received."""

    def wait_for_tensor(self) -> Tensor:
        """Wait for the tensor; return it on the device that computes. Raises CommunicationError."""


class Transport(Protocol):
    """Communication of one worker with others. All methods may raise CommunicationError."""

    @property
    def device(self) -> torch.device:
        """Device that computes."""

    @property
    def ordered(self) -> bool:
        """True if sends and receives are paired by their order, False if by tags."""

    def send(self, tensor: Tensor, target: Worker, tag: int) -> Outgoing:
        """Start to send a tensor to a worker, which receives it with the same tag."""

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, source: Worker, tag: int
    ) -> Incoming:
        """Start to receive a tensor of this shape and dtype from a worker."""

    def sum_over_sharers(self, what: LayerRange | str, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over the live holders of layers or a shared parameter."""

    def reduce_in_background(self, reduce: Callable[[], None]) -> None:
        """Call `reduce`, which sums gradients, while ops go on; such calls run in turn."""

    def wait_for_reductions(self) -> None:
        """Wait for all calls of `reduce_in_background`; raise the error of one that failed."""

    def waiting_for_device(self) -> AbstractContextManager[None]:
        """Return a context within which this thread counts as waiting for the device."""

    def reach_commit_point(self) -> None:
        """Reach a commit point. Raises CommunicationError unless all results so far count."""


class OpRecorder(Protocol):
    """Recorder of the times of ops, such as `runtime.replay.recorder.Recorder`."""

    def record_op(self, op: Op) -> AbstractContextManager[None]:
        """Return a context within which an op runs and is timed."""

    def restart_iteration(self) -> None:
        """Discard what was recorded of the present iteration, which begins again."""
