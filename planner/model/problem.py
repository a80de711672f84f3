"""The scheduling problem in whole ticks: what is fixed, before anything is decided."""

import math
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import msgspec

from planner.job.file import Job
from planner.job.layers import exact
from schedules.schedule import BackwardMode, Grid, Memory, OpKind, OptimizerMode, Slow, Times, VirtualStage, Worker

FINEST = 10**6
"""The longest op has at most this many ticks; finer times are rounded to it."""


class NoPlanError(Exception):
    """No schedule can exist; the message says why."""


class Unit(NamedTuple):
    """A micro-batch at a virtual stage: its F, I and W share one host."""

    stage: int
    pipeline: int
    microbatch: int


class Problem(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """A job with its failures."""

    name: str
    tick_seconds: float
    grid: Grid
    times: Times
    memory: Memory | None
    failed: frozenset[Worker]
    """Workers that are down."""
    backward: BackwardMode = "split"
    optimizer: OptimizerMode = "staggered"

    @cached_property
    def live(self) -> tuple[Worker, ...]:
        """The workers that are not down, sorted."""
        return tuple(worker for worker in self.grid.workers() if worker not in self.failed)

    @cached_property
    def column_of(self) -> tuple[int, ...]:
        """The worker column of each virtual stage."""
        return tuple(stage.column for stage in self.grid.stages)

    @cached_property
    def tied(self) -> tuple[int, ...]:
        """For each column, the first of those whose workers reduce gradients together; with one chain, itself."""
        first = list(range(self.grid.columns))
        for index, column in enumerate(self.column_of):
            original = self.column_of[self.grid.original(index)]
            low, high = sorted((first[original], first[column]))
            first = [low if group == high else group for group in first]
        return tuple(first)

    @cached_property
    def kinds(self) -> tuple[OpKind, ...]:
        """The compute ops of a unit, in order."""
        return (OpKind.F, OpKind.I, OpKind.W) if self.backward == "split" else (OpKind.F, OpKind.B)

    @property
    def gradient_kind(self) -> OpKind:
        """The op whose end frees the activation and sends the gradient on: I, or B when fused."""
        return self.kinds[1]

    @cached_property
    def live_by_column(self) -> tuple[tuple[int, ...], ...]:
        """For each column, the pipelines whose worker there is live."""
        return tuple(tuple(pipeline for pipeline in range(self.grid.pipelines)
                           if Worker(pipeline, column) not in self.failed) for column in range(self.grid.columns))

    def hosts(self, stage: int, pipeline: int) -> tuple[int, ...]:
        """The pipelines whose worker may run this stage of this pipeline's micro-batches: its own, else its peers."""
        live = self.live_by_column[self.column_of[stage]]
        return live if self.worker(stage, pipeline) in self.failed else (pipeline,)

    def worker(self, stage: int, host: int) -> Worker:
        """The worker that holds this stage in pipeline `host`."""
        return Worker(host, self.column_of[stage])

    def cost(self, kind: OpKind, stage: int, host: int) -> int:
        """Ticks of a compute op or A of this stage on pipeline `host`'s worker."""
        return self._cost[kind, stage] if not self.times.slow else \
            self.times.duration_ticks(kind, stage, self.worker(stage, host))

    @cached_property
    def _cost(self) -> dict[tuple[OpKind, int], int]:
        nobody = Worker(-1, -1)
        return {(kind, stage): self.times.duration_ticks(kind, stage, nobody)
                for kind in OpKind if kind is not OpKind.O for stage in range(len(self.grid.stages))}

    def fastest(self, kind: OpKind, stage: int) -> int:
        """The least that this op takes on any live worker of the stage."""
        live = self.live_by_column[self.column_of[stage]]
        return min(self.cost(kind, stage, host) for host in (live if self.times.slow else live[:1]))

    def hop(self, stage: int, host: int, other: int, other_host: int) -> int:
        """Ticks a tensor needs from one unit's worker to the other's: 0 on the same worker."""
        same = self.column_of[stage] == self.column_of[other] and host == other_host
        return 0 if same else self.times.transfer

    def hold(self, stage: int) -> int:
        """The most that a micro-batch ever holds at this stage: its activation, or after its I its stash."""
        return max(self.activation(stage), self.stash(stage))

    def least_room(self, stage: int) -> int:
        """What one micro-batch holds at most on its worker from its F of this stage until its W there has ended.

        The worker may hold deeper stages of the same chain; their W can be done before the gradient is back at this
        one. Where every worker has this room for each of its stages, a plan exists: one micro-batch after the other,
        each W directly after its I. Where one has not, none does.
        """
        held = most = 0
        for other in self.grid.stages_of(self.column_of[stage]):
            if other >= stage and other // self.grid.depth == stage // self.grid.depth:
                most = max(most, held + self.hold(other))
                held += self.activation(other)
        return most

    @cached_property
    def least_ways(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(forward, back): for 0, 1, 2 ... stages from the first on, the least ticks of their F, or of their I (or B),
        each with the way to the stage behind.
        """
        stages = range(len(self.grid.stages))
        hops = [0 if self.column_of[stage] == self.column_of[stage + 1] else self.times.transfer
                for stage in stages[:-1]] + [0]
        forward, back = (tuple(accumulate((self.fastest(kind, stage) + hops[stage] for stage in stages), initial=0))
                         for kind in (OpKind.F, self.gradient_kind))
        return forward, back

    def activation(self, stage: int) -> int:
        """Memory held from F start to the end of I (or B); 0 where memory is unlimited."""
        return self.memory.activation[stage] if self.memory else 0

    def stash(self, stage: int) -> int:
        """Memory held from I end to W end; 0 when fused or where memory is unlimited."""
        return self.memory.weight_stash[stage] if self.memory and self.backward == "split" else 0

    def tail(self, column: int) -> int:
        """Ticks of the all-reduces and the optimizer step that close an iteration on a worker of this column."""
        return sum(self.times.all_reduce[stage] for stage in self.grid.stages_of(column)) + self.times.optimizer[column]

    def units(self, pipelines: Iterable[int] | None = None) -> Iterator[Unit]:
        """Every unit of the given pipelines (default: all), by pipeline, micro-batch, stage."""
        for pipeline in range(self.grid.pipelines) if pipelines is None else pipelines:
            for microbatch in range(self.grid.microbatches[pipeline]):
                for stage in self.grid.path(microbatch):
                    yield Unit(stage, pipeline, microbatch)

    @property
    def operations(self) -> int:
        """Compute ops in one iteration: the size of the problem."""
        return self.grid.total_microbatches * self.grid.depth * len(self.kinds)


def build_problem(job: Job, failed: Sequence[Worker] = (), *, backward: BackwardMode = "split",
                  optimizer: OptimizerMode = "staggered") -> Problem:
    """Translate a job to ticks.

    Raises NoPlanError when a stage has no live worker or a worker cannot hold a single micro-batch.
    """
    grid = Grid(pipelines=job.pipelines, columns=job.stages, microbatches=job.microbatches, stages=_stages(job),
                chains=job.chains)
    tick = _tick(job)
    problem = Problem(name=job.name, tick_seconds=float(tick), grid=grid, times=_times(job, grid, tick),
                      memory=_memory(job), failed=frozenset(failed), backward=backward, optimizer=optimizer)
    _require_feasible(problem)
    return problem


def _stages(job: Job) -> tuple[VirtualStage, ...]:
    if job.layers is None:
        return tuple(VirtualStage(column=column) for column in job.columns)
    depth = len(job.layers) // job.chains
    ends = [sum(job.layers[index // depth * depth:index + 1]) for index in range(len(job.layers))]
    return tuple(VirtualStage(column=column, layers=(end - count, end))
                 for column, count, end in zip(job.columns, job.layers, ends, strict=True))


def _tick(job: Job) -> Fraction:
    """The coarsest tick that holds every time exactly, or the longest op / FINEST when that is coarser."""
    time = job.time
    compute = [exact(value) for value in {*time.forward, *time.backward_input, *time.backward_weight}]
    slowed = [value * Fraction(_per_mille(factor), 1000) for _, factor in time.slow for value in compute]
    values = [value for value in (*compute, *slowed, *map(exact, (*time.optimizer, *time.all_reduce, time.transfer)))
              if value]
    return max(_common(values), max(values) / FINEST)


def _common(values: Iterable[Fraction]) -> Fraction:
    """The greatest common divisor of fractions."""
    numerator, denominator = 0, 1
    for value in values:
        common = math.lcm(denominator, value.denominator)
        numerator = math.gcd(numerator * (common // denominator), value.numerator * (common // value.denominator))
        denominator = common
    return Fraction(numerator, denominator)


def _times(job: Job, grid: Grid, tick: Fraction) -> Times:
    def ticks(values: Sequence[float]) -> tuple[int, ...]:
        return tuple(round(exact(value) / tick) for value in values)

    time = job.time
    optimizer = ticks(time.optimizer)
    return Times(forward=ticks(time.forward), backward_input=ticks(time.backward_input),
                 backward_weight=ticks(time.backward_weight), all_reduce=ticks(time.all_reduce),
                 optimizer=tuple(sum(optimizer[stage] for stage in grid.stages_of(column))
                                 for column in range(grid.columns)),
                 transfer=ticks([time.transfer])[0],
                 slow=tuple(Slow(worker, _per_mille(factor)) for worker, factor in time.slow))


def _per_mille(factor: float) -> int:
    return round(factor * 1000)


def _memory(job: Job) -> Memory | None:
    """Whole multiples of the coarsest exact unit; rounded to the safe side where that would need huge numbers."""
    if job.memory is None:
        return None
    used = [exact(value) for value in (*job.memory.activation, *job.memory.weight_stash)]
    room = [exact(value) for value in job.memory.capacity]
    positive = [value for value in (*used, *room) if value]
    unit = max(_common(positive), max(positive) / 2**40) if positive else Fraction(1)
    count = len(job.memory.activation)
    return Memory(unit=float(unit), capacity=tuple(math.floor(value / unit) for value in room),
                  activation=tuple(math.ceil(value / unit) for value in used[:count]),
                  weight_stash=tuple(math.ceil(value / unit) for value in used[count:]))


def _require_feasible(problem: Problem) -> None:
    for column, live in enumerate(problem.live_by_column):
        if not live:
            raise NoPlanError(f"stage {column} has no live worker: all of its {problem.grid.pipelines} workers are "
                              "down, so nobody holds its parameters")
    memory = problem.memory
    if memory is None:
        return
    for column, capacity in enumerate(memory.capacity):
        chains = max(problem.grid.microbatches)  # those after so many are visited by no micro-batch
        need = max((problem.least_room(stage) for stage in problem.grid.stages_of(column)
                    if stage // problem.grid.depth < chains), default=0)
        if need > capacity:
            raise NoPlanError(f"a worker of stage {column} has room for {capacity * memory.unit:g}, but one "
                              f"micro-batch needs {need * memory.unit:g} there: no schedule can run it")
