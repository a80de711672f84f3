"""Node 0's process is killed.

One that is started anew finds the workers, and goes on with them.
"""

import os
import signal
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from slipstream.runtime import launch
from slipstream.runtime.coordinator.decisions.commit_log import CommitLog, CommittedIteration
from slipstream.runtime.launch import RunOptions, run
from slipstream.runtime.node_agent import join_run
from slipstream.runtime.processes.process_manager import Return
from slipstream.runtime.protocol.failure_injection import Injection
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.protocol.to_coordinator import IterationReport
from slipstream.runtime.protocol.to_worker import StepFactor
from slipstream.runtime.run_folder import read_takeover_record
from slipstream.schedules.schedule import Worker
from tests.runtime.failing import JOB, against
from tests.runtime.forked import fork_server_of_launcher
from tests.runtime.launchers import Launcher
from tests.runtime.pacing import hold_at
from tests.runtime.running import (
    below,
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
SEEN = "processes-seen"
LEAD, FOLLOW = (f"tests.runtime.test_node_0_restart:{function}" for function in ("lead", "follow"))


def lead(
    out: str,
    port: str,
    nodes: str,
    dies: str,
    clip: str,
    timeout: str = "240",
    secret: str = "",
    ranks: str = "1",
) -> None:
    """Lead a run as node 0 until it is killed, or ends.

    It is killed right before, right after, or some time after the losses of some iteration are
    written, as `dies` says; or while it does not know yet how all have stepped that one, and they
    have stepped the next.

    One that is to be killed waits after its first iteration until the test has seen its processes
    (`SEEN`).

    With `secret`, and where there are other nodes, it is given one. "anew" looks for other workers
    for a moment, and begins anew where there are none.
    """
    from slipstream.runtime.coordinator.decisions import failover
    from tests.runtime.test_going_back import on_the_spot

    place, _, at = dies.partition("@")
    if at:
        hold_at(0, Path(out).with_name(SEEN))
    config = tiny(
        iterations=ITERATIONS, clip_norm=float(clip) if clip else None, tensor_parallel=int(ranks)
    )

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def progress(iteration: int, loss: float) -> None:
        if iteration == int(at or -1):
            if place in ("committed", "failing later"):
                die()
            import threading

            threading.Timer(0.03, die).start()

    def validated(
        log: CommitLog, order: int, factor: StepFactor
    ) -> tuple[CommitLog, list[CommittedIteration]]:
        return (
            (log, [])
            if place == "stepped" and factor.iteration == int(at)
            else heard(log, order, factor)
        )

    def ran(
        log: CommitLog, *reports: IterationReport
    ) -> tuple[CommitLog, list[CommittedIteration]]:
        if place == "stepped" and any(
            report.iteration > int(at) and report.worker != Worker(0, 0) for report in reports
        ):
            time.sleep(1.0)  # the others step it, too
            die()
        found = entered(log, *reports)
        if place == "committing" and any(commit.iteration == int(at) for commit in found[1]):
            die()
        return found

    heard, CommitLog.with_factor = CommitLog.with_factor, validated  # type: ignore[method-assign]
    entered, CommitLog.with_reports = CommitLog.with_reports, ran  # type: ignore[method-assign]
    launch.LISTEN_SECONDS = 60.0
    if place == "anew":
        failover.FIRST_WORKER_SECONDS = 15.0
    scheduler = on_the_spot(JOB)
    injections, returns = [], []
    if place == "joining":
        injections, returns = [Injection(Worker(1, 0), 2, 0)], [Return(Worker(1, 0), 3)]
    elif place == "failing later":
        injections = [Injection(Worker(1, 0), 20, "A", "cut")]
    with fork_server_of_launcher() as fork_server:
        address = Rendezvous("127.0.0.1", int(port)) if int(port) else None
        options = RunOptions(
            nodes=int(nodes),
            rendezvous=address,
            secret=SECRET if int(nodes) > 1 or secret else None,
            force=place == "anew",
            notify=lambda news: print(news, file=sys.stderr, flush=True),
        )
        result = run(
            scheduler(()),
            config,
            out=Path(out),
            progress=progress,
            fork_server=fork_server,
            options=options,
            resilience=against(
                injections,
                scheduler=scheduler,
                returns=tuple(returns),
                fetch_bytes_per_second=50e3,
                coordinator_timeout_seconds=float(timeout),
            ),
        )
    print(result.parameter_digest, *(recovery.reasons for recovery in result.recoveries))


def follow(out: str, port: str, clip: str, timeout: str = "240") -> None:
    config = tiny(iterations=ITERATIONS, clip_norm=float(clip) if clip else None)
    job = own_job(JOB, config, Path(out), coordinator_timeout_seconds=float(timeout))
    with fork_server_of_launcher() as fork_server:
        join_run(
            Rendezvous("127.0.0.1", int(port)),
            job,
            node=1,
            nodes=2,
            fork_server=fork_server,
            notify=lambda news: print(news, file=sys.stderr, flush=True),
        )


def started(out: Path, process: Launcher, log: Path, losses: int = 1) -> None:
    """Wait until iterations are committed."""
    deadline = time.monotonic() + 240
    while len(losses_in(out)) < losses:
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.01)


