"""Reductions beside compute: a plan without them is given its reductions, which occupy links (`[network] overlap`).

A schedule is searched as if reductions took no time: they delay no compute op of the same iteration; and, where what
comes of that is not proven to be the best, as if they took half their time, so that who reduces most is done first. The
last micro-batches of each worker take routes of single layers there, so that their W can be done layer by layer: the
reduction of some begins while W of others is still to be done (DDP's buckets, Li et al., VLDB 2020, arXiv 2006.15704,
where the backward itself is cut, from the last layer on). Ops keep their worker and their order but
for these W. How many micro-batches are cut so, and two orders of the W, are tried.

What cannot be hidden is the reduction of the layers whose W is last: `bounding_problem` has bounds count it, and where
layers may move, `exposed_anywhere`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, islice, pairwise, product
from math import ceil, floor
from typing import NamedTuple, TypeVar

from msgspec.structs import asdict, replace

from slipstream.planner.budget import Budget
from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import LayerSeconds, exact, layer_costs, ratio
from slipstream.planner.job.network import Network, rounded
from slipstream.planner.model.from_job import layer_ticks, tick_of, unit_of
from slipstream.planner.model.problem import Bound, Problem
from slipstream.planner.options import PlanOptions
from slipstream.planner.params import OverlapParams
from slipstream.schedules.check import check
from slipstream.schedules.graph import programs_of
from slipstream.schedules.precedence import OpKey, op_key, waits
from slipstream.schedules.schedule import (
    Grid,
    LayerRange,
    Memory,
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
from slipstream.schedules.schedule import period_ticks as window_ticks

ROUNDED = 1e-5
"""Where ticks of a plan are finer than those that its bound is proven in, times are rounded otherwise."""
FINAL = (OpKind.W, OpKind.B)
OF_LAYERS = ("forward", "backward_input", "backward_weight", "all_reduce", "optimizer")
OF_STAGES = (*OF_LAYERS, "optimizer_of_layer")
HELD = ("activation", "weight_stash", "weights")
T = TypeVar("T", Times, Memory, TicksOfLayers)


def overlaps(job: Job) -> bool:
    """Whether reductions are to be planned beside compute, and take time."""
    return job.network.overlap and any(job.time.all_reduce)


def without_reductions(job: Job, share: float = 0.0) -> Job:
    """The job as if reductions took no time, or such a share of it, and occupied workers.

    What they take from the compute beside them is counted at the worker's optimizer step, wherever they are."""
    return replace(job, network=Network(), time=replace(
        job.time, all_reduce=tuple(rounded(share * seconds) for seconds in job.time.all_reduce),
        optimizer=tuple(step + rounded(job.network.slowdown * seconds) for step, seconds in zip(
            job.time.optimizer, job.time.all_reduce, strict=True)) if job.network.slowdown else job.time.optimizer))


def bounding_problem(options: PlanOptions, job: Job, failed: Sequence[Worker]) -> Problem:
    """The problem that bounds are proven for: any live holder of a stage may run any micro-batch, whole or cut. Raises
    NoPlanError."""
    if not overlaps(job):
        return options.shared_problem(job, failed)
    return _with_exposed(options.shared_problem(without_reductions(job), failed), job)


def _with_exposed(problem: Problem, job: Job) -> Problem:
    """A problem of whole stages without reductions, in which each worker reduces the one of its layers that takes the
    least: after its last compute op, which is a W, at least that remains. So a bound for this problem is one for the
    job, where it counts how micro-batches may be cut."""
    grid = problem.grid
    if not has_layers(job):
        return problem
    finer = _ticks_of_layers(problem.tick_seconds, job)
    tick = exact(problem.tick_seconds) / finer
    ticks = reductions_of_layers(job, tick)
    return replace(problem, tick_seconds=float(tick), times=replace(
        _times_more(problem.times, finer, OF_STAGES), transfer=finer * problem.times.transfer,
        all_reduce=least_of_columns(grid, [min(ticks[slice(*layers)]) for layers in grid.layers_by_stage])))


