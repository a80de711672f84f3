"""What the gradients of the whole model say about a step: how far to scale it down, or not to make it."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from slipstream.runtime.config import TrainingConfig

CHUNK = {"cpu": 2**18, "cuda": 2**22}
"""Elements of a gradient that are in float64 at a time: 2 MiB of the host, which stay in its cache (with 32 MiB, which
are new pages each time, the sum took three times as long); on a GPU fewer and larger kernels."""
ADDED = 1e-6
"""To the norm that gradients are divided by: torch.nn.utils.clip_grad_norm_ does so, and all who call it."""


def squares_of(gradient: Tensor) -> Tensor:
    """The sum of squares, in float64; no whole copy of the gradient is made."""
    flat = gradient.detach().reshape(-1)
    sums = [chunk.to(torch.float64, copy=True).square_().sum() for chunk in torch.split(flat, CHUNK[flat.device.type])]
    return torch.stack(sums).sum() if len(sums) != 1 else sums[0]


def watches_gradients(config: TrainingConfig) -> bool:
    """Whether a step depends on the gradients of other stages."""
    return config.clip_norm is not None or config.skip_nonfinite


def clip_factor(squares: Iterable[float], config: TrainingConfig) -> float | None:
    """What to multiply all gradients by; None: make no step.

    `squares` are the sums of squares of each layer's gradients (`PartOptimizer.squares`). Their sum is rounded
    once, so that neither their order nor who holds which layer matters: all workers come to the same bits.
    """
    norm = math.sqrt(_total(squares))
    if config.skip_nonfinite and not math.isfinite(norm):
        return None
    factor = 1.0 if config.clip_norm is None else config.clip_norm / (norm + ADDED)
    return 1.0 if factor > 1 else factor


def _total(squares: Iterable[float]) -> float:
    try:
        return math.fsum(squares)
    except OverflowError:
        return math.inf
