"""Give parameters flat gradients, and record which got one in an iteration.

As in torch, a parameter that no micro-batch of an iteration uses has no gradient: neither its
weight decay nor its momentum acts on it. But gradients here are views of one tensor, so that a
reduction is one sum, and zeros do not say whether anything was added to them. Each worker therefore
marks the parameters to whose gradients something was added, and the marks are summed with the
gradients: a parameter that any worker has used is used.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.runtime.state.parts import StatePartition
from slipstream.runtime.torch_private import count_changes


class GradientBuffer(NamedTuple):
    """Gradients of some parameters, in one flat tensor, and their marks."""

    values: Tensor
    """Gradients of all parameters, one after the other, perhaps padded."""
    marks: Tensor
    """One number for each parameter, above 0 in the sum if it was used."""
    sums: tuple[Tensor, ...]
    """Tensors that contain values and marks, to be summed over workers."""
    parameters: tuple[nn.Parameter, ...]
    views: tuple[Tensor, ...]
    """`.grad` of each parameter: its part of `values`, with its own count of changes."""
    changes: list[int]
    """Count of changes of each view (`count_changes`) when it was set to zero."""

    def find_untouched(self) -> list[int]:
        """Return the indices of the parameters to whose gradients this worker added nothing."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is not view:  # a user's function, or a backward with create_graph, has replaced it
                if parameter.grad is not None:
                    view.copy_(parameter.grad.detach())
                parameter.grad = view
        return [index for index, (view, before) in enumerate(zip(self.views, self.changes, strict=True))
                if count_changes(view) == before]

    def mark_touched(self) -> None:
        """Set the marks of the parameters to whose gradients this worker has added something."""
        untouched = self.find_untouched()
        if not untouched:
            self.marks.fill_(1.0)
        elif len(untouched) < len(self.parameters):
            touched = torch.ones(len(self.parameters), dtype=self.marks.dtype)
            touched[untouched] = 0.0
            self.marks.copy_(touched)

    def set_to_zero(self) -> None:
        """Set gradients and marks to zero."""
        for tensor in self.sums:
            tensor.zero_()
        self.changes[:] = map(count_changes, self.views)


def find_unused(buffers: Iterable[GradientBuffer]) -> frozenset[nn.Parameter]:
    """Return the parameters that no worker has used, once all marks have been summed. Only marks of
    parameters that this worker has not used itself are read, as that waits for the device."""
    untouched = [(buffer, found) for buffer in buffers if (found := buffer.find_untouched())]
    marks = torch.cat([buffer.marks[found].double() for buffer, found in untouched]).tolist() if untouched else []
    parameters = [buffer.parameters[index] for buffer, found in untouched for index in found]
    return frozenset(parameter for parameter, mark in zip(parameters, marks, strict=True) if mark == 0.0)


def allocate_gradients(parameters: Sequence[nn.Parameter], dtype: torch.dtype | None = None,
                       cut: StatePartition | None = None) -> list[GradientBuffer]:
    """Give parameters zero gradients, views of one flat tensor for each dtype.

    Returns the buffers. The gradients have the given dtype; with None, each has that of its
    parameter. With `cut`, the flat tensors are padded to its `padded_length`.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(dtype or parameter.dtype, []).append(parameter)
    return [_allocate_buffer(group, kind, cut) for kind, group in by_dtype.items()]


def _allocate_buffer(parameters: Sequence[nn.Parameter], dtype: torch.dtype, cut: StatePartition | None
                     ) -> GradientBuffer:
    sizes, device = [parameter.numel() for parameter in parameters], parameters[0].device
    length = sum(sizes) if cut is None else max(sum(sizes), cut.padded_length)
    if cut is not None and cut.sharded:  # parts of the values are summed at their owners, the marks at all members
        values = torch.zeros(length, dtype=dtype, device=device)
        marks = torch.zeros(len(parameters), dtype=dtype, device=device)
        sums: tuple[Tensor, ...] = (values, marks)
    else:
        sums = (torch.zeros(length + len(parameters), dtype=dtype, device=device),)
        values, marks = sums[0][:length], sums[0][length:]
    views = []
    for parameter, view in zip(parameters, torch.split(values[:sum(sizes)], sizes), strict=True):
        if dtype != parameter.dtype:
            parameter.grad_dtype = dtype
        # `.data`, unlike a view, has a count of changes of its own.
        parameter.grad = view.view_as(parameter).data
        views.append(parameter.grad)
    return GradientBuffer(values, marks, sums, tuple(parameters), tuple(views), [count_changes(view) for view in views])
