"""Add reductions that overlap compute (`[network] overlap`) to plans made without them.

A schedule is first searched as if reductions took no time: they delay no compute op of the same
iteration. If the result is not proven to be the best, a second one is searched as if they took half
their time, so that workers that reduce most finish first. The last micro-batches of each worker
then take routes of short slices, so that their W can be done slice by slice: the reduction of some
layers begins while the W of others is still to be done (DDP's buckets, Li et al., VLDB 2020, arXiv
2006.15704, where the backward itself is cut, from the last layer on). Ops keep their worker and
their order except for these W. Several numbers of cut micro-batches and two orders of the W are
tried.

The reduction of the layers whose W is last cannot be hidden: bounds count it by `bounding_problem`,
and, if layers may move, by `min_exposed_ticks`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, chain, islice, pairwise, product
from math import ceil, floor
from typing import NamedTuple, TypeVar

from msgspec.structs import asdict, replace

from slipstream.planner.budget import Budget
from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import exact_decimal, layer_costs, limited_ratio, memory_ratio
from slipstream.planner.job.network import Network, round_to_four_digits
from slipstream.planner.model.from_job import choose_memory_unit, choose_tick, to_layer_ticks
from slipstream.planner.model.problem import Bound, Problem
from slipstream.planner.options import PlanOptions
from slipstream.planner.params import OverlapParams
from slipstream.schedules.check import check
from slipstream.schedules.graph import programs_of
from slipstream.schedules.precedence import OpKey, op_key, producers_with_rules
from slipstream.schedules.schedule import (
    Grid,
    LayerRange,
    Memory,
    Op,
    OpKind,
    Program,
    ProgramOp,
    Schedule,
    Scope,
    Seat,
    Times,
    Worker,
)
from slipstream.schedules.schedule import LayerCosts as TicksOfLayers
from slipstream.schedules.schedule import compute_period_ticks as window_ticks

ROUNDING = 1e-5
"""Relative tolerance when a bound is compared with a plan in other, finer ticks."""
FLOAT_ERROR = Fraction(1, 2**50)
"""Relative error of exact seconds divided by a tick, which may be a rounded float."""
WEIGHT_KINDS = (OpKind.W, OpKind.B)
LAYER_TIMES = ("forward", "backward_input", "backward_weight", "all_reduce", "optimizer")
STAGE_TIMES = (*LAYER_TIMES, "optimizer_of_layer")
MEMORY_FIELDS = ("activation", "weight_stash", "weights")
T = TypeVar("T", Times, Memory, TicksOfLayers)


def has_overlapping_reductions(job: Job) -> bool:
    """Return whether gradient reductions of the job take time and run while workers compute."""
    return job.network.overlap and any(job.time.all_reduce)


def without_reductions(job: Job, share: float = 0.0) -> Job:
    """Return a copy of the job whose reductions take only a `share` of their time.

    In the copy, reductions do not overlap compute. The time by which overlapped reductions slow
    down a stage's compute is added to its optimizer step. Both are rounded to four significant
    digits.
    """
    # That time is the same whenever the reductions run.
    reductions, optimizer = job.time.all_reduce, job.time.optimizer
    if job.network.slowdown:
        optimizer = tuple(
            step + round_to_four_digits(job.network.slowdown * seconds)
            for step, seconds in zip(optimizer, reductions, strict=True)
        )
    shortened = tuple(round_to_four_digits(share * seconds) for seconds in reductions)
    time = replace(job.time, all_reduce=shortened, optimizer=optimizer)
    return replace(job, network=Network(), time=time)


def bounding_problem(
    options: PlanOptions, job: Job, failed: Sequence[Worker], *, down: bool = False
) -> Problem:
    """Return the problem from which bounds for a job with failures are proven.

    In this problem, any live holder of a stage may run any micro-batch, whole or cut. Costs are
    rounded up, or down if `down`. Raises NoPlanError if no schedule can exist.
    """
    if not has_overlapping_reductions(job):
        return options.make_shared_problem(job, failed, down=down)
    return _with_exposed_reductions(
        options.make_shared_problem(without_reductions(job), failed, down=down), job
    )


def _with_exposed_reductions(problem: Problem, job: Job) -> Problem:
    """Return a copy of a problem with only the reductions that no compute can hide."""
    # At least that of the layer that takes the least time remains after a worker's last compute op,
    # a W. So a bound for this problem that allows for cut micro-batches holds for the job, too.
    grid, job_layers = problem.grid, _JobLayers.of(job)
    if job_layers is None:
        return problem
    # A layer's reduction may be shorter than a tick of whole stages.
    finer = _unit_divisor(problem.tick_seconds, job_layers.tick)
    tick = exact_decimal(problem.tick_seconds) / finer
    ticks = job_layers.reduction_ticks(tick)
    return replace(
        problem,
        tick_seconds=float(tick),
        times=replace(
            _with_scaled_values(problem.times, finer, STAGE_TIMES),
            transfer=finer * problem.times.transfer,
            all_reduce=keep_column_minimum(
                grid, [min(ticks[slice(*layers)]) for layers in grid.layers_by_stage]
            ),
        ),
    )


def _unit_divisor(unit: float, layer_unit: Fraction) -> int:
    """Return the number of equal parts of `unit` such that each is at most `layer_unit`."""
    return max(1, ceil(limited_ratio(unit, float(layer_unit))))


def _with_scaled_values(struct: T, factor: int, names: Sequence[str]) -> T:
    scaled = {}
    for name in names:
        scaled[name] = tuple(factor * value for value in getattr(struct, name))
    return replace(struct, **scaled)


def keep_column_minimum(grid: Grid, ticks: Sequence[int]) -> tuple[int, ...]:
    """Return `ticks`, by stage, with 0 for all but the smallest value of each column."""
    ticks_by_stage = [0] * len(ticks)
    for column in range(grid.columns):
        least = min(grid.stages_of_column(column), key=lambda stage: ticks[stage])
        ticks_by_stage[least] = ticks[least]
    return tuple(ticks_by_stage)


def min_exposed_ticks(schedule: Schedule) -> int:
    """Return the ticks by which a schedule would at least be shorter without reductions.

    The last W of a worker is of some layer. The reduction of that layer begins no earlier than this
    W ends, takes at least as long as the layer's reduction by itself, and ends before O of the
    worker begins. Without reductions each O may begin as much earlier, and so all windows end as
    much earlier, whoever holds which layers.

    The result is 0 with a synchronous optimizer, or if the schedule records no costs of layers.
    """
    # If all O wait for the last W of all workers, other windows may be as long without reductions.
    costs = schedule.times.of_layers
    if not costs or schedule.optimizer != "staggered":
        return 0
    return floor(min(costs.all_reduce) / Fraction(*costs.per_tick))


def add_overlapping_reductions(
    schedule: Schedule,
    job: Job,
    bound: Bound,
    tick_seconds: float,
    budget: Budget,
    params: OverlapParams,
) -> Schedule:
    """Add the job's overlapping reductions to a schedule that was made without them.

    Return the shortest schedule found in the budget; one without cuts is always made. In it, each
    worker's last micro-batches may be cut into ranges of a slice's layers, so that reductions start
    earlier. Its ticks and units of memory may be finer.

    Parameters
    ----------
    schedule
        Schedule without the reductions.
    job
        Job with them.
    bound
        Lower bound that holds with cut micro-batches; if layers may move, that without reductions.
    tick_seconds
        Seconds of a tick of the bound.
    budget
        Limit of the search.
    params
        Numbers of cut micro-batches, and of ranges, to try.
    """
    # Large schedules try one number of cut micro-batches only.
    ops = sum(len(schedule.programs[seat.program]) for seat in schedule.seats)
    job_layers = _JobLayers.of(job)
    schedule = _in_layer_ticks(schedule, job_layers)
    counts = params.cut if ops <= params.largest else params.cut[len(params.cut) // 2 :][:1]
    best = _shortest_cut(schedule, job, job_layers, counts, params, budget)
    result = _with_layer_costs(best, job_layers)
    # The bound, in the finer ticks of the result. If layers may move, it was proven for a job
    # without reductions.
    ticks = int(limited_ratio(tick_seconds, schedule.tick_seconds) * bound.ticks)
    if bound.scope is Scope.LAYERS:
        ticks += min_exposed_ticks(result)
    assert ticks <= best.period_ticks * (1 + ROUNDING), (
        f"a bound of {ticks} ticks is above {best.period_ticks}"
    )
    return result.with_bound(min(ticks, best.period_ticks), bound.scope)


def _with_layer_costs(schedule: Schedule, job_layers: "_JobLayers | None") -> Schedule:
    """Return the schedule with layers' costs for its bound; without `job_layers`, as it is."""
    if job_layers is None:
        return schedule
    recorded, tick = schedule.times.of_layers, exact_decimal(schedule.tick_seconds)
    if not recorded:
        # In the schedule's own ticks, which `_in_layer_ticks` has made fine enough: the bound is
        # claimed in them.
        least = to_layer_ticks(
            job_layers.costs,
            tick / (1 + FLOAT_ERROR),
            job_layers.unit,
            fused=schedule.backward == "fused",
            down=True,
        )
        per_unit = (
            memory_ratio(schedule.memory.unit, float(job_layers.unit))
            if schedule.memory
            else Fraction(1)
        )
        recorded = TicksOfLayers(
            per_unit=per_unit.as_integer_ratio(), per_tick=(1, 1), **asdict(least)
        )
    # The search was without reductions, or with a part of them: record those of the job.
    recorded = replace(
        recorded, all_reduce=job_layers.reduction_ticks(tick / Fraction(*recorded.per_tick))
    )
    return replace(schedule, times=replace(schedule.times, of_layers=recorded))


