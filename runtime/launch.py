"""Start and supervise a run: workers on this machine, the coordinator, and the files.

A run usually has one node. If it has several, each runs one launcher. The launcher of node 0, in
this module, hosts the coordinator, which knows the schedule. The launchers of the other nodes
(`runtime.node_agent`) start and end workers on its instructions.
"""

import asyncio
import dataclasses
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from slipstream.runtime.checkpoints.checkpoint import (
    identity_of,
    reopen_or_latest,
    require_job,
    verify_checkpoint,
)
from slipstream.runtime.checkpoints.parameters import load_layer
from slipstream.runtime.config import ConfigError, RunConfig
from slipstream.runtime.coordinator.decisions.commit_log import CommitLog
from slipstream.runtime.coordinator.decisions.failover import EMPTY_JOURNAL, read_journal
from slipstream.runtime.coordinator.event_loop import EventLoop
from slipstream.runtime.coordinator.records.metrics import MetricsBuilder, read_recovery_count
from slipstream.runtime.coordinator.records.run_log import ProgressCallback, RunLog, read_losses
from slipstream.runtime.coordinator.records.writer_thread import WriterThread
from slipstream.runtime.coordinator.run_fit import (
    RunFit,
    check_fit,
    compare_with_checkpoint,
    count_samples_read,
)
from slipstream.runtime.coordinator.run_options import Resilience as Resilience
from slipstream.runtime.coordinator.run_options import RunOptions as RunOptions
from slipstream.runtime.coordinator.run_options import RunRequest
from slipstream.runtime.coordinator.run_result import RunResult as RunResult
from slipstream.runtime.coordinator.run_result import build_result
from slipstream.runtime.coordinator.run_spec import RunSpec
from slipstream.runtime.device import gpu_count
from slipstream.runtime.errors import CoordinatorFailedError, NoLiveWorkerError, OtherRunError, first_line
from slipstream.runtime.errors import RunError as RunError
from slipstream.runtime.events import Started
from slipstream.runtime.processes.file_descriptors import (
    count_communicator_ends,
    count_node_0_descriptors,
    raise_descriptor_limit,
)
from slipstream.runtime.processes.fork_server import ForkServer, adopt_fork_server
from slipstream.runtime.processes.process_manager import NodeProcesses, ProcessManager, find_complete_workers
from slipstream.runtime.processes.stop_signals import RunStopped, StopSignals, handle_stop_signals
from slipstream.runtime.processes.worker_start import NodeSettings
from slipstream.runtime.protocol.authentication import SECRET_REMEDY, Secret, create_secret
from slipstream.runtime.protocol.rendezvous import Rendezvous, RendezvousError, open_listener
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.runtime.protocol.store import connect_store, host_store
from slipstream.runtime.replay.group_store import delete_old_orders
from slipstream.runtime.run_folder import (
    TakeoverRecord,
    claim_folder,
    clean_up_folder,
    hold_folder_lock,
    lock_path,
    read_takeover_record,
    remove_takeover_record,
    write_takeover_record,
)
from slipstream.runtime.run_identity import describe_difference
from slipstream.runtime.state.layer_sizes import estimate_layer_bytes
from slipstream.runtime.state.step_factors import needs_gradient_norm
from slipstream.runtime.tensor_codec import TensorError
from slipstream.schedules import codec
from slipstream.schedules.files import write_atomically
from slipstream.schedules.measured_trace import write_measured_trace
from slipstream.schedules.schedule import NoScheduleError, Schedule, Worker

LISTEN_SECONDS, LISTEN_RETRY_SECONDS = 5.0, 0.1
"""Seconds to try to listen where workers look for a coordinator, and between attempts. The system
may briefly give that port to an outgoing connection."""
MAX_RESTARTS, RESTART_WINDOW_SECONDS, FIRST_PAUSE_SECONDS = 5, 3600.0, 0.1
"""Restarts of a failing coordinator in these seconds, and the first pause, which doubles."""
HUGGING_FACE_FOLDER = "hugging-face"
"""Folder, within the run's, for a model of transformers in its own format."""


