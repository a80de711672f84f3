"""Bound the busy windows of the workers of one stage: lemmas 2 to 4.

These workers hold nothing else. A *share* is one of the p equal layers of a stage for one
micro-batch, with p = 1 if micro-batches are not cut. A slice is at least one share, so no wait
begins or ends with less than one. To use whole numbers, times and memory of a stage are multiplied
by p: a share then takes F, I and W of the stage, in ticks / p. The proofs are in docs/bounds.md.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from slipstream.planner.model.assumptions import (
    has_equal_holders,
    has_whole_stages,
    is_single_stage,
    is_synchronous,
)
from slipstream.planner.model.memory import activation_capacity, activation_memory, stash_memory
from slipstream.planner.model.problem import Problem
from slipstream.schedules.schedule import OpKind, Worker


class StageShares(NamedTuple):
    """Times and memory of the shares of a stage on one of its holders.

    A share is one of `parts` equal layers of the stage for one micro-batch. Times are in ticks /
    `parts`, and so whole numbers.
    """

    parts: int
    """Number p of equal layers into which a micro-batch may be cut."""
    forward: int
    gradient: int
    """Time of an I, or of a B when fused."""
    weight: int
    """Time of a W; 0 when fused."""
    round_trip: int
    """Least time from F's end to I's start, through the last stage and back."""
    activation: int
    """Memory units, times `parts`, that a share takes from F's start to I's end."""
    stash: int
    """Memory units, times `parts`, that a share takes from I's end to W's end."""
    room: int
    """Memory units, times `parts`, that the holder has for activations."""
    most: int
    """Number of shares of the stage in an iteration, over all micro-batches."""
    late: int = 0
    """Time by which the first I begins later than its round trip alone requires."""

    @property
    def work(self) -> int:
        """Time of F, I and W of one share, in ticks / `parts`."""
        return self.forward + self.gradient + self.weight

    def capacity_for(self, amount: int) -> int:
        """Return how many shares fit into memory at once if each takes `amount`.

        The amount is in memory units times `parts`. If it is 0, return `most`.
        """
        return self.room // amount if amount else self.most

    @property
    def max_waiting(self) -> int:
        """Number of shares that memory can hold between F and I at once."""
        return self.capacity_for(self.activation)

    def fill_idle(self, count: int) -> int:
        """Return the least idle time before the first I, in ticks / `parts`.

        The worker has `count` shares. Lemma 2a of docs/bounds.md.
        """
        return max(
            0, self.round_trip + self.late - (min(count, self.max_waiting) - 1) * self.forward
        )

    def drain_idle(self, count: int, *, until_weight: bool) -> int:
        """Return the least idle time, in ticks / `parts`, after the last F starts.

        The time runs to the end of the last W if `until_weight`, else to that of the last I, for a
        worker with `count` shares. It does not overlap the time of `fill_idle`. Lemma 2b of
        docs/bounds.md.
        """
        # All shares can wait at once, so no I need come before the last F.
        if count <= self.max_waiting:
            return 0
        idle = self.round_trip + self.gradient
        if until_weight:
            return max(0, idle + self.weight - self.max_remaining_work(count))
        return max(0, idle - self.max_waiting * self.gradient)

    def max_remaining_work(self, count: int) -> int:
        """Return the most time of I and W left when the last F starts.

        The time is in ticks / `parts`, for a worker with `count` shares. Lemma 2c of
        docs/bounds.md.
        """
        largest = min(count, self.max_waiting)
        ends = {1, largest}
        # The most work is concave in the number of shares that wait for I: look at both ends, and
        # next to where memory is just full.
        if self.activation != self.stash:
            corner = (self.room - count * self.stash) // (self.activation - self.stash)
            ends |= {min(max(1, corner + more), largest) for more in (0, 1)}
        return max(
            waiting * self.gradient + self._remaining_weight_ticks(waiting, count)
            for waiting in ends
        )

    def _remaining_weight_ticks(self, waiting: int, count: int) -> int:
        """Return the most time of W left while `waiting` of `count` shares wait for I."""
        if not self.stash:
            return count * self.weight
        free = self.room - waiting * self.activation
        return min(count * self.weight, waiting * self.weight + free * self.weight // self.stash)

    def min_window(self, count: int) -> int:
        """Return the least time, in ticks / `parts`, in which a worker runs `count` shares.

        Lemma 2 of docs/bounds.md; closing ops are not included.
        """
        return (
            count * self.work + self.fill_idle(count) + self.drain_idle(count, until_weight=True)
            if count
            else 0
        )

    def min_gradient_window(self, count: int) -> int:
        """Return the least time, in ticks / `parts`, from first F to last I.

        The worker has `count` shares. All W lie in this time except those whose memory can be held
        until later. Lemma 4a of docs/bounds.md.
        """
        # W that memory cannot hold until after the last I; or fewer, and the idle time of the
        # drain.
        unavoidable = max(
            (count - min(count, self.capacity_for(self.stash))) * self.weight,
            (count - min(count, self.capacity_for(min(self.activation, self.stash)))) * self.weight
            + self.drain_idle(count, until_weight=False),
        )
        return count * (self.forward + self.gradient) + self.fill_idle(count) + unavoidable


def count_microbatches_at(problem: Problem, stage: int) -> int:
    """Return the number of micro-batches that visit a stage in an iteration."""
    grid = problem.grid
    return sum(len(range(stage // grid.depth, count, grid.chains)) for count in grid.microbatches)


def make_shares(problem: Problem, stage: int, worker: Worker, parts: int) -> StageShares:
    """Return the shares of a stage on one holder, with a micro-batch cut into `parts`."""
    forward, gradient, *weight = (
        problem.op_ticks(kind, stage, worker) for kind in problem.op_kinds
    )
    out, home = problem.min_path_ticks
    # Transfers to the next stage and back; the last stage has none.
    hops = 2 * problem.min_transfer_ticks(stage) if stage + 1 < len(problem.grid.stages) else 0
    trip = out[-1] - out[stage + 1] + home[-1] - home[stage + 1] + hops
    return StageShares(
        parts=parts,
        forward=forward,
        gradient=gradient,
        weight=sum(weight),
        round_trip=trip * parts,
        activation=activation_memory(problem, stage),
        stash=stash_memory(problem, stage),
        room=activation_capacity(problem, worker) * parts,
        most=count_microbatches_at(problem, stage) * parts,
    )


def _count_holder_kinds(problem: Problem, stage: int) -> Counter[StageShares]:
    """Return the number of live holders of a stage for each speed and memory."""
    column = problem.column_of[stage]
    workers = [Worker(pipeline, column) for pipeline in problem.live_pipelines_by_column[column]]
    # Equal holders have equal shares, which are computed once.
    example = {problem.workers[worker]: worker for worker in workers}
    numbers: Counter[StageShares] = Counter()
    for properties, number in Counter(problem.workers[worker] for worker in workers).items():
        numbers[make_shares(problem, stage, example[properties], problem.count_parts(stage))] += (
            number
        )
    return numbers


def busiest_window(problem: Problem, stage: int) -> Fraction:
    """Return a bound, in ticks, on the busiest window of a stage's workers.

    The workers must hold no other stage (`is_single_stage`). Lemma 2 of docs/bounds.md.
    """
    assert is_single_stage(problem, stage)
    least = _least_window(
        tuple(_count_holder_kinds(problem, stage).items()),
        count_microbatches_at(problem, stage) * problem.count_parts(stage),
    )
    return Fraction(least, problem.count_parts(stage)) + problem.column_closing_ticks(
        problem.column_of[stage]
    )


@lru_cache(4096)  # failures that come and go repeat most columns
def _least_window(holders: Sequence[tuple[StageShares, int]], total: int) -> int:
    """Return the least window, without closing ops, in which holders run `total` shares.

    It is in ticks / `StageShares.parts`. Each pair has a kind of holder, and how many there are.
    """

    # The shares that fit into windows of this length, over all holders, must be all.
    def is_enough(ticks: int) -> bool:
        return (
            sum(number * _max_shares_within(shares, ticks) for shares, number in holders) >= total
        )

    return bisect_left(
        range(max(shares.min_window(total) for shares, _ in holders)), True, key=is_enough
    )


def _max_shares_within(shares: StageShares, ticks: int) -> int:
    """Return the most shares that a worker can run in a window of length `ticks`.

    The length is in ticks / `shares.parts`, and does not include closing ops.
    """
    return bisect_right(range(1, shares.most + 1), ticks, key=shares.min_window)


def scarce_stage_bound(problem: Problem, stage: int) -> Fraction:
    """Return a bound on the period, in ticks, where a later stage has fewer workers.

    0 if the assumptions of lemma 3 of docs/bounds.md are not met.
    """
    if not (
        has_whole_stages(problem)
        and is_single_stage(problem, stage)
        and has_equal_holders(problem, stage)
    ):
        return Fraction(0)
    (shares,) = _count_holder_kinds(problem, stage)
    total = count_microbatches_at(problem, stage)
    holders = len(problem.holders_by_slice[stage])
    # Holders beyond the later stage's workers have a round trip that is longer by one F there.
    best = 0
    for later in range(stage + 1, len(problem.grid.stages)):
        in_time = len(problem.holders_by_slice[later])
        if in_time >= holders:
            continue
        late = shares._replace(late=problem.fastest_ticks(OpKind.F, later))
        best = max(best, _least_window(((shares, in_time), (late, holders - in_time)), total))
    return Fraction(best) + problem.column_closing_ticks(problem.column_of[stage])


def fill_and_drain_bound(problem: Problem, stage: int) -> Fraction:
    """Return a bound on the period, in ticks, by a stage's work and way.

    The way leads from stage 0 to the stage and back; the work is that of its busiest worker. 0 if
    the assumptions of lemma 4 of docs/bounds.md are not met.
    """
    if not (is_single_stage(problem, stage) and has_equal_holders(problem, stage)):
        return Fraction(0)
    (shares,) = _count_holder_kinds(problem, stage)
    return round_trip_bound(
        problem, stage, shares, -(-shares.most // len(problem.holders_by_slice[stage]))
    )


def round_trip_bound(problem: Problem, stage: int, shares: StageShares, count: int) -> Fraction:
    """Return a bound on the period, in ticks, by a stage's shares and way.

    The way leads from stage 0 to `stage`, where a worker runs `count` shares, and back. Lemma 4 of
    docs/bounds.md.
    """
    out, home = problem.min_path_ticks
    # The last I that comes back to stage 0 is followed by its W.
    last = Fraction(0)
    if problem.backward == "split" and stage and problem.count_parts(0):
        last = Fraction(problem.fastest_ticks(OpKind.W, 0), problem.count_parts(0))
    closing = ticks_after_stage(problem, 0)
    return (
        Fraction(shares.min_gradient_window(count), shares.parts)
        + out[stage]
        + home[stage]
        + last
        + (max(closing, *problem.times.optimizer) if is_synchronous(problem) else closing)
    )


def ticks_after_stage(problem: Problem, stage: int) -> int:
    """Return the least ticks of a holder of a stage after its last W there.

    These are the stage's reduction and the optimizer step, as reductions of the worker's other
    stages may come earlier.
    """
    return problem.times.all_reduce[stage] + problem.times.optimizer[problem.column_of[stage]]
