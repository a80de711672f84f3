"""A proven lower bound on the period of a given layout: no order in time of its routes undercuts it.

In a period of P ticks, for every worker w, with times on one clock:

    first[w]   start of its first op              gradient[w]   start of its first I
    last[w]    end of its last op, and of the reductions that it takes part in

- `first[w]` is that of some F, which waits for the F of the slices before it on its route; `gradient[w]` that of some
  I, which waits for the F and the I of all slices behind it.
- Before its first I, a worker runs nothing but F, of as many micro-batches as it has and has room for. So

      last[w] >= first[w] + its work;   last[w] >= gradient[w] + its work - F for which there is room.

- A reduction waits for all ops of its layers on all workers that hold them, and `last` of each of these for it.
- Of micro-batches that pass the same workers, the last I of each worker comes after all their F and I there, but for
  the F before the first I; it is followed by an I on the worker before, and there by a W.
- The window is no longer than the period: first[w] >= last[w] + optimizer step - P.
- Lines of whole micro-batches fill with whole forwards (`whole_lines`).

Each says that some time is at least a sum, or the least of some sums, of others, so that from one that is set to 0 the
least values of all others follow. Where they put it off beyond 0, no schedule has a period of P.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from slipstream.planner.model.bounds import Fill, can_fill
from slipstream.planner.model.layout import MicroBatch
from slipstream.planner.model.problem import Problem, Unit, Visit
from slipstream.schedules.schedule import Worker

Place = tuple[int, Worker]
"""A worker of a piece."""
PASSES = 60
"""Times that all rules are applied; fewer give a weaker bound, but no wrong one."""


class _Stop(NamedTuple):
    """A slice of a route: its worker, ticks of its ops, and of the transfer to the next one."""

    place: Place
    forward: int
    gradient: int
    weight: int
    hop: int


class _Class(NamedTuple):
    """On one worker, the micro-batches that pass the same workers."""

    before: Place | None
    """The worker before this one on their routes."""
    hop: int
    forward: int
    """Ticks of all their F here;"""
    gradient: int
    """of all I;"""
    least_gradient: int
    """of one I, of those that take least;"""
    least_weight: int
    """of one W."""


def _by_worker(route: Sequence[_Stop]) -> tuple[_Stop, ...]:
    """Consecutive slices of one worker as one: its first F and its first I are as early."""
    found: list[_Stop] = []
    for stop in route:
        if found and found[-1].place == stop.place:
            same = found[-1]
            found[-1] = stop._replace(forward=same.forward + stop.forward, gradient=same.gradient + stop.gradient,
                                      weight=same.weight + stop.weight)
        else:
            found.append(stop)
    return tuple(found)


def can_bound(problem: Problem) -> bool:
    """Whether a problem has such a bound."""
    return problem.assigned and problem.optimizer == "staggered" and not any(problem.times.all_reduce)


def most_forward(forwards: Sequence[tuple[int, int]], room: int) -> int:
    """The most ticks of F, given as (ticks, activation), whose activations there is room for at once."""
    held = [(ticks, activation) for ticks, activation in forwards if activation]
    rate = max((Fraction(ticks, activation) for ticks, activation in held), default=Fraction(0))
    return sum(ticks for ticks, activation in forwards if not activation) \
        + min(sum(ticks for ticks, _ in held), math.floor(room * rate))


class LayoutBound:
    """The bound of the pieces of a problem with a layout, staggered, with reductions that take no time."""

    def __init__(self, pieces: Sequence[Problem], hosts: Sequence[Mapping[Unit, Worker]] = ()) -> None:
        """`pieces`: one of each kind, as `planner.model.decompose` makes them. `hosts`: of each, who runs what; else it
        is as the layout has it.
        """
        self._problem = pieces[0]
        self._routes: list[tuple[_Stop, ...]] = []
        self._work: dict[Place, int] = defaultdict(int)
        self._room: dict[Place, int] = {}
        """Ticks of F before the first I."""
        self._classes: dict[tuple[Place, tuple[Place, ...]], _Class] = {}
        self._lines: list[WholeLine] = []
        self._awaited: dict[tuple[int, Place], tuple[int, int]] = {}
        """[reduction, worker] ticks of F, I and W of its layers, and of their F."""
        for number, piece in enumerate(pieces):
            self._read(number, piece, hosts[number] if hosts else None)
        self._sharers = [[place for place in self._work if self._group(pieces, place) in groups]
                         for _, groups in self._problem.reductions]
        self._step = {place: pieces[place[0]].step(place[1]) for place in self._work}
        self._starts = {route[0].place for route in self._routes}

    def period(self, low: int, high: int, over: Callable[[], bool] = lambda: False) -> int:
        """The least period from `low` to `high` that is not excluded, to a thousandth.

        Less where the time for it is `over` before.
        """
        while high - low > max(1, low // 1000) and not over():
            middle = (low + high) // 2
            if self.excludes(middle):
                low = middle + 1
            else:
                high = middle
        return low

    def excludes(self, period: int) -> bool:
        """Whether no schedule of the layout has a period of so many ticks."""
        if any(work + self._step[place] > period for place, work in self._work.items()):
            return True
        if any(line.excludes(period) for line in self._lines):
            return True
        return any(self._put_off(start, period) for start in sorted(self._starts))

    def _put_off(self, anchor: Place, period: int) -> bool:
        """Whether the first op of this worker, set to 0, comes out later."""
        first: dict[Place, float] = defaultdict(lambda: -math.inf, {anchor: 0})  # all that is finite is whole
        gradient: dict[Place, float] = defaultdict(lambda: -math.inf)
        last: dict[Place, float] = defaultdict(lambda: -math.inf)
        end: dict[tuple[Place, tuple[Place, ...]], float] = defaultdict(lambda: -math.inf)
        for _ in range(PASSES):
            before = dict(first), dict(last)
            self._along_routes(first, gradient)
            self._end(first, gradient, last, end)
            for place, ticks in last.items():
                first[place] = max(first[place], ticks + self._step[place] - period)
            if first[anchor] > 0:
                return True
            if before == (first, last):
                return False
        return False

    def _along_routes(self, first: dict[Place, float], gradient: dict[Place, float]) -> None:
        """The first F and the first I of each worker, from those before and behind them."""
        earliest: dict[Place, float] = {}
        earliest_gradient: dict[Place, float] = {}
        for route in self._routes:
            clock, starts = -math.inf, []
            for stop in route:
                clock = max(clock, first[stop.place])
                starts.append(clock)
                earliest[stop.place] = min(earliest.get(stop.place, math.inf), clock)
                clock += stop.forward + stop.hop
            for stop, start in zip(reversed(route), reversed(starts), strict=True):
                behind = -math.inf if stop is route[-1] else clock + stop.hop
                clock = max(behind, start + stop.forward, gradient[stop.place])
                earliest_gradient[stop.place] = min(earliest_gradient.get(stop.place, math.inf), clock)
                clock += stop.gradient
        for place, ticks in earliest.items():
            first[place] = max(first[place], ticks)
            gradient[place] = max(gradient[place], earliest_gradient[place])

    def _end(self, first: dict[Place, float], gradient: dict[Place, float], last: dict[Place, float],
             end: dict[tuple[Place, tuple[Place, ...]], float]) -> None:
        """The last op of each worker, and the reductions it waits for."""
        for place, work in self._work.items():
            last[place] = max(last[place], first[place] + work, gradient[place] + work - self._room[place])
        for (place, route), of in self._classes.items():
            key = place, route
            both = of.forward + of.gradient
            end[key] = max(end[key], first[place] + both, gradient[place] + both - min(self._room[place], of.forward))
            last[place] = max(last[place], end[key] + of.least_weight)
            if of.before is not None:
                other = of.before, route
                end[other] = max(end[other], end[key] + of.hop + self._classes[other].least_gradient)
        for number, sharers in enumerate(self._sharers):
            begin = -math.inf
            for place in sharers:
                work, forward = self._awaited.get((number, place), (0, 0))
                if work:
                    begin = max(begin, first[place] + work,
                                gradient[place] + work - min(self._room[place], forward))
            for place in sharers:
                last[place] = max(last[place], begin)

    def _read(self, number: int, piece: Problem, hosts: Mapping[Unit, Worker] | None) -> None:
        """The routes of a piece, equal ones once, and what its workers run."""
        kept: dict[Place, list[tuple[int, int]]] = defaultdict(list)
        seen: set[tuple[Visit, ...]] = set()
        routes = {batch: planned if hosts is None else tuple(
            Visit(one.slice, hosts[Unit(one.slice, *batch)]) for one in planned)
            for batch, planned in piece.routes.items()}
        self._lines += whole_lines(piece, routes)
        for visits in routes.values():
            route = tuple(self._stops(number, piece, visits))
            for stop, visit in zip(route, visits, strict=True):
                self._work[stop.place] += stop.forward + stop.gradient + stop.weight
                kept[stop.place].append((stop.forward, piece.activation(visit.slice)))
                self._await(piece, stop, visit)
            self._classify(route)
            if visits not in seen:
                seen.add(visits)
                self._routes.append(_by_worker(route))
        for place, forwards in kept.items():
            self._room[place] = most_forward(forwards, piece.room(place[1]))

    @staticmethod
    def _stops(number: int, piece: Problem, visits: Sequence[Visit]) -> Iterator[_Stop]:
        for visit, after in zip(visits, [*visits[1:], visits[-1]], strict=True):
            forward, gradient, *weight = (piece.cost(kind, visit.slice, visit.worker) for kind in piece.kinds)
            yield _Stop((number, visit.worker), forward, gradient, sum(weight), piece.hop(visit.worker, after.worker))

    def _classify(self, route: Sequence[_Stop]) -> None:
        """Add a micro-batch to those that pass the same workers. Slices of one worker in turn count as one."""
        merged: list[_Stop] = []
        for stop in route:
            if merged and merged[-1].place == stop.place:
                same = merged[-1]
                # The last I and the last W are those of the first of its slices.
                merged[-1] = same._replace(forward=same.forward + stop.forward, hop=stop.hop)
            else:
                merged.append(stop)
        gradients: dict[Place, int] = defaultdict(int)
        for stop in route:
            gradients[stop.place] += stop.gradient
        places = tuple(stop.place for stop in merged)
        if len(set(places)) < len(places):  # it comes back to a worker: not counted
            return
        for index, stop in enumerate(merged):
            known = self._classes.get((stop.place, places))
            before = merged[index - 1] if index else None
            self._classes[stop.place, places] = _Class(
                before.place if before else None, before.hop if before else 0,
                stop.forward + (known.forward if known else 0),
                gradients[stop.place] + (known.gradient if known else 0),
                min(stop.gradient, known.least_gradient) if known else stop.gradient,
                min(stop.weight, known.least_weight) if known else stop.weight)

    def _await(self, piece: Problem, stop: _Stop, visit: Visit) -> None:
        low, high = piece.layers_of[visit.slice]
        for number, ((first, end), _) in enumerate(piece.reductions):
            if first < high and low < end:
                work, forward = self._awaited.get((number, stop.place), (0, 0))
                self._awaited[number, stop.place] = (work + stop.forward + stop.gradient + stop.weight,
                                                     forward + stop.forward)

    @staticmethod
    def _group(pieces: Sequence[Problem], place: Place) -> int:
        return pieces[place[0]].group(place[1])


# --- Lines: workers that run the same whole micro-batches and nothing else, and how long they take to fill ------------
# What a worker runs before its first I are whole forwards (`planner.model.bounds.whole_fill`). Where micro-batches that
# are cut come to a line, it has shorter ones, and is not counted here.


Route = tuple[Visit, ...]


class WholeLine(NamedTuple):
    """Workers, from the first on."""

    fills: tuple[Fill, ...]
    busy: tuple[int, ...]
    """Ticks of their ops and of their optimizer steps."""

    def excludes(self, period: int) -> bool:
        """Whether no order has so short a period, of no less than they are busy, with a staggered optimizer."""
        return not can_fill(self.fills, [period - ticks for ticks in self.busy])


def whole_lines(piece: Problem, routes: Mapping[MicroBatch, Route]) -> list[WholeLine]:
    """The lines of a piece, different ones once."""
    counts = Counter(routes.values())
    passing: Counter[Worker] = Counter()
    for route, count in counts.items():
        for visit in route:
            passing[visit.worker] += count
    return list({_line(piece, route, count) for route, count in counts.items()
                 if all(passing[visit.worker] == count for visit in route)})


def _line(piece: Problem, route: Route, count: int) -> WholeLine:
    fills, busy = [], []
    for visit, after in zip(route, [*route[1:], None], strict=True):
        forward, gradient, *weight = (piece.cost(kind, visit.slice, visit.worker) for kind in piece.kinds)
        activation = piece.activation(visit.slice)
        most = min(count, piece.room(visit.worker) // activation) if activation else count
        back = 0 if after is None else piece.cost(piece.gradient_kind, after.slice, after.worker) \
            + 2 * piece.hop(visit.worker, after.worker)
        fills.append(Fill(forward, most, back))
        step = piece.step(visit.worker)
        busy.append(count * (forward + gradient + sum(weight)) + step)
    return WholeLine(tuple(fills), tuple(busy))
