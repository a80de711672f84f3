"""Layouts to search orders for, the most promising first; in large clusters, group by group.

Among them are the layouts of published systems as special cases, so that the best is never worse than theirs:

- re-cut pipelines, whole micro-batches (Oobleck, SOSP 2023; by speed: Malleus, arXiv 2410.13333);
- one cut for all pipelines (ElasWave, arXiv 2510.00606);
- layers fixed (ReCycle, SOSP 2024, and with live peers that help slow workers).
"""

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from slipstream.planner.budget import Budget
from slipstream.planner.layout.cuts import lines_of, one_cut
from slipstream.planner.layout.division import Divider
from slipstream.planner.layout.fixed import fixed_layout
from slipstream.planner.layout.groups import UNDIVIDED, by_groups, groups_of
from slipstream.planner.layout.routes import layout_of
from slipstream.planner.model.layout import Layout, Route, Stop
from slipstream.planner.model.problem import Problem
from slipstream.schedules.layers import layers_in

LARGEST_SHARED = 100_000
"""Micro-batches times stages up to which layouts are made that are not divided into groups."""
PARTS, HALVES, LARGEST_FINE = 4, 2, 40_000
"""Into how many parts a stage is cut for short slices, at first fewer, and micro-batches times parts of stages up to
which it is."""
SEPARATE, FINEST, LARGEST_FINEST = 3, 6, 10_000
"""The same for micro-batches that are `separate`: thirds are the best most often; what is small in sixths, too."""
LARGEST_WHOLE = 5_000
"""The same, up to which layouts that divide over several pipelines are made of the whole beside those of groups."""


def candidates(problem: Problem, budget: Budget | None = None, *, seconds: float = 2.0,
               largest_fine: float = LARGEST_FINE) -> Iterator[Layout]:
    """Different layouts, the most promising first; each is made when it is asked for.

    `seconds`: by the clock of the budget, for the exact assignment (`planner.layout.cpsat`) of each different group.
    `largest_fine`: micro-batches times parts of stages up to which there are short slices, at most `LARGEST_FINE`.
    Raises LookupError when there is none: nobody holds some layer and none may be loaded from a checkpoint, or there is
    no room for all layers.
    """
    _require_layers(problem)
    fine = min(largest_fine, LARGEST_FINE)
    assigned = partial(_assigned, budget=budget or Budget.of_steps(0), seconds=seconds)
    made = _moved(problem, assigned, fine) if problem.question.layers == "move" else _fixed(problem)
    seen = set()
    failure: LookupError | None = None
    for make in made:
        try:
            layout = make()
        except LookupError as error:
            failure = failure or error
            continue
        key = layout and tuple(layout.routes.items())
        if layout is not None and key not in seen:
            seen.add(key)
            yield layout
    if not seen and failure is not None:
        raise failure


def _fixed(problem: Problem) -> Iterator[Callable[[], Layout | None]]:
    if problem.question.sliced:
        yield partial(fixed_layout, problem)
        yield partial(fixed_layout, problem, within=0.01)
    yield partial(fixed_layout, problem, sliced=False)


def _moved(problem: Problem, assigned: Callable[[Problem], Layout | None],
           largest_fine: float) -> Iterator[Callable[[], Layout | None]]:
    if len(problem.paths) > 1:
        yield from _fixed(problem)
        return
    size = problem.grid.total_microbatches * len(problem.paths[0])
    grouped = _Grouped(problem)

    def recut(**how: Any) -> Callable[[], Layout | None]:
        return partial(grouped, partial(_recut, **how))

    def fits(parts: int, most: float = LARGEST_FINE) -> bool:
        return problem.question.sliced and size * parts <= min(largest_fine, most)

    yield recut(parts=1)
    yield recut(spread=False, parts=1)
    if fits(SEPARATE):
        yield recut(separate=True, parts=SEPARATE)
    if fits(HALVES):
        yield recut(separate=True, parts=HALVES)
        yield recut(spread=False, parts=HALVES)
    yield recut(staggered=True)
    yield recut(spread=False, staggered=True)
    if fits(PARTS):
        yield recut(separate=True, parts=PARTS)
    if fits(FINEST, LARGEST_FINEST):
        yield recut(separate=True, parts=FINEST)
    yield recut(spread=False, floating=False)
    if size <= LARGEST_SHARED:
        yield partial(one_cut, problem)
        yield partial(fixed_layout, problem, sliced=problem.question.sliced)
    if fits(PARTS):  # they take longest to list, so others come first
        yield recut(staggered=True, parts=PARTS)
        yield recut(anywhere=True, parts=PARTS)
        yield recut(spread=False, parts=PARTS)
    yield partial(grouped, assigned)
    if len(problem.grid.microbatches) > UNDIVIDED and size <= LARGEST_WHOLE:
        yield partial(_recut, problem, staggered=True)


