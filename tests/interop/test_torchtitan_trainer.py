"""torchtitan's command line, with failures survived.

The numbers are those of its own Trainer in one process.
"""

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from slipstream.runtime.config import ConfigError, parse_run_config
from slipstream.runtime.data.data import load_data
from slipstream.runtime.events import EVENTS, METRICS, OrderGiven, decode_event, decode_metrics
from slipstream.runtime.models.compiling import require_compilable
from tests.interop.titan_training import write_assets
from tests.runtime.running import below, command_environment, free_port, losses_in

installed = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torchtitan", "triton"))),
    reason="torchtitan is not installed: make neighbours",
)
pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
STEPS = 20
TOLERANCE = {"float32": 1e-5, "float64": 1e-9}
"""Relative."""
THEIRS = "torchtitan.train"
"""Their training program."""
OURS = "slipstream.cli.torchtitan"
"""Our training program."""
PATIENT = ("--slipstream.heartbeat-timeout", "120")
"""A machine that is busy with other things."""
TWO_STAGES = (
    "--parallelism.pipeline_parallel_degree",
    "2",
    "--parallelism.pipeline_parallel_microbatch_size",
    "2",
    "--training.local_batch_size",
    "4",
)


def words(program, folder, *more, config="small"):
    """What Python is told for either program."""
    return [
        "-m",
        "tests.interop.titan_cpu",
        program,
        "--module",
        "tests.interop.titan_config",
        "--config",
        config,
        "--dump_folder",
        str(folder),
        *(("--training.disable_cuda_graphs",) if program == THEIRS else PATIENT),
        *more,
    ]


def environment(folder, assets, dtype):
    folder.mkdir(parents=True, exist_ok=True)
    return {
        **command_environment(),
        "TITAN_ASSETS": str(assets),
        "TITAN_METRICS": str(folder / "metrics"),
        "TITAN_DTYPE": dtype,
        "OMP_NUM_THREADS": "1",
    }


