"""Coordinator event loop: handles messages of workers, missed heartbeats, ends of processes, and planned schedules.

One thread, with asyncio. Every event goes into one queue, and `EventLoop.serve` handles one after the other. No handler
waits for anything.
"""

import asyncio
import math
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from runtime.coordinator.checkpoint_timer import CheckpointTimer
from runtime.coordinator.commit_log import CommitLog, CommitLogError
from runtime.coordinator.coordinator import Coordinator
from runtime.coordinator.event_log import EventLog
from runtime.coordinator.gathering import TELL_SECONDS, who_is_awaited
from runtime.coordinator.heartbeat_monitor import HeartbeatMonitor
from runtime.coordinator.loss_file import LossFile
from runtime.coordinator.node_agents import NodeAgents
from runtime.coordinator.planning import ScheduleService
from runtime.coordinator.plausible import Bounds, printable
from runtime.coordinator.recovery import Recovery
from runtime.coordinator.run import Run
from runtime.coordinator.server import Connection, Server, serve
from runtime.coordinator.settling import Cost, Settler
from runtime.coordinator.slow_workers import SpeedEvent
from runtime.coordinator.stall_watch import StallWatch
from runtime.coordinator.take_over import TakeOver
from runtime.errors import RunError
from runtime.events import LOSSES, CheckpointWritten, LeftOut, Noted, Recovered, Slowed
from runtime.events import Finished as RunFinished
from runtime.processes.fork_server import ForkServerError
from runtime.processes.process_manager import ProcessManager
from runtime.processes.stop_signals import StopSignals
from runtime.protocol.channel import Frame, frame
from runtime.protocol.to_coordinator import (
    Checkpoints,
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
    SpeedMeasured,
    Started,
    Status,
    ToCoordinator,
    Validated,
)
from runtime.protocol.to_node_agent import STILL_RUNNING_SECONDS
from runtime.protocol.to_worker import Leave, ReportStatus
from runtime.replay.placement import Placement
from runtime.run_folder import CHECKPOINTS, holder
from schedules.schedule import Worker

DRAIN_SECONDS = 1.0
"""How long the last messages of a process that has ended may take to arrive."""
MOST_UNKNOWN = 256
"""Connections that may be open of peers that have not said who they are, besides one for each worker."""


FIND_AGAIN_SECONDS = 0.05
"""From one look whether all workers of another coordinator have been found to the next."""


class NobodyLeftError(RuntimeError):
    """No worker lives of the run that another coordinator has led. The message is one line."""


