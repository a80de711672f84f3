"""Runs started by several agents of torchrun on this machine.

Parts of them can be killed.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.distributed import run

from tests.patience import HEARTBEATS
from tests.runtime.launchers import Launcher
from tests.runtime.running import alive, below, children, command_environment, free_port

START_SECONDS = 240.0
"""Each process imports torch, and a busy machine has few cores."""


def torchrun(folder: str, *words: str) -> None:
    """Do what `python -m torch.distributed.run` does, in an agent's process.

    Torch is imported there already.
    """
    os.chdir(folder)
    os.environ.update(command_environment())
    run.main(list(words))


class Agents:
    """One `torchrun` for each machine that is played, all on this one.

    Each starts one launcher.
    """

    def __init__(
        self, folder: Path, job: Path, count: int, restarts: int, words: Sequence[str]
    ) -> None:
        self.out = folder / "out"
        self._folder = folder
        port = free_port()
        for agent in range(count):
            self.log(agent).touch()  # each process opens its own, a moment after it is started
        train = [
            "-m",
            "slipstream",
            "train",
            str(job),
            "--out",
            str(self.out),
            "--resume",
            str(self.out),
            "--method",
            "greedy",
            "--coordinator-timeout",
            "240" if restarts else "2",
            *HEARTBEATS,
            *words,
        ]
        self.processes = [
            Launcher(
                f"{__name__}:torchrun",
                folder,
                "--nnodes",
                count,
                "--nproc-per-node",
                1,
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                f"127.0.0.1:{port}",
                "--rdzv-id",
                "test",
                "--max-restarts",
                restarts,
                "--rdzv-conf",
                f"is_host={int(agent == 0)}",
                "--local-addr",
                "127.0.0.1",
                *train,
                log=self.log(agent),
            )
            for agent in range(count)
        ]
        self.launchers: list[dict[int, int]] = []
        """Of each agent, process id by number of the node."""

    def log(self, agent: int) -> Path:
        return self._folder / f"agent-{agent}.log"

    def said(self) -> str:
        return "\n".join(
            f"agent {agent}:\n{self.log(agent).read_text()}" for agent in range(len(self.processes))
        )

    def wait_for_losses(self, count: int, seconds: float = START_SECONDS) -> None:
        """Wait until so many iterations are committed.

        Raises AssertionError when the run ends before.
        """
        deadline = time.monotonic() + seconds
        while len(losses_in_lines(self.out)) < count:
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)

    def wait_for(self, text: str, seconds: float = START_SECONDS) -> None:
        """Until some agent or launcher has said this."""
        deadline = time.monotonic() + seconds
        while text not in self.said():
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.2)

    def find_launchers(self) -> None:
        self.launchers = []
        for agent in self.processes:
            pids = [pid for pid in children(agent.pid) if "RANK" in environment_of(pid)]
            self.launchers.append({int(environment_of(pid)["RANK"]): pid for pid in pids})

    def agent_of(self, node: int) -> int:
        return next(agent for agent, launchers in enumerate(self.launchers) if node in launchers)

    def launcher(self, node: int) -> int:
        return self.launchers[self.agent_of(node)][node]

    def everything(self) -> list[int]:
        """All processes that are below the agents."""
        return [process for agent in self.processes for process in below(agent.pid)]

    def wait(self, seconds: float) -> list[int | None]:
        """The exit status of each agent; None where it has not ended by then."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and any(agent.poll() is None for agent in self.processes):
            time.sleep(0.1)
        return [agent.poll() for agent in self.processes]


@contextlib.contextmanager
def agents(folder: Path, job: Path, count: int, *words: str, restarts: int = 0) -> Iterator[Agents]:
    """Agents of torchrun; at the end nothing of them is left."""
    agents_ = Agents(folder, job, count, restarts, words)
    try:
        yield agents_
    finally:
        pids = agents_.everything()
        for process in agents_.processes:
            process.kill()
            process.wait(20)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                if alive(pid):
                    os.kill(pid, 9)


def losses_in_lines(out: Path) -> list[bytes]:
    path = out / "losses.jsonl"
    return path.read_bytes().splitlines() if path.exists() else []


def environment_of(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError):
        pairs = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return dict(pair.decode(errors="replace").split("=", 1) for pair in pairs if b"=" in pair)
    return {}
