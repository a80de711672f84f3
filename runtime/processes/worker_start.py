"""Describe what a worker's process is started with."""

from pathlib import Path

import msgspec

from slipstream.runtime.config import RunConfig
from slipstream.runtime.processes.fork_server_messages import ProcessSpec
from slipstream.runtime.protocol.authentication import Secret
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.schedules.schedule import Worker

COORDINATOR_TIMEOUT_SECONDS = 60.0
"""Time to wait for another coordinator: enough to start one by hand that imports torch."""


HUGGING_FACE = "slipstream.runtime.models.hugging_face.model"
TORCHTITAN = "slipstream.runtime.models.torchtitan.model"


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings from a node's own job file and command line, not sent over a network."""

    config: RunConfig
    secret: Secret
    """Secret that all participants of the run share."""
    out: str
    """Folder of the run, with `parameters/`, output of processes in `logs/`, and `checkpoints/`."""
    resume: str | None = None
    """Folder of the checkpoint to start from; None: the run begins with iteration 0."""
    coordinator_timeout_seconds: float = COORDINATOR_TIMEOUT_SECONDS
    """Time that workers wait for another coordinator when the run's coordinator is gone."""
    reports: str | None = None
    """Address at which this node's agent collects reports; None: they go to node 0."""


class WorkerSpec(msgspec.Struct, frozen=True):
    """What one process of a worker is started with."""

    worker: Worker
    coordinator: Rendezvous
    """Address at which the coordinator listens."""
    card: int | None
    """Index of the GPU to compute on. None: compute on the CPU."""
    settings: NodeSettings
    restarted: bool = False
    """True if this worker was lost and the run has continued without it."""
    rank: int = 0
    """Rank of this process within the worker, if the worker has several processes."""

    def build_process_spec(self) -> ProcessSpec:
        """Return the request, which contains the secret, for the fork server to start this."""
        return ProcessSpec(
            format_process_name(self.worker, self.rank),
            "slipstream.runtime.worker.main_thread:main",
            msgspec.json.encode(self).decode(),
            str(self.log_path),
            append=self.restarted,
            imports=self._slow_imports,
        )

    @property
    def _slow_imports(self) -> tuple[str, ...]:
        """Modules that take seconds to import, which the fork server imports once for all."""
        model, modules = self.settings.config.model, list[str]()
        if model.hugging_face is not None:
            modules.append(HUGGING_FACE)
        if model.torchtitan is not None:
            modules.append(TORCHTITAN)
        return tuple(modules)

    @property
    def log_path(self) -> Path:
        """Path of the file for the process's standard output and error."""
        of_rank = f"-rank-{self.rank}" if self.rank else ""
        return Path(self.settings.out) / "logs" / f"worker-{self.worker}{of_rank}.log"


def format_process_name(worker: Worker, rank: int) -> str:
    """Return the name of a worker's process, which `parse_process_name` reads."""
    return f"{worker}/{rank}" if rank else str(worker)


def parse_process_name(name: str) -> Worker:
    """Return the worker that a process belongs to, by its name in the fork server."""
    return Worker.parse(name.partition("/")[0])
