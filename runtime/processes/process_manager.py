"""The processes of a run's workers, on all nodes: starts, kills and restarts them."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import msgspec

from slipstream.runtime.errors import CoordinatorFailedError, RunError
from slipstream.runtime.processes.faults import Crashes, Faults
from slipstream.runtime.processes.fork_server import KILL_SECONDS, ForkServer, ForkServerError
from slipstream.runtime.processes.worker_start import NodeSettings, WorkerSpec, process_name, worker_named
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.protocol.to_coordinator import Ended
from slipstream.runtime.protocol.to_node_agent import KillWorker, StartWorker, ToNodeAgent
from slipstream.schedules.schedule import Worker

SendToAgent = Callable[[int, ToNodeAgent], None]
"""Sends a message to the agent of a node; nothing happens where that is not there."""


class Return(msgspec.Struct, frozen=True):
    """A dead worker's process to be started again in an iteration, or as soon as it is dead after that."""

    worker: Worker
    iteration: int


class NodeFailure(msgspec.Struct, frozen=True):
    """The workers of a node, whose processes are to be killed at once when an iteration begins. For rehearsals."""

    workers: tuple[Worker, ...]
    iteration: int


class NodeProcesses:
    """Starts and kills the worker processes of this node; each takes the next GPU, from `first_card` on.

    The processes of a worker, where there are several, live and die together: when one ends, the others are killed, and
    the worker has ended when all have.
    """

    def __init__(self, fork_server: ForkServer, coordinator: Rendezvous, workers: Sequence[Worker], cards: int,
                 settings: NodeSettings, first_card: int = 0) -> None:
        self._fork_server = fork_server
        self._coordinator = coordinator
        self._cards = cards
        self._first_card = first_card
        self._places = {worker: index for index, worker in enumerate(workers)}
        self._settings = settings
        self._ranks = range(settings.config.training.tensor_parallel)
        self._ending: dict[Worker, Ended] = {}
        """Of workers of which a process has ended: the first to do so."""

    @contextmanager
    def running(self, *, restarted: bool = False, found: bool = False) -> Iterator[None]:
        """In this block, the workers that are to be here from the start; at its end, none is left. Raises RunError.

        Where those of a run were `found` that goes on, none is started yet.
        """
        try:
            for worker in () if found else tuple(self._places):
                self.do(StartWorker(worker, restarted=restarted))
            yield
        except CoordinatorFailedError:
            raise  # another one goes on with those that live
        except ForkServerError as error:
            self._fork_server.kill_all()
            raise RunError(str(error)) from None
        except BaseException:
            self._fork_server.kill_all()
            raise
        self._fork_server.kill_all()

    def do(self, command: StartWorker | KillWorker) -> None:
        """Start or kill a worker. Raises ForkServerError."""
        worker = command.worker
        if isinstance(command, KillWorker):
            self._kill(worker)
        elif not self._lives(worker):
            for rank in self._ranks:
                self._fork_server.start(WorkerSpec(worker, self._coordinator, self.card(worker, rank), self._settings,
                                                   command.restarted, rank).process())

    def alive(self) -> list[Worker]:
        """Those that have been started, and not ended."""
        return [worker for worker in self._places if self._lives(worker)]

    def card(self, worker: Worker, rank: int = 0) -> int | None:
        """The GPU of a worker's process; None where there are none."""
        place = self._places.setdefault(worker, len(self._places)) * len(self._ranks) + rank
        return (self._first_card + place) % self._cards if self._cards else None

    def _kill(self, worker: Worker) -> None:
        for rank in self._ranks:
            self._fork_server.kill(process_name(worker, rank))

    def _lives(self, worker: Worker) -> bool:
        return any(self._fork_server.lives(process_name(worker, rank)) for rank in self._ranks)

    def fileno(self) -> int:
        """For a selector: readable when `poll` has something to report."""
        return self._fork_server.fileno()

    def poll(self) -> list[Ended]:
        """The workers here that have ended. Raises ForkServerError."""
        for one in self._fork_server.poll(0):
            worker = worker_named(one.name)
            self._ending.setdefault(worker, Ended(worker, one.status))
        over = [worker for worker in self._ending if not self._lives(worker)]
        for worker in self._ending.keys() - over:
            self._kill(worker)
        return [self._ending.pop(worker) for worker in over]


