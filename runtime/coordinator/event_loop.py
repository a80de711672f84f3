"""Coordinator event loop: handles messages of workers, missed heartbeats, ends of processes, and planned schedules.

One thread, with asyncio. Every event goes into one queue, and `EventLoop.serve` handles one after the other. No handler
waits for anything.
"""

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from runtime.config import RunConfig
from runtime.coordinator.checkpoint_timer import CheckpointTimer
from runtime.coordinator.commit_log import CommitLog, CommitLogError
from runtime.coordinator.coordinator import Coordinator
from runtime.coordinator.gathering import TELL_SECONDS, who_is_awaited
from runtime.coordinator.heartbeat_monitor import HeartbeatMonitor
from runtime.coordinator.loss_file import LossFile
from runtime.coordinator.planning import RunError, Scheduler, ScheduleService
from runtime.coordinator.plausible import Bounds, printable
from runtime.coordinator.recovery import Recovery
from runtime.coordinator.server import Connection, Server, serve
from runtime.coordinator.stall_watch import StallWatch
from runtime.processes.fork_server import ForkServerError
from runtime.processes.process_manager import ProcessManager
from runtime.processes.stop_signals import StopSignals
from runtime.protocol.authentication import Secret
from runtime.protocol.channel import Frame, frame
from runtime.protocol.failure_injection import Injection
from runtime.protocol.setup import JOIN_TIMEOUT_SECONDS, Setup
from runtime.protocol.to_coordinator import (
    Ended,
    Failed,
    FetchFailed,
    FetchUpToDate,
    Finished,
    Heartbeat,
    Injected,
    JoinNode,
    JoinWorker,
    Leaving,
    Note,
    Paused,
    Ran,
    Ready,
    Saved,
    Started,
    Status,
    ToCoordinator,
    Validated,
)
from runtime.protocol.to_node_agent import (
    STILL_RUNNING_SECONDS,
    NodeSetup,
    NodeTaken,
    RunEnded,
    StillRunning,
    ToNodeAgent,
)
from runtime.protocol.to_worker import Leave, ReportStatus
from schedules.schedule import Schedule, Worker

DRAIN_SECONDS = 1.0
"""How long the last messages of a process that has ended may take to arrive."""
ANNOUNCE_SECONDS = 2.0
"""How long the agents of other nodes may take to end once they are sent the end of the run."""
LOOK_SECONDS = 0.005
STALL_TIMEOUT_SECONDS = 300.0
MOST_UNKNOWN = 256
"""Connections that may be open of peers that have not said who they are, besides one for each worker."""

Notify = Callable[[Recovery | str], None]
"""Called with a recovery, or with something that went wrong and was survived; `str` of it is one line for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the event loop runs."""

    schedule: Schedule
    scheduler: Scheduler | None
    setup: Setup
    shares: Sequence[Sequence[Worker]]
    """The workers of each node that are there from the start."""
    injections: Sequence[Injection]
    out: Path
    config: RunConfig
    secret: Secret
    """What all who take part know."""
    grace_seconds: float = 20.0
    """How long the run may go on once it is told to end."""
    notify: Notify = field(default=lambda _: None)
    join_timeout_seconds: float = JOIN_TIMEOUT_SECONDS
    """For all workers to be there."""
    stall_timeout_seconds: float = STALL_TIMEOUT_SECONDS
    """Without a commit, after which it is said who waits for what."""


