"""Communicate over a worker's ranks, with a backward, for tensor-parallel layers.

The collectives come in pairs, each the other's backward (Megatron-LM: Shoeybi et al., arXiv
1909.08053; sequence parallelism: Korthikanti et al., arXiv 2205.05198). Without a group, as for a
worker of one process, collectives return what they are given.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, distributed

from slipstream.runtime.ranks.shards import gather_tensors, split_dim
from slipstream.runtime.ranks.worker_group import WorkerGroup
from slipstream.runtime.torch_private import reduce_scatter_single

Call = Callable[[Tensor, int, WorkerGroup], Tensor]


def gather_parts(tensor: Tensor, dim: int, group: WorkerGroup | None) -> Tensor:
    """Concatenate the parts of all ranks along a dimension; backward: `sum_parts`."""
    return _apply_to_parts(_concatenate_parts, _reduce_scatter, tensor, dim, group)


def sum_parts(tensor: Tensor, dim: int, group: WorkerGroup | None) -> Tensor:
    """Return this rank's part of the sum over all ranks; backward: `gather_parts`.

    Parts are cut along dimension `dim`.
    """
    return _apply_to_parts(_reduce_scatter, _concatenate_parts, tensor, dim, group)


def gather_replicated(tensor: Tensor, dim: int, group: WorkerGroup | None) -> Tensor:
    """Concatenate all ranks' parts along a dimension, for the same work on all ranks.

    Backward: this rank's part of the gradient. The caller must make sure that all ranks do the same
    computation on the result, up to `take_own_part`.
    """
    return _apply_to_parts(_concatenate_parts, _copy_part, tensor, dim, group)


def take_own_part(tensor: Tensor, dim: int, group: WorkerGroup | None) -> Tensor:
    """Return this rank's part, along a dimension, of a tensor that all ranks have computed.

    Backward: concatenate the gradients of all ranks.
    """
    return _apply_to_parts(_copy_part, _concatenate_parts, tensor, dim, group)


def sum_ranks(tensor: Tensor, group: WorkerGroup | None) -> Tensor:
    """Return the sum over all ranks, on each of them.

    Backward: each rank gets the gradient of the sum.
    """
    if group is None:
        return tensor
    result: Tensor = _SumRanks.apply(tensor, group)  # type: ignore[no-untyped-call]
    return result


def for_all_ranks(group: WorkerGroup | None, *parameters: Tensor) -> tuple[Tensor, ...]:
    """Return parameters that all ranks have, for use on this rank's part of the data.

    Backward: sum the gradients over all ranks.
    """
    if group is None:
        return parameters
    result: tuple[Tensor, ...]
    result = _ForAllRanks.apply(group, *parameters)  # type: ignore[no-untyped-call]
    return result


def part_of(tensor: Tensor, dim: int, group: WorkerGroup | None) -> Tensor:
    """Return this rank's part of a tensor that all ranks have, cut along a dimension."""
    if group is None:
        return tensor
    return split_dim(tensor, dim, group.size()).select(dim, group.rank())


def _concatenate_parts(tensor: Tensor, dim: int, group: WorkerGroup) -> Tensor:
    return gather_tensors(tensor, group).movedim(0, dim).flatten(dim, dim + 1)


def _reduce_scatter(tensor: Tensor, dim: int, group: WorkerGroup) -> Tensor:
    # The collective takes the parts of all ranks one after the other in memory.
    parts = split_dim(tensor, dim, group.size()).movedim(dim, 0).contiguous()
    total = torch.empty_like(parts[0])
    reduce_scatter_single(total, parts, group=group)
    return total


def _copy_part(tensor: Tensor, dim: int, group: WorkerGroup) -> Tensor:
    # A copy: torch does not allow in-place changes of a view that a custom autograd.Function
    # returns.
    return part_of(tensor, dim, group).clone(memory_format=torch.contiguous_format)


def _apply_to_parts(
    forward: Call, backward: Call, tensor: Tensor, dim: int, group: WorkerGroup | None
) -> Tensor:
    """Return `forward(tensor, dim, group)`, with `backward` for the gradient."""
    if group is None:
        return tensor
    result: Tensor
    result = _PartsFunction.apply(  # type: ignore[no-untyped-call]
        forward, backward, tensor, dim, group
    )
    return result


class _PartsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: Call, other: Call, tensor: Tensor, dim: int, group: WorkerGroup
    ) -> Tensor:
        ctx.other, ctx.dim, ctx.group = other, dim, group
        return call(tensor, dim, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor, None, None]:
        return None, None, ctx.other(gradient, ctx.dim, ctx.group), None, None


class _SumRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: WorkerGroup) -> Tensor:  # noqa: ARG004
        # A copy, since the sum is made in place, and the caller may still use its tensor.
        total = tensor.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        # All ranks compute the same from the sum, so each already has the whole gradient.
        return gradient, None


class _ForAllRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: WorkerGroup, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(parameter.view_as(parameter) for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # One sum for all: each takes a round trip, however small.
        total = torch.cat([gradient.flatten() for gradient in gradients])  # in the widest dtype
        distributed.all_reduce(total, group=ctx.group)
        parts = torch.split(total, [gradient.numel() for gradient in gradients])
        return None, *(
            part.view_as(gradient).to(gradient.dtype)
            for part, gradient in zip(parts, gradients, strict=True)
        )
