"""Checksums: equal for equal bits, wherever they lie, and other for others."""

import pytest
import torch

from slipstream.runtime.state.checksum import BLOCK_WORDS, SMALL_BYTES, compute_checksum

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex128]


def drawn(size, dtype):
    return torch.randint(2, 256, (size,), generator=torch.Generator().manual_seed(size)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 8, SMALL_BYTES + 3])
def test_equal_bits_have_equal_sums_wherever_they_lie(dtype, size):
    mine, larger = drawn(size, dtype), torch.zeros(size + 5, dtype=dtype)
    larger[3 : 3 + size] = mine
    assert (
        compute_checksum([mine])
        == compute_checksum([larger[3 : 3 + size]])
        == compute_checksum([mine.view(1, size)])
    )


@pytest.mark.parametrize("size", [5, 2 * BLOCK_WORDS + 3])
def test_each_bit_counts(size):
    mine = drawn(size, torch.float64)
    right, words = compute_checksum([mine]), mine.view(torch.int64)
    for place in {0, size // 2, size - 1}:
        for bit in range(64):
            flip = torch.tensor(1).bitwise_left_shift(bit)
            words[place] ^= flip
            assert compute_checksum([mine]) != right
            words[place] ^= flip
    assert compute_checksum([mine]) == right


def test_places_and_signs_count():
    mine = torch.arange(1.0, 2 * BLOCK_WORDS + 1)
    right = compute_checksum([mine])
    for first, other in ((0, 2), (1, BLOCK_WORDS * 2 - 1), (3, 4)):
        changed = mine.clone()
        changed[[first, other]] = changed[[other, first]]
        assert compute_checksum([changed]) != right
    assert compute_checksum([-mine]) != right
    signs = torch.ones(len(mine))
    signs[[1, 3]] = -1  # two top bits of words, which a sum times odd weights would lose
    assert compute_checksum([mine * signs]) != right


def test_the_order_of_tensors_counts_and_no_number_is_changed():
    tensor, other = drawn(3, torch.float32), drawn(4, torch.float32)
    before = tensor.clone(), other.clone()
    assert compute_checksum([tensor, other]) != compute_checksum([other, tensor])
    assert torch.equal(tensor, before[0]) and torch.equal(other, before[1])
