"""Where the period is above the bound: which of the two is likely to leave the gap."""

from planner.search.incumbent import Incumbent

STALE = 0.5
"""Share of annealing without a better plan from which on more of it hardly helps."""
FEWEST_CYCLES = 3
"""Cooling cycles without which the plan is the likely cause of a gap."""


def evidence(known: Incumbent) -> str:
    """What the bound counts, how hard a better plan was looked for, and so which of them leaves a gap."""
    bound = f"the bound counts {known.bound_counts}"
    if known.annealing is None or not known.annealing.steps:
        return f"{bound}; the plan is the best of list schedules only, so look for the gap there"
    steps, stale = known.annealing.steps, known.annealing.stale
    tried = f"{steps:,} orders were tried, the last {stale:.0%} of them without a better plan"
    settled = stale > STALE and known.annealing.cycles >= FEWEST_CYCLES
    blamed = "the gap is likely the bound's, unless a better plan differs in many orders at once" if settled else \
        "the gap is likely the plan's: more time may help"
    return f"{bound}; {tried}: {blamed}"