def overlapped_period(schedule: Schedule, job: Job, params: OverlapParams) -> float:
    """Estimate the period, in seconds, that `add_overlapping_reductions` reaches."""
    # Only two numbers of cut micro-batches are tried.
    job_layers = _JobLayers.of(job)
    schedule = _in_layer_ticks(schedule, job_layers)
    return schedule.seconds(
        _shortest_cut(schedule, job, job_layers, params.few[:2], params).period_ticks
    )


def _in_layer_ticks(schedule: Schedule, job_layers: "_JobLayers | None") -> Schedule:
    """Return the schedule with ticks and memory units in which costs of layers are integers."""
    if job_layers is None:
        return schedule
    memory, costs = schedule.memory, schedule.times.of_layers
    finer = _unit_divisor(schedule.tick_seconds, job_layers.tick)
    smaller = _unit_divisor(memory.unit, job_layers.unit) if memory else 1
    if finer == smaller == 1:
        return schedule
    if costs:  # its ticks hold what layers take without reductions
        costs = _with_scaled_values(
            _with_scaled_values(costs, finer, LAYER_TIMES), smaller, MEMORY_FIELDS
        )
    if memory:
        rooms = memory.capacity_of
        memory = replace(
            _with_scaled_values(memory, smaller, ("capacity", *MEMORY_FIELDS)),
            unit=float(exact_decimal(memory.unit) / smaller),
            capacity_of=rooms
            and tuple(replace(room, capacity=smaller * room.capacity) for room in rooms),
        )
    # All that is in ticks or memory units grows by the same factor; seconds and bytes stay.
    programs = []
    for program in schedule.programs:
        programs.append(tuple(replace(op, start_ticks=finer * op.start_ticks) for op in program))
    return replace(
        schedule,
        tick_seconds=float(exact_decimal(schedule.tick_seconds) / finer),
        memory=memory,
        times=replace(
            _with_scaled_values(schedule.times, finer, STAGE_TIMES),
            of_layers=costs,
            transfer=finer * schedule.times.transfer,
        ),
        programs=tuple(programs),
        period_ticks=finer * schedule.period_ticks,
        lower_bound_ticks=finer * schedule.lower_bound_ticks,
    )