def killed(process: Launcher, log: Path) -> None:
    """Let a node 0 go on, and wait until it has killed itself.

    The test has seen its processes.
    """
    log.with_name(SEEN).touch()
    assert process.wait(240) == -signal.SIGKILL, log.read_text()


def led_until_killed(out: Path, log: Path, *how: object) -> list[int]:
    """The processes of a node 0 that commits iterations and is killed.

    They are those that it had then.
    """
    first = Launcher(LEAD, out, *how, log=log)
    started(out, first, log)
    processes = below(first.pid)
    killed(first, log)
    return processes


def assert_right(out: Path, clip: float | None = None) -> None:
    """The losses of all iterations, each once and in order, are those of one process."""
    reference = judge(tiny(iterations=ITERATIONS, clip_norm=clip), JOB.microbatches, ITERATIONS)
    losses = losses_in(out)
    assert len(losses) == len(metrics_in(out)) == ITERATIONS
    assert (
        max(abs(ours - theirs) for ours, theirs in zip(losses, reference.losses, strict=True))
        <= 1e-9
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dies", "clip", "ranks"),
    [
        ("committed@7", "1.8", 1),
        ("training@9", "1e-3", 1),
        ("joining@6", "", 1),
        ("stepped@7", "1.8", 1),
        ("committing@7", "", 1),
        ("training@9", "1.8", 2),
    ],
)
def test_on_one_node_its_workers_are_adopted(dies, clip, ranks, tmp_path):
    # Node 0 is killed in the middle of an iteration, between a commit and its acknowledgement,
    # while layers are fetched, between a commit and the line that tells of it, and where the
    # workers have stepped on before the commit.
    out, log = tmp_path / "out", tmp_path / "log"
    pids = led_until_killed(out, log, free_port(), 1, dies, clip, 240, "", ranks)
    assert read_takeover_record(out) is not None
    second = Launcher(LEAD, out, 0, 1, "", clip, 240, "", ranks, log=log)
    assert second.wait(240) == 0, log.read_text()
    log_text = log.read_text()
    assert "node 0 continues with the" in log_text and "Traceback" not in log_text, log_text
    assert_right(out, float(clip) if clip else None)
    wait_until_gone(pids)
    assert read_takeover_record(out) is None and not list(out.glob(".*"))


def test_a_port_that_another_has_for_a_moment_is_waited_for(tmp_path):
    """As one that connects, to which the system has given it."""
    out, log = tmp_path / "out", tmp_path / "log"
    led_until_killed(out, log, free_port(), 1, "committed@4", "")
    with socket.create_server(("127.0.0.1", read_takeover_record(out).coordinator.port)):
        second = Launcher(LEAD, out, 0, 1, "", "", log=log)
        time.sleep(2.0)
    assert second.wait(240) == 0, log.read_text()
    assert "node 0 continues with the 4 workers" in log.read_text(), log.read_text()
    assert_right(out)


