"""Coordinator event loop: handles messages of workers, missed heartbeats, ended processes, and planned schedules.

It runs in one thread with asyncio. All events go into one queue, and `EventLoop.serve` handles them one after the
other. No handler blocks.
"""

import asyncio
import gc
import socket
import time
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from slipstream.runtime.coordinator.connections.message_validation import Bounds, printable
from slipstream.runtime.coordinator.connections.node_agents import NodeAgents
from slipstream.runtime.coordinator.connections.server import Connection, Server, serve
from slipstream.runtime.coordinator.connections.stall_watch import StallWatch
from slipstream.runtime.coordinator.connections.worker_connections import WorkerConnections
from slipstream.runtime.coordinator.decisions.commit_log import CommitLog, CommitLogError, Committed
from slipstream.runtime.coordinator.decisions.effects import GiveUp, Send
from slipstream.runtime.coordinator.decisions.failover import Found, Rejoining
from slipstream.runtime.coordinator.decisions.questions import Question
from slipstream.runtime.coordinator.decisions.recovery_clock import Recovery
from slipstream.runtime.coordinator.decisions.run_state import Gathering, Left, RunState, Training, begun
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedEvent
from slipstream.runtime.coordinator.decisions.speed_planning import SpeedQuestion
from slipstream.runtime.coordinator.decisions.transition import (
    Disconnected,
    Event,
    Hurry,
    Look,
    Lost,
    Reports,
    Stop,
    awaited,
    held,
    transition,
)
from slipstream.runtime.coordinator.planning.background import FEW, background_for, in_thread
from slipstream.runtime.coordinator.planning.precomputed_plans import AheadOfFailures
from slipstream.runtime.coordinator.planning.schedule_finder import Finders, ScheduleService
from slipstream.runtime.coordinator.records.progress_lines import TELL_SECONDS, News, who_is_awaited
from slipstream.runtime.coordinator.records.run_log import RunLog
from slipstream.runtime.coordinator.records.writer_thread import WriterThread
from slipstream.runtime.coordinator.run import Run
from slipstream.runtime.errors import CoordinatorFailedError, NobodyLeftError, RunError, first_line
from slipstream.runtime.events import Event as RunEvent
from slipstream.runtime.events import Finished as RunFinished
from slipstream.runtime.events import Noted, OrderGiven, WentBack
from slipstream.runtime.processes.fork_server import ForkServerError
from slipstream.runtime.processes.process_manager import ProcessManager
from slipstream.runtime.processes.stop_signals import StopSignals
from slipstream.runtime.protocol.channel import frame
from slipstream.runtime.protocol.to_coordinator import (
    Ended,
    Failed,
    Gathered,
    Heartbeat,
    Injected,
    JoinNode,
    JoinWorker,
    Leaving,
    Note,
    Ran,
    Ready,
    Saved,
    Started,
    Status,
    ToCoordinator,
)
from slipstream.runtime.protocol.to_node_agent import STILL_RUNNING_SECONDS
from slipstream.runtime.protocol.to_worker import Acknowledged, ReportStatus
from slipstream.runtime.replay.placement import Placement
from slipstream.schedules.parts import Alike, Parts, divide
from slipstream.schedules.schedule import Schedule, Worker

MOST_UNKNOWN = 256
"""Number of connections that may be open without an identified peer, in addition to one for each worker."""

FIND_AGAIN_SECONDS = 0.05
"""Interval of the checks whether all workers of a dead coordinator have been found."""


