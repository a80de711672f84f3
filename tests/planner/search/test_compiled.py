"""Machine code of the kernel: known by content, so that a copy of an installation need not compile it anew."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from planner.search import compiled

ASK = "from planner.search.compiled import annealing, listing; print(bool(annealing()), bool(listing()))"


def test_a_copy_of_an_installation_uses_the_machine_code_that_came_with_it(tmp_path):
    if not compiled.marker().exists():
        pytest.skip("the kernel is not compiled yet")
    root = Path(compiled.__file__).parents[2]
    for room in ("planner", "schedules"):
        shutil.copytree(root / room, tmp_path / room, ignore=shutil.ignore_patterns("library"))
    source = tmp_path / "planner" / "search" / "kernel" / "annealing.py"
    os.utime(source)  # newer than its machine code
    answer = subprocess.run([sys.executable, "-c", ASK], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
                            capture_output=True, text=True, timeout=60, check=True)
    assert answer.stdout.split() == ["True", "True"]