def test_one_after_the_other_is_killed(tmp_path):
    """Without clipping."""
    out, log = tmp_path / "out", tmp_path / "log"
    pids = led_until_killed(out, log, free_port(), 1, "committed@4", "")
    for dies in ("training@9", "committed@35"):
        killed(Launcher(LEAD, out, 0, 1, dies, "", log=log), log)
    assert Launcher(LEAD, out, 0, 1, "", "", log=log).wait(240) == 0, log.read_text()
    assert log.read_text().count("node 0 continues with the 4 workers") == 3, log.read_text()
    assert_right(out)
    wait_until_gone(pids)


def test_failures_on_purpose_that_only_the_dead_one_knew_of_do_not_happen(tmp_path):
    # The new one would take the report of one for nonsense, and cut the worker off.
    out, log = tmp_path / "out", tmp_path / "log"
    led_until_killed(out, log, free_port(), 1, "failing later@4", "")
    assert Launcher(LEAD, out, 0, 1, "", "", log=log).wait(240) == 0, log.read_text()
    assert (
        "node 0 continues with the 4 workers" in log.read_text()
        and "exit status" not in log.read_text()
    )
    assert_right(out)


@pytest.mark.slow
@pytest.mark.parametrize("machine", [False, True], ids=["its process", "its workers, too"])
def test_on_two_nodes_the_others_hold_still(machine, tmp_path):
    # Where its workers die with node 0, the new one starts them again, and they come in as any that
    # return.
    out, port, log, other = tmp_path / "out", free_port(), tmp_path / "log", tmp_path / "other"
    node = Launcher(FOLLOW, out, port, "", log=other)
    processes = led_until_killed(out, log, port, 2, "training@5", "")
    if machine:
        for pid in processes:  # the workers die with their fork server, which is the first
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    second = Launcher(LEAD, out, port, 2, "", "", log=log)
    assert second.wait(240) == 0 and node.wait(240) == 0, log.read_text() + other.read_text()
    log_text = log.read_text()
    assert f"node 0 continues with the {2 if machine else 4} workers" in log_text, log_text
    assert "Traceback" not in log_text + other.read_text(), log_text + other.read_text()
    assert_right(out)
    wait_until_gone(processes)


@pytest.mark.slow
def test_a_node_that_is_started_with_a_new_node_0_that_finds_nobody_joins_it_again(tmp_path):
    """As where a scheduler has killed all, and starts all."""
    out, port, log, other = tmp_path / "out", free_port(), tmp_path / "log", tmp_path / "other"
    node = Launcher(FOLLOW, out, port, "", log=other)
    first = Launcher(LEAD, out, port, 2, "held@1000", "", log=log)
    started(out, first, log)
    # Who starts workers sees nobody else die.
    for pid in (node.pid, first.pid, *below(node.pid), *below(first.pid)):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    killed(node, other)
    killed(first, log)
    node = Launcher(FOLLOW, out, port, "", log=other)
    second = Launcher(LEAD, out, port, 2, "anew", "", log=log)
    assert second.wait(240) == 0 and node.wait(240) == 0, log.read_text() + other.read_text()
    assert (
        "starts with iteration 0" in log.read_text() and "joins node 0 again" in other.read_text()
    )
    assert_right(out)


@pytest.mark.slow
def test_where_nobody_comes_all_end(tmp_path):
    out, port, log, other = tmp_path / "out", free_port(), tmp_path / "log", tmp_path / "other"
    node = Launcher(FOLLOW, out, port, "", 3.0, log=other)
    first = Launcher(LEAD, out, port, 2, "training@5", "", 3.0, log=log)
    started(out, first, log)
    pids = [*below(first.pid), *below(node.pid)]
    killed(first, log)
    assert node.wait(240) == 1
    assert "no other node 0 came within 3 s" in other.read_text(), other.read_text()
    wait_until_gone(pids)
