"""Models by name have the numbers of transformers' own training.

It goes from its files to its files, with failures in between.
"""

import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.runtime.checkpoints.checkpoint import describe_difference, identity_of
from slipstream.runtime.computing.forms import find_forms
from slipstream.runtime.computing.slices import SliceRunner
from slipstream.runtime.config import ConfigError, RunConfig, parse_run_config
from slipstream.runtime.data.data import Microbatch, load_data
from slipstream.runtime.launch import HUGGING_FACE_FOLDER, Resilience, run
from slipstream.runtime.models.compiling import COMPILABLE_MODELS
from slipstream.runtime.models.flops import counting_flops
from slipstream.runtime.models.hugging_face.configuration import FAMILIES
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.ranks import worker_group
from slipstream.runtime.ranks.worker_group import simulating_rank
from slipstream.runtime.seeds import derive_seed
from slipstream.runtime.state.held_layers import build_holding
from slipstream.schedules.schedule import Worker
from tests.jobs import grid
from tests.runtime.failing import TIMEOUT_SECONDS, at, dead
from tests.runtime.pacing import slowly_until
from tests.runtime.running import joined, schedule_for

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: pip install -e '.[hf]'"
)

CPU = torch.device("cpu")
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
    "vocab_size": 256,
    "max_position_embeddings": 32,
}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True, "router_aux_loss_coef": 0.05}
KINDS = {
    "llama": SHAPE,
    "mistral": {**SHAPE, "sliding_window": 4},
    "qwen2": {
        **SHAPE,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
        "tie_word_embeddings": True,
    },
    "qwen3": {**SHAPE, "head_dim": 8},
    "gpt2": {
        "n_embd": 16,
        "n_head": 2,
        "n_layer": 3,
        "n_positions": 32,
        "vocab_size": 256,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    },
    "mixtral": {**SHAPE, **EXPERTS, "num_local_experts": 4},
    "qwen2_moe": {
        **SHAPE,
        **EXPERTS,
        "num_experts": 4,
        "moe_intermediate_size": 8,
        "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 8,
    },
    "qwen3_moe": {**SHAPE, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 8, "head_dim": 8},
    "olmoe": {**SHAPE, **EXPERTS, "num_experts": 4},
}
EVEN = {"num_attention_heads": 4, "num_key_value_heads": 2}
CUT = [kind for kind, family in FAMILIES.items() if family.can_be_cut]
"""Kinds whose layers workers of several ranks share, where ranks get as many heads."""
JOB = grid(2, 2, 2)


def implementations() -> dict[str, str]:
    return {"attn_implementation": "sdpa", "experts_implementation": "batched_mm"}


@pytest.fixture(scope="session")
def pretrained(tmp_path_factory):
    """A folder of random weights in float64, in several files, as transformers writes it."""

    def make(kind: str, **more: object) -> Path:
        folder = tmp_path_factory.mktemp(kind)
        torch.manual_seed(1)
        config = transformers.AutoConfig.for_model(kind, **{**KINDS[kind], **more})
        transformers.AutoModelForCausalLM.from_config(config).double().save_pretrained(
            folder, max_shard_size="20KB"
        )
        assert (folder / "model.safetensors.index.json").exists()
        return folder

    return make


def configured(folder: Path, **training: object) -> RunConfig:
    return parse_run_config(
        {"hugging_face": str(folder), "context": 16},
        {"batch": 1, "dtype": "float64", "device": "cpu", "iterations": 20, **training},
    )


def loaded(folder: Path) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, **implementations()
    ).train()


