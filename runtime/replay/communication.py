"""Tensors between workers: point to point, and summed over those that hold the same layers.

A `Communicator` holds the process groups of one generation of workers, and is dropped whole with it.
"""

from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import cast

import torch
from torch import Tensor

from slipstream.runtime.model.layers.worker_group import Backend, Connection, WorkerGroup
from slipstream.runtime.replay.group_store import GroupStore
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.transfers import TIMEOUT, Arriving, Outgoing, Summing, told_in_one_line
from slipstream.runtime.replay.transport import Transport
from slipstream.runtime.torch_private import Group, Store, TCPStore, gloo_group, nccl_group
from slipstream.schedules.layers import LayerRange, layers_text
from slipstream.schedules.schedule import Worker

Shared = LayerRange | str
"""What gradients are summed of: a range of layers, or one parameter that several layers share, by its first name."""
CLOCK_ROUNDS = 8
_WORLD = "the world"
_SUMS = "sums"
_CLOCK = "clock"
_BYTES_GROUP = "bytes"
BYTES_TAG = 2**24
"""Above those of any schedule's transfers."""
_RANKS = "the ranks of worker"
BUCKET_BYTES = 2**20
"""Gradients up to this size are summed together: on a slow network each sum takes several trips there and back. Larger
ones take longer to copy than they gain."""


