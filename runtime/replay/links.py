"""Process groups of one process, created when a generation begins, and reused if nothing was aborted in them."""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from slipstream.runtime.replay.backend import Backend, Meeting
from slipstream.runtime.replay.gloo import Gloo
from slipstream.runtime.replay.group_store import GroupStore, order_prefix
from slipstream.runtime.replay.nccl import Nccl
from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.replay.transfers import TIMEOUT, CommunicationError
from slipstream.runtime.replay.transport import Transport
from slipstream.runtime.torch_private import Group, Store

_KEPT = msgspec.json.Decoder(dict[str, tuple[int, int]])
"""Decoder of the groups that a process could reuse, by name: the order that created each, and the number of operations
started in it."""


class OrderEndedError(CommunicationError):
    """The generation has ended while the session was at work."""


class Wanted(NamedTuple):
    """A process group that a session needs."""

    name: str
    """Name of the group, equal at all members and unique in a generation."""
    members: tuple[str, ...]
    """Names of the member processes, by rank."""
    place: int
    """Rank of this process."""
    backend: Backend
    directed: bool = False
    """True if the first of two members only sends to the second."""

    @property
    def turn(self) -> tuple[int, str]:
        """Sort key of group creation, equal in all processes, so that no two wait for each other in different groups.

        Groups whose first member is in an even column come first: so the workers of a long pipeline connect in two
        steps.
        """
        return int(self.members[0].partition(":")[0].rpartition(".")[2]) % 2, self.name


class _Held(NamedTuple):
    """A process group that exists."""

    wanted: Wanted
    order: int
    """Number of the order for which the group was created."""
    group: Group
    keys: GroupStore


class Links:
    """The process groups of one process, kept from generation to generation.

    An NCCL group is kept if the next generation needs it, all of its members live, and nothing was aborted in it. So
    the cost of a change depends on the number of workers that come and go, not on the number of all workers. Groups
    over gloo stay open until the next generation, as other workers may still receive through them what they need to end
    an iteration.
    """

    def __init__(self, transport: Transport) -> None:
        self.host = Gloo()
        """Gloo backend, which carries numbers and bytes in host memory."""
        self.backend: Backend = self.host if transport == "gloo" else Nccl()
        self.backends = (self.host,) if self.backend is self.host else (self.host, self.backend)
        """Backends in the order of their aborts: gloo first, so that no thread that an NCCL abort releases can continue
        over gloo."""
        self.idle: dict[str, _Held] = {}
        """Groups that no session uses, by name."""

    def close(self) -> None:
        """Close the groups that no session uses."""
        idle, self.idle = self.idle, {}
        _close([*idle.values()])


