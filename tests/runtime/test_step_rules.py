"""Parameters that a rule of their layer steps by what it counts.

There are deaths, returns, moves and undone steps.

What a run must give is computed in one process by `plain`, which counts for itself.
"""

import pytest
import torch
from torch import nn

from slipstream.runtime.config import ConfigError, RunConfig, parse_run_config
from slipstream.runtime.data.data import Microbatch, load_data
from slipstream.runtime.launch import Resilience, run
from slipstream.runtime.models.layered_model import build_model, seeded_for_layer
from slipstream.runtime.models.step_rules import leave_gradient
from slipstream.runtime.moving.received_part import SteppedPart
from slipstream.runtime.state.held_layers import build_layer
from slipstream.runtime.state.part_optimizer import PartOptimizer
from slipstream.runtime.tools.reference import ReferenceResult, reference_run
from tests.jobs import grid
from tests.runtime.failing import BACK, KILLS, KILLS_ITERATIONS, at, dead, returned, train
from tests.runtime.ruled_model import Block, Model, level
from tests.runtime.running import assert_same_masters, assert_same_numbers, judge, schedule_for
from tests.runtime.test_routes import LINEAR
from tests.runtime.test_settling import phases
from tests.runtime.test_settling import train as settle

WIDE = grid(3, 2, 2, more="optimizer = 1")


def ruled(iterations: int = 6, **training: object) -> RunConfig:
    return parse_run_config(
        {
            "name": "tests.runtime.ruled_model:Model",
            "blocks": 6,
            "width": 8,
            "context": 8,
            "dropout": 0.1,
        },
        {
            "batch": 1,
            "dtype": "float64",
            "device": "cpu",
            "iterations": iterations,
            "learning_rate": 0.01,
        },
        **training,
    )


def plain(config: RunConfig, microbatches: tuple[int, ...]) -> ReferenceResult:
    """A loop that sees the model's parameters, but for the biases, as torch's optimizer does."""
    training = config.training
    model = Model(config.model, training.seed, torch.float64, torch.device("cpu"))
    corpus = load_data(config, microbatches)
    layers = nn.ModuleList(model.build(layer) for layer in range(model.layers))
    mine = [
        parameter
        for name, parameter in layers.named_parameters()
        if not name.endswith(".bias") or name.count(".") > 1
    ]
    matrices = [parameter for parameter in mine if parameter.dim() >= 2]
    vectors = [parameter for parameter in mine if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": training.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=0.01,
        betas=training.betas,
    )
    blocks = [layer for layer in layers if isinstance(layer, Block)]
    losses = []
    for iteration in range(training.iterations):
        total = 0.0
        for sample in (
            Microbatch(iteration, pipeline, index)
            for pipeline, count in enumerate(microbatches)
            for index in range(count)
        ):
            value, target = corpus.batch(sample, 1, 8)
            for index, layer in enumerate(layers):
                with seeded_for_layer(training.seed, *sample, index, model.device):
                    value = layer(value)
            loss = model.loss(value, target) / sum(microbatches)
            loss.backward()
            total += loss.item()
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(mine, training.clip_norm)
        optimizer.step()
        with torch.no_grad():
            for block in blocks:
                tokens = torch.stack(block.counts).sum(0).float()
                change = 0.02 * torch.sign(tokens.mean() - tokens)
                block.bias.add_(change - change.mean())
                block.counts.clear()
        layers.zero_grad()
        losses.append(total)
    return ReferenceResult(
        losses, {name: parameter.detach() for name, parameter in layers.named_parameters()}, "", {}
    )


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_the_reference_run_is_the_plain_one(clip_norm) -> None:
    config = ruled(clip_norm=clip_norm)
    ours, expected = reference_run(config, (2, 2, 2), 6), plain(config, (2, 2, 2))
    assert ours.losses == pytest.approx(expected.losses, abs=1e-12)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(ours.parameters[name], value, rtol=0, atol=1e-12)
    assert ours.parameters["3.bias"].abs().max() > 0.02, "and the biases have moved"


@pytest.mark.parametrize(
    "training",
    [
        {"recompute": "full"},
        *(pytest.param(more, marks=pytest.mark.slow) for more in ({}, {"shard_optimizer": True})),
    ],
    ids=str,
)
def test_one_dies_after_a_step_that_is_undone(training, fork_server, tmp_path) -> None:
    # Tokens are counted once where a layer is computed again, and are never scaled as gradients
    # are.
    config = ruled(clip_norm=0.5, **training)
    result = train(
        [at("1.0", 2, "O"), at("2.1", 4, 1)], fork_server, tmp_path, job=WIDE, config=config
    )
    assert dead(result) == ["1.0", "2.1"]
    assert_same_numbers(result, plain(config, WIDE.microbatches))


