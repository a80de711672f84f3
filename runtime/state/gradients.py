"""Give parameters flat gradients, and record which got one in an iteration.

As in torch, a parameter that no micro-batch of an iteration uses has no gradient: neither its
weight decay nor its momentum acts on it. But gradients here are views of one tensor, to be reduced
in one sum, so zeros do not say whether anything was added to them. Each worker therefore marks the
parameters that it has used, and the marks are summed with the gradients.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.runtime.state.parts import StatePartition
from slipstream.runtime.torch_private import count_changes


class GradientBuffer(NamedTuple):
    """Gradients of some parameters in one flat tensor, and a mark for each parameter.

    A mark is 1 if this worker has added something to the parameter's gradient, otherwise 0.
    """

    values: Tensor
    """Gradients of all parameters, one after the other, perhaps padded."""
    marks: Tensor
    """Mark of each parameter; summed over workers, above 0 if any has used it."""
    sums: tuple[Tensor, ...]
    """Tensors that contain values and marks, to be summed over workers."""
    parameters: tuple[nn.Parameter, ...]
    views: tuple[Tensor, ...]
    """`.grad` of each parameter: its part of `values`, whose changes are counted separately."""
    changes: list[int]
    """Count of changes of each view (`count_changes`) when it was set to zero."""

    def find_untouched(self) -> list[int]:
        """Return the indices of the parameters to whose gradients this worker has added nothing.

        If `.grad` has been replaced, its value is copied to the view, which is `.grad` again.
        """
        for parameter, view in zip(self.parameters, self.views, strict=True):
            # A user's function, or a backward with create_graph, does that.
            if parameter.grad is not view:
                if parameter.grad is not None:
                    view.copy_(parameter.grad.detach())
                parameter.grad = view
        return [
            index
            for index, (view, before) in enumerate(zip(self.views, self.changes, strict=True))
            if count_changes(view) == before
        ]

    def mark_touched(self) -> None:
        """Set the marks of the parameters to whose gradients this worker has added something."""
        untouched = self.find_untouched()
        # The usual case, that all were used, takes no copy to the device.
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
    """Return the parameters that no worker has used, given marks summed over workers."""
    # Only marks of parameters that this worker has not used itself are read, as that waits for the
    # device.
    untouched = [(buffer, indices) for buffer in buffers if (indices := buffer.find_untouched())]
    if not untouched:
        return frozenset()
    parameters = [buffer.parameters[index] for buffer, indices in untouched for index in indices]
    # One copy from the device for all buffers.
    marks = torch.cat([buffer.marks[indices].double() for buffer, indices in untouched]).tolist()
    return frozenset(
        parameter for parameter, mark in zip(parameters, marks, strict=True) if mark == 0.0
    )


def allocate_gradients(
    parameters: Sequence[nn.Parameter],
    dtype: torch.dtype | None = None,
    cut: StatePartition | None = None,
) -> list[GradientBuffer]:
    """Give trained parameters zero gradients, which are views of one flat tensor for each dtype.

    Gradients have the dtype `dtype`; None: each parameter's own. With `cut`, the flat tensors are
    padded to its `padded_length`. Returns a buffer for each dtype.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(dtype or parameter.dtype, []).append(parameter)
    return [_allocate_buffer(group, kind, cut) for kind, group in by_dtype.items()]


def _allocate_buffer(
    parameters: Sequence[nn.Parameter], dtype: torch.dtype, cut: StatePartition | None
) -> GradientBuffer:
    sizes, device = [parameter.numel() for parameter in parameters], parameters[0].device
    length = sum(sizes) if cut is None else max(sum(sizes), cut.padded_length)
    # Parts of the values are summed at their owners, the marks at all members.
    if cut is not None and cut.sharded:
        values = torch.zeros(length, dtype=dtype, device=device)
        marks = torch.zeros(len(parameters), dtype=dtype, device=device)
        sums: tuple[Tensor, ...] = (values, marks)
    else:
        # Values and marks in one tensor are summed in one transfer.
        sums = (torch.zeros(length + len(parameters), dtype=dtype, device=device),)
        values, marks = sums[0][:length], sums[0][length:]
    views = []
    for parameter, view in zip(parameters, torch.split(values[: sum(sizes)], sizes), strict=True):
        if dtype != parameter.dtype:
            parameter.grad_dtype = dtype
        # `.data`, unlike a view, has a count of changes of its own.
        parameter.grad = view.view_as(parameter).data
        views.append(parameter.grad)
    return GradientBuffer(
        values,
        marks,
        sums,
        tuple(parameters),
        tuple(views),
        [count_changes(view) for view in views],
    )
