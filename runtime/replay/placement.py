"""Placement: which layers of the model each worker holds under a schedule, and which workers each node has."""

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
"""Number of layers of a model in addition to its decoder layers: the embedding and the head."""


class PlacementError(ValueError):
    """Schedule and model do not fit each other. The message is one line."""


class Placement:
    """Mapping of the layers of a job's schedules to the layers of the model.

    The argument `cuts` has the model's first layer of each layer of the schedules, and the end of the last one. Both
    kinds of layers are the same if the job names the layers of its stages; otherwise each stage is one layer of the
    schedules.
    """

    def __init__(self, cuts: Sequence[int]) -> None:
        self.cuts = tuple(cuts)
        self._in_columns: dict[tuple[LayerRange, ...], frozenset[int]] = {}
        self._in_schedules: dict[frozenset[int], tuple[LayerRange, ...]] = {}
        """Cache of earlier results: thousands of workers share a few sets of layers."""

    @property
    def layers(self) -> int:
        """Number of layers of the model."""
        return self.cuts[-1]

    def range_of(self, layers: LayerRange) -> LayerRange:
        """Return a range of a schedule's layers as a range of the model's layers."""
        return self.cuts[layers[0]], self.cuts[layers[1]]

    def slices(self, schedule: Schedule, worker: Worker) -> dict[int, LayerRange]:
        """Return the layers of each slice in the program of a live worker."""
        program = schedule.programs[schedule.seat_of[worker].program]
        numbers = sorted({op.slice for op in program if op.slice is not None})
        return {number: self.range_of(schedule.layers_of(number)) for number in numbers}

    def held(self, schedule: Schedule, worker: Worker) -> frozenset[int]:
        """Return the layers that a live worker must hold."""
        return self._layers(schedule.holds(worker))

    def held_by(self, schedule: Schedule) -> dict[Worker, frozenset[int]]:
        """Return the layers that each live worker must hold."""
        by_ranges: dict[tuple[LayerRange, ...], frozenset[int]] = {}
        return {seat.worker: by_ranges.get(held) or by_ranges.setdefault(held, self._layers(held))
                for seat in schedule.seats for held in [schedule.holds_of(seat)]}

    def held_in_column(self, grid: Grid, column: int) -> frozenset[int]:
        """Return the layers of a column's stages."""
        held = grid.held_by_column[column]
        if held not in self._in_columns:
            self._in_columns[held] = self._layers(held)
        return self._in_columns[held]

    def in_schedules(self, layers: Collection[int]) -> tuple[LayerRange, ...]:
        """Return the layers of schedules that lie completely in `layers`, as ascending ranges that do not touch."""
        key = frozenset(layers)
        if key not in self._in_schedules:
            self._in_schedules[key] = joined_ranges(
                (layer, layer + 1) for layer, (first, end) in enumerate(pairwise(self.cuts))
                if all(inner in key for inner in range(first, end)))
        return self._in_schedules[key]

    def stage_of(self, grid: Grid, layer: int) -> int:
        """Return the first stage that contains a layer of the model."""
        return next(stage for stage, layers in enumerate(grid.layers_by_stage)
                    if layer in range(*self.range_of(layers)))

    def reduced_by_all(self, schedule: Schedule) -> dict[LayerRange, list[Worker]]:
        """Return all ranges by which gradients are reduced, ascending, each with all live workers that reduce it."""
        sharers: dict[LayerRange, set[Worker]] = defaultdict(set)
        by_program = [{schedule.layers_of(op.slice) for op in program if op.kind is OpKind.A and op.slice is not None}
                      for program in schedule.programs]
        for seat in schedule.seats:
            for layers in by_program[seat.program]:
                sharers[layers].add(seat.worker)
        return {self.range_of(layers): sorted(workers) for layers, workers in sorted(sharers.items())}

    def reduced(self, schedule: Schedule, worker: Worker) -> dict[LayerRange, list[Worker]]:
        """Return the ranges by which a worker reduces gradients, ascending, each with all live workers that do."""
        if isinstance(schedule, Part):
            return {self.range_of(layers): list(workers) for layers, workers in schedule.sums}
        return {layers: workers for layers, workers in self.reduced_by_all(schedule).items() if worker in workers}

    def sharers(self, schedule: Schedule, worker: Worker, sharing: Sharing) -> dict[Shared, Sequence[Worker]]:
        """Return the holders for each sum of a worker: its ranges (`reduced`), and parameters that layers share."""
        sharers_of: dict[Shared, Sequence[Worker]] = {}
        for layers, workers in self.reduced(schedule, worker).items():
            sharers_of[layers] = workers
        layers_of_groups = [{place.layer for place in group} for group in sharing.groups]
        ties = dict(schedule.ties) if isinstance(schedule, Part) else dict(
            enumerate(self.ties(schedule, layers_of_groups)))
        for number, members in ties.items():
            if worker in members:
                sharers_of[str(sharing.groups[number][0])] = members
        return sharers_of

    def ties(self, schedule: Schedule, groups: Sequence[Collection[int]]) -> list[list[Worker]]:
        """Return all live workers that hold a layer of each of these groups."""
        held = sorted(self.held_by(schedule).items()) if groups else []
        return [[worker for worker, layers in held if not layers.isdisjoint(group)] for group in groups]

    def writers(self, schedule: Schedule, worker: Worker) -> dict[int, Worker]:
        """Return which holder saves each layer that a live worker holds; holders take turns, layer by layer."""
        return {layer: workers[layer % len(workers)] for layers, workers in self.reduced(schedule, worker).items()
                for layer in range(*layers)}

    def _layers(self, held: Sequence[LayerRange]) -> frozenset[int]:
        return layers_in(map(self.range_of, held))


