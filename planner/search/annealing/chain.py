"""An annealing chain: improves a plan of one piece by the kernel, in rounds short enough to be stopped between."""

from collections.abc import Sequence
from copy import copy

import numpy as np

from slipstream.planner.kernel import (
    BASE,
    EXCHANGE,
    FOREVER,
    MOVE,
    PERIOD,
    SHIFT,
    SPAN,
    TRADE,
    Cycle,
    State,
    anneal,
    end_with_deadlines,
    keep_ends,
    measure_best,
    set_deadlines,
    time,
)
from slipstream.planner.model.arrays import ProblemArrays
from slipstream.planner.model.problem import Problem
from slipstream.planner.model.solution import Solution
from slipstream.planner.model.start_times import NEVER, ends_before_last, group_ends
from slipstream.planner.params import DEFAULTS, AnnealingParams
from slipstream.planner.search.annealing.arrays import make_chain, twin

OPERATORS = {EXCHANGE: "exchange runs of ops", TRADE: "trade units", MOVE: "move a unit", SHIFT: "shift a deadline"}
"""What a step may be (`planner.kernel`); `AnnealingParams` says how often."""


class AnnealingChain:
    """Annealing of one plan. Its steps depend on the seed and on their number, not on the clock.

    The deadlines of the groups are those of the plan at first, and annealing shifts them, until told to `keep` some.
    """

    def __init__(self, problem: Problem, solution: Solution, goal: int, seed: int,
                 params: AnnealingParams = DEFAULTS.annealing) -> None:
        self._problem, self._params = problem, params
        self._arrays = ProblemArrays(problem, solution.hosts)
        self._chain = make_chain(self._arrays, self._arrays.order(solution), seed)
        ops, pipelines = len(self._arrays.ops.duration), problem.grid.pipelines
        self._scale = float(np.mean(self._arrays.ops.duration)) or 1.0
        self._goal = goal
        self.round_steps = round_steps(ops, pipelines, params)
        """Steps between two looks at the clock."""
        self._cycle_steps, self._step = first_cycle_steps(ops, pipelines, params), 0
        self.steps = self.cycles = 0
        """Orders tried, and cooling cycles done."""
        self._shifts = 0
        self._set_deadlines(solution)
        _copy(self._chain.state, self._chain.best)
        self._begin()
        counters = self._chain.queue.counters
        counters[BASE], counters[SPAN] = self._chain.trial.late.min(), max(1, self.period)
        self.loosen()

    def _set_deadlines(self, solution: Solution) -> None:
        """As the plan keeps them; synchronous: so that all windows end together, at 0."""
        chain = self._chain
        if self._problem.interleaved:
            ends = group_ends(self._arrays, self._arrays.starts(solution))
            chain.state.end[:] = np.where(ends > NEVER, ends, ends.max())
            keep_ends(chain.instance, chain.state)
            return
        if self._problem.optimizer == "staggered":
            set_deadlines(chain.instance, chain.state, chain.sorting)
            return
        chain.state.end[:] = -chain.instance.tail.max()
        chain.state.end[chain.instance.group] = -chain.instance.tail
        chain.state.deadline[:] = chain.state.end
        if self._problem.linking:
            chain.state.deadline[:] = ends_before_last(
                self._arrays, group_ends(self._arrays, self._arrays.starts(solution)))

    def _begin(self) -> None:
        """The next cooling cycle; or the present one, where the best plan or the rules are others now."""
        self._cycle = self._next_cycle()
        measure_best(self._chain, self._cycle)

    @property
    def period(self) -> int:
        """Of the best plan so far, in ticks."""
        return int(self._chain.record[PERIOD])

    @property
    def operators(self) -> dict[str, tuple[int, int, int]]:
        """How often each operator was tried, was accepted, and made the best plan shorter."""
        return {name: tuple(self._chain.statistics[kind].tolist()) for kind, name in OPERATORS.items()}

    @property
    def deadlines(self) -> list[int]:
        """Of the best plan so far, by group; 0 for groups that have no worker in this piece."""
        here = np.zeros_like(self._chain.best.deadline)
        here[self._arrays.group] = 1
        deadlines: list[int] = (here * self._chain.best.deadline).tolist()
        return deadlines

    @property
    def between_cycles(self) -> bool:
        """Whether a cooling cycle is about to begin."""
        return self._step == 0

    def keep(self, deadlines: Sequence[int]) -> None:
        """From now on keep these deadlines."""
        if self._problem.optimizer == "staggered":
            self._shifts = 0
            for state in (self._chain.state, self._chain.best):
                if self._problem.interleaved:
                    state.end[:] = np.where(deadlines, deadlines, state.end)
                    keep_ends(self._chain.instance, state)
                else:
                    state.deadline[:] = deadlines
                    end_with_deadlines(self._chain.instance, state)
            measure_best(self._chain, self._cycle)  # tells what to aim at
            self._begin()

    def loosen(self) -> None:
        """Deadlines may be shifted again."""
        often = max(self._params.steps_per_shift * self._problem.grid.pipelines,
                    len(self._arrays.ops.duration) // self._params.ops_per_shift)
        self._shifts = often if self._problem.optimizer == "staggered" else 0
        self._begin()

    def twin(self, seed: int) -> "AnnealingChain":
        """Another chain of the same piece: it begins with the best plan of this one."""
        other = copy(self)
        other._chain = twin(self._chain, seed)
        other._cycle_steps = first_cycle_steps(len(self._arrays.ops.duration), self._problem.grid.pipelines,
                                               self._params)
        other._step = other.steps = other.cycles = 0
        other.take(self)
        return other

    def take(self, other: "AnnealingChain") -> None:
        """Go on from the best plan of another chain of the same piece, under its rules."""
        for mine in (self._chain.state, self._chain.best):
            _copy(other._chain.best, mine)
        self._chain.record[:] = other._chain.record
        self._shifts = other._shifts
        self._begin()

    def _aim(self) -> int:
        return aim(self.period, self._goal, self._params.aim)

    def _next_cycle(self) -> Cycle:
        cooling = self._params.cycles[self.cycles % len(self._params.cycles)]
        base, span = (int(self._chain.queue.counters[which]) for which in (BASE, SPAN))
        return Cycle(steps=self._cycle_steps, hot=cooling.hot * self._scale, cold=cooling.cold * self._scale,
                     pull=cooling.pull, goal=self._aim(), scale=self._scale,
                     trade=self._params.trade, move=self._params.move, shifts=self._shifts,
                     low=int(base + cooling.begin * span) if cooling.begin > 0 else -FOREVER,
                     high=int(base + cooling.end * span) if cooling.end < 1 else FOREVER)

    def cool_within(self, rounds: float) -> None:
        """Have the present cooling cycle end within so many more rounds: one cut off while hot has found little."""
        end = max(self._params.fewest_steps, self._step + int(rounds * self.round_steps))
        if end < self._cycle.steps:
            self._cycle = self._cycle._replace(steps=end)

    def run(self) -> None:
        """One round of steps."""
        self.advance(self.round_steps)

    def advance(self, steps: int) -> None:
        """Some steps, at most to the end of the cooling cycle."""
        end = min(self._step + steps, self._cycle.steps)
        while self._step < end and self.period > self._goal:
            reached = anneal(self._chain, self._cycle, self._step, end)
            self.steps += reached - self._step
            self._step = reached
            if reached < end:  # what the cycle aimed at
                self._cycle = self._cycle._replace(goal=self._aim())
                measure_best(self._chain, self._cycle)
        if end == self._cycle.steps:  # go on from the best, in another way or more slowly
            self.cycles, self._step = self.cycles + 1, 0
            if self.cycles % len(self._params.cycles) == 0:
                self._cycle_steps *= 2
            _copy(self._chain.best, self._chain.state)
            self._begin()

    def solution(self) -> Solution:
        """The best plan so far, on the clock of its deadlines."""
        chain, arrays = self._chain, self._arrays
        time(chain.instance, chain.best, chain.sorting, chain.trial, self._goal)
        begin = chain.trial.late.min() if self._problem.optimizer == "synchronous" else 0
        return arrays.assigned(chain.best.worker.copy()).solution(chain.sorting.order, chain.trial.late - begin)


def _copy(source: State, target: State) -> None:
    for values, array in zip(source, target, strict=True):
        array[:] = values


# --- Cooling cycles ---------------------------------------------------------------------------------------------------


def aim(period: int, goal: int, share: float) -> int:
    """What a cooling cycle aims at when the best plan has this period, in ticks; the goal: what no plan can beat.

    Often no plan reaches the goal. That windows which do not matter come near to it is then bought with longer ones
    that do: from a list schedule of 4,136 ticks, whose layout allows 4,118, a cycle that aimed at a bound of 4,030 cut
    what windows exceed it by from 606 to 472, and ended at 4,152. `share`: of the way from the period to the goal.
    """
    return max(goal, int(period - share * (period - goal)))


def first_cycle_steps(ops: int, pipelines: int, params: AnnealingParams) -> int:
    """Steps of the first cooling cycles. At most a step times the ops of one pipeline anew."""
    return max(params.fewest_steps, min(params.steps_per_op * ops, params.ops_per_cycle * pipelines // ops))


def round_steps(ops: int, pipelines: int, params: AnnealingParams) -> int:
    """Steps between two looks at the clock."""
    return max(1, min(params.steps_per_round, params.ops_per_round * pipelines // ops))
