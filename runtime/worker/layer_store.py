"""Store the layers that a worker holds, which change with the schedule."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Protocol

import torch
from torch import Tensor, nn

from slipstream.runtime.device import own_stream
from slipstream.runtime.model.layers.shards import cut_state, shards_of, whole_state
from slipstream.runtime.model.layers.unfilled import moved
from slipstream.runtime.model.layers.worker_group import first_rank, worker_group
from slipstream.runtime.model.state.followed_part import HOST
from slipstream.runtime.model.state.holding import Holding
from slipstream.runtime.model.state.part_state import PartState, as_parts, elements_of, put, span_of, whole
from slipstream.runtime.model.state.parts import Cut, Elements, Span, without
from slipstream.runtime.protocol.to_coordinator import Checksum, Kept
from slipstream.runtime.worker.layer_messages import PartName
from slipstream.schedules.layers import LayerRange, joined_ranges
from slipstream.schedules.schedule import Worker


class Build(Protocol):
    """Function that builds a layer."""

    def __call__(self, layer: int, *, filled: bool) -> nn.Module:
        """Build a layer as it is before iteration 0. Unless `filled`, its state is to be loaded afterwards:
        `model.state.holding.build_layer`."""


Restore = Callable[[int, Iterable[int]], Mapping[int, Mapping[str, Tensor]]]
"""Function that reads whole states of layers before an iteration; empty if the layers are as built."""


class LayerStore:
    """Layers of a worker, with the parameters after the last committed iteration.

    Parts that are fetched during training, and the layers they are for, take no memory of the `device` before the
    worker holds them: plans have no room for them there.
    """

    def __init__(self, build: Build, restore: Restore, holding: Holding, device: torch.device) -> None:
        self._build = build
        self._restore = restore
        self.holding = holding
        self._device = device
        self._received: list[PartState] = []
        """Parts that have been read or received for an order."""
        self._building = threading.Lock()
        self._built: dict[int, nn.Module] = {}
        """Layers that are needed, or soon will be, and that are not held yet."""
        self._filled: frozenset[int] = frozenset()
        """Layers of `_built` that are as they are before the first iteration."""

    def prepare(self, layers: Iterable[int]) -> None:
        """Build layers that will probably be needed soon, with state from other workers."""
        for layer in layers:
            self.module(layer)

    def clear(self) -> None:
        """Drop all layers."""
        self.holding.clear()
        self._received, self._filled = [], frozenset()

    def read(self, layers: Collection[int], iteration: int) -> None:
        """Read layers as they were before an iteration. Raises CheckpointError."""
        self._received = []
        states = self._restore(iteration, sorted(layers))
        for layer in set(layers) - states.keys() - self.holding.modules.keys():
            module = self._build(layer, filled=True)
            with self._building:
                self._built[layer] = module
            self._filled |= {layer}
        for layer, state in states.items():
            module = self.module(layer)
            self._received.append(as_parts(module, layer, cut_state(state, shards_of(module), worker_group()),
                                           iteration - 1))

    def receive(self, received: Iterable[PartState]) -> None:
        """Add parts that have come for an order. They are kept until the next `keep_parts`."""
        self._received = [*(part for part in self._received if part.state), *received]

    def checksums(self, after: int) -> Callable[[], tuple[Checksum, ...]]:
        """Start to compute the checksums of all state, as it is after an iteration. Return a function that waits for
        them. Raises VersionError."""
        pending = list(self.holding.optimizer.checksums(after))

        def read() -> tuple[Checksum, ...]:
            sums = torch.stack([total for *_, total in pending]).tolist() if pending else ()
            return tuple(Checksum(layer, *span, state, (value,))
                         for (layer, span, state, _), value in zip(pending, sums, strict=True))

        return read

    def flip_bit(self, what: str, rng: Random) -> None:
        """Flip a random bit of the state on purpose (`PartOptimizer.flip_bit`)."""
        self.holding.optimizer.flip_bit(what, rng)

    def keep_parts(self, cuts: Mapping[LayerRange, Cut], worker: Worker, after: int) -> None:
        """Hold the layers of these partitions, and of their optimizer state the parts that they assign to a worker.

        All held, read and received state must be that after the iteration `after`, with no step open. Raises
        VersionError.
        """
        self.holding.keep(self._modules(cuts), cuts, worker, self._received, after, self._filled)
        self._received, self._built, self._filled = [], {}, frozenset()

    def kept(self) -> Kept:
        """Return the layers and parts that are held. Layers that have come whole for an order are included, and parts
        that have come."""
        received = dict[int, list[Span]]()
        for part in self._received:
            if part.state:
                received.setdefault(part.layer, []).append((part.start, part.stop))
        whole = [layer for layer, spans in received.items() if not without((0, self.elements(layer).total), spans)]
        return Kept(joined_ranges((layer, layer + 1) for layer in {*self.holding.modules, *whole}),
                    tuple((layer, *span) for states in (self.holding.optimizer.kept, received)
                          for layer, spans in states.items() for span in spans if span[0] < span[1]),
                    self.holding.optimizer.whole_after)

    def keeps(self, part: PartName) -> bool:
        """Return whether a part of a layer is held, or has been read or received."""
        kept = self.holding.optimizer.kept.get(part.layer, ((0, 0),) if part.layer in self.holding.modules else ())
        return self._has_received(part) is not None or any(
            first <= part.start and part.stop <= end for first, end in kept)

    def part_state(self, part: PartName, after: int) -> dict[str, Tensor]:
        """Return a part of a layer that is held, as it is after an iteration, to be sent to another worker. The tensors
        are not copied. Raises VersionError."""
        span, received = (part.start, part.stop), self._has_received(part)
        if received is not None:
            received.require(after)
            return span_of(self.module(part.layer), received, span, state=part.state)
        state = self.holding.optimizer.part_state(part.layer, span, state=part.state)
        state.require(after)
        return dict(state.tensors)

    def part_gradients(self, part: PartName, after: int) -> dict[str, Tensor]:
        """Return the gradients by which a whole part was stepped in iteration `after`. The tensors are not copied.
        Raises VersionError."""
        self.holding.optimizer.version.require(after, "what this worker keeps")
        return self.holding.optimizer.part_gradients(part.layer, (part.start, part.stop))

    def _has_received(self, part: PartName) -> PartState | None:
        return next((received for received in self._received if received.layer == part.layer and received.state
                     and received.start <= part.start and part.stop <= received.stop), None)

    def put(self, received: Sequence[PartState], after: int) -> None:
        """Set the parameters that are not kept up to date here to those that were received. Raises VersionError. They
        must be those after the iteration `after`."""
        for part in received:
            part.require(after)
        for layer, module in self.holding.modules.items():
            put(module, [state for state in received if state.layer == layer], untrained_too=False)

    def whole_layers(self, layers: Iterable[int], received: Sequence[PartState], after: int
                     ) -> dict[int, dict[str, Tensor]]:
        """Return whole layers as they are after an iteration, in host memory, to be saved.

        Parts that this worker does not keep come from `received`. All ranks of a worker must call this together; the
        first gets the layers, the others nothing. Raises VersionError.
        """
        group, layer_states, layers = worker_group(), dict[int, dict[str, Tensor]](), sorted(layers)
        device = next((parameter.device for parameter in self.holding.parameters().values()), HOST)
        with _copying(device):
            states = {layer: self._with_parts(layer, received, after) for layer in layers}
        for layer, state in states.items():
            if group is not None:  # the group's connections carry only tensors on the device
                shards, own_shards = shards_of(self.holding.modules[layer]), state
                state = whole_state({key: tensor.to(device) for key, tensor in own_shards.items()}, shards, group)
            if first_rank():
                layer_states[layer] = {key: tensor.cpu() for key, tensor in state.items()}
        return layer_states

    def _with_parts(self, layer: int, received: Sequence[PartState], after: int) -> dict[str, Tensor]:
        """Return the state of a layer, joined from held and received parts."""
        parts = [part for part in (*self.holding.optimizer.kept_states(), *self._received, *received)
                 if part.layer == layer]
        for part in parts:
            part.require(after)
        return whole(self.holding.modules[layer], parts)

    def elements(self, layer: int) -> Elements:
        """Return the number of elements, at this rank, of a layer that is held or will be."""
        return elements_of(self.module(layer))

    def _modules(self, cuts: Iterable[LayerRange]) -> dict[int, nn.Module]:
        """Return the layers of some ranges: those that are held, and new ones, which are moved to the device."""
        held = self.holding.modules
        return {layer: held[layer] if layer in held else moved(self.module(layer), self._device)
                for layers in cuts for layer in range(*layers)}

    def module(self, layer: int) -> nn.Module:
        """Return a layer: one that is held, or a new one whose state `keep_parts` will load. Any thread may call
        this."""
        held = self.holding.modules
        if layer in held:
            return held[layer]
        with self._building:
            if layer not in self._built:
                self._built[layer] = self._build(layer, filled=False)
            return self._built[layer]


@contextmanager
def _copying(device: torch.device) -> Iterator[None]:
    """Run the block on a stream of its own, so that copies from a device do not wait for later compute. The copies are
    complete at the end of the block."""
    if device.type != "cuda":
        yield
        return
    stream = own_stream(device, "copies")
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
