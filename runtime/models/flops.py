"""Count the floating-point operations of a model's training, instead of estimating them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from slipstream.runtime.torch_private import without_module_tracking

BACKWARD_PRODUCTS = 2
"""Matrix products in the backward for each in the forward."""


class ForwardFlops:
    """Floating-point operations of a forward, as torch's FlopCounterMode counts them.

    These are of matrix products and attention; other ops count nothing. Activation recomputation is
    not part of the model's work and is not counted.
    """

    def __init__(self, counter: FlopCounterMode) -> None:
        self._counter = counter

    def training_flops(self, microbatches: int) -> float:
        """Return the operations of forward and backward of micro-batches: three times a
        forward's."""
        return float(self._counter.get_total_flops()) * (1 + BACKWARD_PRODUCTS) * microbatches


@contextmanager
def counting_flops() -> Iterator[ForwardFlops]:
    """Yield a counter of the floating-point operations of the forward within the context. The
    forward may run on tensors without memory."""
    with without_module_tracking(FlopCounterMode(display=False, custom_mapping={
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops})) as counter:
        yield ForwardFlops(counter)


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the operations of the CPU's attention kernel, which torch does not count."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]