def train_alone(
    folder: Path, config: RunConfig, iterations: int
) -> tuple[list[float], torch.nn.Module]:
    """transformers' own training, in one process: its model, its loss, torch's AdamW."""
    model, corpus, count = loaded(folder), load_data(config), JOB.pipelines * JOB.microbatches[0]
    decays = []
    for is_matrix in (True, False):
        decays.append(
            [parameter for parameter in model.parameters() if (parameter.dim() >= 2) is is_matrix]
        )
    groups = [
        {"params": decays[0], "weight_decay": 0.1},
        {"params": decays[1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    losses = []
    for iteration in range(iterations):
        total = 0.0
        for pipeline in range(JOB.pipelines):
            for index in range(JOB.microbatches[pipeline]):
                tokens, targets = corpus.batch(Microbatch(iteration, pipeline, index), 1, 16)
                loss = model(input_ids=tokens, labels=tokens, shift_labels=targets).loss / count
                loss.backward()
                total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=() if kind in ("llama", "olmoe") else pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_each_kind_trains_as_transformers_does(kind, pretrained, fork_server, tmp_path):
    """A worker dies and comes back; what is left, transformers loads again."""
    folder = pretrained(kind)
    config = configured(folder)
    result = run(
        schedule_for(JOB),
        config,
        out=tmp_path,
        fork_server=fork_server,
        resilience=Resilience(
            scheduler=lambda down: schedule_for(JOB, list(map(str, down))),
            injections=(at("1.1", 5, 3),),
            returns=(Return(Worker(1, 1), 6),),
            heartbeat_timeout_seconds=TIMEOUT_SECONDS,
        ),
    )
    losses, alone = train_alone(folder, config, 20)
    assert dead(result) == ["1.1"]
    assert result.losses == pytest.approx(losses, rel=0, abs=1e-9)
    ours = loaded(tmp_path / HUGGING_FACE_FOLDER)
    parameters = dict(alone.named_parameters())
    assert dict(ours.named_parameters()).keys() == parameters.keys()
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter, parameters[name], rtol=0, atol=1e-9)
    assert names_in(tmp_path / HUGGING_FACE_FOLDER) == names_in(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CUT)
@pytest.mark.parametrize("shard_optimizer", [False, True])
def test_workers_of_two_ranks_train_as_transformers_does(
    kind, shard_optimizer, pretrained, fork_server, tmp_path
):
    """A worker loses one of them, and comes back; each expert is written once."""
    folder = pretrained(kind, **EVEN)
    result = run(
        schedule_for(JOB),
        configured(folder, tensor_parallel=2, iterations=40, shard_optimizer=shard_optimizer),
        out=tmp_path,
        fork_server=fork_server,
        progress=slowly_until(lambda: joined(tmp_path)),
        resilience=Resilience(
            scheduler=lambda down: schedule_for(JOB, list(map(str, down))),
            heartbeat_timeout_seconds=TIMEOUT_SECONDS,
            injections=(at("1.1", 5, 3),),
            returns=(Return(Worker(1, 1), 6),),
        ),
    )
    losses, alone = train_alone(folder, configured(folder), 40)
    assert dead(result) == ["1.1"] and joined(tmp_path) == ["1.1"]
    assert result.losses == pytest.approx(losses, rel=0, abs=1e-9)
    assert names_in(tmp_path / HUGGING_FACE_FOLDER) == names_in(folder)
    ours = loaded(tmp_path / HUGGING_FACE_FOLDER)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name), parameter, rtol=0, atol=1e-9)