class Communicator:
    """Transfers and sums among the members of one generation, on one device each.

    Parameters
    ----------
    sharers
        For each range of layers by which this worker reduces gradients, and for each parameter that layers share, all
        live workers that do.
    store
        Where the process groups find each other: one that all members share, a TCPStore for NCCL.
    sums
        Whether `sum_over_all` will be used.
    bytes_too
        Whether `send_bytes` will be.
    require
        May raise what shall end the wait for the others at the store.

    Where a worker is a group of processes, each communicates with those of the same rank in all workers; only
    `sum_over_all` is over all processes. The worker's own group is connected with it. A process that stands for several
    ranks communicates as each of them: `own_rank` says which, counted from 0.

    Gloo carries host memory only, so tensors of a GPU pass through pinned buffers. Gloo matches transfers by tag; NCCL
    by their order, so every worker must issue its transfers in an order that all of them agree on (that of
    `schedules.graph.transfers`). Raises CommunicationError.
    """

    def __init__(self, membership: Membership, sharers: Mapping[Shared, Sequence[Worker]], *, transport: Transport,
                 device: torch.device, store: Store, sums: bool = False, bytes_too: bool = False,
                 require: Callable[[], None] = lambda: None) -> None:
        self.device = device
        self.worker = membership.worker
        self.ordered = transport == "nccl"
        """Whether transfers are matched by their order, and so have to be issued in one that all agree on."""
        self.staged = transport == "gloo" and device.type != "cpu"
        """Whether tensors pass through host memory."""
        self.own_ranks = range(membership.stands_for)
        """The ranks that this process stands for, counted from 0."""
        self._transport_device = torch.device("cpu") if self.staged else device
        self._ranks = membership.ranks
        self._groups: dict[tuple[str, int], Group] = {}
        self._stores: list[Store] = []
        """Those written in Python live as long as this does: the groups hold only their C++ half."""

        self._generation = membership.generation
        self._store = store
        self._require = require
        self._between_ranks: Connection | None = None
        self._worker_group = membership.group
        everyone = sorted(self._ranks, key=self._ranks.__getitem__)
        if len(everyone) > 1:
            self._join(_WORLD, everyone, transport)
        self._bytes = _BYTES_GROUP if bytes_too and transport != "gloo" and len(everyone) > 1 else _WORLD
        if self._bytes != _WORLD:
            self._join(_BYTES_GROUP, everyone, "gloo")
        if sums:  # numbers of the host: over gloo also where tensors go over NCCL, whose stream they would hold up
            self._meet(_SUMS, _SUMS, membership.place_of_all, "gloo")
        if membership.group is not None:
            self._connect(membership.group, transport)
        self._sharers = {what: tuple(sorted(members)) for what, members in sharers.items() if len(members) > 1}
        # One group for each set of workers, however many ranges they share. All members make their groups in the order
        # of the sets: no two wait for each other in different groups.
        for members in sorted(set(self._sharers.values())):
            self._join(_name_of(members), members, transport)

    def send(self, tensor: Tensor, target: Worker, tag: int, own_rank: int = 0) -> Outgoing:
        """Start sending; computing goes on."""
        payload = tensor.detach().contiguous()
        if self.staged:
            payload = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True).copy_(payload)
        with told_in_one_line(f"sending to worker {target}"):
            return Outgoing(self._group(_WORLD, own_rank).send([payload], self._ranks[target], tag), payload, target)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: Worker, tag: int, own_rank: int = 0
                ) -> Arriving:
        """Make room for a tensor, and start receiving it."""
        payload = self._buffer(shape, dtype)
        with told_in_one_line(f"receiving from worker {source}"):
            work = self._group(_WORLD, own_rank).recv([payload], self._ranks[source], tag)
            return Arriving(work, payload, source, self.device)

    def sum_over_sharers(self, what: Shared, tensors: Sequence[Tensor], own_rank: int = 0) -> None:
        """Replace each tensor by its sum over all live workers that reduce these layers, or hold a copy of this
        parameter. Raises CommunicationError."""
        members = self._sharers.get(what)
        if members is None:
            return
        with told_in_one_line(f"summing the gradients of {what if isinstance(what, str) else layers_text(what)}"):
            carried = [tensor.cpu() for tensor in tensors] if self.staged else list(tensors)
            group, buckets = self._group(_name_of(members), own_rank), _buckets(carried)
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

    def sharers_of(self, layers: LayerRange, own_rank: int = 0) -> Group | None:
        """The group of those who reduce a range, by their order; None where nobody else does."""
        return self._group(_name_of(self._sharers[layers]), own_rank) if layers in self._sharers else None

    def send_bytes(self, data: bytes, target: Worker, own_rank: int = 0) -> None:
        """Send bytes of this host. Raises CommunicationError."""
        with told_in_one_line(f"sending to worker {target}"):
            group, rank = self._group(self._bytes, own_rank), self._ranks[target]
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for tensor in (torch.tensor([len(data)]), payload):
                group.send([tensor], rank, BYTES_TAG).wait()

    def receive_bytes(self, source: Worker, own_rank: int = 0) -> bytes:
        """Receive what `send_bytes` sends. Raises CommunicationError."""
        with told_in_one_line(f"receiving from worker {source}"):
            group, rank = self._group(self._bytes, own_rank), self._ranks[source]
            length = torch.empty(1, dtype=torch.int64)
            group.recv([length], rank, BYTES_TAG).wait()
            payload = torch.empty(int(length.item()), dtype=torch.uint8)
            group.recv([payload], rank, BYTES_TAG).wait()
            return payload.numpy().tobytes()

    def sum_over_all(self, values: Sequence[float]) -> Summing:
        """Start to sum numbers over all members; computing goes on. Needs `sums`."""
        payload = torch.tensor(values, dtype=torch.float64)
        with told_in_one_line("summing over all workers"):
            return Summing(self._group(_SUMS).allreduce([payload]), payload)

    def clock_offset(self) -> float:
        """Seconds to add to this worker's perf_counter to read that of rank 0. All members must call it together.

        It makes a group of its own, whose messages come between no others. The offset is the one seen in the quickest
        of a few round trips, as in NTP; rank 0 answers the others one by one.
        """
        by_rank = sorted(self._ranks, key=self._ranks.__getitem__)
        if (_CLOCK, 0) not in self._groups:
            self._join(_CLOCK, by_rank, "gloo")
        first, *_ = [self._offset(self._group(_CLOCK, own_rank), by_rank) for own_rank in self.own_ranks]
        return first

    def _offset(self, group: Group, by_rank: Sequence[Worker]) -> float:
        with told_in_one_line("comparing clocks"):
            if self.worker == by_rank[0]:
                for rank in range(1, len(by_rank)):
                    for _ in range(CLOCK_ROUNDS):
                        group.recv([torch.empty(1, dtype=torch.float64)], rank, 0).wait()
                        group.send([torch.tensor([perf_counter()], dtype=torch.float64)], rank, 0).wait()
                return 0.0
            return min(_ask_time(group) for _ in range(CLOCK_ROUNDS))[1]

    def wait_for_all(self) -> None:
        """Wait until all members get here, so that none closes a connection another still reads from."""
        if len(self._ranks) == 1:
            return
        present = torch.ones(1, dtype=torch.float32, device=self._transport_device)  # the default's may differ
        with told_in_one_line("waiting for all workers to end"):
            for own_rank in self.own_ranks:
                self._group(_WORLD, own_rank).allreduce([present.fill_(1.0)]).wait()
                assert present.item() == len(self._ranks)  # reading it waits for the GPU, too

    def drop(self) -> None:
        """Close all groups; peers that wait for this worker are released with an error."""
        if self._worker_group is not None and self._between_ranks is not None:
            self._worker_group.disconnect(self._between_ranks)
        groups, self._groups = self._groups, {}
        for group in reversed(groups.values()):
            group.abort()

    def _join(self, name: str, members: Sequence[Worker], transport: Transport) -> None:
        """Meet workers, here those of their processes that stand for the same rank."""
        place = members.index(self.worker), len(members)
        for own_rank in self.own_ranks:
            rank = 0 if self._worker_group is None else self._worker_group.rank() * len(self.own_ranks) + own_rank
            self._meet(name, name if self._worker_group is None else f"{rank} of {name}", place, transport, own_rank)

    def _connect(self, group: WorkerGroup, transport: Transport) -> None:
        """Meet the other processes of this worker."""
        name = f"{_RANKS} {self.worker}"
        self._meet(name, name, (group.rank(), group.size()), transport)
        backend = cast(Backend, self._group(name))
        self._between_ranks = Connection(backend, told_in_one_line, self.device, self.staged)
        group.connect(self._between_ranks)

    def _meet(self, name: str, key: str, place: tuple[int, int], transport: Transport, own_rank: int = 0) -> None:
        """Make a group whose members leave their addresses under a key; `place` is the rank in it and its size."""
        prefix = f"generation{self._generation}/{key}"
        with told_in_one_line(f"meeting the workers of {name}"):
            if transport == "gloo":
                self._stores.append(GroupStore(self._store, f"{prefix}/", TIMEOUT, self._require, place[1]))
                self._groups[name, own_rank] = gloo_group(self._stores[-1], *place, TIMEOUT)
            else:
                assert isinstance(self._store, TCPStore)
                self._groups[name, own_rank] = nccl_group(self._store, prefix, *place, TIMEOUT)

    def _group(self, name: str, own_rank: int = 0) -> Group:
        try:
            return self._groups[name, own_rank]
        except KeyError:
            raise RuntimeError("the connections are closed") from None

    def _buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.staged:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)


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


def _ask_time(group: Group) -> tuple[float, float]:
    """How long the question took, and the offset it found."""
    asked, answer = perf_counter(), torch.empty(1, dtype=torch.float64)
    group.send([torch.zeros(1, dtype=torch.float64)], 0, 0).wait()
    group.recv([answer], 0, 0).wait()
    answered = perf_counter()
    return answered - asked, answer.item() - (asked + answered) / 2


def _name_of(members: Sequence[Worker]) -> str:
    return " ".join(map(str, members))
