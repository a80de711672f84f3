"""Create process groups when a generation begins, and reuse those in which nothing was aborted."""

import threading
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import NamedTuple

import msgspec

from slipstream.runtime.errors import first_line
from slipstream.runtime.replay.backend import Backend, GroupRendezvous
from slipstream.runtime.replay.gloo import GlooBackend
from slipstream.runtime.replay.group_store import GroupStore, order_key_prefix
from slipstream.runtime.replay.membership import worker_of_process
from slipstream.runtime.replay.nccl import NcclBackend
from slipstream.runtime.replay.python_exit import start_thread
from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.replay.stuck_calls import OPEN_CALLS
from slipstream.runtime.replay.torch_groups import Group, Store
from slipstream.runtime.replay.transfers import (
    TRANSFER_TIMEOUT,
    CommunicationError,
    UnreachableError,
)
from slipstream.runtime.replay.transport import TransportName

# A process's reusable groups: order of their creation and number of operations, by name.
_REUSABLE_DECODER = msgspec.json.Decoder(dict[str, tuple[int, int]])


class GenerationEndedError(CommunicationError):
    """Error for a call that begins, or still waits, after the end of its generation."""


class GroupSpec(NamedTuple):
    """Specification of a process group: name, member processes, own rank and backend."""

    name: str
    """Name of the group, equal at all members and unique in a generation."""
    members: tuple[str, ...]
    """Names of the member processes, by rank."""
    rank: int
    """Index of this process in `members`."""
    backend: Backend
    directed: bool = False
    """True if the group has two members, of which only the first sends."""

    @property
    def creation_key(self) -> tuple[int, str]:
        """Key by which all processes sort new groups, so that no two processes deadlock."""
        # Groups whose first member is in an even column come first: so the workers of a long
        # pipeline connect in two steps.
        return int(self.members[0].partition(":")[0].rpartition(".")[2]) % 2, self.name


class _CachedGroup(NamedTuple):
    spec: GroupSpec
    order: int
    group: Group
    keys: GroupStore


class GroupCache:
    """The process groups of one process, kept from generation to generation.

    An NCCL group is kept if the next generation needs it, all of its members live and have started
    equally many operations in it, and nothing was aborted in it. So the time to connect a
    generation depends on the number of workers that come and go, not on the number of all workers.
    Groups over gloo are kept open only until the next generation has connected, because other
    workers may still receive through them what they need to end an iteration.
    """

    def __init__(self, transport: TransportName) -> None:
        self.host = GlooBackend()
        self.backend: Backend = self.host if transport == "gloo" else NcclBackend()
        # Gloo first, so that no thread that its abort releases uses it.
        self.backends = (self.host,) if self.backend is self.host else (self.host, self.backend)
        """Backends, in the order in which their groups are aborted."""
        self.idle: dict[str, _CachedGroup] = {}
        """Groups that no session uses, by name."""

    def close_idle(self) -> None:
        """Close the groups that no generation uses now. Over gloo, this may wait without limit."""
        idle, self.idle = self.idle, {}
        _close_groups([*idle.values()])


