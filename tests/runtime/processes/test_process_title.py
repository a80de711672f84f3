"""Each process of a run says which it is, in what `ps` and `top` show."""

import contextlib
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.patience import SECONDS
from tests.runtime.running import below, command_environment, losses_in, tiny_text

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux lets a process do so"
)


def test_the_processes_of_a_run_are_told_apart(tmp_path):
    (tmp_path / "job.toml").write_text(tiny_text(pipelines=2, iterations=100_000))
    started = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "slipstream",
            "train",
            "job.toml",
            "--out",
            "run",
            "--method",
            "greedy",
        ],
        cwd=tmp_path,
        env=command_environment(),
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + SECONDS
        while len(losses_in(tmp_path / "run")) < 3:
            assert started.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        titles, names = set(), set()
        for pid in [started.pid, *below(started.pid)]:
            with contextlib.suppress(OSError):  # a process that plans may have ended
                titles.add(Path(f"/proc/{pid}/cmdline").read_bytes().rstrip(b"\0").decode())
                names.add(Path(f"/proc/{pid}/comm").read_text().strip())
    finally:
        started.send_signal(signal.SIGTERM)
        assert started.wait(SECONDS) == 143
    workers = {"worker 0.0", "worker 0.1", "worker 1.0", "worker 1.1"}
    run = f"{tmp_path.name}/run"  # two runs on one machine are told apart by their folders
    assert "slipstream fork server" in titles
    for worker in workers:
        whole_title, shortest = f"slipstream {worker}: {run}", len(f"slipstream {worker}: ")
        assert any(whole_title.startswith(title) and len(title) > shortest for title in titles)
    assert "slipstream node 0: train job.toml --out run --method greedy".startswith(
        next(title for title in titles if title.startswith("slipstream node 0:"))
    )
    # A short name has no spaces: SLURM's proctrack/linuxproc could not read the parent of such a
    # process.
    assert {name.replace(" ", "-") for name in workers} | {
        "node-0",
        "fork-server",
        "node-0's-watch",
    } <= names
