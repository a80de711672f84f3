"""`slipstream reproduce`: a figure as table, JSON and picture."""

import json

import pytest
from typer.testing import CliRunner

from benchmarks.figures import worked_example
from slipstream.cli import reproduce
from slipstream.cli.app import app
from slipstream.cli.figures.unlike_layers import reproduce_unlike_layers
from slipstream.planner.published.measured_layers import MODELS

pytestmark = pytest.mark.usefixtures("counted_steps")


def slipstream(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_figure_as_table_json_and_picture(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(reproduce, "FIGURES", {"worked-example": worked_example.reproduce})
    result = slipstream("reproduce", "worked-example", "--out", tmp_path)
    assert (
        result.exit_code == 0
        and "+ staggered optimizer" in result.stdout
        and "assumed:" in result.stdout
    )
    figure = json.loads((tmp_path / "worked-example.json").read_text())
    assert figure["series"][0]["published"] and figure["series"][0]["values"][0] == 30
    assert (tmp_path / "worked-example.png").read_bytes().startswith(b"\x89PNG")
    assert "| + split backward | 32 | 32 |" in (tmp_path / "worked-example.md").read_text()
    plain = slipstream(
        "reproduce", "worked-example", "--out", tmp_path / "plain", "--no-picture", "--json"
    )
    assert (
        json.loads(plain.stdout)["name"] == "worked-example"
        and not (tmp_path / "plain/worked-example.png").exists()
    )


def test_an_unknown_figure_exits_2():
    result = slipstream("reproduce", "magic")
    assert result.exit_code == 2
    assert f"figure magic: expected one of {', '.join(reproduce.FIGURES)}" in result.stderr


def test_what_has_moved_to_benchmarks_says_so():
    result = slipstream("benchmark", "--case", "100k")
    assert result.exit_code == 2 and "python -m benchmarks.fleet" in result.stderr


@pytest.mark.slow
def test_the_table_of_one_model_of_unlike_layers():
    """In a process of its own, as by the command."""
    model = next(model for model in MODELS if model.name == "gemma-2b")
    figure = reproduce_unlike_layers(lambda done, total: None, [model])
    row = dict(zip(figure.header, figure.rows[0], strict=True))
    assert float(row["bound"]) <= float(row["ours"]) <= float(row["interleaved 1F1B"]) / 1.2
