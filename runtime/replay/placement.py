"""What each holds under a schedule: layers of the model, and workers of nodes."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from itertools import pairwise

from slipstream.runtime.model.layers.layered_model import split_layers
from slipstream.runtime.model.layers.sharing import Sharing
from slipstream.runtime.replay.session import Shared
from slipstream.schedules.layers import LayerRange, joined_ranges, layers_in
from slipstream.schedules.parts import Part
from slipstream.schedules.schedule import Grid, OpKind, Schedule, Worker

ENDS = 2
"""Layers of a model beside its decoder layers: the embedding and the head."""


class PlacementError(ValueError):
    """A schedule and a model that do not fit each other. The message is one line."""


class Placement:
    """Where the layers of a job's schedules lie in the model.

    `cuts`: the layer of the model with which each layer of the schedules begins, and the end of the last one. The two
    are the same where the job names the layers of its stages; else each stage is one layer of the schedules.
    """

    def __init__(self, cuts: Sequence[int]) -> None:
        self.cuts = tuple(cuts)
        self._in_columns: dict[tuple[LayerRange, ...], frozenset[int]] = {}
        self._in_schedules: dict[frozenset[int], tuple[LayerRange, ...]] = {}
        """What was asked before: thousands of workers hold what few others do."""

    @property
    def layers(self) -> int:
        """Of the model."""
        return self.cuts[-1]

    def range_of(self, layers: LayerRange) -> LayerRange:
        """Layers of a schedule as layers of the model."""
        return self.cuts[layers[0]], self.cuts[layers[1]]

    def slices(self, schedule: Schedule, worker: Worker) -> dict[int, LayerRange]:
        """The layers of each slice in the program of a live worker."""
        program = schedule.programs[schedule.seat_of[worker].program]
        numbers = sorted({op.slice for op in program if op.slice is not None})
        return {number: self.range_of(schedule.layers_of(number)) for number in numbers}

    def held(self, schedule: Schedule, worker: Worker) -> frozenset[int]:
        """The layers that a live worker must hold."""
        return self._layers(schedule.holds(worker))

    def held_by(self, schedule: Schedule) -> dict[Worker, frozenset[int]]:
        """The layers that each live worker must hold."""
        found: dict[tuple[LayerRange, ...], frozenset[int]] = {}
        return {seat.worker: found.get(held) or found.setdefault(held, self._layers(held))
                for seat in schedule.seats for held in [schedule.holds_of(seat)]}

    def held_in_column(self, grid: Grid, column: int) -> frozenset[int]:
        """The layers of a column's stages."""
        held = grid.held_by_column[column]
        if held not in self._in_columns:
            self._in_columns[held] = self._layers(held)
        return self._in_columns[held]

    def in_schedules(self, layers: Collection[int]) -> tuple[LayerRange, ...]:
        """The layers of schedules that layers of the model have whole, as ascending ranges that do not touch."""
        key = frozenset(layers)
        if key not in self._in_schedules:
            self._in_schedules[key] = joined_ranges(
                (layer, layer + 1) for layer, (first, end) in enumerate(pairwise(self.cuts))
                if all(one in key for one in range(first, end)))
        return self._in_schedules[key]

    def stage_of(self, grid: Grid, layer: int) -> int:
        """The first stage that has a layer of the model."""
        return next(stage for stage, layers in enumerate(grid.layers_by_stage)
                    if layer in range(*self.range_of(layers)))

    def reduced_by_all(self, schedule: Schedule) -> dict[LayerRange, list[Worker]]:
        """All ranges by which gradients are reduced, each with all live workers that do; ascending."""
        sharers: dict[LayerRange, set[Worker]] = defaultdict(set)
        by_program = [{schedule.layers_of(op.slice) for op in program if op.kind is OpKind.A and op.slice is not None}
                      for program in schedule.programs]
        for seat in schedule.seats:
            for layers in by_program[seat.program]:
                sharers[layers].add(seat.worker)
        return {self.range_of(layers): sorted(workers) for layers, workers in sorted(sharers.items())}

    def reduced(self, schedule: Schedule, worker: Worker) -> dict[LayerRange, list[Worker]]:
        """The ranges by which a live worker reduces gradients, each with all live workers that do; ascending."""
        if isinstance(schedule, Part):
            return {self.range_of(layers): list(workers) for layers, workers in schedule.sums}
        return {layers: workers for layers, workers in self.reduced_by_all(schedule).items() if worker in workers}

    def sharers(self, schedule: Schedule, worker: Worker, sharing: Sharing) -> dict[Shared, Sequence[Worker]]:
        """`reduced`, and the parameters that layers share: each that a live worker holds with all that do."""
        found: dict[Shared, Sequence[Worker]] = {}
        for layers, workers in self.reduced(schedule, worker).items():
            found[layers] = workers
        layers_of_groups = [{place.layer for place in group} for group in sharing.groups]
        ties = dict(schedule.ties) if isinstance(schedule, Part) else dict(
            enumerate(self.ties(schedule, layers_of_groups)))
        for number, members in ties.items():
            if worker in members:
                found[str(sharing.groups[number][0])] = members
        return found

    def ties(self, schedule: Schedule, groups: Sequence[Collection[int]]) -> list[list[Worker]]:
        """All live workers that hold any layer of each of these groups."""
        held = sorted(self.held_by(schedule).items()) if groups else []
        return [[one for one, layers in held if not layers.isdisjoint(group)] for group in groups]

    def writers(self, schedule: Schedule, worker: Worker) -> dict[int, Worker]:
        """Which of its holders saves each layer that a live worker holds: they take turns."""
        return {layer: workers[layer % len(workers)] for layers, workers in self.reduced(schedule, worker).items()
                for layer in range(*layers)}

    def _layers(self, held: Sequence[LayerRange]) -> frozenset[int]:
        return layers_in(map(self.range_of, held))


