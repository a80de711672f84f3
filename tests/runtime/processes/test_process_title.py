"""Each process of a run says which it is, in what `ps` and `top` show."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import SECONDS
from tests.runtime.running import command_environment, losses_in, tiny_text

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux lets a process do so")


def descendants(pid: int) -> list[int]:
    found = [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]
    return [*found, *(below for child in found for below in descendants(child))]


def test_the_processes_of_a_run_are_told_apart(tmp_path):
    (tmp_path / "job.toml").write_text(tiny_text(pipelines=2, iterations=100_000))
    started = subprocess.Popen([sys.executable, "-m", "slipstream", "train", "job.toml", "--out", "run", "--method",
                                "greedy"], cwd=tmp_path, env=command_environment(), stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + SECONDS
        while len(losses_in(tmp_path / "run")) < 3:
            assert started.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        processes = [started.pid, *descendants(started.pid)]
        titles = {Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode() for pid in processes}
        names = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in processes}
    finally:
        started.send_signal(signal.SIGTERM)
        assert started.wait(SECONDS) == 143
    workers = {"worker 0.0", "worker 0.1", "worker 1.0", "worker 1.1"}
    assert {f"slipstream {worker}" for worker in workers} | {"slipstream fork server"} <= titles
    assert "slipstream node 0: train job.toml --out run --method greedy".startswith(
        next(title for title in titles if title.startswith("slipstream node 0:")))
    # A short name has no spaces: SLURM's proctrack/linuxproc could not read the parent of such a process.
    assert {name.replace(" ", "-") for name in workers} | {"node-0", "fork-server", "node-0's-watch"} <= names
