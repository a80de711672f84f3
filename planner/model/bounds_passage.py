"""Bound the period by how micro-batches pass all stages: lemmas 5 and 6 of docs/bounds.md."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from slipstream.planner.model.assumptions import (
    has_equal_pipelines,
    has_single_stages,
    has_whole_stages,
    is_memory_limited,
    is_synchronous,
)
from slipstream.planner.model.bounds_stage import StageShares, make_shares, round_trip_bound
from slipstream.planner.model.memory import activation_capacity, activation_memory
from slipstream.planner.model.problem import Problem

# --- One after the other --------------------------------------------------------------------------

MAX_PASSAGE_STEPS = 20_000
"""Largest stages² x micro-batches for which `passage_bounds` are computed."""


def passage_bounds(problem: Problem) -> list[int]:
    """Return each stage's bound, in ticks, from how micro-batches pass it and later stages.

    The list is empty if the assumptions of lemma 5 of docs/bounds.md are not met, or if the problem
    is larger than `MAX_PASSAGE_STEPS`.
    """
    stages, count = len(problem.grid.stages), problem.grid.total_microbatches
    if (
        not (has_whole_stages(problem) and has_single_stages(problem))
        or stages**2 * count > MAX_PASSAGE_STEPS
    ):
        return []
    return [_passage_bound(problem, stage, count) for stage in range(stages)]


def _passage_bound(problem: Problem, first: int, count: int) -> int:
    """Return the bound of lemma 5, in ticks, for stage `first` and `count` micro-batches."""
    stages = range(first, len(problem.grid.stages))
    forward_kind, gradient_kind = problem.op_kinds[:2]
    forward = {stage: problem.fastest_ticks(forward_kind, stage) for stage in stages}
    gradient = {stage: problem.fastest_ticks(gradient_kind, stage) for stage in stages}
    workers = {stage: len(problem.holders_by_slice[stage]) for stage in stages}
    waiting = {stage: _max_waiting(problem, stage, count) for stage in stages}
    begun: dict[int, list[int]] = {stage: [] for stage in stages}
    returned: dict[int, list[int]] = {stage: [] for stage in stages}  # e(s, k) - I
    # last line of the bound on e(s, k)
    served: dict[int, list[int]] = {stage: [] for stage in stages}
    # Micro-batch after micro-batch: forwards through all stages, then back. Each line is one of the
    # lemma's lower limits on f(s, k) and e(s, k).
    for number in range(count):
        earliest = 0
        for stage in stages:
            if number >= workers[stage]:
                earliest = max(earliest, begun[stage][-workers[stage]] + forward[stage])
            if number >= waiting[stage]:
                earliest = max(earliest, returned[stage][-waiting[stage]] + gradient[stage])
            begun[stage].append(earliest)
            earliest += forward[stage] + (
                problem.min_transfer_ticks(stage) if stage < stages[-1] else 0
            )
        for stage in reversed(stages):
            free = served[stage][-workers[stage]] if number >= workers[stage] else 0
            served[stage].append(max(begun[stage][number], free) + forward[stage] + gradient[stage])
            earliest = max(earliest, served[stage][number] - gradient[stage])
            if number >= workers[stage]:
                earliest = max(earliest, returned[stage][-workers[stage]] + gradient[stage])
            returned[stage].append(earliest)
            earliest += gradient[stage] + (
                problem.min_transfer_ticks(stage - 1) if stage > first else 0
            )
    after = gradient[first] + sum(
        problem.fastest_ticks(kind, first) for kind in problem.op_kinds[2:]
    )
    # Those that have yet to come back, or to begin, are shared by the first stage's workers.
    ends = (
        max(
            returned[first][number] + after * (rounds := -(-(count - number) // workers[first])),
            begun[first][number] + (forward[first] + after) * rounds,
        )
        for number in range(count)
    )
    return max(ends) + problem.column_closing_ticks(problem.column_of[first])


def _max_waiting(problem: Problem, stage: int, count: int) -> int:
    """Return how many of `count` micro-batches a stage's workers can hold between F and I."""
    if not is_memory_limited(problem, stage):
        return count
    amount = activation_memory(problem, stage)
    return max(
        1,
        sum(
            activation_capacity(problem, worker) // amount
            for worker in problem.holders_by_slice[stage]
        ),
    )


# --- How pipelines fill where workers run whole forwards only, which are their own ----------------


class StageFill(NamedTuple):
    """Times and memory that decide how long a stage idles before its first I."""

    forward: int
    """Ticks of an F."""
    max_forwards: int
    """Most micro-batches whose F can run before the first I, by memory and number."""
    return_ticks: int
    """Ticks of the next stage's I, with both transfers; 0 at the last stage."""


class WholeFill(NamedTuple):
    """Bound by the idle time that uncut F leave before each stage's first I."""

    period: int
    """Lower bound on the period, in ticks."""
    idle: tuple[int, ...]
    """Ticks, by stage, for which a worker may idle before its first I.

    More idle ticks would raise the period above the bound.
    """


def compute_whole_fill(problem: Problem) -> WholeFill | None:
    """Return a bound on the period by stages' idle ticks before their first I.

    Before it, they run F that are not cut. None if the assumptions of lemma 6 of docs/bounds.md are
    not met.
    """
    if not (has_equal_pipelines(problem) and has_single_stages(problem)):
        return None
    grid = problem.grid
    count, stages = max(grid.microbatches), range(len(grid.stages))
    # All pipelines are equal, so that the first one stands for all.
    shares = [make_shares(problem, stage, problem.home_worker(stage, 0), 1) for stage in stages]
    without_fill = [_period_without_fill(problem, stage, shares[stage], count) for stage in stages]
    back = [
        problem.fastest_ticks(problem.gradient_kind, stage + 1)
        + 2 * problem.min_transfer_ticks(stage)
        for stage in stages[:-1]
    ]
    fills = []
    for share, after in zip(shares, [*back, 0], strict=True):
        fills.append(StageFill(share.forward, min(count, share.max_waiting), after))
    # The least period that leaves every stage the idle time that it needs.
    least = max(without_fill)
    enough = sum(2 * fill.forward + fill.return_ticks for fill in fills)
    period = least + bisect_left(
        range(enough),
        True,
        key=lambda more: _can_fill(fills, [least + more - ticks for ticks in without_fill]),
    )
    return WholeFill(period, tuple(period - ticks for ticks in without_fill))


def _period_without_fill(problem: Problem, stage: int, shares: StageShares, count: int) -> int:
    """Return a bound on a worker's period without its idle ticks before its first I.

    The worker runs `count` micro-batches; the bound is in ticks.
    """
    window = shares.min_window(count) + problem.column_closing_ticks(problem.column_of[stage])
    if is_synchronous(problem):
        window += problem.min_path_ticks[0][stage]
    return max(
        window, math.ceil(round_trip_bound(problem, stage, shares, count))
    ) - shares.fill_idle(count)


def _can_fill(fills: Sequence[StageFill], idle: Sequence[int]) -> bool:
    """Return whether each stage can reach its first I within the ticks `idle` [stage]."""
    # From the last stage to the first: each waits for the next one's first I, and runs whole F.
    wait = 0
    for (forward, count, back), allowed in zip(reversed(fills), reversed(idle), strict=True):
        wait += forward + back
        done = min(count, wait // forward) if forward else count
        # Too much idle time: one F more delays the first I, if memory and number allow it.
        if wait - done * forward > allowed:
            if not forward or done == count:
                return False
            wait = (done + 1) * forward
    return True
