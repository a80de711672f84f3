"""List scheduling: simulate all workers through time; whoever falls idle takes the most urgent op that may run.

Gradients first (they free memory and others wait for them), then forwards while memory lasts, then weight gradients,
which nobody waits for. What is tuned from plan to plan is a `Policy`; `planner.search.list_schedules` tries many.
"""

import statistics
from collections import Counter, defaultdict
from heapq import heappop, heappush
from typing import Literal

import msgspec

from planner.model.arrays import Dense, Order
from planner.model.problem import Problem

READY_F, READY_I, END = 0, 1, 2
ForwardOrder = Literal["deepest", "oldest"]
Guests = Literal["in turn", "first", "last"]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The choices of a list scheduler."""

    patience: float = 0.0
    """Leave a worker idle rather than start a W when a more urgent op is known to arrive within this share of the W."""
    forward_patience: float = 0.0
    """Leave a worker idle rather than start an F when a gradient is known to arrive within this share of the F."""
    forward_order: ForwardOrder = "deepest"
    """Which F first: the lowest micro-batch, or the one furthest along its pipeline."""
    in_flight: tuple[int, ...] | None = None
    """At most this many micro-batches a worker between F and the end of I, one number per virtual stage.

    Memory that forwards do not take is left for weight gradients to wait in, which fill bubbles later.
    """
    load_share: float = 1.0
    """A worker with x % more micro-batches than the usual one may have this share of x % more in flight."""
    guests: Guests = "in turn"
    """Whether re-routed micro-batches go before those of the worker's own pipeline, after them, or in turn.

    First is good where the broken pipeline, which has to wait for several helpers, sets the pace.
    """
    make_room: bool = False
    """Where an F waits for room, run a W before anything else."""
    eager_weights: bool = False
    """Run a W directly after its I, as an unsplit backward would."""
    ignore_transfers: bool = False
    """Choose the order as if transfers took no time. On the coarse grid of op lengths a worker is rarely caught in the
    middle of an op when a more urgent one arrives a moment later; the order is then timed with the true hops."""


def list_order(dense: Dense, policy: Policy) -> Order:
    """The order in which a list scheduler starts all ops. Always succeeds on a feasible problem (see `_fits`)."""
    return _Simulation(dense, policy).run()


def in_flight(problem: Problem, slope: float = 1.0, extra: int = 0) -> tuple[int, ...]:
    """Limits of 1F1B, times a slope, plus more: high at early stages, whose gradients come back late."""
    grid = problem.grid
    return tuple(max(1, int(slope * (grid.depth - grid.original(stage))) + extra) for stage in range(len(grid.stages)))


def lane_limits(dense: Dense, policy: Policy) -> list[list[float] | None]:
    """How many micro-batches each lane may have in flight at each stage; None: as many as fit."""
    limits = policy.in_flight
    if limits is None:
        return [None] * len(dense.roles)
    load = Counter(dense.lane)
    usual = statistics.median_low(load.values())
    factors = [1 + policy.load_share * max(0.0, load[lane] / usual - 1) for lane in range(len(dense.roles))]
    return [[limit * factor for limit in limits] for factor in factors]


def reserves(problem: Problem) -> list[int]:
    """Room kept free, when an F of each stage starts, for its worker's stages that lie deeper in their chain."""
    grid = problem.grid
    return [sum(problem.hold(other) for other in grid.stages_of(grid.stages[stage].column)
                if grid.original(other) > grid.original(stage)) for stage in range(len(grid.stages))]


def ranks(dense: Dense, guests: Guests) -> list[int]:
    """Units by micro-batch, then pipeline: older micro-batches go first, those of several pipelines in turn."""
    pipelines = dense.problem.grid.pipelines
    found = [unit.microbatch * pipelines + unit.pipeline for unit in dense.units]
    if guests == "in turn":
        return found
    behind = max(found) + 1
    return [rank + behind * ((dense.roles[lane].pipeline == unit.pipeline) == (guests == "first"))
            for rank, unit, lane in zip(found, dense.units, dense.lane, strict=True)]


class _Lane:
    """One worker during the simulation."""

    __slots__ = ("arrivals", "backward", "busy", "capacity", "forward", "gradients", "in_flight", "limits", "used",
                 "weights")

    def __init__(self, capacity: int | None, limits: list[float] | None) -> None:
        self.busy = False
        self.used = 0
        self.capacity = capacity
        self.limits = limits
        self.in_flight: dict[int, int] = defaultdict(int)
        self.forward: list[tuple[int, int, int]] = []
        self.backward: list[tuple[int, int]] = []
        self.weights: list[tuple[int, int]] = []
        self.arrivals: list[int] = []  # times at which ops more urgent than a W are known to become ready
        self.gradients: list[int] = []  # those of them that are more urgent than an F


