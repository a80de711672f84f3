"""Make list schedules of a problem: choose hosts, reserve memory, dispatch ops."""

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
    activation_capacity,
    activation_memory,
    min_room,
    peak_slice_memory,
    stash_memory,
)
from slipstream.planner.model.problem import UNLIMITED, Problem, Unit, choose_evenly
from slipstream.planner.model.start_times import time_order
from slipstream.planner.search.least_loaded import assign_least_loaded
from slipstream.schedules.memory import memory_change
from slipstream.schedules.schedule import OpKind, Worker

# --- Assignment: who runs the micro-batches of dead and of slow workers, chosen before anything is


AssignmentRule = Literal["least-loaded", "spread", "round-robin", "by-speed"]
ASSIGNMENT_RULES: tuple[AssignmentRule, ...] = get_args(AssignmentRule)


def assign_hosts(problem: Problem, rule: AssignmentRule) -> dict[Unit, Worker]:
    """Return each unit's worker: the layout's, its own, or a peer chosen by `rule`.

    A unit stays on the worker of its micro-batch's pipeline if that worker is alive and has room.
    Other units go to peers: in turn ("round-robin"), to the least loaded ("least-loaded"), or to
    those with time to spare ("spread"). The rule "by-speed" evens out loads, and may also take
    micro-batches from live workers. Raises StuckError if no live worker of a stage has room for a
    micro-batch.
    """
    if problem.assigned:
        return {
            Unit(number, *batch): worker
            for batch, route in problem.routes.items()
            for number, worker in route
        }
    if rule == "by-speed":
        return _assign_by_speed(problem)
    # Units whose pipeline's worker is alive, with room, stay there.
    hosts: dict[Unit, Worker] = {}
    rerouted: dict[int, list[Unit]] = {}
    for stage in range(len(problem.grid.stages)):
        roomy = set(_roomy_hosts(problem, stage))
        for pipeline in range(problem.grid.pipelines):
            units = _units_of_pipeline(problem, stage, pipeline)
            home = problem.home_worker(stage, pipeline)
            if home in roomy:
                hosts.update(dict.fromkeys(units, home))
            elif units:
                rerouted.setdefault(stage, []).extend(units)
    for units in rerouted.values():
        # Sorted by micro-batch, so that several pipelines share their peers evenly over time.
        units.sort(key=lambda unit: (unit.microbatch, unit.pipeline))
    # The others go to peers.
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


def _units_of_pipeline(problem: Problem, stage: int, pipeline: int) -> list[Unit]:
    return [
        Unit(stage, pipeline, microbatch)
        for microbatch in range(problem.grid.microbatches[pipeline])
        if stage in problem.grid.stages_of_microbatch(microbatch)
    ]


def _roomy_hosts(problem: Problem, stage: int) -> Sequence[Worker]:
    """Return a stage's hosts with room for a micro-batch; all hosts if there are none."""
    # Those that have room only because a W takes no time are among them if there are no others: a
    # list schedule counts what such a W holds.
    hosts = problem.hosts_by_slice[stage]
    needed = peak_slice_memory(problem, stage)
    return [worker for worker in hosts if needed <= activation_capacity(problem, worker)] or hosts


def hosts_in_column(problem: Problem, stage: int) -> Sequence[Worker]:
    """Return the live workers in a stage's column that have room for a micro-batch.

    If there are none and pipelines are bidirectional, the result has those of the other column that
    holds the stage's layers.
    """
    hosts = _roomy_hosts(problem, stage)
    return [worker for worker in hosts if worker.column == problem.column_of[stage]] or hosts


def _find_hosts(problem: Problem) -> Mapping[int, Sequence[Worker]]:
    """Return, by stage, the workers that may run its re-routed units without a deadlock."""
    # Workers of the other direction's column may help, if both directions may run at once and they
    # have the room that an F needs free.
    reserved = _reserve_by_column(problem)
    hosts: dict[int, Sequence[Worker]] = {}
    for stage in range(len(problem.grid.stages)):
        hosts[stage] = hosts_in_column(problem, stage)
        if not reserved.chains_in_turn:
            hosts[stage] = [
                worker
                for worker in _roomy_hosts(problem, stage)
                if worker in hosts[stage]
                or activation_capacity(problem, worker) >= reserved.needed[stage]
            ]
    return hosts