def run(schedule: Schedule, config: RunConfig, *, out: Path, iterations: int | None = None,
        options: RunOptions = RunOptions(), fork_server: ForkServer | None = None,
        progress: ProgressCallback | None = None, resilience: Resilience = Resilience()) -> RunResult:
    """Train by a schedule, from the first iteration or from a checkpoint.

    If there are several nodes, this is node 0. Writes `schedule.json`, `losses.jsonl`,
    `metrics.jsonl` and `events.jsonl` (line by line as iterations are committed and events occur),
    `schedules/`, `trace.json`, `parameters/` and `logs/` into `out`.

    Raises ConfigError or PlacementError if schedule, configuration and machine do not fit each
    other, CheckpointError if the checkpoint does not fit, FolderError if another run writes to
    `out` or has left its results there, OSError if `out` cannot be written, ScheduleError if the
    schedule is too large for a file, RendezvousError if node 0 cannot listen at its address,
    RunError if the run cannot continue after failures, and RunStopped, which is a
    KeyboardInterrupt, after SIGTERM or Ctrl-C. When it raises, no process is left, and the losses
    of the committed iterations are on disk if that had room for them.

    Parameters
    ----------
    schedule
        Schedule with which the run begins.
    config
        Settings of the model and of the training.
    out
        Folder of the run. If an earlier node 0 that wrote to it has died and workers of its run are
        alive, this call continues with them; if it would train something else than they do, it
        raises ConfigError, and leaves them as they are.
    iterations
        Number of iterations that replaces the one in `config`.
    options
        Where the run takes place, and what it reports.
    fork_server
        Fork server for the workers, which may serve several runs, one after the other; None: a new
        one.
    progress
        Function that is called with the number and the loss of each committed iteration.
    resilience
        How the run deals with failures.
    """
    if iterations is not None:
        try:
            config = replace(config, training=replace(config.training, iterations=iterations))
        except ValueError as error:  # a schedule that takes longer
            raise ConfigError(str(error)) from None
    if options.nodes > 1 and options.secret is None:
        raise ConfigError(f"a run on {options.nodes} nodes needs a secret that all of them have: {SECRET_REMEDY} on "
                          f"each")
    if resilience.resume is not None:
        resilience = dataclasses.replace(resilience, resume=reopen_or_latest(resilience.resume))
    read = count_samples_read(resilience.resume, config, schedule.grid.microbatches)
    fit = check_fit(schedule, config, options, read, resilience)
    request = RunRequest(schedule=schedule, config=config, out=out, options=options, resilience=resilience)
    ranks = config.training.tensor_parallel
    ends = count_communicator_ends(schedule, fit.placement, ranks) if fit.common.transport == "nccl" else 0
    raise_descriptor_limit(count_node_0_descriptors(len(schedule.seats) * ranks, options.nodes, ends))
    if resilience.resume is not None:
        require_job(resilience.resume, identity_of(config, fit.model.layers))
        differences = compare_with_checkpoint(resilience.resume, fit, config)
        if differences is not None:
            options.notify(differences)
        if read_takeover_record(out) is None:
            verify_checkpoint(resilience.resume)
    with ExitStack() as stack:
        stop = stack.enter_context(handle_stop_signals())
        stack.enter_context(hold_folder_lock(out, 0))
        predecessor, server_holder = read_takeover_record(out), _ForkServerHolder(fork_server, stack)
        restarts = RestartLimit()
        while True:
            leader = _RunLeader(request, fit, progress, stop, predecessor)
            try:
                return leader.lead_run(server_holder)
            except NoLiveWorkerError as error:
                remove_takeover_record(out)
                restarts_from_zero = resilience.resume is None and (options.force or options.again)
                options.notify(f"{error}{'; starts with iteration 0' if restarts_from_zero else ''}")
                predecessor, server_holder = None, _ForkServerHolder(fork_server, stack)
            except OtherRunError as error:
                raise ConfigError(str(error)) from None
            except CoordinatorFailedError as error:
                predecessor, pause = read_takeover_record(out), restarts.count_failure()
                if predecessor is None or server_holder.server is None or pause is None or stop.received is not None \
                        or not resilience.coordinator_timeout_seconds:
                    server_holder.end_run(out)
                    assert error.__cause__ is not None
                    raise RunError(str(error.__cause__)) if isinstance(error.__cause__, NoScheduleError) \
                        else error.__cause__ from None
                options.notify("".join(traceback.format_exception(error.__cause__))
                               + f"node 0 failed and is restarted; its workers are alive: {error}")
                time.sleep(pause)


