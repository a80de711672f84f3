"""Keep the state of a run, on which all decisions depend; build the next one."""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions.commit_log import CheckpointTimer, CommitLog
from slipstream.runtime.coordinator.decisions.effects import (
    EffectCollector,
    PreparedSchedule,
    ScheduleRequest,
)
from slipstream.runtime.coordinator.decisions.failover import EMPTY_JOURNAL, Journal, RejoiningPhase
from slipstream.runtime.coordinator.decisions.part_moves import PartitionPlanner
from slipstream.runtime.coordinator.decisions.persistent_map import PersistentMap
from slipstream.runtime.coordinator.decisions.rebalancing import (
    FetchState,
    MoveCost,
    RebalancingPolicy,
)
from slipstream.runtime.coordinator.decisions.recoveries import EmptyOrders, RecoveryClock
from slipstream.runtime.coordinator.decisions.slow_workers import (
    SlowWorkers,
    SpeedEvent,
    build_slow_workers,
)
from slipstream.runtime.failure_domains import NO_SHARED_DOMAINS, FailureDomains
from slipstream.runtime.placement import Placement
from slipstream.runtime.protocol.to_coordinator import Finished, HeldState, IterationReport
from slipstream.runtime.protocol.to_worker import Addresses, LayerMove
from slipstream.runtime.run_identity import NO_IDENTITY, RunIdentity
from slipstream.runtime.state.parts import ElementCounts, OriginalMembers
from slipstream.schedules.layers import layers_in
from slipstream.schedules.schedule import Grid, Schedule, Worker


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Values that follow from schedule, model, data and machines, and only node 0 needs."""

    shares: Sequence[Sequence[Worker]] = ()
    """Workers of each node that are started with the run, by the node's number."""
    elements: Sequence[ElementCounts] = ()
    """Numbers of trained elements of each layer, on each rank of a worker."""
    shared_layers: Sequence[Collection[int]] = ()
    """Groups of layers of the model that share a parameter (`runtime.models.sharing`)."""
    whole_schedules: bool = True
    """True if each worker needs all of every schedule, to deal samples or to evaluate."""
    identity: RunIdentity = NO_IDENTITY
    """What the run trains. Workers with another identity are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRules:
    """Constants of a run on which decisions depend, such as its iterations."""

    first: PreparedSchedule
    """Schedule with which the run begins, for the workers that are started with it."""
    iterations: range
    partition: PartitionPlanner
    """Planner that divides each layer's state among its holders, and plans moves."""
    move_cost: MoveCost | None = None
    """Cost of moving layers to a better schedule; None if layers stay where they are."""
    mtbf_seconds: float | None = None
    """Mean time between failures in the whole cluster; None: as observed during the run."""
    automatic_checkpoints: bool = False
    """True if the coordinator chooses when checkpoints are written, not a fixed interval."""
    plans_for_speeds: bool = False
    """True if a planner is configured that makes schedules for slow workers."""
    domains: FailureDomains = NO_SHARED_DOMAINS
    """Groups of workers that fail together, such as those of one machine."""
    facts: RunFacts = RunFacts()

    @property
    def placement(self) -> Placement:
        """Mapping between the schedules' stages, their columns, and the layers of the model."""
        return self.partition.placement


class WorkerLoss(NamedTuple):
    """Loss of one worker: its reason, and the layers lost with it."""

    reason: str
    layers: frozenset[int] = frozenset()
    """Layers that the worker held; empty if none, or if they are not known."""


class ConnectedWorker(msgspec.Struct, frozen=True):
    """Worker that is connected and ready for an order, whether a member or not."""

    addresses: tuple[tuple[str, int], ...]
    """Host and port of each rank of the worker, from which other workers fetch layers."""
    contents: tuple[str, ...] = ()
    """Digests of the parts of schedule files that the worker already has."""


class GatheringPhase(msgspec.Struct, frozen=True):
    """Phase before the first order: the coordinator waits until all workers are ready."""


class TrainingPhase(msgspec.Struct, frozen=True, kw_only=True):
    """Phase in which the current order is an order to train."""

    began: int = 0
    """First iteration of the current order."""
    ended: bool = False
    """True if members have been told to stop at once (`EndOrder`), or have stopped before."""
    started: PersistentMap[Worker, None] = PersistentMap()
    """Members that have begun their first op in this order."""
    stop_before: int | None = None
    """Iteration before which all members stop; None if none is chosen."""
    save_before: int | None = None
    """Iteration before whose step all members save a checkpoint; None if none is chosen."""
    without_microbatches: frozenset[Worker] = frozenset()
    """Members that hold layers but run no micro-batch."""
    unanswered: tuple[IterationReport, ...] = ()
    """Reports not acknowledged before `without_microbatches` report their iteration, too."""
    restores: bool = False
    """True if the members read layers from a checkpoint in this order."""


