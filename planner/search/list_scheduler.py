"""Make list schedules of a problem: assignment rules, dispatch rules, compiled scheduler."""

import heapq
import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from slipstream.planner.loops import kernel_loops
from slipstream.planner.model.arrays import Ints, ProblemArrays, Solution, to_ints
from slipstream.planner.model.bounds import lower_bound, window_bound
from slipstream.planner.model.memory import (
    activation_memory,
    activation_room,
    min_room,
    peak_slice_memory,
    stash_memory,
)
from slipstream.planner.model.problem import UNLIMITED, Problem, Unit, choose_evenly
from slipstream.planner.model.start_times import time_order
from slipstream.planner.search.least_loaded import assign_least_loaded
from slipstream.schedules.memory import memory_change
from slipstream.schedules.schedule import OpKind, Worker

# --- Assignment: who runs the micro-batches of dead and of slow workers, chosen before anything is timed --------------


AssignmentRule = Literal["least-loaded", "spread", "round-robin", "by-speed"]
ASSIGNMENT_RULES: tuple[AssignmentRule, ...] = get_args(AssignmentRule)


def assign_hosts(problem: Problem, rule: AssignmentRule) -> dict[Unit, Worker]:
    """Return the worker of each unit: the layout's, its own, or a peer by `rule`.

    Its own is that of the micro-batch's pipeline, if alive and with room; peers take units in turn,
    the least loaded first, or spread over stages (`ASSIGNMENT_RULES`). The rule "by-speed" may also
    move micro-batches away from live workers: see `_assign_by_speed`. Raises StuckError if no
    worker in a stage's column has room.
    """
    if problem.assigned:
        return {Unit(number, *batch): worker for batch, route in problem.routes.items() for number, worker in route}
    if rule == "by-speed":
        return _assign_by_speed(problem)
    hosts: dict[Unit, Worker] = {}
    rerouted: dict[int, list[Unit]] = {}
    for stage in range(len(problem.grid.stages)):
        roomy = set(_roomy_hosts(problem, stage))
        for pipeline, count in enumerate(problem.grid.microbatches):
            units = [Unit(stage, pipeline, microbatch) for microbatch in range(count)
                     if stage in problem.grid.stages_of_microbatch(microbatch)]
            own = problem.home_worker(stage, pipeline)
            if own in roomy:
                hosts.update(dict.fromkeys(units, own))
            elif units:
                rerouted.setdefault(stage, []).extend(units)
    for units in rerouted.values():
        # Sorted by micro-batch, so that several pipelines share their peers evenly over time.
        units.sort(key=lambda unit: (unit.microbatch, unit.pipeline))
    lost = _count_dead_workers(problem)
    if not all(hosts_in_column(problem, stage) for stage in rerouted):
        raise StuckError
    if rule == "spread":
        return hosts | _assign_spread(problem, rerouted, lost)
    if rule == "least-loaded":
        return hosts | assign_least_loaded(problem, rerouted, lost, hosts, _find_hosts(problem))
    for stage, units in rerouted.items():
        hosts |= _assign_round_robin(hosts_in_column(problem, stage), units)
    return hosts


def _roomy_hosts(problem: Problem, stage: int) -> Sequence[Worker]:
    """Return the live workers that list schedules may use at a stage.

    Those that have room only because a W takes no time are among them if there are no others: a
    list schedule counts what such a W holds.
    """
    hosts = problem.hosts_by_slice[stage]
    needed = peak_slice_memory(problem, stage)
    return [worker for worker in hosts if needed <= activation_room(problem, worker)] or hosts


def hosts_in_column(problem: Problem, stage: int) -> Sequence[Worker]:
    """Return those of these workers that are in the column of a stage.

    If there are none, return those of the other column that holds it, if pipelines are
    bidirectional.
    """
    hosts = _roomy_hosts(problem, stage)
    return [worker for worker in hosts if worker.column == problem.column_of[stage]] or hosts


def _find_hosts(problem: Problem) -> Mapping[int, Sequence[Worker]]:
    """Return the workers that may run re-routed units of each stage without a deadlock."""
    reserved = _reserve_by_column(problem)
    hosts: dict[int, Sequence[Worker]] = {}
    for stage in range(len(problem.grid.stages)):
        hosts[stage] = hosts_in_column(problem, stage)
        if not reserved.chains_in_turn:
            hosts[stage] = [worker for worker in _roomy_hosts(problem, stage)
                            if worker in hosts[stage]
                            or activation_room(problem, worker) >= reserved.needed[stage]]
    return hosts


