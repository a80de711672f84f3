"""Buffers for the gradient sums of the parts that a worker keeps copies of: two for each part (`late_steps`)."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from slipstream.runtime.state.late_steps import GRADIENT_BUFFERS
from slipstream.runtime.state.parts import Span, StatePartition, split_by_layer
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker

CopyBuffers = Mapping[tuple[int, Span], Sequence[Tensor]]
"""Buffers for the gradient sums of each copied part, by the part's layer and span of the layer's elements."""


class CopyGradients:
    """Gradient buffers for the parts of which one worker, as their buddy, keeps copies: two for each part, in all
    ranges of layers whose gradients are reduced."""

    def __init__(self) -> None:
        self._buffers: dict[LayerRange, dict[Span, list[Tensor]]] = {}

    def allocate(self, layers: LayerRange, cut: StatePartition, worker: Worker, dtype: torch.dtype,
                 device: torch.device) -> None:
        """Allocate two gradient buffers for each part of which `worker`, as a buddy, keeps a copy; `cut` is the
        partition of the range `layers`."""
        self._buffers[layers] = {span: [torch.zeros(span[1] - span[0], dtype=dtype, device=device)
                                        for _ in range(GRADIENT_BUFFERS)] for span in cut.copied_parts(worker)}

    def buffers_of(self, layers: LayerRange, buffer: int) -> Mapping[Span, Tensor]:
        """Return one of the two gradient buffers of each part of `layers` of which this worker, as a buddy, keeps a
        copy.

        The result is keyed by the part's span. Of the buffers 0 and 1, one sums the gradients of the current iteration,
        the other holds those of the iteration before; they change roles at each step (`LateSteps.free_buffer`).
        """
        return {span: buffers[buffer] for span, buffers in self._buffers.get(layers, {}).items()}

    def by_layer(self, elements: Callable[[int], int]) -> CopyBuffers:
        """Return the buffers of all copied parts, cut at the borders of layers, by the layer and the span within it.

        The function `elements` returns the number of a layer's elements that are cut into parts.
        """
        sums: dict[tuple[int, Span], Sequence[Tensor]] = {}
        for layers, spans in self._buffers.items():
            for span, buffers in spans.items():
                start = 0
                for layer, part in split_by_layer(span, layers, elements):
                    end = start + part[1] - part[0]
                    sums[layer, part] = [buffer[start:end] for buffer in buffers]
                    start = end
        return sums