class _Simulation:
    def __init__(self, dense: Dense, policy: Policy) -> None:
        problem = dense.problem
        self._dense = dense
        self._policy = policy
        self._last = dense.depth - 1
        self._place = dense.place
        memory = problem.memory
        lanes = [_Lane(memory.capacity[role.column] if memory else None, limits)
                 for role, limits in zip(dense.roles, lane_limits(dense, policy), strict=True)]
        self._lane = [lanes[lane] for lane in dense.lane]
        self._hop = [0] * len(dense.units) if policy.ignore_transfers else dense.hop
        stages = range(len(problem.grid.stages))
        self._hold = [problem.hold(stage) for stage in stages]
        self._stash = [problem.stash(stage) for stage in stages]
        self._reserve = reserves(problem)
        self._mixed = len(stages) > problem.grid.columns
        self._rank = ranks(dense, policy.guests)
        self._order: list[int] = []
        self._events: list[tuple[int, int, int]] = []
        self._clock = 0

    def run(self) -> Order:
        events, lanes = self._events, self._lane
        for unit, place in enumerate(self._place):
            if place == 0:
                heappush(events, (0, READY_F, unit))
        kinds = self._dense.kinds
        while events:
            self._clock = clock = events[0][0]
            touched: dict[_Lane, None] = {}
            while events and events[0][0] == clock:
                _, what, code = heappop(events)
                unit = code // kinds if what == END else code
                lane = lanes[unit]
                touched[lane] = None
                if what == END:
                    self._end(lane, unit, code % kinds)
                else:
                    self._enqueue(lane, unit, what)
            for lane in touched:
                while not lane.busy:
                    op = self._pick(lane)
                    if op is None:
                        break
                    self._start(lane, op)
        assert len(self._order) == len(self._dense.length), "list scheduler left ops out"
        return self._order

    def _enqueue(self, lane: _Lane, unit: int, what: int) -> None:
        if lane.arrivals and lane.arrivals[0] <= self._clock:
            heappop(lane.arrivals)
        rank, place = self._rank[unit], self._place[unit]
        if what == READY_I:
            heappop(lane.gradients)
            heappush(lane.backward, (rank * self._dense.depth + place, unit))
        else:
            key = (-place, rank, unit) if self._policy.forward_order == "deepest" else (rank, -place, unit)
            heappush(lane.forward, key)

    def _start(self, lane: _Lane, op: int) -> None:
        unit, kind = divmod(op, self._dense.kinds)
        stage, place = self._dense.stage[unit], self._place[unit]
        self._order.append(op)
        end = self._clock + self._dense.length[op]
        lane.busy = True
        heappush(self._events, (end, END, op))
        if kind == 0:
            lane.used += self._hold[stage]
            lane.in_flight[stage] += 1
            if place < self._last:
                self._announce(READY_F, unit + 1, end + self._hop[unit])
            else:
                self._announce(READY_I, unit, end)
        elif kind == 1 and place:
            self._announce(READY_I, unit - 1, end + self._hop[unit - 1])

    def _announce(self, what: int, unit: int, time: int) -> None:
        heappush(self._events, (time, what, unit))
        lane = self._lane[unit]
        heappush(lane.arrivals, time)
        if what == READY_I:
            heappush(lane.gradients, time)

    def _end(self, lane: _Lane, unit: int, kind: int) -> None:
        lane.busy = False
        stage = self._dense.stage[unit]
        if kind == 2:
            lane.used -= self._stash[stage]
        elif kind == 1:
            lane.used += self._stash[stage] - self._hold[stage]
            lane.in_flight[stage] -= 1
            if self._dense.kinds == 3:
                heappush(lane.weights, (self._rank[unit] * self._dense.depth + self._place[unit], unit))

    def _pick(self, lane: _Lane) -> int | None:
        """The most urgent op that may run."""
        kinds, policy = self._dense.kinds, self._policy
        if lane.weights and (policy.eager_weights or (policy.make_room and self._stuck(lane))):
            return heappop(lane.weights)[1] * kinds + 2
        if lane.backward:
            return heappop(lane.backward)[1] * kinds + 1
        if lane.forward:
            first = lane.forward[0][2] * kinds
            if self._comes_within(lane.gradients, policy.forward_patience, first):
                return None
            unit = self._pick_forward(lane)
            if unit is not None:
                return unit * kinds
        if lane.weights and not self._comes_within(lane.arrivals, policy.patience, lane.weights[0][1] * kinds + 2):
            return heappop(lane.weights)[1] * kinds + 2
        return None

    def _stuck(self, lane: _Lane) -> bool:
        """Whether the most urgent F waits for memory."""
        return lane.capacity is not None and bool(lane.forward) and \
            lane.used + self._hold[self._dense.stage[lane.forward[0][2]]] > lane.capacity

    def _pick_forward(self, lane: _Lane) -> int | None:
        """The most urgent F, or one of a deeper virtual stage where that has no room."""
        if self._fits(lane, lane.forward[0][2]):
            return heappop(lane.forward)[2]
        if len(lane.forward) == 1 or not self._mixed:
            return None  # all are of one stage: where one has no room, none has
        for index, entry in enumerate(sorted(lane.forward)):
            if index and self._fits(lane, entry[2]):
                lane.forward = [other for other in sorted(lane.forward) if other is not entry]
                return entry[2]
        return None

    def _fits(self, lane: _Lane, unit: int) -> bool:
        """Whether an F may start: room for it, and still for one micro-batch at each deeper stage of this worker.

        That reserve rules out deadlock: of the micro-batches in flight, look at those furthest forward, at place v of
        their chain. Whatever fills the next worker is at earlier places, and was admitted only while room for place v+1
        was left. So one of them can always go on, and gradients never need more room than was set aside.
        """
        stage = self._dense.stage[unit]
        if lane.limits is not None and lane.in_flight[stage] >= lane.limits[stage]:
            return False
        return lane.capacity is None or lane.used + self._hold[stage] + self._reserve[stage] <= lane.capacity

    def _comes_within(self, arrivals: list[int], share: float, op: int) -> bool:
        """Whether something more urgent arrives before this share of the op would be done."""
        return bool(share and arrivals) and arrivals[0] - self._clock < share * self._dense.length[op]
