"""From a division of the work to routes, one for each micro-batch."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

from slipstream.planner.layout.division import Division
from slipstream.planner.layout.lines import Line
from slipstream.planner.model.layout import Layout, MicroBatch, Route, Stop
from slipstream.planner.model.problem import Problem
from slipstream.schedules.layers import LayerRange, joined_ranges
from slipstream.schedules.schedule import Worker

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

