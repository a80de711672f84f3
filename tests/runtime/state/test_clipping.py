"""Sums of squares of gradients."""

import torch

from slipstream.runtime.state import step_factors
from slipstream.runtime.state.step_factors import sum_of_squares


def test_squares_are_of_all_elements_in_float64_and_leave_the_gradient_alone(monkeypatch):
    monkeypatch.setitem(step_factors.CHUNK_SIZE, "cpu", 16)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for length in (0, 1, 15, 16, 17, 100):
            generator = torch.Generator().manual_seed(length)
            gradient = torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)
            before = gradient.clone()
            torch.testing.assert_close(
                sum_of_squares(gradient), before.double().square().sum(), rtol=1e-15, atol=0
            )
            assert torch.equal(gradient, before)
