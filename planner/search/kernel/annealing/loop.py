"""The steps of a cooling cycle."""

import math

from slipstream.planner.search.kernel.annealing.arrays import (
    ACCEPTED,
    BETTER,
    CHANGED,
    COST,
    NONE,
    PERIOD,
    SHIFT,
    TOUCHED,
    TRIED,
    Chain,
    Cycle,
)
from slipstream.planner.search.kernel.annealing.cost import cost, cost_after
from slipstream.planner.search.kernel.annealing.heads import OPS_PER_STEP, renew
from slipstream.planner.search.kernel.annealing.moves import (
    fits,
    propose_exchange,
    propose_move,
    propose_trade,
    retime_after,
    shift,
    undo,
)
from slipstream.planner.search.kernel.annealing.random import below, uniform
from slipstream.planner.search.kernel.annealing.retiming import revert, unmark
from slipstream.planner.search.kernel.annealing.timing import set_heads, time
from slipstream.planner.search.kernel.jit import inlined, jit

STEPS_PER_PATH = 16
"""At most, so that all critical paths are tried."""
MARGIN = 0.3
"""By how much a window may become longer where others may become shorter: in mean op lengths."""


@jit
def anneal(chain: Chain, cycle: Cycle, begin: int, end: int) -> int:
    """Run steps `begin` to below `end` of a cooling cycle; the step to go on with, less than `end` where the goal is
    reached before. `best` and `record` are kept up to date.

    A step that makes the cost greater by d is accepted with probability exp(-d / T) (Metropolis et al. 1953), drawn
    first: where d is at most the allowance -T ln(1 - u), u uniform. Over the cycle T falls by a constant factor a step.
    """
    instance, state, timing, sorting, heads, queue, log, path, record, random, run, places, statistics = \
        chain.instance, chain.state, chain.timing, chain.sorting, chain.heads, chain.queue, chain.log, chain.path, \
        chain.record, chain.random, chain.run, chain.places, chain.statistics
    time(instance, state, sorting, timing, cycle.goal)
    now = cost(instance, timing, cycle)
    between_heads = 1 + state.duration.shape[0] // OPS_PER_STEP
    movable = instance.movable.shape[0] > 0
    for step in range(begin, end):
        if record[PERIOD] <= cycle.goal:
            return step
        if step % between_heads == 0:
            set_heads(instance, state, timing, sorting, cycle.goal, heads)
        if step % STEPS_PER_PATH == 0:
            path.size[0] = -1
        temperature = cycle.hot * (cycle.cold / cycle.hot) ** (step / cycle.steps)
        allowance = -temperature * math.log(1.0 - uniform(random))
        draw = uniform(random) if movable else 1.0
        if cycle.shifts and below(random, cycle.shifts) == 0:
            before, now = now, shift(chain, cycle, now, allowance)
            statistics[SHIFT, TRIED] += 1
            statistics[SHIFT, ACCEPTED] += now != before
            if _is_better(timing, record, now, cycle.scale):
                statistics[SHIFT, BETTER] += _keep(chain, cycle, now)
            set_heads(instance, state, timing, sorting, cycle.goal, heads)
            path.size[0] = -1
            continue
        log.counters[CHANGED] = log.counters[TOUCHED] = 0
        if draw < cycle.trade:
            move = propose_trade(random, instance, state, timing.late, cycle)
        elif draw < cycle.trade + cycle.move:
            move = propose_move(random, instance, state, timing.late, cycle, places)
        else:
            move = propose_exchange(random, instance, state, timing, cycle, run, path)
        if move.kind == NONE:
            continue
        statistics[move.kind, TRIED] += 1
        limits = (heads, allowance + MARGIN * cycle.scale)
        after, accepted = now, False
        if fits(instance, state, move):
            renew(instance, state, heads, sorting.release, move)
            if retime_after(instance, state, timing, queue, log, limits, move, places):
                after = cost_after(instance, state, timing, log, cycle, now)
                accepted = after <= now + allowance
        unmark(log)
        if not accepted:
            revert(timing, queue, log)
            undo(instance, state, run, places, move)
            renew(instance, state, heads, sorting.release, move)
            continue
        now = after
        path.size[0] = -1
        statistics[move.kind, ACCEPTED] += 1
        if _is_better(timing, record, now, cycle.scale):
            statistics[move.kind, BETTER] += _keep(chain, cycle, now)
    if end == cycle.steps and record[PERIOD] > cycle.goal and (
            timing.longest.max(), now * 1000) < (record[PERIOD], float(record[COST])):
        _keep(chain, cycle, now)
    return end


@jit
def measure_best(chain: Chain, cycle: Cycle) -> None:
    """Time the best state anew, at its cost in this cycle: others count other windows, and weigh them otherwise."""
    period = time(chain.instance, chain.best, chain.sorting, chain.trial, cycle.goal)
    chain.record[PERIOD], chain.record[COST] = period, int(cost(chain.instance, chain.trial, cycle) * 1000)


@inlined
def _is_better(timing, record, now, scale):
    """As long a period at a lower cost is worth keeping, too, if it is lower by more than the copy takes."""
    longest = timing.longest.max()
    return longest < record[PERIOD] or (longest == record[PERIOD] and (now + scale) * 1000 < record[COST] * 0.97)


@jit
def _keep(chain, cycle, now):
    """Note the best state so far, timed from scratch to be sure. 1 where its period is shorter than before, else 0."""
    state, best, before = chain.state, chain.best, chain.record[PERIOD]
    period = time(chain.instance, state, chain.sorting, chain.trial, cycle.goal)
    if 0 <= period <= chain.record[PERIOD]:
        chain.record[PERIOD], chain.record[COST] = period, int(now * 1000)
        best.worker[:] = state.worker
        best.duration[:] = state.duration
        best.sequence[:] = state.sequence
        best.size[:] = state.size
        best.place[:] = state.place
        best.deadline[:] = state.deadline
        best.end[:] = state.end
        best.begin[:] = state.begin
        best.turn[:] = state.turn
    return int(chain.record[PERIOD] < before)