class RestartLimit:
    """Counter of the failures of a coordinator, which limits how often it is restarted."""

    def __init__(self) -> None:
        self._failures: list[float] = []

    def count_failure(self) -> float | None:
        """Count a failure; return the pause before the restart, or None after too many. More than
        `MAX_RESTARTS` in the last `RESTART_WINDOW_SECONDS` are too many."""
        now = time.monotonic()
        self._failures = [*(at for at in self._failures if at > now - RESTART_WINDOW_SECONDS), now]
        count = len(self._failures)
        return None if count > MAX_RESTARTS else FIRST_PAUSE_SECONDS * 2 ** (count - 1)


class _ForkServerHolder:
    """Holder of this node's fork server, which outlives a failing coordinator."""

    def __init__(self, given: ForkServer | None, stack: ExitStack) -> None:
        self._given = given
        self._stack = stack
        self.server: ForkServer | None = None
        """Fork server that starts the workers of this node. None until workers are started or
        adopted."""
        self.adopted = False
        """True if the server may have workers of an earlier coordinator."""

    def get_server(self, found: ForkServer | None) -> ForkServer:
        """Return this node's fork server: the held one, `found`, `run`'s, or a new one."""
        if self.server is None:
            self.server = found or self._given or self._stack.enter_context(ForkServer())
        self.adopted = True
        return self.server

    def end_run(self, out: Path) -> None:
        """Kill all workers, and remove temporary files, locks and the takeover record."""
        if self.server is not None:
            self.server.kill_all()
        remove_takeover_record(out)
        clean_up_folder(out)


