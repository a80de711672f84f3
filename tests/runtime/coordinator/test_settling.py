"""A worker becomes slow and recovers.

Work is shed, then layers move, and they go back later.

All of it where it pays.
"""

import pytest
from msgspec.structs import replace

from slipstream.runtime.coordinator.decisions import slow_detector
from slipstream.runtime.coordinator.decisions.commit_log import CommitLog
from slipstream.runtime.coordinator.decisions.effects import ScheduleRequest, SendMessage
from slipstream.runtime.coordinator.decisions.rebalancing import MoveCost
from slipstream.runtime.coordinator.decisions.run_state import RunRules, build_initial_state
from slipstream.runtime.coordinator.decisions.slow_workers import (
    SpeedEvent,
    SpeedRequest,
    period_at,
)
from slipstream.runtime.coordinator.decisions.transition import WorkerLost, apply_event
from slipstream.runtime.coordinator.planning.background import capture_result
from slipstream.runtime.coordinator.planning.schedule_finder import (
    NoScheduleError,
    SchedulePlanners,
    ScheduleService,
)
from slipstream.runtime.events import (
    Event,
    FetchAbandoned,
    FetchBegun,
    HandedOver,
    OrderGiven,
    SettlingChosen,
)
from slipstream.runtime.protocol.to_coordinator import FetchUpToDate, IterationReport, Paused, Ready
from slipstream.runtime.protocol.to_worker import Acknowledged, EndOrder, Fetch, Train
from slipstream.schedules.check import check
from slipstream.schedules.codec import decode
from slipstream.schedules.measured_trace import OpTime
from slipstream.schedules.schedule import COMPUTE_KINDS, OpKind, Schedule, Seat, Worker
from tests.jobs import grid
from tests.runtime.coordinator.holding import holding, partition
from tests.runtime.failing import Planning, planned
from tests.runtime.running import schedule_for

JOB = grid(2, 2, 4, more="optimizer = 1\n[placement]\nlayers = [4, 4]")
FIRST = schedule_for(JOB)
SLOW = Worker(1, 0)
PARTITION = partition(range(9))


