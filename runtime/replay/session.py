"""Communicate as one worker in one generation.

A session connects a worker to the workers that it communicates with, transfers tensors point to
point, and sums them over peers. Any thread may call `abort`. Results count only after a
`reach_commit_point`: over NCCL, calls return at once, and after an abort all later operations run
on garbage. The idea is that of torchft's manager, which synchronizes, asks for errors, and then
votes.
"""

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from itertools import permutations
from typing import Self, TypeVar

import torch
from torch import Tensor
from torch.distributed import Work

from slipstream.runtime.replay.background_queue import BackgroundQueue
from slipstream.runtime.replay.group_cache import GenerationGroups, GroupCache, GroupSpec
from slipstream.runtime.replay.membership import GradientKey, GroupConnection, Membership
from slipstream.runtime.replay.sockets import Sockets
from slipstream.runtime.replay.stuck_calls import OPEN_CALLS
from slipstream.runtime.replay.sum_tree import SumTree
from slipstream.runtime.replay.torch_groups import Group, Store
from slipstream.runtime.replay.transfers import (
    CommunicationError,
    IncomingTensor,
    OutgoingTensor,
    PendingSum,
    one_line_errors,
)
from slipstream.schedules.layers import LayerRange, layers_text
from slipstream.schedules.schedule import Worker

T = TypeVar("T")
BYTES_TAG = 2**24
"""Tag of transfers of bytes, above the tags of any schedule's transfers."""
BUCKET_BYTES = 2**20
"""Size up to which gradients are summed together, as sums take several round trips. For larger
ones, the copies take longer than the sums gain."""
CLOCK_ROUNDS = 8
DRAIN_POLL_SECONDS = 0.001
"""Interval between checks for pending operations."""


