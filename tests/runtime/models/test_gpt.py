import math

import pytest
import torch
from torch import nn

from slipstream.runtime.config import ModelConfig
from slipstream.runtime.models.layered_model import build_model

CPU = torch.device("cpu")
SMALL = ModelConfig(blocks=2, width=16, heads=2, context=8)


def whole(config: ModelConfig = SMALL, seed: int = 0) -> nn.Sequential:
    model = build_model(config, seed, torch.float64, CPU)
    return nn.Sequential(*(model.build(layer) for layer in range(model.layers)))


def state(module: nn.Module) -> dict[str, torch.Tensor]:
    return module.state_dict()


def test_one_layer_a_block() -> None:
    model = build_model(SMALL, 0, torch.float32, CPU)
    assert model.layers == 4
    assert [type(model.build(layer)).__name__ for layer in range(4)] == [
        "Embedding",
        "Block",
        "Block",
        "Head",
    ]
    for layer in (-1, 4):
        with pytest.raises(IndexError):
            model.build(layer)


def test_a_layer_is_the_same_whoever_builds_it() -> None:
    model, other = (
        build_model(SMALL, 7, torch.float64, CPU),
        build_model(SMALL, 7, torch.float64, CPU),
    )
    torch.manual_seed(1)
    expected = torch.rand(2)
    forwards = [state(model.build(layer)) for layer in range(4)]
    torch.manual_seed(1)
    backwards = [state(other.build(layer)) for layer in reversed(range(4))][::-1]
    assert torch.equal(torch.rand(2), expected), "the global random state was touched"
    for left, right in zip(forwards, backwards, strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_layers_and_seeds_differ() -> None:
    model = build_model(SMALL, 0, torch.float64, CPU)
    weights = [
        model.build(1).up.weight,
        model.build(2).up.weight,
        build_model(SMALL, 1, torch.float64, CPU).build(1).up.weight,
    ]
    assert not any(torch.equal(weights[i], weights[j]) for i, j in ((0, 1), (0, 2), (1, 2)))


def test_a_token_sees_only_itself_and_those_before() -> None:
    model = whole()
    tokens = torch.randint(256, (1, 8), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, 5] = (tokens[0, 5] + 1) % 256
    left, right = model(tokens), model(changed)
    assert left.shape == (1, 8, 256)
    torch.testing.assert_close(left[:, :5], right[:, :5], rtol=0, atol=1e-12)
    assert not torch.allclose(left[:, 5:], right[:, 5:])


def test_an_untrained_model_knows_nothing() -> None:
    tokens = torch.randint(256, (4, 8), generator=torch.Generator().manual_seed(0))
    loss = build_model(SMALL, 0, torch.float64, CPU).loss(whole()(tokens), tokens)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(math.log(256), abs=0.05)


def test_a_shorter_sequence_than_the_context() -> None:
    assert whole()(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 256)


def test_dropout_is_used() -> None:
    model = whole(ModelConfig(blocks=2, width=16, heads=2, context=8, dropout=0.5))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))
