"""Run the steps of a cooling cycle of annealing."""

import math

from .chains import ACCEPTED, BETTER, CHANGED, COST, NONE, PERIOD, SHIFT, TOUCHED, TRIED, Chain, Cycle
from .compiling import jit, jit_inlined
from .moves import (
    is_move_within_capacity,
    propose_exchange,
    propose_move,
    propose_trade,
    retime_after,
    shift_deadline,
    undo_move,
)
from .retiming import renew_heads, revert_timing, unmark_pipelines
from .timing import cost_after, random_below, random_uniform, set_heads, state_cost, time_state


@jit
def anneal(chain: Chain, cycle: Cycle, begin: int, end: int) -> int:
    """Run steps `begin` to below `end` of a cooling cycle of simulated annealing, storing the best state in the chain.

    Return the step with which to continue: less than `end` if the goal is reached before. A step that increases the
    cost by d is accepted with probability exp(-d / T) (Metropolis et al. 1953): if d is at most an allowance that is
    drawn before the step, -T ln(1 - u) with u uniform. Over the cycle T falls by a constant factor for each step.
    """
    instance, state, timing, sorting, heads, queue, log, path, record, random, run, places, statistics = \
        chain.instance, chain.state, chain.timing, chain.sorting, chain.heads, chain.queue, chain.log, chain.path, \
        chain.record, chain.random, chain.run, chain.places, chain.statistics
    time_state(instance, state, sorting, timing, cycle.goal)
    now = state_cost(instance, timing, cycle)
    between_heads = 1 + state.duration.shape[0] // cycle.ops_per_step
    movable = instance.movable.shape[0] > 0
    for step in range(begin, end):
        if record[PERIOD] <= cycle.goal:
            return step
        if step % between_heads == 0:
            set_heads(instance, state, timing, sorting, cycle.goal, heads)
        if step % cycle.steps_per_path == 0:
            path.size[0] = -1
        temperature = cycle.hot * (cycle.cold / cycle.hot) ** (step / cycle.steps)
        allowance = -temperature * math.log(1.0 - random_uniform(random))
        draw = random_uniform(random) if movable else 1.0
        if cycle.shifts and random_below(random, cycle.shifts) == 0:
            before, now = now, shift_deadline(chain, cycle, now, allowance)
            statistics[SHIFT, TRIED] += 1
            statistics[SHIFT, ACCEPTED] += now != before
            if _is_better(timing, record, now, cycle.scale):
                statistics[SHIFT, BETTER] += _store_best(chain, cycle, now)
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
        limits = (heads, allowance + cycle.margin * cycle.scale)
        after, accepted = now, False
        if is_move_within_capacity(instance, state, move):
            renew_heads(instance, state, heads, sorting.release, move)
            if retime_after(instance, state, timing, queue, log, limits, move, places):
                after = cost_after(instance, state, timing, log, cycle, now)
                accepted = after <= now + allowance
        unmark_pipelines(log)
        if not accepted:
            revert_timing(timing, queue, log)
            undo_move(instance, state, run, places, move)
            renew_heads(instance, state, heads, sorting.release, move)
            continue
        now = after
        path.size[0] = -1
        statistics[move.kind, ACCEPTED] += 1
        if _is_better(timing, record, now, cycle.scale):
            statistics[move.kind, BETTER] += _store_best(chain, cycle, now)
    if end == cycle.steps and record[PERIOD] > cycle.goal and (
            timing.longest.max(), now * 1000) < (record[PERIOD], float(record[COST])):
        _store_best(chain, cycle, now)
    return end


@jit
def measure_best(chain: Chain, cycle: Cycle) -> None:
    """Recompute period and cost (`state_cost`, what annealing reduces) of the chain's best state for a new cooling
    cycle, which counts other windows or weighs them differently."""
    period = time_state(chain.instance, chain.best, chain.sorting, chain.trial, cycle.goal)
    chain.record[PERIOD], chain.record[COST] = period, int(state_cost(chain.instance, chain.trial, cycle) * 1000)


@jit_inlined
def _is_better(timing, record, now, scale):
    """Return whether a state, timed in `timing`, is better than the best one by enough to be stored.

    It is if its period is shorter, or if the periods are equal and `now` + `scale` is more than 3 % below the best
    state's cost: `now` is the cost of the state (`state_cost`), `scale` the mean duration of an op, both in ticks.
    `record` has the best state's period and cost.
    """
    # No .max(): where numba's cache has the functions with a runtime, it would compile that here, where it cannot.
    longest = timing.longest[0]
    for value in timing.longest:
        longest = max(longest, value)
    return longest < record[PERIOD] or (longest == record[PERIOD] and (now + scale) * 1000 < record[COST] * 0.97)


@jit
def _store_best(chain, cycle, now):
    """Store the present state of annealing as its best one, unless its period, computed anew, is longer than that of
    the best. Return 1 if its period is shorter, else 0.

    The argument `now` is the state's cost (`state_cost`) in ticks, which is stored, too.
    """
    state, best, before = chain.state, chain.best, chain.record[PERIOD]
    period = time_state(chain.instance, state, chain.sorting, chain.trial, cycle.goal)
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
