"""Start and supervise a run: workers on this machine, the coordinator, and the files.

Each node of a run has one launcher. The launcher of node 0, in this module, hosts the coordinator,
which knows the schedule. The launchers of other nodes (`runtime.node_agent`) start and end workers
as the coordinator says.
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
    CheckpointError,
    find_newest_undamaged,
    identity_of,
    open_checkpoint,
    reopen_or_latest,
    report_damaged,
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
from slipstream.runtime.errors import (
    CoordinatorFailedError,
    NoLiveWorkerError,
    OtherRunError,
    first_line,
)
from slipstream.runtime.errors import RunError as RunError
from slipstream.runtime.events import Started
from slipstream.runtime.failure_domains import FailureDomains
from slipstream.runtime.processes.file_descriptors import (
    count_communicator_ends,
    count_node_0_descriptors,
    raise_descriptor_limit,
)
from slipstream.runtime.processes.fork_server import ForkServer, adopt_fork_server
from slipstream.runtime.processes.process_manager import (
    NodeProcesses,
    ProcessManager,
    find_complete_workers,
)
from slipstream.runtime.processes.stop_signals import RunStopped, StopSignals, handle_stop_signals
from slipstream.runtime.processes.worker_start import NodeSettings
from slipstream.runtime.protocol.authentication import SECRET_REMEDY, Secret, create_secret
from slipstream.runtime.protocol.rendezvous import Rendezvous, RendezvousError, open_listener
from slipstream.runtime.protocol.setup import WorkerSetup
from slipstream.runtime.protocol.store import connect_store, host_store
from slipstream.runtime.replay.group_store import delete_old_orders
from slipstream.runtime.replay.microbatch import SamplesRead
from slipstream.runtime.run_folder import (
    CHECKPOINTS,
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

LISTEN_SECONDS = 5.0
"""Seconds for which to try to listen where workers look for a coordinator."""
LISTEN_RETRY_SECONDS = 0.1
"""Seconds between two attempts to listen."""
MAX_RESTARTS = 5
"""Largest number of restarts of a coordinator within `RESTART_WINDOW_SECONDS`."""
RESTART_WINDOW_SECONDS = 3600.0
"""Seconds for which the failure of a coordinator counts."""
FIRST_PAUSE_SECONDS = 0.1
"""Seconds before the first restart; each further pause is twice as long as the last."""
HUGGING_FACE_FOLDER = "hugging-face"
"""Folder in the run's folder for a model of transformers, in the format of transformers."""


