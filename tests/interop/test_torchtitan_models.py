"""torchtitan's models by name, against the same training in one process.

Tested are layers, its data, and runs with failures.
"""

import importlib.util
import subprocess
import sys
from collections import deque

import pytest
import torch
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.runtime.checkpoints.checkpoint import identity_of, start_saving
from slipstream.runtime.checkpoints.parameters import load_parameters
from slipstream.runtime.config import ConfigError, parse_run_config
from slipstream.runtime.coordinator.run_options import Resilience
from slipstream.runtime.data.data import Microbatch, load_data
from slipstream.runtime.launch import run
from slipstream.runtime.models.compiling import require_compilable
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.models.split_backward import backward_weight, deferring_weights
from slipstream.runtime.protocol.failure_injection import Injection
from slipstream.runtime.ranks.shards import replace_tensor
from slipstream.schedules.schedule import Worker
from tests.interop.titan_training import write_assets
from tests.jobs import grid
from tests.patience import SECONDS
from tests.runtime.running import assert_same_numbers, judge, schedule_for

installed = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("torchtitan", "triton"))),
    reason="torchtitan is not installed: make neighbours",
)
pytestmark = pytest.mark.timeout(900)
CPU = torch.device("cpu")


def config(name="llama3/debugmodel", model=None, **training):
    return parse_run_config(
        {"torchtitan": name, "context": 16, "options": {"attention": "sdpa", **(model or {})}},
        {"device": "cpu", "dtype": "float64", "batch": 2, "iterations": 6, **training},
    )


def titans_data(folder):
    """A data set of torchtitan, which gives positions, too."""
    assets = str(write_assets(folder))
    return {
        "data": "torchtitan",
        "options": {"assets": assets, "dataset": "c4_test", "dataset_path": f"{assets}/data"},
    }


def whole_of(config):
    """torchtitan's model in one piece, of the layers' parameters."""
    model = build_model(config.model, 0, torch.float64, CPU)
    layers = [model.build(layer) for layer in range(model.layers)]
    whole = model._config.build().to(torch.float64)
    for layer in layers:
        for name, parameter in layer.named_parameters():
            if name in layer.step_rules:
                replace_tensor(whole, name, parameter.detach())
            else:
                whole.get_parameter(name).data = parameter.data
    if whole.enable_weight_tying:
        whole.tok_embeddings.weight = whole.lm_head.weight
    return model, layers, whole


def assert_same(result, expected, tolerance):
    """What is tied has the name of the first layer there, or of the head."""
    assert result.losses == pytest.approx(expected.losses, abs=tolerance)
    for parameter, value in load_parameters(result.out).items():
        wanted = expected.parameters.get(parameter)
        torch.testing.assert_close(
            value,
            expected.parameters["0.tok_embeddings.weight"] if wanted is None else wanted,
            rtol=0,
            atol=tolerance,
        )


@pytest.fixture(autouse=True)
def few_experts(monkeypatch):
    """Of Qwen3's small mixture, which has 64 of a width of 768 in eight layers."""
    if importlib.util.find_spec("torchtitan") is None:
        return
    from torchtitan.models import qwen3

    make_config = qwen3.qwen3_configs["debugmodel_moe"]

    def smaller(**options):
        found = make_config(**options)
        del found.layers[2:]
        for layer in found.layers:
            moe, routed = layer.moe, layer.moe.routed_experts
            for part in (moe, moe.router, routed.inner_experts, routed.token_dispatcher):
                part.num_experts = 12
            moe.router.gate.out_features, routed.inner_experts.hidden_dim = 12, 32
        return found

    monkeypatch.setitem(qwen3.qwen3_configs, "debugmodel_moe", smaller)


MIXTURES = ["qwen3/debugmodel_moe", "deepseek_v3/debugmodel"]


