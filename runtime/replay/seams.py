"""What the executor is given: a worker's layers, their state, and its optimizer steps, as interfaces.

`runtime.model` implements them for whole runs, `runtime.own_loop` for a loop of a user's own.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor

from slipstream.runtime.replay.layer_values import Value
from slipstream.runtime.replay.microbatch import Microbatch
from slipstream.runtime.state.parts import Span, StatePartition
from slipstream.schedules.layers import LayerRange

Batch = tuple[Tensor, ...]
"""Data of a micro-batch, on the device that computes: input, target, and others."""


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
        """Run F and return the activation to send on; the last slice returns None, and keeps its loss."""

    def backward(self, microbatch: Microbatch, gradient: Value | None) -> Value | None:
        """Run B and return the gradient of the slice's input; None on the first slice."""

    def backward_input(self, microbatch: Microbatch, gradient: Value | None) -> Value | None:
        """Run I and return the gradient of the slice's input; None on the first slice."""

    def backward_weight(self, microbatch: Microbatch) -> None:
        """Run W."""

    def drop_microbatch(self, microbatch: Microbatch) -> None:
        """Drop a micro-batch whose F has been run and whose backward will not be."""


class State(Protocol):
    """Gradients and parameters of the layers that a worker holds, as they are summed and gathered."""

    @property
    def shared_gradients(self) -> Mapping[str, Any]:
        """Gradients of each parameter that layers share; keys are `LAYER.NAME` in the first of them."""

    def gradients_to_sum(self, what: LayerRange | str) -> list[Tensor]:
        """Return the gradients of a range of layers or of a shared parameter, to be summed in place."""

    def sharded_partition(self, layers: LayerRange) -> StatePartition | None:
        """Return the partition of a range's state; None if all holders keep all of it."""

    def copy_buffers(self, layers: LayerRange) -> Mapping[Span, Tensor]:
        """Return the buffers for the sums of parts of which this worker keeps a copy."""

    def flat_parameters(self) -> Iterable[tuple[LayerRange, Tensor, StatePartition]]:
        """Iterate over the ranges with sharded state, whose parameters are gathered after a step."""

    def mark_gathering(self, iteration: int) -> None:
        """Mark the parameters as being gathered after an iteration."""

    def mark_gathered(self, iteration: int) -> None:
        """Mark the parameters as those after an iteration."""

    def start_copy_steps(self) -> None:
        """Start the steps of copies of others' state."""


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
        """Return this worker's share of the mean loss of the micro-batches run since the last call."""

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
        """Last iteration whose step is known to be right, with its factor; None before the first."""

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
