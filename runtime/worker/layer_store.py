"""Layer store: the layers that a worker holds. They change with the schedule."""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn

from slipstream.runtime.model.layers.shards import cut_state, shards_of, whole_state
from slipstream.runtime.model.layers.worker_group import first_rank, worker_group
from slipstream.runtime.model.ranks.own_ranks import joined_state
from slipstream.runtime.model.state.holding import Holding
from slipstream.runtime.model.state.optimizer import UndoableOptimizer
from slipstream.runtime.model.state.part_optimizer import PartOptimizer
from slipstream.runtime.model.state.part_state import PartState, as_parts, elements_of, put, span_of, whole
from slipstream.runtime.model.state.parts import Cut, Elements
from slipstream.runtime.protocol.to_coordinator import Kept
from slipstream.runtime.worker.layer_messages import PartName
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Worker


class Build(Protocol):
    """Makes layers."""

    def __call__(self, layers: Iterable[int], *, filled: bool) -> Holding:
        """As they are before iteration 0; unless `filled`, their states are to be loaded."""


Restore = Callable[[int, Iterable[int]], Mapping[int, Mapping[str, Tensor]]]
"""The whole states of layers before an iteration, by a checkpoint; nothing where they are as they are built."""
ByRank = Sequence[Sequence[PartState]]
"""What was received as each of the ranks that this process stands for."""


