"""`slipstream export --to megatron` writes stages as Megatron-LM's flags.

The stages are those of a plan, or of a job's placement.
"""

import json
import shlex

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.exporters import ExportError
from slipstream.cli.exporters.megatron import build_settings
from slipstream.planner.job.file import parse_job
from slipstream.planner.job.megatron import read_layout, write_layout
from slipstream.planner.model.from_job import build_grid
from slipstream.schedules import codec
from slipstream.schedules.schedule import Worker
from tests import general
from tests.generate import SHED, by_hand, planned
from tests.jobs import grid
from tests.planner.job.test_megatron import JOB, RECIPES, stage_letters


def export(*arguments):
    return CliRunner().invoke(app, ["export", *map(str, arguments), "--to", "megatron"])


def job_text(stages: int, layout: str, microbatches: int = 8) -> str:
    text = JOB.format(stages, f'"{layout}"')
    return text.replace("microbatches = 1", f"microbatches = {microbatches}")


@pytest.fixture
def job_file(tmp_path):
    """A function that writes a job file with this layout."""

    def write(stages: int, layout: str, microbatches: int = 8):
        path = tmp_path / "job.toml"
        path.write_text(job_text(stages, layout, microbatches))
        return path

    return write


@given(stage_letters(), st.integers(1, 4))
@example(read_layout("layers", RECIPES[0]), 2)
@example(read_layout("layers", RECIPES[1]), 8)
@example(read_layout("layers", RECIPES[2]), 16)
def test_what_a_job_reads_is_written_again(stages, ranks):
    """The job that reads a layout has the placement that is written as it.

    Or the layout is refused.
    """
    assume(len(stages) % ranks == 0 and "t" in "".join(stages))
    letters, chunks = "".join(stages), len(stages) // ranks
    placement = build_grid(parse_job(job_text(ranks, write_layout(stages), 4 * ranks)))
    predicting = [index for index, text in enumerate(stages) if "m" in text]
    if (ranks == 1 and chunks > 1) or any(index < len(stages) - ranks for index in predicting):
        reason = r"Megatron-LM (interleaves stages of 2|takes them in one stage)"
        with pytest.raises(ExportError, match=reason):
            build_settings(placement, letters.count("t"))
        return
    settings = build_settings(placement, letters.count("t"))
    assert read_layout("", settings.pipeline_model_parallel_layout) == tuple(stages)
    assert settings.pipeline_model_parallel_size == ranks
    assert settings.virtual_pipeline_model_parallel_size == chunks
    assert settings.num_layers == letters.count("t")
    assert settings.mtp_num_layers == letters.count("m")


def test_a_job_and_its_plan_are_written_alike(job_file, tmp_path):
    path = job_file(4, "Et*3|(t*2|)*6,tL")
    codec.write(planned(parse_job(path.read_text())), tmp_path / "plan.json")
    decoders = ("--decoder-layers", 16)
    of_job, of_plan = export(path, *decoders), export(tmp_path / "plan.json", *decoders)
    assert of_job.exit_code == 0 and of_job.stdout == of_plan.stdout
    assert shlex.split(of_job.stdout) == [
        "--pipeline-model-parallel-size",
        "4",
        "--pipeline-model-parallel-layout",
        "Et*3|(tt|)*6tL",
    ]
    assert "for --num-layers 16; Megatron-LM runs its own order" in of_job.stderr
    answer = json.loads(export(path, "--json", *decoders).stdout)
    assert answer["num_layers"] == 16 and answer["virtual_pipeline_model_parallel_size"] == 2
    written = export(tmp_path / "plan.json", "--out", tmp_path / "flags", *decoders)
    assert written.stdout == "" and (tmp_path / "flags").read_text() == of_job.stdout


def test_decoder_layers_say_what_else_is_a_layer(job_file):
    path = job_file(4, "Et*3|(t*2|)*2,tmL")  # 8 decoder layers, one of multi-token prediction
    assert "'Et*3|(tt|)*2tmL'" in export(path, "--decoder-layers", 8).stdout
    assert "--mtp-num-layers 1" in export(path, "--decoder-layers", 8).stderr
    assert "'Et*4|(tt|)*2t*3L'" in export(path, "--decoder-layers", 11).stdout
    missing = export(path)
    assert missing.exit_code == 1 and missing.stdout == ""
    assert "give --decoder-layers 11, or 9 where embedding and head are layers" in missing.stderr
    for number in (10, 12):
        refused = export(path, "--decoder-layers", number)
        says = f"--decoder-layers {number}: the stages have 11 layers"
        assert refused.exit_code == 1 and says in refused.stderr


