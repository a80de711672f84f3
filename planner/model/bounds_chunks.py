"""Bound the windows of workers that hold several stages.

Lemmas 18 and 19, by memory and round trips.

They are proven in docs/bounds.md. Times are in ticks, memory in units of the problem.
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


class Chunk(NamedTuple):
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
    """All stages of one worker, and the least time of what it does and awaits."""

    chunks: tuple[Chunk, ...]
    room: int
    work: Fraction
    """Time of all compute ops that the worker runs in an iteration."""
    first: int
    """Time from the first F of the worker to its first I."""
    last: int
    """Time from the end of its last F to the end of its last I."""
    awaited_weight: int
    """Time of the W of that I."""
    is_full: bool
    """True if memory never holds all its micro-batches at once. Some F then follows its first I."""

    @property
    def fill(self) -> Fraction:
        """Least idle time before the first I: lemma 18a."""
        forwards = ((chunk.activation, chunk.forward, chunk.most) for chunk in self.chunks)
        return max(Fraction(0), self.first - most_ticks(forwards, self.room))

    @property
    def most_left(self) -> Fraction:
        """Most time of I and W left when the last F ends (lemma 18b)."""
        all_left, kinds = 0, list(self._stashes)
        for chunk in self.chunks:
            all_left += (chunk.gradient + chunk.weight) * chunk.most
            # W that take no memory are left anyway.
            ticks = chunk.gradient + (chunk.weight if chunk.stash else 0)
            kinds.append((chunk.activation, ticks, chunk.most))
        return min(Fraction(all_left), most_ticks(kinds, self.room))

    @property
    def most_deferred(self) -> Fraction:
        """Most time of W that is left when the last I ends: lemma 18c."""
        return most_ticks(self._stashes, self.room)

    @property
    def _stashes(self) -> tuple[tuple[int, int, int], ...]:
        return tuple((chunk.stash, chunk.weight, chunk.most) for chunk in self.chunks)

    @property
    def rest(self) -> Fraction:
        """Least idle time from the last F's end to the awaited W (lemma 18b)."""
        return max(Fraction(0), self.last + self.awaited_weight - self.most_left)

    @property
    def idle(self) -> Fraction:
        """Least idle time of fill and rest together."""
        return self.fill + self.rest if self.is_full else max(self.fill, self.rest)

    @property
    def ticks_until_last_gradient(self) -> Fraction:
        """Least time from the first F to the end of the last I: lemma 18c."""
        rest, deferred = self.last - self.most_left, -self.most_deferred
        if self.is_full:
            return self.work + self.fill + max(rest, deferred)
        return self.work + max(rest, self.fill + deferred)


def most_ticks(ops: Iterable[tuple[int, int, int]], room: int) -> Fraction:
    """Return an upper bound on the time of ops that a room holds together.

    Ops are given by kind, as memory, time and largest number. The last one may be cut.
    """
    kinds = list(ops)
    total = Fraction(sum(ticks * largest for size, ticks, largest in kinds if not size))
    kinds = [kind for kind in kinds if kind[0]]
    free = 0
    if kinds:
        free = room - room % math.gcd(*(size for size, _, _ in kinds))
    kinds.sort(key=lambda kind: Fraction(kind[1], kind[0]), reverse=True)
    for size, ticks, largest in kinds:
        taken = min(free, size * largest)
        total += Fraction(taken * ticks, size)
        free -= taken
    return total


def chunk_bounds(problem: Problem) -> Iterator[tuple[Fraction, str]]:
    """Yield bounds of lemmas 18 and 19, where assumptions hold, each with what it counts."""
    if not has_whole_stages(problem) or problem.grid.chains > 1:
        return
    for column in range(problem.grid.columns):
        stages = problem.grid.stages_of_column(column)
        if not stages or not problem.holders_by_slice[stages[0]]:
            continue
        yield (_lifetime_bound(problem, column),
               f"how long column {column} holds its activations, and its memory")
        for chunks in _list_chunks(problem, stages) if len(stages) > 1 else ():
            yield (_window_bound(problem, column, chunks),
                   f"the work of column {column}, and its waits for its first and last gradients")
            yield (_return_bound(problem, stages[0], chunks.ticks_until_last_gradient),
                   f"the way to column {column}, what its memory allows, and the way back")


def _list_chunks(problem: Problem, stages: Sequence[int]) -> list[Chunks]:
    """Return the workers of some stages whose least work is known, without repetition."""
    holders, counts = problem.holders_by_slice[stages[0]], problem.grid.microbatches
    if keeps_microbatches_together(problem, stages[0]):
        if len(holders) == 1:
            return [_chunks_together(problem, holders[0], stages, sum(counts))]
        examples = {(problem.workers[worker], counts[worker.pipeline]): worker
                    for worker in holders}
        return [_chunks_together(problem, worker, stages, count)
                for (_, count), worker in examples.items()]
    if has_equal_holders(problem, stages[0]):
        return [_busiest_chunks(problem, holders, stages)]
    return []


