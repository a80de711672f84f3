"""Start, kill and restart the processes of a run's workers, on all nodes."""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import msgspec

from slipstream.runtime.errors import CoordinatorFailedError, RunError
from slipstream.runtime.processes.fork_server import KILL_SECONDS, ForkServer, ForkServerError
from slipstream.runtime.processes.restart_policy import CrashTimes, FaultHistory
from slipstream.runtime.processes.worker_start import (
    NodeSettings,
    WorkerSpec,
    format_process_name,
    parse_process_name,
)
from slipstream.runtime.protocol.rendezvous import Rendezvous
from slipstream.runtime.protocol.to_coordinator import WorkerEnded
from slipstream.runtime.protocol.to_node_agent import KillWorker, StartWorker, ToNodeAgent
from slipstream.schedules.schedule import Worker

SendToAgent = Callable[[int, ToNodeAgent], None]
"""Function that sends a message to a node's agent, if the agent is connected."""


class Return(msgspec.Struct, frozen=True):
    """Restart that the user asks for, once `iteration` has begun and the worker is dead."""

    worker: Worker
    iteration: int


class NodeFailure(msgspec.Struct, frozen=True):
    """Injected failure of a node: its workers are killed at once when an iteration begins."""

    workers: tuple[Worker, ...]
    iteration: int


