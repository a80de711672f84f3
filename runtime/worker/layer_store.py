"""Layer store: the layers that a worker holds. They change with the schedule."""

from collections.abc import Callable, Collection, Iterable, Mapping

from torch import Tensor

from runtime.model.holding import Holding
from runtime.model.shards import cut_state, shards_of, whole_state
from runtime.model.worker_group import first_rank, worker_group

Build = Callable[[Iterable[int]], Holding]
"""Makes layers as they are before iteration 0."""
Restore = Callable[[int, Iterable[int]], Mapping[int, Mapping[str, Tensor]]]
"""The whole states of layers before an iteration, by a checkpoint; nothing where they are as they are built."""


class LayerStore:
    """Layers whose parameters are those after the last committed iteration."""

    def __init__(self, build: Build, restore: Restore) -> None:
        self._build = build
        self._restore = restore
        self.holding = build(())
        self._prepared: dict[int, Holding] = {}

    def prepare(self, layers: Iterable[int]) -> None:
        """Build layers that are likely to be needed soon."""
        for layer in layers:
            self._prepared[layer] = self._build([layer])

    def fresh(self, layer: int) -> Holding:
        """A layer that is not held, prepared or built. May be called from another thread."""
        return self._prepared.pop(layer, None) or self._build([layer])

    def clear(self) -> None:
        """Hold nothing."""
        self.holding.change(())

    def restore(self, layers: Collection[int], iteration: int) -> None:
        """Take up layers as they were before an iteration, beside those held already. Raises CheckpointError."""
        lacking = sorted(set(layers) - self.holding.modules.keys())
        fresh = {layer: self.fresh(layer) for layer in lacking}
        for layer, state in self._restore(iteration, lacking).items():
            one = fresh[layer]
            one.optimizer.load_layer_state(layer, cut_state(state, shards_of(one.modules[layer]), worker_group()))
        self.holding.change({*self.holding.modules, *lacking}, fresh.values())

    def keep(self, layers: Collection[int], fetched: Mapping[int, Holding]) -> None:
        """Hold exactly these layers: of those held already, and those that have come. No step may be open."""
        self.holding.change(layers, [one for layer, one in fetched.items() if layer not in self.holding.modules])

    def holds(self, layer: int) -> bool:
        """Whether a layer is held."""
        return layer in self.holding.modules

    def layer_gradients(self, layer: int) -> dict[str, Tensor]:
        """A layer's gradients; the tensors themselves."""
        return self.holding.optimizer.layer_gradients(layer)

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        """A layer with its optimizer's state, for another worker; the tensors themselves."""
        return self.holding.optimizer.layer_state(layer)

    def whole_states(self, layers: Iterable[int]) -> dict[int, dict[str, Tensor]]:
        """Whole layers to be saved. All ranks of a worker must ask together; the first has them, the others nothing."""
        group, found = worker_group(), dict[int, dict[str, Tensor]]()
        for layer in sorted(layers):
            state = whole_state(self.layer_state(layer), shards_of(self.holding.modules[layer]), group)
            if first_rank():
                found[layer] = state if group is None else {key: tensor.cpu() for key, tensor in state.items()}
        return found
