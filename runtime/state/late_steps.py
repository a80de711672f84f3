"""Make optimizer steps late: after their iteration is committed, so that none is undone.

A buddy steps its copies of another worker's parts in this way, so that no worker waits for them.
Gradients stay in a buffer of their own until all workers are known to have stepped the iteration.
Then the step is made in a thread, concurrently with computation, and on a GPU on its own stream.
Two such buffers for each part replace the copies by which steps are undone; the copied parts are
always the state after a committed iteration.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.replay.background_queue import BackgroundQueue
from slipstream.runtime.state.parameter_groups import OptimizerGroups
from slipstream.runtime.state.parts import Span, StatePartition, Version, split_by_layer
from slipstream.runtime.state.undoable_steps import OptimizerSteps
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker

GRADIENT_BUFFERS = 2
"""Number of gradient buffers: one being filled, and one whose step the thread makes."""


class _DueStep(NamedTuple):
    """Step of copies of other workers' parts that is still to be made."""

    iteration: int
    factor: float | None
    buffer: int
    unused: Collection[nn.Parameter]


class LateSteps(OptimizerSteps):
    """Optimizer of copies of other workers' parts, whose steps are made one commit late.

    `gradients` has, for each of the `GRADIENT_BUFFERS`, the gradients by stepped tensor. What
    waits for a step first makes the committed one, and raises the error of one that failed.
    """

    def __init__(
        self,
        groups: OptimizerGroups,
        config: TrainingConfig,
        gradients: Sequence[Mapping[nn.Parameter, Tensor]],
    ) -> None:
        super().__init__(groups, config)
        self._gradients = gradients
        self._last_step: _DueStep | None = None
        """Step that was registered last, to be made once its iteration is committed."""
        self._committed_step: _DueStep | None = None
        """Step of the iteration before, which is committed; None once it is started."""
        self.version = Version(-1)
        self._buffer = 0
        devices = (gradient.device for gradient in gradients[0].values())
        self._queue = BackgroundQueue(next(devices, torch.device("cpu")), "steps of copies")

    @property
    def free_buffer(self) -> int:
        """Index of the buffer for the next step's gradients; waits until no step reads it."""
        self._wait_for_step()
        return self._buffer

    def register_step(
        self, iteration: int, factor: float | None, unused: Collection[nn.Parameter] = ()
    ) -> None:
        """Remember a step, to be made later with the gradients in the `free_buffer`.

        They are multiplied by `factor`; if it is None, all parameters stay as they are. Those in
        `unused` always do. The step that was registered before counts as committed, and will be
        made; for the one before that, this waits. From now on, another buffer is the free one.
        """
        self._wait_for_step()
        # All workers have stepped the iteration before, or this one could not step.
        self._committed_step, self._last_step = (
            self._last_step,
            _DueStep(iteration, factor, self._buffer, frozenset(unused)),
        )
        self._buffer = (self._buffer + 1) % GRADIENT_BUFFERS

    def start_committed(self) -> None:
        """Start the committed step in the background, unless it was started before."""
        committed, self._committed_step = self._committed_step, None
        if committed is not None:
            self._queue.submit(partial(self._run_step, committed))

    def cancel_step(self, iteration: int) -> None:
        """Forget the registered step of an iteration, which is not committed."""
        # It may be registered again, with another factor and the same gradients.
        if self._last_step is not None and self._last_step.iteration == iteration:
            self._buffer, self._last_step = self._last_step.buffer, None

    def catch_up(self) -> None:
        """Make all registered steps now; the iteration of the last must be committed, too."""
        self._wait_for_step()
        due, self._last_step = self._last_step, None
        if due is not None:
            self._run_step(due)

    def memory_bytes(self) -> int:
        """Return the bytes of the stepped copies, their gradient buffers and optimizer state."""
        self._wait_for_step()
        buffers = [tensor for gradients in self._gradients for tensor in gradients.values()]
        return (
            sum(tensor.nbytes for tensor in (*self._stepped_parameters(), *buffers))
            + self._state_bytes()
        )

    def _wait_for_step(self) -> None:
        """Start the committed step unless it was started, and wait for it."""
        self.start_committed()
        self._queue.wait()

    def _run_step(self, due: _DueStep) -> None:
        self.version.require(due.iteration - 1, "a copy of another worker's part")
        # A skipped step changes the version alone.
        if due.factor is None:
            self.version = Version(due.iteration)
            return
        # If this fails midway, nothing may use the mixture of two states.
        self.version = Version(due.iteration, whole=False)
        gradients = [
            pair for pair in self._gradients[due.buffer].items() if pair[0] not in due.unused
        ]
        self._set_rates(due.iteration)
        batches = [gradients]
        if any(stepped.dtype != gradient.dtype for stepped, gradient in gradients):
            # Gradients of fewer bits are converted one by one, to have no second buffer of them.
            batches = [[pair] for pair in gradients]
        for batch in batches:
            for stepped, gradient in batch:
                stepped.grad = gradient.to(stepped.dtype)
                if due.factor != 1.0:
                    stepped.grad.mul_(due.factor)
            self._apply_update()
            for stepped, _ in batch:
                stepped.grad = None
        self.version = Version(due.iteration)


CopyBuffers = Mapping[tuple[int, Span], Sequence[Tensor]]
"""Buffers for the gradient sums of each copied part, by layer and span."""


class CopyGradients:
    """Gradient buffers, two for each part of which this worker keeps a copy."""

    def __init__(self) -> None:
        self._buffers: dict[LayerRange, dict[Span, list[Tensor]]] = {}

    def allocate(
        self,
        layers: LayerRange,
        cut: StatePartition,
        worker: Worker,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate buffers for the gradients of those parts of `layers` that `worker` copies."""
        buffers_by_span: dict[Span, list[Tensor]] = {}
        for span in cut.copied_parts(worker):
            length = span[1] - span[0]
            buffers_by_span[span] = [
                torch.zeros(length, dtype=dtype, device=device) for _ in range(GRADIENT_BUFFERS)
            ]
        self._buffers[layers] = buffers_by_span

    def buffers_of(self, layers: LayerRange, buffer: int) -> Mapping[Span, Tensor]:
        """Return one gradient buffer of each copied part of `layers`, by the part's span.

        `buffer` is the index of this one among the buffers of each part.
        """
        buffers_by_span = self._buffers.get(layers, {})
        return {span: buffers[buffer] for span, buffers in buffers_by_span.items()}

    def by_layer(self, elements: Callable[[int], int]) -> CopyBuffers:
        """Return the buffers of all copied parts, by layer and span within it.

        `elements` returns how many elements of a layer are cut into parts.
        """
        sums: dict[tuple[int, Span], Sequence[Tensor]] = {}
        for layers, spans in self._buffers.items():
            for span, buffers in spans.items():
                # One buffer has the part of a range; layers get their pieces of it as views.
                start = 0
                for layer, part in split_by_layer(span, layers, elements):
                    end = start + part[1] - part[0]
                    sums[layer, part] = [buffer[start:end] for buffer in buffers]
                    start = end
        return sums
