"""A rehearsal runs each kind of op once before anything is communicated over NCCL.

CUDA loads a kernel when it is first launched, and may wait for the device to be idle to do so (CUDA C++ Programming
Guide, "Lazy Loading", on concurrent execution). A receive that NCCL has begun keeps the device busy until its sender is
there, which may be waiting for this worker in turn.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.model.computing.slices import SliceRunner
from slipstream.runtime.model.data.data import Microbatch
from slipstream.runtime.model.layers.calling import Batch
from slipstream.runtime.model.passed import Form, gradient_form, made
from slipstream.runtime.model.state.part_optimizer import PartOptimizer


class Rehearsal:
    """Knows for which kinds of layers this process has run F, I and W, and for which dtypes O."""

    def __init__(self) -> None:
        self._known = set[Hashable]()

    def run(self, runner: SliceRunner, takes: Form, gives: Form, read: Callable[[Microbatch], Batch],
            microbatch: Microbatch) -> None:
        """Run F, I and W of a slice, unless slices of such layers were run before.

        The gradients that this leaves are to be set to zero; buffers and losses are as before.

        Parameters
        ----------
        takes, gives
            The forms of what goes into the slice and of what comes out.
        read
            Returns the data of a micro-batch.
        microbatch
            Whose data to run; its tensors do not count.
        """
        if not self._is_new((runner.first, runner.last, *map(_kind_of, runner.modules))):
            return
        buffers = [(buffer, buffer.clone()) for module in runner.modules for buffer in module.buffers()]
        batch = read(microbatch) if runner.reads_batch else None
        value = batch[0] if batch is not None and runner.first else made(takes, _zeros(runner.device))
        runner.forward(microbatch, value, batch[1] if batch is not None and runner.last else None, batch, split=True)
        gradient = None if runner.last else made(gradient_form(gives), _zeros(runner.device))
        runner.backward_input(microbatch, gradient)
        runner.backward_weight(microbatch)
        runner.take_loss()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    def run_step(self, modules: Iterable[nn.Module], config: TrainingConfig) -> None:
        """Run O on a small parameter for each dtype of the modules, sum up what it leaves, and undo it, unless that was
        done before.

        The modules themselves stay as they are.
        """
        likes = {one.dtype: one for module in modules for one in module.parameters() if one.requires_grad}
        if not likes or not self._is_new(frozenset(likes)):
            return
        small = nn.ParameterList(nn.Parameter(torch.zeros(2, 2, dtype=like.dtype, device=like.device))
                                 for like in likes.values())
        for parameter in small:
            parameter.grad = torch.zeros_like(parameter)
        span = (0, sum(parameter.numel() for parameter in small))
        optimizer = PartOptimizer({0: small}, config, {0: (span,)}, {0: (span,)})
        optimizer.squares()
        optimizer.step(0, 0.5)  # a factor, as if gradients were clipped
        optimizer.gathered(0)
        list(optimizer.checksums(0))
        optimizer.undo()

    def _is_new(self, kind: Hashable) -> bool:
        """Return whether this kind is asked about for the first time, and remember it."""
        new = kind not in self._known
        self._known.add(kind)
        return new


def _kind_of(module: nn.Module) -> Hashable:
    """Return what decides which kernels a layer uses: its class, and the shapes and dtypes of its parameters."""
    return type(module), tuple((tuple(one.shape), one.dtype) for one in module.parameters())


def _zeros(device: torch.device) -> Callable[[tuple[int, ...], torch.dtype], Any]:
    return lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device)
