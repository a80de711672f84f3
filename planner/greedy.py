"""List scheduling: simulate all workers through time; whoever falls idle takes the most urgent op that may run.

Gradients first (they free memory and others wait for them), then forwards while memory lasts, then weight gradients,
which nobody waits for. What is tuned from plan to plan is a `Policy`; `planner.plan` tries several.
"""

import heapq
from bisect import insort
from collections import defaultdict
from collections.abc import Mapping
from typing import Literal

import msgspec

from planner.dealing import Dealing
from planner.problem import Problem, Unit
from planner.solution import Solution
from schedules.graph import OpKey
from schedules.schedule import OpKind, Worker

Ready = tuple[tuple[int, ...], Unit]


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """The choices of a list scheduler."""

    dealing: Dealing = "least-loaded"
    patience: float = 0.0
    """Leave a worker idle rather than start a W when a more urgent op is known to arrive within this share of the W."""
    forward_order: Literal["oldest", "deepest"] = "deepest"
    """Which F first: the lowest micro-batch, or the one furthest along its pipeline."""
    in_flight: tuple[int, ...] | None = None
    """At most this many micro-batches a worker between F and the end of I, one number per virtual stage."""
    eager_weights: bool = False
    """Run a W directly after its I, as an unsplit backward would."""


def list_schedule(problem: Problem, policy: Policy, hosts: Mapping[Unit, int]) -> Solution:
    """Schedule all compute ops on the given hosts. Always succeeds on a feasible problem (see `_Simulation._fits`)."""
    return _Simulation(problem, policy, hosts).run()


class _Lane:
    """One worker during the simulation."""

    __slots__ = ("arrivals", "backward", "busy", "forward", "in_flight", "used", "weights")

    def __init__(self) -> None:
        self.busy = False
        self.used = 0
        self.in_flight: dict[int, int] = defaultdict(int)
        self.forward: list[Ready] = []
        self.backward: list[Ready] = []
        self.weights: list[Ready] = []
        self.arrivals: list[int] = []  # times at which more urgent ops are known to become ready, ascending