def _assign_by_speed(problem: Problem) -> dict[Unit, Worker]:
    """Distribute each stage's micro-batches over its workers by the longest load.

    A worker keeps its own micro-batches up to the number that balances the loads. The others,
    evenly spaced over the iteration, go to workers that should run more than their own, first to
    pipelines that run the fewest micro-batches of others so far.
    """
    hosts: dict[Unit, Worker] = {}
    foreign: Counter[int] = Counter()
    for stage in range(len(problem.grid.stages)):
        ticks_of, host_of = _ticks_by_pipeline(problem, stage), _host_by_pipeline(problem, stage)
        own = {pipeline: [Unit(stage, pipeline, microbatch) for microbatch in range(count)
                          if stage in problem.grid.stages_of_microbatch(microbatch)]
               for pipeline, count in enumerate(problem.grid.microbatches)}
        free = _balance_counts(ticks_of, {host: len(own[host]) for host in ticks_of}, sum(map(len, own.values())))
        handed_on: list[Unit] = []
        for pipeline, units in own.items():
            leaving_indices = choose_evenly(len(units) - min(len(units), free.get(pipeline, 0)), len(units))
            handed_on += [unit for index, unit in enumerate(units) if index in leaving_indices]
            stay = [unit for index, unit in enumerate(units) if index not in leaving_indices]
            if pipeline in free:
                hosts.update(dict.fromkeys(stay, host_of[pipeline]))
                free[pipeline] -= len(stay)
        for unit in sorted(handed_on, key=lambda unit: (unit.microbatch, unit.pipeline)):
            host = min((host for host in free if free[host]), key=lambda host: (foreign[host], -free[host], host))
            hosts[unit] = host_of[host]
            free[host] -= 1
            foreign[host] += 1
    return hosts


def _balance_counts(price: Mapping[int, int], own: Mapping[int, int], total: int) -> dict[int, int]:
    """Return, by pipeline, the number of `total` units that balances the loads."""
    counts = dict.fromkeys(price, 0)
    heap = [(price[host], own[host] < 1, host) for host in price]
    heapq.heapify(heap)
    for _ in range(total):
        load, _, host = heap[0]
        counts[host] += 1
        heapq.heapreplace(heap, (load + price[host], counts[host] + 1 > own[host], host))
    return counts


def _assign_round_robin(live: Sequence[Worker], units: list[Unit]) -> dict[Unit, Worker]:
    """Assign units to the peers in `live` in turn: ReCycle's rule (SOSP 2024)."""
    return {unit: live[index % len(live)] for index, unit in enumerate(units)}


