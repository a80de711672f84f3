"""Improve a plan by `planner.search.kernel.annealing` on arrays, in slices short enough to be stopped between."""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from planner.model.arrays import Dense
from planner.model.problem import Problem
from planner.model.solution import Solution

OPS_PER_SLICE = 3_000_000
"""Ops timed between two looks at the clock: some 50 ms."""
STEPS_PER_OP, OPS_PER_CYCLE = 60, 80_000_000
"""Steps of the first cooling cycles for each op, and the ops that each may time; the next are twice as long."""
FEWEST_STEPS = 2_000
FOREVER = 2**61
"""Ticks beyond those of any plan."""


class Setting(NamedTuple):
    """Of one cooling cycle."""

    hot: float
    """Temperature in the beginning, in mean op lengths"""
    cold: float
    """and in the end."""
    pull: float
    """Weight of what all windows together exceed: a large one leads out of plateaus where many are the longest."""
    begin: float = 0.0
    """Only the part of the plan from here"""
    end: float = 1.0
    """to here changes, in shares of it: how it fills and drains takes more heat than the rest could bear."""


SETTINGS = (Setting(0.15, 0.05, 3.0), Setting(1.0, 0.1, 3.0, end=0.3), Setting(1.0, 0.1, 3.0, begin=0.7),
            Setting(0.3, 0.1, 10.0), Setting(0.3, 0.1, 30.0))
"""Of the cycles in turn: none is the best on all jobs. The first one must be of the whole plan."""
SPARE = 8
"""Units that a worker may run beyond those of the busiest one at the start."""


SHIFTS = 60
"""One in so many steps, times the pipelines of a piece, shifts a deadline."""


