"""Costs fitted to tokens and squares of documents' lengths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.schedules.dealing import costs_by_stage, fit_coefficients

TOKENS = [64, 64, 64, 64, 32, 32]
SQUARES = [4096, 2048, 1024, 512, 1024, 512]


@given(st.tuples(*[st.sampled_from([0.0, 0.5, 3.0])] * 3).filter(any), st.floats(1e-6, 1e3))
def test_what_was_put_in_comes_out(relative, unit):
    coefficients = [
        value * unit / scale for value, scale in zip(relative, (1, 64, 4096), strict=True)
    ]
    a, b, c = coefficients
    found = fit_coefficients(
        TOKENS, SQUARES, [a + b * t + c * s for t, s in zip(TOKENS, SQUARES, strict=True)]
    )
    assert (
        found.coefficients == pytest.approx(coefficients, rel=1e-6, abs=1e-9 * unit)
        and found.error < 1e-6
    )


@pytest.mark.parametrize("seed", range(20))
def test_no_coefficient_is_negative_and_none_fits_better(seed):
    random = np.random.default_rng(seed)
    seconds = random.uniform(1, 2, 6)
    found = fit_coefficients(TOKENS, SQUARES, seconds)
    rows = np.stack((np.ones(6), TOKENS, SQUARES), axis=1)

    def error(coefficients):
        return np.sqrt(((rows @ coefficients / seconds - 1) ** 2).mean())

    assert min(found.coefficients) >= 0 and error(found.coefficients) == pytest.approx(found.error)
    for _ in range(200):
        other = np.array(found.coefficients) + random.normal(0, 0.1, 3) / (1, 64, 4096)
        assert error(np.maximum(other, 0)) >= found.error - 1e-12


def test_costs_are_multiples_of_the_mean_and_one_where_nothing_is_known():
    coefficients = np.zeros((2, 3, 3))
    coefficients[0, 0] = 1, 2, 3
    coefficients[1, 2] = 0, 0, 1
    found = costs_by_stage([[2, 1], [3]], coefficients)
    assert found.shape == (2, 2, 3) and found[:, 0, 0] == pytest.approx([22 / 28, 34 / 28])
    assert found[:, 1, 2] == pytest.approx([5 / 7, 9 / 7]) and (found[:, 0, 1:] == 1).all()