@installed
@pytest.mark.parametrize(("name", "expected"), list(zip(MIXTURES, (2, 5), strict=True)))
def test_gradients_and_counted_tokens_of_experts_are_the_models(name, expected):
    """To the bit, though gradients of experts' weights come in W."""
    _, layers, whole = whole_of(config(name))
    for module in whole.modules():
        if hasattr(module, "_precompute_cache"):
            module._init_self_buffers()
    for parameter in whole.parameters():
        parameter.grad = None
        parameter.data = parameter.data.clone()
    tokens, work = torch.randint(2000, (2, 16)), deque()
    whole(tokens).square().mean().backward()
    with deferring_weights(work):
        for layer in layers:
            tokens = layer(tokens)
    tokens.square().mean().backward()
    experts = next(
        parameter
        for layer in layers
        for name, parameter in layer.named_parameters()
        if name.endswith("w2_EDF")
    )
    assert experts.grad is None
    backward_weight(work)
    mixtures = 0
    for name, parameter in (pair for layer in layers for pair in layer.named_parameters()):
        if name.endswith("expert_bias_E"):
            moe = whole.get_submodule(name.rpartition(".")[0])
            assert (
                torch.equal(parameter.grad, moe.tokens_per_expert_E)
                and parameter.grad.sum() >= 2 * 16 * 3
            )
            mixtures += 1
        else:
            assert torch.equal(parameter.grad, whole.get_parameter(name).grad), name
    assert mixtures == expected


@installed
@pytest.mark.parametrize(
    "training", [{"clip_norm": 1.0}, {"shard_optimizer": True, "recompute": "full"}], ids=str
)
def test_a_mixture_with_a_killed_worker_has_the_numbers_of_one_process(training, tmp_path):
    run_config = config("deepseek_v3/debugmodel", optimizer="sgd", learning_rate=0.1, **training)
    job = grid(2, 2, 2)
    result = run(
        schedule_for(job),
        run_config,
        out=tmp_path / "run",
        resilience=Resilience(
            scheduler=lambda down: schedule_for(job, [str(worker) for worker in down]),
            injections=(Injection(Worker(1, 1), 3, 1),),
        ),
    )
    assert len(result.recoveries) == 1
    assert_same_numbers(result, judge(run_config, (2, 2), 6))
    biases = [
        value
        for name, value in load_parameters(result.out).items()
        if name.endswith("expert_bias_E")
    ]
    assert len(biases) == 5 and all(bias.abs().max() > 1e-3 for bias in biases)


@installed
@pytest.mark.parametrize(
    ("training", "words"),
    [
        (
            {"tensor_parallel": 2},
            "a mixture of experts, with training.tensor_parallel, which its experts are not "
            "cut for",
        ),
        (
            {"compile": True},
            "a mixture of experts, with training.compile, and experts take other tokens each time",
        ),
    ],
)
def test_what_mixtures_cannot_do_is_refused_in_one_line(training, words, tmp_path):
    job = grid(2, 2, 2)
    with pytest.raises(ConfigError, match=words) as error:
        run(schedule_for(job), config("deepseek_v3/debugmodel", **training), out=tmp_path / "run")
    assert "\n" not in str(error.value)


@installed
@pytest.mark.parametrize("name", ["llama3/debugmodel", "qwen3/debugmodel", *MIXTURES])
def test_the_layers_one_after_the_other_are_the_model(name):
    model, layers, whole = whole_of(config(name))
    if model.shared:
        layers[0].tok_embeddings.weight = layers[-1].lm_head.weight
    tokens = torch.randint(2000, (2, 16))
    for module in whole.modules():  # rotations are complex: `to` has taken their real part
        if hasattr(module, "_precompute_cache"):
            module._init_self_buffers()
    expected = whole(tokens)
    for layer in layers:
        tokens = layer(tokens)
    torch.testing.assert_close(tokens, expected, rtol=0, atol=0)
    names = {name for layer in layers for name in layer.state_dict()}
    assert names >= {name for name, _ in whole.named_parameters()}


