"""Placements of the literature, and divisions of a job's layers over their virtual stages: what promises most.

A division is worth as much as the work of its busiest worker, in the mean of a micro-batch: no order of the ops counts.
"""

import random
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from slipstream.planner.job.arrangement import Arrangement, MovableLayers

MOST_CHUNKS = 6
"""Virtual stages a worker, at most."""


def placements(stages: int, layers: int) -> Iterator[tuple[str, int]]:
    """Those of the literature, as (order, virtual stages a worker)."""
    yield "linear", 1
    for chunks in range(2, min(MOST_CHUNKS, layers // stages) + 1):
        yield "interleaved", chunks
        if stages > 1:
            yield "v", chunks
    if stages > 1 and not stages % 2:
        yield "bidirectional", 1


class StageLoads:
    """What the workers of a pipeline have to do for a micro-batch, in seconds, by placement and division."""

    def __init__(self, layers: MovableLayers) -> None:
        self._stages = layers.job.stages
        self.before = [0.0]
        for layer in range(layers.layers):
            self.before.append(self.before[-1] + float(layers.work(layer)))
        self.count = layers.layers

    def columns(self, arrangement: Arrangement) -> list[float]:
        """The mean of each column's worker for a micro-batch."""
        found = [0.0] * self._stages
        for (first, end), column in zip(pairwise([0, *arrangement.ends]), arrangement.columns(self._stages),
                                        strict=True):
            work = self.before[end] - self.before[first]
            found[column] += work / arrangement.chains
            if arrangement.chains > 1:
                found[self._stages - 1 - column] += work / 2
        return found

    def rank(self, arrangement: Arrangement) -> tuple[float, float]:
        """The less the better: the busiest worker, then how uneven the virtual stages are."""
        edges = [0, *arrangement.ends]
        columns = self.columns(arrangement)
        return max(columns), sum(load * load for load in columns) + sum(
            (self.before[end] - self.before[first]) ** 2 for first, end in pairwise(edges))

    def balanced(self, order: str, chunks: int) -> Arrangement:
        """The division of a placement in which the busiest worker has least to do, as far as moves of one layer tell.
        """
        virtual = self._stages * chunks
        total, ends = self.before[-1], [0]
        for stage in range(1, virtual):
            low, high = ends[-1] + 1, self.count - virtual + stage
            ends.append(min(range(low, high + 1), key=lambda end: abs(self.before[end] - total * stage / virtual)))
        edges = [*ends, self.count]
        best = Arrangement(order=order, chunks=chunks, counts=tuple(end - first for first, end in pairwise(edges)))
        for _ in range(8 * virtual):
            better = min((self.rank(one), one.counts, one) for one in [best, *neighbours(best)])
            if better[2] is best or better[0] >= self.rank(best):
                break
            best = better[2]
        return best


def neighbours(arrangement: Arrangement) -> Iterator[Arrangement]:
    """With one layer more in a virtual stage, and one less in the next one or the one before, or further away."""
    counts = arrangement.counts
    for stage, count in enumerate(counts):
        for other in range(max(0, stage - 4), min(len(counts), stage + 5)):
            if other != stage and count > 1:
                changed = list(counts)
                changed[stage], changed[other] = count - 1, changed[other] + 1
                yield msgspec.structs.replace(arrangement, counts=tuple(changed))


def changed(arrangement: Arrangement, stages: int, loads: StageLoads, chance: random.Random) -> Arrangement | None:
    """Change an arrangement at random, in one or two steps; None where no layer can go.

    A step puts a layer into another virtual stage, or two virtual stages on each other's workers.
    """
    for _ in range(chance.choice((1, 1, 2))):
        if arrangement.chunks > 1 and chance.random() < 0.15:
            columns = list(arrangement.columns(stages))
            one, other = chance.sample(range(len(columns)), 2)
            columns[one], columns[other] = columns[other], columns[one]
            arrangement = msgspec.structs.replace(arrangement, order=tuple(columns))
            continue
        counts = list(arrangement.counts)
        giving = [stage for stage, count in enumerate(counts) if count > 1]
        if not giving or len(counts) < 2:
            return None
        busy = loads.columns(arrangement)
        columns = list(arrangement.columns(stages))
        stage = max(chance.sample(giving, min(2, len(giving))), key=lambda place: busy[columns[place]]) \
            if chance.random() < 0.5 else chance.choice(giving)
        other = chance.choice([place for place in range(max(0, stage - 2), min(len(counts), stage + 3))
                               if place != stage])
        counts[stage] -= 1
        counts[other] += 1
        arrangement = msgspec.structs.replace(arrangement, counts=tuple(counts))
    return arrangement
