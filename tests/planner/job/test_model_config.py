"""Layers by config.json.

They are compared with published counts, and with transformers' own models.
"""

import copy
import json
from itertools import combinations, pairwise

import pytest
import torch

from slipstream.planner.job.estimate import (
    BYTES_READ,
    GPUS,
    ModelLayout,
    divide_layers,
    estimate_job,
)
from slipstream.planner.job.file import JobError, parse_job
from slipstream.planner.job.layers import layer_costs
from slipstream.planner.job.model_config import FAMILIES, model_layers, read_model
from slipstream.planner.job.model_shape import ModelShape
from slipstream.planner.job.toml import job_text
from slipstream.planner.plan import plan_job
from tests.planner.job import model_configs as public

MODELS = {name: value for name, value in vars(public).items() if name.isupper()}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("NEMOTRON_H_8B", 8.10),
        ("NEMOTRON_3_NANO", 31.6),
        ("DEEPSEEK_V2_LITE", 15.7),
        ("QWEN3_30B_A3B", 30.5),
        ("QWEN3_235B_A22B", 235),
        ("QWEN2_57B_A14B", 57.4),
        ("MIXTRAL_8X7B", 46.7),
        ("GEMMA_7B", 8.54),
        ("GEMMA_2_9B", 9.24),
        ("GEMMA_3_27B", 27.0),
        ("QWEN3_8B", 8.2),
        ("QWEN2_7B", 7.62),
        ("LLAMA_3_8B", 8.03),
        ("GRANITE_4_H_SMALL", 32.2),
        ("BAMBA_9B", 9.78),
    ],
)
def test_parameters_are_those_published(name, billions):
    """By the models' reports and cards."""
    assert model_layers(MODELS[name], 4096).parameter_count / 1e9 == pytest.approx(
        billions, rel=0.01
    )


def test_parameters_of_deepseek_v3():
    """DeepSeek V3 has 671 billion parameters, and 14 more for a further token.

    The latter are of the module that predicts it, with its copies of embedding and head.
    """
    model = model_layers(public.DEEPSEEK_V3, 4096)
    without = model_layers({**public.DEEPSEEK_V3, "num_nextn_predict_layers": 0}, 4096)
    assert without.parameter_count / 1e9 == pytest.approx(671, rel=0.01)
    assert (model.parameter_count + 2 * 129280 * 7168) / 1e9 == pytest.approx(685, rel=0.01)
    assert [layer.kind for layer in model.layers[-2:]] == ["multi-token prediction", "head"]
    assert model.layers[-1].used == 2 * without.layers[-1].used == 2 * model.layers[-1].matrices


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("NEMOTRON_3_NANO", 3.2),
        ("QWEN3_30B_A3B", 3.0),
        ("QWEN3_235B_A22B", 22),
        ("QWEN2_57B_A14B", 14),
        ("MIXTRAL_8X7B", 12.9),
        ("GRANITE_4_H_SMALL", 9),
    ],
)
def test_parameters_that_a_token_meets(name, billions):
    """Published as active, as a rule in whole billions and without the embedding."""
    assert model_layers(MODELS[name], 4096).used_parameters / 1e9 == pytest.approx(
        billions, rel=0.03
    )


@pytest.mark.parametrize("name", [name for name in MODELS if name != "GEMMA_3_27B"])
def test_parameters_are_those_of_the_model_in_transformers(name):
    """All parameters of transformers' model are counted, with two exceptions.

    They are biases of routers, which transformers does not train, and modules for more tokens,
    which it lacks.
    """
    transformers = pytest.importorskip("transformers")
    config = copy.deepcopy({**MODELS[name], "num_nextn_predict_layers": 0})
    ours = model_layers(config, 4096)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        )
    routers = sum(
        buffer.numel()
        for name, buffer in theirs.named_buffers()
        if name.endswith("e_score_correction_bias")
    )
    assert (
        ours.parameter_count
        == sum(parameter.numel() for parameter in theirs.parameters()) + routers
    )


def test_a_transformer_is_estimated_alike_by_config_and_by_options():
    """Config and options give the same work and memory, but for the loss.

    The memory between F and I is 34 bytes a token and unit of width for this shape.
    """
    by_config = model_layers(public.LLAMA_3_8B, 8192)
    by_options = ModelShape(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=8,
        ffn=14336,
        gated=True,
        sequence=8192,
        vocabulary=128_256,
    ).by_layer()
    config_layer, other = by_config.layers[1], by_options.layers[1]
    assert (config_layer.used, config_layer.mixing, config_layer.recomputed) == (
        other.used,
        other.mixing,
        other.recomputed,
    )
    assert config_layer.activation == other.activation == 34 * 4096
    assert by_config.parameter_count == pytest.approx(by_options.parameter_count, rel=1e-4)


def test_windows_and_scans_cost_less_than_attention_to_all():
    gemma = model_layers(public.GEMMA_2_9B, 16384).layers
    assert gemma[1].mixing == pytest.approx((2 * 4096 - 4096**2 / 16384) / 16384 * gemma[2].mixing)
    short = model_layers(public.GEMMA_2_9B, 4096).layers
    assert short[1].mixing == short[2].mixing
    at_once, longer = (model_layers(public.NEMOTRON_H_8B, length).layers for length in (4096, 8192))
    kinds = [layer.kind for layer in longer]
    scan, attending = kinds.index("Mamba-2"), kinds.index("attention")
    assert (
        longer[scan].mixing
        == at_once[scan].mixing
        < longer[attending].mixing
        == 2 * at_once[attending].mixing
    )