def place(grid: Grid, layers: int) -> Placement:
    """Return the placement of a model's layers in a grid's stages.

    The argument `layers` is the number of the model's layers. They are placed by the grid's layers if it names them,
    else evenly. If a grid counts only decoder layers, as estimates do, the embedding belongs to the first of them and
    the head to the last. Raises PlacementError unless the stages hold each of the model's layers once, in order, and
    ConfigError if there are more stages than layers.
    """
    stages = grid.stages[:grid.depth]  # the stages of other chains are copies
    ranges = [stage.layers for stage in stages if stage.layers is not None]
    if not ranges:
        return _between(split_layers(layers, len(stages)))
    if len(ranges) < len(stages):
        raise PlacementError(f"the schedule gives layers to {len(ranges)} of its {len(stages)} stages; expected all "
                             "or none")
    expected = 0
    for index, (start, end) in enumerate(ranges):
        if start != expected or end <= start:
            raise PlacementError(f"the schedule gives layers {start} to {end} to stage {index}; expected some layers, "
                                 f"the first of them {expected}")
        expected = end
    if expected + ENDS == layers:
        return Placement([0, *range(ENDS, layers - 1), layers])
    if expected != layers:
        raise PlacementError(f"the schedule's stages hold {expected} layers; the model has {layers}: [placement] and "
                             "[model] of the job file must agree")
    return Placement(range(layers + 1)) if grid.layer_count == layers else _between(ranges)


def with_ends(counts: Sequence[int], layers: int) -> Sequence[int]:
    """Return the number of layers of each stage; adds embedding and head if `counts` has only decoder layers."""
    if sum(counts) + ENDS != layers:
        return counts
    whole = list(counts)
    whole[0] += 1
    whole[-1] += 1
    return whole


def _between(ranges: Sequence[LayerRange]) -> Placement:
    return Placement([0, *(end for _, end in ranges)])


def assign_to_nodes(workers: Sequence[Worker], nodes: int) -> list[list[Worker]]:
    """Divide the live workers into consecutive groups, one for each node, whose sizes differ by at most one."""
    ends = [len(workers) * node // nodes for node in range(nodes + 1)]
    return [list(workers[start:end]) for start, end in pairwise(ends)]
