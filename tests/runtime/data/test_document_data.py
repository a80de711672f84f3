"""Samples of several documents: what they hold, and that no token sees another document."""

from pathlib import Path

import numpy as np
import pytest
import torch

from slipstream.runtime.config import ConfigError, parse_run_config
from slipstream.runtime.data.data import Microbatch, batch_form, is_fully_masked, load_data
from slipstream.runtime.data.loss_weights import LossWeights
from slipstream.runtime.data.token_data import DocumentData, PackedBatch
from slipstream.runtime.models.calling import LayerCall, move_batch
from slipstream.runtime.models.layered_model import build_model, seeded_for_layer
from slipstream.runtime.replay.layer_values import form_of

END = 7
"""The token that ends a document."""
CONTEXT = 16
COUNTS = (2, 3)
"""Micro-batches of each pipeline."""


def config_for(path: Path, model=None, **training):
    return parse_run_config(
        {"context": CONTEXT, "vocabulary": 256, **(model or {})},
        {
            "tokens": str(path),
            "batch": 2,
            "shuffle": False,
            "document_end": END,
            "dtype": "float64",
            **training,
        },
    )


@pytest.fixture
def path(tmp_path):
    random = np.random.default_rng(1)
    tokens = random.integers(8, 256, 2000)
    tokens[np.cumsum(random.integers(1, 14, 200))] = END
    tokens.astype("<u2").tofile(tmp_path / "data.bin")
    return tmp_path / "data.bin"


def test_what_samples_hold(path):
    config = config_for(path)
    data = load_data(config, COUNTS)
    assert isinstance(data, DocumentData)
    lengths, counted, number = data.lengths(1), data.tokens(1), 0
    for pipeline, count in enumerate(COUNTS):
        for index in range(count):
            batch = data.batch(Microbatch(1, pipeline, index), 2, CONTEXT)
            assert isinstance(batch, PackedBatch) and form_of(batch) == batch_form(config)
            expected, ignored = [], []
            for row in batch.tokens.tolist():
                place = 0
                for token in row:
                    expected.append(place)
                    ignored.append(token == END)
                    place = 0 if token == END else place + 1
            assert batch.position_ids.flatten().tolist() == expected
            assert (batch.targets == -100).flatten().tolist() == ignored
            assert sum(place == 0 for place in expected) == len(lengths[number])
            assert sum(lengths[number]) == 2 * CONTEXT and max(lengths[number]) == max(expected) + 1
            assert counted[number] == (batch.targets != -100).sum() > 0
            number += 1
    plain = load_data(config_for(path, document_end=None), COUNTS)
    assert plain.digest != data.digest
    assert torch.equal(plain.batch(Microbatch(1, 1, 2), 2, CONTEXT)[0], batch.tokens)


@pytest.mark.parametrize("model", ["gpt", "llama", "mistral", "gpt2"])
def test_each_document_is_as_if_it_were_alone(path, tmp_path, model):
    """Logits and gradients of a sample are those of its documents by themselves."""
    if model == "gpt":
        config = config_for(path, {"blocks": 2, "width": 32})
    else:
        transformers = pytest.importorskip("transformers")
        if model == "gpt2":
            shape = {
                "n_embd": 16,
                "n_head": 2,
                "n_layer": 2,
                "n_positions": 32,
                "resid_pdrop": 0.0,
                "embd_pdrop": 0.0,
                "attn_pdrop": 0.0,
            }
        else:
            shape = {
                "hidden_size": 16,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "num_hidden_layers": 2,
                "intermediate_size": 32,
                "max_position_embeddings": 32,
            }
        if model == "mistral":
            shape["sliding_window"] = 4
        transformers.AutoConfig.for_model(model, vocab_size=256, **shape).save_pretrained(tmp_path)
        config = parse_run_config(
            {"hugging_face": str(tmp_path / "config.json"), "context": CONTEXT},
            {
                "tokens": str(path),
                "batch": 2,
                "document_end": END,
                "dtype": "float64",
                "shuffle": False,
            },
        )
    layered_model = build_model(config.model, 0, torch.float64, torch.device("cpu"))
    layers = torch.nn.ModuleList(
        layered_model.build(layer) for layer in range(layered_model.layers)
    )
    data = load_data(config, COUNTS)

    def run(value, batch):
        for index, layer in enumerate(layers):
            with seeded_for_layer(0, 0, 0, 0, index, layered_model.device):
                value = LayerCall(layer)(value, batch)
        return value

    batch = move_batch(data.batch(Microbatch(0, 1, 0), 2, CONTEXT), layered_model.device)
    assert (batch.position_ids == 0).sum() > 2
    whole = run(batch[0], batch)
    whole.square().sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in layers.named_parameters()}
    layers.zero_grad()
    parts = torch.zeros_like(whole)
    for row, positions in enumerate(batch.position_ids.tolist()):
        begins = [at for at, place in enumerate(positions) if place == 0]
        for begin, end in zip(begins, [*begins[1:], CONTEXT], strict=True):
            alone = run(batch.tokens[row : row + 1, begin:end], None)
            alone.square().sum().backward()
            parts[row, begin:end] = alone[0].detach()
    torch.testing.assert_close(whole, parts, rtol=1e-10, atol=1e-12)
    for name, parameter in layers.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("training", "says"),
    [
        ({"document_end": 256}, "training.document_end is 256; expected 0 to 255"),
        ({"document_end": -1}, "training.document_end is -1; expected a token"),
        ({"tokens": None}, "training.document_end is 7; expected it with training.tokens"),
        ({"data": "a:b"}, "data of your own give position_ids instead"),
    ],
)
def test_what_is_refused(path, training, says):
    with pytest.raises(ConfigError, match=says.replace("(", r"\(")):
        load_data(config_for(path, **training), COUNTS)


def test_a_micro_batch_without_targets_counts_nothing(tmp_path):
    """It would end the run in the middle, and on resume again."""
    ends = np.ones(400, "<u2")
    ends[: 2 * CONTEXT] = END
    ends.tofile(tmp_path / "data.bin")
    config = config_for(tmp_path / "data.bin", loss_weights="tokens", shuffle=False)
    data, names = (
        load_data(config, COUNTS),
        [
            Microbatch(0, pipeline, index)
            for pipeline, count in enumerate(COUNTS)
            for index in range(count)
        ],
    )
    assert [is_fully_masked(data.batch(name, 2, CONTEXT)) for name in names] == [True] + [False] * (
        len(names) - 1
    )
    weights = LossWeights(data, config.training, COUNTS)
    assert [weights(name) for name in names] == [0.0] + [1 / (len(names) - 1)] * (len(names) - 1)
    np.full(400, END, "<u2").tofile(tmp_path / "data.bin")
    with pytest.raises(ConfigError, match="expected 5 whole numbers of 0 or more, and not all 0"):
        LossWeights(load_data(config, COUNTS), config.training, COUNTS)(names[0])
