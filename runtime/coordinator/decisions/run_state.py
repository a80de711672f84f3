"""The state of a run: all that is decided by. It never changes; `Step` has the next one while an event is handled."""

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
    """What stays the same in one run."""

    first: Schedule
    """That for the workers which are there from the start."""
    iterations: range
    partition: Partition
    """How the state of the model's layers is cut."""
    prepared: Callable[[Schedule], Prepared]
    """What a schedule is in an order. Pure; keeps what it was asked for last."""
    settles: Cost | None = None
    """What moving layers to a better schedule costs; None: they stay where they are."""
    mtbf_seconds: float | None = None
    """As in `Settling`."""
    automatic_checkpoints: bool = False
    plans_for_speeds: bool = False
    """Whether anything plans for slow workers."""
    domains: FailureDomains = ALONE
    """Which workers fail together."""
    whole_schedules: bool = True
    """Whether workers are sent the whole of each schedule besides: to deal or evaluate data by it."""

    @property
    def placement(self) -> Placement:
        """Where the schedules' layers lie in the model."""
        return self.partition.placement


class Present(msgspec.Struct, frozen=True):
    """A worker that is there."""

    addresses: tuple[tuple[str, int], ...]
    """Where each of its ranks sends layers from."""
    contents: tuple[str, ...] = ()
    """By their digests, the contents of schedules that it has."""


class Gathering(msgspec.Struct, frozen=True):
    """The first order waits for all its members."""


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """There is an order to train."""

    began: int = 0
    """Its first iteration."""
    ended: bool = False
    """Whether `EndOrder` has been sent."""
    started: PersistentMap[Worker, None] = PersistentMap()
    """Members that have begun their first op."""
    stop_before: int | None = None
    """The iteration before which all members stop, and that before whose step they save, where these are chosen."""
    save_before: int | None = None
    without_microbatches: frozenset[Worker] = frozenset()
    """Members that hold layers of which others run all micro-batches."""
    unanswered: tuple[Ran, ...] = ()
    """Reports that wait for those of `without_microbatches`."""


class Finishing(msgspec.Struct, frozen=True):
    """There is an order to finish."""

    finished: PersistentMap[Worker, None] = PersistentMap()
    """Members that have."""
    outdated: bool = False
    """Whether a member was lost after the order, which names it."""


class Left(msgspec.Struct, frozen=True):
    """Everything is done, and the workers may go."""


class RunState(msgspec.Struct, frozen=True, kw_only=True):
    """The present order, who is there, and what is known."""

    current: Schedule
    """Of the present order; before the first one, of that."""
    members: frozenset[Worker]
    """Those of the present order that live; before the first one, those that it waits for."""
    phase: Gathering | Rejoining | Training | Finishing | Left = Gathering()
    order: int = 0
    """The number of the last order; they are numbered from 1."""
    live: PersistentMap[Worker, Present] = PersistentMap()
    """All workers that are there: members, those that wait for the next order, those left out as they are slow."""
    paused: PersistentMap[Worker, Kept] = PersistentMap()
    """Members that have, with what they hold."""
    leaving: frozenset[Worker] = frozenset()
    """Members that were told to end by somebody else, and stay until the others can go on without them."""
    stopping: bool = False
    """Whether the run is to end at the next iteration, with a checkpoint."""
    vain: int = 0
    """Orders, the last ones before the present one, in which nobody has begun."""
    doubt: str | None = None
    """Why nothing can be gone on from that members hold: the run is to go back."""
    faulty: tuple[Worker, ...] = ()
    """Those whose copies were wrong then. They are given up once all have paused: whoever is left knows of the
    difference, and can tell it to another coordinator."""
    doubted: int = -1
    """The iteration before which copies differed when it went back last, and nobody could tell who was right."""
    cut_for: CutFor = {}
    """Of the present order, the ranges whose parts stay as they are, as some have gone who keep them."""
    corpus: tuple[str, Worker] | None = None
    """Digest of the text that all read, and who has said so first."""
    log: CommitLog
    joins: Joins = Joins()
    slow: SlowWorkers
    settler: Settler | None
    checkpoints: CheckpointTimer
    recovery: RecoveryClock = RecoveryClock()
    lost: PersistentMap[Worker, Loss] = PersistentMap()
    """Those that are gone, until they are back."""
    asked: PersistentMap[Worker, float] = PersistentMap()
    """When workers were asked which checkpoints they can read, by time.monotonic (`checkpoint_rollback`)."""
    readable: PersistentMap[Worker, tuple[int, ...]] = PersistentMap()
    """What they have answered."""
    answers: Mapping[Question, Schedule | Exception] = {}
    """To what has been asked since the present order was given."""

    @property
    def grid(self) -> Grid:
        """The job's shape."""
        return self.current.grid

    @property
    def ready(self) -> Set[Worker]:
        """Those that wait for an order to take part in."""
        if len(self.live) == len(self.members) + len(self.slow.left_out):
            return set()
        return {worker for worker in self.live if worker not in self.members and worker not in self.slow.left_out}

    @property
    def everyone(self) -> Set[Worker]:
        """Who takes part, or could."""
        return {worker for worker in self.live if worker not in self.slow.left_out}

    @property
    def all_paused(self) -> bool:
        """Whether all members have."""
        return len(self.paused) >= len(self.members)

    @property
    def planning(self) -> bool:
        """Whether all members wait for a schedule."""
        return isinstance(self.phase, Training) and bool(self.members) and self.all_paused

    @property
    def holds(self) -> dict[Worker, frozenset[int]]:
        """The layers of each member that has paused."""
        return {worker: layers_in(kept.layers) for worker, kept in self.paused.items()}

    def addresses(self, moves: Iterable[Move]) -> Addresses:
        """Where each rank of the sources sends layers from."""
        return tuple((source, self.live[source].addresses) for source in sorted({move.source for move in moves}))

    def held_now(self, placement: Placement) -> Mapping[Worker, frozenset[int]]:
        """The layers of each member under the present schedule."""
        return {worker: layers for worker, layers in placement.held_by(self.current).items() if worker in self.members}


def begun(rules: Rules, log: CommitLog, at: float, rejoining: Rejoining | None = None,
          journal: Journal = NO_JOURNAL) -> RunState:
    """The state of a run that begins at a time by time.monotonic, or looks for the workers of another coordinator, of
    which there is a journal."""
    timer, last = CheckpointTimer(automatic=rules.automatic_checkpoints), journal.checkpoint
    if last is not None:  # else node 0s that die often would never have one written
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
    """An event that is being handled: the state so far, and what is to be done outside."""

    def __init__(self, rules: Rules, state: RunState, at: float) -> None:
        super().__init__(at)
        self.rules = rules
        self.state = state

    def change(self, **fields: Any) -> None:
        """Go on with a state that has other values of these fields."""
        self.state = replace(self.state, **fields)

    def do(self, effect: object) -> None:
        """Have something done. What had been settled for is over once speeds have changed."""
        settler = self.state.settler
        if settler is not None and isinstance(effect, SpeedEvent) and effect.changes:
            self.change(settler=replace(settler, changes=settler.changes + 1))
        super().do(effect)

    def forget(self, workers: Iterable[Worker]) -> None:
        """Workers are not there any more."""
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
        """The layers that nobody of these has, or of whose state they do not have all."""
        return self.rules.partition.lost({one: kept for one, kept in self.state.paused.items() if one in workers})

    def fetched_for(self, schedule: Schedule) -> tuple[Move, ...]:
        """What workers are to fetch for a schedule, while all train by the present one."""
        return self.rules.partition.fetched(schedule, self.state.current, self.state.members, self.state.cut_for)