class World:
    """Workers that take as long as they are told to.

    They do at once what the coordinator says.

    `at_speeds` plans where they stay with their layers; `mtbf` is the user's.
    """

    def __init__(self, at_speeds, mtbf=None, first=FIRST) -> None:
        self.factor, self.events, self.told, self.iteration, self.found = 1.0, [], [], 0, []
        self.fetching = True
        self.died = False
        self.order: Train | None = None
        self.schedule: Schedule | None = None
        self.rebalancer = Planning(JOB)
        self.answering = ScheduleService(
            FIRST.grid,
            SchedulePlanners(planned(JOB), at_speeds, self.rebalancer),
            self.found.append,
            background=lambda work, done, **_: done(capture_result(work)),
        )
        self.rules = RunRules(
            first=self.answering.prepare_schedule(first),
            iterations=range(10_000),
            partition=PARTITION,
            move_cost=MoveCost([1000] * 8, 1e6),
            mtbf_seconds=mtbf,
            plans_for_speeds=True,
        )
        self.state = build_initial_state(self.rules, CommitLog(), 0.0)
        self.acknowledged: dict[Worker, Acknowledged] = {}
        for worker in FIRST.seat_of:
            self.happens(Ready(worker, (("", 1),)))

    def happens(self, event) -> None:
        self.state, effects = apply_event(self.rules, self.state, event, 0.0)
        for effect in effects:
            match effect:
                case SendMessage():
                    for worker in effect.workers:
                        self.send(worker, effect.message)
                case Event():
                    self.events.append(effect)
                case str() | SpeedEvent():
                    self.told.append(str(effect))
                case ScheduleRequest():
                    self.answering.request_schedule(effect)
                case SpeedRequest():
                    self.answering.request_speed_decision(effect)
        while self.found:
            self.happens(self.found.pop(0))

    def send(self, worker, message) -> None:
        match message:
            case Train():
                self.order, self.schedule = message, decode(bytes(message.schedule))
            case Acknowledged():
                self.acknowledged[worker] = message
            case Fetch() if self.fetching and worker == SLOW:
                targets = sorted({move.target for move in message.moves})
                self.fetched = [FetchUpToDate(target, message.number) for target in targets]
            case EndOrder():
                assert self.died, "nobody has died"

    def run(self, iterations: int) -> None:
        for _ in range(iterations):
            schedule, number, speeds = self.schedule, self.order.order, {SLOW: self.factor}
            window = period_at(schedule, speeds) / 100
            for worker in schedule.seat_of:
                self.happens(
                    IterationReport(worker, number, self.iteration, 1.0, window, self.times(worker))
                )
            for fetched in self.__dict__.pop("fetched", []):
                self.happens(fetched)
            self.iteration += 1
            if all(acknowledgement.stop for acknowledgement in self.acknowledged.values()):
                for worker in schedule.seat_of:
                    layers = tuple(
                        (layer, layer + 1)
                        for layer in sorted(PARTITION.placement.held_layers(schedule, worker))
                    )
                    self.happens(Paused(worker, number, holding(*layers), None, None))
                assert self.order.order == number + 1
            self.acknowledged.clear()

    def die(self, worker: Worker) -> None:
        """A worker dies between two iterations, and the others stop."""
        self.died, schedule, number = True, self.schedule, self.order.order
        self.happens(WorkerLost(worker, "killed", 0.0))
        for other in sorted(schedule.seat_of.keys() - {worker}):
            layers = tuple(
                (layer, layer + 1)
                for layer in sorted(PARTITION.placement.held_layers(schedule, other))
            )
            self.happens(Paused(other, number, holding(*layers), None, None))
        assert self.order.order == number + 1

    def times(self, worker: Worker) -> tuple[OpTime, ...]:
        schedule = self.schedule
        program = schedule.programs[schedule.seat_of[worker].program]
        ops = [(op.kind, op.slice) for op in program if op.kind in COMPUTE_KINDS]
        factor = self.factor if worker == SLOW else 1.0
        return tuple(
            OpTime(
                kind,
                slice_,
                ops.count((kind, slice_)),
                factor / 100 * len(range(*schedule.layers_of(slice_))),
            )
            for kind, slice_ in sorted(set(ops))
        )

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def phases(self) -> list[str]:
        return [event.phase for event in self.of(OrderGiven)]

    @property
    def moved(self) -> bool:
        return any(map(self.schedule.has_moved_layers, self.schedule.seats))