class EventLoop:
    """Serves one run, until the workers have left or cannot go on."""

    def __init__(self, run: Run, log: CommitLog, losses: LossFile, processes: ProcessManager,
                 event_log: EventLog) -> None:
        self._run = run
        self._log = log
        self._losses = losses
        self._event_log = event_log
        self.processes = processes
        self._monitor = HeartbeatMonitor(run.setup.heartbeat_timeout_seconds)
        self._stall = StallWatch(run.stall_timeout_seconds, lambda worker: self._send(worker, ReportStatus()))
        self._events: asyncio.Queue[Callable[[], None]] = asyncio.Queue()
        schedules = ScheduleService(run.schedule, run.scheduler, lambda: self._put(lambda: None), event_log,
                                    run.at_speeds, None if run.settling is None else run.settling.rebalancer)
        setup = run.setup
        self.checkpoints = CheckpointTimer(automatic=setup.checkpoint_every is None)
        self._coordinator = Coordinator(schedules, self._send, log, placement=Placement(setup.cuts),
                                        tell=self._tell_speed,
                                        checkpoints=self.checkpoints, events=event_log, went_back=losses.go_back,
                                        iterations=range(setup.first_iteration,
                                                         max(setup.first_iteration, setup.iterations)))
        if run.settling is not None:
            self._coordinator.settler = Settler(Cost(run.layer_bytes, setup.fetch_bytes_per_second),
                                                run.settling.mtbf_seconds, event_log, run.notify)
        self._take_over = None
        if run.behind is not None:
            last = None if run.losses is None else setup.first_iteration + len(run.losses) - 1
            self._take_over = TakeOver(last, setup.first_iteration, run.gone,
                                       [seat.worker for seat in run.schedule.seats])
            self._coordinator.await_workers_of_another()
        self._workers: dict[Worker, Connection] = {}
        self._agents = NodeAgents(run, processes, self._is_missed)
        self._ended: dict[Worker, Ended] = {}
        """Processes that have ended, as long as messages of theirs may still arrive."""
        self._given_up: set[Worker] = set()
        """Workers that were lost before their processes have ended."""
        self._injected: dict[int, float] = {}
        """When each failure on purpose happened."""
        self._known = frozenset(run.schedule.grid.workers())
        self._corpora: dict[str, Worker] = {}
        self._folder = holder(run.out)
        self._apart = False
        """Whether a node has another folder."""
        self._bounds = Bounds(setup, len(run.injections), self._known)
        self._last_sent: tuple[msgspec.Struct | None, Frame] = None, Frame(b"", b"")
        """The last message and its bytes: an order, with its schedule, is encoded once for all workers."""
        self._checkpointed = 0
        """The newest complete checkpoint of which the event log was told."""
        self.notes: list[str] = []
        self.speed_events: list[SpeedEvent] = []
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
        self.processes.connect(self._agents.send)
        server = await serve(listener, Server(self._run.secret, self._heard, self._run.notify,
                                              MOST_UNKNOWN + len(self._known)))
        loop, descriptor = asyncio.get_running_loop(), self.processes.fileno()
        loop.add_reader(descriptor, self._read_ends)
        loop.call_later(self._run.join_timeout_seconds, self._put, self._require_all_there)
        address = "{}:{}".format(*listener.getsockname()[:2])
        self._tell_awaited(address, others_only=True)
        self._every(TELL_SECONDS, partial(self._tell_awaited, address))
        self._every(self._monitor.interval_seconds, self._look)
        if self._take_over is not None:
            self._every(FIND_AGAIN_SECONDS, self._find)
        self._every(STILL_RUNNING_SECONDS, self._agents.reassure)
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
        except NobodyLeftError as reason:
            error = str(reason)
            raise
        except (CommitLogError, ForkServerError, RunError) as reason:
            error = f"{reason}; {self._how_far()}"
            raise RunError(error) from None
        finally:
            self._event_log.write(RunFinished(error=error))
            loop.remove_reader(descriptor)
            server.close()
            await self._agents.announce_end(error)
            for connection in self._workers.values():
                connection.close()

    def _how_far(self) -> str:
        """What is committed, as a clause."""
        count, path = self._log.next_iteration, self._run.out / LOSSES
        return "no iteration is committed" if count == 0 else f"one iteration is committed, its loss is in {path}" \
            if count == 1 else f"{count} iterations are committed, their losses are in {path}"

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

    def _every(self, seconds: float, work: Callable[[], None]) -> None:
        """Have this done as an event, now and then."""
        def again() -> None:
            self._put(work)
            self._every(seconds, work)

        asyncio.get_running_loop().call_later(seconds, again)

    def _tell_speed(self, event: SpeedEvent) -> None:
        self.speed_events.append(event)
        for change in event.changes:
            self._event_log.write(Recovered(worker=change.worker) if change.factor == 1.0 else
                                  Slowed(worker=change.worker, factor=round(change.factor, 3)))
        for worker in event.left_out:
            self._event_log.write(LeftOut(worker=worker, reason=str(event)))
        self._run.notify(event)

    def _note(self, text: str) -> None:
        self.notes.append(text)
        self._event_log.write(Noted(text=text))
        self._run.notify(text)

    def _tell_awaited(self, address: str, *, others_only: bool = False) -> None:
        """Say for whom this node waits before the first order; at the start only for other nodes."""
        own = self._run.shares[0] if others_only else ()
        awaited = [worker for worker in self._coordinator.awaited if worker not in own]
        if awaited:
            self._run.notify(f"node 0, at {address}, waits for "
                             + who_is_awaited(awaited, self._run.shares, self._agents.connected))

    def _look(self) -> None:
        """Give up who is silent. Where nothing is committed for long, say so, and give up who keeps the others waiting
        by itself."""
        for worker, heard in self._monitor.missed():
            self._give_up(worker, f"worker {worker} stopped answering", heard)
            self.processes.kill(worker)
        held = self._coordinator.held
        stall = self._stall.look(held, self._monitor.interval_seconds, planning=self._coordinator.planning)
        if stall is None or not held:
            return
        self._note(str(stall))
        for one in stall.culprits(held):
            self._give_up(one.worker, f"worker {one.worker} hung for {one.seconds:.0f} s in {one.doing}")
            self.processes.kill(one.worker)

    def _find(self) -> None:
        """Take over once the workers of another coordinator have been found. Raises NobodyLeftError."""
        if self._take_over is None:
            return
        if self._take_over.nobody():
            raise NobodyLeftError("nobody is left of the run that another node 0 has led here")
        if not self._take_over.over():
            return
        found, self._take_over = self._take_over.found(), None
        first, count = self._run.setup.first_iteration, found.committed + 1
        losses = list(self._run.losses or ())[:count - first]
        unknown = count - first - len(losses)
        if unknown:
            self._note(f"the losses of {unknown} iterations before {count} are not known: node 0 has been started anew "
                       "without the folder that holds them")
        self._losses.go_back(first + len(losses))
        self._log.take_over([*losses, *[math.nan] * unknown], found.factor)
        self._run.notify(f"node 0 goes on with the {len(found.holds)} workers that it has found; {count} iterations "
                         "are committed")
        self._coordinator.take_over(found)
        self.processes.start_missing()

    def _send(self, worker: Worker, message: msgspec.Struct) -> None:
        if isinstance(message, Leave):  # its end is no news
            self._given_up.add(worker)
            self._monitor.remove(worker)
        if message is not self._last_sent[0]:
            self._last_sent = message, frame(message)
        if worker in self._workers:
            self._workers[worker].send(self._last_sent[1])

    def _handle(self, connection: Connection, message: ToCoordinator) -> None:
        """Handle a message of a worker or a node agent."""
        peer = connection.peer
        wrong = self._bounds.wrong(message, self._log.next_iteration)
        if wrong is not None:
            connection.cut_off(wrong)
        elif isinstance(peer, int):
            self._handle_agent(connection, message)
        elif isinstance(message, JoinWorker):
            self._admit(connection, message)
        elif peer is not None and self._workers.get(peer) is connection:
            self._monitor.heard(peer)
            self._handle_worker(peer, printable(message))

    def _admit(self, connection: Connection, message: JoinWorker) -> None:
        worker, setup = message.worker, self._run.setup
        if message.epoch and (message.epoch >= setup.epoch or self._run.behind is None):
            connection.send(frame(Leave()))  # it was given up, or belongs to another run, or follows a newer one
            connection.close()
            return
        if worker in self._workers or worker not in self._known:
            connection.close()  # not ours: a process is started anew only once its end has been handled
            return
        self._workers[worker] = connection
        self._given_up.discard(worker)
        late = message.epoch > 0 and self._take_over is None
        connection.send(frame(replace(setup, forget=late, injections=tuple(
            (index, one) for index, one in enumerate(self._run.injections)
            if one.worker == worker and index not in self._injected),
            slowdowns=tuple(one for one in self._run.slowdowns if one.worker == worker))))

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
                self._compare_folder(message)
                self._monitor.add(worker)
                coordinator.ready(message)
                if self._take_over is not None and message.known is not None:
                    self._take_over.ready(worker, message.known)
            case Saved():
                self._saved(message)
            case Note():
                self._note(message.text)
            case Injected():
                self._injected[message.index] = message.at
            case SpeedMeasured():
                coordinator.speed_measured(message)
            case Status():
                self._stall.answered(message)
            case Checkpoints():
                coordinator.can_read(message)
            case Leaving():
                coordinator.leaving(worker)
            case Failed(everywhere=True):
                raise RunError(message.reason)
            case Failed():
                self._give_up(worker, f"worker {worker} failed: {message.reason} "
                                      f"(see {self._log_of(worker)})")

    def _saved(self, report: Saved) -> None:
        """A worker has written its layers; the checkpoint is complete once its folder has its name."""
        if report.iteration < self._run.setup.iterations:  # the last one costs no training
            self.checkpoints.saved(report.iteration, report.seconds)
        if report.iteration > self._checkpointed and (self._run.out / CHECKPOINTS
                                                      / f"iteration-{report.iteration}").is_dir():
            self._checkpointed = report.iteration
            self._event_log.write(CheckpointWritten(checkpoint=report.iteration, took=round(report.seconds, 3)))

    def _handle_agent(self, connection: Connection, message: ToCoordinator) -> None:
        match message:
            case JoinNode():
                self._agents.admit(connection, message, restarted=self._coordinator.number > 0
                                   or self._coordinator.rejoining)
            case Leaving() if self._agents.speaks_for(connection, message.worker):
                self._coordinator.leaving(message.worker)
            case Ended() if self._agents.speaks_for(connection, message.worker):
                self._process_ended(message)

    def _is_missed(self, node: int) -> bool:
        """Whether all workers of a node have been given up: its machine may be gone without a word."""
        workers = self.processes.workers_of(node)
        return bool(workers) and all(worker in self._given_up and worker not in self._workers for worker in workers)

    def _disconnected(self, connection: Connection) -> None:
        """A connection has ended, and all messages that came over it have been handled."""
        peer = connection.peer
        if isinstance(peer, Worker):
            if self._workers.get(peer) is connection:
                del self._workers[peer]
                if peer in self._ended:
                    self._handle_end(self._ended.pop(peer))
        elif peer is not None and self._agents.disconnected(connection):
            for worker in self.processes.workers_of(peer):
                # An agent that has lost the coordinator, or has died, ends its workers.
                if worker in self._monitor:
                    self._give_up(worker, f"worker {worker} is gone with node {peer}")
                elif worker in self._workers:  # it was not ready yet
                    self._workers.pop(worker).close()

    def _read_ends(self) -> None:
        try:
            for ended in self.processes.poll():
                self._put(partial(self._process_ended, ended))
        except ForkServerError as error:
            asyncio.get_running_loop().remove_reader(self.processes.fileno())
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
        self.processes.ended(ended.worker)

    def _require_all_there(self) -> None:
        """Raises RunError where workers are still waited for before the first order."""
        if self._coordinator.awaited:
            raise RunError(f"waited {self._run.join_timeout_seconds:g} s in vain for "
                           + who_is_awaited(self._coordinator.awaited, self._run.shares, self._agents.connected))

    def _commit(self, committed: Iterator[tuple[int, float]]) -> None:
        for iteration, loss in committed:
            self._losses.write(iteration, loss, self._log.period_seconds, self._event_log.now(),
                               self._log.gradient_norm, self._log.evaluation)
            if self._log.evaluation is not None:
                self._run.notify(f"validation loss {self._log.evaluation:.6f} after {iteration + 1} iterations")
            self.processes.committed(iteration)
            self._coordinator.committed()
            self._stall.progressed()

    def _give_up(self, worker: Worker, reason: str, since: float = 0.0) -> None:
        """Count a worker as lost whose process may not have ended."""
        self._given_up.add(worker)
        self._lose(worker, reason, since)

    def _lose(self, worker: Worker, reason: str, since: float = 0.0) -> None:
        """Count a worker as lost, and close its connection."""
        self._monitor.remove(worker)
        if self._take_over is not None:
            self._take_over.lost(worker)
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

    def _compare_folder(self, report: Ready) -> None:
        """Note once, of the first node that it is true of, that what is written does not come together."""
        if report.folder != self._folder and not self._apart:
            self._apart = True
            node = next((node for node, share in enumerate(self._run.shares) if report.worker in share), 0)
            self._note(f"node {node} writes to another folder than node 0: checkpoints and parameters of which both "
                       "write layers are complete in neither; give all nodes one --out on a file system they share")

    def _describe(self, ended: Ended) -> str:
        if ended.status < 0:
            with suppress(ValueError):  # a signal that has no name
                return f"worker {ended.worker} was killed by {signal.Signals(-ended.status).name}"
        return f"worker {ended.worker} ended with exit status {ended.status} (see {self._log_of(ended.worker)})"

    def _log_of(self, worker: Worker) -> Path:
        return self._run.out / "logs" / f"worker-{worker}.log"


def _fail(error: Exception) -> None:
    raise error