class _Simulation:
    def __init__(self, problem: Problem, policy: Policy, hosts: Mapping[Unit, int]) -> None:
        self._problem = problem
        self._policy = policy
        self._hosts = hosts
        self._last = len(problem.grid.stages) - 1
        self._lanes = {role: _Lane() for role in problem.player}
        self._starts: dict[OpKey, int] = {}
        self._clock = 0
        self._events: list[tuple[int, int, str, OpKind, Unit]] = []
        self._serial = 0
        self._reserve = tuple(self._deeper_hold(stage) for stage in range(self._last + 1))
        self._forward = OpKind.F
        self._backward = problem.gradient_kind

    def _deeper_hold(self, stage: int) -> int:
        """Room kept free for the later virtual stages of the same worker."""
        column = self._problem.column_of[stage]
        return sum(self._problem.hold(other) for other in self._problem.grid.stages_of(column) if other > stage)

    def run(self) -> Solution:
        for unit in self._problem.units():
            if unit.stage == 0:
                self._push(0, "ready", self._forward, unit)
        while self._events:
            self._clock = self._events[0][0]
            touched: dict[Worker, None] = {}
            while self._events and self._events[0][0] == self._clock:
                _, _, what, kind, unit = heapq.heappop(self._events)
                role = self._problem.role(unit.stage, self._hosts[unit])
                touched[role] = None
                if what == "ready":
                    self._enqueue(self._lanes[role], kind, unit)
                elif what == "end":
                    self._end(self._lanes[role], kind, unit)
            for role in touched:
                self._dispatch(role)
        expected = self._problem.operations
        assert len(self._starts) == expected, f"list scheduler placed {len(self._starts)} of {expected} ops"
        return Solution(hosts=self._hosts, starts=self._starts)

    def _push(self, time: int, what: str, kind: OpKind, unit: Unit) -> None:
        self._serial += 1
        heapq.heappush(self._events, (time, self._serial, what, kind, unit))

    def _enqueue(self, lane: _Lane, kind: OpKind, unit: Unit) -> None:
        if lane.arrivals and lane.arrivals[0] <= self._clock:
            lane.arrivals.pop(0)
        if kind is self._forward:
            deepest = self._policy.forward_order == "deepest"
            key = (-unit.stage, unit.microbatch, unit.pipeline) if deepest else \
                (unit.microbatch, -unit.stage, unit.pipeline)
            insort(lane.forward, (key, unit))
        else:
            heapq.heappush(lane.backward, ((unit.microbatch, unit.stage, unit.pipeline), unit))

    def _announce(self, kind: OpKind, unit: Unit, source: Unit, end: int) -> None:
        """An op of `source` that ends at `end` makes this op ready, one hop later if the workers differ."""
        time = end + self._problem.hop(source.stage, self._hosts[source], unit.stage, self._hosts[unit])
        self._push(time, "ready", kind, unit)
        insort(self._lanes[self._problem.role(unit.stage, self._hosts[unit])].arrivals, time)

    def _start(self, lane: _Lane, kind: OpKind, unit: Unit) -> None:
        stage = unit.stage
        if kind is OpKind.F:
            lane.used += self._problem.hold(stage)
            lane.in_flight[stage] += 1
        self._starts[kind, *unit] = self._clock
        end = self._clock + self._problem.cost(kind, stage, self._hosts[unit])
        lane.busy = True
        self._push(end, "end", kind, unit)
        if kind is OpKind.F and stage < self._last:
            self._announce(OpKind.F, unit._replace(stage=stage + 1), unit, end)
        elif kind is OpKind.F:
            self._announce(self._backward, unit, unit, end)
        elif kind is not OpKind.W and stage > 0:
            self._announce(self._backward, unit._replace(stage=stage - 1), unit, end)

    def _end(self, lane: _Lane, kind: OpKind, unit: Unit) -> None:
        lane.busy = False
        if kind is OpKind.W:
            lane.used -= self._problem.stash(unit.stage)
        elif kind is not OpKind.F:
            lane.used += self._problem.stash(unit.stage) - self._problem.hold(unit.stage)
            lane.in_flight[unit.stage] -= 1
            if kind is OpKind.I:
                heapq.heappush(lane.weights, ((unit.microbatch, unit.stage, unit.pipeline), unit))

    def _dispatch(self, role: Worker) -> None:
        lane = self._lanes[role]
        while not lane.busy:
            picked = self._pick(lane)
            if picked is None:
                return
            self._start(lane, *picked)

    def _pick(self, lane: _Lane) -> tuple[OpKind, Unit] | None:
        if self._policy.eager_weights and lane.weights:
            return OpKind.W, heapq.heappop(lane.weights)[1]
        if lane.backward:
            return self._backward, heapq.heappop(lane.backward)[1]
        for index, (_, unit) in enumerate(lane.forward):
            # Only the most urgent F, unless virtual stages share the worker: a deeper one may fit where that does not.
            if self._fits(lane, unit):
                del lane.forward[index]
                return OpKind.F, unit
            if self._reserve[unit.stage] == 0 and self._policy.in_flight is None:
                break
        if lane.weights and not self._better_wait(lane):
            return OpKind.W, heapq.heappop(lane.weights)[1]
        return None

    def _fits(self, lane: _Lane, unit: Unit) -> bool:
        """Whether an F may start: room for it, and still for one micro-batch at each later stage of this worker.

        That reserve rules out deadlock: of the micro-batches in flight, look at those furthest forward, at stage v.
        Whatever fills the worker of stage v+1 is at earlier stages, and was admitted only while room for stage v+1
        was left. So one of them can always go on, and gradients never need more room than was set aside.
        """
        limits = self._policy.in_flight
        if limits is not None and lane.in_flight[unit.stage] >= limits[unit.stage]:
            return False
        if self._problem.memory is None:
            return True
        capacity = self._problem.memory.capacity[self._problem.column_of[unit.stage]]
        return lane.used + self._problem.hold(unit.stage) + self._reserve[unit.stage] <= capacity

    def _better_wait(self, lane: _Lane) -> bool:
        if not self._policy.patience or not lane.arrivals:
            return False
        unit = lane.weights[0][1]
        cost = self._problem.cost(OpKind.W, unit.stage, self._hosts[unit])
        return lane.arrivals[0] - self._clock < self._policy.patience * cost