def at_speeds(down, speeds):
    holdings = tuple(
        (seat.worker, FIRST.held_layers_of_seat(seat))
        for seat in FIRST.seats
        if seat.worker not in down
    )
    return Planning(JOB).plan_at_once(down, holdings, speeds)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Each iteration is an observation."""
    monkeypatch.setattr(slow_detector, "OBSERVATION_SECONDS", 0.0)


def test_it_sheds_work_then_settles_and_goes_back_once_the_worker_has_recovered():
    world = World(at_speeds)
    world.run(20)
    assert world.phases == ["whole"] and not world.of(SettlingChosen)
    world.factor = 3.0
    world.run(20)
    assert world.phases == ["whole", "whole", "settled"] and world.moved
    shed, chosen = world.of(OrderGiven)[1], world.of(SettlingChosen)[-1]
    assert chosen.settles and chosen.settled_period < 0.95 * chosen.present_period
    assert chosen.present_period == pytest.approx(shed.planned_period / 100)  # as it was measured
    assert any(line.startswith("settles: ") for line in world.told)
    world.factor = 1.0
    world.run(40)
    assert world.phases[-1] == "whole" and not world.moved and world.schedule == FIRST
    orders = world.order.order
    world.run(40)
    assert world.order.order == orders, "it stays so"


def test_layers_that_have_moved_before_a_death_do_not_make_the_next_schedule_settled():
    # A run with `--layers move` begins with layers that have moved: it is whole then, and at once
    # after a death.
    rebalancer = Planning(JOB)
    holdings = tuple((seat.worker, FIRST.held_layers_of_seat(seat)) for seat in FIRST.seats)
    first = rebalancer.plan_rebalanced((), holdings, ((SLOW, 3.0),))
    assert any(map(first.has_moved_layers, first.seats))
    world = World(at_speeds, first=first)
    world.rebalancer.plan_rebalanced = rebalancer.plan_rebalanced
    world.run(2)
    assert world.phases == ["whole"]
    world.die(Worker(1, 1))
    assert world.moved and world.phases == ["whole", "at once"]


def test_it_settles_where_shedding_alone_gains_nothing():
    # No order has come in between: the present one is to be settled all the same, at its period
    # with a slow worker.
    world = World(lambda down, speeds: FIRST)
    world.run(20)
    world.factor = 3.0
    world.run(20)
    assert world.phases == ["whole", "settled"]
    (chosen,) = world.of(SettlingChosen)
    assert chosen.present_period == pytest.approx(period_at(FIRST, {SLOW: 3.0}) / 100, rel=0.01)


def test_it_settles_where_no_schedule_can_be_planned_in_which_layers_stay():
    def none(down, speeds):
        raise NoScheduleError("the table has none")

    world = World(none)
    world.run(20)
    world.factor = 3.0
    world.run(20)
    assert world.phases == ["whole", "settled"]
    assert "as no other is available: the table has none" in "".join(world.told)
    (chosen,) = world.of(SettlingChosen)
    assert chosen.present_period == pytest.approx(period_at(FIRST, {SLOW: 3.0}) / 100, rel=0.01)


def test_it_does_not_settle_where_something_else_comes_sooner_and_asks_no_more():
    world = World(at_speeds, mtbf=0.001)
    world.run(20)
    world.factor = 3.0
    world.run(60)
    assert world.phases == ["whole", "whole"] and not world.moved
    assert [choice.settles for choice in world.of(SettlingChosen)] == [False]


def test_whoever_has_nothing_to_do_takes_no_part_and_waits():
    # It would wait for nobody, and nobody for it: it could be any number of iterations ahead.

    def none(down, speeds):
        raise NoScheduleError("the table has none")

    world = World(none)
    world.rebalancer.plan_rebalanced = lambda down, holdings, speeds: idle(
        SLOW, planned(JOB)((*down, SLOW))
    )
    world.run(20)
    world.factor = 20.0
    world.run(20)
    assert len(world.of(HandedOver)) == 1 and len(world.schedule.seats) == 3
    assert world.schedule.failed == (SLOW,) and not check(world.schedule)
    assert world.state.available_workers == FIRST.seat_of.keys(), "it may come in again"
    world.run(40)
    assert len(world.of(FetchBegun)) == 1 and world.order.order == 2, (
        "what it could join has nothing for it"
    )


def idle(worker, schedule):
    """A schedule in which one more worker is alive, and holds nothing."""
    steps = next(op for op in schedule.programs[0] if op.kind is OpKind.O)
    seats = {**schedule.seat_of, worker: Seat(worker, worker, len(schedule.programs), ())}
    times = replace(schedule.times, optimizer_of_layer=(1,) * schedule.grid.layer_count)
    return replace(
        schedule,
        failed=tuple(worker_ for worker_ in schedule.failed if worker_ != worker),
        times=times,
        seats=tuple(seats[worker_] for worker_ in sorted(seats)),
        programs=(*schedule.programs, (steps,)),
    )


def test_a_fetch_for_a_worker_that_has_recovered_meanwhile_is_dropped():
    world = World(at_speeds)
    world.fetching = False
    world.run(20)
    world.factor = 3.0
    world.run(20)
    assert world.of(SettlingChosen)[-1].settles and not world.of(HandedOver)
    world.factor = 1.0
    world.run(40)
    assert world.of(FetchAbandoned) and not world.of(HandedOver) and not world.moved


def test_who_becomes_slow_and_recovers_again_and_again_is_moved_for_less_and_less_often():
    """Each change of speed counts like a failure: what is gained lasts less long."""
    world = World(at_speeds)
    world.run(20)
    before = world.state.rebalancing.expected_seconds_to_failure(0.0)
    for factor in (3.0, 1.0, 3.0, 1.0):
        world.factor = factor
        world.run(80)
    assert world.state.rebalancing.expected_seconds_to_failure(0.0) < before / 3
    assert "the next failure or change of speed is expected in" in world.told[-1]
