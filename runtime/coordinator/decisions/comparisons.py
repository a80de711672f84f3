"""Find copies that differ by their checksums, and workers that read other samples.

If most holders have the same copy, the others are wrong. With two holders, or with the owner and
the buddy of sharded state, it cannot be determined which one is wrong.

If most readers of a sample have the same data, the others are wrong. Without a majority, those
readers are wrong that have just joined (`SampleDifference.with_suspects`).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from slipstream.runtime.protocol.to_coordinator import Finished, IterationReport
from slipstream.schedules.schedule import Worker

MAX_NAMES = 8
"""Largest number of layers or workers that a message names."""


class CopyDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Difference between copies of layers that should be equal, and who is wrong."""

    iteration: int
    """Iteration that ran on these copies."""
    layers: tuple[int, ...]
    """Layers of which copies differ."""
    holders: tuple[Worker, ...]
    """All workers that hold one of the differing copies, right or wrong."""
    wrong: tuple[Worker, ...]
    """Holders whose copy differs from the copy of most holders; empty without a majority."""
    spread: bool
    """True if committed iterations may depend on a wrong copy."""

    @property
    def fault(self) -> str:
        """Rest of a sentence about a worker of `wrong`: what it has done."""
        return "held copies that differ from those of most holders"

    def __str__(self) -> str:
        who = "there is no majority among"
        if self.wrong:
            workers = "workers" if len(self.wrong) > 1 else "worker"
            who = f"{workers} {_abbreviate_names(self.wrong)} disagreed with most of"
        layers = "layers" if len(self.layers) > 1 else "layer"
        return (
            f"copies of {layers} {_abbreviate_names(self.layers)} differed before iteration "
            f"{self.iteration}: {who} workers {_abbreviate_names(self.holders)}"
        )


def find_difference(
    iteration: int, reports: Iterable[IterationReport | Finished]
) -> CopyDifference | None:
    """Return how copies differ before `iteration`, by the checksums in `reports`; None if equal."""
    # Collect each holder's sums over the same elements.
    sums: dict[tuple[int, int, int, bool], dict[Worker, tuple[int, ...]]] = {}
    for report in reports:
        for checksum in report.checksums:
            sums.setdefault(checksum.compared_elements, {})[report.worker] = checksum.sums
    differing = {
        what: by_worker for what, by_worker in sums.items() if len(set(by_worker.values())) > 1
    }
    if not differing:
        return None
    # Wrong optimizer state alone, if it is known whose, has not been used by any step yet.
    wrong, spread = set[Worker](), any(not state for *_, state in differing)
    for by_worker in differing.values():
        (commonest, count), *_ = Counter(by_worker.values()).most_common(1)
        if 2 * count > len(by_worker):
            wrong |= {worker for worker, copy in by_worker.items() if copy != commonest}
        else:  # no majority: any copy may be the wrong one
            spread = True
    return CopyDifference(
        iteration=iteration,
        layers=tuple(sorted({layer for layer, *_ in differing})),
        spread=spread,
        holders=tuple(sorted({worker for by_worker in differing.values() for worker in by_worker})),
        wrong=tuple(sorted(wrong)),
    )


def _abbreviate_names(names: tuple[object, ...]) -> str:
    return ", ".join(map(str, names[:MAX_NAMES])) + (
        f" and {len(names) - MAX_NAMES} more" if names[MAX_NAMES:] else ""
    )


class SampleDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Difference between workers that should have the same samples, and who is wrong."""

    iteration: int
    what: str
    """What differs, as a noun for messages: samples, or their assignment to micro-batches."""
    readers: tuple[Worker, ...]
    """All workers that were compared, right or wrong."""
    wrong: tuple[Worker, ...]
    """Readers that are known to be wrong; empty if it is not known who is."""
    spread: bool = False
    """Always False: no committed iteration depends on the samples of `iteration`."""

    def __str__(self) -> str:
        more = ", ..." if self.readers[MAX_NAMES:] else ""
        named = ", ".join(map(str, self.readers[:MAX_NAMES])) + more
        alone = f"; wrong: {', '.join(map(str, self.wrong[:MAX_NAMES]))}" if self.wrong else ""
        return f"workers {named} have different {self.what} in iteration {self.iteration}{alone}"

    @property
    def fault(self) -> str:
        """Rest of a sentence about a worker of `wrong`: what it has done."""
        return f"had other {self.what} than its peers in iteration {self.iteration}"

    def with_suspects(self, suspects: Collection[Worker]) -> "SampleDifference":
        """Return the difference with `suspects` as the wrong readers.

        Returns it unchanged if wrong readers are known already, or if all readers are suspects.
        """
        suspected = tuple(reader for reader in self.readers if reader in suspects)
        if self.wrong or len(suspected) == len(self.readers):
            return self
        return replace(self, wrong=suspected)


def find_sample_difference(
    iteration: int, reports: Iterable[IterationReport]
) -> SampleDifference | None:
    """Return the first difference in dealt or read samples between workers; None without one."""
    # All workers deal the same samples, and some read the same.
    deals: dict[Worker, frozenset[str]] = {}
    digests: dict[tuple[int, int], dict[Worker, frozenset[str]]] = {}
    for report in reports:
        deals[report.worker] = frozenset((report.deal,))
        for sample in report.samples:
            readers = digests.setdefault((sample.pipeline, sample.index), {})
            readers[report.worker] = readers.get(report.worker, frozenset()) | {sample.digest}
    # Samples dealt differently are read differently, too: the cause comes first.
    difference = _compare_readers(iteration, "assignments of samples to micro-batches", deals)
    for (pipeline, index), readers in sorted(digests.items()):
        what = f"samples for micro-batch {index} of pipeline {pipeline}"
        difference = difference or _compare_readers(iteration, what, readers)
    return difference


def _compare_readers(
    iteration: int, what: str, digests: Mapping[Worker, frozenset[str]]
) -> SampleDifference | None:
    """Return how digests of `what` differ; None if each worker has only the same."""
    counts = Counter(digests.values())
    if len(counts) == 1 and all(len(digest) == 1 for digest in counts):
        return None
    (commonest, count), *_ = counts.most_common(1)
    has_majority = 2 * count > len(digests) and len(commonest) == 1
    # A worker whose ranks have different digests is wrong in any case.
    wrong = [
        worker
        for worker, digest in digests.items()
        if len(digest) > 1 or (has_majority and digest != commonest)
    ]
    return SampleDifference(
        iteration=iteration, what=what, readers=tuple(sorted(digests)), wrong=tuple(sorted(wrong))
    )
