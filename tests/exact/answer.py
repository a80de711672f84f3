"""Answer a question: the shortest period in seconds, and a schedule file that attains it.

Each solution is written as a schedule that `slipstream.schedules.check` judges.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import chain

import msgspec

from slipstream.schedules import grid, ops
from slipstream.schedules.check import check
from slipstream.schedules.layers import merge_ranges
from slipstream.schedules.schedule import Schedule, Scope
from tests.exact.model import EFFORT, ExactModel
from tests.exact.question import TIMES, WHOLE_STAGES, LayerRange, Part, Question, Worker, join


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Bounds in seconds on the shortest period, and a schedule that takes `upper` seconds."""

    lower: Fraction
    """No schedule is shorter, of those as short as was asked for."""
    upper: Fraction | None = None
    schedule: Schedule | None = None
    is_impossible: bool = False
    """True if it is proven that no schedule is as short as was asked for."""
    effort: float = 0.0
    """Deterministic time that the solver took."""

    @property
    def is_exact(self) -> bool:
        """True if the shortest period is known."""
        return self.upper == self.lower


def answer(
    question: Question, *, at_most: Fraction | None = None, effort: float = EFFORT
) -> Answer:
    """Return the shortest period of a question, or proven bounds, by a deterministic `effort`.

    With `at_most` seconds, no longer periods are looked for. Raises AssertionError if the checker
    refuses what was found.
    """
    limit = None if at_most is None else int(at_most / question.tick)
    relaxed = _relax(question)
    above = below = ExactModel(question, limit)
    above.solve(effort if relaxed == question else effort / 2)
    taken = above.effort
    if relaxed != question:
        below = ExactModel(relaxed, limit)
        below.solve(max(0.0, effort - taken))  # the solver may exceed its limit
        taken += below.effort
    lower = below.bound * question.tick
    if not above.has_solution:
        return Answer(lower=lower, is_impossible=below.is_impossible, effort=taken)
    schedule = write_schedule(above)
    violations = check(schedule)
    assert not violations, f"the checker refuses what the reference found: {violations[0]}"
    upper = schedule.period_ticks * question.tick
    return Answer(lower=lower, upper=upper, schedule=schedule, effort=taken)


def _relax(question: Question) -> Question:
    """Return a question whose bound also holds for slices of several layers.

    A slice frees all of its activations at once. If the stash of a layer takes more than its
    activation, layers that run one by one hold more. So stashes take no more than activations.
    """
    if question.scope in WHOLE_STAGES or question.backward == "fused":
        return question
    layers = []
    for layer in question.layers:
        stash = min(layer.costs["weight_stash"], layer.costs["activation"])
        layers.append(Part(layer.layers, layer.costs | {"weight_stash": stash}))
    return replace(question, layers=tuple(layers))


# --- The schedule file ---------------------------------------------------------------


