"""Estimates against figures that were measured."""

import tomllib
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest

from slipstream.planner.job.estimate import GPUS, ModelLayout, estimate_job
from slipstream.planner.job.file import parse_job
from slipstream.planner.job.layers import layer_costs, with_shared_state
from slipstream.planner.job.model_shape import ModelShape, experts_shape
from slipstream.planner.job.presets import preset_names, preset_text
from slipstream.planner.job.toml import job_text
from slipstream.planner.model.from_job import choose_tick
from slipstream.planner.plan import plan_job
from slipstream.runtime.config import MuonConfig, parse_run_config
from slipstream.schedules.schedule import Worker


def gpt(layers, hidden, heads, vocabulary=50_304):
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, sequence=1024, vocabulary=vocabulary
    )


def layout(stages, **more):
    return ModelLayout(
        **{
            "gpu": GPUS["a100"],
            "pipelines": 4,
            "stages": stages,
            "microbatches": 16,
            "efficiency": 0.55,
            **more,
        }
    )


@pytest.mark.parametrize(
    ("name", "shape", "stages", "size"),
    [
        ("gpt-6.2b", gpt(32, 4096, 32), 8, 3),
        ("gpt-14.6b", gpt(48, 5120, 40), 16, 1),
        ("gpt-28.3b", gpt(64, 6144, 48), 32, 1),
    ],
)
def test_stage_times_are_near_those_published(name, shape, stages, size):
    """Zero Bubble (Qi et al.

    2023) on A100s, micro-batches of 3, 1 and 1: a share of 55 % of the peak explains all.
    """
    tables, _ = estimate_job(name, shape.by_layer(), layout(stages, microbatch_size=size))
    middle = stages // 2
    layers = tables["placement"]["layers"][middle] / (shape.layers / stages)
    published = tomllib.loads(preset_text(name))["time"]
    assert tables["time"]["forward"][middle] / layers == pytest.approx(
        published["forward"], rel=0.08
    )
    assert tables["time"]["backward_input"][middle] / layers == pytest.approx(
        published["backward_input"], rel=0.12
    )
    assert published["backward_weight"] < tables["time"]["backward_weight"][middle] / layers


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_jobs(name):
    job = parse_job(preset_text(name))
    assert job.name == name and job.layers is not None and job.memory is not None


def test_sizes_of_llama_3():
    sizes = [
        float(preset_text(name).split("measured: ")[1].split(" billion")[0])
        for name in ("llama-3-8b", "llama-3-70b")
    ]
    assert sizes == [pytest.approx(8.03, abs=0.01), pytest.approx(70.6, abs=0.1)]


@pytest.mark.parametrize(
    ("pipelines", "lost", "bytes_kept"),
    [
        (2, 0, 24),
        (2, 1, 24),
        (4, 0, 2 * 24 / 4),
        (4, 1, 2 * 24 / 3),
        (8, 0, 2 * 24 / 8),
        (8, 3, 2 * 24 / 5),
        (4, 3, 24),
    ],
)
def test_sharded_optimizer_state_leaves_room(pipelines, lost, bytes_kept):
    """Weight and gradient stay whole, and optimizer state is shared.

    Those of a stage that are left share it.
    """
    model = gpt(32, 4096, 32).by_layer()
    whole, sharded = (
        parse_job(
            job_text(
                *estimate_job(
                    "x",
                    model,
                    layout(8, pipelines=pipelines, shard_optimizer=sharded, gpu=GPUS["h200"]),
                )
            )
        )
        for sharded in (False, True)
    )
    sharded = with_shared_state(
        sharded, [Worker(pipeline, stage) for pipeline in range(lost) for stage in range(8)]
    )
    for before, after in zip(whole.memory.weights, sharded.memory.weights, strict=True):
        assert after / before == pytest.approx((6 + bytes_kept) / 30, abs=1e-3)
    freed = [
        after - before
        for before, after in zip(whole.memory.capacity, sharded.memory.capacity, strict=True)
    ]
    less = [
        before - after
        for before, after in zip(whole.memory.weights, sharded.memory.weights, strict=True)
    ]
    assert freed == pytest.approx(less, abs=10)
    training = parse_run_config({}, sharded.training).training
    assert training.shard_optimizer and training.master_weights and not whole.training


