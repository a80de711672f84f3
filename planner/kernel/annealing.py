"""Run the steps of a cycle of annealing, in which the temperature falls."""

import math

from .chains import (
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
    """Run the steps of a cooling cycle from number `begin` to below `end`.

    The temperature falls by a constant factor for each step of the cycle. The best state is stored
    in the chain. Return the number of the step with which to continue: `end`, or less if the goal
    is reached before.
    """
    (
        instance,
        state,
        timing,
        sorting,
        heads,
        queue,
        log,
        path,
        record,
        random,
        run,
        places,
        statistics,
    ) = (
        chain.instance,
        chain.state,
        chain.timing,
        chain.sorting,
        chain.heads,
        chain.queue,
        chain.log,
        chain.path,
        chain.record,
        chain.random,
        chain.run,
        chain.places,
        chain.statistics,
    )
    # Costs depend on the goal, which may have been another in the cycle before.
    time_state(instance, state, sorting, timing, cycle.goal)
    now = state_cost(instance, timing, cycle)
    between_heads = 1 + state.duration.shape[0] // cycle.ops_per_step
    movable = instance.movable.shape[0] > 0
    for step in range(begin, end):
        if record[PERIOD] <= cycle.goal:
            return step
        # What only some steps renew: heads, and the critical path.
        if step % between_heads == 0:
            set_heads(instance, state, timing, sorting, cycle.goal, heads)
        if step % cycle.steps_per_path == 0:
            path.size[0] = -1
        # A change that costs d more is accepted with probability exp(-d / T) (Metropolis et al.
        # 1953): if d is at most -T ln(1 - u) with u uniform, which is drawn before the change.
        temperature = cycle.hot * (cycle.cold / cycle.hot) ** (step / cycle.steps)
        allowance = -temperature * math.log(1.0 - random_uniform(random))
        draw = random_uniform(random) if movable else 1.0
        # A shift is drawn, made, timed and judged by itself.
        if cycle.shifts and random_below(random, cycle.shifts) == 0:
            before, now = now, shift_deadline(chain, cycle, now, allowance)
            statistics[SHIFT, TRIED] += 1
            statistics[SHIFT, ACCEPTED] += now != before
            if _is_better(timing, record, now, cycle.scale):
                statistics[SHIFT, BETTER] += _store_best(chain, cycle, now)
            set_heads(instance, state, timing, sorting, cycle.goal, heads)
            path.size[0] = -1
            continue
        # Draw one of the other three, and make it.
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
        # Time it, unless workers lack the memory.
        limits = (heads, allowance + cycle.margin * cycle.scale)
        after, accepted = now, False
        if is_move_within_capacity(instance, state, move):
            renew_heads(instance, state, heads, sorting.release, move)
            if retime_after(instance, state, timing, queue, log, limits, move, places):
                after = cost_after(instance, state, timing, log, cycle, now)
                accepted = after <= now + allowance
        unmark_pipelines(log)
        # Undo it, or keep it.
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
    # The last state of a cycle may be better by less than `_is_better` demands.
    if (
        end == cycle.steps
        and record[PERIOD] > cycle.goal
        and (timing.longest.max(), now * 1000) < (record[PERIOD], float(record[COST]))
    ):
        _store_best(chain, cycle, now)
    return end


@jit
def measure_best(chain: Chain, cycle: Cycle) -> None:
    """Recompute period and cost of the chain's best state for a new cooling cycle.

    The cost (`state_cost`) depends on the cycle's goal and weights.
    """
    period = time_state(chain.instance, chain.best, chain.sorting, chain.trial, cycle.goal)
    chain.record[PERIOD], chain.record[COST] = (
        period,
        int(state_cost(chain.instance, chain.trial, cycle) * 1000),
    )


@jit_inlined
def _is_better(timing, record, now, scale):
    """Return whether a state of cost `now` is better by enough to be stored."""
    # No .max(): where numba's cache has the functions with a runtime, it would compile that here,
    # where it cannot.
    longest = timing.longest[0]
    for value in timing.longest:
        longest = max(longest, value)
    return longest < record[PERIOD] or (
        longest == record[PERIOD] and (now + scale) * 1000 < record[COST] * 0.97
    )


@jit
def _store_best(chain, cycle, now):
    """Store the state, of cost `now`, unless its period is longer; return 1 if shorter."""
    state, best, before = chain.state, chain.best, chain.record[PERIOD]
    # Timed from scratch, so that what is stored does not rest on the changes of many steps.
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
