"""Session: all that replay knows of how workers communicate.

A session is one worker's part in one order: it connects to those that the worker talks to, carries tensors point to
point and sums them over those who hold the same layers. Any thread may `abort` it. What was computed counts only after
a `commit_point`: over NCCL, calls return at once, and an abort lets everything behind it run on garbage. The idea is
that of torchft's manager, which synchronises, asks for errors, and then votes.
"""

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import NamedTuple, Self, cast

import msgspec
import torch
from torch import Tensor

from slipstream.runtime.beside import Beside
from slipstream.runtime.model.layers.worker_group import Backend as RanksBackend
from slipstream.runtime.model.layers.worker_group import Connection
from slipstream.runtime.replay.backend import Backend, Meeting
from slipstream.runtime.replay.gloo import Gloo
from slipstream.runtime.replay.group_store import GroupStore
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.nccl import Nccl
from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.replay.stuck_calls import OPEN_CALLS
from slipstream.runtime.replay.transfers import (
    TIMEOUT,
    Arriving,
    CommunicationError,
    Outgoing,
    Summing,
    told_in_one_line,
)
from slipstream.runtime.replay.transport import Transport
from slipstream.runtime.torch_private import Group, Store
from slipstream.schedules.layers import LayerRange, layers_text
from slipstream.schedules.schedule import Worker

Shared = LayerRange | str
"""What gradients are summed of: a range of layers, or one parameter that several layers share, by its first name."""
CLOCK_ROUNDS = 8
DRAIN_SECONDS = 0.001
"""From one look at what is under way to the next."""
BYTES_TAG = 2**24
"""Above those of any schedule's transfers."""
BUCKET_BYTES = 2**20
"""Gradients up to this size are summed together: on a slow network each sum takes several trips there and back. Larger
ones take longer to copy than they gain."""
_KEPT = msgspec.json.Decoder(dict[str, int])
"""The groups that a process could use again, by name, and the order that made each."""


class OrderEndedError(CommunicationError):
    """The order has ended while the session was at work."""


class _Wanted(NamedTuple):
    """A process group that a session needs."""

    name: str
    """The same at all members; no other group of an order has it."""
    members: tuple[str, ...]
    """Processes, by rank."""
    place: int
    """Of this process."""
    backend: Backend

    @property
    def turn(self) -> tuple[int, str]:
        """All make their groups in this order, so that no two wait for each other in different groups. Those of every
        other column come first: the workers of a long pipeline meet in two steps."""
        return int(self.members[0].partition(":")[0].rpartition(".")[2]) % 2, self.name


class _Held(NamedTuple):
    """A process group that is there."""

    wanted: _Wanted
    order: int
    """That it was made for."""
    group: Group
    keys: GroupStore


