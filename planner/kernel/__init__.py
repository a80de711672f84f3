"""Run the planner's inner loops, which numba compiles to machine code.

    compiling    decorators that compile a function, anew if any file here has changed
    starts       start times of an order, and of the reductions after it; the arrays of a problem
    lists        list schedules
    rounds       orders in rounds
    chains       arrays of annealing
    timing       a state of annealing, timed from scratch; its cost, its critical paths
    retiming     the same where a step changed it
    moves        the steps of annealing
    annealing    the loop over the steps, while the temperature falls

The types of their arguments are here, too. `planner.loops` decides when they are compiled. Imported
under any other name, this package is plain Python: the same plans, a hundred times slower. So its
files import each other by relative names.

A group is the workers that hold the same layers. The indices of an array stand in brackets: [op]
means one value for each op.
"""

from .annealing import anneal, measure_best
from .chains import (
    BASE,
    BETTER,
    BUCKETS,
    EXCHANGE,
    MOVE,
    PERIOD,
    SHIFT,
    SPAN,
    TIMED,
    TRADE,
    Chain,
    Cycle,
    Instance,
    Log,
    Path,
    Queue,
    Sorting,
    State,
    Timing,
)
from .compiling import SOURCES, Ints
from .lists import FORWARD, NEEDED, Dispatch, MemoryLimits, list_order
from .rounds import Lanes, RoundRule, order_in_rounds, order_in_turn
from .starts import (
    FOREVER,
    Arcs,
    Ops,
    Reductions,
    delay_deadlines,
    run_reductions,
    set_earliest_starts,
    set_latest_compute_ends,
    set_latest_starts,
)
from .timing import (
    set_deadlines_from_ends,
    set_earliest_deadlines,
    set_ends_from_deadlines,
    set_heads,
    time_state,
)

__all__ = [
    "BASE",
    "BETTER",
    "BUCKETS",
    "EXCHANGE",
    "FOREVER",
    "FORWARD",
    "MOVE",
    "NEEDED",
    "PERIOD",
    "SHIFT",
    "SOURCES",
    "SPAN",
    "TIMED",
    "TRADE",
    "Arcs",
    "Chain",
    "Cycle",
    "Dispatch",
    "Instance",
    "Ints",
    "Lanes",
    "Log",
    "MemoryLimits",
    "Ops",
    "Path",
    "Queue",
    "Reductions",
    "RoundRule",
    "Sorting",
    "State",
    "Timing",
    "anneal",
    "delay_deadlines",
    "list_order",
    "measure_best",
    "order_in_rounds",
    "order_in_turn",
    "run_reductions",
    "set_deadlines_from_ends",
    "set_earliest_deadlines",
    "set_earliest_starts",
    "set_ends_from_deadlines",
    "set_heads",
    "set_latest_compute_ends",
    "set_latest_starts",
    "time_state",
]
