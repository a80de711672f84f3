"""Answer a question: the shortest period in seconds, and a schedule file that attains it.

Each solution is written as a schedule that `slipstream.schedules.check` judges.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import msgspec

from slipstream.schedules.check import check
from slipstream.schedules.layers import LayerRange, merge_ranges
from slipstream.schedules.schedule import (
    Grid,
    Memory,
    OpKind,
    ProgramOp,
    Room,
    Schedule,
    Seat,
    Slow,
    Times,
    VirtualStage,
    Worker,
)
from tests.exact.model import EFFORT, Solution, solve
from tests.exact.question import TIMES, Part, Question, in_whole_units

CLOSE = Fraction(1, 10**4)
"""Relative difference up to which two bounds of rounded times count as one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Bounds in seconds on the shortest period, and a schedule that takes `upper` seconds."""

    lower: Fraction
    """No schedule of the question is shorter, if any is as short as was asked for."""
    upper: Fraction | None
    schedule: Schedule | None
    is_impossible: bool = False
    """True if it is proven that no schedule is as short as was asked for."""
    effort: float = 0.0
    """Deterministic time that the solver took."""

    @property
    def is_exact(self) -> bool:
        """True if the shortest period is known, up to the rounding of times that are too fine."""
        return self.upper is not None and self.upper <= self.lower * (1 + CLOSE)


def answer(
    question: Question, *, at_most: Fraction | None = None, effort: float = EFFORT
) -> Answer:
    """Return the shortest period of a question, or proven bounds, by a deterministic `effort`.

    With `at_most` seconds, no longer periods are looked for. Raises AssertionError if the checker
    refuses what was found.
    """
    upwards = in_whole_units(question, up=True)
    limit = None if at_most is None else int(at_most / upwards.tick)
    rounding = 0 if upwards.is_exact or limit is None else max(1, int(limit * CLOSE / 2))
    above = below = solve(upwards, at_most=limit if limit is None else limit + rounding,
                          effort=effort if upwards.is_exact else effort / 2)
    taken = above.effort
    if not upwards.is_exact:
        below = solve(
            in_whole_units(question, up=False), at_most=limit, effort=max(0.0, effort - taken)
        )
        taken += below.effort
    lower, is_impossible = below.bound * upwards.tick, below.solution is None and below.is_decided
    if above.solution is None:
        return Answer(lower=lower, upper=None, schedule=None, is_impossible=is_impossible,
                      effort=taken)
    schedule = write_schedule(upwards, above.solution)
    violations = check(schedule)
    assert not violations, f"the checker refuses what the reference found: {violations[0]}"
    upper = schedule.period_ticks * upwards.tick
    return Answer(lower=lower, upper=upper, schedule=schedule, effort=taken)


def write_schedule(question: Question, solution: Solution) -> Schedule:
    """Return a solution of a question in whole units as a schedule file."""
    chains, ranges = len(question.chains), [(part.first, part.end) for part in question.parts]
    slices = tuple(layers for layers in ranges if layers not in question.stages)
    stages = question.stages * chains
    numbers = [
        [
            chain * len(question.stages) + question.stages.index(layers)
            if layers in question.stages
            else len(stages) + slices.index(layers)
            for layers in ranges
        ]
        for chain in range(chains)
    ]
    columns = [column for chain in question.chains for column in chain]
    pipelines = _pipelines_of_roles(question, solution)
    seats, programs = [], []
    for number, worker in enumerate(question.live):
        is_listed = question.scope == "any layers" or (
            question.scope == "roles" and worker in question.capacity_of)
        holds = merge_ranges(ranges[part] for part in solution.held[worker]) if is_listed else None
        seats.append(
            Seat(
                Worker(*worker), Worker(pipelines[worker], solution.columns[worker]), number, holds
            )
        )
        programs.append(_program(question, solution, numbers, worker, pipelines[worker]))
    schedule = Schedule(
        job="tiny",
        tick_seconds=float(question.tick),
        slices=slices,
        backward=question.backward,
        grid=Grid(
            pipelines=question.pipelines,
            columns=question.columns,
            chains=chains,
            microbatches=question.microbatches,
            stages=tuple(
                VirtualStage(column=column, layers=layers if question.has_layers else None)
                for column, layers in zip(columns, stages, strict=True)
            ),
        ),
        times=_times(question, [*stages, *slices]),
        memory=_memory(question, [*stages, *slices]),
        optimizer=question.optimizer,
        failed=tuple(Worker(*worker) for worker in question.failed),
        seats=tuple(seats),
        programs=tuple(programs),
        period_ticks=1,
        lower_bound_ticks=0,
        status="feasible",
        method="exact",
    )
    return msgspec.structs.replace(schedule, period_ticks=_period(schedule, solution))


def _period(schedule: Schedule, solution: Solution) -> int:
    """Return the period of the ops as they are, which may be shorter than the solution says."""
    windows = [
        (ops[0].start_ticks, ops[-1].end_ticks) for ops in map(schedule.ops, schedule.members)
    ]
    first = min(start for start, _ in windows)
    period = max(
        end - (first if schedule.optimizer == "synchronous" else start) for start, end in windows
    )
    assert period <= solution.period, (
        f"the schedule takes {period} ticks, its solution {solution.period}"
    )
    return period


def _pipelines_of_roles(question: Question, solution: Solution) -> dict[tuple[int, int], int]:
    """Return the pipeline of each worker's role: its own, or the first one left."""
    own = {worker for worker in question.live if solution.columns[worker] == worker[1]}
    pipelines, taken = {worker: worker[0] for worker in own}, set(own)
    for worker in question.live:
        if worker not in own:
            pipelines[worker] = next(number for number in range(question.pipelines)
                                     if (number, solution.columns[worker]) not in taken)
            taken.add((pipelines[worker], solution.columns[worker]))
    return pipelines


