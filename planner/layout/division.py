"""How the work of an iteration is divided over lines of workers, and the route of each micro-batch that follows.

A line runs layers 0..L-1 of its micro-batches. Its cells are (layer, micro-batch); they are cut in order of layers into
one chunk a worker. Where a cut falls between two cells of one layer, that layer *floats*: both neighbours hold it, and
some micro-batches are cut before it, others after it.

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
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import islice
from typing import NamedTuple, TypeVar

from slipstream.planner.model.bounds import ticks_of_work, work_bound
from slipstream.planner.model.problem import Layout, MicroBatch, Problem, Route, Stop
from slipstream.planner.params import DEFAULTS, LayoutParams
from slipstream.schedules.layers import LayerRange, joined_ranges
from slipstream.schedules.schedule import Worker

T = TypeVar("T")
Chunk = dict[int, int]
"""Cells of one worker: layer -> micro-batches. The layers are consecutive, ascending."""


class Line(NamedTuple):
    """Live workers that run whole micro-batches, in order of layers."""

    workers: tuple[Worker, ...]
    cut: bool
    """Whether its layers are cut anew; else its workers keep the stages they hold."""


def chunk_ticks(problem: Problem, worker: Worker, chunk: Chunk) -> int:
    """A worker's load: its compute ops at its speed, then all-reduce and optimizer of the layers it holds."""
    compute = sum(problem.costs.work[layer] * count for layer, count in chunk.items())
    return -(-compute * problem.slowness(worker) // 1000) + sum(problem.costs.closing[layer] for layer in chunk)


def fill_idle(problem: Problem, worker: Worker, hops: int) -> Callable[[int, int, int], int]:
    """Ticks that a worker idles at least between its first F and its first I, by lack of memory or of micro-batches.

    Of the first layer that it holds, the end of what it holds, and how many micro-batches it runs, each of which has
    `hops` transfers to the line's end. The I of its first one starts after F of what it holds, F and I of all layers
    after these, and the transfers of both ways. Until then the worker runs only F, of as many micro-batches as it has,
    and as it has room for.
    """
    sums = problem.costs.sums
    forward, backward, weights, most = sums.forward, sums.backward_input, sums.weights, sums.most
    slow, room = problem.slowness(worker), problem.workers[worker].room
    trip = forward[-1] + backward[-1] + 2 * hops * problem.times.transfer

    def idle(first: int, end: int, count: int) -> int:
        own, held = forward[end] - forward[first], most[end] - most[first]
        ran = count * own
        if held and count * held > (free := room - weights[end] + weights[first]):
            ran = max(0, free) * own // held
        return max(0, trip - forward[end] - backward[end] + (own - ran) * slow // 1000)

    return idle


def cut(problem: Problem, workers: Sequence[Worker], counts: Sequence[int], limit: int, *,
        floating: bool = True) -> list[Chunk] | None:
    """Chunks of at most `limit` ticks that cover counts[layer] cells of every layer; None if the line is too short.

    A chunk's ticks are its load and what its worker idles at least by lack of memory (`fill_idle`). From the first
    worker on, each takes as many cells as fit. Not `floating`: only whole layers.
    """
    chunks: list[Chunk] = []
    sums, work = problem.costs.sums, problem.costs.work
    layer, left = 0, counts[0]
    for position, worker in enumerate(workers):
        idle = fill_idle(problem, worker, len(workers) - 1 - position)
        slow, room, load, first = problem.slowness(worker), problem.workers[worker].room, 0, layer
        chunk: Chunk = {}
        while layer < len(counts):
            if not left:
                layer += 1
                left = counts[layer] if layer < len(counts) else 0
                first = first if chunk else layer
                continue
            end = layer + 1
            if sums.weights[end] - sums.weights[first] + sums.most[end] - sums.most[first] > room:
                break
            beside = idle(first, end, counts[layer]) + sums.closing[end] - sums.closing[first]
            cell, free = work[layer] * slow, (limit - beside) * 1000 - load
            taken = left if left * cell <= free or not cell else max(0, free // cell)
            if not taken or not (floating or taken == left):
                break
            chunk[layer] = taken
            load += taken * cell
            left -= taken
            if left:
                break
        chunks.append(chunk)
    return chunks if layer == len(counts) else None


def least_limit(attempt: Callable[[int], T | None], low: int, high: int, best: T, within: float = 0.0) -> tuple[int, T]:
    """The least limit from `low` + 1 to `high` for which an attempt gives something, and what it gives.

    `best` is what it gives for `high`. `within`: how far from the least the answer may be, as a share of it.
    """
    while high - low > max(1, within * high):
        middle = (low + high) // 2
        found = attempt(middle)
        if found is None:
            low = middle
        else:
            high, best = middle, found
    return high, best


# --- How many micro-batches each line runs, and how the rest is spread over several -----------------------------------


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
                 spread: bool = True, anywhere: bool = False, separate: bool = False,
                 params: LayoutParams = DEFAULTS.layouts) -> None:
        """`floating`: two neighbours of a line may hold one layer; `spread`: a micro-batch may visit several lines;
        `anywhere`: and come back to one; `separate`: few of its own."""
        self._problem, self._lines, self._params = problem, tuple(lines), params
        self._spread, self._anywhere, self._separate = spread, anywhere, separate
        self._cut = partial(cut, floating=floating)
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
        enough = min(most.values()) + Fraction(self._params.fewer_sets) * max(self._problem.grid.microbatches)
        count = max(count for count in counts if most[count] <= enough)
        each = items // count
        size = next(size for size in itertools.count(1) if self._most_of_stage(each, size) <= most[count])
        for number in range(count):
            yield range(number * each, (number + 1) * each), kept[number * size:(number + 1) * size]

    def _most_of_stage(self, items: int, lines: int) -> Fraction:
        """The most that a worker runs where so many lines share so many micro-batches: a share of a stage in layers."""
        counts = [end - first for (first, end), _ in self._problem.paths[0]]
        least = Fraction(self._params.least_share)
        return max(least, *(Fraction(-(-items * count // lines), count) for count in counts))

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


# --- From a division to routes, one for each micro-batch --------------------------------------------------------------


GOLDEN = 0.6180339887498949
"""The fractional parts of its multiples fill [0, 1) evenly from the first few on."""


def layout_of(problem: Problem, lines: Sequence[Line], division: Division, kind: str) -> Layout:
    """The layout of a division: names its micro-batches, and decides where each is cut."""
    whole, items = _names(problem, lines, division)
    where: dict[MicroBatch, dict[int, Worker]] = {batch: {} for names in (*whole, items) for batch in names}
    for index, line in enumerate(lines):
        parts = [piece for piece in division.pieces if piece.line == index and piece.worker is None]
        if line.cut:
            _cut_evenly(division.chunks[index], line, whole[index],
                        [(items[piece.item], piece.first, piece.end) for piece in parts], where)
        else:
            for worker in line.workers:
                for layer in problem.layers_held(worker):
                    for batch in whole[index]:
                        where[batch][layer] = worker
    for piece in division.pieces:
        if piece.worker is not None:
            where[items[piece.item]].update(dict.fromkeys(range(piece.first, piece.end), piece.worker))
    routes = {batch: stops_of(layers) for batch, layers in sorted(where.items())}
    return Layout(kind=kind, holds=_holds(problem, lines, routes), routes=routes)


def _names(problem: Problem, lines: Sequence[Line],
           division: Division) -> tuple[list[list[MicroBatch]], list[MicroBatch]]:
    """The micro-batches of each line, and those of no line; a line's own first, the others even over the iteration."""
    whole: list[list[MicroBatch]] = []
    rest: list[MicroBatch] = []
    of_pipeline = {line.workers[0].pipeline: index for index, line in reversed(list(enumerate(lines)))}
    own: dict[int, list[MicroBatch]] = defaultdict(list)
    for pipeline, count in enumerate(problem.grid.microbatches):
        batches = [MicroBatch(pipeline, number) for number in range(count)]
        stay = min(count, division.whole[of_pipeline[pipeline]]) if pipeline in of_pipeline else 0
        leaving = {(2 * step + 1) * count // (2 * (count - stay)) for step in range(count - stay)}
        rest += [batch for batch in batches if batch.microbatch in leaving]
        if stay:
            own[of_pipeline[pipeline]] = [batch for batch in batches if batch.microbatch not in leaving]
    rest.sort(key=_in_turn)
    taken = 0
    for index, count in enumerate(division.whole):
        more = count - len(own[index])
        whole.append(sorted(own[index] + rest[taken:taken + more], key=_in_turn))
        taken += more
    return whole, rest[taken:]


def _in_turn(batch: MicroBatch) -> tuple[int, int]:
    return batch.microbatch, batch.pipeline


def _cut_evenly(chunks: Sequence[dict[int, int]], line: Line, batches: Sequence[MicroBatch],
                parts: Iterable[tuple[MicroBatch, int, int]], where: dict[MicroBatch, dict[int, Worker]]) -> None:
    """Choose the cuts of each micro-batch.

    With x_k the layers before the k-th cut, a real number, micro-batch i is cut at floor(x_k + phase(i)). All cuts of a
    micro-batch share its phase, so that every worker runs the same number of layers of each micro-batch, give or take
    one; and phases of successive micro-batches are spread evenly.
    """
    phase = {batch: GOLDEN * number % 1 for number, batch in enumerate(batches)}
    spans = [(batch, 0, len(chunks) and 1 << 30) for batch in batches] + list(parts)
    for number, (batch, _, _) in enumerate(parts):
        phase[batch] = GOLDEN * (len(batches) + number) % 1
    order = sorted(spans, key=lambda span: -phase[span[0]])
    sharers: dict[int, list[tuple[Worker, int]]] = defaultdict(list)
    for worker, chunk in zip(line.workers, chunks, strict=True):
        for layer, count in chunk.items():
            sharers[layer].append((worker, count))
    for layer, shares in sharers.items():
        present = [batch for batch, first, end in order if first <= layer < end]
        assert len(present) == sum(count for _, count in shares), "a layer's cells are its micro-batches"
        at = 0
        for worker, count in shares:
            for batch in present[at:at + count]:
                where[batch][layer] = worker
            at += count


def stops_of(layers: dict[int, Worker]) -> Route:
    """Consecutive layers on one worker are one slice."""
    stops: list[Stop] = []
    for layer in sorted(layers):
        worker = layers[layer]
        if stops and stops[-1].worker == worker and stops[-1].layers[1] == layer:
            stops[-1] = Stop((stops[-1].layers[0], layer + 1), worker)
        else:
            stops.append(Stop((layer, layer + 1), worker))
    return tuple(stops)


def _holds(problem: Problem, lines: Sequence[Line],
           routes: dict[MicroBatch, Route]) -> dict[Worker, tuple[LayerRange, ...]]:
    """Workers of lines that are cut anew hold what they run, all others what they held."""
    anew = {worker for line in lines if line.cut for worker in line.workers}
    run: dict[Worker, set[int]] = defaultdict(set)
    for route in routes.values():
        for stop in route:
            run[stop.worker].update(range(*stop.layers))
    return {worker: joined_ranges((layer, layer + 1) for layer in run[worker]) if worker in anew else
            problem.workers[worker].holds for worker in problem.live}
