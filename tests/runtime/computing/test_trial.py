"""Layers are tried before the start.

Gradients are autograd's own, and a forward changes no state.
"""

import pytest

from slipstream.runtime.computing.trial import MAX_FLOPS, try_layers
from slipstream.runtime.config import ConfigError, parse_run_config
from slipstream.runtime.data.data import load_data
from slipstream.runtime.replay.microbatch import Microbatch


def tried(*kinds, begins=(0, 1), flops=0.0, **training):
    """Try a model; return the layers whose backward is not divided, and what was said."""
    config = parse_run_config(
        {
            "name": "tests.runtime.tried_model:Model",
            "width": 8,
            "context": 8,
            "options": {"kinds": list(kinds)},
        },
        {"batch": 2, "dtype": "float64", "device": "cpu", "iterations": 1, **training},
    )
    data, notes = load_data(config, (1,)), []
    return try_layers(
        config, data.batch(Microbatch(0, 0, 0), 2, 8), begins, flops, notes.append
    ), notes


@pytest.mark.parametrize(
    "training", [{}, {"recompute": "full"}, {"dtype": "float32"}, {"dtype": "bf16"}], ids=str
)
def test_layers_that_keep_the_contract_pass_without_a_word(training):
    assert tried("Plain", "Forces", "Plain", "InnerStep", **training) == (frozenset(), [])


@pytest.mark.parametrize(
    ("kind", "name"), [("Normalized", "norm.running_mean"), ("Counting", "calls")]
)
def test_state_that_a_forward_changes_is_refused_in_one_line(kind, name):
    with pytest.raises(
        ConfigError, match=f"layer 2 .{kind}. changes its '{name}'.*GroupNorm"
    ) as error:
        tried("Plain", kind)
    assert "\n" not in str(error.value)


def test_a_layer_that_changes_its_input_cannot_be_computed_again():
    assert tried("Plain", "InPlace") == (frozenset(), [])
    with pytest.raises(
        ConfigError, match=r"training.recompute is 'full': layer 2 \(InPlace\).*neither its input"
    ) as error:
        tried("Plain", "InPlace", recompute="full")
    assert "\n" not in str(error.value)


def test_a_layer_with_which_a_stage_begins_must_not_write_to_its_input():
    with pytest.raises(
        ConfigError, match="layer 2 cannot be run: RuntimeError: a leaf Variable"
    ) as error:
        tried("Plain", "InPlace", begins=(0, 2))
    assert "\n" not in str(error.value)


def test_a_backward_that_cannot_be_divided_stays_in_one_with_a_line():
    fused, [note] = tried("Plain", "Unreduced", "Unreduced")
    assert (
        fused == {2, 3} and "layer 2 (Unreduced) is not divided" in note and "part.weight" in note
    )


def test_a_model_too_large_for_a_cpu_is_not_tried_which_is_said():
    fused, [note] = tried("Normalized", flops=2 * MAX_FLOPS)
    assert fused == frozenset() and "4.0 TFLOP" in note