class EventLoop:
    """Event loop of one run, which serves until all workers have been told to leave or the run cannot continue."""

    def __init__(self, run: Run, commits: CommitLog, processes: ProcessManager, log: RunLog,
                 writer: WriterThread | None = None) -> None:
        self._run = run
        self._writer = writer
        self._log = log
        self.processes = processes
        self.news = News(run, log)
        self._workers = WorkerConnections(run, processes, self._put, self._lose)
        resilience, self._notify = run.resilience, run.options.notify
        self._stall = StallWatch(resilience.stall_timeout_seconds,
                                 lambda worker: self._workers.send(worker, ReportStatus()))
        self._events: asyncio.Queue[Callable[[], object]] = asyncio.Queue()
        grid = frozenset(run.schedule.grid.workers())
        background = background_for(len(grid))
        divided = partial(_divided, run)
        self._ahead = AheadOfFailures(run.schedule, resilience.scheduler, background, run.domains, divided) \
            if resilience.scheduler is not None and len(grid) > FEW else None
        self._schedules = ScheduleService(
            run.schedule.grid, Finders(resilience.scheduler, resilience.at_speeds, resilience.rebalancer),
            lambda answer: self._put(partial(self._happens, answer)), log.write,
            divided, background, (lambda _: None) if self._ahead is None else self._ahead.known)
        # Failure domains matter to workers only if they keep parts of each other's states.
        self._setup = run.setup if run.config.training.shard_optimizer else replace(run.setup, failure_domains=())
        self._setup_frame = frame(self._setup)  # encoded once: nearly all workers get the same
        self._rules = run.rules(self._schedules.prepared)
        at = time.monotonic()
        self.state = begun(self._rules, commits, at, run.rejoining(at), run.journal)
        self._injected: dict[int, float] = {}
        """Time at which each injected failure happened, by the index of the injection."""
        self._bounds = Bounds(run.setup, len(resilience.injections), grid)
        self._agents = NodeAgents(run, processes, self._workers, self._bounds)
        self.out_of_time = False
        """True if the run was told to end and has not ended within the time allowed."""

    @property
    def _left(self) -> bool:
        return isinstance(self.state.phase, Left)

    @property
    def stopped(self) -> bool:
        """True if the run was told to end and has ended before its last iteration."""
        early = self.state.log.next_iteration < self._rules.iterations.stop
        return self.out_of_time or (self._left and early)

    async def serve(self, listener: socket.socket, stop: StopSignals) -> None:
        """Serve the run until all iterations are done or it has ended because it was told to.

        Raises RunError if the run cannot continue, and CoordinatorFailedError if another coordinator could continue it.
        """
        self.processes.connect(self._agents.send, self.news.note)
        connected = Server(self._run.secret, self._heard, self._notify, MOST_UNKNOWN + len(self._bounds.workers))
        server = await serve(listener, connected)
        loop, descriptor = asyncio.get_running_loop(), self.processes.fileno()
        loop.add_reader(descriptor, self._read_ends)
        loop.call_later(self._run.resilience.join_timeout_seconds, self._put, self._require_all_there)
        address = "{}:{}".format(*listener.getsockname()[:2])
        self._tell_awaited(address, others_only=True)
        self._every(TELL_SECONDS, partial(self._tell_awaited, address))
        self._every(self._workers.interval_seconds, self._look)
        if isinstance(self.state.phase, Rejoining):
            self._every(FIND_AGAIN_SECONDS, self._find)
        self._every(STILL_RUNNING_SECONDS, self._agents.reassure)
        error: str | None = "node 0 ended the run"
        anew = failed = False
        try:
            with stop.asking(partial(loop.call_soon_threadsafe, self._stop)):
                while not self._left and not self.out_of_time:
                    (await self._events.get())()
            error = "node 0 was told to end the run" if self.stopped else None
        except NobodyLeftError as reason:
            error, anew = str(reason), True
            raise
        except (CommitLogError, ForkServerError, RunError) as reason:
            error = f"{reason}; {self.news.how_far(self.state.log.next_iteration)}"
            raise RunError(error) from None
        except Exception as unexpected:
            failed = True
            raise CoordinatorFailedError(f"{type(unexpected).__name__}: {first_line(unexpected)}") from unexpected
        finally:
            gc.unfreeze()
            gc.enable()
            loop.remove_reader(descriptor)
            server.close()
            if not failed:
                self._log.write(RunFinished(error=error))
                await self._agents.announce_end(error, anew=anew)
                self._workers.close()
            connected.end()  # after a failure, as if this process died: all look for another one

    def _stop(self) -> None:
        """Handle a signal to end: stop at the next iteration boundary, or at once after half of the grace time."""
        loop, grace = asyncio.get_running_loop(), self._run.options.grace_seconds
        self._notify(f"told to end: the run ends at the next iteration, within {grace:g} s; a second signal ends it at "
                     "once")
        self._put(partial(self._happens, Stop()))
        loop.call_later(grace / 2, self._put, partial(self._happens, Hurry()))
        loop.call_later(grace, self._put, self._run_out_of_time)

    def _run_out_of_time(self) -> None:
        self.out_of_time = not self._left

    def _put(self, event: Callable[[], object]) -> None:
        self._events.put_nowait(event)

    def _happens(self, event: Event) -> None:
        """Apply an event to the state and carry out its effects. Raises what they raise."""
        before = self.state
        self.state, effects = transition(self._rules, before, event, time.monotonic())
        for effect in effects:
            self._carry_out(effect)
        self._agents.answer()
        if (self.state.order, self.state.log.next_iteration) != (before.order, before.log.next_iteration):
            self._stall.progressed()
        if self.state.order == 1 > before.order:
            gc.freeze()  # connections and modules stay: the collector need not scan them again
        (gc.disable if _is_waited_for(self.state) else gc.enable)()
        if self._ahead is not None and self.state.order > before.order and isinstance(self.state.phase, Training):
            self._ahead.look(self.state.current)

    def _carry_out(self, effect: object) -> None:
        match effect:
            case Send(message=Acknowledged() as message):
                self._agents.acknowledge(effect.workers, message)
            case Send():
                for worker in effect.workers:
                    self._workers.send(worker, effect.message)
            case GiveUp():
                self.processes.kill(effect.worker)
                self._put(partial(self._workers.give_up, effect.worker, effect.reason))
            case Committed():
                self.news.committed(effect)
                self.processes.committed(effect.iteration)
                order, phase = self.state.order, self.state.phase
                if order > 1 and isinstance(phase, Training) and effect.iteration == phase.began:
                    in_thread(partial(self._run.forget_orders, order), lambda _: None)
            case Noted():
                self.news.note(effect.text)
            case RunEvent():
                if isinstance(effect, OrderGiven):
                    self._log.keep(self._rules.prepared(self.state.current).text)
                elif isinstance(effect, WentBack):
                    self.news.went_back(self.state.log.next_iteration)
                self._log.write(effect)
            case Question():
                self._schedules.find(effect)
            case SpeedQuestion():
                self._schedules.decide(effect)
            case SpeedEvent():
                self.news.speed(effect)
            case Recovery() | str():
                self._notify(effect)
            case Found():
                for worker in self._workers.incomplete:  # its remaining ranks would be told to drop what they hold
                    self._carry_out(GiveUp(worker, f"worker {worker} was not found whole by the new node 0"))
                self.news.took_over(effect)
                self.processes.start_missing()

    def _heard(self, connection: Connection, message: ToCoordinator | None) -> None:
        if message is None:
            self._put(lambda: self._disconnected(connection))
        elif isinstance(message, Heartbeat):
            self._workers.hears(connection)  # at once, not after the events in the queue
        else:
            self._put(lambda: self._handle(connection, message))

    def _every(self, seconds: float, work: Callable[[], None]) -> None:
        """Call a function as an event, again and again at the given interval."""
        def again() -> None:
            self._put(work)
            self._every(seconds, work)

        asyncio.get_running_loop().call_later(seconds, again)

    def _tell_awaited(self, address: str, *, others_only: bool = False) -> None:
        """Report which workers the first order waits for; at the start of the run, only those of other nodes."""
        own_workers = self._run.shares[0] if others_only else ()
        self.news.awaited([worker for worker in awaited(self.state) if worker not in own_workers],
                          self._agents.connected, address)

    def _look(self) -> None:
        """Give up silent workers and those that hold up the others; restart due workers; report slow writes."""
        for text in self._writer.news() if self._writer is not None else ():
            self.news.note(text)
        self._workers.give_up_silent()
        self.processes.look()
        needed = held(self._rules, self.state)
        stall = self._stall.look(needed, self._workers.interval_seconds, planning=self.state.planning)
        if stall is not None and needed:
            self.news.note(str(stall))
        for one in stall.culprits(needed) if stall is not None else ():
            self.processes.kill(one.worker)  # first, as its other processes may then end by themselves
            self._workers.give_up(one.worker, f"worker {one.worker} hung for {one.seconds:.0f} s in {one.doing}")
        self._happens(Look())

    def _find(self) -> None:
        """Check whether a dead coordinator's workers have been found. Raises NobodyLeftError if none came."""
        if isinstance(self.state.phase, Rejoining):
            self._happens(Look())

    def _handle(self, connection: Connection, message: ToCoordinator) -> None:
        """Handle a message of a worker or a node agent."""
        peer = connection.peer
        violation = self._bounds.wrong(message, self.state.log.next_iteration)
        if violation is not None:
            connection.cut_off(violation)
        elif isinstance(peer, int):
            self._handle_agent(connection, message)
        elif isinstance(message, JoinWorker):
            self._admit(connection, message)
        elif peer is not None:
            combined = self._workers.take(connection, printable(message))
            if combined is not None:
                self._handle_worker(peer, combined)

    def _handle_worker(self, worker: Worker, message: ToCoordinator) -> None:
        """Handle a message of a worker. Raises CommitLogError, and RunError for an error that all would meet."""
        match message:
            case Note():
                self.news.note_once(message.text)
            case Injected():
                self._injected[message.index] = message.at
            case Status():
                self._stall.answered(message)
            case Failed(everywhere=True):
                raise RunError(message.reason)
            case Failed():
                self._workers.fail(worker, message.reason)
            case _:
                if isinstance(message, Ready):
                    self.news.ready(message)
                    self._workers.ready(worker)
                elif isinstance(message, Saved):
                    self.news.saved(message)
                elif isinstance(message, Ran):
                    self._agents.passed_by(worker)
                self._happens(message)
                if isinstance(message, Started):
                    self.processes.begins(self.state.log.next_iteration)

    def _admit(self, connection: Connection, message: JoinWorker) -> None:
        worker, resilience = message.worker, self._run.resilience
        if self._workers.admit(connection, message):
            late = message.epoch > 0 and not isinstance(self.state.phase, Rejoining)
            injections = tuple((index, one) for index, one in enumerate(resilience.injections)
                               if (one.worker, one.rank) == (worker, message.rank)
                               and index not in self._injected)
            slowdowns = tuple(one for one in resilience.slowdowns if one.worker == worker)
            if late or injections or slowdowns:
                connection.send(frame(replace(self._setup, forget=late, injections=injections, slowdowns=slowdowns)))
            else:
                connection.send(self._setup_frame)

    def _handle_agent(self, connection: Connection, message: ToCoordinator) -> None:
        match message:
            case JoinNode():
                if self._agents.admit(connection, message, restarted=self.state.order > 0
                                      or isinstance(self.state.phase, Rejoining)):
                    self._workers.node_gone(message.node)  # else its new workers would be refused
            case Leaving() if message.worker in self._agents.speaks_for(connection):
                self._happens(message)
            case Ended() if message.worker in self._agents.speaks_for(connection):
                self._workers.process_ended(message)
            case Gathered() if isinstance(connection.peer, int):
                reports = self._agents.take(connection.peer, self._agents.speaks_for(connection), message,
                                            self.state.log.next_iteration)
                if reports:
                    self._happens(Reports(reports))
                self._agents.answer()

    def _disconnected(self, connection: Connection) -> None:
        """Handle the end of a connection. All messages that arrived over it have been handled."""
        peer = connection.peer
        if isinstance(peer, Worker):
            if self._workers.disconnected(connection):
                self._happens(Disconnected(peer))
        elif peer is not None and self._agents.disconnected(connection):
            self._workers.node_gone(peer)

    def _read_ends(self) -> None:
        try:
            for ended in self.processes.poll():
                self._put(partial(self._workers.process_ended, ended))
        except ForkServerError as error:
            asyncio.get_running_loop().remove_reader(self.processes.fileno())
            self._put(partial(_fail, error))

    def _require_all_there(self) -> None:
        """Raise RunError if workers are still missing before the first order."""
        if isinstance(self.state.phase, Gathering) and (missing := awaited(self.state)):
            raise RunError(f"waited {self._run.resilience.join_timeout_seconds:g} s in vain for "
                           + who_is_awaited(missing, self._run.shares, self._agents.connected))

    def _lose(self, worker: Worker, reason: str, since: float) -> None:
        """Handle the loss of a worker."""
        if not self._left:
            injections, ordered = self._run.resilience.injections, self.state.recovery.ordered_at
            # Injections before the last order do not count: the worker outlived them, or was started again since.
            times = [at for index, at in self._injected.items() if injections[index].worker == worker and at > ordered]
            self._happens(Lost(worker, reason, max([since, *times]) or time.monotonic()))


def _is_waited_for(state: RunState) -> bool:
    """Return whether workers wait for an order, or all layers for the next one have been fetched. Garbage collection is
    off then: it takes a third of the CPU time of a death among 4,096 workers."""
    return not isinstance(state.phase, Training) or state.phase.ended or state.joins.current is not None


def _divided(run: Run, schedule: Schedule, alike: Alike | None = None) -> Parts:
    return divide(schedule, alike, ties=Placement(run.setup.cuts).ties(schedule, run.shared_layers))


def _fail(error: Exception) -> None:
    raise error