@installed
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("llama3/9B", "expected one of llama3/debugmodel"),
        ("nothing", "such as 'llama3/8B'"),
        ("kimi_k2_7/debugmodel", "is more than a chain"),
        (
            "gpt_oss/debugmodel",
            "attention has sinks and windows, which ScaledDotProductAttention lacks",
        ),
        ("flux/flux-debug", "is no decoder"),
    ],
)
def test_other_models_are_refused_in_one_line(name, words):
    with pytest.raises(ConfigError, match=words) as error:
        build_model(config(name).model, 0, torch.float64, CPU)
    assert "\n" not in str(error.value)


@installed
def test_on_cpus_attention_that_sees_documents_is_refused():
    run_config = parse_run_config({"torchtitan": "llama3/debugmodel", "context": 16}, {})
    with pytest.raises(
        ConfigError,
        match=r"no backward on cpu; expected a GPU, or model\.options\.attention = 'sdpa'",
    ):
        build_model(run_config.model, 0, torch.float32, CPU)


@installed
def test_its_data_are_one_stream_by_iterations_that_can_be_gone_back(tmp_path):
    run_config = config(**titans_data(tmp_path))
    corpus, another = load_data(run_config, (2, 1)), load_data(run_config, (2, 1))
    names = [
        Microbatch(iteration, pipeline, index)
        for iteration in range(12)
        for pipeline, count in enumerate((2, 1))
        for index in range(count)
    ]
    read = {name: corpus.batch(name, 2, 16) for name in names}
    loader = another._data._data
    for name, batch in zip(names, loader, strict=False):
        assert all(
            torch.equal(mine, theirs)
            for mine, theirs in zip(
                read[name], (batch[0]["input"], batch[1], batch[0]["positions"]), strict=True
            )
        )
    for iteration in (11, 9, 10, 0, 5):  # within what is kept, and from the beginning
        again = corpus.batch(Microbatch(iteration, 1, 0), 2, 16)
        assert all(map(torch.equal, again, read[Microbatch(iteration, 1, 0)]))
    assert list(corpus.tokens(3)) == [32, 32, 32]


@installed
def test_a_run_with_a_killed_worker_has_the_numbers_of_one_process(tmp_path):
    run_config = config(clip_norm=1.0, loss_weights="tokens", **titans_data(tmp_path / "assets"))
    job = grid(2, 2, 2)
    result = run(
        schedule_for(job),
        run_config,
        out=tmp_path / "run",
        resilience=Resilience(
            scheduler=lambda down: schedule_for(job, [str(worker) for worker in down]),
            injections=(Injection(Worker(1, 1), 3, 1),),
        ),
    )
    assert len(result.recoveries) == 1
    assert_same_numbers(result, judge(run_config, (2, 2), 6))


@installed
@pytest.mark.parametrize("name", ["llama3/debugmodel", "qwen3/debugmodel"])
def test_compiled_layers_have_the_numbers_of_others(tmp_path, name):
    """Each compiled decoder layer has the numbers of others, its backward in two.

    Rotations are computed in float32, and rounded so.
    """
    job, data = grid(2, 2, 2), titans_data(tmp_path / "assets")
    result = run(
        schedule_for(job),
        config(name, compile=True, **data),
        out=tmp_path / "run",
        resilience=Resilience(
            scheduler=lambda down: schedule_for(job, [str(worker) for worker in down]),
            injections=(Injection(Worker(1, 1), 3, 1),),
        ),
    )
    assert len(result.recoveries) == 1
    assert_same(result, judge(config(name, **data), (2, 2), 6), 1e-7)


@installed
def test_layers_that_are_given_masks_are_not_compiled():
    run_config = parse_run_config(
        {"torchtitan": "llama3/debugmodel", "context": 16}, {"compile": True}
    )
    with pytest.raises(
        ConfigError, match=r"given masks of documents, which is untested; expected false"
    ):
        require_compilable(run_config, CPU)