class GenerationGroups:
    """The process groups of one process in one generation."""

    def __init__(
        self,
        links: GroupCache,
        store: Store,
        order: int,
        own_process: str,
        exempt_sockets: Callable[[], Sockets],
    ) -> None:
        self.links = links
        self._store = store
        self._order = order
        self._own_process = own_process
        self._exempt_sockets = exempt_sockets
        self._groups: dict[str, _CachedGroup] = {}
        self._aborted_groups: list[_CachedGroup] = []
        self._ended = False
        self._released = False
        # With this lock, either `abort` sees a new group, or the creating thread sees the abort.
        self._lock = threading.Lock()

    def create_groups(self, specs: Iterable[GroupSpec]) -> None:
        """Provide all groups of the generation: reuse what is possible, create the others.

        Earlier groups that are not reused are closed in the background. Raises GenerationEndedError
        if the generation ends, UnreachableError if a member does not join, and DistStoreError if
        one does not say in time which groups it has kept.
        """
        self.raise_if_ended()
        wanted = {spec.name: spec for spec in specs}
        idle, self.links.idle = self.links.idle, {}
        # A reused group need not be connected again.
        for name in self._find_reusable(wanted, idle):
            wanted[name].backend.allow_reuse(idle[name].group)
            self._register_group(idle.pop(name))
        self.create_missing(wanted.values())
        # Only now: other workers may still receive through them until they have joined.
        _close_in_background([*idle.values()])

    def create_missing(self, specs: Iterable[GroupSpec]) -> None:
        """Create those of the groups that the generation does not have yet.

        Raises GenerationEndedError and UnreachableError as `create_groups` does.
        """
        self.raise_if_ended()
        # In the same order at all members, or two would wait for each other.
        missing = sorted(
            (spec for spec in specs if spec.name not in self._groups),
            key=lambda spec: spec.creation_key,
        )
        # Separately: gloo's abort shuts all sockets opened meanwhile.
        for backend in self.links.backends:
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
        return {name: entry.group for name, entry in self._groups.items()}

    def open_store(self, purpose: str, members: int = 1) -> GroupStore:
        """Return a store that this generation's processes share, separate for each `purpose`.

        A wait in this store for the key `NAME/RANK` waits for the keys of all ranks below
        `members`.
        """
        return GroupStore(
            self._store, self._key_prefix(purpose), TRANSFER_TIMEOUT, self.raise_if_ended, members
        )

    def raise_if_ended(self) -> None:
        """Raise GenerationEndedError if the generation has ended."""
        if self._ended:
            raise GenerationEndedError("the generation has ended")

    def abort(self) -> None:
        """End the generation, and abort all pending operations. Any thread may call this."""
        # Set before the lock is taken: a thread that registers a group meanwhile sees it.
        self._ended = True
        with self._lock:
            if self._released:
                return
            entries = tuple(self._groups.values())
        for backend in self.links.backends:
            backend.abort_groups(_groups_of(backend, entries))

    def failure_reason(self) -> str | None:
        """Return why one of the groups has failed, in one line; None if none has."""
        for entry in tuple(self._groups.values()):
            reason = entry.spec.backend.failure_reason(entry.group)
            if reason is not None:
                return f"the connections of {entry.spec.name} have failed: {reason}"
        return None

    def is_quiescent(self) -> bool:
        """Return whether no operation of the generation's groups can still write to a tensor."""
        entries = (*self._groups.values(), *self._aborted_groups)
        return all(
            backend.is_quiescent(_groups_of(backend, entries)) for backend in self.links.backends
        )

    def release(self) -> None:
        """Leave to the next generation the groups in which nothing has failed or was aborted.

        A later `abort` aborts no operation.
        """
        with self._lock:
            self._released = True
            entries, self._groups = self._groups, {}
        # An aborted group may still write to tensors, so `is_quiescent` keeps asking it.
        for name, entry in entries.items():
            if entry.spec.backend.failure_reason(entry.group) is None:
                self.links.idle[name] = entry
            else:
                self._aborted_groups.append(entry)

    def close(self) -> None:
        """Close, in the background, the aborted groups that `release` has put aside."""
        entries, self._aborted_groups = self._aborted_groups, []
        _close_in_background(entries)

    def _find_reusable(
        self, wanted: Mapping[str, GroupSpec], idle: Mapping[str, _CachedGroup]
    ) -> list[str]:
        """Return the names of `wanted` groups that are usable at all members; none over gloo."""
        # Groups over gloo are not reused, because receives may be pending in them whose tensors
        # were never sent.
        if not self.links.backend.ordered:
            return []
        # The number of operations tells members apart that ended differently. A send ends on the
        # device once its data is in the buffers on the way, even if it is not received. Its
        # receiver would then take it for data of the next generation; but in this case the receiver
        # has started fewer operations.
        reusable_here = {
            name: (entry.order, entry.spec.backend.count_started(entry.group))
            for name, entry in idle.items()
            if name in wanted
            and entry.spec.backend.ordered
            and entry.spec.members == wanted[name].members
            and entry.spec.backend.failure_reason(entry.group) is None
        }
        # Each process publishes the groups that it could reuse, and reads what the others could.
        members = set(chain.from_iterable(spec.members for spec in wanted.values()))
        others = sorted(members - {self._own_process})
        keys = self.open_store("kept ")
        OPEN_CALLS.name_awaited(sorted(set(map(worker_of_process, others))))
        keys.set(self._own_process, msgspec.json.encode(reusable_here))
        keys.wait(others)
        by_process = {process: _REUSABLE_DECODER.decode(keys.get(process)) for process in others}
        by_process[self._own_process] = reusable_here
        # All members come to the same answer, as they compare the same numbers.
        reusable = []
        for name, state in reusable_here.items():
            if all(by_process[member].get(name) == state for member in wanted[name].members):
                reusable.append(name)
        return reusable

    def _create_group(self, spec: GroupSpec) -> _CachedGroup:
        purpose, size = f"{spec.name}/", len(spec.members)
        # Name whom this call waits for: if nothing moves, node 0 finds out who holds up all.
        workers = {worker_of_process(member) for member in spec.members}
        peers = sorted(workers - {worker_of_process(self._own_process)})
        OPEN_CALLS.name_awaited(peers)
        keys = self.open_store(purpose, size)
        meeting = GroupRendezvous(
            keys, self._store, self._key_prefix(purpose), spec.rank, size, spec.directed
        )
        try:
            group = spec.backend.create_group(meeting)
        except RuntimeError as error:
            self.raise_if_ended()  # otherwise the error is not due to the end of the generation
            # An UnreachableError of the backend says that this process itself cannot connect.
            raise UnreachableError(
                first_line(error), () if isinstance(error, UnreachableError) else peers
            ) from error
        # The group may outlive this generation, and still reads its store.
        keys.drop_end_check()
        return _CachedGroup(spec, self._order, group, keys)

    def _key_prefix(self, purpose: str) -> str:
        return order_key_prefix(self._order) + purpose

    def _register_group(self, entry: _CachedGroup) -> None:
        with self._lock:
            self._groups[entry.spec.name] = entry
        self.raise_if_ended()


def _groups_of(backend: Backend, entries: Iterable[_CachedGroup]) -> list[Group]:
    return [entry.group for entry in entries if entry.spec.backend is backend]


def _close_groups(entries: list[_CachedGroup]) -> None:
    """Close groups and empty the list, so that this thread drops the last references."""
    for backend in {id(entry.spec.backend): entry.spec.backend for entry in entries}.values():
        backend.close_groups(_groups_of(backend, entries))
    while entries:
        entries.pop()


def _close_in_background(entries: list[_CachedGroup]) -> None:
    """Close groups in a new thread, as this may wait without limit."""
    # The list moves to the thread, which empties it: no reference may stay with the caller.
    if entries:
        start_thread("closing", _close_groups, entries)
