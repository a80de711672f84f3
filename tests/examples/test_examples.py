"""The programs of examples/ run as they stand, and are short enough to read."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py"))
MOST_LINES = 200


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    """Each compares its own numbers and fails where they differ."""
    assert len(path.read_text().splitlines()) <= MOST_LINES
    done = subprocess.run([sys.executable, "-m", f"examples.{path.stem}"], cwd=ROOT, capture_output=True, text=True,
                          timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_there_are_examples():
    assert ROOT / "examples" / "dead_worker.py" in EXAMPLES
