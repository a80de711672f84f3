"""Coordinator event loop: handles messages of workers, missed heartbeats, ends of processes, and planned schedules.

One thread, with asyncio. Every event goes into one queue, and `EventLoop.serve` handles one after the other. No handler
waits for anything.
"""

import asyncio
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial

from msgspec.structs import replace

from slipstream.runtime.coordinator.background import apart
from slipstream.runtime.coordinator.commit_log import CommitLog, CommitLogError
from slipstream.runtime.coordinator.commits import Commits
from slipstream.runtime.coordinator.context import Listeners
from slipstream.runtime.coordinator.coordinator import Coordinator
from slipstream.runtime.coordinator.cost_fit import CostFit
from slipstream.runtime.coordinator.event_log import EventLog
from slipstream.runtime.coordinator.gathering import TELL_SECONDS, who_is_awaited
from slipstream.runtime.coordinator.loss_file import LossFile
from slipstream.runtime.coordinator.news import News
from slipstream.runtime.coordinator.node_agents import NodeAgents
from slipstream.runtime.coordinator.part_moves import Partition
from slipstream.runtime.coordinator.planning import ScheduleService
from slipstream.runtime.coordinator.plausible import Bounds, printable
from slipstream.runtime.coordinator.rank_reports import RankReports
from slipstream.runtime.coordinator.recovery import Recovery
from slipstream.runtime.coordinator.run import Run
from slipstream.runtime.coordinator.server import Connection, Server, serve
from slipstream.runtime.coordinator.settling import Cost, Settler
from slipstream.runtime.coordinator.stall_watch import StallWatch
from slipstream.runtime.coordinator.take_over import TakeOver
from slipstream.runtime.coordinator.worker_connections import WorkerConnections
from slipstream.runtime.coordinator.worker_messages import WorkerMessages
from slipstream.runtime.errors import CoordinatorFailedError, RunError, first_line
from slipstream.runtime.events import Finished as RunFinished
from slipstream.runtime.failure_domains import FailureDomains
from slipstream.runtime.processes.fork_server import ForkServerError
from slipstream.runtime.processes.process_manager import ProcessManager
from slipstream.runtime.processes.stop_signals import StopSignals
from slipstream.runtime.protocol.channel import frame
from slipstream.runtime.protocol.to_coordinator import (
    Ended,
    Heartbeat,
    Injected,
    JoinNode,
    JoinWorker,
    Known,
    Leaving,
    Paused,
    Ran,
    Ready,
    Started,
    Status,
    ToCoordinator,
    Validated,
)
from slipstream.runtime.protocol.to_node_agent import STILL_RUNNING_SECONDS
from slipstream.runtime.protocol.to_worker import EndOrder, ReportStatus
from slipstream.runtime.replay.placement import Placement
from slipstream.schedules.parts import Parts, divide
from slipstream.schedules.schedule import Schedule, Worker

MOST_UNKNOWN = 256
"""Connections that may be open of peers that have not said who they are, besides one for each worker."""

FIND_AGAIN_SECONDS = 0.05
"""From one look whether all workers of another coordinator have been found to the next."""


NOTHING_FOLLOWS = object()
"""What an event gives after which there is nothing to decide: most of a large run's are such."""
_CHANGE_LITTLE = Ran, Validated, Started, Injected, Status
"""Nothing follows from these before an iteration is committed."""


class NobodyLeftError(RuntimeError):
    """No worker lives of the run that another coordinator has led. The message is one line."""