def _program(question: Question, solution: Solution, numbers: Sequence[Sequence[int]],
             worker: tuple[int, int], pipeline: int) -> tuple[ProgramOp, ...]:
    """Return the ops of a worker in order; those without duration come first."""
    placed: list[tuple[int, int, tuple[int, ...], ProgramOp]] = []
    for (kind, batch, part), start in solution.starts.items():
        if solution.hosts[batch, part] == worker:
            rank = ("FIBW".index(kind), part if kind == "F" else -part, *batch)
            placed.append(
                (
                    start,
                    start + question.ticks(kind, part, worker),
                    rank,
                    ProgramOp(
                        OpKind(kind),
                        numbers[batch[1] % len(numbers)][part],
                        batch[1],
                        start,
                        None if batch[0] == pipeline else batch[0],
                    ),
                )
            )
    for part in solution.held[worker]:
        start = solution.reductions[part]
        placed.append((start, start + question.ticks("A", part), (4, part),
                       ProgramOp(OpKind.A, numbers[0][part], None, start)))
    placed.sort(key=lambda op: op[:3])
    return (*(op for *_, op in placed), ProgramOp(OpKind.O, None, None, solution.steps[worker]))


def _times(question: Question, ranges: Sequence[LayerRange]) -> Times:
    totals = {key: _totals(question, ranges, lambda part, kind=kind: part.times[kind])
              for kind, key in TIMES.items()}
    totals["optimizer"] = tuple(
        sum(question.ticks("O", part) for part in held) for held in question.held
    )
    return Times(
        **totals,
        transfer=int(question.transfer),
        slow=tuple(
            Slow(Worker(*worker), int(factor * 1000))
            for worker, factor in sorted(question.slow.items())
        ),
        optimizer_of_layer=tuple(question.ticks("O", part) for part in range(len(question.parts)))
        if _has_layers_as_parts(question)
        else (),
        **({"overlap": True} if question.overlap else {}),
    )


def _memory(question: Question, ranges: Sequence[LayerRange]) -> Memory | None:
    if question.capacity is None:
        return None
    rooms = tuple(
        Room(Worker(*worker), int(room)) for worker, room in sorted(question.capacity_of.items())
    )
    return Memory(unit=float(question.unit), capacity=tuple(map(int, question.capacity)),
                  activation=_totals(question, ranges, lambda part: part.activation),
                  weight_stash=_totals(question, ranges, lambda part: part.stash),
                  weights=tuple(int(part.weights) for part in question.parts)
                  if _has_layers_as_parts(question) else (), capacity_of=rooms or msgspec.UNSET)


def _has_layers_as_parts(question: Question) -> bool:
    return len(question.parts) == question.stages[-1][1]


def _totals(
    question: Question, ranges: Sequence[LayerRange], amount: Callable[[Part], Any]
) -> tuple[int, ...]:
    """Return an amount of all parts within each of the ranges of layers."""
    return tuple(
        int(sum(amount(part) for part in question.parts if first <= part.first and part.end <= end))
        for first, end in ranges
    )
