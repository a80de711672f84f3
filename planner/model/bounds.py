"""Proven lower bounds on the period. Each is valid on its own; the largest counts.

All hold for any order and either backward mode; those of this module, where micro-batches stay with their own workers
while these live. `shared_bounds` has those without that rule.
"""

import heapq
import math
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from typing import NamedTuple

from slipstream.planner.bound import Bound
from slipstream.planner.model.drain import Room, most_left
from slipstream.planner.model.problem import Problem
from slipstream.planner.model.shared_bounds import Named, shared_bounds
from slipstream.schedules.schedule import OpKind, Scope


def lower_bound(problem: Problem) -> int:
    """The best proven lower bound on the period, in ticks."""
    return strongest_bound(problem).ticks


def strongest_bound(problem: Problem) -> Bound:
    """The best proven lower bound on the period, for the question that the problem asks.

    0 where a layout is given: the problem that it was made for has one (`work_bounds`).
    """
    if problem.assigned:
        return Bound(0, Scope.LAYERS)
    ticks, counts = exact_bound(problem)
    return Bound((math.floor if problem.sliced else math.ceil)(ticks), problem.scope, counts)


def exact_bound(problem: Problem) -> Named:
    """The same, exactly: the times of schedules with slices need not be whole numbers of the problem's ticks."""
    if problem.sharing:
        return max(shared_bounds(problem), key=lambda bound: bound[0])
    stages, columns = range(len(problem.grid.stages)), range(problem.grid.columns)
    bounds = [(window_bound(problem, column), f"work and round trips of the busiest worker of column {column}")
              for column in columns]
    bounds += [(_chain_bound(problem, stage), f"the way to stage {stage}, its work, and the way back")
               for stage in stages]
    bounds += [(_crowded_bound(problem, stage), f"the wait of stage {stage} for peers at other stages")
               for stage in stages]
    if (whole := whole_fill(problem)) is not None:
        bounds.append((whole.period, "work, and what whole forwards leave of the round trips"))
    if problem.optimizer == "synchronous":
        bounds += [(_synchronous_bound(problem, column), f"the way to column {column}, and its work")
                   for column in columns]
    ticks, counts = max(bounds, key=lambda bound: bound[0])
    return Fraction(ticks), counts


def _unit_cost(problem: Problem, stage: int, host: int) -> int:
    return sum(problem.cost(kind, stage, problem.worker(stage, host)) for kind in problem.kinds)


