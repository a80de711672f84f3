"""The cooling cycles of an annealing chain, in turn."""

from typing import NamedTuple


class Cooling(NamedTuple):
    """One cooling cycle."""

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


CYCLES = (Cooling(0.15, 0.02, 3.0), Cooling(1.0, 0.1, 3.0, end=0.3), Cooling(1.0, 0.1, 3.0, begin=0.7),
          Cooling(0.3, 0.1, 10.0), Cooling(0.3, 0.1, 30.0))
"""None is the best on all jobs. The first one must be of the whole plan. When all are done, they take twice as long."""
STEPS_PER_OP, OPS_PER_CYCLE = 60, 800_000_000
"""Steps of the first cooling cycles for each op, and the ops that all pipelines together have in these steps."""
FEWEST_STEPS = 2_000
AIM = 0.5
"""Share of the way from the best plan's period to the bound: only windows longer than that count in a cooling cycle."""
STEPS_PER_SLICE, OPS_PER_SLICE = 10_000, 30_000_000
"""The same between two looks at the clock: some 50 ms."""


def aim(period: int, goal: int) -> int:
    """What a cooling cycle aims at when the best plan has this period, in ticks; the goal: what no plan can beat.

    Often no plan reaches the goal. That windows which do not matter come near to it is then bought with longer ones
    that do: from a list schedule of 4,136 ticks, whose layout allows 4,118, a cycle that aimed at a bound of 4,030 cut
    what windows exceed it by from 606 to 472, and ended at 4,152.
    """
    return max(goal, int(period - AIM * (period - goal)))


def first_cycle_steps(ops: int, pipelines: int) -> int:
    """Steps of the first cooling cycles. At most a step times the ops of one pipeline anew."""
    return max(FEWEST_STEPS, min(STEPS_PER_OP * ops, OPS_PER_CYCLE * pipelines // ops))


def slice_steps(ops: int, pipelines: int) -> int:
    """Steps between two looks at the clock."""
    return max(1, min(STEPS_PER_SLICE, OPS_PER_SLICE * pipelines // ops))
