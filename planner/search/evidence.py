"""Where the period is above the bound: whether more time is likely to help."""

from slipstream.planner.budget import Clock
from slipstream.planner.search.incumbent import Incumbent

STALE = 0.5
"""Share of annealing without a better plan from which on more of it hardly helps."""
FEWEST_CYCLES = 3
"""Cooling cycles without which the plan is the likely cause of a gap."""


def evidence(known: Incumbent, clock: Clock, seconds: float) -> str:
    """How hard a better plan was looked for in so many seconds, whether more time may help, and what the bound counts.
    """
    bound = f"the bound counts {known.bound.counts}"
    if known.annealing is None or not known.annealing.steps:
        return f"only list schedules were tried, and a longer search may find a better plan; {bound}"
    steps, stale = known.annealing.steps, known.annealing.stale
    tried = f"{steps:,} orders were tried"
    if stale > STALE and known.annealing.cycles >= FEWEST_CYCLES:
        return f"no improvement for the last {clock.described(stale * seconds)} ({tried}): this is probably close to " \
               f"the best, and the bound a little low; {bound}"
    return f"still improving when the time was up ({tried}): try 5 times the limit; {bound}"
