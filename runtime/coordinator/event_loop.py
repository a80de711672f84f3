"""Handle messages, missed heartbeats, ended processes, and planned schedules.

The loop runs in one thread with asyncio. All events but heartbeats go into one queue, and
`EventLoop.serve` handles them one after the other. No handler blocks.
"""

import asyncio
import gc
import socket
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial

from msgspec.structs import replace

from slipstream.runtime.coordinator.connections.message_validation import (
    MessageBounds,
    make_printable,
)
from slipstream.runtime.coordinator.connections.node_agents import NodeAgents
from slipstream.runtime.coordinator.connections.server import Connection, Server, start_server
from slipstream.runtime.coordinator.connections.stall_watch import StallReport, StallWatch
from slipstream.runtime.coordinator.connections.worker_connections import WorkerConnections
from slipstream.runtime.coordinator.decisions.commit_log import (
    CommitLog,
    CommitLogError,
    CommittedIteration,
)
from slipstream.runtime.coordinator.decisions.effects import (
    GiveUpWorker,
    ScheduleRequest,
    SendMessage,
)
from slipstream.runtime.coordinator.decisions.failover import FailoverResult, RejoiningPhase
from slipstream.runtime.coordinator.decisions.recoveries import Recovery
from slipstream.runtime.coordinator.decisions.run_state import (
    EndedPhase,
    GatheringPhase,
    RunState,
    TrainingPhase,
    build_initial_state,
)
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedEvent, SpeedRequest
from slipstream.runtime.coordinator.decisions.transition import (
    AbortIteration,
    ReportsReceived,
    StallFound,
    StopRequested,
    TimePassed,
    TransitionEvent,
    WorkerDisconnected,
    WorkerLost,
    apply_event,
    find_awaited_workers,
    find_needed_layers,
)
from slipstream.runtime.coordinator.planning.background import (
    MAX_SMALL_JOB_WORKERS,
    choose_background,
    run_in_thread,
)
from slipstream.runtime.coordinator.planning.precomputed_plans import FailurePrecomputer
from slipstream.runtime.coordinator.planning.schedule_finder import (
    PrecomputedLookup,
    SchedulePlanners,
    ScheduleService,
)
from slipstream.runtime.coordinator.records.progress_lines import (
    REPORT_INTERVAL_SECONDS,
    RunReporter,
    describe_awaited,
)
from slipstream.runtime.coordinator.records.run_log import RunLog
from slipstream.runtime.coordinator.records.writer_thread import WriterThread
from slipstream.runtime.coordinator.run_spec import RunSpec
from slipstream.runtime.errors import (
    CoordinatorFailedError,
    NoLiveWorkerError,
    OtherRunError,
    RunError,
    describe_data_end,
    first_line,
)
from slipstream.runtime.events import Event as RunEvent
from slipstream.runtime.events import Noted, OrderGiven, RunFinished, WentBack
from slipstream.runtime.placement import Placement
from slipstream.runtime.processes.fork_server import ForkServerError
from slipstream.runtime.processes.process_manager import ProcessManager
from slipstream.runtime.processes.stop_signals import StopSignals
from slipstream.runtime.protocol.channel import encode_frame
from slipstream.runtime.protocol.to_coordinator import (
    CheckpointSaved,
    GatheredReports,
    Heartbeat,
    Injected,
    IterationReport,
    JoinNode,
    JoinWorker,
    Leaving,
    Note,
    Ready,
    ToCoordinator,
    TrainingStarted,
    WorkerEnded,
    WorkerFailed,
    WorkerStatus,
)
from slipstream.runtime.protocol.to_node_agent import STILL_RUNNING_SECONDS
from slipstream.runtime.protocol.to_worker import Acknowledged, ReportStatus
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.shares import DividedSchedule, EquivalentSchedule, divide_schedule

MAX_UNKNOWN_CONNECTIONS = 256
"""Connections that may be open without an identified peer, besides one for each worker."""