class _Grouped:
    """Makes layouts of a problem group by group; the groups are found once."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._groups: tuple[tuple[int, ...], ...] = ()

    def __call__(self, make: Callable[[Problem], Layout | None]) -> Layout | None:
        self._groups = self._groups or tuple(groups_of(self._problem))
        return by_groups(self._problem, self._groups, make)


def _require_layers(problem: Problem) -> None:
    """Raise LookupError where a layer would have to come from nowhere."""
    held = layers_in(itertools.chain.from_iterable(one.holds for one in problem.workers.values()))
    missing = sorted(set(range(problem.grid.layer_count)) - held)
    if missing and not (problem.question.layers == "move" and problem.question.from_checkpoint):
        raise LookupError(f"no live worker holds layer {missing[0]}")


def _assigned(problem: Problem, *, budget: Budget, seconds: float) -> Layout | None:
    """The exact assignment: no longer than the others' longest load, and fewer bytes moved."""
    from slipstream.planner.layout.cpsat import improved  # the solver takes a third of a second to load

    lines = lines_of(problem)
    known = Divider(problem, lines).least()
    division = known and improved(problem, lines, known, budget.within(seconds))
    return division and layout_of(problem, lines, division, "exact assignment, floating layers, the rest spread")


def _recut(problem: Problem, *, floating: bool = True, spread: bool = True, staggered: bool = False,
           anywhere: bool = False, separate: bool = False, parts: int = 0) -> Layout | None:
    """The layout with the least longest load on lines; `parts`: of `finer_slices`."""
    lines = lines_of(problem)
    found = Divider(problem, lines, floating=floating, spread=spread, staggered=staggered, anywhere=anywhere,
                    separate=separate).least()
    if found is None:
        return None
    where = " anywhere" if anywhere else " separately" if separate else ""
    kind = ", ".join(["re-cut pipelines", "floating layers" if floating else "one cut each",
                      f"the rest spread{where}" if spread else "whole micro-batches"])
    layout = layout_of(problem, lines, found[1], kind)
    return finer_slices(problem, layout, parts) if parts else layout


def finer_slices(problem: Problem, layout: Layout, parts: int) -> Layout:
    """The same layout with slices that end where the stages of the job end, and so many equal parts of each.

    The workers of a stage reduce gradients together, later stages later. A slice over two stages would have to be done
    by the earlier of the two times; in two slices, the second has until the later one.

    In several parts, what is more urgent waits no longer than a part takes, and a worker that waits has work for less
    time than a whole stage takes. No tensor passes between slices of one worker.
    """
    ends = {first - (first - end) * number // parts for path in problem.paths for (first, end), _ in path
            for number in range(1, parts + 1)}

    def finer(route: Route) -> Route:
        return tuple(Stop((first, end), worker) for (low, high), worker in route
                     for first, end in _split(low, high, ends))

    return msgspec.structs.replace(layout, routes={batch: finer(route) for batch, route in layout.routes.items()},
                                   kind=f"{layout.kind}, {'slices end with stages' if parts == 1 else 'short slices'}")


def _split(low: int, high: int, ends: set[int]) -> Iterator[tuple[int, int]]:
    edges = [low, *sorted(end for end in ends if low < end < high), high]
    yield from itertools.pairwise(edges)
