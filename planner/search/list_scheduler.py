"""List schedules of one problem under one assignment: what is chosen, and the call of the compiled scheduler."""

import heapq
import math
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Literal, NamedTuple, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.planner.loops import loops
from slipstream.planner.model.arrays import Ints, ProblemArrays, Solution, ints
from slipstream.planner.model.bounds import lower_bound, window_bound
from slipstream.planner.model.problem import UNLIMITED, Problem, Unit, evenly
from slipstream.planner.model.start_times import timed
from slipstream.schedules.schedule import OpKind, Worker

# --- Assignment: who runs the micro-batches of dead and of slow workers, chosen before anything is timed --------------


AssignmentRule = Literal["least-loaded", "spread", "round-robin", "by-speed"]
ASSIGNMENT_RULES: tuple[AssignmentRule, ...] = get_args(AssignmentRule)


def assign(problem: Problem, rule: AssignmentRule) -> dict[Unit, Worker]:
    """A host for every unit: that of the layout; else its own worker where that is alive, else a peer by the rule.

    "by-speed" leaves live workers only what they have time for: see `_by_speed`.
    """
    if problem.assigned:
        return {Unit(number, *batch): worker for batch, route in problem.routes.items() for number, worker in route}
    if rule == "by-speed":
        return _by_speed(problem)
    hosts: dict[Unit, Worker] = {}
    rerouted: dict[int, list[Unit]] = {}
    for stage in range(len(problem.grid.stages)):
        for pipeline, count in enumerate(problem.grid.microbatches):
            units = [Unit(stage, pipeline, microbatch) for microbatch in range(count)
                     if stage in problem.grid.path(microbatch)]
            own = problem.worker(stage, pipeline)
            if own not in problem.failed:
                hosts.update(dict.fromkeys(units, own))
            elif units:
                rerouted.setdefault(stage, []).extend(units)
    for units in rerouted.values():
        # By micro-batch, so that those of several pipelines share their peers evenly over time.
        units.sort(key=lambda unit: (unit.microbatch, unit.pipeline))
    lost = _lost(problem)
    if rule == "spread":
        return hosts | _spread(problem, rerouted, lost)
    for stage, units in rerouted.items():
        live = problem.holders[stage]
        hosts |= _round_robin(live, units) if rule == "round-robin" else _least_loaded(problem, stage, units, lost)
    return hosts


def _by_speed(problem: Problem) -> dict[Unit, Worker]:
    """Each stage's micro-batches over its live workers, so that the last of them is done as early as can be.

    A worker keeps as many of its own as it gets, and the others, even over the iteration, go to those that get more:
    to workers of pipelines that run the fewest of others so far.
    """
    hosts: dict[Unit, Worker] = {}
    foreign: Counter[int] = Counter()
    for stage in range(len(problem.grid.stages)):
        price = _prices(problem, stage)
        own = {pipeline: [Unit(stage, pipeline, microbatch) for microbatch in range(count)
                          if stage in problem.grid.path(microbatch)]
               for pipeline, count in enumerate(problem.grid.microbatches)}
        free = _counts(price, {host: len(own[host]) for host in price}, sum(map(len, own.values())))
        shed: list[Unit] = []
        for pipeline, units in own.items():
            leaving = evenly(len(units) - min(len(units), free.get(pipeline, 0)), len(units))
            shed += [unit for index, unit in enumerate(units) if index in leaving]
            stay = [unit for index, unit in enumerate(units) if index not in leaving]
            hosts.update(dict.fromkeys(stay, problem.worker(stage, pipeline)))
            if pipeline in free:
                free[pipeline] -= len(stay)
        for unit in sorted(shed, key=lambda unit: (unit.microbatch, unit.pipeline)):
            host = min((host for host in free if free[host]), key=lambda host: (foreign[host], -free[host], host))
            hosts[unit] = problem.worker(stage, host)
            free[host] -= 1
            foreign[host] += 1
    return hosts


def _counts(price: Mapping[int, int], own: Mapping[int, int], total: int) -> dict[int, int]:
    """How many units each host runs so that the last is done first; of equal choices, its own."""
    counts = dict.fromkeys(price, 0)
    heap = [(price[host], own[host] < 1, host) for host in price]
    heapq.heapify(heap)
    for _ in range(total):
        load, _, host = heap[0]
        counts[host] += 1
        heapq.heapreplace(heap, (load + price[host], counts[host] + 1 > own[host], host))
    return counts


