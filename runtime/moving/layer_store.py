"""Store the layers that a worker holds, which change with the schedule."""

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from random import Random
from typing import Protocol

import torch
from torch import Tensor, nn

from slipstream.runtime.models.uninitialized import move_uninitialized
from slipstream.runtime.moving.layer_messages import PartRange
from slipstream.runtime.moving.received_part import HOST
from slipstream.runtime.protocol.to_coordinator import Checksum, HeldState
from slipstream.runtime.ranks.shards import cut_state, gather_state, shards_of
from slipstream.runtime.ranks.worker_group import is_first_rank, worker_group
from slipstream.runtime.replay.background_queue import get_stream_for
from slipstream.runtime.state.held_layers import HeldLayers
from slipstream.runtime.state.part_state import (
    PartState,
    as_whole_part,
    assemble_state,
    copy_to_module,
    count_elements,
    select_span,
)
from slipstream.runtime.state.parts import ElementCounts, Span, StatePartition, subtract
from slipstream.schedules.layers import LayerRange, merge_ranges
from slipstream.schedules.schedule import Worker


class BuildLayer(Protocol):
    """Function that builds a layer of the model, with or without initial values."""

    def __call__(self, layer: int, *, filled: bool) -> nn.Module:
        """Build a layer as it is before iteration 0, by `runtime.state.held_layers.build_layer`.
        Unless `filled`, its parameters have arbitrary values, to be loaded afterwards."""


RestoreLayers = Callable[[int, Iterable[int]], Mapping[int, Mapping[str, Tensor]]]
"""Function that returns whole states of layers before an iteration, unless they are as built."""


