"""Place the model's layers: which worker holds them by a schedule, and on which node."""

from collections.abc import Collection, Sequence
from itertools import pairwise

from slipstream.runtime.errors import ConfigError
from slipstream.schedules.layers import LayerRange, layers_in, merge_ranges
from slipstream.schedules.program import WorkerProgram, find_reductions
from slipstream.schedules.schedule import Grid, Schedule, Worker

END_LAYERS = 2
"""Layers of a model besides its decoder layers: the embedding and the head."""


class PlacementError(ValueError):
    """Error for a schedule and a model that do not fit each other. The message is one line."""


class Placement:
    """Mapping of the layers of a job's schedules to the layers of the model.

    Layer `n` of the schedules consists of the model's layers from `cuts[n]` up to `cuts[n + 1]`.
    Both kinds of layers are the same, or differ by embedding and head only, if the job names the
    layers of its stages; otherwise each stage is one layer of the schedules.
    """

    def __init__(self, cuts: Sequence[int]) -> None:
        self.cuts = tuple(cuts)
        self._in_columns: dict[tuple[LayerRange, ...], frozenset[int]] = {}
        self._in_schedules: dict[frozenset[int], tuple[LayerRange, ...]] = {}
        """Results of `schedule_layers` so far, for a few sets of layers."""

    @property
    def layer_count(self) -> int:
        """Number of layers of the model."""
        return self.cuts[-1]

    def model_range(self, layers: LayerRange) -> LayerRange:
        """Return a range of a schedule's layers as a range of the model's layers."""
        return self.cuts[layers[0]], self.cuts[layers[1]]

    def slice_layers(self, program: WorkerProgram) -> dict[int, LayerRange]:
        """Return the range of model layers of each slice in a program, by slice."""
        numbers = sorted({op.slice for op in program.ops if op.slice is not None})
        return {number: self.model_range(program.layers_of(number)) for number in numbers}

    def model_layers(self, layers: Sequence[LayerRange]) -> frozenset[int]:
        """Return the model's layers that these ranges of a schedule's layers consist of."""
        return layers_in(map(self.model_range, layers))

    def held_layers(self, schedule: Schedule, worker: Worker) -> frozenset[int]:
        """Return the model's layers that a live worker must hold under a schedule."""
        return self.model_layers(schedule.held_layers(worker))

    def held_layers_by_worker(self, schedule: Schedule) -> dict[Worker, frozenset[int]]:
        """Return the model's layers that each live worker must hold under a schedule."""
        # Thousands of workers share a few sets of layers.
        layers_of: dict[tuple[LayerRange, ...], frozenset[int]] = {}
        by_worker = dict[Worker, frozenset[int]]()
        for seat in schedule.seats:
            ranges = schedule.held_layers_of_seat(seat)
            if ranges not in layers_of:
                layers_of[ranges] = self.model_layers(ranges)
            by_worker[seat.worker] = layers_of[ranges]
        return by_worker

    def layers_in_column(self, grid: Grid, column: int) -> frozenset[int]:
        """Return the model's layers of all stages in a column of the grid."""
        ranges = grid.held_layers_by_column[column]
        if ranges not in self._in_columns:
            self._in_columns[ranges] = self.model_layers(ranges)
        return self._in_columns[ranges]

    def schedule_layers(self, layers: Collection[int]) -> tuple[LayerRange, ...]:
        """Return, as ascending ranges, the schedules' layers made of these model layers only."""
        # Asked again and again for the same few sets, as thousands of workers share them.
        key = frozenset(layers)
        if key not in self._in_schedules:
            ranges = [
                (layer, layer + 1)
                for layer, (first, end) in enumerate(pairwise(self.cuts))
                if key.issuperset(range(first, end))
            ]
            self._in_schedules[key] = merge_ranges(ranges)
        return self._in_schedules[key]

    def stage_of(self, grid: Grid, layer: int) -> int:
        """Return the number of the first stage that contains a layer of the model."""
        return next(
            stage
            for stage, layers in enumerate(grid.layers_by_stage)
            if layer in range(*self.model_range(layers))
        )

    def all_reductions(self, schedule: Schedule) -> dict[LayerRange, tuple[Worker, ...]]:
        """Return, by ascending range of model layers, the live workers that sum its gradients."""
        return {
            self.model_range(layers): workers
            for layers, workers in find_reductions(schedule).items()
        }

    def reductions_of(self, program: WorkerProgram) -> dict[LayerRange, list[Worker]]:
        """Return the workers of each sum in a program, by ascending range of model layers."""
        return {self.model_range(layers): list(workers) for layers, workers in program.sums}

    def holders_of_groups(
        self, schedule: Schedule, groups: Sequence[Collection[int]]
    ) -> list[list[Worker]]:
        """Return, for each group of layers with a shared parameter, their live holders.

        A holder has at least one layer of the group.
        """
        if not groups:
            return []
        holders = list[list[Worker]]()
        by_worker = sorted(self.held_layers_by_worker(schedule).items())
        for group in groups:
            holders.append([worker for worker, layers in by_worker if not layers.isdisjoint(group)])
        return holders

    def choose_writers(self, program: WorkerProgram) -> dict[int, Worker]:
        """Return, for each layer that a program's worker holds, who writes it to checkpoints."""
        # The holders of a range of layers take turns, so each writes about as much.
        return {
            layer: workers[layer % len(workers)]
            for layers, workers in self.reductions_of(program).items()
            for layer in range(*layers)
        }