class Groups:
    """The process groups of one generation; `Session` describes most methods."""

    def __init__(self, links: Links, store: Store, order: int, own: str,
                 spared: Callable[[], Sockets]) -> None:
        self.links = links
        self._store = store
        self._order = order
        self._own = own
        """Name of this process among the members."""
        self._spared = spared
        self._held: dict[str, _Held] = {}
        self._lost: list[_Held] = []
        self._ended = False
        self._released = False
        self._lock = threading.Lock()
        """Makes sure that `abort` sees each new group, or the thread that creates it sees the abort."""

    def make(self, all_wanted: Iterable[Wanted]) -> None:
        """Provide all groups that the generation needs: reuse the groups that can be reused, and create the others."""
        self.require()
        wanted = {spec.name: spec for spec in all_wanted}
        idle, self.links.idle = self.links.idle, {}
        for name in self._agreed(wanted, idle):
            wanted[name].backend.reuse(idle[name].group)
            self._hold(idle.pop(name))
        self.add(wanted.values())
        _close_beside([*idle.values()])

    def add(self, wanted: Iterable[Wanted]) -> None:
        """Create the groups that do not exist yet."""
        self.require()
        missing = sorted((spec for spec in wanted if spec.name not in self._held), key=lambda spec: spec.turn)
        for backend in self.links.backends:  # separately: gloo's abort shuts all sockets opened meanwhile
            with backend.making(self._spared):
                for spec in missing:
                    if spec.backend is backend:
                        self._hold(self._made(spec))

    def named(self, name: str) -> Group:
        """Return the group of this name. Raises RuntimeError if there is none."""
        try:
            return self._held[name].group
        except KeyError:
            raise RuntimeError("there is no connection") from None

    def by_name(self) -> dict[str, Group]:
        """Return all groups, by name."""
        return {name: held.group for name, held in self._held.items()}

    def keys(self, purpose: str, members: int = 1) -> GroupStore:
        """Return a store in which members of this generation exchange values for one purpose."""
        return GroupStore(self._store, self._prefix(purpose), TIMEOUT, self.require, members)

    def require(self) -> None:
        """Raise OrderEndedError if the generation has ended."""
        if self._ended:
            raise OrderEndedError("the order is over")

    def abort(self) -> None:
        """Abort all pending operations, from any thread."""
        self._ended = True
        with self._lock:
            if self._released:
                return
            held = tuple(self._held.values())
        for backend in self.links.backends:
            backend.abort([entry.group for entry in held if entry.wanted.backend is backend])

    def errored(self) -> str | None:
        """Return why one of the groups has failed, in one line; None if none has."""
        return next((f"the connections of {held.wanted.name} have failed: {lost}" for held in tuple(self._held.values())
                     if (lost := held.wanted.backend.lost(held.group)) is not None), None)

    def over(self) -> bool:
        """Return whether no pending operation can write to a tensor."""
        held = (*self._held.values(), *self._lost)
        return all(backend.over([entry.group for entry in held if entry.wanted.backend is backend])
                   for backend in self.links.backends)

    def release(self) -> None:
        """Keep the groups in which nothing was aborted for the next generation."""
        with self._lock:
            self._released = True
            held, self._held = self._held, {}
        for name, entry in held.items():
            if entry.wanted.backend.lost(entry.group) is None:
                self.links.idle[name] = entry
            else:
                self._lost.append(entry)

    def close(self) -> None:
        """Close the aborted groups in the background."""
        lost, self._lost = self._lost, []
        _close_beside(lost)

    def _agreed(self, wanted: Mapping[str, Wanted], idle: Mapping[str, _Held]) -> list[str]:
        """Return the names of the groups that all members still have, with equal numbers of started operations.

        Each process publishes the groups that it could reuse. A send ends on the device once its data is in the buffers
        on the way, even if it is not received. Its receiver would then take it for data of the next generation; but in
        this case the receiver has started fewer operations. Groups over gloo are not reused, because receives of an
        iteration that never came may be posted in them.
        """
        if not self.links.backend.ordered:
            return []
        reusable_here = {name: (one.order, one.wanted.backend.begun(one.group)) for name, one in idle.items()
                         if name in wanted and one.wanted.backend.ordered
                         and one.wanted.members == wanted[name].members and one.wanted.backend.lost(one.group) is None}
        others = sorted({member for one in wanted.values() for member in one.members} - {self._own})
        keys = self.keys("kept ")
        keys.set(self._own, msgspec.json.encode(reusable_here))
        keys.wait(others)
        by_process = {process: _KEPT.decode(keys.get(process)) for process in others} | {self._own: reusable_here}
        return [name for name, state in reusable_here.items()
                if all(by_process[member].get(name) == state for member in wanted[name].members)]

    def _made(self, one: Wanted) -> _Held:
        purpose, size = f"{one.name}/", len(one.members)
        keys = self.keys(purpose, size)
        try:
            group = one.backend.group(Meeting(keys, self._store, self._prefix(purpose), one.place, size, one.directed))
        except RuntimeError:
            self.require()  # otherwise the error is not due to the end of the generation
            raise
        keys.met()
        return _Held(one, self._order, group, keys)

    def _prefix(self, purpose: str) -> str:
        return order_prefix(self._order) + purpose

    def _hold(self, one: _Held) -> None:
        with self._lock:
            self._held[one.wanted.name] = one
        self.require()


def _close(held: list[_Held]) -> None:
    """Close groups. For NCCL, the references in the list are the last ones."""
    for backend in {id(entry.wanted.backend): entry.wanted.backend for entry in held}.values():
        backend.close([entry.group for entry in held if entry.wanted.backend is backend])
    while held:
        held.pop()


def _close_beside(held: list[_Held]) -> None:
    """Close groups in a new thread, as this may wait without limit (`runtime.replay.gloo.GlooGroup`)."""
    if held:
        threading.Thread(target=_close, args=(held,), daemon=True, name="closing").start()
