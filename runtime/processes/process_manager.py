"""The processes of a run's workers, on all nodes: which node has which, who is killed, who comes back, and when."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
from torch._C._distributed_c10d import TCPStore

from runtime.processes.fork_server import Nursery
from runtime.processes.worker_start import Birth
from runtime.protocol.rendezvous import Rendezvous, pop
from runtime.protocol.reports import Ended
from schedules.schedule import Worker


class Return(msgspec.Struct, frozen=True):
    """A dead worker's process to be started again in an iteration, or as soon as it is dead after that."""

    worker: Worker
    iteration: int


class Fork(msgspec.Struct, frozen=True, tag=True):
    """For the launcher of another node: start a worker."""

    worker: Worker
    after: int


class Expel(msgspec.Struct, frozen=True, tag=True):
    """For the launcher of another node: kill a worker."""

    worker: Worker


Command = Fork | Expel


class Hands:
    """Starts and ends worker processes on this machine, cards dealt in turn."""

    def __init__(self, nursery: Nursery, rendezvous: Rendezvous, workers: Sequence[Worker], cards: int,
                 out: Path, first_card: int = 0) -> None:
        self._nursery = nursery
        self._rendezvous = rendezvous
        self._cards = {worker: (first_card + index) % cards if cards else None
                       for index, worker in enumerate(workers)}
        self._out = out

    def start(self) -> None:
        """Start all workers that are to be here. Raises NurseryError."""
        for worker in self._cards:
            self.do(Fork(worker, 0))

    def do(self, command: Command) -> None:
        """Follow a command. Raises NurseryError."""
        if isinstance(command, Expel):
            self._nursery.kill(command.worker)
        elif not self._nursery.lives(command.worker):
            self._nursery.fork(Birth(command.worker, self._rendezvous, self._cards.get(command.worker),
                                     str(self._out), command.after))

    def poll(self, seconds: float) -> list[Ended]:
        """The workers here that have ended. Raises NurseryError."""
        return self._nursery.poll(seconds)


class Crew:
    """Node 0's hold on all processes."""

    def __init__(self, hands: Hands, store: TCPStore, nodes: Mapping[Worker, int],
                 returns: Sequence[Return] = (), absent: Sequence[Worker] = ()) -> None:
        self._hands = hands
        self._store = store
        self._nodes = nodes
        self._later = list(returns)
        self._due: set[Worker] = set()
        self._dead = set(absent)

    def poll(self, seconds: float) -> list[Ended]:
        """The workers of node 0 that have ended, waiting so long for news. Raises NurseryError."""
        return self._hands.poll(seconds)

    def expel(self, worker: Worker) -> None:
        """Kill a worker's process, wherever it is. Raises NurseryError."""
        self._do(Expel(worker))

    def buried(self, worker: Worker, after: int) -> None:
        """A process has ended; start it anew if that is due. Raises NurseryError."""
        self._dead.add(worker)
        self._bring_back(after)

    def committed(self, iteration: int, after: int) -> None:
        """The iteration after this one begins. Raises NurseryError."""
        for one in [one for one in self._later if one.iteration <= iteration + 1]:
            self._later.remove(one)
            self._due.add(one.worker)
        self._bring_back(after)

    def _bring_back(self, after: int) -> None:
        for worker in sorted(self._due & self._dead):
            self._due.remove(worker)
            self._dead.remove(worker)
            self._do(Fork(worker, after))

    def _do(self, command: Command) -> None:
        node = self._nodes.get(command.worker, 0)
        if node == 0:
            self._hands.do(command)
        else:
            self._store.queue_push(_queue(node), msgspec.json.encode(command).decode())


def next_command(store: TCPStore, node: int) -> Command | None:
    """The next thing that node 0 wants done on another node; None when there is nothing."""
    message = pop(store, _queue(node))
    return None if message is None else msgspec.json.decode(message, type=Command)


def _queue(node: int) -> str:
    return f"node/{node}/commands"
