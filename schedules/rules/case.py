"""The schedule under check, and what several rules look up in it."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import msgspec

from slipstream.schedules.equal import equal_groups
from slipstream.schedules.graph import programs_of
from slipstream.schedules.layers import joined_ranges, layers_text
from slipstream.schedules.precedence import OpKey, op_key
from slipstream.schedules.schedule import COMPUTE_KINDS, LayerRange, Op, OpKind, Schedule, Worker

Route = Sequence[int]
"""The slices that a micro-batch passes, in order."""


class Violation(msgspec.Struct, frozen=True):
    """A broken rule: its name, one line with ids and values, and the offending op or worker where there is one."""

    rule: str
    message: str
    op: Op | None = None
    worker: Worker | None = None

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


class Case(msgspec.Struct, frozen=True, dict=True):
    """The schedule under check, and what several rules look up in it."""

    schedule: Schedule
    forwards: bool = False
    """Whether it is to have forwards alone."""

    @cached_property
    def pipelines(self) -> tuple[int, ...]:
        """The pipelines to look at: one group of each set that behaves the same."""
        return tuple(sorted(pipeline for group in equal_groups(self.schedule) for pipeline in group))

    @cached_property
    def programs(self) -> Mapping[Worker, list[Op]]:
        """The ops of each worker whose role lies in `pipelines`, in program order."""
        return programs_of(self.schedule, self.pipelines)

    @cached_property
    def ops(self) -> Mapping[OpKey, Op]:
        """The compute ops, by what they compute. Each is there exactly once from the second tier on."""
        return {op_key(op): op for op in self.compute()}

    def compute(self) -> Iterator[Op]:
        """All compute ops, worker by worker."""
        return (op for ops in self.programs.values() for op in ops if op.kind in COMPUTE_KINDS)

    @cached_property
    def reductions(self) -> Mapping[Worker, list[tuple[LayerRange, Op]]]:
        """The As of each worker, with the layers whose gradients they sum."""
        layers = self.schedule.layers_by_slice
        return {worker: [(layers[op.slice], op) for op in ops if op.kind is OpKind.A and op.slice is not None]
                for worker, ops in self.programs.items()}

    @property
    def kinds(self) -> tuple[OpKind, ...]:
        """The ops of one micro-batch at one slice."""
        if self.forwards:
            return (OpKind.F,)
        split = self.schedule.backward == "split"
        return (OpKind.F, OpKind.I, OpKind.W) if split else (OpKind.F, OpKind.B)

    @property
    def gradient_kind(self) -> OpKind:
        """The op that produces the gradient for the slice before."""
        return self.kinds[1]

    def microbatches(self) -> Iterator[tuple[int, int]]:
        """Every micro-batch of `pipelines`: its pipeline and its number."""
        for pipeline in self.pipelines:
            for microbatch in range(self.schedule.grid.microbatches[pipeline]):
                yield pipeline, microbatch

    @cached_property
    def whole_stages(self) -> bool:
        """Whether every micro-batch runs every op once along its own chain of stages, and nothing else runs."""
        grid, kinds = self.schedule.grid, self.kinds
        expected = ((kind, stage, pipeline, microbatch) for pipeline, microbatch in self.microbatches()
                    for stage in grid.path(microbatch) for kind in kinds)
        count = sum(grid.microbatches[pipeline] for pipeline in self.pipelines) * grid.depth * len(kinds)
        return all(map(self.ops.__contains__, expected)) and sum(1 for _ in self.compute()) == len(self.ops) == count

    @cached_property
    def routes(self) -> Mapping[tuple[int, int], tuple[int, ...]]:
        """The slices whose F each micro-batch (pipeline, number) runs, in the order of their layers."""
        found: dict[tuple[int, int], list[int]] = defaultdict(list)
        for kind, slice, pipeline, microbatch in self.ops:
            if kind is OpKind.F:
                found[pipeline, microbatch].append(slice)
        layers = self.schedule.layers_by_slice
        return {microbatch: tuple(sorted(slices, key=lambda slice: layers[slice]))
                for microbatch, slices in found.items()}

    def route(self, pipeline: int, microbatch: int) -> Route:
        """The route of a micro-batch; it tiles all layers from the second tier on."""
        if self.whole_stages:
            return self.schedule.grid.path(microbatch)
        return self.routes.get((pipeline, microbatch), ())

    @cached_property
    def reduced_ranges(self) -> list[LayerRange]:
        """The layers of all As, each range once, ascending. They are disjoint from the third tier on."""
        return sorted({layers for reduced in self.reductions.values() for layers, _ in reduced})

    def reduced_with(self, layers: LayerRange) -> Iterator[LayerRange]:
        """The ranges among `reduced_ranges` that share a layer with these; for disjoint ranges."""
        ranges = self.reduced_ranges
        for index in range(max(0, bisect_left(ranges, (layers[0], 0)) - 1), len(ranges)):
            if ranges[index][0] >= layers[1]:
                return
            if ranges[index][1] > layers[0]:
                yield ranges[index]

    def covers(self, held: Sequence[LayerRange], layers: LayerRange) -> bool:
        """Whether ascending ranges that do not touch have all these layers."""
        return any(first <= layers[0] and layers[1] <= end for first, end in held)

    def hop(self, before: Op, after: Op) -> int:
        """Ticks on the way from one op to the next: none within a worker."""
        return 0 if before.worker == after.worker else self.schedule.times.transfer

    def text(self, op: Op) -> str:
        """An op for a message."""
        return self.schedule.op_text(op)

    def at(self, ticks: int) -> str:
        """A time or duration for a message."""
        return f"{ticks} ticks ({self.schedule.seconds(ticks):g} s)"


def listed(ranges: Sequence[LayerRange]) -> str:
    """Layers for a message: `layers 0 to 3, layer 6`."""
    return ", ".join(layers_text(layers) for layers in joined_ranges(ranges)) or "no layer"