def cluster(**more):
    return ModelLayout(
        **{
            "gpu": GPUS["h200"],
            "pipelines": 4,
            "stages": 8,
            "microbatches": 16,
            "tensor_parallel": 8,
            **more,
        }
    )


def test_few_tokens_an_expert_are_bound_by_reading_weights():
    """With 32 tokens for each of 256 experts, products would take a quarter of that."""
    model = model_layers(public.DEEPSEEK_V3, 1024)
    tables, _ = estimate_job("job", model, cluster(stages=61, gpu=GPUS["b200"]))
    layer = model.layers[10]
    reading = BYTES_READ * layer.matrices / 8 / GPUS["b200"].memory_bandwidth
    assert tables["layers"]["forward"][10] == pytest.approx(reading, rel=0.01)
    more = estimate_job("job", model, cluster(stages=61, gpu=GPUS["b200"], microbatch_size=8))[0]
    assert more["layers"]["forward"][10] == pytest.approx(
        (2 * layer.used + layer.mixing) * 8192 / 8 / GPUS["b200"].flops / 0.5, rel=0.01
    )


@pytest.mark.parametrize("name", ["NEMOTRON_H_8B", "GEMMA_2_9B", "QWEN3_30B_A3B"])
def test_the_job_of_a_model_can_be_planned(name):
    model = model_layers(MODELS[name], 4096)
    job = parse_job(job_text(*estimate_job("job", model, cluster())))
    assert sum(job.layers) == len(model.layers) and job.layer_values is not None
    costs = layer_costs(job)
    assert (
        costs.forward[0] == 0 < costs.weights[0]
        and costs.forward[-1] > 0
        and len(set(costs.forward)) > 2
    )
    assert plan_job(job, method="greedy").schedule.gap < 1


def test_the_head_of_a_large_vocabulary_takes_layers_from_the_last_stage():
    counts = estimate_job("job", model_layers(public.GEMMA_2_9B, 4096), cluster())[0]["placement"][
        "layers"
    ]
    assert sum(counts) == 44 and counts[-1] < max(counts) - 2


@pytest.mark.parametrize(
    "work", [(0, 3, 1, 1, 5, 2), (4, 4, 4, 1), (0, 1, 2, 3, 4, 5, 6), (7, 1, 1, 1, 7)]
)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_layers_are_divided_for_the_least_longest_stage(work, stages):
    def loads(ends):
        edges = [0, *ends, len(work)]
        return [sum(work[begin:end]) for begin, end in pairwise(edges)]

    divisions = map(loads, combinations(range(1, len(work)), stages - 1))
    figures = []
    for found in divisions:
        figures.append((max(found), sum(load**2 for load in found)))
    best = min(figures)
    counts = divide_layers(work, stages)
    ends = [sum(counts[:index]) for index in range(1, stages)]
    assert min(counts) > 0 and (max(loads(ends)), sum(load**2 for load in loads(ends))) == best


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "t5"}, "model_type is 't5'; expected one of llama, "),
        ({"hidden_size": None}, "hidden_size is None; expected a whole number"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; expected"),
        (
            {"num_hidden_layers": 2000},
            "num_hidden_layers is 2000; expected a whole number, 1 to 1000",
        ),
        (
            {"num_attention_heads": 5},
            "num_attention_heads is 5; expected a number that num_key_value_heads divides",
        ),
        ({"tie_word_embeddings": 3}, "tie_word_embeddings is 3; expected true or false"),
        (
            {"model_type": "gemma3_text", "layer_types": ["full_attention"]},
            "expected 32 kinds of layers",
        ),
        ({"model_type": "gemma2"}, "sliding_window is None; expected a whole number"),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "MX"},
            "hybrid_override_pattern is 'MX'; expected",
        ),
        (
            {"model_type": "nemotron_h", "layers_block_type": 7},
            "layers_block_type is 7; expected a list of texts",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "-", "moe_latent_size": 3},
            "moe_latent_size is 3",
        ),
        ({"model_type": "bamba", "layer_types": ["rnn"] * 32}, "layer_types is "),
    ],
)
def test_what_a_config_does_not_say_is_refused(change, says):
    with pytest.raises(JobError) as refused:
        model_layers({**public.LLAMA_3_8B, **change}, 4096)
    assert says in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "not JSON; expected a model's config.json"), ("[]", "not a JSON object")],
)
def test_files_that_are_no_config(text, says, tmp_path):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(JobError, match=says):
        read_model(tmp_path, 4096)
    with pytest.raises(JobError, match="cannot be read"):
        read_model(tmp_path / "none.json", 4096)


def test_a_folder_has_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(public.GEMMA_3_27B))
    assert read_model(tmp_path, 4096) == read_model(tmp_path / "config.json", 4096)


def test_every_family_has_a_model_here():
    kinds = {model.get("text_config", model)["model_type"] for model in MODELS.values()}
    assert kinds == FAMILIES.keys() - {"mistral"}  # which is as Llama