def write_schedule(model: ExactModel) -> Schedule:
    """Return a solution as a schedule file.

    Each worker lists its layers, and its room for activations next to those of its own column.
    Ticks may be finer than files allow.
    """
    question, columns = model.question, range(model.question.columns)
    roles = _assign_roles(model)
    stages = question.stages * len(question.chains)
    columns_of_stages = chain.from_iterable(question.chains)
    slices = tuple(part.layers for part in question.parts if part.layers not in stages)
    ranges = [*stages, *slices]
    costs = _list_costs([join(question.layers[first:end]) for first, end in ranges])
    costs_of_layers = _list_costs(question.layers)
    weights = list(map(question.weights, columns))
    times = {key: costs[key] for key in TIMES.values()}
    steps = []
    for parts in question.holdings:
        steps.append(sum(question.ticks("O", part) for part in parts))
    times["optimizer"] = tuple(steps)
    slow = []
    for worker, factor in sorted(question.slow.items()):
        slow.append(ops.Slow(grid.Worker(*worker), int(factor * 1000)))

    memory = None
    if question.memory is not None:
        rooms = []
        for worker, role in roles.items():
            room = question.memory_for(worker, role.column) - weights[worker[1]]
            rooms.append(ops.Room(grid.Worker(*worker), room))
        memory = ops.Memory(
            unit=float(question.unit),
            capacity=tuple(question.memory[column] - weights[column] for column in columns),
            activation=costs["activation"],
            weight_stash=costs["weight_stash"],
            weights=costs_of_layers["weights"],
            capacity_of=tuple(rooms),
        )
    seats = []
    for number, worker in enumerate(question.live):
        layers = merge_ranges(
            question.parts[part].layers for part in model.chosen(model.holds[worker])
        )
        seats.append(ops.Seat(grid.Worker(*worker), roles[worker], number, layers))
    schedule = Schedule(
        job="tiny",
        tick_seconds=float(question.tick),
        grid=grid.Grid(
            pipelines=question.pipelines,
            columns=question.columns,
            chains=len(question.chains),
            microbatches=question.microbatches,
            stages=tuple(
                grid.VirtualStage(column=column, layers=layers)
                for column, layers in zip(columns_of_stages, stages, strict=True)
            ),
        ),
        slices=slices,
        times=ops.Times(
            **times,
            transfer=question.transfer,
            slow=tuple(slow),
            optimizer_of_layer=costs_of_layers["optimizer"],
            overlap=question.overlap or msgspec.UNSET,
        ),
        memory=memory,
        backward=question.backward,
        optimizer=question.optimizer,
        failed=tuple(grid.Worker(*worker) for worker in question.failed),
        seats=tuple(seats),
        programs=tuple(
            _program(model, ranges, worker, role.pipeline) for worker, role in roles.items()
        ),
        period_ticks=1,
        lower_bound_ticks=0,
        status="feasible",
        method="exact",
        bound_scope=Scope(question.scope),
    )
    return msgspec.structs.replace(schedule, period_ticks=_measure_period(schedule))


def _list_costs(parts: Sequence[Part]) -> dict[str, tuple[int, ...]]:
    """Return the costs of some parts as a list for each key."""
    costs = {}
    for key in parts[0].costs:
        costs[key] = tuple(part.costs[key] for part in parts)
    return costs


def _assign_roles(model: ExactModel) -> dict[Worker, grid.Worker]:
    """Return the role of each live worker, its own if it has that column."""
    question, roles = model.question, dict[Worker, grid.Worker]()
    columns = {worker: model.chosen(model.roles[worker])[0] for worker in question.live}
    for worker in sorted(question.live, key=lambda worker: columns[worker] != worker[1]):
        pipelines = (worker[0], *range(question.pipelines))
        choices = [grid.Worker(pipeline, columns[worker]) for pipeline in pipelines]
        roles[worker] = next(role for role in choices if role not in roles.values())
    return {worker: roles[worker] for worker in question.live}


def _program(
    model: ExactModel, ranges: Sequence[LayerRange], worker: Worker, pipeline: int
) -> tuple[ops.ProgramOp, ...]:
    """Return the ops of a worker in order; those without duration come first."""
    question, placed = model.question, []
    for (kind, batch, part), start, ticks, literal in model.runs[worker]:
        if model.value(literal):
            # The stages of each direction are numbered one after the other.
            direction = batch[1] % len(question.chains)
            number = ranges.index(question.parts[part].layers, direction * len(question.stages))
            owner = None if batch[0] == pipeline else batch[0]
            op = ops.ProgramOp(ops.OpKind(kind), number, batch[1], model.value(start), owner)
            rank = ("FIBW".index(kind), part if kind == "F" else -part, batch)
            placed.append((op.start_ticks, op.start_ticks + ticks, rank, op))
    for part in model.chosen(model.holds[worker]):
        number, start = ranges.index(question.parts[part].layers), model.reductions[part]
        op = ops.ProgramOp(ops.OpKind.A, number, None, model.value(start))
        rank = (len("FIBW"), part, (0, 0))
        placed.append((op.start_ticks, op.start_ticks + question.ticks("A", part), rank, op))
    placed.sort(key=lambda op: op[:3])
    step = ops.ProgramOp(ops.OpKind.O, None, None, model.value(model.steps[worker]))
    return (*(op for *_, op in placed), step)


def _measure_period(schedule: Schedule) -> int:
    """Return the period of the ops, which may be shorter than the solution says."""
    programs = list(map(schedule.ops, schedule.members))
    starts = [program[0].start_ticks for program in programs]
    ends = [program[-1].end_ticks for program in programs]
    if schedule.optimizer == "synchronous":
        return max(ends) - min(starts)
    return max(end - start for start, end in zip(starts, ends, strict=True))
