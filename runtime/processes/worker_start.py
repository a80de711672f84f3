"""What a worker's process is given when it is started."""

from pathlib import Path

import msgspec

from slipstream.runtime.config import RunConfig
from slipstream.runtime.processes.fork_server_messages import ProcessSpec
from slipstream.runtime.protocol.authentication import Secret
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.schedules.schedule import Worker

COORDINATOR_TIMEOUT_SECONDS = 60.0
"""Long enough to start a process by hand that imports torch."""


HUGGING_FACE = "slipstream.runtime.model.layers.hugging_face.model"
TORCHTITAN = "slipstream.runtime.model.layers.torchtitan.model"


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a node's own job file and command line say. Its workers get it from their launcher, not over a network."""

    config: RunConfig
    secret: Secret
    """What all who take part in the run know."""
    out: str
    """The run's folder: parameters go to `parameters/`, what the process prints to `logs/`, checkpoints to
    `checkpoints/`."""
    resume: str | None = None
    """Folder of the checkpoint to start from."""
    coordinator_timeout_seconds: float = COORDINATOR_TIMEOUT_SECONDS
    """How long to hold still for another coordinator when that of the run is gone."""
    reports: str | None = None
    """Where this node's agent gathers reports (`protocol.node_reports`); None: each goes to node 0 itself."""


class WorkerSpec(msgspec.Struct, frozen=True):
    """A worker to be started."""

    worker: Worker
    coordinator: Rendezvous
    """Where the coordinator listens."""
    card: int | None
    """The GPU it computes on; None on a CPU."""
    settings: NodeSettings
    restarted: bool = False
    """Whether the run has been going on without it."""
    rank: int = 0
    """Which of the worker's processes this is, where it is several."""

    def process(self) -> ProcessSpec:
        """The request to the fork server, over a socket that nobody else reads: the secret is in no command line and no
        environment. A worker that comes back appends to its log."""
        return ProcessSpec(process_name(self.worker, self.rank), "slipstream.runtime.worker.main:main",
                           msgspec.json.encode(self).decode(), str(self.log), append=self.restarted,
                           imports=self._imports)

    @property
    def _imports(self) -> tuple[str, ...]:
        """What takes seconds to import, and is imported once for all."""
        model = self.settings.config.model
        return (*((HUGGING_FACE,) if model.hugging_face is not None else ()),
                *((TORCHTITAN,) if model.torchtitan is not None else ()))

    @property
    def log(self) -> Path:
        """Where the process's standard output and error go."""
        of_rank = f"-rank-{self.rank}" if self.rank else ""
        return Path(self.settings.out) / "logs" / f"worker-{self.worker}{of_rank}.log"


def process_name(worker: Worker, rank: int) -> str:
    """What the fork server calls a worker's process: all that is known of one whose launcher has died."""
    return f"{worker}/{rank}" if rank else str(worker)


def worker_named(name: str) -> Worker:
    """Whose process a name is."""
    return Worker.parse(name.partition("/")[0])
