"""Bound the windows of workers that hold several stages, by memory and round trips.

A *chunk* is one stage on one worker. Lemmas 18 and 19 of docs/bounds.md have the proofs. Times are
in ticks, memory in units of the problem.
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
from slipstream.planner.model.memory import activation_capacity, activation_memory, stash_memory
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
    """All stages of one worker, with the least times that it works and waits."""

    chunks: tuple[Chunk, ...]
    room: int
    work: Fraction
    """Least time of all compute ops that the worker runs in an iteration."""
    first: int
    """Least time from the start of the worker's first F to its first I."""
    last: int
    """Least time from the end of the worker's last F to its last I's end."""
    awaited_weight: int
    """Least time of the W that follows the last I."""
    is_full: bool
    """True if memory never holds all of the worker's micro-batches at once.

    Some F then follows its first I.
    """

    @property
    def fill(self) -> Fraction:
        """Least ticks for which the worker idles before its first I: lemma 18a."""
        forwards = ((chunk.activation, chunk.forward, chunk.most) for chunk in self.chunks)
        return max(Fraction(0), self.first - most_ticks(forwards, self.room))

    @property
    def most_left(self) -> Fraction:
        """Most time of I and W left when the last F ends: lemma 18b."""
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
        """Least idle time of the worker after its last F, until its last W ends.

        Lemma 18b of docs/bounds.md.
        """
        return max(Fraction(0), self.last + self.awaited_weight - self.most_left)

    @property
    def idle(self) -> Fraction:
        """Least idle ticks of the worker before its first I or after its last F."""
        return self.fill + self.rest if self.is_full else max(self.fill, self.rest)

    @property
    def ticks_until_last_gradient(self) -> Fraction:
        """Least time from the first F to the end of the last I: lemma 18c."""
        rest, deferred = self.last - self.most_left, -self.most_deferred
        if self.is_full:
            return self.work + self.fill + max(rest, deferred)
        return self.work + max(rest, self.fill + deferred)


def most_ticks(ops: Iterable[tuple[int, int, int]], room: int) -> Fraction:
    """Return the most time of ops whose memory fits together into `room`.

    Each kind of ops is a triple (memory, time, largest number). The result is an upper bound, as
    the last op may be cut.
    """
    kinds = list(ops)
    total = Fraction(sum(ticks * largest for size, ticks, largest in kinds if not size))
    # Only multiples of what all sizes have in common can be filled.
    kinds = [kind for kind in kinds if kind[0]]
    free = 0
    if kinds:
        free = room - room % math.gcd(*(size for size, _, _ in kinds))
    # The fractional knapsack: ops with the most time for their memory first (Dantzig 1957).
    kinds.sort(key=lambda kind: Fraction(kind[1], kind[0]), reverse=True)
    for size, ticks, largest in kinds:
        taken = min(free, size * largest)
        total += Fraction(taken * ticks, size)
        free -= taken
    return total


def chunk_bounds(problem: Problem) -> Iterator[tuple[Fraction, str]]:
    """Yield pairs (bound of lemma 18 or 19, what it counts); none without the assumptions."""
    if not has_whole_stages(problem) or problem.grid.chains > 1:
        return
    for column in range(problem.grid.columns):
        stages = problem.grid.stages_of_column(column)
        # A column without stages, or one that has lost all workers, has no window.
        if not stages or not problem.holders_by_slice[stages[0]]:
            continue
        yield (
            _lifetime_bound(problem, column),
            f"how long column {column} holds its activations, and its memory",
        )
        for chunks in _list_chunks(problem, stages) if len(stages) > 1 else ():
            yield (
                _window_bound(problem, column, chunks),
                f"the work of column {column}, and its waits for its first and last gradients",
            )
            yield (
                _return_bound(problem, stages[0], chunks.ticks_until_last_gradient),
                f"the way to column {column}, what its memory allows, and the way back",
            )


def _list_chunks(problem: Problem, stages: Sequence[int]) -> list[Chunks]:
    """Return a column's different `Chunks`; none if it is unknown how much each worker runs."""
    holders, counts = problem.holders_by_slice[stages[0]], problem.grid.microbatches
    # Either it is known which micro-batches each worker runs, or one of equal workers has the mean.
    if keeps_microbatches_together(problem, stages[0]):
        if len(holders) == 1:
            return [_chunks_together(problem, holders[0], stages, sum(counts))]
        examples = {
            (problem.workers[worker], counts[worker.pipeline]): worker for worker in holders
        }
        return [
            _chunks_together(problem, worker, stages, count)
            for (_, count), worker in examples.items()
        ]
    if has_equal_holders(problem, stages[0]):
        return [_busiest_chunks(problem, holders, stages)]
    return []


