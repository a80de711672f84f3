"""Bounds on workers that hold several stages, by memory and round trips: lemmas 18 and 19 of docs/bounds.md.

All times are in ticks, all memory in units of the problem.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import NamedTuple

from slipstream.planner.model.assumptions import (
    has_equal_holders,
    has_whole_stages,
    is_synchronous,
    keeps_microbatches_together,
)
from slipstream.planner.model.bounds_stage import count_microbatches_at, ticks_after_stage
from slipstream.planner.model.memory import activation_memory, activation_room, stash_memory
from slipstream.planner.model.problem import Problem
from slipstream.schedules.schedule import OpKind, Worker


class StageCosts(NamedTuple):
    """Times and memory of one stage on one worker."""

    forward: int
    gradient: int
    """Time of an I, or of a B when fused."""
    weight: int
    """Time of a W; 0 when fused."""
    activation: int
    stash: int
    most: int
    """Largest number of micro-batches that the worker runs at the stage."""

    @property
    def work(self) -> int:
        """Time of all ops of one micro-batch."""
        return self.forward + self.gradient + self.weight


class Chunks(NamedTuple):
    """Stages of one worker, the work that it does at least, and the waits that it can not avoid."""

    stages: tuple[StageCosts, ...]
    room: int
    work: Fraction
    """Time of the compute ops that the worker runs in an iteration."""
    until_gradient: int
    """Least time from the first F of the worker to its first I."""
    until_last_gradient: int
    """Least time from the end of its last F to the end of its last I."""
    last_weight: int
    """Least time of the W that follows the I of `until_last_gradient`."""
    is_full: bool
    """True if memory does not hold all its micro-batches at once, so that an I comes before the last F."""

    @property
    def fill_idle(self) -> Fraction:
        """Least idle time before the first I, in which the worker runs only F that memory holds."""
        forwards = most_ticks(
            ((stage.activation, stage.forward, stage.most) for stage in self.stages), self.room)
        return max(Fraction(0), self.until_gradient - forwards)

    @property
    def max_remaining_work(self) -> Fraction:
        """Most time of I and W that is left at the end of the last F, as memory holds it."""
        waiting = [(stage.activation, stage.gradient + (stage.weight if stage.stash else 0), stage.most)
                   for stage in self.stages]
        stashed = [(stage.stash, stage.weight, stage.most) for stage in self.stages]
        return min(most_ticks((*waiting, *stashed), self.room),
                   Fraction(sum((stage.work - stage.forward) * stage.most for stage in self.stages)))

    @property
    def max_deferred_work(self) -> Fraction:
        """Most time of W that is left at the end of the last I, as memory holds its stashes."""
        return most_ticks(((stage.stash, stage.weight, stage.most) for stage in self.stages), self.room)

    @property
    def drain_idle(self) -> Fraction:
        """Least idle time from the last F to the end of a W whose I comes late, 0 or negative if there is none."""
        return self.until_last_gradient + self.last_weight - self.max_remaining_work

    def min_gradient_window(self) -> Fraction:
        """Return the least time from the first F to the end of the last I."""
        drain, deferred = self.until_last_gradient - self.max_remaining_work, -self.max_deferred_work
        if self.is_full:
            return self.work + self.fill_idle + max(drain, deferred)
        return self.work + max(drain, self.fill_idle + deferred)


def most_ticks(items: Iterable[tuple[int, int, int]], room: int) -> Fraction:
    """Return an upper bound on the time of ops whose memory fits into a room together.

    Each item is (memory, time, largest number) of one kind of op; the last that fits may be cut.
    """
    total, free, sized = Fraction(0), room, []
    for size, ticks, most in items:
        if size:
            sized.append((size, ticks, most))
        else:
            total += ticks * most
    if sized:
        free -= free % math.gcd(*(size for size, _, _ in sized))
    for size, ticks, most in sorted(sized, key=lambda item: Fraction(item[1], item[0]), reverse=True):
        taken = min(free, size * most)
        total += Fraction(taken * ticks, size)
        free -= taken
    return total


def chunk_bounds(problem: Problem) -> Iterator[tuple[Fraction, str]]:
    """Yield the bounds of lemmas 18 and 19 for all columns, each with words that say what it counts."""
    if not has_whole_stages(problem) or problem.grid.chains > 1:
        return
    for column in range(problem.grid.columns):
        stages = problem.grid.stages_of_column(column)
        if not stages or not problem.holders_by_slice[stages[0]]:
            continue
        yield _lifetime_bound(problem, column), f"how long column {column} holds its activations, in its memory"
        if len(stages) > 1:
            for chunks in _list_chunks(problem, column):
                yield _window_bound(problem, column, chunks), \
                    f"the work of column {column}, and its waits for its first and last gradients"
                yield _return_bound(problem, column, chunks), \
                    f"the way to column {column}, its work, and the way back, by memory"


def _list_chunks(problem: Problem, column: int) -> list[Chunks]:
    """Return the workers of a column whose least work and waits are known, without repetition."""
    stages = problem.grid.stages_of_column(column)
    holders = problem.holders_by_slice[stages[0]]
    if keeps_microbatches_together(problem):
        counts = problem.grid.microbatches
        examples = {(problem.workers[worker], counts[worker.pipeline]): worker for worker in holders}
        return [_own_chunks(problem, worker, stages) for worker in examples.values()]
    if has_equal_holders(problem, stages[0]):
        return [_busiest_chunks(problem, holders, stages)]
    return []


def _own_chunks(problem: Problem, worker: Worker, stages: Sequence[int]) -> Chunks:
    """Return the chunks of a worker that runs all its stages of its own micro-batches, and no others."""
    count, room = problem.grid.microbatches[worker.pipeline], activation_room(problem, worker)
    costs = tuple(_stage_costs(problem, stage, worker, count) for stage in stages)
    trip = _round_trip(problem, stages[-1])
    out, home = problem.min_path_ticks
    return Chunks(
        stages=costs, room=room, work=Fraction(count * sum(stage.work for stage in costs)),
        until_gradient=out[stages[-1] + 1] - out[stages[0]] - _hop(problem, stages[-1]) + trip,
        until_last_gradient=trip + home[stages[-1] + 1] - home[stages[0]] - _hop(problem, stages[-1]),
        last_weight=costs[0].weight, is_full=count * sum(stage.activation for stage in costs) > room)


def _busiest_chunks(problem: Problem, holders: Sequence[Worker], stages: Sequence[int]) -> Chunks:
    """Return the chunks of that holder of some stages which has the most to do.

    It may run a micro-batch at its last stage alone, where the way to the end and back is shortest.
    """
    costs = tuple(_stage_costs(problem, stage, holders[0], count_microbatches_at(problem, stage))
                  for stage in stages)
    trip, room = _round_trip(problem, stages[-1]), activation_room(problem, holders[0])
    work = Fraction(sum(stage.work * stage.most for stage in costs), len(holders))
    least_held = min((Fraction(stage.activation, stage.work) for stage in costs if stage.work), default=0)
    return Chunks(
        stages=costs, room=room, work=work,
        until_gradient=problem.fastest_ticks(OpKind.F, stages[-1]) + trip,
        until_last_gradient=trip + problem.fastest_ticks(problem.gradient_kind, stages[-1]),
        last_weight=min(stage.weight for stage in costs), is_full=work * least_held > room)


def _stage_costs(problem: Problem, stage: int, worker: Worker, most: int) -> StageCosts:
    forward, gradient, *weight = (problem.op_ticks(kind, stage, worker) for kind in problem.op_kinds)
    return StageCosts(forward, gradient, sum(weight), activation_memory(problem, stage),
                      stash_memory(problem, stage), most)


def _hop(problem: Problem, stage: int) -> int:
    """Return the least time of the transfer from a stage to the next one, 0 for the last stage."""
    return problem.min_transfer_ticks(stage) if stage + 1 < len(problem.grid.stages) else 0


def _round_trip(problem: Problem, stage: int) -> int:
    """Return the least time from the end of an F to the start of its I."""
    out, home = problem.min_path_ticks
    return out[-1] - out[stage + 1] + home[-1] - home[stage + 1] + 2 * _hop(problem, stage)


def _window_bound(problem: Problem, column: int, chunks: Chunks) -> Fraction:
    """Return the bound of lemma 18 on the windows of the workers of a column."""
    reductions = [problem.times.all_reduce[stage] for stage in problem.grid.stages_of_column(column)]
    all_reduced, first, least = sum(reductions), reductions[0], min(reductions)
    together = keeps_microbatches_together(problem)
    fill, drain = chunks.fill_idle, max(Fraction(0), chunks.drain_idle)
    idle = fill + drain if chunks.is_full else max(fill, drain)
    window = max(fill + (all_reduced if together else least), idle + (first if together else least))
    reach = problem.min_path_ticks[0][problem.grid.stages_of_column(column)[0]] if is_synchronous(problem) else 0
    return reach + chunks.work + window + problem.times.optimizer[column]


def _return_bound(problem: Problem, column: int, chunks: Chunks) -> Fraction:
    """Return the bound of lemma 18 from stage 0 to a column and back; 0 for the column of stage 0."""
    stage = problem.grid.stages_of_column(column)[0]
    if not stage:
        return Fraction(0)
    out, home = problem.min_path_ticks
    last = sum(problem.fastest_ticks(kind, 0) for kind in problem.op_kinds[2:])
    closing = ticks_after_stage(problem, 0)
    if is_synchronous(problem):
        closing = max(closing, *problem.times.optimizer)
    return out[stage] + chunks.min_gradient_window() + home[stage] + last + closing


def _lifetime_bound(problem: Problem, column: int) -> Fraction:
    """Return the bound of lemma 19: memory times period is no less than what activations take for as long."""
    stages = problem.grid.stages_of_column(column)
    room = sum(activation_room(problem, worker) for worker in problem.holders_by_slice[stages[0]])
    demand = sum(count_microbatches_at(problem, stage) * _lifetime(problem, stage) for stage in stages)
    if not demand or room <= 0:
        return Fraction(0)
    closing = min(problem.times.all_reduce[stage] for stage in stages) + problem.times.optimizer[column]
    return Fraction(demand, room) + closing


def _lifetime(problem: Problem, stage: int) -> int:
    """Return the least memory, times the time for which it is held, of a micro-batch at a stage."""
    passes = problem.fastest_ticks(OpKind.F, stage) + _round_trip(problem, stage) \
        + problem.fastest_ticks(problem.gradient_kind, stage)
    weight = sum(problem.fastest_ticks(kind, stage) for kind in problem.op_kinds[2:])
    return activation_memory(problem, stage) * passes + stash_memory(problem, stage) * weight