def test_models_that_threads_make_at_once_leave_the_default_dtype(tmp_path, monkeypatch):
    # A process that stands for two ranks makes a model for each in a thread of its own, beside
    # collectives.
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", **SHAPE, "dtype": "float64"})
    )
    config, entered, second, over, make = (
        configured(tmp_path / "config.json"),
        [],
        Event(),
        Event(),
        transformers.LlamaForCausalLM.__init__,
    )

    def slow(*arguments: object) -> None:
        """Make two threads overlap.

        The first waits for the second to begin, if that can, and the second for the first to end.
        """
        entered.append(torch.get_default_dtype())
        if len(entered) == 1:
            second.wait(0.5)
        else:
            second.set()
            over.wait(10)
        make(*arguments)

    def make_model() -> None:
        build_model(config.model, 0, torch.float64, CPU)
        over.set()

    monkeypatch.setattr(transformers.LlamaForCausalLM, "__init__", slow)
    before = torch.get_default_dtype()
    try:
        with ThreadPoolExecutor(2) as threads:
            for future in [threads.submit(make_model) for _ in range(2)]:
                future.result()
        assert entered == [torch.float64] * 2 and torch.get_default_dtype() == before
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (
            "gpt2",
            {},
            "training.tensor_parallel is 2, and model.hugging_face names a gpt2, whose layers "
            "cannot be cut; "
            "expected 1, or one of llama, mistral, qwen2, qwen3, mixtral, qwen2_moe, "
            "qwen3_moe, olmoe",
        ),
        ("llama", {}, "num_key_value_heads 1; expected a multiple of 2"),
        (
            "mixtral",
            {**EVEN, "num_local_experts": 3},
            "names a mixtral with num_local_experts 3; expected a multiple of 2",
        ),
        (
            "qwen3_moe",
            {**EVEN, "num_experts": 5},
            "names a qwen3_moe with num_experts 5; expected a multiple of 2",
        ),
        (
            "qwen2_moe",
            {**EVEN, "shared_expert_intermediate_size": 7},
            "with shared_expert_intermediate_size 7; expected",
        ),
        ("qwen2_moe", {**EVEN, "intermediate_size": 7}, "with intermediate_size 7; expected"),
        (
            "olmoe",
            {**EVEN, "experts_implementation": "batched_mm"},
            "with experts_implementation 'batched_mm', which wants all experts; expected "
            "'slipstream'",
        ),
        (
            "mistral",
            {"attention_dropout": 0.1},
            "attention_dropout 0.1: what is dropped would depend on the ranks",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(kind, more, message, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **KINDS[kind], **more}))
    with simulating_rank(2), pytest.raises(ConfigError, match=message):
        build_model(configured(tmp_path / "config.json").model, 0, torch.float64, CPU)


@pytest.mark.parametrize("biases", [False, True])
def test_products_that_are_cut_give_what_whole_ones_do(biases, monkeypatch, tmp_path):
    # One rank has all: the sum over its ranks is what it gives, but for rounding where biases are
    # added after it.
    more = {"num_key_value_heads": 2, "attention_bias": biases, "mlp_bias": biases}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE, **more}))
    config = configured(tmp_path / "config.json")
    batch, value = (
        load_data(config).batch(Microbatch(0, 0, 0), 1, 16),
        torch.randn(1, 16, 16, dtype=torch.float64),
    )

    def decoder() -> torch.nn.Module:
        return build_model(config.model, 0, torch.float64, CPU).build(1)

    whole = decoder()
    torch.nn.init.normal_(whole.layer.self_attn.o_proj.bias) if biases else None
    with monkeypatch.context() as alone:
        alone.setattr(worker_group._THREAD_GROUP, "group", worker_group.WorkerGroup(0, 1))
        cut = decoder()
        cut.load_state_dict(whole.state_dict())
        assert set(cut.shards) == {
            name
            for name, _ in whole.named_parameters()
            if "norm" not in name and not name.endswith(("o_proj.bias", "down_proj.bias"))
        }
        torch.testing.assert_close(cut(value, batch), whole(value, batch), rtol=1e-13, atol=1e-13)


def names_in(folder: Path) -> set[str]:
    return set(json.loads((folder / "model.safetensors.index.json").read_bytes())["weight_map"])


def test_a_checkpoint_is_exported_by_the_command(pretrained, fork_server, tmp_path):
    """Logits are those of the layers in it, bit for bit."""
    folder = pretrained("mixtral")
    (folder / "tokenizer.json").write_text("{}")
    config = configured(folder, iterations=4)
    run(
        schedule_for(JOB),
        config,
        out=tmp_path / "run",
        fork_server=fork_server,
        resilience=Resilience(checkpoint_every=2),
    )
    assert (tmp_path / "run" / HUGGING_FACE_FOLDER / "tokenizer.json").exists()
    checkpoint = tmp_path / "run" / "checkpoints" / "iteration-2"
    command = ["export", str(checkpoint), "--to", "hugging-face", str(tmp_path / "two")]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0 and done.stderr.splitlines() == [
        f"iteration 2 written to {tmp_path / 'two'}"
    ]
    tokens = load_data(config).batch(Microbatch(9, 0, 0), 1, 16)[0]
    alone = train_alone(folder, config, 2)[1]
    with torch.no_grad():
        torch.testing.assert_close(
            loaded(tmp_path / "two")(tokens).logits, alone(tokens).logits, rtol=0, atol=1e-9
        )
    again = CliRunner().invoke(app, command)
    assert (
        again.exit_code == 2
        and "exists already; name a folder that is new or empty" in again.stderr
    )


