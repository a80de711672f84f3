"""Compute Oobleck's pipeline templates (SOSP 2023): layers divided over nodes, and the times."""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, combinations
from typing import NamedTuple


class Template(NamedTuple):
    """Times of a pipeline: n micro-batches take `fill` + n x `step` seconds."""

    step: float
    """Seconds of a micro-batch at the slowest stage, forward and backward."""
    fill: float
    """Seconds to fill and drain the pipeline, in addition to `step` for each micro-batch."""

    def seconds_for(self, microbatches: int) -> float:
        """Return the seconds of these micro-batches, without all-reduces and optimizer steps."""
        return self.fill + microbatches * self.step if microbatches else 0.0


@lru_cache(maxsize=1024)
def find_template(layers: tuple[float, ...], nodes: int) -> Template:
    """Divide layers over a pipeline's nodes as Oobleck's formula does; return the times.

    The argument `layers` has the seconds of each layer. With c_i the time of stage i = 0..S-1 and
    k* the slowest stage, the division has the least T = T1 + T2 + T3, where

        T1 = sum of c_i;  T2 = (N - S + k* - 1) c_k*;  T3 = sum of c_i for i >= k*;  N = 4 S

    and N counts micro-batches. The result is exact. Nodes beyond the number of layers get none.
    """
    stages = min(nodes, len(layers))
    prefix = [0.0, *accumulate(layers)]
    least = _make_stage_counter(prefix)
    best, best_template = math.inf, None
    # Try every range of layers as the slowest stage, with the fewest stages before it that suffice.
    parts = combinations(range(len(layers) + 1), 2)
    for first, last in sorted(parts, key=lambda part: prefix[part[1]] - prefix[part[0]]):
        slowest = prefix[last] - prefix[first]
        # Ranges are in order of time, so from here on none can be better.
        if prefix[-1] + (3 * stages - 1) * slowest >= best:
            break
        after = least(last, len(layers), slowest)
        before = max(least(0, first, slowest), stages - 1 - (len(layers) - last))
        if before > first or after > stages - 1 - before:
            continue
        tail = prefix[-1] - prefix[first]
        total = prefix[-1] + (3 * stages + before - 1) * slowest + tail
        if total < best:
            best = total
            best_template = Template(slowest, prefix[-1] + (before - stages - 1) * slowest + tail)
    assert best_template is not None
    return best_template


def _make_stage_counter(prefix: Sequence[float]) -> Callable[[int, int, float], int]:
    """Return a function (first layer, end, seconds) that counts the fewest stages needed."""

    def count_stages(first: int, last: int, seconds: float) -> int:
        # The layers [first, last) are packed greedily, which needs the fewest stages.
        count, position = 0, first
        while position < last:
            end = (
                bisect_right(prefix, prefix[position] + seconds * (1 + 1e-9), position, last + 1)
                - 1
            )
            if end == position:
                return len(prefix)  # a single layer is longer
            count, position = count + 1, end
        return count

    return count_stages


@lru_cache(maxsize=65536)
def shortest_iteration_by_length(
    layers: tuple[float, ...], lengths: tuple[tuple[int, int], ...], microbatches: int
) -> float:
    """Return the seconds of the shortest iteration on pipelines of these lengths.

    The argument `lengths` has pairs (nodes, number of pipelines with so many), and `layers` the
    seconds of each layer. Layers are divided within pipelines, micro-batches over them. All-reduces
    and optimizer steps do not count.
    """
    pipelines: Counter[Template] = Counter()
    for nodes, count in lengths:
        pipelines[find_template(layers, nodes)] += count
    return shortest_iteration(pipelines, microbatches)


def shortest_iteration(pipelines: Mapping[Template, int], microbatches: int) -> float:
    """Return the seconds of an iteration if micro-batches are divided over pipelines as is fastest.

    The argument `pipelines` has the number of pipelines of each template.
    """

    def count_fitting(seconds: float) -> int:
        return sum(
            count * max(0, int((seconds - template.fill) / template.step + 1e-9))
            for template, count in pipelines.items()
        )

    # Bisect for the least time in which all pipelines together run the micro-batches.
    low = 0.0
    high = min(
        template.seconds_for(-(-microbatches // count)) for template, count in pipelines.items()
    )
    for _ in range(60):
        middle = (low + high) / 2
        if count_fitting(middle) >= microbatches:
            high = middle
        else:
            low = middle
    return high
