"""Messages from the coordinator to the node agents, the launchers of the other nodes."""

import msgspec

from slipstream.runtime.config import RunConfig
from slipstream.runtime.protocol.channel import Decoder
from slipstream.runtime.protocol.setup import CommonSettings
from slipstream.runtime.protocol.to_worker import Acknowledged
from slipstream.schedules.schedule import Worker

STILL_RUNNING_SECONDS = 20.0
"""Interval of the messages that tell agents that the run continues."""
SILENT_SECONDS = 600.0
"""Seconds without a message from the coordinator after which an agent ends."""


class NodeSetup(msgspec.Struct, frozen=True, tag=True):
    """Answer to `JoinNode`: settings, and the workers to start if all fits the agent's job."""

    common: CommonSettings
    shares: tuple[int, ...]
    """Number of workers of each node that take part from the start."""
    workers: tuple[Worker, ...]
    """Workers of the agent's own node, which it starts."""
    config: RunConfig
    """Configuration of node 0; the agent's must equal it, except iterations, "auto" recompute."""
    first_iteration: int
    """Iteration of the checkpoint that the agent's --resume must find; 0: none is needed."""
    restarted: bool = False
    """True if the run has continued without these workers."""
    epoch: int = 0


class NodeTaken(msgspec.Struct, frozen=True, tag=True):
    """Answer to `JoinNode` while another agent of the node is connected: ask again later."""


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    """Request to start a worker's process, unless it is alive."""

    worker: Worker
    restarted: bool = True
    """True if the run has continued without this worker."""


class KillWorker(msgspec.Struct, frozen=True, tag=True):
    """Request to kill a worker's process, as the coordinator has given the worker up."""

    worker: Worker


class StillRunning(msgspec.Struct, frozen=True, tag=True):
    """Message sent every `STILL_RUNNING_SECONDS`; an agent that gets none ends with its workers."""


class ReportsAcknowledged(msgspec.Struct, frozen=True, tag=True):
    """Acknowledgements of workers' reports, which the node agent passes on to these workers."""

    acknowledged: tuple[tuple[tuple[Worker, ...], Acknowledged], ...]


class RunEnded(msgspec.Struct, frozen=True, tag=True):
    """Message that ends a node agent: the run is over, or continues without its node."""

    error: str | None
    """Why the node ends, such as the run's error. None: all iterations are done."""
    anew: bool = False
    """True if node 0 starts from the beginning, and the agent must join again."""


ToNodeAgent = (
    NodeSetup | NodeTaken | StartWorker | KillWorker | StillRunning | ReportsAcknowledged | RunEnded
)

decode: Decoder[ToNodeAgent] = Decoder(ToNodeAgent)
