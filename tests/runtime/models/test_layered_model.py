import pytest
import torch

from slipstream.runtime.config import ConfigError, ModelConfig, TrainingConfig
from slipstream.runtime.models.layered_model import (
    autocast_context,
    build_model,
    parameter_dtype,
    seeded_for_layer,
)
from slipstream.runtime.placement import split_layers
from slipstream.runtime.seeds import derive_seed, seeded

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("layers", "stages", "ranges"),
    [
        (4, 4, [(0, 1), (1, 2), (2, 3), (3, 4)]),
        (5, 3, [(0, 1), (1, 3), (3, 5)]),
        (6, 4, [(0, 1), (1, 3), (3, 5), (5, 6)]),
        (7, 1, [(0, 7)]),
    ],
)
def test_split_layers(layers: int, stages: int, ranges: list[tuple[int, int]]) -> None:
    assert split_layers(layers, stages) == ranges


def test_split_layers_covers_and_balances() -> None:
    for layers in range(1, 30):
        for stages in range(1, layers + 1):
            ranges = split_layers(layers, stages)
            assert [layer for start, end in ranges for layer in range(start, end)] == list(
                range(layers)
            )
            lengths = [end - start for start, end in ranges]
            assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("stages", [0, 5])
def test_split_layers_refuses(stages: int) -> None:
    with pytest.raises(ConfigError, match=f"4 layers cannot be cut into {stages} stages"):
        split_layers(4, stages)


def test_unknown_model() -> None:
    with pytest.raises(
        ConfigError, match=r"^model\.name is 'bert'; expected one of 'gpt', or 'module:function'$"
    ):
        build_model(ModelConfig(name="bert"), 0, torch.float32, CPU)


def test_dtypes() -> None:
    bf16, masters = TrainingConfig(dtype="bf16"), TrainingConfig(dtype="bf16", master_weights=True)
    assert parameter_dtype(bf16) is torch.float32 and parameter_dtype(masters) is torch.bfloat16
    assert parameter_dtype(TrainingConfig(dtype="float64")) is torch.float64
    product = torch.ones(2, 2)
    with autocast_context(bf16, CPU):
        assert (product @ product).dtype is torch.bfloat16
    for config in (TrainingConfig(), masters):
        with autocast_context(config, CPU):
            assert (product @ product).dtype is torch.float32


def test_seeds_depend_on_every_part() -> None:
    seeds = {
        derive_seed("a", 1, 2),
        derive_seed("a", 2, 1),
        derive_seed("a", 12),
        derive_seed("a", "1", 2),
        derive_seed("b", 1, 2),
    }
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert derive_seed("layer", 1) == 2562372894439030236  # the same for ever, on every machine


def test_seeded_leaves_the_global_state_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    with seeded(1):
        first = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with pytest.raises(KeyError), seeded(1):
        assert torch.equal(torch.rand(3), first)
        raise KeyError


def test_layer_randomness_is_addressed_by_microbatch_and_layer() -> None:
    def draw(*address: int) -> float:
        with seeded_for_layer(*address, device=CPU):
            return torch.rand(()).item()

    address = (0, 1, 2, 3, 4)
    assert draw(*address) == draw(*address)
    others = set()
    for at in range(5):
        others.add(draw(*(part + (index == at) for index, part in enumerate(address))))
    assert len({draw(*address), *others}) == 6
