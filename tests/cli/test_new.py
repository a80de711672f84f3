import gzip
import json

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app, load_command
from slipstream.planner.job.file import parse_job, read_job
from slipstream.planner.job.presets import preset_names, preset_text
from slipstream.planner.plan import plan_job
from slipstream.schedules import codec
from tests.jobs import grid
from tests.planner.job.model_configs import GEMMA_2_9B

MODEL = [
    "--layers",
    8,
    "--hidden",
    1024,
    "--heads",
    16,
    "--sequence",
    2048,
    "--vocabulary",
    50_000,
    "--gpu",
    "a100",
    "--pipelines",
    2,
    "--stages",
    4,
    "--microbatches",
    8,
]


def new(*arguments, answers=""):
    return CliRunner().invoke(app, ["new", *map(str, arguments)], input=answers)


@pytest.mark.parametrize("name", preset_names())
def test_presets(name, tmp_path):
    done = new("--preset", name, "--out", tmp_path / "job.toml")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "job.toml").read_text() == preset_text(name)


def test_an_estimated_preset_with_sharded_optimizer_state(tmp_path):
    done = new("--preset", "llama-3-8b", "--shard-optimizer", "--out", tmp_path / "job.toml")
    assert done.exit_code == 0, done.output
    assert (
        (tmp_path / "job.toml").read_text()
        == preset_text("llama-3-8b", shard_optimizer=True)
        != preset_text("llama-3-8b")
    )


def test_a_model_by_options_or_by_answers(tmp_path):
    assert new(*MODEL, "--out", tmp_path / "a.toml").exit_code == 0
    job = read_job(tmp_path / "a.toml")
    assert (job.pipelines, job.stages, job.microbatches[0], sum(job.layers)) == (2, 4, 8, 8)
    answers = "model\n8\nmany\n1024\n16\n2048\n50000\na100\n2\n4\n8\n"
    done = new("--out", tmp_path / "b.toml", answers=answers)
    assert done.exit_code == 0, done.output
    assert "'many' is not an answer" in done.stderr
    assert (tmp_path / "a.toml").read_text() == (tmp_path / "b.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "option", "way"),
    [
        (["--preset", "gpt-1.5b", "--stages", 3], "--stages", "preset"),
        (["--preset", "gpt-1.5b", "--name", "mine"], "--name", "preset"),
        (["--trace", "t.json", "--gpu", "h100"], "--gpu", "trace"),
        ([*MODEL, "--transfer", 0.1], "--transfer", "model"),
        (["--model", "config.json", "--heads", 3], "--heads", "config"),
    ],
)
def test_options_that_would_not_be_used_are_refused(arguments, option, way, tmp_path):
    done = new(*arguments, "--out", tmp_path / "job.toml")
    assert (
        done.exit_code == 2
        and done.stderr.count("\n") == 1
        and not (tmp_path / "job.toml").exists()
    )
    assert f"{option}: not used for a job from a {way}" in done.stderr


def test_a_model_by_its_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_2_9B))
    done = new(
        "--model",
        tmp_path / "config.json",
        "--sequence",
        4096,
        *MODEL[10:],
        "--tensor-parallel",
        8,
        "--out",
        tmp_path / "job.toml",
    )
    assert done.exit_code == 0, done.output
    assert sum(read_job(tmp_path / "job.toml").layers) == 44
    assert (
        "21 x sliding attention + MLP, 21 x full attention + MLP, head"
        in (tmp_path / "job.toml").read_text()
    )
    done = new(
        "--model",
        tmp_path / "none.json",
        *MODEL[10:],
        "--sequence",
        8,
        "--out",
        tmp_path / "other.toml",
    )
    assert (
        done.exit_code == 2
        and "none.json: cannot be read" in done.stderr
        and done.stderr.count("\n") == 1
    )


