"""Sum numbers over all processes of a generation: up a tree, and back down.

Each process connects to only a few others, however many there are, and all get identical bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from slipstream.runtime.replay.background_queue import BackgroundQueue
from slipstream.runtime.replay.group_cache import GenerationGroups, GroupSpec
from slipstream.runtime.replay.torch_groups import Group
from slipstream.runtime.replay.transfers import PendingSum

MAX_CHILDREN = 4
"""Largest number of children of a process in the tree."""
_UP = 0
"""Tag of transfers to the parent."""
_DOWN = 1
"""Tag of transfers from the parent."""


class SumTree:
    """Tree of all processes of a generation, in which they sum numbers.

    `members` are the names of all processes, the root first; `members[place]` is this process.
    """

    def __init__(self, groups: GenerationGroups, members: Sequence[str], place: int) -> None:
        self._groups = groups
        self._members = members
        self._place = place
        # As in a heap, the children of process n follow from n alone.
        first = MAX_CHILDREN * place + 1
        self._children = range(first, min(first + MAX_CHILDREN, len(members)))
        self._queue = BackgroundQueue(torch.device("cpu"), "sums over all workers")

    def required_groups(self) -> Iterator[GroupSpec]:
        """Return the process groups that the tree needs, one with each neighbor."""
        # As child, this process meets its parent; the root has none.
        places = [self._place] if self._place else []
        for child in (*places, *self._children):
            ends = self._members[(child - 1) // MAX_CHILDREN], self._members[child]
            yield GroupSpec(
                _group_name(ends[1]),
                ends,
                ends.index(self._members[self._place]),
                self._groups.links.host,  # NCCL would block the stream of tensors
            )

    def start_sum(self, values: Sequence[float]) -> PendingSum:
        """Start to sum each of `values` over all processes.

        All processes call this in the same order.
        """
        # In a thread, since a sum waits for the slowest process.
        summing = PendingSum(torch.tensor(values, dtype=torch.float64))
        self._queue.submit(partial(self._run_sum, summing))
        return summing

    def _run_sum(self, total: PendingSum) -> None:
        try:
            # Receive the sums of all subtrees at the same time.
            groups = [self._parent_group(child) for child in self._children]
            subtree_sums = [torch.empty_like(total.payload) for _ in groups]
            receives = [
                group.recv([subtree_sum], 1, _UP)
                for group, subtree_sum in zip(groups, subtree_sums, strict=True)
            ]
            for work in receives:
                work.wait()

            # Added in the order of children, not of arrival: rounding depends on the order.
            for subtree_sum in subtree_sums:
                total.payload.add_(subtree_sum)
            # Pass the subtree's sum up; the whole sum comes back, and is passed down.
            if self._place:
                _exchange_with_parent(self._parent_group(self._place), total.payload)
            sends = [group.send([total.payload], 1, _DOWN) for group in groups]
        except Exception as error:
            # The error is raised where the sum is awaited.
            total.set_outcome(str(error))
            return
        total.set_outcome(None)
        with suppress(RuntimeError):  # an error here also fails the next sum, if there is one
            for work in sends:
                work.wait()

    def _parent_group(self, child: int) -> Group:
        return self._groups.get_group(_group_name(self._members[child]))


def _exchange_with_parent(above: Group, payload: Tensor) -> None:
    """Send `payload`, a subtree's sum, to the parent; replace it by the whole sum."""
    total = torch.empty_like(payload)
    # Posted before the send, so that the answer arrives at once.
    arriving = above.recv([total], 0, _DOWN)
    above.send([payload], 0, _UP).wait()
    arriving.wait()
    payload.copy_(total)


def _group_name(child: str) -> str:
    return f"sums of {child}"
