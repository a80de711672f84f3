"""What a session knows of gloo and NCCL: a `Backend` makes process groups, and breaks them off from any thread."""

from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from slipstream.runtime.replay.group_store import GroupStore
from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.torch_private import Group, Store


class Meeting(NamedTuple):
    """How the members of one process group find each other."""

    keys: GroupStore
    """Of this group alone. It outlives the group, which holds only its C++ half."""
    store: Store
    """That of the run, and what the keys of this group begin with there."""
    prefix: str
    rank: int
    size: int
    directed: bool = False
    """Whether the first of two members only sends to the second."""


class Backend(Protocol):
    """One kind of process groups in one process, from its first order to its last."""

    ordered: bool
    """Whether transfers are matched by their order, and by no tag. Then each pair of workers has a group for each
    direction, so that nothing that is sent waits behind something that is to be received."""

    def making(self, spared: Callable[[], Sockets]) -> AbstractContextManager[None]:
        """Groups are made in here; `spared` gives the sockets that other threads open meanwhile."""

    def group(self, meeting: Meeting) -> Group:
        """Make a group; returns when all members have. Raises RuntimeError."""

    def reuse(self, group: Group) -> None:
        """Another order uses a group that is not lost."""

    def abort(self, groups: Collection[Group]) -> None:
        """End what is under way in these groups, from any thread. It does not wait for that."""

    def lost(self, group: Group) -> str | None:
        """Why a group cannot be used any more, here or at its other members; None where it can."""

    def over(self, groups: Collection[Group]) -> bool:
        """Whether nothing that was begun in these groups changes a tensor any more."""

    def begun(self, group: Group) -> int:
        """Return how many operations this member has begun in the group, from its first order on."""

    def close(self, groups: Collection[Group]) -> None:
        """Nobody uses these groups any more."""
