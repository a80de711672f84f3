"""Node 0's process is killed; one that is started anew finds the workers, and goes on with them."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from runtime.launch import Resilience, RunOptions, run
from runtime.node_agent import join
from runtime.processes.process_manager import Return
from runtime.protocol.failure_injection import Injection
from runtime.protocol.rendezvous import Rendezvous
from runtime.run_folder import left_behind
from schedules.schedule import Worker
from tests.runtime.failing import JOB, TIMEOUT_SECONDS
from tests.runtime.running import (
    below,
    command_environment,
    free_port,
    judge,
    losses_in,
    metrics_in,
    tiny,
    wait_until_gone,
)
from tests.runtime.speaking import SECRET, own_job

pytestmark = pytest.mark.timeout(900)
ITERATIONS = 40
LEAD = """
import sys
from tests.runtime.test_node_0_restart import lead
lead(*sys.argv[1:])
"""
FOLLOW = """
import sys
from tests.runtime.test_node_0_restart import follow
follow(*sys.argv[1:])
"""


def lead(out: str, port: str, nodes: str, dies: str, clip: str, timeout: str = "240") -> None:
    """Node 0. It is killed before, or right after, the losses of some iteration are written, as `dies` says."""
    from tests.runtime.test_going_back import on_the_spot

    place, _, at = dies.partition("@")
    config = tiny(iterations=ITERATIONS, clip_norm=float(clip) if clip else None)

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def progress(iteration: int, _: float) -> None:
        if iteration == int(at or -1):
            if place == "committed":
                die()
            import threading
            threading.Timer(0.03, die).start()

    scheduler = on_the_spot(JOB)
    injections, returns = [], []
    if place == "joining":
        injections, returns = [Injection(Worker(1, 0), 2, 0)], [Return(Worker(1, 0), 3)]
    result = run(scheduler(()), config, out=Path(out), progress=progress, options=RunOptions(
        nodes=int(nodes), rendezvous=Rendezvous("127.0.0.1", int(port)) if int(port) else None,
        secret=SECRET if int(nodes) > 1 else None, notify=lambda news: print(news, file=sys.stderr, flush=True)),
        resilience=Resilience(scheduler=scheduler, heartbeat_timeout_seconds=TIMEOUT_SECONDS,
                              injections=tuple(injections), returns=tuple(returns), fetch_bytes_per_second=50e3,
                              coordinator_timeout_seconds=float(timeout)))
    print(result.parameter_digest, *(one.reasons for one in result.recoveries))


def follow(out: str, port: str, clip: str, timeout: str = "240") -> None:
    config = tiny(iterations=ITERATIONS, clip_norm=float(clip) if clip else None)
    join(Rendezvous("127.0.0.1", int(port)), replace(own_job(JOB, config), coordinator_timeout_seconds=float(timeout)),
         node=1, nodes=2, out=Path(out), notify=lambda news: print(news, file=sys.stderr, flush=True))


def start(script: str, *words: object, log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, "-c", script, *map(str, words)], env=command_environment(),
                                stdout=file, stderr=file)


def started(out: Path, process: subprocess.Popen[bytes], log: Path, losses: int = 1) -> None:
    """Wait until iterations are committed."""
    deadline = time.monotonic() + 240
    while len(losses_in(out)) < losses:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


def killed(process: subprocess.Popen[bytes], log: Path) -> None:
    assert process.wait(240) == -signal.SIGKILL, log.read_text()


def assert_right(out: Path, clip: float | None = None) -> None:
    """The losses of all iterations, each once and in order, are those of one process."""
    reference = judge(tiny(iterations=ITERATIONS, clip_norm=clip), JOB.microbatches, ITERATIONS)
    losses = losses_in(out)
    assert len(losses) == len(metrics_in(out)) == ITERATIONS
    assert max(abs(ours - theirs) for ours, theirs in zip(losses, reference.losses, strict=True)) <= 1e-9


@pytest.mark.parametrize(("dies", "clip"), [("committed@7", "1.8"), ("training@9", "1e-3"), ("joining@6", "")])
def test_on_one_node_its_workers_are_adopted(dies, clip, tmp_path):
    """Killed in the middle of an iteration, between a commit and its acknowledgement, while layers are fetched."""
    out, log = tmp_path / "out", tmp_path / "log"
    first = start(LEAD, out, 0, 1, dies, clip, log=log)
    started(out, first, log)
    pids = below(first.pid)
    killed(first, log)
    assert left_behind(out) is not None
    second = start(LEAD, out, 0, 1, "", clip, log=log)
    assert second.wait(240) == 0, log.read_text()
    told = log.read_text()
    assert "node 0 goes on with the" in told and "Traceback" not in told, told
    assert_right(out, float(clip) if clip else None)
    wait_until_gone(pids)
    assert left_behind(out) is None and not list(out.glob(".*"))


def test_one_after_the_other_is_killed(tmp_path):
    """Without clipping."""
    out, log = tmp_path / "out", tmp_path / "log"
    first = start(LEAD, out, 0, 1, "committed@4", "", log=log)
    started(out, first, log)
    pids = below(first.pid)
    killed(first, log)
    for dies in ("training@9", "committed@20"):
        killed(start(LEAD, out, 0, 1, dies, "", log=log), log)
    assert start(LEAD, out, 0, 1, "", "", log=log).wait(240) == 0, log.read_text()
    assert log.read_text().count("node 0 goes on with the 4 workers") == 3, log.read_text()
    assert_right(out)
    wait_until_gone(pids)


@pytest.mark.parametrize("machine", [False, True], ids=["its process", "its workers, too"])
def test_on_two_nodes_the_others_hold_still(machine, tmp_path):
    """Where its workers die with node 0, the new one starts them again, and they come in as any that return."""
    out, port, log, other = tmp_path / "out", free_port(), tmp_path / "log", tmp_path / "other"
    node = start(FOLLOW, out, port, "", log=other)
    first = start(LEAD, out, port, 2, "training@5", "", log=log)
    started(out, first, log)
    held = below(first.pid)
    killed(first, log)
    if machine:
        for pid in held:
            os.kill(pid, signal.SIGKILL)
    second = start(LEAD, out, port, 2, "", "", log=log)
    assert second.wait(240) == 0 and node.wait(60) == 0, log.read_text() + other.read_text()
    told = log.read_text()
    assert f"node 0 goes on with the {2 if machine else 4} workers" in told, told
    assert "Traceback" not in told + other.read_text(), told + other.read_text()
    assert_right(out)
    wait_until_gone(held)


def test_where_nobody_comes_all_end(tmp_path):
    out, port, log, other = tmp_path / "out", free_port(), tmp_path / "log", tmp_path / "other"
    node = start(FOLLOW, out, port, "", 3.0, log=other)
    first = start(LEAD, out, port, 2, "training@5", "", 3.0, log=log)
    started(out, first, log)
    pids = [*below(first.pid), *below(node.pid)]
    killed(first, log)
    assert node.wait(60) == 1
    assert "no other one came within 3 s" in other.read_text(), other.read_text()
    wait_until_gone(pids)
