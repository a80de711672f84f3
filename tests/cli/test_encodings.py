"""Terminals and files of other encodings than UTF-8."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.schedules.codec import write
from tests.cli.runs import settled_run
from tests.generate import BROKEN, by_hand
from tests.patience import SECONDS

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command",
    [
        "plan JOB --failed 1.2 --method greedy",
        "show plan.json",
        "show --run run",
        "check plan.json",
    ],
)
def test_an_answer_is_told_in_ascii_where_there_is_nothing_else(command, tmp_path):
    write(by_hand(BROKEN), tmp_path / "plan.json")
    settled_run(tmp_path / "run")
    arguments = command.replace("JOB", str(ROOT / "cli" / "jobs" / "worked-example.toml")).split()
    done = subprocess.run(
        [sys.executable, "-m", "slipstream", *arguments],
        cwd=tmp_path,
        capture_output=True,
        timeout=SECONDS,
        check=False,
        env={"PYTHONIOENCODING": "ascii", "HOME": str(tmp_path)},
    )
    assert done.returncode == 0 and b"Traceback" not in done.stderr, done.stderr
    assert done.stdout.decode("ascii") and "?" not in done.stdout.decode("ascii")


def test_every_file_is_read_and_written_as_utf_8():
    """Whatever the locale is: each call that reads or writes text says so."""
    packages = ("cli", "planner", "runtime", "schedules")
    for path in [file for package in packages for file in (ROOT / package).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Call) or not isinstance(
                node.func, ast.Attribute | ast.Name
            ):
                continue
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            texts = [
                argument.value
                for argument in node.args
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
            ]
            mode = texts[0] if texts else "r"
            is_file = (
                name in ("read_text", "write_text")
                or (name == "open" and isinstance(node.func, ast.Name))
                or (name == "open" and "Path" in ast.unparse(node.func))
            )
            binary = "b" in mode and name == "open"
            said = name == "read_text" and node.args  # the encoding by its place
            assert (
                not is_file
                or binary
                or said
                or any(keyword.arg == "encoding" for keyword in node.keywords)
            ), f"{path}:{node.lineno}: {ast.unparse(node)}"
