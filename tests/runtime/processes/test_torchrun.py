"""What of a run that torchrun has started may be killed.

What becomes of the rest is as docs/clusters.md says.
"""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from slipstream.runtime.checkpoints.checkpoint import open_latest
from tests.runtime.processes.torchrun import Agents, agents, losses_in_lines
from tests.runtime.running import alive, tiny_text

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.timeout(600),
]
END_SECONDS = 150.0
"""On a busy machine the end of torchrun itself takes long."""


def started(run: Agents) -> list[int]:
    """All processes of a run, once it trains."""
    run.wait_for_losses(5)
    run.find_launchers()
    return run.everything()


def job(folder: Path, count: int) -> Path:
    path = folder / "job.toml"
    path.write_text(tiny_text(pipelines=count, iterations=100_000))
    return path


def assert_trains_on(run: Agents) -> None:
    """Many iterations more than those that were under way when something was killed."""
    run.wait_for_losses(len(losses_in_lines(run.out)) + 20)


def assert_all_end(run: Agents, processes: list[int]) -> None:
    deadline = time.monotonic() + END_SECONDS
    while any(map(alive, processes)):
        assert time.monotonic() < deadline, run.said()
        time.sleep(0.1)
    assert all(run.wait(END_SECONDS)), run.said()


def test_a_launcher_and_then_an_agent_are_killed_and_the_others_go_on_until_node_0_is(tmp_path):
    # One after the other are killed: a launcher of another node; the agent of another node; node 0,
    # which ends it.
    with agents(tmp_path, job(tmp_path, 3), 3, "--checkpoint-every", "1000000") as run:
        processes = started(run)
        others = [node for node in range(3) if node != 0 and run.agent_of(node) != 0]
        assert len(others) == 2, "else node 0 is not with the first agent, and ends with it"
        os.kill(run.launcher(others[-1]), signal.SIGKILL)
        assert_trains_on(run)
        run.processes[run.agent_of(others[0])].kill()
        run.wait_for(f"worker {others[0]}.0 has left, as it was asked to")
        assert_trains_on(run)
        os.kill(run.launcher(0), signal.SIGKILL)
        assert_all_end(run, processes)
    assert open_latest(run.out / "checkpoints") is None, (
        "none was due, and nobody was asked for one"
    )


def test_the_agent_of_node_0_is_killed_and_the_run_ends_with_a_checkpoint(tmp_path):
    with agents(tmp_path, job(tmp_path, 2), 2) as run:
        processes = started(run)
        run.processes[run.agent_of(0)].kill()
        assert_all_end(run, processes)
        newest = open_latest(run.out / "checkpoints")
        assert newest is not None and newest.iteration == len(losses_in_lines(run.out)), run.said()


def test_with_restarts_node_0_goes_on_with_its_workers_and_sigterm_at_all_agents_ends_the_run(
    tmp_path,
):
    """When node 0 dies, torchrun ends and starts all launchers: the others come in anew.

    Then a scheduler takes all.
    """
    with agents(tmp_path, job(tmp_path, 2), 2, restarts=1) as run:
        started(run)
        os.kill(run.launcher(0), signal.SIGKILL)
        run.wait_for("node 0 continues with the 2 workers that it has found")
        run.wait_for("worker 1.0 is back")
        assert_trains_on(run)
        processes = run.everything()
        for agent in run.processes:
            agent.send_signal(signal.SIGTERM)
        assert_all_end(run, processes)
        newest = open_latest(run.out / "checkpoints")
        assert newest is not None and newest.iteration == len(losses_in_lines(run.out)), run.said()
