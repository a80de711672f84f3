"""Messages from the coordinator to the node agents: the launchers of the other nodes (`runtime.node_agent`)."""

from typing import Literal

import msgspec

from slipstream.runtime.config import RunConfig
from slipstream.runtime.protocol.channel import Decoder
from slipstream.runtime.protocol.to_worker import Acknowledged
from slipstream.runtime.replay.transport import Transport
from slipstream.schedules.schedule import Worker

STILL_RUNNING_SECONDS = 20.0
SILENT_SECONDS = 600.0
"""As long as a worker waits for an acknowledgement: a node 0 that was stopped for less goes on."""


class NodeSetup(msgspec.Struct, frozen=True, tag=True):
    """The answer to `JoinNode`: what to start. The agent checks that it fits its machine, and starts the workers."""

    shares: tuple[int, ...]
    """The number of workers of each node that are there from the start."""
    device: Literal["cpu", "cuda"]
    transport: Transport
    workers: tuple[Worker, ...]
    """Those of this node."""
    config: RunConfig
    """Node 0's: the agent compares it with its own job file, which is what it runs."""
    first_iteration: int
    """That of the checkpoint to go on from, which the agent's own command line names; 0: from the start."""
    restarted: bool = False
    """Whether the run has been going on without them."""
    epoch: int = 0
    """Of the coordinator, as in `runtime.protocol.setup.Setup`."""


class NodeTaken(msgspec.Struct, frozen=True, tag=True):
    """The other answer to `JoinNode`: that node is there already, or has not been missed yet. Ask again later."""


class StartWorker(msgspec.Struct, frozen=True, tag=True):
    """When a dead worker is to come back: start its process, unless it lives."""

    worker: Worker
    restarted: bool = True
    """Whether the run has been going on without it."""


class KillWorker(msgspec.Struct, frozen=True, tag=True):
    """When a worker has been given up: kill its process, if it lives."""

    worker: Worker


class StillRunning(msgspec.Struct, frozen=True, tag=True):
    """Sent every `STILL_RUNNING_SECONDS`: an agent that hears nothing for long ends its workers, and itself."""


class GoOn(msgspec.Struct, frozen=True, tag=True):
    """The answer to `Gathered`, and what acknowledges reports later: the agent passes it on to the workers."""

    acknowledged: tuple[tuple[tuple[Worker, ...], Acknowledged], ...]


class RunEnded(msgspec.Struct, frozen=True, tag=True):
    """When the run is over: the agent ends its workers, closes the connection, and ends with this result."""

    error: str | None
    """None: all iterations are done."""
    anew: bool = False
    """Whether node 0 begins the run anew, and is to be joined again."""


ToNodeAgent = NodeSetup | NodeTaken | StartWorker | KillWorker | StillRunning | GoOn | RunEnded

decode: Decoder[ToNodeAgent] = Decoder(ToNodeAgent)