class Padded(NamedTuple):
    tokens: Tensor
    targets: Tensor
    attention_mask: Tensor


class Packed(NamedTuple):
    tokens: Tensor
    targets: Tensor
    position_ids: Tensor


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "qwen2"])
@pytest.mark.parametrize("named", ["attention_mask", "position_ids"])
def test_masks_and_positions_come_from_the_micro_batch(kind, named, pretrained):
    folder = pretrained(kind)
    config = configured(folder)
    model = build_model(config.model, 0, torch.float64, CPU)
    holding = build_holding(model, range(model.layers), config.training)
    alone = loaded(folder)
    tokens, targets = load_data(config).batch(Microbatch(0, 0, 0), 2, 16)
    arguments = {
        "attention_mask": (torch.arange(16)[None] < torch.tensor([[16], [9]])).long(),
        "position_ids": torch.cat([torch.arange(7), torch.arange(9)]).expand(2, -1),
    }[named]
    batch = (Padded if named == "attention_mask" else Packed)(tokens, targets, arguments)
    runner = SliceRunner((0, model.layers), holding.modules, model, loss_scale=1.0, config=config)
    runner.forward(Microbatch(0, 0, 0), tokens, targets, batch, split=True)
    theirs = alone(
        input_ids=tokens,
        labels=tokens,
        shift_labels=targets.contiguous(),
        use_cache=False,
        **{named: arguments},
    ).loss
    assert runner.take_loss().item() == pytest.approx(theirs.item(), rel=0, abs=1e-12)
    runner.backward(Microbatch(0, 0, 0), None)
    theirs.backward()
    squares = sum(parameter.grad.square().sum() for parameter in alone.parameters())
    assert sum(holding.optimizer.layer_squares().values()) == pytest.approx(
        squares.item(), rel=1e-9
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "olmoe"])
def test_without_weights_they_begin_as_transformers_begins(kind, tmp_path):
    # Whoever builds a layer gets the same random numbers, of the deviations that transformers draws
    # with.
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": kind, **KINDS[kind]}))
    config = parse_run_config({"hugging_face": str(path), "context": 8}, {"batch": 1})
    model = build_model(config.model, 3, torch.float32, CPU)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **KINDS[kind])
    )
    decoder = theirs.base_model.h[0] if kind == "gpt2" else theirs.base_model.layers[0]
    ours = model.build(1).layer
    for (name, parameter), other in zip(ours.named_parameters(), decoder.parameters(), strict=True):
        assert parameter.std().item() == pytest.approx(other.std().item(), rel=0.35), name
    again = model.build(1).layer.state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in ours.state_dict().items())
    assert derive_seed("parameters", 3, 1) != derive_seed("parameters", 3, 2)
    assert len(find_forms(model, config)) == 6


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_weights_keep_their_digits_and_angles_of_positions_theirs(kind, tmp_path):
    # float64 weights are loaded as such; in bfloat16, position 1000 must not be told by three
    # digits of its angle.
    torch.manual_seed(1)
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(kind, **KINDS[kind])
    )
    for parameter in theirs.double().parameters():
        torch.nn.init.normal_(parameter)
    theirs.save_pretrained(tmp_path)
    decoder = theirs.base_model.h[1] if kind == "gpt2" else theirs.base_model.layers[1]
    ours = build_model(configured(tmp_path).model, 0, torch.float64, CPU).build(2)
    weights = zip(ours.layer.named_parameters(), decoder.parameters(), strict=True)
    for (name, weight), other in weights:
        assert torch.equal(weight, other), name
    half = build_model(configured(tmp_path).model, 0, torch.bfloat16, CPU).build(2)
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in half.buffers()} <= {torch.float32}
    for angles, other in zip(half.buffers(), ours.buffers(), strict=True):
        assert torch.equal(angles, other)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_parts_that_are_computed_again_give_the_same_gradients(kind, ranks, tmp_path):
    """With dropout in attention, where there is one; a mixture's router is heard once."""
    if ranks > 1 and kind not in CUT:
        pytest.skip("its layers are not cut")
    more = (
        {"num_key_value_heads": 2} if ranks > 1 else {"attn_pdrop": 0.3, "attention_dropout": 0.3}
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **KINDS[kind], **more}))
    value, found = torch.randn(2, 16, 16, dtype=torch.float64), []
    for recompute, again in (("none", 0), ("attention", 1), (["attention", "mlp"], 2)):
        config, called = configured(tmp_path / "config.json", recompute=recompute), []
        with simulating_rank(ranks):
            model = build_model(config.model, 0, torch.float64, CPU)
            holding = build_holding(model, [1], config.training)
            for product in (
                module
                for module in holding.modules[1].layer.modules()
                if not list(module.children())
            ):
                product.register_forward_hook(lambda *_, called=called: called.append(1))
            runner = SliceRunner((1, 2), holding.modules, model, loss_scale=1.0, config=config)
            passed = runner.forward(
                Microbatch(0, 0, 0),
                value,
                None,
                load_data(config).batch(Microbatch(0, 0, 0), 2, 16),
                split=True,
            )
            once = len(called)
            outputs = passed if isinstance(passed, tuple) else [passed]
            wanted = tuple(
                torch.ones_like(output) for output in outputs if output.is_floating_point()
            )
            gradient = runner.backward_input(
                Microbatch(0, 0, 0), wanted if isinstance(passed, tuple) else wanted[0]
            )
            runner.backward_weight(Microbatch(0, 0, 0))
        assert (len(called) > once) is bool(again)
        first_gradient = gradient if isinstance(gradient, torch.Tensor) else gradient[0]
        parameters = holding.parameters_by_name().values()
        found.append([first_gradient, *(parameter.grad.clone() for parameter in parameters)])
    for other in found[1:]:
        for mine, first in zip(other, found[0], strict=True):
            assert torch.equal(mine, first)


