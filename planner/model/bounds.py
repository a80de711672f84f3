"""Proven lower bounds on the period. Each one is valid separately, and the largest counts.

All hold for any order of ops and for both backward modes. Bounds with layers in place count *shares*: one of the p
equal layers of a stage for one micro-batch, with p = 1 if micro-batches are not cut. A slice is at least one share, so
no wait begins or ends with less than one. Bounds with layers moved (`layout_lower_bound`) count layers. To use whole
numbers, times of a stage are multiplied
by p: a share then takes F, I and W ticks. Times of a schedule with slices, and so the bounds, need not be whole numbers
of the problem's ticks.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from slipstream.planner.model.memory import activation_memory, activation_room, stash_memory
from slipstream.planner.model.problem import Bound, Problem, iterate_held_ranges
from slipstream.schedules.schedule import OpKind, Scope, Worker

NamedBound = tuple[Fraction, str]
"""Lower bound on the period in ticks, and words that say what it counts."""


def lower_bound(problem: Problem) -> int:
    """Return the ticks of `strongest_bound`, the best proven lower bound on the period."""
    return strongest_bound(problem).ticks


def strongest_bound(problem: Problem) -> Bound:
    """Return the best proven lower bound on the period, in whole ticks, with the scope of the schedules for which it
    holds.

    The bound is 0 if a layout is given: the problem that the layout was made for has its own bound
    (`layout_lower_bound`).
    """
    if problem.assigned:
        return Bound(0, Scope.LAYERS)
    ticks, counts = exact_bound(problem)
    return Bound((math.floor if problem.can_cut_stages else math.ceil)(ticks), problem.bound_scope, counts)


def exact_bound(problem: Problem) -> NamedBound:
    """Return the best proven lower bound on the period as a pair: an exact fraction of ticks, and words that say what
    it counts.

    Times of schedules with slices need not be whole numbers of the problem's ticks.
    """
    return max(_bounds_in_place(problem), key=lambda bound: bound[0])


def _bounds_in_place(problem: Problem) -> list[NamedBound]:
    """Return all lower bounds on the period for layers in place, each with words that say what it counts.

    Each holds if any live holder of a stage may run any micro-batch of it, and so also if workers keep their own.
    """
    late = problem.optimizer == "synchronous"  # then windows begin only with a micro-batch
    bounds = []
    for first in sorted(set(problem.reduction_root)):
        columns = [column for column, tied in enumerate(problem.reduction_root) if tied == first]
        stages = [stage for column in columns for stage in problem.grid.stages_of_column(column)]
        reach = min(_earliest_forward(problem, stage) for stage in stages) if late else 0
        work = reach + column_work(problem, columns)
        bounds.append((work, f"the work of column {first}, shared by its live workers"))
        if not problem.sharing:
            bounds += [(reach + _busiest_own_work(problem, column),
                        f"the work of the busiest worker of column {column}")
                       for column in columns]
    for stage in _find_single_stages(problem):
        column = problem.column_of[stage]
        window = _busiest_window(problem, stage)
        bounds.append((window, f"work and round trips of the busiest worker of column {column}"))
        bounds.append((_scarce_stage_bound(problem, stage),
                       f"the wait of column {column} for fewer workers at other stages"))
        bounds.append((_fill_and_drain_bound(problem, stage), f"the way to stage {stage}, its work, and the way back"))
        if late:
            bounds.append((_earliest_forward(problem, stage) + window, f"the way to column {column}, and its work"))
    bounds += [(Fraction(ticks), f"how micro-batches pass stage {stage} and come back to it, one after the other")
               for stage, ticks in enumerate(_passage_bounds(problem))]
    if (whole := compute_whole_fill(problem)) is not None:
        bounds.append((Fraction(whole.period), "work, and what whole forwards leave of the round trips"))
    return bounds


def _find_single_stages(problem: Problem) -> Sequence[int]:
    """Return the numbers of the stages whose workers hold no other stage. If micro-batches may be cut, the layers of
    such a stage must also be equal."""
    grid = problem.grid
    if grid.chains > 1:
        return ()
    return [stage for stage in range(len(grid.stages))
            if len(grid.stages_of_column(problem.column_of[stage])) == 1 and problem.count_parts(stage)]


def _earliest_forward(problem: Problem, stage: int) -> int:
    """Return the least ticks from the start of an iteration to the first F of a stage."""
    forward_ticks, _ = problem.min_path_ticks
    return forward_ticks[stage] - forward_ticks[stage - problem.grid.original_stage(stage)]


def column_work(problem: Problem, columns: Sequence[int]) -> Fraction:
    """Return the least ticks in which the live workers of some columns together do the work that these columns have in
    an iteration.

    The shortest reductions and optimizer step of these workers are added.
    """
    work = sum(sum(problem.usual_ticks(kind, stage) for kind in problem.op_kinds) * _microbatches_at(problem, stage)
               for column in columns for stage in problem.grid.stages_of_column(column))
    slowness = (problem.workers[Worker(pipeline, column)].per_mille for column in columns
                for pipeline in problem.live_pipelines_by_column[column])
    return ticks_of_work(work, slowness) + min(map(problem.column_closing_ticks, columns))


def _busiest_own_work(problem: Problem, column: int) -> Fraction:
    """Return the longest time, in ticks, that a live worker of a column needs in an iteration for the micro-batches of
    its own pipeline, its reductions and its optimizer step."""
    stages, counts, grid = problem.grid.stages_of_column(column), problem.grid.microbatches, problem.grid
    return Fraction(problem.column_closing_ticks(column) + max(
        sum(problem.op_ticks(kind, stage, Worker(pipeline, column)) * len(range(stage // grid.depth, counts[pipeline],
                                                                                grid.chains))
            for stage in stages for kind in problem.op_kinds) for pipeline in problem.live_pipelines_by_column[column]))


def _microbatches_at(problem: Problem, stage: int) -> int:
    """Return the number of micro-batches that visit a stage in an iteration."""
    grid = problem.grid
    return sum(len(range(stage // grid.depth, count, grid.chains)) for count in grid.microbatches)


# --- One stage --------------------------------------------------------------------------------------------------------


class StageShares(NamedTuple):
    """Times and memory of the shares of a stage on one of its holders. A share is one of p equal layers of the stage
    for one micro-batch.

    Times are in ticks / p.
    """

    parts: int
    """Number p of equal layers of the stage, into which a micro-batch may be cut there."""
    forward: int
    gradient: int
    """Time of an I, or of a B when fused."""
    weight: int
    """Time of a W; 0 when fused."""
    round_trip: int
    """Time from the end of an F to the start of its I: to the last stage and back."""
    activation: int
    """Memory units, times p, that a share takes from the start of its F to the end of its I."""
    stash: int
    """Memory units, times p, that a share takes from the end of its I to the end of its W."""
    room: int
    """Memory units, times p, that the holder has for activations."""
    most: int
    """Number of shares of the stage in an iteration, over all micro-batches."""
    late: int = 0
    """Time by which the first I begins later than its round trip requires."""

    @property
    def work(self) -> int:
        """Time of F, I and W of one share (one of p equal layers of the stage, for one micro-batch), in ticks / p."""
        return self.forward + self.gradient + self.weight

    def capacity_for(self, amount: int) -> int:
        """Return how many shares (one of p equal layers of the stage, for one micro-batch each) fit in the holder's
        memory at once if each takes `amount` (memory units times p)."""
        return self.room // amount if amount else self.most

    @property
    def max_waiting(self) -> int:
        """Number of shares (one of p equal layers of the stage, for one micro-batch each) that can be between F and I
        at once in the holder's memory."""
        return self.capacity_for(self.activation)

    def fill_idle(self, count: int) -> int:
        """Return the least idle time, in ticks / p, before the first I of a worker that runs `count` shares (one of p
        equal layers of the stage, for one micro-batch each).

        Until its first I may start, a worker runs nothing but forwards, and no more of them than its memory holds: the
        rest of the round trip of its first micro-batch is idle. With k forwards admitted in that time,

            window >= n (F + I + W) + max(0, round trip - (k - 1) F),    k = min(n, capacity / activation)

        for a worker that runs n, and the idle time of `drain_idle` is added to it. The right side does not fall with n.
        """
        return max(0, self.round_trip + self.late - (min(count, self.max_waiting) - 1) * self.forward)

    def drain_idle(self, count: int, *, until_weight: bool) -> int:
        """Return the least idle time, in ticks / p, of a worker with `count` shares (one of p equal layers of the
        stage, for one micro-batch each), from its last F to the end of its last W (`until_weight`) or I.

        When the last F starts, memory holds x shares that still wait for their I, including its own, and y that wait
        only for their W, with x <= k (`max_waiting`). So at most x I and x + y W run from then on, during the last
        share's `round_trip`:

            idle >= round trip + (I + W) - max over x, y of (x I + (x + y) W)    until its W ends,
            idle and W meanwhile >= round trip + I - k I                         until its I ends.

        If memory holds at most l shares that wait for I or W when the last F starts, at least count - l W are done
        before that; the second line counts none of them, so `min_gradient_window` adds both. With count > k some I
        comes before the last F, so that nothing is counted twice: the time of `fill_idle` ends when the first I starts.
        With fewer, all F may come first, and 0 is returned.
        """
        if count <= self.max_waiting:
            return 0
        idle = self.round_trip + self.gradient
        if until_weight:
            return max(0, idle + self.weight - self.max_remaining_work(count))
        return max(0, idle - self.max_waiting * self.gradient)

    def max_remaining_work(self, count: int) -> int:
        """Return an upper limit on the time of I and W, in ticks / p, that a worker still has to run when the last F of
        its `count` shares (one of p equal layers, for one micro-batch each) starts.

        At that time x shares wait for their I, 1 <= x <= k (`max_waiting`), and y only for their W, with x + y <= count
        and x activation + y stash <= capacity (stash: memory that W needs, kept from I until W). The limit is the
        maximum of x I + (x + y) W. If y need not be a whole number, this is concave in x: the maximum lies at an end,
        or at the whole numbers next to the x from which on not all can wait for their W.
        """
        most = min(count, self.max_waiting)
        ends = {1, most}
        if self.activation != self.stash:
            corner = (self.room - count * self.stash) // (self.activation - self.stash)
            ends |= {min(max(1, corner + more), most) for more in (0, 1)}
        return max(waiting * self.gradient + self._remaining_weight_ticks(waiting, count) for waiting in ends)

    def _remaining_weight_ticks(self, waiting: int, count: int) -> int:
        """Return the most time of W, in ticks / p, that can be due while `waiting` of `count` shares (one of p equal
        layers, for one micro-batch each) wait for their I and memory is full. The number of other shares, which wait
        only for their W, need not be whole."""
        if not self.stash:
            return count * self.weight
        free = self.room - waiting * self.activation
        return min(count * self.weight, waiting * self.weight + free * self.weight // self.stash)

    def min_window(self, count: int) -> int:
        """Return the shortest time, in ticks / p, from the first to the last compute op of a worker that runs `count`
        shares (one of p equal layers of the stage, for one micro-batch each)."""
        return count * self.work + self.fill_idle(count) + self.drain_idle(count, until_weight=True) if count else 0

    def min_gradient_window(self, count: int) -> int:
        """Return the shortest time, in ticks / p, from the first F to the last I of a worker that runs `count` shares
        (one of p equal layers of the stage, for one micro-batch each).

        All W must be done in it except those that memory can hold until later.
        """
        unavoidable = max((count - min(count, self.capacity_for(self.stash))) * self.weight,
                          (count - min(count, self.capacity_for(min(self.activation, self.stash)))) * self.weight
                          + self.drain_idle(count, until_weight=False))
        return count * (self.forward + self.gradient) + self.fill_idle(count) + unavoidable


def _make_shares(problem: Problem, stage: int, worker: Worker, parts: int) -> StageShares:
    forward, gradient, *weight = (problem.op_ticks(kind, stage, worker) for kind in problem.op_kinds)
    out, home = problem.min_path_ticks
    # Transfers to the next stage and back; the last stage has none.
    hops = 2 * problem.min_transfer_ticks(stage) if stage + 1 < len(problem.grid.stages) else 0
    trip = out[-1] - out[stage + 1] + home[-1] - home[stage + 1] + hops
    return StageShares(parts=parts, forward=forward, gradient=gradient, weight=sum(weight), round_trip=trip * parts,
                       activation=activation_memory(problem, stage), stash=stash_memory(problem, stage),
                       room=activation_room(problem, worker) * parts, most=_microbatches_at(problem, stage) * parts)


def _count_holder_kinds(problem: Problem, stage: int) -> Counter[StageShares]:
    """Return the number of live holders of a stage by their speed and memory, given as `StageShares`."""
    column = problem.column_of[stage]
    workers = [Worker(pipeline, column) for pipeline in problem.live_pipelines_by_column[column]]
    example = {problem.workers[worker]: worker for worker in workers}
    numbers: Counter[StageShares] = Counter()
    for properties, number in Counter(problem.workers[worker] for worker in workers).items():
        numbers[_make_shares(problem, stage, example[properties], problem.count_parts(stage))] += number
    return numbers


def _busiest_window(problem: Problem, stage: int) -> Fraction:
    """Return a bound for a stage: the least T such that its holders can run all its work in windows of T ticks.

    The work is counted in shares (equal layers for one micro-batch). T is a whole number of ticks / p, as all times of
    shares are. A worker that runs n shares has a window of at least n (F + I + W) plus the idle time of filling and
    draining, which does not fall with n. So in T it runs at most the n whose window fits.
    """
    least = _least_window(tuple(_count_holder_kinds(problem, stage).items()),
                          _microbatches_at(problem, stage) * problem.count_parts(stage))
    return Fraction(least, problem.count_parts(stage)) + problem.column_closing_ticks(problem.column_of[stage])


@lru_cache(4096)  # failures that come and go repeat most columns
def _least_window(holders: Sequence[tuple[StageShares, int]], total: int) -> int:
    """Return the least T, in ticks / p, such that holders can run `total` shares of a stage (one of p equal layers, for
    one micro-batch each) if each has a busy window of T.

    The argument `holders` has pairs of a speed and memory (`StageShares`) and the number of holders with these.
    """
    def is_enough(ticks: int) -> bool:
        return sum(number * _max_shares_within(shares, ticks) for shares, number in holders) >= total

    return bisect_left(range(max(shares.min_window(total) for shares, _ in holders)), True, key=is_enough)


def window_bound(problem: Problem, column: int) -> int:
    """Return a lower bound, in ticks, on the busy window of the busiest worker of a column."""
    stages = [stage for stage in _find_single_stages(problem) if problem.column_of[stage] == column]
    return math.ceil(_busiest_window(problem, stages[0]) if stages else column_work(problem, [column]))


def _scarce_stage_bound(problem: Problem, stage: int) -> Fraction:
    """Return a lower bound on the period, in ticks, from a stage whose micro-batches wait for a later stage with fewer
    live workers.

    It is 0 if micro-batches may be cut or workers differ. The I that come first on the n holders are of n
    micro-batches. At a stage with k < n holders, at most k of these n are the first that their worker runs; the others
    start their F there at least one F later, and n - k holders idle that much longer. If fewer holders are in use,
    fewer idle longer, but those in use do not run more than with all.
    """
    kinds = _count_holder_kinds(problem, stage)
    if problem.can_cut_stages or len(kinds) > 1:
        return Fraction(0)
    shares, = kinds
    total, holders, best = _microbatches_at(problem, stage), len(problem.holders_by_slice[stage]), 0
    for later in range(stage + 1, len(problem.grid.stages)):
        in_time = len(problem.holders_by_slice[later])
        if in_time >= holders:
            continue
        late = shares._replace(late=problem.fastest_ticks(OpKind.F, later))
        best = max(best, _least_window(((shares, in_time), (late, holders - in_time)), total))
    return Fraction(best) + problem.column_closing_ticks(problem.column_of[stage])


def _max_shares_within(shares: StageShares, ticks: int) -> int:
    """Return how many of all shares of a stage (one of p equal layers, for one micro-batch each) a holder can run in a
    busy window, without reductions and optimizer step, of `ticks` (in ticks / p)."""
    return bisect_right(range(1, shares.most + 1), ticks, key=shares.min_window)


def _fill_and_drain_bound(problem: Problem, stage: int) -> Fraction:
    """Return a lower bound on the period, in ticks: the time from stage 0 through a stage's busiest worker and back to
    the last W of stage 0.

    It is 0 if the stage's workers differ in speed or memory.

    The worker's first F has come through the earlier stages (reach), and its last I still travels back through them
    (way back) and ends with a W at stage 0. In between it runs all its n F and I, idles while it fills, and runs all W
    except those that it can hold until its last I is done, k = min(n, capacity / stash), or else idles while it drains;
    stash is the memory that W needs, kept from I until W. All ops of stage 0 lie in a window of period - A - O
    (staggered: any two workers' windows there end together), so

        period >= reach + n (F + I) + (n - k) W + idle + way back + W of stage 0 + A + O of stage 0.

    When fused, B takes the place of I, and no W is left for later.
    """
    kinds = _count_holder_kinds(problem, stage)
    if len(kinds) > 1:
        return Fraction(0)
    shares, = kinds
    return _round_trip_bound(problem, stage, shares, -(-shares.most // len(problem.holders_by_slice[stage])))


def _round_trip_bound(problem: Problem, stage: int, shares: StageShares, count: int) -> Fraction:
    """Return the bound of `_fill_and_drain_bound`, in ticks, for a worker that runs `count` shares of the stage (one of
    p equal layers, for one micro-batch each)."""
    out, home = problem.min_path_ticks
    last = Fraction(0)
    if problem.backward == "split" and stage and problem.count_parts(0):
        last = Fraction(problem.fastest_ticks(OpKind.W, 0), problem.count_parts(0))
    closing = problem.column_closing_ticks(problem.column_of[0])
    return Fraction(shares.min_gradient_window(count), shares.parts) + out[stage] + home[stage] + last + (
        closing if problem.optimizer == "staggered" else max(closing, *problem.times.optimizer))


# --- How whole micro-batches pass the stages, one after the other -----------------------------------------------------


MAX_PASSAGE_STEPS = 20_000
"""Largest size of a problem (stages squared times micro-batches) for which `_passage_bounds` are computed."""


def _passage_bounds(problem: Problem) -> list[int]:
    """Return, for each stage, a lower bound on the period, in ticks, from how its micro-batches pass this and later
    stages.

    The list is empty if micro-batches may be cut, workers hold several stages, or the problem is too large
    (`MAX_PASSAGE_STEPS`).

    Let f(s, k) be the start of the k-th F of stage s and e(s, k) the end of the k-th I, whichever micro-batches they
    belong to; n(s) is the number of live workers. By f(s, k), k micro-batches have passed stage s - 1; n(s) + 1 ops do
    not run at once; memory has room for h(s) that wait for their I. Of the k micro-batches whose I has ended by e(s,
    k), k - j + 1 have begun at f(s, j) or later, and some worker runs at least one n-th of them, rounded up. Hence

        f(s, k) >= f(s - 1, k) + F(s - 1) + transfer,       f(s, k - n) + F,   e(s, k - h)
        e(s, k) >= e(s + 1, k) + transfer + I,              e(s, k - n) + I,
                   f(s, j) + (F + I) (k - j + 1) / n  for each j up to k.

    The window of stage s begins with f(s, 1), before which nothing is done at later stages. Of the micro-batches whose
    I ends at e(s, j) or later, some worker runs at least one n-th, and only the first of their I may begin before that:

        end >= e(s, j) - I + (I + W) (K - j + 1) / n,       f(s, j) + (F + I + W) (K - j + 1) / n,

    each rounded up to whole micro-batches, for each j up to their number K.
    """
    grid = problem.grid
    stages, count = len(grid.stages), grid.total_microbatches
    if problem.can_cut_stages or grid.chains > 1 or grid.columns < stages or stages**2 * count > MAX_PASSAGE_STEPS:
        return []
    return [_passage_bound(problem, stage, count) for stage in range(stages)]


def _passage_bound(problem: Problem, first: int, count: int) -> int:
    """Return a lower bound, in ticks, on the period of the workers of stage `first`; see `_passage_bounds`.

    The argument `count` is the number of micro-batches.
    """
    stages = range(first, len(problem.grid.stages))
    forward, gradient = ({stage: problem.fastest_ticks(kind, stage) for stage in stages}
                         for kind in problem.op_kinds[:2])
    workers = {stage: len(problem.holders_by_slice[stage]) for stage in stages}
    waiting = {stage: _max_waiting(problem, stage, count) for stage in stages}
    begun: dict[int, list[int]] = {stage: [] for stage in stages}
    returned: dict[int, list[int]] = {stage: [] for stage in stages}  # e(s, k) - I
    served: dict[int, list[int]] = {stage: [] for stage in stages}  # last line of the bound on e(s, k)
    for number in range(count):
        earliest = 0
        for stage in stages:
            if number >= workers[stage]:
                earliest = max(earliest, begun[stage][-workers[stage]] + forward[stage])
            if number >= waiting[stage]:
                earliest = max(earliest, returned[stage][-waiting[stage]] + gradient[stage])
            begun[stage].append(earliest)
            earliest += forward[stage] + (problem.min_transfer_ticks(stage) if stage < stages[-1] else 0)
        for stage in reversed(stages):
            free = served[stage][-workers[stage]] if number >= workers[stage] else 0
            served[stage].append(max(begun[stage][number], free) + forward[stage] + gradient[stage])
            earliest = max(earliest, served[stage][number] - gradient[stage])
            if number >= workers[stage]:
                earliest = max(earliest, returned[stage][-workers[stage]] + gradient[stage])
            returned[stage].append(earliest)
            earliest += gradient[stage] + (problem.min_transfer_ticks(stage - 1) if stage > first else 0)
    after = gradient[first] + sum(problem.fastest_ticks(kind, first) for kind in problem.op_kinds[2:])
    ends = (max(returned[first][number] + after * (rounds := -(-(count - number) // workers[first])),
                begun[first][number] + (forward[first] + after) * rounds) for number in range(count))
    return max(ends) + problem.column_closing_ticks(problem.column_of[first])


def _max_waiting(problem: Problem, stage: int, count: int) -> int:
    """Return the number of micro-batches that all workers of a stage together can hold between F and I."""
    amount = activation_memory(problem, stage)
    return max(1, sum(activation_room(problem, worker) // amount for worker in problem.holders_by_slice[stage])) \
        if amount else count


# --- How pipelines fill where workers run whole forwards only, which are their own ------------------------------------


class StageFill(NamedTuple):
    """Times and memory of a stage that decide how long its worker idles before its first I (`compute_whole_fill`)."""

    forward: int
    """Ticks of an F."""
    max_forwards: int
    """Number of micro-batches whose F can run before the first I, for lack of memory or of micro-batches."""
    return_ticks: int
    """Ticks of the I of the next stage, with the transfers to it and back; 0 at the last stage."""


class WholeFill(NamedTuple):
    """Lower bound on the period if workers run whole forwards only, and the idle ticks that it allows at each stage
    (`compute_whole_fill`)."""

    period: int
    """Lower bound on the period, in ticks."""
    idle: tuple[int, ...]
    """Ticks, by stage, that a worker may idle before its first I in a plan whose period is this bound."""


def compute_whole_fill(problem: Problem) -> WholeFill | None:
    """Compute a lower bound on the period, from how all stages fill together before their first I, and the idle time
    that it allows each stage.

    Return None if workers are down or slow, share micro-batches, or hold several stages.

    Let u(s) be the time from the first F to the first I of stage s. In it, the worker runs only whole F, at most k, so
    that it idles for u(s) - min(k, floor(u(s) / F)) F. The first F has come from the stage before, and the first I
    continues to that stage:

        u(s - 1) >= u(s) + F(s - 1) + I(s) + two transfers,   u(last) >= F(last).

    A period allows each stage a certain idle time. If a stage exceeds it, the worker may run one more F and start its I
    later, which delays the I of all stages before. The least u(s) that a period allows, computed from the last stage to
    the first, decide whether the period is possible at all.
    """
    grid = problem.grid
    if problem.failed or problem.has_slow_workers or problem.sharing or grid.chains > 1 \
            or grid.columns < len(grid.stages):
        return None
    count, stages = max(grid.microbatches), range(grid.columns)
    shares = [_make_shares(problem, stage, problem.home_worker(stage, 0), 1) for stage in stages]
    without_fill = [_period_without_fill(problem, stage, shares[stage], count) for stage in stages]
    back = [problem.fastest_ticks(problem.gradient_kind, stage + 1) + 2 * problem.min_transfer_ticks(stage)
            for stage in stages[:-1]]
    fills = [StageFill(one.forward, min(count, one.max_waiting), after) for one,
             after in zip(shares, [*back, 0], strict=True)]
    least = max(without_fill)
    enough = sum(2 * fill.forward + fill.return_ticks for fill in fills)
    period = least + bisect_left(range(enough), True, key=lambda more: _can_fill(
        fills, [least + more - ticks for ticks in without_fill]))
    return WholeFill(period, tuple(period - ticks for ticks in without_fill))


def _period_without_fill(problem: Problem, stage: int, shares: StageShares, count: int) -> int:
    """Return the least period of a worker of this stage that runs `count` shares (one of p equal layers, for one
    micro-batch each), less its idle ticks before its first I."""
    window = shares.min_window(count) + problem.column_closing_ticks(problem.column_of[stage])
    if problem.optimizer == "synchronous":
        window += _earliest_forward(problem, stage)
    return max(window, math.ceil(_round_trip_bound(problem, stage, shares, count))) - shares.fill_idle(count)


def _can_fill(fills: Sequence[StageFill], idle: Sequence[int]) -> bool:
    """Return whether every stage can start its first I, after those of later stages, and idle before it for at most the
    ticks that `idle` has for the stage. `fills` has a `StageFill` for each stage."""
    wait = 0
    for (forward, most, back), allowed in zip(reversed(fills), reversed(idle), strict=True):
        wait += forward + back
        done = min(most, wait // forward) if forward else most
        if wait - done * forward > allowed:
            if not forward or done == most:
                return False
            wait = (done + 1) * forward
    return True


# --- For every layout that the problem allows -------------------------------------------------------------------------


def layout_lower_bound(below: Problem) -> Bound:
    """Return a lower bound on the period for all layouts in the scope of the problem `below`. It also holds if layers
    cost more time and memory than in `below`, but not if they cost less.

    A schedule stays valid if ops take less time and each ends at the same time as before: ops that wait for its end
    wait no longer, no two ops of a worker overlap, an activation is held from a later F on, and no worker's window is
    longer. The same is true if transfers take less time, less memory is needed, or more memory is available. Hence a
    bound for costs that were rounded down also holds for the exact costs, and for costs that were rounded up: those of
    the slices of layouts, which are sums over their layers, and of whole stages, each of which costs at least that sum.

    If workers share micro-batches in `below`, layers are in place, and `exact_bound` counts, too. It allows that a
    micro-batch is cut at a stage into at most as many shares as `below.parts` says.
    """
    bound = period_bound(below)
    if below.sharing:
        ticks, counts = exact_bound(below)
        bound |= Bound(math.ceil(ticks), bound.scope, counts)
    return bound


def work_bound(problem: Problem) -> int:
    """Return a lower bound on the period, in ticks, for any distribution of layers over workers, by the total work.

    A worker that runs any op holds a layer, so that at least C of a period T, the all-reduce and the optimizer step of
    one layer, is not F, I or W. In the rest, a worker that takes s times the usual time does at most (T - C) / s of the
    usual work. The sum over all live workers is at least the work of an iteration.
    """
    work = sum(problem.costs.work) * problem.grid.total_microbatches
    return min(problem.costs.closing) + math.ceil(ticks_of_work(work, map(problem.slowness, problem.live_workers)))


def ticks_of_work(work: int, slowness: Iterable[int]) -> Fraction:
    """Return the ticks in which these workers together do work that takes one worker of the usual speed `work` ticks.

    The argument `slowness` has the time that each worker takes, per mille of the usual time.
    """
    kinds = Counter(slowness)
    return work / sum((Fraction(1000 * number, slow) for slow, number in kinds.items()), start=Fraction(0))


def period_bound(problem: Problem) -> Bound:
    """Return the best lower bound on the period for the layouts that the problem allows, by the work of all layers.

    It is `any_layers_bound` if layers may move, else `fixed_bound`, and at least `work_bound`.
    """
    moving = problem.question.layers == "move"
    return Bound(max(work_bound(problem), any_layers_bound(problem) if moving else fixed_bound(problem)),
                 problem.question.bound_scope, "the work of all layers that workers share")


def any_layers_bound(problem: Problem) -> int:
    """Return a lower bound on the period, in ticks, for all layouts, whichever layers workers hold. No layer of a
    micro-batch is divided between workers.

    A worker that holds h layers does at most the work that all micro-batches have in h layers. The all-reduces and
    optimizer steps of h layers are not available for F, I and W. In the rest of the period it does a sum of layers'
    work, which is a multiple of their greatest common divisor.
    """
    unit, total = math.gcd(*problem.costs.work), problem.grid.total_microbatches
    if not unit:
        return 0
    most = [total * work for work in accumulate(sorted(problem.costs.work, reverse=True))]
    closings = list(accumulate(sorted(problem.costs.closing)))
    kinds = Counter(map(problem.slowness, problem.live_workers))

    def is_enough(limit: int) -> bool:
        return sum(count * max(min(work, max(0, limit - closing) * 1000 // (slow * unit) * unit)
                               for work, closing in zip(most, closings, strict=True))
                   for slow, count in kinds.items()) >= most[-1]

    return bisect_left(range(4 * problem.ample_ticks), True, key=is_enough)


def placement_bound(problem: Problem, *, input_free: bool) -> Bound:
    """Return a lower bound on the period, in ticks, for all placements of virtual stages, with no failures.

    It is the larger one of two, from the work and from the time that activations occupy memory. With `input_free`, the
    first stage has no I, whichever layers it has; all of its backward is W.
    """
    from_work = Bound(max(work_bound(problem), any_layers_bound(problem)), Scope.PLACEMENT,
                      "the work of all layers, shared by a pipeline's workers")
    from_memory = Bound(memory_bound(problem, input_free=input_free), Scope.PLACEMENT,
                        "how long the activations of all layers are held, in the memory of all workers")
    return from_work | from_memory


def memory_bound(problem: Problem, *, input_free: bool) -> int:
    """Return the least period, in ticks, that memory allows, wherever the virtual stages are placed.

    From the start of its F of a micro-batch until the end of its I, a layer's activation is on some worker, and in
    between are the F and the I of all layers behind it. After that its stash, what W needs, is there while its W runs.
    All of this lies in the windows of workers, which have T - C ticks in a period T, where C is the least time of the
    reductions and the step of a layer:

        (T - C) x room of all workers >= micro-batches x sum over layers of (activation x (F and I from it on)
                                                                             + stash x W).

    A pipeline holds the weights of each layer at least once. If the first stage has no I (`input_free`), the I of its
    layers does not count, however many they are: the bound is the least over all numbers of layers. For each number it
    is at least the work of those layers on one worker.
    """
    costs, grid = problem.costs, problem.grid
    if problem.memory is None or not any(costs.activation):
        return 0
    room = sum(worker.room for worker in problem.workers.values()) - grid.pipelines * sum(costs.weights)
    if room <= 0:
        return 0
    fused = problem.backward == "fused"
    back = costs.backward_input if not fused else tuple(map(sum, zip(
        costs.backward_input, costs.backward_weight, strict=True)))
    behind = _suffix_sums(costs.forward)
    stashed = 0 if fused else sum(stash * weight for stash, weight in zip(
        costs.weight_stash, costs.backward_weight, strict=True))
    total, slow = grid.total_microbatches, min(1000, problem.min_slowness)
    least = None
    work = list(accumulate(costs.work, initial=0))
    for first in range(1, grid.layer_count + 1) if input_free and not fused else (0,):
        # In each pipeline one worker runs the layers of the first stage, or two with two directions.
        alone = work[first] * min(grid.microbatches) * slow // 2000
        after = _suffix_sums(tuple(0 if layer < first else ticks for layer, ticks in enumerate(back)))
        held = sum(activation * (behind[layer] + after[layer]) for layer, activation in enumerate(costs.activation))
        ticks = max(alone, -(-total * (held + stashed) * slow // (1000 * room)))
        least = ticks if least is None else min(least, ticks)
    return min(costs.closing) + (least or 0)


def _suffix_sums(values: Sequence[int]) -> list[int]:
    """Return, for each layer, the sum of its value and of the values of all layers behind it."""
    return list(accumulate(reversed(values)))[::-1]


def fixed_bound(problem: Problem) -> int:
    """Return a lower bound on the period, in ticks, for the layers that workers hold now.

    The work of consecutive ranges of layers (`iterate_held_ranges`) is done by the workers that hold any of them. In a
    period they are not available for the all-reduces and optimizer steps of all layers they hold, and for the time that
    they idle for lack of memory (`min_fill_ticks`). Without slices, no worker runs a fraction of a micro-batch: see
    `whole_bound`.
    """
    parts = list(iterate_held_ranges(problem))
    idle_of_kind = {kind: problem.held_closing_ticks(worker) + min_fill_ticks(problem, worker)
                    for kind, worker in {problem.workers[worker]: worker for worker in problem.live_workers}.items()}
    idle = {worker: idle_of_kind[problem.workers[worker]] for worker in problem.live_workers}
    best = 0
    for first in range(len(parts)):
        holders: set[Worker] = set()
        work = 0
        for part in parts[first:]:
            holders.update(part.holders)
            work += sum(problem.costs.work[layer] for layer in range(*part.layers)) * problem.grid.total_microbatches
            best = max(best, _min_shared_period(problem, holders, work, idle))
    return best if problem.question.sliced else max(best, whole_bound(problem))


def whole_bound(problem: Problem) -> int:
    """Return a lower bound on the period, in ticks, if no micro-batch is cut within layers that the same workers hold.

    A holder of such a range runs at most floor((T - C) / t) micro-batches in a period T, if one takes t ticks, and its
    all-reduces and optimizer step take C ticks.
    """
    best = 0
    for part in iterate_held_ranges(problem):
        work = sum(problem.costs.work[layer] for layer in range(*part.layers))
        kinds = Counter((problem.held_closing_ticks(worker), problem.slowness(worker)) for worker in part.holders)

        def is_enough(limit: int, work: int = work, kinds: Counter[tuple[int, int]] = kinds) -> bool:
            return not work or sum(count * (max(0, limit - closing) * 1000 // (work * slow))
                                   for (closing, slow), count in kinds.items()) >= problem.grid.total_microbatches

        best = max(best, bisect_left(range(4 * problem.ample_ticks), True, key=is_enough))
    return best


def min_fill_ticks(problem: Problem, worker: Worker) -> int:
    """Return a lower bound on the ticks of a period that a worker, with its present layers, idles before its first I.

    Let its first F start at t, and its first I at u; that I is of a slice [a, b) of some micro-batch. After the F of
    [a, b), F of all layers from b on and I of the same come before that I, at best on the fastest workers and with one
    transfer each way if b < L. The worker holds b - 1 but perhaps not b; whatever b is, at least the F of one layer
    that it holds, and F and I of all layers behind the last one that it holds, lie between t and u. In that time the
    worker runs F only, as W follows I, and each of these still holds its activation at u. So they take no longer than
    its room for activations allows, at the highest ratio of ticks of F to memory. For the rest of u - t it idles.
    """
    held = problem.list_held_layers(worker)
    if not held or held[-1] + 1 == problem.grid.layer_count:
        return 0
    end, slow, sums = held[-1] + 1, problem.slowness(worker), problem.costs.prefix_sums
    behind = sums.forward[-1] - sums.forward[end] + sums.backward_input[-1] - sums.backward_input[end]
    fastest = min(1000, problem.min_slowness)
    trip = min(problem.costs.forward[layer] for layer in held) * slow // 1000 + behind * fastest // 1000
    trip += 2 * problem.times.transfer
    if not problem.costs.activation or not all(problem.costs.activation[layer] for layer in held):
        return 0
    room = problem.workers[worker].room - sum(problem.costs.weights[layer] for layer in held)
    rate = max(Fraction(problem.costs.forward[layer] * slow, 1000 * problem.costs.activation[layer]) for layer in held)
    rounding = len(held) * problem.grid.total_microbatches if slow != 1000 else 0  # each F is rounded up to a tick
    return max(0, trip - int(room * rate) - rounding - 1)


def _min_shared_period(problem: Problem, workers: Iterable[Worker], work: int,
                       unavailable: Mapping[Worker, int]) -> int:
    """Return the least period T, in ticks, in which workers do `work` ticks: sum of (T - unavailable) / slowness >=
    work."""
    kinds = Counter((problem.slowness(worker), unavailable[worker]) for worker in workers)

    def is_enough(limit: int) -> bool:
        return sum(Fraction(max(0, limit - lost) * 1000 * count, slow) for (slow, lost), count in kinds.items()) >= work

    return bisect_left(range(problem.ample_ticks * 4), True, key=is_enough)