def test_muon_remembers_one_number_of_two_and_multiplies():
    """A stage in the middle has layers only, whose matrices Muon steps.

    The products of a step are counted one by one.
    """
    shape = ModelShape(
        layers=32,
        hidden=1024,
        heads=16,
        kv_heads=4,
        ffn=2816,
        gated=True,
        sequence=1024,
        vocabulary=50_304,
    )
    adamw, muon = (
        estimate_job("x", shape.by_layer(), layout(8, muon=muon))[0] for muon in (False, True)
    )
    assert muon["memory"]["weights"][3] / adamw["memory"]["weights"][3] == pytest.approx(
        (14 + 8) / 30, abs=2e-3
    )
    saved = adamw["memory"]["weights"][0] - muon["memory"]["weights"][0]
    assert saved == pytest.approx(
        8e-6 * shape.layer_parameters * adamw["placement"]["layers"][0], rel=0.01
    )
    products, gpu = 0, GPUS["a100"]
    for m, n in [(1024, 1024), (1024, 1024), (256, 1024), (256, 1024), *[(1024, 2816)] * 3]:
        for _ in range(MuonConfig().steps):
            products += 2 * m * m * n + 2 * m * m * m + 2 * m * m * n
    layers = adamw["placement"]["layers"][3]
    less = layers * 8 * shape.layer_parameters / gpu.memory_bandwidth
    more = muon["time"]["optimizer"][3] - adamw["time"]["optimizer"][3]
    assert more == pytest.approx(layers * products / gpu.flops / 0.55 - less, rel=0.02)
    training = parse_run_config({}, muon["training"]).training
    assert training.optimizer == "muon" and training.master_weights


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b"])
def test_layers_are_estimated_like_stages(name):
    """The embedding weighs on the first layer and the head on the last.

    Stages are about the sums of their layers.
    """
    job = parse_job(preset_text(name))
    memory, values = job.memory, job.layer_values
    ends = [sum(job.layers[:index]) for index in range(job.depth + 1)]
    for key in ("forward", "backward_weight", "optimizer", "weights"):
        stages = memory.weights if key == "weights" else getattr(job.time, key)
        sums = [sum(getattr(values, key)[begin:end]) for begin, end in pairwise(ends)]
        assert sums == pytest.approx(stages, rel=2e-3)
    costs = layer_costs(job)
    assert costs.forward[0] < costs.forward[-1] and costs.weights[1] < costs.weights[0]


def test_workers_of_several_gpus():
    """Each rank sends, reduces and holds its part of a one-GPU worker's share."""
    text = preset_text("llama-3-8b")
    assert parse_job(text).ranks == 2 and parse_job(text).training == {"tensor_parallel": 2}
    assert "A worker is 2 ranks" in text and "from rank to\n# rank, all at the same time" in text
    single, four = (
        estimate_job("job", gpt(24, 1024, 16).by_layer(), layout(4, tensor_parallel=ranks))[0]
        for ranks in (1, 4)
    )
    assert "training" not in single and four["training"] == {"tensor_parallel": 4}
    for key in ("transfer", "forward", "all_reduce"):
        assert 4 * np.array(four["time"][key]) == pytest.approx(single["time"][key], rel=0.03)
    assert 4 * np.array(four["memory"]["weights"]) == pytest.approx(
        single["memory"]["weights"], rel=0.02
    )
    assert four["memory"]["unit_bytes"] == 4 * single["memory"]["unit_bytes"]


@pytest.mark.parametrize(
    ("gpus", "choices"), [(1, 2), (2, 2 * 2), (3, 3 * 2), (4, 4 * 1), (8, 8 * 1), (16, 16 * 1)]
)
def test_each_gpu_has_room_for_the_tokens_of_its_experts(gpus, choices):
    """Of 4 experts, a token chooses 2; a GPU has as many as the one with most of them."""
    experts = experts_shape(64, 128, number=4, chosen=2, gated=True)
    extra = choices - 2
    assert experts.worst_case_bytes(gpus) == (
        experts.activation + extra * experts.expert_activation,
        experts.stash + extra * experts.expert_stash,
    )


def test_the_head_takes_layers_from_the_last_stage():
    tables, remarks = estimate_job(
        "job", gpt(24, 1024, 16, vocabulary=128_000).by_layer(), layout(4)
    )
    counts = tables["placement"]["layers"]
    assert sum(counts) == 24 and counts[-1] < min(counts[:-1])
    assert tables["time"]["backward_input"][0] == 0 < tables["time"]["backward_input"][1]
    assert plan_job(parse_job(job_text(tables, remarks)), method="greedy").schedule.gap < 1


@pytest.mark.parametrize(
    ("shape", "stages", "says"),
    [
        (gpt(4, 1024, 16), 5, "5 stages for 4 layers"),
        (gpt(4, 1000, 16), 2, "expected each to divide the one before"),
        (gpt(80, 8192, 64), 2, "stage 0 needs .* GB on each GPU, a100 has 80"),
    ],
)
def test_what_cannot_be_is_refused(shape, stages, says):
    with pytest.raises(ValueError, match=says):
        estimate_job("job", shape.by_layer(), layout(stages))


@pytest.mark.parametrize("more", [{"shard_optimizer": True}, {"tensor_parallel": 2}], ids=str)
def test_muon_with_parts_of_matrices_is_refused(more):
    with pytest.raises(
        ValueError,
        match="Muon needs whole matrices; expected no shared optimizer state, and one GPU",
    ):
        estimate_job("job", gpt(4, 1024, 16).by_layer(), layout(2, muon=True, **more))


@pytest.mark.parametrize("name", ["llama-3-8b", "llama-3-70b"])
def test_times_of_layers_need_no_finer_clock_than_those_of_stages(name):
    # Else plans that cut stages are rounded otherwise than those that do not, and neither is proven
    # optimal.
    job = parse_job(preset_text(name))
    assert choose_tick(job) == choose_tick(job, layer_costs(job)) == Fraction(1, 10**6)
