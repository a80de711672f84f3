"""Define a job's shape: workers, stages and layers, with the ranges that reading checks."""

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Annotated, NamedTuple, Self

import msgspec

from slipstream.schedules.layers import LayerRange, merge_ranges

MAX_WORKERS = 2**17
MAX_MICROBATCHES = 2**16
Natural = Annotated[int, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)]
Ticks = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
"""Time or amount of memory, as an integer that a double represents exactly."""
TickSeconds = Annotated[float, msgspec.Meta(ge=1e-12, le=1e6)]
_Term = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
Ratio = tuple[_Term, _Term]
"""Exact fraction, as (numerator, denominator)."""


class Worker(NamedTuple):
    """Name of a worker, or of a role: column `column` of pipeline `pipeline`.

    Without virtual stages, the column is the stage. As text, the name is `pipeline.column`, e.g.
    `1.2`.
    """

    pipeline: Natural
    column: Natural

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.column}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a worker's name, such as `1.2`. Raises ValueError, which quotes the text."""
        pipeline, dot, column = text.partition(".")
        are_numbers = pipeline.isdecimal() and column.isdecimal() and text.isascii()
        if not (dot and are_numbers and len(text) <= 16):
            raise ValueError(f"{text!r} is not a worker: write PIPELINE.STAGE, for example 1.2")
        return cls(int(pipeline), int(column))


Speeds = tuple[tuple[Worker, float], ...]
"""Workers at unusual speed, sorted, each with the factor on its compute ops' times."""
HeldLayers = tuple[tuple[Worker, tuple[LayerRange, ...]], ...]
"""Layers that each live worker holds, sorted by worker."""


class VirtualStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Virtual stage: the column whose workers hold it, and its layers; None if unknown."""

    column: Natural
    layers: LayerRange | None = None


class Grid(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    omit_defaults=True,
    dict=True,
):
    """Shape of a job: its pipelines, their micro-batches, and their virtual stages.

    Bidirectional pipelines (Chimera, Li & Hoefler 2021) have several chains. A *chain* is a run of
    virtual stages that cover the model once; each micro-batch passes a single chain. `stages` lists
    chains one after the other, with equally many stages each. Stages at the same place of different
    chains are *copies*: they hold the same layers, and their gradients are reduced together.
    """

    pipelines: Count
    columns: Count
    microbatches: tuple[Annotated[int, msgspec.Meta(ge=0, le=MAX_MICROBATCHES)], ...]
    """Number of micro-batches per iteration, one value per pipeline."""
    stages: tuple[VirtualStage, ...]
    """Virtual stages in the order in which micro-batches pass them, chain by chain."""
    chains: Count = 1
    """Number of chains, between which micro-batches alternate: 2 if bidirectional, else 1."""

    @property
    def depth(self) -> int:
        """Number of virtual stages that a micro-batch passes."""
        return len(self.stages) // self.chains

    def stages_of_microbatch(self, microbatch: int) -> range:
        """Return the numbers of the virtual stages that a micro-batch passes, in order.

        `microbatch` is its number in its pipeline.
        """
        return self._stages_by_chain[microbatch % self.chains]

    @cached_property
    def _stages_by_chain(self) -> tuple[range, ...]:
        starts = range(0, len(self.stages), self.depth)
        return tuple(range(first, first + self.depth) for first in starts)

    def is_last(self, stage: int) -> bool:
        """Return whether a stage is the last one of its chain."""
        return (stage + 1) % self.depth == 0

    def original_stage(self, stage: int) -> int:
        """Return the stage of the first chain that has the same layers as `stage`.

        In the first chain, that is the stage itself.
        """
        return stage % self.depth

    def workers(self) -> Iterator[Worker]:
        """Iterate over all workers of the grid, including failed ones, in ascending order."""
        for pipeline in range(self.pipelines):
            for column in range(self.columns):
                yield Worker(pipeline, column)

    def stages_of_column(self, column: int) -> tuple[int, ...]:
        """Return the virtual stages that the workers of a column hold, ascending."""
        return self._stages_by_column[column]

    @cached_property
    def _stages_by_column(self) -> tuple[tuple[int, ...], ...]:
        stages: list[list[int]] = [[] for _ in range(self.columns)]
        for index, stage in enumerate(self.stages):
            stages[stage.column].append(index)
        return tuple(map(tuple, stages))

    @cached_property
    def held_layers_by_column(self) -> tuple[tuple[LayerRange, ...], ...]:
        """Layers of each column's stages, as ascending ranges that do not touch."""
        return tuple(merge_ranges(map(self.layers_of, stages)) for stages in self._stages_by_column)

    @cached_property
    def layers_by_stage(self) -> tuple[LayerRange, ...]:
        """Range of layers of each virtual stage, by its number.

        The ranges are those that the stages name, if every stage has layers and those of each chain
        cover the model from layer 0 on without gaps. Otherwise every stage counts as one layer,
        numbered by its place in its chain.
        """
        count = len(self.stages)
        named = tuple(stage.layers for stage in self.stages if stage.layers is not None)
        chains = [named[first : first + self.depth] for first in range(0, count, self.depth)]
        if len(named) == count and all(map(_is_tiling_from_zero, chains)):
            return named
        return tuple((stage % self.depth, stage % self.depth + 1) for stage in range(count))

    @property
    def layer_count(self) -> int:
        """Number of layers of the model. A route covers layers 0 to `layer_count` - 1."""
        return self.layers_by_stage[self.depth - 1][1]

    def layers_of(self, stage: int) -> LayerRange:
        """Return the layers of a virtual stage, by its number."""
        return self.layers_by_stage[stage]

    @property
    def total_microbatches(self) -> int:
        """Number of micro-batches of all pipelines in one iteration."""
        return sum(self.microbatches)


def _is_tiling_from_zero(ranges: Sequence[LayerRange]) -> bool:
    """Return whether the ranges are not empty, begin at layer 0, and leave no gaps."""
    have_layers = all(first < end for first, end in ranges)
    return (
        have_layers
        and ranges[0][0] == 0
        and all(before[1] == after[0] for before, after in pairwise(ranges))
    )
