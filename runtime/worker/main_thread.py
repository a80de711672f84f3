"""Run a worker's process: join the run, and follow the coordinator until it may leave.

The main thread reads messages and sends heartbeats, however long computing takes in other threads.
"""

import contextlib
import faulthandler
import selectors
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from slipstream.runtime.checkpoints.checkpoint import CheckpointError
from slipstream.runtime.computing.slices import SliceRunner
from slipstream.runtime.config import ConfigError, ModelConfig, RunConfig
from slipstream.runtime.errors import first_line
from slipstream.runtime.models.layered_model import build_model
from slipstream.runtime.moving.layer_receiver import FetchRequest, find_layer_sources
from slipstream.runtime.processes.process_attributes import name_process
from slipstream.runtime.processes.worker_start import WorkerSpec, format_process_name
from slipstream.runtime.protocol import to_worker
from slipstream.runtime.protocol.channel import Channel
from slipstream.runtime.protocol.coordinator_link import Connect, CoordinatorLink
from slipstream.runtime.protocol.rendezvous import RendezvousError
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.runtime.protocol.store import connect_store
from slipstream.runtime.protocol.to_coordinator import (
    NOTHING_HELD,
    Heartbeat,
    JoinWorker,
    Leaving,
    ReadableCheckpoints,
    Ready,
    RecoveryReport,
    WorkerFailed,
    WorkerStatus,
)
from slipstream.runtime.protocol.to_worker import (
    MAX_STORED_CONTENTS,
    Acknowledged,
    AssignedShare,
    EndOrder,
    Fetch,
    Finish,
    Leave,
    Publish,
    ReportCheckpoints,
    ReportStatus,
    ScheduleContent,
    ToWorker,
    Train,
)
from slipstream.runtime.replay.transport import set_own_nccl_host
from slipstream.runtime.run_folder import read_lock_holder
from slipstream.runtime.state.held_layers import build_holding
from slipstream.runtime.worker.context import STORE_TIMEOUT, WorkerLink, build_worker_context
from slipstream.runtime.worker.device_memory import NoRoomError
from slipstream.runtime.worker.generation import GenerationRunner
from slipstream.runtime.worker.order_threads import OrderThreads
from slipstream.schedules.codec import decode
from slipstream.schedules.schedule import Worker
from slipstream.schedules.shares import assemble_program
from slipstream.schedules.tables.relabel import preload_solver

HEARTBEATS_PER_TIMEOUT = 5
POLL_SECONDS = 0.02
"""Interval between checks while a generation ends."""
RETRY_SECONDS = 0.2
"""Interval between attempts to reach a coordinator."""
MAX_STORED_LOSSES = 256
"""Number of latest losses that a worker stores for another coordinator."""


class CoordinatorGoneError(Exception):
    """Error, in one line, for a lost connection to the coordinator."""