@dataclass(frozen=True, slots=True)
class _RunLeader:
    """Leader of one run, in a locked folder: starts or adopts workers, runs the coordinator."""

    request: RunRequest
    fit: RunFit
    progress: ProgressCallback | None
    stop: StopSignals
    behind: TakeoverRecord | None
    """Record of the earlier node 0 whose workers the run continues with. None: they are started."""

    def lead_run(self, held: _ForkServerHolder) -> RunResult:
        """Lead the run to its end, and return its result.

        `held` keeps the fork server beyond this call, if the coordinator fails. If the field
        `behind` is set, the run continues with the workers of an earlier coordinator. Raises
        NoLiveWorkerError if none of them is alive, and CoordinatorFailedError if the coordinator
        fails in a way that another one could take over from.
        """
        request, behind = self.request, self.behind
        config, options, out, resume = request.config, request.options, request.out, request.resilience.resume
        first = (0 if resume is None else resume.iteration) if behind is None else behind.first_iteration
        with ExitStack() as stack:
            adopted = held.server if held.adopted else self._adopt_workers(stack)
            listener, address = self._listen_for_workers()
            stack.callback(listener.close)
            if behind is None:
                encoded = codec.encode(request.schedule)
                claim_folder(out, resume, config, force=options.force, again=options.again)
                write_atomically(out / "schedule.json", encoded)
            stack.push(partial(_call_unless_coordinator_failed, clean_up_folder, out))
            fork_server = held.get_server(adopted)
            fork_server.register_cleanup("slipstream.runtime.run_folder:remove_lock", lock_path(out, 0).absolute())
            store, store_address = host_store(Rendezvous(address.host, 0))
            options.announce(address)
            losses = None if behind is None else read_losses(out, first)
            writer = stack.enter_context(WriterThread(options.notify))
            log = stack.enter_context(self._build_log(first + len(losses or ()), writer))
            log.write(_build_started_event(request))
            settings = self._build_settings(adopted)
            record = self._build_takeover_record(address, first, settings, fork_server)
            alive = [] if adopted is None else find_complete_workers(adopted, config.training.tensor_parallel)
            events = EventLoop(
                self._build_run(record, settings, store_address, losses, alive),
                CommitLog(job=request.schedule.job, first_iteration=first, skips=config.training.skip_nonfinite,
                          validates=needs_gradient_norm(config.training)),
                self._build_process_manager(record, settings, fork_server, alive, writer), log, writer)
            write_takeover_record(out, record)
            stack.push(partial(_call_unless_coordinator_failed, writer, partial(remove_takeover_record, out)))
            try:
                with events.processes.run_workers(found=behind is not None):
                    asyncio.run(events.serve(listener, self.stop))
            finally:
                del store  # closes it, whatever an error keeps
            self._write_results(events)
        return build_result(request.schedule, events, out)

    def _build_log(self, begins: int, writer: WriterThread) -> RunLog:
        options, out = self.request.options, self.request.out
        return RunLog(out, begins, writer,
                      metrics=MetricsBuilder(self.request.config.training, self.fit.work, read_recovery_count(out)),
                      tensorboard=options.tensorboard, prometheus=options.prometheus, observer=options.observe,
                      iteration_observer=options.observe_iteration or (lambda _: None),
                      progress=self.progress or (lambda *_: None))

    def _write_results(self, events: EventLoop) -> None:
        """Write the trace of a complete run and, for a model of transformers, its format."""
        # Raises RunStopped if a signal has ended the run early, and RunError if the data have
        # ended.
        if events.data_end_reason is not None and self.stop.received is None:
            raise RunError(events.data_end_reason)
        if events.has_stopped_early:
            signal_received = self.stop.received or signal.SIGTERM
            raise RunStopped(signal_received, f"interrupted by {signal_received.name}" + (
                f", and not ended within {self.request.options.grace_seconds:g} s" if events.out_of_time else ""))
        write_measured_trace(events.state.log.build_trace(), self.request.out / "trace.json")
        if self.request.config.model.hugging_face is not None:
            self._export_hugging_face()

    def _export_hugging_face(self) -> None:
        """Write the model in the format of transformers, or tell the users that this failed."""
        from slipstream.runtime.checkpoints.hugging_face_export import export_model
        from slipstream.runtime.models.hugging_face.configuration import read_config, weights_folder

        model, folder = self.request.config.model, self.request.out / HUGGING_FACE_FOLDER
        assert model.hugging_face is not None
        try:
            export_model(read_config(model), partial(load_layer, self.request.out), folder,
                         weights_folder(model.hugging_face))
        except (ConfigError, TensorError, OSError) as error:
            self.request.options.notify(f"{folder} cannot be written: {first_line(error)}")

    def _adopt_workers(self, stack: ExitStack) -> ForkServer | None:
        """Adopt the workers that an earlier node 0 left here. Return their fork server, if any."""
        # `stack` closes it. Raises NoLiveWorkerError if an earlier run is continued, none can be
        # adopted, and there is no other node that could have live workers.
        if self.behind is None:
            return None
        adopted = None if self.behind.fork_server is None else adopt_fork_server(self.behind.fork_server)
        if adopted is not None:
            self._require_same_run(adopted, self.behind)
            stack.push(partial(_call_unless_coordinator_failed, adopted.close))
        elif self.request.options.nodes == 1:
            raise NoLiveWorkerError("no worker of the previous run in this folder is alive")
        return adopted

    def _require_same_run(self, adopted: ForkServer, behind: TakeoverRecord) -> None:
        """Raise OtherRunError if the workers in `adopted` are of another run; they are left."""
        difference = None if behind.identity is None else describe_difference(self.fit.facts.identity, behind.identity)
        if difference is not None:
            adopted.detach()
            raise OtherRunError(f"{self.request.out}: the workers of a run wait there for node 0, and {difference}; "
                                "start it with the job file, code and data of the run, or wait until its workers have "
                                "ended")

    def _listen_for_workers(self) -> tuple[socket.socket, Rendezvous]:
        """Return a socket that listens for workers, and its address."""
        # It is that of the earlier coordinator, if there is one and the options name no port.
        # Raises NoLiveWorkerError if that address cannot be used, because workers look for a
        # coordinator only there, and RendezvousError if another one cannot.
        wanted = self.request.options.rendezvous
        if self.behind is not None and (wanted is None or wanted.port == 0):
            deadline = time.monotonic() + LISTEN_SECONDS
            while True:
                try:
                    return open_listener(self.behind.coordinator)
                except RendezvousError as error:
                    if time.monotonic() > deadline:
                        raise NoLiveWorkerError("the workers of the previous run in this folder cannot be reached: "
                                                f"{error}") from None
                time.sleep(LISTEN_RETRY_SECONDS)
        return open_listener(wanted)

    def _build_settings(self, adopted: ForkServer | None) -> NodeSettings:
        request = self.request
        resume, shared_secret = request.resilience.resume, request.options.secret
        own_secret = create_secret() if adopted is None else Secret(bytes.fromhex(adopted.note))
        path = None if resume is None else str(resume.path.resolve())
        return NodeSettings(config=request.config, secret=shared_secret or own_secret, out=str(request.out.resolve()),
                            resume=path if self.behind is None else self.behind.resume,
                            coordinator_timeout_seconds=request.resilience.coordinator_timeout_seconds)

    def _build_takeover_record(self, opened: Rendezvous, first: int, settings: NodeSettings, fork_server: ForkServer
                               ) -> TakeoverRecord:
        """Return the record from which a new node 0 can continue with this one's workers."""
        # Workers reach this node 0 at the address `opened`; the run began with the iteration
        # `first`. If `settings` let workers wait for a coordinator, `fork_server` is asked to keep
        # them alive.
        request, behind = self.request, self.behind
        epoch = max(time.time_ns(), 0 if behind is None else behind.epoch + 1)
        seconds = settings.coordinator_timeout_seconds
        read = count_samples_read(request.resilience.resume, request.config, request.schedule.grid.microbatches)
        return TakeoverRecord(
            epoch=epoch, coordinator=opened, first_iteration=first, resume=settings.resume,
            read=read if behind is None else behind.read, crashes=() if behind is None else behind.crashes,
            fork_server=fork_server.hold_for_adoption(seconds, settings.secret.hex()) if seconds else None,
            identity=self.fit.facts.identity if behind is None else behind.identity)

    def _build_run(self, record: TakeoverRecord, settings: NodeSettings, store: Rendezvous,
                   losses: Sequence[float] | None, alive: Sequence[Worker]) -> RunSpec:
        request, fit = self.request, self.fit
        setup = WorkerSetup(common=fit.common, epoch=record.epoch, first_iteration=record.first_iteration,
                            read=record.read, store=store)
        options = dataclasses.replace(request.options, secret=settings.secret)
        return RunSpec(request=dataclasses.replace(request, options=options), setup=setup, facts=fit.facts,
                       forget_orders=lambda before: delete_old_orders(connect_store(store), before),
                       layer_bytes=() if request.resilience.settling is None else estimate_layer_bytes(
                           fit.model, request.config.training, request.schedule.grid.pipelines),
                       behind=self.behind, losses=losses,
                       journal=EMPTY_JOURNAL if self.behind is None else read_journal(request.out),
                       gone=[worker for worker in fit.facts.shares[0] if worker not in alive])

    def _build_process_manager(self, record: TakeoverRecord, settings: NodeSettings, fork_server: ForkServer,
                               alive: Sequence[Worker], writer: WriterThread) -> ProcessManager:
        request, shares = self.request, self.fit.facts.shares
        places = {worker: node for node, share in enumerate(shares) for worker in share}
        local = NodeProcesses(fork_server, record.coordinator, shares[0], gpu_count(self.fit.common.device), settings,
                              self.fit.gpus.first)
        running = places if self.behind is None else alive
        return ProcessManager(
            local, places, request.resilience.returns,
            [worker for worker in request.schedule.grid.workers() if worker not in running],
            request.resilience.node_failures, faults_per_hour=request.resilience.faults_per_hour,
            crashes=record.crashes,
            keep=lambda crashes: writer(partial(write_takeover_record, request.out, replace(record, crashes=crashes))))


def _call_unless_coordinator_failed(work: Callable[..., object], *given: Any) -> None:
    """Call `work` unless CoordinatorFailedError is raised: another one needs what it removes."""
    # It is an exit callback for `ExitStack.push`: the arguments for `work` come first, then the
    # three of the exception.
    *arguments, kind, _, _ = given
    if kind is None or not issubclass(kind, CoordinatorFailedError):
        work(*arguments)


def _build_started_event(request: RunRequest) -> Started:
    schedule, training = request.schedule, request.config.training
    whole = len(schedule.seats) == schedule.grid.pipelines * schedule.grid.columns
    planned = schedule.seconds(schedule.period_ticks) if whole else None
    return Started(job=schedule.job, workers=schedule.grid.pipelines * schedule.grid.columns,
                   iterations=training.iterations, samples=training.batch * schedule.grid.total_microbatches,
                   fault_free_period=planned or request.options.fault_free_seconds)
