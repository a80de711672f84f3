"""Comparison of copies: finds holders of equal state whose copies differ, from the checksums that they report.

If most holders have the same copy, the others are wrong. With two holders, or with the owner and the buddy of sharded
state, it cannot be determined which one is wrong.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

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
    """True if committed iterations may depend on a wrong copy. If only optimizer state differs and its wrong copies are
    known, no step has used them yet."""

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
    """Compare the copies of the state on which an iteration ran; return the difference, or None if all are equal.

    The copies are compared by the checksums in `reports`, which has each member's report on the iteration, or on the
    state with which training has ended before it.
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
