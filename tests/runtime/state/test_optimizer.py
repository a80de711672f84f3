"""One set of tests for every optimizer.

They are those that come with Slipstream, and one of a user's.
"""

import math
from random import Random

import pytest
import torch
from torch import nn

from slipstream.runtime.config import ConfigError, TrainingConfig
from slipstream.runtime.state.held_layers import HeldLayers
from slipstream.runtime.state.part_optimizer import PartOptimizer
from slipstream.runtime.state.part_state import as_whole_part, assemble_state
from slipstream.runtime.state.step_factors import clip_factor

OWN = """
import torch

class Heavy(torch.optim.Optimizer):
    def __init__(self, groups, config):
        super().__init__(groups, {"lr": config.learning_rate})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                old = self.state[parameter].get("sum", torch.zeros_like(parameter))
                # A new tensor, unlike torch's own.
                self.state[parameter]["sum"] = 0.9 * old + parameter.grad
                parameter.sub_(group["lr"] * self.state[parameter]["sum"])

class Whitened(torch.optim.Optimizer):
    whole_parameters = True

    def __init__(self, groups, config):
        super().__init__(groups, {"lr": config.learning_rate})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if parameter.dim() == 2:  # a square beside a matrix that is none
                    unit = torch.eye(len(parameter)).to(parameter)
                    square = state.setdefault("square", unit)
                    square += parameter.grad @ parameter.grad.T
                    parameter.sub_(group["lr"] * torch.linalg.solve(square, parameter.grad))
                else:
                    state.setdefault("length", torch.zeros(()).to(parameter)).add_(1)
                    parameter.sub_(group["lr"] * parameter.grad)
"""
CONFIGS = {
    "adamw": TrainingConfig(learning_rate=0.1),
    "sgd": TrainingConfig(optimizer="sgd", learning_rate=0.1),
    "sgd with momentum": TrainingConfig(optimizer="sgd", learning_rate=0.1, momentum=0.9),
    "muon": TrainingConfig(optimizer="muon", learning_rate=0.1),
    "own of whole matrices": TrainingConfig(
        optimizer="my_own_optimizer:Whitened", learning_rate=0.1
    ),
    "own": TrainingConfig(optimizer="my_own_optimizer:Heavy", learning_rate=0.1),
}


@pytest.fixture(params=CONFIGS.values(), ids=CONFIGS.keys())
def config(request, tmp_path_factory, monkeypatch) -> TrainingConfig:
    if request.param.optimizer.startswith("my_own"):
        folder = tmp_path_factory.mktemp("own")
        (folder / "my_own_optimizer.py").write_text(OWN)
        monkeypatch.syspath_prepend(folder)
    return request.param


def build_optimizer(layers: dict[int, nn.Module], config: TrainingConfig) -> PartOptimizer:
    """One that steps all of some layers."""
    found = HeldLayers(layers, config).optimizer
    assert isinstance(found, PartOptimizer)
    return found


class Rig:
    """Two layers and their optimizer; gradients depend on the iteration alone."""

    def __init__(
        self,
        config: TrainingConfig,
        layers: tuple[int, ...] = (3, 4),
        dtype: torch.dtype = torch.float64,
    ) -> None:
        torch.manual_seed(0)
        everything = {
            layer: nn.Sequential(nn.Linear(3, 5, dtype=dtype), nn.LayerNorm(5, dtype=dtype))
            for layer in (3, 4)
        }
        self.layers = {layer: everything[layer] for layer in layers}
        self.optimizer = build_optimizer(self.layers, config)

    def backward(self, iteration: int) -> None:
        for layer, module in self.layers.items():
            generator = torch.Generator().manual_seed(100 * iteration + layer)
            for parameter in module.parameters():
                parameter.grad = torch.randn(
                    parameter.shape, generator=generator, dtype=parameter.dtype
                )

    def run(self, iterations: range, factor: float = 1.0) -> None:
        for iteration in iterations:
            self.backward(iteration)
            self.optimizer.step(iteration, factor)

    def state(self) -> dict[str, torch.Tensor]:
        return {
            f"{layer}.{name}": tensor.clone()
            for layer in self.layers
            for name, tensor in self.layer_state(layer).items()
        }

    def layer_state(self, layer: int) -> dict[str, torch.Tensor]:
        return assemble_state(self.layers[layer], self.optimizer.own_states(layer))


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(tensor, right[name]) for name, tensor in left.items()
    )


@pytest.mark.parametrize("before", [0, 1, 4])
def test_undo_is_exact(config, before) -> None:
    rig = Rig(config)
    rig.run(range(before))
    state = rig.state()
    for factor in (1.0, 0.3, math.nan):
        rig.backward(before)
        rig.optimizer.step(before, factor)
        assert not same(rig.state(), state)
        rig.optimizer.undo()
        assert same(rig.state(), state) and rig.optimizer.open_iteration is None


def test_undone_and_redone_is_as_if_done_once(config) -> None:
    rig, judge = Rig(config), Rig(config)
    for iteration in range(5):
        rig.backward(iteration)
        rig.optimizer.step(iteration)
        rig.optimizer.undo()
        rig.optimizer.step(iteration, 0.25)
        judge.run(range(iteration, iteration + 1), 0.25)
        assert same(rig.state(), judge.state())


def test_only_the_last_step_can_be_undone(config) -> None:
    rig = Rig(config)
    rig.run(range(2))
    assert rig.optimizer.open_iteration == 1
    rig.optimizer.commit()
    rig.optimizer.commit()
    with pytest.raises(AssertionError, match="no step is open"):
        rig.optimizer.undo()