def _chunks_together(
    problem: Problem, worker: Worker, stages: Sequence[int], count: int
) -> Chunks:
    """Return the chunks of a worker that runs `count` micro-batches at all its stages."""
    chunks = tuple(_make_chunk(problem, stage, worker, count) for stage in stages)
    trip, between = _round_trip(problem, stages[-1]), _hop(problem, stages[-1])
    out, home = problem.min_path_ticks
    room = activation_room(problem, worker)
    return Chunks(
        chunks=chunks,
        room=room,
        work=Fraction(count * sum(chunk.work for chunk in chunks)),
        first=out[stages[-1] + 1] - out[stages[0]] - between + trip,
        last=trip + home[stages[-1] + 1] - home[stages[0]] - between,
        awaited_weight=chunks[0].weight,
        is_full=count * sum(chunk.activation for chunk in chunks) > room)


def _busiest_chunks(problem: Problem, holders: Sequence[Worker], stages: Sequence[int]) -> Chunks:
    """Return the chunks of the busiest of equal holders, which may share micro-batches."""
    room, trip = activation_room(problem, holders[0]), _round_trip(problem, stages[-1])
    chunks = tuple(_make_chunk(problem, stage, holders[0], count_microbatches_at(problem, stage))
                   for stage in stages)
    work = Fraction(sum(chunk.work * chunk.most for chunk in chunks), len(holders))
    if common := math.gcd(*(chunk.work for chunk in chunks)):
        work = Fraction(math.ceil(work / common) * common)  # lemma 20
    held_per_work = min((Fraction(chunk.activation, chunk.work) for chunk in chunks if chunk.work),
                        default=0)
    return Chunks(
        chunks=chunks,
        room=room,
        work=work,
        first=problem.fastest_ticks(OpKind.F, stages[-1]) + trip,
        last=trip + problem.fastest_ticks(problem.gradient_kind, stages[-1]),
        awaited_weight=min(chunk.weight for chunk in chunks),
        is_full=work * held_per_work > room)


def _make_chunk(problem: Problem, stage: int, worker: Worker, count: int) -> Chunk:
    forward, gradient, *weight = (problem.op_ticks(kind, stage, worker)
                                  for kind in problem.op_kinds)
    return Chunk(forward, gradient, sum(weight), activation_memory(problem, stage),
                 stash_memory(problem, stage), count)


def _hop(problem: Problem, stage: int) -> int:
    """Return the least time of the transfer from a stage to the next, if any."""
    return problem.min_transfer_ticks(stage) if stage + 1 < len(problem.grid.stages) else 0


def _round_trip(problem: Problem, stage: int) -> int:
    """Return the least time from the end of an F to its I."""
    out, home = problem.min_path_ticks
    return out[-1] - out[stage + 1] + home[-1] - home[stage + 1] + 2 * _hop(problem, stage)


def _window_bound(problem: Problem, column: int, chunks: Chunks) -> Fraction:
    """Return a bound on the windows of the workers of a column: lemma 18b."""
    stages = problem.grid.stages_of_column(column)
    reductions = [problem.times.all_reduce[stage] for stage in stages]
    beside_fill, beside_rest = sum(reductions), reductions[0]
    if not keeps_microbatches_together(problem, stages[0]):
        beside_fill = beside_rest = min(reductions)
    way = problem.min_path_ticks[0][stages[0]] if is_synchronous(problem) else 0
    return (way + chunks.work + max(chunks.fill + beside_fill, chunks.idle + beside_rest)
            + problem.times.optimizer[column])


def _return_bound(problem: Problem, stage: int, until_last_gradient: Fraction) -> Fraction:
    """Return a bound from stage 0 to a worker, and back to the end.

    The worker's first stage is `stage`. The worker takes so many ticks from its first F to the end
    of its last I: lemmas 18d and 19.
    """
    if not stage:
        return Fraction(0)
    out, home = problem.min_path_ticks
    weight = sum(problem.fastest_ticks(kind, 0) for kind in problem.op_kinds[2:])
    closing = ticks_after_stage(problem, 0)
    if is_synchronous(problem):
        closing = max(closing, *problem.times.optimizer)
    return out[stage] + until_last_gradient + home[stage] + weight + closing


def _lifetime_bound(problem: Problem, column: int) -> Fraction:
    """Return a bound by memory, and the time for which a column's ops hold it. Lemma 19."""
    stages = problem.grid.stages_of_column(column)
    room = sum(activation_room(problem, worker) for worker in problem.holders_by_slice[stages[0]])
    active = stashed = 0
    for stage in stages:
        count = count_microbatches_at(problem, stage)
        lifetime = sum(problem.fastest_ticks(kind, stage) for kind in problem.op_kinds[:2])
        lifetime += _round_trip(problem, stage)
        active += count * activation_memory(problem, stage) * lifetime
        weight = sum(problem.fastest_ticks(kind, stage) for kind in problem.op_kinds[2:])
        stashed += count * stash_memory(problem, stage) * weight
    if room <= 0 or not active + stashed:
        return Fraction(0)
    closing = min(problem.times.all_reduce[stage] for stage in stages)
    window = Fraction(active + stashed, room) + closing + problem.times.optimizer[column]
    if not has_equal_holders(problem, stages[0]):
        return window
    return max(window, _return_bound(problem, stages[0], Fraction(active, room)))
