"""How many steps the cooling cycles of an annealing chain have, and what they aim at."""

from slipstream.planner.params import AnnealingParams


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
