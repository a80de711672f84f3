"""The model, data and job file of docs/own-model.md as they stand.

They are trained and compared with one process.
"""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from slipstream.planner.job.file import parse_job
from slipstream.runtime.checkpoints.checkpoint import open_checkpoint
from slipstream.runtime.computing.slices import SliceRunner
from slipstream.runtime.config import ConfigError, parse_run_config
from slipstream.runtime.data.data import Microbatch, load_data
from slipstream.runtime.launch import Resilience, RunError, run
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.run_folder import CHECKPOINTS
from slipstream.runtime.state.held_layers import build_holding
from tests.runtime.failing import JOB, planned
from tests.runtime.forked import own_fork_server
from tests.runtime.running import assert_same_numbers, judge, losses_in, schedule_for, tiny

DOCUMENT = Path(__file__).parents[2] / "docs" / "own-model.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCUMENT.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working directory with the document's files."""
    model, data = blocks("python")
    (tmp_path / "my_llama.py").write_text(model)
    (tmp_path / "my_data.py").write_text(data)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("my_llama", "my_data"):  # those of another test's directory
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


@pytest.fixture
def transformers():
    return pytest.importorskip(
        "transformers", reason="transformers is not installed: pip install -e '.[hf]'"
    )


def test_the_model_takes_few_lines() -> None:
    code = [line for line in blocks("python")[0].splitlines() if line.strip() and '"""' not in line]
    assert len(code) <= 45


@pytest.mark.slow
def test_llama_trains_as_in_one_process(here, transformers) -> None:
    job = parse_job(blocks("toml")[0])
    config = parse_run_config(
        {**job.model, "blocks": 2, "width": 32, "context": 16},
        job.training,
        iterations=5,
        device="cpu",
        data="my_data:Data",
    )
    with own_fork_server() as fork_server:
        result = run(schedule_for(job, ["1.1"]), config, out=here / "out", fork_server=fork_server)
    assert_same_numbers(result, judge(config, job.microbatches, 5))
    assert result.losses[-1] < result.losses[0]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_w_gets_every_linear_layer(kind, here, transformers) -> None:
    """Only the norms, and nothing of any size, get theirs before."""
    job = parse_job(blocks("toml")[0])
    config = parse_run_config({**job.model, "blocks": 1, "width": 32, "context": 8}, job.training)
    model = build_model(config.model, 0, torch.float64, torch.device("cpu"))
    if kind == "gpt2":
        build = model.build
        model.build = lambda layer: gpt2_block() if layer == 1 else build(layer)
    holding = build_holding(model, [1], config.training)
    stage = SliceRunner((1, 2), holding.modules, model, loss_scale=1.0, config=config)
    value, gradient = (torch.randn(2, 8, 32, dtype=torch.float64) for _ in range(2))
    microbatch = Microbatch(0, 0, 0)
    stage.forward(microbatch, value, split=True)
    stage.backward_input(microbatch, gradient)
    early = {
        name for name, parameter in holding.parameters_by_name().items() if parameter.grad.any()
    }
    matrices = {
        name for name, parameter in holding.parameters_by_name().items() if parameter.dim() > 1
    }
    assert len(matrices) >= 4 and not early & matrices
    assert early and all("norm" in name or "ln_" in name for name in early)
    stage.backward_weight(microbatch)
    assert all(
        parameter.grad.any()
        for name, parameter in holding.parameters_by_name().items()
        if name in matrices
    )


def gpt2_block() -> nn.Module:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    return GPT2Block(GPT2Config(n_embd=32, n_head=4, attn_implementation="sdpa"), 0).double()


