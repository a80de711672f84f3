"""Proven lower bounds on the period. Each is valid on its own; the largest counts.

All hold for any order and either backward mode. What bounds count are *shares*: one of the p equal layers of a stage
for one micro-batch, p = 1 where micro-batches are not cut. A slice is one share or more, so that a wait which starts or
ends with a unit starts or ends with one share at least. To stay in whole numbers, times of a stage are multiplied by p:
then a share takes F, I and W ticks. A schedule with slices may have times that are no whole number of the problem's
ticks, so neither are the bounds.
"""

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from slipstream.planner.model.problem import Bound, Problem, parts_of
from slipstream.schedules.schedule import OpKind, Scope, Worker

Named = tuple[Fraction, str]
"""A bound in ticks, and in words what it counts."""


def lower_bound(problem: Problem) -> int:
    """The best proven lower bound on the period, in ticks."""
    return strongest_bound(problem).ticks


def strongest_bound(problem: Problem) -> Bound:
    """The best proven lower bound on the period, for the question that the problem asks.

    0 where a layout is given: the problem that it was made for has one (`least_of`).
    """
    if problem.assigned:
        return Bound(0, Scope.LAYERS)
    ticks, counts = exact_bound(problem)
    return Bound((math.floor if problem.sliced else math.ceil)(ticks), problem.scope, counts)


def exact_bound(problem: Problem) -> Named:
    """The same, exactly: the times of schedules with slices need not be whole numbers of the problem's ticks."""
    return max(_bounds_in_place(problem), key=lambda bound: bound[0])


def _bounds_in_place(problem: Problem) -> list[Named]:
    """Each valid on its own: where any live holder of a stage may run any micro-batch of it, and so where workers keep
    their own."""
    late = problem.optimizer == "synchronous"  # then no window begins before a micro-batch has come
    bounds = []
    for first in sorted(set(problem.tied)):
        columns = [column for column, tied in enumerate(problem.tied) if tied == first]
        stages = [stage for column in columns for stage in problem.grid.stages_of(column)]
        reach = min(_reach(problem, stage) for stage in stages) if late else 0
        work = reach + column_work(problem, columns)
        bounds.append((work, f"the work of column {first}, shared by its live workers"))
        if not problem.sharing:
            bounds += [(reach + _own_work(problem, column), f"the work of the busiest worker of column {column}")
                       for column in columns]
    for stage in _single(problem):
        column = problem.column_of[stage]
        window = _window(problem, stage)
        bounds.append((window, f"work and round trips of the busiest worker of column {column}"))
        bounds.append((_crowded(problem, stage), f"the wait of column {column} for fewer workers at other stages"))
        bounds.append((_chain(problem, stage), f"the way to stage {stage}, its work, and the way back"))
        if late:
            bounds.append((_reach(problem, stage) + window, f"the way to column {column}, and its work"))
    bounds += [(Fraction(ticks), f"how micro-batches pass stage {stage} and come back to it, one after the other")
               for stage, ticks in enumerate(_passages(problem))]
    if (whole := whole_fill(problem)) is not None:
        bounds.append((Fraction(whole.period), "work, and what whole forwards leave of the round trips"))
    return bounds


def _single(problem: Problem) -> Sequence[int]:
    """The stages whose workers hold no other layers, and whose layers, if they can be told apart, are equal."""
    grid = problem.grid
    if grid.chains > 1:
        return ()
    return [stage for stage in range(len(grid.stages))
            if len(grid.stages_of(problem.column_of[stage])) == 1 and problem.parts_of(stage)]


def _reach(problem: Problem, stage: int) -> int:
    """Least ticks before the first F of a stage may start."""
    there, _ = problem.least_ways
    return there[stage] - there[stage - problem.grid.original(stage)]


def column_work(problem: Problem, columns: Sequence[int]) -> Fraction:
    """All work of some columns at the rates of all their live workers, with the shortest of their closings."""
    work = sum(sum(problem.usual(kind, stage) for kind in problem.kinds) * _along(problem, stage)
               for column in columns for stage in problem.grid.stages_of(column))
    slowness = (problem.workers[Worker(pipeline, column)].per_mille for column in columns
                for pipeline in problem.live_by_column[column])
    return ticks_of_work(work, slowness) + min(map(problem.column_closing, columns))