def place(grid: Grid, layers: int) -> Placement:
    """Where a model of so many layers lies in a grid's stages: by the grid's layers where it names some, else evenly.

    A grid that counts decoder layers alone, as estimates do, has the model's first layer, the embedding, with the first
    of them, and the last, the head, with the last. Raises PlacementError unless the stages hold each of the model's
    layers once, in order, and ConfigError when there are more stages than layers.
    """
    stages = grid.stages[:grid.depth]  # those of other chains are copies
    given = [stage.layers for stage in stages if stage.layers is not None]
    if not given:
        return _between(split_layers(layers, len(stages)))
    if len(given) < len(stages):
        raise PlacementError(f"the schedule gives layers to {len(given)} of its {len(stages)} stages; expected all "
                             "or none")
    expected = 0
    for index, (start, end) in enumerate(given):
        if start != expected or end <= start:
            raise PlacementError(f"the schedule gives layers {start} to {end} to stage {index}; expected some layers, "
                                 f"the first of them {expected}")
        expected = end
    if expected + ENDS == layers:
        return Placement([0, *range(ENDS, layers - 1), layers])
    if expected != layers:
        raise PlacementError(f"the schedule's stages hold {expected} layers; the model has {layers}: [placement] and "
                             "[model] of the job file must agree")
    return Placement(range(layers + 1)) if grid.layer_count == layers else _between(given)


def with_ends(counts: Sequence[int], layers: int) -> Sequence[int]:
    """The layers of each stage of a model of so many, where `counts` may be decoder layers alone."""
    if sum(counts) + ENDS != layers:
        return counts
    whole = list(counts)
    whole[0] += 1
    whole[-1] += 1
    return whole


def _between(ranges: Sequence[LayerRange]) -> Placement:
    return Placement([0, *(end for _, end in ranges)])


def assign_to_nodes(workers: Sequence[Worker], nodes: int) -> list[list[Worker]]:
    """Cut the live workers, in their order, into one run of neighbours a node, sizes differing by at most one."""
    ends = [len(workers) * node // nodes for node in range(nodes + 1)]
    return [list(workers[start:end]) for start, end in pairwise(ends)]
