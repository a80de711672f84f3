"""The page docs/preset-to-run.md as a new user follows it.

The model has the preset's depth and little width.
"""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.planner.job.file import read_job
from tests.patience import HEARTBEATS, SECONDS
from tests.runtime.launchers import Launcher

PAGE = (Path(__file__).parents[2] / "docs" / "preset-to-run.md").read_text()
CONFIG = {
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 32,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the page's files.

    Only the model's folder, the text and the tokens are others.
    """
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["new", "--preset", "llama-3-8b", "--out", "preset.toml"])
    assert done.exit_code == 0, done.output
    [text] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    for written, here in (
        ('"llama-3-8b" ', '"config.json" '),
        ("context = 8192", "context = 4"),
        ('tokenizer = "llama-3-8b/tokenizer.json"\n', 'batch = 1\ndevice = "cpu"\n'),
    ):
        assert written in text
        text = text.replace(written, here)
    Path("run.toml").write_text(text)
    Path("config.json").write_text(json.dumps(CONFIG))
    Path("my.txt").write_text("A text of no great interest. " * 99)
    return tmp_path


def test_the_pages_job_is_the_presets_but_for_what_it_says(here):
    job, preset = read_job(Path("run.toml")), read_job(Path("preset.toml"))
    assert (job.pipelines, preset.pipelines) == (2, 8)
    assert (job.layers, job.time.forward) == (preset.layers, preset.time.forward)
    done = CliRunner().invoke(
        app, ["plan", "run.toml", "--failed", "1.1", "--time-limit", "0.2", "--json"]
    )
    assert done.exit_code == 0 and json.loads(done.stdout)["period"] > 0


@pytest.mark.slow
def test_the_pages_run_loses_a_worker_and_goes_on(here):
    status = Launcher(
        "tests.runtime.launchers:command_in",
        here,
        "train",
        "run.toml",
        "--kill",
        "1.1@1",
        "--set",
        "training.learning_rate=1e-4",
        "--set",
        "training.iterations=3",
        *HEARTBEATS,
        "--out",
        "run",
        log=here / "said",
    ).wait(3 * SECONDS)
    said = (here / "said").read_text()
    assert status == 0, said
    assert "the job counts 32 decoder layers, the model 34" in said and "Warning" not in said
    losses = [
        json.loads(line)["loss"]
        for line in (here / "run" / "losses.jsonl").read_text().splitlines()
    ]
    assert len(losses) == 3 and "worker 1.1 was killed" in said
    assert len(list((here / "run" / "parameters").glob("layer-*"))) == 34
