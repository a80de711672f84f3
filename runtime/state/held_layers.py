"""Layers that a worker holds, their gradients, and one optimizer over all of them.

Nothing here depends on stages: the layers are those that a schedule assigns to the worker, and
change with the schedule.
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
    """Return the dtype in which gradients are accumulated; None: each parameter's own."""
    if not config.master_weights:
        return None
    return torch.float32 if config.reduce_dtype == "float32" else torch.bfloat16


class HeldLayers:
    """Layers that a worker holds, with gradients and one optimizer.

    Each `.grad` is a view of a flat tensor, to be summed in place. `hold_layers` selects the parts
    of the layers' state that are stored; before that, and if a process trains alone, all parts are.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        config: TrainingConfig,
        sharing: Sharing = NOTHING_SHARED,
    ) -> None:
        self._config = config
        self.sharing = sharing
        self.modules: dict[int, nn.Module] = dict(sorted(modules.items()))
        sharing.tie_parameters(self.modules)
        self.cuts: dict[LayerRange, StatePartition] = {}
        """Partition of the optimizer's state of each range that is reduced."""
        self._flat_parameters: dict[LayerRange, Tensor] = {}
        self._sums = CopyGradients()
        # Until `hold_layers`, the process trains alone and keeps all state.
        self.optimizer = self._build_full_optimizer(self.modules)
        self._gradients: dict[LayerRange, list[GradientBuffer]] = {}
        self.shared_gradients: dict[str, list[GradientBuffer]] = {}
        """Gradients of each shared parameter, by `LAYER.NAME` of the first layer with it."""
        self._unused: frozenset[nn.Parameter] | None = None
        """Parameters that no worker has used in this iteration; None before its step."""
        self.set_reduced_ranges(merge_ranges((layer, layer + 1) for layer in self.modules))

    def clear(self) -> None:
        """Release all layers, with their gradients and optimizer state."""
        self.modules, self.cuts, self._flat_parameters = {}, {}, {}
        self._sums = CopyGradients()
        self.optimizer = self._build_full_optimizer({})
        self.set_reduced_ranges(())

    def hold_layers(
        self,
        modules: Mapping[int, nn.Module],
        cuts: Mapping[LayerRange, StatePartition],
        worker: Worker,
        parts: Sequence[PartState],
        after: int,
        built: Collection[int] = (),
    ) -> None:
        """Hold exactly these layers, and the parts of their state that `cuts` assigns.

        All of that state, and all missing elements of the parameters, must be in `parts` or already
        held. If layers and partitions are as before, the memory stays in place. Raises
        VersionError, before anything has changed, if some state is missing or of another iteration.

        Parameters
        ----------
        modules
            Modules by layer; a layer that is held already stays if its module is the same.
        cuts
            Partition of the state of each range of layers.
        worker
            This worker, whose parts are held.
        parts
            State from elsewhere, all of it that after `after`.
        after
            Iteration after which the layers have this state.
        built
            Layers that are new and in their initial state, which is that after `after`.
        """
        old_optimizer, old_modules = self.optimizer, self.modules
        self._require_all(modules, cuts, worker, parts, after, built)
        same_layout = old_modules == modules and _flat_lengths(self.cuts) == _flat_lengths(cuts)
        is_sharded = any(cut.sharded for cut in cuts.values())
        same_parts = same_layout and (self.cuts == cuts or not is_sharded)

        self.cuts = dict(sorted(cuts.items()))
        if same_parts:
            # The owner may still differ: unsharded state is stored by all members.
            old_optimizer.own_parts = self._parts_by(worker, StatePartition.own_parts)
        else:
            self.modules = dict(sorted(modules.items()))
            self._sums = CopyGradients()
        # Gradients and parameters of a range are flat tensors, which depend on the layout alone.
        if not same_layout:
            self.sharing.tie_parameters(self.modules)
            self._gradients = {}
            self.set_reduced_ranges(self.cuts)
            self._flatten_parameters()
        if not same_parts:
            self._allocate_sums(worker)

        # Parameters get their values before the optimizer, whose pieces may be views of them.
        for layer, module in self.modules.items():
            copy_to_module(
                module,
                [part for part in parts if part.layer == layer],
                untrained_too=old_modules.get(layer) is not module,
            )
        if not same_parts:
            self.optimizer = self._build_optimizer(worker)
            self.optimizer.adopt_state(old_optimizer, parts)
        self.optimizer.set_version(after)
        self.optimizer.mark_gathered(after)

    def _require_all(
        self,
        modules: Mapping[int, nn.Module],
        cuts: Mapping[LayerRange, StatePartition],
        worker: Worker,
        parts: Sequence[PartState],
        after: int,
        built: Collection[int],
    ) -> None:
        """Raise VersionError unless all state that `hold_layers` needs is available."""
        optimizer = self.optimizer
        for part in parts:
            part.require_version(after)
        # Layers that stay have their state here; new ones get it from `parts`.
        needed = parts_of_worker(worker, cuts, lambda layer: count_elements(modules[layer]))
        staying = [
            layer
            for layer, module in modules.items()
            if layer not in built and self.modules.get(layer) is module
        ]
        if staying:
            optimizer.require_version(after)
        for layer, module in modules.items():
            if layer in built:
                continue
            # Spans of which optimizer state is here, and those of which parameters are.
            states = [
                (part.start, part.stop) for part in parts if part.layer == layer and part.state
            ]
            values = [(part.start, part.stop) for part in parts if part.layer == layer]
            if layer in staying:
                states += optimizer.stored_parts.get(layer, ())
            absent = [
                missing for span in needed.get(layer, ()) for missing in subtract(span, states)
            ]
            if layer not in staying or optimizer.parameters != Version(after):
                absent += subtract((0, count_elements(module).total), [*states, *values])
            if absent:
                start, stop = absent[0]
                raise VersionError(
                    f"worker {worker} lacks elements {start} to {stop} of layer {layer} as they "
                    f"are after iteration {after}"
                )

    def _allocate_sums(self, worker: Worker) -> None:
        """Allocate buffers for the gradient sums of the parts of which `worker` is the buddy."""
        for layers, cut in self.cuts.items():
            parameters = self._reduced_parameters(layers, whole=False)
            if parameters:
                dtype = gradient_dtype(self._config) or parameters[0].dtype
                self._sums.allocate(layers, cut, worker, dtype, parameters[0].device)

    def _flatten_parameters(self) -> None:
        """Move the parameters of each sharded range into one flat tensor, to be gathered."""
        self._flat_parameters = {
            layers: _flatten_parameters(
                self._reduced_parameters(layers, whole=False), cut.padded_length
            )
            for layers, cut in self.cuts.items()
            if cut.sharded
        }

    def _build_optimizer(self, worker: Worker) -> PartOptimizer:
        return PartOptimizer(
            self.modules,
            self._config,
            self._parts_by(worker, StatePartition.stored_parts),
            self._parts_by(worker, StatePartition.own_parts),
            self.sharing,
            self._sums.by_layer(lambda layer: count_elements(self.modules[layer]).cut),
        )

    def _parts_by(
        self, worker: Worker, which: Callable[[StatePartition, Worker], tuple[Span, ...]]
    ) -> Parts:
        """Return, by layer, the spans that a `StatePartition` method selects for `worker`."""
        return parts_of_worker(
            worker, self.cuts, lambda layer: count_elements(self.modules[layer]), which
        )

    def step(self, iteration: int, factor: float | None = 1.0) -> None:
        """Make the optimizer's step of all held layers, with gradients times `factor`.

        If `factor` is None, parameters stay as they are; those that no worker has used always do.
        All sums of gradients must have arrived. Raises VersionError unless what is stepped is the
        state after the iteration before.
        """
        # A step that is made again, with another factor, is one of the same parameters.
        if self._unused is None:
            self._unused = find_unused(self._buffers())
        self.optimizer.step(iteration, factor, self._unused)

    def sharded_partition(self, layers: LayerRange) -> StatePartition | None:
        """Return the partition of a range; None if its optimizer state is not sharded."""
        cut = self.cuts.get(layers)
        return cut if cut is not None and cut.sharded else None

    def copy_buffers(self, layers: LayerRange) -> Mapping[Span, Tensor]:
        """Return the gradient buffers of a range's parts that this worker copies, by span.

        Waits until no step reads them.
        """
        return self._sums.buffers_of(layers, self.optimizer.copy_buffer)

    def flat_parameters(self) -> Iterable[tuple[LayerRange, Tensor, StatePartition]]:
        """Return each range with sharded state, its flat, padded parameters, and its partition."""
        return [(layers, flat, self.cuts[layers]) for layers, flat in self._flat_parameters.items()]

    def set_reduced_ranges(self, ranges: Iterable[LayerRange]) -> None:
        """Set the ranges of held layers, each with a sum of gradients of its own.

        The ranges must cover all held layers. A change sets all gradients to zero.
        """
        ranges = sorted(ranges)
        if ranges == list(self._gradients):
            return
        assert [layer for layers in ranges for layer in range(*layers)] == list(self.modules), (
            "ranges tile the layers"
        )
        # The memory is freed before new memory is allocated.
        self._gradients, self._unused = {}, None
        for parameter in self.parameters_by_name().values():
            parameter.grad = None
        self._gradients = {layers: self._zero_gradients(layers) for layers in ranges}
        self.shared_gradients = {
            str(first): self._zero_shared_gradients(places[0])
            for first, places in self.sharing.groups_in(self.modules)
        }

    def _zero_gradients(self, layers: LayerRange) -> list[GradientBuffer]:
        kind = gradient_dtype(self._config)
        ruled = [
            self.modules[layer].get_parameter(name)
            for layer in range(*layers)
            for name in trained_parameters(self.modules[layer])
            if name in step_rules(self.modules[layer])
        ]
        return [
            *allocate_gradients(
                self._reduced_parameters(layers, whole=False), kind, self.cuts.get(layers)
            ),
            *allocate_gradients(self._reduced_parameters(layers, whole=True), kind),
            *allocate_gradients(ruled),
        ]

    def _zero_shared_gradients(self, mine: LayerParameter) -> list[GradientBuffer]:
        return allocate_gradients(
            [self.modules[mine.layer].get_parameter(mine.name)], gradient_dtype(self._config)
        )

    def _buffers(self) -> Iterator[GradientBuffer]:
        for buffers in (*self._gradients.values(), *self.shared_gradients.values()):
            yield from buffers

    def flat_gradients(self, layers: LayerRange | None = None) -> list[Tensor]:
        """Return a range's gradients without those of shared parameters, as flat tensors.

        Without a range, return the gradients of all parameters.
        """
        buffers = self._buffers() if layers is None else self._gradients[layers]
        return [buffer.values for buffer in buffers]

    def gradients_to_sum(self, what: LayerRange | str) -> list[Tensor]:
        """Return the flat gradients of `what` and this worker's marks, to be summed in place.

        `what` is a range of layers, or `LAYER.NAME` of a shared parameter. A mark says whether this
        worker has used a parameter.
        """
        buffers = self.shared_gradients[what] if isinstance(what, str) else self._gradients[what]
        for buffer in buffers:
            buffer.mark_touched()
        return [tensor for buffer in buffers for tensor in buffer.sums]

    def layer_squares(self) -> dict[int, float]:
        """Return, by layer, the sum of squares of the gradients of own parts, in float64."""
        return self.optimizer.layer_squares()

    def sum_squares(self) -> float:
        """Return the sum of squares of the gradients of own parts, for display."""
        # Its rounding depends on the layout.
        # Ranks of a group share some parameters, members may own parts, and parameters with rules
        # do not count.
        if (
            worker_group() is not None
            or any(cut.sharded for cut in self.cuts.values())
            or any(map(step_rules, self.modules.values()))
        ):
            return math.fsum(self.layer_squares().values())
        # Otherwise all gradients of a range count, or none, so flat tensors are summed.
        own_layers = {layer for layer, spans in self.optimizer.own_parts.items() if spans}
        gradients = list[Tensor]()
        for layers in self._gradients:
            if not own_layers.isdisjoint(range(*layers)):
                gradients += self.flat_gradients(layers)
        for first, _ in self.sharing.groups_in(self.modules):
            if first.layer in own_layers:
                gradients += [buffer.values for buffer in self.shared_gradients[str(first)]]
        if not gradients:
            return 0.0
        return float(torch.stack([sum_of_squares(flat) for flat in gradients]).sum().item())

    def _build_full_optimizer(self, modules: Mapping[int, nn.Module]) -> PartOptimizer:
        everything = {
            layer: ((0, count_elements(module).total),) for layer, module in modules.items()
        }
        return PartOptimizer(modules, self._config, everything, everything, self.sharing)

    def _reduced_parameters(self, layers: LayerRange, *, whole: bool) -> list[nn.Parameter]:
        """Return a range's cut parameters or, if `whole`, its uncut ones."""
        # Left out are shared parameters, which have sums of their own, and those of step rules.
        return [
            parameter
            for layer in range(*layers)
            for name, parameter in trained_parameters(self.modules[layer]).items()
            if (name in uncut_names(self.modules[layer])) is whole
            and not self.sharing.is_shared(layer, name)
            and name not in step_rules(self.modules[layer])
        ]

    def zero_gradients(self) -> None:
        """Set all gradients to zero, after the optimizer's step."""
        self._unused = None
        for buffer in self._buffers():
            buffer.set_to_zero()

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Return all held parameters by `LAYER.NAME`; of a shared one, the first name counts."""
        return {
            str(self.sharing.first_of_group(layer, name)): parameter
            for layer, module in self.modules.items()
            for name, parameter in module.named_parameters()
        }


def build_on_device(model: LayeredModel, layer: int, *, filled: bool = True) -> nn.Module:
    """Build a layer on the model's device, without changing other threads' random numbers.

    If not `filled`, the layer is built in host memory, with arbitrary values; its state is loaded
    after `move_uninitialized` has moved it to the device. Raises ConfigError as `sharing_of` does,
    and ValueError as `with_local_parameters` does.
    """
    # Neither initial nor shared values are needed.
    if not filled:
        with restoring_generators(), building_uninitialized(), torch.no_grad():
            return with_local_parameters(model.build(layer))
    with restoring_generators(), torch.no_grad():
        module = with_local_parameters(model.build(layer))
        # A shared parameter has the initial values of the first layer of its group.
        for name, first in sharing_of(model).copies_in(layer).items():
            other = with_local_parameters(model.build(first.layer))
            module.get_parameter(name).copy_(other.get_parameter(first.name))
        return module.to(model.device)


def build_on_meta(model: LayeredModel, layer: int) -> nn.Module:
    """Build a layer on the meta device, for its shapes and dtypes only.

    Raises ValueError as `with_local_parameters` does.
    """
    with torch.device("meta"):
        return with_local_parameters(model.build(layer))


def build_layer(
    model: LayeredModel, layer: int, config: TrainingConfig, *, filled: bool = True
) -> nn.Module:
    """Build a layer as `build_on_device` does, and mark parameters that all holders store whole.

    Raises ConfigError, too, if a step rule is not for a trained parameter of this layer alone.
    """
    module = build_on_device(model, layer, filled=filled)
    _mark_uncut(layer, module, config, sharing_of(model))
    return module


def build_holding(model: LayeredModel, layers: Iterable[int], config: TrainingConfig) -> HeldLayers:
    """Build a `HeldLayers` of some layers, with their initial parameters.

    Raises ConfigError and ValueError as `build_layer` does.
    """
    return HeldLayers(
        {layer: build_layer(model, layer, config) for layer in layers}, config, sharing_of(model)
    )


def _mark_uncut(layer: int, module: nn.Module, config: TrainingConfig, sharing: Sharing) -> None:
    """Mark a layer's uncut parameters: shared, of another dtype, or stepped by a rule."""
    rules, parameters = step_rules(module), trained_parameters(module)
    require_stepped_by_rules(
        layer, rules, {name: sharing.is_shared(layer, name) for name in parameters}
    )
    mark_uncut(
        module,
        [
            name
            for name, parameter in parameters.items()
            if sharing.is_shared(layer, name)
            or parameter.dtype != parameter_dtype(config)
            or name in rules
        ],
    )


def count_trained_elements(
    model: LayeredModel, config: TrainingConfig
) -> tuple[ElementCounts, ...]:
    """Return, for each layer, how many trained elements are cut, and how many stored whole.

    A rank of a worker counts its own elements. Raises ConfigError and ValueError as `build_layer`
    does.
    """
    elements, sharing = [], sharing_of(model)
    for layer in range(model.layers):
        module = build_on_meta(model, layer)
        _mark_uncut(layer, module, config, sharing)
        elements.append(count_elements(module))
    return tuple(elements)


def _flat_lengths(cuts: Mapping[LayerRange, StatePartition]) -> dict[LayerRange, tuple[int, bool]]:
    return {layers: (cut.padded_length, cut.sharded) for layers, cut in cuts.items()}


def _flatten_parameters(parameters: Sequence[nn.Parameter], length: int) -> Tensor:
    """Copy parameters of one dtype into a flat tensor of `length`, whose views they become."""
    flat = torch.zeros(length, dtype=parameters[0].dtype, device=parameters[0].device)
    start = 0
    for parameter in parameters:
        view = flat[start : start + parameter.numel()].view_as(parameter)
        view.copy_(parameter.detach())
        parameter.data = view
        start += parameter.numel()
    return flat
