"""Replay a schedule with other durations than planned: with noise, or slow workers.

Workers keep the planned order of their ops. Each op starts as soon as its worker is free and the
tensors that it waits for have arrived. Iterations follow one another on each worker without a
barrier, as in the runtime. All replays advance together, op by op in a topological order, with
numpy over the replays.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.schedules.graph import (
    Collective,
    last_local_backward,
    programs_of,
    topological_order,
)
from slipstream.schedules.precedence import OpKey, op_key, producers_with_rules
from slipstream.schedules.schedule import COMPUTE_KINDS, LayerRange, Op, OpKind, Schedule, Worker

Floats = npt.NDArray[np.float64]

BATCH = 1000
"""Number of replays that advance together: enough for numpy, few enough for the cache."""


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """Random and constant factors by which compute ops of a replay take longer."""

    spread: float = 0.0
    """Standard deviation of the logarithm of each op's random factor, whose mean is 1."""
    slow: Mapping[Worker, float] = {}
    """Constant factors by which all compute ops of some workers take longer than planned."""


class ReplayStep(NamedTuple):
    """Step of a replay, an op or a whole all-reduce: what it occupies and awaits."""

    op: Op
    """Op of this step; for an all-reduce, the longest A of its workers."""
    workers: tuple[int, ...]
    """Numbers of the workers and links that the step occupies.

    Workers are numbered in the order of `Schedule.seats`. If reductions overlap with compute, each
    worker also has a link, numbered after all workers: A occupies links, and O a worker and its
    link.
    """
    sources: tuple[tuple[int, int], ...]
    """Steps that this one awaits, besides those on `workers`: pairs (index, ticks to arrive)."""

    @property
    def planned_ticks(self) -> int:
        """Planned duration of the step in ticks."""
        return self.op.end_ticks - self.op.start_ticks

    @property
    def is_compute(self) -> bool:
        """True if noise and speed change the step's duration, unlike that of A or O."""
        return self.op.kind in COMPUTE_KINDS


def replay_with_noise(
    schedule: Schedule, noise: Noise, *, replays: int = 1000, iterations: int = 4, seed: int = 0
) -> Floats:
    """Return the mean seconds from one iteration to the next in each of several replays.

    The shape is [replays]. Durations are random. With neither spread nor slow workers, the result
    is at most the planned period.

    Raises ValueError for values out of range, unknown workers, and schedules whose ops wait for
    each other in a circle.

    Parameters
    ----------
    schedule
        Schedule to replay.
    noise
        Spread of durations, and workers that are slow.
    replays
        Number of replays, whose mean seconds are returned.
    iterations
        Number of iterations in a row, of which the first is a warm-up.
    seed
        Seed of the random durations.
    """
    _require_valid(schedule, noise, replays, iterations)
    steps, workers = replay_steps(schedule)
    # A step takes its planned time, unless its worker is slow.
    lengths = []
    for step in steps:
        factor = noise.slow.get(step.op.worker, 1.0) if step.is_compute else 1.0
        lengths.append(schedule.seconds(step.planned_ticks) * factor)
    random = np.random.default_rng(seed)
    parts = []
    # The first iteration fills the pipelines, so time counts from its end.
    for begin in range(0, replays, BATCH):
        count = min(BATCH, replays - begin)
        free = np.zeros((workers, count))
        first = np.zeros(count)
        for iteration in range(iterations):
            _run_iteration(steps, lengths, schedule.tick_seconds, free, noise.spread, random)
            if iteration == 0:
                first = free.max(axis=0)
        parts.append((free.max(axis=0) - first) / (iterations - 1))
    return np.concatenate(parts)


def period_at(schedule: Schedule, speeds: Mapping[Worker, float]) -> float:
    """Return the seconds from one iteration to the next if workers have other speeds.

    `speeds` has the factors by which compute ops of workers take longer than usual; others take the
    usual time. If all are within 0.1 % of the plan's, the result is the planned period. The order
    of each worker's ops stays as planned. Ops wait for each other as in the runtime. Raises
    ValueError if they wait in a circle, or for a factor out of range.
    """
    planned = schedule.times.per_mille_of
    slow = {
        worker: speeds.get(worker, 1.0) / (planned.get(worker, 1000) / 1000)
        for worker in schedule.seat_of
    }
    # Speeds as planned: the replay would only repeat the plan.
    if all(abs(factor - 1.0) < 1e-3 for factor in slow.values()):
        return schedule.seconds(schedule.period_ticks)
    return float(replay_with_noise(schedule, Noise(slow=slow), replays=1)[0])


