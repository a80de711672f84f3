"""State of a run: all that decisions depend on. It is immutable; `Step` builds the next one for each event."""

from collections.abc import Callable, Collection, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.checkpoint_timer import CheckpointTimer
from slipstream.runtime.coordinator.decisions.commit_log import CommitLog
from slipstream.runtime.coordinator.decisions.effects import Effects
from slipstream.runtime.coordinator.decisions.failover import Rejoining
from slipstream.runtime.coordinator.decisions.join_planning import Joins
from slipstream.runtime.coordinator.decisions.journal import NO_JOURNAL, Journal
from slipstream.runtime.coordinator.decisions.lost_workers import Loss
from slipstream.runtime.coordinator.decisions.part_moves import Partition
from slipstream.runtime.coordinator.decisions.persistent_map import PersistentMap
from slipstream.runtime.coordinator.decisions.questions import Prepared, Question
from slipstream.runtime.coordinator.decisions.recovery_clock import RecoveryClock
from slipstream.runtime.coordinator.decisions.settling import Cost, Settler
from slipstream.runtime.coordinator.decisions.slow_workers import SlowWorkers, SpeedEvent, watched
from slipstream.runtime.failure_domains import ALONE, FailureDomains
from slipstream.runtime.model.state.parts import CutFor
from slipstream.runtime.protocol.to_coordinator import Kept, Ran
from slipstream.runtime.protocol.to_worker import Addresses, Move
from slipstream.runtime.replay.placement import Placement
from slipstream.schedules.layers import layers_in
from slipstream.schedules.schedule import Grid, Schedule, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Settings and functions that stay the same during a whole run."""

    first: Schedule
    """Schedule for the workers that are started with the run."""
    iterations: range
    partition: Partition
    """Planner of the partition of each layer's state among its holders."""
    prepared: Callable[[Schedule], Prepared]
    """Pure function that turns a schedule into the form that orders send; it caches its last results."""
    settles: Cost | None = None
    """Cost of moving layers to a better schedule; None if layers stay where they are."""
    mtbf_seconds: float | None = None
    """Mean time between failures, as in `Settling.mtbf_seconds`."""
    automatic_checkpoints: bool = False
    """True if the coordinator chooses when checkpoints are written; otherwise the workers know it themselves."""
    plans_for_speeds: bool = False
    """True if a planner is configured that makes schedules for slow workers."""
    domains: FailureDomains = ALONE
    """Failure domains: groups of workers that fail together."""
    whole_schedules: bool = True
    """True if each member is also sent the whole of each schedule, to deal samples or to evaluate by it."""

    @property
    def placement(self) -> Placement:
        """Placement of the schedules' layers in the model."""
        return self.partition.placement


class Present(msgspec.Struct, frozen=True):
    """Worker that is connected and ready, whether or not it takes part in the current order."""

    addresses: tuple[tuple[str, int], ...]
    """Address of each rank of the worker from which other workers fetch layers."""
    contents: tuple[str, ...] = ()
    """Digests of the schedule contents that the worker already has."""


class Gathering(msgspec.Struct, frozen=True):
    """Phase before the first order, in which the coordinator waits for all of its members."""


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """Phase in which the current order is an order to train."""

    began: int = 0
    """First iteration of the current order."""
    ended: bool = False
    """True if `EndOrder` has been sent."""
    started: PersistentMap[Worker, None] = PersistentMap()
    """Members that have begun their first op in this order."""
    stop_before: int | None = None
    """Iteration before which all members stop; None if none is chosen."""
    save_before: int | None = None
    """Iteration before whose optimizer step all members save a checkpoint; None if none is chosen."""
    without_microbatches: frozenset[Worker] = frozenset()
    """Members that hold layers but run no micro-batch, because other workers run all micro-batches on these layers."""
    unanswered: tuple[Ran, ...] = ()
    """Reports to acknowledge when the members of `without_microbatches` have reported the same iteration."""


class Finishing(msgspec.Struct, frozen=True):
    """Phase in which the current order is an order to write the final parameters or a checkpoint."""

    finished: PersistentMap[Worker, None] = PersistentMap()
    """Members that have reported `Finished`."""
    outdated: bool = False
    """True if a member that the order names was lost after it was sent."""