class FinishingPhase(msgspec.Struct, frozen=True):
    """Phase of an order to write the final parameters or a checkpoint."""

    finished: PersistentMap[Worker, Finished] = PersistentMap()
    """Members that have written drafts, with their reports."""
    published: PersistentMap[Worker, None] = PersistentMap()
    """Members that have published what they wrote."""
    outdated: bool = False
    """True if the order names a member that is lost, or cannot write its part."""
    ordered_at: float = 0.0
    """Time of `time.monotonic` at which the order was given."""


class EndedPhase(msgspec.Struct, frozen=True):
    """Final phase: all workers have been told to leave."""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """State of a run, on which all decisions depend.

    Before the first order, `prepared` and `members` are those of the order that is to be given;
    while a new coordinator looks for workers, `members` is empty.
    """

    prepared: PreparedSchedule
    """Schedule of the current order."""
    members: frozenset[Worker]
    """Live members of the current order."""
    phase: GatheringPhase | RejoiningPhase | TrainingPhase | FinishingPhase | EndedPhase = (
        GatheringPhase()
    )
    order: int = 0
    """Number of the last order. Orders are numbered from 1; 0 means that none has been given."""
    rebalanced: bool = False
    """True if layers have moved for the members of the current order."""
    live: PersistentMap[Worker, ConnectedWorker] = PersistentMap()
    """All connected workers: members, those that wait, and those left out as slow."""
    paused: PersistentMap[Worker, HeldState] = PersistentMap()
    """Members that have paused in the current order, with the state that they hold."""
    leaving: frozenset[Worker] = frozenset()
    """Members with a signal to end that stay until the others can do without them."""
    stopping: bool = False
    """True if the run is to end at the next iteration boundary, with a checkpoint."""
    vain: int = 0
    """Orders in a row, before the current one, in which no op began."""
    doubt: str | None = None
    """Reason why the members' state cannot be trusted and the run must go back."""
    faulty: tuple[Worker, ...] = ()
    """Members with wrong copies or samples, given up once all members have paused."""
    fault: str = ""
    """Rest of a sentence about a worker of `faulty`: what it has done."""
    newcomers: frozenset[Worker] = frozenset()
    """Members of the current order that took no part in the order before."""
    doubted: int = -1
    """Last iteration before which copies differed without a majority; -1: none."""
    trusted_from: int = 0
    """Last order with which the run went back because of a `doubt`; 0: none."""
    data_end: int | None = None
    """First iteration without samples, before which the run ends; None: not known."""
    repeated: int = -1
    """Last iteration repeated for its loss, if the run has not gone back; -1: none."""
    returned_for: int = -1
    """Last iteration because of whose loss the run went back; -1: none."""
    cut_for: OriginalMembers = {}
    """Original members of each range of layers that keeps its partition after losses."""
    log: CommitLog
    joins: FetchState = FetchState()
    slow: SlowWorkers
    rebalancing: RebalancingPolicy | None
    checkpoints: CheckpointTimer
    recovery: RecoveryClock = RecoveryClock()
    lost: PersistentMap[Worker, WorkerLoss] = PersistentMap()
    """Workers that are lost and have not come back, each with the reason."""
    asked: PersistentMap[Worker, float] = PersistentMap()
    """Time of `time.monotonic` at which each worker was asked which checkpoints it can read."""
    readable: PersistentMap[Worker, tuple[int, ...]] = PersistentMap()
    """Iterations of the checkpoints that each asked worker can read."""
    answers: Mapping[ScheduleRequest, PreparedSchedule | Exception] = {}
    """Answers to the schedule requests made since the current order was given."""
    empty: EmptyOrders = EmptyOrders()
    """Empty orders in a row, and the workers that may be at fault."""

    @property
    def current(self) -> Schedule:
        """Schedule of the current order."""
        return self.prepared.schedule

    @property
    def grid(self) -> Grid:
        """Grid of pipelines and stages of the job."""
        return self.current.grid

    @property
    def waiting_workers(self) -> Set[Worker]:
        """Connected workers that wait for an order to take part in."""
        if len(self.live) == len(self.members) + len(self.slow.left_out):
            return set()
        return {
            worker
            for worker in self.live
            if worker not in self.members and worker not in self.slow.left_out
        }

    @property
    def available_workers(self) -> Set[Worker]:
        """Connected workers, except those that are left out as slow."""
        return {worker for worker in self.live if worker not in self.slow.left_out}

    @property
    def all_paused(self) -> bool:
        """True if all members have paused."""
        return len(self.paused) >= len(self.members)

    @property
    def is_planning(self) -> bool:
        """True if all members have paused, and wait for the coordinator's next schedule."""
        return isinstance(self.phase, TrainingPhase) and bool(self.members) and self.all_paused

    @property
    def held_by_paused(self) -> dict[Worker, frozenset[int]]:
        """Layers that each paused member holds."""
        return {worker: layers_in(kept.layers) for worker, kept in self.paused.items()}

    def find_source_addresses(self, moves: Iterable[LayerMove]) -> Addresses:
        """Return the workers that send in these moves, sorted, each with its ranks' addresses."""
        sources = sorted({move.source for move in moves})
        return tuple((source, self.live[source].addresses) for source in sources)

    def find_held_layers(self, placement: Placement) -> Mapping[Worker, frozenset[int]]:
        """Return the layers that each member holds under the current schedule."""
        return {
            worker: layers
            for worker, layers in placement.held_layers_by_worker(self.current).items()
            if worker in self.members
        }


