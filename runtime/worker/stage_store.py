"""Stage store: the stages that a worker holds, each with its optimizer. They change with its role."""

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from runtime.model.optimizer import StageOptimizer
from runtime.model.stage import StageModule
from runtime.worker.layer_receiver import Fetched

Build = Callable[[int], tuple[StageModule, StageOptimizer]]
"""Makes a stage."""
Restore = Callable[[StageModule, StageOptimizer, int], None]
"""Brings a stage to where it was before an iteration, by a checkpoint; or leaves it as it is built."""


class StageStore:
    """Stages whose parameters are those after the last committed iteration."""

    def __init__(self, build: Build, restore: Restore) -> None:
        self._build = build
        self._restore = restore
        self.stages: dict[int, StageModule] = {}
        self.optimizers: dict[int, StageOptimizer] = {}
        self._prepared: dict[int, tuple[StageModule, StageOptimizer]] = {}

    def prepare(self, stages: Iterable[int]) -> None:
        """Build stages that are likely to be needed soon."""
        for index in stages:
            self._prepared[index] = self._build(index)

    def clear(self) -> None:
        """Hold nothing."""
        self.stages.clear()
        self.optimizers.clear()

    def restore(self, stages: Iterable[int], iteration: int) -> None:
        """Take up stages as they were before an iteration, beside those held already. Raises CheckpointError."""
        for index in stages:
            if index not in self.stages:
                stage, optimizer = self.fresh(index)
                self._restore(stage, optimizer, iteration)
                self.stages[index], self.optimizers[index] = stage, optimizer

    def fresh(self, index: int) -> tuple[StageModule, StageOptimizer]:
        """A stage that is not held, prepared or built. May be called from another thread."""
        return self._prepared.pop(index, None) or self._build(index)

    def adopt(self, fetched: Mapping[int, Fetched]) -> None:
        """Hold these stages, too. Layers that have not come are copied from those held already. No step may be open."""
        for index, (stage, optimizer, layers) in sorted(fetched.items()):
            for layer in set(stage.modules) - layers:
                optimizer.load_layer_state(layer, self.layer_state(layer))
            self.stages[index], self.optimizers[index] = stage, optimizer

    def holds(self, layer: int) -> bool:
        """Whether a layer is held."""
        return any(layer in range(*stage.layers) for stage in self.stages.values())

    def layer_gradients(self, layer: int) -> dict[str, Tensor]:
        """A layer's gradients; the tensors themselves."""
        return self.optimizers[self._stage_of(layer)].layer_gradients(layer)

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        """A layer with its optimizer's state, for another worker; the tensors themselves."""
        return self.optimizers[self._stage_of(layer)].layer_state(layer)

    def keep(self, stages: Iterable[int]) -> None:
        """Hold exactly these stages: each that is not held yet is a copy of one that is. No step may be open."""
        fresh = {}
        for index in stages:
            if index not in self.stages:
                stage, optimizer = self.fresh(index)
                for layer in range(*stage.layers):
                    optimizer.load_layer_state(layer, self.layer_state(layer))
                fresh[index] = stage, optimizer
        for index in set(self.stages) - set(stages):
            del self.stages[index], self.optimizers[index]
        for index, (stage, optimizer) in fresh.items():
            self.stages[index], self.optimizers[index] = stage, optimizer

    def discard(self) -> None:
        """Forget all micro-batches in flight, and the gradients: the iteration did not happen."""
        for stage in self.stages.values():
            stage.discard()

    def _stage_of(self, layer: int) -> int:
        return next(index for index, stage in self.stages.items() if layer in range(*stage.layers))
