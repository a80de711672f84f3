"""Compute Oobleck's pipeline templates (SOSP 2023).

A template is the division of layers over a pipeline's nodes, and the resulting times.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, combinations
from typing import NamedTuple


class Template(NamedTuple):
    """Times of a pipeline's length: n micro-batches take `fill` + n x `step` seconds."""

    step: float
    """Seconds of a micro-batch at the slowest stage, forward and backward."""
    fill: float
    """Seconds to fill and drain the pipeline, in addition to `step` for each micro-batch."""

    def seconds_for(self, microbatches: int) -> float:
        """Return the seconds of an iteration of these micro-batches, without A and O."""
        return self.fill + microbatches * self.step if microbatches else 0.0


@lru_cache(maxsize=1024)
def find_template(layers: tuple[float, ...], nodes: int) -> Template:
    """Return the template of the best contiguous division of `layers` over nodes.

    Layers are in seconds each, and Oobleck's formula judges. With c_i the time of stage i = 0..S-1
    and k* the slowest stage, it minimises T = T1 + T2 + T3 where

        T1 = sum of c_i;  T2 = (N - S + k* - 1) c_k*;  T3 = sum of c_i for i >= k*;  N = 4 S

    and N counts micro-batches. Exact: every range of layers is tried as the slowest stage, with the
    fewest stages before it that suffice.
    """
    stages = min(nodes, len(layers))
    prefix = [0.0, *accumulate(layers)]
    least = _make_stage_counter(prefix)
    best, best_template = math.inf, None
    parts = combinations(range(len(layers) + 1), 2)
    for first, last in sorted(parts, key=lambda part: prefix[part[1]] - prefix[part[0]]):
        slowest = prefix[last] - prefix[first]
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
    """Return a function that counts the stages that a range of layers needs."""
    def count_stages(first: int, last: int, seconds: float) -> int:
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
def shortest_iteration_by_length(layers: tuple[float, ...], lengths: tuple[tuple[int, int], ...],
                                 microbatches: int) -> float:
    """Return the seconds of the best iteration over pipelines of these lengths.

    Their stages divide `layers` (seconds each), and the pipelines divide the micro-batches, in the
    best way.

    The argument `lengths` has pairs (nodes, number of pipelines with so many nodes).
    """
    pipelines: Counter[Template] = Counter()
    for nodes, count in lengths:
        pipelines[find_template(layers, nodes)] += count
    return shortest_iteration(pipelines, microbatches)


def shortest_iteration(pipelines: Mapping[Template, int], microbatches: int) -> float:
    """Return the seconds of the best divided iteration, for pipelines by template."""
    def count_fitting(seconds: float) -> int:
        return sum(
            count * max(0, int((seconds - template.fill) / template.step + 1e-9))
            for template, count in pipelines.items()
        )

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
