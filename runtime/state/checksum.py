"""Compute checksums, by which workers compare copies, and digests of parameters.

A checksum has 64 bits, and is computed where the tensor is. The tensor is read as words of 64 bits:
each is folded into itself and multiplied by an odd weight that depends on its place, and the
products are summed modulo 2**64, which all devices compute alike. A change of a single word is
always detected; of other changes, about one in 2**32 is not. A checksum is no signature: tensors
with equal checksums can be constructed deliberately.
"""

import functools
import hashlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor


def parameter_digest(parameters: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 over parameters' names, dtypes, shapes and bytes, whatever their order."""
    return combined_digest(
        {name: tensor_digest(name, tensor) for name, tensor in parameters.items()}
    )


def tensor_digest(name: str, tensor: Tensor) -> str:
    """Return the SHA-256 over one parameter's name, dtype, shape and bytes."""
    tensor = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
    digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def combined_digest(digests: Mapping[str, str]) -> str:
    """Return the `parameter_digest` of all parameters whose `tensor_digest` is given, by name."""
    return hashlib.sha256("".join(digests[name] for name in sorted(digests)).encode()).hexdigest()


WORD_BYTES = 8
BLOCK_WORDS = 2**18
"""Number of words in a block (2 MiB), each with its own weight."""
BLOCKS_AT_ONCE = {"cuda": 16}
"""Number of blocks summed in one call, by type of device; 1 for others."""
SMALL_BYTES = 2**16
"""Size up to which tensors are joined, to be summed in one call."""


def compute_checksum(tensors: Iterable[Tensor]) -> Tensor:
    """Return the checksum, int64 [] on their device, of at least one tensor, in order."""
    # Sums of blocks are weighted, too, so that the order of blocks counts.
    return _weighted_sum(
        torch.cat([block_sum for flat in _join_small(tensors) for block_sum in _block_sums(flat)])
    )


def _join_small(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    small: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        if flat.nbytes > SMALL_BYTES:
            yield flat
        else:
            small.setdefault(flat.dtype, []).append(flat)
    for group in small.values():
        device = group[-1].device
        yield torch.cat([flat.to(device) for flat in group])


def _block_sums(flat: Tensor) -> Iterator[Tensor]:
    """Yield the checksums of a flat tensor's blocks, then of what remains."""
    in_word = max(1, WORD_BYTES // flat.itemsize)
    whole = len(flat) - len(flat) % in_word
    body = flat[:whole]
    if body.storage_offset() % in_word:
        body = body.clone()  # a part of a larger tensor may begin within a word
    words = body.view(torch.int64)
    blocks, together = len(words) // BLOCK_WORDS, BLOCKS_AT_ONCE.get(flat.device.type, 1)
    rows = words[: blocks * BLOCK_WORDS].view(blocks, BLOCK_WORDS)
    for first in range(0, blocks, together):
        yield _sum_rows(rows[first : first + together])
    # The last block has fewer words, and the tensor may end within a word.
    yield _sum_rows(words[None, blocks * BLOCK_WORDS :])
    if whole < len(flat):
        end = words.new_zeros(1)
        end.view(flat.dtype)[: len(flat) - whole] = flat[whole:]
        yield end


def _sum_rows(words: Tensor) -> Tensor:
    # Low bits of a product depend on low bits alone, so high bits are folded into them.
    folded = words >> 31
    return folded.bitwise_xor_(words).mul_(_word_weights(words.device)[: words.shape[1]]).sum(1)


def _weighted_sum(numbers: Tensor) -> Tensor:
    return (numbers * _word_weights(numbers.device)[: len(numbers)]).sum()


@functools.cache
def _word_weights(device: torch.device) -> Tensor:
    """Return the weight of each position in a block: odd numbers, int64 [BLOCK_WORDS]."""
    # As in SplitMix64 (Steele et al., OOPSLA 2014), but with shifts that keep the sign.
    mixed = torch.arange(1, BLOCK_WORDS + 1) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        mixed = (mixed ^ (mixed >> shift)) * factor
    return ((mixed ^ (mixed >> 31)) | 1).to(device)