def _own_work(problem: Problem, column: int) -> Fraction:
    """The most that a live worker of a column takes for the micro-batches of its own pipeline."""
    stages, counts, grid = problem.grid.stages_of(column), problem.grid.microbatches, problem.grid
    return Fraction(problem.column_closing(column) + max(
        sum(problem.cost(kind, stage, Worker(pipeline, column)) * len(range(stage // grid.depth, counts[pipeline],
                                                                            grid.chains))
            for stage in stages for kind in problem.kinds) for pipeline in problem.live_by_column[column]))


def _along(problem: Problem, stage: int) -> int:
    """Micro-batches that visit a stage in an iteration."""
    grid = problem.grid
    return sum(len(range(stage // grid.depth, count, grid.chains)) for count in grid.microbatches)


# --- One stage --------------------------------------------------------------------------------------------------------


class Shares(NamedTuple):
    """The shares of a stage on one of its holders; times in ticks / p."""

    parts: int
    """p: shares of a micro-batch."""
    forward: int
    gradient: int
    """Of an I, or B."""
    weight: int
    """Of a W; 0 when fused."""
    round_trip: int
    """From the end of an F to the start of its I: to the last stage and back."""
    activation: int
    """Memory that a share takes / p from F to the end of I;"""
    stash: int
    """from there to the end of W;"""
    room: int
    """and that of the holder."""
    most: int
    """Shares of all micro-batches."""
    late: int = 0
    """How much later than after its round trip the first I starts."""

    @property
    def work(self) -> int:
        """F, I and W."""
        return self.forward + self.gradient + self.weight

    def held(self, amount: int) -> int:
        """How many have room at once, of which each takes so much."""
        return self.room // amount if amount else self.most

    @property
    def waiting(self) -> int:
        """How many memory holds between F and I."""
        return self.held(self.activation)

    def fill(self, count: int) -> int:
        """Idle time before the first I of a worker that runs so many.

        Until its first I may start, a worker runs nothing but forwards, and no more of them than its memory holds: the
        rest of the round trip of its first micro-batch is idle. With k forwards admitted in that time,

            window >= n (F + I + W) + max(0, round trip - (k - 1) F),   k = min(n, capacity / activation)

        for a worker that runs n, and the idle time of `drain` comes on top. The right side does not fall with n.
        """
        return max(0, self.round_trip + self.late - (min(count, self.waiting) - 1) * self.forward)

    def drain(self, count: int, *, until_weight: bool) -> int:
        """Idle time of a worker that runs so many from its last F on, until the last I has ended, or its W, too.

        When the last F starts, memory holds x <= k micro-batches that still wait for their I, that one counted, and y
        that wait for their W only. So no more than x I and x + y W are run from there on, while its own round trip goes
        on:

            idle >= round trip + (I + W) - max over x, y of (x I + (x + y) W)    until its W ends,
            idle and W meanwhile >= round trip + I - k I                         until its I ends.

        In the second case (`_chain`), these W are not among the count - l that are done before the last F starts, where
        l are held in memory at most. With count > k some I comes before the last F, so that nothing is counted twice:
        `fill` is over when the first I starts. With fewer, all F may come first, and 0 is returned.
        """
        if count <= self.waiting:
            return 0
        idle = self.round_trip + self.gradient
        if until_weight:
            return max(0, idle + self.weight - self.most_left(count))
        return max(0, idle - self.waiting * self.gradient)

    def most_left(self, count: int) -> int:
        """At least the ticks of the I and W that can still be due when the last of `count` F starts.

        x of them wait for their I then, 1 <= x <= k, and y for their W only, with x + y <= count and
        x activation + y stash <= capacity: the maximum of x I + (x + y) W. With y not in whole numbers it is concave in
        x, so that it lies at an end, or at the whole numbers around the x from which on not all can wait for their W.
        """
        most = min(count, self.waiting)
        ends = {1, most}
        if self.activation != self.stash:
            corner = (self.room - count * self.stash) // (self.activation - self.stash)
            ends |= {min(max(1, corner + more), most) for more in (0, 1)}
        return max(waiting * self.gradient + self._weights(waiting, count) for waiting in ends)

    def _weights(self, waiting: int, count: int) -> int:
        """Ticks of W that are due while so many micro-batches wait for their I; y need not be a whole number."""
        if not self.stash:
            return count * self.weight
        free = self.room - waiting * self.activation
        return min(count * self.weight, waiting * self.weight + free * self.weight // self.stash)

    def window(self, count: int) -> int:
        """Time from the first to the last op."""
        return count * self.work + self.fill(count) + self.drain(count, until_weight=True) if count else 0

    def inside(self, count: int) -> int:
        """Time from the first F to the end of the last I, in which all W are done but those that can wait."""
        left = max((count - min(count, self.held(self.stash))) * self.weight,
                   (count - min(count, self.held(min(self.activation, self.stash)))) * self.weight
                   + self.drain(count, until_weight=False))
        return count * (self.forward + self.gradient) + self.fill(count) + left


def _shares(problem: Problem, stage: int, worker: Worker, parts: int) -> Shares:
    forward, gradient, *weight = (problem.cost(kind, stage, worker) for kind in problem.kinds)
    there, back = problem.least_ways
    # The hop from the stage to the next one, there and back; that behind the last stage is 0.
    hops = 2 * problem.least_hop(stage) if stage + 1 < len(problem.grid.stages) else 0
    trip = there[-1] - there[stage + 1] + back[-1] - back[stage + 1] + hops
    limited = problem.memory is not None
    return Shares(parts=parts, forward=forward, gradient=gradient, weight=sum(weight), round_trip=trip * parts,
                  activation=problem.activation(stage) if limited else 0, stash=problem.stash(stage) if limited else 0,
                  room=problem.room(worker) * parts, most=_along(problem, stage) * parts)


def _kinds(problem: Problem, stage: int) -> Counter[Shares]:
    """How many holders of a stage run its shares in which times and room."""
    column = problem.column_of[stage]
    workers = [Worker(pipeline, column) for pipeline in problem.live_by_column[column]]
    one = {problem.workers[worker]: worker for worker in workers}
    found: Counter[Shares] = Counter()
    for like, number in Counter(problem.workers[worker] for worker in workers).items():
        found[_shares(problem, stage, one[like], problem.parts_of(stage))] += number
    return found


def _window(problem: Problem, stage: int) -> Fraction:
    """The least T such that the holders of a stage can run all of its shares in windows of T ticks.

    T is a whole number of ticks / p, as all times of shares are. A worker that runs n shares has a window of at least
    n (F + I + W) and the idle time while it fills and drains, which do not fall with n. So in T it runs no more than
    the n with which that is T.
    """
    least = _least_window(tuple(_kinds(problem, stage).items()), _along(problem, stage) * problem.parts_of(stage))
    return Fraction(least, problem.parts_of(stage)) + problem.column_closing(problem.column_of[stage])


@lru_cache(4096)  # where failures come and go, most columns have been like this before
def _least_window(holders: Sequence[tuple[Shares, int]], total: int) -> int:
    """The least T such that so many holders of each kind can run `total` shares in windows of T ticks / p."""
    def enough(ticks: int) -> bool:
        return sum(number * _most(shares, ticks) for shares, number in holders) >= total

    return bisect_left(range(max(shares.window(total) for shares, _ in holders)), True, key=enough)


def window_bound(problem: Problem, column: int) -> int:
    """The window of the busiest worker of a column, in ticks."""
    stages = [stage for stage in _single(problem) if problem.column_of[stage] == column]
    return math.ceil(_window(problem, stages[0]) if stages else column_work(problem, [column]))


def _crowded(problem: Problem, stage: int) -> Fraction:
    """As `_window`, where a later stage has fewer live workers. 0 with slices.

    The I that come first on the n holders are of n micro-batches. At a stage with k < n holders no more than k of these
    have the first F of their worker; the others get it at least one F late, and n - k holders idle that much longer.
    With fewer holders in use, fewer idle longer, but those that do not run no more than with all.
    """
    kinds = _kinds(problem, stage)
    if problem.sliced or len(kinds) > 1:
        return Fraction(0)
    shares, = kinds
    total, holders, best = _along(problem, stage), len(problem.holders[stage]), 0
    for later in range(stage + 1, len(problem.grid.stages)):
        in_time = len(problem.holders[later])
        if in_time >= holders:
            continue
        late = shares._replace(late=problem.fastest(OpKind.F, later))
        best = max(best, _least_window(((shares, in_time), (late, holders - in_time)), total))
    return Fraction(best) + problem.column_closing(problem.column_of[stage])


def _most(shares: Shares, ticks: int) -> int:
    """How many, up to all, fit in a window."""
    return bisect_right(range(1, shares.most + 1), ticks, key=shares.window)


def _chain(problem: Problem, stage: int) -> Fraction:
    """Fill and drain bound: from stage 0 through a stage's busiest worker and back to the last W of stage 0. 0 where
    speeds differ.

    The worker's first F has come through the earlier stages, and its last I still travels back through them and ends
    with a W at stage 0. In between it runs all its n F and I, idles while it fills, and runs all W but those that it
    can hold until its last I is done, k = min(n, capacity / stash), or else idles while it drains. All ops of stage 0
    lie in a window of period - A - O (staggered: any two workers' windows there end together), so

        period >= reach + n (F + I) + (n - k) W + idle + way back + W of stage 0 + A + O of stage 0.

    Fused, B takes the place of I, and no W is left for later.
    """
    kinds = _kinds(problem, stage)
    if len(kinds) > 1:
        return Fraction(0)
    shares, = kinds
    return _way_through(problem, stage, shares, -(-shares.most // len(problem.holders[stage])))


def _way_through(problem: Problem, stage: int, shares: Shares, count: int) -> Fraction:
    """`_chain` of a worker that runs so many shares."""
    there, back = problem.least_ways
    last = Fraction(0)
    if problem.backward == "split" and stage and problem.parts_of(0):
        last = Fraction(problem.fastest(OpKind.W, 0), problem.parts_of(0))
    closing = problem.column_closing(problem.column_of[0])
    return Fraction(shares.inside(count), shares.parts) + there[stage] + back[stage] + last + (
        closing if problem.optimizer == "staggered" else max(closing, *problem.times.optimizer))


# --- How whole micro-batches pass the stages, one after the other -----------------------------------------------------


MAX_PASSAGES = 20_000
"""Stages, squared, times micro-batches up to which they are counted one by one."""


def _passages(problem: Problem) -> list[int]:
    """By stage, the least period of its workers, in ticks; empty where micro-batches may be cut or workers hold several
    stages.

    Let f(s, k) be when the k-th F of stage s begins and e(s, k) when the k-th I ends, whichever micro-batches they are
    of; n(s) are its live workers. By f(s, k), k micro-batches have passed stage s - 1; n(s) + 1 ops do not run at once;
    memory has room for h(s) that wait for their I. Of the k micro-batches whose I have ended by e(s, k), k - j + 1 have
    begun at f(s, j) or later, and some worker runs so many n-ths of them, rounded up. Hence

        f(s, k) >= f(s - 1, k) + F(s - 1) + transfer,       f(s, k - n) + F,   e(s, k - h)
        e(s, k) >= e(s + 1, k) + transfer + I,              e(s, k - n) + I,
                   f(s, j) + (F + I) (k - j + 1) / n  for each j up to k.

    The window of stage s begins with f(s, 1), before which nothing is done at later stages. Of the micro-batches whose
    I end at e(s, j) or later, some worker runs so many n-ths, and only the first of their I may begin before that:

        end >= e(s, j) - I + (I + W) (K - j + 1) / n,       f(s, j) + (F + I + W) (K - j + 1) / n,

    each rounded up to whole micro-batches, for each j up to their number K.
    """
    grid = problem.grid
    stages, count = len(grid.stages), grid.total_microbatches
    if problem.sliced or grid.chains > 1 or grid.columns < stages or stages**2 * count > MAX_PASSAGES:
        return []
    return [_passage(problem, stage, count) for stage in range(stages)]


def _passage(problem: Problem, first: int, count: int) -> int:
    """The least period of the workers of a stage, by what micro-batches do from there on."""
    stages = range(first, len(problem.grid.stages))
    forward, gradient = ({stage: problem.fastest(kind, stage) for stage in stages} for kind in problem.kinds[:2])
    workers = {stage: len(problem.holders[stage]) for stage in stages}
    waiting = {stage: _most_waiting(problem, stage, count) for stage in stages}
    begun: dict[int, list[int]] = {stage: [] for stage in stages}
    returned: dict[int, list[int]] = {stage: [] for stage in stages}  # e(s, k) - I
    served: dict[int, list[int]] = {stage: [] for stage in stages}  # the last line for e(s, k), from the k - n-th on
    for number in range(count):
        earliest = 0
        for stage in stages:
            if number >= workers[stage]:
                earliest = max(earliest, begun[stage][-workers[stage]] + forward[stage])
            if number >= waiting[stage]:
                earliest = max(earliest, returned[stage][-waiting[stage]] + gradient[stage])
            begun[stage].append(earliest)
            earliest += forward[stage] + (problem.least_hop(stage) if stage < stages[-1] else 0)
        for stage in reversed(stages):
            free = served[stage][-workers[stage]] if number >= workers[stage] else 0
            served[stage].append(max(begun[stage][number], free) + forward[stage] + gradient[stage])
            earliest = max(earliest, served[stage][number] - gradient[stage])
            if number >= workers[stage]:
                earliest = max(earliest, returned[stage][-workers[stage]] + gradient[stage])
            returned[stage].append(earliest)
            earliest += gradient[stage] + (problem.least_hop(stage - 1) if stage > first else 0)
    after = gradient[first] + sum(problem.fastest(kind, first) for kind in problem.kinds[2:])
    ends = (max(returned[first][number] + after * (left := -(-(count - number) // workers[first])),
                begun[first][number] + (forward[first] + after) * left) for number in range(count))
    return max(ends) + problem.column_closing(problem.column_of[first])


def _most_waiting(problem: Problem, stage: int, count: int) -> int:
    """How many micro-batches memory of all workers of a stage holds at most between F and I."""
    amount = problem.activation(stage)
    return max(1, sum(problem.room(worker) // amount for worker in problem.holders[stage])) if amount else count


# --- How pipelines fill where workers run whole forwards only, which are their own ------------------------------------


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
    if problem.failed or problem.slow or problem.sharing or grid.chains > 1 or grid.columns < len(grid.stages):
        return None
    count, stages = max(grid.microbatches), range(grid.columns)
    shares = [_shares(problem, stage, problem.worker(stage, 0), 1) for stage in stages]
    beside = [_beside_fill(problem, stage, shares[stage], count) for stage in stages]
    back = [problem.fastest(problem.gradient_kind, stage + 1) + 2 * problem.least_hop(stage) for stage in stages[:-1]]
    fills = [Fill(one.forward, min(count, one.waiting), after) for one, after in zip(shares, [*back, 0], strict=True)]
    least = max(beside)
    enough = sum(2 * fill.forward + fill.back for fill in fills)
    period = least + bisect_left(range(enough), True, key=lambda more: _can_fill(
        fills, [least + more - ticks for ticks in beside]))
    return WholeFill(period, tuple(period - ticks for ticks in beside))


def _beside_fill(problem: Problem, stage: int, shares: Shares, count: int) -> int:
    """The least period of a worker of this stage without the time it idles before its first I."""
    window = shares.window(count) + problem.column_closing(problem.column_of[stage])
    if problem.optimizer == "synchronous":
        window += _reach(problem, stage)
    return max(window, math.ceil(_way_through(problem, stage, shares, count))) - shares.fill(count)


def _can_fill(fills: Sequence[Fill], idle: Sequence[int]) -> bool:
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


# --- For every layout that the problem allows -------------------------------------------------------------------------


def least_of(below: Problem) -> Bound:
    """A bound for all layouts that the question of a problem of layers allows, where these cost no more than there.

    Any schedule stays one where ops take less time, each ending when it did and beginning later: what waits for its end
    waits no longer, no two ops of a worker overlap, an activation is held from a later F on, and no worker's window is
    longer. So it does where transfers take less, and where less memory is needed or more is there. Hence a bound for
    costs that were rounded down holds for the costs themselves, and for what they were rounded up to: the slices of
    layouts, which take the sums of their layers, and whole stages, of which each takes at least that sum.

    Where the problem shares its micro-batches, layers are in place, and bounds of whole stages, cut into equal `parts`
    at most, count, too.
    """
    found = period_bound(below)
    if below.sharing:
        ticks, counts = exact_bound(below)
        found |= Bound(math.ceil(ticks), found.scope, counts)
    return found


def work_bound(problem: Problem) -> int:
    """No schedule has a shorter period than this many ticks, whoever holds what.

    A worker that runs any op holds a layer, so that of a period T at least C, the all-reduce and the optimizer step of
    one layer, are not F, I or W. In the rest, a worker that takes s times the usual time does at most (T - C) / s of
    the usual work. The sum over all live workers is at least the work of an iteration.
    """
    work = sum(problem.costs.work) * problem.grid.total_microbatches
    return min(problem.costs.closing) + math.ceil(ticks_of_work(work, map(problem.slowness, problem.live)))


def ticks_of_work(work: int, slowness: Iterable[int]) -> Fraction:
    """In how many ticks workers, each at its speed (per mille of the usual time), do so many ticks of usual work."""
    kinds = Counter(slowness)
    return work / sum((Fraction(1000 * number, slow) for slow, number in kinds.items()), start=Fraction(0))


def period_bound(problem: Problem) -> Bound:
    """The best bound known: `any_layers_bound`, or where layers stay in place, `fixed_bound`; at least `work_bound`."""
    moving = problem.question.layers == "move"
    return Bound(max(work_bound(problem), any_layers_bound(problem) if moving else fixed_bound(problem)),
                 problem.question.scope, "the work of all layers that workers share")


def any_layers_bound(problem: Problem) -> int:
    """A bound for all holdings: workers run whole layers of whole micro-batches, and hold the layers that they run.

    A worker that holds h layers does no more of the usual work than all micro-batches have in h layers. Of a period the
    all-reduces and steps of h layers are not F, I or W; in the rest it does a sum of layers' work, which is a multiple
    of the greatest common divisor of these.
    """
    unit, total = math.gcd(*problem.costs.work), problem.grid.total_microbatches
    if not unit:
        return 0
    most = [total * work for work in accumulate(sorted(problem.costs.work, reverse=True))]
    closings = list(accumulate(sorted(problem.costs.closing)))
    kinds = Counter(map(problem.slowness, problem.live))

    def enough(limit: int) -> bool:
        return sum(count * max(min(work, max(0, limit - closing) * 1000 // (slow * unit) * unit)
                               for work, closing in zip(most, closings, strict=True))
                   for slow, count in kinds.items()) >= most[-1]

    return bisect_left(range(4 * problem.ample_ticks), True, key=enough)


def placement_bound(problem: Problem, *, input_free: bool) -> Bound:
    """A bound for all placements of whole pipelines: work, and how long memory is taken.

    `input_free`: the first stage leaves all of its backward to W, whichever layers it has.
    """
    found = Bound(max(work_bound(problem), any_layers_bound(problem)), Scope.PLACEMENT,
                  "the work of all layers, shared by a pipeline's workers")
    held = Bound(held_bound(problem, input_free=input_free), Scope.PLACEMENT,
                 "how long the activations of all layers are held, in the memory of all workers")
    return found | held


def held_bound(problem: Problem, *, input_free: bool) -> int:
    """What memory allows at least, wherever virtual stages are.

    From the start of its F of a micro-batch until the end of its I, a layer's activation is on some worker, and in
    between are the F and the I of all layers behind it. After that its stash is there while its W runs. All that lies
    in the windows of workers, which a period T, less the reductions and the step of a layer at least, C, allows:

        (T - C) x room of all workers >= micro-batches x sum over layers of (activation x (F and I from it on)
                                                                             + stash x W).

    A pipeline holds the weights of each layer at least once. Where the first stage has no I, that of its layers does
    not count, however many they are: the least of all numbers holds, for which a worker has the work of some of them.
    """
    costs, grid = problem.costs, problem.grid
    if problem.memory is None or not any(costs.activation):
        return 0
    room = sum(one.room for one in problem.workers.values()) - grid.pipelines * sum(costs.weights)
    if room <= 0:
        return 0
    fused = problem.backward == "fused"
    back = costs.backward_input if not fused else tuple(map(sum, zip(
        costs.backward_input, costs.backward_weight, strict=True)))
    behind = _sums_behind(costs.forward)
    stashed = 0 if fused else sum(stash * weight for stash, weight in zip(
        costs.weight_stash, costs.backward_weight, strict=True))
    total, slow = grid.total_microbatches, min(1000, problem.least_slowness)
    least = None
    work = list(accumulate(costs.work, initial=0))
    for first in range(1, grid.layer_count + 1) if input_free and not fused else (0,):
        # Each of the first stage's layers has a worker of every pipeline; with two directions, two share them.
        alone = work[first] * min(grid.microbatches) * slow // 2000
        after = _sums_behind(tuple(0 if layer < first else ticks for layer, ticks in enumerate(back)))
        held = sum(activation * (behind[layer] + after[layer]) for layer, activation in enumerate(costs.activation))
        ticks = max(alone, -(-total * (held + stashed) * slow // (1000 * room)))
        least = ticks if least is None else min(least, ticks)
    return min(costs.closing) + (least or 0)


def _sums_behind(values: Sequence[int]) -> list[int]:
    """[layer] the sum of its value and of those of all layers behind it."""
    return list(accumulate(reversed(values)))[::-1]


def fixed_bound(problem: Problem) -> int:
    """A bound for the present holdings.

    The work of consecutive parts (`parts_of`) is done by those who hold any of them. Of a period they are not available
    for the all-reduces and optimizer steps of all they hold, and for what they idle by lack of memory (`fill_ticks`).
    Without slices, nobody runs a part of a micro-batch: see `whole_bound`.
    """
    parts = list(parts_of(problem))
    idle_of_kind = {kind: problem.closing(worker) + fill_ticks(problem, worker)
                    for kind, worker in {problem.workers[worker]: worker for worker in problem.live}.items()}
    idle = {worker: idle_of_kind[problem.workers[worker]] for worker in problem.live}
    best = 0
    for first in range(len(parts)):
        holders: set[Worker] = set()
        work = 0
        for part in parts[first:]:
            holders.update(part.holders)
            work += sum(problem.costs.work[layer] for layer in range(*part.layers)) * problem.grid.total_microbatches
            best = max(best, _least(problem, holders, work, idle))
    return best if problem.question.sliced else max(best, whole_bound(problem))


def whole_bound(problem: Problem) -> int:
    """A bound where a micro-batch is not cut within a part: each holder runs a whole number of them.

    A holder of a part, of which C ticks are its closing ones and t those for a micro-batch, runs at most
    floor((T - C) / t) in a period T.
    """
    best = 0
    for part in parts_of(problem):
        work = sum(problem.costs.work[layer] for layer in range(*part.layers))
        kinds = Counter((problem.closing(worker), problem.slowness(worker)) for worker in part.holders)

        def enough(limit: int, work: int = work, kinds: Counter[tuple[int, int]] = kinds) -> bool:
            return not work or sum(count * (max(0, limit - closing) * 1000 // (work * slow))
                                   for (closing, slow), count in kinds.items()) >= problem.grid.total_microbatches

        best = max(best, bisect_left(range(4 * problem.ample_ticks), True, key=enough))
    return best


def fill_ticks(problem: Problem, worker: Worker) -> int:
    """Ticks of every period that a worker idles at least, before its first I: proven for its present holdings.

    Let its first F start at t, and its first I at u; that is of a slice [a, b) of some micro-batch. After the F of
    [a, b), F of all layers from b on and I of the same come before that I, at best on workers of no less than the usual
    time and with one transfer each way if b < L. The worker holds b - 1 but perhaps not b; whatever b is, at least the
    F of one layer that it holds, and F and I of all layers behind the last one that it holds, lie between t and u. In
    that time the worker runs F only, as W follows I, and each of these still holds its activation at u. So they take no
    longer than its room for activations allows, at the most ticks of F for the memory. The rest of u - t it idles.
    """
    held = problem.layers_held(worker)
    if not held or held[-1] + 1 == problem.grid.layer_count:
        return 0
    end, slow, sums = held[-1] + 1, problem.slowness(worker), problem.costs.sums
    behind = sums.forward[-1] - sums.forward[end] + sums.backward_input[-1] - sums.backward_input[end]
    fastest = min(1000, problem.least_slowness)
    trip = min(problem.costs.forward[layer] for layer in held) * slow // 1000 + behind * fastest // 1000
    trip += 2 * problem.times.transfer
    if not problem.costs.activation or not all(problem.costs.activation[layer] for layer in held):
        return 0
    room = problem.workers[worker].room - sum(problem.costs.weights[layer] for layer in held)
    rate = max(Fraction(problem.costs.forward[layer] * slow, 1000 * problem.costs.activation[layer]) for layer in held)
    rounding = len(held) * problem.grid.total_microbatches if slow != 1000 else 0  # each F is rounded up to a tick
    return max(0, trip - int(room * rate) - rounding - 1)


def _least(problem: Problem, workers: Iterable[Worker], work: int, unavailable: Mapping[Worker, int]) -> int:
    """The least T with which these workers can do the work: sum of (T - unavailable) / slowness >= work."""
    kinds = Counter((problem.slowness(worker), unavailable[worker]) for worker in workers)

    def enough(limit: int) -> bool:
        return sum(Fraction(max(0, limit - lost) * 1000 * count, slow) for (slow, lost), count in kinds.items()) >= work

    return bisect_left(range(problem.ample_ticks * 4), True, key=enough)
