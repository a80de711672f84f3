"""Experts as grouped products: tokens are sorted by expert, so that no shape depends on how they are routed.

Other than torch's grouped_mm it takes any dtype, and leaves the gradients of experts' weights to W. transformers runs
it for `experts_implementation = "slipstream"`, which is what a model has unless it names another.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula
from transformers.integrations.moe import ExpertsInterface

from slipstream.runtime.model.layers.split import weight_work

NAME = "slipstream"


@torch.library.custom_op("slipstream::grouped_product", mutates_args=())
def grouped_product(value: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows [S, n] times the matrix of their group [E, n, m]: [S, m]. Group e ends at row `ends[e]`, int32 [E]."""
    if _is_native(value, weight.shape[2]):
        return functional.grouped_mm(value, weight, offs=ends)
    result = value.new_zeros(value.shape[0], weight.shape[2])
    for group, (begin, end) in enumerate(_ranges(ends)):
        torch.mm(value[begin:end], weight[group], out=result[begin:end])
    return result


@grouped_product.register_fake
def _(value: Tensor, weight: Tensor, ends: Tensor) -> Tensor:  # noqa: ARG001  # as the op itself
    return value.new_empty(value.shape[0], weight.shape[2])


@register_flop_formula(torch.ops.slipstream.grouped_product)
def _flops(value: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    """For MFU (`runtime.model.layers.flops`): two for each product of a number with a weight."""
    return 2 * value[0] * value[1] * weight[2]


class _GroupedLinear(torch.autograd.Function):
    """`functional.linear` by group: weights [E, m, n]."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        used = weight.to(value.dtype)
        ctx.save_for_backward(value, used, ends)
        ctx.weight, ctx.work = weight, weight_work()
        product: Tensor = grouped_product(value, used.transpose(1, 2), ends)
        return product

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        value, used, ends = ctx.saved_tensors
        gradient = gradient.contiguous()
        of_value = grouped_product(gradient, used, ends) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_value, None, None
        find = partial(_weight_gradient, value, gradient, ends, ctx.weight)
        if ctx.work is None:
            return of_value, find(), None
        ctx.work.append(partial(_add, ctx.weight, find))
        return of_value, None, None


def run_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Features [N, C] through the experts [N, k] that each token has chosen, weighted [N, k]: [N, C]."""
    experts: Any = self
    tokens, choices = top_k_index.shape
    order = top_k_index.flatten().argsort(stable=True)
    chosen = functional.one_hot(top_k_index, experts.num_experts).sum((0, 1))
    ends = chosen.cumsum(0).int()
    value = hidden_states[order // choices]
    if torch.is_autocast_enabled(value.device.type) and value.dtype == torch.float32:
        value = value.to(torch.get_autocast_dtype(value.device.type))
    gate, up = _linear(value, experts.gate_up_proj, ends).chunk(2, -1)
    given = _linear(experts.act_fn(gate) * up, experts.down_proj, ends)
    weighted = given * top_k_weights.flatten()[order, None]
    result = torch.empty_like(weighted).index_copy(0, order, weighted)
    return result.view(tokens, choices, -1).sum(1).to(hidden_states.dtype)


def register() -> None:
    """Have transformers know of this."""
    ExpertsInterface.register(NAME, run_experts)


def _linear(value: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    result: Tensor = _GroupedLinear.apply(value, weight, ends)  # type: ignore[no-untyped-call]
    return result


@torch.no_grad()
def _weight_gradient(value: Tensor, gradient: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
    if _is_native(value, gradient.shape[1]):
        return functional.grouped_mm(gradient.t(), value, offs=ends).to(weight.dtype)
    result = torch.zeros_like(weight)
    for group, (begin, end) in enumerate(_ranges(ends)):
        result[group] = gradient[begin:end].t() @ value[begin:end]
    return result


def _add(weight: Tensor, find: Any) -> None:
    if weight.grad is None:
        weight.grad = find()
    else:
        weight.grad.add_(find())


def _is_native(value: Tensor, width: int) -> bool:
    """Whether torch has one kernel for all groups, which does not ask the GPU where they end."""
    return value.is_cuda and value.dtype == torch.bfloat16 and value.shape[1] % 8 == 0 and width % 8 == 0


def _ranges(ends: Tensor) -> list[tuple[int, int]]:
    return list(pairwise([0, *ends.tolist()]))
