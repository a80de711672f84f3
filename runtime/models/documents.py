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
"""Document lengths by tensor of positions; finding them makes the CPU wait for a GPU."""


def document_lengths(position_ids: Tensor) -> list[list[int]]:
    """Return the lengths of the documents in each row of positions [B, T].

    Positions rise by 1 within a document. On the meta device and for fake tensors, whose positions
    are unknown, each row counts as one document.
    """
    if isinstance(position_ids, FakeTensor) or position_ids.is_meta:
        return [[position_ids.shape[1]]] * position_ids.shape[0]
    if position_ids not in _KNOWN_LENGTHS:
        rows = []
        # A document begins where positions do not rise by 1. All rows come to the CPU in one copy.
        breaks = (position_ids.diff(dim=1) != 1).cpu()
        for row in breaks:
            ends = [0, *(row.nonzero().flatten() + 1).tolist(), position_ids.shape[1]]
            rows.append([end - begin for begin, end in pairwise(ends)])
        _KNOWN_LENGTHS[position_ids] = rows
    lengths: list[list[int]] = _KNOWN_LENGTHS[position_ids]
    return lengths


def remember_lengths(position_ids: Tensor, moved: Tensor) -> None:
    """Store the document lengths of `position_ids` for `moved`, its copy on a device."""
    if moved is not position_ids:
        _KNOWN_LENGTHS[moved] = document_lengths(position_ids)


def attend_by_document(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    position_ids: Tensor | None,
    q_BHTK: Tensor,
    k_BNTK: Tensor,
    v_BNTK: Tensor,
) -> Tensor:
    """Apply the causal attention `attend` to each document alone; return the joined result.

    Shapes: H heads of queries, N heads of keys and values, K width of a head; the result is [B, H,
    T, K]. `position_ids` are the tokens' positions in their documents, [B or 1, T]; None if each
    row is one document.
    """
    if position_ids is None:
        return attend(q_BHTK, k_BNTK, v_BNTK)
    lengths = document_lengths(position_ids)
    # Nothing to separate: one call of the kernel does all rows.
    if all(len(row) == 1 for row in lengths):
        return attend(q_BHTK, k_BNTK, v_BNTK)
    # All rows have the same documents, or each its own.
    if len(lengths) == 1:
        return _attend_row(attend, lengths[0], q_BHTK, k_BNTK, v_BNTK)
    rows = list[Tensor]()
    for index, row in enumerate(lengths):
        here = slice(index, index + 1)
        rows.append(_attend_row(attend, row, q_BHTK[here], k_BNTK[here], v_BNTK[here]))
    return torch.cat(rows)


def _attend_row(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], lengths: list[int], *qkv: Tensor
) -> Tensor:
    """Apply `attend` to each document of some rows that have documents of the same lengths."""
    documents = zip(*(tensor.split_with_sizes(lengths, 2) for tensor in qkv), strict=True)
    return torch.cat([attend(*document) for document in documents], 2)