def _assign_by_speed(problem: Problem) -> dict[Unit, Worker]:
    """Share each stage's micro-batches among its workers so that the longest load is least."""
    # Micro-batches handed on go first to pipelines that run the fewest of others so far.
    hosts: dict[Unit, Worker] = {}
    foreign: Counter[int] = Counter()
    for stage in range(len(problem.grid.stages)):
        ticks_of, host_of = _ticks_by_pipeline(problem, stage), _host_by_pipeline(problem, stage)
        units_of = [
            _units_of_pipeline(problem, stage, pipeline)
            for pipeline in range(problem.grid.pipelines)
        ]
        counts = {host: len(units_of[host]) for host in ticks_of}
        # How many each worker is to run.
        free = _balance_counts(ticks_of, counts, sum(map(len, units_of)))
        # Each worker keeps as many of its own as it is to run; the others are evenly spaced.
        handed_on: list[Unit] = []
        for pipeline, units in enumerate(units_of):
            leaving_indices = choose_evenly(
                len(units) - min(len(units), free.get(pipeline, 0)), len(units)
            )
            handed_on += [unit for index, unit in enumerate(units) if index in leaving_indices]
            stay = [unit for index, unit in enumerate(units) if index not in leaving_indices]
            if pipeline in free:
                hosts.update(dict.fromkeys(stay, host_of[pipeline]))
                free[pipeline] -= len(stay)
        # Those go to the workers that should run more.
        for unit in sorted(handed_on, key=lambda unit: (unit.microbatch, unit.pipeline)):
            host = min(
                (host for host in free if free[host]),
                key=lambda host: (foreign[host], -free[host], host),
            )
            hosts[unit] = host_of[host]
            free[host] -= 1
            foreign[host] += 1
    return hosts


def _balance_counts(
    price: Mapping[int, int], present: Mapping[int, int], total: int
) -> dict[int, int]:
    """Return how many of `total` units each pipeline's worker runs, so that loads are even."""
    # `price` has the ticks of a unit on the pipeline's worker, `present` its own units. Of equal
    # loads, a pipeline goes first that has units of its own left.
    counts = dict.fromkeys(price, 0)
    heap = [(price[host], present[host] < 1, host) for host in price]
    heapq.heapify(heap)
    for _ in range(total):
        load, _, host = heap[0]
        counts[host] += 1
        heapq.heapreplace(heap, (load + price[host], counts[host] + 1 > present[host], host))
    return counts


def _assign_round_robin(live: Sequence[Worker], units: list[Unit]) -> dict[Unit, Worker]:
    # ReCycle's rule (Gandhi et al., SOSP 2024).
    return {unit: live[index % len(live)] for index, unit in enumerate(units)}


def _assign_spread(
    problem: Problem, rerouted: Mapping[int, list[Unit]], lost: Sequence[int]
) -> dict[Unit, Worker]:
    """Assign units to peers with time to spare, whose pipelines run the fewest re-routed ones."""
    # Pipelines with dead workers come last: their micro-batches wait for peers, so their workers
    # should have time to spare.
    bound = lower_bound(problem)
    rerouted_to = [
        dead_count * count
        for dead_count, count in zip(lost, problem.grid.microbatches, strict=True)
    ]
    hosts: dict[Unit, Worker] = {}
    windows = dict.fromkeys(rerouted, 0)
    for stage in rerouted:
        column = problem.column_of[stage]
        if problem.live_pipelines_by_column[column]:
            windows[stage] = window_bound(problem, column)
    # The stages with the least spare time choose first.
    for stage in sorted(rerouted, key=lambda stage: -windows[stage]):
        # A peer has room up to an equal share, and what its stage has to spare below the bound.
        price, host_of = _ticks_by_pipeline(problem, stage), _host_by_pipeline(problem, stage)
        least = windows[stage]
        loads = {host: price[host] * problem.grid.microbatches[host] for host in price}
        busiest = -(
            -(sum(loads.values()) + len(rerouted[stage]) * max(price.values())) // len(price)
        )
        room = max(bound - least, 0) + busiest
        for unit in rerouted[stage]:
            host = min(
                price,
                key=lambda host: (
                    loads[host] + price[host] > room,
                    rerouted_to[host],
                    loads[host],
                    host,
                ),
            )
            hosts[unit] = host_of[host]
            loads[host] += price[host]
            rerouted_to[host] += 1
    return hosts