def _run_iteration(
    steps: Sequence[ReplayStep],
    lengths: Sequence[float],
    tick_seconds: float,
    free: Floats,
    spread: float,
    random: np.random.Generator,
) -> None:
    """Replay one iteration in all replays, and update `free` to its end.

    `free` has the seconds at which each worker and link is free, [workers and links, replays].
    `lengths` has the seconds of each step without noise, and `spread` the standard deviation of the
    logarithm of the factor on compute ops.
    """
    ends = np.empty((len(steps), free.shape[1]))
    # Steps are sorted such that all awaited ones have ended before.
    for number, step in enumerate(steps):
        start = free[step.workers[0]]
        for worker in step.workers[1:]:
            start = np.maximum(start, free[worker])
        for source, hop in step.sources:
            start = np.maximum(start, ends[source] + hop * tick_seconds)
        length: float | Floats = lengths[number]
        if step.is_compute and spread and length:
            # A log-normal factor: positive, and with this location of mean 1.
            length = length * np.exp(random.normal(-(spread**2) / 2, spread, free.shape[1]))
        np.add(start, length, out=ends[number])
        for worker in step.workers:
            free[worker] = ends[number]


def replay_steps(schedule: Schedule) -> tuple[list[ReplayStep], int]:
    """Return the steps of an iteration in order, and the number of workers and links.

    Steps are ops and whole all-reduces; each comes after what it waits for. Only if reductions
    overlap compute does each worker have a link, numbered after all workers. Raises ValueError if
    ops wait for each other in a circle.
    """
    programs = programs_of(schedule)
    number = {worker: index for index, worker in enumerate(programs)}
    done: dict[OpKey, tuple[int, Worker]] = {}
    members = _ops_by_reduction(schedule, programs)
    steps: list[ReplayStep] = []
    links = len(number) if schedule.has_overlap else 0
    for node in topological_order(schedule, programs):
        if isinstance(node, Collective):
            reductions = members[node.layers]
            awaited: list[tuple[int, int]] = []
            # A reduction on the worker itself follows its program; one on a link waits for the
            # last backward of its layers.
            for op in reductions if links else ():
                program = programs[op.worker]
                before = last_local_backward(schedule, program, program.index(op))
                if before is not None:
                    awaited.append((done[op_key(before)][0], 0))
            longest = max(reductions, key=lambda op: op.end_ticks - op.start_ticks)
            places = tuple(links + number[op.worker] for op in reductions)
            steps.append(ReplayStep(longest, places, tuple(awaited)))
            continue
        assert isinstance(node, Op)
        sources: tuple[tuple[int, int], ...] = ()
        if node.kind in COMPUTE_KINDS:
            sources = tuple(_remote_sources(op_key(node), node.worker, schedule, done))
            done[op_key(node)] = (len(steps), node.worker)
        place = number[node.worker]
        # The optimizer step also waits for the worker's link, on which its reductions run.
        places = (place, links + place) if links and node.kind is OpKind.O else (place,)
        steps.append(ReplayStep(node, places, sources))
    return steps, len(number) + links


def _ops_by_reduction(
    schedule: Schedule, programs: Mapping[Worker, Sequence[Op]]
) -> dict[LayerRange, list[Op]]:
    """Return the A of all workers that take part, by range of layers."""
    members: dict[LayerRange, list[Op]] = {}
    for ops in programs.values():
        for op in ops:
            if op.kind is OpKind.A and op.slice is not None:
                members.setdefault(schedule.layers_of(op.slice), []).append(op)
    return members


def _remote_sources(
    key: OpKey, worker: Worker, schedule: Schedule, done: Mapping[OpKey, tuple[int, Worker]]
) -> Iterator[tuple[int, int]]:
    """Yield the steps in `done` on other workers that op `key` awaits (`ReplayStep.sources`)."""
    path = schedule.route_of(key.pipeline, key.microbatch)
    for producer, rule in producers_with_rules(key, path):
        if producer in done and done[producer][1] != worker:
            yield done[producer][0], schedule.times.transfer if rule.tensor else 0


def _require_valid(schedule: Schedule, noise: Noise, replays: int, iterations: int) -> None:
    """Raise ValueError unless the arguments of `replay_with_noise` are valid."""
    if replays < 1 or iterations < 2:
        raise ValueError(
            f"{replays} replays of {iterations} iterations; expected at least 1 of at least 2"
        )
    if not 0 <= noise.spread <= 2:
        raise ValueError(f"noise of {noise.spread:g}; expected 0 to 2")
    for worker, factor in noise.slow.items():
        if worker not in schedule.seat_of:
            raise ValueError(f"the schedule has no live worker {worker}")
        if not 0 < factor <= 1000:
            raise ValueError(
                f"worker {worker} slower by a factor of {factor:g}; expected more than 0, at most "
                "1000"
            )
