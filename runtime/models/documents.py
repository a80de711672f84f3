"""Attend within the documents of a sample, without time for pairs of other documents.

Data that pack several documents into a sample give `position_ids`, which restart in each document.
A mask alone would leave attention as slow as without documents, so torch's fused kernels are called
for each document separately. torch's flex_attention can do the same with block masks, but has no
backward on CPUs, and none in float64.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from slipstream.runtime.torch_private import FakeTensor

_KNOWN_LENGTHS = WeakIdKeyDictionary()
"""Document lengths by the tensor of positions. All layers of a slice ask for the same, and each
time a GPU would have to be synchronized."""


def document_lengths(position_ids: Tensor) -> list[list[int]]:
    """Return the lengths of the documents in each row of positions [B, T].

    Positions rise by 1 within a document: B lists, each of which sums to T. On the meta device and
    for fake tensors, whose positions are unknown, each row counts as one document of T tokens.
    """
    if isinstance(position_ids, FakeTensor) or position_ids.is_meta:
        return [[position_ids.shape[1]]] * position_ids.shape[0]
    if position_ids not in _KNOWN_LENGTHS:
        rows = []
        breaks = (position_ids.diff(dim=1) != 1).cpu()
        for row in breaks:
            ends = [0, *(row.nonzero().flatten() + 1).tolist(), position_ids.shape[1]]
            rows.append([end - begin for begin, end in pairwise(ends)])
        _KNOWN_LENGTHS[position_ids] = rows
    known: list[list[int]] = _KNOWN_LENGTHS[position_ids]
    return known


def remember_lengths(position_ids: Tensor, moved: Tensor) -> None:
    """Store the document lengths of positions for `moved`, their copy on a device. So
    `document_lengths` of it need not wait for that device."""
    if moved is not position_ids:
        _KNOWN_LENGTHS[moved] = document_lengths(position_ids)


def attend_by_document(attend: Callable[[Tensor, Tensor, Tensor], Tensor], position_ids: Tensor | None, q_BHTK: Tensor,
                       k_BNTK: Tensor, v_BNTK: Tensor) -> Tensor:
    """Apply a causal attention to each document separately; return the joined result. It is [B, H,
    T, K]. Positions in documents are [B or 1, T]; with None, each row is one document."""
    if position_ids is None:
        return attend(q_BHTK, k_BNTK, v_BNTK)
    lengths = document_lengths(position_ids)
    if all(len(row) == 1 for row in lengths):
        return attend(q_BHTK, k_BNTK, v_BNTK)
    if len(lengths) == 1:
        return _attend_row(attend, lengths[0], q_BHTK, k_BNTK, v_BNTK)
    rows = [_attend_row(attend, row, *(tensor[index:index + 1] for tensor in (q_BHTK, k_BNTK, v_BNTK)))
            for index, row in enumerate(lengths)]
    return torch.cat(rows)


def _attend_row(attend: Callable[[Tensor, Tensor, Tensor], Tensor], lengths: list[int], *of: Tensor) -> Tensor:
    """Apply `attend` to each document of a row's query, key and value, [B, heads, T, K]."""
    parts = zip(*(tensor.split_with_sizes(lengths, 2) for tensor in of), strict=True)
    return torch.cat([attend(*part) for part in parts], 2)
