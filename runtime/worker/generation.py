"""Run a generation: one worker's part in one order, from connecting to its last step.

It gets the layers that the order needs, from a checkpoint or other workers, drops the rest, and
trains. It ends with the order: because all iterations are done, because the order stops before the
next iteration, or because of an error. In all cases, `return_to_committed` returns to the last
committed iteration.
"""

import math
import threading
import time
from collections.abc import Callable

import torch

from slipstream.runtime.checkpoints.checkpoint import CheckpointError
from slipstream.runtime.data.dealt_samples import DealtSamples
from slipstream.runtime.data.token_data import DataEndedError
from slipstream.runtime.moving.layer_receiver import FetchRequest, find_layer_sources
from slipstream.runtime.protocol.to_coordinator import Note, Paused, RecoveryReport, WorkerStatus
from slipstream.runtime.protocol.to_worker import Acknowledged, Finish, Order, StepFactor, Train
from slipstream.runtime.replay.group_cache import GenerationEndedError
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.replay.stuck_calls import OPEN_CALLS
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.seeds import GENERATOR_LOCK
from slipstream.runtime.state.part_state import PartState
from slipstream.runtime.state.parts import VersionError, build_partitions
from slipstream.runtime.state.step_factors import needs_gradient_norm
from slipstream.runtime.worker.context import WAITING_PREFIX, Activity, OrderContext, WorkerContext
from slipstream.runtime.worker.device_memory import trim_host_memory
from slipstream.runtime.worker.iteration_reports import IterationReports
from slipstream.runtime.worker.training_loop import TrainingLoop
from slipstream.schedules.program import WorkerProgram
from slipstream.schedules.schedule import Schedule, Worker


def take_layers(part: OrderContext) -> None:
    """Hold exactly the layers that the order's schedule needs of this worker.

    They come from a checkpoint or from other members. A member drops its old layers only after all
    members have what they need of them; until then, it reports the parts that it has received, too,
    as held. So if a worker dies meanwhile, nothing is lost: members that have not learned that all
    are ready hold both the old layers and the new ones, the others the new ones. Raises
    CommunicationError.
    """
    order, context, store = part.order, part.context, part.context.layer_store
    context.injector.fail_if_due(order.first_iteration, "met")
    if order.restore is not None:
        _restore_layers(part, next((layers for worker, layers in order.restore if worker == part.worker), ()))
    elif order.first_iteration == context.setup.first_iteration:
        if context.config.training.shard_optimizer:  # it may keep other parts of layers that it holds
            store.drop_all()
        store.restore_layers(context.placement.model_layers(part.program.holds) - store.holding.modules.keys(),
                             order.first_iteration)
    part.activity.set_activity(f"{WAITING_PREFIX} for layers to move", sorted(
        {move.source for move in order.moves if move.target == part.worker}
        | {move.target for move in order.moves if move.source == part.worker}))
    store.add_received(move_layers(context, order, part.session.raise_if_ended, order.fetch))
    if order.moves or order.fetch:
        part.session.wait_for_all()
    cuts = build_partitions(context.placement.reductions_of(part.program), dict(order.cut_for),
                            store.count_elements,
                            context.setup.common.failure_domains, sharded=context.config.training.shard_optimizer)
    store.keep_parts(cuts, part.worker, order.first_iteration - 1)
    context.injector.fail_if_due(order.first_iteration, "moved")


def move_layers(context: WorkerContext, order: Train | Finish, require: Callable[[], None], fetch: int = 0
                ) -> list[PartState]:
    """Send the parts that others lack for `order`, and return those that this worker lacks.

    All workers wait. Parts fetched during training under the number `fetch` (0: there are none) are
    returned, too. The function `require` is called meanwhile, and may raise. Raises
    CommunicationError.
    """
    senders = find_layer_sources(context.worker, order.moves, order.addresses, context.rank)
    context.layer_receiver.start_fetch(FetchRequest(0, order.order, senders, follow=False))
    receivers = {move.target for move in order.moves if move.source == context.worker}
    context.layer_sender.send_to_waiting(order.order, order.first_iteration - 1, len(receivers), context.layer_store,
                                         require)
    return context.layer_receiver.take_parts(order.order, fetch, require)


