"""Layers that are built to be filled with somebody's state."""

import threading

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.runtime.config import ModelConfig
from slipstream.runtime.models.calling import LayerCall
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.seeds import GENERATOR_LOCK
from slipstream.runtime.state.held_layers import build_on_device

CPU = torch.device("cpu")
GPT = ModelConfig(blocks=2, width=8, heads=2, context=6, vocabulary=11)


class _Random(TorchDispatchMode):
    """Numbers that are drawn."""

    drawn = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn += found.numel()
        return found


def llama(tmp_path) -> ModelConfig:
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=16,
    ).save_pretrained(tmp_path)
    return ModelConfig(hugging_face=str(tmp_path / "config.json"), context=6)


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_one_that_is_filled_computes_as_one_that_was_drawn(kind, tmp_path):
    model = build_model(GPT if kind == "gpt" else llama(tmp_path), 5, torch.float64, CPU)
    value = torch.arange(6).reshape(1, 6)
    batch = value, value
    for layer in range(model.layers):
        with _Random() as before:
            whole = build_on_device(model, layer)
        with _Random() as random:
            other = build_on_device(model, layer, filled=False)
        assert before.drawn and not random.drawn
        for parameter in other.parameters():
            parameter.data.fill_(torch.nan)  # whatever it was
        other.load_state_dict(whole.state_dict())
        output = LayerCall(whole)(value, batch)
        torch.testing.assert_close(LayerCall(other)(value, batch), output, rtol=0, atol=0)
        value = output.detach()


def test_layers_are_built_while_nobody_else_draws_random_numbers():
    """Forwards hold the generators while they run.

    A user's `build` may draw from them, for empty layers, too.
    """
    ownership = []

    class Watched(type(build_model(GPT, 0, torch.float64, CPU))):
        def build(self, layer):
            ownership.append(GENERATOR_LOCK.is_owned)
            return super().build(layer)

    model = Watched(GPT, 0, torch.float64, CPU)
    thread = threading.Thread(
        target=lambda: (build_on_device(model, 1, filled=False), build_on_device(model, 1))
    )
    thread.start()
    thread.join()
    assert ownership == [True, True]
