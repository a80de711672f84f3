"""Create and abort process groups of gloo or NCCL by one interface, from any thread."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from slipstream.runtime.replay.group_store import GroupStore
from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.replay.torch_groups import Group, Store


class GroupRendezvous(NamedTuple):
    """Arguments with which the members of one process group find each other."""

    keys: GroupStore
    """Store of the members' addresses, which must live as long as the group."""
    store: Store
    """Store of the whole run, in which this group's keys begin with `prefix`."""
    prefix: str
    rank: int
    size: int
    directed: bool = False
    """True if the group has two members, of which only the first sends."""


class Backend(Protocol):
    """Interface to gloo or NCCL, by which one process creates its groups in all generations."""

    ordered: bool
    """True if sends and receives are paired by their order: each direction needs a group."""

    def creating_groups(
        self, exempt_sockets: Callable[[], Sockets]
    ) -> AbstractContextManager[None]:
        """Return a context manager within which `create_group` must be called.

        Over gloo, an abort shuts down all sockets that were opened within the context, except
        sockets of other threads, which `exempt_sockets` returns when the abort begins.
        """

    def create_group(self, meeting: GroupRendezvous) -> Group:
        """Create a process group; return it when all members have joined.

        Raises RuntimeError if one does not join or connect, or if the generation ends before; of
        these, UnreachableError if this process has no usable network interface.
        """

    def allow_reuse(self, group: Group) -> None:
        """Let a new generation use an earlier group, in which nothing was aborted."""

    def abort_groups(self, groups: Collection[Group]) -> None:
        """Start to abort the pending operations of groups; any thread may call this.

        Over gloo, this ends the operations of all groups of this process.
        """

    def failure_reason(self, group: Group) -> str | None:
        """Return why a group is unusable here or at other members; None if usable."""

    def is_quiescent(self, groups: Collection[Group]) -> bool:
        """Return whether no operation of these groups can still write to a tensor.

        After an abort, call it again and again until it returns True.
        """

    def count_started(self, group: Group) -> int:
        """Return how many operations this process started in a group; 0 without reuse of groups."""

    def close_groups(self, groups: Collection[Group]) -> None:
        """Release groups that are no longer used. Over gloo, this may wait without limit."""