def _least_makespan(problem: Problem, column: int) -> tuple[int, int]:
    """Work bound: (ticks, micro-batches of the busiest) that some worker of the column must at least spend computing.

    Live workers run all units of their own pipelines, and those of the others are split: the largest load is at least
    that of the best integral split. With several virtual stages only the fractional average is taken, which is weaker.
    """
    live = problem.live_by_column[column]
    stages = problem.grid.stages_of(column)
    if len(stages) > 1:
        own = max(sum(_unit_cost(problem, stage, host) * _along(problem, stage, host) for stage in stages)
                  for host in live)
        work = sum(min(_unit_cost(problem, stage, host) for host in live)
                   * sum(_along(problem, stage, pipeline) for pipeline in range(problem.grid.pipelines))
                   for stage in stages)
        return max(own, -(-work // len(live))), 0
    cost = {host: _unit_cost(problem, stages[0], host) for host in live}
    if len(set(cost.values())) == 1:
        count = _busiest(problem, column)
        return count * cost[live[0]], count
    counts = problem.grid.microbatches
    longest = max(counts[host] * price for host, price in cost.items())
    # Giving each unit to the worker that is done with it first is optimal for equal units on workers of fixed speeds.
    loads = [((counts[host] + 1) * price, price) for host, price in cost.items()]
    heapq.heapify(loads)
    for _ in range(problem.grid.total_microbatches - sum(counts[host] for host in live)):
        load, price = loads[0]
        longest = max(longest, load)
        heapq.heapreplace(loads, (load + price, price))
    return longest, 0


def _busiest(problem: Problem, column: int) -> int:
    """Micro-batches that some worker of a column must at least run, where each runs one stage."""
    live = problem.live_by_column[column]
    return max(-(-problem.grid.total_microbatches // len(live)), *(problem.grid.microbatches[host] for host in live))


def _along(problem: Problem, stage: int, pipeline: int) -> int:
    """Micro-batches of a pipeline that visit a stage in an iteration."""
    return len(range(stage // problem.grid.depth, problem.grid.microbatches[pipeline], problem.grid.chains))


def _round_trip(problem: Problem, stage: int) -> int:
    """Least ticks from the end of a unit's F to the start of its I: to the last stage and back."""
    there, back = problem.least_ways
    # The hop from the stage to the next one, there and back; that behind the last stage is 0.
    hops = 2 * problem.least_hop(stage) if stage + 1 < len(problem.grid.stages) else 0
    return there[-1] - there[stage + 1] + back[-1] - back[stage + 1] + hops


def window_bound(problem: Problem, column: int) -> int:
    """Work bound plus fill bound of a column.

    Until its first I may start, a worker runs nothing but forwards, and no more of them than its memory holds: the
    rest of the round trip of its first micro-batch is idle. With k forwards admitted in that time,

        period >= n (F + I + W) + max(0, round trip - (k - 1) F) + A + O,   k = min(n, capacity / activation)

    for a worker that runs n micro-batches, and the idle time of `_drain_idle` comes on top. The right side does not
    fall with n, so the least n of the busiest worker gives a bound. With several virtual stages the forwards of all of
    them may fill the wait, and it is left out.
    """
    work, count = _least_makespan(problem, column)
    stages = problem.grid.stages_of(column)
    idle = 0
    if len(stages) == 1 and count:
        stage = stages[0]
        idle = _fill_idle(problem, stage, count) + _drain_idle(problem, stage, count, problem.kinds[1:])
    return work + idle + problem.column_tail(column)


def _fill_idle(problem: Problem, stage: int, count: int) -> int:
    """Idle ticks of a worker that runs `count` micro-batches of one stage, before its first I."""
    forwards = (_in_flight(problem, stage, count) - 1) * _slowest(problem, OpKind.F, stage)
    return max(0, _round_trip(problem, stage) - forwards)


def _drain_idle(problem: Problem, stage: int, count: int, kinds: Sequence[OpKind]) -> int:
    """Idle ticks of a worker that runs `count` micro-batches of one stage, from its last F on.

    `kinds` are the ops after F that end the time looked at: until the last micro-batch's I, or until its W.

    When the last F starts, memory holds x <= k micro-batches that still wait for their I, that one counted, and y that
    wait for their W only. So no more than x I and x + y W are run from there on, while its own round trip goes on:

        idle >= round trip + (I + W) - max over x, y of (x I + (x + y) W)    until its W ends,
        idle and W meanwhile >= round trip + I - k I                         until its I ends.

    In the second case (`_chain`), these W are not among the count - l that are done before the last F starts, where l
    are held in memory at most. With count > k some I comes before the last F, so that nothing is counted twice:
    `_fill_idle` is over when the first I starts. With fewer, all F may come first, and 0 is returned.
    """
    waiting = _in_flight(problem, stage, count)
    if waiting == count:
        return 0
    idle = _round_trip(problem, stage) + sum(problem.fastest(kind, stage) for kind in kinds)
    gradient, *weight = (_slowest(problem, kind, stage) for kind in kinds)
    if not weight:
        return max(0, idle - waiting * gradient)
    return max(0, idle - most_left(_room(problem, stage), waiting, count, gradient, weight[0]))


def _room(problem: Problem, stage: int) -> Room:
    return Room(problem.activation(stage), problem.stash(stage), _most_room(problem, stage))


def _most_room(problem: Problem, stage: int) -> int:
    """Of any live worker that holds the stage: one of them is the busiest, but not known which."""
    return max(map(problem.room, problem.holders[stage]))


def _held(problem: Problem, stage: int, count: int) -> int:
    """Micro-batches of the `count` that a worker can hold between F and the end of W."""
    least = min(problem.activation(stage), problem.stash(stage))
    if problem.memory is None or least == 0:
        return count
    return min(count, _most_room(problem, stage) // least)


def _in_flight(problem: Problem, stage: int, count: int) -> int:
    """Micro-batches that a worker can hold between F and the end of I, of the `count` it runs."""
    activation = problem.activation(stage)
    if problem.memory is None or activation == 0:
        return count
    return min(count, _most_room(problem, stage) // activation)


class Fill(NamedTuple):
    """A stage before its first I."""

    forward: int
    """Ticks of an F."""
    most: int
    """F that memory holds."""
    back: int
    """Ticks of the I of the next stage, with the transfers there and back; 0 at the last one."""


class WholeFill(NamedTuple):
    """How pipelines fill where workers run whole forwards only."""

    period: int
    """No plan has a shorter one, in ticks."""
    idle: tuple[int, ...]
    """[stage] ticks that a worker may be idle before its first I in a plan of this period."""


def whole_fill(problem: Problem) -> WholeFill | None:
    """Fill bound of all stages together. None where workers run others' micro-batches, or several stages.

    Let u(s) be the time from the first F to the first I of stage s. What its worker runs in it are whole F, at most k,
    so that it idles for u(s) - min(k, floor(u(s) / F)) F. The first F has come from the stage before, and the first I
    goes on to it:

        u(s - 1) >= u(s) + F(s - 1) + I(s) + two transfers,   u(last) >= F(last).

    A period allows each stage so much idle time. Where it is exceeded the worker may run one more F and start its I
    later, and so the I of all stages before. The least u(s) that a period allows, from the last stage to the first,
    tell whether it is possible at all.
    """
    grid = problem.grid
    own = not (problem.failed or problem.slow or problem.sharing or problem.assigned)
    if not own or grid.chains > 1 or grid.columns < len(grid.stages):
        return None
    count, stages = max(grid.microbatches), range(grid.columns)
    beside = [_beside_fill(problem, stage, count) for stage in stages]
    back = [problem.fastest(problem.gradient_kind, stage + 1) + 2 * problem.least_hop(stage) for stage in stages[:-1]]
    fills = [Fill(problem.fastest(OpKind.F, stage), _in_flight(problem, stage, count), after)
             for stage, after in zip(stages, [*back, 0], strict=True)]
    least = max(beside)
    enough = sum(2 * fill.forward + fill.back for fill in fills)
    period = least + bisect_left(range(enough), True, key=lambda more: can_fill(
        fills, [least + more - ticks for ticks in beside]))
    return WholeFill(period, tuple(period - ticks for ticks in beside))


def _beside_fill(problem: Problem, stage: int, count: int) -> int:
    """The least period of a worker of this stage without the time it idles before its first I."""
    column = problem.column_of[stage]
    window = count * _unit_cost(problem, stage, 0) + _drain_idle(problem, stage, count, problem.kinds[1:]) \
        + problem.column_tail(column)
    if problem.optimizer == "synchronous":
        window += _reach(problem, stage)
    return max(window, _chain(problem, stage, count) - _fill_idle(problem, stage, count))


def can_fill(fills: Sequence[Fill], idle: Sequence[int]) -> bool:
    """Whether all stages can fill with so much idle time."""
    wait = 0
    for (forward, most, back), allowed in zip(reversed(fills), reversed(idle), strict=True):
        wait += forward + back
        done = min(most, wait // forward) if forward else most
        if wait - done * forward > allowed:
            if not forward or done == most:
                return False
            wait = (done + 1) * forward
    return True


def _synchronous_bound(problem: Problem, column: int) -> int:
    """Path bound with a synchronous optimizer: reach the column, do its work, all-reduce, step.

    The busiest worker cannot start before a micro-batch has come through the earlier stages; its window bound then
    runs in full. The optimizer step of whichever worker ends last follows the last compute op of the job.
    """
    return min(_reach(problem, stage) for stage in problem.grid.stages_of(column)) + window_bound(problem, column)


def _reach(problem: Problem, stage: int) -> int:
    """Least ticks before the first F of a stage may start."""
    first = stage - problem.grid.original(stage)
    there, _ = problem.least_ways
    return there[stage] - there[first]


def _chain_bound(problem: Problem, stage: int) -> int:
    """Fill and drain bound: from stage 0 through a stage's busiest worker and back to the last W of stage 0.

    The worker's first F has come through the earlier stages, and its last I still travels back through them and ends
    with a W at stage 0. In between it runs all its n F and I, idles while it fills (`_fill_idle`), and runs all W but
    those that it can hold until its last I is done, k = min(n, capacity / stash), or else idles while it drains. All
    ops of stage 0 lie in a window of period - A - O (staggered: any two workers' windows there end together), so

        period >= reach + n (F + I) + (n - k) W + idle + way back + W of stage 0 + A + O of stage 0.

    Fused, B takes the place of I, and no W is left for later.
    """
    column = problem.column_of[stage]
    if len(problem.grid.stages_of(column)) > 1:
        return 0
    return _chain(problem, stage, _busiest(problem, column))


def _chain(problem: Problem, stage: int, count: int) -> int:
    """The fill and drain bound of a worker that runs at least `count` micro-batches of this stage."""
    kinds = [kind for kind in problem.kinds if kind is not OpKind.W]
    work = count * sum(problem.fastest(kind, stage) for kind in kinds) + _fill_idle(problem, stage, count)
    drain = _drain_idle(problem, stage, count, problem.kinds[1:2])
    last_weight = 0
    if problem.backward == "split":
        weight = problem.fastest(OpKind.W, stage)
        drain = max((count - _stashed(problem, stage, count)) * weight,
                    (count - _held(problem, stage, count)) * weight + drain)
        last_weight = problem.fastest(OpKind.W, 0)
    work += drain
    chain = _reach(problem, stage) + work + _way_back(problem, stage) + (last_weight if stage else 0)
    tail = problem.column_tail(problem.column_of[0])
    return chain + (tail if problem.optimizer == "staggered" else max(tail, *problem.times.optimizer))


def _crowded_bound(problem: Problem, stage: int) -> int:
    """Path bound through the peers at a stage with dead workers.

    Take from each pipeline whose worker of this stage lives the micro-batch whose I is the first there. At a later
    stage with fewer live workers, q = ceil(pipelines / live workers) of these micro-batches meet on one worker, so one
    of them gets its F there (q - 1) F late, and its pipeline idles that much longer than `_fill_idle` says. In the
    same way the last I of some pipeline must leave (q - 1) I early, where an earlier stage has fewer live workers.
    """
    if len(problem.grid.stages_of(problem.column_of[stage])) > 1:
        return 0
    live = problem.live_by_column[problem.column_of[stage]]
    count = min(problem.grid.microbatches[pipeline] for pipeline in live)
    column = problem.column_of[stage]
    late = _crowding(problem, stage, OpKind.F, range(stage + 1, len(problem.grid.stages)))
    slack = (_in_flight(problem, stage, count) - 1) * _slowest(problem, OpKind.F, stage)
    idle = max(0, _round_trip(problem, stage) + late - slack)
    work = count * sum(problem.fastest(kind, stage) for kind in problem.kinds)
    idle += _drain_idle(problem, stage, count, problem.kinds[1:])
    early = _crowding(problem, stage, problem.gradient_kind, range(stage))
    return max(work + idle + problem.column_tail(column), _chain(problem, stage, count) + early)


def _crowding(problem: Problem, stage: int, kind: OpKind, others: range) -> int:
    """How long the last of one op of each pipeline waits at the most crowded of the other stages."""
    if not problem.failed:
        return 0
    pipelines = len(problem.live_by_column[problem.column_of[stage]])
    live = problem.live_by_column
    return max(((-(-pipelines // len(live[column])) - 1) * problem.fastest(kind, other)
                for other in others if len(live[column := problem.column_of[other]]) < pipelines), default=0)


def _slowest(problem: Problem, kind: OpKind, stage: int) -> int:
    """The most that this op takes on any live worker of the stage."""
    holders = problem.holders[stage]
    return max(problem.cost(kind, stage, host) for host in (holders if problem.slow else holders[:1]))


def _stashed(problem: Problem, stage: int, count: int) -> int:
    """Micro-batches of the `count` that a worker runs whose W it can leave until all its I are done."""
    stash = problem.stash(stage)
    if problem.memory is None or stash == 0:
        return count
    return min(count, _most_room(problem, stage) // stash)


def _way_back(problem: Problem, stage: int) -> int:
    """Least ticks from the end of an I of a stage to the end of that micro-batch's I at stage 0."""
    return problem.least_ways[1][stage]


