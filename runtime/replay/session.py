"""Session: all that replay knows of how workers communicate.

A session is one worker's part in one order: it connects to those that the worker talks to, carries tensors point to
point and sums them over those who hold the same layers. Any thread may `abort` it. What was computed counts only after
a `commit_point`: over NCCL, calls return at once, and an abort lets everything behind it run on garbage. The idea is
that of torchft's manager, which synchronises, asks for errors, and then votes.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import permutations
from typing import Self, TypeVar

import torch
from torch import Tensor
from torch.distributed import Work

from slipstream.runtime.beside import Beside
from slipstream.runtime.model.layers.worker_group import Connection
from slipstream.runtime.replay.links import Groups, Links, Wanted
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.replay.stuck_calls import OPEN_CALLS
from slipstream.runtime.replay.sum_tree import SumTree
from slipstream.runtime.replay.transfers import Arriving, CommunicationError, Outgoing, Summing, told_in_one_line
from slipstream.runtime.torch_private import Group, Store
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
CLOCK_ROUNDS = 8
DRAIN_SECONDS = 0.001
"""From one look at what is under way to the next."""


class Session:
    """Transfers and sums among the members of one order, on one device each.

    Parameters
    ----------
    links
        The groups of this process, and what makes them.
    store
        Where the members find each other: one that all share, a TCPStore for NCCL.
    spared
        Gives the sockets that other threads have opened meanwhile, which `abort` leaves alone.

    Nothing is connected before `connect`, so that `abort` can end that, too. Where a worker is a group of processes,
    each communicates with those of the same rank in all workers; only `sum_over_all` is over all processes. The
    worker's own group is connected with it.

    Gloo carries host memory only, so tensors of a GPU pass through pinned buffers. Gloo matches transfers by tag; NCCL
    by their order, so every worker must issue its transfers in an order that all of them agree on (that of
    `schedules.graph.transfers`). All methods raise CommunicationError, but `abort`, `errored`, `release` and `close`.
    """

    def __init__(self, membership: Membership, *, links: Links, device: torch.device, store: Store,
                 spared: Callable[[], Sockets] = frozenset) -> None:
        self.device = device
        self.worker = membership.worker
        self.ordered = links.backend.ordered
        """Whether transfers are matched by their order, and so have to be issued in one that all agree on."""
        self.staged = links.backend is links.host and device.type != "cpu"
        """Whether tensors pass through host memory."""
        self._groups = Groups(links, store, membership.order, membership.process(membership.worker), spared)
        self._membership = membership
        self._sharers: Mapping[Shared, tuple[Worker, ...]] = {}
        self._routes: dict[tuple[Worker, Worker], tuple[Group, int]] = {}
        """By source and target: the group, and the rank of the other end in it."""
        self._of_sharers: dict[tuple[Worker, ...], Group] = {}
        self._between_ranks: Connection | None = None
        self._sums: SumTree | None = None
        self._beside = Beside(device, "reductions", enqueues=self.ordered)
        self._sends = Beside(device, "sends")
        """Through host memory."""
        self._presences = 0

    def connect(self, sharers: Mapping[Shared, Sequence[Worker]] = {}, *,
                pairs: Collection[tuple[Worker, Worker]] | None = None, sums: bool = False, bytes_too: bool = False
                ) -> Self:
        """Meet those that this worker talks to. What lives on from the order before is used again.

        Parameters
        ----------
        sharers
            For each range of layers by which this worker reduces gradients, and for each parameter that layers share,
            all live workers that do.
        pairs
            Which worker sends to which; None: each to each. Only they connect.
        sums
            Whether `sum_over_all` will be used.
        bytes_too
            Whether `send_bytes` will be.
        """
        group, groups, links = self._membership.group, self._groups, self._groups.links
        self._sharers = {what: tuple(sorted(members)) for what, members in sharers.items() if len(members) > 1}
        mine = {pair for pair in (permutations(self._membership.ranks, 2) if pairs is None else pairs)
                if self.worker in pair}
        wanted = [*self._wanted(mine, bytes_too=bytes_too)]
        if sums:
            self._sums = SumTree(groups, *self._everyone())
            wanted += self._sums.wanted()
        if group is not None:
            ranks, mates = f"ranks of {self.worker}", self._membership.processes_of(self.worker)
            wanted.append(Wanted(ranks, mates, mates.index(self._membership.process(self.worker)), links.backend))
        with told_in_one_line("meeting the other workers"):
            groups.make(wanted)
        self._route(mine)
        if group is not None:
            self._between_ranks = Connection(groups.named(ranks), told_in_one_line, self.device, self.staged)
            group.connect(self._between_ranks)
        return self

    def send(self, tensor: Tensor, target: Worker, tag: int) -> Outgoing:
        """Start sending; computing goes on."""
        payload = tensor.detach().contiguous()
        with told_in_one_line(f"sending to worker {target}"):
            group, rank = self._way(self.worker, target)
            work = self._send_staged(group, payload, rank, tag) if self.staged else group.send([payload], rank, tag)
            return Outgoing(work, payload, target)

    def _send_staged(self, group: Group, tensor: Tensor, rank: int, tag: int) -> Future[Work]:
        """Send a tensor through pinned host memory once the device has made it, while the host goes on."""
        begun, payload = Future[Work](), torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

        def send() -> None:
            payload.copy_(tensor, non_blocking=True)
            torch.cuda.current_stream(self.device).synchronize()
            try:
                begun.set_result(group.send([payload], rank, tag))
            except RuntimeError as error:
                begun.set_exception(error)

        self._sends.begin(send)
        return begun

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

    def abort(self) -> None:
        """The order has ended: whatever waits for other workers comes to an end, and nothing is computed any more that
        counts. For any thread; returns at once."""
        self._groups.abort()

    def cut(self) -> None:
        """Break connections, as a network may: on purpose, for tests."""
        self._groups.links.host.cut()

    def require(self) -> None:
        """Raises OrderEndedError once the order has ended."""
        self._groups.require()

    def errored(self) -> str | None:
        """What is wrong with what this worker communicates by, in one line."""
        return self._groups.errored()

    def commit_point(self) -> None:
        """Wait until the device has done all that this thread gave it to do, and what that waits for; then no group may
        have failed, and the order must be open: else what was computed may be garbage."""
        self._wait_for_device()
        self.require()
        error = self.errored()
        if error is not None:
            raise CommunicationError(error)

    def groups(self) -> dict[str, Group]:
        """Those that are there, by name."""
        return self._groups.by_name()

    def over(self) -> bool:
        """Whether nothing that this session has begun changes a tensor any more."""
        return self._groups.over()

    def begin_beside(self, reduce: Callable[[], None]) -> None:
        """Reduce gradients beside what is computed from now on: one range after the other, as they are begun. Raises
        what an earlier one has raised."""
        self._beside.begin(reduce)

    def wait_beside(self) -> None:
        """Until all that was begun beside computing is done. Raises what it raised."""
        with _waiting("summing gradients"):
            self._beside.wait()
        self.require()  # over NCCL, what an abort has broken off ends as if all were well

    def threads_beside(self) -> list[int]:
        """The thread, if there is one, in which gradients are being reduced."""
        return [] if (thread := self._beside.thread) is None else [thread]

    def drain(self) -> None:
        """Wait until all is over; after an abort that is soon. It waits without end: whoever has aborted must look at
        the time."""
        with _waiting("ending sums of gradients"):
            self._beside.drop()
            self._sends.drop()
        while not self.over():
            time.sleep(DRAIN_SECONDS)
        if self.device.type == "cuda" and self.ordered:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Nothing is sent or received any more: groups in which nothing was aborted wait for the next order. `abort`
        does nothing from now on."""
        self._groups.release()
        if self._membership.group is not None and self._between_ranks is not None:
            self._membership.group.disconnect(self._between_ranks)
        self._routes, self._of_sharers = {}, {}

    def close(self) -> None:
        """Close what was aborted, beside all else: it may take a while. Peers that wait for it are released with an
        error."""
        self.release()
        self._groups.close()

    def sum_over_all(self, values: Sequence[float]) -> Summing:
        """Start to sum numbers over all members; computing goes on. Needs `sums`."""
        assert self._sums is not None
        return self._sums.begin(values)

    def clock_offset(self) -> float:
        """Seconds to add to this worker's perf_counter to read that of the first member. All must call it together.

        The first one has a group with each other, whose messages come between no others, and answers them one by one.
        The offset is the one seen in the quickest of a few round trips, as in NTP.
        """
        members, place = self._everyone()
        wanted = [Wanted(f"clock of {members[other]}", (members[0], members[other]), min(place, 1),
                         self._groups.links.host) for other in range(1, len(members)) if place in {0, other}]
        with told_in_one_line("comparing clocks"):
            self._groups.add(wanted)
            for group in [self._groups.named(one.name) for one in wanted]:
                if place > 0:
                    return min(_ask_time(group) for _ in range(CLOCK_ROUNDS))[1]
                for _ in range(CLOCK_ROUNDS):
                    group.recv([torch.empty(1, dtype=torch.float64)], 1, 0).wait()
                    group.send([torch.tensor([time.perf_counter()], dtype=torch.float64)], 1, 0).wait()
        return 0.0

    def wait_for_all(self) -> None:
        """Wait until all members get here, with all that their devices had to do."""
        members, _ = self._everyone()
        if len(members) == 1:
            return
        self._presences += 1
        keys = self._groups.keys(f"present {self._presences} ")
        self._wait_for_device()
        with told_in_one_line("waiting for all workers"):
            if keys.add("count", 1) == len(members):
                keys.set("all", b"")
            keys.wait(["all"])

    def _wanted(self, pairs: Collection[tuple[Worker, Worker]], *, bytes_too: bool) -> Iterator[Wanted]:
        """The process groups that it needs; see `connect`."""
        links = self._groups.links
        for ends in sorted({self._ends(pair) for pair in pairs}):
            yield Wanted(*self._among(ends, "to"), links.backend, directed=self.ordered)
        for members in sorted(set(self._sharers.values())):
            yield Wanted(*self._among(members, "and"), links.backend)
            if bytes_too and self.ordered:
                yield Wanted(*self._among(members, "bytes"), links.host)

    def _route(self, pairs: Collection[tuple[Worker, Worker]]) -> None:
        """Look up those groups, once."""
        for source, target in pairs:
            ends = self._ends((source, target))
            other = ends.index(source if target == self.worker else target)
            self._routes[source, target] = self._groups.named(self._among(ends, "to")[0]), other
        for members in self._sharers.values():
            self._of_sharers[members] = self._groups.named(self._among(members, "and")[0])

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

    def _wait_for_device(self) -> None:
        """No thread is left behind in here (`runtime.replay.stuck_calls`): the device would go on behind it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _everyone(self) -> tuple[tuple[str, ...], int]:
        """All processes, and the place of this one."""
        members = self._membership.processes()
        return members, members.index(self._membership.process(self.worker))


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """Wait for another thread, which may be stuck in a process group: then both are left behind."""
    OPEN_CALLS.begin(what)
    try:
        yield
    finally:
        OPEN_CALLS.end()


def _ask_time(group: Group) -> tuple[float, float]:
    """How long the question took, and the offset it found."""
    asked, answer = time.perf_counter(), torch.empty(1, dtype=torch.float64)
    group.send([torch.zeros(1, dtype=torch.float64)], 0, 0).wait()
    group.recv([answer], 0, 0).wait()
    answered = time.perf_counter()
    return answered - asked, answer.item() - (asked + answered) / 2


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
