"""The loss a few rows at a time.

It is compared with torch's of all rows at once.
"""

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.runtime.models.cross_entropy import IGNORED_TARGET, cross_entropy


def case(
    dtype: torch.dtype, tokens: int = 7, vocabulary: int = 11
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    logits = (20 * torch.randn(1, tokens, vocabulary, generator=generator, dtype=torch.float64)).to(
        dtype
    )
    return logits.requires_grad_(), torch.randint(vocabulary, (1, tokens), generator=generator)


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize("ignored", [(), (2, 3), (0, 1, 2, 3, 4, 5, 6)])
def test_it_is_torchs(rows, ignored):
    logits, target = case(torch.float64)
    target[0, list(ignored)] = IGNORED_TARGET
    expected = functional.cross_entropy(logits.flatten(0, 1), target.flatten())
    found = cross_entropy(logits, target, chunk=rows * logits.shape[-1])
    (ours,) = torch.autograd.grad(3 * found, logits)
    if len(ignored) == 7:  # where torch's is not a number, and neither are its gradients
        assert found == 0 and not ours.any() and expected.isnan()
        return
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)
    (theirs,) = torch.autograd.grad(3 * expected, logits)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-14)


def test_a_target_outside_the_vocabulary_is_refused():
    logits, target = case(torch.float64)
    target[0, 0] = 11
    with pytest.raises((IndexError, RuntimeError)):
        cross_entropy(logits, target)


class _Largest(TorchDispatchMode):
    """The largest float32 tensor that any call gives."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else [found]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32:
                self.elements = max(self.elements, tensor.numel())
        return found


def test_no_whole_float32_logits_exist():
    logits, target = case(torch.bfloat16, tokens=64, vocabulary=50)
    with _Largest() as largest:
        loss = cross_entropy(logits, target, chunk=4 * 50)
        (gradient,) = torch.autograd.grad(loss, logits)
    assert largest.elements == 4 * 50
    assert loss.dtype == torch.float32 and gradient.dtype == torch.bfloat16
    expected = functional.cross_entropy(logits.float().flatten(0, 1), target.flatten())
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])
