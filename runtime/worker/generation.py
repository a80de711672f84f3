"""A generation: one worker's part in one order for training. It connects to the other members, gets layers, and runs.

It ends when the order does: because all iterations are done, because it was told to stop before the next one, or
because of an error. In all cases, `leave` goes back to the last committed iteration.
"""

import contextlib
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from runtime.config import RunConfig
from runtime.model.calling import Batch, on_device
from runtime.model.checkpoint import CheckpointError
from runtime.model.clipping import watches_gradients
from runtime.model.data import Data, Microbatch, is_evaluated
from runtime.model.layers import LayeredModel
from runtime.model.passed import Form
from runtime.model.sharing import sharing_of
from runtime.model.slices import Slices
from runtime.model.steps import Steps
from runtime.model.worker_group import WorkerGroup
from runtime.protocol.coordinator_link import CoordinatorLink
from runtime.protocol.failure_injection import Injector
from runtime.protocol.setup import Setup
from runtime.protocol.to_coordinator import Known, Note, Paused, Ran, Started, Status, Validated
from runtime.protocol.to_worker import Acknowledged, Factor, Order, ToWorker, Train
from runtime.replay.communication import CommunicationError, Communicator, Membership
from runtime.replay.evaluation import Evaluation
from runtime.replay.exchange import Exchange
from runtime.replay.executor import Executor
from runtime.replay.placement import Placement
from runtime.replay.recorder import Recorder
from runtime.replay.stuck_calls import OPEN_CALLS
from runtime.torch_private import TCPStore
from runtime.worker.checkpointer import Checkpointer
from runtime.worker.connections import Connections, OrderEndedError
from runtime.worker.layer_receiver import LayerFetch, LayerReceiver, senders_for
from runtime.worker.layer_sender import LayerSender
from runtime.worker.layer_store import LayerStore
from runtime.worker.slowed_recorder import recorder_for
from runtime.worker.sockets import Sockets
from schedules.schedule import OpKind, Schedule, Worker

STUCK_SECONDS = 1.0
"""Once connections are cut, calls into a process group return in milliseconds, or never."""
MEETING_SECONDS = 0.1
"""Making a process group can block where nothing can be cut yet: on a peer that died before it connected."""
LET_GO_SECONDS = 3600.0
"""An iteration takes minutes; schedules are planned in seconds."""
ANSWER_SECONDS = 600.0
"""The coordinator acknowledges an iteration in a millisecond."""
WorkerLink = CoordinatorLink[ToWorker, Setup]
_WAITS = "waits"
"""What a generation that waits for others says that it does begins so."""


class _StoppedError(Exception):
    """The order ends before an iteration that nothing has been passed on of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a worker keeps from order to order."""

    worker: Worker
    group: WorkerGroup | None
    """The processes of this worker, where it is several."""
    channel: WorkerLink
    store: TCPStore
    """Where process groups find each other."""
    setup: Setup
    config: RunConfig
    """Of this node's own job file."""
    device: torch.device
    model: LayeredModel
    placement: Placement
    corpus: Data
    validation: Data | None
    forms: Sequence[Form]
    """Of what passes at each of the placement's cuts."""
    layer_store: LayerStore
    injector: Injector
    checkpointer: Checkpointer
    layer_sender: LayerSender
    layer_receiver: LayerReceiver

    def lasting_sockets(self) -> Sockets:
        """Those that outlive an order."""
        return self.layer_sender.sockets() | self.layer_receiver.sockets()