@installed
@pytest.mark.parametrize(
    "name", ["llama3/debugmodel", "qwen3/debugmodel", "deepseek_v3/debugmodel"]
)
def test_a_checkpoint_that_is_exported_is_one_of_torchtitan_and_where_layers_begin(tmp_path, name):
    from torch.distributed.checkpoint.state_dict_loader import load

    run_config, folder = config(name), tmp_path / "titan"
    model, layers, whole = whole_of(run_config)
    for number, layer in enumerate(layers):
        shared = [group[1] for group in model.shared]
        state = {
            f"model.{key}": value.detach()
            for key, value in layer.named_parameters()
            if f"{number}.{key}" not in shared
        }
        start_saving(
            tmp_path / "checkpoints", 3, {number: state}, identity_of(run_config, len(layers))
        ).wait()
    done = CliRunner().invoke(app, ["export", str(tmp_path), str(folder), "--to", "torchtitan"])
    assert done.exit_code == 0 and done.stderr == f"iteration 3 written to {folder}\n", done.stderr
    read = {key: torch.zeros_like(value) for key, value in whole.state_dict().items()}
    assert "layers.0.attention.qkv_linear.wq.weight" in read
    load(read, checkpoint_id=folder, no_dist=True)
    assert all(torch.equal(read[key], value) for key, value in whole.state_dict().items())
    initial = build_model(
        config(name, model={"checkpoint": str(folder)}).model, 7, torch.float64, CPU
    )
    for number in range(len(layers)):
        for key, value in initial.build(number).named_parameters():
            assert torch.equal(
                value, {**dict(whole.named_parameters()), **dict(whole.named_buffers())}[key]
            )
    absent = build_model(
        config(name, model={"checkpoint": str(tmp_path)}).model, 7, torch.float64, CPU
    )
    with pytest.raises(ConfigError, match="cannot be read"):
        absent.build(0)


@installed
def test_a_checkpoint_of_other_layers_is_not_exported(tmp_path):
    run_config = config()
    _, layers, _ = whole_of(run_config)
    for number in range(len(layers)):
        start_saving(
            tmp_path / "checkpoints",
            3,
            {number: {"model.w": torch.zeros(2)}},
            identity_of(run_config, len(layers)),
        ).wait()
    done = CliRunner().invoke(
        app, ["export", str(tmp_path), str(tmp_path / "titan"), "--to", "torchtitan"]
    )
    assert done.exit_code == 2 and "are not those of torchtitan's llama3/debugmodel" in done.stderr
    assert done.stderr.count("\n") == 1 and [path.name for path in tmp_path.iterdir()] == [
        "checkpoints"
    ]


@installed
@pytest.mark.parametrize("name", ["llama3/debugmodel", "qwen3/debugmodel"])
def test_workers_of_two_ranks_have_the_numbers_of_one_process(tmp_path, name):
    """Workers of two ranks step by SGD as one process does.

    Adam divides gradients by their own size, and with those that are nearly nothing also their
    rounding.
    """
    job, training = grid(2, 2, 2), {"clip_norm": 1.0, "optimizer": "sgd"}
    result = run(
        schedule_for(job),
        config(name, tensor_parallel=2, **training),
        out=tmp_path / "run",
        resilience=Resilience(
            scheduler=lambda down: schedule_for(job, [str(worker) for worker in down]),
            injections=(Injection(Worker(1, 1), 3, 1),),
        ),
    )
    assert len(result.recoveries) == 1
    assert_same(result, judge(config(name, **training), (2, 2), 6), 1e-9)


OTHERS = """
import sys
import torch
sys.modules["torchtitan"] = None  # who imports it fails
import slipstream.runtime.worker.fork_server_process, slipstream.runtime.worker.main_thread
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.data.data import load_data
from slipstream.runtime.models.layered_model import build_model
given = parse_run_config({}, {})
load_data(given, (1,))
build_model(given.model, 0, torch.float32, torch.device("cpu")).build(0)
print("triton" in sys.modules)
import slipstream.cli.train, slipstream.cli.export, slipstream.runtime.api
"""


def test_who_does_not_name_it_imports_none_of_it_and_workers_no_triton_either():
    done = subprocess.run(
        [sys.executable, "-c", OTHERS], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
