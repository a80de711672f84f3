"""Combine the messages of a worker's processes into messages of the worker.

A worker of several processes is ready, has run an iteration or has paused when all of its ranks
have. A message that one rank sends for itself passes at once, as do all of a worker with one
process.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

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
from slipstream.runtime.protocol.to_worker import StepFactor
from slipstream.runtime.run_identity import combine_identities
from slipstream.runtime.state.checksum import combined_digest
from slipstream.schedules.schedule import Worker


class MessageKey(NamedTuple):
    """Key of messages from a worker's ranks; those of equal keys belong together."""

    kind: type
    order: int = 0
    """Number of the order or fetch; 0 if the message belongs to none."""
    iteration: int = 0


BreakOffCallback = Callable[[Worker, int], None]
"""Function that tells a worker's ranks to stop in the order of the given number."""


class RankReports:
    """Collector that combines the messages of a worker's ranks into one message.

    Each worker has `processes` ranks. When a rank reports an error that ends an order, `break_off`
    is called, to make the other ranks stop, too.
    """

    def __init__(self, processes: int, break_off: BreakOffCallback) -> None:
        self._processes = processes
        self._break_off = break_off
        self._open: dict[Worker, dict[MessageKey, dict[int, ToCoordinator]]] = {}
        """Messages that only some ranks of a worker have sent, by worker, key and rank."""

    def add_message(
        self, worker: Worker, rank: int, message: ToCoordinator
    ) -> ToCoordinator | None:
        """Add a rank's message; return the worker's message, or None while ranks are missing.

        Of a `StepValidated`, only that of rank 0 is returned. When all ranks have paused, other
        uncombined messages of the worker are dropped.
        """
        # What needs no combination passes at once.
        if self._processes == 1:
            return message
        if isinstance(message, StepValidated):
            return message if rank == 0 else None  # all ranks know the same
        key = _find_message_key(message)
        if key is None:
            return message
        # Keep it until all ranks have sent theirs.
        pending = self._open.setdefault(worker, {})
        messages = pending.setdefault(key, {})
        messages[rank] = message
        if len(messages) < self._processes:
            # The other ranks would wait for this one until their timeout.
            if isinstance(message, Paused) and message.reason is not None:
                self._break_off(worker, message.order)
            return None
        del pending[key]
        if isinstance(message, Paused):  # no further message of this order follows
            self.drop_worker(worker)
        return _combine_messages(
            list(messages.values()), [messages[number] for number in sorted(messages)]
        )

    @property
    def incomplete_workers(self) -> list[Worker]:
        """Workers of which some ranks, but not all, are ready for an order."""
        ready = MessageKey(Ready)
        return [worker for worker, pending in self._open.items() if ready in pending]

    def drop_worker(self, worker: Worker) -> None:
        """Drop the uncombined messages of a worker that is lost, or whose messages are outdated."""
        self._open.pop(worker, None)


def _find_message_key(message: ToCoordinator) -> MessageKey | None:
    match message:
        case IterationReport():
            return MessageKey(IterationReport, message.order, message.iteration)
        case TrainingStarted() | Paused() | Finished() | Published():
            return MessageKey(type(message), message.order)
        case FetchUpToDate():
            return MessageKey(FetchUpToDate, message.fetch)
        case Ready() | WorkerStatus() | ReadableCheckpoints():
            return MessageKey(type(message))
    return None


M = TypeVar("M", bound=ToCoordinator)


def _select_kind(messages: Sequence[ToCoordinator], kind: type[M]) -> list[M]:
    return [message for message in messages if isinstance(message, kind)]


def _combine_messages(
    in_time: Sequence[ToCoordinator], by_rank: Sequence[ToCoordinator]
) -> ToCoordinator:
    # What differs between ranks is combined; all else is equal, so the first rank's message has it.
    first = by_rank[0]
    match first:
        case Ready():
            return _combine_ready(first, _select_kind(by_rank, Ready))
        case IterationReport():
            return _combine_iteration(first, _select_kind(by_rank, IterationReport))
        case Paused():
            return _combine_paused(first, _select_kind(in_time, Paused))
        case Finished():
            reports = _select_kind(by_rank, Finished)
            return replace(
                first,
                digests=_combine_digests([report.digests for report in reports]),
                checksums=_combine_checksums([report.checksums for report in reports]),
            )
        # Each rank reads its own files, so all must be able to read a checkpoint.
        case ReadableCheckpoints():
            readable = [
                set(report.iterations) for report in _select_kind(by_rank, ReadableCheckpoints)
            ]
            return replace(first, iterations=tuple(sorted(set.intersection(*readable))))
        case WorkerStatus():
            return _combine_statuses(first, _select_kind(by_rank, WorkerStatus))
    return first


