"""Sum numbers over all processes of a generation: up a tree, and back down. Each process connects
to only a few others, however many there are, and all get identical bits."""

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
_UP, _DOWN = 0, 1
"""Tags of transfers to the parent and from the parent."""


class SumTree:
    """Tree of all processes of a generation, seen from `members[place]`; the first is root.

    The numbers are in host memory and go over gloo, even if tensors go over NCCL, whose stream they
    would block.
    """

    def __init__(self, groups: GenerationGroups, members: Sequence[str], place: int) -> None:
        self._groups = groups
        self._members = members
        self._place = place
        first = MAX_CHILDREN * place + 1
        self._children = range(first, min(first + MAX_CHILDREN, len(members)))
        self._queue = BackgroundQueue(torch.device("cpu"), "sums over all workers")

    def required_groups(self) -> Iterator[GroupSpec]:
        """Return the process groups that the tree needs, one with each neighbor."""
        for child in (*([self._place] if self._place else []), *self._children):
            ends = self._members[(child - 1) // MAX_CHILDREN], self._members[child]
            yield GroupSpec(_group_name(ends[1]), ends, ends.index(self._members[self._place]), self._groups.links.host)

    def start_sum(self, values: Sequence[float]) -> PendingSum:
        """Start to sum each of `values` over all processes, all in the same order."""
        summing = PendingSum(torch.tensor(values, dtype=torch.float64))
        self._queue.submit(partial(self._run_sum, summing))
        return summing

    def _run_sum(self, one: PendingSum) -> None:
        try:
            below = [self._parent_group(child) for child in self._children]
            arriving = [torch.empty_like(one.payload) for _ in below]
            for work in [group.recv([partial_sum], 1, _UP) for group, partial_sum in zip(below, arriving, strict=True)]:
                work.wait()
            for partial_sum in arriving:
                one.payload.add_(partial_sum)
            if self._place:
                _exchange_with_parent(self._parent_group(self._place), one.payload)
            sent = [group.send([one.payload], 1, _DOWN) for group in below]
        except Exception as error:
            one.set_outcome(str(error))
            return
        one.set_outcome(None)
        with suppress(RuntimeError):  # an error here also fails the next sum, if there is one
            for work in sent:
                work.wait()

    def _parent_group(self, child: int) -> Group:
        """Return the group that connects process `members[child]` with its parent."""
        return self._groups.get_group(_group_name(self._members[child]))


def _exchange_with_parent(above: Group, payload: Tensor) -> None:
    """Send `payload`, the sum of a subtree, to the parent. Replace it by the sum of all."""
    total = torch.empty_like(payload)
    arriving = above.recv([total], 0, _DOWN)  # posted before the send, so that the answer arrives at once
    above.send([payload], 0, _UP).wait()
    arriving.wait()
    payload.copy_(total)


def _group_name(child: str) -> str:
    return f"sums of {child}"