def test_layers_move_with_their_state(config) -> None:
    # A worker that takes over one layer after three iterations goes on as those who always had it.
    veteran, newcomer = Rig(config), Rig(config, (4,))
    for parameter in newcomer.layers[4].parameters():
        nn.init.zeros_(parameter)
    veteran.run(range(3))
    newcomer.optimizer.load_parts([as_whole_part(newcomer.layers[4], 4, veteran.layer_state(4))])
    newcomer.optimizer.set_version(2)
    veteran.run(range(3, 6))
    newcomer.run(range(3, 6))
    newcomer.optimizer.undo()
    newcomer.run(range(5, 6))
    assert same(
        newcomer.state(),
        {name: tensor for name, tensor in veteran.state().items() if name.startswith("4.")},
    )


def test_a_foreign_state_is_refused() -> None:
    rig = Rig(TrainingConfig())
    good = rig.layer_state(3)
    missing = {name: tensor for name, tensor in good.items() if name != "model.1.bias"}
    for bad, message in (
        (missing, "has no elements of 'model.1.bias'; expected 5"),
        ({**good, "model.2.bias": torch.ones(5)}, "5 elements of 'model.2.bias'; expected none"),
        ({**good, "optimizer.sum.9": torch.ones(5)}, "'optimizer.sum.9'; expected none"),
        ({**good, "model.1.bias": torch.ones(4)}, "4 elements of 'model.1.bias'; expected 5"),
    ):
        with pytest.raises(ValueError, match=message):
            as_whole_part(rig.layers[3], 3, bad)


def test_undo_takes_what_is_written(config) -> None:
    rig = Rig(config)
    rig.run(range(2))
    assert rig.optimizer.undo_bytes() == sum(tensor.nbytes for tensor in rig.state().values())


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_only_matrices_decay(name: str) -> None:
    layer = nn.LayerNorm(2)
    layer.matrix, layer.frozen = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(1), False)
    optimizer = build_optimizer(
        {0: layer}, TrainingConfig(optimizer=name, learning_rate=0.1, weight_decay=0.5)
    )
    for parameter in (layer.matrix, layer.weight, layer.bias):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0)
    torch.testing.assert_close(layer.matrix.detach(), torch.full((2, 2), 0.95))
    assert torch.equal(layer.weight, torch.ones(2)) and torch.equal(layer.frozen, torch.ones(1))


def test_a_stage_without_vectors_or_without_parameters() -> None:
    for layer in (nn.Linear(2, 2, bias=False), nn.ReLU()):
        optimizer = build_optimizer({0: layer}, TrainingConfig())
        assert optimizer.layer_squares() == {0: 0}
        optimizer.step(0)
        optimizer.undo()


def test_unknown_optimizers_are_refused() -> None:
    for name, message in (
        ("adam", "one of 'adamw', 'sgd', 'muon', or"),
        ("no.such:thing", "cannot be imported: No module"),
        ("math:pi", "a float; expected a class or function"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_optimizer({}, TrainingConfig(optimizer=name))


def test_squares_do_not_depend_on_the_stage_or_its_buffers() -> None:
    # They are equal bit for bit, also where the gradients are parts of one flat tensor at any
    # offset.
    whole, part = Rig(TrainingConfig()), Rig(TrainingConfig(), (4,))
    whole.backward(0)
    part.backward(0)
    for parameter in part.layers[4].parameters():
        assert parameter.grad is not None
        room = torch.empty(parameter.numel() + 1, dtype=parameter.dtype)[1:].view(parameter.shape)
        parameter.grad = room.copy_(parameter.grad)
    assert whole.optimizer.layer_squares()[4] == part.optimizer.layer_squares()[4]


def test_clip_factor() -> None:
    clipped = TrainingConfig(clip_norm=5.0)
    assert clip_factor([9.0, 15.0], clipped) == 1.0
    gradient = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    gradient.grad = torch.tensor([6.0, 8.0], dtype=torch.float64)
    torch.nn.utils.clip_grad_norm_([gradient], 5.0)
    assert 6.0 * clip_factor([36.0, 64.0], clipped) == gradient.grad[0]
    assert clip_factor([36.0, 64.0], TrainingConfig()) == 1.0
    assert clip_factor([], clipped) == 1.0
    for bad in ([math.inf, 1.0], [math.nan, 1.0], [1e308, 1e308]):
        assert clip_factor(bad, TrainingConfig(clip_norm=5.0, skip_nonfinite=True)) is None
        assert clip_factor(bad, clipped) != 1.0
    values = [1e16, 1.0, -0.0, 3.0, 1e-9, 7.0]
    assert (
        len({clip_factor(order, clipped) for order in (values, values[::-1], sorted(values))}) == 1
    )


@pytest.mark.parametrize("what", ["parameters", "state"])
def test_a_flipped_bit_changes_what_is_computed(what):
    # A bit of a zero, as in the state of a row that no sample has used, is rounded away by the next
    # step.
    layer = nn.Linear(3, 5, dtype=torch.float64)
    optimizer = build_optimizer({0: layer}, TrainingConfig(learning_rate=0.1))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.zeros_like(parameter).index_fill_(0, torch.tensor([2]), 1.0))
            parameter.grad = parameter.clone()
    optimizer.step(0)
    for seed in range(50):
        before = {
            key: tensor.clone() for key, tensor in optimizer.part_state(0, (0, 20)).tensors.items()
        }
        assert optimizer.flip_bit(what, Random(seed))
        (changed,) = [
            before[key][before[key] != tensor].item()
            for key, tensor in optimizer.part_state(0, (0, 20)).tensors.items()
            if tensor.dim() and not torch.equal(before[key], tensor)
        ]
        assert changed != 0.0
    assert not build_optimizer({0: layer}, TrainingConfig()).flip_bit("state", Random(0)), (
        "it has none yet"
    )
