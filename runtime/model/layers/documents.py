"""Attention within the documents of a sample: no token sees another document, and no time is spent on pairs of them.

Data that pack several documents into a sample give `position_ids`, which begin anew with each document. A mask alone
would leave attention as long as without one. So each document is attended to by itself, by torch's fused kernels.
torch's flex_attention does the same with block masks; it has no backward on CPUs, and none in float64.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from slipstream.runtime.torch_private import FakeTensor

_KNOWN = WeakIdKeyDictionary()
"""Lengths by the tensor of positions: all layers of a slice ask for the same, and a GPU would have to be waited for."""


def document_lengths(position_ids: Tensor) -> list[list[int]]:
    """Of positions [B, T], the lengths of each row's documents: one ends where positions do not go on by 1.

    Of tensors without memory, a document a row.
    """
    if isinstance(position_ids, FakeTensor) or position_ids.is_meta:
        return [[position_ids.shape[1]]] * position_ids.shape[0]
    if position_ids not in _KNOWN:
        rows = []
        breaks = (position_ids.diff(dim=1) != 1).cpu()
        for row in breaks:
            ends = [0, *(row.nonzero().flatten() + 1).tolist(), position_ids.shape[1]]
            rows.append([end - begin for begin, end in pairwise(ends)])
        _KNOWN[position_ids] = rows
    found: list[list[int]] = _KNOWN[position_ids]
    return found


def remember_lengths(position_ids: Tensor, moved: Tensor) -> None:
    """Positions have been moved to a device: their lengths are those that the CPU finds."""
    if moved is not position_ids:
        _KNOWN[moved] = document_lengths(position_ids)


def within_documents(attend: Callable[[Tensor, Tensor, Tensor], Tensor], position_ids: Tensor | None, q_BHTK: Tensor,
                     k_BNTK: Tensor, v_BNTK: Tensor) -> Tensor:
    """What `attend`, causal attention, gives for each document by itself: [B, H, T, K].

    `position_ids`: [B or 1, T]; None: each row is one document.
    """
    if position_ids is None:
        return attend(q_BHTK, k_BNTK, v_BNTK)
    lengths = document_lengths(position_ids)
    if all(len(row) == 1 for row in lengths):
        return attend(q_BHTK, k_BNTK, v_BNTK)
    if len(lengths) == 1:
        return _attended(attend, lengths[0], q_BHTK, k_BNTK, v_BNTK)
    rows = [_attended(attend, row, *(one[index:index + 1] for one in (q_BHTK, k_BNTK, v_BNTK)))
            for index, row in enumerate(lengths)]
    return torch.cat(rows)


def _attended(attend: Callable[[Tensor, Tensor, Tensor], Tensor], lengths: list[int], *of: Tensor) -> Tensor:
    parts = zip(*(one.split_with_sizes(lengths, 2) for one in of), strict=True)
    return torch.cat([attend(*part) for part in parts], 2)
