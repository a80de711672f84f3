"""Compute cross entropy of the next token, a few rows of logits at a time.

So bfloat16 logits are never copied as a whole. Shapes: N tokens of a micro-batch, V vocabulary, or
the part of it that a rank of the worker has.
"""

from typing import Any

import torch
from torch import Tensor

from slipstream.runtime.ranks.worker_group import WorkerGroup

IGNORED_TARGET = -100
"""Target that does not count, as in torch's own cross entropy."""
CHUNK_SIZE = 2**25
"""Logits processed at a time: enough to keep a device busy, 128 MiB in float32."""


def cross_entropy(logits: Tensor, target: Tensor, group: WorkerGroup | None = None, chunk: int = CHUNK_SIZE) -> Tensor:
    """Return the mean loss over the tokens whose target is not `IGNORED_TARGET`.

    It is a scalar, in float32 or better; the loss is 0, and so are its gradients, if no token
    counts.

    Parameters
    ----------
    logits
        [..., vocabulary]; with a group, this rank's part of the vocabulary, which is cut in the
        order of the ranks.
    target
        [...], token numbers or `IGNORED_TARGET`.
    group
        Ranks over which the vocabulary is cut; None if it is not cut.
    chunk
        Number of logits that are processed at a time.
    """
    loss: Tensor = _CrossEntropy.apply(  # type: ignore[no-untyped-call]
        logits.flatten(0, -2), target.flatten(), group, max(1, chunk // logits.shape[-1]))
    return loss


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, target_N: Tensor, group: WorkerGroup | None, rows: int) -> Tensor:
        kind = torch.promote_types(logits_NV.dtype, torch.float32)
        counted_N = target_N != IGNORED_TARGET
        place_N = target_N.where(counted_N, 0)
        mine_N = counted_N
        if group is not None:
            known = logits_NV.shape[1]
            place_N = place_N - group.rank() * known
            mine_N = counted_N & (place_N >= 0) & (place_N < known)
            place_N = place_N.where(mine_N, 0)
        highest_N = logits_NV.amax(-1).to(kind)
        if group is not None:
            torch.distributed.all_reduce(highest_N, torch.distributed.ReduceOp.MAX, group)
        sums_2N = torch.empty(2, len(logits_NV), dtype=kind, device=logits_NV.device)
        for some in _row_chunks(len(logits_NV), rows):
            shifted_CV = logits_NV[some].to(kind) - highest_N[some, None]
            sums_2N[1, some] = shifted_CV.gather(1, place_N[some, None]).squeeze(1) * mine_N[some]
            sums_2N[0, some] = shifted_CV.exp_().sum(-1)
        if group is not None:
            torch.distributed.all_reduce(sums_2N, group=group)
        total_N, found_N = sums_2N
        count = counted_N.sum().clamp_(min=1)
        ctx.save_for_backward(logits_NV, highest_N, total_N, place_N, mine_N, counted_N, count)
        ctx.rows = rows
        loss: Tensor = ((total_N.log() - found_N) * counted_N).sum() / count
        return loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor, None, None, None]:
        """Return the gradient of the logits, 0 for tokens that do not count.

        It is the softmax, less 1 at the target, times `scale` (the gradient of the mean loss),
        divided by the number of tokens that count.
        """
        logits_NV, highest_N, total_N, place_N, mine_N, counted_N, count = ctx.saved_tensors
        gradient_NV = torch.empty_like(logits_NV)
        weight_N = counted_N * (scale / count)
        for some in _row_chunks(len(logits_NV), ctx.rows):
            share_CV = (logits_NV[some].to(highest_N.dtype) - highest_N[some, None]).exp_().div_(total_N[some, None])
            share_CV.scatter_add_(1, place_N[some, None], -mine_N[some, None].to(share_CV.dtype))
            gradient_NV[some] = share_CV.mul_(weight_N[some, None])
        return gradient_NV, None, None, None


def _row_chunks(length: int, rows: int) -> list[slice]:
    return [slice(start, min(start + rows, length)) for start in range(0, length, rows)]