def _round_robin(live: tuple[Worker, ...], units: list[Unit]) -> dict[Unit, Worker]:
    """ReCycle's rule (SOSP 2024): peer after peer, whatever they already have to do."""
    return {unit: live[index % len(live)] for index, unit in enumerate(units)}


def _spread(problem: Problem, rerouted: Mapping[int, list[Unit]], lost: Sequence[int]) -> dict[Unit, Worker]:
    """Each to the peer whose pipeline runs the fewest of others so far, at whatever stage, where that peer has time.

    Pipelines with dead workers of their own come last: their micro-batches wait for peers, and their workers had better
    have time to spare.

    A peer has time for more than its share where the bound is set by another stage. The stages with the least to spare
    choose first.
    """
    bound = lower_bound(problem)
    rerouted_to = [gone * count for gone, count in zip(lost, problem.grid.microbatches, strict=True)]
    hosts: dict[Unit, Worker] = {}
    for stage in sorted(rerouted, key=lambda stage: -window_bound(problem, problem.column_of[stage])):
        price = _prices(problem, stage)
        least = window_bound(problem, problem.column_of[stage])
        loads = {host: price[host] * problem.grid.microbatches[host] for host in price}
        busiest = -(-(sum(loads.values()) + len(rerouted[stage]) * max(price.values())) // len(price))
        room = max(bound - least, 0) + busiest
        for unit in rerouted[stage]:
            host = min(price, key=lambda host: (loads[host] + price[host] > room, rerouted_to[host], loads[host], host))
            hosts[unit] = problem.worker(stage, host)
            loads[host] += price[host]
            rerouted_to[host] += 1
    return hosts


def _lost(problem: Problem) -> list[int]:
    """How many workers each pipeline has lost."""
    here = Counter(pipeline for live in problem.live_by_column for pipeline in live)
    return [problem.grid.columns - here[pipeline] for pipeline in range(problem.grid.pipelines)]


def _prices(problem: Problem, stage: int) -> dict[int, int]:
    """What a micro-batch takes on each pipeline's worker of a stage, in ticks."""
    return {host.pipeline: sum(problem.cost(kind, stage, host) for kind in problem.kinds)
            for host in problem.holders[stage]}


def _least_loaded(problem: Problem, stage: int, units: list[Unit], lost: Sequence[int]) -> dict[Unit, Worker]:
    """Each to the peer that would be done first with all its work; of equal peers, to one whose pipeline is whole."""
    price = _prices(problem, stage)
    live = sorted(price, key=lambda host: (lost[host], host))
    loads = [(price[host] * (problem.grid.microbatches[host] + 1), index, host) for index, host in enumerate(live)]
    heapq.heapify(loads)
    hosts = {}
    for unit in units:
        load, order, host = heapq.heappop(loads)
        hosts[unit] = problem.worker(stage, host)
        heapq.heappush(loads, (load + price[host], order + len(live), host))
    return hosts


# --- The list scheduler -----------------------------------------------------------------------------------------------


ForwardOrder = Literal["deepest", "oldest"]
Rerouted = Literal["in turn", "first", "last"]


STEPS = 64
"""In which places in the turn of micro-batches are told apart, to one of a micro-batch."""
RANKS_KEPT = 32
"""Turns of micro-batches that are kept: neighbours of a rule share them, but random steps come by thousands."""
Floats = NDArray[np.float64]


class StuckError(Exception):
    """Micro-batches wait for each other's room: workers hold too many layers for so little memory."""


class Places(NamedTuple):
    """By how much a micro-batch goes before its turn."""

    pipeline: int
    microbatch: int
    places: float
    """In the turn; negative: after it."""


class DispatchRule(msgspec.Struct, frozen=True, kw_only=True):
    """The dispatching rule of a list scheduler: which ready op a worker starts, if any.

    A gradient before a forward before a weight gradient; this says the rest. `planner.search.list_search` tries many.
    """

    lookahead: float = 0.0
    """Leave a worker idle rather than start a W when a more urgent op is known to be ready within this share of it."""
    forward_lookahead: float = 0.0
    """Leave a worker idle rather than start an F when a gradient is known to be ready within this share of it."""
    fill_wait: tuple[int, ...] | None = None
    """The same before a worker's first gradient, in ticks by slice; None: as later.

    An F that delays the first gradient delays it at all earlier stages, where other ops will have to fill the time;
    later on, there are ops enough.
    """
    advance: float = 0.0
    """Micro-batches on longer routes than others go before these: by this many times what their way takes longer."""
    gradient_advance: float = 0.0
    """The same of their gradients."""
    places: tuple[Places, ...] = ()
    """Single micro-batches that go before, or after, their turn."""
    gradient_places: tuple[Places, ...] = ()
    """The same of their gradients."""
    forward_order: ForwardOrder = "deepest"
    """Which F first: the lowest micro-batch, or the one furthest along its chain."""
    in_flight: tuple[int, ...] | None = None
    """At most this many micro-batches a worker between F and the end of I, one number per slice.

    Memory that forwards do not take is left for weight gradients to wait in, which fill bubbles later.
    """
    load_share: float = 1.0
    """A worker with x % more micro-batches than the usual one may have this share of x % more in flight."""
    rerouted: Rerouted = "in turn"
    """Whether re-routed micro-batches go before those of the worker's own pipeline, after them, or in turn.

    First is good where the broken pipeline, which has to wait for several peers, sets the pace.
    """
    make_room: bool = False
    """Where an F waits for room, run a W before anything else."""
    eager_weights: bool = False
    """Run a W directly after its I, as an unsplit backward would."""
    ignore_transfers: bool = False
    """Choose the order as if transfers took no time. On the coarse grid of op lengths a worker is rarely caught in the
    middle of an op when a more urgent one arrives a moment later; the order is then timed with the true hops."""


def in_flight(problem: Problem, slope: float = 1.0, extra: int = 0) -> tuple[int, ...]:
    """Limits of 1F1B, times a slope, plus more: high at early stages, whose gradients come back late."""
    return tuple(max(1, int(slope * ahead) + extra) for ahead in problem.ahead)


def shares_of_forward(problem: Problem, share: float) -> tuple[int, ...]:
    """[slice] a share of its F's usual time, in ticks."""
    return tuple(math.ceil(share * problem.usual(OpKind.F, number)) for number in range(len(problem.layers_of)))


class ListScheduler:
    """Makes list schedules of a problem with an assignment."""

    def __init__(self, arrays: ProblemArrays) -> None:
        self.arrays = arrays
        problem, ops, reserved = arrays.problem, arrays.ops, reserved_memory(arrays)
        stash = [problem.stash(number) for number in range(len(problem.layers_of))]
        capacity = [problem.room(worker) for worker in arrays.workers]
        self._kernel = kernel = loops()
        self._memory = kernel.MemoryLimits(capacity=ints(capacity),
                                     room=ints(list(zip(reserved.at_start, stash, reserved.needed, strict=True))))
        first = np.flatnonzero(np.diff(ops.predecessors.start) == 0)
        chain = ops.slice[ops.unit[first]] // problem.grid.depth
        chains = range(problem.grid.chains)
        self._first = [first[chain == number] for number in chains] if reserved.chains_in_turn else [first]
        self._forward = ints([problem.usual(OpKind.F, number) for number in range(len(problem.layers_of))])
        self._waits: dict[tuple[float, tuple[int, ...] | None], Ints] = {}
        self._ranks: dict[tuple[Rerouted, float, tuple[Places, ...]], Ints] = {}
        self._made: tuple[Ints, Ints] | None = None

    def order(self, rule: DispatchRule) -> Ints:
        """All ops in the order in which they start under a rule. Raises StuckError; see `reserved_memory`."""
        dispatch = self._kernel.Dispatch(
            rank=self._rank(rule.rerouted, rule.advance, rule.places),
            gradient_rank=self._rank(rule.rerouted, rule.gradient_advance, rule.gradient_places),
            slots=self._slots(rule), lookahead=rule.lookahead,
            forward_wait=self._forward_wait(rule), deepest_first=rule.forward_order == "deepest",
            eager_weights=rule.eager_weights, make_room=rule.make_room, transfers=not rule.ignore_transfers)
        order, done = np.zeros(len(self.arrays.ops.unit), dtype=np.int64), 0
        for first in self._first:
            done = self._kernel.list_order(self.arrays.ops, self._memory, dispatch, first, order, done)
        if done < len(order):
            raise StuckError
        return order

    def _forward_wait(self, rule: DispatchRule) -> Ints:
        """[before or after its worker's first gradient, slice] ticks that an F waits for a gradient.

        By the usual time of an F: a slow worker's slice may take longer.
        """
        key = rule.forward_lookahead, rule.fill_wait
        if key not in self._waits:
            usual = rule.forward_lookahead * self._forward
            first = usual if rule.fill_wait is None else ints(rule.fill_wait)
            self._waits[key] = np.ceil([first, usual]).astype(np.int64)
        return self._waits[key]

    def _rank(self, rerouted: Rerouted, advance: float, places: tuple[Places, ...]) -> Ints:
        """[unit] how urgent it is; see `_ranks`."""
        key = rerouted, advance, places
        if key not in self._ranks:
            if len(self._ranks) == RANKS_KEPT:
                self._ranks.clear()
            longer = self._longer if advance else None
            self._ranks[key] = _ranks(self.arrays, longer, *key)
        return self._ranks[key]

    @cached_property
    def _longer(self) -> Floats:
        return _longer(self.arrays)

    def period(self, rule: DispatchRule) -> int:
        """The period in ticks that a rule gives. `solution` is then that of this rule."""
        order = self.order(rule)
        period, start = timed(self.arrays, order)
        self._made = order, start
        return period

    def solution(self) -> Solution:
        """The last plan that `period` made."""
        return self.arrays.solution(*self.made)

    @property
    def made(self) -> tuple[Ints, Ints]:
        """Its order and [op] start ticks."""
        assert self._made is not None
        return self._made

    def _slots(self, rule: DispatchRule) -> Ints:
        """[worker, slice] most micro-batches in flight."""
        load = self.arrays.load
        if rule.in_flight is None:
            return np.full((len(load), len(self._memory.room)), UNLIMITED)
        usual = statistics.median_low(units for units in load.tolist() if units)
        more = np.maximum(0.0, load / usual - 1)
        slots: Ints = np.ceil(np.outer(1 + rule.load_share * more, rule.in_flight)).astype(np.int64)
        return slots


def _ranks(arrays: ProblemArrays, longer: Floats | None, rerouted: Rerouted, advance: float,
           places: Sequence[Places]) -> Ints:
    """[unit] by micro-batch, then pipeline: older micro-batches go first, those of several pipelines in turn.

    Those on longer routes (`_longer`) count as older: `DispatchRule.advance`, and single ones: `DispatchRule.places`.
    """
    _, pipeline, number = arrays.unit_numbers.T
    older = np.zeros(len(number)) if longer is None else advance * longer
    for one in places:
        older[(pipeline == one.pipeline) & (number == one.microbatch)] += one.places
    _, found = np.unique(np.round((number - older) * STEPS) * arrays.problem.grid.pipelines + pipeline,
                         return_inverse=True)
    if rerouted == "in turn":
        return found
    home = ints([worker.pipeline for worker in arrays.workers])[arrays.ops.worker] == pipeline
    later: Ints = (home if rerouted == "first" else ~home).astype(np.int64)
    return found + later * int(found.max() + 1)


def _longer(arrays: ProblemArrays) -> Floats:
    """[unit] how much longer than the shortest way, there and back, that of its micro-batch is.

    In times that the busiest worker needs for a micro-batch. An op waits on average for half of another one to end.
    """
    ops, kinds = arrays.ops, arrays.ops.kinds
    both = ops.duration[::kinds] + ops.duration[1::kinds] + 2 * arrays.problem.times.transfer + ops.duration.mean()
    begins = np.flatnonzero(np.diff(arrays.unit_numbers[:, 1:], axis=0, prepend=-1).any(axis=1))
    ways = np.add.reduceat(both, begins)
    busiest = np.bincount(ops.worker[ops.unit], weights=ops.duration).max()
    longer: Floats = (ways - ways.min()) * max(arrays.problem.grid.microbatches) / busiest
    return np.repeat(longer, np.diff([*begins, len(both)]))


# --- Memory that is reserved ------------------------------------------------------------------------------------------


class ReservedMemory(NamedTuple):
    """Room by slice.

    Why nothing gets stuck: of all micro-batches that wait for room, take one whose next op is at the deepest position p
    of its chain, an I before an F. Whatever else its worker holds was begun at positions up to p (before p, if the op
    is an F), and the last of these was begun only while the room that is needed at p was left. So the op fits.
    """

    at_start: tuple[int, ...]
    """Room taken when an F starts. Where the stash is more, the I waits until the worker has run enough of its W."""
    needed: tuple[int, ...]
    """Room that must be free when an F starts: for itself, and to go on at the deeper stages of its worker."""
    chains_in_turn: bool
    """Whether the micro-batches of one chain must all be done before those of the next begin."""


def reserved_memory(arrays: ProblemArrays) -> ReservedMemory:
    """What keeps a list schedule from getting stuck; where layers are not held by column, what mostly does."""
    return _by_worker(arrays) if arrays.problem.assigned else _by_column(arrays.problem)


def _by_worker(arrays: ProblemArrays) -> ReservedMemory:
    """Room for the largest of the deeper slices that a worker runs, too, under this assignment.

    So all of them can drain, by the argument above, if no worker's room is too small for that. Else each F waits for
    its own room only.
    """
    problem = arrays.problem
    count = len(problem.layers_of)
    most = tuple(map(problem.hold, range(count)))
    run: list[set[int]] = [set() for _ in arrays.workers]
    for number, row in set(zip(arrays.ops.slice.tolist(), arrays.ops.worker.tolist(), strict=True)):
        run[row].add(number)
    needed = list(most)
    ample = True
    for worker, numbers in zip(arrays.workers, run, strict=True):
        for number in numbers:
            first = problem.layers_of[number][0]
            deeper = max((most[other] for other in numbers if problem.layers_of[other][0] > first), default=0)
            needed[number] = max(needed[number], most[number] + deeper)
        ample = ample and all(needed[number] <= problem.room(worker) for number in numbers)
    if ample:
        return ReservedMemory(most, tuple(needed), chains_in_turn=False)
    return ReservedMemory(tuple(map(problem.activation, range(count))), most, chains_in_turn=False)


def _by_column(problem: Problem) -> ReservedMemory:
    """Where memory allows, room for the stash of every micro-batch in flight and for one more at each deeper stage.

    Then no I ever waits for room. Else the least with which a plan exists (`Problem.least_room`). With that little,
    micro-batches that go opposite ways would block each other, so that chains take turns.
    """
    grid, stages = problem.grid, range(len(problem.grid.stages))
    most = tuple(map(problem.hold, stages))
    ample = tuple(most[stage] + sum(most[other] for other in grid.stages_of(problem.column_of[stage])
                                    if grid.original(other) > grid.original(stage)) for stage in stages)
    room = [min((problem.room(Worker(pipeline, column)) for pipeline in live), default=0)
            for column, live in enumerate(problem.live_by_column)]
    if problem.memory is None or (all(ample[stage] <= room[problem.column_of[stage]] for stage in stages)
                                  and not _starves(problem, room)):
        return ReservedMemory(most, ample, chains_in_turn=False)
    return ReservedMemory(tuple(map(problem.activation, stages)), tuple(map(problem.least_room, stages)),
                    chains_in_turn=True)


def _starves(problem: Problem, room: Sequence[int]) -> bool:
    """Whether room for the stash of all in flight, where it is more than the activation, keeps too many from starting.

    So it is where activations are computed again: hardly anything is held until I, and then as much as ever.
    """
    grid = problem.grid
    return grid.chains == 1 and any(
        problem.stash(stage) > problem.activation(stage)
        and room[problem.column_of[stage]] < (grid.depth - stage) * problem.stash(stage)
        for stage in range(grid.depth))


# --- What others run: orders to compare with, by the same list scheduler under their rules ----------------------------


def one_f_one_b(problem: Problem) -> Solution:
    """1F1B (PipeDream-flush, Narayanan et al. 2021); micro-batches of workers that are down go to peers round-robin.

    Stage v of V holds at most V - v micro-batches between F and B; a backward is never postponed or torn apart.
    """
    return _list(problem, DispatchRule(forward_order="oldest", eager_weights=True, in_flight=in_flight(problem)))


def recycle(problem: Problem) -> Solution:
    """ReCycle's rule (SOSP 2024): round-robin assignment, every worker's own micro-batches in 1F1B order.

    Re-routed micro-batches and weight gradients go into what bubbles that order leaves. A peer may have as many more
    micro-batches in flight as it runs more of them.
    """
    return _list(problem, DispatchRule(forward_order="oldest", rerouted="last", in_flight=in_flight(problem)))


BASELINES: Mapping[str, Callable[[Problem], Solution]] = {"1f1b": one_f_one_b, "recycle": recycle}


def _list(problem: Problem, rule: DispatchRule) -> Solution:
    scheduler = ListScheduler(ProblemArrays(problem, assign(problem, "round-robin")))
    scheduler.period(rule)
    return scheduler.solution()
