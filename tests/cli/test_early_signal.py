"""A signal that comes before a run handles signals ends the process.

So it does with the first process of a container.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import SECONDS


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_node_0_without_a_watch_handles_sigterm_before_it_has_read_its_job(tmp_path) -> None:
    """The system ignores a signal that the first process of a container does not handle."""
    job = tmp_path / "job"  # read after the command line has been checked
    os.mkfifo(job)
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "slipstream",
            "train",
            str(job),
            "--coordinator-timeout",
            "0",
            "--out",
            str(tmp_path / "run"),
        ]
    )
    try:
        deadline = time.monotonic() + SECONDS
        while b"slipstream node 0" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        status = dict(
            line.split(":\t", 1)
            for line in Path(f"/proc/{process.pid}/status").read_text().splitlines()
            if ":\t" in line
        )
        assert int(status["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1
        process.terminate()
        assert process.wait(SECONDS) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
