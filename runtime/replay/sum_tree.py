"""Sums of numbers over all processes of an order: up a tree, and down again.

So each process connects to a few others, however many there are, and all get the same bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from slipstream.runtime.beside import Beside
from slipstream.runtime.replay.links import Groups, Wanted
from slipstream.runtime.replay.transfers import Summing
from slipstream.runtime.torch_private import Group

CHILDREN = 4
"""Of a process in the tree."""
_UP, _DOWN = 0, 1
"""Tags."""


class SumTree:
    """This process in the tree: `members[place]`; the first one is the root.

    Numbers are of the host: over gloo, also where tensors go over NCCL, whose stream they would hold up.
    """

    def __init__(self, groups: Groups, members: Sequence[str], place: int) -> None:
        self._groups = groups
        self._members = members
        self._place = place
        first = CHILDREN * place + 1
        self._children = range(first, min(first + CHILDREN, len(members)))
        self._beside = Beside(torch.device("cpu"), "sums over all workers")

    def wanted(self) -> Iterator[Wanted]:
        """A process group with each neighbour."""
        for child in (*([self._place] if self._place else []), *self._children):
            ends = self._members[(child - 1) // CHILDREN], self._members[child]
            yield Wanted(_name(ends[1]), ends, ends.index(self._members[self._place]), self._groups.links.host)

    def begin(self, values: Sequence[float]) -> Summing:
        """Start to sum numbers; all processes do so in the same order."""
        one = Summing(torch.tensor(values, dtype=torch.float64))
        self._beside.begin(partial(self._sum, one))
        return one

    def _sum(self, one: Summing) -> None:
        try:
            below = [self._group(child) for child in self._children]
            arriving = [torch.empty_like(one.payload) for _ in below]
            for work in [group.recv([there], 1, _UP) for group, there in zip(below, arriving, strict=True)]:
                work.wait()
            for there in arriving:
                one.payload.add_(there)
            if self._place:
                _through(self._group(self._place), one.payload)
            sent = [group.send([one.payload], 1, _DOWN) for group in below]
        except Exception as error:
            one.end(str(error))
            return
        one.end(None)
        with suppress(RuntimeError):  # the next sum fails, too, or nobody waits for one
            for work in sent:
                work.wait()

    def _group(self, child: int) -> Group:
        """That of a process and the one above it."""
        return self._groups.named(_name(self._members[child]))


def _through(above: Group, payload: Tensor) -> None:
    """Send up what is the sum of all below, and receive the sum of all."""
    total = torch.empty_like(payload)
    arriving = above.recv([total], 0, _DOWN)  # before it is sent, so that it comes at once
    above.send([payload], 0, _UP).wait()
    arriving.wait()
    payload.copy_(total)


def _name(child: str) -> str:
    return f"sums of {child}"
