"""What a session carries as one of the ranks of a worker: tensors, sums of gradients, bytes."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.runtime.replay.links import Groups, Wanted
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.transfers import Arriving, Outgoing, told_in_one_line
from slipstream.runtime.torch_private import Group
from slipstream.schedules.layers import LayerRange, layers_text
from slipstream.schedules.schedule import Worker

T = TypeVar("T")
Shared = LayerRange | str
"""What gradients are summed of: a range of layers, or one parameter that several layers share, by its first name."""
BYTES_TAG = 2**24
"""Above those of any schedule's transfers."""
BUCKET_BYTES = 2**20
"""Gradients up to this size are summed together: on a slow network each sum takes several trips there and back. Larger
ones take longer to copy than they gain."""


class RankSession:
    """Communicates with those of one rank in all workers: the one as which the membership says that it acts.

    All methods raise CommunicationError.
    """

    def __init__(self, groups: Groups, membership: Membership, device: torch.device) -> None:
        links = groups.links
        self.device = device
        self.worker = membership.worker
        self.ordered = links.backend.ordered
        """Whether transfers are matched by their order, and so have to be issued in one that all agree on."""
        self.staged = links.backend is links.host and device.type != "cpu"
        """Whether tensors pass through host memory."""
        self._groups = groups
        self._membership = membership
        self._sharers: Mapping[Shared, tuple[Worker, ...]] = {}
        self._pairs: Collection[tuple[Worker, Worker]] = ()
        self._routes: dict[tuple[Worker, Worker], tuple[Group, int]] = {}
        """By source and target: the group, and the rank of the other end in it."""
        self._of_sharers: dict[tuple[Worker, ...], Group] = {}

    def wanted(self, sharers: Mapping[Shared, tuple[Worker, ...]], pairs: Collection[tuple[Worker, Worker]], *,
               bytes_too: bool) -> Iterator[Wanted]:
        """The process groups that it needs; see `Session.connect`."""
        self._sharers, self._pairs, links = sharers, pairs, self._groups.links
        for ends in sorted({self._ends(pair) for pair in pairs}):
            yield Wanted(*self._among(ends, "to"), links.backend, directed=self.ordered)
        for members in sorted(set(sharers.values())):
            yield Wanted(*self._among(members, "and"), links.backend)
            if bytes_too and self.ordered:
                yield Wanted(*self._among(members, "bytes"), links.host)

    def route(self) -> None:
        """Look up those groups, once."""
        for source, target in self._pairs:
            ends = self._ends((source, target))
            other = ends.index(source if target == self.worker else target)
            self._routes[source, target] = self._groups.named(self._among(ends, "to")[0]), other
        for members in self._sharers.values():
            self._of_sharers[members] = self._groups.named(self._among(members, "and")[0])

    def forget_routes(self) -> None:
        """Nothing is sent or received any more."""
        self._routes, self._of_sharers = {}, {}

    def send(self, tensor: Tensor, target: Worker, tag: int) -> Outgoing:
        """Start sending; computing goes on."""
        payload = tensor.detach().contiguous()
        if self.staged:
            payload = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True).copy_(payload)
        with told_in_one_line(f"sending to worker {target}"):
            group, rank = self._way(self.worker, target)
            return Outgoing(group.send([payload], rank, tag), payload, target)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: Worker, tag: int) -> Arriving:
        """Make room for a tensor, and start receiving it."""
        payload = torch.empty(tuple(shape), dtype=dtype, pin_memory=True) if self.staged \
            else torch.empty(tuple(shape), dtype=dtype, device=self.device)
        with told_in_one_line(f"receiving from worker {source}"):
            group, rank = self._way(source, self.worker)
            return Arriving(group.recv([payload], rank, tag), payload, source, self.device)

    def sum_over_sharers(self, what: Shared, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all live workers that reduce these layers, or hold a copy of this
        parameter."""
        if what not in self._sharers:
            return
        with told_in_one_line(f"summing the gradients of {what if isinstance(what, str) else layers_text(what)}"):
            carried = [tensor.cpu() for tensor in tensors] if self.staged else list(tensors)
            group, buckets = self._sharing(what), _buckets(carried)
            joined = [bucket[0] if len(bucket) == 1 else torch.cat([tensor.flatten() for tensor in bucket])
                      for bucket in buckets]
            for work in [group.allreduce([one]) for one in joined]:
                work.wait()
        for bucket, totals in zip(buckets, joined, strict=True):
            start = 0
            for tensor in bucket if len(bucket) > 1 else ():
                tensor.copy_(totals.narrow(0, start, tensor.numel()).view_as(tensor))
                start += tensor.numel()
        if self.staged:
            for tensor, total in zip(tensors, carried, strict=True):
                tensor.copy_(total)

    def sharers_of(self, layers: LayerRange) -> Group | None:
        """The group of those who reduce a range, by their order; None where nobody else does."""
        return self._sharing(layers) if layers in self._sharers else None

    def send_bytes(self, data: bytes, layers: LayerRange, target: Worker) -> None:
        """Send bytes of this host to another of those who reduce a range. Needs `bytes_too`."""
        with told_in_one_line(f"sending to worker {target}"):
            group, rank = self._of_bytes(layers), self._sharers[layers].index(target)
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for tensor in (torch.tensor([len(data)]), payload):
                group.send([tensor], rank, BYTES_TAG).wait()

    def receive_bytes(self, layers: LayerRange, source: Worker) -> bytes:
        """Receive what `send_bytes` sends."""
        with told_in_one_line(f"receiving from worker {source}"):
            group, rank = self._of_bytes(layers), self._sharers[layers].index(source)
            length = torch.empty(1, dtype=torch.int64)
            group.recv([length], rank, BYTES_TAG).wait()
            payload = torch.empty(int(length.item()), dtype=torch.uint8)
            group.recv([payload], rank, BYTES_TAG).wait()
            return payload.numpy().tobytes()

    def _ends(self, pair: tuple[Worker, Worker]) -> tuple[Worker, ...]:
        """The members of the group that carries what one sends to the other."""
        return pair if self.ordered else tuple(sorted(pair))

    def _among(self, workers: Sequence[Worker], word: str) -> tuple[str, tuple[str, ...], int]:
        """Name, members and this process's place of the group of this rank in some workers."""
        members = tuple(self._membership.process(worker) for worker in workers)
        return f" {word} ".join(members), members, workers.index(self.worker)

    def _way(self, source: Worker, target: Worker) -> tuple[Group, int]:
        return self._connected(self._routes.get((source, target)))

    def _sharing(self, what: Shared) -> Group:
        return self._connected(self._of_sharers.get(self._sharers.get(what, ())))

    def _connected(self, found: T | None) -> T:
        """What an order that is open has. Raises RuntimeError."""
        self._groups.require()  # a transfer may begin, and fail later, on connections that were just shut
        if found is None:
            raise RuntimeError("there is no connection")
        return found

    def _of_bytes(self, layers: LayerRange) -> Group:
        self._groups.require()
        return self._groups.named(self._among(self._sharers[layers], "bytes" if self.ordered else "and")[0])


def _buckets(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Neighbours of one dtype together, up to `BUCKET_BYTES`; the same at all workers that reduce them."""
    buckets: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not buckets or tensor.nbytes > room or tensor.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(tensor)
        room -= tensor.nbytes
    return buckets