def _count_dead_workers(problem: Problem) -> list[int]:
    here = Counter(pipeline for live in problem.live_pipelines_by_column for pipeline in live)
    return [problem.grid.columns - here[pipeline] for pipeline in range(problem.grid.pipelines)]


def _ticks_by_pipeline(problem: Problem, stage: int) -> dict[int, int]:
    """Return, by pipeline, the ticks of its live worker at a stage for a micro-batch."""
    ticks = {}
    for pipeline, host in _host_by_pipeline(problem, stage).items():
        ticks[pipeline] = sum(problem.op_ticks(kind, stage, host) for kind in problem.op_kinds)
    return ticks


def _host_by_pipeline(problem: Problem, stage: int) -> dict[int, Worker]:
    return {host.pipeline: host for host in hosts_in_column(problem, stage)}


# --- The list scheduler ---------------------------------------------------------------------------


ForwardOrder = Literal["deepest", "oldest"]
ReroutedTurn = Literal["in turn", "first", "last"]


STEPS_PER_PLACE = 64
"""Denominator to which fractions of a place in the turn are rounded.

The turn is the order in which micro-batches go if nothing else decides.
"""
MAX_CACHED_PRIORITIES = 32
"""Maximum number of arrays of priorities that a scheduler stores for similar rules."""
Floats = NDArray[np.float64]


class StuckError(Exception):
    """Raised when ops wait for memory, or for each other, so that none can start."""


class PlaceChange(NamedTuple):
    """Change of a micro-batch's place in the order in which micro-batches go."""

    pipeline: int
    microbatch: int
    places: float
    """Number of places by which the micro-batch goes earlier; negative: later."""


class DispatchRule(msgspec.Struct, frozen=True, kw_only=True):
    """Rule by which a list scheduler decides which ready op a worker starts, if any.

    I and B come before F, and F before W; the fields decide the rest. The turn is the order of
    micro-batches by age, those of several pipelines alternating. `planner.search.list_search` tries
    many rules.
    """

    lookahead: float = 0.0
    """Time, in durations of a W, for which W wait for a more urgent op.

    No W starts if such an op becomes ready within this time.
    """
    forward_lookahead: float = 0.0
    """Time, in durations of an F, for which F wait for a gradient.

    No F starts if an I or B becomes ready within this time.
    """
    fill_wait: tuple[int, ...] | None = None
    """Ticks for which an F waits for its worker's first I or B, by slice.

    None: `forward_lookahead` decides then, too. An F that delays the first gradient of a worker
    delays it at all earlier stages, where few other ops are ready yet to fill the time.
    """
    advance: float = 0.0
    """Factor on the places by which F of longer routes go before their turn.

    With 1, there are as many places as the busiest worker runs micro-batches in the time by which
    the route takes longer than the shortest one.
    """
    gradient_advance: float = 0.0
    """Factor like `advance`, for I, B and W."""
    places: tuple[PlaceChange, ...] = ()
    """Micro-batches whose F go before or after their turn, and how far."""
    gradient_places: tuple[PlaceChange, ...] = ()
    """Micro-batches whose I, B and W go before or after their turn, and how far."""
    forward_order: ForwardOrder = "deepest"
    """F that goes first: of the oldest micro-batch, or of the deepest on its route."""
    in_flight: tuple[int, ...] | None = None
    """Maximum number of micro-batches that a worker has in flight, by slice; None: unlimited.

    A micro-batch is in flight from the start of F to the end of I or B. In memory that more F would
    take, W can wait, and fill bubbles later.
    """
    load_share: float = 1.0
    """Factor by which the limits `in_flight` grow with a worker's load.

    A worker with x % more units than the median has limits that are this factor times x % higher.
    """
    rerouted: ReroutedTurn = "in turn"
    """Turn of re-routed and shed micro-batches: "first", "last", or by age ("in turn").

    They go before or after all other micro-batches of the worker, or among them. "first" is good if
    the broken pipeline, which waits for several peers, sets the pace.
    """
    make_room: bool = False
    """True if a W runs before anything else while an F waits for memory."""
    eager_weights: bool = False
    """True if each W runs directly after its I, as in a fused backward."""
    ignore_transfers: bool = False
    """True if the order is chosen as if transfers took no time.

    Otherwise a more urgent op may arrive a moment after a worker has begun another one. In the end
    the order is timed with transfers.
    """


