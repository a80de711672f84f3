"""Count the floating-point operations of a model's training, rather than estimate them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from slipstream.runtime.torch_private import without_module_tracking

BACKWARD_PRODUCTS = 2
"""Number of matrix products in the backward for each one in the forward."""


class ForwardFlops:
    """Floating-point operations of a forward, as torch's FlopCounterMode counts them.

    Only matrix products and attention are counted, and no recomputation.
    """

    def __init__(self, counter: FlopCounterMode) -> None:
        self._counter = counter

    def training_flops(self, microbatches: int) -> float:
        """Return the operations of forward and backward of this many micro-batches."""
        return float(self._counter.get_total_flops()) * (1 + BACKWARD_PRODUCTS) * microbatches


@contextmanager
def counting_flops() -> Iterator[ForwardFlops]:
    """Yield a counter of a forward's operations; the layers may be on the meta device."""
    with without_module_tracking(
        FlopCounterMode(
            display=False,
            # torch has no formula for its attention kernel for CPUs.
            custom_mapping={
                torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops
            },
        )
    ) as counter:
        yield ForwardFlops(counter)


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]
