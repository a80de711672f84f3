"""The examples of docs/library.md run as they stand, one after the other."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import slipstream.planner as planner
from tests.patience import SECONDS

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_examples(tmp_path):
    blocks = BLOCK.findall((ROOT / "docs" / "library.md").read_text())
    assert len(blocks) >= 6
    program = tmp_path / "examples.py"
    program.write_text("\n".join(blocks))
    done = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("30.0 optimal\nstage 2 has no live worker")
    assert (tmp_path / "run" / "losses.jsonl").read_text().count("\n") == 3
    # What was observed.
    assert [line.split()[0] for line in done.stdout.splitlines()[-3:]] == ["0", "1", "2"]


@pytest.mark.parametrize("name", [name for name in dir(planner) if name in planner._HOMES])
def test_public_names(name):
    assert getattr(planner, name).__doc__


def test_what_is_not_there():
    with pytest.raises(AttributeError, match="has no attribute 'zebra'"):
        planner.zebra  # noqa: B018
    assert "plan_job" in dir(planner)