def scale_in_flight_limits(problem: Problem, slope: float = 1.0, extra: int = 0) -> tuple[int, ...]:
    """Return limits of micro-batches in flight, by slice, for `DispatchRule.in_flight`.

    A limit is `slope` times that of 1F1B, rounded down, plus `extra`, and at least 1. The limit of
    1F1B is the number of stages from the slice's own on.
    """
    grid = problem.grid
    # The number of stages before each slice; of a slice within stages, before its first layer's.
    begun_before = [grid.original_stage(stage) for stage in range(len(grid.stages))]
    first = [low for low, _ in problem.layers_by_slice[: grid.depth]]
    begun_before += [bisect_right(first, low) - 1 for low, _ in problem.slices]
    return tuple(max(1, int(slope * (grid.depth - before)) + extra) for before in begun_before)


def scale_forward_ticks(problem: Problem, share: float) -> tuple[int, ...]:
    """Return, by slice, `share` times the ticks of an F at usual speed, rounded up."""
    return tuple(
        math.ceil(share * problem.usual_ticks(OpKind.F, number))
        for number in range(len(problem.layers_by_slice))
    )


class ListScheduler:
    """Builder of list schedules of one problem by any dispatch rule, given each unit's worker."""

    def __init__(self, arrays: ProblemArrays) -> None:
        self.arrays = arrays
        problem, ops = arrays.problem, arrays.ops
        self._kernel = kernel_loops()
        self._memory, chains_in_turn = make_memory_limits(arrays)
        # The ops that begin a list schedule; of each direction in turn, if memory requires that.
        first = np.flatnonzero(np.diff(ops.predecessors.start) == 0)
        chain = ops.slice[ops.unit[first]] // problem.grid.depth
        chains = range(problem.grid.chains)
        self._first = [first]
        if chains_in_turn:
            self._first = [first[chain == number] for number in chains]
        slices = range(len(problem.layers_by_slice))
        self._forward = to_ints([problem.usual_ticks(OpKind.F, number) for number in slices])
        self._waits: dict[tuple[float, tuple[int, ...] | None], Ints] = {}
        self._cached_priorities: dict[
            tuple[ReroutedTurn, float, tuple[PlaceChange, ...]], Ints
        ] = {}
        self._last_order_and_starts: tuple[Ints, Ints] | None = None

    def order_ops(self, rule: DispatchRule) -> Ints:
        """Return the numbers of all ops in the order of their start under a rule.

        Raises StuckError if micro-batches wait for each other's memory, as they may where
        `compute_reserved_memory` gives no guarantee.
        """
        # The rule as numbers, for the compiled loop.
        dispatch = self._kernel.Dispatch(
            rank=self._priorities(rule.rerouted, rule.advance, rule.places),
            gradient_rank=self._priorities(
                rule.rerouted, rule.gradient_advance, rule.gradient_places
            ),
            slots=self._in_flight_slots(rule),
            lookahead=rule.lookahead,
            forward_wait=self._forward_wait_ticks(rule),
            deepest_first=rule.forward_order == "deepest",
            eager_weights=rule.eager_weights,
            make_room=rule.make_room,
            transfers=not rule.ignore_transfers,
        )
        order, done = np.zeros(len(self.arrays.ops.unit), dtype=np.int64), 0
        for first in self._first:
            done = self._kernel.list_order(
                self.arrays.ops, self._memory, dispatch, first, order, done
            )
        if done < len(order):
            raise StuckError
        return order

    def _forward_wait_ticks(self, rule: DispatchRule) -> Ints:
        """Return the ticks for which F wait for an I or B: [2, slices].

        No F starts if an I or B becomes ready within that time. The first row holds before the
        worker's first I or B, the second from then on.
        """
        key = rule.forward_lookahead, rule.fill_wait
        if key not in self._waits:
            usual = rule.forward_lookahead * self._forward
            first = usual if rule.fill_wait is None else to_ints(rule.fill_wait)
            self._waits[key] = np.ceil([first, usual]).astype(np.int64)
        return self._waits[key]

    def _priorities(
        self, rerouted: ReroutedTurn, advance: float, places: tuple[PlaceChange, ...]
    ) -> Ints:
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
        """Make the list schedule of a rule, and return its period in ticks.

        `last_solution` then returns the schedule. Raises StuckError if micro-batches wait for each
        other's memory.
        """
        order = self.order_ops(rule)
        period, start = time_order(self.arrays, order)
        self._last_order_and_starts = order, start
        return period

    def last_solution(self) -> Solution:
        """Return the list schedule that the last call of `evaluate_rule` made."""
        return self.arrays.make_solution(*self.last_order_and_starts)

    @property
    def last_order_and_starts(self) -> tuple[Ints, Ints]:
        """Order of all ops, and start ticks by op, of the last call of `evaluate_rule`."""
        assert self._last_order_and_starts is not None
        return self._last_order_and_starts

    def _in_flight_slots(self, rule: DispatchRule) -> Ints:
        """Return the limits of micro-batches in flight by a rule: [workers, slices]."""
        # A worker that runs more units than usual, as of failed workers, has more in flight.
        load = self.arrays.load
        if rule.in_flight is None:
            return np.full((len(load), len(self._memory.room)), UNLIMITED)
        usual = statistics.median_low(units for units in load.tolist() if units)
        more = np.maximum(0.0, load / usual - 1)
        slots: Ints = np.ceil(np.outer(1 + rule.load_share * more, rule.in_flight)).astype(np.int64)
        return slots


