"""Answer a question: the shortest period in seconds, and a schedule file that attains it.

Each solution is written as a schedule that `slipstream.schedules.check` judges.
"""

from dataclasses import dataclass, replace
from fractions import Fraction

from slipstream.schedules.check import check
from slipstream.schedules.layers import merge_ranges
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
    compute_period_ticks,
)
from tests.exact.model import EFFORT, Solution, solve
from tests.exact.question import OPS, Question
from tests.exact.units import Units, units_of

CLOSE = Fraction(1, 10**4)
"""Relative difference up to which two bounds of rounded times count as one answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Bounds in seconds on the shortest period; equal if it is known."""

    lower: Fraction
    """No schedule of the question is shorter. If there is none up to the limit that was asked for, above it."""
    upper: Fraction | None
    schedule: Schedule | None
    """Schedule that takes `upper` seconds."""
    is_impossible: bool = False
    """True if it is proven that no schedule exists up to the limit that was asked for."""

    @property
    def is_exact(self) -> bool:
        """True if the shortest period is known, up to the rounding of times that are too fine."""
        return self.upper is not None and self.upper <= self.lower * (1 + CLOSE)


def answer(question: Question, *, at_most: Fraction | None = None, effort: float = EFFORT) -> Answer:
    """Return the shortest period of a question, or proven bounds.

    With `at_most` seconds, only shorter or equal periods are looked for. The deterministic time `effort`
    is about seconds. Raises AssertionError if the checker refuses what was found.
    """
    upwards = units_of(question, up=True)
    limit = None if at_most is None else max(1, int(at_most / upwards.tick))
    rounding = 0 if upwards.is_exact or limit is None else max(1, int(limit * CLOSE / 2))
    above = solve(upwards, at_most=limit and limit + rounding, effort=effort)
    lower, is_impossible = above.bound * upwards.tick, above.solution is None and above.is_decided
    if not upwards.is_exact:
        below = solve(replace(upwards, up=False), at_most=limit, effort=effort)
        lower, is_impossible = below.bound * upwards.tick, below.solution is None and below.is_decided
    if above.solution is None:
        return Answer(lower=lower, upper=None, schedule=None, is_impossible=is_impossible)
    schedule = write_schedule(upwards, above.solution)
    violations = check(schedule)
    assert not violations, f"the checker refuses what the reference found: {violations[0]}"
    return Answer(lower=lower, upper=schedule.period_ticks * upwards.tick, schedule=schedule)


def write_schedule(units: Units, solution: Solution) -> Schedule:
    """Return a solution as a schedule file."""
    question = units.question
    numbers, slices = _number_slices(question)
    ranges = [*question.stages * len(question.chains), *slices]
    in_place = question.scope != "any layers"
    seats, programs = [], []
    pipelines = _role_pipelines(question, solution)
    for worker in question.live:
        role = Worker(pipelines[worker], solution.columns[worker])
        other_room = question.scope == "roles" and worker in question.capacity_of
        holds = None if in_place and not other_room else merge_ranges(
            (question.parts[part].first, question.parts[part].end) for part in solution.held[worker])
        seats.append(Seat(Worker(*worker), role, len(programs), holds))
        programs.append(_program(units, solution, numbers, worker, role.pipeline))
    columns = tuple(column for chain in question.chains for column in chain)
    stages = tuple(VirtualStage(column=column, layers=layers if question.has_layers else None)
                   for column, layers in zip(columns, question.stages * len(question.chains), strict=True))
    schedule = Schedule(
        job=question.name, tick_seconds=float(units.tick), slices=slices, backward=question.backward,
        grid=Grid(pipelines=question.pipelines, columns=question.columns, stages=stages,
                  microbatches=question.microbatches, chains=len(question.chains)),
        times=_times(units, ranges), memory=_memory(units, ranges), optimizer=question.optimizer,
        failed=tuple(Worker(*worker) for worker in question.failed), seats=tuple(seats),
        programs=tuple(programs), period_ticks=1, lower_bound_ticks=0, status="feasible", method="exact")
    period = compute_period_ticks(schedule.all_ops())
    if question.optimizer == "synchronous":
        ops = list(schedule.all_ops())
        period = max(op.end_ticks for op in ops) - min(op.start_ticks for op in ops)
    assert period <= solution.period, f"the schedule takes {period} ticks, the solution {solution.period}"
    return Schedule(**{name: getattr(schedule, name) for name in Schedule.__struct_fields__
                       if name != "period_ticks"}, period_ticks=period)