class ToldOfNothing(torch.autograd.Function):
    """A product that does not ask for the work of W."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.T, x.flatten(0, -2).T @ gradient.flatten(0, -2)


class WithOwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.own, self.linear = nn.Parameter(torch.randn(32, 32)), nn.Linear(32, 32)

    def forward(self, x):
        return x + self.linear(ToldOfNothing.apply(x, self.own).tanh())


class OfOwnFunctions:
    layers = 3

    def __init__(self, _config, _seed, dtype, device) -> None:
        self.dtype, self.device = dtype, device

    def build(self, layer):
        return [nn.Embedding(256, 32), WithOwnFunction(), nn.Linear(32, 256)][layer].to(self.dtype)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def test_a_function_that_is_not_told_of_w_has_its_gradients_in_i_and_the_numbers_of_one_backward(
    here,
) -> None:
    """pytorch 166577: an own autograd.Function under a split backward."""
    config = parse_run_config(
        {"name": f"{__name__}:OfOwnFunctions", "context": 8}, {"dtype": "float64"}
    )
    model = build_model(config.model, 0, torch.float64, torch.device("cpu"))
    holding = build_holding(model, [1], config.training)
    stage = SliceRunner((1, 2), holding.modules, model, loss_scale=1.0, config=config)
    value, gradient = (torch.randn(2, 8, 32, dtype=torch.float64) for _ in range(2))
    stage.forward(Microbatch(0, 0, 0), value, split=True)
    passed = stage.backward_input(Microbatch(0, 0, 0), gradient)
    early = {
        name: parameter.grad.clone() for name, parameter in holding.parameters_by_name().items()
    }
    stage.backward_weight(Microbatch(0, 0, 0))
    layer, x = holding.modules[1], value.requires_grad_()
    parameters = dict(layer.named_parameters())
    whole = torch.autograd.grad(layer(x), [x, *parameters.values()], gradient)
    assert torch.equal(passed, whole[0])
    for name, expected in zip(parameters, whole[1:], strict=True):
        torch.testing.assert_close(
            holding.parameters_by_name()[f"1.{name}"].grad, expected, rtol=0, atol=1e-12
        )
        assert bool(early[f"1.{name}"].any()) is (name == "own"), name


@pytest.mark.parametrize(
    ("data", "error", "says"),
    [
        (
            "AtOnce",
            ConfigError,
            r"\(int64 \[1, 5\], int64 \[1, 5\]\) for micro-batch 1 of pipeline 0 in iteration "
            r"0, and \("
            r"int64 \[1, 4\].* pad them",
        ),
        ("Exhausted", RunError, "the data have no samples left for iteration 3"),
        (
            "Later",
            RunError,
            r"\(int64 \[1, 8\], int64 \[1, 8\]\) for micro-batch \d of pipeline \d in iteration 3",
        ),
    ],
)
def test_data_that_no_worker_can_train_on_end_the_run_in_one_line(
    data, error, says, tmp_path
) -> None:
    """Megatron-LM 5100, torchtitan 1618: lengths that change, and ranks without data, hung.

    Workers here died one after the other, until one was left.
    """
    config = tiny(iterations=8, data=f"tests.runtime.growing_data:{data}")
    with own_fork_server() as fork_server, pytest.raises(error, match=says) as caught:
        run(
            schedule_for(JOB),
            config,
            out=tmp_path,
            fork_server=fork_server,
            resilience=Resilience(scheduler=planned(JOB), checkpoint_every=2),
        )
    assert "\n" not in str(caught.value)
    assert len(losses_in(tmp_path)) <= 3
    if data == "Exhausted":  # what is committed is saved
        assert len(losses_in(tmp_path)) == 3 and "3 iterations are committed" in str(caught.value)
        assert open_checkpoint(tmp_path / CHECKPOINTS / "iteration-3").iteration == 3


def test_own_data(here) -> None:
    config = parse_run_config({"context": 4}, {"data": "my_data:Data", "batch": 3})
    data = load_data(config)
    tokens, targets = data.batch(Microbatch(1, 2, 3), 3, 4)
    assert tokens.shape == targets.shape == (3, 4) and torch.equal(tokens[:, 1:], targets[:, :-1])
    assert data.digest == "counting, version 1"


def test_refusals(here) -> None:
    (here / "broken_model.py").write_text("raise RuntimeError('first\\nsecond')")
    for name, message in (
        ("gptt", "expected one of 'gpt', or 'module:function'"),
        ("nowhere:Model", "which cannot be imported: No module named 'nowhere'"),
        ("my_data:Missing", "has no attribute 'Missing'"),
        ("broken_model:Model", "which cannot be imported: first$"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_model(
                parse_run_config({"name": name}, {}).model, 0, torch.float32, torch.device("cpu")
            )
    with pytest.raises(
        ConfigError, match=r"training\.data is 'x'; expected the name of a function"
    ):
        parse_run_config({}, {"data": "x"})