def build_initial_state(
    rules: RunRules,
    log: CommitLog,
    at: float,
    rejoining: RejoiningPhase | None = None,
    journal: Journal = EMPTY_JOURNAL,
) -> RunState:
    """Return the state with which a coordinator begins; `at` is the time of `time.monotonic`.

    Parameters
    ----------
    rejoining
        Phase that looks for workers after a failover; None: the run begins.
    journal
        Summary of what happened under earlier coordinators.
    """
    # What was observed before node 0 died counts on: checkpoints, failures and speeds.
    timer, last = CheckpointTimer(automatic=rules.automatic_checkpoints), journal.checkpoint
    if last is not None:  # else no checkpoint is ever due if node 0 dies often
        timer = timer.with_checkpoint(last.checkpoint, last.took, last.time)
    rebalancing = None
    if rules.move_cost is not None:
        rebalancing = RebalancingPolicy(
            cost=rules.move_cost,
            mtbf=rules.mtbf_seconds,
            failures=journal.failures,
            began=at if journal.began is None else journal.began,
        )
    # After a failover nobody is a member before it is found.
    return RunState(
        prepared=rules.first,
        members=frozenset(() if rejoining is not None else rules.first.schedule.seat_of),
        phase=rejoining or GatheringPhase(),
        log=log,
        slow=build_slow_workers(
            rules.first.schedule, plans=rules.plans_for_speeds, measured=journal.speeds
        ),
        rebalancing=rebalancing,
        checkpoints=timer,
    )


class TransitionBuilder(EffectCollector):
    """Builder of the next state, and of effects, for one event; called `step` elsewhere."""

    def __init__(self, rules: RunRules, state: RunState, at: float) -> None:
        super().__init__(at)
        self.rules = rules
        self.state = state

    def update_state(self, **fields: Any) -> None:
        """Replace the given fields of the state that is being built."""
        self.state = replace(self.state, **fields)

    def add_effect(self, effect: object) -> None:
        """Add an effect; if it reports changes of speed, count it in the rebalancing policy."""
        # Like a failure, a change of speed puts the layout chosen before out of date.
        rebalancing = self.state.rebalancing
        if rebalancing is not None and isinstance(effect, SpeedEvent) and effect.changes:
            self.update_state(rebalancing=replace(rebalancing, changes=rebalancing.changes + 1))
        super().add_effect(effect)

    def remove_workers(self, workers: Iterable[Worker]) -> None:
        """Remove workers that are lost or leave from the state; cancel fetches that need them."""
        # Whom the order and the next decisions count on.
        state, gone = self.state, frozenset(workers)
        empty = state.empty.without_workers(gone)
        # A lost worker explains the orders in vain: nobody waits any longer.
        if empty.number < state.empty.number:
            self.update_state(vain=0)
        self.update_state(
            live=state.live.without_keys(*gone),
            members=state.members - gone,
            paused=state.paused.without_keys(*gone),
            leaving=state.leaving - gone,
            asked=state.asked.without_keys(*gone),
            readable=state.readable.without_keys(*gone),
            empty=empty,
        )
        # What the phase has collected from them.
        if isinstance(state.phase, FinishingPhase):
            self.update_state(
                phase=replace(
                    state.phase,
                    finished=state.phase.finished.without_keys(*gone),
                    published=state.phase.published.without_keys(*gone),
                )
            )
        if isinstance(state.phase, RejoiningPhase):
            self.update_state(phase=state.phase.without_workers(gone))
        # Changes that are being prepared.
        self.update_state(joins=state.joins.without_workers(gone, self.state.live, self))
        for worker in gone:
            self.update_state(slow=self.state.slow.without_worker(worker))

    def find_lost_layers(self, workers: Collection[Worker]) -> list[int]:
        """Return the layers that these paused workers together do not hold completely."""
        return self.rules.partition.find_lost_layers(
            {worker: kept for worker, kept in self.state.paused.items() if worker in workers}
        )

    def plan_fetches(self, schedule: Schedule) -> tuple[LayerMove, ...]:
        """Return the moves for `schedule` that can be made while all train."""
        return self.rules.partition.plan_fetches(
            schedule, self.state.current, self.state.members, self.state.cut_for
        )
