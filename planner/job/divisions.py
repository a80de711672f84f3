"""List placements of the literature, and find promising divisions of layers.

A division is of a job's layers over virtual stages.

A division is ranked by the mean work of its busiest worker per micro-batch. The order of ops does
not count.
"""

import random
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from slipstream.planner.job.arrangement import Arrangement, MovableLayers

MAX_CHUNKS = 6
"""Largest number of virtual stages per worker that is tried."""


def known_placements(stages: int, layers: int) -> Iterator[tuple[str, int]]:
    """Iterate over the placements known from the literature that a job can have.

    It has these columns and layers. Each is yielded as the name of its order, such as "v", and the
    number of virtual stages per worker.
    """
    yield "linear", 1
    for chunks in range(2, min(MAX_CHUNKS, layers // stages) + 1):
        yield "interleaved", chunks
        if stages > 1:
            yield "v", chunks
    if stages > 1 and not stages % 2:
        yield "bidirectional", 1


class StageLoads:
    """Calculator of each worker's seconds of work per micro-batch.

    It takes any placement and division of a pipeline.
    """

    def __init__(self, layers: MovableLayers) -> None:
        self._stages = layers.job.stages
        self.before = [0.0]
        for layer in range(layers.layers):
            self.before.append(self.before[-1] + float(layers.layer_work(layer)))
        self.count = layers.layers

    def column_loads(self, arrangement: Arrangement) -> list[float]:
        """Return the seconds of work of each column's worker per micro-batch.

        With two directions, it is the mean of both.
        """
        loads = [0.0] * self._stages
        for (first, end), column in zip(
            pairwise([0, *arrangement.layer_ends]),
            arrangement.stage_columns(self._stages),
            strict=True,
        ):
            work = self.before[end] - self.before[first]
            loads[column] += work / arrangement.chains
            if arrangement.chains > 1:
                loads[self._stages - 1 - column] += work / 2
        return loads

    def ranking_key(self, arrangement: Arrangement) -> tuple[float, float]:
        """Return a sort key that puts the better placement and division first.

        It has the work of the busiest worker, then the sum of squares of the work of workers and
        virtual stages.
        """
        edges = [0, *arrangement.layer_ends]
        columns = self.column_loads(arrangement)
        squares = sum(load * load for load in columns)
        squares += sum(
            (self.before[end] - self.before[first]) ** 2 for first, end in pairwise(edges)
        )
        return max(columns), squares

    def balance_layers(self, order: str, chunks: int) -> Arrangement:
        """Return the placement that `order` names, with a balanced division of the layers.

        Its busiest worker has as little work as was found. The division is improved by moves of one
        layer. `chunks` is the number of virtual stages of a worker.
        """
        virtual = self._stages * chunks
        total, ends = self.before[-1], [0]
        for stage in range(1, virtual):
            low, high = ends[-1] + 1, self.count - virtual + stage
            ends.append(
                min(
                    range(low, high + 1),
                    key=lambda end: abs(self.before[end] - total * stage / virtual),
                )
            )
        edges = [*ends, self.count]
        best = Arrangement(
            order=order, chunks=chunks, counts=tuple(end - first for first, end in pairwise(edges))
        )
        for _ in range(8 * virtual):
            better = min((self.ranking_key(near), near.counts, near)
                         for near in [best, *neighbouring_arrangements(best)])
            if better[2] is best or better[0] >= self.ranking_key(best):
                break
            best = better[2]
        return best


def neighbouring_arrangements(arrangement: Arrangement) -> Iterator[Arrangement]:
    """Iterate over copies of an arrangement, each with one layer moved.

    It moves to a virtual stage at most four stages away.
    """
    counts = arrangement.counts
    for stage, count in enumerate(counts):
        for other in range(max(0, stage - 4), min(len(counts), stage + 5)):
            if other != stage and count > 1:
                changed = list(counts)
                changed[stage], changed[other] = count - 1, changed[other] + 1
                yield msgspec.structs.replace(arrangement, counts=tuple(changed))


def change_at_random(arrangement: Arrangement, stages: int, loads: StageLoads,
                     chance: random.Random) -> Arrangement | None:
    """Return an arrangement after one or two random steps.

    None if no layer can be moved. A step moves a layer to a virtual stage at most two stages away,
    often from the busier of two workers by `loads`, or swaps the workers of two virtual stages. The
    random numbers are those of `chance`.
    """
    for _ in range(chance.choice((1, 1, 2))):
        if arrangement.chunks > 1 and chance.random() < 0.15:
            columns = list(arrangement.stage_columns(stages))
            first, second = chance.sample(range(len(columns)), 2)
            columns[first], columns[second] = columns[second], columns[first]
            arrangement = msgspec.structs.replace(arrangement, order=tuple(columns))
            continue
        counts = list(arrangement.counts)
        donors = [stage for stage, count in enumerate(counts) if count > 1]
        if not donors or len(counts) < 2:
            return None
        column_loads = loads.column_loads(arrangement)
        columns = list(arrangement.stage_columns(stages))
        stage = (
            max(
                chance.sample(donors, min(2, len(donors))),
                key=lambda place: column_loads[columns[place]],
            )
            if chance.random() < 0.5
            else chance.choice(donors)
        )
        other = chance.choice(
            [
                place
                for place in range(max(0, stage - 2), min(len(counts), stage + 3))
                if place != stage
            ]
        )
        counts[stage] -= 1
        counts[other] += 1
        arrangement = msgspec.structs.replace(arrangement, counts=tuple(counts))
    return arrangement
