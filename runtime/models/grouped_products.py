"""Multiply rows, sorted by group, with the matrices of their groups, for experts.

No shape depends on the routing. Unlike torch's grouped_mm, the products support any dtype, and
leave the gradients of the matrices to W.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from slipstream.runtime.models.split_backward import weight_work


@torch.library.custom_op("slipstream::grouped_product", mutates_args=())
def grouped_product(
    value: Tensor,
    weight: Tensor,
    ends: Tensor,
    expected: int,  # noqa: ARG001
) -> Tensor:
    """Multiply rows [S, n] by their groups' matrices [E, n, m], into [S, m].

    Group e ends before row `ends[e]`, int32 [E]. Rows behind the last group have arbitrary values.
    `expected`, the rows of all groups if routing is even, only serves to count operations.
    """
    if _has_native_kernel(value, weight.shape[2]):
        return functional.grouped_mm(value, weight, offs=ends)
    # Elsewhere one product after the other, for which the CPU waits for `ends`.
    result = value.new_empty(value.shape[0], weight.shape[2])
    for group, (begin, end) in enumerate(_group_ranges(ends)):
        torch.mm(value[begin:end], weight[group], out=result[begin:end])
    return result


@grouped_product.register_fake
def _(value: Tensor, weight: Tensor, ends: Tensor, expected: int) -> Tensor:  # noqa: ARG001
    return value.new_empty(value.shape[0], weight.shape[2])


@register_flop_formula(torch.ops.slipstream.grouped_product)
def _product_flops(
    value: Sequence[int], weight: Sequence[int], _ends: Sequence[int], expected: int, **__: Any
) -> int:
    return 2 * expected * value[1] * weight[2]


class ExpertGroups(NamedTuple):
    """Ranges of rows, sorted by expert, that belong to the E experts on this rank."""

    ends: Tensor
    """Row at which each expert's rows end: int32 [E]."""
    outside: Tensor | None
    """True for each row of another rank's expert, bool [S, 1]. None if all experts are here."""
    expected: int
    """Rows that all experts on this rank get if routing is even, to count operations."""

    def product(self, value: Tensor, weight: Tensor) -> Tensor:
        """Multiply rows [S, n] by their experts' matrices [E, n, m], into [S, m].

        Rows of other ranks' experts become zero.
        """
        result: Tensor = grouped_product(value, weight, self.ends, self.expected)
        return result if self.outside is None else result.masked_fill_(self.outside, 0)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
        used = weight.to(value.dtype)
        ctx.save_for_backward(value, used)
        ctx.weight, ctx.groups, ctx.work = weight, groups, weight_work()
        return groups.product(value, used.transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        value, used = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_value = ctx.groups.product(gradient, used) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_value, None, None
        # With a split backward, W finds the matrices' gradient; else it is returned now.
        find = partial(_weight_gradient, value, gradient, ctx.groups.ends, ctx.weight)
        if ctx.work is None:
            return of_value, find(), None
        ctx.work.append(partial(_add_gradient, ctx.weight, find))
        return of_value, None, None


def grouped_linear(value: Tensor, weight: Tensor, groups: ExpertGroups) -> Tensor:
    """Multiply rows [S, n] by their experts' transposed matrices [E, m, n].

    The product is [S, m], and has the rows' dtype.
    """
    result: Tensor = _GroupedLinear.apply(value, weight, groups)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def _weight_gradient(value: Tensor, gradient: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
    # They are of the rows [S, n] and the gradients of their products [S, m].
    if _has_native_kernel(value, gradient.shape[1]):
        return functional.grouped_mm(gradient.t(), value, offs=ends).to(weight.dtype)
    result = torch.zeros_like(weight)
    for group, (begin, end) in enumerate(_group_ranges(ends)):
        result[group] = gradient[begin:end].t() @ value[begin:end]
    return result


def _add_gradient(weight: Tensor, find: Any) -> None:
    if weight.grad is None:
        weight.grad = find()
    else:
        weight.grad.add_(find())


def _has_native_kernel(value: Tensor, width: int) -> bool:
    """Return whether torch has one kernel for rows `value` by matrices [E, n, `width`]."""
    return (
        value.is_cuda
        and value.dtype == torch.bfloat16
        and value.shape[1] % 8 == 0
        and width % 8 == 0
    )


def _group_ranges(ends: Tensor) -> list[tuple[int, int]]:
    return list(pairwise([0, *ends.tolist()]))