def place_layers(grid: Grid, layers: int) -> Placement:
    """Return the placement of a model of `layers` layers in the stages of a grid.

    The stages have the layers that the grid names; if it names none, layers are divided evenly. If
    the grid counts only decoder layers, the embedding belongs to the first of them and the head to
    the last. Raises PlacementError if only some stages have layers, or if they do not hold each of
    the model's layers once, in order; and ConfigError if there are more stages than layers.
    """
    stages = grid.stages[: grid.depth]  # the stages of other chains are copies
    ranges = [stage.layers for stage in stages if stage.layers is not None]
    if not ranges:
        return _placement_of_ranges(split_layers(layers, len(stages)))
    if len(ranges) < len(stages):
        raise PlacementError(
            f"the schedule gives layers to {len(ranges)} of its {len(stages)} stages; expected all "
            "or none"
        )
    # Each stage must go on where the one before has ended.
    expected = 0
    for index, (start, end) in enumerate(ranges):
        if start != expected or end <= start:
            raise PlacementError(
                f"the schedule gives layers {start} to {end} to stage {index}; expected one or "
                f"more, beginning with layer {expected}"
            )
        expected = end
    # As estimates do, the grid may count only decoder layers.
    if expected + END_LAYERS == layers:
        return Placement([0, *range(END_LAYERS, layers - 1), layers])
    if expected != layers:
        raise PlacementError(
            f"the schedule's stages hold {expected} layers; the model has {layers}: [placement] "
            "and [model] of the job file must agree"
        )
    # The schedules' layers are the model's, if the grid counts them alike.
    if grid.layer_count == layers:
        return Placement(range(layers + 1))
    return _placement_of_ranges(ranges)


def split_layers(layers: int, stages: int) -> list[tuple[int, int]]:
    """Divide layers into ranges, one for each stage, whose lengths differ by at most one.

    The end of each range is exclusive; stages in the middle get the longer ranges. Raises
    ConfigError unless there are 1 to `layers` stages.
    """
    # The first and the last layer of a model (embedding, head) usually differ from the others, so
    # the stages that hold them are the last to get an extra layer.
    if not 1 <= stages <= layers:
        raise ConfigError(
            f"{layers} layers cannot be cut into {stages} stages; expected 1 to {layers} stages"
        )
    short, extra = divmod(layers, stages)
    first = (stages - extra + 1) // 2
    ranges = []
    start = 0
    for stage in range(stages):
        end = start + short + (first <= stage < first + extra)
        ranges.append((start, end))
        start = end
    return ranges


def with_end_layers(counts: Sequence[int], layers: int) -> Sequence[int]:
    """Return the number of layers in each stage, the embedding and the head included.

    The model has `layers` layers, these two included. If the `counts` of the stages sum up to two
    less, the embedding is added to the first stage, and the head to the last. Otherwise `counts`
    are returned as they are, even if their sum is wrong.
    """
    if sum(counts) + END_LAYERS != layers:
        return counts
    whole = list(counts)
    whole[0] += 1
    whole[-1] += 1
    return whole


def _placement_of_ranges(ranges: Sequence[LayerRange]) -> Placement:
    return Placement([0, *(end for _, end in ranges)])


def assign_workers_to_nodes(workers: Sequence[Worker], nodes: int) -> list[list[Worker]]:
    """Divide workers, in order, among nodes, whose numbers of workers differ by at most 1."""
    ends = [len(workers) * node // nodes for node in range(nodes + 1)]
    return [list(workers[start:end]) for start, end in pairwise(ends)]