def _ticks_of_layers(tick_seconds: float, job: Job) -> int:
    """Into how many a tick is to be divided to hold what single layers take: a problem of whole stages has coarser
    ones."""
    return max(1, ceil(ratio(tick_seconds, float(tick_of(job, layer_costs(job))))))


def _times_more(of: T, factor: int, names: Sequence[str]) -> T:
    """The same with the values of these names so many times as large."""
    return replace(of, **{name: tuple(factor * value for value in getattr(of, name)) for name in names})


def has_layers(job: Job) -> bool:
    """Whether each stage has some."""
    return all(job.layers or (1,))


def reductions_of_layers(job: Job, tick: Fraction) -> tuple[int, ...]:
    """[layer] the whole ticks of so many seconds that its reduction takes by itself; a tick may be a rounded float."""
    seconds = _Reductions(job)
    return tuple(floor(seconds.of((layer, layer + 1)) / tick + Fraction(ROUNDED))
                 for layer in range(len(layer_costs(job).forward)))


def least_of_columns(grid: Grid, ticks: Sequence[int]) -> tuple[int, ...]:
    """Ticks by stage: of each column, those of the stage with the least; of its other stages, none."""
    found = [0] * len(ticks)
    for column in range(grid.columns):
        least = min(grid.stages_of(column), key=lambda stage: ticks[stage])
        found[least] = ticks[least]
    return tuple(found)


def exposed_anywhere(schedule: Schedule) -> int:
    """How much shorter, in ticks, a schedule would be at least without its reductions, whoever holds which layers.

    The last W of a worker is of some layer. The reduction of that layer begins no earlier than this W ends, takes as
    long as the layer does by itself at least, and ends before O of the worker begins. Without reductions each O may
    begin as much earlier, and so all windows end as much earlier. Where all O wait for the last W of all, windows of
    others may be as long without.
    """
    told = schedule.times.of_layers
    if not told or schedule.optimizer != "staggered":
        return 0
    return floor(min(told.all_reduce) / Fraction(*told.per_tick))