class Links:
    """The process groups of one process, from order to order.

    Over NCCL, a group lives on where the next order needs it, all of its members live, and nothing was aborted in it:
    what a change costs depends on who comes and goes, not on how many workers there are. Groups over gloo stay open
    until the next order, as others may still take from them what they need for the end of an iteration.
    """

    def __init__(self, transport: Transport) -> None:
        self.host = Gloo()
        """Carries numbers and bytes of the host."""
        self.backend: Backend = self.host if transport == "gloo" else Nccl()
        self.backends = (self.host,) if self.backend is self.host else (self.host, self.backend)
        """In the order in which they are aborted: nothing that NCCL leaves behind goes on over the other."""
        self.idle: dict[str, _Held] = {}
        """Those that no session uses, by name."""

    def close(self) -> None:
        """Close what no session uses."""
        idle, self.idle = self.idle, {}
        _close([*idle.values()])


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
    worker's own group is connected with it. A process that stands for several ranks communicates as each of them:
    `own_rank` says which, counted from 0.

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
        self.own_ranks = range(membership.stands_for)
        """The ranks that this process stands for, counted from 0."""
        self._membership = membership
        self._links = links
        self._store = store
        self._spared = spared
        self._sharers: dict[Shared, tuple[Worker, ...]] = {}
        self._pairs: set[tuple[Worker, Worker]] = set()
        self._held: dict[str, _Held] = {}
        self._lost: list[_Held] = []
        self._routes: dict[tuple[Worker, Worker, int], tuple[Group, int]] = {}
        """By source, target and own rank: the group, and the rank of the other end in it."""
        self._of_sharers: dict[tuple[tuple[Worker, ...], int], Group] = {}
        self._between_ranks: Connection | None = None
        self._beside = Beside(device, "reductions", enqueues=self.ordered)
        self._presences = 0
        self._ended = False
        self._released = False
        self._lock = threading.Lock()
        """Either `abort` knows a group, or whoever made it knows of the abort."""

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
        self._sharers = {what: tuple(sorted(members)) for what, members in sharers.items() if len(members) > 1}
        self._pairs = {pair for pair in (permutations(self._membership.ranks, 2) if pairs is None else pairs)
                       if self.worker in pair}
        wanted = {one.name: one for one in self._wanted(sums=sums, bytes_too=bytes_too)}
        with told_in_one_line("meeting the other workers"):
            self._make_all(wanted)
        self._route()
        group = self._membership.group
        if group is not None:
            backend = cast(RanksBackend, self._held[self._name_of_ranks].group)
            self._between_ranks = Connection(backend, told_in_one_line, self.device, self.staged)
            group.connect(self._between_ranks)
        return self

    def abort(self) -> None:
        """The order has ended: whatever waits for other workers comes to an end, and nothing is computed any more that
        counts. For any thread; returns at once."""
        self._ended = True
        with self._lock:
            if self._released:
                return
            held = tuple(self._held.values())
        for backend in self._links.backends:
            backend.abort([one.group for one in held if one.wanted.backend is backend])

    def cut(self) -> None:
        """Break connections, as a network may: on purpose, for tests."""
        self._links.host.cut()

    def require(self) -> None:
        """Raises OrderEndedError once the order has ended."""
        if self._ended:
            raise OrderEndedError("the order is over")

    def errored(self) -> str | None:
        """What is wrong with what this worker communicates by, in one line."""
        return next((f"the connections of {one.wanted.name} have failed: {lost}" for one in tuple(self._held.values())
                     if (lost := one.wanted.backend.lost(one.group)) is not None), None)

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
        return {name: one.group for name, one in self._held.items()}

    def over(self) -> bool:
        """Whether nothing that this session has begun changes a tensor any more."""
        held = (*self._held.values(), *self._lost)
        return all(backend.over([one.group for one in held if one.wanted.backend is backend])
                   for backend in self._links.backends)

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
        while not self.over():
            time.sleep(DRAIN_SECONDS)
        if self.device.type == "cuda" and self.ordered:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Nothing is sent or received any more: groups in which nothing was aborted wait for the next order. `abort`
        does nothing from now on."""
        with self._lock:
            self._released = True
            held, self._held = self._held, {}
        if self._membership.group is not None and self._between_ranks is not None:
            self._membership.group.disconnect(self._between_ranks)
        self._routes, self._of_sharers = {}, {}
        for name, one in held.items():
            if one.wanted.backend.lost(one.group) is None:
                self._links.idle[name] = one
            else:
                self._lost.append(one)

    def close(self) -> None:
        """Close what was aborted, beside all else: it may take a while. Peers that wait for it are released with an
        error."""
        self.release()
        lost, self._lost = self._lost, []
        _close_beside(lost)

    def send(self, tensor: Tensor, target: Worker, tag: int, own_rank: int = 0) -> Outgoing:
        """Start sending; computing goes on."""
        payload = tensor.detach().contiguous()
        if self.staged:
            payload = torch.empty(payload.shape, dtype=payload.dtype, pin_memory=True).copy_(payload)
        with told_in_one_line(f"sending to worker {target}"):
            group, rank = self._way(self.worker, target, own_rank)
            return Outgoing(group.send([payload], rank, tag), payload, target)

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: Worker, tag: int, own_rank: int = 0
                ) -> Arriving:
        """Make room for a tensor, and start receiving it."""
        payload = self._buffer(shape, dtype)
        with told_in_one_line(f"receiving from worker {source}"):
            group, rank = self._way(source, self.worker, own_rank)
            return Arriving(group.recv([payload], rank, tag), payload, source, self.device)

    def sum_over_sharers(self, what: Shared, tensors: Sequence[Tensor], own_rank: int = 0) -> None:
        """Replace each tensor by its sum over all live workers that reduce these layers, or hold a copy of this
        parameter."""
        if what not in self._sharers:
            return
        with told_in_one_line(f"summing the gradients of {what if isinstance(what, str) else layers_text(what)}"):
            carried = [tensor.cpu() for tensor in tensors] if self.staged else list(tensors)
            group, buckets = self._sharing(what, own_rank), _buckets(carried)
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
        return self._sharing(layers, own_rank) if layers in self._sharers else None

    def send_bytes(self, data: bytes, layers: LayerRange, target: Worker, own_rank: int = 0) -> None:
        """Send bytes of this host to another of those who reduce a range. Needs `bytes_too`."""
        with told_in_one_line(f"sending to worker {target}"):
            group, rank = self._sharing(layers, own_rank, of_bytes=True), self._sharers[layers].index(target)
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for tensor in (torch.tensor([len(data)]), payload):
                group.send([tensor], rank, BYTES_TAG).wait()

    def receive_bytes(self, layers: LayerRange, source: Worker, own_rank: int = 0) -> bytes:
        """Receive what `send_bytes` sends."""
        with told_in_one_line(f"receiving from worker {source}"):
            group, rank = self._sharing(layers, own_rank, of_bytes=True), self._sharers[layers].index(source)
            length = torch.empty(1, dtype=torch.int64)
            group.recv([length], rank, BYTES_TAG).wait()
            payload = torch.empty(int(length.item()), dtype=torch.uint8)
            group.recv([payload], rank, BYTES_TAG).wait()
            return payload.numpy().tobytes()

    def sum_over_all(self, values: Sequence[float]) -> Summing:
        """Start to sum numbers over all members; computing goes on. Needs `sums`."""
        payload = torch.tensor(values, dtype=torch.float64)
        with told_in_one_line("summing over all workers"):
            return Summing(self._group("all sums").allreduce([payload]), payload)

    def clock_offset(self) -> float:
        """Seconds to add to this worker's perf_counter to read that of the first member. All must call it together.

        It makes a group of its own, whose messages come between no others. The offset is the one seen in the quickest
        of a few round trips, as in NTP; the first member answers the others one by one.
        """
        members = self._membership.processes()
        one = _Wanted("all clocks", members, members.index(self._process(0)), self._links.host)
        with told_in_one_line("comparing clocks"):
            if one.name not in self._held:
                self.require()
                one.backend.begin(self._spared)
                self._hold(self._made(one))
                one.backend.made()
            group = self._group(one.name)
            if one.place > 0:
                return min(_ask_time(group) for _ in range(CLOCK_ROUNDS))[1]
            for rank in range(1, len(members)):
                for _ in range(CLOCK_ROUNDS):
                    group.recv([torch.empty(1, dtype=torch.float64)], rank, 0).wait()
                    group.send([torch.tensor([time.perf_counter()], dtype=torch.float64)], rank, 0).wait()
            return 0.0

    def wait_for_all(self) -> None:
        """Wait until all members get here, with all that their devices had to do."""
        members = self._membership.processes()
        if len(members) == 1:
            return
        self._presences += 1
        keys = GroupStore(self._store, f"{self._prefix}present {self._presences} ", TIMEOUT, self.require)
        self._wait_for_device()
        with told_in_one_line("waiting for all workers"):
            if keys.add("count", 1) == len(members):
                keys.set("all", b"")
            keys.wait(["all"])

    def _wait_for_device(self) -> None:
        """No thread is left behind in here (`runtime.replay.stuck_calls`): the device would go on behind it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    @property
    def _prefix(self) -> str:
        """Of the keys of this order."""
        return f"order{self._membership.generation}/"

    def _process(self, own_rank: int) -> str:
        """As which of the processes this one takes part."""
        return self._membership.process(self.worker, own_rank)

    def _wanted(self, *, sums: bool, bytes_too: bool) -> Iterator[_Wanted]:
        """All process groups that this process takes part in."""
        membership, backend, host = self._membership, self._links.backend, self._links.host
        for own_rank in self.own_ranks:
            for ends in sorted(map(self._ends, self._pairs)):
                yield self._among(ends, own_rank, "to", backend)
            for members in sorted(set(self._sharers.values())):
                yield self._among(members, own_rank, "and", backend)
                if bytes_too and self.ordered:
                    yield self._among(members, own_rank, "bytes", host)
        everyone = membership.processes()
        if sums:
            # Numbers of the host: over gloo also where tensors go over NCCL, whose stream they would hold up.
            yield _Wanted("all sums", everyone, everyone.index(self._process(0)), host)
        if membership.group is not None:
            mates = membership.processes_of(self.worker)
            yield _Wanted(self._name_of_ranks, mates, mates.index(self._process(0)), backend)

    @property
    def _name_of_ranks(self) -> str:
        return f"ranks of {self.worker}"

    def _among(self, workers: Sequence[Worker], own_rank: int, word: str, backend: Backend) -> _Wanted:
        """The processes of one rank in some workers."""
        return _Wanted(self._name(workers, own_rank, word),
                       tuple(self._membership.process(worker, own_rank) for worker in workers),
                       workers.index(self.worker), backend)

    def _name(self, workers: Sequence[Worker], own_rank: int, word: str) -> str:
        return f" {word} ".join(self._membership.process(worker, own_rank) for worker in workers)

    def _make_all(self, wanted: Mapping[str, _Wanted]) -> None:
        """Have all groups, those that can be used again and others."""
        self.require()
        idle, self._links.idle = self._links.idle, {}
        for name in self._agreed(wanted, idle):
            wanted[name].backend.reuse(idle[name].group)
            self._hold(idle.pop(name))
        lacking = sorted((one for one in wanted.values() if one.name not in self._held), key=lambda one: one.turn)
        for backend in self._links.backends:  # apart: gloo's abort shuts all sockets that were opened meanwhile
            backend.begin(self._spared)
            try:
                for one in lacking:
                    if one.backend is backend:
                        self._hold(self._made(one))
            finally:
                backend.made()
        _close_beside([*idle.values()])

    def _agreed(self, wanted: Mapping[str, _Wanted], idle: Mapping[str, _Held]) -> list[str]:
        """The groups that all of their members still have: each says which it could use again.

        Over gloo none is: receives of an iteration that never came may have been posted in it.
        """
        if not self.ordered:
            return []
        mine = {name: one.order for name, one in idle.items() if name in wanted and one.wanted.backend.ordered
                and one.wanted.members == wanted[name].members and one.wanted.backend.lost(one.group) is None}
        own = [self._process(own_rank) for own_rank in self.own_ranks]
        others = {member for one in wanted.values() for member in one.members}.difference(own)
        keys = GroupStore(self._store, f"{self._prefix}kept ", TIMEOUT, self.require)
        for process in own:
            keys.set(process, msgspec.json.encode(mine))
        keys.wait(sorted(others))
        theirs = [_KEPT.decode(keys.get(process)) for process in sorted(others)]
        by_process = dict(zip(sorted(others), theirs, strict=True)) | dict.fromkeys(own, mine)
        return [name for name, order in mine.items()
                if all(by_process[member].get(name) == order for member in wanted[name].members)]

    def _made(self, one: _Wanted) -> _Held:
        prefix = f"{self._prefix}{one.name}/"
        keys = GroupStore(self._store, prefix, TIMEOUT, self.require, len(one.members))
        group = one.backend.group(Meeting(keys, self._store, prefix, one.place, len(one.members)))
        keys.met()
        return _Held(one, self._membership.generation, group, keys)

    def _hold(self, one: _Held) -> None:
        with self._lock:
            self._held[one.wanted.name] = one
        self.require()

    def _ends(self, pair: tuple[Worker, Worker]) -> tuple[Worker, ...]:
        """The members of the group that carries what one sends to the other."""
        return pair if self.ordered else tuple(sorted(pair))

    def _route(self) -> None:
        """Look up the groups of all pairs and sharers, once."""
        for own_rank in self.own_ranks:
            for source, target in self._pairs:
                ends = self._ends((source, target))
                other = ends.index(source if target == self.worker else target)
                self._routes[source, target, own_rank] = self._group(self._name(ends, own_rank, "to")), other
            for members in self._sharers.values():
                self._of_sharers[members, own_rank] = self._group(self._name(members, own_rank, "and"))

    def _way(self, source: Worker, target: Worker, own_rank: int) -> tuple[Group, int]:
        self.require()  # a transfer may begin, and fail later, on connections that were just shut
        try:
            return self._routes[source, target, own_rank]
        except KeyError:
            raise RuntimeError("there is no connection") from None

    def _sharing(self, what: Shared, own_rank: int, *, of_bytes: bool = False) -> Group:
        self.require()
        members = self._sharers[what]
        if of_bytes and self.ordered:
            return self._group(self._name(members, own_rank, "bytes"))
        try:
            return self._of_sharers[members, own_rank]
        except KeyError:
            raise RuntimeError("there is no connection") from None

    def _group(self, name: str) -> Group:
        try:
            return self._held[name].group
        except KeyError:
            raise RuntimeError("there is no connection") from None

    def _buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if self.staged:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)


def _close(held: list[_Held]) -> None:
    """Close groups; of those over NCCL, the references in the list are the last ones."""
    for backend in {id(one.wanted.backend): one.wanted.backend for one in held}.values():
        backend.close([one.group for one in held if one.wanted.backend is backend])
    while held:
        held.pop()


def _close_beside(held: list[_Held]) -> None:
    """Close groups in a thread of its own, which may wait without end (`runtime.replay.gloo.GlooGroup`)."""
    if held:
        threading.Thread(target=_close, args=(held,), daemon=True, name="closing").start()


@contextmanager
def _waiting(what: str) -> Iterator[None]:
    """Wait for another thread, which may be stuck in a process group: then both are left behind."""
    OPEN_CALLS.begin(what)
    try:
        yield
    finally:
        OPEN_CALLS.end()


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
    asked, answer = time.perf_counter(), torch.empty(1, dtype=torch.float64)
    group.send([torch.zeros(1, dtype=torch.float64)], 0, 0).wait()
    group.recv([answer], 0, 0).wait()
    answered = time.perf_counter()
    return answered - asked, answer.item() - (asked + answered) / 2
