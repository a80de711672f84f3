"""Compute the cross entropy of next tokens, a few rows of logits at a time.

So logits in bfloat16 are never copied to float32 as a whole. Shapes: N tokens of a micro-batch, V
vocabulary, or the part of it that a rank of the worker has.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.runtime.ranks.worker_group import WorkerGroup

IGNORED_TARGET = -100
"""Target that does not count, as in torch's own cross entropy."""
CHUNK_SIZE = 2**25
"""Logits processed at a time, which keep a device busy: 128 MiB in float32."""


def cross_entropy(
    logits: Tensor, target: Tensor, group: WorkerGroup | None = None, chunk: int = CHUNK_SIZE
) -> Tensor:
    """Return the mean loss over the tokens whose target is not `IGNORED_TARGET`.

    The loss is a scalar in float32 or better. If no token counts, the loss and its gradients are 0.

    Parameters
    ----------
    logits
        [..., vocabulary]; with a group, this rank's part of the vocabulary, which is cut in the
        order of the ranks.
    target
        [...], token numbers or `IGNORED_TARGET`.
    group
        Ranks over which the vocabulary is cut, which call this together; None if it is not cut.
    chunk
        Number of logits that are processed at a time.
    """
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, -2), target.flatten(), group, max(1, chunk // logits.shape[-1])
    )
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, target_N: Tensor, group: WorkerGroup | None, rows: int
    ) -> Tensor:
        kind = torch.promote_types(logits_NV.dtype, torch.float32)
        counted_N = target_N != IGNORED_TARGET
        place_N = target_N.where(counted_N, 0)
        mine_N = counted_N
        # Targets in this rank's part of the vocabulary, and their places there.
        if group is not None:
            size = logits_NV.shape[1]
            place_N = place_N - group.rank() * size
            mine_N = counted_N & (place_N >= 0) & (place_N < size)
            place_N = place_N.where(mine_N, 0)

        # The highest logit is subtracted before the exponential, which would overflow.
        highest_N = logits_NV.amax(-1).to(kind)
        if group is not None:
            torch.distributed.all_reduce(highest_N, torch.distributed.ReduceOp.MAX, group)
        # Sums of exponentials, and logits of targets: one tensor, for one collective.
        sums_2N = torch.empty(2, len(logits_NV), dtype=kind, device=logits_NV.device)
        for chunk in _row_chunks(len(logits_NV), rows):
            shifted_CV = logits_NV[chunk].to(kind) - highest_N[chunk, None]
            at_target_C = shifted_CV.gather(1, place_N[chunk, None]).squeeze(1)
            sums_2N[1, chunk] = at_target_C * mine_N[chunk]
            sums_2N[0, chunk] = shifted_CV.exp_().sum(-1)
        if group is not None:
            torch.distributed.all_reduce(sums_2N, group=group)
        total_N, at_target_N = sums_2N
        # At least 1, so that without tokens the loss is 0, and not 0 / 0.
        count = counted_N.sum().clamp_(min=1)
        ctx.save_for_backward(logits_NV, highest_N, total_N, place_N, mine_N, counted_N, count)
        ctx.rows = rows
        loss: Tensor = ((total_N.log() - at_target_N) * counted_N).sum() / count
        return loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the logits, 0 for tokens that do not count."""
        # It is the softmax, less 1 at the target, times `scale` (the gradient of the mean loss),
        # divided by the number of tokens that count.
        logits_NV, highest_N, total_N, place_N, mine_N, counted_N, count = ctx.saved_tensors
        gradient_NV = torch.empty_like(logits_NV)
        weight_N = counted_N * (scale / count)
        # The softmax is computed again: stored, it would be as large as the logits in float32.
        for chunk in _row_chunks(len(logits_NV), ctx.rows):
            shifted_CV = logits_NV[chunk].to(highest_N.dtype) - highest_N[chunk, None]
            share_CV = shifted_CV.exp_().div_(total_N[chunk, None])
            share_CV.scatter_add_(1, place_N[chunk, None], -mine_N[chunk, None].to(share_CV.dtype))
            gradient_NV[chunk] = share_CV.mul_(weight_N[chunk, None])
        return gradient_NV, None, None, None


def _row_chunks(length: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, length)) for start in range(0, length, rows)]
