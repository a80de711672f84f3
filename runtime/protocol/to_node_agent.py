"""Messages from the coordinator to the node agents, the launchers of the other nodes."""

import msgspec

from slipstream.runtime.config import RunConfig
from slipstream.runtime.protocol.channel import Decoder
from slipstream.runtime.protocol.setup import CommonSettings
from slipstream.runtime.protocol.to_worker import Acknowledged
from slipstream.schedules.schedule import Worker

STILL_RUNNING_SECONDS = 20.0
SILENT_SECONDS = 600.0
"""Time without a message after which an agent ends, as long as a worker's wait for an
acknowledgement."""


class NodeSetup(msgspec.Struct, frozen=True, tag=True):
    """Answer to `JoinNode`: the workers to start, once the agent has checked that they fit."""

    common: CommonSettings
    shares: tuple[int, ...]
    """Number of workers of each node that take part from the start."""
    workers: tuple[Worker, ...]
    """Workers of the agent's own node, which it starts."""
    config: RunConfig
    """Configuration of node 0, which must match the agent's own, used by its workers."""
    first_iteration: int
    """Iteration to resume from, of the checkpoint that the agent's own command line names. Or 0."""
    restarted: bool = False
    """True if the run has continued without these workers."""
    epoch: int = 0
    """Number of the coordinator that sends this, as in `WorkerSetup.epoch`."""


class NodeTaken(msgspec.Struct, frozen=True, tag=True):
    """Answer to `JoinNode` that makes the agent ask again later. A node of this number is
    connected, or its loss has not been noticed."""


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    """Request to start a worker's process, unless it is alive."""

    worker: Worker
    restarted: bool = True
    """True if the run has continued without this worker."""


class KillWorker(msgspec.Struct, frozen=True, tag=True):
    """Request to kill the process of a worker that has been given up."""

    worker: Worker


class StillRunning(msgspec.Struct, frozen=True, tag=True):
    """Message sent every `STILL_RUNNING_SECONDS`, without which an agent ends with its workers."""


class ReportsAcknowledged(msgspec.Struct, frozen=True, tag=True):
    """Answer to `GatheredReports`, and later acknowledgements, which the agent passes on."""

    acknowledged: tuple[tuple[tuple[Worker, ...], Acknowledged], ...]


class RunEnded(msgspec.Struct, frozen=True, tag=True):
    """Message that the run is over, or continues without this node. The agent ends its workers,
    closes the connection, and ends with this result."""

    error: str | None
    """Error that ended the run. None: all iterations are done."""
    anew: bool = False
    """True if node 0 starts from the beginning, and the agent must join again."""


ToNodeAgent = NodeSetup | NodeTaken | StartWorker | KillWorker | StillRunning | ReportsAcknowledged | RunEnded

decode: Decoder[ToNodeAgent] = Decoder(ToNodeAgent)
