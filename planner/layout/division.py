"""How many micro-batches each line runs, and how those that fit on no line whole are spread over several.

Every line takes as many whole micro-batches as its longest load allows. The cells of the rest are in one row,
micro-batch after micro-batch, layers ascending. Each line that is cut anew takes one segment of it; the workers of the
lines that keep their stages take what is left, stage by stage (the wrap-around rule of McNaughton 1959). As every
worker takes consecutive cells, in one order of workers, no two routes pass two workers in opposite order.

Not so `anywhere`: there a line that is cut anew first takes what the workers of each stage have no time for, so that
loads are more even by up to a layer; with little memory, such a layout may have no order.

`separate`, each of the rest has a few lines of its own that keep their stages, and the lines that are cut anew take
none. So the lines fall into small sets that share no micro-batch, most of them alike, whose orders are soon found.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import NamedTuple

from slipstream.planner.layout.lines import Chunk, Line, chunk_ticks, cut, fill_idle, least_limit
from slipstream.planner.model.problem import Problem
from slipstream.planner.model.work_bounds import ticks_of_work, work_bound
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker

LEAST_SHARE = Fraction(1, 4)
"""Of a stage, which a worker takes of a micro-batch that is spread separately: shorter slices wait longer than they
take."""
TOLERANCE = 0.01
"""By how much of the period loads may be longer than with fewer and larger sets of lines, each `separate`."""
Cell = tuple[int, int]
"""A layer of one of the micro-batches that run on no line whole: (item, layer)."""


class Piece(NamedTuple):
    """Layers [first, end) of one of the micro-batches that run on no line whole; on a line, or on one worker of it."""

    item: int
    first: int
    end: int
    line: int
    worker: Worker | None


class Division(NamedTuple):
    """The work of an iteration, divided."""

    whole: tuple[int, ...]
    """Whole micro-batches of each line."""
    chunks: tuple[tuple[Chunk, ...], ...]
    """Of each line that is cut anew, one for each worker; () for others."""
    pieces: tuple[Piece, ...]
    items: int
    """Micro-batches that run on no line whole."""


class Divider:
    """Divides the work of a problem over given lines, for a given longest load."""

    def __init__(self, problem: Problem, lines: Sequence[Line], *, floating: bool = True,
                 spread: bool = True, staggered: bool = False, anywhere: bool = False, separate: bool = False) -> None:
        """`floating`: two neighbours of a line may hold one layer; `spread`: a micro-batch may visit several lines;
        `anywhere`: and come back to one; `separate`: few of its own."""
        self._problem, self._lines = problem, tuple(lines)
        self._spread, self._anywhere, self._separate = spread, anywhere, separate
        self._cut = partial(cut, floating=floating, staggered=staggered)
        self._kinds = [self._kind(line) for line in lines]
        self._known: dict[tuple[object, int], int] = {}

    def least(self, within: float = 0.0) -> tuple[int, Division] | None:
        """The least longest load, and a division that has it, to this relative precision; None if nothing fits."""
        low = work_bound(self._problem) - 1
        high, best = low + low // 16 + 1, None
        while (best := self._divided(high)) is None:
            if high > self._problem.ample_ticks * 4:
                return None
            low, high = high, high + 2 * (high - low)
        limit, found = least_limit(self._divided, low, high, best, within)
        return limit, self._with_chunks(found, limit)

    def _divided(self, limit: int) -> Division | None:
        """A division in which nobody's load is more than `limit` ticks, without its chunks; None if there is none."""
        left = self._problem.grid.total_microbatches
        whole = []
        for index in range(len(self._lines)):
            most = min(left, self._most(index, limit))
            whole.append(most)
            left -= most
        if left and not self._spread:
            return None
        return self.complete(whole, (), [] if self._separate else self._segments(whole, left, limit), limit)

    def _with_chunks(self, division: Division, limit: int) -> Division:
        """The same with a chunk for each worker of the lines that are cut anew."""
        counts = self._counts(division.whole, [piece for piece in division.pieces if piece.worker is None])
        return division._replace(chunks=tuple(
            tuple(self._balanced(line, of, limit)) if line.cut else ()
            for line, of in zip(self._lines, counts, strict=True)))

    def complete(self, whole: Sequence[int], chunks: Sequence[Sequence[Chunk]], segments: Sequence[Piece],
                 limit: int) -> Division | None:
        """The division with these whole micro-batches, chunks and segments of lines that are cut anew.

        The workers that keep their stages take the rest; None if it does not fit.
        """
        items = self._problem.grid.total_microbatches - sum(whole)
        taken = {(piece.item, layer) for piece in segments for layer in range(piece.first, piece.end)}
        pieces = self._over_sets(whole, items, limit) if self._separate else \
            self._over_workers(whole, items, taken, limit)
        if pieces is None:
            return None
        return Division(tuple(whole), tuple(map(tuple, chunks)), (*segments, *pieces), items)

    def most_whole(self, index: int, limit: int) -> int:
        """The most whole micro-batches of a line within the limit."""
        return self._most(index, limit)

    def _kind(self, line: Line) -> tuple[object, ...]:
        problem = self._problem
        return (line.cut, *((worker.column, problem.slowness(worker), problem.workers[worker].room)
                            for worker in line.workers))

    def _most(self, index: int, limit: int) -> int:
        """The most whole micro-batches of a line within the limit."""
        key = self._kinds[index], limit
        if key not in self._known:
            line, low, step = self._lines[index], 0, 0
            high = self._at_most(line, limit)
            while low < high:
                middle = max((low + high + 1) // 2, high - step)  # most often it is little less than all time takes
                if self._fits(line, [middle] * self._problem.grid.layer_count, limit):
                    low = middle
                else:
                    high, step = middle - 1, 2 * step + 1
            self._known[key] = low
        return self._known[key]

    def _at_most(self, line: Line, limit: int) -> int:
        """Micro-batches that take all the time of all workers."""
        rate = sum(1000 / self._problem.slowness(worker) for worker in line.workers)
        work = sum(self._problem.costs.work)
        return min(self._problem.grid.total_microbatches, int(limit * rate / work) + 1 if work else 1 << 30)

    def _fits(self, line: Line, counts: Sequence[int], limit: int) -> bool:
        if line.cut:
            return self._cut(self._problem, line.workers, counts, limit) is not None
        return all(self._kept_ticks(line, position, counts[0]) <= limit for position in range(len(line.workers)))

    def _kept_ticks(self, line: Line, position: int, count: int) -> int:
        """The load of a worker that keeps its layers, and its least idle time."""
        problem, worker = self._problem, line.workers[position]
        held = problem.layers_held(worker)
        idle = 0 if len(problem.workers[worker].holds) > 1 else fill_idle(
            problem, worker, len(line.workers) - 1 - position)(*problem.workers[worker].holds[0], count)
        return chunk_ticks(problem, worker, dict.fromkeys(held, count)) + idle

    def _segments(self, whole: Sequence[int], items: int, limit: int) -> list[Piece]:
        """What each line that is cut anew takes of the rest."""
        count = self._problem.grid.layer_count
        cells = ((item, layer) for item in range(items) for layer in range(count))
        if self._anywhere:
            free = self._free(whole, limit)
            short = {cell for stage in self._problem.paths[0] for cell in self._short(items, *stage, free)}
            left = sorted(cells, key=lambda cell: cell not in short)
        else:
            left = list(islice(cells, (count - 1) * len(self._lines)))
        pieces: list[Piece] = []
        for index, line in enumerate(self._lines):
            if not line.cut:
                continue
            low, high = 0, min(count - 1, len(left))
            while low < high:
                middle = (low + high + 1) // 2
                if self._fits(line, _profile(count, whole[index], left[:middle]), limit):
                    low = middle
                else:
                    high = middle - 1
            pieces += _pieces(sorted(left[:low]), index, None)
            left = left[low:]
        return pieces

    def _free(self, whole: Sequence[int], limit: int) -> dict[Worker, int]:
        """Ticks that the workers of lines that are not cut have beside their whole micro-batches."""
        return {worker: limit - self._kept_ticks(line, position, whole[index])
                for index, line in enumerate(self._lines) if not line.cut
                for position, worker in enumerate(line.workers)}

    def _short(self, items: int, layers: LayerRange, column: int, free: dict[Worker, int]) -> list[Cell]:
        """The first so many cells of a stage as its workers have no time for."""
        cells = [(item, layer) for item in range(items) for layer in range(*layers)]
        longest = max(self._problem.costs.work[layer] for layer in range(*layers))
        room = sum(max(0, ticks) * 1000 // max(1, longest * self._problem.slowness(worker))
                   for worker, ticks in free.items() if worker.column == column)
        return cells[:max(0, len(cells) - room)]

    def _over_workers(self, whole: Sequence[int], items: int, taken: set[Cell], limit: int) -> list[Piece] | None:
        """What is not taken of the items, over the workers that keep their stages; None if it does not fit."""
        problem = self._problem
        pieces: list[Piece] = []
        free = self._free(whole, limit) if items else {}
        for (first, end), column in problem.paths[0]:
            cells = [(item, layer) for item in range(items) for layer in range(first, end)
                     if (item, layer) not in taken]
            placed = 0
            for index, line in enumerate(self._lines):
                for worker in line.workers:
                    if line.cut or worker.column != column or placed == len(cells):
                        continue
                    run = placed
                    while run < len(cells):
                        layer = cells[run][1]
                        ticks = problem.slice_ticks((layer, layer + 1), worker)
                        if ticks > free[worker]:
                            break
                        free[worker] -= ticks
                        run += 1
                    pieces += _pieces(cells[placed:run], index, worker)
                    placed = run
            if placed < len(cells):
                return None
        return pieces

    def _over_sets(self, whole: Sequence[int], items: int, limit: int) -> list[Piece] | None:
        """The items over sets of lines that keep their stages, in each the same number; None if they do not fit.

        The workers of a stage in a set take even shares of it.
        """
        free, pieces = self._free(whole, limit) if items else {}, []
        for batches, lines in self._sets(items):
            for layers, column in self._problem.paths[0]:
                workers = [(index, worker) for index in lines for worker in self._lines[index].workers
                           if worker.column == column]
                for (index, worker), cells in zip(workers, self._shares(batches, layers, len(workers)), strict=True):
                    parts = _pieces(cells, index, worker)
                    free[worker] -= sum(self._problem.slice_ticks((part.first, part.end), worker) for part in parts)
                    if free[worker] < 0:
                        return None
                    pieces += parts
        return pieces if pieces or not items else None

    def _sets(self, items: int) -> Iterator[tuple[range, list[int]]]:
        """(items, lines) of each set: as many sets as can be with hardly longer loads, of as few lines each."""
        kept = [index for index, line in enumerate(self._lines) if not line.cut]
        counts = [count for count in range(1, min(items, len(kept)) + 1) if items % count == 0]
        if not counts:
            return
        most = {count: self._most_of_stage(items // count, len(kept) // count) for count in counts}
        enough = min(most.values()) + Fraction(TOLERANCE) * max(self._problem.grid.microbatches)
        count = max(count for count in counts if most[count] <= enough)
        each = items // count
        size = next(size for size in itertools.count(1) if self._most_of_stage(each, size) <= most[count])
        for number in range(count):
            yield range(number * each, (number + 1) * each), kept[number * size:(number + 1) * size]

    def _most_of_stage(self, items: int, lines: int) -> Fraction:
        """The most that a worker runs where so many lines share so many micro-batches: a share of a stage in layers."""
        counts = [end - first for (first, end), _ in self._problem.paths[0]]
        return max(LEAST_SHARE, *(Fraction(-(-items * count // lines), count) for count in counts))

    def _shares(self, items: range, layers: LayerRange, count: int) -> list[list[Cell]]:
        """The cells of a stage in so many consecutive parts, of even work."""
        work = self._problem.costs.work
        total, before = sum(work[slice(*layers)]) * len(items), 0
        shares: list[list[Cell]] = [[] for _ in range(count)]
        for item in items:
            for layer in range(*layers):
                shares[min(count - 1, (2 * before + work[layer]) * count // max(1, 2 * total))].append((item, layer))
                before += work[layer]
        return shares

    def _counts(self, whole: Sequence[int], segments: Sequence[Piece]) -> list[list[int]]:
        """Cells of each layer on each line, without what is spread over single workers."""
        counts = [[most] * self._problem.grid.layer_count for most in whole]
        for piece in segments:
            for layer in range(piece.first, piece.end):
                counts[piece.line][layer] += 1
        return counts

    def _balanced(self, line: Line, counts: Sequence[int], limit: int) -> list[Chunk]:
        """The cut of a line whose longest load is least; without floating layers, where that is not above the limit."""
        whole_layers = partial(self._cut, floating=False)
        cut_within = self._cut if whole_layers(self._problem, line.workers, counts, limit) is None else whole_layers
        problem, slowness = self._problem, map(self._problem.slowness, line.workers)
        work = sum(ticks * count for ticks, count in zip(problem.costs.work, counts, strict=True))
        attempt = partial(cut_within, problem, line.workers, counts)
        chunks = attempt(limit)
        assert chunks is not None, "a line holds its counts"
        return least_limit(attempt, max(0, math.ceil(ticks_of_work(work, slowness)) - 1), limit, chunks)[1]


def _profile(count: int, whole: int, more: Sequence[Cell]) -> list[int]:
    """Cells of each layer: `whole`, and these."""
    counts = [whole] * count
    for _, layer in more:
        counts[layer] += 1
    return counts


def _pieces(cells: Sequence[Cell], line: int, worker: Worker | None) -> list[Piece]:
    """Cells in order of items and layers as pieces of consecutive layers."""
    pieces: list[Piece] = []
    for item, layer in cells:
        if pieces and pieces[-1].item == item and pieces[-1].end == layer:
            pieces[-1] = pieces[-1]._replace(end=layer + 1)
        else:
            pieces.append(Piece(item, layer, layer + 1, line, worker))
    return pieces
