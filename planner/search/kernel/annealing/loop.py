"""The steps of a cooling cycle."""

import math

from planner.search.kernel.annealing.arrays import CHANGED, COST, NONE, PERIOD, TOUCHED, Chain, Cycle
from planner.search.kernel.annealing.cost import cost, cost_after
from planner.search.kernel.annealing.moves import fits, propose, retime_after, shift, undo
from planner.search.kernel.annealing.random import below, uniform
from planner.search.kernel.annealing.retiming import revert, unmark
from planner.search.kernel.annealing.timing import time
from planner.search.kernel.jit import jit


@jit
def anneal(chain: Chain, cycle: Cycle, begin: int, end: int) -> None:
    """Run steps `begin` to `end` of a cooling cycle. `best` and `record` are kept up to date.

    A step that makes the cost greater by d is accepted with probability exp(-d / T) (Metropolis et al. 1953), drawn
    first: where d is at most the allowance -T ln(1 - u), u uniform. Over the cycle T falls by a constant factor a step.
    """
    time(chain.instance, chain.state, chain.sorting, chain.timing, cycle.goal)
    now = cost(chain.instance, chain.timing, cycle)
    kinds = 24 if chain.instance.movable.shape[0] else 0
    for step in range(begin, end):
        if chain.record[PERIOD] <= cycle.goal:
            break
        temperature = cycle.hot * (cycle.cold / cycle.hot) ** (step / cycle.steps)
        allowance = -temperature * math.log(1.0 - uniform(chain.random))
        dice = below(chain.random, kinds) if kinds else 24
        if cycle.shifts and below(chain.random, cycle.shifts) == 0:
            now = shift(chain, cycle, now, allowance)
            _keep_if_better(chain, cycle, now)
            continue
        accepted, now = _step(chain, cycle, dice, now, allowance)
        if accepted:
            _keep_if_better(chain, cycle, now)
    if end == cycle.steps and chain.record[PERIOD] > cycle.goal and (
            chain.timing.longest.max(), now * 1000) < (chain.record[PERIOD], float(chain.record[COST])):
        _keep(chain, cycle, now)


@jit
def _step(chain, cycle, dice, before, allowance):
    """Try one change of orders or workers: whether it was accepted, and the cost after it."""
    chain.log.counters[CHANGED] = chain.log.counters[TOUCHED] = 0
    move = propose(chain, cycle, dice)
    if move.kind == NONE:
        return False, before
    after, accepted = before, False
    if fits(chain, move) and retime_after(chain, cycle, allowance + cycle.scale, move):
        after = cost_after(chain, cycle, before)
        accepted = after <= before + allowance
    unmark(chain.log)
    if accepted:
        return True, after
    revert(chain.timing, chain.queue, chain.log)
    undo(chain, move)
    return False, before


@jit
def _keep_if_better(chain, cycle, now):
    """As long a period at a lower cost is worth keeping, too, if it is lower by more than the copy takes."""
    longest, record = chain.timing.longest.max(), chain.record
    if longest < record[PERIOD] or (longest == record[PERIOD] and (now + cycle.scale) * 1000 < record[COST] * 0.97):
        _keep(chain, cycle, now)


@jit
def _keep(chain, cycle, now):
    """Note the best state so far, timed from scratch to be sure."""
    state, best = chain.state, chain.best
    period = time(chain.instance, state, chain.sorting, chain.trial, cycle.goal)
    if 0 <= period <= chain.record[PERIOD]:
        chain.record[PERIOD], chain.record[COST] = period, int(now * 1000)
        best.worker[:] = state.worker
        best.duration[:] = state.duration
        best.sequence[:] = state.sequence
        best.size[:] = state.size
        best.place[:] = state.place
        best.deadline[:] = state.deadline
