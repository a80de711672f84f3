"""What the coordinator's decisions share: the state of the run, and those who plan, watch and write for it.

`coordinator` changes the state as events come; `next_order` and `boundary` decide by it; `orders` gives orders and
changes it with them.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from slipstream.runtime.coordinator.checkpoint_timer import CheckpointTimer
from slipstream.runtime.coordinator.commit_log import CommitLog
from slipstream.runtime.coordinator.cost_fit import CostFit
from slipstream.runtime.coordinator.event_log import EventLog
from slipstream.runtime.coordinator.join_planning import JoinPlanner, Moves
from slipstream.runtime.coordinator.layer_moves import layers_without_holder, plan_moves
from slipstream.runtime.coordinator.lost_workers import LostWorkers
from slipstream.runtime.coordinator.part_moves import Partition
from slipstream.runtime.coordinator.planning import ScheduleService
from slipstream.runtime.coordinator.recovery import RecoveryClock
from slipstream.runtime.coordinator.settling import Settler
from slipstream.runtime.coordinator.slow_workers import SlowWorkers, SpeedEvent
from slipstream.runtime.failure_domains import FailureDomains
from slipstream.runtime.model.state.parts import CutFor
from slipstream.runtime.protocol.to_coordinator import Kept, Ran
from slipstream.runtime.protocol.to_worker import Fetch, Leave, NewCosts, ToWorker
from slipstream.runtime.replay.placement import Placement
from slipstream.schedules.schedule import Grid, Schedule, Worker


class Send(Protocol):
    """Sends a message to a worker; nothing happens where that is gone."""

    def __call__(self, worker: Worker, message: ToWorker) -> None:
        """Send."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listeners:
    """Who is told what the coordinator finds out and decides."""

    events: EventLog = field(default_factory=lambda: EventLog(None))
    note: Callable[[str], None] = lambda _: None
    """A line about something that was survived."""
    speed: Callable[[SpeedEvent], None] = lambda _: None
    """What was found out about the workers' speeds."""
    went_back: Callable[[int], None] = lambda _: None
    """Iterations from this one on are no longer committed, because layers were lost."""


@dataclass(slots=True)
class RunState:
    """The present order, and who takes part in it or waits for the next."""

    current: Schedule
    """Of the present order; before the first one, of that."""
    members: set[Worker]
    phase: Literal["rejoining", "gathering", "training", "finishing", "left"] = "gathering"
    number: int = 0
    """Of the last order."""
    began: int = 0
    """Its first iteration."""
    ended: bool = False
    """Whether `EndOrder` has been sent."""
    outdated: bool = False
    """Whether a member was lost after the order to finish, which names it."""
    stop_before: int | None = None
    """The iteration before which all members stop, and that before whose step they save, where these are chosen."""
    save_before: int | None = None
    new_costs: NewCosts | None = None
    """What all are told with what acknowledges the iteration `LEAD` before its first."""
    stopping: bool = False
    """Whether the run is to end at the next iteration, with a checkpoint."""
    without_microbatches: frozenset[Worker] = frozenset()
    """Members that hold layers of which others run all micro-batches."""
    unanswered: list[Ran] = field(default_factory=list)
    """Reports of this order that wait for those of `without_microbatches`."""
    ready: set[Worker] = field(default_factory=set)
    """Workers that have sent `Ready` and take part in no order yet."""
    paused: set[Worker] = field(default_factory=set)
    finished: set[Worker] = field(default_factory=set)
    leaving: set[Worker] = field(default_factory=set)
    """Members that were told to end by somebody else, and stay until the others can go on without them."""
    holds: dict[Worker, frozenset[int]] = field(default_factory=dict)
    """The layers of each member that has paused, or is told to finish."""
    kept: dict[Worker, Kept] = field(default_factory=dict)
    """The same of what they keep of optimizer states, where workers keep parts."""
    cut_for: CutFor = field(default_factory=dict)
    """Of the present order, the ranges whose parts stay as they are, as some have gone who keep them."""
    addresses: dict[Worker, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    """Where each rank of a worker sends layers from."""
    stand_for: dict[Worker, int] = field(default_factory=dict)
    """For how many ranks each process does of a worker."""
    contents: dict[Worker, deque[str]] = field(default_factory=dict)
    """By their digests, the contents of schedules that each worker has."""

    @property
    def grid(self) -> Grid:
        """The job's shape."""
        return self.current.grid

    @property
    def everyone(self) -> set[Worker]:
        """Who takes part, or could."""
        return self.members | self.ready

    @property
    def all_paused(self) -> bool:
        """Whether all members have."""
        return len(self.paused) >= len(self.members) and self.paused >= self.members

    def forget(self, worker: Worker) -> None:
        """A worker takes no part any more."""
        for group in (self.members, self.ready, self.paused, self.finished, self.leaving):
            group.discard(worker)
        self.contents.pop(worker, None)
        self.holds.pop(worker, None)
        self.kept.pop(worker, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorContext:
    """One run's state, and what its decisions ask and tell."""

    state: RunState
    iterations: range
    placement: Placement
    """Where the schedules' layers lie in the model."""
    send: Send
    log: CommitLog
    schedules: ScheduleService
    joins: JoinPlanner
    slow: SlowWorkers
    settler: Settler | None
    """Decides whether layers move to a better schedule; None: they stay where they are."""
    checkpoints: CheckpointTimer
    recovery: RecoveryClock
    lost: LostWorkers
    listeners: Listeners
    domains: FailureDomains
    partition: Partition | None = None
    """How optimizer states are cut, where workers keep parts of them."""
    costs: CostFit | None = None
    """Follows what samples cost; None: they are not dealt by coefficients."""
    whole_schedules: bool = True
    """Whether workers need the whole of each schedule: to deal or evaluate data by it."""

    def lost_layers(self, workers: Collection[Worker]) -> list[int]:
        """The layers that nobody of these has, or of whose optimizer state nobody has all."""
        state = self.state
        lost = layers_without_holder({one: held for one, held in state.holds.items() if one in workers},
                                     self.placement.layers)
        if lost or self.partition is None:
            return lost
        return self.partition.lost({one: kept for one, kept in state.kept.items() if one in workers})

    @property
    def events(self) -> EventLog:
        """Is told what happens."""
        return self.listeners.events

    def held_now(self) -> Mapping[Worker, frozenset[int]]:
        """The layers of each member under the present schedule."""
        return {worker: layers for worker, layers in self.placement.held_by(self.state.current).items()
                if worker in self.state.members}

    def fetched_for(self, schedule: Schedule) -> Moves:
        """What workers are to fetch for a schedule, while all train by the present one."""
        held = self.held_now()
        if self.partition is None:
            return plan_moves(self.placement.held_by(schedule), held)
        return self.partition.fetched(schedule, self.state.current, held, self.state.cut_for)

    def tell(self, workers: Collection[Worker], message: ToWorker) -> None:
        """Send to several."""
        for worker in sorted(workers):
            self.send(worker, message)

    def tell_all(self, message: Fetch | Leave) -> None:
        """Send to all that live, also to those left out."""
        self.tell(self.state.everyone | self.slow.left_out, message)
