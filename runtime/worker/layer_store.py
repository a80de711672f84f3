"""Layer store: the layers that a worker holds. They change with the schedule."""

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
    """Makes a layer."""

    def __call__(self, layer: int, *, filled: bool) -> nn.Module:
        """As it is before iteration 0; unless `filled`, its state is to be loaded: `model.state.holding.built`."""


Restore = Callable[[int, Iterable[int]], Mapping[int, Mapping[str, Tensor]]]
"""The whole states of layers before an iteration, by a checkpoint; nothing where they are as they are built."""


class LayerStore:
    """Layers whose parameters are those after the last committed iteration.

    What is fetched while training goes on, and the layers that it is for, take nothing of the `device` before they are
    held: plans have no room for them there.
    """

    def __init__(self, build: Build, restore: Restore, holding: Holding, device: torch.device) -> None:
        self._build = build
        self._restore = restore
        self.holding = holding
        self._device = device
        self._received: list[PartState] = []
        """What has been read or has come for an order."""
        self._building = threading.Lock()
        self._built: dict[int, nn.Module] = {}
        """Layers that are needed, or soon will be, and that are not held yet."""
        self._filled: frozenset[int] = frozenset()
        """Those of them that are as they are before the first iteration."""

    def prepare(self, layers: Iterable[int]) -> None:
        """Build layers that are likely to be needed soon, and to come from others."""
        for layer in layers:
            self.module(layer)

    def clear(self) -> None:
        """Hold nothing."""
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
        """Parts have come for an order: keep them, too, until the next `keep_parts`."""
        self._received = [*(one for one in self._received if one.state), *received]

    def checksums(self, after: int) -> Callable[[], tuple[Checksum, ...]]:
        """Have the checksums summed of all that is held, as it is after an iteration; what waits for them. Raises
        VersionError."""
        found = list(self.holding.optimizer.checksums(after))

        def read() -> tuple[Checksum, ...]:
            sums = torch.stack([one for *_, one in found]).tolist() if found else ()
            return tuple(Checksum(layer, *span, state, (value,))
                         for (layer, span, state, _), value in zip(found, sums, strict=True))

        return read

    def flip_bit(self, what: str, rng: Random) -> None:
        """Break what is held, on purpose (`PartOptimizer.flip_bit`)."""
        self.holding.optimizer.flip_bit(what, rng)

    def keep_parts(self, cuts: Mapping[LayerRange, Cut], worker: Worker, after: int) -> None:
        """Hold the layers of these cuts, and of their optimizer's state what a worker keeps by them.

        What is held, and has been read and received, must be as it is after an iteration, with no step open. Raises
        VersionError.
        """
        self.holding.keep(self._modules(cuts), cuts, worker, self._received, after, self._filled)
        self._received, self._built, self._filled = [], {}, frozenset()

    def kept(self) -> Kept:
        """The layers that are held, with those that have come whole for an order, and the parts of them that are kept
        or have come."""
        came = dict[int, list[Span]]()
        for one in self._received:
            if one.state:
                came.setdefault(one.layer, []).append((one.start, one.stop))
        whole = [layer for layer, spans in came.items() if not without((0, self.elements(layer).total), spans)]
        return Kept(joined_ranges((layer, layer + 1) for layer in {*self.holding.modules, *whole}),
                    tuple((layer, *span) for states in (self.holding.optimizer.kept, came)
                          for layer, spans in states.items() for span in spans if span[0] < span[1]),
                    self.holding.optimizer.whole_after)

    def keeps(self, part: PartName) -> bool:
        """Whether a part of a layer is kept, or has been read or received."""
        kept = self.holding.optimizer.kept.get(part.layer, ((0, 0),) if part.layer in self.holding.modules else ())
        return self._has_received(part) is not None or any(
            first <= part.start and part.stop <= end for first, end in kept)

    def part_state(self, part: PartName, after: int) -> dict[str, Tensor]:
        """A part of a layer that is kept, as it is after an iteration, for another worker; the tensors themselves.
        Raises VersionError."""
        span, received = (part.start, part.stop), self._has_received(part)
        if received is not None:
            received.require(after)
            return span_of(self.module(part.layer), received, span, state=part.state)
        found = self.holding.optimizer.part_state(part.layer, span, state=part.state)
        found.require(after)
        return dict(found.tensors)

    def part_gradients(self, part: PartName, after: int) -> dict[str, Tensor]:
        """By what a part that is kept, as a whole, was stepped to where it is after an iteration; the tensors
        themselves. Raises VersionError."""
        self.holding.optimizer.version.require(after, "what this worker keeps")
        return self.holding.optimizer.part_gradients(part.layer, (part.start, part.stop))

    def _has_received(self, part: PartName) -> PartState | None:
        return next((one for one in self._received if one.layer == part.layer and one.state
                     and one.start <= part.start and part.stop <= one.stop), None)

    def put(self, received: Sequence[PartState], after: int) -> None:
        """What was received of what is not kept here are the parameters from now on: those after an iteration. Raises
        VersionError."""
        for part in received:
            part.require(after)
        for layer, module in self.holding.modules.items():
            put(module, [one for one in received if one.layer == layer], untrained_too=False)

    def whole_layers(self, layers: Iterable[int], received: Sequence[PartState], after: int
                     ) -> dict[int, dict[str, Tensor]]:
        """Whole layers to be saved, as they are after an iteration, in host memory, with what was received of what is
        not kept here. All ranks of a worker must ask together; the first has them, the others nothing. Raises
        VersionError."""
        group, found, layers = worker_group(), dict[int, dict[str, Tensor]](), sorted(layers)
        device = next((one.device for one in self.holding.parameters().values()), HOST)
        with _copying(device):
            states = {layer: self._with_parts(layer, received, after) for layer in layers}
        for layer, state in states.items():
            if group is not None:  # whose connections may carry nothing that is not on the device
                shards, mine = shards_of(self.holding.modules[layer]), state
                state = whole_state({key: tensor.to(device) for key, tensor in mine.items()}, shards, group)
            if first_rank():
                found[layer] = {key: tensor.cpu() for key, tensor in state.items()}
        return found

    def _with_parts(self, layer: int, received: Sequence[PartState], after: int) -> dict[str, Tensor]:
        """The state of a layer, from parts that are kept and others that were received."""
        parts = [one for one in (*self.holding.optimizer.kept_states(), *self._received, *received)
                 if one.layer == layer]
        for one in parts:
            one.require(after)
        return whole(self.holding.modules[layer], parts)

    def elements(self, layer: int) -> Elements:
        """How many a layer has, at a rank, that is held, or will be."""
        return elements_of(self.module(layer))

    def _modules(self, cuts: Iterable[LayerRange]) -> dict[int, nn.Module]:
        """Those that are held already, and new ones, which are on the device from now on."""
        held = self.holding.modules
        return {layer: held[layer] if layer in held else moved(self.module(layer), self._device)
                for layers in cuts for layer in range(*layers)}

    def module(self, layer: int) -> nn.Module:
        """A layer: one that is held, or a new one, whose state is to be loaded by `keep_parts`. For any thread."""
        held = self.holding.modules
        if layer in held:
            return held[layer]
        with self._building:
            if layer not in self._built:
                self._built[layer] = self._build(layer, filled=False)
            return self._built[layer]


@contextmanager
def _copying(device: torch.device) -> Iterator[None]:
    """Copies from a device are made beside what is computed later, on a stream of their own; they are there then."""
    if device.type != "cuda":
        yield
        return
    stream = own_stream(device, "copies")
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
