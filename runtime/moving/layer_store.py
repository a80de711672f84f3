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
        """Build a layer as before iteration 0; unless `filled`, with arbitrary parameters."""


RestoreLayers = Callable[[int, Iterable[int]], Mapping[int, Mapping[str, Tensor]]]
"""Function that returns the saved states of layers before an iteration.

Layers that were not saved, because they are as built, are left out.
"""


class LayerStore:
    """Layers that a worker holds, and what it has read or received to hold next.

    Layers and parts that are fetched during training take no memory of the `device` before they are
    held, as plans reserve none for them.
    """

    def __init__(
        self, build: BuildLayer, restore: RestoreLayers, holding: HeldLayers, device: torch.device
    ) -> None:
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
        """Build layers in advance, to be filled with state that other workers send."""
        for layer in layers:
            self.get_module(layer)

    def drop_all(self) -> None:
        """Drop all held layers, with gradients and optimizer state, and all received parts."""
        self.holding.clear()
        self._received, self._filled = [], frozenset()

    def restore_layers(self, layers: Collection[int], iteration: int) -> None:
        """Read layers from the checkpoint of an iteration; build those that it does not have.

        A held layer that it does not have stays as it is. Parts that were received before are
        dropped. The layers become held at the next `keep_parts`. Raises CheckpointError if a layer
        cannot be read, and ValueError if a saved layer does not fit the model.
        """
        # Before iteration 0 there is no checkpoint: layers are then as they are built.
        self._received = []
        states = self._restore(iteration, sorted(layers))
        for layer in set(layers) - states.keys() - self.holding.modules.keys():
            module = self._build(layer, filled=True)
            with self._building:
                self._built[layer] = module
            self._filled |= {layer}
        for layer, state in states.items():
            module = self.get_module(layer)
            shards = cut_state(state, shards_of(module), worker_group())
            self._received.append(as_whole_part(module, layer, shards, iteration - 1))

    def add_received(self, received: Iterable[PartState]) -> None:
        """Add received parts, from which the next `keep_parts` takes what it needs.

        Earlier ones without optimizer state are dropped.
        """
        self._received = [*(part for part in self._received if part.state), *received]

    def start_checksums(self, after: int) -> Callable[[], tuple[Checksum, ...]]:
        """Start to compute checksums of all held state; return a function that awaits them.

        Raises VersionError unless the state is that after iteration `after`.
        """
        pending = list(self.holding.optimizer.compute_checksums(after))

        def read() -> tuple[Checksum, ...]:
            if not pending:
                return ()
            # One copy from the device for all checksums.
            values = torch.stack([state.checksum for state in pending]).tolist()
            return tuple(
                Checksum(state.layer, *state.span, state.of_part, (value,))
                for state, value in zip(pending, values, strict=True)
            )

        return read

    def flip_bit(self, what: str, rng: Random) -> None:
        """Flip a random bit of stored state, as broken memory would.

        `what` is "parameters", "state" or "copy", as in `PartOptimizer.flip_bit`.
        """
        self.holding.optimizer.flip_bit(what, rng)

    def keep_parts(
        self, cuts: Mapping[LayerRange, StatePartition], worker: Worker, after: int
    ) -> None:
        """Hold the layers of `cuts`, and the parts of their state assigned to `worker`.

        All other layers and parts are dropped. Any step must have been undone or committed. Raises
        VersionError unless held, read and received state is that after iteration `after`, or if
        some of it is missing.
        """
        self.holding.hold_layers(
            self._get_device_modules(cuts), cuts, worker, self._received, after, self._filled
        )
        self._received, self._built, self._filled = [], {}, frozenset()

    def list_held_state(self) -> HeldState:
        """Return the layers and the optimizer state that this worker holds or has received."""
        # A layer of which all parts were received counts as held.
        received = dict[int, list[Span]]()
        for part in self._received:
            if part.state:
                received.setdefault(part.layer, []).append((part.start, part.stop))
        layers = set(self.holding.modules)
        for layer, spans in received.items():
            if not subtract((0, self.count_elements(layer).total), spans):
                layers.add(layer)
        parts = tuple(
            (layer, *span)
            for states in (self.holding.optimizer.stored_parts, received)
            for layer, spans in states.items()
            for span in spans
            if span[0] < span[1]
        )
        return HeldState(
            merge_ranges((layer, layer + 1) for layer in layers),
            parts,
            self.holding.optimizer.whole_after,
        )

    def has_part(self, part: PartRange) -> bool:
        """Return whether this worker holds a part of a layer, or has received it."""
        if self._find_received(part) is not None:
            return True
        # A held layer without a stored part has its empty part.
        empty: tuple[Span, ...] = ((0, 0),) if part.layer in self.holding.modules else ()
        spans = self.holding.optimizer.stored_parts.get(part.layer, empty)
        return any(start <= part.start and part.stop <= stop for start, stop in spans)

    def get_part_state(self, part: PartRange, after: int) -> dict[str, Tensor]:
        """Return the tensors of a part, by name, as they are after iteration `after`.

        The part must be held, read or received (`has_part`); its tensors are not copied. Raises
        VersionError if its state is of another iteration.
        """
        span, received = (part.start, part.stop), self._find_received(part)
        if received is not None:
            received.require_version(after)
            return select_span(self.get_module(part.layer), received, span, state=part.state)
        state = self.holding.optimizer.part_state(part.layer, span, state=part.state)
        state.require_version(after)
        return dict(state.tensors)

    def get_part_gradients(self, part: PartRange, after: int) -> dict[str, Tensor]:
        """Return the gradients by which a part was stepped in iteration `after`, not copied.

        Raises VersionError if this worker's last step was of another iteration.
        """
        self.holding.optimizer.version.require(after, "what this worker keeps")
        return self.holding.optimizer.part_gradients(part.layer, (part.start, part.stop))

    def _find_received(self, part: PartRange) -> PartState | None:
        for received in self._received:
            if received.layer != part.layer or not received.state:
                continue
            if received.start <= part.start and part.stop <= received.stop:
                return received
        return None

    def set_parameters(self, received: Sequence[PartState], after: int) -> None:
        """Copy received parameters into held layers, for parts that are not stepped here.

        Raises VersionError unless they are the parameters after iteration `after`.
        """
        for part in received:
            part.require_version(after)
        for layer, module in self.holding.modules.items():
            copy_to_module(
                module, [state for state in received if state.layer == layer], untrained_too=False
            )

    def gather_whole_layers(
        self, layers: Iterable[int], received: Sequence[PartState], after: int
    ) -> dict[int, dict[str, Tensor]]:
        """Return whole layers, in host memory, as they are after iteration `after`.

        Parts that this worker does not keep come from `received`. All ranks of the worker must call
        this together; the first gets the layers, the others nothing. Raises VersionError if a part
        is of another iteration, and CommunicationError if a rank is lost.
        """
        # A rank has a shard of each tensor: join its parts, and then the shards of all ranks.
        group, layer_states = worker_group(), dict[int, dict[str, Tensor]]()
        parameters = self.holding.parameters_by_name().values()
        device = next((parameter.device for parameter in parameters), HOST)
        with _use_copy_stream(device):
            states = {layer: self._join_parts(layer, received, after) for layer in sorted(layers)}
        for layer, state in states.items():
            if group is not None:
                # The group's connections carry only tensors on the device.
                shards = {key: tensor.to(device) for key, tensor in state.items()}
                state = gather_state(shards, shards_of(self.holding.modules[layer]), group)
            if is_first_rank():
                layer_states[layer] = {key: tensor.cpu() for key, tensor in state.items()}
        return layer_states

    def _join_parts(
        self, layer: int, received: Sequence[PartState], after: int
    ) -> dict[str, Tensor]:
        parts = [
            part
            for part in (*self.holding.optimizer.stored_states(), *self._received, *received)
            if part.layer == layer
        ]
        for part in parts:
            part.require_version(after)
        return assemble_state(self.holding.modules[layer], parts)

    def count_elements(self, layer: int) -> ElementCounts:
        """Return the number of elements of a layer on this rank, held or not."""
        return count_elements(self.get_module(layer))

    def _get_device_modules(self, cuts: Iterable[LayerRange]) -> dict[int, nn.Module]:
        modules = dict[int, nn.Module]()
        for layers in cuts:
            for layer in range(*layers):
                module = self.get_module(layer)
                # Fetched layers have taken no memory of the device so far.
                if layer not in self.holding.modules:
                    module = move_uninitialized(module, self._device)
                modules[layer] = module
        return modules

    def get_module(self, layer: int) -> nn.Module:
        """Return a held layer, or one built to be filled. Any thread may call this."""
        # Read once: another thread may replace it.
        modules = self.holding.modules
        if layer in modules:
            return modules[layer]
        with self._building:
            if layer not in self._built:
                self._built[layer] = self._build(layer, filled=False)
            return self._built[layer]


@contextmanager
def _use_copy_stream(device: torch.device) -> Iterator[None]:
    """Run the context on the stream for copies, and wait until the copies are done."""
    if device.type != "cuda":
        yield
        return
    stream = get_stream_for(device, "copies")
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()