def _compute_priorities(
    arrays: ProblemArrays,
    longer: Floats | None,
    rerouted: ReroutedTurn,
    advance: float,
    places: Sequence[PlaceChange],
) -> Ints:
    """Return each unit's rank in the turn; units of low rank go first."""
    # By age, with the changes of places; of equal age, pipelines in turn.
    _, pipeline, number = arrays.unit_numbers.T
    older = np.zeros(len(number)) if longer is None else advance * longer
    for change in places:
        older[(pipeline == change.pipeline) & (number == change.microbatch)] += change.places
    _, ranks = np.unique(
        np.round((number - older) * STEPS_PER_PLACE) * arrays.problem.grid.pipelines + pipeline,
        return_inverse=True,
    )
    if rerouted == "in turn":
        return ranks
    home = to_ints([worker.pipeline for worker in arrays.workers])[arrays.ops.worker] == pipeline
    # Units of the one kind come after all of the other.
    later: Ints = (home if rerouted == "first" else ~home).astype(np.int64)
    return ranks + later * int(ranks.max() + 1)


def _compute_extra_route_time(arrays: ProblemArrays) -> Floats:
    """Return, by unit, how much longer its micro-batch's route takes than the shortest route.

    The difference is in multiples of the time in which the busiest worker runs one micro-batch.
    """
    # The time of F and I of each unit, summed over the units of each route, in that of the busiest
    # worker for a micro-batch. An op is assumed to wait for half of another op on average.
    ops, kinds = arrays.ops, arrays.ops.kinds
    both = (
        ops.duration[::kinds]
        + ops.duration[1::kinds]
        + 2 * arrays.problem.times.transfer
        + ops.duration.mean()
    )
    begins = np.flatnonzero(np.diff(arrays.unit_numbers[:, 1:], axis=0, prepend=-1).any(axis=1))
    ways = np.add.reduceat(both, begins)
    busiest = np.bincount(ops.worker[ops.unit], weights=ops.duration).max()
    longer: Floats = (ways - ways.min()) * max(arrays.problem.grid.microbatches) / busiest
    return np.repeat(longer, np.diff([*begins, len(both)]))


# --- Memory that is reserved ----------------------------------------------------------------------