class ProcessManager:
    """Starts, kills and restarts the worker processes of all nodes; on node 0.

    Parameters
    ----------
    nodes
        Where each worker is; those that are not there from the start are on node 0.
    returns
        The workers to start again.
    absent
        The workers that are not there from the start.
    failures
        Nodes whose workers to kill.
    faults_per_hour
        How many times a worker that crashes is started again; 0: only those of `returns` are.
    crashes
        Those under another node 0, which count; `keep` is called with all when there is one more.
    """

    def __init__(self, local: NodeProcesses, nodes: Mapping[Worker, int], returns: Sequence[Return] = (),
                 absent: Sequence[Worker] = (), failures: Sequence[NodeFailure] = (), *,
                 faults_per_hour: int = 0, crashes: Crashes = (),
                 keep: Callable[[Crashes], None] = lambda _: None) -> None:
        self._local = local
        self._nodes = nodes
        self._workers_of: dict[int, list[Worker]] = defaultdict(list)
        for worker, node in nodes.items():
            self._workers_of[node].append(worker)
        self._returns = list(returns)
        self._iteration = -1
        """The last one that has begun."""
        self._dead = set(absent)
        self._failures = list(failures)
        self._faults = Faults.after(faults_per_hour, crashes)
        self._keep = keep
        self._again: dict[Worker, float] = {}
        """When each is started again that has crashed."""
        self._send: SendToAgent = lambda *_: None
        self._note: Callable[[str], None] = lambda _: None

    def running(self, *, found: bool) -> AbstractContextManager[None]:
        """See `NodeProcesses.running`."""
        return self._local.running(found=found)

    def connect(self, send: SendToAgent, note: Callable[[str], None]) -> None:
        """From now on, reach the agents of other nodes, and tell who is started again."""
        self._send, self._note = send, note

    def fileno(self) -> int:
        """For a selector: readable when `poll` has something to report."""
        return self._local.fileno()

    def poll(self) -> list[Ended]:
        """The workers of node 0 that have ended. Raises ForkServerError."""
        return self._local.poll()

    def workers_of(self, node: int) -> Sequence[Worker]:
        """Those that are on a node."""
        return self._workers_of.get(node, ())

    def node_started(self, node: int) -> None:
        """A node is there, and starts its workers."""
        self._dead.difference_update(self.workers_of(node))

    def node_found(self, node: int, alive: Collection[Worker]) -> None:
        """A node is there that has followed another coordinator, with these of its workers. The others have crashed;
        that coordinator may have been about to start them again."""
        workers = set(self.workers_of(node))
        missing = workers - set(alive)
        self._dead = (self._dead - workers) | missing
        for worker in sorted(missing):
            self._crashed(worker)

    def start_missing(self) -> None:
        """Start the workers of node 0 that do not live: the node has been started again. Raises ForkServerError."""
        for worker in sorted(set(self.workers_of(0)) & self._dead):
            self._start(worker)

    def kill(self, worker: Worker) -> None:
        """Kill a worker's process, wherever it is; all of them, where it is several. Raises ForkServerError."""
        self._do(KillWorker(worker))

    def ended(self, ended: Ended) -> None:
        """A worker has ended; start it anew if that is due. Raises ForkServerError."""
        worker = ended.worker
        self._dead.add(worker)
        self._bring_back()
        if ended.status and worker in self._dead:
            self._crashed(worker)

    def _crashed(self, worker: Worker) -> None:
        if worker in self._again:
            return
        now = time.monotonic()
        self._faults, verdict = self._faults.add(worker, self.workers_of(self._nodes.get(worker, 0)), now)
        self._keep(self._faults.crashes)
        if verdict.pause_seconds is not None:
            self._again[worker] = now + verdict.pause_seconds
        if verdict.reason:
            self._note(verdict.reason)

    def look(self) -> None:
        """To be called at an interval: starts those again whose pause is over. Raises ForkServerError."""
        now = time.monotonic()
        for worker in sorted(worker for worker, at in self._again.items() if at <= now):
            del self._again[worker]
            if worker in self._dead:
                self._start(worker)

    def begins(self, iteration: int) -> None:
        """An iteration begins, for the first time or again. Raises ForkServerError."""
        due = [one for one in self._failures if one.iteration <= iteration]
        self._failures = [one for one in self._failures if one.iteration > iteration]
        for one in due:
            if one.iteration == iteration:  # else it was in what another coordinator has led
                for worker in one.workers:
                    self.kill(worker)

    def committed(self, iteration: int) -> None:
        """The iteration after this one begins. Raises ForkServerError."""
        self.begins(iteration + 1)
        self._iteration = max(self._iteration, iteration + 1)
        self._bring_back()

    def _bring_back(self) -> None:
        for one in sorted(self._returns, key=lambda one: one.worker):
            if one.iteration <= self._iteration and one.worker in self._dead:
                self._returns.remove(one)
                self._start(one.worker)

    def _start(self, worker: Worker) -> None:
        self._dead.remove(worker)
        self._do(StartWorker(worker))

    def _do(self, command: StartWorker | KillWorker) -> None:
        node = self._nodes.get(command.worker, 0)
        if node == 0:
            self._local.do(command)
        else:
            self._send(node, command)


def find_workers(adopted: ForkServer, ranks: int) -> list[Worker]:
    """The workers of a run whose launcher has died; what is left of those that are not whole is killed before.

    Raises ForkServerError.
    """
    living: dict[Worker, list[str]] = {}
    for name in adopted.names():
        living.setdefault(worker_named(name), []).append(name)
    left = {name for names in living.values() if len(names) < ranks for name in names}
    for name in left:
        adopted.kill(name)
    deadline = time.monotonic() + KILL_SECONDS
    while left.intersection(adopted.names()) and time.monotonic() < deadline:
        adopted.poll(1.0)
    return [worker for worker, names in living.items() if len(names) == ranks]
