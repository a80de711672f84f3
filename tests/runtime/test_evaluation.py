"""Validation losses are those of one process, whoever fails when.

test_settling has layers that move.
"""

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import numpy as np
import pytest
import torch

from slipstream.runtime.checkpoints.checkpoint import open_latest
from slipstream.runtime.computing.slices import WorkerSlices, find_forms
from slipstream.runtime.config import ConfigError, parse_run_config
from slipstream.runtime.data.data import load_data, load_validation_data
from slipstream.runtime.launch import Resilience, run
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.placement import Placement
from slipstream.runtime.protocol.store import host_store
from slipstream.runtime.replay.exchange import Exchange
from slipstream.runtime.replay.group_cache import GroupCache
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.state.held_layers import build_holding
from slipstream.runtime.state.steps import StepController
from slipstream.runtime.worker.training_loop import Evaluation, EvaluationMode
from slipstream.schedules.program import build_program
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import JOB, TIMEOUT_SECONDS, at, dead, planned
from tests.runtime.running import assert_same_evaluations, judge, schedule_for, tiny


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, object]:
    """Tokens to train and to evaluate on: `[training]` options."""
    folder, random = tmp_path_factory.mktemp("tokens"), np.random.default_rng(0)
    for name, count in (("train", 600), ("validation", 150)):
        random.integers(0, 256, count).astype("<u2").tofile(folder / f"{name}.bin")
    return {
        "tokens": str(folder / "train.bin"),
        "validation_tokens": str(folder / "validation.bin"),
        "evaluate_every": 2,
        "evaluation_iterations": 2,
    }


@pytest.mark.parametrize(
    ("modes", "clip"), [(("split", "staggered"), 1.8), (("fused", "synchronous"), None)]
)
def test_failures_before_in_and_after_evaluations(modes, clip, files, fork_server, tmp_path):
    # Epochs have 37 samples, 4 an iteration: training has read all of them when the first run ends.
    config = tiny(iterations=10, clip_norm=clip, **files)
    scheduler = planned(JOB, *modes)
    half = Resilience(
        scheduler=scheduler,
        heartbeat_timeout_seconds=TIMEOUT_SECONDS,
        checkpoint_every=6,
        injections=(at("1.0", 3, "evaluating"), at("0.1", 5, 3)),
    )
    result = run(
        scheduler(()), config, iterations=6, out=tmp_path, fork_server=fork_server, resilience=half
    )
    assert dead(result) == ["1.0", "0.1"]
    resumed = run(
        scheduler(()),
        config,
        out=tmp_path,
        fork_server=fork_server,
        resilience=Resilience(
            scheduler=scheduler,
            resume=open_latest(tmp_path / "checkpoints"),
            injections=(at("0.0", 9, "evaluating"),),
            heartbeat_timeout_seconds=TIMEOUT_SECONDS,
        ),
    )
    assert dead(resumed) == ["0.0"]
    reference = judge(config, JOB.microbatches, 10)
    assert [*result.losses, *resumed.losses] == pytest.approx(reference.losses, rel=0, abs=1e-9)
    assert list(reference.evaluations) == [1, 3, 5, 7, 9]
    assert_same_evaluations(tmp_path, reference)


def test_an_evaluation_that_is_left_behind_leaves_layers_as_they_were():
    # A thread that is stuck in the network is left behind; the iteration is run again on its
    # layers, with dropout.
    config, schedule, (store, _) = tiny(), schedule_for(grid(1, 1, 2)), host_store()
    model = build_model(config.model, 0, torch.float64, torch.device("cpu"))
    worker, placement = Worker(0, 0), Placement([0, model.layers])
    session = GenerationSession(
        Membership(1, {worker: 0}, worker),
        links=GroupCache("gloo"),
        device=model.device,
        store=store,
    )
    session.connect()
    holding = build_holding(model, range(model.layers), config.training)
    stuck, freed, mode = Event(), Event(), EvaluationMode()

    def before_op(*_):
        stuck.set()
        assert freed.wait(TIMEOUT_SECONDS)

    evaluation = Evaluation(
        schedule,
        session=session,
        steps=StepController(
            holding, config.training, layers=model.layers, share=None, staggered=False
        ),
        slices=WorkerSlices(
            holding,
            placement.slice_layers(build_program(schedule, worker)),
            model,
            loss_scale=0.5,
            config=config,
        ),
        exchange=lambda program, iterations: Exchange(
            program, session, find_forms(model, config), iterations
        ),
        feed=lambda name: load_data(config).batch(name, 1, config.model.context),
        before_op=before_op,
        iterations=1,
        mode=mode,
    )
    modules = [part for module in holding.modules.values() for part in module.modules()]
    assert all(module.training for module in modules)
    with ThreadPoolExecutor(1) as pool:
        loss = pool.submit(evaluation.run)
        assert stuck.wait(TIMEOUT_SECONDS) and not any(module.training for module in modules)
        mode.leave_mode()
        assert all(module.training for module in modules)
        modules[0].training = False  # another evaluation has begun
        freed.set()
        assert loss.result(TIMEOUT_SECONDS) > 0 and not modules[0].training
    session.close()


@pytest.mark.parametrize(
    ("training", "said"),
    [
        (
            {"evaluate_every": 3},
            "training.evaluate_every is 3, and there is nothing to evaluate on",
        ),
        ({"validation_text": "a"}, "training.evaluate_every is not given, and validation data are"),
        (
            {"evaluate_every": 3, "validation_text": "a", "validation_tokens": "b"},
            "validation_data: expected one of them",
        ),
    ],
)
def test_keys_that_do_not_go_together(training, said):
    with pytest.raises(ConfigError, match=said):
        parse_run_config({}, training)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("validation_tokens", "training.validation_tokens is '/none', which does not exist"),
        ("validation_text", "training.validation_text is '/none', which does not exist"),
    ],
)
def test_the_key_is_named(key, said):
    with pytest.raises(ConfigError, match=f"^{said}"):
        load_validation_data(parse_run_config({}, {"evaluate_every": 3, key: "/none"}))
