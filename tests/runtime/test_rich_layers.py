"""Rich layers, with deaths, returns, moves, files.

They have tuples, batches that all layers read, losses of any layer, tied embeddings.

What each must give is computed in one process by `plain`, which shares the layers with the runtime
and nothing else.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.planner.failures import FailurePlanner
from slipstream.runtime.checkpoints.checkpoint import load_layers, open_latest
from slipstream.runtime.checkpoints.parameters import load_parameters
from slipstream.runtime.config import RunConfig, parse_run_config
from slipstream.runtime.data.data import Microbatch
from slipstream.runtime.launch import Resilience, run
from slipstream.runtime.models.calling import collecting_losses
from slipstream.runtime.models.layered_model import seeded_for_layer
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.tools.profile import profile_stages
from slipstream.runtime.tools.reference import reference_run
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import at, dead, returned, train
from tests.runtime.rich_model import Data, Model
from tests.runtime.running import assert_same_evaluations, assert_same_numbers, judge, schedule_for
from tests.runtime.test_routes import cut_anew

LINEAR = grid(2, 4, 4, more="optimizer = 1\n[placement]\nlayers = [2, 2, 2, 2]")
V = grid(2, 2, 3, more="[placement]\norder = 'v'\nchunks = 2\nlayers = [2, 2, 2, 2]")


def rich(iterations: int = 6, **training: object) -> RunConfig:
    return parse_run_config(
        {
            "name": "tests.runtime.rich_model:Model",
            "blocks": 6,
            "width": 8,
            "heads": 1,
            "context": 8,
            "dropout": 0.1,
        },
        {
            "batch": 1,
            "dtype": "float64",
            "device": "cpu",
            "iterations": iterations,
            "data": "tests.runtime.rich_model:Data",
        },
        **training,
    )


def plain(
    config: RunConfig, microbatches: tuple[int, ...], iterations: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of a loop in one process.

    It knows nothing of the runtime but how it seeds dropout.
    """
    model, data = Model(config.model, 0, torch.float64, torch.device("cpu")), Data(config)
    layers = torch.nn.ModuleList(model.build(layer) for layer in range(model.layers))
    layers[-1].logits.weight = layers[0].tokens.weight
    matrices = [parameter for parameter in layers.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in layers.parameters() if parameter.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.95),
    )
    losses = []
    for iteration in range(iterations):
        total = 0.0
        for microbatch in (
            Microbatch(iteration, pipeline, index)
            for pipeline, count in enumerate(microbatches)
            for index in range(count)
        ):
            batch = data.batch(microbatch, 1, 8)
            value = batch.tokens
            with collecting_losses() as added:
                for index, layer in enumerate(layers):
                    with seeded_for_layer(0, *microbatch, index, model.device):
                        value = layer(value) if index == len(layers) - 1 else layer(value, batch)
            loss = (model.loss(value, batch.targets, batch) + sum(added)) / sum(microbatches)
            assert len(added) == 6
            loss.backward()
            total += loss.item()
        if config.training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(layers.parameters(), config.training.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, dict(layers.named_parameters())


def test_the_reference_run_is_the_plain_one() -> None:
    losses, parameters = plain(rich(), (2, 2), 3)
    expected = reference_run(rich(), (2, 2), 3)
    assert expected.losses == pytest.approx(losses, abs=1e-12)
    assert expected.parameters.keys() == parameters.keys()
    assert all(
        torch.allclose(parameter, parameters[name], rtol=0, atol=1e-12)
        for name, parameter in expected.parameters.items()
    )


EVALUATED = {
    "evaluate_every": 2,
    "validation_data": "tests.runtime.rich_model:Data",
    "parameter_groups": [{"parameters": "0.tokens.weight", "weight_decay": 0.0}],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "failed", "backward", "training"),
    [
        (LINEAR, [], "split", EVALUATED),
        (LINEAR, ["1.0"], "fused", {"clip_norm": 1.6}),
        (LINEAR, ["0.3"], "split", {"clip_norm": 1.6, "skip_nonfinite": True}),
        (V, ["0.1"], "split", {}),
        (V, [], "fused", {}),
        (V, [], "split", {**EVALUATED, "clip_norm": 1.6, "shard_optimizer": True}),
    ],
    ids=["linear", "first lost", "last lost", "v", "v-fused", "v-sharded"],
)
def test_layers_of_all_kinds(job, failed, backward, training, fork_server, tmp_path):
    config = rich(**training)
    result = run(
        schedule_for(job, failed, backward=backward), config, out=tmp_path, fork_server=fork_server
    )
    expected = judge(config, job.microbatches, config.training.iterations)
    assert_same_numbers(result, expected)
    if "evaluate_every" in training:
        assert_same_evaluations(tmp_path, expected)


@pytest.mark.slow
@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_deaths_moves_and_returns(shard_optimizer, fork_server, tmp_path):
    """Each schedule cuts the layers anew, with deaths, moves and returns.

    What layers share comes together on a worker, and parts again.
    """
    kills = [("1.0", 1, 3), ("0.3", 3, "A"), ("1.1", 5, "O")]
    result = train(
        [at(*kill) for kill in kills],
        fork_server,
        tmp_path,
        job=LINEAR,
        scheduler=cut_anew(LINEAR),
        config=rich(iterations=40, clip_norm=1.6, shard_optimizer=shard_optimizer),
        checkpoint_every=20,
        returns=tuple(Return(Worker.parse(kill[0]), 8) for kill in kills),
    )
    assert dead(result) == [kill[0] for kill in kills] and returned(result)


def test_what_is_shared_is_written_once_and_goes_on_from_a_checkpoint(fork_server, tmp_path):
    # It does so on two stages instead of four; then the last stage is lost, and they go back.
    config = rich(iterations=12)
    run(
        schedule_for(LINEAR),
        rich(iterations=12, shard_optimizer=True),
        out=tmp_path / "half",
        iterations=6,
        fork_server=fork_server,
        resilience=Resilience(checkpoint_every=6),
    )
    checkpoint = open_latest(tmp_path / "half" / "checkpoints")
    assert checkpoint is not None and checkpoint.iteration == 6
    written = load_layers(checkpoint, (0, 7))
    assert "model.tokens.weight" in written[0] and not any("logits" in name for name in written[7])
    assert not any("logits" in name for name in load_parameters(tmp_path / "half"))
    job = grid(2, 2, 4)
    whole = schedule_for(job)
    result = run(
        whole,
        config,
        out=tmp_path / "whole",
        fork_server=fork_server,
        resilience=Resilience(
            scheduler=FailurePlanner(job, whole).after,
            resume=checkpoint,
            checkpoint_every=2,
            injections=(at("0.1", 8, "A"), at("1.1", 9, "A")),
        ),
    )
    assert any(recovery.went_back_to for recovery in result.recoveries)
    expected = judge(config, job.microbatches, 12)
    assert_same_numbers(result, replace(expected, losses=expected.losses[6:]))


def test_profile_measures_them_and_what_computing_again_saves(fork_server):
    # It is on two stages: of the first one, and of a later one that takes a tuple.
    ranges = [(0, 4), (4, 8)]
    kept, again = (
        profile_stages(
            rich(recompute=recompute),
            ranges,
            copies=1,
            workers=1,
            microbatches=2,
            rounds=1,
            fork_server=fork_server,
        )
        for recompute in ("none", "full")
    )
    for plain, less in zip(kept.stages, again.stages, strict=True):
        assert 0 < less.activation_bytes < 0.6 * plain.activation_bytes
        assert less.static_bytes == plain.static_bytes
