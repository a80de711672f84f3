"""Rehearse: run each kind of op once before anything is communicated over NCCL.

CUDA loads a kernel when it is first launched, and may wait for the device to be idle to do so (CUDA
C++ Programming Guide, "Lazy Loading", on concurrent execution). A receive that NCCL has begun keeps
the device busy until its sender arrives, and the sender may be waiting for this worker in turn.
"""

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn

from slipstream.runtime.computing.slices import SliceRunner
from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.data.data import Microbatch
from slipstream.runtime.models.calling import Batch
from slipstream.runtime.replay.layer_values import Form, Value, allocate_value, gradient_form
from slipstream.runtime.state.part_optimizer import PartOptimizer


class Rehearsal:
    """Runs each kind of layers once, on discarded data, so that CUDA loads its kernels."""

    def __init__(self) -> None:
        self._kinds = set[Hashable]()
        """Kinds of layers, and of steps, that have been run."""

    def run(
        self,
        runner: SliceRunner,
        takes: Form,
        gives: Form,
        read: Callable[[Microbatch], Batch],
        microbatch: Microbatch,
    ) -> None:
        """Run F, I and W of a slice once, unless its kind has been run.

        A kind is the classes and parameter forms of its layers, and whether it is the first or last
        slice. Buffers are left unchanged, and losses dropped; the caller must set the gradients to
        zero.

        Parameters
        ----------
        takes, gives
            Forms (shapes and dtypes) of the input and the output of the slice.
        read
            Function that returns the data of a micro-batch.
        microbatch
            Micro-batch whose data are used; the result is discarded.
        """
        if not self._is_new((runner.first, runner.last, *map(_kind_of, runner.modules))):
            return
        buffers = [
            (buffer, buffer.clone()) for module in runner.modules for buffer in module.buffers()
        ]
        # Inputs from other slices are zeros; what is computed does not matter.
        batch = read(microbatch) if runner.reads_batch else None
        if batch is not None and runner.first:
            value: Value = batch[0]
        else:
            value = allocate_value(takes, _zeros_on(runner.device))
        target = batch[1] if batch is not None and runner.last else None
        runner.forward(microbatch, value, target, batch, split=True)
        # The ops in the order of a micro-batch; then undo what they have changed.
        gradient = None
        if not runner.last:
            gradient = allocate_value(gradient_form(gives), _zeros_on(runner.device))
        runner.backward_input(microbatch, gradient)
        runner.backward_weight(microbatch)
        runner.take_loss()
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    def run_step(self, modules: Iterable[nn.Module], config: TrainingConfig) -> None:
        """Run O once on a small parameter of each dtype, and undo it.

        Nothing is run for dtypes that have been run together before.
        """
        example_of = {
            parameter.dtype: parameter
            for module in modules
            for parameter in module.parameters()
            if parameter.requires_grad
        }
        if not example_of or not self._is_new(frozenset(example_of)):
            return
        # Kernels depend on the dtype, and not on the size.
        small = nn.ParameterList(
            nn.Parameter(torch.zeros(2, 2, dtype=example.dtype, device=example.device))
            for example in example_of.values()
        )
        for parameter in small:
            parameter.grad = torch.zeros_like(parameter)
        # All that a member does with its parameters in an iteration.
        span = (0, sum(parameter.numel() for parameter in small))
        optimizer = PartOptimizer({0: small}, config, {0: (span,)}, {0: (span,)})
        optimizer.layer_squares()
        optimizer.step(0, 0.5)  # a factor other than 1, as for clipped gradients
        optimizer.mark_gathered(0)
        list(optimizer.compute_checksums(0))
        optimizer.undo()

    def _is_new(self, kind: Hashable) -> bool:
        is_new = kind not in self._kinds
        self._kinds.add(kind)
        return is_new


def _kind_of(module: nn.Module) -> Hashable:
    parameters = module.parameters()
    return type(module), tuple((tuple(tensor.shape), tensor.dtype) for tensor in parameters)


def _zeros_on(device: torch.device) -> Callable[[tuple[int, ...], torch.dtype], Any]:
    return lambda shape, dtype: torch.zeros(shape, dtype=dtype, device=device)