class MainThread:
    """Main thread of a worker's process: it follows the coordinator until it may leave."""

    def __init__(self, spec: WorkerSpec, channel: WorkerLink) -> None:
        self._spec = spec
        self._worker = spec.worker
        self._channel = channel
        self._context = build_worker_context(spec, channel)
        self._threads = OrderThreads(self._record_error)
        self._generation: GenerationRunner | None = None
        # The last order, if it was a `Finish`.
        self._finish_order: Finish | None = None
        # Workers that took no part in the last order for training.
        self._down: tuple[Worker, ...] = ()
        # True if the last order ended because its state cannot be trusted.
        self._doubted = False
        # The latest `Train.trusted_from` that has come.
        self._trusted_from = 0
        # This worker's share of the next order's schedule, as received last.
        self._assigned: AssignedShare | None = None
        # Contents of schedules that were received, by digest, in order of arrival.
        self._contents: dict[str, bytes] = {}
        # Of the last committed iterations: a coordinator that dies may not have written them.
        self._losses: dict[int, float] = {}
        self._error: BaseException | None = None
        self._waker, self._woken = socket.socketpair()
        self._sigterm_pending = False
        signal.signal(signal.SIGTERM, self._handle_sigterm)
        # Blocked until now, as in the fork server.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    def _handle_sigterm(self, *_: object) -> None:
        """Note a SIGTERM, of which the coordinator is told in `serve`."""
        # This worker leaves once the others need it no more. Repeated signals, as of schedulers,
        # are ignored.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._sigterm_pending = True
        self._waker.send(b"!")

    def _record_error(self, error: BaseException) -> None:
        self._error = error
        self._waker.send(b"!")

    def serve(self) -> int:
        """Handle messages until this worker may leave; return the exit status.

        Raises RendezvousError if the coordinator is lost and no other one comes in time, or before
        a SIGTERM; and all errors after which this worker cannot go on.
        """
        if self._spec.restarted:
            # The worker will most likely play its own role: build its layers while the others
            # train.
            self._context.layer_store.prebuild_layers(
                self._context.setup.common.columns[self._worker.column]
            )
        # Report to the coordinator, and follow it; if it is lost, do the same with the next one.
        recovery_report = None
        while True:
            self._channel.send(
                Ready(
                    self._worker,
                    (self._context.layer_sender.address,),
                    read_lock_holder(Path(self._spec.settings.out)),
                    recovery_report,
                    self._context.identity,
                )
            )
            try:
                return self._follow_coordinator()
            except CoordinatorGoneError as gone:
                if not self._find_new_coordinator(str(gone)):
                    return 0
                recovery_report = self._build_recovery_report()

    def _follow_coordinator(self) -> int:
        interval = (
            self._context.setup.common.resilience.heartbeat_timeout_seconds / HEARTBEATS_PER_TIMEOUT
        )
        beat = time.monotonic() + interval
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            for reporter_socket in self._context.reporter.list_sockets():
                selector.register(reporter_socket, selectors.EVENT_READ)
            while True:
                # Wait for messages, for a signal or an error, and at most until a heartbeat is due.
                ending = self._generation is not None and self._generation.is_ending
                pause = max(0.0, beat - time.monotonic())
                ready = selector.select(min(pause, POLL_SECONDS) if ending else pause)
                if self._error is not None:
                    raise self._error
                if self._sigterm_pending:
                    self._sigterm_pending = False
                    self._woken.recv(1)
                    self._channel.send(Leaving(self._worker))

                # Handle what has come, from the coordinator and from this node's agent.
                messages: list[ToWorker] = []
                if any(key.fileobj is self._channel for key, _ in ready):
                    messages = self._read_messages()
                for message in messages:
                    if isinstance(message, Leave):
                        return 0
                    self._handle_message(message)
                for acknowledged in self._context.reporter.read_acknowledgements():
                    self._handle_message(acknowledged)

                if time.monotonic() >= beat:
                    # Any other message shows that this worker is alive, and replaces a heartbeat.
                    beat = max(self._channel.sent, self._context.reporter.sent) + interval
                    if time.monotonic() >= beat:
                        self._channel.send(Heartbeat())
                        beat = time.monotonic() + interval
                if self._generation is not None and self._generation.is_ending:
                    self._generation.abandon_if_stuck()

    def _read_messages(self) -> list[ToWorker]:
        try:
            return self._channel.read()
        except RendezvousError as error:
            raise CoordinatorGoneError(str(error)) from None

    def _find_new_coordinator(self, reason: str) -> bool:
        """Connect to another coordinator; return False if that one lets this worker leave."""
        # `reason` says how the last connection ended, for the log.
        seconds = self._spec.settings.coordinator_timeout_seconds
        print(
            f"{reason}; waiting up to {seconds:g} s for another coordinator",
            file=sys.stderr,
            flush=True,
        )
        deadline = time.monotonic() + seconds
        generation = self._generation
        if generation is not None:
            generation.end_order()  # the coordinator is gone, and with it the order
        # Otherwise the generation might use layers that are incomplete.
        self._context.layer_receiver.drop_fetches(sys.maxsize)
        while time.monotonic() < deadline:
            if self._error is not None:
                raise self._error
            if self._sigterm_pending:
                raise RendezvousError(f"{reason}; received SIGTERM")
            # The next coordinator asks for what this worker holds, which still changes.
            if generation is not None and not generation.paused:
                generation.abandon_if_stuck()
                time.sleep(POLL_SECONDS)
                continue
            with contextlib.suppress(RendezvousError):
                # Another coordinator does not know that this worker has them.
                self._contents.clear()
                store = self._channel.follow_new_coordinator(
                    JoinWorker(self._worker, self._channel.setup.epoch, self._spec.rank),
                    Leave,
                    lambda setup: connect_store(setup.store, STORE_TIMEOUT),
                )
                if isinstance(store, Leave):
                    return False
                self._context = replace(self._context, store=store, setup=self._channel.setup)
                self._context.injector.replace_injections(self._channel.setup.injections)
                return True
            time.sleep(RETRY_SECONDS)
        raise RendezvousError(f"{reason}; no other coordinator came within {seconds:g} s")

    def _build_recovery_report(self) -> RecoveryReport | None:
        """Return what a new coordinator has to know; None if it makes this worker forget."""
        # A coordinator for which this worker comes too late has gone on without its state.
        generation = self._generation
        if self._channel.setup.forget:
            self._generation = None
            self._threads.drop_layers(self._context)
            return None
        # This worker was training.
        if generation is not None:
            report = generation.build_recovery_report()
            # The next node 0 may be lost before it has written them, too.
            self._losses |= report.losses
            return msgspec.structs.replace(
                report, losses=self._losses, doubted=self._doubted, trusted_from=self._trusted_from
            )
        # This worker has had no order, or sat out the last one, and holds nothing.
        if self._finish_order is None:
            return RecoveryReport(
                0,
                (),
                self._context.setup.first_iteration - 1,
                NOTHING_HELD,
                None,
                pending=False,
                losses=self._losses,
                trusted_from=self._trusted_from,
            )
        # This worker was writing its parameters, at the end of training.
        return RecoveryReport(
            self._finish_order.order,
            self._down,
            self._finish_order.first_iteration - 1,
            self._context.layer_store.list_held_state(),
            self._finish_order.factor,
            pending=False,
            begun=self._finish_order.first_iteration - 1,
            losses=self._losses,
            trusted_from=self._trusted_from,
        )

    def _handle_message(self, message: ToWorker) -> None:
        generation = self._generation
        match message:
            case ScheduleContent():
                self._contents[message.digest] = bytes(message.data)
                if len(self._contents) > MAX_STORED_CONTENTS:
                    del self._contents[next(iter(self._contents))]
            case AssignedShare():
                self._assigned = message
            case Train():
                self._finish_order, self._down, self._doubted = None, message.failed, False
                self._trusted_from = max(self._trusted_from, message.trusted_from)
                # Where the run goes back, losses of iterations since then may be wrong.
                self._losses = {
                    number: loss
                    for number, loss in self._losses.items()
                    if number < message.first_iteration
                }
                # Without a share of the schedule, this worker has no part in the order.
                if self._assigned is not None and self._assigned.order == message.order:
                    program = assemble_program(message.failed, self._assigned.share, self._contents)
                    whole = decode(bytes(message.schedule)) if message.has_schedule else None
                    self._generation = following = GenerationRunner(
                        self._context, message, program, whole
                    )
                    self._threads.start_training(self._context, message, following, generation)
                else:
                    self._context.layer_receiver.drop_fetches(message.order)
                    self._generation = None
                    self._threads.sit_out(self._context, message, generation)
            case Finish():
                self._generation, self._finish_order = None, message
                self._threads.start_finishing(self._context, message, generation)
            case Publish() if (
                self._finish_order is not None and self._finish_order.order == message.order
            ):
                self._threads.start_publishing(self._context, self._finish_order)
            case EndOrder() if generation is not None and generation.order_number == message.order:
                self._doubted |= message.doubted
                generation.end_order()
            case Acknowledged() if (
                generation is not None and generation.order_number == message.order
            ):
                generation.handle_acknowledgement(message)
                self._store_loss(message)
            case Fetch():
                # If this worker has no part in the fetch, an earlier one of the same order is
                # dropped.
                senders = find_layer_sources(
                    self._worker, message.moves, message.addresses, self._context.rank
                )
                self._context.layer_receiver.start_fetch(
                    FetchRequest(message.number, message.order, senders, follow=True)
                )
            case ReportStatus():
                self._channel.send(self._build_status())
            case ReportCheckpoints():
                # In a thread, as the folder may be on a slow disk.
                self._threads.start_thread(
                    self._context.device,
                    "checkpoints",
                    lambda: self._channel.send(
                        ReadableCheckpoints(
                            self._worker, self._context.checkpointer.list_iterations()
                        )
                    ),
                )

    def _store_loss(self, message: Acknowledged) -> None:
        if message.committed is not None:
            iteration, loss = message.committed
            self._context.checkpointer.allow_committed(iteration)
            if loss is not None:
                self._losses[iteration] = loss
            self._losses.pop(iteration - MAX_STORED_LOSSES, None)

    def _build_status(self) -> WorkerStatus:
        if self._generation is not None:
            return self._generation.build_status()
        if self._threads.is_finishing:
            return WorkerStatus(self._worker, "writes its parameters", 0.0, waits=False)
        return WorkerStatus(self._worker, "waits for an order", 0.0, waits=True)


