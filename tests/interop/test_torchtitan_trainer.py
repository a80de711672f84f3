"""A run whose workers die and return has the numbers of torchtitan's Trainer in one process, from its own start."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from slipstream.runtime.api import Injection, Return, parse_run_config, run
from slipstream.runtime.events import METRICS, decode_metrics
from slipstream.runtime.model.checkpoints.parameters import load_layer
from slipstream.runtime.model.layers.layered_model import model_for
from slipstream.runtime.run_options import Resilience
from slipstream.schedules.schedule import Worker
from tests.interop.titan_training import write_assets
from tests.jobs import grid
from tests.runtime.running import schedule_for

installed = pytest.mark.skipif(not all(map(importlib.util.find_spec, ("torchtitan", "triton"))),
                               reason="torchtitan is not installed: make neighbours")
ROOT = Path(__file__).parents[2]
STEPS = 20
TOLERANCE = 1e-5
"""Relative, in float32."""
NORM_TOLERANCE = 5e-4
"""torchtitan's norm is a sum in float32, the runtime's one in float64."""


def trainer(folder, *more):
    """Run torchtitan's Trainer in one process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "TITAN_ASSETS": str(folder / "assets"), "TITAN_METRICS": str(folder / "metrics"),
                   "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-m", "tests.interop.titan_cpu", "--module", "tests.interop.titan_config",
                           "--config", "small", "--dump_folder", str(folder / "out"), *more], cwd=ROOT,
                          env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("titan")
    write_assets(folder / "assets")
    trainer(folder, "--checkpoint.create_seed_checkpoint")
    trainer(folder)
    return folder


@installed
@pytest.mark.parametrize(("pipelines", "microbatches"), [(2, 2), (3, [2, 1, 1])])
def test_numbers_are_those_of_its_trainer(trained, tmp_path, pipelines, microbatches):
    from torch.distributed.checkpoint.state_dict_loader import load

    config = parse_run_config({"torchtitan": "llama3/debugmodel", "context": 16, "options": {
        "attention": "sdpa", "checkpoint": str(trained / "out" / "checkpoint" / "step-0")}}, {
        "device": "cpu", "batch": 2, "iterations": STEPS, "clip_norm": 1.0, "learning_rate": 8e-4,
        "parameter_groups": [{"parameters": "*", "weight_decay": 0.1}], "data": "torchtitan", "loss_weights": "tokens",
        "learning_rate_schedule": "tests.interop.titan_training:rate", "options": {
            "assets": str(trained / "assets"), "dataset": "c4_test", "dataset_path": str(trained / "assets" / "data")}})
    job, dies = grid(pipelines, 2, microbatches), Worker(1, 1)
    result = run(schedule_for(job), config, out=tmp_path, resilience=Resilience(
        scheduler=lambda down: schedule_for(job, [str(one) for one in down]),
        injections=(Injection(dies, 3, 1), Injection(Worker(0, 0), 12, "A")), returns=(Return(dies, 5),)))
    assert len(result.recoveries) >= 2
    theirs = [json.loads(line) for line in (trained / "metrics").read_text().splitlines()]
    ours = [decode_metrics(line) for line in (tmp_path / METRICS).read_bytes().splitlines()]
    assert len(theirs) == len(ours) == STEPS
    assert [one.loss for one in ours] == pytest.approx([one["loss"] for one in theirs], rel=TOLERANCE)
    assert [one.gradient_norm for one in ours] == pytest.approx([one["norm"] for one in theirs], rel=NORM_TOLERANCE)
    assert [one.learning_rate for one in ours] == pytest.approx([one["rate"] for one in theirs], rel=1e-12)
    model = model_for(config.model, 0, torch.float32, torch.device("cpu"))
    final = {name: value for layer in range(model.layers)
             for name, value in model.named_as_written(layer, load_layer(tmp_path, layer)).items()}
    expected = {name: torch.empty_like(value) for name, value in final.items()}
    load(expected, checkpoint_id=trained / "out" / "checkpoint" / f"step-{STEPS}", no_dist=True)
    print("parameters", max(((value - expected[name]).norm() / expected[name].norm()).item()
                            for name, value in final.items()))
    for name, value in final.items():
        assert (value - expected[name]).norm() <= TOLERANCE * expected[name].norm(), name
