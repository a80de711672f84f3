"""How many floating-point operations a model's training takes, counted and not estimated from its size."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

BACKWARD = 2
"""A matrix product in the forward takes two in the backward: for its input and for its weights."""


class ForwardFlops:
    """Counts the operations of matrix products and attention, as torch's FlopCounterMode does; other ops count nothing.

    What is computed again (activation recomputation) is not the model's work, and is not counted either.
    """

    def __init__(self, counter: FlopCounterMode) -> None:
        self._counter = counter

    def training(self, microbatches: int) -> float:
        """Of forward and backward of so many micro-batches, where one forward was counted."""
        return float(self._counter.get_total_flops()) * (1 + BACKWARD) * microbatches


@contextmanager
def counted() -> Iterator[ForwardFlops]:
    """Count what is computed within; also on tensors without memory."""
    with FlopCounterMode(display=False, custom_mapping={
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention}) as counter:
        yield ForwardFlops(counter)


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """The CPU's kernel, which torch does not count."""
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]
