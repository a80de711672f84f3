"""Comparing copies: whether all who hold some state hold the same, by the checksums that they report.

Where most holders have the same, the others are wrong. With two holders, or where state is sharded, its owner and its
buddy, that cannot be told.
"""

from collections import Counter
from collections.abc import Iterable

import msgspec

from slipstream.runtime.protocol.to_coordinator import Ran
from slipstream.schedules.schedule import Worker

TOLD = 8
"""Layers, or workers, that a line names."""


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Copies of some layers that should be equal, and are not."""

    iteration: int
    """The one that has been run on them."""
    layers: tuple[int, ...]
    holders: tuple[Worker, ...]
    """All who hold what differs."""
    wrong: tuple[Worker, ...]
    """Those of them whose copy is another one than most have."""
    spread: bool
    """Whether committed iterations may rest on what is wrong. Not where it is known whose optimizer state is, and all
    parameters are equal: it was not stepped by yet."""

    def __str__(self) -> str:
        several = "s" if len(self.layers) > 1 else ""
        who = f"worker{'s' if len(self.wrong) > 1 else ''} {_some(self.wrong)} had others than most of" if self.wrong \
            else "nobody can tell who is right of"
        return (f"copies of layer{several} {_some(self.layers)} differed before iteration {self.iteration}: {who} "
                f"workers {_some(self.holders)}")


def find_difference(iteration: int, reports: Iterable[Ran]) -> Difference | None:
    """What differs of the state before an iteration that all members have reported; None: nothing."""
    sums: dict[tuple[int, int, int, bool], dict[Worker, tuple[int, ...]]] = {}
    for report in reports:
        for one in report.checksums:
            sums.setdefault(one.what, {})[report.worker] = one.sums
    differing = {what: mine for what, mine in sums.items() if len(set(mine.values())) > 1}
    if not differing:
        return None
    wrong, spread = set[Worker](), any(not state for *_, state in differing)
    for mine in differing.values():
        (most, count), *_ = Counter(mine.values()).most_common(1)
        if 2 * count > len(mine):
            wrong |= {worker for worker, its in mine.items() if its != most}
        else:
            spread = True
    return Difference(iteration=iteration, layers=tuple(sorted({layer for layer, *_ in differing})), spread=spread,
                      holders=tuple(sorted({worker for mine in differing.values() for worker in mine})),
                      wrong=tuple(sorted(wrong)))


def _some(names: tuple[object, ...]) -> str:
    return ", ".join(map(str, names[:TOLD])) + (f" and {len(names) - TOLD} more" if names[TOLD:] else "")
