"""A real Open MPI runs the command line of docs/clusters.md.

What the page says of failures is so.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.runtime.checkpoints.checkpoint import open_latest
from slipstream.runtime.protocol.authentication import SECRET_VARIABLE
from tests.launchers import paced_model
from tests.launchers.documents import blocks, replaced
from tests.launchers.processes import kill_all, launcher, wait_until, with_variable
from tests.runtime.processes.torchrun import losses_in_lines
from tests.runtime.running import command_environment, free_port, losses_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("mpirun") is None, reason="mpirun: not installed (make launchers)"
    ),
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.timeout(600),
]
MARK = "SLIPSTREAM_TEST_RUN"


class Run:
    """The documented command.

    Paths are this test's; node 0 and the end of the processes are not waited for as long.
    """

    def __init__(self, folder: Path) -> None:
        self.out, self._folder, self._log = folder / "out", folder, folder / "log"
        self._mark = str(folder)
        (folder / "hosts").write_text("localhost slots=3\n")
        (folder / "job.toml").write_text(paced_model.job(100_000))
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(16))
        self._script = replaced(
            blocks("mpirun", "sh")[0],
            {
                "~/secret": str(secret),
                "/shared/run": str(self.out),
                "=29500": f"={free_port()}",
                "sigkill_timeout 25": "sigkill_timeout 5",
                "--out": "--coordinator-timeout 5 --out",
            },
        )
        self._environment = {
            **command_environment(),
            MARK: self._mark,
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        del self._environment[SECRET_VARIABLE]  # the command says where the secret is

    def start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(
                ["bash", "-c", self._script],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def mpirun(self) -> int:
        (found,) = [
            pid
            for pid in self.processes()
            if Path(f"/proc/{pid}/comm").read_text().startswith("mpirun")
        ]
        return found

    def rank(self, number: int) -> int:
        return launcher(self.processes(), "OMPI_COMM_WORLD_RANK", number)

    def processes(self) -> list[int]:
        return with_variable(MARK, self._mark)

    def trains_on(self, iterations: int = 20) -> None:
        wanted = len(losses_in_lines(self.out)) + iterations
        wait_until(lambda: len(losses_in_lines(self.out)) >= wanted, self.said)

    def all_end(self) -> None:
        wait_until(lambda: not self.processes(), self.said)

    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def newest(self) -> int:
        found = open_latest(self.out / "checkpoints")
        assert found is not None, self.said()
        return found.iteration


@pytest.fixture
def run(tmp_path):
    run_ = Run(tmp_path)
    yield run_
    kill_all(run_.processes())


def test_the_run_goes_on_when_a_process_is_killed_and_ends_with_a_checkpoint_when_mpirun_is_told_to(
    run,
):
    """Then it goes on from there, until node 0 is killed."""
    run.start()
    run.trains_on(5)
    os.kill(run.rank(2), signal.SIGKILL)
    wait_until(lambda: "gone with node 2" in run.said(), run.said)
    run.trains_on()
    os.kill(run.mpirun(), signal.SIGTERM)
    run.all_end()
    assert run.newest() == len(losses_in(run.out)), run.said()

    run.start()
    run.trains_on()
    os.kill(run.rank(0), signal.SIGKILL)
    run.all_end()
    assert "no other node 0 came within 5 s" in run.said()


def test_nothing_is_left_when_mpirun_is_killed(run):
    run.start()
    run.trains_on(5)
    os.kill(run.mpirun(), signal.SIGKILL)
    run.all_end()
    assert run.newest() == len(losses_in(run.out)), run.said()
