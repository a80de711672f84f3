"""One worker's part in one order: it meets the others, takes the layers it lacks, and runs iterations.

A shift ends when the order does: because all iterations are done, because it was told to stop before the next one, or
because something broke. In all cases `go_back` leaves exactly the iterations that are committed.
"""

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from runtime.coordinator.membership import Member, MembershipError
from runtime.model.clipping import watches_gradients
from runtime.model.data import Data, Microbatch
from runtime.model.stage import Boundary
from runtime.model.steps import Steps
from runtime.protocol.failure_injection import Injector
from runtime.protocol.orders import Factor, Train, turn_key
from runtime.protocol.rendezvous import asking_node_0
from runtime.protocol.reports import Paused, Ran, Settled, Started, push
from runtime.protocol.setup import Setup
from runtime.replay.communication import CommunicationError, Communicator, Membership
from runtime.replay.exchange import Exchange
from runtime.replay.executor import Executor
from runtime.replay.placement import reduce_group
from runtime.replay.recorder import Recorder
from runtime.replay.stuck_calls import OPEN_CALLS
from runtime.worker.checkpointer import Keeper
from runtime.worker.heartbeat import Pulse
from runtime.worker.layer_receiver import Follower
from runtime.worker.layer_sender import Source
from runtime.worker.layer_transfer import exchange_layers
from runtime.worker.meeting import Meeting, Outcome
from runtime.worker.sockets import Sockets
from runtime.worker.stage_store import Holdings
from schedules.schedule import OpKind, Schedule, Worker

