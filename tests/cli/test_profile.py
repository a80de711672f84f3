"""`slipstream profile` writes a complete job file.

It says what was measured, and can be planned.
"""

import json
import tomllib
from collections.abc import Iterator
from importlib import import_module

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.profile import job_tables, table_comments
from slipstream.planner.job.file import Job, parse_job, read_job
from slipstream.planner.job.layers import layer_costs
from slipstream.planner.job.network import Network
from slipstream.planner.job.toml import job_text
from slipstream.planner.plan import plan_job
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.processes import fork_server
from slipstream.runtime.ranks.worker_group import simulating_rank
from slipstream.runtime.tools.measurer import MeasuredNetwork
from slipstream.runtime.tools.profile import Profile, profile_stages
from slipstream.runtime.tools.stage_bench import StageProfile
from tests.runtime.forked import own_fork_server

JOB = """
name = "tiny \\"quoted\\" é"
pipelines = 2
stages = 2
microbatches = [2, 3]
[time]
forward = 1
backward_input = 1
backward_weight = 1
[placement]
order = "v"
chunks = 2
layers = [1, 2, 1, 2]
[model]
blocks = 4
width = 16
heads = 2
context = 16
[training]
batch = 2
clip_norm = 1.0
betas = [0.8, 0.9]
device = "cpu"
"""