class EventLoop:
    """Serves one run, until the workers have left or cannot go on."""

    def __init__(self, run: Run, log: CommitLog, losses: LossFile, processes: ProcessManager,
                 event_log: EventLog) -> None:
        self._run = run
        self._log = log
        self._event_log = event_log
        self.processes = processes
        self.news = News(run, event_log)
        self._workers = WorkerConnections(run, processes, self._put, self._lose)
        self._reports = RankReports(self._workers.processes_of, lambda worker, order: self._workers.send(
            worker, EndOrder(order)))
        self._stall = StallWatch(run.stall_timeout_seconds, lambda worker: self._workers.send(worker, ReportStatus()))
        self._events: asyncio.Queue[Callable[[], object]] = asyncio.Queue()
        schedules = ScheduleService(run.schedule, run.scheduler, lambda: self._put(lambda: None), event_log,
                                    run.at_speeds, run.rebalancer, run.with_degraded, partial(_divided, run), apart)
        setup = run.setup
        # Who shares a machine matters to workers that keep parts of each other's states alone.
        self._setup = setup if run.elements else replace(setup, failure_domains=())
        self._setup_frame = frame(self._setup)  # encoded once: nearly all workers get the same
        self._commits = commits = Commits(run, log, losses, event_log, self.news, processes)
        self._coordinator = Coordinator(
            schedules, self._workers.send, log, placement=Placement(setup.cuts), checkpoints=self.news.checkpoints,
            iterations=range(setup.first_iteration, max(setup.first_iteration, setup.iterations)),
            settler=None if run.settling is None else Settler(
                Cost(run.layer_bytes, setup.fetch_bytes_per_second), run.settling.mtbf_seconds, event_log, run.notify),
            partition=Partition(run.elements, Placement(setup.cuts), setup.failure_domains,
                                run.config.training.shard_optimizer) if run.elements else None,
            listeners=Listeners(events=event_log, note=self.news.note, speed=self.news.speed,
                                went_back=commits.go_back), domains=FailureDomains(setup.failure_domains),
            costs=None if run.length_costs is None else CostFit(run.length_costs, Placement(setup.cuts)),
            whole_schedules=run.whole_schedules)
        self._take_over = None
        if run.behind is not None:
            last = None if run.losses is None else setup.first_iteration + len(run.losses) - 1
            self._take_over = TakeOver(last, setup.first_iteration, run.gone,
                                       run.schedule.members, tuple(run.schedule.grid.workers()))
            self._coordinator.await_workers_of_another()
        self._agents = NodeAgents(run, processes, lambda node: self._workers.are_given_up(processes.workers_of(node)))
        self._messages = WorkerMessages(run, log, commits, self._coordinator, self._workers, self.news, self._stall)
        self._bounds = Bounds(setup, len(run.injections), frozenset(run.schedule.grid.workers()))
        self.out_of_time = False
        """Whether the run was told to end, and could not in time."""

    @property
    def recoveries(self) -> Sequence[Recovery]:
        """All changes of the workers that take part."""
        return self._coordinator.recoveries

    @property
    def stopped(self) -> bool:
        """Whether the run has ended before its last iteration, as it was told to."""
        return self.out_of_time or self._coordinator.stopped

    async def serve(self, listener: socket.socket, stop: StopSignals) -> None:
        """Return when all is done, or the run has ended as it was told to.

        Raises RunError when there is no way to go on, and CoordinatorFailedError where another could.
        """
        self.processes.connect(self._agents.send, self.news.note)
        connected = Server(self._run.secret, self._heard, self._run.notify, MOST_UNKNOWN + len(self._bounds.workers))
        server = await serve(listener, connected)
        loop, descriptor = asyncio.get_running_loop(), self.processes.fileno()
        loop.add_reader(descriptor, self._read_ends)
        loop.call_later(self._run.join_timeout_seconds, self._put, self._require_all_there)
        address = "{}:{}".format(*listener.getsockname()[:2])
        self._tell_awaited(address, others_only=True)
        self._every(TELL_SECONDS, partial(self._tell_awaited, address))
        self._every(self._workers.interval_seconds, self._look)
        if self._take_over is not None:
            self._every(FIND_AGAIN_SECONDS, self._find)
        self._every(STILL_RUNNING_SECONDS, self._agents.reassure)
        error: str | None = "node 0 ended the run"
        anew = failed = False
        try:
            with stop.asking(partial(loop.call_soon_threadsafe, self._stop)):
                while not self._coordinator.left and not self.out_of_time:
                    if (await self._events.get())() is NOTHING_FOLLOWS:
                        continue
                    order = self._coordinator.number
                    self._coordinator.advance()
                    if self._coordinator.number != order:
                        self._stall.progressed()
            error = "node 0 was told to end the run" if self.stopped else None
        except NobodyLeftError as reason:
            error, anew = str(reason), True
            raise
        except (CommitLogError, ForkServerError, RunError) as reason:
            error = f"{reason}; {self.news.how_far(self._log.next_iteration)}"
            raise RunError(error) from None
        except Exception as unexpected:
            failed = True
            traceback.print_exc()
            raise CoordinatorFailedError(f"{type(unexpected).__name__}: {first_line(unexpected)}") from unexpected
        finally:
            loop.remove_reader(descriptor)
            server.close()
            if not failed:
                self._event_log.write(RunFinished(error=error))
                await self._agents.announce_end(error, anew=anew)
                self._workers.close()
            connected.end()  # after a failure all connections, as when this process dies: all look for another one

    def _stop(self) -> None:
        """A signal has come: end at the next iteration, or in it where that takes too much of the time there is."""
        loop, grace = asyncio.get_running_loop(), self._run.grace_seconds
        self._run.notify(f"told to end: the run ends at the next iteration, within {grace:g} s; a second signal ends "
                         "it at once")
        self._put(self._coordinator.stop)
        loop.call_later(grace / 2, self._put, self._coordinator.hurry)
        loop.call_later(grace, self._put, self._run_out_of_time)

    def _run_out_of_time(self) -> None:
        self.out_of_time = not self._coordinator.left

    def _put(self, event: Callable[[], object]) -> None:
        self._events.put_nowait(event)

    def _heard(self, connection: Connection, message: ToCoordinator | None) -> None:
        if message is None:
            self._put(lambda: self._disconnected(connection))
        elif isinstance(message, Heartbeat):
            self._workers.hears(connection)  # not behind what is in the queue
        else:
            self._put(lambda: self._handle(connection, message))

    def _every(self, seconds: float, work: Callable[[], None]) -> None:
        """Have this done as an event, now and then."""
        def again() -> None:
            self._put(work)
            self._every(seconds, work)

        asyncio.get_running_loop().call_later(seconds, again)

    def _tell_awaited(self, address: str, *, others_only: bool = False) -> None:
        """Say for whom this node waits before the first order; at the start only for other nodes."""
        own = self._run.shares[0] if others_only else ()
        awaited = self._coordinator.awaited if self._take_over is None else sorted(self._take_over.missing)
        self.news.awaited([worker for worker in awaited if worker not in own],
                          self._agents.connected, address)

    def _look(self) -> None:
        """Give up who is silent. Where nothing is committed for long, say so, and give up who keeps the others waiting
        by itself."""
        self._workers.give_up_silent()
        self.processes.look()
        held = self._coordinator.held
        stall = self._stall.look(held, self._workers.interval_seconds, planning=self._coordinator.planning)
        if stall is None or not held:
            return
        self.news.note(str(stall))
        for one in stall.culprits(held):
            rank = one.rank if self._workers.processes_of(one.worker) > 1 else None
            self.processes.kill(one.worker, rank)  # first: the others of its processes may end by themselves then
            self._workers.give_up(one.worker, f"worker {one.worker} hung for {one.seconds:.0f} s in {one.doing}")

    def _find(self) -> None:
        """Take over once the workers of another coordinator have been found. Raises NobodyLeftError."""
        if self._take_over is None:
            return
        if self._take_over.nobody():
            raise NobodyLeftError("nobody is left of the run that another node 0 has led here")
        if not self._take_over.over():
            return
        for worker in self._reports.incomplete:  # its other ranks would be told to forget what they hold
            self._workers.give_up(worker, f"worker {worker} was not found whole by the new node 0")
            self.processes.kill(worker)
        found, self._take_over = self._take_over.found(), None
        self._commits.take_over(found)
        self._coordinator.take_over(found)
        self.processes.start_missing()

    def _handle(self, connection: Connection, message: ToCoordinator) -> object:
        """Handle a message of a worker or a node agent; `NOTHING_FOLLOWS` where that changes nothing to decide by."""
        peer = connection.peer
        wrong = self._bounds.wrong(message, self._log.next_iteration)
        if wrong is not None:
            connection.cut_off(wrong)
        elif isinstance(peer, int):
            self._handle_agent(connection, message)
        elif isinstance(message, JoinWorker):
            self._admit(connection, message)
        elif peer is not None and self._workers.hears(connection):
            whole, before = self._reports.take(peer, connection.rank, printable(message)), self._log.next_iteration
            if whole is None:
                return NOTHING_FOLLOWS
            self._messages.handle(peer, whole)
            if isinstance(whole, Started):
                self.processes.begins(self._log.next_iteration)
            if isinstance(whole, Ready) and self._take_over is not None:
                known = whole.known
                if known is None and not self._run.losses:  # before the first commit, one that starts is as good as any
                    known = Known(0, (), self._run.setup.first_iteration - 1, (), None, pending=False)
                if known is not None:
                    self._take_over.ready(peer, known)
            if isinstance(whole, Paused) and not self._coordinator.planning:
                return NOTHING_FOLLOWS  # others still run
            if isinstance(whole, Ready) and self._take_over is not None:
                return NOTHING_FOLLOWS  # `_find` looks whether all are there
            if isinstance(whole, _CHANGE_LITTLE) and before == self._log.next_iteration:
                return NOTHING_FOLLOWS
        return None

    def _admit(self, connection: Connection, message: JoinWorker) -> None:
        worker, run = message.worker, self._run
        if self._workers.admit(connection, message):
            late = message.epoch > 0 and self._take_over is None
            injections = tuple((index, one) for index, one in enumerate(run.injections)
                               if (one.worker, one.rank) == (worker, message.rank)
                               and index not in self._messages.injected)
            slowdowns = tuple(one for one in run.slowdowns if one.worker == worker)
            if late or injections or slowdowns:
                connection.send(frame(replace(self._setup, forget=late, injections=injections, slowdowns=slowdowns)))
            else:
                connection.send(self._setup_frame)

    def _handle_agent(self, connection: Connection, message: ToCoordinator) -> None:
        match message:
            case JoinNode():
                self._agents.admit(connection, message, restarted=self._coordinator.number > 0
                                   or self._coordinator.rejoining)
            case Leaving() if self._agents.speaks_for(connection, message.worker):
                self._coordinator.leaving(message.worker)
            case Ended() if self._agents.speaks_for(connection, message.worker):
                self._workers.process_ended(message)

    def _disconnected(self, connection: Connection) -> None:
        """A connection has ended, and all messages that came over it have been handled."""
        peer = connection.peer
        if isinstance(peer, Worker):
            if self._workers.disconnected(connection):
                self._coordinator.disconnected(peer)
        elif peer is not None and self._agents.disconnected(connection):
            for worker in self.processes.workers_of(peer):
                self._reports.forget(worker)  # also what ranks of one have said that is not ready yet
            self._workers.node_gone(peer)

    def _read_ends(self) -> None:
        try:
            for ended in self.processes.poll():
                self._put(partial(self._workers.process_ended, ended))
        except ForkServerError as error:
            asyncio.get_running_loop().remove_reader(self.processes.fileno())
            self._put(partial(_fail, error))

    def _require_all_there(self) -> None:
        """Raises RunError where workers are still waited for before the first order."""
        if self._coordinator.awaited:
            raise RunError(f"waited {self._run.join_timeout_seconds:g} s in vain for "
                           + who_is_awaited(self._coordinator.awaited, self._run.shares, self._agents.connected))

    def _lose(self, worker: Worker, reason: str, since: float) -> None:
        """A worker is gone."""
        self._reports.forget(worker)
        if self._take_over is not None:
            self._take_over.lost(worker)
        if not self._coordinator.left:
            since = max([since, *self._messages.failed_on_purpose(worker)])
            if not self._coordinator.lost(worker, reason, since or time.monotonic()):
                self.news.note(f"{reason}, before it took part")


def _divided(run: Run, schedule: Schedule) -> Parts:
    return divide(schedule, Placement(run.setup.cuts).ties(schedule, run.shared_layers))


def _fail(error: Exception) -> None:
    raise error
