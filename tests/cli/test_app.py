"""The command line as a whole."""

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from slipstream.cli.app import COMMANDS, app, load_command
from tests.patience import SECONDS
from tests.runtime.running import tiny_text


def test_lists_every_command():
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0 and all(name in result.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_explains_itself(name):
    assert " ".join(load_command(name).help.split()).startswith(COMMANDS[name].rstrip("."))
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0 and "--json" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_readable_at_80_columns(name):
    """Options in groups, each with what it takes by its name, without types and ranges."""
    said = CliRunner().invoke(app, [name, "--help"], terminal_width=80).stdout
    assert all(len(line) <= 80 for line in said.splitlines())
    assert not re.search(r"<\w+>|<\w+ range>|<=", said)
    options = [line for line in said.splitlines() if line.startswith("  -")]
    assert len(options) <= 6 or len(re.findall(r"^\S.*:$", said, re.MULTILINE)) >= 3, said


def test_an_unknown_command_exits_2():
    result = CliRunner().invoke(app, ["plann"])
    assert result.exit_code == 2 and "plann" in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "command", [["--help"], ["plan", "--help"], ["check", "--help"], ["show", "--help"]]
)
def test_planning_does_not_wait_for_torch(command):
    code = (
        f"import sys; from typer.testing import CliRunner; from slipstream.cli.app import app; "
        f"result = CliRunner().invoke(app, {command!r}); sys.exit(result.exit_code or 'torch' "
        "in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], timeout=SECONDS, check=False).returncode == 0
    )


def test_a_plan_imports_neither_simulation_nor_published_pipelines(tmp_path):
    (tmp_path / "job.toml").write_text(tiny_text(pipelines=2, iterations=1))
    code = (
        "import sys; from typer.testing import CliRunner; from slipstream.cli.app import app; "
        "result = CliRunner().invoke(app, ['plan', 'job.toml', '--method', 'greedy', '--json']); "
        "others = ('slipstream.planner.simulation', 'slipstream.planner.published', "
        "'slipstream.cli.figures'); "
        "assert result.exit_code == 0 and 'slipstream.planner.plan' in sys.modules, result.output; "
        "print([name for name in sys.modules if name.startswith(others)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=True,
    )
    assert done.stdout == "[]\n"
