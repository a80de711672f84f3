"""Where the sums of gradients come of the parts that a worker keeps copies of: two buffers for each (`late_steps`)."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from slipstream.runtime.model.state.late_steps import BUFFERS
from slipstream.runtime.model.state.parts import Cut, Span, in_layers
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker

Sums = Mapping[tuple[int, Span], Sequence[Tensor]]
"""Parts of layers that are copies, each with its buffers."""


class CopiedSums:
    """Those of one worker, of all ranges that it reduces."""

    def __init__(self) -> None:
        self._buffers: dict[LayerRange, dict[Span, list[Tensor]]] = {}

    def make(self, layers: LayerRange, cut: Cut, worker: Worker, dtype: torch.dtype, device: torch.device) -> None:
        """Buffers for what a worker copies of a range."""
        self._buffers[layers] = {span: [torch.zeros(span[1] - span[0], dtype=dtype, device=device)
                                        for _ in range(BUFFERS)] for span in cut.copied(worker)}

    def of(self, layers: LayerRange, buffer: int) -> Mapping[Span, Tensor]:
        """One of the buffers of each part of a range."""
        return {span: buffers[buffer] for span, buffers in self._buffers.get(layers, {}).items()}

    def by_layer(self, elements: Callable[[int], int]) -> Sums:
        """All of them, by parts of layers; `elements` says how many of a layer are cut."""
        found: dict[tuple[int, Span], Sequence[Tensor]] = {}
        for layers, its in self._buffers.items():
            for span, buffers in its.items():
                start = 0
                for layer, part in in_layers(span, layers, elements):
                    end = start + part[1] - part[0]
                    found[layer, part] = [buffer[start:end] for buffer in buffers]
                    start = end
        return found
