"""A real SLURM runs the batch script of docs/clusters.md.

What the page says of failures is so.
"""

import os
import secrets
import signal
import sys
from pathlib import Path

import pytest

from slipstream.runtime.checkpoints.checkpoint import Checkpoint, open_latest
from tests.launchers import paced_model, slurm
from tests.launchers.documents import blocks, replaced
from tests.launchers.processes import wait_until
from tests.runtime.processes.torchrun import losses_in_lines
from tests.runtime.running import losses_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing()),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The documented batch script on three nodes, which all tests here go on with."""
    with slurm.cluster(tmp_path_factory.mktemp("slurm"), 3) as cluster:
        yield Run(cluster, tmp_path_factory.mktemp("run"))


class Run:
    """The documented batch script, and its job.

    Paths are this test's, and node 0 is not waited for as long.
    """

    def __init__(self, cluster: slurm.Cluster, folder: Path) -> None:
        self.cluster, self.job, self.out = cluster, "", folder / "out"
        self._folder, self._log = folder, folder / "job.log"
        self.train(100_000)
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(16))
        (folder / "script.sh").write_text(
            replaced(
                blocks("SLURM", "sh")[0],
                {
                    "~/secret": str(secret),
                    "/shared/run": str(self.out),
                    "--out": "--coordinator-timeout 60 --out",
                },
            )
        )

    def submit(self) -> None:
        """Options of a command line go before those of a script."""
        self.job = self.cluster.command(
            "sbatch",
            "--parsable",
            "--nodes=3",
            "--ntasks-per-node=1",
            "--gpus-per-node=0",
            "--cpus-per-task=1",
            f"--chdir={self._folder}",
            f"--output={self._log}",
            str(self._folder / "script.sh"),
        )

    def start_again(self) -> Checkpoint:
        """Start a queued job again, and return what it will go on from.

        SLURM would let it wait for two minutes.
        """
        self.wait_for_state("PENDING")
        found = open_latest(self.out / "checkpoints")
        assert found is not None, self.said()
        self.cluster.command("scontrol", "update", f"JobId={self.job}", "StartTime=now")
        return found

    def train(self, iterations: int, seed: int = 0) -> None:
        """What the job file asks for."""
        (self._folder / "job.toml").write_text(paced_model.job(iterations, seed))

    def wait_for(self, text: str) -> None:
        wait_until(lambda: text in self.log(), self.said)

    def trains_on(self, iterations: int = 20) -> None:
        wanted = len(losses_in_lines(self.out)) + iterations
        wait_until(lambda: len(losses_in_lines(self.out)) >= wanted, self.said)

    def wait_for_state(self, *states: str) -> None:
        wait_until(lambda: self.cluster.state(self.job) in states, self.said)

    def log(self) -> str:
        """Without a line for each iteration."""
        lines = self._log.read_text(errors="replace").splitlines() if self._log.exists() else []
        return "\n".join(line for line in lines if not line.startswith("iteration "))

    def said(self) -> str:
        return self.log() + self.cluster.said()


def test_the_run_goes_on_when_tasks_are_killed_and_when_a_machine_is_lost(run):
    """Killed tasks are started again in place, that of node 0 too."""
    run.submit()
    run.trains_on(5)
    os.kill(run.cluster.task(2), signal.SIGKILL)
    run.wait_for("gone with node 2")
    run.wait_for("is back: iteration")
    os.kill(run.cluster.task(0), signal.SIGKILL)
    run.wait_for("node 0 continues with")
    run.trains_on()
    run.cluster.lose_node(2)
    run.trains_on()
    assert run.cluster.state(run.job) == "RUNNING" and run.cluster.nodes_of(run.job) == "n[0-1]", (
        run.said()
    )


def test_the_run_goes_on_when_it_is_queued_again_also_because_the_first_machine_is_lost(run):
    # It is by `scontrol requeue` first, then by the tasks of the other machines.
    run.cluster.start_node(2)
    run.cluster.command("scontrol", "requeue", run.job)
    newest = run.start_again()
    assert newest.iteration == len(losses_in(run.out)), run.said()
    run.trains_on()
    run.cluster.lose_node(0)
    run.train(newest.iteration + 100)
    run.wait_for_state("PENDING")
    run.cluster.start_node(0)
    run.start_again()
    run.wait_for_state("COMPLETED", "FAILED")
    assert run.cluster.state(run.job) == "COMPLETED", run.said()
    assert len(losses_in(run.out)) == newest.iteration + 100


def test_the_warning_before_the_time_is_over_ends_the_run_with_a_checkpoint(run):
    """As `#SBATCH --signal=USR1@90` has it sent, to all tasks."""
    run.train(100_000)
    run.submit()
    run.trains_on(5)
    run.cluster.command("scancel", "--signal=USR1", run.job)
    run.wait_for_state("FAILED", "CANCELLED")
    newest = open_latest(run.out / "checkpoints")
    assert newest is not None and newest.iteration == len(losses_in(run.out)), run.said()
    assert run.cluster.exit_status(run.job) == 128 + signal.SIGUSR1, run.said()


def test_nobody_waits_for_a_node_0_that_has_nothing_to_do_or_refuses_to_start(run):
    run.train(100)
    run.submit()
    run.wait_for_state("COMPLETED")
    run.train(1000, seed=1)
    run.submit()
    run.wait_for_state("FAILED")
    assert "training.seed is 0, here it is 1" in run.log(), run.said()