class LayerStore:
    """Layers of a worker, with the parameters after the last committed iteration.

    Parts that are fetched during training, and the layers they are for, take no memory of the
    `device` before the worker holds them, as plans reserve none for them.
    """

    def __init__(self, build: BuildLayer, restore: RestoreLayers, holding: HeldLayers, device: torch.device) -> None:
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

    def prebuild_layers(self, layers: Iterable[int]) -> None:
        """Build layers that will probably be needed soon, for state from other workers."""
        for layer in layers:
            self.get_module(layer)

    def drop_all(self) -> None:
        """Drop all layers, with their gradients and optimizer state, and all received parts."""
        self.holding.clear()
        self._received, self._filled = [], frozenset()

    def restore_layers(self, layers: Collection[int], iteration: int) -> None:
        """Read layers from an iteration's checkpoint, or build them if none had run. They become
        held layers at the next `keep_parts`. Raises CheckpointError."""
        self._received = []
        states = self._restore(iteration, sorted(layers))
        for layer in set(layers) - states.keys() - self.holding.modules.keys():
            module = self._build(layer, filled=True)
            with self._building:
                self._built[layer] = module
            self._filled |= {layer}
        for layer, state in states.items():
            module = self.get_module(layer)
            self._received.append(as_whole_part(module, layer, cut_state(state, shards_of(module), worker_group()),
                                                iteration - 1))

    def add_received(self, received: Iterable[PartState]) -> None:
        """Add parts that were sent for an order, until `keep_parts` takes what it needs."""
        self._received = [*(part for part in self._received if part.state), *received]

    def start_checksums(self, after: int) -> Callable[[], tuple[Checksum, ...]]:
        """Start to compute the checksums of all held layers and parts after an iteration. Returns a
        function that waits for the checksums and returns them. Raises VersionError."""
        pending = list(self.holding.optimizer.compute_checksums(after))

        def read() -> tuple[Checksum, ...]:
            sums = torch.stack([total for *_, total in pending]).tolist() if pending else ()
            return tuple(Checksum(layer, *span, state, (value,))
                         for (layer, span, state, _), value in zip(pending, sums, strict=True))

        return read

    def flip_bit(self, what: str, rng: Random) -> None:
        """Flip a random bit of stored state, as broken memory would. `what` is "parameters",
        "state" (of the optimizer) or "copy" (of another worker's part)."""
        self.holding.optimizer.flip_bit(what, rng)

    def keep_parts(self, cuts: Mapping[LayerRange, StatePartition], worker: Worker, after: int) -> None:
        """Hold exactly the layers of these partitions, and a worker's parts of their state.

        All else is dropped. All held, read and received state must be that after iteration `after`,
        and the last optimizer step must be permanent or undone (`UndoableSteps.return_to`). Raises
        VersionError otherwise.
        """
        self.holding.hold_layers(self._get_device_modules(cuts), cuts, worker, self._received, after, self._filled)
        self._received, self._built, self._filled = [], {}, frozenset()

    def list_held_state(self) -> HeldState:
        """Return which layers, and which parts of optimizer state, this worker holds. Parts
        received for an order count as held, and so do layers of which all parts were received."""
        received = dict[int, list[Span]]()
        for part in self._received:
            if part.state:
                received.setdefault(part.layer, []).append((part.start, part.stop))
        whole = [layer for layer, spans in received.items()
                 if not subtract((0, self.count_elements(layer).total), spans)]
        return HeldState(merge_ranges((layer, layer + 1) for layer in {*self.holding.modules, *whole}),
                         tuple((layer, *span) for states in (self.holding.optimizer.kept, received)
                               for layer, spans in states.items() for span in spans if span[0] < span[1]),
                         self.holding.optimizer.whole_after)

    def has_part(self, part: PartRange) -> bool:
        """Return whether a part of a layer is held, or has been read or received."""
        kept = self.holding.optimizer.kept.get(part.layer, ((0, 0),) if part.layer in self.holding.modules else ())
        return self._find_received(part) is not None or any(
            first <= part.start and part.stop <= end for first, end in kept)

    def get_part_state(self, part: PartRange, after: int) -> dict[str, Tensor]:
        """Return the tensors of a part after an iteration, uncopied, to be sent. The part is held,
        read or received. Raises VersionError."""
        span, received = (part.start, part.stop), self._find_received(part)
        if received is not None:
            received.require_version(after)
            return select_span(self.get_module(part.layer), received, span, state=part.state)
        state = self.holding.optimizer.part_state(part.layer, span, state=part.state)
        state.require_version(after)
        return dict(state.tensors)

    def get_part_gradients(self, part: PartRange, after: int) -> dict[str, Tensor]:
        """Return the gradients, uncopied, by which a part was stepped. Raises VersionError."""
        self.holding.optimizer.version.require(after, "what this worker keeps")
        return self.holding.optimizer.part_gradients(part.layer, (part.start, part.stop))

    def _find_received(self, part: PartRange) -> PartState | None:
        return next((received for received in self._received if received.layer == part.layer and received.state
                     and received.start <= part.start and part.stop <= received.stop), None)

    def set_parameters(self, received: Sequence[PartState], after: int) -> None:
        """Copy received parameters into held layers, for parts that are not stepped here. Raises
        VersionError unless the received ones are the state after iteration `after`."""
        for part in received:
            part.require_version(after)
        for layer, module in self.holding.modules.items():
            copy_to_module(module, [state for state in received if state.layer == layer], untrained_too=False)

    def gather_whole_layers(self, layers: Iterable[int], received: Sequence[PartState], after: int
                            ) -> dict[int, dict[str, Tensor]]:
        """Return whole layers as they are after an iteration, in host memory, to be saved.

        Parts that this worker does not keep come from `received`. All ranks of a worker must call
        this together; the first gets the layers, the others nothing. Raises VersionError.
        """
        group, layer_states, layers = worker_group(), dict[int, dict[str, Tensor]](), sorted(layers)
        device = next((parameter.device for parameter in self.holding.parameters_by_name().values()), HOST)
        with _use_copy_stream(device):
            states = {layer: self._join_parts(layer, received, after) for layer in layers}
        for layer, state in states.items():
            if group is not None:  # the group's connections carry only tensors on the device
                shards, own_shards = shards_of(self.holding.modules[layer]), state
                state = gather_state({key: tensor.to(device) for key, tensor in own_shards.items()}, shards, group)
            if is_first_rank():
                layer_states[layer] = {key: tensor.cpu() for key, tensor in state.items()}
        return layer_states

    def _join_parts(self, layer: int, received: Sequence[PartState], after: int) -> dict[str, Tensor]:
        """Join a layer's state from held and received parts. Raises VersionError."""
        parts = [part for part in (*self.holding.optimizer.kept_states(), *self._received, *received)
                 if part.layer == layer]
        for part in parts:
            part.require_version(after)
        return assemble_state(self.holding.modules[layer], parts)

    def count_elements(self, layer: int) -> ElementCounts:
        """Return this rank's number of elements of a layer that is or will be held."""
        return count_elements(self.get_module(layer))

    def _get_device_modules(self, cuts: Iterable[LayerRange]) -> dict[int, nn.Module]:
        """Return the modules of all layers in some ranges, on the device, by layer."""
        held = self.holding.modules
        return {layer: held[layer] if layer in held else move_uninitialized(self.get_module(layer), self._device)
                for layers in cuts for layer in range(*layers)}

    def get_module(self, layer: int) -> nn.Module:
        """Return a layer: a held one, or a new one to be loaded. Any thread may call this."""
        held = self.holding.modules
        if layer in held:
            return held[layer]
        with self._building:
            if layer not in self._built:
                self._built[layer] = self._build(layer, filled=False)
            return self._built[layer]


@contextmanager
def _use_copy_stream(device: torch.device) -> Iterator[None]:
    """Run the context on a stream of its own, and wait for its copies."""
    # So copies from a device do not wait for later compute.
    if device.type != "cuda":
        yield
        return
    stream = get_stream_for(device, "copies")
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