def start(program, folder, assets, dtype, *more, machine=0, machines=1, config="small"):
    """One process of either program, as torchrun starts it."""
    alone = {
        "RANK": str(machine),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(machines),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return subprocess.run(
        [sys.executable, *words(program, folder, *more, config=config)],
        cwd=ROOT,
        env=environment(folder, assets, dtype) | alone,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


def train(program, *arguments, config="small"):
    done = start(program, *arguments, config=config)
    assert done.returncode == 0, done.stderr[-3000:]
    assert ("checkpoints while it trains are Slipstream's" in done.stdout + done.stderr) == (
        program == OURS
    )


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics").read_text().splitlines()]


def saved(folder):
    """All tensors of torchtitan's last checkpoint: parameters, and what the optimizer remembers."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    path = folder / "checkpoint" / f"step-{STEPS}"
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in FileSystemReader(path).read_metadata().state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    load(found, checkpoint_id=path, no_dist=True)
    return found


def scalars(path, tag):
    """What TensorBoard shows, by steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(path))
    read.Reload()
    found = read.Scalars(tag)
    assert [scalar.step for scalar in found] == list(range(1, STEPS + 1))
    return [scalar.value for scalar in found]


def orders_of(folder):
    return [
        event
        for line in (folder / "slipstream" / EVENTS).read_bytes().splitlines()
        if isinstance(event := decode_event(line), OrderGiven)
    ]


def assert_same(ours, theirs, dtype, steps=STEPS, least=100):
    """Losses, norms, learning rates, tokens, and the last checkpoints."""
    mine, expected = lines(ours), lines(theirs)[-steps:]
    numbers = [step["step"] for step in expected]
    assert [step["step"] for step in mine] == numbers
    for key in ("loss", "norm", "rate", "tokens"):
        values = [step[key] for step in expected]
        assert [step[key] for step in mine] == pytest.approx(values, rel=TOLERANCE[dtype]), key
    found, wanted = saved(ours), saved(theirs)
    assert found.keys() == wanted.keys() and len(wanted) > least
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= TOLERANCE[dtype] * value.norm(), name


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with the data, and the results of torchtitan's Trainer by dtype.

    It has trained in one process.
    """
    folder, folders = tmp_path_factory.mktemp("titan"), {}
    write_assets(folder / "assets")

    def of(dtype):
        if dtype not in folders:
            train(THEIRS, folder / dtype, folder / "assets", dtype, "--checkpoint.interval", "10")
            folders[dtype] = folder / dtype
        return folders[dtype]

    return of


@installed
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (
            "float64",
            [
                "--parallelism.data_parallel_replicate_degree",
                "2",
                "--slipstream.kill",
                "1.1@3",
                "--slipstream.return",
                "1.1@6",
                "--slipstream.kill",
                "0.0@12",
            ],
        ),
        (
            "float64",
            [
                "--parallelism.data_parallel_replicate_degree",
                "3",
                "--parallelism.pipeline_parallel_microbatch_size",
                "1",
                "--slipstream.kill",
                "1.1@2",
                "--slipstream.kill",
                "2.1@18",
                "--slipstream.settle",
                "0.5",
                "--dataloader.pause",
                "0.2",
            ],
        ),
        (
            "float32",
            ["--parallelism.data_parallel_replicate_degree", "2", "--slipstream.kill", "1.1@3"],
        ),
    ],
)
def test_numbers_are_those_of_its_trainer(trained, tmp_path, dtype, options, ranks):
    theirs = trained(dtype)
    train(
        OURS,
        tmp_path,
        theirs.parent / "assets",
        dtype,
        *TWO_STAGES,
        "--parallelism.tensor_parallel_degree",
        str(ranks),
        "--metrics.enable_tensorboard",
        *options,
    )
    assert_same(tmp_path, theirs, dtype)
    devices = int(options[1]) * 2 * ranks
    per_device = [line["of_a_device"] / devices for line in lines(theirs)]
    assert [line["of_a_device"] for line in lines(tmp_path)] == per_device
    [shown] = (tmp_path / "tb").rglob("events*")
    assert scalars(shown, "loss_metrics/global_avg_loss") == pytest.approx(
        [line["loss"] for line in lines(theirs)], 1e-5
    )
    run = tmp_path / "slipstream"
    stepped_with = [
        decode_metrics(line).learning_rate for line in (run / METRICS).read_bytes().splitlines()
    ]
    assert stepped_with == pytest.approx([line["rate"] for line in lines(theirs)], rel=1e-12)
    orders = orders_of(tmp_path)
    assert len({order.live for order in orders}) > 1  # workers have died
    assert ("--slipstream.settle" in options) == any(order.phase == "settled" for order in orders)


@installed
@pytest.mark.parametrize(
    "options",
    [
        [
            "--parallelism.data_parallel_replicate_degree",
            "2",
            "--slipstream.kill",
            "1.1@3",
            "--slipstream.return",
            "1.1@6",
            "--slipstream.kill",
            "0.0@12",
        ],
        [
            "--parallelism.data_parallel_replicate_degree",
            "3",
            "--parallelism.pipeline_parallel_microbatch_size",
            "1",
            "--slipstream.kill",
            "1.1@2",
            "--slipstream.kill",
            "2.1@18",
            "--slipstream.settle",
            "0.5",
            "--dataloader.pause",
            "0.2",
        ],
    ],
)
def test_so_are_those_of_a_mixture_of_experts(tmp_path, options):
    """The bias by which tokens choose, which its optimizer moves, is in the checkpoints."""
    assets, size = write_assets(tmp_path / "assets"), ["--training.local_batch_size", "1"]
    train(
        THEIRS,
        tmp_path / "theirs",
        assets,
        "float64",
        *(size if "1" in options else []),
        config="small_experts",
    )
    train(OURS, tmp_path / "ours", assets, "float64", *TWO_STAGES, *options, config="small_experts")
    assert_same(tmp_path / "ours", tmp_path / "theirs", "float64", least=40)
    biases = [
        value
        for name, value in saved(tmp_path / "ours").items()
        if name.endswith("moe.expert_bias_E")
    ]
    assert len(biases) == 2 and all(bias.abs().max() > 0.01 for bias in biases)


@installed
def test_of_two_machines_that_torchrun_starts_one_is_lost(trained, tmp_path):
    """A worker dies and returns on one machine; then torchrun is killed on the other."""
    theirs, port = trained("float64"), free_port()
    grid = (*TWO_STAGES, "--parallelism.data_parallel_replicate_degree", "2")
    variables = environment(tmp_path, theirs.parent / "assets", "float64")
    logs = [tmp_path / f"machine-{machine}.log" for machine in range(2)]
    machines = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nnodes",
                "2",
                "--nproc-per-node",
                "1",
                "--node-rank",
                str(machine),
                "--master-addr",
                "127.0.0.1",
                "--master-port",
                str(port),
                *words(
                    OURS,
                    tmp_path,
                    *grid,
                    "--slipstream.kill",
                    "0.1@2",
                    "--slipstream.return",
                    "0.1@4",
                    "--dataloader.pause",
                    "0.2",
                ),
            ],
            cwd=ROOT,
            env=variables,
            stdout=log.open("w"),
            stderr=subprocess.STDOUT,
        )
        for machine, log in enumerate(logs)
    ]

    def wait_until(done):
        deadline = time.monotonic() + 240
        while not done():
            assert machines[0].poll() is None and time.monotonic() < deadline, logs[0].read_text()[
                -3000:
            ]
            time.sleep(0.1)

    try:
        wait_until(lambda: len(losses_in(tmp_path / "slipstream")) > 6)
        machines[1].kill()
        wait_until(lambda: "Training completed" in logs[0].read_text())
    finally:
        pids = [pid for machine in machines for pid in (machine.pid, *below(machine.pid))]
        for pid in pids:  # torchrun waits five minutes for one that is lost
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for machine in machines:
            machine.wait(20)
    assert_same(tmp_path, theirs, "float64")
    alive = [order.live for order in orders_of(tmp_path)]
    assert alive[0] == 4 and min(alive) == alive[-1] == 2, alive
    again = start(OURS, tmp_path, theirs.parent / "assets", "float64", *grid, machine=1, machines=2)
    assert again.returncode == 0 and "node 1 has nothing to do" in again.stdout + again.stderr, (
        again.stderr
    )


@installed
def test_each_goes_on_from_the_others_checkpoint(trained, tmp_path):
    theirs, grid = (
        trained("float64"),
        (*TWO_STAGES, "--parallelism.data_parallel_replicate_degree", "2"),
    )
    assets, total = theirs.parent / "assets", ("--lr_scheduler.total_steps", str(STEPS))
    shutil.copytree(theirs / "checkpoint" / "step-10", tmp_path / "ours" / "checkpoint" / "step-10")
    train(OURS, tmp_path / "ours", assets, "float64", *grid)
    assert_same(tmp_path / "ours", theirs, "float64", steps=10)
    train(OURS, tmp_path / "theirs", assets, "float64", *grid, *total, "--training.steps", "10")
    (tmp_path / "theirs" / "metrics").unlink()
    train(THEIRS, tmp_path / "theirs", assets, "float64", *total)
    assert_same(tmp_path / "theirs", theirs, "float64", steps=10)


REFUSED = [
    ("--parallelism.data_parallel_shard_degree", "2"),
    ("--parallelism.context_parallel_degree", "2"),
    ("--parallelism.expert_parallel_degree", "2"),
    ("--validator.enable",),
    ("--training.enable_cpu_offload",),
    ("--training.max_norm", "0"),
    ("--checkpoint.create_seed_checkpoint",),
    ("--optimizer.implementation", "fused_opt_states_bf16"),
    ("--comm.mode", "fake_backend"),
    ("--compile.backend", "aot_eager"),
]


@installed
def test_what_cannot_be_done_is_refused_in_one_line_before_anything_starts(tmp_path):
    write_assets(tmp_path / "assets")
    done = start(
        OURS,
        tmp_path / "out",
        tmp_path / "assets",
        "float32",
        "--compile.enable",
        *(word for words in REFUSED for word in words),
    )
    said = [line for line in done.stderr.splitlines() if line.startswith("slipstream:")]
    assert done.returncode == 2 and len(said) == 1, done.stderr
    assert [words for words in REFUSED if " ".join(words) not in said[0]] == []
    assert not (tmp_path / "out" / "slipstream").exists()


@installed
def test_what_is_done_in_another_way_is_said():
    from slipstream.runtime.models.torchtitan.specification import parse_arguments
    from slipstream.runtime.models.torchtitan.training import describe_differences

    options = [
        "--parallelism.pipeline_parallel_degree",
        "2",
        "--parallelism.pipeline_parallel_layers_per_stage",
        "3",
        "--parallelism.tensor_parallel_degree",
        "2",
        "--checkpoint.enable",
        "--debug.deterministic",
    ]
    said = list(
        describe_differences(
            parse_arguments(["--module", "llama3", "--config", "llama3_debugmodel", *options])
        )
    )
    for words in (
        "--checkpoint.interval 10 does not",
        "SelectiveAC.Config does not count",
        "sequence parallelism",
        "--parallelism.pipeline_parallel_schedule, "
        "--parallelism.pipeline_parallel_layers_per_stage does not",
        "--debug.deterministic applies to this process",
    ):
        assert len([line for line in said if words in line]) == 1, said
    assert len(said) == 5, said


@installed
def test_what_torchtitan_does_not_take_is_said_in_one_line(tmp_path):
    done = start(OURS, tmp_path / "out", tmp_path, "float32", "--training.stepz", "3")
    said = [line for line in done.stderr.splitlines() if line.startswith("slipstream:")]
    assert done.returncode == 2 and len(said) == 1, done.stderr
    assert "Unrecognized options: --training.stepz, 3" in said[0]


@installed
@pytest.mark.parametrize(
    ("theirs", "asked", "read"), [(6, -1, []), (8, -1, [-1]), (None, -1, []), (6, 4, [4])]
)
def test_torchtitans_checkpoint_is_read_where_it_is_newer_than_the_runs_own(
    tmp_path, monkeypatch, theirs, asked, read
):
    """Its last one has the model alone by default, which it cannot go on from.

    The run's own is of step 6.
    """
    from slipstream.cli import torchtitan

    for name, found in {
        "latest": SimpleNamespace(iteration=6, path=tmp_path),
        "identity_of": None,
        "_layers": 8,
        "read_state": None,
    }.items():
        monkeypatch.setattr(torchtitan, name, lambda *_, found=found: found)
    if theirs is not None:
        (tmp_path / "checkpoint" / f"step-{theirs}").mkdir(parents=True)
    calls = []
    torchtitan.SlipstreamTrainer.train(
        SimpleNamespace(
            own=SimpleNamespace(folder=tmp_path, config=None),
            step=0,
            _count=lambda steps: True,
            metrics_processor=SimpleNamespace(),
            checkpointer=SimpleNamespace(
                load=lambda step: calls.append(step), save=lambda step, last_step: None
            ),
            config=SimpleNamespace(
                training=SimpleNamespace(steps=6),
                dump_folder=str(tmp_path),
                checkpoint=SimpleNamespace(
                    enable=True, folder="checkpoint", load_step=asked, last_save_model_only=True
                ),
            ),
        )
    )
    assert calls == read


PLANS_ON = """
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from slipstream.cli import torchtitan

def plan():
    with ThreadPoolExecutor(1) as pool:
        pool.submit(time.sleep, 3600).result()

torchtitan._own = lambda: ()
torchtitan._train = lambda: threading.Thread(target=plan, daemon=True, name="planning").start()
torchtitan.main()
"""


@installed
def test_it_ends_though_plans_are_made_for_a_run_that_is_over():
    done = subprocess.run(
        [sys.executable, "-c", PLANS_ON],
        cwd=ROOT,
        env=command_environment(),
        timeout=250,
        check=False,
    )
    assert done.returncode == 0


WITHOUT = """
import runpy, sys
sys.modules["torchtitan"] = None
sys.argv[1:] = ["--module", "llama3"]
runpy.run_module("slipstream.cli.torchtitan", run_name="__main__", alter_sys=True)
"""


def test_where_torchtitan_is_not_installed_one_line_says_how(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        cwd=tmp_path,
        env=command_environment(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "pip install -e '.[torchtitan]'" in done.stderr


@pytest.mark.parametrize(
    ("model", "training"),
    [
        ({"torchtitan": "llama3/8B"}, {"tokens": "tokens.bin"}),
        ({"torchtitan": "llama3/8B"}, {"compile": True}),
        ({}, {"data": "torchtitan"}),
    ],
)
def test_nor_does_a_job_that_names_it(model, training, monkeypatch):
    for name in [
        name
        for name in sys.modules
        if name.startswith("slipstream.runtime.") and "torchtitan" in name
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchtitan.trainer", None)
    run_config = parse_run_config(model, training)
    with pytest.raises(ConfigError, match=r"pip install -e '.\[torchtitan\]'") as error:
        require_compilable(
            run_config, torch.device("cpu")
        ) if run_config.training.compile else load_data(run_config, (1,))
    assert "\n" not in str(error.value)