def _shortest_cut(
    schedule: Schedule,
    job: Job,
    job_layers: "_JobLayers | None",
    counts: Sequence[int],
    params: OverlapParams,
    budget: Budget | None = None,
) -> Schedule:
    """Return the shortest schedule with reductions, over `counts` of cut micro-batches."""
    # Without a cut, there is always a schedule.
    best = _OverlapBuilder(schedule, job, job_layers, 0, 1).build_schedule()

    def try_cut(count: int, pieces: int, *, ascending: bool) -> bool:
        nonlocal best
        if budget is not None and (budget.seconds_left <= 0 or budget.is_stopped):
            return False
        candidate = _OverlapBuilder(
            schedule, job, job_layers, count, pieces, ascending=ascending
        ).build_schedule()
        # Cut micro-batches hold their layers' memory at other times, which may be too much.
        if candidate.period_ticks >= best.period_ticks or check(candidate):
            return False
        best = candidate
        return True

    # With latency, fewer and longer reductions may be best. Of the numbers of cut micro-batches,
    # the few first, then from the last that helped to both sides.
    for pieces, ascending in product(
        params.pieces if job.network.latency else params.pieces[:1], (False, True)
    ):
        few = [count for count in counts if count in params.few] or counts
        improving = [
            count
            for count in few
            if job_layers is not None and try_cut(count, pieces, ascending=ascending)
        ]
        for step in (-1, 1) if improving else ():
            place = counts.index(improving[-1]) + step
            while 0 <= place < len(counts) and try_cut(counts[place], pieces, ascending=ascending):
                place += step
    return best


