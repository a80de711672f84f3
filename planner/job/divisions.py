"""List placements from the literature, and find good divisions of layers over stages.

A division is better if its busiest worker has less work per micro-batch, on average over
directions. The order of ops does not count.
"""

import random
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from slipstream.planner.job.arrangement import Arrangement, MovableLayers

MAX_CHUNKS = 6
"""Largest number of virtual stages per worker that is tried."""


def known_placements(stages: int, layers: int) -> Iterator[tuple[str, int]]:
    """Iterate over the placements from the literature that a job can have.

    The result is pairs of the name of a placement, such as "v", and the number of virtual stages
    per worker. `stages` is the number of columns, `layers` that of the model's layers.
    """
    yield "linear", 1
    for chunks in range(2, min(MAX_CHUNKS, layers // stages) + 1):
        yield "interleaved", chunks
        if stages > 1:
            yield "v", chunks
    if stages > 1 and not stages % 2:
        yield "bidirectional", 1


class StageLoads:
    """Calculator of the work of each worker, for any `Arrangement` of a job's layers."""

    def __init__(self, layers: MovableLayers) -> None:
        self._stages = layers.job.stages
        self.before = [0.0]
        for layer in range(layers.layers):
            self.before.append(self.before[-1] + float(layers.layer_work(layer)))
        self.count = layers.layers

    def column_loads(self, arrangement: Arrangement) -> list[float]:
        """Return the seconds of work per micro-batch of a worker in each column.

        In a bidirectional pipeline, work is the mean of the two directions.
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
        """Return a key by which arrangements sort, the most even first.

        The key is the work of the busiest worker, then the sum of the squares of the work of each
        worker and of each virtual stage.
        """
        edges = [0, *arrangement.layer_ends]
        columns = self.column_loads(arrangement)
        squares = sum(load * load for load in columns)
        squares += sum(
            (self.before[end] - self.before[first]) ** 2 for first, end in pairwise(edges)
        )
        return max(columns), squares

    def balance_layers(self, order: str, chunks: int) -> Arrangement:
        """Return an arrangement with columns in this order and layers divided evenly by work.

        The order is a name from `[placement] order`. Each worker has `chunks` virtual stages, for
        each of which there must be a layer. Layers are moved one at a time, as long as the
        arrangement becomes more even (`ranking_key`), at most 8 per virtual stage.
        """
        virtual = self._stages * chunks
        total, ends = self.before[-1], [0]
        # To begin with, each stage ends where the work so far is nearest to its share.
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
        # Then the best move of a layer, again and again, up to a limit.
        for _ in range(8 * virtual):
            better = min(
                (self.ranking_key(near), near.counts, near)
                for near in [best, *neighbouring_arrangements(best)]
            )
            if better[2] is best or better[0] >= self.ranking_key(best):
                break
            best = better[2]
        return best


def neighbouring_arrangements(arrangement: Arrangement) -> Iterator[Arrangement]:
    """Iterate over copies of an arrangement, each with one layer moved.

    The layer moves from a virtual stage with several layers to one at most four stages away.
    """
    counts = arrangement.counts
    for stage, count in enumerate(counts):
        for other in range(max(0, stage - 4), min(len(counts), stage + 5)):
            if other != stage and count > 1:
                changed = list(counts)
                changed[stage], changed[other] = count - 1, changed[other] + 1
                yield msgspec.structs.replace(arrangement, counts=tuple(changed))


def change_at_random(
    arrangement: Arrangement, stages: int, loads: StageLoads, chance: random.Random
) -> Arrangement | None:
    """Return a copy of an arrangement after one or two random steps.

    None if no layer can move. A step moves a layer to a virtual stage at most two stages away,
    often from the busier of two workers by `loads`. Or, if workers have several virtual stages, it
    swaps the columns of two. `stages` is the number of columns. The random numbers come from
    `chance`.
    """
    for _ in range(chance.choice((1, 1, 2))):
        # Now and then another placement, if workers have several stages.
        if arrangement.chunks > 1 and chance.random() < 0.15:
            columns = list(arrangement.stage_columns(stages))
            first, second = chance.sample(range(len(columns)), 2)
            columns[first], columns[second] = columns[second], columns[first]
            arrangement = msgspec.structs.replace(arrangement, order=tuple(columns))
            continue
        counts = list(arrangement.counts)
        # Every virtual stage keeps at least one layer.
        donors = [stage for stage, count in enumerate(counts) if count > 1]
        if not donors or len(counts) < 2:
            return None
        column_loads = loads.column_loads(arrangement)
        columns = list(arrangement.stage_columns(stages))
        # Half of the moves relieve the busier of two random workers, the others explore.
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
