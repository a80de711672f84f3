"""Which sample takes which name: a pure function of a schedule, the samples' costs, a seed and a number of swaps."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.schedules.dealing.arrays import arrays_of, shares_of
from slipstream.schedules.dealing.kernel import Ints, improve, replay
from slipstream.schedules.schedule import Schedule

UNIT = 10**6
"""Costs are rounded to millionths of the mean. From there on all numbers are whole: all machines find the same."""
MOST = 1000
"""A sample costs at most so many times the mean."""
STEPS_PER_SECOND = 64_000_000
"""Steps of replays that a core makes, about. An iteration is dealt with those of a second at most, and of half the time
that it takes by plan: the next one is dealt while it runs. Larger schedules have fewer swaps."""

Costs = npt.NDArray[np.float64]
"""[samples, 3], or [samples, stages, 3] where stages differ: what a sample's F, I and W take, as multiples of the mean.

Samples are in the order of names. With several chains, stages are those of one.
"""


class CostError(ValueError):
    """Costs that cannot be. The message is one line."""


class Dealt(NamedTuple):
    """The samples of an iteration, and what that brings."""

    sample: Ints
    """[names]: the sample that each name stands for; both are numbered pipeline by pipeline, micro-batch by
    micro-batch."""
    before_ticks: float
    """How long the iteration takes where each sample has its own name."""
    after_ticks: float


def require_costs(costs: object, samples: int, stages: int) -> Costs:
    """Costs by stage, [samples, stages, 3]. Raises CostError for what are no costs of so many samples."""
    try:
        found = np.asarray(costs, np.float64)
    except (TypeError, ValueError):
        raise CostError(f"costs are a {type(costs).__name__}; expected an array of numbers") from None
    if found.shape not in {(samples, 3), (samples, stages, 3)}:
        raise CostError(f"costs are of shape {list(found.shape)}; expected [{samples}, 3]: F, I and W of each sample, "
                        f"or [{samples}, {stages}, 3] by stage")
    wrong = ~np.isfinite(found) | (found < 0) | (found > MOST)
    if wrong.any():
        at = tuple(int(one) for one in np.argwhere(wrong)[0])
        raise CostError(f"the {'FIW'[at[-1]]} of sample {at[0]} costs {found[at]:g} times the mean; expected 0 to "
                        f"{MOST}")
    return np.broadcast_to(found[:, None] if found.ndim == 2 else found, (samples, stages, 3))


class Dealer:
    """Deals the samples of iterations to one schedule.

    Raises ValueError where the schedule's ops wait for each other in a circle.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._arrays = arrays_of(schedule)
        self._shares = shares_of(schedule)
        self.samples = schedule.grid.total_microbatches
        self.stages = schedule.grid.depth
        self._tick_seconds = schedule.tick_seconds
        self._counts = schedule.grid.microbatches
        self._weights = self._work()
        # What a swap replays: the blocks of two names, and the tail.
        begin = self._arrays.begin
        sizes = np.sort(begin[1:-1] - begin[:-2])
        self._most_steps = int(STEPS_PER_SECOND * min(1.0, schedule.seconds(schedule.period_ticks) / 2))
        self._steps_of_a_swap = int(sizes[-2:].sum() + begin[-1] - begin[-2]) + len(self._arrays.release)

    def swaps(self, wanted: int) -> int:
        """How many of the swaps that are wanted are tried: fewer than all where they would take too long."""
        return min(wanted, self._most_steps // max(1, self._steps_of_a_swap))

    def deal(self, costs: object, *, seed: int, swaps: int) -> Dealt:
        """The samples of an iteration, by their `Costs`.

        It begins with each sample at its own name, or with pipelines of about equal work where that is shorter, and
        tries so many swaps. The result is never longer than where it began. Raises CostError.
        """
        whole = self._whole(costs)
        pairs = _pairs(seed, self.swaps(swaps), self.samples)
        own = np.arange(self.samples)
        before = self._window(whole, own)
        if not swaps:
            return Dealt(own, before / UNIT, before / UNIT)
        even = self._even(whole @ self._weights)
        sample = even if self._window(whole, even) < before else own
        _, after = improve(self._arrays, whole, UNIT, pairs, sample)
        return Dealt(sample, before / UNIT, after / UNIT)

    def seconds(self, costs: Iterable[object], samples: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """From one iteration to the next, of iterations in a row: [iterations]; the first begins as planned.

        `costs`: those of each iteration; `samples`: [iterations, names]. Workers do not wait for each other between
        iterations. Raises CostError.
        """
        free = self._arrays.release * UNIT
        ends = [int(free.max())]
        for one, sample in zip(costs, np.asarray(samples), strict=True):
            replay(self._arrays, self._whole(one), sample, UNIT, free)
            ends.append(int(free.max()))
        return np.diff(np.array(ends)) / UNIT * self._tick_seconds

    def by_slice(self, costs: object) -> Costs:
        """[samples, slices, 3]: of the schedule's slices, by the layers that they have of stages. Raises CostError."""
        found: Costs = np.einsum("ls,nsk->nlk", self._shares, require_costs(costs, self.samples, self.stages))
        return found

    def _whole(self, costs: object) -> Ints:
        """[samples, columns], in `UNIT`."""
        whole: Ints = np.rint(self.by_slice(costs) * UNIT).astype(np.int64).reshape(self.samples, 3 * len(self._shares))
        return whole

    def _window(self, costs: Ints, sample: Ints) -> int:
        before, _ = improve(self._arrays, costs, UNIT, np.empty((0, 2), np.int64), sample)
        return int(before)

    def _work(self) -> Ints:
        """[columns]: the ticks that all steps together take by each column."""
        arrays = self._arrays
        computing = arrays.column >= 0
        return np.bincount(arrays.column[computing], arrays.ticks[computing],
                           minlength=3 * len(self._shares)).astype(np.int64)

    def _even(self, costs: Ints) -> Ints:
        """Samples dealt by their costs, longest first, to the pipeline with the least work that has names left."""
        loads, left = [0] * len(self._counts), list(self._counts)
        dealt: list[list[int]] = [[] for _ in self._counts]
        for sample in np.argsort(-costs, kind="stable").tolist():
            pipeline = min((one for one, count in enumerate(left) if count), key=lambda one: (loads[one], one))
            dealt[pipeline].append(sample)
            loads[pipeline] += int(costs[sample])
            left[pipeline] -= 1
        return np.array([sample for one in dealt for sample in sorted(one)], np.int64)


def _pairs(seed: int, swaps: int, samples: int) -> Ints:
    """Pairs of different names, [swaps, 2]. Raw numbers of the generator, whose stream never changes."""
    if samples < 2:
        return np.empty((0, 2), np.int64)
    raw = np.random.PCG64(seed).random_raw(2 * swaps).reshape(-1, 2) >> np.uint64(32)
    first = raw[:, 0] % np.uint64(samples)
    other = raw[:, 1] % np.uint64(samples - 1)
    return np.stack((first, other + (other >= first)), axis=1).astype(np.int64)
