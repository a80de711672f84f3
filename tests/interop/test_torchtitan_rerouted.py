"""torchtitan's Trainer in re-routed plans: the numbers of its own, whoever dies."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.torchtitan_rerouted import JOB
from tests.interop.titan_training import write_assets
from tests.runtime.running import free_port

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("torchtitan", "triton"))),
        reason="torchtitan is not installed: make neighbours",
    ),
]
ROOT = Path(__file__).parents[2]
STEPS = 6
KILLED_IN = 3
"""The step in which a rank is killed."""
SHARDS = ("--parallelism.data_parallel_shard_degree", "2")
PARTS = ("--parallelism.tensor_parallel_degree", "2")
EVERY_SAMPLE = ("--training.global_batch_size", "16")
"""Each of two shards reads samples of its own."""


def train(folder, config, count, *flags, **variables):
    """Run torchtitan with a configuration of `titan_rerouted`.

    Returns exit statuses, and the lines of each rank.
    """
    folder.mkdir()
    process_environment = {
        **os.environ,
        "TITAN_ASSETS": str(folder.parent / "assets"),
        "TITAN_DTYPE": "float64",
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "TITAN_TABLE": str(folder.parent / "table"),
        **variables,
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.interop.titan_forks",
            str(count),
            str(folder),
            "--module",
            "tests.interop.titan_rerouted",
            "--config",
            config,
            *flags,
        ],
        cwd=ROOT,
        env=process_environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=True,
    )
    lines = []
    for rank in range(count):
        path = folder / f"metrics-{rank}"
        texts = path.read_text().splitlines() if path.exists() else []
        lines.append(list(map(json.loads, texts)))
    return json.loads(done.stdout), lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data, and plans for up to one dead worker."""
    folder_ = tmp_path_factory.mktemp("titan")
    write_assets(folder_ / "assets")
    (folder_ / "job.toml").write_text(JOB)
    subprocess.run(
        [
            sys.executable,
            "-m",
            "slipstream",
            "table",
            folder_ / "job.toml",
            "--max-failures",
            "1",
            "--exact",
            "--optimizer",
            "synchronous",
            "--method",
            "greedy",
            "--steps",
            "50",
            "--out",
            folder_ / "table",
        ],
        check=True,
        capture_output=True,
        timeout=300,
    )
    return folder_


@pytest.fixture(scope="module")
def theirs(folder):
    """What torchtitan's own Trainer prints, by model and shards."""
    metrics_of = {}

    def of(model, sharded):
        if (model, sharded) not in metrics_of:
            begin = folder / f"{model}_beginning"
            if not begin.exists():
                assert train(begin, f"{model}_beginning", 1)[0] == [0]
            flags = (*SHARDS, *EVERY_SAMPLE) if sharded else ()
            statuses, lines = train(
                folder / f"{model}_{sharded}",
                model,
                4 if sharded else 2,
                *flags,
                TITAN_BEGIN=str(begin / "checkpoint" / "step-0"),
            )
            assert not any(statuses)
            metrics_of[model, sharded] = lines[0]
        return metrics_of[model, sharded]

    return of


@pytest.mark.parametrize(
    ("model", "ranks", "flags", "variables"),
    [
        ("llama3", 1, (), {}),
        ("llama3", 1, (), {"TITAN_FAILED": "1.1"}),
        ("llama3", 1, (), {"TITAN_KILL": f"1.1@{KILLED_IN}"}),
        ("llama3", 2, SHARDS, {"TITAN_FAILED": "0.1"}),
        ("llama3", 2, SHARDS, {"TITAN_KILL": f"1.0@{KILLED_IN}"}),
        ("llama3", 4, (*SHARDS, *PARTS), {"TITAN_FAILED": "1.1"}),
        ("llama3", 4, (*SHARDS, *PARTS), {"TITAN_KILL": f"0.1@{KILLED_IN}"}),
        ("deepseek_v3", 1, (), {"TITAN_KILL": f"1.1@{KILLED_IN}"}),
    ],
    ids=[
        "whole",
        "failed",
        "killed",
        "shards",
        "shards-killed",
        "shards-and-parts",
        "shards-and-parts-killed",
        "experts",
    ],
)
def test_numbers_are_torchtitans(folder, theirs, request, model, ranks, flags, variables):
    """All that live print the numbers of torchtitan's own run.

    Those are losses, norms, tokens and rates; nobody dies in it.
    """
    expected = theirs(model, SHARDS[0] in flags)
    statuses, lines = train(
        folder / request.node.callspec.id,
        f"rerouted_{model}",
        ranks * (3 if "TITAN_FAILED" in variables else 4),
        *flags,
        **variables,
        TITAN_BEGIN=str(folder / f"{model}_beginning" / "checkpoint" / "step-0"),
    )
    assert statuses.count(-9) == (ranks if "TITAN_KILL" in variables else 0)
    assert statuses.count(0) == len(statuses) - statuses.count(-9)
    for status, metrics in zip(statuses, lines, strict=True):
        assert len(metrics) == (STEPS if status == 0 else KILLED_IN - 1)
        for key in ("loss", "norm", "tokens", "rate"):
            values = [line[key] for line in expected[: len(metrics)]]
            assert [line[key] for line in metrics] == pytest.approx(values, rel=1e-12), key


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--parallelism.data_parallel_replicate_degree", "3"),
            "data_parallel_replicate_degree is 3; expected 2",
        ),
        (("--training.local_batch_size", "8"), "local_batch_size is 8; expected 4"),
        (("--parallelism.spmd_backend", "full_dtensor"), "expected partial_dtensor or spmd_types"),
        (("--checkpoint.no-load_only",), "expected checkpoint.load_only as well"),
    ],
    ids=["pipelines", "samples", "tensors", "checkpoints"],
)
def test_what_does_not_fit_is_refused(folder, tmp_path, flags, message):
    (tmp_path / "assets").symlink_to(folder / "assets")
    (tmp_path / "table").symlink_to(folder / "table")
    statuses, _ = train(tmp_path / "run", "rerouted_llama3", 1, *flags, TITAN_BEGIN="/nowhere")
    assert statuses == [1]
    assert message in (tmp_path / "run" / "log-0").read_text()


def test_the_example_loses_a_worker():
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "torchtitan_rerouted.py"],
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert "3 workers go on" in done.stdout and "equal to" in done.stdout, done.stdout + done.stderr
