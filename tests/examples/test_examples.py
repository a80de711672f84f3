"""The programs of examples/ run as they stand, and are short enough to read."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(
    path for path in (ROOT / "examples").glob("*.py") if not path.stem.startswith("torchtitan")
)
"""Those of torchtitan run in tests/interop, where it is installed."""
MOST_LINES = 260
STARTED = {"own_loop": ["torch.distributed.run", "--standalone", "--nproc-per-node", "8", "-m"]}
"""What starts an example that is not one process; standalone: at a port that nobody else uses."""
SECONDS = 850
"""Nearly until pytest ends a slow test: each of up to a dozen processes imports torch."""


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    """Each compares its own numbers and fails where they differ."""
    assert len(path.read_text().splitlines()) <= MOST_LINES
    command = [sys.executable, "-m", *STARTED.get(path.stem, ()), f"examples.{path.stem}"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr


def test_there_are_examples():
    assert ROOT / "examples" / "dead_worker.py" in EXAMPLES