def _combine_ready(first: Ready, reports: Sequence[Ready]) -> Ready:
    addresses = tuple(address for report in reports for address in report.addresses)
    return replace(
        first,
        addresses=addresses,
        known=_combine_recovery_reports([report.known for report in reports]),
        identity=combine_identities(report.identity for report in reports),
    )


def _combine_statuses(first: WorkerStatus, statuses: Sequence[WorkerStatus]) -> WorkerStatus:
    """Return the first busy rank's status or, if all wait, `first`, with all awaited."""
    # The others may wait for the busy rank, inside a layer. It is named if no other is busy.
    busy_ranks = [rank for rank, status in enumerate(statuses) if not status.waits]
    if busy_ranks:
        alone = len(busy_ranks) == 1
        return replace(statuses[busy_ranks[0]], rank=busy_ranks[0] if alone else None)
    awaited = {worker for status in statuses for worker in status.awaited}
    return replace(first, awaited=tuple(sorted(awaited)))


def _combine_iteration(
    first: IterationReport, reports: Sequence[IterationReport]
) -> IterationReport:
    # Each has the whole loss, but the squared gradients of its own shard. The longest window
    # counts.
    squares = [report.squares for report in reports if report.squares is not None]
    all_finite = len(squares) == len(reports)
    return replace(
        first,
        window_seconds=max(report.window_seconds for report in reports),
        checksums=_combine_checksums([report.checksums for report in reports]),
        samples=tuple(sorted({sample for report in reports for sample in report.samples})),
        deal=" ".join(sorted({report.deal for report in reports})),
        squares=math.fsum(squares) if all_finite else None,
    )


def _combine_checksums(by_rank: Sequence[Sequence[Checksum]]) -> tuple[Checksum, ...]:
    sums: dict[tuple[int, int, int, bool], tuple[int, ...]] = {}
    for checksum in itertools.chain.from_iterable(by_rank):
        elements = checksum.compared_elements
        sums[elements] = (*sums.get(elements, ()), *checksum.sums)
    return tuple(Checksum(*elements, rank_sums) for elements, rank_sums in sums.items())


def _combine_paused(first: Paused, reports: Sequence[Paused]) -> Paused:
    """Combine the ranks' reports of a pause, sorted by arrival; `first` is rank 0's."""
    # The first reason is the cause: later ranks only lost their connections to that one.
    cause = next((report for report in reports if report.reason is not None), first)
    return replace(
        first,
        kept=intersect_held_state([report.kept for report in reports]),
        named=cause.named,
        validated=_find_latest_factor([report.validated for report in reports]),
        reason=cause.reason,
        data_end=cause.data_end,
    )


def _find_latest_factor(factors: Sequence[StepFactor | None]) -> StepFactor | None:
    return max(
        (factor for factor in factors if factor is not None),
        key=lambda factor: factor.iteration,
        default=None,
    )


def _combine_recovery_reports(by_rank: Sequence[RecoveryReport | None]) -> RecoveryReport | None:
    """Combine the ranks' reports for a new coordinator; None if some rank has none."""
    # A rank without a report has just been started, and holds nothing.
    reports = [report for report in by_rank if report is not None]
    if len(reports) < len(by_rank):
        return None
    last = max(reports, key=lambda report: (report.order, report.iteration))
    # If only some have received the last order, nothing is held from which all can continue. All
    # have paused, so none has run anything of that order.
    kept = NOTHING_HELD
    if all(report.order == last.order for report in reports):
        kept = intersect_held_state([report.kept for report in reports])
    # For the rest, the doubt of one rank counts, and so does the knowledge of one.
    losses: dict[int, float] = {}
    for report in reports:
        losses.update(report.losses)
    return replace(
        last,
        kept=kept,
        behind=any(report.iteration < last.iteration for report in reports),
        doubted=any(report.doubted for report in reports),
        trusted_from=max(report.trusted_from for report in reports),
        pending=any(report.pending for report in reports),
        begun=max(report.begun for report in reports),
        validated=_find_latest_factor([report.validated for report in reports]),
        losses=losses,
    )


def _combine_digests(by_rank: Sequence[Mapping[str, str]]) -> dict[str, str]:
    # As in `intersect_held_state`, a parameter that some rank does not report is left out: ranks
    # stopped at different points of an order hold different layers.
    combined = {}
    for name in by_rank[0]:
        if all(name in digests for digests in by_rank):
            of_ranks = {str(rank): digests[name] for rank, digests in enumerate(by_rank)}
            combined[name] = combined_digest(of_ranks)
    return combined