class _JobLayers:
    """Costs of a job's layers, and durations of the reductions of ranges of layers."""

    def __init__(self, job: Job) -> None:
        self.costs = layer_costs(job)
        self.tick, self.unit = choose_tick(job, self.costs), choose_memory_unit(job, self.costs)
        # A reduction takes its latency, and in addition some time for each of its layers: what a
        # stage's reduction takes in all, less one latency, is shared by its layers.
        least = exact_decimal(job.network.reduction_latency(job.pipelines * job.chains))
        ends = [*accumulate(job.layers or (1,) * job.depth, initial=0)]
        self._least = min(
            [least, *(exact_decimal(seconds) for seconds in job.time.all_reduce if seconds)]
        )
        self._beyond: list[Fraction] = []
        for (first, end), whole in zip(pairwise(ends), job.time.all_reduce, strict=False):
            share = 1 - self._least / exact_decimal(whole) if whole else Fraction(1)
            self._beyond += [layer * share for layer in self.costs.all_reduce[first:end]]
        self._is_reduced = [seconds > 0 for seconds in self.costs.all_reduce]

    @classmethod
    def of(cls, job: Job) -> "_JobLayers | None":
        """Return the costs of a job's layers, or None if a stage has no layer."""
        return cls(job) if all(job.layers or (1,)) else None

    def reduction_seconds(self, layers: LayerRange) -> Fraction:
        if not any(self._is_reduced[slice(*layers)]):
            return Fraction(0)
        return self._least + sum(self._beyond[slice(*layers)], Fraction(0))

    def reduction_ticks(self, tick: Fraction) -> tuple[int, ...]:
        """Return the ticks, of `tick` seconds each, of each layer's own reduction, rounded down."""
        return tuple(
            floor(self.reduction_seconds((layer, layer + 1)) / tick * (1 + FLOAT_ERROR))
            for layer in range(len(self._is_reduced))
        )


class _LayerParts(NamedTuple):
    """Compute ops of a worker, in order, and the ranges of layers that it reduces."""

    ops: list[ProgramOp]
    reduced: list[LayerRange]


