"""docs/own-model.md as it stands: its model, its data and its job file, trained and compared with one process."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from slipstream.planner.job.file import parse_job
from slipstream.runtime.config import ConfigError, parse_run_config
from slipstream.runtime.launch import run
from slipstream.runtime.model.computing.slices import SliceRunner
from slipstream.runtime.model.data.data import Microbatch, load_corpus
from slipstream.runtime.model.layers.layered_model import model_for
from slipstream.runtime.model.state.holding import build_holding
from tests.runtime.forked import own_fork_server
from tests.runtime.running import assert_same_numbers, judge, schedule_for

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
    return pytest.importorskip("transformers", reason="transformers is not installed: pip install slipstream-train[hf]")


def test_the_model_takes_thirty_lines() -> None:
    code = [line for line in blocks("python")[0].splitlines() if line.strip() and '"""' not in line]
    assert len(code) <= 40


@pytest.mark.slow
def test_llama_trains_as_in_one_process(here, transformers) -> None:
    job = parse_job(blocks("toml")[0])
    config = parse_run_config({**job.model, "blocks": 2, "width": 32, "context": 16}, job.training, iterations=5,
                              device="cpu", data="my_data:Data")
    with own_fork_server() as fork_server:
        result = run(schedule_for(job, ["1.1"]), config, out=here / "out", fork_server=fork_server)
    assert_same_numbers(result, judge(config, job.microbatches, 5))
    assert result.losses[-1] < result.losses[0]


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_w_gets_every_linear_layer(kind, here, transformers) -> None:
    """Of a block's parameters only the norms, and nothing of any size, get their gradients before W."""
    job = parse_job(blocks("toml")[0])
    config = parse_run_config({**job.model, "blocks": 1, "width": 32, "context": 8}, job.training)
    model = model_for(config.model, 0, torch.float64, torch.device("cpu"))
    if kind == "gpt2":
        build = model.build
        model.build = lambda layer: gpt2_block() if layer == 1 else build(layer)
    holding = build_holding(model, [1], config.training)
    stage = SliceRunner((1, 2), holding.modules, model, loss_scale=1.0, config=config)
    value, gradient = (torch.randn(2, 8, 32, dtype=torch.float64) for _ in range(2))
    microbatch = Microbatch(0, 0, 0)
    stage.forward(microbatch, value, split=True)
    stage.backward_input(microbatch, gradient)
    early = {name for name, parameter in holding.parameters().items() if parameter.grad.any()}
    matrices = {name for name, parameter in holding.parameters().items() if parameter.dim() > 1}
    assert len(matrices) >= 4 and not early & matrices
    assert early and all("norm" in name or "ln_" in name for name in early)
    stage.backward_weight(microbatch)
    assert all(parameter.grad.any() for name, parameter in holding.parameters().items() if name in matrices)


def gpt2_block() -> nn.Module:
    from transformers import GPT2Config
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    return GPT2Block(GPT2Config(n_embd=32, n_head=4, attn_implementation="sdpa"), 0).double()


def test_own_data(here) -> None:
    config = parse_run_config({"context": 4}, {"data": "my_data:Data", "batch": 3})
    data = load_corpus(config)
    tokens, targets = data.batch(Microbatch(1, 2, 3), 3, 4)
    assert tokens.shape == targets.shape == (3, 4) and torch.equal(tokens[:, 1:], targets[:, :-1])
    assert data.digest == "counting, version 1"


def test_refusals(here) -> None:
    (here / "broken_model.py").write_text("raise RuntimeError('first\\nsecond')")
    for name, message in (("gptt", "expected one of 'gpt', or 'module:function'"),
                          ("nowhere:Model", "which cannot be imported: No module named 'nowhere'"),
                          ("my_data:Missing", "has no attribute 'Missing'"),
                          ("broken_model:Model", "which cannot be imported: first$")):
        with pytest.raises(ConfigError, match=message):
            model_for(parse_run_config({"name": name}, {}).model, 0, torch.float32, torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"training\.data is 'x'; expected the name of a function"):
        parse_run_config({}, {"data": "x"})