def beside_compute(schedule: Schedule, job: Job, bound: Bound, tick_seconds: float, budget: Budget,
                   params: OverlapParams) -> Schedule:
    """The schedule of a job without reductions, with those of the job: the shortest that is found within the budget.

    `bound`: on schedules of the job that cut micro-batches, in ticks of so many seconds; where layers may move, on
    those without reductions.
    """
    ops = sum(len(schedule.programs[seat.program]) for seat in schedule.seats)
    schedule = _in_ticks_of_layers(schedule, job)
    few = params.cut if ops <= params.largest else params.cut[len(params.cut) // 2:][:1]
    best = _best(schedule, job, few, params, budget)
    told, ticks = _telling(best, job), int(ratio(tick_seconds, schedule.tick_seconds) * bound.ticks)
    if bound.scope is Scope.LAYERS:
        ticks += exposed_anywhere(told)
    assert ticks <= best.period_ticks * (1 + ROUNDED), f"a bound of {ticks} ticks is above {best.period_ticks}"
    return told.with_bound(min(ticks, best.period_ticks), bound.scope)


def _telling(schedule: Schedule, job: Job) -> Schedule:
    """With what layers cost, and what the reduction of each takes by itself, which the bound counts."""
    if not has_layers(job):
        return schedule
    told, tick = schedule.times.of_layers, exact(schedule.tick_seconds)
    if not told:
        costs = layer_costs(job)
        fine, unit = tick_of(job, costs), unit_of(job, costs)
        least = layer_ticks(costs, fine, unit, fused=schedule.backward == "fused", down=True)
        per_tick = ratio(schedule.tick_seconds, float(fine))
        per_unit = ratio(schedule.memory.unit, float(unit)) if schedule.memory else Fraction(1)
        told = TicksOfLayers(per_tick=per_tick.as_integer_ratio(), per_unit=per_unit.as_integer_ratio(),
                             **asdict(least))
    told = replace(told, all_reduce=reductions_of_layers(job, tick / Fraction(*told.per_tick)))
    return replace(schedule, times=replace(schedule.times, of_layers=told))


def period_beside(schedule: Schedule, job: Job, params: OverlapParams) -> float:
    """Seconds of about the same, for those who ask for hundreds of periods: fewer ways to cut are tried."""
    schedule = _in_ticks_of_layers(schedule, job)
    return schedule.seconds(_best(schedule, job, params.few[:2], params).period_ticks)


def _in_ticks_of_layers(schedule: Schedule, job: Job) -> Schedule:
    """The same schedule in ticks, and units of memory, that also hold what single layers take."""
    if not has_layers(job):
        return schedule
    memory, told = schedule.memory, schedule.times.of_layers
    finer = _ticks_of_layers(schedule.tick_seconds, job)
    smaller = max(1, ceil(ratio(memory.unit, float(unit_of(job, layer_costs(job)))))) if memory else 1
    if finer == smaller == 1:
        return schedule
    if told:  # its ticks hold what layers take without reductions
        told = _times_more(_times_more(told, finer, OF_LAYERS), smaller, HELD)
    if memory:
        memory = replace(_times_more(memory, smaller, ("capacity", *HELD)), unit=float(exact(memory.unit) / smaller),
                         capacity_of=memory.capacity_of and tuple(replace(one, capacity=smaller * one.capacity)
                                                                  for one in memory.capacity_of))
    return replace(schedule, tick_seconds=float(exact(schedule.tick_seconds) / finer), memory=memory,
                   times=replace(_times_more(schedule.times, finer, OF_STAGES), of_layers=told,
                                 transfer=finer * schedule.times.transfer),
                   programs=tuple(tuple(replace(op, start_ticks=finer * op.start_ticks) for op in program)
                                  for program in schedule.programs),
                   period_ticks=finer * schedule.period_ticks, lower_bound_ticks=finer * schedule.lower_bound_ticks)


def _best(schedule: Schedule, job: Job, counts: Sequence[int], params: OverlapParams,
          budget: Budget | None = None) -> Schedule:
    """Of ways to cut the last micro-batches, so many of each worker, and of cutting none, the shortest of those that
    there is time for."""
    costs = layer_costs(job) if has_layers(job) else None
    best = _Overlapped(schedule, job, costs, 0, 1).schedule()

    def shorter(count: int, pieces: int, *, ascending: bool) -> bool:
        nonlocal best
        if budget is not None and (budget.seconds <= 0 or budget.stopped):
            return False
        made = _Overlapped(schedule, job, costs, count, pieces, ascending=ascending).schedule()
        if made.period_ticks >= best.period_ticks or check(made):
            return False
        best = made
        return True

    for pieces, ascending in product(params.pieces if job.network.latency else params.pieces[:1], (False, True)):
        few = [count for count in counts if count in params.few] or counts
        found = [count for count in few if costs is not None and shorter(count, pieces, ascending=ascending)]
        for step in (-1, 1) if found else ():
            place = counts.index(found[-1]) + step
            while 0 <= place < len(counts) and shorter(counts[place], pieces, ascending=ascending):
                place += step
    return best


class _Reductions:
    """What reductions of ranges of layers take: what the least takes, and the layers' shares of the rest."""

    def __init__(self, job: Job) -> None:
        least = exact(job.network.least(job.pipelines * job.chains))
        costs, ends = layer_costs(job), [*accumulate(job.layers or (1,) * job.depth, initial=0)]
        self._least = min([least, *(exact(one) for one in job.time.all_reduce if one)])
        self._beyond = [layer * (1 - self._least / exact(whole)) if whole else layer
                        for (first, end), whole in zip(pairwise(ends), job.time.all_reduce, strict=False)
                        for layer in costs.all_reduce[first:end]]

    def of(self, layers: LayerRange) -> Fraction:
        """Seconds."""
        beyond = sum(self._beyond[slice(*layers)], Fraction(0))
        return self._least + beyond if beyond else beyond


def _ticks(seconds: Fraction, tick: Fraction) -> int:
    """Rounded up; but a tick is a float, which may be a little less than it should."""
    return ceil(seconds / tick - Fraction(ROUNDED))


class _LayerParts(NamedTuple):
    """A worker's program as it is cut: its compute ops in order, and what it reduces, each range with its number."""

    ops: list[ProgramOp]
    reduced: list[LayerRange]


class _Overlapped:
    """A schedule whose workers cut the last `count` micro-batches that they run, and each range that is reduced into so
    many `pieces` at most. `ascending`: their W are done by layer, the first one first, in place of Johnson's rule."""

    def __init__(self, schedule: Schedule, job: Job, costs: LayerSeconds | None, count: int, pieces: int, *,
                 ascending: bool = False) -> None:
        self._old, self._costs, self._count, self._ascending = schedule, costs, count, ascending
        self._job = job
        self._layers = list(schedule.layers_by_slice)
        self._number = {layers: number for number, layers in reversed(list(enumerate(self._layers)))}
        times, memory = schedule.times, schedule.memory
        self._values = [list(one) for one in zip(
            times.forward, times.backward_input, times.backward_weight,
            *((memory.activation, memory.weight_stash) if memory else ()), strict=True)]
        """Of each slice."""
        self._pieces = pieces
        self._within: dict[LayerRange, list[LayerRange]] = {}
        self._turn: dict[int, int] = {}

    def schedule(self) -> Schedule:
        """It, without a bound."""
        old = self._old
        self._turn = self._turns()
        parts = [self._divided(program) for program in old.programs]
        reductions = sorted({layers for one in parts for layers in one.reduced})
        for layers in reductions:
            self._known(layers)
        forward, inputs, weights, *held = zip(*self._values, strict=True)
        times = replace(old.times, forward=forward, backward_input=inputs, backward_weight=weights, overlap=True,
                        all_reduce=self._reduction_ticks())
        memory = old.memory and replace(old.memory, activation=held[0], weight_stash=held[1])
        made = replace(old, slices=tuple(self._layers[len(old.grid.stages):]), times=times, memory=memory,
                       programs=tuple(tuple(one.ops) for one in parts))
        return _timed(made, [one.reduced for one in parts], self._number)

    def _reduction_ticks(self) -> tuple[int, ...]:
        """By slice."""
        tick, stages = exact(self._old.tick_seconds), self._job.time.all_reduce
        if self._costs is None:
            return tuple(_ticks(exact(seconds), tick) for seconds in stages)
        seconds = _Reductions(self._job)
        return (*(_ticks(exact(one), tick) for one in stages),
                *(_ticks(seconds.of(layers), tick) for layers in self._layers[len(stages):]))

    def _turns(self) -> dict[int, int]:
        """[layer] the turn in which its W is done, where there is a choice. Of two machines that jobs pass one after
        the other, here W of a worker and then its link, all are done earliest by Johnson's rule (Nav. Res. Logist. Q.
        1, 1954): first those that take the first for a shorter time, shortest first; then those that take the second
        for the longest. It knows no neighbours: of two that share a layer, the one whose window ends first, which is
        the one with lower layers, waits for both. Ascending, it waits for least."""
        if not self._count or self._costs is None:
            return {}
        pieces = {piece for program in self._old.programs for op in program if op.kind is OpKind.A
                  for piece in self._cut(self._old.layers_of(op.slice or 0))}
        seconds = _Reductions(self._job)

        def rule(piece: LayerRange) -> tuple[bool, Fraction, int]:
            assert self._costs is not None
            weights = self._costs.backward_weight[slice(*piece)]
            if self._ascending:
                return False, Fraction(0), piece[0]
            first, second = self._count * sum(weights, Fraction(0)), seconds.of(piece)
            return first >= second, first if first < second else -second, -piece[0]

        return {layer: turn for turn, piece in enumerate(sorted(pieces, key=rule)) for layer in range(*piece)}

    def _divided(self, program: Program) -> _LayerParts:
        """A program with its last micro-batches cut."""
        reduced = [self._old.layers_of(op.slice) for op in program if op.kind is OpKind.A and op.slice is not None]
        if not self._count:
            return _LayerParts([op for op in program if op.kind not in (OpKind.A, OpKind.O)], sorted(reduced))
        pieces = sorted(piece for layers in reduced for piece in self._cut(layers))
        edges = sorted({edge for piece in pieces for edge in piece})
        finals = [op for op in program if op.kind in FINAL]
        chosen = {(op.slice, op.microbatch, op.pipeline) for op in finals[-self._count:]}
        ops: list[ProgramOp] = []
        waiting: list[tuple[int, int, ProgramOp]] = []
        for op in program:
            unit = op.slice, op.microbatch, op.pipeline
            if op.kind in (OpKind.A, OpKind.O) or op.slice is None:
                continue
            if unit not in chosen:
                ops.append(op)
                continue
            cut = [replace(op, slice=number) for number in self._pieces_of(op.slice, edges)]
            if op.kind is OpKind.F:
                ops += cut
            elif op.kind is OpKind.W:
                waiting.sort(key=lambda one: one[:2])
                ops += [waiting.pop(0)[2] for _ in cut]
            else:
                ops += reversed(cut)
                if op.kind is OpKind.I:  # from now on, their W may be done
                    waiting += [(self._turn[self._layers[one.slice or 0][0]], len(ops) + place,
                                 replace(one, kind=OpKind.W))
                                for place, one in enumerate(reversed(cut))]
        return _LayerParts(ops, pieces)

    def _cut(self, layers: LayerRange) -> list[LayerRange]:
        """Layers that are reduced together, as ranges that are reduced one after the other."""
        first, end = layers
        count = min(self._pieces, end - first)
        edges = [first + (end - first) * piece // count for piece in range(count + 1)]
        return list(pairwise(edges))

    def _pieces_of(self, slice_: int, edges: Sequence[int]) -> list[int]:
        """The numbers of the slices that a slice is cut into."""
        layers = self._layers[slice_]
        if layers not in self._within:
            first, end = layers
            inner = [first, *(edge for edge in edges if first < edge < end), end]
            self._within[layers] = list(pairwise(inner))
            if len(inner) > 2:
                self._add(slice_, self._within[layers])
        return [self._number[piece] for piece in self._within[layers]]

    def _add(self, slice_: int, pieces: Sequence[LayerRange]) -> None:
        """Slices beside those that there are, with what they take of a slice; of two, the more."""
        costs, whole = self._costs, self._values[slice_]
        assert costs is not None
        by_layer = costs.forward, costs.backward_input, costs.backward_weight, costs.activation, costs.weight_stash
        for place, value in enumerate(whole):
            *before, total = accumulate((sum(by_layer[place][slice(*piece)]) for piece in pieces), initial=Fraction(0))
            ends = [round(value * one / total) if total else 0 for one in (*before, total)]
            for piece, (begin, end) in zip(pieces, pairwise(ends), strict=True):
                number = self._known(piece)
                if number >= len(self._old.layers_by_slice):
                    self._values[number][place] = max(self._values[number][place], end - begin)

    def _known(self, layers: LayerRange) -> int:
        if layers not in self._number:
            self._number[layers] = len(self._layers)
            self._layers.append(layers)
            self._values.append([0] * len(self._values[0]))
        return self._number[layers]


# --- Start times ------------------------------------------------------------------------------------------------------


def _timed(schedule: Schedule, reduced: Sequence[Sequence[LayerRange]], number: Mapping[LayerRange, int]) -> Schedule:
    """A schedule of compute ops with what each program has `reduced`. Every op as early as the order allows; workers
    begin when they did. Reductions follow the last W of their layers as soon as the links of all that hold these are
    free, the ones that can begin first before others."""
    begins = _compute_begins(schedule)
    ends: dict[Worker, int] = {}
    ready: dict[LayerRange, int] = defaultdict(int)
    holders: dict[LayerRange, list[Worker]] = defaultdict(list)
    last_of_slice: dict[int, int] = defaultdict(int)
    for seat in schedule.seats:
        worker = seat.worker
        ends[worker] = 0
        for op, start in zip(schedule.programs[seat.program], begins[worker], strict=True):
            assert op.slice is not None
            ends[worker] = end = start + schedule.times.duration_ticks(op.kind, op.slice, worker)
            if op.kind in FINAL:
                last_of_slice[op.slice] = max(last_of_slice[op.slice], end)
        for layers in reduced[seat.program]:
            holders[layers].append(worker)
    for slice_, end in last_of_slice.items():
        low, high = schedule.layers_of(slice_)
        for layers in holders:
            if layers[0] < high and low < layers[1]:
                ready[layers] = max(ready[layers], end)
    links = dict.fromkeys(begins, 0)
    closing: dict[Worker, list[ProgramOp]] = defaultdict(list)
    for layers in sorted(holders, key=lambda one: (ready[one], -one[0])):
        begin = max(ready[layers], *(links[worker] for worker in holders[layers]))
        for worker in holders[layers]:
            closing[worker].append(ProgramOp(OpKind.A, number[layers], None, begin))
            links[worker] = begin + schedule.times.all_reduce[number[layers]]
    last = max(ends.values()) if schedule.optimizer == "synchronous" else 0
    programs: dict[Program, int] = {}
    seats: list[Seat] = []
    for seat in schedule.seats:
        worker = seat.worker
        body = [replace(op, start_ticks=start)
                for op, start in zip(schedule.programs[seat.program], begins[worker], strict=True)]
        merged = sorted([*body, *closing[worker]], key=lambda op: (op.start_ticks, op.kind is OpKind.A))
        step = ProgramOp(OpKind.O, None, None, max(ends[worker], links[worker], last))
        seats.append(replace(seat, program=programs.setdefault((*merged, step), len(programs))))
    made = replace(schedule, seats=tuple(seats), programs=tuple(programs))
    period = window_ticks(made.all_ops())
    if schedule.optimizer == "synchronous":
        ops = list(made.all_ops())
        period = max(op.end_ticks for op in ops) - min(op.start_ticks for op in ops)
    return replace(made, period_ticks=period, lower_bound_ticks=0, status="feasible")


def _compute_begins(schedule: Schedule) -> dict[Worker, list[int]]:
    """When the ops of each worker begin; those who have none begin nothing."""
    programs, transfer = programs_of(schedule), schedule.times.transfer
    free = {worker: min((op.start_ticks for op in ops), default=0) for worker, ops in programs.items()}
    begins: dict[Worker, list[int]] = {worker: [] for worker in programs}
    done: dict[OpKey, tuple[int, Worker]] = {}
    waiting: dict[OpKey, list[Worker]] = defaultdict(list)
    todo = list(begins)
    while todo:
        worker = todo.pop()
        for op in islice(programs[worker], len(begins[worker]), None):
            key, start = op_key(op), free[worker]
            for awaited, rule in waits(key, schedule.path(*key[2:])):
                if awaited not in done:
                    waiting[awaited].append(worker)
                    break
                end, by = done[awaited]
                start = max(start, end + (transfer if rule.tensor and by != worker else 0))
            else:
                begins[worker].append(start)
                free[worker] = start + op.end_ticks - op.start_ticks
                done[key] = free[worker], worker
                todo += waiting.pop(key, ())
                continue
            break
    return begins
