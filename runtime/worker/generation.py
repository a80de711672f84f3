"""Run one worker's part in a generation, from connecting to the last step.

The worker gets the layers that the order needs, from a checkpoint or other workers, drops the rest,
and trains, until all iterations are done, the order stops, or an error occurs. Whatever the end,
`return_to_committed` then returns to the last committed iteration.
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
    """Get the layers that the order's schedule needs of this worker, and drop all others.

    Layers come from a checkpoint or other members, or are built. Raises CommunicationError,
    VersionError for state of another iteration, ValueError if no copy of a part is left, and
    CheckpointError if the checkpoint that the run began from cannot be read.
    """
    # A member drops its old layers only after all members have what they need of them; until then,
    # it reports the parts that it has received, too, as held. So if a worker dies meanwhile,
    # nothing is lost.
    order, context, store = part.order, part.context, part.context.layer_store
    context.injector.fail_if_due(order.first_iteration, "met")
    # Layers from a checkpoint, or those that this worker builds itself at the start.
    if order.restore is not None:
        _restore_layers(part, dict(order.restore).get(part.worker, ()))
    elif order.first_iteration == context.setup.first_iteration:
        # It may keep other parts of layers that it holds.
        if context.config.training.shard_optimizer:
            store.drop_all()
        # At the first iteration, each worker builds or reads the layers that it lacks.
        store.restore_layers(
            context.placement.model_layers(part.program.holds) - store.holding.modules.keys(),
            order.first_iteration,
        )
    # Layers of other members.
    sources = {move.source for move in order.moves if move.target == part.worker}
    targets = {move.target for move in order.moves if move.source == part.worker}
    part.activity.set_activity(f"{WAITING_PREFIX} for layers to move", sorted(sources | targets))
    store.add_received(move_layers(context, order, part.session.raise_if_ended, order.fetch))
    # From here on all members have what they need: members that have not learned it hold both the
    # old layers and the new ones, the others the new ones.
    if order.moves or order.fetch:
        part.session.wait_for_all()
    # Divide the state of each layer among its holders, and keep this worker's parts.
    cuts = build_partitions(
        context.placement.reductions_of(part.program),
        dict(order.cut_for),
        store.count_elements,
        context.setup.common.failure_domains,
        sharded=context.config.training.shard_optimizer,
    )
    store.keep_parts(cuts, part.worker, order.first_iteration - 1)
    context.injector.fail_if_due(order.first_iteration, "moved")


def move_layers(
    context: WorkerContext, order: Train | Finish, require: Callable[[], None], fetch: int = 0
) -> list[PartState]:
    """Send the parts that others lack for `order`, and return those that this worker lacks.

    All workers do this at once, and wait. Raises CommunicationError, and VersionError if this
    worker has to send state of another iteration.

    Parameters
    ----------
    require
        Function that is called repeatedly meanwhile, and may raise.
    fetch
        Number of an earlier fetch during training, whose parts are returned as well; 0: none.
    """
    # Receiving goes on in threads while this one sends.
    senders = find_layer_sources(context.worker, order.moves, order.addresses, context.rank)
    context.layer_receiver.start_fetch(FetchRequest(0, order.order, senders, follow=False))
    receivers = {move.target for move in order.moves if move.source == context.worker}
    context.layer_sender.send_to_waiting(
        order.order, order.first_iteration - 1, len(receivers), context.layer_store, require
    )
    return context.layer_receiver.take_parts(order.order, fetch, require)


def _restore_layers(part: OrderContext, layers: tuple[int, ...]) -> None:
    part.activity.set_activity("reads a checkpoint")
    iteration = part.order.first_iteration
    try:
        part.context.layer_store.restore_layers(layers, iteration)
    except CheckpointError as error:
        part.context.channel.send(Note(part.worker, str(error)))
        raise CommunicationError(f"returning to iteration {iteration} failed: {error}") from None


STUCK_SECONDS = 1.0
"""Time after which a call counts as stuck: with connections cut, calls return in milliseconds."""
ABORT_SECONDS = 60.0
"""Time within which a device must be idle after an abort; NCCL may need seconds."""


class StuckDeviceError(Exception):
    """Error, in one line, for a device that stays busy although its work was aborted."""


class GenerationRunner:
    """One worker's part in one order to train.

    `whole` is the schedule of all workers, if samples are dealt or evaluations run by it; otherwise
    it may be None. `run` is called in a thread of its own, which computes, and opens and closes
    connections. The main thread calls `end_order`, `handle_acknowledgement` and `abandon_if_stuck`,
    which return at once.
    """

    def __init__(
        self, context: WorkerContext, order: Train, program: WorkerProgram, whole: Schedule | None
    ) -> None:
        self._context = context
        self._order = order
        self._program = program
        self._session = GenerationSession(
            Membership(
                order.order,
                {worker: rank for rank, worker in enumerate(program.members)},
                context.worker,
                context.group,
            ),
            links=context.links,
            device=context.device,
            store=context.store,
            exempt_sockets=context.list_lasting_sockets,
        )
        self._activity = Activity()
        self._part = OrderContext(
            context=context,
            order=order,
            program=program,
            whole=whole,
            session=self._session,
            activity=self._activity,
            samples=DealtSamples(
                whole,
                program.grid,
                context.corpus,
                context.config.training,
                context.placement,
                self._session.raise_if_ended,
            ),
        )
        # Computes the samples while the workers connect.
        self._part.samples.start_dealing(order.first_iteration)
        self._reports = IterationReports(self._part)
        # None until the layers are ready.
        self._training: TrainingLoop | None = None
        self._thread: threading.Thread | None = None
        self._ended_at: float | None = None
        self.paused = False
        """True once `run` has reported how it ended, and changes nothing any more."""

    @property
    def order_number(self) -> int:
        """Number of the order that started this generation."""
        return self._order.order

    @property
    def is_ending(self) -> bool:
        """True after `end_order`, until the end of `run` has been reported (`Paused`)."""
        return self._ended_at is not None and not self.paused

    @property
    def _validated_factor(self) -> StepFactor | None:
        """Step factor of the last iteration of this order whose factor is known, if any."""
        last = None if self._training is None else self._training.steps.validated
        return None if last is None else StepFactor(*last)

    def end_order(self) -> None:
        """End the order: `run` stops waiting for other workers, and ends."""
        self._ended_at = time.monotonic()
        self._session.abort()
        self._reports.cancel_wait()

    def build_recovery_report(self) -> RecoveryReport:
        """Return what this worker holds and how far it got, for a new coordinator.

        To be called once `paused` is True.
        """
        assert self.paused
        first_iteration, reached = self._order.first_iteration, self._reports.reached
        validated = self._validated_factor or self._order.factor
        # Pending: the last step was made with a guessed step factor, not confirmed here.
        has_factors = self._training is not None and needs_gradient_norm(
            self._context.config.training
        )
        pending = (
            has_factors
            and reached >= first_iteration
            and (validated is None or validated.iteration < reached)
        )
        losses = self._training.steps.losses if self._training is not None else ()
        return RecoveryReport(
            self.order_number,
            self._program.failed,
            reached,
            self._context.layer_store.list_held_state(),
            validated,
            pending,
            max(first_iteration - 1, self._context.layer_store.holding.optimizer.last_final),
            {iteration: loss for iteration, loss in losses if math.isfinite(loss)},
        )

    def handle_acknowledgement(self, message: Acknowledged) -> None:
        """Pass an acknowledgement of an iteration to the thread that waits for it."""
        self._reports.handle_acknowledgement(message)

    def abandon_if_stuck(self) -> None:
        """Abandon `run`'s thread if it hangs in a process group, and report its end.

        To be called after `end_order`. Nothing is done in the first `STUCK_SECONDS`, and while the
        device may still write to tensors that this worker holds. Raises StuckDeviceError if the
        device is busy `ABORT_SECONDS` after `end_order`.
        """
        assert self._ended_at is not None
        if self._thread is None:
            return
        # The device could still write to tensors.
        if not self._session.is_quiescent():
            if time.monotonic() - self._ended_at > ABORT_SECONDS:
                raise StuckDeviceError(
                    f"the device is still busy {ABORT_SECONDS:.0f} s after an abort"
                )
            return
        thread = self._thread.ident or 0
        call = OPEN_CALLS.call_of_thread(thread)
        if (
            call is not None
            and time.monotonic() - self._ended_at > STUCK_SECONDS
            and OPEN_CALLS.abandon_threads(
                [thread, *self._session.reduction_threads()], STUCK_SECONDS
            )
        ):
            # Do what the thread can no longer do: free its lock and tensors, and report. If its
            # call ever returns, it ends.
            self._thread = None
            GENERATOR_LOCK.release_from(thread)
            if self._training is not None:
                self._training.free_microbatches()
            self._session.release()  # what is stuck stays open: closing it would not return
            self._send_paused(f"stuck while {call.what}")

    def build_status(self) -> WorkerStatus:
        """Return what this generation is doing now, as a message for the coordinator."""
        if self.paused:
            return WorkerStatus(self._context.worker, "waits for the next order", 0.0, waits=True)
        return self._activity.build_status(
            self._context.worker,
            self._program,
            None if self._thread is None else self._thread.ident,
        )

    def run(self) -> None:
        """Carry out the order, report how it ended, and close connections that have failed.

        Raises AbandonedError if the main thread has abandoned this one, and all errors after which
        this worker cannot go on.
        """
        self._thread = threading.current_thread()
        self._context.injector.cut = self._session.cut_connections
        self._context.injector.flip = self._context.layer_store.flip_bit
        reason, suspects, data_end, out_of_memory = None, tuple[Worker, ...](), None, False
        # Errors that end an order, and after which the worker goes on, become a reason to report.
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
                suspects = self._context.worker, *error.peers
        except DataEndedError as error:
            reason, data_end = str(error), error.iteration
        except VersionError as error:
            reason = f"worker {self._context.worker} does not hold the expected state: {error}"
            self._context.layer_store.drop_all()
        except torch.OutOfMemoryError:
            reason = self._context.memory.handle_out_of_memory(
                self._reports.reached + 1, self._context.layer_store.holding
            )
            self._context.channel.send(Note(self._context.worker, reason))
            out_of_memory = True
        finally:
            self._part.samples.close()
        # The error is handled: nothing refers to the iteration's tensors any more.
        if out_of_memory:
            self._context.memory.release_cached_memory()
        if reason is not None:
            self._session.abort()  # other members may be waiting for this worker
        self._session.drain()
        self._session.release()
        # From here on this thread changes nothing, but closing takes gloo 10 ms and more.
        self._send_paused(reason, suspects, data_end)
        self._session.close()
        trim_host_memory()

    def return_to_committed(self, order: Order) -> None:
        """Return to the state after the last committed iteration, which the next `order` names.

        To be called once `paused` is True. Gradients become zero. Raises VersionError if this
        worker's state is too far from it.
        """
        # At most one step is undone, or made again with the step factor that was right.
        assert self.paused
        committed, factor = order.first_iteration - 1, order.factor
        if self._training is None:
            self._context.layer_store.holding.optimizer.return_to(committed)
        else:
            assert factor is None or factor.iteration == committed
            self._training.steps.return_to(
                committed,
                None if factor is None else factor.factor,
                is_factor_known=factor is not None,
            )
            self._training.evaluation_mode.leave_mode()
        self._context.layer_store.holding.zero_gradients()

    def _send_paused(
        self, reason: str | None, suspects: tuple[Worker, ...] = (), data_end: int | None = None
    ) -> None:
        self.paused = True
        self._context.channel.send(
            Paused(
                self._context.worker,
                self.order_number,
                self._context.layer_store.list_held_state(),
                self._validated_factor,
                reason,
                suspects,
                data_end,
            )
        )

    def _connect_members(self) -> None:
        context, training = self._context, self._context.config.training
        self._session.connect(
            context.sharing.find_sharers(context.placement, self._program),
            pairs=self._program.connections,
            sums=needs_gradient_norm(training),
            bytes_too=training.shard_optimizer,
        )
