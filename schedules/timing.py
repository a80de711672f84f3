"""A schedule replayed under other durations than the planned ones: noise, stragglers, many replays at once.

Workers keep the planned order of their ops; each op starts as soon as its worker is free and what it waits for has
come. Iterations follow each other on a worker without a barrier, as in the runtime. All replays advance together,
op by op along one topological order, with numpy over the replays.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.schedules.graph import Collective, awaited_here, programs_of, topological_order
from slipstream.schedules.precedence import OpKey, op_key, waits
from slipstream.schedules.schedule import COMPUTE_KINDS, LayerRange, Op, OpKind, Schedule, Worker

Floats = npt.NDArray[np.float64]

BATCH = 1000
"""Replays that advance together: enough for numpy, few enough for the cache."""


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """How durations differ from the plan."""

    spread: float = 0.0
    """Standard deviation of the logarithm of each compute op's factor; the mean factor is 1."""
    slow: Mapping[Worker, float] = {}
    """Factors of stragglers, on all their compute ops."""


class Step(NamedTuple):
    """One op, or an all-reduce as a whole: numbers of its workers, of what it waits for, and its length."""

    op: Op
    """Of an all-reduce, the longest of its As."""
    workers: tuple[int, ...]
    """Where reductions overlap, the link of a worker counts as one more, which A occupies, and O besides its own."""
    sources: tuple[tuple[int, int], ...]
    """Steps of other workers, and the ticks that their tensors need."""

    @property
    def ticks(self) -> int:
        """As planned."""
        return self.op.end_ticks - self.op.start_ticks

    @property
    def computes(self) -> bool:
        """Whether it takes another time with other data, or on another worker: not A and O."""
        return self.op.kind in COMPUTE_KINDS


def replay(schedule: Schedule, noise: Noise, *, replays: int = 1000, iterations: int = 4, seed: int = 0) -> Floats:
    """Mean seconds from one iteration to the next, one value a replay.

    Of `iterations` in a row the first is the run-up. Without noise that is at most the planned period. Raises
    ValueError for values that make no sense, unknown workers, and schedules whose ops wait for each other in a circle.
    """
    _require(schedule, noise, replays, iterations)
    steps, workers = steps_of(schedule)
    lengths = [schedule.seconds(step.ticks) * (noise.slow.get(step.op.worker, 1.0) if step.computes else 1.0)
               for step in steps]
    random = np.random.default_rng(seed)
    parts = []
    for begin in range(0, replays, BATCH):
        count = min(BATCH, replays - begin)
        free = np.zeros((workers, count))
        first = np.zeros(count)
        for iteration in range(iterations):
            _advance(steps, lengths, schedule.tick_seconds, free, noise.spread, random)
            if iteration == 0:
                first = free.max(axis=0)
        parts.append((free.max(axis=0) - first) / (iterations - 1))
    return np.concatenate(parts)


def period_at(schedule: Schedule, speeds: Mapping[Worker, float]) -> float:
    """Seconds from one iteration to the next when workers take `speeds` times as long as usual.

    The order of each worker's ops stays; ops wait for each other as in the runtime.
    """
    known = schedule.times.per_mille_of
    slow = {worker: speeds.get(worker, 1.0) / (known.get(worker, 1000) / 1000) for worker in schedule.seat_of}
    if all(abs(factor - 1.0) < 1e-3 for factor in slow.values()):
        return schedule.seconds(schedule.period_ticks)
    return float(replay(schedule, Noise(slow=slow), replays=1)[0])


def _advance(steps: Sequence[Step], lengths: Sequence[float], tick_seconds: float, free: Floats, spread: float,
             random: np.random.Generator) -> None:
    """One iteration: moves the times at which workers are free, (workers, replays) in seconds."""
    ends = np.empty((len(steps), free.shape[1]))
    for number, step in enumerate(steps):
        start = free[step.workers[0]]
        for worker in step.workers[1:]:
            start = np.maximum(start, free[worker])
        for source, hop in step.sources:
            start = np.maximum(start, ends[source] + hop * tick_seconds)
        length: float | Floats = lengths[number]
        if step.computes and spread and length:
            length = length * np.exp(random.normal(-spread**2 / 2, spread, free.shape[1]))
        np.add(start, length, out=ends[number])
        for worker in step.workers:
            free[worker] = ends[number]


def steps_of(schedule: Schedule) -> tuple[list[Step], int]:
    """All steps of an iteration, each after what it waits for, and the number of workers; where reductions overlap, the
    links of these have the numbers beyond.

    Raises ValueError where ops wait for each other in a circle.
    """
    programs = programs_of(schedule)
    number = {worker: index for index, worker in enumerate(programs)}
    done: dict[OpKey, tuple[int, Worker]] = {}
    members = _members(schedule, programs)
    steps: list[Step] = []
    links = len(number) if schedule.overlaps else 0
    for node in topological_order(schedule, programs):
        if isinstance(node, Collective):
            reductions = members[node.layers]
            awaited = [one for one in (awaited_here(schedule, programs[op.worker], programs[op.worker].index(op))
                                       for op in reductions) if one is not None] if links else []
            steps.append(Step(max(reductions, key=lambda op: op.end_ticks - op.start_ticks),
                              tuple(links + number[op.worker] for op in reductions),
                              tuple((done[op_key(one)][0], 0) for one in awaited)))
            continue
        assert isinstance(node, Op)
        sources: tuple[tuple[int, int], ...] = ()
        if node.kind in COMPUTE_KINDS:
            sources = tuple(_sources(op_key(node), node.worker, schedule, done))
            done[op_key(node)] = (len(steps), node.worker)
        own = number[node.worker]
        steps.append(Step(node, (own, links + own) if links and node.kind is OpKind.O else (own,), sources))
    return steps, len(number) + links


def _members(schedule: Schedule, programs: Mapping[Worker, Sequence[Op]]) -> dict[LayerRange, list[Op]]:
    """The As of each all-reduce, one a worker."""
    members: dict[LayerRange, list[Op]] = {}
    for ops in programs.values():
        for op in ops:
            if op.kind is OpKind.A and op.slice is not None:
                members.setdefault(schedule.layers_of(op.slice), []).append(op)
    return members


def _sources(key: OpKey, own: Worker, schedule: Schedule, done: Mapping[OpKey, tuple[int, Worker]]) -> \
        Iterator[tuple[int, int]]:
    _, _, pipeline, microbatch = key
    for producer, rule in waits(key, schedule.path(pipeline, microbatch)):
        if producer in done and done[producer][1] != own:
            yield done[producer][0], schedule.times.transfer if rule.tensor else 0


def _require(schedule: Schedule, noise: Noise, replays: int, iterations: int) -> None:
    if replays < 1 or iterations < 2:
        raise ValueError(f"{replays} replays of {iterations} iterations; expected at least 1 of at least 2")
    if not 0 <= noise.spread <= 2:
        raise ValueError(f"noise of {noise.spread:g}; expected 0 to 2")
    for worker, factor in noise.slow.items():
        if worker not in schedule.seat_of:
            raise ValueError(f"the schedule has no live worker {worker}")
        if not 0 < factor <= 1000:
            raise ValueError(f"worker {worker} slower by a factor of {factor:g}; expected more than 0, at most 1000")