CONNECT_SECONDS = 60.0
_SPEC = msgspec.json.Decoder(WorkerSpec)


def main(task: bytes) -> int:
    """Run the process that `task`, a `WorkerSpec` in JSON, describes; return its exit status.

    Errors are reported to node 0 and written to the log; the status is then 1.
    """
    spec = _SPEC.decode(task)
    name_process(
        f"worker {format_process_name(spec.worker, spec.rank)}",
        "/".join(Path(spec.settings.out).parts[-2:]),
    )
    # Writes the stacks of a hanging worker to its log.
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])
    if spec.settings.config.training.share_devices:
        set_own_nccl_host(f"{spec.worker}:{spec.rank}")
    # Errors of this worker alone are reported to the coordinator, which goes on without it.
    try:

        def connect(hello: msgspec.Struct, seconds: float) -> Channel[ToWorker]:
            return Channel(spec.coordinator, spec.settings.secret, hello, to_worker.decode, seconds)

        channel, setup = _join_run(spec, connect)
        link = CoordinatorLink(channel, setup, connect)
        try:
            return MainThread(spec, link).serve()
        except RendezvousError:
            raise
        except Exception as error:
            traceback.print_exc()
            link.send(
                WorkerFailed(
                    spec.worker,
                    f"{type(error).__name__}: {first_line(error)}",
                    everywhere=isinstance(error, ConfigError | NoRoomError | CheckpointError),
                )
            )
        finally:
            link.close()
    except RendezvousError as error:
        # Without node 0 there is no coordinator to report to.
        print(first_line(error), file=sys.stderr)
    return 1


def _join_run(
    spec: WorkerSpec, connect: Connect[ToWorker]
) -> tuple[Channel[ToWorker], WorkerSetup]:
    # If node 0 dies before it has answered, the next one may come at the same address.
    deadline = time.monotonic() + spec.settings.coordinator_timeout_seconds
    while True:
        channel = connect(JoinWorker(spec.worker, rank=spec.rank), CONNECT_SECONDS)
        try:
            return channel, channel.read_first(WorkerSetup)
        except RendezvousError:
            channel.close()
            if time.monotonic() > deadline:
                raise
        time.sleep(RETRY_SECONDS)


def import_slow_modules() -> None:
    """Import modules that take long, so that forked workers need not import them."""
    preload_solver()
    # Building a small model imports what torch and the runtime otherwise import at first use.
    config = RunConfig(model=ModelConfig(blocks=1, width=2, heads=1, context=2))
    model = build_model(config.model, 0, torch.float32, torch.device("cpu"))
    holding = build_holding(model, range(model.layers), config.training)
    SliceRunner((0, model.layers), holding.modules, model, loss_scale=1.0, config=config)