@pytest.mark.parametrize(("microbatches", "group"), [(8, None), (5, 5), (7, 7), (10, 5)])
def test_interleaved_stages_have_groups_of_microbatches_that_megatron_takes(microbatches, group):
    """By the rule in its `forward_backward_pipelining_with_interleaving`; its default is the number
    of ranks."""
    settings = build_settings(build_grid(parse_job(job_text(4, "Et|(t|)*6tL", microbatches))), 8)
    assert settings.microbatch_group_size_per_virtual_pipeline_stage == group
    rest = microbatches % (group or 4)
    assert 4 <= (group or 4) <= microbatches and (rest == 0 or rest >= 4)
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    assert (flag in settings.build_flags()) == (group is not None)


IN_TURN = "Megatron-LM puts them on ranks in turn: plan with [placement] order = 'interleaved'"


def placed(
    stages: int, layers: list[int], *more: str, microbatches: object = 4, pipelines: int = 1
):
    """A job whose stages have these layers, with more lines in [placement]."""
    lines = ["[placement]", f"layers = {layers}", *more, ""]
    return grid(pipelines, stages, microbatches, more="\n".join(lines))


@pytest.mark.parametrize(
    ("job", "says"),
    [
        (grid(1, 2, 4), "the stages have no layers: give the job [placement] layers"),
        (placed(2, [2] * 4, "chunks = 2", "order = 'v'"), f"are on ranks [0, 1, 1, 0]; {IN_TURN}"),
        (placed(2, [2] * 4, "chunks = 2"), f"stages are on ranks [0, 0, 1, 1]; {IN_TURN}"),
        (
            placed(2, [2, 2], "order = 'bidirectional'"),
            "micro-batches pass in two directions; "
            "Megatron-LM has one: plan with [placement] order = 'interleaved'",
        ),
        (
            placed(1, [2, 2], "chunks = 2"),
            "a rank has all 2 stages; Megatron-LM interleaves stages of 2"
            " or more ranks: plan with [placement] chunks = 1",
        ),
        (
            placed(2, [2, 2], microbatches=[3, 4], pipelines=2),
            "pipelines have 3 to 4 micro-batches",
        ),
        (
            placed(4, [2] * 8, "chunks = 2", "order = 'interleaved'", microbatches=3),
            "3 micro-batches on"
            " 4 ranks; Megatron-LM interleaves stages from 4 micro-batches on: plan with more, "
            "or with",
        ),
        (placed(2, [3, 0]), "gives the first or the last stage no layer"),
    ],
)
def test_placements_that_megatron_does_not_have_are_refused(job, says, tmp_path):
    codec.write(planned(job), tmp_path / "plan.json")
    decoders = sum(job.layers or (3,)) // job.chains - 2  # embedding and head are layers
    done = export(tmp_path / "plan.json", "--decoder-layers", decoders)
    assert done.exit_code == 1 and done.stdout == ""
    assert says in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("schedule", "says"),
    [
        (
            planned(placed(2, [2, 2], pipelines=2), [Worker(1, 0)]),
            "worker 0.0 also runs micro-batch 1.0, of another pipeline; Megatron-LM knows one "
            "pipeline: "
            "export a plan with all workers alive, each with its own layers and micro-batches",
        ),
        (
            by_hand(SHED),
            "is shed to worker 1.0, of another pipeline; Megatron-LM knows one pipeline: "
            "plan with --method",
        ),
        (
            general.floating_layer(),
            "worker 0.0 holds layers of its own choice (0-2), not those of its stage; Megatron-LM",
        ),
    ],
)
def test_plans_that_are_more_than_stages_are_refused(schedule, says, tmp_path):
    codec.write(schedule, tmp_path / "plan.json")
    done = export(tmp_path / "plan.json")
    assert done.exit_code == 1 and done.stdout == ""
    assert says in done.stderr and done.stderr.count("\n") == 1


def test_layers_of_multi_token_prediction_are_in_the_last_stage_of_their_rank(job_file):
    refused = export(job_file(2, "Et|m||L"), "--decoder-layers", 1)
    assert refused.exit_code == 1
    assert "layers of multi-token prediction are in stages 1; Megatron-LM" in refused.stderr


def test_a_job_file_is_for_megatron_only(job_file):
    path = job_file(2, "Et|tL")
    done = CliRunner().invoke(app, ["export", str(path), "--to", "torch-csv"])
    assert done.exit_code == 2 and "makes a schedule of a job" in done.stderr
    path.write_text("pipelines = 0\n")
    assert export(path).exit_code == 2