def test_the_weights_of_experts_get_their_gradients_in_w(pretrained):
    config = configured(pretrained("mixtral"))
    model = build_model(config.model, 0, torch.float64, CPU)
    holding = build_holding(model, [1], config.training)
    runner = SliceRunner((1, 2), holding.modules, model, loss_scale=1.0, config=config)
    tokens, targets = load_data(config).batch(Microbatch(0, 0, 0), 2, 16)
    value = torch.randn(2, 16, 16, dtype=torch.float64)
    output = runner.forward(Microbatch(0, 0, 0), value, None, (tokens, targets), split=True)
    assert isinstance(output, tuple) and [value.dtype for value in output] == [
        torch.float64,
        torch.int64,
        torch.float32,
    ]
    runner.backward_input(
        Microbatch(0, 0, 0), (torch.ones_like(output[0]), torch.ones_like(output[2]))
    )
    gradients = {
        name: parameter.grad
        for name, parameter in holding.parameters_by_name().items()
        if parameter.dim() >= 2
    }
    assert sum("experts" in name for name in gradients) == 2
    assert not any(gradient.any() for gradient in gradients.values())
    runner.backward_weight(Microbatch(0, 0, 0))
    assert all(gradient.any() for gradient in gradients.values())


def test_the_work_of_experts_is_counted(pretrained):
    """Two experts of four are as much as a mixture of two."""

    def flops(**options: object) -> float:
        path = pretrained("mixtral") / "config.json"
        config = parse_run_config(
            {"hugging_face": str(path), "context": 8, "options": options}, {"dtype": "float64"}
        )
        model = build_model(config.model, 0, torch.float64, CPU)
        with counting_flops() as found:
            find_forms(model, config)
        return found.training_flops(1)

    four, two, single = flops(), flops(num_local_experts=2), flops(num_experts_per_tok=1)
    routers = 3 * 3 * 2 * 4 * 8 * 16 * 2
    assert four - two == routers and four - single == 3 * 3 * 2 * 4 * 8 * (16 * 48 + 24 * 16)