class EventLoop:
    """Serves one run, until the workers have left or cannot go on."""

    def __init__(self, run: Run, log: CommitLog, losses: LossFile, processes: ProcessManager) -> None:
        self._run = run
        self._log = log
        self._losses = losses
        self._processes = processes
        self._monitor = HeartbeatMonitor(run.setup.heartbeat_timeout_seconds)
        self._stall = StallWatch(run.stall_timeout_seconds, lambda worker: self._send(worker, ReportStatus()))
        self._events: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        schedules = None if run.scheduler is None else ScheduleService(
            run.scheduler, lambda: self._events.put_nowait(lambda: None))
        setup = run.setup
        self.checkpoints = CheckpointTimer(automatic=setup.checkpoint_every is None)
        self._coordinator = Coordinator(run.schedule, schedules, self._send, log, ranges=setup.ranges,
                                        checkpoints=self.checkpoints,
                                        iterations=range(setup.first_iteration,
                                                         max(setup.first_iteration, setup.iterations)))
        self._workers: dict[Worker, Connection] = {}
        self._agents: dict[int, Connection] = {}
        self._ended: dict[Worker, Ended] = {}
        """Processes that have ended, as long as messages of theirs may still arrive."""
        self._given_up: set[Worker] = set()
        """Workers that were lost before their processes have ended."""
        self._injected: dict[int, float] = {}
        """When each failure on purpose happened."""
        self._known = frozenset(run.schedule.grid.workers())
        self._corpora: dict[str, Worker] = {}
        self._bounds = Bounds(setup, len(run.injections))
        self._last_sent: tuple[msgspec.Struct | None, Frame] = None, Frame(b"", b"")
        """The last message and its bytes: an order, with its schedule, is encoded once for all workers."""
        self.notes: list[str] = []
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

        Raises RunError when there is no way to go on.
        """
        self._processes.connect(self._send_to_agent)
        server = await serve(listener, Server(self._run.secret, self._heard, self._run.notify,
                                              MOST_UNKNOWN + len(self._known)))
        loop, descriptor = asyncio.get_running_loop(), self._processes.fileno()
        loop.add_reader(descriptor, self._read_ends)
        loop.call_later(self._monitor.interval_seconds, self._look)
        loop.call_later(STILL_RUNNING_SECONDS, self._reassure_agents)
        loop.call_later(self._run.join_timeout_seconds, self._put, self._require_all_there)
        self._tell_awaited("{}:{}".format(*listener.getsockname()[:2]), others_only=True)
        error: str | None = "node 0 ended the run"
        try:
            with stop.asking(partial(loop.call_soon_threadsafe, self._stop)):
                while not self._coordinator.left and not self.out_of_time:
                    (await self._events.get())()
                    order = self._coordinator.number
                    self._coordinator.advance()
                    if self._coordinator.number != order:
                        self._stall.progressed()
            error = "node 0 was told to end the run" if self.stopped else None
        except (CommitLogError, ForkServerError, RunError) as reason:
            error = (f"{reason}; {self._log.next_iteration} iterations are committed, their losses are in "
                     f"{self._run.out / 'losses.jsonl'}")
            raise RunError(error) from None
        finally:
            loop.remove_reader(descriptor)
            server.close()
            await self._announce_end(error)

    async def _announce_end(self, error: str | None) -> None:
        """Send the agents of the other nodes how the run has ended, and wait until they have disconnected."""
        for agent in self._agents.values():
            agent.send(frame(RunEnded(error)))
        with suppress(TimeoutError):
            async with asyncio.timeout(ANNOUNCE_SECONDS):
                while not all(agent.closed for agent in self._agents.values()):
                    await asyncio.sleep(LOOK_SECONDS)
        for connection in (*self._workers.values(), *self._agents.values()):
            connection.close()

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

    def _put(self, event: Callable[[], None]) -> None:
        self._events.put_nowait(event)

    def _heard(self, connection: Connection, message: ToCoordinator | None) -> None:
        if message is None:
            self._put(lambda: self._disconnected(connection))
        else:
            self._put(lambda: self._handle(connection, message))

    def _look(self) -> None:
        self._put(self._give_up_silent)
        self._put(self._watch)
        asyncio.get_running_loop().call_later(self._monitor.interval_seconds, self._look)

    def _reassure_agents(self) -> None:
        for agent in self._agents.values():
            agent.send(frame(StillRunning()))
        asyncio.get_running_loop().call_later(STILL_RUNNING_SECONDS, self._reassure_agents)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._run.notify(text)

    def _tell_awaited(self, address: str, *, others_only: bool = False) -> None:
        """Say for whom this node waits, now and then; at the start only for other nodes."""
        awaited = self._coordinator.awaited
        if not awaited:
            return
        if others_only:
            awaited = [worker for worker in awaited if worker not in self._run.shares[0]]
        if awaited:
            self._run.notify(f"node 0, at {address}, waits for "
                             + who_is_awaited(awaited, self._run.shares, self._agents))
        asyncio.get_running_loop().call_later(TELL_SECONDS, self._put, partial(self._tell_awaited, address))

    def _watch(self) -> None:
        """Where nothing is committed for long, say so, and give up who keeps the others waiting by itself."""
        columns = self._coordinator.columns
        stall = self._stall.look(columns, self._monitor.interval_seconds, planning=self._coordinator.planning)
        if stall is None or not columns:
            return
        self._note(str(stall))
        for one in stall.culprits(columns):
            self._give_up(one.worker, f"worker {one.worker} hung for {one.seconds:.0f} s in {one.doing}")
            self._processes.kill(one.worker)

    def _send(self, worker: Worker, message: msgspec.Struct) -> None:
        if isinstance(message, Leave):  # its end is no news
            self._given_up.add(worker)
            self._monitor.remove(worker)
        if message is not self._last_sent[0]:
            self._last_sent = message, frame(message)
        if worker in self._workers:
            self._workers[worker].send(self._last_sent[1])

    def _send_to_agent(self, node: int, message: ToNodeAgent) -> None:
        if node in self._agents:
            self._agents[node].send(frame(message))

    def _handle(self, connection: Connection, message: ToCoordinator) -> None:
        """Handle a message of a worker or a node agent."""
        peer = connection.peer
        wrong = self._bounds.wrong(message, self._log.next_iteration)
        if wrong is not None:
            connection.cut_off(wrong)
        elif isinstance(peer, int):
            self._handle_agent(connection, peer, message)
        elif isinstance(message, JoinWorker):
            self._admit(connection, message.worker)
        elif peer is not None and self._workers.get(peer) is connection:
            self._monitor.heard(peer)
            self._handle_worker(peer, message)

    def _admit(self, connection: Connection, worker: Worker) -> None:
        if worker in self._workers or worker not in self._known:
            connection.close()  # not ours: a process is started anew only once its end has been handled
            return
        self._workers[worker] = connection
        self._given_up.discard(worker)
        connection.send(frame(replace(self._run.setup, injections=tuple(
            (index, one) for index, one in enumerate(self._run.injections)
            if one.worker == worker and index not in self._injected))))

    def _handle_worker(self, worker: Worker, message: ToCoordinator) -> None:
        coordinator = self._coordinator
        match message:
            case Heartbeat():
                pass
            case Ran():
                self._commit(self._log.ran(message))
                coordinator.ran(message)
            case Validated():
                self._commit(self._log.validated(message.order, message.factor))
            case Started():
                recovery = coordinator.started(message)
                if recovery is not None:
                    self._run.notify(recovery)
            case Paused():
                if message.validated is not None:
                    self._commit(self._log.validated(message.order, message.validated))
                coordinator.paused(message)
            case FetchUpToDate():
                coordinator.fetch_up_to_date(message)
            case FetchFailed():
                coordinator.fetch_failed(message)
            case Finished():
                coordinator.finished(message)
            case Ready():
                self._compare_corpus(message)
                self._monitor.add(worker)
                coordinator.ready(message)
            case Saved() if message.iteration < self._run.setup.iterations:  # the last one costs no training
                self.checkpoints.saved(message.iteration, message.seconds)
            case Note():
                self._note(printable(message.text))
            case Injected():
                self._injected[message.index] = message.at
            case Status():
                self._stall.answered(message)
            case Leaving():
                coordinator.leaving(worker)
            case Failed():
                self._give_up(worker, f"worker {worker} failed: {printable(message.reason)} "
                                      f"(see {self._log_of(worker)})")

    def _handle_agent(self, connection: Connection, node: int, message: ToCoordinator) -> None:
        match message:
            case JoinNode() if node in self._agents and not self._is_missed(node):
                connection.send(frame(NodeTaken()))
                connection.close()
            case JoinNode():
                self._admit_node(connection, node)
            case Leaving() if self._agents.get(node) is connection \
                    and message.worker in self._processes.workers_of(node):
                self._coordinator.leaving(message.worker)
            case Ended() if self._agents.get(node) is connection and message.worker in self._processes.workers_of(node):
                self._process_ended(message)

    def _admit_node(self, connection: Connection, node: int) -> None:
        """Have a node start its workers: those of one that is started again come in as any that return."""
        setup, shares, known = self._run.setup, self._run.shares, 0 < node < self._run.setup.nodes
        if known:
            before = self._agents.get(node)
            self._agents[node] = connection
            if before is not None:
                before.close()
            self._processes.node_started(node)
        connection.send(frame(NodeSetup(
            tuple(map(len, shares)), setup.device, setup.transport, tuple(shares[node]) if known else (),
            self._run.config, setup.first_iteration, restarted=self._coordinator.number > 0)))

    def _is_missed(self, node: int) -> bool:
        """Whether all workers of a node have been given up: its machine may be gone without a word."""
        workers = self._processes.workers_of(node)
        return bool(workers) and all(worker in self._given_up and worker not in self._workers for worker in workers)

    def _disconnected(self, connection: Connection) -> None:
        """A connection has ended, and all messages that came over it have been handled."""
        peer = connection.peer
        if isinstance(peer, Worker):
            if self._workers.get(peer) is connection:
                del self._workers[peer]
                if peer in self._ended:
                    self._handle_end(self._ended.pop(peer))
        elif peer is not None and self._agents.get(peer) is connection:
            del self._agents[peer]
            for worker in self._processes.workers_of(peer):
                # An agent that has lost the coordinator, or has died, ends its workers.
                if worker in self._monitor:
                    self._give_up(worker, f"worker {worker} is gone with node {peer}")
                elif worker in self._workers:  # it was not ready yet
                    self._workers.pop(worker).close()

    def _read_ends(self) -> None:
        try:
            for ended in self._processes.poll():
                self._put(partial(self._process_ended, ended))
        except ForkServerError as error:
            asyncio.get_running_loop().remove_reader(self._processes.fileno())
            self._put(partial(_fail, error))

    def _process_ended(self, ended: Ended) -> None:
        """Handle a worker's last messages before its end: one that ends by itself has sent the reason."""
        if ended.worker in self._workers:
            self._ended[ended.worker] = ended
            asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._put, lambda: self._wait_no_more(ended))
        else:
            self._handle_end(ended)

    def _wait_no_more(self, ended: Ended) -> None:
        if self._ended.get(ended.worker) is ended:
            self._handle_end(self._ended.pop(ended.worker))

    def _handle_end(self, ended: Ended) -> None:
        """A process has ended, and all its messages have been handled."""
        if ended.worker in self._given_up:
            self._given_up.remove(ended.worker)
        else:
            self._lose(ended.worker, self._describe(ended))
        self._processes.ended(ended.worker)

    def _give_up_silent(self) -> None:
        for worker, heard in self._monitor.missed():
            self._give_up(worker, f"worker {worker} stopped answering", heard)
            self._processes.kill(worker)

    def _require_all_there(self) -> None:
        """Raises RunError where workers are still waited for before the first order."""
        missing = self._coordinator.awaited
        if missing:
            others = f", nor are {len(missing) - 1} others" if missing[1:] else ""
            raise RunError(f"worker {missing[0]} is not there after {self._run.join_timeout_seconds:.0f} s{others}")

    def _commit(self, committed: Iterator[tuple[int, float]]) -> None:
        for iteration, loss in committed:
            self._losses.write(iteration, loss)
            self._processes.committed(iteration)
            self._coordinator.committed()
            self._stall.progressed()

    def _give_up(self, worker: Worker, reason: str, since: float = 0.0) -> None:
        """Count a worker as lost whose process may not have ended."""
        self._given_up.add(worker)
        self._lose(worker, reason, since)

    def _lose(self, worker: Worker, reason: str, since: float = 0.0) -> None:
        """Count a worker as lost, and close its connection."""
        self._monitor.remove(worker)
        connection = self._workers.pop(worker, None)
        if connection is not None:
            connection.close()
        ended = self._ended.pop(worker, None)
        if ended is not None:
            self._put(lambda: self._handle_end(ended))
        if not self._coordinator.left:
            injected = [at for index, at in self._injected.items() if self._run.injections[index].worker == worker]
            if not self._coordinator.lost(worker, reason, max([since, *injected]) or time.monotonic()):
                self._note(f"{reason}, before it took part")

    def _compare_corpus(self, report: Ready) -> None:
        self._corpora.setdefault(report.corpus, report.worker)
        if len(self._corpora) > 1:
            raise CommitLogError(f"workers {' and '.join(map(str, self._corpora.values()))} read different texts; give "
                                 "every node the same training.text")

    def _describe(self, ended: Ended) -> str:
        if ended.status < 0:
            with suppress(ValueError):  # a signal that has no name
                return f"worker {ended.worker} was killed by {signal.Signals(-ended.status).name}"
        return f"worker {ended.worker} ended with exit status {ended.status} (see {self._log_of(ended.worker)})"

    def _log_of(self, worker: Worker) -> Path:
        return self._run.out / "logs" / f"worker-{worker}.log"


def _fail(error: Exception) -> None:
    raise error