def _number_slices(question: Question) -> tuple[dict[tuple[int, int], int], tuple[tuple[int, int], ...]]:
    """Return the number of each part for each direction, and the ranges of those that are no stages."""
    slices: list[tuple[int, int]] = []
    numbers: dict[tuple[int, int], int] = {}
    for number, part in enumerate(question.parts):
        layers = (part.first, part.end)
        for chain in range(len(question.chains)):
            if layers in question.stages:
                numbers[chain, number] = chain * question.depth + question.stages.index(layers)
            else:
                slices += [layers] if layers not in slices else []
                numbers[chain, number] = len(question.chains) * question.depth + slices.index(layers)
    return numbers, tuple(slices)


def _role_pipelines(question: Question, solution: Solution) -> dict[tuple[int, int], int]:
    """Return the pipeline of each worker's role: its own, or in another column the first one left."""
    own = {worker for worker in question.live if solution.columns[worker] == worker[1]}
    taken = set(own)
    pipelines = {worker: worker[0] for worker in own}
    for worker in question.live:
        if worker not in own:
            pipelines[worker] = next(number for number in range(question.pipelines)
                                     if (number, solution.columns[worker]) not in taken)
            taken.add((pipelines[worker], solution.columns[worker]))
    return pipelines


def _program(units: Units, solution: Solution, numbers: dict[tuple[int, int], int], worker: tuple[int, int],
             pipeline: int) -> tuple[ProgramOp, ...]:
    """Return the ops of a worker in order. What takes no time comes first, in the order of its results."""
    placed: list[tuple[int, int, tuple[int, ...], ProgramOp]] = []
    rank = {"F": 0, "I": 1, "B": 1, "W": 2}
    for (kind, home, batch, part), start in solution.starts.items():
        if solution.hosts[home, batch, part] == worker:
            number = numbers[batch % len(units.question.chains), part]
            depth = part if kind == "F" else -part
            placed.append((start, start + units.ticks(kind, part, worker), (rank[kind], depth, home, batch),
                           ProgramOp(OpKind(kind), number, batch, start, None if home == pipeline else home)))
    for part in solution.held[worker]:
        start = solution.reductions[part]
        placed.append((start, start + units.ticks("A", part), (3, part),
                       ProgramOp(OpKind.A, numbers[0, part], None, start)))
    placed.sort(key=lambda op: op[:3])
    return (*(op for *_, op in placed), ProgramOp(OpKind.O, None, None, solution.steps[worker]))


def _times(units: Units, ranges: list[tuple[int, int]]) -> Times:
    question = units.question

    def of_slices(kind: str) -> tuple[int, ...]:
        return tuple(_sum_of_parts(question, layers, lambda part: units.ticks(kind, part)) for layers in ranges)

    cut = len(question.parts) == question.stages[-1][1]
    return Times(**{key: of_slices(kind) for kind, key in {**OPS, "A": "all_reduce"}.items()},
                 optimizer=tuple(sum(units.ticks("O", part) for part in held) for held in question.held),
                 transfer=units.transfer,
                 slow=tuple(Slow(Worker(*worker), int(factor * 1000))
                            for worker, factor in sorted(question.slow.items())),
                 optimizer_of_layer=tuple(units.ticks("O", part) for part in range(len(question.parts)))
                 if cut else (), **({"overlap": True} if question.overlap else {}))


def _memory(units: Units, ranges: list[tuple[int, int]]) -> Memory | None:
    question = units.question
    if question.capacity is None:
        return None
    rooms = tuple(Room(Worker(*worker), units.room(room)) for worker, room in sorted(question.capacity_of.items()))
    cut = len(question.parts) == question.stages[-1][1]
    return Memory(unit=float(units.unit), capacity=tuple(map(units.room, question.capacity)),
                  activation=tuple(_sum_of_parts(question, layers, units.activation) for layers in ranges),
                  weight_stash=tuple(_sum_of_parts(question, layers, units.stash) for layers in ranges),
                  weights=tuple(units.need(part.weights) for part in question.parts) if cut else (),
                  **({"capacity_of": rooms} if rooms else {}))


def _sum_of_parts(question: Question, layers: tuple[int, int], amount: object) -> int:
    assert callable(amount)
    return sum(amount(part) for part, own in enumerate(question.parts)
               if layers[0] <= own.first and own.end <= layers[1])