def test_its_own_trace(tmp_path):
    """What `show --perfetto` writes is read back as the times that it was planned with."""
    job = grid(
        2,
        3,
        4,
        times="forward = [1, 2, 3]\nbackward_input = [0, 2, 1]\nbackward_weight = [4, 5, 6]",
    )
    codec.write(plan_job(job, method="greedy").schedule, tmp_path / "s.json")
    shown = CliRunner().invoke(
        app, ["show", str(tmp_path / "s.json"), "--perfetto", str(tmp_path / "t.json")]
    )
    assert shown.exit_code == 0
    done = new(
        "--trace", tmp_path / "t.json", "--pipelines", 2, "--json", "--out", tmp_path / "job.toml"
    )
    assert done.exit_code == 0, done.output
    again = parse_job(json.loads(done.stdout)["job"])
    assert again.microbatches == (4, 4) and again.time.forward == (1, 2, 3)
    assert again.time.backward_input == (0, 2, 1) and again.time.backward_weight == (4, 5, 6)


def trace(*events, key="traceEvents"):
    found = [
        {"ph": "X", "name": name, "dur": dur, "ts": 0, "pid": 0, "tid": 0, **more}
        for name, dur, more in events
    ]
    return json.dumps({key: found} if key else found)


def test_whole_backwards_gpu_ranges_and_other_names(tmp_path):
    events = []
    for stage in range(2):
        for microbatch in range(3):
            late = 1000 if microbatch == 0 else 0  # the first one warms up
            events += [
                (f"PP:{stage}F{microbatch}", 5 + late, {}),
                (f"PP:{stage}B{microbatch}", 7, {}),
                (f"PP:{stage}F{microbatch}", 100 + late, {"cat": "gpu_user_annotation"}),
                (f"PP:{stage}B{microbatch}", 300, {"cat": "gpu_user_annotation"}),
            ]
    with gzip.open(tmp_path / "t.json.gz", "wt") as file:
        file.write(trace(*events, ("aten::mm", 3, {}), key=""))
    done = new(
        "--trace",
        tmp_path / "t.json.gz",
        "--pipelines",
        1,
        "--transfer",
        0.001,
        "--out",
        tmp_path / "job.toml",
    )
    assert done.exit_code == 0, done.output
    text = (tmp_path / "job.toml").read_text()
    assert "whole backwards only" in text
    job = parse_job(text)
    assert job.time.forward == (
        1e-4,
        1e-4,
    ) and job.time.backward_input == job.time.backward_weight == (1.5e-4, 1.5e-4)
    assert job.time.transfer == 0.001 and job.microbatches == (3,)

    (tmp_path / "o.json").write_text(trace(("step F of 0", 10, {}), ("step B of 0", 20, {})))
    done = new(
        "--trace",
        tmp_path / "o.json",
        "--pattern",
        "step (?P<kind>[FB]) of (?P<stage>[0-9]+)",
        "--pipelines",
        1,
        "--microbatches",
        4,
        "--out",
        tmp_path / "o.toml",
    )
    assert done.exit_code == 0, done.output
    assert read_job(tmp_path / "o.toml").time.forward == (1e-5,)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--preset", "gpt-9"], "--preset gpt-9: expected one of gpt-1.5b"),
        (
            ["--preset", "gpt-1.5b", "--shard-optimizer"],
            "--shard-optimizer: the preset gpt-1.5b is no estimate",
        ),
        (["--preset", "gpt-1.5b", "--layers", 3], "four ways to begin: take one"),
        ([*MODEL, "--gpu", "abacus"], "--gpu abacus: expected one of"),
        ([*MODEL, "--stages", 9], "9 stages for 8 layers"),
        (
            [*MODEL, "--stages", 2, "--tensor-parallel", 32],
            "--tensor-parallel 32: expected a divisor of 16",
        ),
        (["--trace", "no.json"], "no.json: cannot be read"),
        (["--trace", "bad.json"], "bad.json: not a Chrome trace"),
        (["--trace", "bad.json.gz"], "bad.json.gz: cannot be read"),
        (["--trace", "changed.json.gz"], "changed.json.gz: cannot be read"),
        (["--trace", "empty.json"], "no op of a micro-batch among its 1 events"),
        (["--trace", "empty.json", "--pattern", "("], "not a regular expression"),
        (["--trace", "empty.json", "--pattern", "F"], "expected groups"),
        (
            ["--trace", "words.json", "--pattern", "(?P<kind>[a-z]+)_(?P<stage>.+)"],
            "of kind 'fwd' and stage '0'",
        ),
        (
            ["--trace", "words.json", "--pattern", "(?P<kind>F)(?P<stage>.+)"],
            "of kind 'F' and stage 'x'",
        ),
        (
            ["--preset", "gpt-1.5b", "--out", "bad.json"],
            "bad.json: exists already; --force overwrites it",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "bad.json.gz").write_text("{")
    packed = bytearray(gzip.compress(trace(("PP:0F0", 3, {})).encode()))
    packed[12:20] = bytes(255 - byte for byte in packed[12:20])
    (tmp_path / "changed.json.gz").write_bytes(packed)
    (tmp_path / "empty.json").write_text(trace(("aten::mm", 3, {})))
    (tmp_path / "words.json").write_text(trace(("fwd_0", 3, {}), ("Fx", 3, {})))
    done = new(*arguments)
    assert done.exit_code == 2 and done.stdout == ""
    assert says in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "job.toml").exists()


