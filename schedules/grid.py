"""The shape of a job: workers, virtual stages and their layers."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Self

import msgspec

from slipstream.schedules.layers import LayerRange, joined_ranges


class Worker(NamedTuple):
    """A worker, or the role of one: the process that holds column `column` of pipeline `pipeline`.

    Without virtual stages the column is the stage. Written `pipeline.column`, e.g. `1.2`.
    """

    pipeline: int
    column: int

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.column}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `pipeline.column`. Raises ValueError that names the text."""
        pipeline, dot, column = text.partition(".")
        if not (dot and pipeline.isdecimal() and column.isdecimal() and text.isascii() and len(text) <= 16):
            raise ValueError(f"{text!r} is not a worker: write PIPELINE.STAGE, for example 1.2")
        return cls(int(pipeline), int(column))


class VirtualStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A virtual stage: the worker column that holds it and, when known, its half-open range of model layers."""

    column: int
    layers: LayerRange | None = None


class Grid(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True,
           dict=True):
    """The job's shape. `stages` are the virtual stages in the order in which a micro-batch visits them.

    With several chains (bidirectional pipelines: Chimera, Li & Hoefler 2021) they are as many runs of equal length, one
    after the other, and a micro-batch visits one run only. Stages at the same place of different chains are *copies*:
    they hold the same layers, and their gradients are reduced together.
    """

    pipelines: int
    columns: int
    microbatches: tuple[int, ...]
    """Micro-batches per iteration, one number a pipeline."""
    stages: tuple[VirtualStage, ...]
    chains: int = 1
    """Micro-batch m of a pipeline goes along chain m modulo `chains`."""

    @property
    def depth(self) -> int:
        """Virtual stages that a micro-batch visits."""
        return len(self.stages) // self.chains

    def path(self, microbatch: int) -> range:
        """The virtual stages that a micro-batch visits, in order."""
        first = microbatch % self.chains * self.depth
        return range(first, first + self.depth)

    def is_last(self, stage: int) -> bool:
        """Whether a chain ends with this stage."""
        return (stage + 1) % self.depth == 0

    def original(self, stage: int) -> int:
        """The same for all copies of a stage: the one in the first chain."""
        return stage % self.depth

    def workers(self) -> Iterator[Worker]:
        """Every worker of the grid, failed ones included, sorted."""
        for pipeline in range(self.pipelines):
            for column in range(self.columns):
                yield Worker(pipeline, column)

    def stages_of(self, column: int) -> tuple[int, ...]:
        """The virtual stages a worker of this column holds, ascending."""
        return self._stages_by_column[column]

    @cached_property
    def _stages_by_column(self) -> tuple[tuple[int, ...], ...]:
        held: list[list[int]] = [[] for _ in range(self.columns)]
        for index, stage in enumerate(self.stages):
            held[stage.column].append(index)
        return tuple(map(tuple, held))

    @cached_property
    def held_by_column(self) -> tuple[tuple[LayerRange, ...], ...]:
        """[column] the layers of its stages, as ascending ranges that do not touch."""
        return tuple(joined_ranges(self.layers_of(stage) for stage in held) for held in self._stages_by_column)

    @cached_property
    def layers_by_stage(self) -> tuple[LayerRange, ...]:
        """The layers of each virtual stage.

        They are the model's where the stages of each chain name them, from 0 on and at least one each. Else every
        stage counts as one layer.
        """
        given = tuple(stage.layers for stage in self.stages)
        named = tuple(layers for layers in given if layers is not None)
        chains = [named[first:first + self.depth] for first in range(0, len(given), self.depth)]
        if len(named) == len(given) and all(_tile_from_zero(chain) for chain in chains):
            return named
        return tuple((stage % self.depth, stage % self.depth + 1) for stage in range(len(given)))

    @property
    def layer_count(self) -> int:
        """Layers of the model: a route tiles 0 to `layer_count`."""
        return self.layers_by_stage[self.depth - 1][1]

    def layers_of(self, stage: int) -> LayerRange:
        """The layers of a virtual stage."""
        return self.layers_by_stage[stage]

    @property
    def total_microbatches(self) -> int:
        """Micro-batches of all pipelines in one iteration."""
        return sum(self.microbatches)


def _tile_from_zero(ranges: Sequence[LayerRange]) -> bool:
    return ranges[0][0] == 0 and all(first < end for first, end in ranges) and all(
        before[1] == after[0] for before, after in pairwise(ranges))
