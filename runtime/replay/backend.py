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
    """Store for the members' addresses, kept as long as the group, which refers to its C++ half."""
    store: Store
    """Store of the whole run, in which the keys of this group begin with `prefix`."""
    prefix: str
    rank: int
    size: int
    directed: bool = False
    """True if the first of two members only sends to the second."""


class Backend(Protocol):
    """Interface to gloo or NCCL, by which one process creates its groups in all generations."""

    ordered: bool
    """True if transfers are matched by their order, not by a tag. Then each pair of workers has a
    group for each direction, so that no send waits behind a receive."""

    def creating_groups(self, spared: Callable[[], Sockets]) -> AbstractContextManager[None]:
        """Return a context manager within which `create_group` must be called.

        Over gloo, an abort shuts down all sockets that were opened within it, except those that
        `spared` returns at the time of the abort: sockets that other threads have opened for other
        purposes.
        """

    def create_group(self, meeting: GroupRendezvous) -> Group:
        """Create a process group; return it when all members have joined. Raises RuntimeError."""

    def allow_reuse(self, group: Group) -> None:
        """Let a new generation use an earlier group without aborts."""

    def abort_groups(self, groups: Collection[Group]) -> None:
        """Start to abort the pending operations of these groups (over gloo, of all). Any thread may
        call this."""

    def failure_reason(self, group: Group) -> str | None:
        """Return why a group is no longer usable, here or at other members. None if it is
        usable."""

    def is_quiescent(self, groups: Collection[Group]) -> bool:
        """Return whether no operation of these groups can still write to a tensor. To be called
        repeatedly after an abort."""

    def count_started(self, group: Group) -> int:
        """Return the number of operations that this process has started in the group.

        It is 0 if groups of this backend are not reused. A group is reused only if all members have
        started the same number.
        """

    def close_groups(self, groups: Collection[Group]) -> None:
        """Release groups that are no longer used. Over gloo, this may wait without limit."""
