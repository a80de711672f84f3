"""Combine the messages of a worker's processes into messages of the worker.

A worker of several processes counts as one: it is ready, has run an iteration or has paused when
all of its ranks have. A message that one rank sends for itself passes at once, as all do of a
worker with one process.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from msgspec.structs import replace

from slipstream.runtime.protocol.to_coordinator import (
    NOTHING_HELD,
    Checksum,
    FetchUpToDate,
    Finished,
    IterationReport,
    Paused,
    Published,
    ReadableCheckpoints,
    Ready,
    RecoveryReport,
    StepValidated,
    ToCoordinator,
    TrainingStarted,
    WorkerStatus,
    intersect_held_state,
)
from slipstream.runtime.run_identity import combine_identities
from slipstream.runtime.state.checksum import combined_digest
from slipstream.schedules.schedule import Worker

MessageKey = tuple[type, int, int]
BreakOffCallback = Callable[[Worker, int], None]
"""Function that stops a worker's remaining ranks when one has stopped in an order."""


class RankReports:
    """Collector that combines the messages of a worker's ranks into one message.

    Each worker has `processes` ranks. When a rank reports an error that ends an order, `break_off`
    is called with the worker and the order's number, to make the other ranks stop, too.
    """

    def __init__(self, processes: int, break_off: BreakOffCallback) -> None:
        self._processes = processes
        self._break_off = break_off
        self._open: dict[Worker, dict[MessageKey, dict[int, ToCoordinator]]] = {}
        """Messages of each worker that some ranks have yet to send, by key and rank."""

    def add_message(self, worker: Worker, rank: int, message: ToCoordinator) -> ToCoordinator | None:
        """Add a rank's message; return the worker's once all ranks have sent theirs.

        Returns None until then. A message that a rank sends only for itself is returned at once.
        All ranks send the same `StepValidated`; that of rank 0 is returned.
        """
        processes = self._processes
        if processes == 1:
            return message
        if isinstance(message, StepValidated):
            return message if rank == 0 else None  # all ranks know the same
        key = _find_message_key(message)
        if key is None:
            return message
        pending = self._open.setdefault(worker, {})
        messages = pending.setdefault(key, {})
        messages[rank] = message
        if len(messages) < processes:
            if isinstance(message, Paused) and message.reason is not None:
                self._break_off(worker, message.order)
            return None
        del pending[key]
        if isinstance(message, Paused):  # no further message of this order follows
            self.drop_worker(worker)
        return _combine_messages(list(messages.values()), [messages[number] for number in sorted(messages)])

    @property
    def incomplete_workers(self) -> list[Worker]:
        """Workers of which some ranks, but not all, are ready for an order."""
        return [worker for worker, said in self._open.items() if any(kind is Ready for kind, *_ in said)]

    def drop_worker(self, worker: Worker) -> None:
        """Drop the messages of a worker that is lost, or whose messages are outdated."""
        self._open.pop(worker, None)


def _find_message_key(message: ToCoordinator) -> MessageKey | None:
    """Return a key that all ranks' messages of one kind share. None for those not combined."""
    match message:
        case IterationReport():
            return IterationReport, message.order, message.iteration
        case TrainingStarted() | Paused() | Finished() | Published():
            return type(message), message.order, 0
        case FetchUpToDate():
            return FetchUpToDate, message.fetch, 0
        case Ready() | WorkerStatus() | ReadableCheckpoints():
            return type(message), 0, 0
    return None


