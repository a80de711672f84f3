"""Experts as grouped products: tokens are sorted by expert, so that no shape depends on how they are routed.

A rank of a worker may have some of the experts (`runtime.model.layers.hugging_face.parallel`). Tokens that have chosen
others are sorted behind its own, as there may be any number of them, and add nothing.

Other than torch's grouped_mm it takes any dtype, and leaves the gradients of experts' weights to W. transformers runs
it for `experts_implementation = "slipstream"`, which is what a model has unless it names another.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula
from transformers.integrations.moe import ExpertsInterface

from slipstream.runtime.model.layers.split import weight_work

NAME = "slipstream"


@torch.library.custom_op("slipstream::grouped_product", mutates_args=())
def grouped_product(value: Tensor, weight: Tensor, ends: Tensor, expected: int) -> Tensor:  # noqa: ARG001
    """Rows [S, n] times the matrix of their group [E, n, m]: [S, m]. Group e ends at row `ends[e]`, int32 [E].

    Rows behind the last group hold anything. `expected` is how many rows are in groups on average.
    """
    if _is_native(value, weight.shape[2]):
        return functional.grouped_mm(value, weight, offs=ends)
    result = value.new_empty(value.shape[0], weight.shape[2])
    for group, (begin, end) in enumerate(_ranges(ends)):
        torch.mm(value[begin:end], weight[group], out=result[begin:end])
    return result


@grouped_product.register_fake
def _(value: Tensor, weight: Tensor, ends: Tensor, expected: int) -> Tensor:  # noqa: ARG001  # as the op itself
    return value.new_empty(value.shape[0], weight.shape[2])


@register_flop_formula(torch.ops.slipstream.grouped_product)
def _flops(value: Sequence[int], weight: Sequence[int], _ends: Sequence[int], expected: int, **__: Any) -> int:
    """For MFU (`runtime.model.layers.flops`): two for each product of a number with a weight."""
    return 2 * expected * value[1] * weight[2]


class _Groups(NamedTuple):
    """The rows that each expert takes."""

    ends: Tensor
    """int32 [E]: where those of each expert end."""
    outside: Tensor | None
    """bool [S, 1]: whether a row belongs to an expert of another rank; None: all experts are here."""
    expected: int
    """How many rows belong to these experts on average."""

    def product(self, value: Tensor, weight: Tensor) -> Tensor:
        """Rows [S, n] times the matrices of their experts [E, n, m]; zeros outside."""
        result: Tensor = grouped_product(value, weight, self.ends, self.expected)
        return result if self.outside is None else result.masked_fill_(self.outside, 0)


class _GroupedLinear(torch.autograd.Function):
    """`functional.linear` by group: weights [E, m, n]."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, groups: _Groups) -> Tensor:
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
        find = partial(_weight_gradient, value, gradient, ctx.groups.ends, ctx.weight)
        if ctx.work is None:
            return of_value, find(), None
        ctx.work.append(partial(_add, ctx.weight, find))
        return of_value, None, None


def run_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Features [N, C] through the experts [N, k] that each token has chosen, weighted [N, k]: [N, C].

    Where the module has some of the experts, from `first_expert` on, it is what these add.
    """
    experts: Any = self
    (tokens, choices), every, here = top_k_index.shape, experts.num_experts, experts.gate_up_proj.shape[0]
    own_first = (top_k_index - getattr(experts, "first_expert", 0)) % every
    rows = tokens * min(choices, here)  # the choices of a token differ
    order = own_first.flatten().argsort(stable=True)[:rows]
    ends = functional.one_hot(own_first, every).sum((0, 1))[:here].cumsum(0).int()
    outside = None if here == every else torch.arange(rows, device=ends.device)[:, None] >= ends[-1]
    groups = _Groups(ends, outside, tokens * choices * here // every)
    value = hidden_states[order // choices]
    if torch.is_autocast_enabled(value.device.type) and value.dtype == torch.float32:
        value = value.to(torch.get_autocast_dtype(value.device.type))
    gate, up = _linear(value, experts.gate_up_proj, groups).chunk(2, -1)
    given = _linear(experts.act_fn(gate) * up, experts.down_proj, groups)
    weighted = given * top_k_weights.flatten()[order, None]
    allocate = weighted.new_empty if rows == tokens * choices else weighted.new_zeros
    result = allocate((tokens * choices, weighted.shape[1])).index_copy(0, order, weighted)
    return result.view(tokens, choices, -1).sum(1).to(hidden_states.dtype)


def register() -> None:
    """Have transformers know of this."""
    ExpertsInterface.register(NAME, run_experts)


def _linear(value: Tensor, weight: Tensor, groups: _Groups) -> Tensor:
    result: Tensor = _GroupedLinear.apply(value, weight, groups)  # type: ignore[no-untyped-call]
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