def _restore_layers(part: OrderContext, layers: tuple[int, ...]) -> None:
    """Read layers from a checkpoint. Raises CommunicationError if it is damaged."""
    part.activity.set_activity("reads a checkpoint")
    iteration = part.order.first_iteration
    try:
        part.context.layer_store.restore_layers(layers, iteration)
    except CheckpointError as error:
        part.context.channel.send(Note(part.worker, str(error)))
        raise CommunicationError(f"returning to iteration {iteration} failed: {error}") from None


STUCK_SECONDS = 1.0
"""Time after which a call is stuck: with connections cut, others return in milliseconds."""
ABORT_SECONDS = 60.0
"""Time limit of an abort, after which the process is unusable; NCCL may need seconds."""


class StuckDeviceError(Exception):
    """Error for a device that an abort has not freed. The message is one line."""


class GenerationRunner:
    """One worker's part in one order for training.

    `run` is for a thread of its own, which computes, and opens and closes connections. The main
    thread calls `end_order`, `handle_acknowledgement` and `abandon_if_stuck`, which return at once.
    """

    def __init__(self, context: WorkerContext, order: Train, program: WorkerProgram, whole: Schedule | None) -> None:
        self._context = context
        self._order = order
        self._program = program
        self._session = GenerationSession(
            Membership(order.order, {worker: rank for rank, worker in enumerate(program.members)}, context.worker,
                       context.group),
            links=context.links, device=context.device, store=context.store, spared=context.list_lasting_sockets)
        self._activity = Activity()
        self._part = OrderContext(context=context, order=order, program=program, whole=whole, session=self._session,
                                  activity=self._activity,
                                  samples=DealtSamples(whole, program.grid, context.corpus, context.config.training,
                                                       context.placement, self._session.raise_if_ended))
        self._part.samples.start_dealing(order.first_iteration)  # computes the samples while the workers connect
        self._reports = IterationReports(self._part)
        self._training: TrainingLoop | None = None
        """Iterations of the order; None until the layers are ready."""
        self._thread: threading.Thread | None = None
        self._ended_at: float | None = None
        self.paused = False
        """True if `run` changes nothing any more."""

    @property
    def order_number(self) -> int:
        """Number of the order that started this generation."""
        return self._order.order

    @property
    def is_ending(self) -> bool:
        """True if `end_order` has been called and `Paused` has not been sent."""
        return self._ended_at is not None and not self.paused

    @property
    def _validated_factor(self) -> StepFactor | None:
        """Last iteration of this order whose clip factor this worker knows, with the factor."""
        last = None if self._training is None else self._training.steps.validated
        return None if last is None else StepFactor(*last)

    def end_order(self) -> None:
        """End the order: `run` stops, whatever it waits for."""
        self._ended_at = time.monotonic()
        self._session.abort()
        self._reports.cancel_wait()

    def build_recovery_report(self) -> RecoveryReport:
        """Return how far this worker got and what it holds, for a new coordinator. The generation
        must have paused."""
        assert self.paused
        begins, reached = self._order.first_iteration, self._reports.reached
        validated = self._validated_factor or self._order.factor
        watched = self._training is not None and needs_gradient_norm(self._context.config.training)
        pending = watched and reached >= begins and (validated is None or validated.iteration < reached)
        losses = self._training.steps.losses if self._training is not None else ()
        return RecoveryReport(self.order_number, self._program.failed, reached,
                              self._context.layer_store.list_held_state(), validated, pending,
                              max(begins - 1, self._context.layer_store.holding.optimizer.last_final),
                              {iteration: loss for iteration, loss in losses if math.isfinite(loss)})

    def handle_acknowledgement(self, message: Acknowledged) -> None:
        """Pass the coordinator's acknowledgement of a reported iteration to the thread that waits
        for it."""
        self._reports.handle_acknowledgement(message)

    def abandon_if_stuck(self) -> None:
        """Abandon the thread of `run` if a process group holds it.

        `Paused` is reported in its place. See `runtime.replay.stuck_calls`. If the call ever
        returns, the thread ends. The thread's tensors of this order are freed. The thread is not
        abandoned while the device may still write to tensors that this worker holds. Raises
        StuckDeviceError if the device is still busy long after the abort.
        """
        assert self._ended_at is not None
        if self._thread is None:
            return
        if not self._session.is_quiescent():
            if time.monotonic() - self._ended_at > ABORT_SECONDS:
                raise StuckDeviceError(f"the device is still busy {ABORT_SECONDS:.0f} s after an abort")
            return
        thread = self._thread.ident or 0
        call = OPEN_CALLS.call_of_thread(thread)
        if call is not None and time.monotonic() - self._ended_at > STUCK_SECONDS \
                and OPEN_CALLS.abandon_threads([thread, *self._session.reduction_threads()], STUCK_SECONDS):
            self._thread = None
            GENERATOR_LOCK.release_from(thread)
            if self._training is not None:
                self._training.free_microbatches()
            self._session.release()  # what is stuck stays open: closing it would not return
            self._send_paused(f"stuck while {call.what}")

    def build_status(self) -> WorkerStatus:
        """Return the present activity of this generation, as a message for the coordinator."""
        if self.paused:
            return WorkerStatus(self._context.worker, "waits for the next order", 0.0, waits=True)
        return self._activity.build_status(self._context.worker, self._program,
                                           None if self._thread is None else self._thread.ident)

    def run(self) -> None:
        """Carry out the order, report how it ended, and close connections that have failed. Raises
        AbandonedError, and errors of this worker's own."""
        self._thread = threading.current_thread()
        self._context.injector.cut = self._session.cut_connections
        self._context.injector.flip = self._context.layer_store.flip_bit
        reason, named, data_end, out_of_memory = None, tuple[Worker, ...](), None, False
        try:
            self._context.injector.fail_if_due(self._order.first_iteration, "ordered")
            self._session.raise_if_ended()
            self._activity.set_activity("meets the other workers")
            self._connect_members()
            take_layers(self._part)
            self._activity.set_activity("prepares its program")
            self._training = TrainingLoop(self._part, self._reports)
            self._training.run()
        except CommunicationError as error:
            reason = str(error)
            if self._ended_at is None and not isinstance(error, GenerationEndedError):
                named = self._context.worker, *error.peers
        except DataEndedError as error:
            reason, data_end = str(error), error.iteration
        except VersionError as error:
            reason = f"worker {self._context.worker} does not hold the expected state: {error}"
            self._context.layer_store.drop_all()
        except torch.OutOfMemoryError:
            reason = self._context.memory.handle_out_of_memory(self._reports.reached + 1,
                                                               self._context.layer_store.holding)
            self._context.channel.send(Note(self._context.worker, reason))
            out_of_memory = True
        finally:
            self._part.samples.close()
        if out_of_memory:  # the error is handled: nothing refers to the iteration's tensors any more
            self._context.memory.release_cached_memory()
        if reason is not None:
            self._session.abort()  # other members may be waiting for this worker
        self._session.drain()
        self._session.release()
        self._send_paused(reason, named, data_end)
        self._session.close()
        trim_host_memory()

    def return_to_committed(self, order: Order) -> None:
        """Return to the last committed iteration, after which `order`, the next one, begins.

        Raises VersionError if this is impossible. That order came after `Paused`, so `run` changes
        nothing any more. It still closes connections: gloo takes 10 ms and more for that.
        """
        assert self.paused
        committed, factor = order.first_iteration - 1, order.factor
        if self._training is None:
            self._context.layer_store.holding.optimizer.return_to(committed)
        else:
            assert factor is None or factor.iteration == committed
            self._training.steps.return_to(committed, None if factor is None else factor.factor,
                                           known=factor is not None)
            self._training.evaluation_mode.leave_mode()
        self._context.layer_store.holding.zero_gradients()

    def _send_paused(self, reason: str | None, named: tuple[Worker, ...] = (), data_end: int | None = None) -> None:
        self.paused = True
        self._context.channel.send(Paused(self._context.worker, self.order_number,
                                          self._context.layer_store.list_held_state(), self._validated_factor, reason,
                                          named, data_end))

    def _connect_members(self) -> None:
        context, training = self._context, self._context.config.training
        self._session.connect(context.sharing.find_sharers(context.placement, self._program),
                              pairs=self._program.connections,
                              sums=needs_gradient_norm(training), bytes_too=training.shard_optimizer)
