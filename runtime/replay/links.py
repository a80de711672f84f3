"""Links: the process groups of one process, made when an order begins, and used again where nothing was aborted."""

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
"""The groups that a process could use again, by name: the order that made each, and the operations begun in it."""


class OrderEndedError(CommunicationError):
    """The order has ended while the session was at work."""


class Wanted(NamedTuple):
    """A process group that a session needs."""

    name: str
    """The same at all members; no other group of an order has it."""
    members: tuple[str, ...]
    """Processes, by rank."""
    place: int
    """Of this process."""
    backend: Backend
    directed: bool = False
    """Whether the first of two members only sends to the second."""

    @property
    def turn(self) -> tuple[int, str]:
        """All make their groups in this order, so that no two wait for each other in different groups. Those of every
        other column come first: the workers of a long pipeline meet in two steps."""
        return int(self.members[0].partition(":")[0].rpartition(".")[2]) % 2, self.name


class _Held(NamedTuple):
    """A process group that is there."""

    wanted: Wanted
    order: int
    """That it was made for."""
    group: Group
    keys: GroupStore


class Links:
    """The process groups of one process, from order to order.

    Over NCCL, a group lives on where the next order needs it, all of its members live, and nothing was aborted in it:
    what a change costs depends on who comes and goes, not on how many workers there are. Groups over gloo stay open
    until the next order, as others may still take from them what they need for the end of an iteration.
    """

    def __init__(self, transport: Transport) -> None:
        self.host = Gloo()
        """Carries numbers and bytes of the host."""
        self.backend: Backend = self.host if transport == "gloo" else Nccl()
        self.backends = (self.host,) if self.backend is self.host else (self.host, self.backend)
        """In the order in which they are aborted: nothing that NCCL leaves behind goes on over the other."""
        self.idle: dict[str, _Held] = {}
        """Those that no session uses, by name."""

    def close(self) -> None:
        """Close what no session uses."""
        idle, self.idle = self.idle, {}
        _close([*idle.values()])


class Groups:
    """The process groups of one order; see `Session` for most methods."""

    def __init__(self, links: Links, store: Store, order: int, own: str,
                 spared: Callable[[], Sockets]) -> None:
        self.links = links
        self._store = store
        self._order = order
        self._own = own
        """As which process this one takes part."""
        self._spared = spared
        self._held: dict[str, _Held] = {}
        self._lost: list[_Held] = []
        self._ended = False
        self._released = False
        self._lock = threading.Lock()
        """Either `abort` knows a group, or whoever made it knows of the abort."""

    def make(self, all_wanted: Iterable[Wanted]) -> None:
        """Have all that the order needs, those that can be used again and others."""
        self.require()
        wanted = {one.name: one for one in all_wanted}
        idle, self.links.idle = self.links.idle, {}
        for name in self._agreed(wanted, idle):
            wanted[name].backend.reuse(idle[name].group)
            self._hold(idle.pop(name))
        self.add(wanted.values())
        _close_beside([*idle.values()])

    def add(self, wanted: Iterable[Wanted]) -> None:
        """Make those that are not there."""
        self.require()
        lacking = sorted((one for one in wanted if one.name not in self._held), key=lambda one: one.turn)
        for backend in self.links.backends:  # apart: gloo's abort shuts all sockets that were opened meanwhile
            with backend.making(self._spared):
                for one in lacking:
                    if one.backend is backend:
                        self._hold(self._made(one))

    def named(self, name: str) -> Group:
        """Raises RuntimeError."""
        try:
            return self._held[name].group
        except KeyError:
            raise RuntimeError("there is no connection") from None

    def by_name(self) -> dict[str, Group]:
        """Those that are there."""
        return {name: one.group for name, one in self._held.items()}

    def keys(self, purpose: str, members: int = 1) -> GroupStore:
        """What members of this order tell each other for a purpose."""
        return GroupStore(self._store, self._prefix(purpose), TIMEOUT, self.require, members)

    def require(self) -> None:
        """Raises OrderEndedError once the order has ended."""
        if self._ended:
            raise OrderEndedError("the order is over")

    def abort(self) -> None:
        """End what is under way; for any thread."""
        self._ended = True
        with self._lock:
            if self._released:
                return
            held = tuple(self._held.values())
        for backend in self.links.backends:
            backend.abort([one.group for one in held if one.wanted.backend is backend])

    def errored(self) -> str | None:
        """What is wrong with one of them, in one line."""
        return next((f"the connections of {one.wanted.name} have failed: {lost}" for one in tuple(self._held.values())
                     if (lost := one.wanted.backend.lost(one.group)) is not None), None)

    def over(self) -> bool:
        """Whether nothing that was begun changes a tensor any more."""
        held = (*self._held.values(), *self._lost)
        return all(backend.over([one.group for one in held if one.wanted.backend is backend])
                   for backend in self.links.backends)

    def release(self) -> None:
        """Those in which nothing was aborted wait for the next order."""
        with self._lock:
            self._released = True
            held, self._held = self._held, {}
        for name, one in held.items():
            if one.wanted.backend.lost(one.group) is None:
                self.links.idle[name] = one
            else:
                self._lost.append(one)

    def close(self) -> None:
        """Close what was aborted, beside all else."""
        lost, self._lost = self._lost, []
        _close_beside(lost)

    def _agreed(self, wanted: Mapping[str, Wanted], idle: Mapping[str, _Held]) -> list[str]:
        """The groups that all of their members still have, and have begun as many operations in: each says which it
        could use again.

        A send has ended on the device once what it sends is in the buffers on the way, whether it is received or not:
        the receiver would take it for what the next order sends. Then it has begun fewer operations. Over gloo no group
        is used again: receives of an iteration that never came may have been posted in it.
        """
        if not self.links.backend.ordered:
            return []
        mine = {name: (one.order, one.wanted.backend.begun(one.group)) for name, one in idle.items()
                if name in wanted and one.wanted.backend.ordered
                and one.wanted.members == wanted[name].members and one.wanted.backend.lost(one.group) is None}
        others = sorted({member for one in wanted.values() for member in one.members} - {self._own})
        keys = self.keys("kept ")
        keys.set(self._own, msgspec.json.encode(mine))
        keys.wait(others)
        by_process = {process: _KEPT.decode(keys.get(process)) for process in others} | {self._own: mine}
        return [name for name, kept in mine.items()
                if all(by_process[member].get(name) == kept for member in wanted[name].members)]

    def _made(self, one: Wanted) -> _Held:
        purpose, size = f"{one.name}/", len(one.members)
        keys = self.keys(purpose, size)
        try:
            group = one.backend.group(Meeting(keys, self._store, self._prefix(purpose), one.place, size, one.directed))
        except RuntimeError:
            self.require()  # else it has failed by itself
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
    """Close groups; of those over NCCL, the references in the list are the last ones."""
    for backend in {id(one.wanted.backend): one.wanted.backend for one in held}.values():
        backend.close([one.group for one in held if one.wanted.backend is backend])
    while held:
        held.pop()


def _close_beside(held: list[_Held]) -> None:
    """Close groups in a thread of its own, which may wait without end (`runtime.replay.gloo.GlooGroup`)."""
    if held:
        threading.Thread(target=_close, args=(held,), daemon=True, name="closing").start()