class ReservedMemory(NamedTuple):
    """Memory, by slice, that F take or need free, so that no schedule gets stuck.

    Proof: of all micro-batches that wait for room, take one that is furthest along its route, at
    position p; of several, one that waits for its I. Everything else on its worker was begun at
    positions up to p (before p, if it waits for its F), and the last of it was begun only while the
    room needed at p remained. So the op fits.
    """

    at_start: tuple[int, ...]
    """Memory units that an F takes when it starts, by slice.

    If the weight stash needs more, the I waits until enough W have run.
    """
    needed: tuple[int, ...]
    """Memory units, by slice, that an F needs free, also for its worker's later stages."""
    chains_in_turn: bool
    """True if a direction's micro-batches must finish before the other's begin."""


def compute_reserved_memory(arrays: ProblemArrays) -> ReservedMemory:
    """Return the memory, by slice, that each F takes, and that it needs free.

    If this memory is reserved, no list schedule gets stuck while layers are held by column; with
    other layouts, one may.
    """
    if arrays.problem.assigned:
        return _reserve_by_worker(arrays)
    return _reserve_by_column(arrays.problem)


def _reserve_by_worker(arrays: ProblemArrays) -> ReservedMemory:
    """Return the memory that each F takes and needs free, if units' workers are known."""
    # If the slice's peak and the largest peak of its worker's later slices are free, all
    # micro-batches can drain, by the argument of `ReservedMemory`. If some worker's room is too
    # small for this, or for the peaks of all its slices of one micro-batch, each F waits only for
    # the peak of its own slice.
    problem = arrays.problem
    slices = range(len(problem.layers_by_slice))
    peaks = tuple(peak_slice_memory(problem, number) for number in slices)
    run: list[set[int]] = [set() for _ in arrays.workers]
    for number, row in set(zip(arrays.ops.slice.tolist(), arrays.ops.worker.tolist(), strict=True)):
        run[row].add(number)
    needed = list(peaks)
    ample = True
    for worker, numbers in zip(arrays.workers, run, strict=True):
        for number in numbers:
            first = problem.layers_by_slice[number][0]
            deeper = [other for other in numbers if problem.layers_by_slice[other][0] > first]
            largest = max((peaks[other] for other in deeper), default=0)
            needed[number] = max(needed[number], peaks[number] + largest)
        ample = ample and all(
            needed[number] <= activation_capacity(problem, worker) for number in numbers
        )
    if ample and _has_room_for_each(arrays, run, peaks):
        return ReservedMemory(peaks, tuple(needed), chains_in_turn=False)
    activations = tuple(activation_memory(problem, number) for number in slices)
    return ReservedMemory(activations, peaks, chains_in_turn=False)


def _has_room_for_each(
    arrays: ProblemArrays, run: Sequence[set[int]], peaks: Sequence[int]
) -> bool:
    """Return whether workers have room for all their peaks of each micro-batch."""
    # The first I of a micro-batch follows all of its F, which hold their peaks until then.
    room = [activation_capacity(arrays.problem, worker) for worker in arrays.workers]
    taken = [sum(map(peaks.__getitem__, numbers)) for numbers in run]
    if all(amount <= free for amount, free in zip(taken, room, strict=True)):
        return True
    # A worker rarely runs all of its slices for one micro-batch.
    of_microbatch: Counter[tuple[int, int, int]] = Counter()
    for unit, row in zip(arrays.units, arrays.ops.worker.tolist(), strict=True):
        of_microbatch[row, unit.pipeline, unit.microbatch] += peaks[unit.slice]
    return all(amount <= room[row] for (row, *_), amount in of_microbatch.items())


