"""Make optimizer steps late: after their iteration is committed, so that none is undone.

A buddy steps its copies of another worker's parts in this way, so that no worker waits for them.
The gradients of an iteration stay in a buffer of their own until all workers are known to have
stepped it. Then the step is made in a thread, concurrently with computation, and on a GPU on a
stream of its own. Two such buffers for each part replace the copies by which steps are undone; the
copies themselves are always the state after a committed iteration.
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
"""Gradient buffers: for the current iteration, and for the one whose step the thread makes."""


class _DueStep(NamedTuple):
    """Step of copies of others' parts that is registered and still to be made."""

    iteration: int
    factor: float | None
    buffer: int
    unused: Collection[nn.Parameter]


class LateSteps(OptimizerSteps):
    """Optimizer of copies of other workers' parts, one commit late. For each gradient buffer,
    `gradients` maps the stepped tensors to their gradients in that buffer."""

    def __init__(self, groups: OptimizerGroups, config: TrainingConfig,
                 gradients: Sequence[Mapping[nn.Parameter, Tensor]]) -> None:
        super().__init__(groups, config)
        self._gradients = gradients
        self._last_step: _DueStep | None = None
        """Step that was registered last; it is made once its iteration is committed."""
        self._committed_step: _DueStep | None = None
        """Step of the iteration before `_last_step`, which is committed; None once the step is
        started."""
        self.version = Version(-1)
        """Version of the stepped tensors; steps that have been made cannot be undone."""
        self._buffer = 0
        self._queue = BackgroundQueue(next((one.device for one in gradients[0].values()), torch.device("cpu")),
                                      "steps of copies")

    @property
    def free_buffer(self) -> int:
        """Index of the buffer for the gradients of the next step. Waits until no step reads it."""
        self._wait_for_step()
        return self._buffer

    def register_step(self, iteration: int, factor: float | None, unused: Collection[nn.Parameter] = ()) -> None:
        """Register a step with the gradients in the free buffer times `factor` (None: no step).

        The parameters in `unused` stay as they are. The iteration of the step registered before
        counts as committed from now on.
        """
        self._wait_for_step()
        self._committed_step, self._last_step = self._last_step, _DueStep(
            iteration, factor, self._buffer, frozenset(unused))
        self._buffer = (self._buffer + 1) % GRADIENT_BUFFERS

    def start_committed(self) -> None:
        """Start the step of the last committed iteration, unless it was started before. It runs
        concurrently with computation. That iteration is the one before the last registered one."""
        committed, self._committed_step = self._committed_step, None
        if committed is not None:
            self._queue.submit(partial(self._run_step, committed))

    def cancel_step(self, iteration: int) -> None:
        """Cancel the registered step of an iteration, which must not be committed. It may be
        registered again, with another factor and the same gradients."""
        if self._last_step is not None and self._last_step.iteration == iteration:
            self._buffer, self._last_step = self._last_step.buffer, None

    def catch_up(self) -> None:
        """Make all registered steps now; the iteration of the last one must be committed, too."""
        self._wait_for_step()
        due, self._last_step = self._last_step, None
        if due is not None:
            self._run_step(due)

    def memory_bytes(self) -> int:
        """Return the bytes of the stepped copies, their gradient buffers and optimizer state."""
        self._wait_for_step()
        buffers = [tensor for gradients in self._gradients for tensor in gradients.values()]
        return sum(tensor.nbytes for tensor in (*self._stepped_parameters(), *buffers)) + self._state_bytes()

    def _wait_for_step(self) -> None:
        """Start the step of the last committed iteration, if necessary, and wait for it."""
        self.start_committed()
        self._queue.wait()

    def _run_step(self, due: _DueStep) -> None:
        """Make a registered step. Raises VersionError unless the copies are of the iteration
        before."""
        self.version.require(due.iteration - 1, "a copy of another worker's part")
        if due.factor is None:
            self.version = Version(due.iteration)
            return
        self.version = Version(due.iteration, whole=False)
        gradients = [pair for pair in self._gradients[due.buffer].items() if pair[0] not in due.unused]
        self._set_rates(due.iteration)
        # Gradients of fewer bits are converted one by one, so that there is no second buffer of them.
        same_dtype = all(stepped.dtype == gradient.dtype for stepped, gradient in gradients)
        for batch in [gradients] if same_dtype else [[pair] for pair in gradients]:
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
    """Gradient buffers, two each, of the parts of which one worker keeps copies."""

    def __init__(self) -> None:
        self._buffers: dict[LayerRange, dict[Span, list[Tensor]]] = {}

    def allocate(self, layers: LayerRange, cut: StatePartition, worker: Worker, dtype: torch.dtype,
                 device: torch.device) -> None:
        """Allocate two gradient buffers for each part of `layers` that `worker` copies, by
        `cut`."""
        self._buffers[layers] = {span: [torch.zeros(span[1] - span[0], dtype=dtype, device=device)
                                        for _ in range(GRADIENT_BUFFERS)] for span in cut.copied_parts(worker)}

    def buffers_of(self, layers: LayerRange, buffer: int) -> Mapping[Span, Tensor]:
        """Return one of the two gradient buffers of each copied part of `layers`, by span.

        Of the buffers 0 and 1, one sums the gradients of the current iteration, the other holds
        those of the iteration before; they change roles at each step (`LateSteps.free_buffer`).
        """
        return {span: buffers[buffer] for span, buffers in self._buffers.get(layers, {}).items()}

    def by_layer(self, elements: Callable[[int], int]) -> CopyBuffers:
        """Return the buffers of all copied parts, by layer and span within it. The function
        `elements` returns the number of a layer's elements that are cut into parts."""
        sums: dict[tuple[int, Span], Sequence[Tensor]] = {}
        for layers, spans in self._buffers.items():
            for span, buffers in spans.items():
                start = 0
                for layer, part in split_by_layer(span, layers, elements):
                    end = start + part[1] - part[0]
                    sums[layer, part] = [buffer[start:end] for buffer in buffers]
                    start = end
        return sums