def test_who_comes_back_steps_by_the_rule_while_it_gets_its_layers(fork_server, tmp_path) -> None:
    config = ruled(40)
    result = train(
        [at("0.0", 2, "O")], fork_server, tmp_path, config=config, job=WIDE, returns=BACK[:1]
    )
    assert returned(result) == ["0.0"] and all(
        recovery.meanwhile for recovery in result.recoveries if recovery.returned
    )
    assert_same_numbers(result, plain(config, WIDE.microbatches))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["fused", "split"])
@pytest.mark.parametrize(
    "training", [{"clip_norm": 0.5}, {"shard_optimizer": True}, {"optimizer": "sgd"}], ids=str
)
def test_killed_anywhere_and_back(training, mode, fork_server, tmp_path) -> None:
    result = train(
        KILLS,
        fork_server,
        tmp_path,
        job=WIDE,
        config=ruled(KILLS_ITERATIONS, **training),
        returns=BACK,
        modes=(mode, "staggered"),
    )
    assert set(dead(result)) == {"0.0", "2.1", "1.0", "1.1"} and sorted(returned(result)) == [
        "0.0",
        "2.1",
    ]


@pytest.mark.slow
def test_layers_move(fork_server, tmp_path) -> None:
    config = ruled(60, evaluate_every=10, validation_text=__file__)
    result, events, _ = settle([at("1.2", 2, "O")], fork_server, tmp_path, config=config)
    assert dead(result) == ["1.2"] and phases(events) == ["whole", "at once", "settled"]
    assert_same_numbers(result, plain(config, LINEAR.microbatches))


def test_counts_are_exact_beside_parameters_of_fewer_bits(fork_server, tmp_path) -> None:
    """The bias is in float32 among bfloat16, and tokens are not added up in that."""
    config = ruled(master_weights=True, dtype="bf16")
    result = run(
        schedule_for(WIDE),
        config,
        out=tmp_path,
        fork_server=fork_server,
        resilience=Resilience(checkpoint_every=6),
    )
    # The losses of this model are rounded to the 8 bits of bfloat16.
    assert_same_masters(result, config, WIDE.microbatches, 6, share=1e-2, rounding=2**-8)
    assert judge(config, WIDE.microbatches, 6).parameters["3.bias"].dtype == torch.float32


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"absent": level}, "'absent', which is no trained parameter of it"),
        ({"router.running": level}, "'router.running', which is no trained parameter of it"),
    ],
)
def test_a_rule_without_a_parameter_is_refused_in_one_line(rules, words, monkeypatch) -> None:
    config = ruled()
    model = build_model(config.model, 0, torch.float64, torch.device("cpu"))
    build = model.build

    def wrong(layer: int) -> nn.Module:
        module = build(layer)
        module.step_rules = rules
        return module

    monkeypatch.setattr(model, "build", wrong)
    with pytest.raises(ConfigError, match=words) as error:
        build_layer(model, 2, config.training)
    assert "\n" not in str(error.value)


def test_what_is_left_for_a_parameter_is_left_once_however_the_loss_is_scaled() -> None:
    value, bias = torch.ones(2, 3, requires_grad=True), nn.Parameter(torch.zeros(2))
    with torch.no_grad():
        leave_gradient(value, bias, torch.tensor([1, 2]))
    (0.25 * leave_gradient(value, bias, torch.tensor([1, 2])).sum()).backward()
    assert torch.equal(bias.grad, torch.tensor([1.0, 2.0])) and torch.equal(
        value.grad, torch.full((2, 3), 0.25)
    )


def test_who_follows_steps_is_sent_the_gradient_of_a_rule_unscaled() -> None:
    # That holds also of a parameter in bfloat16, which is stepped in float32, and where the other
    # gradients are clipped.
    module = nn.Linear(3, 2).to(torch.bfloat16)
    module.step_rules = {"bias": lambda bias, gradient: bias.add_(gradient)}
    config = ruled(master_weights=True, dtype="bf16").training
    whole = (0, sum(parameter.numel() for parameter in module.parameters()))
    optimizer = PartOptimizer({0: module}, config, {0: [whole]}, {0: [whole]})
    follower = SteppedPart(optimizer.part_state(0, whole), module, config, torch.device("cpu"))
    for iteration, factor in enumerate((1.0, 0.25)):
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 2.0)
        optimizer.step(iteration, factor)
        follower.follow_step(iteration, optimizer.part_gradients(0, whole))
    ours, theirs = optimizer.part_state(0, whole).tensors, follower.to_part_state().tensors
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name].view(-1), tensor.view(-1), rtol=0, atol=0)
