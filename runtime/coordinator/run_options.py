"""Say what a run is asked for: what to train, where, and with which failures."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from slipstream.runtime.checkpoints.checkpoint import Checkpoint
from slipstream.runtime.config import RunConfig
from slipstream.runtime.coordinator.decisions.effects import SchedulerAtSpeeds
from slipstream.runtime.coordinator.decisions.rebalancing import Rebalancing
from slipstream.runtime.coordinator.decisions.recoveries import Recovery
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedEvent
from slipstream.runtime.coordinator.planning.schedule_finder import Rebalancer, Scheduler
from slipstream.runtime.events import IterationObserver, Observer
from slipstream.runtime.processes.launch_environment import ONLY_PROCESS, LocalProcess
from slipstream.runtime.processes.process_manager import NodeFailure, Return
from slipstream.runtime.processes.stop_signals import GRACE_SECONDS
from slipstream.runtime.processes.worker_start import COORDINATOR_TIMEOUT_SECONDS
from slipstream.runtime.protocol.authentication import Secret
from slipstream.runtime.protocol.failure_injection import Injection, Slowdown
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.protocol.setup import JOIN_TIMEOUT_SECONDS, WorkerResilience
from slipstream.schedules.schedule import Schedule, Worker

STALL_TIMEOUT_SECONDS = 300.0
"""Default for `Resilience.stall_timeout_seconds`; long, because one op takes seconds."""
Notify = Callable[[Recovery | SpeedEvent | str], None]
"""Function that is called with each message for users; a `str` is one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resilience(WorkerResilience):
    """Options for how a run deals with failures; those of `WorkerResilience` go to workers."""

    scheduler: Scheduler | None = None
    """Function that returns the schedule without failed workers; None: only `rebalancer` does."""
    at_speeds: SchedulerAtSpeeds | None = None
    """Function that returns the schedule at given speeds; None: slow workers are reported only."""
    join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS
    """Seconds to wait for all workers before the first iteration."""
    stall_timeout_seconds: float = STALL_TIMEOUT_SECONDS
    """Seconds without commit or order after which the run reports what each worker does."""
    coordinator_timeout_seconds: float = COORDINATOR_TIMEOUT_SECONDS
    """Seconds that workers wait for another node 0 after its death. 0: they end at once."""
    resume: Checkpoint | None = None
    """Checkpoint from which the run continues; None: it starts with iteration 0."""
    rebalancer: Rebalancer | None = None
    """Planner that moves layers; None: the run ends if workers are fewer than stages."""
    settling: Rebalancing | None = None
    """Rules for moving layers to better schedules; None: layers stay as long as possible."""
    injections: tuple[Injection, ...] = ()
    """Failures to inject, for rehearsals."""
    slowdowns: tuple[Slowdown, ...] = ()
    """Workers to slow down, for rehearsals."""
    node_failures: tuple[NodeFailure, ...] = ()
    """Nodes whose workers all fail at the same time, for rehearsals."""
    returns: tuple[Return, ...] = ()
    """Workers to start again after they died."""
    faults_per_hour: int = 0
    """Restarts per hour of a crashing worker, twice as many for a node. 0: only `returns`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """Options for where a run takes place and what it reports."""

    nodes: int = 1
    rendezvous: Rendezvous | None = None
    """Address at which node 0 listens; None: a free port of loopback."""
    announce: Callable[[Rendezvous], None] = lambda _: None
    """Function that is called with the address when node 0 listens there."""
    local: LocalProcess = ONLY_PROCESS
    """Number of this launcher among those on its machine, and how many there are."""
    topology: Sequence[Collection[Worker]] = ()
    """Workers of each machine, from the job; empty: each node has consecutive workers."""
    secret: Secret | None = None
    """Secret that all nodes share; None: there is one node, which creates it."""
    traced: int = 3
    """Number of last iterations whose ops are recorded in `trace.json`."""
    force: bool = False
    """True to remove the files of another run from the folder."""
    again: bool = False
    """True to start the folder's run again, which has saved no checkpoint and no parameters."""
    grace_seconds: float = GRACE_SECONDS
    """Seconds that the run may take to end after SIGTERM or Ctrl-C, with a checkpoint."""
    notify: Notify = lambda _: None
    """Function that is called with messages for users; workers wait meanwhile."""
    observe: Observer = lambda _: None
    """Function that is called with each event of the run (`runtime.events`)."""
    observe_iteration: IterationObserver | None = None
    """Function that is called with the `Metrics` of each iteration, again if it is repeated."""
    fault_free_seconds: float | None = None
    """Planned seconds per iteration with all workers, recorded if the first schedule has fewer."""
    tensorboard: Path | None = None
    """Folder for TensorBoard's files; None: none are written."""
    prometheus: Path | None = None
    """File for Prometheus' textfile collector; None: none is written."""
    peak_flops: float | None = None
    """Peak operations per second of a device, used if the job does not give them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """All that `runtime.launch.run` is asked for: what to train, by which schedule, and how."""

    schedule: Schedule
    """Schedule with which the run begins."""
    config: RunConfig
    out: Path
    """Folder of the run."""
    options: RunOptions = RunOptions()
    resilience: Resilience = Resilience()