def _combine_messages(in_time: Sequence[ToCoordinator], by_rank: Sequence[ToCoordinator]) -> ToCoordinator:
    """Combine the ranks' messages, given in the order of arrival and by rank."""
    first = by_rank[0]
    match first:
        case Ready():
            reports = [one for one in by_rank if isinstance(one, Ready)]
            return replace(first, addresses=tuple(one for report in reports for one in report.addresses),
                           known=_combine_known([report.known for report in reports]),
                           identity=combine_identities(report.identity for report in reports))
        case IterationReport():
            return _combine_ran(first, [one for one in by_rank if isinstance(one, IterationReport)])
        case Paused():
            return _combine_paused(first, [one for one in in_time if isinstance(one, Paused)])
        case Finished():
            finished = [one for one in by_rank if isinstance(one, Finished)]
            return replace(first, digests=_combine_digests([one.digests for one in finished]),
                           checksums=_combine_checksums([one.checksums for one in finished]))
        case ReadableCheckpoints():
            readable = [set(one.iterations) for one in by_rank if isinstance(one, ReadableCheckpoints)]
            return replace(first, iterations=tuple(sorted(set.intersection(*readable))))
        case WorkerStatus():
            busy = [(rank, one) for rank, one in enumerate(by_rank) if isinstance(one, WorkerStatus) and not one.waits]
            if busy:
                return replace(busy[0][1], rank=busy[0][0] if len(busy) == 1 else None)
            awaited = {worker for one in by_rank if isinstance(one, WorkerStatus) for worker in one.awaited}
            return replace(first, awaited=tuple(sorted(awaited)))
    return first


def _combine_ran(first: IterationReport, reports: Sequence[IterationReport]) -> IterationReport:
    """Combine the ranks' reports on one iteration."""
    # Each has the whole loss, but the squared gradients of its own shard. The longest window
    # counts.
    squares = [one.squares for one in reports]
    return replace(first, window_seconds=max(one.window_seconds for one in reports),
                   checksums=_combine_checksums([one.checksums for one in reports]),
                   samples=tuple(sorted({sample for report in reports for sample in report.samples})),
                   deal=" ".join(sorted({report.deal for report in reports})),
                   squares=None if None in squares else math.fsum(one for one in squares if one is not None))


def _combine_checksums(by_rank: Sequence[Sequence[Checksum]]) -> tuple[Checksum, ...]:
    sums: dict[tuple[int, int, int, bool], tuple[int, ...]] = {}
    for one in (one for checksums in by_rank for one in checksums):
        sums[one.compared_elements] = (*sums.get(one.compared_elements, ()), *one.sums)
    return tuple(Checksum(*what, mine) for what, mine in sums.items())


def _combine_paused(first: Paused, reports: Sequence[Paused]) -> Paused:
    """Combine the ranks' reports, in the order of arrival, that they have paused."""
    # The first reason is the cause: later ranks only lost their connections to that one.
    factors = [one.validated for one in reports if one.validated is not None]
    cause = next((one for one in reports if one.reason is not None), first)
    return replace(first, kept=intersect_held_state([one.kept for one in reports]), named=cause.named,
                   validated=max(factors, key=lambda one: one.iteration, default=None),
                   reason=cause.reason, data_end=cause.data_end)


def _combine_known(by_rank: Sequence[RecoveryReport | None]) -> RecoveryReport | None:
    """Combine what ranks report to a new coordinator; None if one has just been started."""
    # If only some have received the last order, nothing is held from which all can continue. All
    # have paused, so none has run anything of that order.
    found = [known for known in by_rank if known is not None]
    if len(found) < len(by_rank):
        return None
    last = max(found, key=lambda one: (one.order, one.iteration))
    same = all(one.order == last.order for one in found)
    factors = [one.validated for one in found if one.validated is not None]
    return replace(last, kept=intersect_held_state([one.kept for one in found]) if same else NOTHING_HELD,
                   behind=any(one.iteration < last.iteration for one in found),
                   doubted=any(one.doubted for one in found),
                   trusted_from=max(one.trusted_from for one in found),
                   pending=any(one.pending for one in found), begun=max(one.begun for one in found),
                   validated=max(factors, key=lambda one: one.iteration, default=None),
                   losses={iteration: loss for one in found for iteration, loss in one.losses.items()})


def _combine_digests(by_rank: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Combine the digests of each parameter's shards."""
    # As in `intersect_held_state`, a parameter that some rank does not report is left out: ranks
    # stopped at different points of an order hold different layers.
    return {name: combined_digest({str(rank): digests[name] for rank, digests in enumerate(by_rank)})
            for name in by_rank[0] if all(name in digests for digests in by_rank)}
