"""A SLURM of this machine, as Debian packages it.

It has a controller, and a daemon for each node that is played.
"""

import contextlib
import getpass
import os
import random
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from slipstream.runtime.protocol.authentication import SECRET_VARIABLE
from tests.launchers.processes import SECONDS, kill_all, launcher, parent, wait_until, with_variable
from tests.runtime.processes.torchrun import environment_of
from tests.runtime.running import command_environment, free_port

_DAEMONS = ("munged", "slurmctld", "slurmd")


def missing() -> str:
    """Why there can be no SLURM here, in words; empty where there can."""
    needed = [name for name in (*_DAEMONS, "sbatch") if program(name) is None]
    return f"{', '.join(needed)}: not installed (make launchers)" if needed else ""


def program(name: str) -> str | None:
    """Debian has daemons where only root looks for programs."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


def _number_of_job() -> int:
    """The number of a job whose port is free by the documented script.

    Other such tests may run on this machine.
    """
    while True:
        number = random.randrange(1, 9_990)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 20_000 + number)):
            return number


class Cluster:
    """Nodes n0, n1, ... Each could run all tasks; commands of SLURM are run with `environment`."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self.folder = folder
        self.environment = {
            **command_environment(),
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        del self.environment[SECRET_VARIABLE]  # scripts say where the secret is
        self._nodes = nodes
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Until all nodes are there."""
        folder, nodes = self.folder, self._nodes
        self._write()
        self._start(
            "munged",
            "--foreground",
            "--force",
            f"--key-file={folder / 'munge.key'}",
            f"--socket={folder / 'munge'}",
            f"--pid-file={folder / 'munge.pid'}",
            f"--seed-file={folder / 'munge.seed'}",
            f"--log-file={folder / 'munge.log'}",
        )
        wait_until((folder / "munge").exists, self.said)
        self._start("slurmctld", "-D")
        for node in range(nodes):
            self.start_node(node)
        wait_until(
            lambda: (
                self.try_command("sinfo", "--noheader", "--format=%D %t").stdout.split()
                == [str(nodes), "idle"]
            ),
            self.said,
        )

    def _write(self) -> None:
        folder, host = self.folder, socket.gethostname().split(".")[0]
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        lines = [
            "ClusterName=test",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={free_port()}",
            f"SlurmUser={getpass.getuser()}",
            f"SlurmdUser={getpass.getuser()}",
            f"AuthInfo=socket={folder / 'munge'}",
            f"StateSaveLocation={folder / 'state'}",
            f"SlurmdSpoolDir={folder}/%n",
            f"SlurmdPidFile={folder}/%n.pid",
            f"SlurmctldPidFile={folder / 'slurmctld.pid'}",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "SelectType=select/cons_tres",
            "SelectTypeParameters=CR_CPU",
            "SlurmdParameters=config_overrides",  # of processors
            "ReturnToService=2",
            "MpiDefault=none",
            f"FirstJobId={_number_of_job()}",
            *(
                f"NodeName=n{node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=8"
                for node in range(self._nodes)
            ),
            "PartitionName=all Nodes=ALL Default=YES",
        ]
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (folder / "state").mkdir()

    def _start(self, name: str, *words: str, of: str = "") -> None:
        path = program(name)
        assert path is not None
        log = (self.folder / f"{of or name}.log").open("ab")
        self._running[of or name] = subprocess.Popen(
            [path, *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=self.folder,
            env=self.environment,
        )

    def start_node(self, node: int) -> None:
        self._start("slurmd", "-D", "-N", f"n{node}", of=f"n{node}")

    def lose_node(self, node: int) -> None:
        """As when the machine of a node loses its power, and SLURM has noticed."""
        name = f"n{node}"
        tasks = [
            pid for pid in self.processes() if environment_of(pid).get("SLURMD_NODENAME") == name
        ]
        # The parent of each is another one, or a step's daemon.
        kill_all({self._running[name].pid, *tasks, *map(parent, tasks)} - {0, 1})
        self.command("scontrol", "update", f"NodeName={name}", "State=DOWN", "Reason=test")

    def command(self, *words: str) -> str:
        """What a command of SLURM answers."""
        done = self.try_command(*words)
        assert done.returncode == 0, f"{words}: {done.stderr}\n{self.said()}"
        return done.stdout.strip()

    def try_command(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            cwd=self.folder,
            env=self.environment,
            check=False,
        )

    def state(self, job: str) -> str:
        return self._of_job(job, "JobState")

    def nodes_of(self, job: str) -> str:
        return self._of_job(job, "NodeList")

    def exit_status(self, job: str) -> int:
        return int(self._of_job(job, "ExitCode").partition(":")[0])

    def _of_job(self, job: str, key: str) -> str:
        pairs = self.command("scontrol", "show", "job", job, "--oneliner").split()
        fields = (pair.partition("=") for pair in pairs)
        return next(value for name, _, value in fields if name == key)

    def task(self, number: int) -> int:
        """The process of `slipstream train` that is this task."""
        return launcher(self.processes(), "SLURM_PROCID", number)

    def processes(self) -> list[int]:
        """All processes of this SLURM.

        Steps are no children of the daemons that have started them.
        """
        return with_variable("SLURM_CONF", self.environment["SLURM_CONF"])

    def said(self) -> str:
        return "\n".join(
            f"{path.name}:\n{path.read_text(errors='replace')}"
            for path in self.folder.glob("*.log")
        )

    def close(self) -> None:
        kill_all(self.processes())
        for process in self._running.values():
            process.wait(20)


@contextlib.contextmanager
def cluster(folder: Path, nodes: int) -> Iterator[Cluster]:
    """A SLURM; at the end nothing of it is left."""
    cluster_ = Cluster(folder, nodes)
    try:
        cluster_.start()
        yield cluster_
    finally:
        cluster_.close()