@pytest.fixture(autouse=True, scope="module")
def _quick_fork_servers() -> Iterator[None]:
    """Forked where torch is imported already; `runtime.processes.test_children` has one that is
    started.
    """
    # Else what that imports would keep what is put in the place of the class.
    import_module("slipstream.cli.train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fork_server, "ForkServer", own_fork_server)
        yield


def test_a_job_is_measured(tmp_path) -> None:
    """One test, because measuring takes seconds."""
    asked = JOB + "recompute = 'auto'\n"
    (tmp_path / "job.toml").write_text(asked)
    result = CliRunner().invoke(
        app,
        [
            "profile",
            "--job",
            str(tmp_path / "job.toml"),
            "--rounds",
            "9",
            "--json",
            "--out",
            str(tmp_path / "out.toml"),
        ],
    )
    assert result.exit_code == 0, result.output
    text = (tmp_path / "out.toml").read_text()
    assert tomllib.loads(text) == json.loads(result.stdout)["job"]
    assert "2 of 2 pipelines" in text and "MiB a stage" in text and "over gloo" in text
    before, after = parse_job(asked), read_job(tmp_path / "out.toml")
    for name in (
        "name",
        "pipelines",
        "stages",
        "microbatches",
        "columns",
        "layers",
        "model",
        "training",
    ):
        assert getattr(after, name) == getattr(before, name)
    assert parse_run_config(after.model, after.training) == parse_run_config(
        before.model, before.training
    )
    assert plan_job(after, method="greedy").schedule.period_ticks > 0
    require_sense(after)
    assert after.network.latency > 0 and after.network.bandwidth > 0
    assert 0 <= after.network.slowdown < 1 and not after.network.overlap
    for stage, (again, kept) in enumerate(
        zip(after.memory.recomputed, after.memory.activation, strict=True)
    ):
        assert 0 < again <= (kept if stage == 0 else 0.8 * kept), (
            "what a block takes is little of what it computes"
        )
    costs = layer_costs(after)
    assert len(costs.weights) == 6 and sum(costs.weights) == sum(after.memory.weights)
    assert 0 < min(costs.weights) < max(costs.weights), "a block holds more than the last norm"


BIDIRECTIONAL = """
name = "both ways"
pipelines = 2
stages = 2
microbatches = 4
[time]
forward = 1
backward_input = 1
backward_weight = 1
[placement]
order = "bidirectional"
[model]
blocks = 2
width = 16
heads = 2
context = 16
[training]
batch = 2
device = "cpu"
"""


def test_a_bidirectional_job_is_measured_as_one_chain(tmp_path) -> None:
    """Both chains hold the same layers.

    They are cut into as many ranges as one of them has stages.
    """
    (tmp_path / "job.toml").write_text(BIDIRECTIONAL)
    result = CliRunner().invoke(
        app,
        [
            "profile",
            "--job",
            str(tmp_path / "job.toml"),
            "--rounds",
            "9",
            "--out",
            str(tmp_path / "out.toml"),
        ],
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("2 stages measured")
    assert "all_reduce: 4 of 4 copies of a stage" in (tmp_path / "out.toml").read_text()
    before, after = parse_job(BIDIRECTIONAL), read_job(tmp_path / "out.toml")
    assert (after.columns, after.chains) == (before.columns, before.chains)
    assert after.layers == (2, 2) * 2, "the layers of each stage that were measured"
    assert len(after.time.forward) == 4 and after.time.forward[:2] == after.time.forward[2:], (
        "one for both chains"
    )
    assert plan_job(after, method="greedy").schedule.period_ticks > 0


def test_a_worker_of_several_processes_is_measured_as_one(tmp_path) -> None:
    asked = JOB.replace("layers = [1, 2, 1, 2]", "layers = [2, 1, 1, 2]")
    (tmp_path / "job.toml").write_text(asked)
    result = CliRunner().invoke(
        app,
        [
            "profile",
            "--job",
            str(tmp_path / "job.toml"),
            "--rounds",
            "9",
            "--tensor-parallel",
            "2",
            "--out",
            str(tmp_path / "out.toml"),
        ],
    )
    assert result.exit_code == 0, result.output
    text, before, after = (
        (tmp_path / "out.toml").read_text(),
        parse_job(asked),
        read_job(tmp_path / "out.toml"),
    )
    assert "Each is a rank of a worker of 2." in text and "tensors go from rank r to rank r" in text
    assert after.training == {**before.training, "tensor_parallel": 2} and after.ranks == 2
    time, memory = after.time, after.memory
    assert memory is not None and memory.unit_bytes == 2048
    assert all(
        seconds > 0
        for seconds in (*time.forward, *time.backward_weight, *time.optimizer, *time.all_reduce)
    )
    assert time.transfer > 0 and time.backward_input[0] < min(time.backward_input[1:])
    config = parse_run_config(after.model, after.training)
    with simulating_rank(2):
        model = build_model(config.model, 0, torch.float32, torch.device("cpu"))
        by_layer = []
        for layer in range(model.layers):
            parameters = model.build(layer).parameters()
            by_layer.append(sum(parameter.nbytes for parameter in parameters))
    # Parameters, gradients, two moments, and three copies to undo a step; a number for each
    # parameter besides.
    for weights, (first, end) in zip(memory.weights, ((0, 2), (2, 3), (3, 4), (4, 6)), strict=True):
        assert 1024 * weights == pytest.approx(7 * sum(by_layer[first:end]), rel=0.02)


def test_parts_of_optimizer_state_are_measured(tmp_path) -> None:
    """Each of four workers keeps two parts of four.

    To its own belongs what undoes a step; the other is a copy, which undoes none.
    """
    config = parse_run_config(
        {"blocks": 1, "width": 64, "heads": 2, "context": 16},
        {
            "device": "cpu",
            "batch": 1,
            "dtype": "bf16",
            "master_weights": True,
            "shard_optimizer": True,
        },
    )
    with own_fork_server() as server:
        found = profile_stages(
            config, [(0, 3)], copies=4, workers=4, microbatches=4, rounds=1, fork_server=server
        )
    (stage,) = found.stages
    parameters = 256 * 64 + 16 * 64 + 12 * 64**2 + 13 * 64 + 2 * 64 + 256 * 64
    assert stage.static_bytes == pytest.approx(parameters * (2 + 4 + (24 + 20) / 4), rel=0.02)
    assert stage.undo_bytes == pytest.approx(parameters * 12 / 4, rel=0.02)
    assert stage.state_bytes == pytest.approx(parameters * (24 + 20) / 2, rel=0.02)
    assert stage.all_reduce > 0 and stage.optimizer > 0


def measured(job: Job) -> Profile:
    """What could be measured of any job."""
    stage = StageProfile(
        forward=0.1,
        backward_input=0.1,
        backward_weight=0.1,
        optimizer=0.1,
        activation_bytes=2048,
        stash_bytes=1024,
        static_bytes=2**20,
        undo_bytes=2**19,
    )
    return Profile(
        stages=(stage,) * job.depth,
        transfer=0.01,
        device="cpu",
        device_bytes=2**30,
        sharing=4,
        workers=1,
        ranks=1,
        reduce_group=2,
        transport="gloo",
        waiting=0.0,
    )


@pytest.mark.parametrize(
    "placement",
    [
        "",
        "layers = [3, 1]",
        "chunks = 2",
        "chunks = 2\norder = 'interleaved'\nlayers = [1, 2, 3, 4]",
        "chunks = 3\norder = 'v'",
        "order = [1, 0]",
        "order = 'bidirectional'\nlayers = [3, 1]",
    ],
)
def test_the_placement_is_kept(placement) -> None:
    before = parse_job(JOB[: JOB.index("[placement]")] + "[placement]\n" + placement)
    tables = job_tables(before, measured(before))
    after = parse_job(job_text(tables, {}))
    for name in ("columns", "chains", "layers", "depth"):
        assert getattr(after, name) == getattr(before, name)
    weights = len(before.columns) // before.stages * 2**10
    assert after.memory.capacity == (2**20 // 4 - weights,) * 2, (
        "a worker holds all of its stages, of both chains"
    )


def test_a_shared_gpu_is_divided_and_what_its_processes_take_besides_is_left_out() -> None:
    job = parse_job(JOB)
    found = msgspec.structs.replace(
        measured(job), device="cuda", transport="nccl", outside_bytes=2**20
    )
    (stage,) = {*job_tables(job, found)["memory"]["capacity"]}
    (alone,) = {
        *job_tables(job, msgspec.structs.replace(found, sharing=1, outside_bytes=0))["memory"][
            "capacity"
        ]
    }
    assert stage == (2**30 // 4 - 2**20 - (2**30 - 1024 * alone)) // 1024
    assert "shared by 4 processes" in table_comments(job, found)["memory"][0]


@pytest.mark.parametrize(
    ("device", "transport", "counts"),
    [("cpu", "gloo", True), ("cuda", "nccl", True), ("cuda", "gloo", False)],
)
def test_gradients_on_their_way_have_room(device, transport, counts) -> None:
    """A stage has room for one gradient for each stage from it on.

    The pipeline drains so. Staged gradients are not on the device.
    """
    job = parse_job(JOB[: JOB.index("[placement]")])
    without = msgspec.structs.replace(measured(job), device=device, transport=transport)
    sent = 2**16
    without_first = [
        msgspec.structs.replace(stage, sent_bytes=sent) for stage in without.stages[1:]
    ]
    stages = (msgspec.structs.replace(without.stages[0], sent_bytes=0), *without_first)
    least, longest = (
        job_tables(job, training)["memory"]["capacity"]
        for training in (msgspec.structs.replace(without, stages=stages), without)
    )
    room = [more - less for less, more in zip(least, longest, strict=True)]
    gradients = [
        counts * min(job.depth - index, max(job.microbatches)) * sent // 2**10
        for index in range(1, job.stages)
    ]
    assert room == [0, *gradients]


def test_slow_workers_stay_slow() -> None:
    job = parse_job(JOB.replace("[placement]", 'slow = {"1.0" = 1.5}\n[placement]'))
    assert parse_job(job_text(job_tables(job, measured(job)), {})).time.slow == job.time.slow


@pytest.mark.parametrize(
    "topology", ["workers_per_node = 3", 'node = [["0.1", "1.0"], ["0.0", "1.1"]]']
)
def test_the_nodes_are_kept(topology) -> None:
    job = parse_job(JOB.replace("[placement]", f"[topology]\n{topology}\n[placement]"))
    assert job.nodes and parse_job(job_text(job_tables(job, measured(job)), {})).nodes == job.nodes


def test_how_reductions_go_is_kept_and_what_was_measured_takes_the_place_of_bytes() -> None:
    network = "overlap = true\nlatency = 1e-4\nbandwidth = 1e9\ngradients = 4\nactivation = 4"
    job = parse_job(JOB.replace("[placement]", f"[network]\n{network}\n[placement]"))
    found = parse_job(job_text(job_tables(job, measured(job)), {})).network
    assert job.network.gradients and found == Network(overlap=True, latency=1e-4)
    links = MeasuredNetwork(latency=2e-5, bandwidth=3e9, slowdown=0.25)
    profile = msgspec.structs.replace(measured(job), network=links)
    assert parse_job(job_text(job_tables(job, profile), {})).network == Network(
        overlap=True, latency=2e-5, bandwidth=3e9, slowdown=0.25
    )


def require_sense(job: Job) -> None:
    time, memory = job.time, job.memory
    assert memory is not None
    assert all(seconds > 0 for seconds in (*time.forward, *time.backward_weight, time.transfer))
    assert time.backward_input[0] < min(time.backward_input[1:]), (
        "the first stage has no input gradient"
    )
    assert all(seconds > 0 for seconds in (*time.optimizer, *time.all_reduce))
    block = 2 * 16 * 16 * 4 / 1024
    assert 10 * block < memory.activation[2] < 60 * block, "one block, KiB"
    assert 2 * block < memory.weight_stash[2] < 1.2 * memory.activation[2]
    assert memory.activation[1] == pytest.approx(2 * memory.activation[2], rel=0.15), (
        "two blocks hold twice as much"
    )
    assert min(memory.capacity) > 1024


def test_what_cannot_be_measured_is_refused(tmp_path) -> None:
    for change, message in (
        (("blocks = 4", "blocks = 5"), "placement.layers is [1, 2, 1, 2]"),
        (("[model]", "[model]\nname = 'nowhere:Model'"), "No module named 'nowhere'"),
        (("width = 16", "widht = 16"), "did you mean model.width?"),
    ):
        (tmp_path / "job.toml").write_text(JOB.replace(*change))
        result = CliRunner().invoke(app, ["profile", "--job", str(tmp_path / "job.toml")])
        assert (
            result.exit_code == 2
            and message in " ".join(result.stderr.split())
            and result.stdout == ""
        )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused_as_by_train(tmp_path) -> None:
    (tmp_path / "job.toml").write_text(JOB.replace('device = "cpu"', 'device = "cuda"'))
    for command in (["profile", "--job"], ["train"]):
        result = CliRunner().invoke(
            app,
            [
                *command,
                str(tmp_path / "job.toml"),
                *(
                    ["--out", str(tmp_path / "out"), "--method", "greedy"]
                    if command == ["train"]
                    else []
                ),
            ],
        )
        assert result.exit_code == 2 and result.stdout == ""
        assert "training.device is 'cuda', but torch finds no GPU here" in " ".join(
            result.stderr.split()
        )
