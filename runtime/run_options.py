"""What a run is given besides a schedule and a configuration: how it deals with failures, and where it takes place."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.runtime.coordinator.decisions.questions import SchedulerAtSpeeds
from slipstream.runtime.coordinator.decisions.recovery_clock import Recovery
from slipstream.runtime.coordinator.decisions.settling import Settling
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedEvent
from slipstream.runtime.coordinator.planning.schedule_finder import Rebalancer, Scheduler
from slipstream.runtime.events import IterationObserver, Observer
from slipstream.runtime.model.checkpoints.checkpoint import Checkpoint
from slipstream.runtime.processes.launchers import ALONE, LocalProcess
from slipstream.runtime.processes.process_manager import NodeFailure, Return
from slipstream.runtime.processes.stop_signals import GRACE_SECONDS
from slipstream.runtime.processes.worker_start import COORDINATOR_TIMEOUT_SECONDS
from slipstream.runtime.protocol.authentication import Secret
from slipstream.runtime.protocol.failure_injection import Injection, Slowdown
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.protocol.setup import JOIN_TIMEOUT_SECONDS, VERIFY_EVERY
from slipstream.schedules.schedule import Worker

STALL_TIMEOUT_SECONDS = 300.0
"""One op takes seconds."""
Notify = Callable[[Recovery | SpeedEvent | str], None]
"""Called with a recovery, with what was done about slow workers, or with something that went wrong and was survived;
`str` of it is one line for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resilience:
    """How a run deals with failures."""

    scheduler: Scheduler | None = None
    """Gives the schedule for other failures, in a thread of its own; None: the first failure ends the run."""
    at_speeds: SchedulerAtSpeeds | None = None
    """Gives the schedule where workers are slow, and for failures then; None: they are told of, and that is all."""
    heartbeat_timeout_seconds: float = 5.0
    """A worker that shows no sign of life for so long is given up."""
    join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS
    """How long workers are waited for before the first iteration."""
    stall_timeout_seconds: float = STALL_TIMEOUT_SECONDS
    """When nothing has been committed for so long, it is said who waits for what."""
    coordinator_timeout_seconds: float = COORDINATOR_TIMEOUT_SECONDS
    """How long workers hold still for another node 0 when this one has died; 0: they end."""
    fetch_bytes_per_second: float | None = None
    """How fast a worker that comes in is sent layers by each of the others while they train; None: as fast as it goes.
    """
    checkpoint_every: int | None = 0
    """Iterations from one checkpoint to the next; 0: none; None: such that they cost less than 1 % of the time."""
    verify_every: int = VERIFY_EVERY
    """Iterations from one comparison of workers' copies of parameters and optimizer state to the next; 0: they are
    compared where an order begins, a checkpoint is written, and before the last step."""
    resume: Checkpoint | None = None
    """Where to go on from."""
    rebalancer: Rebalancer | None = None
    """Gives the schedule where layers must move, since fewer workers live than there are stages, or may move; None:
    then the run ends."""
    settling: Settling | None = None
    """Whether and how layers move to better schedules after failures; None: they stay as long as they can."""
    injections: tuple[Injection, ...] = ()
    """Failures on purpose."""
    slowdowns: tuple[Slowdown, ...] = ()
    """Workers that are slow on purpose."""
    node_failures: tuple[NodeFailure, ...] = ()
    """Nodes whose workers all fail at once, on purpose."""
    returns: tuple[Return, ...] = ()
    """Workers to start again once they are dead."""
    faults_per_hour: int = 0
    """How often within an hour a worker that crashes is started again, each time after a longer pause; a node has
    twice as many. 0: who is dead stays out, but for `returns`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Where a run takes place, and what is told about it."""

    nodes: int = 1
    rendezvous: Rendezvous | None = None
    """Where node 0 listens; None: on loopback."""
    announce: Callable[[Rendezvous], None] = lambda _: None
    """Called with the address once node 0 listens there."""
    local: LocalProcess = ALONE
    """Which of the processes that share this machine this is."""
    topology: Sequence[Collection[Worker]] = ()
    """The workers of each machine, where the job says so; else the nodes are what they are started as."""
    secret: Secret | None = None
    """What all nodes know (`runtime.protocol.authentication`); None: there is one node, and it makes one."""
    traced: int = 3
    """How many iterations, the last ones, `trace.json` holds."""
    force: bool = False
    """Remove what another run has left in the folder, instead of refusing to write there."""
    again: bool = False
    """Do its iterations again where it has saved nothing, neither a checkpoint nor parameters."""
    grace_seconds: float = GRACE_SECONDS
    """How long the run may go on after SIGTERM or Ctrl-C: it ends at the next iteration, with a checkpoint."""
    notify: Notify = lambda _: None
    """Called with what people should know. This and the next two are called between messages of workers, which wait
    meanwhile; `slipstream train` prints in a thread."""
    observe: Observer = lambda _: None
    """Called with each event of the run (`runtime.events`)."""
    observe_iteration: IterationObserver | None = None
    """Called with loss, gradient norm, learning rate and speed of each iteration once it is committed
    (`runtime.events.Metrics`). After going back to a checkpoint, iterations are told again."""
    fault_free_seconds: float | None = None
    """Planned period with all workers, where the first schedule is not of all of them; None: nobody has planned it."""
    tensorboard: Path | None = None
    """Folder for TensorBoard's files; None: there are none."""
    peak_flops: float | None = None
    """What a worker's device does at its best where `[training] peak_flops` is silent; None: not known."""