def _reserve_by_column(problem: Problem) -> ReservedMemory:
    """Return the memory to reserve by stage, if layers are held by column."""
    grid, stages = problem.grid, range(len(problem.grid.stages))
    peaks = tuple(peak_slice_memory(problem, stage) for stage in stages)
    # The peaks of a stage and of all later ones of its worker.
    ample = list(peaks)
    for stage in stages:
        for other in grid.stages_of_column(problem.column_of[stage]):
            if grid.original_stage(other) > grid.original_stage(stage):
                ample[stage] += peaks[other]
    # The least room of a live worker in each column.
    room = []
    for column, live in enumerate(problem.live_pipelines_by_column):
        rooms = [activation_capacity(problem, Worker(pipeline, column)) for pipeline in live]
        room.append(min(rooms, default=0))
    # With enough memory, no I ever waits for room.
    if problem.memory is None or (
        all(ample[stage] <= room[problem.column_of[stage]] for stage in stages)
        and not _can_starve(problem, room)
    ):
        return ReservedMemory(peaks, tuple(ample), chains_in_turn=False)
    # Otherwise an F takes its activation, and the least memory with which a plan exists must be
    # free. As opposite directions would then block each other, one must finish before the other.
    activations = tuple(activation_memory(problem, stage) for stage in stages)
    needed = tuple(min_room(problem, stage) for stage in stages)
    return ReservedMemory(activations, needed, chains_in_turn=True)


def _can_starve(problem: Problem, room: Sequence[int]) -> bool:
    """Return whether room reserved for each W leaves fewer micro-batches in flight than 1F1B."""
    # This is so with activation recomputation: little is held until I, and from then on as much as
    # without it.
    grid = problem.grid
    return grid.chains == 1 and any(
        stash_memory(problem, stage) > activation_memory(problem, stage)
        and room[problem.column_of[stage]] < (grid.depth - stage) * stash_memory(problem, stage)
        for stage in range(grid.depth)
    )


def make_memory_limits(arrays: ProblemArrays) -> tuple[Any, bool]:
    """Return the kernel's `MemoryLimits`, and whether directions must run one after the other.

    If so, all micro-batches of one direction must finish before those of the other begin.
    """
    # What each op changes, and what an F needs: [slice, F, I or B, W, needed].
    problem, reserved = arrays.problem, compute_reserved_memory(arrays)
    kinds = OpKind.F, problem.gradient_kind, OpKind.W
    room = []
    for number, (at_start, needed) in enumerate(
        zip(reserved.at_start, reserved.needed, strict=True)
    ):
        stash = stash_memory(problem, number)
        room.append([*(memory_change(kind, at_start, stash) for kind in kinds), needed])
    capacity = to_ints([activation_capacity(problem, worker) for worker in arrays.workers])
    limits = kernel_loops().MemoryLimits(capacity=capacity, room=to_ints(room))
    return limits, reserved.chains_in_turn


def without_reserves(memory: Any) -> Any:
    """Return a copy of the kernel's `MemoryLimits` in which F reserve nothing for later stages."""
    loops, room = kernel_loops(), memory.room.copy()
    room[:, loops.NEEDED] = room[:, loops.FORWARD]
    return memory._replace(room=room)


# --- What others run: orders to compare with, by the same list scheduler under their rules --------


def schedule_1f1b(problem: Problem) -> Solution:
    """Return the list schedule of 1F1B; peers take re-routed micro-batches in turn.

    1F1B is PipeDream-flush (Narayanan et al. 2021). Stage v of V holds at most V - v micro-batches
    between F and B, on a peer with more units in proportion more. A backward is never postponed or
    split. Raises StuckError for lack of memory.
    """
    return _schedule_by_rule(
        problem,
        DispatchRule(
            forward_order="oldest", eager_weights=True, in_flight=scale_in_flight_limits(problem)
        ),
    )


def schedule_recycle(problem: Problem) -> Solution:
    """Return the list schedule of ReCycle's rule (SOSP 2024).

    Peers take re-routed micro-batches in turn, and run their own in the order of 1F1B. Re-routed
    ones and W fill the bubbles that this order leaves. A peer's limit of micro-batches in flight
    grows with the number of micro-batches that it runs. Raises StuckError for lack of memory.
    """
    return _schedule_by_rule(
        problem,
        DispatchRule(
            forward_order="oldest", rerouted="last", in_flight=scale_in_flight_limits(problem)
        ),
    )


BASELINES: Mapping[str, Callable[[Problem], Solution]] = {
    "1f1b": schedule_1f1b,
    "recycle": schedule_recycle,
}


def _schedule_by_rule(problem: Problem, rule: DispatchRule) -> Solution:
    scheduler = ListScheduler(ProblemArrays(problem, assign_hosts(problem, "round-robin")))
    scheduler.evaluate_rule(rule)
    return scheduler.last_solution()