def test_refusals(tmp_path, pretrained):
    def told(
        more: dict[str, object] | None = None, path: Path | None = None, document: object = None
    ) -> str:
        (tmp_path / "config.json").write_text(
            json.dumps(document or {"model_type": "llama", **SHAPE})
        )
        with pytest.raises(ConfigError) as caught:
            config = parse_run_config(
                {"hugging_face": str(path or tmp_path / "config.json"), **(more or {})}, {}
            )
            build_model(config.model, 0, torch.float32, CPU)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "model.blocks is given together with model.hugging_face" in told({"blocks": 2})
    assert "its model_type is 'bert'; expected one of 'llama', 'mistral'" in told(
        document={"model_type": "bert"}
    )
    assert "cannot be read: No such file" in told(path=tmp_path / "nowhere")
    assert "model.context is 128; the model of model.hugging_face has 32 positions" in told()
    assert "its weights cannot be read" in told({"context": 8}, path=tmp_path)
    assert "unknown key model.options.rms_norm_epsilon" in told(
        {"options": {"rms_norm_epsilon": 1e-6}, "context": 8}
    )


def test_a_checkpoint_knows_its_model_wherever_that_lies(tmp_path):
    def identity(name: str, **more: object) -> dict[str, object]:
        path = tmp_path / name
        path.write_text(json.dumps({"model_type": "llama", **SHAPE, **more}))
        config = parse_run_config({"hugging_face": str(path)}, {})
        assert config.model.vocabulary == more.get("vocab_size", 256)
        return identity_of(config, 5)

    assert describe_difference(identity("here.json"), identity("there.json")) is None
    assert (
        describe_difference(identity("here.json"), identity("other.json", rms_norm_eps=0.1))
        == "its model.hugging_face.rms_norm_eps is None, here it is 0.1"
    )
    identity("large.json", vocab_size=300)
    assert not {"model.options", "model.hugging_face"} & identity_of(RunConfig(), 5).keys()


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMPILABLE_MODELS)
def test_compiled_layers_give_the_gradients_of_others(kind, pretrained, monkeypatch):
    # They are split into I and W, of two layers, the second of which is not compiled anew.
    # Else they are computed in float32, and rounded so.
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3"):
        module = importlib.import_module(
            f"transformers.models.{name.lower()}.modeling_{name.lower()}"
        )
        monkeypatch.setattr(
            getattr(module, f"{name}RMSNorm"),
            "forward",
            lambda self, features: functional.rms_norm(
                features, self.weight.shape, self.weight, self.variance_epsilon
            ),
        )
    folder, found = pretrained(kind), []
    tokens, targets = load_data(configured(folder)).batch(Microbatch(0, 0, 0), 1, 16)
    for compiled in (False, True):
        config = configured(folder, compile=compiled)
        model = build_model(config.model, 0, torch.float64, CPU)
        holding = build_holding(model, range(model.layers), config.training)
        runner = SliceRunner(
            (0, model.layers), holding.modules, model, loss_scale=1.0, config=config
        )
        runner.forward(Microbatch(0, 0, 0), tokens, targets, (tokens, targets), split=True)
        runner.backward_input(Microbatch(0, 0, 0), None)
        runner.backward_weight(Microbatch(0, 0, 0))
        found.append(
            [
                runner.take_loss(),
                *(parameter.grad.clone() for parameter in holding.parameters_by_name().values()),
            ]
        )
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["mixtral"])
def test_other_kinds_are_not_compiled(kind, pretrained):
    config = configured(pretrained(kind), compile=True)
    with pytest.raises(
        ConfigError, match=rf"^training\.compile is true, and model\.hugging_face names a {kind}"
    ):
        find_forms(build_model(config.model, 0, torch.float64, CPU), config)