class GenerationSession:
    """Transfers and sums among the members of one generation, each on one device.

    Nothing is connected before `connect`, so that `abort` can also end the connecting. If a worker
    is a group of processes, each communicates with the processes of the same rank in all workers;
    only `start_sum_over_all` is over all processes. The worker's own group is connected as well.
    Gloo carries host memory only, so tensors of a GPU pass through pinned buffers. Gloo matches
    transfers by tag, NCCL by their order, so every worker must issue its transfers in an order that
    all of them agree on (that of `schedules.graph.order_transfers`). All methods raise
    CommunicationError, except `abort`, `failure_reason`, `release` and `close`.

    Parameters
    ----------
    links
        The process groups of this process, and the backends that create them.
    store
        Store in which the members find each other: one that all of them share, for NCCL a TCPStore.
    spared
        Function that returns the sockets for other purposes, such as fetching layers, which `abort`
        must leave open.
    """

    def __init__(self, membership: Membership, *, links: GroupCache, device: torch.device, store: Store,
                 spared: Callable[[], Sockets] = frozenset) -> None:
        self.device = device
        self.worker = membership.worker
        self.ordered = links.backend.ordered
        """True if transfers are matched by an order that all workers agree on."""
        self.staged = links.backend is links.host and device.type != "cpu"
        """True if tensors pass through host memory."""
        self._groups = GenerationGroups(links, store, membership.order, membership.peer_process(membership.worker),
                                        spared)
        self._membership = membership
        self._sharers: Mapping[GradientKey, tuple[Worker, ...]] = {}
        self._routes: dict[tuple[Worker, Worker], tuple[Group, int]] = {}
        """Process group of transfers, and the other's rank, by source and target."""
        self._sharer_groups: dict[tuple[Worker, ...], Group] = {}
        self._rank_connection: GroupConnection | None = None
        self._sums: SumTree | None = None
        self._reductions = BackgroundQueue(device, "reductions", enqueues=self.ordered)
        self._sends = BackgroundQueue(device, "sends")
        """Queue of sends through host memory."""
        self._barriers = 0

    def connect(self, sharers: Mapping[GradientKey, Sequence[Worker]] = {}, *,
                pairs: Collection[tuple[Worker, Worker]] | None = None, sums: bool = False, bytes_too: bool = False
                ) -> Self:
        """Connect to the workers that this one communicates with, and return this session.

        Groups of earlier generations are reused.

        Parameters
        ----------
        sharers
            For each range of layers by which this worker reduces gradients, and for each parameter
            that layers share, all live workers that take part in the sum.
        pairs
            Pairs (source, target) of workers between which tensors are sent; None: all pairs. Only
            they connect.
        sums
            True if `start_sum_over_all` will be used.
        bytes_too
            True if `send_bytes` will be used.
        """
        group, groups, links = self._membership.group, self._groups, self._groups.links
        self._sharers = {what: tuple(sorted(members)) for what, members in sharers.items() if len(members) > 1}
        own_pairs = {pair for pair in (permutations(self._membership.ranks, 2) if pairs is None else pairs)
                     if self.worker in pair}
        wanted = [*self._required_groups(own_pairs, bytes_too=bytes_too)]
        if sums:
            self._sums = SumTree(groups, *self._all_processes())
            wanted += self._sums.required_groups()
        if group is not None:
            ranks, mates = f"ranks of {self.worker}", self._membership.processes_of_worker(self.worker)
            wanted.append(GroupSpec(ranks, mates, mates.index(self._membership.peer_process(self.worker)),
                                    links.backend))
        with one_line_errors("connecting to the other workers"):
            groups.create_groups(wanted)
        self._look_up_groups(own_pairs)
        if group is not None:
            self._rank_connection = GroupConnection(groups.get_group(ranks), one_line_errors, self.device, self.staged)
            group.connect(self._rank_connection)
        return self

    def send(self, tensor: Tensor, target: Worker, tag: int) -> OutgoingTensor:
        """Start to send a tensor to a worker; the caller must await the transfer. Gloo matches it
        to a receive by `tag`."""
        payload = tensor.detach().contiguous()
        with one_line_errors(f"sending to worker {target}", (target,)):
            group, rank = self._route_between(self.worker, target)
            work = self._send_staged(group, payload, rank, tag) if self.staged else group.send([payload], rank, tag)
            return OutgoingTensor(work, payload, target)

    def _send_staged(self, group: Group, tensor: Tensor, rank: int, tag: int) -> Future[Work]:
        """Send a tensor through pinned memory once it is computed, without blocking the host."""
        # The future's result is the work of gloo's send, when that has started.
        begun, payload = Future[Work](), torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

        def send() -> None:
            payload.copy_(tensor, non_blocking=True)
            torch.cuda.current_stream(self.device).synchronize()
            try:
                begun.set_result(group.send([payload], rank, tag))
            except RuntimeError as error:
                begun.set_exception(error)

        self._sends.submit(send)
        return begun

    def receive(self, shape: Sequence[int], dtype: torch.dtype, source: Worker, tag: int) -> IncomingTensor:
        """Start to receive a tensor from worker `source`; return the transfer. Gloo matches it to a
        send by `tag`."""
        payload = torch.empty(tuple(shape), dtype=dtype, pin_memory=True) if self.staged \
            else torch.empty(tuple(shape), dtype=dtype, device=self.device)
        with one_line_errors(f"receiving from worker {source}", (source,)):
            group, rank = self._route_between(source, self.worker)
            return IncomingTensor(group.recv([payload], rank, tag), payload, source, self.device)

    def sum_over_sharers(self, what: GradientKey, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all live workers that hold `what`. That is a range of
        layers or a shared parameter."""
        if what not in self._sharers:
            return
        doing = f"summing the gradients of {what if isinstance(what, str) else layers_text(what)}"
        with one_line_errors(doing, self.list_other_sharers(what)):
            carried = [tensor.cpu() for tensor in tensors] if self.staged else list(tensors)
            group, buckets = self._open_sharer_group(what), _bucket_tensors(carried)
            joined = [bucket[0] if len(bucket) == 1 else torch.cat([tensor.flatten() for tensor in bucket])
                      for bucket in buckets]
            for work in [group.allreduce([bucket_sum]) for bucket_sum in joined]:
                work.wait()
        for bucket, totals in zip(buckets, joined, strict=True):
            start = 0
            for tensor in bucket if len(bucket) > 1 else ():
                tensor.copy_(totals.narrow(0, start, tensor.numel()).view_as(tensor))
                start += tensor.numel()
        if self.staged:
            for tensor, total in zip(tensors, carried, strict=True):
                tensor.copy_(total)

    def list_other_sharers(self, what: GradientKey) -> list[Worker]:
        """Return the other live workers that hold a range of layers or a shared parameter."""
        return [sharer for sharer in self._sharers.get(what, ()) if sharer != self.worker]

    def sharer_group(self, layers: LayerRange) -> Group | None:
        """Return the group of all workers that sum the gradients of layers, ascending. Returns None
        if this worker is the only one."""
        return self._open_sharer_group(layers) if layers in self._sharers else None

    def send_bytes(self, data: bytes, layers: GradientKey, target: Worker) -> None:
        """Send bytes in host memory to another worker that sums the gradients of `layers`.
        `connect` must have been given `bytes_too`."""
        with one_line_errors(f"sending to worker {target}", (target,)):
            group, rank = self._bytes_group(layers), self._sharers[layers].index(target)
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            for tensor in (torch.tensor([len(data)]), payload):
                group.send([tensor], rank, BYTES_TAG).wait()

    def receive_bytes(self, layers: GradientKey, source: Worker) -> bytes:
        """Return the bytes that worker `source` sends with `send_bytes`."""
        with one_line_errors(f"receiving from worker {source}", (source,)):
            group, rank = self._bytes_group(layers), self._sharers[layers].index(source)
            length = torch.empty(1, dtype=torch.int64)
            group.recv([length], rank, BYTES_TAG).wait()
            payload = torch.empty(int(length.item()), dtype=torch.uint8)
            group.recv([payload], rank, BYTES_TAG).wait()
            return payload.numpy().tobytes()

    def abort(self) -> None:
        """End the generation: abort its operations, so that calls that wait for others raise. From
        now on `reach_commit_point` raises. Any thread may call this. It returns at once."""
        self._groups.abort()

    def cut_connections(self) -> None:
        """Break connections on purpose, as a network failure would; for tests."""
        self._groups.links.host.cut_connections()

    def raise_if_ended(self) -> None:
        """Raise GenerationEndedError if the generation has ended."""
        self._groups.raise_if_ended()

    def failure_reason(self) -> str | None:
        """Return why this worker's connections have failed, in one line; None if they have not."""
        return self._groups.failure_reason()

    def reach_commit_point(self) -> None:
        """Wait until the device has completed this thread's work, and check that it counts.

        Raises GenerationEndedError if the generation has ended, and CommunicationError if a group
        has failed: results may then be garbage.
        """
        self.wait_for_device()
        self.raise_if_ended()
        error = self.failure_reason()
        if error is not None:
            raise CommunicationError(error)

    def wait_for_device(self) -> None:
        """Wait until a GPU has completed what this thread issued in its current stream.

        Over NCCL, the GPU may wait for other workers, and so does this thread. A thread in this
        call is never abandoned (`runtime.replay.stuck_calls`), because the GPU would still write to
        tensors.
        """
        if self.device.type == "cuda":
            with self.waiting_for_device():
                torch.cuda.current_stream(self.device).synchronize()

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """Register, within the context, that this thread waits for the device.

        Does nothing unless operations are ordered, as over NCCL, where the device waits for the
        other members: otherwise it only computes.
        """
        with _registered_wait("waiting for the device", self._list_others(), on_device=True) if self.ordered \
                else nullcontext():
            yield

    def groups_by_name(self) -> dict[str, Group]:
        """Return the process groups, by name."""
        return self._groups.groups_by_name()

    def is_quiescent(self) -> bool:
        """Return whether no operation of this session can still write to a tensor."""
        return self._groups.is_quiescent()

    def reduce_in_background(self, reduce: Callable[[], None]) -> None:
        """Call `reduce`, which sums gradients, concurrently with compute. Calls run one after the
        other. Raises the error of an earlier reduction."""
        self._reductions.submit(reduce)

    def wait_for_reductions(self) -> None:
        """Wait for all concurrent reductions, and raise the error of any."""
        with _registered_wait("summing gradients", sorted({sharer for sharers in self._sharers.values()
                                                           for sharer in sharers} - {self.worker})):
            self._reductions.wait()
        self.raise_if_ended()  # over NCCL, operations that were aborted end as if they had succeeded

    def reduction_threads(self) -> list[int]:
        """Return the identifier of the thread that sums gradients, in a list, if any."""
        return [] if (thread := self._reductions.thread_ident) is None else [thread]

    def drain(self) -> None:
        """Wait until no operation is pending, which is soon after an abort. The wait has no limit;
        the caller that aborted must watch the time."""
        with _registered_wait("ending sums of gradients"):
            self._reductions.discard_pending()
            self._sends.discard_pending()
        while not self.is_quiescent():
            time.sleep(DRAIN_POLL_SECONDS)
        if self.device.type == "cuda" and self.ordered:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Release this session's groups; those without aborts are kept for the next generation. A
        later `abort` has no effect."""
        self._groups.release()
        if self._membership.group is not None and self._rank_connection is not None:
            self._membership.group.disconnect(self._rank_connection)
        self._routes, self._sharer_groups = {}, {}

    def close(self) -> None:
        """Close the aborted groups in the background. Peers that wait in them get an error."""
        self.release()
        self._groups.close()

    def start_sum_over_all(self, values: Sequence[float]) -> PendingSum:
        """Start to sum each of `values` over all members, concurrently with compute. The object
        returned waits for the sums. `connect` must have been given `sums`."""
        assert self._sums is not None
        return self._sums.start_sum(values)

    def measure_clock_offset(self) -> float:
        """Return the seconds to add to this worker's perf_counter to get the first member's.

        All members must call this at the same time. The first member shares one group with each
        other member, used for nothing else, and answers one member after the other. The offset is
        that of the fastest of a few round trips, as in NTP.
        """
        members, place = self._all_processes()
        specs = [GroupSpec(f"clock of {members[other]}", (members[0], members[other]), min(place, 1),
                           self._groups.links.host) for other in range(1, len(members)) if place in {0, other}]
        with one_line_errors("comparing clocks"):
            self._groups.create_missing(specs)
            for group in [self._groups.get_group(spec.name) for spec in specs]:
                if place > 0:
                    return min(_measure_offset(group) for _ in range(CLOCK_ROUNDS))[1]
                for _ in range(CLOCK_ROUNDS):
                    group.recv([torch.empty(1, dtype=torch.float64)], 1, 0).wait()
                    group.send([torch.tensor([time.perf_counter()], dtype=torch.float64)], 1, 0).wait()
        return 0.0

    def wait_for_all(self) -> None:
        """Wait until all members have called this, and their devices have completed their work."""
        members, _ = self._all_processes()
        if len(members) == 1:
            return
        self._barriers += 1
        keys = self._groups.open_store(f"present {self._barriers} ")
        self.wait_for_device()
        with one_line_errors("waiting for all workers", self._list_others()):
            if keys.add("count", 1) == len(members):
                keys.set("all", b"")
            keys.wait(["all"])

    def _required_groups(self, pairs: Collection[tuple[Worker, Worker]], *, bytes_too: bool) -> Iterator[GroupSpec]:
        """Return the process groups that transfers and sums of this worker need; see `connect`."""
        links = self._groups.links
        for ends in sorted({self._pair_members(pair) for pair in pairs}):
            yield GroupSpec(*self._describe_group(ends, "to"), links.backend, directed=self.ordered)
        for members in sorted(set(self._sharers.values())):
            yield GroupSpec(*self._describe_group(members, "and"), links.backend)
            if bytes_too and self.ordered:
                yield GroupSpec(*self._describe_group(members, "bytes"), links.host)

    def _look_up_groups(self, pairs: Collection[tuple[Worker, Worker]]) -> None:
        """Look up the groups for all sums and transfers once."""
        for source, target in pairs:
            ends = self._pair_members((source, target))
            other = ends.index(source if target == self.worker else target)
            self._routes[source, target] = self._groups.get_group(self._describe_group(ends, "to")[0]), other
        for members in self._sharers.values():
            self._sharer_groups[members] = self._groups.get_group(self._describe_group(members, "and")[0])

    def _pair_members(self, pair: tuple[Worker, Worker]) -> tuple[Worker, ...]:
        return pair if self.ordered else tuple(sorted(pair))

    def _describe_group(self, workers: Sequence[Worker], word: str) -> tuple[str, tuple[str, ...], int]:
        """Return a group's name, its processes' names, and this process's index among them."""
        members = tuple(self._membership.peer_process(worker) for worker in workers)
        return f" {word} ".join(members), members, workers.index(self.worker)

    def _route_between(self, source: Worker, target: Worker) -> tuple[Group, int]:
        return self._require_connection(self._routes.get((source, target)))

    def _open_sharer_group(self, what: GradientKey) -> Group:
        return self._require_connection(self._sharer_groups.get(self._sharers.get(what, ())))

    def _require_connection(self, found: T | None) -> T:
        """Return `found`, which exists while the generation lasts; RuntimeError if it is None."""
        # a transfer could start on connections that were just shut down, and fail only later
        self._groups.raise_if_ended()
        if found is None:
            raise RuntimeError("there is no connection")
        return found

    def _bytes_group(self, layers: GradientKey) -> Group:
        self._groups.raise_if_ended()
        return self._groups.get_group(self._describe_group(self._sharers[layers], "bytes" if self.ordered
                                                           else "and")[0])

    def _list_others(self) -> list[Worker]:
        return [member for member in self._membership.ranks if member != self.worker]

    def _all_processes(self) -> tuple[tuple[str, ...], int]:
        """Return the names of all members' processes, and the index of this one."""
        members = self._membership.all_processes()
        return members, members.index(self._membership.peer_process(self.worker))


@contextmanager
def _registered_wait(what: str, awaited: Collection[Worker] = (), *, on_device: bool = False) -> Iterator[None]:
    """Register, within the context, that this thread waits for a thread, or for the device."""
    # That communicates with the workers in `awaited`. If the other thread is stuck in a process
    # group, both are abandoned.
    OPEN_CALLS.enter_call(what, awaited, on_device=on_device)
    try:
        yield
    finally:
        OPEN_CALLS.leave_call()


def _measure_offset(group: Group) -> tuple[float, float]:
    """Return one round trip's duration, and the offset to the first member's clock."""
    asked, answer = time.perf_counter(), torch.empty(1, dtype=torch.float64)
    group.send([torch.zeros(1, dtype=torch.float64)], 0, 0).wait()
    group.recv([answer], 0, 0).wait()
    answered = time.perf_counter()
    return answered - asked, answer.item() - (asked + answered) / 2


def _bucket_tensors(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group consecutive tensors of one dtype into buckets of up to `BUCKET_BYTES` bytes."""
    # A larger tensor gets a bucket of its own. All workers get the same buckets.
    buckets: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not buckets or tensor.nbytes > room or tensor.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(tensor)
        room -= tensor.nbytes
    return buckets
