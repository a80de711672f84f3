"""What a worker's process is told when it is forked."""

from pathlib import Path

import msgspec

from runtime.protocol.rendezvous import Rendezvous
from schedules.schedule import Worker


class Birth(msgspec.Struct, frozen=True, tag=True):
    """A worker to be forked."""

    worker: Worker
    rendezvous: Rendezvous
    card: int | None
    """The GPU it computes on; None on a CPU."""
    out: str
    """The run's folder: parameters go to `parameters/`, whatever the process prints to `logs/`."""
    after: int = 0
    """The last order (`runtime.protocol.orders`) given before it was born."""

    @property
    def log(self) -> Path:
        """Where the process's standard output and error go."""
        return Path(self.out) / "logs" / f"worker-{self.worker}.log"