class NodeProcesses:
    """Processes of this node's workers, started and killed by its fork server.

    They use the machine's `cards` GPUs in turn, beginning with number `first_card`. The processes
    of one worker live and die together: when one ends, the others are killed, and the worker has
    ended when all of them have.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        coordinator: Rendezvous,
        workers: Sequence[Worker],
        cards: int,
        settings: NodeSettings,
        first_card: int = 0,
    ) -> None:
        self._fork_server = fork_server
        self._coordinator = coordinator
        self._cards = cards
        self._first_card = first_card
        self._places = {worker: index for index, worker in enumerate(workers)}
        self._settings = settings
        self._ranks = range(settings.config.training.tensor_parallel)
        self._ending: dict[Worker, WorkerEnded] = {}
        """First end of a process of each worker whose other processes are still alive."""

    @contextmanager
    def run_workers(self, *, restarted: bool = False, found: bool = False) -> Iterator[None]:
        """Start this node's workers, and kill those that are left when the context ends.

        After CoordinatorFailedError they are not killed: another coordinator continues with them.
        With `restarted`, workers are told that the run has continued without them. With `found`,
        they are alive already, and none is started. Raises RunError if the fork server fails.
        """
        try:
            for worker in () if found else tuple(self._places):
                self.execute_command(StartWorker(worker, restarted=restarted))
            yield
        except CoordinatorFailedError:
            raise  # another coordinator continues with the workers that are alive
        except ForkServerError as error:
            self._fork_server.kill_all()
            raise RunError(str(error)) from None
        except BaseException:
            self._fork_server.kill_all()
            raise
        self._fork_server.kill_all()

    def execute_command(self, command: StartWorker | KillWorker) -> None:
        """Start the processes of a worker, unless one is alive, or kill them.

        Raises ForkServerError.
        """
        worker = command.worker
        if isinstance(command, KillWorker):
            self._kill_worker(worker)
        elif not self._is_alive(worker):
            for rank in self._ranks:
                self._fork_server.start_process(
                    WorkerSpec(
                        worker,
                        self._coordinator,
                        self.assign_gpu(worker, rank),
                        self._settings,
                        command.restarted,
                        rank,
                    ).build_process_spec()
                )

    def list_alive(self) -> list[Worker]:
        """Return the workers that have been started and have not ended."""
        return [worker for worker in self._places if self._is_alive(worker)]

    def assign_gpu(self, worker: Worker, rank: int = 0) -> int | None:
        """Return the GPU's index for a worker's process; None if there are no GPUs.

        A worker that is not one of this node's yet becomes one.
        """
        place = self._places.setdefault(worker, len(self._places)) * len(self._ranks) + rank
        return (self._first_card + place) % self._cards if self._cards else None

    def _kill_worker(self, worker: Worker) -> None:
        for rank in self._ranks:
            self._fork_server.kill_process(format_process_name(worker, rank))

    def _is_alive(self, worker: Worker) -> bool:
        return any(
            self._fork_server.is_alive(format_process_name(worker, rank)) for rank in self._ranks
        )

    def fileno(self) -> int:
        """Return the descriptor for a selector, which is readable when `poll` has news."""
        return self._fork_server.fileno()

    def poll(self) -> list[WorkerEnded]:
        """Return this node's workers that have ended since the last call, with their status.

        Raises ForkServerError.
        """
        # The worker's status is that of the process that ended first: the others are killed.
        for process in self._fork_server.poll(0):
            worker = parse_process_name(process.name)
            self._ending.setdefault(worker, WorkerEnded(worker, process.status))
        ended = [worker for worker in self._ending if not self._is_alive(worker)]
        for worker in self._ending.keys() - ended:
            self._kill_worker(worker)
        return [self._ending.pop(worker) for worker in ended]


class ProcessManager:
    """Worker processes of all nodes, which node 0 starts, kills and restarts.

    Parameters
    ----------
    nodes
        Node of each worker. Workers that do not take part from the start are on node 0.
    returns
        Workers to start again, each in a given iteration or later.
    absent
        Workers that do not take part from the start.
    failures
        Failures of nodes to inject: their workers are killed when an iteration begins.
    faults_per_hour
        Largest number of crashes in an hour after which a worker is started again. 0: crashed
        workers are not started again, except those of `returns`.
    crashes
        Crashes under a previous node 0, which count as well.
    keep
        Function that is called with all crashes after each new one, to write them down.
    """

    def __init__(
        self,
        local: NodeProcesses,
        nodes: Mapping[Worker, int],
        returns: Sequence[Return] = (),
        absent: Sequence[Worker] = (),
        failures: Sequence[NodeFailure] = (),
        *,
        faults_per_hour: int = 0,
        crashes: CrashTimes = (),
        keep: Callable[[CrashTimes], None] = lambda _: None,
    ) -> None:
        self._local = local
        self._nodes = nodes
        self._workers_of: dict[int, list[Worker]] = defaultdict(list)
        for worker, node in nodes.items():
            self._workers_of[node].append(worker)
        self._returns = list(returns)
        self._iteration = -1
        """Latest iteration that has begun; -1 before the first."""
        # After a takeover, who is dead on another node is known when its agent is back: until then
        # a start that is due would be lost, and for a worker that is alive it would be used up.
        self._dead = {worker for worker in absent if nodes.get(worker, 0) == 0}
        self._failures = list(failures)
        self._faults = FaultHistory.from_crashes(faults_per_hour, crashes)
        self._keep = keep
        self._again: dict[Worker, float] = {}
        """Time at which each crashed worker is to be started again."""
        self._send: SendToAgent = lambda *_: None
        self._note: Callable[[str], None] = lambda _: None

    def run_workers(self, *, found: bool) -> AbstractContextManager[None]:
        """Return a context in which node 0's workers run; if `found`, they are alive already."""
        return self._local.run_workers(found=found)

    def connect_agents(self, send: SendToAgent, note: Callable[[str], None]) -> None:
        """Set the functions that send commands to other nodes, and print lines about crashes."""
        self._send, self._note = send, note

    def fileno(self) -> int:
        """Return the descriptor for a selector, which is readable when `poll` has news."""
        return self._local.fileno()

    def poll(self) -> list[WorkerEnded]:
        """Return node 0's workers that ended since the last call. Raises ForkServerError."""
        return self._local.poll()

    def get_node_workers(self, node: int) -> Sequence[Worker]:
        """Return the workers of a node; none if the node is unknown."""
        return self._workers_of.get(node, ())

    def record_node_started(self, node: int) -> None:
        """Record that a node has joined and starts its workers."""
        self._dead.difference_update(self.get_node_workers(node))

    def record_node_adopted(self, node: int, alive: Collection[Worker]) -> None:
        """Record that an earlier coordinator's node has joined. Workers not `alive` crashed."""
        workers = set(self.get_node_workers(node))
        missing = workers - set(alive)
        self._dead = (self._dead - workers) | missing
        for worker in sorted(missing):
            self._record_crash(worker)

    def start_missing_workers(self) -> None:
        """Start node 0's dead workers, after its own restart. Raises ForkServerError."""
        for worker in sorted(set(self.get_node_workers(0)) & self._dead):
            self._start_worker(worker)

    def kill_worker(self, worker: Worker) -> None:
        """Kill all processes of a worker, on whichever node they are. Raises ForkServerError."""
        self._execute_command(KillWorker(worker))

    def handle_worker_end(self, ended: WorkerEnded) -> None:
        """Record a worker's end; start it again if a rehearsed return is due.

        A crash is counted; unless the worker stays out, `restart_due_workers` starts it after a
        pause. Raises ForkServerError.
        """
        worker = ended.worker
        self._dead.add(worker)
        # If a restart that the user asked for is due, the end does not count as a crash.
        self._start_returning_workers()
        if ended.status and worker in self._dead:
            self._record_crash(worker)

    def _record_crash(self, worker: Worker) -> None:
        # A crash that is waiting for its restart was counted before.
        if worker in self._again:
            return
        now = time.monotonic()
        self._faults, verdict = self._faults.with_fault(
            worker, self.get_node_workers(self._nodes.get(worker, 0)), now
        )
        self._keep(self._faults.crash_times)
        if verdict.pause_seconds is not None:
            self._again[worker] = now + verdict.pause_seconds
        if verdict.reason:
            self._note(verdict.reason)

    def restart_due_workers(self) -> None:
        """Start the crashed workers whose pause is over. Raises ForkServerError."""
        now = time.monotonic()
        for worker in sorted(worker for worker, at in self._again.items() if at <= now):
            del self._again[worker]
            if worker in self._dead:
                self._start_worker(worker)

    def begin_iteration(self, iteration: int) -> None:
        """Kill the workers of nodes that fail in `iteration`; start those due to return.

        Raises ForkServerError if the fork server has ended.
        """
        due = [failure for failure in self._failures if failure.iteration <= iteration]
        self._failures = [failure for failure in self._failures if failure.iteration > iteration]
        for failure in due:
            if failure.iteration == iteration:  # otherwise it was due under a previous coordinator
                for worker in failure.workers:
                    self.kill_worker(worker)
        self._iteration = max(self._iteration, iteration)
        self._start_returning_workers()

    def _start_returning_workers(self) -> None:
        for entry in sorted(self._returns, key=lambda entry: entry.worker):
            if entry.iteration <= self._iteration and entry.worker in self._dead:
                self._returns.remove(entry)
                self._start_worker(entry.worker)

    def _start_worker(self, worker: Worker) -> None:
        self._dead.remove(worker)
        self._execute_command(StartWorker(worker))

    def _execute_command(self, command: StartWorker | KillWorker) -> None:
        node = self._nodes.get(command.worker, 0)
        if node == 0:
            self._local.execute_command(command)
        else:
            self._send(node, command)


def find_complete_workers(adopted: ForkServer, ranks: int) -> list[Worker]:
    """Return the workers whose `ranks` processes are all alive, and kill those of other workers.

    Waits up to `KILL_SECONDS` until the killed ones have ended. Raises ForkServerError if the fork
    server `adopted` has died.
    """
    ranks_alive: dict[Worker, list[str]] = {}
    for name in adopted.list_alive():
        ranks_alive.setdefault(parse_process_name(name), []).append(name)
    incomplete = {name for names in ranks_alive.values() if len(names) < ranks for name in names}
    # A worker without all its ranks cannot compute; it is started again as a whole.
    for name in incomplete:
        adopted.kill_process(name)
    deadline = time.monotonic() + KILL_SECONDS
    while incomplete.intersection(adopted.list_alive()) and time.monotonic() < deadline:
        adopted.poll(1.0)
    return [worker for worker, names in ranks_alive.items() if len(names) == ranks]
