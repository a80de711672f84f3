"""What a layout is made for, in plain integers."""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

import msgspec

from slipstream.planner.layout.types import Held, LiveWorker, MicroBatch, Stop
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker

LayersMode = Literal["fixed", "move"]


class Sums(NamedTuple):
    """[layer] sums over all layers before it, L + 1 values each."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    """I."""
    weight_gradient: tuple[int, ...]
    """W."""
    tail: tuple[int, ...]
    weight: tuple[int, ...]
    most: tuple[int, ...]


class LayoutProblem(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Costs of layers, live workers and what they hold. Times are ticks; memory is whole numbers of any one unit."""

    forward: tuple[int, ...]
    """Ticks of each layer."""
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    optimizer: tuple[int, ...]
    all_reduce: tuple[int, ...]
    transfer: int = 0
    """Ticks from one worker to another."""
    activation: tuple[int, ...] = ()
    """Memory that a micro-batch holds of each layer from F to I; () where memory is unlimited."""
    weight_stash: tuple[int, ...] = ()
    """From I to W."""
    weights: tuple[int, ...] = ()
    """Memory of each layer's parameters, gradients and optimizer state; () where holding more costs no room."""
    workers: Mapping[Worker, LiveWorker]
    """The live workers, sorted, with what they hold now."""
    microbatches: tuple[int, ...]
    """Of each pipeline in an iteration."""
    paths: tuple[tuple[tuple[LayerRange, int], ...], ...]
    """One for each chain: the stages that its micro-batches visit, in order, as (layers, worker column)."""
    layers: LayersMode = "fixed"
    """Whether workers may come to hold other layers."""
    from_checkpoint: bool = False
    """Whether layers that no live worker holds may be loaded from a checkpoint."""
    sliced: bool = True
    """Whether a route may be cut within what its workers hold; False: whole micro-batches at each worker."""

    @property
    def layer_count(self) -> int:
        """L."""
        return len(self.forward)

    @cached_property
    def live(self) -> tuple[Worker, ...]:
        """The live workers, sorted."""
        return tuple(self.workers)

    @cached_property
    def holds(self) -> Mapping[Worker, Held]:
        """What each live worker holds now."""
        return {worker: one.holds for worker, one in self.workers.items()}

    def holding(self, holds: Mapping[Worker, Held]) -> "LayoutProblem":
        """The same where live workers hold these layers now."""
        return msgspec.structs.replace(self, workers={worker: msgspec.structs.replace(one, holds=holds[worker])
                                                      for worker, one in self.workers.items()})

    @cached_property
    def live_of(self) -> tuple[tuple[Worker, ...], ...]:
        """[pipeline] its live workers, sorted."""
        found: list[list[Worker]] = [[] for _ in self.microbatches]
        for worker in self.live:
            found[worker.pipeline].append(worker)
        return tuple(map(tuple, found))

    @cached_property
    def work(self) -> tuple[int, ...]:
        """Ticks of F, I and W of each layer for one micro-batch, at the usual speed."""
        return tuple(map(sum, zip(self.forward, self.backward_input, self.backward_weight, strict=True)))

    @cached_property
    def tail(self) -> tuple[int, ...]:
        """Ticks of each layer at the end of an iteration on a worker that holds it: all-reduce and optimizer."""
        return tuple(map(sum, zip(self.all_reduce, self.optimizer, strict=True)))

    def slowness(self, worker: Worker) -> int:
        """Per mille of the usual time that this worker takes."""
        return self.workers[worker].per_mille

    def room_of(self, worker: Worker) -> int:
        """Memory of this worker; where it is unlimited, more than anything needs."""
        return self.workers[worker].room

    def slice_ticks(self, layers: LayerRange, worker: Worker) -> int:
        """Ticks of F, I and W of these layers on a worker; each op is rounded up by itself."""
        slow = self.slowness(worker)
        return sum(-(-(sums[layers[1]] - sums[layers[0]]) * slow // 1000) for sums in self.sums[:3])

    @cached_property
    def sums(self) -> "Sums":
        """Sums over the layers before each one."""
        def before(values: Iterable[int]) -> tuple[int, ...]:
            return tuple(accumulate(values, initial=0))

        layers = range(self.layer_count)
        return Sums(before(self.forward), before(self.backward_input), before(self.backward_weight), before(self.tail),
                    before(map(self.weight, layers)), before(map(self.most, layers)))

    def weight(self, layer: int) -> int:
        """Memory of a layer's parameters; 0 where memory is unlimited."""
        return self.weights[layer] if self.weights and self.activation else 0

    def stagger(self, first: int, last: int) -> int:
        """Ticks between the starts of the job's stages that hold these two layers: F and a transfer of each between.

        So far apart are their reductions: a slice over both is done before the first of them, and its worker then waits
        for the second.
        """
        return self._staggered[last] - self._staggered[first]

    @cached_property
    def _staggered(self) -> tuple[int, ...]:
        """[layer] ticks from the start of the first stage to that of the stage that holds it."""
        between = [0] * (self.layer_count + 1)
        for (low, high), _ in self.paths[0]:
            between[high] += self.transfer + self.sums.forward[high] - self.sums.forward[low]
        return tuple(accumulate(between))

    def most(self, layer: int) -> int:
        """The most that a micro-batch ever holds of a layer: its activation, or after its I its stash."""
        return max(self.activation[layer], self.weight_stash[layer]) if self.activation else 0

    def layers_held(self, worker: Worker) -> tuple[int, ...]:
        """The layers that a worker holds now, ascending."""
        return tuple(layer for first, end in self.holds[worker] for layer in range(first, end))

    @cached_property
    def ample_ticks(self) -> int:
        """More than the longest load can be: the slowest worker runs everything."""
        slowest = max(map(self.slowness, self.live))
        return (sum(self.work) * self.total_microbatches * slowest) // 1000 + sum(self.tail) + 1

    @property
    def total_microbatches(self) -> int:
        """Of all pipelines in one iteration."""
        return sum(self.microbatches)

    def home(self, batch: MicroBatch) -> tuple[Stop, ...]:
        """The route of a micro-batch when all workers live."""
        path = self.paths[batch.microbatch % len(self.paths)]
        return tuple(Stop(layers, Worker(batch.pipeline, column)) for layers, column in path)


class Part(NamedTuple):
    """Consecutive layers and those who hold all of them."""

    layers: LayerRange
    holders: tuple[Worker, ...]


def parts_of(problem: LayoutProblem) -> Iterator[Part]:
    """The parts, in order of layers. Raises LookupError where no live worker holds a layer."""
    cuts = {end for path in problem.paths for layers, _ in path for end in layers}
    cuts |= {end for held in problem.holds.values() for layers in held for end in layers}
    edges = sorted(cuts)
    for first, end in itertools.pairwise(edges):
        holders = tuple(worker for worker in problem.live
                        if any(low <= first and end <= high for low, high in problem.holds[worker]))
        if not holders:
            raise LookupError(f"no live worker holds layer {first}")
        yield Part((first, end), holders)