def run(
    schedule: Schedule,
    config: RunConfig,
    *,
    out: Path,
    iterations: int | None = None,
    options: RunOptions = RunOptions(),
    fork_server: ForkServer | None = None,
    progress: ProgressCallback | None = None,
    resilience: Resilience = Resilience(),
) -> RunResult:
    """Train by a schedule, from the first iteration or from a checkpoint.

    If there are several nodes, this one is node 0. Writes `schedule.json`, `losses.jsonl`,
    `metrics.jsonl` and `events.jsonl` (line by line as iterations are committed and events occur),
    `schedules/`, `trace.json`, `parameters/`, `checkpoints/`, `logs/` and, for a model of
    transformers, `hugging-face/` into `out`.

    Raises ConfigError or PlacementError if schedule, configuration and machine do not fit each
    other, CheckpointError if the checkpoint is damaged or does not fit, FolderError if another run
    writes to `out` or has left its results there, OSError if `out` cannot be written, ScheduleError
    if the schedule is too large for a file, RendezvousError if node 0 cannot listen at its address,
    RunError if the data end early or the run cannot continue after failures, and RunStopped, which
    is a KeyboardInterrupt, after a signal (`StopSignals`). When it raises, no process of this run
    is left, and the losses of the committed iterations are on disk, unless the disk is full.

    Parameters
    ----------
    schedule
        Schedule with which the run begins.
    config
        Settings of the model and of the training.
    out
        Folder of the run. If an earlier node 0 that wrote to it has died and its workers are alive,
        this call continues with these workers; or it raises ConfigError, and leaves them as they
        are, if it would train something else than they do.
    iterations
        Number of iterations, instead of the number in `config`.
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
    # What is asked for? Refuse what contradicts itself, and find the checkpoint that is meant.
    if iterations is not None:
        try:
            config = replace(config, training=replace(config.training, iterations=iterations))
        except ValueError as error:  # a learning-rate schedule that is longer
            raise ConfigError(str(error)) from None
    if options.nodes > 1 and options.secret is None:
        raise ConfigError(
            f"a run on {options.nodes} nodes needs a secret that all of them have: "
            f"{SECRET_REMEDY} on each"
        )
    if resilience.resume is not None:
        resilience = dataclasses.replace(resilience, resume=reopen_or_latest(resilience.resume))
    request = RunRequest(
        schedule=schedule, config=config, out=out, options=options, resilience=resilience
    )
    # Does it fit this machine? Layers are tried here, so that no worker starts in vain.
    read = _count_samples_read(request, read_takeover_record(out))
    fit = check_fit(schedule, config, options, read, resilience)
    # May it open enough files? Node 0 has a connection to each process; NCCL needs more.
    ranks, ends = config.training.tensor_parallel, 0
    if fit.common.transport == "nccl":
        ends = count_communicator_ends(schedule, fit.placement, ranks)
    raise_descriptor_limit(
        count_node_0_descriptors(len(schedule.seats) * ranks, options.nodes, ends)
    )
    # Does the checkpoint belong to this job?
    if resilience.resume is not None:
        require_job(resilience.resume, identity_of(config, fit.model.layers))
        differences = compare_with_checkpoint(resilience.resume, fit, config)
        if differences is not None:
            options.notify(differences)
        if read_takeover_record(out) is None:  # else live workers have the layers
            verify_checkpoint(resilience.resume)
    with ExitStack() as stack:
        stop = stack.enter_context(handle_stop_signals())
        stack.enter_context(hold_folder_lock(out, 0))
        predecessor = read_takeover_record(out)
        if (now := _count_samples_read(request, predecessor)) != read:
            # The folder's run has begun or ended since.
            read, fit = now, check_fit(schedule, config, options, now, resilience)
        server_holder = _ForkServerHolder(fork_server, stack)
        restarts = RestartLimit()
        # Each pass is one coordinator: the first, or one that takes over from its predecessor.
        while True:
            leader = _RunLeader(request, fit, progress, stop, predecessor)
            try:
                return leader.lead_run(server_holder)
            except NoLiveWorkerError as error:
                # No worker is left to be taken over: the next pass starts all workers anew. From
                # here on, all depends on the checkpoint, which was not verified above.
                options.notify(str(error))
                assert predecessor is not None
                request = _resume_whole(request, predecessor)
                if request.resilience.resume is not None:
                    require_job(request.resilience.resume, identity_of(config, fit.model.layers))
                remove_takeover_record(out)
                predecessor, server_holder = None, _ForkServerHolder(fork_server, stack)
                if (now := _count_samples_read(request, None)) != read:
                    read, fit = now, check_fit(schedule, config, options, now, resilience)
            except OtherRunError as error:
                raise ConfigError(str(error)) from None
            except CoordinatorFailedError as error:
                predecessor, pause = read_takeover_record(out), restarts.count_failure()
                # Is another coordinator possible, wanted, and worth an attempt?
                if (
                    predecessor is None
                    or server_holder.server is None
                    or pause is None
                    or stop.received is not None
                    or not resilience.coordinator_timeout_seconds
                ):
                    # No: the run ends with the coordinator's own error. One of the planner becomes
                    # a RunError, since without a schedule the run cannot continue.
                    server_holder.end_run(out)
                    assert error.__cause__ is not None
                    raise (
                        RunError(str(error.__cause__))
                        if isinstance(error.__cause__, NoScheduleError)
                        else error.__cause__
                    ) from None
                # The workers wait meanwhile for a node 0 at the same address.
                options.notify(
                    "".join(traceback.format_exception(error.__cause__))
                    + f"node 0 failed and is restarted; its workers are alive: {error}"
                )
                time.sleep(pause)


def _count_samples_read(request: RunRequest, behind: TakeoverRecord | None) -> SamplesRead:
    """Return the samples read before this run, or before the run `behind` that continues."""
    if behind is not None:
        return behind.read
    microbatches = request.schedule.grid.microbatches
    return count_samples_read(request.resilience.resume, request.config, microbatches)


def _resume_whole(request: RunRequest, behind: TakeoverRecord) -> RunRequest:
    """Return the request, with an undamaged checkpoint if it resumes. Raises CheckpointError."""
    # The run of the record `behind` has lost all its processes. A request that repeats it begins
    # with its newest undamaged checkpoint, or else with the one that it began from.
    resume, options = request.resilience.resume, request.options
    folder = request.out / CHECKPOINTS
    began = None if behind.resume is None else Path(behind.resume)
    if resume is None and (began is None or not options.again):
        if options.force or options.again:
            options.notify("starts with iteration 0")
        return request
    newest, damaged = find_newest_undamaged(folder)
    run_paths = [began, *map(Path.resolve, damaged)]
    if newest is not None:
        run_paths.append(newest.path.resolve())
    if resume is not None and resume.path.resolve() not in run_paths:
        # Another checkpoint than the newest of this run may be meant.
        whole = verify_checkpoint(resume)
    elif newest is not None:
        whole = newest
    elif began is None or (damaged and began.parent == folder.resolve()):
        raise next(iter(damaged.values()))
    else:
        whole = verify_checkpoint(open_checkpoint(began))
        options.notify(f"the run has no checkpoint of its own: training continues from {began}")
        options = dataclasses.replace(options, again=True)
    # Other nodes look only where their own --resume says.
    asked = folder if resume is None else resume.path.parent
    if options.nodes > 1 and whole.path.resolve().parent != asked.resolve():
        raise CheckpointError(
            f"{request.out}: the run there continues from {whole.path}; start every node with "
            f"--resume {whole.path}"
        )
    report_damaged(damaged, whole, options.notify, rename=True)
    resilience = dataclasses.replace(request.resilience, resume=whole)
    return dataclasses.replace(request, options=options, resilience=resilience)


class RestartLimit:
    """Counter of a coordinator's failures, to limit how often the coordinator is restarted."""

    def __init__(self) -> None:
        self._failures: list[float] = []

    def count_failure(self) -> float | None:
        """Count a failure; return the seconds to pause before a restart, None after too many."""
        # Failures of long ago do not count: then the pauses begin small again.
        now = time.monotonic()
        self._failures = [*(at for at in self._failures if at > now - RESTART_WINDOW_SECONDS), now]
        count = len(self._failures)
        return None if count > MAX_RESTARTS else FIRST_PAUSE_SECONDS * 2 ** (count - 1)


