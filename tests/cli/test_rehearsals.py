"""A rehearsal that cannot happen is refused at once: before torch is imported."""

import subprocess
import sys

import pytest

from slipstream.cli.shared.launch_options import require_possible_rehearsals
from tests.patience import SECONDS
from tests.runtime.running import tiny_text

PROGRAM = """
import sys
from slipstream.cli.app import app
try:
    app(sys.argv[1:], prog_name="slipstream")
finally:
    assert "torch" not in sys.modules
"""


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--kill", "1@5"], "--kill: '1' is not a worker"),
        (["--kill=9.0@5"], "--kill 9.0@5: the job has no worker 9.0"),
        (["--kill", "1.1@50"], "--kill 1.1@50 cannot happen: the last iteration is 29"),
        (["--kill", "1.1@50", "--iterations", "40"], "the last iteration is 39"),
        (["--kill", "1.1@50", "--iterations=60", "--iterations", "40"], "the last iteration is 39"),
        (["--return", "1.1@5"], "--return 1.1@5: worker 1.1 is not down by then"),
        (["--slow", "1.1=0@5"], "--slow 1.1=0@5: expected D.S=FACTOR@ITERATION"),
        (["--slow", "1.1=2@5", "--slow", "1.1=3@5"], "--slow 1.1=3@5 contradicts --slow 1.1=2@5"),
    ],
)
def test_what_cannot_happen_is_refused_before_torch_is_imported(options, says, tmp_path):
    (tmp_path / "job.toml").write_text(tiny_text(pipelines=2, iterations=30))
    command = [sys.executable, "-c", PROGRAM, "train", "job.toml", *options]
    ended = subprocess.run(
        command, cwd=tmp_path, timeout=SECONDS, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert says in ended.stderr and ended.stderr.count("\n") == 1


@pytest.mark.parametrize("options", [["--failed", "1.1"], ["--failed=1.1"]])
def test_a_worker_that_is_down_from_the_start_may_return(options, tmp_path):
    (tmp_path / "job.toml").write_text(tiny_text(pipelines=2, iterations=30))
    require_possible_rehearsals(
        ["train", str(tmp_path / "job.toml"), *options, "--return", "1.1@5"]
    )
