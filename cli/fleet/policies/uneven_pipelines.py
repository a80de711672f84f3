"""Pipelines whose stages differ: layers cut by the speed of each node, and who holds them when some are gone."""

from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import accumulate

from slipstream.cli.fleet.policies.oobleck_templates import Template


@lru_cache(maxsize=65536)
def cut_by_speed(layers: tuple[float, ...], factors: tuple[float, ...]) -> Template:
    """The contiguous cut of layers (seconds each) over nodes in this order whose slowest stage takes least.

    A node with factor f takes f times as long. With c_i the time of stage i, n micro-batches take the sum of all c_i
    and n - 1 times the longest. A node may be left without layers. Raises ValueError for no nodes.
    """
    if not factors:
        raise ValueError("a pipeline of no nodes")
    prefix = [0.0, *accumulate(layers)]
    low, high = 0.0, prefix[-1] * min(factors)
    for _ in range(50):
        middle = (low + high) / 2
        if _stages_within(prefix, factors, middle) is None:
            low = middle
        else:
            high = middle
    stages = _stages_within(prefix, factors, high * (1 + 1e-9)) or [prefix[-1] * min(factors)]
    return Template(step=max(stages), fill=sum(stages) - max(stages))


def _stages_within(prefix: Sequence[float], factors: Sequence[float], seconds: float) -> list[float] | None:
    """Seconds of each stage where every node in turn takes as many layers as fit; None where some are left over."""
    position, stages = 0, []
    for factor in factors:
        end = position
        while end + 1 < len(prefix) and (prefix[end + 1] - prefix[position]) * factor <= seconds:
            end += 1
        stages.append((prefix[end] - prefix[position]) * factor)
        position = end
    return stages if position == len(prefix) - 1 else None


def all_layers_held(pipelines: Sequence[Sequence[int]], gone: Collection[int]) -> bool:
    """Whether the machines that are left hold every layer, where node k of n holds about the k-th n-th of them."""
    gone = set(gone)
    if any(nodes and gone.isdisjoint(nodes) for nodes in pipelines):
        return True
    parts = sorted((index / len(nodes), (index + 1) / len(nodes)) for nodes in pipelines
                   for index, machine in enumerate(nodes) if machine not in gone)
    reached = 0.0
    for first, end in parts:
        if first > reached + 1e-9:
            return False
        reached = max(reached, end)
    return reached > 1 - 1e-9
