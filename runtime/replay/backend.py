"""What a session knows of gloo and NCCL: a `Backend` makes process groups, and breaks them off from any thread."""

from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from slipstream.runtime.replay.group_store import GroupStore
from slipstream.runtime.replay.sockets import Sockets, cut, open_sockets
from slipstream.runtime.replay.transfers import TIMEOUT
from slipstream.runtime.torch_private import GlooDevice, Group, Store, gloo_devices, gloo_group


class Meeting(NamedTuple):
    """How the members of one process group find each other."""

    keys: GroupStore
    """Of this group alone. It outlives the group, which holds only its C++ half."""
    store: Store
    """That of the run, and what the keys of this group begin with there."""
    prefix: str
    rank: int
    size: int


class Backend(Protocol):
    """One kind of process groups in one process, from its first order to its last."""

    ordered: bool
    """Whether transfers are matched by their order, and by no tag. Then each pair of workers has a group for each
    direction, so that nothing that is sent waits behind something that is to be received."""

    def begin(self, spared: Callable[[], Sockets]) -> None:
        """Groups are about to be made; `spared` gives the sockets that other threads open meanwhile."""

    def group(self, meeting: Meeting) -> Group:
        """Make a group; returns when all members have. Raises RuntimeError."""

    def made(self) -> None:
        """All groups are there that were to be made."""

    def reuse(self, group: Group) -> None:
        """Another order uses a group that is not lost."""

    def abort(self, groups: Collection[Group]) -> None:
        """End what is under way in these groups, from any thread. It does not wait for that."""

    def lost(self, group: Group) -> str | None:
        """Why a group cannot be used any more, here or at its other members; None where it can."""

    def over(self, groups: Collection[Group]) -> bool:
        """Whether nothing that was begun in these groups changes a tensor any more."""

    def close(self, groups: Collection[Group]) -> None:
        """Nobody uses these groups any more."""


class Gloo:
    """Gloo lets go of a blocked transfer when its connection closes, and by no call of its own: `abort` shuts the
    sockets that were opened while groups were made, whichever groups are meant.

    Groups share a listening socket and its thread. Those that are made after an abort get others: gloo may be stuck
    (`runtime.replay.stuck_calls`).
    """

    ordered = False

    def __init__(self) -> None:
        self._devices: list[GlooDevice] = []
        self._spared: Callable[[], Sockets] = frozenset
        self._before: Sockets | None = None
        """What was open when groups began to be made; None while none are."""
        self._sockets: Sockets = frozenset()
        self._alive: set[int] = set()
        """The identities of groups that were not aborted."""
        self._aborts = 0

    def begin(self, spared: Callable[[], Sockets]) -> None:
        """See `Backend`."""
        self._spared, self._before = spared, open_sockets()
        if not self._devices:
            self._sockets = frozenset()

    def group(self, meeting: Meeting) -> Group:
        """See `Backend`."""
        aborts = self._aborts
        self._devices = self._devices or gloo_devices()
        group = gloo_group(meeting.keys, meeting.rank, meeting.size, TIMEOUT, self._devices)
        if aborts == self._aborts:
            self._alive.add(id(group))
        return group

    def made(self) -> None:
        """See `Backend`."""
        if self._before is not None:
            self._sockets, self._before = self._sockets | (open_sockets() - self._before), None

    def reuse(self, group: Group) -> None:
        """Nothing is to be done."""

    def abort(self, groups: Collection[Group]) -> None:  # noqa: ARG002
        """See `Backend`."""
        self._aborts += 1
        self._devices, self._alive = [], set()
        self.cut()

    def cut(self) -> None:
        """Break the connections, as a network may."""
        before = self._before
        cut((self._sockets if before is None else self._sockets | (open_sockets() - before)) - self._spared())

    def lost(self, group: Group) -> str | None:
        """See `Backend`."""
        return None if id(group) in self._alive else "its connections were shut"

    def over(self, groups: Collection[Group]) -> bool:  # noqa: ARG002
        """It is once their sockets are shut."""
        return True

    def close(self, groups: Collection[Group]) -> None:
        """Connections close when the last reference to a group is gone."""
        self._alive -= {id(group) for group in groups}
