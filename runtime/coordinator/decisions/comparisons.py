"""Find copies that differ by their checksums, and workers that read other samples.

If most holders have the same copy, the others are wrong. With two holders, or with the owner and
the buddy of sharded state, it cannot be determined which one is wrong.

If most readers of a sample have the same, the others are wrong. Without a majority, members that
have just joined are (`SampleDifference.with_suspects`), if there are any among the readers and
others, too.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import msgspec
from msgspec.structs import replace

from slipstream.runtime.protocol.to_coordinator import Finished, IterationReport
from slipstream.schedules.schedule import Worker

MAX_NAMES = 8
"""Largest number of layers, or of workers, that a message names."""


class CopyDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of some layers that should be equal but differ."""

    iteration: int
    """Iteration that ran on these copies."""
    layers: tuple[int, ...]
    holders: tuple[Worker, ...]
    """All workers that hold one of the differing copies, right or wrong."""
    wrong: tuple[Worker, ...]
    """Holders whose copy differs from the copy of most holders."""
    spread: bool
    """True if committed iterations may depend on a wrong copy. They do not if the wrong copies are
    known, and are only of optimizer state, which no step has used yet."""

    @property
    def fault(self) -> str:
        """What each of `wrong` has done, as the rest of a sentence."""
        return "held copies that differ from those of most holders"

    def __str__(self) -> str:
        several = "s" if len(self.layers) > 1 else ""
        who = f"worker{'s' if len(self.wrong) > 1 else ''} {_abbreviate_names(self.wrong)} disagreed with most of" \
            if self.wrong \
            else "there is no majority among"
        return (f"copies of layer{several} {_abbreviate_names(self.layers)} differed before iteration "
                f"{self.iteration}: {who} "
                f"workers {_abbreviate_names(self.holders)}")


def find_difference(iteration: int, reports: Iterable[IterationReport | Finished]) -> CopyDifference | None:
    """Return how copies of the state of an iteration differ; None if all are equal.

    They are compared by the checksums in `reports`, which has each member's report on the
    iteration, or on the state with which training has ended before it.
    """
    sums: dict[tuple[int, int, int, bool], dict[Worker, tuple[int, ...]]] = {}
    for report in reports:
        for checksum in report.checksums:
            sums.setdefault(checksum.compared_elements, {})[report.worker] = checksum.sums
    differing = {what: by_worker for what, by_worker in sums.items() if len(set(by_worker.values())) > 1}
    if not differing:
        return None
    wrong, spread = set[Worker](), any(not state for *_, state in differing)
    for by_worker in differing.values():
        (most, count), *_ = Counter(by_worker.values()).most_common(1)
        if 2 * count > len(by_worker):
            wrong |= {worker for worker, copy in by_worker.items() if copy != most}
        else:
            spread = True
    return CopyDifference(iteration=iteration, layers=tuple(sorted({layer for layer, *_ in differing})), spread=spread,
                          holders=tuple(sorted({worker for by_worker in differing.values() for worker in by_worker})),
                          wrong=tuple(sorted(wrong)))


def _abbreviate_names(names: tuple[object, ...]) -> str:
    return ", ".join(map(str, names[:MAX_NAMES])) + (f" and {len(names) - MAX_NAMES} more" if names[MAX_NAMES:] else "")


class SampleDifference(msgspec.Struct, frozen=True, kw_only=True):
    """Readers of an iteration's samples that have, or have dealt, different ones."""

    iteration: int
    what: str
    """What differs, for messages: a sample, or the assignment of samples to micro-batches."""
    readers: tuple[Worker, ...]
    """All workers that were compared, right or wrong."""
    wrong: tuple[Worker, ...]
    """Readers that are known to be wrong."""
    spread: bool = False
    """Always False: no committed iteration depends on a sample of this one."""

    def __str__(self) -> str:
        more = ", ..." if self.readers[MAX_NAMES:] else ""
        named = ", ".join(map(str, self.readers[:MAX_NAMES])) + more
        alone = f"; wrong: {', '.join(map(str, self.wrong[:MAX_NAMES]))}" if self.wrong else ""
        return f"workers {named} have different {self.what} in iteration {self.iteration}{alone}"

    @property
    def fault(self) -> str:
        """What each of `wrong` has done, as the rest of a sentence."""
        return f"had other {self.what} than its peers in iteration {self.iteration}"

    def with_suspects(self, suspects: Collection[Worker]) -> "SampleDifference":
        """Return the difference with those readers that are `suspects` as wrong. Nothing changes if
        some are known to be wrong, or if all readers are suspects."""
        suspected = tuple(reader for reader in self.readers if reader in suspects)
        if self.wrong or len(suspected) == len(self.readers):
            return self
        return replace(self, wrong=suspected)


def find_sample_difference(iteration: int,
                           reports: Iterable[IterationReport]) -> SampleDifference | None:
    """Return how the samples read in an iteration, or their dealing, differ first. `reports` has
    each member's report on the iteration. Returns None if there is no difference."""
    deals: dict[Worker, frozenset[str]] = {}
    digests: dict[tuple[int, int], dict[Worker, frozenset[str]]] = {}
    for report in reports:
        deals[report.worker] = frozenset((report.deal,))
        for sample in report.samples:
            readers = digests.setdefault((sample.pipeline, sample.index), {})
            readers[report.worker] = readers.get(report.worker, frozenset()) | {sample.digest}
    found = _compare_readers(iteration, "assignments of samples to micro-batches", deals)
    for (pipeline, index), readers in sorted(digests.items()):
        what = f"samples for micro-batch {index} of pipeline {pipeline}"
        found = found or _compare_readers(iteration, what, readers)
    return found


def _compare_readers(iteration: int, what: str,
                     digests: Mapping[Worker, frozenset[str]]) -> SampleDifference | None:
    """Return the difference; None if each worker has one thing, and all the same."""
    counts = Counter(digests.values())
    if len(counts) == 1 and all(len(digest) == 1 for digest in counts):
        return None
    (most, count), *_ = counts.most_common(1)
    has_majority = 2 * count > len(digests) and len(most) == 1
    # A worker whose ranks have different ones is wrong in any case.
    wrong = [worker for worker, digest in digests.items()
             if len(digest) > 1 or (has_majority and digest != most)]
    return SampleDifference(iteration=iteration, what=what, readers=tuple(sorted(digests)),
                            wrong=tuple(sorted(wrong)))
