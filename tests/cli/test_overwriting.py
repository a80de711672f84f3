"""No command writes over its inputs, nor over a file of a table or run."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import COMMANDS, app, load_command
from slipstream.cli.shared.outputs import is_output_file
from slipstream.planner.job.file import read_job
from slipstream.planner.plan import plan_job
from slipstream.schedules.codec import write
from slipstream.schedules.schedule import Worker
from tests.generate import HEALTHY, by_hand
from tests.patience import SECONDS

ROOT = Path(__file__).parents[2]
JOB = ROOT / "cli" / "jobs" / "worked-example.toml"
READ = {
    "--trace",
    "--model",
    "--params",
    "--measured",
    "--schedule",
    "--lengths",
    "--job",
    "--entry",
    "FILE",
    "FILE...",
}
"""Options and arguments that name a file to read."""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a job, a schedule, a table and the files of a run.

    There is a link to each of the first two.
    """
    monkeypatch.chdir(tmp_path)
    shutil.copy(JOB, "q.toml")
    Path("layers.toml").write_text(f"{JOB.read_text()}[placement]\nlayers = [1, 1, 1, 1]\n")
    write(by_hand(HEALTHY), Path("q.json"))
    write(
        plan_job(read_job(Path("q.toml")), [Worker(0, 0)], method="greedy").schedule,
        Path("rerouted.json"),
    )
    Path("link.toml").symlink_to("q.toml")
    os.link("q.json", "hard.json")
    shutil.copytree(ROOT / "schedules" / "library" / "gpt-1.5b", "tb")
    for name in (
        "events.jsonl",
        "losses.jsonl",
        "schedule.json",
        "schedules/00.json",
        "checkpoints/iteration-2/manifest.json",
    ):
        path = Path("run") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("kept\n")
    return tmp_path


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    "command",
    [
        "plan q.toml --out q.toml",
        "plan q.toml --out ./link.toml",
        "plan link.toml --out q.toml",
        "plan q.toml --params q.json --out q.json",
        "simulate q.toml --html q.toml",
        "profile --job q.toml --out q.toml",
        "new --trace q.json --out q.json --force",
        "show q.json --html q.json",
        "show q.json --svg hard.json",
        "show q.json --perfetto q.json",
        "show q.json --html new.html --svg new.html",
        "show q.json hard.json --html q.json",
        "show q.json --measured tb/job.toml --html tb/job.toml",
        "export q.json --out q.json",
        "lookup tb --failed 1.1 --out tb/index.json",
        "lookup tb --failed 1.1 --out tb/programs.json.gz",
        "plan q.toml --out tb/index.md",
        "new --preset gpt-1.5b --out tb/job.toml --force",
        "plan q.toml --out run/schedule.json",
        "show q.json --svg run/events.jsonl",
        "show --run run --html run/losses.jsonl",
        "plan q.toml --out run/schedules/00.json",
        "plan q.toml --out run/checkpoints/iteration-2/manifest.json",
    ],
)
def test_no_command_writes_over_what_it_reads_or_over_a_part_of_something(command, here):
    before = contents(here)
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 2 and not result.stdout, result.output
    assert result.stderr.count("\n") == 1
    assert (
        "give another file to write" in result.stderr
        or "give each a file of its own" in result.stderr
    )
    assert contents(here) == before


@pytest.mark.parametrize(
    "command",
    [
        "show q.json --html run/page.html",
        "export q.json --out order.csv",
        "plan q.toml --steps 0 --out new.json",
        "show q.json --html page.html --svg picture.svg --perfetto trace.json",
        "lookup tb --failed 1.1 --out answer.json",
        "export rerouted.json --to torch-csv --communication --out rows.csv",
        "export layers.toml --to megatron --decoder-layers 4 --out flags.txt",
    ],
)
def test_other_files_are_written_and_written_again(command, here):
    for _ in range(2):
        result = CliRunner().invoke(app, command.split())
        assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("plan q.toml --out other.toml", "is not a schedule"),
        ("show q.json --html other.toml", "is not a page"),
        ("show q.json --svg other.toml", "is not an SVG picture"),
        ("export q.json --out other.toml", "is not an order"),
        ("show q.json --perfetto hard.json", "is read by this command"),
        ("show q.json --perfetto mine.json", "is not a trace"),
        ("new --preset gpt-1.5b --out other.toml", "exists already; --force"),
    ],
)
def test_a_file_of_another_kind_is_replaced_only_by_force(command, reason, here):
    Path("other.toml").write_text('name = "mine"\n')
    write(by_hand(HEALTHY), Path("mine.json"))
    before = contents(here)
    result = CliRunner().invoke(app, command.split())
    assert result.exit_code == 2 and reason in result.stderr, result.output
    assert contents(here) == before
    if "hard.json" not in command:
        forced = CliRunner().invoke(app, [*command.split(), "--force"])
        assert forced.exit_code == 0, forced.output
        assert contents(here) != before


@pytest.mark.skipif(not Path("/dev/stdin").exists(), reason="needs /dev/stdin")
def test_a_pipe_may_be_both(here):
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", "show", "/dev/stdin", "--svg", "/dev/stdout"],
        input=Path("q.json").read_bytes(),
        capture_output=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0 and b"<svg" in done.stdout, done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_of_each_option_it_is_known_whether_its_file_is_read_or_written(name):
    for param in load_command(name).params:
        option = str(param.metavar) if param.param_type_name == "argument" else param.opts[0]
        if str(param.metavar).startswith("FILE") or str(param.metavar).endswith("FILE"):
            assert is_output_file(param) != (option in READ), (name, option)