class LayerStore:
    """Layers whose parameters are those after the last committed iteration."""

    def __init__(self, build: Build, restore: Restore) -> None:
        self._build = build
        self._restore = restore
        self.holding = build((), filled=True)
        self._prepared: dict[int, Holding] = {}
        self._received: list[PartState] = []
        """What has been read or has come for an order, where workers keep parts of layers' states."""
        self._building = threading.Lock()
        self._built: dict[int, nn.Module] = {}
        """Layers that an order needs and that are not held yet."""

    def prepare(self, layers: Iterable[int]) -> None:
        """Build layers that are likely to be needed soon, and to come from others."""
        for layer in layers:
            self._prepared[layer] = self._build([layer], filled=False)

    def fresh(self, layer: int) -> Holding:
        """A layer that is not held, prepared or built, and whose state is to be loaded. May be called from another
        thread."""
        return self._prepared.pop(layer, None) or self._build([layer], filled=False)

    def clear(self) -> None:
        """Hold nothing."""
        self.holding.change(())
        self._received = []

    def restore(self, layers: Collection[int], iteration: int) -> None:
        """Take up layers as they were before an iteration, beside those held already. Raises CheckpointError."""
        lacking = sorted(set(layers) - self.holding.modules.keys())
        states = self._restore(iteration, lacking)
        fresh = {layer: self.fresh(layer) if layer in states else self._build([layer], filled=True)
                 for layer in lacking}
        for layer, state in states.items():
            one = fresh[layer]
            assert isinstance(one.optimizer, UndoableOptimizer)
            one.optimizer.load_layer_state(layer, cut_state(state, shards_of(one.modules[layer]), worker_group()))
        self.holding.change({*self.holding.modules, *lacking}, fresh.values())

    def keep(self, layers: Collection[int], fetched: Mapping[int, Holding]) -> None:
        """Hold exactly these layers: of those held already, and those that have come. No step may be open."""
        self.holding.change(layers, [one for layer, one in fetched.items() if layer not in self.holding.modules])

    def read(self, layers: Collection[int], iteration: int) -> None:
        """Where workers keep parts: read layers as they were before an iteration. Raises CheckpointError."""
        self._received = []
        states = self._restore(iteration, sorted(layers))
        for layer in set(layers) - states.keys() - self.holding.modules.keys():
            module = self._build([layer], filled=True).modules[layer]
            with self._building:
                self._built[layer] = module
        for layer, state in states.items():
            module = self.module(layer)
            self._received.append(as_parts(module, layer, cut_state(state, shards_of(module), worker_group())))

    def receive(self, received: ByRank) -> None:
        """Parts have come for an order: keep them, too, until the next `keep_parts`."""
        (mine,) = received
        self._received = [*(one for one in self._received if one.state), *mine]

    def keep_parts(self, cuts: Mapping[LayerRange, Cut], worker: Worker, after: int) -> None:
        """Hold the layers of these cuts, and of their optimizer's state what a worker keeps by them.

        What has been read and received is as it is after an iteration; no step may be open.
        """
        self.holding.keep(self._modules(cuts), cuts, worker, self._received, after)
        self._received, self._built = [], {}

    def kept(self) -> Kept | None:
        """What is kept, where workers keep parts of layers' states."""
        optimizer = self.holding.optimizer
        if not isinstance(optimizer, PartOptimizer):
            return None
        return Kept((*((layer, *span) for layer, spans in optimizer.kept.items() for span in spans),
                     *((one.layer, one.start, one.stop) for one in self._received if one.state)),
                    optimizer.whole_after)

    def keeps(self, part: PartName) -> bool:
        """Whether a part of a layer is kept, or has been read or received."""
        return self._has_received(part) is not None or any(
            first <= part.start and part.stop <= end for first, end in self._parts.kept.get(part.layer, ()))

    def part_state(self, part: PartName) -> dict[str, Tensor]:
        """A part of a layer that is kept, for another worker; the tensors themselves."""
        span, received = (part.start, part.stop), self._has_received(part)
        if received is not None:
            return span_of(self.module(part.layer), received, span, state=part.state)
        return dict(self._parts.part_state(part.layer, span, state=part.state).tensors)

    def part_gradients(self, part: PartName) -> dict[str, Tensor]:
        """By what a part that is kept, as a whole, was stepped last; the tensors themselves."""
        return self._parts.part_gradients(part.layer, (part.start, part.stop))

    def _has_received(self, part: PartName) -> PartState | None:
        return next((one for one in self._received if one.layer == part.layer and one.state
                     and one.start <= part.start and part.stop <= one.stop), None)

    def put(self, received: ByRank) -> None:
        """What was received of what is not kept here are the parameters from now on."""
        (mine,) = received
        for layer, module in self.holding.modules.items():
            put(module, [one for one in mine if one.layer == layer], untrained_too=False)

    def own_parts(self, layers: LayerRange) -> list[PartState]:
        """This worker's own parts of a range of layers; the tensors themselves."""
        return [part for layer in range(*layers) for part in self._parts.own_states(layer)]

    @property
    def by_rank(self) -> Sequence["LayerStore"]:
        """That of each rank that this process stands for, where workers keep parts of layers' states."""
        return [self]

    def whole_layers(self, layers: Iterable[int], received: ByRank) -> dict[int, dict[str, Tensor]]:
        """As `whole_states`, with what was received of what is not kept here."""
        group, found = worker_group(), dict[int, dict[str, Tensor]]()
        for layer in sorted(layers):
            shards = shards_of(self.holding.modules[layer])
            states = [store.with_parts(layer, parts) for store, parts in zip(self.by_rank, received, strict=True)]
            state = whole_state(states[0] if len(states) == 1 else joined_state(states, shards), shards, group)
            if first_rank():
                found[layer] = state
        return found

    def with_parts(self, layer: int, received: Sequence[PartState]) -> dict[str, Tensor]:
        """The state of a layer, from parts that are kept and others that were received."""
        return whole(self.holding.modules[layer],
                     [one for one in (*self._parts.kept_states(), *self._received, *received) if one.layer == layer])

    @property
    def _whole(self) -> UndoableOptimizer:
        optimizer = self.holding.optimizer
        assert isinstance(optimizer, UndoableOptimizer)
        return optimizer

    @property
    def _parts(self) -> PartOptimizer:
        optimizer = self.holding.optimizer
        assert isinstance(optimizer, PartOptimizer)
        return optimizer

    def elements(self, layer: int) -> Elements:
        """How many a layer has that is held, or will be."""
        return elements_of(self.module(layer))

    def _modules(self, cuts: Iterable[LayerRange]) -> dict[int, nn.Module]:
        return {layer: self.module(layer) for layers in cuts for layer in range(*layers)}

    def module(self, layer: int) -> nn.Module:
        """A layer: one that is held, or a new one, which is kept for `keep_parts`. May be called from other threads."""
        held = self.holding.modules
        if layer in held:
            return held[layer]
        with self._building:
            if layer not in self._built:
                self._built[layer] = self.fresh(layer).modules[layer]
            return self._built[layer]

    def holds(self, layer: int) -> bool:
        """Whether a layer is held."""
        return layer in self.holding.modules

    def layer_gradients(self, layer: int) -> dict[str, Tensor]:
        """A layer's gradients; the tensors themselves."""
        return self._whole.layer_gradients(layer)

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        """A layer with its optimizer's state, for another worker; the tensors themselves."""
        return self._whole.layer_state(layer)

    def whole_states(self, layers: Iterable[int]) -> dict[int, dict[str, Tensor]]:
        """Whole layers to be saved. All ranks of a worker must ask together; the first has them, the others nothing."""
        group, found = worker_group(), dict[int, dict[str, Tensor]]()
        for layer in sorted(layers):
            state = whole_state(self.layer_state(layer), shards_of(self.holding.modules[layer]), group)
            if first_rank():
                found[layer] = state if group is None else {key: tensor.cpu() for key, tensor in state.items()}
        return found