FAILOVER_CHECK_SECONDS = 0.05
"""Seconds from one check to the next whether a dead coordinator's workers have been found."""


class EventLoop:
    """Event loop of a run: passes events to the decisions, and carries out their effects."""

    def __init__(
        self,
        run: RunSpec,
        commits: CommitLog,
        processes: ProcessManager,
        log: RunLog,
        writer: WriterThread | None = None,
    ) -> None:
        schedule, resilience = run.request.schedule, run.request.resilience
        grid = frozenset(schedule.grid.workers())
        self._events: asyncio.Queue[Callable[[], object]] = asyncio.Queue()
        self._run = run
        self._notify = run.request.options.notify
        self._writer = writer
        self._log = log
        # Workers, node agents and users.
        self.processes = processes
        self.news = RunReporter(run, log)
        self._workers = WorkerConnections(run, processes, self._enqueue, self._handle_lost_worker)
        self._stall = StallWatch(
            resilience.stall_timeout_seconds,
            lambda worker: self._workers.send(worker, ReportStatus()),
        )
        self._bounds = MessageBounds(run.setup, len(resilience.injections), grid)
        self._agents = NodeAgents(run, processes, self._workers, self._bounds)
        # Planners. Only for a large job is a plan ready sooner if it is made in advance.
        background = choose_background(len(grid))
        divided = partial(_divide_schedule, run)
        self._ahead: FailurePrecomputer | None = None
        find_precomputed: PrecomputedLookup = _find_no_plan
        if resilience.scheduler is not None and len(grid) > MAX_SMALL_JOB_WORKERS:
            self._ahead = FailurePrecomputer(
                schedule, resilience.scheduler, background, run.failure_domains, divided
            )
            find_precomputed = self._ahead.find_plan
        self._schedules = ScheduleService(
            schedule.grid,
            SchedulePlanners(resilience.scheduler, resilience.at_speeds, resilience.rebalancer),
            lambda answer: self._enqueue(partial(self._apply_event, answer)),
            log.write,
            divided,
            background,
            find_precomputed,
        )
        # What each worker is told when it joins, encoded once: nearly all get the same. Failure
        # domains matter to workers only if they keep parts of each other's states.
        self._setup = run.setup
        if not run.request.config.training.shard_optimizer:
            common = replace(run.setup.common, failure_domains=())
            self._setup = replace(run.setup, common=common)
        self._setup_frame = encode_frame(self._setup)
        # The state on which all decisions depend.
        self._rules = run.build_rules(self._schedules.prepare_schedule(schedule))
        at = time.monotonic()
        self.state = build_initial_state(
            self._rules, commits, at, run.build_rejoining_phase(at), run.journal
        )
        self._injected: dict[int, float] = {}
        """Time of `time.monotonic` of each injected failure, by its index in `injections`."""
        self.out_of_time = False
        """True if the run was told to end and has not ended in time."""

    @property
    def _has_ended(self) -> bool:
        return isinstance(self.state.phase, EndedPhase)

    @property
    def has_stopped_early(self) -> bool:
        """True if the run ended before its last iteration, or failed to end in time."""
        early = self.state.log.next_iteration < self._rules.iterations.stop
        return self.out_of_time or (self._has_ended and early)

    @property
    def data_end_reason(self) -> str | None:
        """Line for users if the run ended because its data ended; otherwise None."""
        # An end of the data that was reported counts only once all iterations before it are done.
        state = self.state
        if (
            state.data_end is None
            or not self._has_ended
            or state.log.next_iteration < state.data_end
        ):
            return None
        progress = self.news.describe_progress(state.log.next_iteration)
        return f"{describe_data_end(state.data_end)}; {progress}"

    async def serve(self, listener: socket.socket, stop: StopSignals) -> None:
        """Serve until iterations or data end, or a signal of `stop` ends the run.

        Raises RunError if the run cannot continue, NoLiveWorkerError if no worker of a dead
        coordinator was found, OtherRunError if one that was found is of another run, and
        CoordinatorFailedError if another coordinator could continue the run. A second signal
        raises RunStopped, here or elsewhere in the event loop.
        """
        # Listen: to peers, to this node's processes, and to the clock.
        self.processes.connect_agents(self._agents.send, self.news.report_note)
        connected = Server(
            self._run.secret,
            self._receive_message,
            self._notify,
            MAX_UNKNOWN_CONNECTIONS + len(self._bounds.workers),
        )
        server = await start_server(listener, connected)
        loop, descriptor = asyncio.get_running_loop(), self.processes.fileno()
        loop.add_reader(descriptor, self._read_ended_processes)
        # A worker that never joins would otherwise make all others wait forever.
        loop.call_later(
            self._run.request.resilience.join_timeout_seconds,
            self._enqueue,
            self._require_all_connected,
        )
        # Users start the other nodes: they see at once whom node 0 waits for, and where.
        address = "{}:{}".format(*listener.getsockname()[:2])
        self._report_awaited(address, others_only=True)
        self._call_every(REPORT_INTERVAL_SECONDS, partial(self._report_awaited, address))
        self._call_every(self._workers.check_interval_seconds, self._check_health)
        if isinstance(self.state.phase, RejoiningPhase):
            self._call_every(FAILOVER_CHECK_SECONDS, self._check_failover)
        self._call_every(STILL_RUNNING_SECONDS, self._agents.send_still_running)
        # Handle events until the end. Then peers get `error` (None: the run is complete), and with
        # `anew` they learn that it starts again with new workers; if it has `failed`, they get
        # nothing. The first value of `error` stays if the loop is interrupted, as by a second
        # signal.
        error: str | None = "node 0 ended the run"
        anew = failed = False
        try:
            with stop.call_at_first_signal(
                partial(loop.call_soon_threadsafe, self._handle_stop_signal)
            ):
                while not self._has_ended and not self.out_of_time:
                    (await self._events.get())()
            error = self.data_end_reason or (
                "node 0 was asked to end the run" if self.has_stopped_early else None
            )
        except NoLiveWorkerError as reason:
            error, anew = str(reason), True
            raise
        except (CommitLogError, ForkServerError, RunError) as reason:
            error = f"{reason}; {self.news.describe_progress(self.state.log.next_iteration)}"
            raise RunError(error) from None
        except OtherRunError:
            failed = True
            raise
        except Exception as unexpected:
            failed = True
            raise CoordinatorFailedError(
                f"{type(unexpected).__name__}: {first_line(unexpected)}"
            ) from unexpected
        finally:
            # Undo what `_apply_event` did to the garbage collector.
            gc.unfreeze()
            gc.enable()
            # Tell all peers how the run ended. If `failed`, tell them nothing, as if this process
            # had died: they look for another coordinator. Workers of another run (OtherRunError)
            # shall do so, too.
            loop.remove_reader(descriptor)
            server.close()
            if not failed:
                self._log.write(RunFinished(error=error))
                await self._agents.announce_end(error, anew=anew)
                self._workers.close_all()
            connected.abort_all()

    def _handle_stop_signal(self) -> None:
        """End the run at the next iteration boundary, or after half the grace period."""
        # After half of `grace_seconds` it stops in the middle of an iteration, and after all of it
        # `serve` returns.
        loop, grace = asyncio.get_running_loop(), self._run.request.options.grace_seconds
        self._notify(
            f"asked to end: the run ends at the next iteration, within {grace:g} s; a second "
            "signal ends it at once"
        )
        self._enqueue(partial(self._apply_event, StopRequested()))
        loop.call_later(grace / 2, self._enqueue, partial(self._apply_event, AbortIteration()))
        loop.call_later(grace, self._enqueue, self._mark_out_of_time)

    def _mark_out_of_time(self) -> None:
        self.out_of_time = not self._has_ended

    def _enqueue(self, event: Callable[[], object]) -> None:
        self._events.put_nowait(event)

    def _apply_event(self, event: TransitionEvent) -> None:
        # Decide, then act: no effect changes what was decided for this event.
        before = self.state
        self.state, effects = apply_event(self._rules, before, event, time.monotonic())
        for effect in effects:
            self._carry_out_effect(effect)
        self._agents.send_answers()
        # An order or a commit is progress.
        if (self.state.order, self.state.log.next_iteration) != (
            before.order,
            before.log.next_iteration,
        ):
            self._stall.restart_timeout()
        if self.state.order == 1 > before.order:
            gc.freeze()  # connections and modules stay: the collector need not scan them again
        # While workers wait, no collection may delay the next order.
        (gc.disable if _has_waiting_workers(self.state) else gc.enable)()
        # Members begin to train: plan for the next failures while no worker waits for a plan.
        if (
            self._ahead is not None
            and self.state.order > before.order
            and isinstance(self.state.phase, TrainingPhase)
        ):
            self._ahead.precompute_for(self.state.current)

    def _carry_out_effect(self, effect: object) -> None:
        match effect:
            # To workers.
            case SendMessage(message=Acknowledged() as message):
                self._agents.acknowledge_reports(effect.workers, message)
            case SendMessage():
                for worker in effect.workers:
                    self._workers.send(worker, effect.message)
            case GiveUpWorker():
                self.processes.kill_worker(effect.worker)
                self._enqueue(partial(self._workers.give_up_worker, effect.worker, effect.reason))
            # To files and users.
            case CommittedIteration():
                self.news.log_iteration(effect)
                self.processes.begin_iteration(effect.iteration + 1)
                order, phase = self.state.order, self.state.phase
                if (
                    order > 1
                    and isinstance(phase, TrainingPhase)
                    and effect.iteration == phase.began
                ):
                    # No worker connects for an earlier order any more.
                    run_in_thread(partial(self._run.forget_orders, order), lambda _: None)
            case Noted():
                self.news.report_note(effect.text)
            case RunEvent():
                if isinstance(effect, OrderGiven):
                    self._log.store_schedule(self.state.prepared.text)
                elif isinstance(effect, WentBack):
                    self.news.log_rollback(self.state.log.next_iteration)
                self._log.write(effect)
            # To planners, whose answers arrive as events.
            case ScheduleRequest():
                self._schedules.request_schedule(effect)
            case SpeedRequest():
                self._schedules.request_speed_decision(effect)
            case SpeedEvent():
                self.news.report_speed_event(effect)
            case Recovery() | str():
                self._notify(effect)
            case FailoverResult():
                # Else their remaining ranks would be told to drop what they hold.
                for worker in self._workers.incomplete_workers:
                    self._carry_out_effect(
                        GiveUpWorker(
                            worker, f"worker {worker} was not found whole by the new node 0"
                        )
                    )
                self.news.report_failover(effect)
                self.processes.start_missing_workers()

    def _receive_message(self, connection: Connection, message: ToCoordinator | None) -> None:
        if message is None:
            self._enqueue(lambda: self._handle_disconnect(connection))
        elif isinstance(message, Heartbeat):
            # At once, not after the events in the queue.
            self._workers.record_sign_of_life(connection)
        else:
            self._enqueue(lambda: self._handle_message(connection, message))

    def _call_every(self, seconds: float, work: Callable[[], None]) -> None:
        def again() -> None:
            self._enqueue(work)
            self._call_every(seconds, work)

        asyncio.get_running_loop().call_later(seconds, again)

    def _report_awaited(self, address: str, *, others_only: bool = False) -> None:
        # This launcher starts node 0's own workers, and users start the other nodes.
        local_workers = self._run.facts.shares[0] if others_only else ()
        self.news.report_awaited(
            [worker for worker in find_awaited_workers(self.state) if worker not in local_workers],
            self._agents.connected_nodes,
            address,
        )

    def _check_health(self) -> None:
        """Give up silent and hanging workers, restart crashed ones, and report file problems."""
        if self._writer is not None:
            for text in self._writer.take_reports():
                self.news.report_note(text)
        # A machine that is lost, or a process that hangs, sends nothing that would say so.
        self._workers.give_up_silent()
        self.processes.restart_due_workers()
        # A worker may send heartbeats and yet make no progress.
        needed = find_needed_layers(self._rules, self.state)
        stall = self._stall.check_progress(
            needed, self._workers.check_interval_seconds, planning=self.state.is_planning
        )
        if stall is not None and needed:
            self.news.report_note(str(stall))
        if stall is not None:
            self._handle_stall(stall, needed)
        self._apply_event(TimePassed())

    def _handle_stall(self, stall: StallReport, needed: Mapping[Worker, Collection[int]]) -> None:
        """Give up members that hang, or end an order whose members wait for each other."""
        culprits, circle = stall.find_culprits(needed), stall.find_circle()
        for status in culprits:
            # Killed first, as its other processes may then end by themselves.
            worker = status.worker
            self.processes.kill_worker(worker)
            self._workers.give_up_worker(
                worker, f"worker {worker} hung for {status.seconds:.0f} s in {status.doing}"
            )
        # Nobody is at fault alone: the next order connects the members anew.
        if circle and not culprits:
            self._apply_event(
                StallFound(
                    tuple(status.worker for status in circle),
                    f"{len(circle)} workers wait for each other, worker {circle[0].worker} for "
                    f"{circle[0].seconds:.0f} s: {circle[0].doing}",
                )
            )

    def _check_failover(self) -> None:
        if isinstance(self.state.phase, RejoiningPhase):
            self._apply_event(TimePassed())

    def _handle_message(self, connection: Connection, message: ToCoordinator) -> None:
        # No part of a message is used if one of its values is impossible.
        peer = connection.peer
        violation = self._bounds.find_violation(message, self.state.log.next_iteration)
        if violation is not None:
            connection.cut_off(violation)
        elif isinstance(peer, int):
            self._handle_agent_message(connection, message)
        elif isinstance(message, JoinWorker):
            self._admit_worker(connection, message)
        elif peer is not None:
            combined = self._workers.combine_message(connection, make_printable(message))
            if combined is not None:
                self._handle_worker_message(peer, combined)

    def _handle_worker_message(self, worker: Worker, message: ToCoordinator) -> None:
        """Report a worker's message to users, or apply it to the state as an event."""
        match message:
            # What no decision depends on.
            case Note():
                self.news.report_note_once(message.text)
            case Injected():
                self._injected[message.index] = message.at
            case WorkerStatus():
                self._stall.add_status(message)
            # An error that all workers would meet ends the run.
            case WorkerFailed(everywhere=True):
                raise RunError(message.reason)
            case WorkerFailed():
                self._workers.give_up_failed(worker, message.reason)
            # All else is an event of the state; some of it is also reported.
            case _:
                if isinstance(message, Ready):
                    self.news.check_folder(message)
                    self._workers.expect_heartbeats(worker)
                elif isinstance(message, CheckpointSaved):
                    self.news.log_checkpoint(message)
                elif isinstance(message, IterationReport):
                    self._agents.mark_direct_report(worker)
                self._apply_event(message)
                if isinstance(message, TrainingStarted):
                    self.processes.begin_iteration(self.state.log.next_iteration)

    def _admit_worker(self, connection: Connection, message: JoinWorker) -> None:
        worker, resilience = message.worker, self._run.request.resilience
        if not self._workers.admit_process(connection, message):
            return
        # What differs by worker: is it too late for a failover, and what is to fail in it?
        late = message.epoch > 0 and not isinstance(self.state.phase, RejoiningPhase)
        injections = tuple(
            (index, injection)
            for index, injection in enumerate(resilience.injections)
            if (injection.worker, injection.rank) == (worker, message.rank)
            and index not in self._injected
        )
        slowdowns = tuple(
            slowdown for slowdown in resilience.slowdowns if slowdown.worker == worker
        )
        # Nearly all workers get the settings that are already encoded.
        if late or injections or slowdowns:
            setup = replace(self._setup, forget=late, injections=injections, slowdowns=slowdowns)
            connection.send(encode_frame(setup))
        else:
            connection.send(self._setup_frame)

    def _handle_agent_message(self, connection: Connection, message: ToCoordinator) -> None:
        # A message about a worker counts only if the worker is of the agent's own node.
        match message:
            case JoinNode():
                if self._agents.admit_node(
                    connection,
                    message,
                    restarted=self.state.order > 0 or isinstance(self.state.phase, RejoiningPhase),
                ):
                    # Else its new workers would be refused.
                    self._workers.handle_node_loss(message.node)
            case Leaving() if message.worker in self._agents.find_represented_workers(connection):
                self._apply_event(message)
            case WorkerEnded() if message.worker in self._agents.find_represented_workers(
                connection
            ):
                self._workers.handle_process_end(message)
            # Reports of many workers come in one message, and are one event.
            case GatheredReports() if isinstance(connection.peer, int):
                reports = self._agents.receive_reports(
                    connection.peer,
                    self._agents.find_represented_workers(connection),
                    message,
                    self.state.log.next_iteration,
                )
                if reports:
                    self._apply_event(ReportsReceived(reports))
                self._agents.send_answers()

    def _handle_disconnect(self, connection: Connection) -> None:
        # All messages that arrived over the connection have been handled: they were queued before.
        peer = connection.peer
        if isinstance(peer, Worker):
            if self._workers.handle_disconnect(connection):
                self._apply_event(WorkerDisconnected(peer))
        elif peer is not None and self._agents.handle_disconnect(connection):
            self._workers.handle_node_loss(peer)

    def _read_ended_processes(self) -> None:
        try:
            for ended in self.processes.poll():
                self._enqueue(partial(self._workers.handle_process_end, ended))
        except ForkServerError as error:
            asyncio.get_running_loop().remove_reader(self.processes.fileno())
            self._enqueue(partial(_raise_error, error))

    def _require_all_connected(self) -> None:
        """Raise RunError if workers are still missing before the first order."""
        if isinstance(self.state.phase, GatheringPhase) and (
            missing := find_awaited_workers(self.state)
        ):
            raise RunError(
                f"waited {self._run.request.resilience.join_timeout_seconds:g} s "
                "unsuccessfully for "
                + describe_awaited(missing, self._run.facts.shares, self._agents.connected_nodes)
            )

    def _handle_lost_worker(self, worker: Worker, reason: str, since: float) -> None:
        # The loss is dated to `since` (`time.monotonic`, or 0 if unknown) or to a later failure
        # that was injected since the last order; to now without either.
        if self._has_ended:
            return
        injections = self._run.request.resilience.injections
        # Injections before the last order do not count: the worker outlived them, or was started
        # again since.
        times = [
            at
            for index, at in self._injected.items()
            if injections[index].worker == worker and at > self.state.recovery.ordered_at
        ]
        self._apply_event(WorkerLost(worker, reason, max([since, *times]) or time.monotonic()))


def _has_waiting_workers(state: RunState) -> bool:
    # Garbage collection is off then: it would take a third of the CPU time of handling a death
    # among 4,096 workers.
    return (
        not isinstance(state.phase, TrainingPhase)
        or state.phase.ended
        or state.joins.completed_fetch is not None
    )


def _divide_schedule(
    run: RunSpec, schedule: Schedule, alike: EquivalentSchedule | None = None
) -> DividedSchedule:
    return divide_schedule(
        schedule,
        alike,
        ties=Placement(run.setup.common.cuts).holders_of_groups(schedule, run.facts.shared_layers),
    )


def _find_no_plan(_: tuple[Worker, ...]) -> None:
    return None


def _raise_error(error: Exception) -> None:
    raise error
