"""Layers that a worker holds, their gradients, and one optimizer over all of them.

Nothing here depends on stages: the layers are those that a schedule assigns to the worker, and
change with it.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.models.distributed_tensors import with_local_parameters
from slipstream.runtime.models.layered_model import LayeredModel, parameter_dtype
from slipstream.runtime.models.sharing import NOTHING_SHARED, LayerParameter, Sharing, sharing_of
from slipstream.runtime.models.step_rules import require_stepped_by_rules, step_rules
from slipstream.runtime.models.uninitialized import building_uninitialized
from slipstream.runtime.ranks.worker_group import worker_group
from slipstream.runtime.seeds import restoring_generators
from slipstream.runtime.state.gradients import GradientBuffer, allocate_gradients, find_unused
from slipstream.runtime.state.late_steps import CopyGradients
from slipstream.runtime.state.part_optimizer import PartOptimizer
from slipstream.runtime.state.part_state import (
    PartState,
    copy_to_module,
    count_elements,
    mark_uncut,
    trained_parameters,
    uncut_names,
)
from slipstream.runtime.state.parts import (
    ElementCounts,
    Parts,
    Span,
    StatePartition,
    Version,
    VersionError,
    parts_of_worker,
    subtract,
)
from slipstream.runtime.state.step_factors import sum_of_squares
from slipstream.schedules.layers import LayerRange, merge_ranges
from slipstream.schedules.schedule import Worker


def gradient_dtype(config: TrainingConfig) -> torch.dtype | None:
    """Return the dtype in which gradients are accumulated; None if it is each parameter's."""
    if not config.master_weights:
        return None
    return torch.float32 if config.reduce_dtype == "float32" else torch.bfloat16