LOOK_SECONDS = 0.05
STUCK_SECONDS = 1.0
"""Once connections are cut, calls into a process group return in milliseconds, or never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """What a worker has from order to order."""

    worker: Worker
    store: TCPStore
    setup: Setup
    device: torch.device
    layers: int
    """Of the whole model."""
    corpus: Data
    boundaries: Sequence[Boundary]
    """Of all stages."""
    holdings: Holdings
    pulse: Pulse
    injector: Injector
    keeper: Keeper
    source: Source
    follower: Follower

    def lasting_sockets(self) -> Sockets:
        """Those that outlive an order."""
        return self.source.sockets() | self.follower.sockets()


class Shift:
    """Follows one order to its end."""

    def __init__(self, plant: Plant, order: Train, schedule: Schedule) -> None:
        self._plant = plant
        self._order = order
        self._schedule = schedule
        self._worker = plant.worker
        self._meeting = Meeting(plant.lasting_sockets)
        self._epoch: Communicator | None = None
        self._steps: Steps | None = None

    def work(self, founder: Member | None, timeout: timedelta) -> Paused:
        """Do what the order says; how it ended. Raises RendezvousError, and what goes wrong within this worker.

        After an end as planned the connections stay open until `end`: others may still read from them. All is done in a
        thread, which is left behind where it is stuck in a process group after the order is over
        (`runtime.replay.stuck_calls`).
        """
        outcomes: list[Outcome[Paused]] = []
        thread = threading.Thread(target=lambda: outcomes.append(Outcome(lambda: self._work(founder, timeout))),
                                  daemon=True, name="shift")
        thread.start()
        over = math.inf
        while thread.is_alive():
            thread.join(LOOK_SECONDS)
            over = min(over, time.monotonic()) if self._meeting.over else math.inf
            if time.monotonic() - over > STUCK_SECONDS and OPEN_CALLS.abandon(thread.ident or 0, STUCK_SECONDS):
                self._plant.pulse.unwatch()
                self._epoch = None  # the thread keeps it: dropping what is stuck would not return
                return self._paused("stuck in a process group")
        (outcome,) = outcomes
        if outcome.error is not None:
            raise outcome.error
        assert outcome.value is not None
        return outcome.value

    def _work(self, founder: Member | None, timeout: timedelta) -> Paused:
        plant, meeting = self._plant, self._meeting
        if plant.device.type == "cuda":
            torch.cuda.set_device(plant.device)  # of each thread its own
        plant.injector.cut = meeting.cut
        reason = None
        try:
            plant.pulse.watch(self._order.number, meeting.end)
            plant.injector.at(self._order.first_iteration, "ordered")
            if founder is not None:
                meeting.hold(lambda: founder.join(timeout))
            self._epoch = meeting.hold(self._meet, Communicator.drop)
            self._iterate(self._epoch)
        except (CommunicationError, MembershipError) as error:
            reason = str(error)
            self.end()
        return self._paused(reason)

    def _paused(self, reason: str | None) -> Paused:
        settled = None if self._steps is None or self._steps.settled is None else Factor(*self._steps.settled)
        return Paused(self._worker, self._order.number, tuple(sorted(self._plant.holdings.stages)), settled, reason)

    def end(self) -> None:
        """Close all connections; peers that wait for this worker are released."""
        self._plant.pulse.unwatch()
        epoch, self._epoch = self._epoch, None
        if epoch is not None:
            dropping = threading.Thread(target=epoch.drop, daemon=True, name="drop")
            dropping.start()
            dropping.join(STUCK_SECONDS)

    def go_back(self, committed: int, factor: Factor | None) -> None:
        """Keep the iterations up to `committed`, and nothing of any later one."""
        if self._steps is not None:
            assert factor is None or factor.iteration == committed
            self._steps.go_back(committed, None if factor is None else factor.factor)
        self._plant.holdings.discard()

    def _meet(self) -> Communicator:
        order, plant = self._order, self._plant
        members = sorted(seat.worker for seat in self._schedule.seats)
        return Communicator(
            Membership(order.number, {worker: rank for rank, worker in enumerate(members)}, self._worker),
            {self._schedule.grid.original(index): reduce_group(self._schedule, index) for index in self._needed()},
            transport=plant.setup.transport, device=plant.device, store=plant.store,
            sums=watches_gradients(plant.setup.config.training), require=self._meeting.require)

    def _needed(self) -> tuple[int, ...]:
        return self._schedule.grid.stages_of(self._schedule.seat_of[self._worker].role.column)

    def _take_layers(self, epoch: Communicator) -> None:
        order, plant = self._order, self._plant
        plant.injector.at(order.first_iteration, "met")
        if order.first_iteration == plant.setup.first_iteration:
            plant.holdings.add_initial(self._needed())
        plant.holdings.adopt(plant.follower.take(order, self._meeting.require))
        states = exchange_layers(epoch, self._worker, order.moves, plant.holdings.layer_state)
        plant.holdings.replace(self._needed(), states)
        plant.injector.at(order.first_iteration, "moved")

    def _iterate(self, epoch: Communicator) -> None:
        order, plant, setup = self._order, self._plant, self._plant.setup
        self._take_layers(epoch)
        recorder = Recorder(plant.device, epoch.clock_offset() if setup.nodes > 1 else 0.0)
        stages, training = plant.holdings.stages, setup.config.training
        iterations = range(order.first_iteration, setup.iterations)
        exchange = Exchange(self._schedule, epoch, plant.boundaries, iterations)
        first_of_team = [index for index in stages if reduce_group(self._schedule, index)[0] == self._worker]
        self._steps = steps = Steps(
            stages, plant.holdings.optimizers, training, layers=plant.layers, speaks_for=first_of_team,
            share=epoch.sum_over_all if watches_gradients(training) else None,
            staggered=self._schedule.optimizer == "staggered", stepped=self._pass_on)
        executor = Executor(self._schedule, stages=stages, steps=steps, communicator=epoch, exchange=exchange,
                            feed=self._read, recorder=recorder, gate=partial(self._gate, first_of_team))
        push(plant.store, Started(self._worker, order.number))
        for iteration in iterations:
            recorder.begin(traced=iteration >= setup.iterations - setup.traced)
            loss = executor.run(iteration)
            plant.injector.at(iteration, "stepped")
            if self._tell(iteration, loss, recorder):
                break
        steps.settle()
        exchange.flush()

    def _gate(self, first_of_team: Sequence[int], iteration: int, place: int, kind: OpKind) -> None:
        """Before each op: stop when the order is over; before O: copy what this step would overwrite, for those who
        are to have it."""
        plant = self._plant
        self._meeting.require()
        plant.injector.at(iteration, place)
        if kind is OpKind.A:
            plant.injector.at(iteration, "A")
        elif kind is OpKind.O:
            plant.injector.at(iteration, "O")
            if plant.keeper.due(iteration):
                # Whoever is about to step an iteration knows that all have stepped the one before.
                plant.keeper.save(iteration, {
                    layer: plant.holdings.layer_state(layer) for index in first_of_team
                    for layer in range(*plant.holdings.stages[index].layers)})
            plant.source.wait_for_room(self._meeting.require)
            if plant.source.asked:
                plant.injector.at(iteration, "asked")
                plant.source.before_step(iteration, plant.holdings)

    def _pass_on(self, iteration: int) -> None:
        self._plant.source.stepped(iteration, self._plant.holdings)

    def _tell(self, iteration: int, loss: float, recorder: Recorder) -> bool:
        """Report an iteration; whether to stop before the next one. Raises CommunicationError when it is too late to.

        When this returns, the report has arrived. So whoever steps the next iteration, for which all others must have
        begun it, knows that the reports of this one are there, even of those that have died since.
        """
        plant = self._plant
        assert self._steps is not None
        push(plant.store, Ran(self._worker, self._order.number, iteration, loss if abs(loss) < float("inf") else None,
                              recorder.window_seconds(), recorder.ops()))
        if self._worker == self._schedule.seats[0].worker and watches_gradients(plant.setup.config.training):
            self._steps.when_settled(self._tell_settled)
        with asking_node_0():
            turn = plant.store.add(turn_key(self._order.number), 0)
        plant.injector.at(iteration, "reported")
        if turn and iteration + 1 > turn:
            raise CommunicationError(f"was to stop before iteration {turn}, and has run it")
        return turn == iteration + 1

    def _tell_settled(self) -> None:
        assert self._steps is not None and self._steps.settled is not None
        push(self._plant.store, Settled(self._order.number, Factor(*self._steps.settled)))

    def _read(self, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
        config, device = self._plant.setup.config, self._plant.device
        tokens, targets = self._plant.corpus.batch(microbatch, config.training.batch, config.model.context)
        return tokens.to(device), targets.to(device)
