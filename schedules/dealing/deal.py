"""Choose a sample for each micro-batch: a pure function of schedule, costs, seed and swaps."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.schedules.dealing.arrays import arrays_of, shares_of
from slipstream.schedules.dealing.kernel import Ints, improve_by_swaps, replay_iteration
from slipstream.schedules.schedule import Schedule

UNIT = 10**6
"""Number of integer units in a cost of 1, which is the mean.

Costs are rounded to millionths. All numbers after that are integers, so that all machines get the
same result.
"""
MAX_COST = 1000
"""Highest cost of a sample, as a multiple of the mean."""
STEPS_PER_SECOND = 64_000_000
"""Approximate number of steps (ops, or whole all-reduces) that a core replays per second.

Dealing an iteration may take one second, or half of the planned time of the iteration if that is
less, because the next iteration is dealt while it runs. For larger schedules, fewer swaps are
tried.
"""

Costs = npt.NDArray[np.float64]
"""Times of F, I and W of each sample, as multiples of the mean.

The shape is [samples, 3], or [samples, stages, 3] if stages differ. Samples are numbered like the
micro-batches that they would be in without dealing. In a bidirectional pipeline, the stages are
those of one direction.
"""


class CostError(ValueError):
    """Error of one line for invalid costs of samples, or invalid lengths."""


class Dealt(NamedTuple):
    """Samples of an iteration as dealt to micro-batches, and how long the iteration takes."""

    sample: Ints
    """Number of the sample that each micro-batch gets, [micro-batches].

    Micro-batches are numbered pipeline by pipeline. Without dealing, each gets the sample with its
    own number.
    """
    before_ticks: float
    """Ticks of the iteration without dealing."""
    after_ticks: float
    """Ticks of the iteration with these samples."""


def require_costs(costs: object, samples: int, stages: int) -> Costs:
    """Return the costs of samples as an array [samples, stages, 3].

    `costs` has the times of F, I and W as multiples of the mean, in this shape or as [samples, 3]
    for equal stages. The result is read-only, and may share memory with them. Raises CostError for
    anything but numbers, for another shape, or unless all are from 0 to `MAX_COST`.
    """
    try:
        array = np.asarray(costs, np.float64)
    except (TypeError, ValueError):
        raise CostError(
            f"costs are a {type(costs).__name__}; expected an array of numbers"
        ) from None
    if array.shape not in {(samples, 3), (samples, stages, 3)}:
        raise CostError(
            f"costs are of shape {list(array.shape)}; expected [{samples}, 3]: F, I and W of each "
            f"sample, or [{samples}, {stages}, 3] by stage"
        )
    wrong = ~np.isfinite(array) | (array < 0) | (array > MAX_COST)
    if wrong.any():
        at = tuple(int(index) for index in np.argwhere(wrong)[0])
        raise CostError(
            f"the {'FIW'[at[-1]]} of sample {at[0]} costs {array[at]:g} times the mean; expected 0 "
            f"to {MAX_COST}"
        )
    # If stages do not differ, all have the same costs.
    return np.broadcast_to(array[:, None] if array.ndim == 2 else array, (samples, stages, 3))


class Dealer:
    """Dealer of samples to the micro-batches of one schedule.

    Its creation raises ValueError if ops of the schedule wait for each other in a circle.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._arrays = arrays_of(schedule)
        self._shares = shares_of(schedule)
        self.samples = schedule.grid.total_microbatches
        self.stages = schedule.grid.depth
        self._tick_seconds = schedule.tick_seconds
        self._counts = schedule.grid.microbatches
        self._weights = self._work_by_column()
        # A swap replays the blocks of two names, and the tail.
        begin = self._arrays.begin
        sizes = np.sort(begin[1:-1] - begin[:-2])
        self._most_steps = int(
            STEPS_PER_SECOND * min(1.0, schedule.seconds(schedule.period_ticks) / 2)
        )
        self._steps_of_a_swap = int(sizes[-2:].sum() + begin[-1] - begin[-2]) + len(
            self._arrays.release
        )

    def affordable_swaps(self, wanted: int) -> int:
        """Return how many swaps of two samples `deal` has time for: at most `wanted`."""
        return min(wanted, self._most_steps // max(1, self._steps_of_a_swap))

    def deal(self, costs: object, *, seed: int, swaps: int) -> Dealt:
        """Choose a sample for each micro-batch so that the iteration ends early.

        `costs` has the times of F, I and W of each sample as multiples of the mean, [samples, 3] or
        [samples, stages, 3]. The search starts with sample k in micro-batch k (without dealing) or,
        if that is shorter, with pipelines of about equal work. It then tries random swaps of two
        samples: as many as `affordable_swaps` allows of `swaps`. The result is never longer than
        without dealing; with 0 `swaps`, nothing is dealt. Raises CostError for invalid costs.
        """
        integer_costs = self._integer_costs(costs)
        pairs = _random_pairs(seed, self.affordable_swaps(swaps), self.samples)
        undealt = np.arange(self.samples)
        before = self._window_length(integer_costs, undealt)
        if not swaps:
            return Dealt(undealt, before / UNIT, before / UNIT)
        # Pipelines with equal work usually end earlier, but not always.
        even = self._deal_evenly(integer_costs @ self._weights)
        sample = even if self._window_length(integer_costs, even) < before else undealt
        _, after = improve_by_swaps(self._arrays, integer_costs, UNIT, pairs, sample)
        return Dealt(sample, before / UNIT, after / UNIT)

    def iteration_seconds(
        self, costs: Iterable[object], samples: npt.ArrayLike
    ) -> npt.NDArray[np.float64]:
        """Return the seconds that each of several successive iterations takes.

        An iteration is measured from the end of the previous one to its own end. For each
        iteration, `costs` has the times of F, I and W of its samples as multiples of the mean
        (`Costs`), and `samples` has the sample of each micro-batch, [iterations, micro-batches].
        The first iteration starts as planned, and is measured from the last worker's planned start.
        Workers do not wait for each other between iterations. Raises CostError for invalid costs,
        and ValueError for unequal numbers of iterations.
        """
        # When each worker is free, from one iteration to the next.
        free = self._arrays.release * UNIT
        ends = [int(free.max())]
        for own_costs, sample in zip(costs, np.asarray(samples), strict=True):
            replay_iteration(self._arrays, self._integer_costs(own_costs), sample, UNIT, free)
            ends.append(int(free.max()))
        return np.diff(np.array(ends)) / UNIT * self._tick_seconds

    def costs_by_slice(self, costs: object) -> Costs:
        """Return the times of F, I and W of samples by slice, [samples, slices, 3].

        The times are multiples of the mean. For a slice with layers of several stages, they are
        averages over these stages, weighted by numbers of layers. `costs` is as in `Costs`, by
        stage or equal for all stages. Raises CostError for invalid costs.
        """
        costs_by_slice: Costs = np.einsum(
            "ls,nsk->nlk", self._shares, require_costs(costs, self.samples, self.stages)
        )
        return costs_by_slice

    def _integer_costs(self, costs: object) -> Ints:
        """Return the costs of samples in units of 1 / `UNIT`, [samples, 3 x slices]."""
        # The times of F, I and W of a slice are next to each other, as in `arrays.COSTS`.
        whole: Ints = (
            np.rint(self.costs_by_slice(costs) * UNIT)
            .astype(np.int64)
            .reshape(self.samples, 3 * len(self._shares))
        )
        return whole

    def _window_length(self, costs: Ints, sample: Ints) -> int:
        """Return the longest busy window of a worker, in units of 1 / `UNIT` ticks."""
        # Without pairs to swap, this only replays the iteration.
        before, _ = improve_by_swaps(self._arrays, costs, UNIT, np.empty((0, 2), np.int64), sample)
        return int(before)

    def _work_by_column(self) -> Ints:
        """Return the planned ticks of an iteration's ops by 3 x slice + kind (`arrays.COSTS`)."""
        arrays = self._arrays
        computing = arrays.column >= 0
        return np.bincount(
            arrays.column[computing], arrays.ticks[computing], minlength=3 * len(self._shares)
        ).astype(np.int64)

    def _deal_evenly(self, costs: Ints) -> Ints:
        """Return each micro-batch's sample, so that pipelines have about equal sums of `costs`."""
        # Longest first (Graham 1969): each sample goes to the pipeline with the least work that
        # still has micro-batches.
        loads, left = [0] * len(self._counts), list(self._counts)
        dealt: list[list[int]] = [[] for _ in self._counts]
        for sample in np.argsort(-costs, kind="stable").tolist():
            with_room = [pipeline for pipeline, count in enumerate(left) if count]
            pipeline = min(with_room, key=lambda pipeline: (loads[pipeline], pipeline))
            dealt[pipeline].append(sample)
            loads[pipeline] += int(costs[sample])
            left[pipeline] -= 1
        return np.array([sample for samples in dealt for sample in sorted(samples)], np.int64)


def _random_pairs(seed: int, swaps: int, samples: int) -> Ints:
    """Return random pairs of different numbers below `samples`, [swaps, 2], alike everywhere."""
    if samples < 2:
        return np.empty((0, 2), np.int64)
    # The generator's raw numbers are the same with any version of numpy.
    raw = np.random.PCG64(seed).random_raw(2 * swaps).reshape(-1, 2) >> np.uint64(32)
    first = raw[:, 0] % np.uint64(samples)
    other = raw[:, 1] % np.uint64(samples - 1)
    return np.stack((first, other + (other >= first)), axis=1).astype(np.int64)
