"""Read the memory of each process on a card from its driver.

It includes memory that torch does not know of.
"""

import subprocess
import threading
from typing import Self

import torch

from slipstream.runtime.processes.fork_server import ForkServer

LOOK_SECONDS = 0.5


class CardMemory(threading.Thread):
    """Context that polls the memory of the processes of a fork server."""

    def __init__(self, fork_server: ForkServer) -> None:
        super().__init__(daemon=True)
        self._fork_server = fork_server
        self._over = threading.Event()
        self.most: dict[str, int] = {}
        """Peak bytes by name of the process."""
        self.used = 0
        """Peak bytes of all processes on all cards."""
        self.total = 0

    def run(self) -> None:
        """Poll until the context ends."""
        while not self._over.wait(LOOK_SECONDS):
            names = {pid: name for name, pid in tuple(self._fork_server.pids.items())}
            for pid, size in held_by_process().items():
                if pid in names:
                    self.most[names[pid]] = max(size, self.most.get(names[pid], 0))
            used, self.total = cards()
            self.used = max(self.used, used)

    def __enter__(self) -> Self:
        if torch.cuda.device_count():
            self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.is_alive():
            self.join()


def held_by_process() -> dict[int, int]:
    """Return the bytes of each process on all cards, by pid."""
    found: dict[int, int] = {}
    for pid, size in query("compute-apps=pid,used_memory"):
        found[int(pid)] = found.get(int(pid), 0) + int(size) * 2**20
    return found


def cards() -> tuple[int, int]:
    """Return used and total bytes of all cards."""
    lines = [(int(used), int(total)) for used, total in query("gpu=memory.used,memory.total")]
    used_mib = sum(used for used, _ in lines)
    total_mib = sum(total for _, total in lines)
    return used_mib * 2**20, total_mib * 2**20


def query(what: str) -> list[list[str]]:
    """Return the answer of nvidia-smi, line by line; empty without that program."""
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-{what}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=20,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    rows = []
    for line in done.stdout.splitlines():
        words = [word.strip() for word in line.split(",")]
        if all(word and "N/A" not in word for word in words):
            rows.append(words)
    return rows
