"""Optimizer steps that are made late: each once its iteration is committed, so that none is ever undone.

A buddy steps its copies of another worker's parts like this, so that nobody waits for them. The gradients of an
iteration lie in a buffer of their own until all workers are known to have stepped it. Then the step is made in a
thread, beside what is computed, and on a GPU on a stream of its own. There are two such buffers, in the place of copies
by which steps are undone, and what is stepped stays at an iteration that is committed.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.runtime.beside import Beside
from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.model.state.parameter_groups import Groups
from slipstream.runtime.model.state.undoable_steps import OptimizerSteps
from slipstream.runtime.model.state.version import Version

BUFFERS = 2
"""Of gradients: those of the iteration that all are in, and of the one before, by which the thread steps."""


class _Due(NamedTuple):
    """A step that is to be made."""

    iteration: int
    factor: float | None
    buffer: int


class LateSteps(OptimizerSteps):
    """`gradients` are, for each of the buffers, those of each tensor that is stepped."""

    def __init__(self, groups: Groups, config: TrainingConfig,
                 gradients: Sequence[Mapping[nn.Parameter, Tensor]]) -> None:
        super().__init__(groups, config)
        self._gradients = gradients
        self._due: _Due | None = None
        """The last step: made once it is known to stand."""
        self._stands: _Due | None = None
        """The one before it, until it is begun."""
        self.version = Version(-1)
        """Of what is stepped: the steps that have been made cannot be undone."""
        self._buffer = 0
        self._beside = Beside(next((one.device for one in gradients[0].values()), torch.device("cpu")),
                              "steps of copies")

    @property
    def free(self) -> int:
        """The buffer for the gradients of the next step; waits for what is stepped by it."""
        self._wait()
        return self._buffer

    def step(self, iteration: int, factor: float | None) -> None:
        """A step by the gradients in the free buffer, times a factor; the one before it stands, and may begin. None:
        there is no step."""
        self._wait()
        self._stands, self._due = self._due, _Due(iteration, factor, self._buffer)
        self._buffer = (self._buffer + 1) % BUFFERS

    def begin(self) -> None:
        """What stands is stepped from now on, beside what is computed."""
        stands, self._stands = self._stands, None
        if stands is not None:
            self._beside.begin(partial(self._make, stands))

    def undo(self, iteration: int) -> None:
        """That iteration's step is not made. It may be made otherwise, by the same gradients."""
        if self._due is not None and self._due.iteration == iteration:
            self._buffer, self._due = self._due.buffer, None

    def catch_up(self) -> None:
        """Make all steps: the last one stands, too."""
        self._wait()
        due, self._due = self._due, None
        if due is not None:
            self._make(due)

    def bytes(self) -> int:
        """Memory of all that is kept."""
        self._wait()
        buffers = [tensor for gradients in self._gradients for tensor in gradients.values()]
        return sum(tensor.nbytes for tensor in (*self._stepped(), *buffers)) + self._remembered_bytes()

    def _wait(self) -> None:
        """Until all that stands is stepped."""
        self.begin()
        self._beside.wait()

    def _make(self, due: _Due) -> None:
        self.version.require(due.iteration - 1, "a copy of another worker's part")
        if due.factor is None:
            self.version = Version(due.iteration)
            return
        self.version = Version(due.iteration, whole=False)
        gradients = list(self._gradients[due.buffer].items())
        self._set_rates(due.iteration)
        # Gradients of fewer bits are made longer one by one, so that there is no second buffer of them.
        alike = all(stepped.dtype == gradient.dtype for stepped, gradient in gradients)
        for some in [gradients] if alike else [[pair] for pair in gradients]:
            for stepped, gradient in some:
                stepped.grad = gradient.to(stepped.dtype)
                if due.factor != 1.0:
                    stepped.grad.mul_(due.factor)
            self._update()
            for stepped, _ in some:
                stepped.grad = None
        self.version = Version(due.iteration)