def _chunks_together(problem: Problem, worker: Worker, stages: Sequence[int], count: int) -> Chunks:
    """Return the `Chunks` of a worker that runs `count` micro-batches at all its stages."""
    # The first I is of a micro-batch that has passed all stages of the worker; the last F is at the
    # last stage.
    chunks = tuple(_make_chunk(problem, stage, worker, count) for stage in stages)
    trip, between = _round_trip(problem, stages[-1]), _hop(problem, stages[-1])
    out, home = problem.min_path_ticks
    room = activation_capacity(problem, worker)
    return Chunks(
        chunks=chunks,
        room=room,
        work=Fraction(count * sum(chunk.work for chunk in chunks)),
        first=out[stages[-1] + 1] - out[stages[0]] - between + trip,
        last=trip + home[stages[-1] + 1] - home[stages[0]] - between,
        awaited_weight=chunks[0].weight,
        is_full=count * sum(chunk.activation for chunk in chunks) > room,
    )


def _busiest_chunks(problem: Problem, holders: Sequence[Worker], stages: Sequence[int]) -> Chunks:
    """Return the `Chunks` of the busiest of `holders`, equal workers that all have `stages`."""
    room, trip = activation_capacity(problem, holders[0]), _round_trip(problem, stages[-1])
    chunks = tuple(
        _make_chunk(problem, stage, holders[0], count_microbatches_at(problem, stage))
        for stage in stages
    )
    work = Fraction(sum(chunk.work * chunk.most for chunk in chunks), len(holders))
    if common := math.gcd(*(chunk.work for chunk in chunks)):
        work = Fraction(math.ceil(work / common) * common)  # lemma 20
    # The busiest worker has at least this work, and so at least this much to hold.
    held_per_work = min(
        (Fraction(chunk.activation, chunk.work) for chunk in chunks if chunk.work), default=0
    )
    return Chunks(
        chunks=chunks,
        room=room,
        work=work,
        first=problem.fastest_ticks(OpKind.F, stages[-1]) + trip,
        last=trip + problem.fastest_ticks(problem.gradient_kind, stages[-1]),
        awaited_weight=min(chunk.weight for chunk in chunks),
        is_full=work * held_per_work > room,
    )


def _make_chunk(problem: Problem, stage: int, worker: Worker, count: int) -> Chunk:
    forward, gradient, *weight = (
        problem.op_ticks(kind, stage, worker) for kind in problem.op_kinds
    )
    return Chunk(
        forward,
        gradient,
        sum(weight),
        activation_memory(problem, stage),
        stash_memory(problem, stage),
        count,
    )


def _hop(problem: Problem, stage: int) -> int:
    """Return the least time of a stage's transfer to the next; 0 without one."""
    return problem.min_transfer_ticks(stage) if stage + 1 < len(problem.grid.stages) else 0


def _round_trip(problem: Problem, stage: int) -> int:
    """Return the least time from F's end to I's start at a stage."""
    out, home = problem.min_path_ticks
    return out[-1] - out[stage + 1] + home[-1] - home[stage + 1] + 2 * _hop(problem, stage)


def _window_bound(problem: Problem, column: int, chunks: Chunks) -> Fraction:
    """Return a bound on the windows of the workers of a column: lemma 18b."""
    stages = problem.grid.stages_of_column(column)
    reductions = [problem.times.all_reduce[stage] for stage in stages]
    # No reduction lies in the fill. In the rest some may, but not the one that awaits the last W.
    beside_fill, beside_rest = sum(reductions), reductions[0]
    if not keeps_microbatches_together(problem, stages[0]):
        beside_fill = beside_rest = min(reductions)
    way = problem.min_path_ticks[0][stages[0]] if is_synchronous(problem) else 0
    return (
        way
        + chunks.work
        + max(chunks.fill + beside_fill, chunks.idle + beside_rest)
        + problem.times.optimizer[column]
    )


def _return_bound(problem: Problem, stage: int, until_last_gradient: Fraction) -> Fraction:
    """Return a bound, in ticks, by the way of micro-batches to `stage` and back.

    `until_last_gradient` is the least time there, from the first F to the end of the last I. The
    bound is 0 for stage 0.
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
    """Return a bound by memory and how long a column's micro-batches hold it. Lemma 19."""
    stages = problem.grid.stages_of_column(column)
    room = sum(
        activation_capacity(problem, worker) for worker in problem.holders_by_slice[stages[0]]
    )
    # Memory x time that all micro-batches take at all stages (Little 1961).
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
    # Holders hold nothing during their last reduction and step.
    closing = min(problem.times.all_reduce[stage] for stage in stages)
    window = Fraction(active + stashed, room) + closing + problem.times.optimizer[column]
    if not has_equal_holders(problem, stages[0]):
        return window
    return max(window, _return_bound(problem, stages[0], Fraction(active, room)))