def _assign_spread(problem: Problem, rerouted: Mapping[int, list[Unit]], lost: Sequence[int]) -> dict[Unit, Worker]:
    """Assign units to peers whose pipelines run the fewest re-routed ones, if they have time.

    Pipelines with dead workers come last: their micro-batches wait for peers, so their workers
    should have time to spare. A peer has time for more than its share if another stage sets the
    bound. The stages with the least spare time choose first.
    """
    bound = lower_bound(problem)
    rerouted_to = [dead_count * count for dead_count, count in zip(lost, problem.grid.microbatches, strict=True)]
    hosts: dict[Unit, Worker] = {}
    windows = {stage: window_bound(problem, column) if problem.live_pipelines_by_column[column] else 0
               for stage in rerouted for column in [problem.column_of[stage]]}
    for stage in sorted(rerouted, key=lambda stage: -windows[stage]):
        price, host_of = _ticks_by_pipeline(problem, stage), _host_by_pipeline(problem, stage)
        least = windows[stage]
        loads = {host: price[host] * problem.grid.microbatches[host] for host in price}
        busiest = -(-(sum(loads.values()) + len(rerouted[stage]) * max(price.values())) // len(price))
        room = max(bound - least, 0) + busiest
        for unit in rerouted[stage]:
            host = min(price, key=lambda host: (loads[host] + price[host] > room, rerouted_to[host], loads[host], host))
            hosts[unit] = host_of[host]
            loads[host] += price[host]
            rerouted_to[host] += 1
    return hosts


def _count_dead_workers(problem: Problem) -> list[int]:
    """Return the number of dead workers of each pipeline."""
    here = Counter(pipeline for live in problem.live_pipelines_by_column for pipeline in live)
    return [problem.grid.columns - here[pipeline] for pipeline in range(problem.grid.pipelines)]


def _ticks_by_pipeline(problem: Problem, stage: int) -> dict[int, int]:
    """Return the ticks of a micro-batch's compute ops, by pipeline with a live worker here."""
    return {pipeline: sum(problem.op_ticks(kind, stage, host) for kind in problem.op_kinds)
            for pipeline, host in _host_by_pipeline(problem, stage).items()}


def _host_by_pipeline(problem: Problem, stage: int) -> dict[int, Worker]:
    """Return the worker of each pipeline that may run this stage."""
    return {host.pipeline: host for host in hosts_in_column(problem, stage)}


# --- The list scheduler -----------------------------------------------------------------------------------------------


ForwardOrder = Literal["deepest", "oldest"]
ReroutedTurn = Literal["in turn", "first", "last"]


STEPS_PER_PLACE = 64
"""Number of steps per place to which a place in the turn is rounded.

The turn is the order in which micro-batches go if nothing else decides.
"""
MAX_CACHED_PRIORITIES = 32
"""Largest number of arrays of priorities that a scheduler keeps for neighbouring rules."""
Floats = NDArray[np.float64]


class StuckError(Exception):
    """Raised when micro-batches wait for each other's memory: workers hold too many layers."""


class PlaceChange(NamedTuple):
    """Change of a micro-batch's place in the turn."""

    pipeline: int
    microbatch: int
    places: float
    """Number of places by which the micro-batch moves forward in the turn; negative: backward."""


class DispatchRule(msgspec.Struct, frozen=True, kw_only=True):
    """Rule by which a list scheduler decides which ready op a worker starts, if any.

    Gradients come before forwards, and forwards before weight gradients; the fields decide the
    rest. The turn is the order of micro-batches by age, those of several pipelines alternating.
    `planner.search.list_search` tries many rules.
    """

    lookahead: float = 0.0
    """Durations of a W: none starts if a more urgent op becomes ready within."""
    forward_lookahead: float = 0.0
    """Durations of an F: none starts if an I or B becomes ready within."""
    fill_wait: tuple[int, ...] | None = None
    """Ticks, by slice: no F starts if a first I or B becomes ready within.

    None: `forward_lookahead` decides before a worker's first I or B, too. An F that delays the
    first gradient delays it at all earlier stages, where other ops must fill the time. Later there
    are enough ops.
    """
    advance: float = 0.0
    """Factor on a longer route's extra time, by which F go before their turn."""
    gradient_advance: float = 0.0
    """Factor on a longer route's extra time, by which I, B and W go earlier."""
    places: tuple[PlaceChange, ...] = ()
    """Micro-batches whose F go before or after their turn, with places."""
    gradient_places: tuple[PlaceChange, ...] = ()
    """Micro-batches whose I, B and W go before or after their turn, with places."""
    forward_order: ForwardOrder = "deepest"
    """F that goes first: "oldest" prefers lower micro-batches, "deepest" those furthest along their
    routes."""
    in_flight: tuple[int, ...] | None = None
    """Maximum of a worker's micro-batches between F and I's end, by slice; None: no limit.

    Weight gradients can wait in memory that forwards do not take, and fill bubbles later.
    """
    load_share: float = 1.0
    """Factor by which limits `in_flight` grow with a worker's load.

    With x % more units than usual, they are this times x % higher.
    """
    rerouted: ReroutedTurn = "in turn"
    """Turn of re-routed micro-batches: "first", "last", or by age ("in turn").

    First or last is before or after the pipeline's own. "first" is good if the broken pipeline,
    which waits for several peers, sets the pace.
    """
    make_room: bool = False
    """True if a W runs before anything else while an F waits for memory."""
    eager_weights: bool = False
    """True if each W runs directly after its I, as in a fused backward."""
    ignore_transfers: bool = False
    """True if the order is chosen as if transfers took no time.

    On the coarse grid of op lengths a worker is rarely in the middle of an op when a more urgent
    one arrives a moment later. The order is then timed with the true transfers.
    """


def scale_in_flight_limits(problem: Problem, slope: float = 1.0, extra: int = 0) -> tuple[int, ...]:
    """Return 1F1B's limits by slice, high at first, times `slope` plus `extra`."""
    grid, first = problem.grid, [low for low, _ in problem.layers_by_slice[:problem.grid.depth]]
    begun_before = [*(grid.original_stage(stage) for stage in range(len(grid.stages))),
                    *(bisect_right(first, low) - 1 for low, _ in problem.slices)]
    return tuple(max(1, int(slope * (grid.depth - before)) + extra) for before in begun_before)


def scale_forward_ticks(problem: Problem, share: float) -> tuple[int, ...]:
    """Return the ticks of F at usual speed times `share`, rounded up, by slice."""
    return tuple(math.ceil(share * problem.usual_ticks(OpKind.F, number))
                 for number in range(len(problem.layers_by_slice)))


class ListScheduler:
    """Builder of list schedules of a problem with one assignment, by any dispatch rule."""

    def __init__(self, arrays: ProblemArrays) -> None:
        self.arrays = arrays
        problem, ops = arrays.problem, arrays.ops
        self._kernel = kernel_loops()
        self._memory, chains_in_turn = make_memory_limits(arrays)
        first = np.flatnonzero(np.diff(ops.predecessors.start) == 0)
        chain = ops.slice[ops.unit[first]] // problem.grid.depth
        chains = range(problem.grid.chains)
        self._first = [first[chain == number] for number in chains] if chains_in_turn else [first]
        self._forward = to_ints([problem.usual_ticks(OpKind.F, number)
                                 for number in range(len(problem.layers_by_slice))])
        self._waits: dict[tuple[float, tuple[int, ...] | None], Ints] = {}
        self._cached_priorities: dict[tuple[ReroutedTurn, float, tuple[PlaceChange, ...]], Ints] = {}
        self._last_order_and_starts: tuple[Ints, Ints] | None = None

    def order_ops(self, rule: DispatchRule) -> Ints:
        """Return the numbers of all ops in the order of their start under a rule.

        Raises StuckError if micro-batches wait for each other's memory; see
        `compute_reserved_memory`.
        """
        dispatch = self._kernel.Dispatch(
            rank=self._priorities(rule.rerouted, rule.advance, rule.places),
            gradient_rank=self._priorities(rule.rerouted, rule.gradient_advance, rule.gradient_places),
            slots=self._in_flight_slots(rule), lookahead=rule.lookahead,
            forward_wait=self._forward_wait_ticks(rule), deepest_first=rule.forward_order == "deepest",
            eager_weights=rule.eager_weights, make_room=rule.make_room, transfers=not rule.ignore_transfers)
        order, done = np.zeros(len(self.arrays.ops.unit), dtype=np.int64), 0
        for first in self._first:
            done = self._kernel.list_order(self.arrays.ops, self._memory, dispatch, first, order, done)
        if done < len(order):
            raise StuckError
        return order

    def _forward_wait_ticks(self, rule: DispatchRule) -> Ints:
        """Return the ticks that an F waits before and after a first gradient: [2, slices]."""
        key = rule.forward_lookahead, rule.fill_wait
        if key not in self._waits:
            usual = rule.forward_lookahead * self._forward
            first = usual if rule.fill_wait is None else to_ints(rule.fill_wait)
            self._waits[key] = np.ceil([first, usual]).astype(np.int64)
        return self._waits[key]

    def _priorities(self, rerouted: ReroutedTurn, advance: float, places: tuple[PlaceChange, ...]) -> Ints:
        """Return the priority of each unit by these fields of a `DispatchRule`; cached."""
        key = rerouted, advance, places
        if key not in self._cached_priorities:
            if len(self._cached_priorities) == MAX_CACHED_PRIORITIES:
                self._cached_priorities.clear()
            longer = self._extra_route_time if advance else None
            self._cached_priorities[key] = _compute_priorities(self.arrays, longer, *key)
        return self._cached_priorities[key]

    @cached_property
    def _extra_route_time(self) -> Floats:
        return _compute_extra_route_time(self.arrays)

    def evaluate_rule(self, rule: DispatchRule) -> int:
        """Return the ticks of a rule's list schedule, which becomes `last_solution`."""
        order = self.order_ops(rule)
        period, start = time_order(self.arrays, order)
        self._last_order_and_starts = order, start
        return period

    def last_solution(self) -> Solution:
        """Return the list schedule that the last call of `evaluate_rule` made."""
        return self.arrays.make_solution(*self.last_order_and_starts)

    @property
    def last_order_and_starts(self) -> tuple[Ints, Ints]:
        """Order of all ops, and start ticks by op, of the last `evaluate_rule`."""
        assert self._last_order_and_starts is not None
        return self._last_order_and_starts

    def _in_flight_slots(self, rule: DispatchRule) -> Ints:
        """Return the in-flight limits of workers under a rule: [workers, slices]."""
        load = self.arrays.load
        if rule.in_flight is None:
            return np.full((len(load), len(self._memory.room)), UNLIMITED)
        usual = statistics.median_low(units for units in load.tolist() if units)
        more = np.maximum(0.0, load / usual - 1)
        slots: Ints = np.ceil(np.outer(1 + rule.load_share * more, rule.in_flight)).astype(np.int64)
        return slots


def _compute_priorities(arrays: ProblemArrays, longer: Floats | None, rerouted: ReroutedTurn, advance: float,
                        places: Sequence[PlaceChange]) -> Ints:
    """Return the priority of each unit; lower ones, of older micro-batches, go first."""
    _, pipeline, number = arrays.unit_numbers.T
    older = np.zeros(len(number)) if longer is None else advance * longer
    for change in places:
        older[(pipeline == change.pipeline) & (number == change.microbatch)] += change.places
    _, ranks = np.unique(np.round((number - older) * STEPS_PER_PLACE) * arrays.problem.grid.pipelines + pipeline,
                         return_inverse=True)
    if rerouted == "in turn":
        return ranks
    home = to_ints([worker.pipeline for worker in arrays.workers])[arrays.ops.worker] == pipeline
    later: Ints = (home if rerouted == "first" else ~home).astype(np.int64)
    return ranks + later * int(ranks.max() + 1)


def _compute_extra_route_time(arrays: ProblemArrays) -> Floats:
    """Return how much longer each unit's route takes than the shortest one.

    The unit is the time of the busiest worker for a micro-batch. An op is assumed to wait for half
    of another op on average.
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
    """Memory, by slice, that F takes and that must be free, against deadlocks.

    Proof: of all micro-batches that wait for room, take one that is furthest along its route, at
    position p; of several, one that waits for its I. Everything else on its worker was begun at
    positions up to p (before p, if it waits for its F), and the last of it was begun only while the
    room needed at p remained. So the op fits.
    """

    at_start: tuple[int, ...]
    """Memory units taken when an F starts, by slice. If the stash needs more, the I waits until
    enough W have run."""
    needed: tuple[int, ...]
    """Memory units, by slice, that F needs free, also for its worker's later stages."""
    chains_in_turn: bool
    """True if a direction's micro-batches must finish before the other's begin."""


def compute_reserved_memory(arrays: ProblemArrays) -> ReservedMemory:
    """Return the memory to reserve at a micro-batch's F, so that no schedule gets stuck.

    This is a guarantee if layers are held by column; for other layouts a schedule may still get
    stuck.
    """
    return _reserve_by_worker(arrays) if arrays.problem.assigned else _reserve_by_column(arrays.problem)


def _reserve_by_worker(arrays: ProblemArrays) -> ReservedMemory:
    """Return the memory to reserve by slice, if `arrays` give each unit's worker.

    The free memory must suffice for the slice's peak and for the largest peak of its worker's later
    slices. All micro-batches can then drain, by the argument of `ReservedMemory`. If some worker's
    room is too small for this, each F waits only for the peak of its own slice.
    """
    problem = arrays.problem
    slices = range(len(problem.layers_by_slice))
    most = tuple(peak_slice_memory(problem, number) for number in slices)
    run: list[set[int]] = [set() for _ in arrays.workers]
    for number, row in set(zip(arrays.ops.slice.tolist(), arrays.ops.worker.tolist(), strict=True)):
        run[row].add(number)
    needed = list(most)
    ample = True
    for worker, numbers in zip(arrays.workers, run, strict=True):
        for number in numbers:
            first = problem.layers_by_slice[number][0]
            deeper = max((most[other] for other in numbers if problem.layers_by_slice[other][0] > first), default=0)
            needed[number] = max(needed[number], most[number] + deeper)
        ample = ample and all(needed[number] <= activation_room(problem, worker) for number in numbers)
    if ample:
        return ReservedMemory(most, tuple(needed), chains_in_turn=False)
    return ReservedMemory(tuple(activation_memory(problem, number) for number in slices), most, chains_in_turn=False)


def _reserve_by_column(problem: Problem) -> ReservedMemory:
    """Return the memory to reserve by stage, if layers are held by column.

    If workers have enough memory, an F takes the peak of its stage, and the peaks of its worker's
    later stages must be free, too. No I then ever waits for room. Otherwise an F takes its
    activation, and the least memory with which a plan exists (`min_room`) must be free. As opposite
    directions would then block each other, one must finish before the other begins.
    """
    grid, stages = problem.grid, range(len(problem.grid.stages))
    most = tuple(peak_slice_memory(problem, stage) for stage in stages)
    ample = tuple(most[stage] + sum(most[other] for other in grid.stages_of_column(problem.column_of[stage])
                                    if grid.original_stage(other) > grid.original_stage(stage)) for stage in stages)
    room = [min((activation_room(problem, Worker(pipeline, column)) for pipeline in live), default=0)
            for column, live in enumerate(problem.live_pipelines_by_column)]
    if problem.memory is None or (all(ample[stage] <= room[problem.column_of[stage]] for stage in stages)
                                  and not _can_starve(problem, room)):
        return ReservedMemory(most, ample, chains_in_turn=False)
    return ReservedMemory(tuple(activation_memory(problem, stage) for stage in stages),
                          tuple(min_room(problem, stage) for stage in stages), chains_in_turn=True)


def _can_starve(problem: Problem, room: Sequence[int]) -> bool:
    """Return whether reserving what W needs leaves fewer in flight than 1F1B has.

    This is so with activation recomputation: little is held until I, and from then on as much as
    without it. False for bidirectional pipelines.
    """
    grid = problem.grid
    return grid.chains == 1 and any(
        stash_memory(problem, stage) > activation_memory(problem, stage)
        and room[problem.column_of[stage]] < (grid.depth - stage) * stash_memory(problem, stage)
        for stage in range(grid.depth))


def make_memory_limits(arrays: ProblemArrays) -> tuple[Any, bool]:
    """Return the kernel's `MemoryLimits`, and whether directions must run in turn."""
    problem, reserved = arrays.problem, compute_reserved_memory(arrays)
    kinds = OpKind.F, problem.gradient_kind, OpKind.W
    room = [(*(memory_change(kind, at_start, stash_memory(problem, number)) for kind in kinds), needed)
            for number, (at_start, needed) in enumerate(zip(reserved.at_start, reserved.needed, strict=True))]
    capacity = to_ints([activation_room(problem, worker) for worker in arrays.workers])
    return kernel_loops().MemoryLimits(capacity=capacity, room=to_ints(room)), reserved.chains_in_turn


def without_reserves(memory: Any) -> Any:
    """Return a copy of `MemoryLimits` in which an F reserves nothing for later stages."""
    loops, room = kernel_loops(), memory.room.copy()
    room[:, loops.NEEDED] = room[:, loops.FORWARD]
    return memory._replace(room=room)


# --- What others run: orders to compare with, by the same list scheduler under their rules ----------------------------


def schedule_1f1b(problem: Problem) -> Solution:
    """Return the list schedule of 1F1B (PipeDream-flush, Narayanan et al. 2021), with re-routing
    round-robin to peers.

    Stage v of V holds at most V - v micro-batches between F and B. A backward is never postponed or
    split.
    """
    return _schedule_by_rule(problem, DispatchRule(forward_order="oldest", eager_weights=True,
                                                   in_flight=scale_in_flight_limits(problem)))


def schedule_recycle(problem: Problem) -> Solution:
    """Return the list schedule of ReCycle's rule (SOSP 2024).

    It re-routes round-robin, and runs own micro-batches in 1F1B order. Re-routed micro-batches and
    weight gradients fill the bubbles that this order leaves. The in-flight limit of a peer grows
    with the number of micro-batches that it runs.
    """
    return _schedule_by_rule(problem, DispatchRule(forward_order="oldest", rerouted="last",
                                                   in_flight=scale_in_flight_limits(problem)))


BASELINES: Mapping[str, Callable[[Problem], Solution]] = {"1f1b": schedule_1f1b, "recycle": schedule_recycle}


def _schedule_by_rule(problem: Problem, rule: DispatchRule) -> Solution:
    scheduler = ListScheduler(ProblemArrays(problem, assign_hosts(problem, "round-robin")))
    scheduler.evaluate_rule(rule)
    return scheduler.last_solution()
