"""Cost fit: what samples cost by the lengths of their documents follows, slowly, what ops are measured to take.

The job file has coefficients of each layer (`[training.length_costs]`), from another machine, perhaps, or from ops that
ran alone. Workers report sums of what theirs took (`schedules.dealing.fit`), which are fitted here. What of a slice is
other than known is divided over its layers by what each is known to take. All members deal an iteration by the same
coefficients: new ones go out with what acknowledges the iteration `LEAD` before, and with each order.
"""

import math
from collections.abc import Iterable, Iterator, Mapping

import msgspec
import numpy as np
from msgspec.structs import replace

from slipstream.runtime.config import LengthCosts
from slipstream.runtime.protocol.to_coordinator import Ran
from slipstream.runtime.replay.dealt_samples import kinds_of, of_op
from slipstream.runtime.replay.placement import Placement
from slipstream.schedules.dealing import Coefficients, Summed
from slipstream.schedules.dealing.arrays import COSTS
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import OpKind, Schedule

EVERY = 16
"""Iterations from one fit to the next."""
KEPT = 0.75
"""What was measured before a fit counts so much less for the next: a quarter of what counts is of the last `EVERY`."""
PRIOR_OPS = 16.0
"""As much as so many ops, the job file counts."""
LEAST_GAIN = 0.01
"""By which costs must be nearer to what is measured, as a share of it, before anything changes."""
LEAD = 3
"""A worker that begins an iteration deals the next one, and knows what acknowledged the one before the last."""

Cell = tuple[OpKind, LayerRange]


class CostFit(msgspec.Struct, frozen=True, kw_only=True):
    """What is known in one run."""

    known: LengthCosts
    """The job file's coefficients."""
    placement: Placement
    """Where the schedules' layers lie in the model."""
    current: LengthCosts
    """What samples are dealt by, from an order's begin or an iteration on that all members are told."""
    sums: Mapping[Cell, np.ndarray] = {}
    next: int | None = None
    error: float = 0.0
    error_before: float = 0.0
    """Of the last change: the root of the mean square of (fitted / measured - 1), with it and before it."""

    def ran(self, reports: Iterable[Ran], schedule: Schedule) -> "CostFit":
        """With workers' reports of an iteration by a schedule."""
        sums = dict(self.sums)
        for time in (time for report in reports for time in report.times):
            if time.sums is not None and time.slice in range(len(schedule.layers_by_slice)):
                cell = time.kind, self.placement.range_of(schedule.layers_of(time.slice))
                sums[cell] = sums.get(cell, 0.0) + np.asarray(time.sums)
        return replace(self, sums=sums)

    def look(self, iteration: int) -> "CostFit":
        """With other coefficients as `current`, where there are better ones. `iteration` is the next to be committed.
        """
        if self.next is not None and iteration < self.next:
            return self
        new = replace(self, next=iteration + EVERY)
        return new if self.next is None else new._refitted()

    def _refitted(self) -> "CostFit":
        counting = {cell: sums for cell, sums in self.sums.items() if sums[-1] >= 1}
        new = replace(self, sums={cell: sums * KEPT for cell, sums in counting.items()})
        # What takes no time, by the job file, is left at that.
        summed = {cell: Summed(sums) for cell, sums in counting.items() if any(of_op(self.known, *cell))}
        fitted = self._fitted(summed)
        ops = sum(one.ops for one in summed.values())
        if not ops:
            return new
        before, after = (math.sqrt(sum(one.error(of_op(known, *cell)) for cell, one in summed.items()) / ops)
                         for known in (self.current, fitted))
        if before - after < LEAST_GAIN:
            return new
        return replace(new, current=fitted, error=after, error_before=before)

    def _fitted(self, summed: dict[Cell, Summed]) -> LengthCosts:
        """The job file's coefficients, each with the mean, by ops, of what slices with its layer are other than known.
        """
        known = {kind: np.array(self.known.of(kind)) for kind in COSTS}
        changes = {kind: np.zeros_like(one) for kind, one in known.items()}
        ops = {kind: np.zeros(len(one)) for kind, one in known.items()}
        for (kind, layers), one in summed.items():
            of_slice = of_op(self.known, kind, layers)
            fitted = one.fit(of_slice, PRIOR_OPS)
            for part, layer in self._parts(kind, layers):
                share = one.share(self.known.of(part)[layer]) / one.share(of_slice)
                changes[part][layer] += one.ops * share * (np.array(fitted) - of_slice)
                ops[part][layer] += one.ops
        found = {kind: tuple(_coefficients(np.maximum(0.0, one + changes[kind] / np.maximum(1.0, ops[kind])[:, None])))
                 for kind, one in known.items()}
        return replace(self.known, forward=found[OpKind.F], backward_input=found[OpKind.I],
                       backward_weight=found[OpKind.W])

    def _parts(self, kind: OpKind, layers: LayerRange) -> Iterator[tuple[OpKind, int]]:
        return ((part, layer) for part in kinds_of(kind, layers) for layer in range(*layers))


def _coefficients(rows: np.ndarray) -> Iterator[Coefficients]:
    return ((a, b, c) for a, b, c in rows.tolist())
