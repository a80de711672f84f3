"""Runs with Muon, and with a user's optimizer of whole layers, whatever fails.

They are compared with one process that steps by `torch.optim.Muon` and `torch.optim.AdamW`.
"""

import sys
from dataclasses import replace

import pytest
import torch

from slipstream.planner.job.file import Job
from slipstream.runtime.checkpoints.checkpoint import open_latest
from slipstream.runtime.config import ConfigError, RunConfig
from slipstream.runtime.data.data import Microbatch, load_data
from slipstream.runtime.launch import Resilience, run
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.run_folder import CHECKPOINTS
from slipstream.runtime.tools.reference import ReferenceResult, _compute_loss
from tests.jobs import grid
from tests.runtime.failing import BACK, KILLS, KILLS_ITERATIONS, at, dead, returned, train
from tests.runtime.forked import own_fork_server
from tests.runtime.running import assert_same_numbers, schedule_for, tiny
from tests.runtime.state.test_optimizer import OWN
from tests.runtime.test_routes import LINEAR, eight_layers
from tests.runtime.test_settling import phases
from tests.runtime.test_settling import train as settle

WIDE = grid(3, 2, 2, more="optimizer = 1")


def by_torch(config: RunConfig, job: Job = WIDE) -> ReferenceResult:
    """Train in one process, as one would write it.

    Muon steps what is a matrix in the blocks, and torch's own function clips.
    """
    training = config.training
    model = build_model(config.model, training.seed, torch.float64, torch.device("cpu"))
    corpus = load_data(config, job.microbatches)
    layers = torch.nn.ModuleList(model.build(layer) for layer in range(model.layers))
    matrices = [
        parameter
        for block in layers[1:-1]
        for parameter in block.parameters()
        if parameter.dim() == 2
    ]
    vectors = [parameter for parameter in layers.parameters() if parameter.dim() == 1]
    ends = [
        parameter
        for layer in (layers[0], layers[-1])
        for parameter in layer.parameters()
        if parameter.dim() == 2
    ]
    muon = torch.optim.Muon(
        matrices, lr=training.muon.learning_rate, weight_decay=training.weight_decay
    )
    adamw = torch.optim.AdamW(
        [{"params": ends}, {"params": vectors, "weight_decay": 0.0}],
        lr=training.learning_rate,
        betas=training.betas,
        eps=training.epsilon,
        weight_decay=training.weight_decay,
    )
    losses = []
    for iteration in range(training.iterations):
        samples = [
            Microbatch(iteration, pipeline, index)
            for pipeline, count in enumerate(job.microbatches)
            for index in range(count)
        ]
        mean = [
            _compute_loss(config, model, layers, corpus, sample) / len(samples)
            for sample in samples
        ]
        for loss in mean:
            loss.backward()
        losses.append(sum(loss.item() for loss in mean))
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(layers.parameters(), training.clip_norm)
        muon.step()
        adamw.step()
        layers.zero_grad()
    return ReferenceResult(
        losses, {name: parameter.detach() for name, parameter in layers.named_parameters()}, "", {}
    )


def muon(iterations: int, **training: object) -> RunConfig:
    return tiny(iterations=iterations, optimizer="muon", muon={"learning_rate": 0.02}, **training)


def test_one_dies_after_a_step_that_is_undone(fork_server, tmp_path):
    config = muon(6, clip_norm=1.8)
    result = train(
        [at("1.0", 2, "O"), at("2.1", 4, 1)], fork_server, tmp_path, job=WIDE, config=config
    )
    assert dead(result) == ["1.0", "2.1"]
    assert_same_numbers(result, by_torch(config))


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", [None, 1.8])
def test_killed_anywhere_and_back(clip_norm, fork_server, tmp_path):
    config = muon(KILLS_ITERATIONS, clip_norm=clip_norm)
    result = train(KILLS, fork_server, tmp_path, job=WIDE, config=config, returns=BACK)
    assert set(dead(result)) == {"0.0", "2.1", "1.0", "1.1"} and sorted(returned(result)) == [
        "0.0",
        "2.1",
    ]
    assert all(recovery.meanwhile for recovery in result.recoveries if recovery.returned), (
        "who comes back makes the same steps"
    )
    assert_same_numbers(result, by_torch(config))


@pytest.mark.slow
def test_layers_move(fork_server, tmp_path):
    """After a death layers are spread anew: matrices move with their momentum, while all train."""
    config = eight_layers(
        iterations=60,
        optimizer="muon",
        muon={"learning_rate": 0.02},
        evaluate_every=10,
        validation_text=__file__,
    )
    result, events, _ = settle([at("1.2", 2, "O")], fork_server, tmp_path, config=config)
    assert dead(result) == ["1.2"] and phases(events) == ["whole", "at once", "settled"]
    assert_same_numbers(result, by_torch(config, LINEAR))


def test_a_checkpoint_goes_on_with_its_momentum(fork_server, tmp_path):
    config = muon(6)
    first = run(
        schedule_for(WIDE),
        config,
        out=tmp_path / "first",
        iterations=3,
        fork_server=fork_server,
        resilience=Resilience(checkpoint_every=3),
    )
    second = run(
        schedule_for(WIDE),
        config,
        out=tmp_path / "second",
        fork_server=fork_server,
        resilience=Resilience(resume=open_latest(first.out / CHECKPOINTS)),
    )
    assert_same_numbers(replace(second, losses=first.losses + second.losses), by_torch(config))


@pytest.mark.slow
def test_an_optimizer_of_whole_layers_of_ones_own(tmp_path, monkeypatch):
    """Which keeps a square beside each matrix."""
    (tmp_path / "whole_optimizer.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "whole_optimizer", raising=False)
    config = tiny(
        iterations=KILLS_ITERATIONS, optimizer="whole_optimizer:Whitened", learning_rate=0.02
    )
    with own_fork_server() as fork_server:
        result = train(KILLS, fork_server, tmp_path / "run", job=WIDE, config=config, returns=BACK)
    assert sorted(returned(result)) == ["0.0", "2.1"]


def test_who_would_have_a_part_of_a_matrix_is_refused(fork_server, tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"'muon', which needs whole parameters, and training.shard_optimizer true",
    ):
        run(
            schedule_for(WIDE), muon(3, shard_optimizer=True), out=tmp_path, fork_server=fork_server
        )