class Annealer:
    """Annealing of one plan. Its steps depend on the seed and on their number, not on the clock.

    The deadlines of the columns are those of the plan at first, and annealing shifts them, until told to `keep` some.
    """

    def __init__(self, kernel: ModuleType, problem: Problem, solution: Solution, goal: int, seed: int) -> None:
        self._kernel = kernel
        self._problem = problem
        self._dense = dense = Dense(problem, solution.hosts)
        ops, pipelines = len(dense.length), problem.grid.pipelines
        self._fixed = _fixed(kernel, dense)
        self._orders = _orders(kernel, dense, solution)
        self._clock, self._trial = (_zeros(kernel.Clock, ops, pipelines, pipelines) for _ in range(2))
        self._scratch = _scratch(kernel, ops, pipelines)
        self._state = np.array([(seed * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) % 2**64 or 1], dtype=np.uint64)
        self._scale = float(np.mean(dense.length)) or 1.0
        self._goal = goal
        self._shifts = 0
        self.cycles = 0
        """Cooling cycles done."""
        self.loosen()
        self._slice = max(1, OPS_PER_SLICE * pipelines // ops)
        self._cycle = max(FEWEST_STEPS, min(STEPS_PER_OP * ops, OPS_PER_CYCLE * pipelines // ops))
        self._step = 0
        self.steps = 0
        """Orders tried."""
        self._set_deadlines()
        self._best = _copy(kernel.Orders, self._orders)
        self._record = _ints([0, 0])
        self._measure()
        count = self._scratch.counts
        count[kernel.BASE], count[kernel.SPAN] = self._trial.late.min(), max(1, self.period)

    def _set_deadlines(self) -> None:
        """As the plan keeps them; synchronous: so that all windows end together, at 0."""
        if self._problem.optimizer == "staggered":
            self._kernel.set_deadlines(self._fixed, self._orders, self._scratch)
            return
        for tail, group in zip(self._fixed.tail, self._fixed.group, strict=True):
            self._orders.deadline[group] = -tail

    def _measure(self) -> None:
        self._record[:] = (self._kernel.evaluate(self._fixed, self._best, self._scratch, self._trial, self._chosen),
                           2**62)

    @property
    def period(self) -> int:
        """Of the best plan so far."""
        return int(self._record[0])

    @property
    def deadlines(self) -> list[int]:
        """Of the best plan so far, by column."""
        return [int(self._best.deadline[group]) for group in self._problem.tied]

    @property
    def fresh(self) -> bool:
        """Whether a cooling cycle is about to begin."""
        return self._step == 0

    def keep(self, deadlines: Sequence[int]) -> None:
        """From now on keep these deadlines."""
        if self._problem.optimizer == "staggered":
            self._shifts = 0
            self._chosen = self._setting(self.cycles)
            self._orders.deadline[:] = self._best.deadline[:] = deadlines
            self._measure()

    def loosen(self) -> None:
        """Deadlines may be shifted again."""
        self._shifts = SHIFTS * self._problem.grid.pipelines if self._problem.optimizer == "staggered" else 0
        self._chosen = self._setting(self.cycles)

    def take(self, other: "Annealer") -> None:
        """Go on from the best plan of another annealing of the same piece, under its rules."""
        for mine in (self._orders, self._best):
            for target, source in zip(mine, other._best, strict=True):
                target[:] = source
        self._record[:] = other._record
        self._shifts = other._shifts
        self._chosen = self._setting(self.cycles)

    def _setting(self, cycle: int) -> Any:
        setting = SETTINGS[cycle % len(SETTINGS)]
        base, span = (int(self._scratch.counts[which]) for which in (self._kernel.BASE, self._kernel.SPAN))
        return self._kernel.Chosen(hot=setting.hot * self._scale, cold=setting.cold * self._scale, pull=setting.pull,
                                   goal=self._goal, scale=self._scale, shifts=self._shifts,
                                   low=int(base + setting.begin * span) if setting.begin > 0 else -FOREVER,
                                   high=int(base + setting.end * span) if setting.end < 1 else FOREVER)

    def run(self) -> None:
        """One slice of steps."""
        self.advance(self._slice)

    def advance(self, steps: int) -> None:
        """Some steps, at most to the end of the cooling cycle."""
        end = min(self._step + steps, self._cycle)
        self._kernel.anneal(
            self._fixed, self._orders, self._best, self._record, self._clock, self._trial, self._scratch, self._state,
            self._chosen, self._step, end, self._cycle)
        self.steps += end - self._step
        self._step = end
        if end == self._cycle:  # go on from the best, in another way or more slowly
            self.cycles += 1
            self._chosen, self._step = self._setting(self.cycles), 0
            if self.cycles % len(SETTINGS) == 0:
                self._cycle *= 2
            for target, source in zip(self._orders, self._best, strict=True):
                target[:] = source

    def solution(self) -> Solution:
        """The best plan so far, on the clock of its deadlines."""
        dense = self._dense
        self._kernel.evaluate(self._fixed, self._best, self._scratch, self._trial, self._chosen)
        hosts = {unit: dense.roles[lane].pipeline for unit, lane in zip(dense.units, self._best.lane, strict=True)}
        begin = self._trial.late.min() if self._problem.optimizer == "synchronous" else 0
        start = (self._trial.late - begin).tolist()
        return Dense(self._problem, hosts).solution(self._scratch.order.tolist(), start)


def _scratch(kernel: ModuleType, ops: int, pipelines: int) -> Any:
    sizes = (ops, ops, ops, ops, kernel.GROUP, kernel.BUCKETS, ops, ops, 4 * ops, 4 * ops, pipelines, (2, pipelines),
             pipelines, kernel.COUNTS)
    made = kernel.Scratch(*(np.zeros(size, dtype=np.int64) for size in sizes))
    made.bucket[:] = -1
    return made


def _tails(dense: Dense) -> list[int]:
    """For each lane, ticks from the deadline of its columns to the end of its window.

    Synchronous: to the end of the job, which is the end of all windows. No step starts before the last compute op.
    """
    problem = dense.problem
    if problem.optimizer == "staggered":
        return [dense.tail[column] for column in dense.column]
    step = max(problem.times.optimizer)
    tails = [max(step, *(dense.tail[other] for other, group in enumerate(problem.tied) if group == tied))
             for tied in problem.tied]
    return [tails[column] for column in dense.column]


def _fixed(kernel: ModuleType, dense: Dense) -> Any:
    problem, roles, kinds = dense.problem, dense.roles, dense.kinds
    memory = problem.memory
    choice = [number for number, unit in enumerate(dense.units) if len(problem.hosts(unit.stage, unit.pipeline)) > 1]
    taker, weight = _takers(dense)
    source = [-1] * len(taker)
    for op, (other, own) in enumerate(zip(taker, weight, strict=True)):
        for waits in (other, own):
            if waits >= 0:
                source[waits] = op
    return kernel.Fixed(
        kinds=kinds, transfer=problem.times.transfer, stage=_ints(dense.stage),
        unit=_ints([op // kinds for op in range(len(taker))]), source=_ints(source), taker=_ints(taker),
        weight=_ints(weight), group=_ints([problem.tied[role.column] for role in roles]), tail=_ints(_tails(dense)),
        pipeline=_ints([role.pipeline for role in roles]), lanes=_lanes(dense),
        capacity=_ints([memory.capacity[role.column] if memory else -1 for role in roles]),
        holds=_ints([holds for stage in dense.stage for holds in _holds(problem, stage)]), free=_ints(choice),
        choices=_choices(dense), cost=_costs(dense))


def _lanes(dense: Dense) -> Any:
    """[pipeline, number] its lanes, -1 behind the last."""
    lanes: list[list[int]] = [[] for _ in range(dense.problem.grid.pipelines)]
    for lane, role in enumerate(dense.roles):
        lanes[role.pipeline].append(lane)
    return _padded(lanes)


def _padded(rows: Sequence[Sequence[int]]) -> Any:
    width = max(map(len, rows))
    return np.array([[*row, *[-1] * (width - len(row))] for row in rows], dtype=np.int64)


def _choices(dense: Dense) -> Any:
    """[stage, number] the lanes that may run a stage, -1 behind the last."""
    columns = dense.problem.grid.columns
    lanes = [[lane for lane, column in enumerate(dense.column) if column == which] for which in range(columns)]
    return _padded([lanes[column] for column in dense.problem.column_of])


def _costs(dense: Dense) -> Any:
    """[kind, stage, lane] ticks of an op; 0 where it cannot run."""
    problem = dense.problem
    cost = np.zeros((dense.kinds, len(problem.grid.stages), len(dense.roles)), dtype=np.int64)
    for lane, role in enumerate(dense.roles):
        for stage in problem.grid.stages_of(role.column):
            cost[:, stage, lane] = [problem.cost(kind, stage, role.pipeline) for kind in problem.kinds]
    return cost


def _takers(dense: Dense) -> tuple[list[int], list[int]]:
    """For each op, who takes its tensor, and an I's own W; -1 for nobody."""
    kinds, last = dense.kinds, dense.depth - 1
    taker, weight = [-1] * len(dense.length), [-1] * len(dense.length)
    for unit, place in enumerate(dense.place):
        forward, backward = unit * kinds, unit * kinds + 1
        taker[forward] = backward if place == last else forward + kinds
        taker[backward] = backward - kinds if place else -1
        weight[backward] = backward + 1 if kinds == 3 else -1
    return taker, weight


def _holds(problem: Problem, stage: int) -> tuple[int, ...]:
    """What F, I and W of a stage add to the memory that their worker holds."""
    activation, stash = problem.activation(stage), problem.stash(stage)
    return (activation, stash - activation, -stash)[:len(problem.kinds)]


def _orders(kernel: ModuleType, dense: Dense, solution: Solution) -> Any:
    lanes: list[list[int]] = [[] for _ in dense.roles]
    place = [0] * len(dense.length)
    for op in dense.order(solution):
        lane = lanes[dense.lane[op // dense.kinds]]
        place[op] = len(lane)
        lane.append(op)
    sequence = np.zeros((len(lanes), max(map(len, lanes)) + SPARE * dense.kinds), dtype=np.int64)
    for number, lane in enumerate(lanes):
        sequence[number, :len(lane)] = lane
    return kernel.Orders(lane=_ints(dense.lane), length=_ints(dense.length), sequence=sequence,
                         size=_ints([len(lane) for lane in lanes]), place=_ints(place),
                         deadline=_ints([0] * dense.problem.grid.columns))


def _ints(values: Sequence[int]) -> Any:
    return np.array(values, dtype=np.int64)


def _zeros(kind: Callable[..., Any], *sizes: int) -> Any:
    return kind(*(np.zeros(size, dtype=np.int64) for size in sizes))


def _copy(kind: Callable[..., Any], arrays: Any) -> Any:
    return kind(*(array.copy() for array in arrays))
