"""Checksums: 64 bits of tensors, by which workers compare what they hold; summed where the tensors are.

The words of 64 bits of a tensor, each folded into itself and times an odd weight by its place, are summed modulo 2**64:
integers, which all devices and libraries compute alike. A change of one word is always seen, as folding and an odd
weight can be inverted; of other changes about one in 2**32 is not. It is no signature: whoever wants to can find
tensors with equal checksums.
"""

import functools
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

WORD_BYTES = 8
BLOCK = 2**18
"""Words that have weights of their own: 2 MB, which a processor's cache holds."""
BLOCKS_AT_ONCE = {"cuda": 16}
"""So that a GPU has more to do than to begin; else one."""
SMALL_BYTES = 2**16
"""Tensors up to this size are copied one behind the other: it takes longer to begin than to compute."""


def checksum(tensors: Iterable[Tensor]) -> Tensor:
    """That of some tensors, in their order: one number, on their device. There must be one at least."""
    return _weighted(torch.cat([one for flat in _joined(tensors) for one in _sums(flat)]))


def _joined(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors, flat; the small ones of a dtype as one."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if flat.nbytes > SMALL_BYTES:
            yield flat
        else:
            small.setdefault(flat.dtype, []).append(flat)
    for some in small.values():
        device = some[-1].device
        yield torch.cat([one.to(device) for one in some])


def _sums(flat: Tensor) -> Iterator[Tensor]:
    """Of its blocks, and of what follows the last whole one."""
    in_word = max(1, WORD_BYTES // flat.itemsize)
    whole = len(flat) - len(flat) % in_word
    body = flat[:whole]
    if body.storage_offset() % in_word:
        body = body.clone()  # a part of a larger tensor begins anywhere
    words = body.view(torch.int64)
    blocks, together = len(words) // BLOCK, BLOCKS_AT_ONCE.get(flat.device.type, 1)
    rows = words[:blocks * BLOCK].view(blocks, BLOCK)
    for first in range(0, blocks, together):
        yield _summed(rows[first:first + together])
    yield _summed(words[None, blocks * BLOCK:])
    if whole < len(flat):
        end = words.new_zeros(1)
        end.view(flat.dtype)[:len(flat) - whole] = flat[whole:]
        yield end


def _summed(words: Tensor) -> Tensor:
    """One number for each row."""
    folded = words >> 31
    return folded.bitwise_xor_(words).mul_(_weights(words.device)[:words.shape[1]]).sum(1)


def _weighted(numbers: Tensor) -> Tensor:
    return (numbers * _weights(numbers.device)[:len(numbers)]).sum()


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Odd numbers without a pattern: SplitMix64 (Steele et al., OOPSLA 2014), with shifts that keep the sign."""
    mixed = torch.arange(1, BLOCK + 1) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return ((mixed ^ (mixed >> 31)) | 1).to(device)
