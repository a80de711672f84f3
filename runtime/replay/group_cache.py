"""Create process groups when a generation begins, and reuse those without aborts."""

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import msgspec

from slipstream.runtime.errors import first_line
from slipstream.runtime.replay.backend import Backend, GroupRendezvous
from slipstream.runtime.replay.gloo import GlooBackend
from slipstream.runtime.replay.group_store import GroupStore, order_key_prefix
from slipstream.runtime.replay.membership import worker_of_process
from slipstream.runtime.replay.nccl import NcclBackend
from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.replay.stuck_calls import OPEN_CALLS
from slipstream.runtime.replay.torch_groups import Group, Store
from slipstream.runtime.replay.transfers import TRANSFER_TIMEOUT, CommunicationError, UnreachableError
from slipstream.runtime.replay.transport import TransportName

_REUSABLE_DECODER = msgspec.json.Decoder(dict[str, tuple[int, int]])
"""Decoder of a process's reusable groups: order and number of operations, by name."""


class GenerationEndedError(CommunicationError):
    """Error for a call that is made, or waits, when its generation has ended."""


class GroupSpec(NamedTuple):
    """Specification of a process group: name, member processes, own rank and backend."""

    name: str
    """Name of the group, equal at all members and unique in a generation."""
    members: tuple[str, ...]
    """Names of the member processes, by rank."""
    rank: int
    """Rank of this process."""
    backend: Backend
    directed: bool = False
    """True if the first of two members only sends to the second."""

    @property
    def creation_key(self) -> tuple[int, str]:
        """Key by which processes sort the groups that they create, so that no two deadlock.

        All processes sort alike. Groups whose first member is in an even column come first: so the
        workers of a long pipeline connect in two steps.
        """
        return int(self.members[0].partition(":")[0].rpartition(".")[2]) % 2, self.name


class _CachedGroup(NamedTuple):
    """A process group that has been created, with its specification, order and store."""

    spec: GroupSpec
    order: int
    """Number of the order for which the group was created."""
    group: Group
    keys: GroupStore


class GroupCache:
    """The process groups of one process, kept from generation to generation.

    An NCCL group is kept if the next generation needs it, all of its members live, and nothing was
    aborted in it. So the time for connecting a generation depends on the number of workers that
    come and go, not on the number of all workers. Groups over gloo stay open until the next
    generation, as other workers may still receive through them what they need to end an iteration.
    """

    def __init__(self, transport: TransportName) -> None:
        self.host = GlooBackend()
        """Gloo backend, which carries numbers and bytes in host memory."""
        self.backend: Backend = self.host if transport == "gloo" else NcclBackend()
        self.backends = (self.host,) if self.backend is self.host else (self.host, self.backend)
        """Backends in the order of their aborts: gloo first, so that no released thread uses it."""
        self.idle: dict[str, _CachedGroup] = {}
        """Groups that no session uses, by name."""

    def close_idle(self) -> None:
        """Close the groups that no generation uses now. Over gloo, this may wait without limit."""
        idle, self.idle = self.idle, {}
        _close_groups([*idle.values()])