def test_nobody_to_answer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = new()
    assert done.exit_code == 2 and "no answer to" in done.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--layers", 4], "--hidden"),
        (["--layers", 4, "--hidden", 64], "--heads"),
        (
            ["--layers", 4, "--hidden", 64, "--heads", 4, "--sequence", 8, "--vocabulary", 99],
            "--gpu or --peak-tflops",
        ),
        ([], "--preset, --trace, --model, or --layers and the others"),
    ],
)
def test_a_question_that_nobody_answers_names_its_option(tmp_path, options, says):
    refused = new(*options, "--out", tmp_path / "job.toml")
    assert refused.exit_code == 2 and refused.stderr.endswith(f"; give it with {says}\n"), (
        refused.stderr
    )


def test_nodes_are_written(tmp_path):
    done = new(
        "--layers",
        4,
        "--hidden",
        64,
        "--heads",
        4,
        "--sequence",
        8,
        "--vocabulary",
        99,
        "--gpu",
        "h100",
        "--pipelines",
        2,
        "--stages",
        2,
        "--microbatches",
        2,
        "--workers-per-node",
        2,
        "--out",
        tmp_path / "job.toml",
    )
    assert done.exit_code == 0, done.output
    assert len(read_job(tmp_path / "job.toml").nodes) == 2


def test_presets_are_completed():
    [preset] = [param for param in load_command("new").params if param.name == "preset_name"]
    offered = [item.value for item in preset.shell_complete(None, "llama")]
    assert offered == [name for name in preset_names() if name.startswith("llama")] != []


def test_a_job_with_the_placement_that_is_found(tmp_path):
    """The head of a large vocabulary is as long as several layers."""
    model = [*MODEL, "--json", "--out"]
    usual = new(*model, tmp_path / "usual.toml")
    done = new(
        *model,
        tmp_path / "job.toml",
        "--workers-per-node",
        2,
        "--placement",
        "any",
        "--steps",
        20_000,
    )
    assert usual.exit_code == done.exit_code == 0, done.output
    answer, job = json.loads(done.stdout), read_job(tmp_path / "job.toml")
    assert (
        answer["job"] == (tmp_path / "job.toml").read_text()
        and "Estimated, not measured" in answer["job"]
    )
    assert list(job.layers) == answer["placement"]["layers"] * job.chains and len(job.nodes) == 4
    assert answer["placement"] != {"layers": list(read_job(tmp_path / "usual.toml").layers)}
    assert done.stderr.count("period") and "placement" not in json.loads(usual.stdout)
    trace = new(*MODEL, "--placement", "some", "--out", tmp_path / "other.toml")
    assert trace.exit_code == 2 and "--placement some: expected given or any" in trace.stderr
