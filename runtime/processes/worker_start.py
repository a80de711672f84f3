"""What a worker's process is given when it is started."""

from pathlib import Path

import msgspec

from runtime.processes.fork_server import ProcessSpec
from runtime.protocol.rendezvous import Rendezvous
from schedules.schedule import Worker


class WorkerSpec(msgspec.Struct, frozen=True):
    """A worker to be started."""

    worker: Worker
    coordinator: Rendezvous
    """Where the coordinator listens."""
    card: int | None
    """The GPU it computes on; None on a CPU."""
    out: str
    """The run's folder: parameters go to `parameters/`, what the process prints to `logs/`."""
    restarted: bool = False
    """Whether the run has been going on without it."""

    def process(self) -> ProcessSpec:
        """The request to the fork server. A worker that comes back appends to its log."""
        return ProcessSpec(str(self.worker), "runtime.worker.main:main", msgspec.json.encode(self).decode(),
                           str(self.log), append=self.restarted)

    @property
    def log(self) -> Path:
        """Where the process's standard output and error go."""
        return Path(self.out) / "logs" / f"worker-{self.worker}.log"