class HeldLayers:
    """Layers of a model with gradients and optimizer.

    Each `.grad` is a view of a flat tensor, to be summed in place. `hold_layers` selects the parts
    of their state that are stored; before that, and if a process trains alone, all are.
    """

    def __init__(self, modules: Mapping[int, nn.Module], config: TrainingConfig,
                 sharing: Sharing = NOTHING_SHARED) -> None:
        self._config = config
        self.sharing = sharing
        self.modules: dict[int, nn.Module] = dict(sorted(modules.items()))
        sharing.tie_parameters(self.modules)
        self.cuts: dict[LayerRange, StatePartition] = {}
        """Partition of the optimizer's state of each range of layers whose gradients are reduced
        together."""
        self._flat_parameters: dict[LayerRange, Tensor] = {}
        self._sums = CopyGradients()
        self.optimizer = self._build_full_optimizer(self.modules)
        self._gradients: dict[LayerRange, list[GradientBuffer]] = {}
        self.shared_gradients: dict[str, list[GradientBuffer]] = {}
        """Gradients of each shared parameter, by its first `LAYER.NAME`, to be summed over all
        holders."""
        self._unused: frozenset[nn.Parameter] | None = None
        """Parameters that no worker has used in this iteration; None before its step."""
        self.set_reduced_ranges(merge_ranges((layer, layer + 1) for layer in self.modules))

    def clear(self) -> None:
        """Release all layers, with their gradients and optimizer state."""
        self.modules, self.cuts, self._flat_parameters, self._sums = {}, {}, {}, CopyGradients()
        self.optimizer = self._build_full_optimizer({})
        self.set_reduced_ranges(())

    def hold_layers(self, modules: Mapping[int, nn.Module], cuts: Mapping[LayerRange, StatePartition], worker: Worker,
                    parts: Sequence[PartState], after: int, built: Collection[int] = ()) -> None:
        """Hold exactly these layers, and the parts of their state that `cuts` assigns.

        All of that state, and all missing elements of the parameters, must be in `parts` or already
        held. If layers and partitions are as before, the memory stays in place, which is usual for
        workers of stages without a change. Raises VersionError, before anything has changed, if
        some state is missing.

        Parameters
        ----------
        worker
            Worker to whose parts the layers are cut.
        after
            Iteration after which all of this is the state.
        built
            Layers that are new and in their initial state, which is that after `after`.
        """
        before, held = self.optimizer, self.modules
        self._require_all(modules, cuts, worker, parts, after, built)
        same_layout = held == modules and _flat_lengths(self.cuts) == _flat_lengths(cuts)
        same_parts = same_layout and (self.cuts == cuts or not any(cut.sharded for cut in cuts.values()))
        if same_parts:  # the owner may still differ: unsharded state is stored by all members
            self.cuts = dict(sorted(cuts.items()))
            before.own = self._parts_by(worker, StatePartition.own_parts)
        if not same_parts:
            self.modules, self.cuts = dict(sorted(modules.items())), dict(sorted(cuts.items()))
            self._sums = CopyGradients()
        if not same_layout:
            self.sharing.tie_parameters(self.modules)
            self._gradients = {}
            self.set_reduced_ranges(self.cuts)
            self._flatten_parameters()
        if not same_parts:
            for layers, cut in self.cuts.items():
                for parameter in self._reduced_parameters(layers, whole=False)[:1]:
                    self._sums.allocate(layers, cut, worker, gradient_dtype(self._config) or parameter.dtype,
                                        parameter.device)
        for layer, module in self.modules.items():
            copy_to_module(module, [part for part in parts if part.layer == layer],
                           untrained_too=held.get(layer) is not module)
        if not same_parts:
            self.optimizer = self._build_optimizer(worker)
            self.optimizer.adopt_state(before, parts)
        self.optimizer.set_version(after)
        self.optimizer.mark_gathered(after)

    def _require_all(self, modules: Mapping[int, nn.Module], cuts: Mapping[LayerRange, StatePartition], worker: Worker,
                     parts: Sequence[PartState], after: int, built: Collection[int]) -> None:
        """Raise VersionError unless all state that `hold_layers` needs is available."""
        before, held = self.optimizer, self.modules
        for part in parts:
            part.require_version(after)
        needed = parts_of_worker(worker, cuts, lambda layer: count_elements(modules[layer]))
        staying = [layer for layer, module in modules.items() if layer not in built and held.get(layer) is module]
        if staying:
            before.require_version(after)
        for layer, module in modules.items():
            if layer in built:
                continue
            states = [*(before.kept.get(layer, ()) if layer in staying else ()),
                      *((part.start, part.stop) for part in parts if part.layer == layer and part.state)]
            others = [(part.start, part.stop) for part in parts if part.layer == layer]
            whole = layer in staying and before.parameters == Version(after)
            absent = [missing for span in needed.get(layer, ()) for missing in subtract(span, states)]
            absent += () if whole else subtract((0, count_elements(module).total), [*states, *others])
            if absent:
                start, stop = absent[0]
                raise VersionError(f"worker {worker} lacks elements {start} to {stop} of layer {layer} as they are "
                                   f"after iteration {after}")

    def _flatten_parameters(self) -> None:
        """Move the parameters of each sharded range into one flat tensor, to be gathered."""
        self._flat_parameters = {layers: _flatten_parameters(self._reduced_parameters(layers, whole=False),
                                                             cut.padded_length)
                                 for layers, cut in self.cuts.items() if cut.sharded}

    def _build_optimizer(self, worker: Worker) -> PartOptimizer:
        """Build the optimizer of the parts that `worker` has to store, without state yet."""
        kept, own = self._parts_by(worker, StatePartition.stored_parts), self._parts_by(worker,
                                                                                        StatePartition.own_parts)
        return PartOptimizer(self.modules, self._config, kept, own, self.sharing,
                             self._sums.by_layer(lambda layer: count_elements(self.modules[layer]).cut))

    def _parts_by(self, worker: Worker, which: Callable[[StatePartition, Worker], tuple[Span, ...]]) -> Parts:
        """Return the spans that `which`, a method of `StatePartition`, selects, by layer."""
        return parts_of_worker(worker, self.cuts, lambda layer: count_elements(self.modules[layer]), which)

    def step(self, iteration: int, factor: float | None = 1.0) -> None:
        """Make the optimizer's step of all held layers, with gradients times `factor`.

        If `factor` is None, parameters stay as they are, and the iteration counts as stepped.
        Parameters that no worker has used stay, too. All sums of gradients must have arrived.
        """
        if self._unused is None:  # a step that is made again, with another factor, is one of the same parameters
            self._unused = find_unused(self._buffers())
        self.optimizer.step(iteration, factor, self._unused)

    def sharded_partition(self, layers: LayerRange) -> StatePartition | None:
        """Return the partition of a range if its optimizer's state is sharded, otherwise None."""
        cut = self.cuts.get(layers)
        return cut if cut is not None and cut.sharded else None

    def copy_buffers(self, layers: LayerRange) -> Mapping[Span, Tensor]:
        """Return the buffers of copies' gradients in a range, by span."""
        return self._sums.buffers_of(layers, self.optimizer.copy_buffer)

    def flat_parameters(self) -> Iterable[tuple[LayerRange, Tensor, StatePartition]]:
        """Return each range with sharded state, its parameters as one tensor, and its partition.
        The tensor is flat and padded."""
        return [(layers, flat, self.cuts[layers]) for layers, flat in self._flat_parameters.items()]

    def set_reduced_ranges(self, ranges: Iterable[LayerRange]) -> None:
        """Set the ranges whose gradients are summed together; zero gradients if they change. Each
        held layer must be in exactly one range."""
        ranges = sorted(ranges)
        if ranges == list(self._gradients):
            return
        assert [layer for one in ranges for layer in range(*one)] == list(self.modules), "ranges tile the layers"
        self._gradients, self._unused = {}, None
        for parameter in self.parameters_by_name().values():
            parameter.grad = None  # the memory is freed before new memory is allocated
        self._gradients = {one: self._zero_gradients(one) for one in ranges}
        self.shared_gradients = {str(first): self._zero_shared_gradients(places[0])
                                 for first, places in self.sharing.groups_in(self.modules)}

    def _zero_gradients(self, layers: LayerRange) -> list[GradientBuffer]:
        """Give zero gradients to the trained parameters of a range, except shared ones."""
        kind = gradient_dtype(self._config)
        ruled = [self.modules[layer].get_parameter(name) for layer in range(*layers)
                 for name in trained_parameters(self.modules[layer]) if name in step_rules(self.modules[layer])]
        return [*allocate_gradients(self._reduced_parameters(layers, whole=False), kind, self.cuts.get(layers)),
                *allocate_gradients(self._reduced_parameters(layers, whole=True), kind), *allocate_gradients(ruled)]

    def _zero_shared_gradients(self, mine: LayerParameter) -> list[GradientBuffer]:
        """Give a zero gradient to the shared parameter of which `mine` is a held copy."""
        return allocate_gradients([self.modules[mine.layer].get_parameter(mine.name)], gradient_dtype(self._config))

    def _buffers(self) -> Iterator[GradientBuffer]:
        for buffers in (*self._gradients.values(), *self.shared_gradients.values()):
            yield from buffers

    def flat_gradients(self, layers: LayerRange | None = None) -> list[Tensor]:
        """Return the gradients of a range, without shared parameters: one flat tensor a dtype.
        Without an argument, all gradients are returned, including those of shared parameters."""
        return [buffer.values for buffer in (self._buffers() if layers is None else self._gradients[layers])]

    def gradients_to_sum(self, what: LayerRange | str) -> list[Tensor]:
        """Return the flat gradients of `what`, with this worker's marks, to be summed in place.
        `what` is a range of layers, or `LAYER.NAME` of a shared parameter."""
        buffers = self.shared_gradients[what] if isinstance(what, str) else self._gradients[what]
        for buffer in buffers:
            buffer.mark_touched()
        return [tensor for buffer in buffers for tensor in buffer.sums]

    def layer_squares(self) -> dict[int, float]:
        """Return, by layer, the sum of squares of the gradients of own parts, in float64."""
        return self.optimizer.layer_squares()

    def sum_squares(self) -> float:
        """Return the sum of squares of own parts' gradients, for display. Its rounding depends on
        the layout."""
        # Ranks of a group share some parameters, members may own parts, and parameters with rules do not count.
        if worker_group() is not None or any(one.sharded for one in self.cuts.values()) or any(
                map(step_rules, self.modules.values())):
            return math.fsum(self.layer_squares().values())
        layers = {layer for layer, spans in self.optimizer.own.items() if spans}
        found = [flat for one in self._gradients if not layers.isdisjoint(range(*one))
                 for flat in self.flat_gradients(one)]
        found += [buffer.values for first, _ in self.sharing.groups_in(self.modules) if first.layer in layers
                  for buffer in self.shared_gradients[str(first)]]
        return float(torch.stack([sum_of_squares(flat) for flat in found]).sum().item()) if found else 0.0

    def _build_full_optimizer(self, modules: Mapping[int, nn.Module]) -> PartOptimizer:
        """Build an optimizer that stores and owns all elements of the given layers."""
        everything = {layer: ((0, count_elements(module).total),) for layer, module in modules.items()}
        return PartOptimizer(modules, self._config, everything, everything, self.sharing)

    def _reduced_parameters(self, layers: LayerRange, *, whole: bool) -> list[nn.Parameter]:
        """Return a range's parameters whose gradients are summed together."""
        # With `whole`, they are those that are not cut into parts, else those that are. Shared
        # ones, and those with a step rule, are not included.
        return [parameter for layer in range(*layers) for name,
                parameter in trained_parameters(self.modules[layer]).items()
                if (name in uncut_names(self.modules[layer])) is whole and not self.sharing.is_shared(layer, name)
                and name not in step_rules(self.modules[layer])]

    def zero_gradients(self) -> None:
        """Set all gradients to zero, after the optimizer's step."""
        self._unused = None
        for buffer in self._buffers():
            buffer.set_to_zero()

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Return all held parameters by `LAYER.NAME`, a shared one by the first of its group."""
        return {str(self.sharing.first_of_group(layer, name)): parameter for layer, module in self.modules.items()
                for name, parameter in module.named_parameters()}


def build_on_device(model: LayeredModel, layer: int, *, filled: bool = True) -> nn.Module:
    """Build a layer on the model's device, without effect on another thread's random numbers.

    If not `filled`, the layer is built in host memory, with arbitrary values that are never
    accessed, and its state is loaded after `move_uninitialized` has moved it to the device.
    """
    if not filled:
        with restoring_generators(), building_uninitialized(), torch.no_grad():
            return with_local_parameters(model.build(layer))
    with restoring_generators(), torch.no_grad():
        module = with_local_parameters(model.build(layer))
        for name, first in sharing_of(model).copies_in(layer).items():
            other = with_local_parameters(model.build(first.layer))
            module.get_parameter(name).copy_(other.get_parameter(first.name))
        return module.to(model.device)


def build_on_meta(model: LayeredModel, layer: int) -> nn.Module:
    """Build a layer on the meta device, for its shapes and dtypes only."""
    with torch.device("meta"):
        return with_local_parameters(model.build(layer))


def build_layer(model: LayeredModel, layer: int, config: TrainingConfig, *, filled: bool = True) -> nn.Module:
    """Build a layer on the model's device, and mark its uncut parameters (`mark_uncut`).

    With `filled` false, its parameters have arbitrary values, for state that is loaded later (see
    `build_on_device`). Raises ConfigError as `require_stepped_by_rules` does.
    """
    module = build_on_device(model, layer, filled=filled)
    _mark_uncut(layer, module, config, sharing_of(model))
    return module


def build_holding(model: LayeredModel, layers: Iterable[int], config: TrainingConfig) -> HeldLayers:
    """Build a `HeldLayers` of the given layers, with their initial parameters."""
    return HeldLayers({layer: build_layer(model, layer, config) for layer in layers}, config, sharing_of(model))


def _mark_uncut(layer: int, module: nn.Module, config: TrainingConfig, sharing: Sharing) -> None:
    """Mark a layer's uncut parameters: shared, of another dtype, or with a rule."""
    # Raises ConfigError as `require_stepped_by_rules` does.
    rules, parameters = step_rules(module), trained_parameters(module)
    require_stepped_by_rules(layer, rules, {name: sharing.is_shared(layer, name) for name in parameters})
    mark_uncut(module, [name for name, parameter in parameters.items() if sharing.is_shared(layer, name)
                        or parameter.dtype != parameter_dtype(config) or name in rules])


def count_trained_elements(model: LayeredModel, config: TrainingConfig) -> tuple[ElementCounts, ...]:
    """Return, for each layer, how many trained elements are cut, and how many stored whole."""
    elements, sharing = [], sharing_of(model)
    for layer in range(model.layers):
        module = build_on_meta(model, layer)
        _mark_uncut(layer, module, config, sharing)
        elements.append(count_elements(module))
    return tuple(elements)


def _flat_lengths(cuts: Mapping[LayerRange, StatePartition]) -> dict[LayerRange, tuple[int, bool]]:
    """Return, by range, the padded length and whether state is sharded."""
    return {layers: (cut.padded_length, cut.sharded) for layers, cut in cuts.items()}


def _flatten_parameters(parameters: Sequence[nn.Parameter], length: int) -> Tensor:
    """Copy parameters of one dtype into a flat tensor, as views of it."""
    flat = torch.zeros(length, dtype=parameters[0].dtype, device=parameters[0].device)
    start = 0
    for parameter in parameters:
        view = flat[start:start + parameter.numel()].view_as(parameter)
        view.copy_(parameter.detach())
        parameter.data = view
        start += parameter.numel()
    return flat
