"""Communicate as one worker in one generation.

Results count only after `GenerationSession.reach_commit_point`: over NCCL, calls return at once,
and after an abort all later operations run on garbage. The idea comes from torchft's manager, which
synchronizes, asks for errors, and then votes.
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

from slipstream.runtime.errors import first_line
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
"""Largest size in bytes of gradients that are copied together to be summed at once."""
CLOCK_ROUNDS = 8
"""Number of round trips by which two clocks are compared; the fastest counts."""
DRAIN_POLL_SECONDS = 0.001
"""Seconds between checks for pending operations."""


class GenerationSession:
    """Transfers and sums between one member of a generation and the others.

    Nothing is connected before `connect`, so that `abort` can also end the connecting. If a worker
    has several processes, each communicates with the processes of its rank in all workers; only
    `start_sum_over_all`, `wait_for_all` and `measure_clock_offset` are over all processes. Gloo
    carries host memory only, so tensors of a GPU pass through pinned buffers. Gloo matches
    transfers by tag, NCCL by their order, so every worker must start its transfers in an order that
    all workers agree on (`schedules.graph.order_transfers`). Methods that communicate raise
    CommunicationError, and AbandonedError if their thread was abandoned meanwhile.

    Parameters
    ----------
    links
        The process groups of this process, and the backends that create them.
    store
        Store that all members share, for NCCL a TCPStore.
    exempt_sockets
        Function that returns the sockets for other purposes, which `abort` must leave open.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        links: GroupCache,
        device: torch.device,
        store: Store,
        exempt_sockets: Callable[[], Sockets] = frozenset,
    ) -> None:
        self.device = device
        self.worker = membership.worker
        self.ordered = links.backend.ordered
        """True if sends and receives are paired by their order, False if by tags."""
        self.staged = links.backend is links.host and device.type != "cpu"
        """True if tensors pass through host memory."""
        own_process = membership.peer_process(membership.worker)
        self._groups = GenerationGroups(links, store, membership.order, own_process, exempt_sockets)
        self._membership = membership
        # Nothing is connected yet: `connect` sets these.
        self._sharers: Mapping[GradientKey, tuple[Worker, ...]] = {}
        self._routes: dict[tuple[Worker, Worker], tuple[Group, int]] = {}
        """Process group of transfers, and the other worker's rank in it, by source and target."""
        self._sharer_groups: dict[tuple[Worker, ...], Group] = {}
        self._rank_connection: GroupConnection | None = None
        self._sums: SumTree | None = None
        self._reductions = BackgroundQueue(device, "reductions", enqueues=self.ordered)
        self._sends = BackgroundQueue(device, "sends")
        self._barriers = 0

    def connect(
        self,
        sharers: Mapping[GradientKey, Sequence[Worker]] = {},
        *,
        pairs: Collection[tuple[Worker, Worker]] | None = None,
        sums: bool = False,
        bytes_too: bool = False,
    ) -> Self:
        """Connect to the workers that this one communicates with, and return this session.

        Parameters
        ----------
        sharers
            All live holders of each range of layers, and of each shared parameter.
        pairs
            Pairs (source, target) of workers between which tensors are sent; None: all pairs.
        sums
            True if `start_sum_over_all` will be used.
        bytes_too
            True if `send_bytes` will be used.
        """
        group, groups, links = self._membership.group, self._groups, self._groups.links
        # A worker that holds layers alone sums nothing.
        self._sharers = {
            what: tuple(sorted(members)) for what, members in sharers.items() if len(members) > 1
        }
        all_pairs = permutations(self._membership.ranks, 2) if pairs is None else pairs
        own_pairs = {pair for pair in all_pairs if self.worker in pair}

        # List all groups first: every process must create them in the same order.
        specs = [*self._required_groups(own_pairs, bytes_too=bytes_too)]
        if sums:
            self._sums = SumTree(groups, *self._all_processes())
            specs += self._sums.required_groups()
        ranks_name = f"ranks of {self.worker}"
        if group is not None:
            mates = self._membership.processes_of_worker(self.worker)
            own_rank = mates.index(self._membership.peer_process(self.worker))
            specs.append(GroupSpec(ranks_name, mates, own_rank, links.backend))
        with one_line_errors("connecting to the other workers"):
            groups.create_groups(specs)

        # Look each group up once, not at every transfer.
        self._look_up_groups(own_pairs)
        if group is not None:
            self._rank_connection = GroupConnection(
                groups.get_group(ranks_name), one_line_errors, self.device, self.staged
            )
            group.connect(self._rank_connection)
        return self

    def send(self, tensor: Tensor, target: Worker, tag: int) -> OutgoingTensor:
        """Start to send a tensor to a worker; the caller must `wait` for the result.

        Until then the tensor must not change. Over gloo, the receiver must use the same tag; NCCL
        ignores it.
        """
        payload = tensor.detach().contiguous()
        with one_line_errors(f"sending to worker {target}", (target,)):
            group, rank = self._route_between(self.worker, target)
            work = (
                self._send_staged(group, payload, rank, tag)
                if self.staged
                else group.send([payload], rank, tag)
            )
            return OutgoingTensor(work, payload, target)

    def _send_staged(self, group: Group, tensor: Tensor, rank: int, tag: int) -> Future[Work]:
        """Send a tensor through pinned memory once it is computed, without blocking the host."""
        # The future's result is the work of gloo's send, when that has started.
        future = Future[Work]()
        payload = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

        def send() -> None:
            payload.copy_(tensor, non_blocking=True)
            # Gloo reads host memory at once, so the copy must have ended.
            torch.cuda.current_stream(self.device).synchronize()
            try:
                future.set_result(group.send([payload], rank, tag))
            except RuntimeError as error:
                future.set_exception(error)

        def fail(error: BaseException) -> None:
            # Else the thread that awaits the send would wait for the whole timeout.
            if not future.done():
                future.set_exception(RuntimeError(first_line(error)))

        self._sends.submit(send, fail)
        return future

    def receive(
        self, shape: Sequence[int], dtype: torch.dtype, source: Worker, tag: int
    ) -> IncomingTensor:
        """Start to receive a tensor of this shape and dtype; return the transfer.

        Over gloo, the sender must use the same tag; NCCL ignores it.
        """
        payload = (
            torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
            if self.staged
            else torch.empty(tuple(shape), dtype=dtype, device=self.device)
        )
        with one_line_errors(f"receiving from worker {source}", (source,)):
            group, rank = self._route_between(source, self.worker)
            return IncomingTensor(group.recv([payload], rank, tag), payload, source, self.device)

    def sum_over_sharers(self, what: GradientKey, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by their sums over the live holders of layers or a shared parameter.

        Does nothing if there is one holder. Over NCCL only the current stream waits, not the host.
        """
        if what not in self._sharers:
            return  # nobody else holds it
        doing = f"summing the gradients of {what if isinstance(what, str) else layers_text(what)}"
        with one_line_errors(doing, self.list_other_sharers(what)):
            operands = list(tensors)
            if self.staged:
                operands = [tensor.cpu() for tensor in tensors]
            # Many small tensors cost a message each, so they are summed in buckets.
            group, buckets = self._open_sharer_group(what), _bucket_tensors(operands)
            totals = [_join_bucket(bucket) for bucket in buckets]
            # All sums are started before the first is awaited, so that they overlap.
            for work in [group.allreduce([total]) for total in totals]:
                work.wait()

        # Divide the sums of buckets again; the sum of a single tensor is in place.
        for bucket, total in zip(buckets, totals, strict=True):
            start = 0
            for tensor in bucket if len(bucket) > 1 else ():
                tensor.copy_(total.narrow(0, start, tensor.numel()).view_as(tensor))
                start += tensor.numel()
        if self.staged:
            for tensor, operand in zip(tensors, operands, strict=True):
                tensor.copy_(operand)

    def list_other_sharers(self, what: GradientKey) -> list[Worker]:
        """Return the other live holders of layers or of a shared parameter."""
        return [sharer for sharer in self._sharers.get(what, ()) if sharer != self.worker]

    def sharer_group(self, layers: LayerRange) -> Group | None:
        """Return the process group of the holders of layers; None for a single holder.

        Raises GenerationEndedError if the generation has ended.
        """
        return self._open_sharer_group(layers) if layers in self._sharers else None

    def send_bytes(self, data: bytes, layers: GradientKey, target: Worker) -> None:
        """Send bytes to another holder of `layers`, and wait until they are sent.

        `data` must not be empty. Needs `connect(bytes_too=True)`.
        """
        with one_line_errors(f"sending to worker {target}", (target,)):
            group, rank = self._bytes_group(layers), self._sharers[layers].index(target)
            payload = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            # The length goes first: the receiver allocates by it.
            for tensor in (torch.tensor([len(data)]), payload):
                group.send([tensor], rank, BYTES_TAG).wait()

    def receive_bytes(self, layers: GradientKey, source: Worker) -> bytes:
        """Wait for bytes from another holder of `layers`, and return them.

        The worker `source` sends them with `send_bytes`. Needs `connect(bytes_too=True)`.
        """
        with one_line_errors(f"receiving from worker {source}", (source,)):
            group, rank = self._bytes_group(layers), self._sharers[layers].index(source)
            length = torch.empty(1, dtype=torch.int64)
            group.recv([length], rank, BYTES_TAG).wait()
            payload = torch.empty(int(length.item()), dtype=torch.uint8)
            group.recv([payload], rank, BYTES_TAG).wait()
            return payload.numpy().tobytes()

    def abort(self) -> None:
        """End the generation: calls that wait raise an error. Returns at once, in any thread."""
        self._groups.abort()

    def cut_connections(self) -> None:
        """Break all gloo connections on purpose, as a network failure would; for tests."""
        self._groups.links.host.cut_connections()

    def raise_if_ended(self) -> None:
        """Raise GenerationEndedError if the generation has ended."""
        self._groups.raise_if_ended()

    def failure_reason(self) -> str | None:
        """Return, in one line, why a connection has failed here; None if none has."""
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
        """Wait until a GPU has completed what this thread issued in its current stream."""
        # A thread in this wait is never abandoned, because the GPU would still write to tensors.
        if self.device.type == "cuda":
            with self.waiting_for_device():
                torch.cuda.current_stream(self.device).synchronize()

    @contextmanager
    def waiting_for_device(self) -> Iterator[None]:
        """Over NCCL, register within the context that this thread waits for the device."""
        # Over NCCL the device may wait for other members. With tags it only computes.
        with (
            _registered_wait("waiting for the device", self._list_others(), on_device=True)
            if self.ordered
            else nullcontext()
        ):
            yield

    def groups_by_name(self) -> dict[str, Group]:
        """Return the process groups, by name."""
        return self._groups.groups_by_name()

    def is_quiescent(self) -> bool:
        """Return whether no operation of this session can still write to a tensor."""
        return self._groups.is_quiescent()

    def reduce_in_background(self, reduce: Callable[[], None]) -> None:
        """Call `reduce`, which sums gradients, while ops go on; such calls run in turn.

        Raises the error of an earlier call or, over NCCL, of this one.
        """
        self._reductions.submit(reduce)

    def wait_for_reductions(self) -> None:
        """Wait for all calls of `reduce_in_background`; raise the error of one that failed.

        Also raises GenerationEndedError if the generation has ended, and AbandonedError if this
        thread was abandoned meanwhile.
        """
        # Any other holder of this worker's layers may be the one that is late.
        sharers = {sharer for sharers in self._sharers.values() for sharer in sharers}
        with _registered_wait("summing gradients", sorted(sharers - {self.worker})):
            self._reductions.wait()
        # Over NCCL, operations that were aborted end as if they had succeeded.
        self.raise_if_ended()

    def reduction_threads(self) -> list[int]:
        """Return the identifier of the thread that sums gradients, in a list; empty without one."""
        return [] if (thread := self._reductions.thread_ident) is None else [thread]

    def drain(self) -> None:
        """Wait, without limit, until no operation is pending, after `abort` or the last op.

        Reductions and sends that have not begun are dropped. Raises AbandonedError if this thread
        was abandoned meanwhile.
        """
        with _registered_wait("ending sums of gradients"):
            self._reductions.discard_pending()
            self._sends.discard_pending()
        while not self.is_quiescent():
            time.sleep(DRAIN_POLL_SECONDS)
        # Kernels queued behind the aborted operations still write to tensors.
        if self.device.type == "cuda" and self.ordered:
            torch.cuda.synchronize(self.device)

    def release(self) -> None:
        """Leave the groups in which nothing was aborted to the next generation.

        A later `abort` aborts no operation.
        """
        self._groups.release()
        # The worker's own processes must not use an old generation's group.
        if self._membership.group is not None and self._rank_connection is not None:
            self._membership.group.disconnect(self._rank_connection)
        self._routes, self._sharer_groups = {}, {}

    def close(self) -> None:
        """Call `release`, and close the aborted groups in the background.

        Members that wait in these groups get an error.
        """
        self.release()
        self._groups.close()

    def start_sum_over_all(self, values: Sequence[float]) -> PendingSum:
        """Start to sum each of `values` over all processes, and return the pending sums.

        Needs `connect(sums=True)`. All processes call this in the same order.
        """
        assert self._sums is not None
        return self._sums.start_sum(values)

    def measure_clock_offset(self) -> float:
        """Return by how many seconds the first process's perf_counter is ahead of this one's.

        In the first process, it is 0. All processes of all members call this together.
        """
        # The first member shares one group with each other member, used for nothing else, and
        # answers one member after the other.
        members, place = self._all_processes()
        specs = [
            GroupSpec(
                f"clock of {members[other]}",
                (members[0], members[other]),
                min(place, 1),
                self._groups.links.host,
            )
            for other in range(1, len(members))
            if place in {0, other}
        ]
        with one_line_errors("comparing clocks"):
            self._groups.create_missing(specs)
            for group in [self._groups.get_group(spec.name) for spec in specs]:
                # The fastest round trip has the smallest error.
                if place > 0:
                    return min(_measure_offset(group) for _ in range(CLOCK_ROUNDS))[1]
                for _ in range(CLOCK_ROUNDS):
                    group.recv([torch.empty(1, dtype=torch.float64)], 1, 0).wait()
                    group.send(
                        [torch.tensor([time.perf_counter()], dtype=torch.float64)], 1, 0
                    ).wait()
        return 0.0

    def wait_for_all(self) -> None:
        """Wait until all processes, if several, have called this and their devices are done."""
        members, _ = self._all_processes()
        if len(members) == 1:
            return
        # Each barrier has keys of its own, as keys are set once.
        self._barriers += 1
        keys = self._groups.open_store(f"present {self._barriers} ")
        self.wait_for_device()
        with one_line_errors("waiting for all workers", self._list_others()):
            # The last member to come releases all.
            if keys.add("count", 1) == len(members):
                keys.set("all", b"")
            keys.wait(["all"])

    def _required_groups(
        self, pairs: Collection[tuple[Worker, Worker]], *, bytes_too: bool
    ) -> Iterator[GroupSpec]:
        # One for each pair that exchanges tensors, one for each set of workers that sum gradients.
        links = self._groups.links
        for ends in sorted({self._pair_members(pair) for pair in pairs}):
            yield GroupSpec(*self._describe_group(ends, "to"), links.backend, directed=self.ordered)
        for members in sorted(set(self._sharers.values())):
            yield GroupSpec(*self._describe_group(members, "and"), links.backend)
            # NCCL carries device memory only, so bytes take a group over gloo.
            if bytes_too and self.ordered:
                yield GroupSpec(*self._describe_group(members, "bytes"), links.host)

    def _look_up_groups(self, pairs: Collection[tuple[Worker, Worker]]) -> None:
        for source, target in pairs:
            ends = self._pair_members((source, target))
            other = ends.index(source if target == self.worker else target)
            self._routes[source, target] = (
                self._groups.get_group(self._describe_group(ends, "to")[0]),
                other,
            )
        for members in self._sharers.values():
            self._sharer_groups[members] = self._groups.get_group(
                self._describe_group(members, "and")[0]
            )

    def _pair_members(self, pair: tuple[Worker, Worker]) -> tuple[Worker, ...]:
        # With tags, one group serves both directions.
        return pair if self.ordered else tuple(sorted(pair))

    def _describe_group(
        self, workers: Sequence[Worker], word: str
    ) -> tuple[str, tuple[str, ...], int]:
        """Return a group's name, joined by `word`, its processes' names, and this one's index."""
        members = tuple(self._membership.peer_process(worker) for worker in workers)
        return f" {word} ".join(members), members, workers.index(self.worker)

    def _route_between(self, source: Worker, target: Worker) -> tuple[Group, int]:
        return self._require_connection(self._routes.get((source, target)))

    def _open_sharer_group(self, what: GradientKey) -> Group:
        return self._require_connection(self._sharer_groups.get(self._sharers.get(what, ())))

    def _require_connection(self, connection: T | None) -> T:
        """Return `connection`. Raises RuntimeError if it is None or the generation has ended."""
        # A transfer could start on connections that were just shut down, and fail only later.
        self._groups.raise_if_ended()
        if connection is None:
            raise RuntimeError("there is no connection")
        return connection

    def _bytes_group(self, layers: GradientKey) -> Group:
        self._groups.raise_if_ended()
        return self._groups.get_group(
            self._describe_group(self._sharers[layers], "bytes" if self.ordered else "and")[0]
        )

    def _list_others(self) -> list[Worker]:
        return [member for member in self._membership.ranks if member != self.worker]

    def _all_processes(self) -> tuple[tuple[str, ...], int]:
        """Return the names of all members' processes, and the index of this one."""
        members = self._membership.all_processes()
        return members, members.index(self._membership.peer_process(self.worker))


@contextmanager
def _registered_wait(
    what: str, awaited: Collection[Worker] = (), *, on_device: bool = False
) -> Iterator[None]:
    """Register, within the context, that this thread waits for workers, or for the device."""
    # If the other thread, which communicates with the workers in `awaited`, is stuck in a process
    # group, both are abandoned.
    OPEN_CALLS.enter_call(what, awaited, on_device=on_device)
    try:
        yield
    finally:
        OPEN_CALLS.leave_call()


def _measure_offset(group: Group) -> tuple[float, float]:
    """Return the seconds of a round trip, and how far rank 0's clock is ahead."""
    start, answer = time.perf_counter(), torch.empty(1, dtype=torch.float64)
    group.send([torch.zeros(1, dtype=torch.float64)], 0, 0).wait()
    group.recv([answer], 0, 0).wait()
    end = time.perf_counter()
    # As in NTP: the other clock was read in the middle of the round trip.
    return end - start, answer.item() - (start + end) / 2


def _join_bucket(bucket: Sequence[Tensor]) -> Tensor:
    if len(bucket) == 1:
        return bucket[0]
    return torch.cat([tensor.flatten() for tensor in bucket])


def _bucket_tensors(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group consecutive tensors of one dtype into buckets of up to `BUCKET_BYTES`."""
    # A larger tensor gets a bucket of its own, as its copy would cost more than it saves. All
    # workers get the same buckets.
    buckets: list[list[Tensor]] = []
    room = 0
    for tensor in tensors:
        if not buckets or tensor.nbytes > room or tensor.dtype != buckets[-1][0].dtype:
            buckets.append([])
            room = BUCKET_BYTES
        buckets[-1].append(tensor)
        room -= tensor.nbytes
    return buckets