class _ForkServerHolder:
    """Holder of this node's fork server, which outlives a failing coordinator."""

    def __init__(self, callers_server: ForkServer | None, stack: ExitStack) -> None:
        self._callers_server = callers_server
        self._stack = stack
        self.server: ForkServer | None = None
        """Fork server of this node's workers; None until these are started or adopted."""
        self.adopted = False
        """True if the server may have workers of an earlier coordinator."""

    def get_server(self, adopted: ForkServer | None) -> ForkServer:
        """Return this node's fork server, which the first call chooses."""
        # An adopted server has live workers, and that of the caller of `run` serves its next runs.
        if self.server is None:
            self.server = adopted or self._callers_server or self._stack.enter_context(ForkServer())
        self.adopted = True
        return self.server

    def end_run(self, out: Path) -> None:
        """Kill all workers, and remove temporary files, locks and the takeover record."""
        # No coordinator will take over, so nothing may be left for one.
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
    """Record of the earlier node 0 whose workers are taken over; None: workers are started."""

    def lead_run(self, server_holder: _ForkServerHolder) -> RunResult:
        """Lead the run to its end, and return its result."""
        # `server_holder` keeps the fork server beyond this call, if the coordinator fails. Raises
        # NoLiveWorkerError if no worker of an earlier coordinator is alive, and
        # CoordinatorFailedError if another coordinator could take over.
        request, behind = self.request, self.behind
        config, options, out = request.config, request.options, request.out
        resume = request.resilience.resume
        first = 0 if resume is None else resume.iteration
        if behind is not None:
            first = behind.first_iteration
        with ExitStack() as stack:
            # Meet the workers: those of an earlier node 0, at the address that they know.
            adopted = server_holder.server if server_holder.adopted else self._adopt_workers(stack)
            listener, address = self._listen_for_workers()
            stack.callback(listener.close)
            if behind is None:
                # Encoded first: a schedule that is too large must not cost the old results.
                encoded = codec.encode(request.schedule)
                claim_folder(out, resume, config, force=options.force, again=options.again)
                write_atomically(out / "schedule.json", encoded)
            stack.push(partial(_call_unless_coordinator_failed, clean_up_folder, out))
            # Have the fork server clean up even if this process is killed.
            fork_server = server_holder.get_server(adopted)
            fork_server.register_cleanup(
                "slipstream.runtime.run_folder:remove_lock", lock_path(out, 0).absolute()
            )
            store, store_address = host_store(Rendezvous(address.host, 0))
            options.announce(address)
            # Open the run's files, and continue them where the last coordinator stopped.
            losses = None if behind is None else read_losses(out, first)
            writer = stack.enter_context(WriterThread(options.notify))
            log = stack.enter_context(self._build_log(first + len(losses or ()), writer))
            log.write(_build_started_event(request))
            # Build the takeover record and, for the workers that are alive, the event loop.
            settings = self._build_settings(adopted)
            record = self._build_takeover_record(address, first, settings, fork_server)
            alive = list[Worker]()
            if adopted is not None:
                alive = find_complete_workers(adopted, config.training.tensor_parallel)
            events = EventLoop(
                self._build_run(record, settings, store_address, losses, alive),
                CommitLog(
                    job=request.schedule.job,
                    first_iteration=first,
                    skips=config.training.skip_nonfinite,
                    validates=needs_gradient_norm(config.training),
                ),
                self._build_process_manager(record, settings, fork_server, alive, writer),
                log,
                writer,
            )
            # From here on, another node 0 can take over. The record is removed at the end, except
            # after CoordinatorFailedError: another coordinator then continues with it.
            write_takeover_record(out, record)
            stack.push(
                partial(
                    _call_unless_coordinator_failed, writer, partial(remove_takeover_record, out)
                )
            )
            try:
                # The workers train from here; this process makes decisions until the end.
                with events.processes.run_workers(found=behind is not None):
                    asyncio.run(events.serve(listener, self.stop))
            finally:
                # Closes the store, which an error's traceback would keep open by this variable.
                del store
            self._write_results(events)
        return build_result(request.schedule, events, out)

    def _build_log(self, begins: int, writer: WriterThread) -> RunLog:
        # The files are continued after the iterations that they have, and so are their counts.
        options, out = self.request.options, self.request.out
        return RunLog(
            out,
            begins,
            writer,
            metrics=MetricsBuilder(
                self.request.config.training, self.fit.work, read_recovery_count(out)
            ),
            tensorboard=options.tensorboard,
            prometheus=options.prometheus,
            observer=options.observe,
            iteration_observer=options.observe_iteration or (lambda _: None),
            progress=self.progress or (lambda *_: None),
        )

    def _write_results(self, events: EventLoop) -> None:
        """Write the trace of a complete run, and a model of transformers in its format."""
        # A run that has not come to its last iteration ends with an error: RunError if the data
        # have ended, RunStopped after a signal.
        if events.data_end_reason is not None and self.stop.received is None:
            raise RunError(events.data_end_reason)
        if events.has_stopped_early:
            signal_received = self.stop.received or signal.SIGTERM
            text = f"interrupted by {signal_received.name}"
            if events.out_of_time:
                text += f", and not ended within {self.request.options.grace_seconds:g} s"
            raise RunStopped(signal_received, text)
        write_measured_trace(events.state.log.build_trace(), self.request.out / "trace.json")
        if self.request.config.model.hugging_face is not None:
            self._export_hugging_face()

    def _export_hugging_face(self) -> None:
        """Write the model in the format of transformers, or tell the user that this failed."""
        # Imported here, as other models need no transformers.
        from slipstream.runtime.checkpoints.hugging_face_export import export_model
        from slipstream.runtime.models.hugging_face.configuration import read_config, weights_folder

        model, folder = self.request.config.model, self.request.out / HUGGING_FACE_FOLDER
        assert model.hugging_face is not None
        # A failure must not cost the trained parameters, which are on disk in another format.
        try:
            export_model(
                read_config(model),
                partial(load_layer, self.request.out),
                folder,
                weights_folder(model.hugging_face),
            )
        except (ConfigError, TensorError, OSError) as error:
            self.request.options.notify(f"{folder} cannot be written: {first_line(error)}")

    def _adopt_workers(self, stack: ExitStack) -> ForkServer | None:
        """Adopt the workers that an earlier node 0 left; return their fork server, or None."""
        # Returns None if there was no earlier node 0, or if only other nodes may have live workers.
        # Raises NoLiveWorkerError if there are no other nodes.
        if self.behind is None:
            return None
        adopted = None
        if self.behind.fork_server is not None:
            adopted = adopt_fork_server(self.behind.fork_server)
        if adopted is not None:
            self._require_same_run(adopted, self.behind)
            stack.push(partial(_call_unless_coordinator_failed, adopted.close))
        elif self.request.options.nodes == 1:
            raise NoLiveWorkerError("no worker of the previous run in this folder is alive")
        return adopted

    def _require_same_run(self, adopted: ForkServer, behind: TakeoverRecord) -> None:
        """Raise OtherRunError if the adopted workers are of another run; they stay alive."""
        # The workers of another run are left as they are, for a node 0 of that run.
        if behind.identity is None:  # a record of an earlier version
            return
        difference = describe_difference(self.fit.facts.identity, behind.identity)
        if difference is not None:
            adopted.detach()
            raise OtherRunError(
                f"{self.request.out}: the workers of a run wait there for node 0, and "
                f"{difference}; start it with the job file, code and data of the run, or wait "
                "until its workers have ended"
            )

    def _listen_for_workers(self) -> tuple[socket.socket, Rendezvous]:
        # Workers of an earlier coordinator look for another one only at its address: if that cannot
        # be used, raises NoLiveWorkerError. Raises RendezvousError for any other address.
        wanted = self.request.options.rendezvous
        if self.behind is not None and (wanted is None or wanted.port == 0):
            deadline = time.monotonic() + LISTEN_SECONDS
            while True:
                try:
                    return open_listener(self.behind.coordinator)
                except RendezvousError as error:
                    if time.monotonic() > deadline:
                        raise NoLiveWorkerError(
                            "the workers of the previous run in this folder cannot be reached: "
                            f"{error}"
                        ) from None
                time.sleep(LISTEN_RETRY_SECONDS)
        return open_listener(wanted)

    def _build_settings(self, adopted: ForkServer | None) -> NodeSettings:
        # Adopted workers know the secret of their run, which their fork server has kept.
        request = self.request
        resume, shared_secret = request.resilience.resume, request.options.secret
        own_secret = create_secret() if adopted is None else Secret(bytes.fromhex(adopted.note))
        path = None if resume is None else str(resume.path.resolve())
        return NodeSettings(
            config=request.config,
            secret=shared_secret or own_secret,
            out=str(request.out.resolve()),
            resume=path if self.behind is None else self.behind.resume,
            coordinator_timeout_seconds=request.resilience.coordinator_timeout_seconds,
        )

    def _build_takeover_record(
        self, opened: Rendezvous, first: int, settings: NodeSettings, fork_server: ForkServer
    ) -> TakeoverRecord:
        """Return the record by which a new node 0 can take over this one's workers."""
        # If `settings` let workers wait for a coordinator, `fork_server` keeps them alive.
        request, behind = self.request, self.behind
        # Higher than all before, even if the clock was set back: workers follow no older epoch.
        epoch = max(time.time_ns(), 0 if behind is None else behind.epoch + 1)
        seconds = settings.coordinator_timeout_seconds
        server_name = None
        if seconds:
            server_name = fork_server.hold_for_adoption(seconds, settings.secret.hex())
        return TakeoverRecord(
            epoch=epoch,
            coordinator=opened,
            first_iteration=first,
            resume=settings.resume,
            read=_count_samples_read(request, behind),
            crashes=() if behind is None else behind.crashes,
            fork_server=server_name,
            identity=self.fit.facts.identity if behind is None else behind.identity,
        )

    def _build_run(
        self,
        record: TakeoverRecord,
        settings: NodeSettings,
        store: Rendezvous,
        losses: Sequence[float] | None,
        alive: Sequence[Worker],
    ) -> RunSpec:
        # First what every worker is told, then what the coordinator alone needs.
        request, fit = self.request, self.fit
        domains = FailureDomains(fit.common.failure_domains)
        setup = WorkerSetup(
            common=fit.common,
            epoch=record.epoch,
            first_iteration=record.first_iteration,
            read=record.read,
            store=store,
        )
        options = dataclasses.replace(request.options, secret=settings.secret)
        # What moving a layer costs, to decide whether a rebalanced schedule pays.
        layer_bytes: Sequence[int] = ()
        if request.resilience.settling is not None:
            layer_bytes = estimate_layer_bytes(
                fit.model, request.config.training, request.schedule.grid.pipelines
            )
        return RunSpec(
            request=dataclasses.replace(request, options=options),
            setup=setup,
            facts=fit.facts,
            forget_orders=lambda before: delete_old_orders(connect_store(store), before),
            layer_bytes=layer_bytes,
            behind=self.behind,
            losses=losses,
            journal=EMPTY_JOURNAL if self.behind is None else read_journal(request.out, domains),
            gone=[worker for worker in fit.facts.shares[0] if worker not in alive],
        )

    def _build_process_manager(
        self,
        record: TakeoverRecord,
        settings: NodeSettings,
        fork_server: ForkServer,
        alive: Sequence[Worker],
        writer: WriterThread,
    ) -> ProcessManager:
        request, shares = self.request, self.fit.facts.shares
        # This node starts its own workers; other nodes start theirs when they are told to.
        places = {worker: node for node, share in enumerate(shares) for worker in share}
        local = NodeProcesses(
            fork_server,
            record.coordinator,
            shares[0],
            gpu_count(self.fit.common.device),
            settings,
            self.fit.gpus.first,
        )
        # After a takeover, workers that are not alive do not take part at first, but may return.
        running = places if self.behind is None else alive
        return ProcessManager(
            local,
            places,
            request.resilience.returns,
            [worker for worker in request.schedule.grid.workers() if worker not in running],
            request.resilience.node_failures,
            faults_per_hour=request.resilience.faults_per_hour,
            crashes=record.crashes,
            keep=lambda crashes: writer(
                partial(write_takeover_record, request.out, replace(record, crashes=crashes))
            ),
        )


def _call_unless_coordinator_failed(work: Callable[..., object], *exit_arguments: Any) -> None:
    """Call `work` at an exit, unless another coordinator needs what `work` would remove."""
    # An ExitStack passes the arguments of `work`, then the three of the exception.
    *arguments, kind, _, _ = exit_arguments
    if kind is None or not issubclass(kind, CoordinatorFailedError):
        work(*arguments)


def _build_started_event(request: RunRequest) -> Started:
    # The planned period with all workers, to compare with: unknown if some are down at the start.
    schedule, training = request.schedule, request.config.training
    whole = len(schedule.seats) == schedule.grid.pipelines * schedule.grid.columns
    planned = schedule.seconds(schedule.period_ticks) if whole else None
    return Started(
        job=schedule.job,
        workers=schedule.grid.pipelines * schedule.grid.columns,
        iterations=training.iterations,
        samples=training.batch * schedule.grid.total_microbatches,
        fault_free_period=planned or request.options.fault_free_seconds,
    )
