"""`slipstream table` as a user meets it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import app
from slipstream.cli.table import FINISHING, fit_rows
from slipstream.planner.report import format_gigabytes
from slipstream.schedules.tables.table import Table
from tests.patience import SECONDS

pytestmark = pytest.mark.usefixtures("counted_steps")

JOB = """
pipelines = 3
stages = 2
microbatches = 3
[time]
forward = 1
backward_input = 1
backward_weight = 1
optimizer = 1
"""


def slipstream(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


@pytest.mark.real_clock
def test_writes_a_table_and_says_what_it_is_worth(job, tmp_path):
    out = tmp_path / "table"
    first = slipstream(
        "table",
        job,
        "--max-failures",
        "2",
        "--time-limit",
        "2",
        "--jobs",
        "2",
        "--out",
        out,
        "--json",
    )
    answer = json.loads(first.stdout)
    assert (
        first.exit_code == 0
        and answer["entries"] == 7
        and answer["seconds"] > 0
        and answer["worst_gap"] >= 0
    )
    assert answer["bytes"] == sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    again = slipstream("table", job, "--max-failures", "2", "--time-limit", "2", "--out", out)
    assert again.exit_code == 0 and "0 planned now" in again.stdout
    worst = re.search(r"worst gap ([\d.]+%) \((\S+)\)", again.stdout)
    assert worst and f" {worst[1]} |" in again.stdout.partition("worst gap")[0], (
        "the rows above have it"
    )
    assert "| failures |" in again.stdout and "count-2" in again.stdout and "66.67%" in again.stdout
    assert [row.key for row in Table.load(out).rows()] == [
        "count-0",
        "count-1",
        "count-2",
        "pattern-0",
        "pattern-1",
        "settled-count-1",
        "settled-count-2",
    ]


def test_a_log_tells_how_far_a_table_is_and_the_index_how_long_was_searched(job, tmp_path):
    options = ("--steps", "2000", "--jobs", "1")
    done = slipstream("table", job, "--max-failures", "1", *options, "--out", tmp_path / "table")
    assert done.exit_code == 0 and "2,000 steps an entry" in done.stdout
    progress = [line for line in done.stderr.splitlines() if line.startswith("planning: ")]
    assert progress == [f"planning: {count} of 5 entries" for count in range(6)]
    assert FINISHING in done.stderr
    single = slipstream("table", job, "--max-failures", "0", *options, "--out", tmp_path / "one")
    assert "\n1 entry, 1 planned now" in single.stdout


def test_a_job_from_a_pipe_is_kept_beside_the_table(tmp_path):
    pipe, out = tmp_path / "pipe", tmp_path / "table"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(JOB,), daemon=True)
    writer.start()
    assert (
        slipstream(
            "table", pipe, "--max-failures", "0", "--method", "greedy", "--out", out
        ).exit_code
        == 0
    )
    writer.join(SECONDS)
    assert Table.load(out).job_text() == JOB.encode()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--max-failures", "9"], "--max-failures 9: the job has only 6 workers"),
        (["--max-failures", "-1"], "--max-failures"),
        (["--max-failures", "1", "--method", "magic"], "--method magic: expected"),
        (["--max-failures", "1", "--jobs", "0"], "--jobs"),
    ],
)
def test_bad_options_exit_2(job, tmp_path, arguments, says):
    result = slipstream("table", job, "--out", tmp_path / "table", *arguments)
    assert result.exit_code == 2 and says in result.stderr and "Traceback" not in result.stderr


def test_the_folder_of_another_table_exits_2(job, tmp_path):
    out = tmp_path / "table"
    assert slipstream("table", job, "--max-failures", "0", "--out", out).exit_code == 0
    job.write_text(JOB.replace("forward = 1", "forward = 2"))
    result = slipstream("table", job, "--max-failures", "0", "--out", out)
    assert result.exit_code == 2 and result.stdout == ""
    assert (
        "has another job or other options: its times differ; remove it, or choose another folder"
        in result.stderr
    )


def test_other_parameters_of_the_search_make_another_table(job, tmp_path):
    out, params = tmp_path / "table", tmp_path / "params.toml"
    params.write_text("[lists]\nmost_steps = 9\n")
    arguments = (
        "table",
        job,
        "--max-failures",
        "0",
        "--method",
        "greedy",
        "--out",
        out,
        "--params",
        params,
    )
    assert (
        slipstream(*arguments).exit_code == 0
        and Table.load(out).index.basis.params["lists"]["most_steps"] == 9
    )
    assert "0 planned now" in slipstream(*arguments).stdout
    refused = slipstream(*arguments[:-2])
    assert (
        refused.exit_code == 2
        and "its params differ; remove it, or choose another folder" in refused.stderr
    )


def test_a_folder_that_cannot_be_written_exits_2(job):
    result = slipstream("table", job, "--max-failures", "0", "--out", "/dev/null/table")
    assert (
        result.exit_code == 2
        and "/dev/null/table" in result.stderr
        and "cannot be written" in result.stderr
    )


def test_a_job_without_any_plan_exits_1(job, tmp_path):
    job.write_text(JOB + "[memory]\ncapacity = 1\nactivation = 2\n")
    result = slipstream("table", job, "--max-failures", "1", "--out", tmp_path / "table")
    assert result.exit_code == 1 and "no schedule can run it" in result.stderr


def test_a_table_none_of_whose_entries_has_a_plan_exits_1(job, tmp_path):
    # Two workers have room for two of the three virtual stages at once.
    job.write_text(
        "pipelines = 2\nstages = 1\nmicrobatches = 1\n[placement]\nchunks = 3\n"
        "[time]\nforward = 1\nbackward_input = 1\nbackward_weight = 1\n"
        "[memory]\ncapacity = 1\nactivation = 1\n"
    )
    planned = ("table", job, "--max-failures", 1, "--steps", 2000, "--jobs", 1)
    for _ in range(2):  # the second time from finished entries
        result = slipstream(*planned, "--out", tmp_path / "table")
        assert result.exit_code == 1 and result.stdout == ""
        assert "slipstream: no schedule with layers in place keeps all workers" in result.stderr
    assert not (tmp_path / "table" / "index.json").exists()


@pytest.mark.real_clock
def test_a_job_that_is_too_large_exits_2_in_one_line(job, tmp_path):
    job.write_text(
        JOB.replace("microbatches = 3", "microbatches = 65_536").replace(
            "stages = 2", "stages = 16"
        )
    )
    result = slipstream(
        "table", job, "--max-failures", "1", "--time-limit", "1", "--out", tmp_path / "t"
    )
    assert result.exit_code == 2 and result.stdout == ""
    assert (
        result.stderr.startswith("planning: 0 of 19 entries\nslipstream: ")
        and result.stderr.count("\n") == 2
    )
    assert "65,536 micro-batches a pipeline" in result.stderr and "--time-limit" in result.stderr


@pytest.mark.real_clock
def test_interrupting_keeps_what_is_finished(tmp_path):
    (tmp_path / "job.toml").write_text(
        JOB.replace("= 2", "= 4").replace("microbatches = 3", "microbatches = 8")
    )
    command = [
        sys.executable,
        "-m",
        "slipstream",
        "table",
        "job.toml",
        "--max-failures",
        "4",
        "--exact",
        "--jobs",
        "1",
        "--time-limit",
        "1",
        "--out",
        "table",
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path.cwd()), *sys.path]))
    }
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + SECONDS
    while (
        not list(tmp_path.glob("table/parts/*.gz"))
        and time.monotonic() < deadline
        and process.poll() is None
    ):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=SECONDS)
    assert process.returncode == 130 and "Traceback" not in stderr
    assert (
        "finished entries are kept in table: the same command continues from there"
        in stderr.replace("\n", " ")
    )
    assert list(tmp_path.glob("table/parts/*.gz")) and not list(tmp_path.glob("table/index.json"))


UNLIKE = JOB.replace("forward = 1\n", "forward = [2, 5]\n", 1) + (
    "[placement]\nlayers = 2\n[layers]\n"
    + "".join(
        f"{key} = {values}\n"
        for key, values in (
            ("forward", [1, 1, 1, 4]),
            ("backward_input", [0.5] * 4),
            ("backward_weight", [0.5] * 4),
        )
    )
)


def test_a_table_for_the_placement_that_is_found(tmp_path):
    job, best, out = tmp_path / "job.toml", tmp_path / "best.toml", tmp_path / "table"
    job.write_text("# Measured on Monday.\n" + UNLIKE)
    asked = (
        "table",
        job,
        "--max-failures",
        "1",
        "--steps",
        "4000",
        "--jobs",
        "1",
        "--out",
        out,
        "--placement",
        "any",
        "--job-out",
        best,
    )
    refused = slipstream(*asked, "--share", "0/2")
    assert (
        refused.exit_code == 2
        and "find the placement first, with `slipstream plan" in refused.stderr
    )
    first = slipstream(*asked)
    assert first.exit_code == 0 and "1 down" in first.stderr, first.stderr
    assert best.read_text().startswith(
        "# Measured on Monday.\n# Placement found by `--placement any`: "
    )
    table = Table.load(out)
    assert table.job_text() == best.read_bytes()
    assert table.unchecked_schedule("count-0").grid.layers_by_stage != (2, 2)
    again = slipstream(*asked, "--seed", "5")  # which might find another one
    assert (
        again.exit_code == 2
        and "other options" in again.stderr
        and "has the placement" in again.stderr
    )
    assert "0 planned now" in slipstream(*asked).stdout
    job.write_text(UNLIKE.replace("optimizer = 1", "optimizer = 2"))
    other = slipstream(*asked)
    assert other.exit_code == 2 and "best.toml: exists already, and is not" in other.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--placement", "all"], "--placement all: expected given or any"),
        (["--placement", "any"], "--placement any and --job-out FILE: one needs the other"),
        (["--job-out", "best.toml"], "--placement any and --job-out FILE: one needs the other"),
        (
            ["--placement", "any", "--job-out", "best.toml", "--method", "1f1b"],
            "not with --method 1f1b",
        ),
    ],
)
def test_options_of_a_search_for_a_placement(job, tmp_path, options, says):
    done = slipstream("table", job, "--max-failures", "1", "--out", tmp_path / "table", *options)
    assert done.exit_code == 2 and says in done.stderr and not (tmp_path / "table").exists()


def test_rows_fit_into_a_terminal():
    text = (
        "About.\n\n| failures | period s | status  | GB to move | key     |\n"
        "|---------:|---------:|---------|-----------:|---------|\n"
        "|        1 |     2.52 | optimal |        115 | count-1 |\n"
    )
    assert fit_rows(text, 100) == text
    assert fit_rows(text, 50) == (
        "About.\n\n| failures | period s | GB to move | key     |\n|---------:|---------:|"
        "-----------:|---------|\n|        1 |     2.52 |        115 | count-1 |\n"
    )
    assert max(map(len, fit_rows(text, 30).split("\n"))) <= 30
    assert fit_rows("no table\n", 10) == "no table\n"


def test_sizes_have_no_exponent():
    assert [format_gigabytes(count) for count in (0, 5e4, 1.5e6, 115.2e9, 999.6e9, 1.9e12)] == [
        "0",
        "0.00005",
        "0.0015",
        "115",
        "1,000",
        "1,900",
    ]
