"""What the coordinator is given: the run as its launcher has set it up."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.runtime.config import LengthCosts, RunConfig
from slipstream.runtime.coordinator.planning import Rebalancer, Scheduler, WithDegraded
from slipstream.runtime.coordinator.questions import SchedulerAtSpeeds
from slipstream.runtime.coordinator.recovery import Recovery
from slipstream.runtime.coordinator.settling import Settling
from slipstream.runtime.coordinator.slow_workers import SpeedEvent
from slipstream.runtime.coordinator.stall_watch import STALL_TIMEOUT_SECONDS
from slipstream.runtime.events import CheckpointWritten
from slipstream.runtime.model.state.parts import Elements
from slipstream.runtime.processes.stop_signals import GRACE_SECONDS
from slipstream.runtime.protocol.authentication import Secret
from slipstream.runtime.protocol.failure_injection import Injection, Slowdown
from slipstream.runtime.protocol.setup import JOIN_TIMEOUT_SECONDS, Setup
from slipstream.runtime.run_folder import LeftBehind
from slipstream.schedules.schedule import Schedule, Worker

Notify = Callable[[Recovery | SpeedEvent | str], None]
"""Called with a recovery, with what was done about slow workers, or with something that went wrong and was survived;
`str` of it is one line for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run."""

    schedule: Schedule
    scheduler: Scheduler | None
    setup: Setup
    shares: Sequence[Sequence[Worker]]
    """The workers of each node that are there from the start."""
    injections: Sequence[Injection]
    out: Path
    config: RunConfig
    secret: Secret
    """What all who take part know."""
    slowdowns: Sequence[Slowdown] = ()
    at_speeds: SchedulerAtSpeeds | None = None
    """What is asked for schedules where workers are slow."""
    grace_seconds: float = GRACE_SECONDS
    """How long the run may go on once it is told to end."""
    rebalancer: Rebalancer | None = None
    """What plans where layers must move, or may."""
    with_degraded: WithDegraded | None = None
    """What plans while workers go on as half their processes."""
    settling: Settling | None = None
    """Whether and how layers move to better schedules after failures; None: they stay as long as they can."""
    layer_bytes: Sequence[int] = ()
    """What is sent of each layer of the model."""
    shared_layers: Sequence[Collection[int]] = ()
    """The layers of the model that have a parameter together, group by group (`runtime.model.layers.sharing`)."""
    length_costs: LengthCosts | None = None
    """The coefficients that samples are dealt by at first; None: they are not dealt by any."""
    whole_schedules: bool = False
    """Whether workers deal or evaluate data by the whole of each schedule."""
    elements: Sequence[Elements] = ()
    """Of each layer of the model: how many are trained, where workers keep parts of layers' optimizer states."""
    notify: Notify = field(default=lambda _: None)
    join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS
    """For all workers to be there."""
    behind: LeftBehind | None = None
    """Where another coordinator has died: its workers are looked for."""
    losses: Sequence[float] | None = None
    """Those that it has committed; None: they are not known."""
    checkpointed: CheckpointWritten | None = None
    """The last checkpoint that it has told of."""
    gone: Sequence[Worker] = ()
    """Workers that have died with it."""
    stall_timeout_seconds: float = STALL_TIMEOUT_SECONDS
    """Without a commit, after which it is said who waits for what."""
