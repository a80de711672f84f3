"""Group the workers that hold the same layers, and find what they reduce together."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise

import msgspec

from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Grid

Held = tuple[LayerRange, ...]
"""Layers that a worker holds: ascending ranges that do not touch."""
Reduction = tuple[LayerRange, tuple[int, ...]]
"""Range of layers whose gradients are reduced together, and the groups that hold it."""


class ReduceGroups(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Groups of workers with the same layers, and the reductions that they take part in.

    The workers of a group share one deadline for their compute ops.
    """

    held: tuple[Held, ...]
    """Layers that the workers of each group hold."""
    reductions: tuple[Reduction, ...]
    """Reductions of all held layers, ascending."""

    @cached_property
    def number_of(self) -> Mapping[Held, int]:
        """Number of each group, by the layers that its workers hold."""
        return {layers: number for number, layers in enumerate(self.held)}

    @cached_property
    def linked(self) -> tuple[tuple[int, ...], ...]:
        """Groups with which each group shares a reduction, itself included, by number."""
        linked: list[set[int]] = [{group} for group in range(len(self.held))]
        for _, groups in self.reductions:
            for group in groups:
                linked[group].update(groups)
        return tuple(tuple(sorted(groups)) for groups in linked)

    @cached_property
    def has_shared_reductions(self) -> bool:
        """True if several groups take part in some reduction."""
        return any(len(groups) > 1 for _, groups in self.reductions)


def find_holding_groups(ranges: Sequence[LayerRange], groups: Sequence[Held]) -> list[list[int]]:
    """Return, for each range of layers, the groups that hold all of it, ascending."""
    # Sorted, the ranges within a group's layers are found by bisection: there may be thousands.
    order = sorted(range(len(ranges)), key=lambda number: ranges[number])
    firsts = [ranges[number][0] for number in order]
    holding_groups: list[list[int]] = [[] for _ in ranges]
    for group, layers in enumerate(groups):
        for low, high in layers:
            for number in order[bisect_left(firsts, low) : bisect_left(firsts, high)]:
                if ranges[number][1] <= high:
                    holding_groups[number].append(group)
    return holding_groups


def make_reduce_groups(grid: Grid, holds: Iterable[Held]) -> ReduceGroups:
    """Return the groups of workers, and the ranges of layers that they reduce together.

    `holds` has the layers of each worker. A range is reduced by all groups that hold it. If all
    workers hold whole stages, each stage is a range of its own; otherwise ranges are as long as
    possible.
    """
    groups = tuple(sorted(set(holds)))
    ends = {end for _, end in grid.layers_by_stage}
    # Between two edges, all layers have the same holders.
    edges = {edge for group in groups for layers in group for edge in layers}
    # Where workers hold whole stages, each stage is reduced by itself, as its time is given.
    whole = edges - {0} <= ends
    ranges = list(pairwise(sorted(edges | ends if whole else edges)))
    reductions: list[Reduction] = []
    for (first, end), holders in zip(
        ranges, map(tuple, find_holding_groups(ranges, groups)), strict=True
    ):
        # Otherwise, neighbouring ranges of the same holders are reduced as one.
        if (
            reductions
            and reductions[-1][1] == holders
            and reductions[-1][0][1] == first
            and not whole
        ):
            reductions[-1] = (reductions[-1][0][0], end), holders
        elif holders:
            reductions.append(((first, end), holders))
    return ReduceGroups(held=groups, reductions=tuple(reductions))