class Generation:
    """Carries out one order for training.

    `run` is for a thread of its own, which computes, and makes and closes the connections. The main thread calls
    `end`, `acknowledged` and `abandon_if_stuck`, which return at once.
    """

    def __init__(self, context: WorkerContext, order: Train, schedule: Schedule) -> None:
        self._context = context
        self._order = order
        self._schedule = schedule
        self._worker = context.worker
        self._connections = Connections(context.lasting_sockets)
        self._acknowledged: queue.SimpleQueue[Acknowledged | None] = queue.SimpleQueue()
        self._reported: int | None = None
        """The iteration whose report is to be acknowledged."""
        self._reached = order.first_iteration - 1
        """The last iteration that it may have stepped: it is being evaluated, or reported, or was."""
        self._communicator: Communicator | None = None
        self._steps: Steps | None = None
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        """The next order has come: no peer reads from the connections any more."""
        self._ended_at: float | None = None
        self._paused = False
        self._doing: tuple[str | tuple[int, int], float] = "begins an order", time.monotonic()
        """What `run` does, or the iteration and the place of an op in the program; since when."""

    @property
    def number(self) -> int:
        """Of the order."""
        return self._order.number

    @property
    def ending(self) -> bool:
        """Whether the order has ended, and `Paused` has not been sent."""
        return self._ended_at is not None and not self._paused

    def end(self) -> None:
        """The order has ended: break the connections, so that `run` stops whatever it waits for."""
        self._ended_at = time.monotonic()
        self._connections.end()

    def end_without_coordinator(self) -> None:
        """The coordinator is gone, and with it the order: no report is acknowledged any more."""
        self.end()
        self._acknowledged.put(None)

    @property
    def paused(self) -> bool:
        """Whether `run` changes nothing any more."""
        return self._paused

    def known(self) -> Known:
        """What another coordinator must know of this order, once it has paused."""
        assert self._paused
        validated = self._validated or self._order.factor
        watched = self._steps is not None and watches_gradients(self._context.config.training)
        pending = watched and self._reached >= self._order.first_iteration and (
            validated is None or validated.iteration < self._reached)
        return Known(self.number, tuple(seat.worker for seat in self._schedule.seats), self._reached,
                     self._context.layer_store.holding.ranges, validated, pending,
                     self._order.first_iteration - 1,
                     {iteration: loss for iteration, loss in (self._steps.losses if self._steps is not None else ())
                      if math.isfinite(loss)})

    @property
    def _validated(self) -> Factor | None:
        """Of the last iteration of which it is known how to step."""
        last = None if self._steps is None else self._steps.validated
        return None if last is None else Factor(*last)

    def fits(self, order: Order) -> bool:
        """Whether what this worker holds can be brought to where an order begins."""
        return self._order.first_iteration <= order.first_iteration \
            and order.first_iteration - 1 in (self._reached, self._reached - 1)

    def let_go(self) -> None:
        """Nobody reads from the connections any more."""
        self._over.set()

    def acknowledged(self, message: Acknowledged) -> None:
        """The coordinator has acknowledged a report."""
        self._acknowledged.put(message)

    def abandon_if_stuck(self) -> None:
        """Where the thread is stuck in a process group after the order has ended, go on without it.

        See `runtime.replay.stuck_calls`. Should the call ever return, the thread ends.
        """
        assert self._ended_at is not None
        if self._thread is None:
            return
        patience = MEETING_SECONDS if self._communicator is None else STUCK_SECONDS
        thread = self._thread.ident or 0
        call = OPEN_CALLS.of(thread)
        if call is not None and time.monotonic() - self._ended_at > patience and OPEN_CALLS.abandon(thread, patience):
            self._thread = None
            self._connections.release()
            self._communicator = None  # the thread keeps it: dropping what is stuck would not return
            self._say_paused(f"stuck while {call.what}")

    def status(self) -> Status:
        """What `run` does at this moment."""
        if self._paused:
            return Status(self._worker, "waits for the next order", 0.0, waits=True)
        doing, since = self._doing
        if not isinstance(doing, str):
            iteration, place = doing
            doing = f"iteration {iteration}, {self._schedule.ops(self._worker)[place]}"
        call = None if self._thread is None else OPEN_CALLS.of(self._thread.ident or 0)
        if call is not None:
            doing, since = f"{doing}: {call.what}", call.began
        return Status(self._worker, doing, time.monotonic() - since,
                      waits=call is not None or doing.startswith(_WAITS))

    def run(self) -> None:
        """Carry out the order, and report how it ended; then close the connections, once no peer reads from them.

        Raises AbandonedError, and errors of this worker's own.
        """
        self._thread = threading.current_thread()
        self._context.injector.cut = self._connections.cut
        reason = None
        try:
            self._context.injector.at(self._order.first_iteration, "ordered")
            self._connections.require()
            self._does("meets the other workers")
            self._communicator = self._meet()
            self._connections.made()
            self._iterate(self._communicator)
        except CommunicationError as error:
            reason = str(error)
        self._say_paused(reason)
        if reason is None:
            # Others may still take from these connections what they need for the end of the iteration. Who has not
            # after so long loses them as in a failure.
            self._over.wait(LET_GO_SECONDS)
        self._connections.release()
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.drop()

    def leave(self, order: Order) -> None:
        """The next order has come: go back to the last committed iteration.

        The order came after `Paused`, so that `run` changes nothing any more. It closes the connections meanwhile:
        gloo takes 10 ms and more for that.
        """
        assert self._paused
        self._over.set()
        if self._steps is not None:
            committed, factor = order.first_iteration - 1, order.factor
            assert factor is None or factor.iteration == committed
            self._steps.go_back(committed, None if factor is None else factor.factor)
        self._context.layer_store.holding.zero_gradients()

    def _does(self, what: str | tuple[int, int]) -> None:
        self._doing = what, time.monotonic()

    def _say_paused(self, reason: str | None) -> None:
        self._paused = True
        self._context.channel.send(Paused(self._worker, self.number, self._context.layer_store.holding.ranges,
                                          self._validated, reason))

    def _meet(self) -> Communicator:
        order, context = self._order, self._context
        members = sorted(seat.worker for seat in self._schedule.seats)
        return Communicator(
            Membership(order.number, {worker: rank for rank, worker in enumerate(members)}, self._worker,
                       context.group),
            context.placement.sharers(self._schedule, self._worker, sharing_of(context.model)),
            transport=context.setup.transport, device=context.device, store=context.store,
            sums=watches_gradients(context.config.training), require=self._connections.require)

    def _take_layers(self) -> None:
        order, context = self._order, self._context
        context.injector.at(order.first_iteration, "met")
        needed = context.placement.held(self._schedule, self._worker)
        if order.restore is not None:
            self._restore(next((layers for worker, layers in order.restore if worker == self._worker), ()))
        elif order.first_iteration == context.setup.first_iteration:
            context.layer_store.restore(needed, order.first_iteration)
        self._move_layers(needed)
        context.layer_store.holding.reduce_by(context.placement.reduced(self._schedule, self._worker))
        context.injector.at(order.first_iteration, "moved")

    def _restore(self, layers: tuple[int, ...]) -> None:
        """Read layers from a checkpoint. One that is damaged ends the order: the coordinator finds another one."""
        self._does("reads a checkpoint")
        try:
            self._context.layer_store.restore(layers, self._order.first_iteration)
        except CheckpointError as error:
            self._context.channel.send(Note(self._worker, str(error)))
            raise CommunicationError(f"going back to iteration {self._order.first_iteration} failed: {error}") from None

    def _move_layers(self, needed: frozenset[int]) -> None:
        """Take over layers that were fetched for this order, or move now while all wait; drop those not needed now."""
        order, context, require = self._order, self._context, self._connections.require
        rank = 0 if context.group is None else context.group.rank()
        senders = senders_for(self._worker, order.moves, order.addresses, rank)
        self._does(f"{_WAITS} for layers to move")
        context.layer_receiver.begin(LayerFetch(0, order.number, senders, follow=False))
        receivers = {move.target for move in order.moves if move.source == self._worker}
        context.layer_sender.give(order.number, order.first_iteration - 1, len(receivers), context.layer_store, require)
        context.layer_store.keep(needed, context.layer_receiver.take(order.number, order.fetch, require))

    def _iterate(self, communicator: Communicator) -> None:
        order, context, setup = self._order, self._context, self._context.setup
        self._take_layers()
        self._does("prepares its program")
        recorder = recorder_for(setup.slowdowns, context.device)
        training, holding = context.config.training, context.layer_store.holding
        iterations = range(order.first_iteration, setup.iterations)
        exchange = Exchange(self._schedule, communicator, context.forms, self._stretch(order.first_iteration))
        speaks_for = frozenset(layer for layer, worker in context.placement.first_holders(self._schedule).items()
                               if worker == self._worker)
        self._steps = steps = Steps(
            holding, training, layers=context.model.layers, speaks_for=speaks_for,
            share=communicator.sum_over_all if watches_gradients(training) else None,
            staggered=self._schedule.optimizer == "staggered", stepped=self._pass_on)
        slices = Slices(holding, context.placement.slices(self._schedule, self._worker), context.model,
                        loss_scale=setup.loss_scale, config=context.config)
        executor = Executor(self._schedule, slices=slices, steps=steps, communicator=communicator, exchange=exchange,
                            feed=partial(self._read, context.corpus), recorder=recorder,
                            before_op=partial(self._before_op, speaks_for),
                            before_exchange=self._require_acknowledged)
        evaluate = self._evaluation(communicator, slices, steps)
        context.channel.send(Started(self._worker, order.number))
        first_traced = max(order.first_iteration, setup.iterations - setup.traced)
        with contextlib.suppress(_StoppedError):
            for iteration in iterations:
                if iteration == first_traced and setup.nodes > 1:
                    # Not before: it takes many trips between the nodes, and no recovery should wait for them.
                    self._require_acknowledged()
                    self._does("compares clocks")
                    with self._connections.more():
                        recorder.offset_seconds = communicator.clock_offset()
                recorder.begin(iteration, traced=iteration >= first_traced)
                loss = executor.run(iteration)
                context.injector.at(iteration, "stepped")
                evaluation = None
                if is_evaluated(training, iteration):
                    evaluation = evaluate(iteration)
                    exchange.more(len(self._stretch(iteration + 1)))
                self._report(iteration, loss, recorder, evaluation)
            self._require_acknowledged()
        self._does("ends its last iteration")
        steps.validate()
        exchange.flush()

    def _stretch(self, first: int) -> range:
        """Iterations from one on, up to the next evaluation: tensors of what follows that are not asked for before."""
        training, end = self._context.config.training, self._context.setup.iterations
        every = training.evaluate_every
        return range(first, end if every is None else min(end, (first // every + 1) * every))

    def _evaluation(self, communicator: Communicator, slices: Slices, steps: Steps) -> Callable[[int], float]:
        """What evaluates after an iteration. It is made when it is first used: no recovery waits for it."""
        context, made = self._context, list[Evaluation]()

        def before_op(iteration: int, place: int, kind: OpKind) -> None:
            self._does(f"evaluates after iteration {self._reached}: {kind} {place} of round {iteration}")
            self._connections.require()
            context.injector.at(self._reached, "evaluating")

        def evaluate(iteration: int) -> float:
            steps.validate()
            steps.void = False  # on all alike: nobody has run a forward of the next iteration
            self._reached = iteration
            assert context.validation is not None
            if not made:
                made.append(Evaluation(
                    self._schedule, communicator=communicator, slices=slices, steps=steps,
                    exchange=lambda schedule, iterations: Exchange(schedule, communicator, context.forms, iterations),
                    feed=partial(self._read, context.validation), before_op=before_op,
                    iterations=context.config.training.evaluation_iterations))
            return made[0].run()

        return evaluate

    def _before_op(self, speaks_for: frozenset[int], iteration: int, place: int, kind: OpKind) -> None:
        """Before each op: stop when the order is over. Before O: copy the state that the step overwrites, where a
        checkpoint or another worker needs it."""
        context = self._context
        self._does((iteration, place))
        self._connections.require()
        context.injector.at(iteration, place)
        if kind is OpKind.A:
            context.injector.at(iteration, "A")
        elif kind is OpKind.O:
            context.injector.at(iteration, "O")
            if context.checkpointer.due(iteration):
                # A worker that is about to step an iteration knows that all have stepped the one before.
                context.checkpointer.save(iteration, context.layer_store.whole_states(speaks_for))
            context.layer_sender.wait_for_room(self._connections.require)
            if context.layer_sender.asked:
                context.injector.at(iteration, "asked")
                context.layer_sender.before_step(iteration, context.layer_store)

    def _pass_on(self, iteration: int) -> None:
        self._context.layer_sender.stepped(iteration, self._context.layer_store)

    def _report(self, iteration: int, loss: float, recorder: Recorder, evaluation: float | None) -> None:
        """Report an iteration."""
        context, number = self._context, self.number
        assert self._steps is not None
        self._reached = self._reported = iteration
        context.channel.send(Ran(self._worker, number, iteration, finite(loss), recorder.window_seconds(),
                                 recorder.times(), recorder.ops(), finite(self._steps.squares),
                                 None if evaluation is None else finite(evaluation)))
        if self._worker == self._schedule.seats[0].worker and watches_gradients(context.config.training):
            self._steps.when_validated(self._report_validated)

    def _require_acknowledged(self) -> None:
        """Wait until the last report has arrived, before anything of the next iteration is passed on.

        A worker can step an iteration only after all others have passed on something of it. It then knows that their
        reports of the one before have arrived, even of those that have died since. Raises _StoppedError where the order
        ends before the next iteration.
        """
        if self._reported is None:
            return
        iteration, self._reported = self._reported, None
        doing, _ = self._doing
        self._does(f"{_WAITS} for node 0 to acknowledge iteration {iteration}")
        try:
            answer = self._acknowledged.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise CommunicationError(f"node 0 has not answered within {ANSWER_SECONDS:.0f} s") from None
        if answer is None:
            raise OrderEndedError("node 0 is gone")
        assert answer.iteration == iteration
        if answer.save:
            self._context.checkpointer.ask(iteration + 1)
        self._context.injector.at(iteration, "reported")
        if answer.stop:
            raise _StoppedError
        self._does(doing)

    def _report_validated(self) -> None:
        assert self._validated is not None
        self._context.channel.send(Validated(self.number, self._validated))

    def _read(self, data: Data, microbatch: Microbatch) -> Batch:
        config, device = self._context.config, self._context.device
        return on_device(data.batch(microbatch, config.training.batch, config.model.context), device)


def finite(number: float) -> float | None:
    """A number as JSON can say it."""
    return number if math.isfinite(number) else None