class Left(msgspec.Struct, frozen=True):
    """Final phase: all workers have been told to leave."""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run at one moment: the current order, the workers that exist, and what is known about them."""

    current: Schedule
    """Schedule of the current order; before the first order, the schedule that the first order will use."""
    members: frozenset[Worker]
    """Live members of the current order; before the first order, the workers that it waits for."""
    phase: Gathering | Rejoining | Training | Finishing | Left = Gathering()
    order: int = 0
    """Number of the last order. Orders are numbered from 1; 0 means that none has been given."""
    live: PersistentMap[Worker, Present] = PersistentMap()
    """All connected workers: members, those that wait for the next order, and those left out as slow."""
    paused: PersistentMap[Worker, Kept] = PersistentMap()
    """Members that have paused, each with the layers and parts that it holds."""
    leaving: frozenset[Worker] = frozenset()
    """Members that received a signal to end and stay until the others can continue without them."""
    stopping: bool = False
    """True if the run is to end at the next iteration boundary, with a checkpoint."""
    vain: int = 0
    """Number of consecutive orders, directly before the current one, in which no member began its first op."""
    doubt: str | None = None
    """Reason why the members' state cannot be trusted and the run must go back; None if it can be trusted."""
    faulty: tuple[Worker, ...] = ()
    """Members whose copies are wrong. They are given up when all have paused: then the remaining members know about the
    difference and can report it to another coordinator."""
    doubted: int = -1
    """Iteration before which copies differed when the run last went back not knowing which was right, or -1."""
    cut_for: CutFor = {}
    """Ranges of layers that keep their former partition in the current order although some of its members are lost."""
    corpus: tuple[str, Worker] | None = None
    """Digest of the text that all workers read, and the first worker that reported it; None before the first report."""
    log: CommitLog
    joins: Joins = Joins()
    slow: SlowWorkers
    settler: Settler | None
    checkpoints: CheckpointTimer
    recovery: RecoveryClock = RecoveryClock()
    lost: PersistentMap[Worker, Loss] = PersistentMap()
    """Workers that are lost and have not come back, each with the reason."""
    asked: PersistentMap[Worker, float] = PersistentMap()
    """Time of `time.monotonic` at which each worker was asked which checkpoints it can read (`checkpoint_rollback`)."""
    readable: PersistentMap[Worker, tuple[int, ...]] = PersistentMap()
    """Iterations of the checkpoints that each asked worker can read."""
    answers: Mapping[Question, Schedule | Exception] = {}
    """Answers to the schedule requests made since the current order was given."""

    @property
    def grid(self) -> Grid:
        """Grid of pipelines and stages of the job."""
        return self.current.grid

    @property
    def ready(self) -> Set[Worker]:
        """Connected workers that wait for an order to take part in."""
        if len(self.live) == len(self.members) + len(self.slow.left_out):
            return set()
        return {worker for worker in self.live if worker not in self.members and worker not in self.slow.left_out}

    @property
    def everyone(self) -> Set[Worker]:
        """Connected workers that take part or could: all except those that are left out because they are slow."""
        return {worker for worker in self.live if worker not in self.slow.left_out}

    @property
    def all_paused(self) -> bool:
        """True if all members have paused."""
        return len(self.paused) >= len(self.members)

    @property
    def planning(self) -> bool:
        """True if all members have paused and wait for a schedule."""
        return isinstance(self.phase, Training) and bool(self.members) and self.all_paused

    @property
    def holds(self) -> dict[Worker, frozenset[int]]:
        """Layers that each paused member holds."""
        return {worker: layers_in(kept.layers) for worker, kept in self.paused.items()}

    def addresses(self, moves: Iterable[Move]) -> Addresses:
        """Return the addresses from which the ranks of each source of these moves send layers."""
        return tuple((source, self.live[source].addresses) for source in sorted({move.source for move in moves}))

    def held_now(self, placement: Placement) -> Mapping[Worker, frozenset[int]]:
        """Return the layers that each member holds under the current schedule."""
        return {worker: layers for worker, layers in placement.held_by(self.current).items() if worker in self.members}


def begun(rules: Rules, log: CommitLog, at: float, rejoining: Rejoining | None = None,
          journal: Journal = NO_JOURNAL) -> RunState:
    """Return the state of a run that begins at `at` (`time.monotonic`), or that looks for the workers of a dead
    coordinator, whose events `journal` summarizes, if `rejoining` is given."""
    timer, last = CheckpointTimer(automatic=rules.automatic_checkpoints), journal.checkpoint
    if last is not None:  # else no checkpoint is ever due if node 0 dies often
        timer = timer.after(last.checkpoint, last.took, last.time)
    return RunState(
        current=rules.first, members=frozenset(() if rejoining is not None else rules.first.seat_of),
        phase=rejoining or Gathering(), log=log,
        slow=watched(rules.first, plans=rules.plans_for_speeds, known=journal.speeds),
        settler=None if rules.settles is None else Settler(
            cost=rules.settles, mtbf=rules.mtbf_seconds, failures=journal.failures,
            began=at if journal.began is None else journal.began),
        checkpoints=timer)


class Step(Effects):
    """Builder of the next state while one event is handled; it also collects the effects of the event."""

    def __init__(self, rules: Rules, state: RunState, at: float) -> None:
        super().__init__(at)
        self.rules = rules
        self.state = state

    def change(self, **fields: Any) -> None:
        """Replace the given fields of the state."""
        self.state = replace(self.state, **fields)

    def do(self, effect: object) -> None:
        """Add an effect. If it reports a change of speed, the layout chosen for the former speeds is out of date."""
        settler = self.state.settler
        if settler is not None and isinstance(effect, SpeedEvent) and effect.changes:
            self.change(settler=replace(settler, changes=settler.changes + 1))
        super().do(effect)

    def forget(self, workers: Iterable[Worker]) -> None:
        """Remove workers that are lost or leave from all parts of the state."""
        state, gone = self.state, frozenset(workers)
        self.change(live=state.live.without(*gone), members=state.members - gone, paused=state.paused.without(*gone),
                    leaving=state.leaving - gone, asked=state.asked.without(*gone),
                    readable=state.readable.without(*gone))
        if isinstance(state.phase, Finishing):
            self.change(phase=replace(state.phase, finished=state.phase.finished.without(*gone)))
        if isinstance(state.phase, Rejoining):
            self.change(phase=state.phase.lost(gone))
        self.change(joins=state.joins.lost(gone, self.state.live, self))
        for worker in gone:
            self.change(slow=self.state.slow.lost(worker))

    def lost_layers(self, workers: Collection[Worker]) -> list[int]:
        """Return the layers whose state these workers do not hold completely."""
        return self.rules.partition.lost({one: kept for one, kept in self.state.paused.items() if one in workers})

    def fetched_for(self, schedule: Schedule) -> tuple[Move, ...]:
        """Return the moves that workers must fetch for a schedule while all members train by the current one."""
        return self.rules.partition.fetched(schedule, self.state.current, self.state.members, self.state.cut_for)