class _OverlapBuilder:
    """Builder of a schedule with reductions, in which each worker's last micro-batches are cut.

    On each worker, the last `count` micro-batches run range by range of a slice's layers. Layers
    that are reduced together are divided into at most `pieces` ranges, each reduced by itself. With
    `ascending`, the W of a micro-batch are ordered by layer, the lowest first, instead of by
    Johnson's rule. Without `job_layers`, `count` must be 0.
    """

    def __init__(
        self,
        schedule: Schedule,
        job: Job,
        job_layers: _JobLayers | None,
        count: int,
        pieces: int,
        *,
        ascending: bool = False,
    ) -> None:
        self._old, self._job, self._job_layers = schedule, job, job_layers
        self._count, self._ascending = count, ascending
        # Slices by number, those that the cuts add at the end; of equal ones, the first counts.
        self._layers = list(schedule.layers_by_slice)
        self._number = {
            layers: number for number, layers in reversed(list(enumerate(self._layers)))
        }
        times, memory = schedule.times, schedule.memory
        columns = [times.forward, times.backward_input, times.backward_weight]
        if memory:
            columns += [memory.activation, memory.weight_stash]
        self._values = [list(values) for values in zip(*columns, strict=True)]
        """Ticks of F, I and W, activation and weight stash, by slice number."""
        self._pieces = pieces
        self._within: dict[LayerRange, list[LayerRange]] = {}
        self._turn: dict[int, int] = {}

    def build_schedule(self) -> Schedule:
        # Cut the programs, then number the ranges that are reduced.
        old = self._old
        self._turn = self._weight_turns()
        parts = [self._cut_program(program) for program in old.programs]
        reductions = sorted({layers for part in parts for layers in part.reduced})
        for layers in reductions:
            self._slice_number(layers)
        # The cut schedule, whose ops have no start times yet.
        forward, inputs, weights, *memories = zip(*self._values, strict=True)
        times = replace(
            old.times,
            forward=forward,
            backward_input=inputs,
            backward_weight=weights,
            overlap=True,
            all_reduce=self._reduction_ticks(),
        )
        memory = old.memory
        if memory:
            memory = replace(memory, activation=memories[0], weight_stash=memories[1])
        cut_schedule = replace(
            old,
            slices=tuple(self._layers[len(old.grid.stages) :]),
            times=times,
            memory=memory,
            programs=tuple(tuple(part.ops) for part in parts),
        )
        return _with_start_times(cut_schedule, [part.reduced for part in parts], self._number)

    def _reduction_ticks(self) -> tuple[int, ...]:
        tick, job_layers = exact_decimal(self._old.tick_seconds), self._job_layers
        durations = [exact_decimal(seconds) for seconds in self._job.time.all_reduce]
        if job_layers is not None:
            durations += map(job_layers.reduction_seconds, self._layers[len(durations) :])
        return tuple(ceil(seconds / tick * (1 - FLOAT_ERROR)) for seconds in durations)

    def _weight_turns(self) -> dict[int, int]:
        """Return each layer's place in the order of W; empty if any order will do."""
        # Jobs pass two machines in turn, here the W of a worker and then its link: Johnson's rule
        # ends all of them earliest. It ignores other workers: of two that share a layer, the one
        # whose window ends first, which is the one with lower layers, waits until both are ready.
        # In ascending order it waits least.
        job_layers = self._job_layers
        if not self._count or job_layers is None:
            return {}
        pieces = {
            piece
            for program in self._old.programs
            for op in program
            if op.kind is OpKind.A
            for piece in self._divide_range(self._old.layers_of(op.slice or 0))
        }

        def sort_key(piece: LayerRange) -> tuple[bool, Fraction, int]:
            weights = job_layers.costs.backward_weight[slice(*piece)]
            if self._ascending:
                return False, Fraction(0), piece[0]
            # Johnson's rule (Nav. Res. Logist. Q. 1, 1954): first those that take less time on the
            # first machine, shortest first; then those that take less time on the second, longest
            # on it first.
            first = self._count * sum(weights, Fraction(0))
            second = job_layers.reduction_seconds(piece)
            return first >= second, first if first < second else -second, -piece[0]

        return {
            layer: turn
            for turn, piece in enumerate(sorted(pieces, key=sort_key))
            for layer in range(*piece)
        }

    def _cut_program(self, program: Program) -> _LayerParts:
        """Return a program's compute ops, those of the last micro-batches cut, and reductions."""
        reduced = [
            self._old.layers_of(op.slice)
            for op in program
            if op.kind is OpKind.A and op.slice is not None
        ]
        if not self._count:
            return _LayerParts(
                [op for op in program if op.kind not in (OpKind.A, OpKind.O)], sorted(reduced)
            )
        # The last units are cut at all edges of what is reduced.
        pieces = sorted(piece for layers in reduced for piece in self._divide_range(layers))
        edges = sorted({edge for piece in pieces for edge in piece})
        finals = [op for op in program if op.kind in WEIGHT_KINDS]
        chosen = {(op.slice, op.microbatch, op.pipeline) for op in finals[-self._count :]}
        ops: list[ProgramOp] = []
        waiting: list[tuple[int, int, ProgramOp]] = []
        for op in program:
            unit = op.slice, op.microbatch, op.pipeline
            if op.kind in (OpKind.A, OpKind.O) or op.slice is None:
                continue
            if unit not in chosen:
                ops.append(op)
                continue
            # F from the first layers on, I and B from the last; a W is that of the best turn.
            cut = [replace(op, slice=number) for number in self._slices_within(op.slice, edges)]
            if op.kind is OpKind.F:
                ops += cut
            elif op.kind is OpKind.W:
                waiting.sort(key=lambda piece_op: piece_op[:2])
                ops += [waiting.pop(0)[2] for _ in cut]
            else:
                ops += reversed(cut)
                if op.kind is OpKind.I:  # from now on, their W may be done
                    waiting += [
                        (
                            self._turn[self._layers[piece_op.slice or 0][0]],
                            len(ops) + place,
                            replace(piece_op, kind=OpKind.W),
                        )
                        for place, piece_op in enumerate(reversed(cut))
                    ]
        return _LayerParts(ops, pieces)

    def _divide_range(self, layers: LayerRange) -> list[LayerRange]:
        """Divide layers into at most `pieces` ranges, to be reduced one after the other."""
        first, end = layers
        count = min(self._pieces, end - first)
        edges = [first + (end - first) * piece // count for piece in range(count + 1)]
        return list(pairwise(edges))

    def _slices_within(self, slice_: int, edges: Sequence[int]) -> list[int]:
        """Return the numbers of slices into which `edges` cut a slice, first layers first."""
        # An edge is the number of the layer before which it lies.
        layers = self._layers[slice_]
        if layers not in self._within:
            first, end = layers
            inner = [first, *(edge for edge in edges if first < edge < end), end]
            self._within[layers] = list(pairwise(inner))
            if len(inner) > 2:
                self._add_slices(slice_, self._within[layers])
        return [self._number[piece] for piece in self._within[layers]]

    def _add_slices(self, slice_: int, pieces: Sequence[LayerRange]) -> None:
        """Add parts of a slice as new slices, with their shares of times and memory."""
        assert self._job_layers is not None
        costs, whole = self._job_layers.costs, self._values[slice_]
        by_layer = (
            costs.forward,
            costs.backward_input,
            costs.backward_weight,
            costs.activation,
            costs.weight_stash,
        )
        # Ends are rounded, not parts, so that these add up to the whole.
        for place, value in enumerate(whole):
            shares = [sum(by_layer[place][slice(*piece)], Fraction(0)) for piece in pieces]
            sums = list(accumulate(shares, initial=Fraction(0)))
            ends = [0] * len(sums)
            if sums[-1]:
                ends = [round(value * partial / sums[-1]) for partial in sums]
            for piece, (begin, end) in zip(pieces, pairwise(ends), strict=True):
                number = self._slice_number(piece)
                if number >= len(self._old.layers_by_slice):
                    self._values[number][place] = max(self._values[number][place], end - begin)

    def _slice_number(self, layers: LayerRange) -> int:
        if layers not in self._number:
            self._number[layers] = len(self._layers)
            self._layers.append(layers)
            self._values.append([0] * len(self._values[0]))
        return self._number[layers]


# --- Start times ----------------------------------------------------------------------------------


def _with_start_times(
    schedule: Schedule, reduced: Sequence[Sequence[LayerRange]], number: Mapping[LayerRange, int]
) -> Schedule:
    """Return the schedule timed anew, with the ranges that each program reduces, in `reduced`."""
    # Compute first; reductions delay none of it.
    computed = _place_compute(schedule)
    reductions = _place_reductions(schedule, computed, reduced, number)
    is_synchronous = schedule.optimizer == "synchronous"
    # O waits for its worker and link; if synchronous, for the last compute op of all.
    last = 0
    if is_synchronous:
        last = max(op.end_ticks for op in chain.from_iterable(computed.values()))
    programs: dict[Program, int] = {}
    seats: list[Seat] = []
    # Workers with equal ops at equal times share a program.
    for seat in schedule.seats:
        ops, sums = computed[seat.worker], reductions[seat.worker]
        body = [
            replace(op, start_ticks=placed.start_ticks)
            for op, placed in zip(schedule.programs[seat.program], ops, strict=True)
        ]
        body += [ProgramOp(OpKind.A, op.slice, None, op.start_ticks) for op in sums]
        body.sort(key=lambda op: (op.start_ticks, op.kind is OpKind.A))
        ends = [op.end_ticks for op in (*ops[-1:], *sums[-1:])]
        step = ProgramOp(OpKind.O, None, None, max([last, *ends]))
        seats.append(replace(seat, program=programs.setdefault((*body, step), len(programs))))
    # With a synchronous optimizer, all windows end together: the whole iteration counts.
    timed = replace(schedule, seats=tuple(seats), programs=tuple(programs))
    period = window_ticks(timed.all_ops())
    if is_synchronous:
        begin = min(op.start_ticks for op in timed.all_ops())
        period = max(op.end_ticks for op in timed.all_ops()) - begin
    return replace(timed, period_ticks=period, lower_bound_ticks=0, status="feasible")


def _place_compute(schedule: Schedule) -> dict[Worker, list[Op]]:
    """Return each worker's compute ops as early as their order and inputs allow."""
    # Each worker begins when it did: an earlier start would lengthen its busy window.
    programs, transfer = programs_of(schedule), schedule.times.transfer
    free = {}
    for worker, ops in programs.items():
        free[worker] = min((op.start_ticks for op in ops), default=0)
    placed: dict[Worker, list[Op]] = {worker: [] for worker in programs}
    done: dict[OpKey, Op] = {}
    waiting: dict[OpKey, list[Worker]] = defaultdict(list)
    # A worker goes on until an input is missing; it continues once that op is placed.
    todo = list(placed)
    while todo:
        worker = todo.pop()
        for op in islice(programs[worker], len(placed[worker]), None):
            key, start = op_key(op), free[worker]
            path = schedule.route_of(key.pipeline, key.microbatch)
            for awaited, rule in producers_with_rules(key, path):
                if awaited not in done:
                    waiting[awaited].append(worker)
                    break
                producer = done[awaited]
                hop = transfer if rule.tensor and producer.worker != worker else 0
                start = max(start, producer.end_ticks + hop)
            else:
                free[worker] = start + op.end_ticks - op.start_ticks
                done[key] = replace(op, start_ticks=start, end_ticks=free[worker])
                placed[worker].append(done[key])
                todo += waiting.pop(key, ())
                continue
            break
    return placed


def _place_reductions(
    schedule: Schedule,
    computed: Mapping[Worker, list[Op]],
    reduced: Sequence[Sequence[LayerRange]],
    number: Mapping[LayerRange, int],
) -> dict[Worker, list[Op]]:
    """Return each worker's reductions, as early as the `computed` ops allow."""
    # When the last W of each range of layers ends, and who reduces it.
    ends: dict[LayerRange, int] = defaultdict(int)
    for op in chain.from_iterable(computed.values()):
        if op.kind in WEIGHT_KINDS and op.slice is not None:
            layers = schedule.layers_of(op.slice)
            ends[layers] = max(ends[layers], op.end_ticks)
    holders: dict[LayerRange, list[Worker]] = defaultdict(list)
    for seat in schedule.seats:
        for layers in reduced[seat.program]:
            holders[layers].append(seat.worker)
    ready = {}
    for first, end in holders:
        awaited = [ticks for (low, high), ticks in ends.items() if first < high and low < end]
        ready[first, end] = max(awaited, default=0)
    # Those that are ready first go first, on the links of all their workers at once.
    links = dict.fromkeys(computed, 0)
    placed: dict[Worker, list[Op]] = {worker: [] for worker in computed}
    for layers in sorted(holders, key=lambda layers: (ready[layers], -layers[0])):
        begin = max(ready[layers], *(links[worker] for worker in holders[layers]))
        for worker in holders[layers]:
            links[worker] = begin + schedule.times.all_reduce[number[layers]]
            placed[worker].append(
                Op(OpKind.A, number[layers], None, None, worker, begin, links[worker])
            )
    return placed
