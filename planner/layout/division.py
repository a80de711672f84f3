"""How many micro-batches each line runs, and how those that fit on no line whole are spread over several.

Every line takes as many whole micro-batches as its longest load allows. The cells of the rest are a tape, micro-batch
after micro-batch, layers ascending. Each line that is cut anew takes one segment of it; the workers of the lines that
keep their stages take what is left, stage by stage (the wrap-around rule of McNaughton 1959). As every worker takes
consecutive cells, in one order of workers, no two routes pass two workers in opposite order.
"""

from collections.abc import Sequence
from typing import NamedTuple

from planner.layout.lines import Chunk, Line, chunk_ticks, cut, fill_idle
from planner.layout.problem import LayoutProblem
from schedules.schedule import Worker


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

    def __init__(self, problem: LayoutProblem, lines: Sequence[Line], *, floating: bool = True,
                 spread: bool = True) -> None:
        """`floating`: two neighbours of a line may hold one layer; `spread`: a micro-batch may visit several lines."""
        self._problem, self._lines, self._floating, self._spread = problem, tuple(lines), floating, spread
        self._kinds = [self._kind(line) for line in lines]
        self._known: dict[tuple[object, int], int] = {}

    def least(self, within: float = 0.0) -> tuple[int, Division] | None:
        """The least longest load, and a division that has it, to this relative precision; None if nothing fits."""
        high = self._problem.ample_ticks
        best = self.divide(high)
        if best is None:
            return None
        low = 0
        while high - low > max(1, within * high):
            middle = (low + high) // 2
            found = self.divide(middle)
            if found is None:
                low = middle
            else:
                high, best = middle, found
        return high, best

    def divide(self, limit: int) -> Division | None:
        """A division in which nobody's load is more than `limit` ticks; None if there is none of this form."""
        left = self._problem.total_microbatches
        whole = []
        for index in range(len(self._lines)):
            most = min(left, self._most(index, limit))
            whole.append(most)
            left -= most
        if left and not self._spread:
            return None
        segments, at = self._segments(whole, left, limit)
        pieces = self._over_workers(whole, left, at, limit)
        if pieces is None:
            return None
        chunks = tuple(self._balanced(index, counts) if self._lines[index].cut else ()
                       for index, counts in enumerate(self._counts(whole, segments)))
        return Division(tuple(whole), chunks, (*segments, *pieces), left)

    def _kind(self, line: Line) -> tuple[object, ...]:
        problem = self._problem
        return (line.cut, *((worker.column, problem.slowness(worker), problem.room_of(worker))
                            for worker in line.workers))

    def _most(self, index: int, limit: int) -> int:
        """The most whole micro-batches of a line within the limit."""
        key = self._kinds[index], limit
        if key not in self._known:
            line, low, high = self._lines[index], 0, self._problem.total_microbatches
            while low < high:
                middle = (low + high + 1) // 2
                if self._fits(line, [middle] * self._problem.layer_count, limit):
                    low = middle
                else:
                    high = middle - 1
            self._known[key] = low
        return self._known[key]

    def _fits(self, line: Line, counts: Sequence[int], limit: int) -> bool:
        if line.cut:
            return self._cut(line, counts, limit) is not None
        return all(self._kept_ticks(line, position, counts[0]) <= limit for position in range(len(line.workers)))

    def _cut(self, line: Line, counts: Sequence[int], limit: int) -> list[Chunk] | None:
        return cut(self._problem, line.workers, counts, limit, floating=self._floating)

    def _kept_ticks(self, line: Line, position: int, count: int) -> int:
        """The load of a worker that keeps its layers, and its least idle time."""
        problem, worker = self._problem, line.workers[position]
        held = problem.layers_held(worker)
        idle = 0 if len(problem.holds[worker]) > 1 else fill_idle(
            problem, worker, held, count, len(line.workers) - 1 - position)
        return chunk_ticks(problem, worker, dict.fromkeys(held, count)) + idle

    def _segments(self, whole: Sequence[int], items: int, limit: int) -> tuple[list[Piece], tuple[int, int]]:
        """What each line that is cut anew takes of the tape, and where the tape is then, as (item, layer)."""
        pieces: list[Piece] = []
        item, layer = 0, 0
        count = self._problem.layer_count
        for index, line in enumerate(self._lines):
            if not line.cut or item == items:
                continue
            low, high = 0, min(count - 1, (items - item) * count - layer)
            while low < high:
                middle = (low + high + 1) // 2
                counts = _profile(count, whole[index], layer, middle)
                if self._fits(line, counts, limit):
                    low = middle
                else:
                    high = middle - 1
            while low:
                end = min(count, layer + low)
                pieces.append(Piece(item, layer, end, index, None))
                low -= end - layer
                item, layer = (item + 1, 0) if end == count else (item, end)
        return pieces, (item, layer)

    def _over_workers(self, whole: Sequence[int], items: int, at: tuple[int, int], limit: int) -> list[Piece] | None:
        """The rest of the tape over the workers of the lines that keep their stages; None if it does not fit."""
        problem = self._problem
        pieces: list[Piece] = []
        used: dict[Worker, int] = {}
        if at[0] == items:
            return pieces
        kept = [index for index, line in enumerate(self._lines) if not line.cut]
        for (first, end), column in problem.paths[0]:
            cells = [(item, layer) for item in range(at[0], items) for layer in range(first, end)
                     if (item, layer) >= at]
            placed = 0
            for index in kept:
                if placed == len(cells):
                    break
                for position, worker in enumerate(self._lines[index].workers):
                    if worker.column != column:
                        continue
                    free = limit - used.get(worker, 0) - self._kept_ticks(self._lines[index], position, whole[index])
                    run = 0
                    ticks = 0
                    while placed + run < len(cells):
                        more = -(-problem.work[cells[placed + run][1]] * problem.slowness(worker) // 1000)
                        if ticks + more > free:
                            break
                        ticks += more
                        run += 1
                    pieces += _pieces(cells[placed:placed + run], index, worker)
                    used[worker] = used.get(worker, 0) + ticks
                    placed += run
            if placed < len(cells):
                return None
        return pieces

    def _counts(self, whole: Sequence[int], segments: Sequence[Piece]) -> list[list[int]]:
        """Cells of each layer on each line, without what is spread over single workers."""
        counts = [[most] * self._problem.layer_count for most in whole]
        for piece in segments:
            for layer in range(piece.first, piece.end):
                counts[piece.line][layer] += 1
        return counts

    def _balanced(self, index: int, counts: Sequence[int]) -> tuple[Chunk, ...]:
        """The cut of a line whose longest load is least."""
        line = self._lines[index]
        low, high = 0, self._problem.ample_ticks
        while high - low > 1:
            middle = (low + high) // 2
            if self._cut(line, counts, middle) is None:
                low = middle
            else:
                high = middle
        chunks = self._cut(line, counts, high)
        assert chunks is not None, "a line holds its counts"
        return tuple(chunks)


def _profile(count: int, whole: int, first: int, more: int) -> list[int]:
    """Cells of each layer: `whole`, and one more of `more` layers from `first` on, going round."""
    counts = [whole] * count
    for step in range(more):
        counts[(first + step) % count] += 1
    return counts


def _pieces(cells: Sequence[tuple[int, int]], line: int, worker: Worker) -> list[Piece]:
    """Consecutive cells of one worker as pieces, one a micro-batch."""
    pieces: list[Piece] = []
    for item, layer in cells:
        if pieces and pieces[-1].item == item and pieces[-1].end == layer:
            pieces[-1] = pieces[-1]._replace(end=layer + 1)
        else:
            pieces.append(Piece(item, layer, layer + 1, line, worker))
    return pieces