class GenerationGroups:
    """The process groups of one generation; `GenerationSession` describes most methods."""

    def __init__(self, links: GroupCache, store: Store, order: int, own: str, spared: Callable[[], Sockets]) -> None:
        self.links = links
        self._store = store
        self._order = order
        self._own_process = own
        """Name of this process among the members."""
        self._exempt_sockets = spared
        self._groups: dict[str, _CachedGroup] = {}
        self._aborted_groups: list[_CachedGroup] = []
        self._ended = False
        self._released = False
        self._lock = threading.Lock()
        """Lock by which `abort` sees each new group, or its thread sees the abort."""

    def create_groups(self, all_wanted: Iterable[GroupSpec]) -> None:
        """Provide all groups that the generation needs: reuse some, and create the others."""
        self.raise_if_ended()
        wanted = {spec.name: spec for spec in all_wanted}
        idle, self.links.idle = self.links.idle, {}
        for name in self._find_reusable(wanted, idle):
            wanted[name].backend.allow_reuse(idle[name].group)
            self._register_group(idle.pop(name))
        self.create_missing(wanted.values())
        _close_in_background([*idle.values()])

    def create_missing(self, wanted: Iterable[GroupSpec]) -> None:
        """Create the wanted groups that do not exist yet; return when all members have joined."""
        self.raise_if_ended()
        missing = sorted((spec for spec in wanted if spec.name not in self._groups), key=lambda spec: spec.creation_key)
        for backend in self.links.backends:  # separately: gloo's abort shuts all sockets opened meanwhile
            with backend.creating_groups(self._exempt_sockets):
                for spec in missing:
                    if spec.backend is backend:
                        self._register_group(self._create_group(spec))

    def get_group(self, name: str) -> Group:
        """Return the group of this name. Raises RuntimeError if there is none."""
        try:
            return self._groups[name].group
        except KeyError:
            raise RuntimeError("there is no connection") from None

    def groups_by_name(self) -> dict[str, Group]:
        """Return all process groups of the generation by name."""
        return {name: held.group for name, held in self._groups.items()}

    def open_store(self, purpose: str, members: int = 1) -> GroupStore:
        """Return a store for one named purpose, shared by this generation's processes. In it, a
        wait for the key `NAME/RANK` waits for the keys of all ranks below `members`."""
        return GroupStore(self._store, self._key_prefix(purpose), TRANSFER_TIMEOUT, self.raise_if_ended, members)

    def raise_if_ended(self) -> None:
        """Raise GenerationEndedError if the generation has ended."""
        if self._ended:
            raise GenerationEndedError("the generation has ended")

    def abort(self) -> None:
        """End the generation, and abort all pending operations of its groups. Any thread may call
        this."""
        self._ended = True
        with self._lock:
            if self._released:
                return
            held = tuple(self._groups.values())
        for backend in self.links.backends:
            backend.abort_groups([entry.group for entry in held if entry.spec.backend is backend])

    def failure_reason(self) -> str | None:
        """Return why one of the groups has failed, in one line; None if none has."""
        return next((f"the connections of {held.spec.name} have failed: {lost}" for held in tuple(self._groups.values())
                     if (lost := held.spec.backend.failure_reason(held.group)) is not None), None)

    def is_quiescent(self) -> bool:
        """Return whether no operation of the generation's groups can still write to a tensor."""
        held = (*self._groups.values(), *self._aborted_groups)
        return all(backend.is_quiescent([entry.group for entry in held if entry.spec.backend is backend])
                   for backend in self.links.backends)

    def release(self) -> None:
        """Leave groups in which nothing was aborted to the next generation. `close` closes the
        others. A later `abort` has no effect."""
        with self._lock:
            self._released = True
            held, self._groups = self._groups, {}
        for name, entry in held.items():
            if entry.spec.backend.failure_reason(entry.group) is None:
                self.links.idle[name] = entry
            else:
                self._aborted_groups.append(entry)

    def close(self) -> None:
        """Close, in the background, the groups that `release` has not left."""
        lost, self._aborted_groups = self._aborted_groups, []
        _close_in_background(lost)

    def _find_reusable(self, wanted: Mapping[str, GroupSpec], idle: Mapping[str, _CachedGroup]) -> list[str]:
        """Return the names of wanted groups that all members still have, alike."""
        # Each process publishes the groups that it could reuse. A send ends on the device once its
        # data is in the buffers on the way, even if it is not received. Its receiver would then
        # take it for data of the next generation; but in this case the receiver has started fewer
        # operations. Groups over gloo are not reused, because receives may be pending in them whose
        # tensors were never sent.
        if not self.links.backend.ordered:
            return []
        reusable_here = {name: (one.order, one.spec.backend.count_started(one.group)) for name, one in idle.items()
                         if name in wanted and one.spec.backend.ordered
                         and one.spec.members == wanted[name].members
                         and one.spec.backend.failure_reason(one.group) is None}
        others = sorted({member for one in wanted.values() for member in one.members} - {self._own_process})
        keys = self.open_store("kept ")
        OPEN_CALLS.name_awaited(sorted({worker_of_process(other) for other in others}))
        keys.set(self._own_process, msgspec.json.encode(reusable_here))
        keys.wait(others)
        by_process = {process: _REUSABLE_DECODER.decode(keys.get(process))
                      for process in others} | {self._own_process: reusable_here}
        return [name for name, state in reusable_here.items()
                if all(by_process[member].get(name) == state for member in wanted[name].members)]

    def _create_group(self, one: GroupSpec) -> _CachedGroup:
        purpose, size = f"{one.name}/", len(one.members)
        peers = sorted({worker_of_process(member) for member in one.members} - {worker_of_process(self._own_process)})
        OPEN_CALLS.name_awaited(peers)
        keys = self.open_store(purpose, size)
        try:
            group = one.backend.create_group(GroupRendezvous(keys, self._store, self._key_prefix(purpose), one.rank,
                                                             size, one.directed))
        except RuntimeError as error:
            self.raise_if_ended()  # otherwise the error is not due to the end of the generation
            raise UnreachableError(first_line(error), () if isinstance(error, UnreachableError) else peers) from error
        keys.drop_end_check()
        return _CachedGroup(one, self._order, group, keys)

    def _key_prefix(self, purpose: str) -> str:
        return order_key_prefix(self._order) + purpose

    def _register_group(self, one: _CachedGroup) -> None:
        with self._lock:
            self._groups[one.spec.name] = one
        self.raise_if_ended()


def _close_groups(held: list[_CachedGroup]) -> None:
    """Close groups and empty the list, so that this thread drops the last references."""
    for backend in {id(entry.spec.backend): entry.spec.backend for entry in held}.values():
        backend.close_groups([entry.group for entry in held if entry.spec.backend is backend])
    while held:
        held.pop()


def _close_in_background(held: list[_CachedGroup]) -> None:
    """Close groups in a new thread, as this may wait without limit
    (`runtime.replay.gloo.GlooGroup`)."""
    if held:
        threading.Thread(target=_close_groups, args=(held,), daemon=True, name="closing").start()
