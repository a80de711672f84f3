"""Job files: right values are read exactly, wrong ones named in one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.planner.job.file import (
    JobError,
    LayerValues,
    extended_files,
    parse_job,
    read_job,
    read_job_text,
)
from slipstream.schedules.schedule import Worker

TIME = "[time]\nforward = 0.0297\nbackward_input = 0.0294\nbackward_weight = 0.0199\n"
GOOD = "name = 'gpt'\npipelines = 2\nstages = 3\nmicrobatches = 4\n" + TIME


def test_scalars_are_spread_over_stages():
    job = parse_job(GOOD + "optimizer = 0.01\ntransfer = 0.0005\n[memory]\ncapacity = 8.0\n")
    assert job.time.forward == (0.0297,) * 3 and job.time.optimizer == (0.01,) * 3
    assert job.microbatches == (4, 4) and job.time.all_reduce == (0.0,) * 3
    assert (
        job.memory is not None
        and job.memory.activation == (1.0,) * 3
        and job.memory.weight_stash == (0.0,) * 3
    )


def test_lists_give_each_stage_and_pipeline_its_own():
    job = parse_job(
        "pipelines = 2\nstages = 2\nmicrobatches = [3, 5]\n"
        "[time]\nforward = [1, 2]\nbackward_input = [0, 2]\nbackward_weight = [3, 2]\n"
    )
    assert job.microbatches == (3, 5) and job.time.backward_input == (0.0, 2.0)


@pytest.mark.parametrize(
    ("order", "columns"),
    [
        ("'linear'", (0, 0, 1, 1, 2, 2)),
        ("'interleaved'", (0, 1, 2, 0, 1, 2)),
        ("'v'", (0, 1, 2, 2, 1, 0)),
        ("[0, 2, 1, 1, 2, 0]", (0, 2, 1, 1, 2, 0)),
    ],
)
def test_placements(order, columns):
    assert parse_job(f"{GOOD}[placement]\nchunks = 2\norder = {order}\n").columns == columns


def test_slow_workers_and_tables_of_the_runtime_are_kept():
    job = parse_job(GOOD + "slow = {'1.2' = 1.5}\n[model]\nwidth = 8\n[training]\niterations = 2\n")
    assert job.time.slow == ((Worker(1, 2), 1.5),)
    assert job.model == {"width": 8} and job.training == {"iterations": 2}


def test_weights_and_values_of_layers():
    job = parse_job(
        GOOD + "[memory]\ncapacity = 8\nweights = [1, 2, 3]\nunit_bytes = 1e6\n"
        "[placement]\nlayers = [1, 2, 1]\n[layers]\nforward = 2\nweights = [1, 2, 3, 4]\n"
    )
    assert (
        job.memory is not None
        and job.memory.weights == (1.0, 2.0, 3.0)
        and job.memory.unit_bytes == 1e6
    )
    assert job.layer_values == LayerValues(forward=(2.0,) * 4, weights=(1.0, 2.0, 3.0, 4.0))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            GOOD + "[layers]\nforward = [1, 2]\n",
            "layers.forward has 2 values; expected 3, one per layer",
        ),
        (
            GOOD + "[layers]\ntransfer = 1\n",
            "unknown key 'layers.transfer'; known: activation, all_reduce",
        ),
        (
            GOOD + "[memory]\ncapacity = 1\nweight = 1\n",
            "unknown key 'memory.weight'; did you mean 'memory.weights'?",
        ),
        (GOOD.replace("pipelines = 2", "pipelines = 0"), "pipelines is 0; expected a whole number"),
        (GOOD.replace("pipelines = 2", "pipelines = true"), "pipelines is True"),
        (GOOD.replace("pipelines = 2\n", ""), "key 'pipelines' is missing"),
        (GOOD.replace("stages = 3", "stages = 99999999"), "stages is 99999999"),
        (
            GOOD.replace("microbatches = 4", "microbatches = [4]"),
            "microbatches has 1 value; expected 2, one per pipeline",
        ),
        (GOOD.replace("0.0297", "[1, 2]"), "time.forward has 2 values; expected 3"),
        (
            GOOD.replace("0.0297", "-1"),
            "time.forward is -1; expected a finite number of at least 0",
        ),
        (GOOD.replace("0.0297", "nan"), "time.forward is nan"),
        (GOOD.replace("0.0297", "'fast'"), "time.forward is 'fast'"),
        (
            GOOD.replace("forward", "forwards", 1),
            "key 'time.forward' is missing; is 'forwards' a misspelling of it?",
        ),
        (
            GOOD.replace("[time]", "[times]"),
            "key 'time' is missing; is 'times' a misspelling of it?",
        ),
        (GOOD[: GOOD.index("[time]")], "key 'time' is missing; expected a table"),
        (
            GOOD.replace("pipelines", "pipelnes"),
            "key 'pipelines' is missing; is 'pipelnes' a misspelling of it?",
        ),
        (GOOD + "backward = 3\n", "unknown key 'time.backward'"),
        ("color = 1\n" + GOOD, "unknown key 'color'; known"),
        ("microbatchs = 1\n" + GOOD, "unknown key 'microbatchs'; did you mean 'microbatches'?"),
        (GOOD + "[memory]\nactivation = 1\n", "key 'memory.capacity' is missing"),
        (
            GOOD + "[placement]\norder = 'zigzag'\n",
            "placement.order is 'zigzag'; expected one of linear",
        ),
        (GOOD + "[placement]\norder = [0, 1, 1]\n", "placement.order is [0, 1, 1]"),
        (GOOD + "slow = {'7.0' = 2}\n", "time.slow: the job has no worker 7.0"),
        (GOOD + "slow = {'x' = 2}\n", "time.slow: 'x' is not a worker"),
        (GOOD + "slow = 2\n", "time.slow is 2"),
        ("model = 3\n" + GOOD, "model is 3; expected a table"),
        (
            GOOD + "[training]\ntensor_parallel = 'two'\n",
            "training.tensor_parallel is 'two'; expected a whole number",
        ),
        (
            GOOD + "[training]\ntensor_parallel = 2.0\n",
            "training.tensor_parallel is 2.0; expected a whole number, 1 to",
        ),
        (
            GOOD + "[training]\ntensor_parallel = 0\n",
            "training.tensor_parallel is 0; expected a whole number, 1 to",
        ),
        ("time = 3\npipelines = 1\nstages = 1\nmicrobatches = 1\n", "time is 3; expected a table"),
        (
            GOOD.replace("0.0297", "0").replace("0.0294", "0").replace("0.0199", "0"),
            "every op takes 0 seconds",
        ),
        ("name = [", "not readable as TOML"),
        ("name = 1" + "0" * 5000, "not readable as TOML"),
        ("name = ''\n" + GOOD[GOOD.index("\n") :], "name is ''"),
    ],
)
def test_bad_jobs_are_refused_in_one_line(text, says):
    with pytest.raises(JobError, match=r"^job\.toml: ") as refused:
        parse_job(text, "job.toml")
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_a_byte_order_mark_is_skipped(tmp_path):
    (tmp_path / "job.toml").write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert read_job(tmp_path / "job.toml") == parse_job(GOOD)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text):
    with pytest.raises(JobError):
        parse_job(text)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"#" * (2**20 + 1)])
def test_unreadable_files_are_refused(tmp_path, content):
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    with pytest.raises(JobError, match=r"job\.toml"):
        read_job(path)


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(JobError, match=r"none.toml: cannot be read: No such file"):
        read_job(tmp_path / "none.toml")


# --- Files that extend others, and keys that are set ----------------------------------------------


def test_a_file_says_what_differs_from_the_one_it_extends(tmp_path):
    (tmp_path / "base.toml").write_text(
        GOOD + "optimizer = 0.5\n[training]\nbatch = 3\ntext = 'a.txt'\n"
    )
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "middle.toml").write_text(
        "extends = '../base.toml'\n[training]\nbatch = 4\n"
    )
    path = tmp_path / "own.toml"
    path.write_text("extends = 'sub/middle.toml'\npipelines = 5\n[time]\nforward = [1, 2, 3]\n")
    job = read_job(
        path, ["training.learning_rate=1e-4", "name=mine", 'time.slow."0.1"=2', "training.seed = 7"]
    )
    assert (job.name, job.pipelines, job.time.forward, job.time.optimizer) == (
        "mine",
        5,
        (1.0, 2.0, 3.0),
        (0.5,) * 3,
    )
    assert job.training == {"batch": 4, "text": "a.txt", "learning_rate": 1e-4, "seed": 7}
    assert job.time.slow == ((Worker(0, 1), 2.0),)
    assert parse_job(read_job_text(path)) == read_job(path), "one text that needs no other file"
    assert extended_files(path) == (
        tmp_path / "sub" / "middle.toml",
        tmp_path / "sub" / ".." / "base.toml",
    )


@pytest.mark.parametrize(
    ("text", "settings", "says"),
    [
        (
            "extends = 'none.toml'",
            (),
            "own.toml: extends: .*none.toml: cannot be read: No such file",
        ),
        ("extends = 7", (), "own.toml: extends is 7; expected the path of a job file"),
        (
            "extends = 'own.toml'",
            (),
            "own.toml: extends is 'own.toml', which is circular or too deep",
        ),
        (
            "extends = 'back.toml'",
            (),
            "back.toml: extends is 'own.toml', which is circular or too deep",
        ),
        ("extends = 'bad.toml'", (), "own.toml: extends: .*bad.toml: not readable as TOML"),
        (
            GOOD,
            ("training.batch",),
            "--set training.batch: expected KEY=VALUE, for example training.learning_rate=1e-4",
        ),
        (GOOD, ("=3",), "--set =3: expected KEY=VALUE"),
        (GOOD, ("a b=3",), "--set a b=3: expected KEY=VALUE"),
        (
            GOOD,
            ("pipelines=100000",),
            "pipelines x stages is 100000 x [0-9]+ = [0-9]+ workers; expected at most 131072",
        ),
        (GOOD, ("pipelines=two",), "own.toml: pipelines is 'two'; expected a whole number"),
        (GOOD, ("tme.forward=2",), "own.toml: .*did you mean 'time'"),
    ],
)
def test_what_cannot_be_extended_or_set_is_refused_in_one_line(tmp_path, text, settings, says):
    (tmp_path / "back.toml").write_text("extends = 'own.toml'")
    (tmp_path / "bad.toml").write_text("x = [")
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(JobError, match=says) as refused:
        read_job(tmp_path / "own.toml", settings)
    assert "\n" not in str(refused.value)
