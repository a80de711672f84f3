"""Layers that a worker holds, their gradients, and one optimizer over all of them.

Nothing here depends on stages: the layers are those that a schedule assigns to the worker, and change with it.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.model.layers.distributed_tensors import with_local_parameters
from slipstream.runtime.model.layers.layered_model import LayeredModel, parameter_dtype
from slipstream.runtime.model.layers.sharing import NOTHING_SHARED, Place, Sharing, sharing_of
from slipstream.runtime.model.layers.step_rules import require_stepped_by_rules, step_rules
from slipstream.runtime.model.layers.unfilled import unfilled
from slipstream.runtime.model.layers.worker_group import worker_group
from slipstream.runtime.model.seeds import GENERATORS
from slipstream.runtime.model.state.clipping import squares_of
from slipstream.runtime.model.state.copied_sums import CopiedSums
from slipstream.runtime.model.state.part_optimizer import PartOptimizer
from slipstream.runtime.model.state.part_state import PartState, elements_of, keep_whole, kept_whole, put, trained
from slipstream.runtime.model.state.parts import Cut, Elements, Parts, Span, parts_of, without
from slipstream.runtime.model.state.version import Version, VersionError
from slipstream.schedules.layers import LayerRange, joined_ranges
from slipstream.schedules.schedule import Worker


def gradient_dtype(config: TrainingConfig) -> torch.dtype | None:
    """Return the dtype in which gradients are accumulated; None for that of each parameter."""
    if not config.master_weights:
        return None
    return torch.float32 if config.reduce_dtype == "float32" else torch.bfloat16


class Holding:
    """Layers of a model with gradients and optimizer. Each `.grad` is a view of a flat tensor, to be summed in place.

    `keep` selects the parts of their state that are stored; before that, and if a process trains alone, all are.
    """

    def __init__(self, modules: Mapping[int, nn.Module], config: TrainingConfig,
                 sharing: Sharing = NOTHING_SHARED) -> None:
        self._config = config
        self.sharing = sharing
        self.modules: dict[int, nn.Module] = dict(sorted(modules.items()))
        sharing.tie(self.modules)
        self.cuts: dict[LayerRange, Cut] = {}
        """Partition of each range that is reduced."""
        self._flat_parameters: dict[LayerRange, Tensor] = {}
        self._sums = CopiedSums()
        self.optimizer = self._build(self.modules)
        self._gradients: dict[LayerRange, list[Tensor]] = {}
        self.shared_gradients: dict[str, list[Tensor]] = {}
        """Gradients of each parameter that layers share, by its first name, to be summed in place over all holders of a
        copy."""
        self.reduce_by(joined_ranges((layer, layer + 1) for layer in self.modules))

    def clear(self) -> None:
        """Release all layers."""
        self.modules, self.cuts, self._flat_parameters, self._sums = {}, {}, {}, CopiedSums()
        self.optimizer = self._build({})
        self.reduce_by(())

    def keep(self, modules: Mapping[int, nn.Module], cuts: Mapping[LayerRange, Cut], worker: Worker,
             parts: Sequence[PartState], after: int, built: Collection[int] = ()) -> None:
        """Hold exactly these layers, and of their optimizer's state the parts that `cuts` assigns to a worker.

        All of that state, and all missing elements of the parameters, must be in `parts` or already held, as they are
        after the iteration `after`. Newly built layers, listed in the last argument, are in their initial state, which
        is that after `after`. Raises VersionError, before anything has changed, if some state is missing. If layers and
        partitions are as before, the memory stays in place, which is usual for workers of stages without a change.
        """
        before, held = self.optimizer, self.modules
        self._require_all(modules, cuts, worker, parts, after, built)
        same_layout = held == modules and _lengths(self.cuts) == _lengths(cuts)
        same_parts = same_layout and (self.cuts == cuts or not any(cut.sharded for cut in cuts.values()))
        if same_parts:  # the owner may still differ: unsharded state is stored by all members
            self.cuts = dict(sorted(cuts.items()))
            before.own = self._parts_by(worker, Cut.own)
        if not same_parts:
            self.modules, self.cuts = dict(sorted(modules.items())), dict(sorted(cuts.items()))
            self._sums = CopiedSums()
        if not same_layout:
            self.sharing.tie(self.modules)
            self._gradients = {}
            self.reduce_by(self.cuts)
            self._flatten_parameters()
        if not same_parts:
            for layers, cut in self.cuts.items():
                for parameter in self._reduced(layers, whole=False)[:1]:
                    self._sums.make(layers, cut, worker, gradient_dtype(self._config) or parameter.dtype,
                                    parameter.device)
        for layer, module in self.modules.items():
            put(module, [part for part in parts if part.layer == layer], untrained_too=held.get(layer) is not module)
        if not same_parts:
            self.optimizer = self._keeping(worker)
            self.optimizer.take_over(before, parts)
        self.optimizer.as_after(after)
        self.gathered(after)

    def _require_all(self, modules: Mapping[int, nn.Module], cuts: Mapping[LayerRange, Cut], worker: Worker,
                     parts: Sequence[PartState], after: int, built: Collection[int]) -> None:
        """Raise VersionError unless all state that `keep` needs is available, as it is after an iteration."""
        before, held = self.optimizer, self.modules
        for part in parts:
            part.require(after)
        needed = parts_of(worker, cuts, lambda layer: elements_of(modules[layer]))
        staying = [layer for layer, module in modules.items() if layer not in built and held.get(layer) is module]
        if staying:
            before.require(after)
        for layer, module in modules.items():
            if layer in built:
                continue
            states = [*(before.kept.get(layer, ()) if layer in staying else ()),
                      *((part.start, part.stop) for part in parts if part.layer == layer and part.state)]
            others = [(part.start, part.stop) for part in parts if part.layer == layer]
            whole = layer in staying and before.parameters == Version(after)
            absent = [missing for span in needed.get(layer, ()) for missing in without(span, states)]
            absent += () if whole else without((0, elements_of(module).total), [*states, *others])
            if absent:
                start, stop = absent[0]
                raise VersionError(f"worker {worker} lacks elements {start} to {stop} of layer {layer} as they are "
                                   f"after iteration {after}")

    def _flatten_parameters(self) -> None:
        """Move the parameters of each range with sharded state into one flat tensor, in which they can be gathered."""
        self._flat_parameters = {layers: _flatten_parameters(self._reduced(layers, whole=False), cut.length)
                                 for layers, cut in self.cuts.items() if cut.sharded}

    def _keeping(self, worker: Worker) -> PartOptimizer:
        """Build the optimizer of the parts that the partitions assign to a worker."""
        kept, own = self._parts_by(worker, Cut.kept), self._parts_by(worker, Cut.own)
        return PartOptimizer(self.modules, self._config, kept, own, self.sharing,
                             self._sums.by_layer(lambda layer: elements_of(self.modules[layer]).cut))

    def _parts_by(self, worker: Worker, which: Callable[[Cut, Worker], tuple[Span, ...]]) -> Parts:
        """Return the spans of each layer that `which` selects for a worker, such as those it stores."""
        return parts_of(worker, self.cuts, lambda layer: elements_of(self.modules[layer]), which)

    def step(self, iteration: int, factor: float | None = 1.0) -> None:
        """Make or skip an iteration's step; see `PartOptimizer.step`."""
        self.optimizer.step(iteration, factor)

    def undo(self) -> None:
        """Undo the open step."""
        self.optimizer.undo()

    def go_back(self, committed: int) -> None:
        """Undo the open step if its iteration is later than the last committed one; otherwise make it final."""
        self.optimizer.go_back(committed)

    @property
    def cannot_undo(self) -> int:
        """Last iteration whose step can no longer be undone, of those stepped in this order; -1 if none."""
        return self.optimizer.cannot_undo

    def sharded_cut(self, layers: LayerRange) -> Cut | None:
        """Return the partition of a range if its optimizer's state is sharded, otherwise None."""
        cut = self.cuts.get(layers)
        return cut if cut is not None and cut.sharded else None

    def copies(self, layers: LayerRange) -> Mapping[Span, Tensor]:
        """Return the copied parts of a range, each with the buffer for its gradient sums of the next step."""
        return self._sums.of(layers, self.optimizer.buffer)

    def arrived(self) -> None:
        """Start the steps of copies, after other workers' parameters of a step, which may be a guess, have arrived."""
        self.optimizer.begin_copies()

    def gathering(self, iteration: int) -> None:
        """Mark the parameters as being received from other workers, with arbitrary values until `gathered`."""
        self.optimizer.gathering(iteration)

    def gathered(self, iteration: int) -> None:
        """Mark all elements of the parameters as those after an iteration."""
        self.optimizer.gathered(iteration)

    def flat_parameters(self) -> Iterable[tuple[LayerRange, Tensor, Cut]]:
        """Return each range with sharded state, its parameters as one flat, padded tensor, and its partition."""
        return [(layers, flat, self.cuts[layers]) for layers, flat in self._flat_parameters.items()]

    def reduce_by(self, ranges: Iterable[LayerRange]) -> None:
        """Set the ranges, which tile the layers, by which gradients are summed; zero the gradients if they changed."""
        ranges = sorted(ranges)
        if ranges == list(self._gradients):
            return
        assert [layer for one in ranges for layer in range(*one)] == list(self.modules), "ranges tile the layers"
        self._gradients = {}
        for parameter in self.parameters().values():
            parameter.grad = None  # the memory is freed before new memory is allocated
        self._gradients = {one: self._zero_gradients(one) for one in ranges}
        self.shared_gradients = {str(first): self._zero_shared_gradients(places[0])
                                 for first, places in self.sharing.held(self.modules)}

    def _zero_gradients(self, layers: LayerRange) -> list[Tensor]:
        """Allocate zero gradients for the parameters that are reduced with a range."""
        kind = gradient_dtype(self._config)
        ruled = [self.modules[layer].get_parameter(name) for layer in range(*layers)
                 for name in trained(self.modules[layer]) if name in step_rules(self.modules[layer])]
        return [*_flatten_gradients(self._reduced(layers, whole=False), kind, self.cuts.get(layers)),
                *_flatten_gradients(self._reduced(layers, whole=True), kind), *_flatten_gradients(ruled)]

    def _zero_shared_gradients(self, mine: Place) -> list[Tensor]:
        """Allocate zero gradients for a parameter that layers share."""
        return _flatten_gradients([self.modules[mine.layer].get_parameter(mine.name)], gradient_dtype(self._config))

    def gradients(self, layers: LayerRange | None = None) -> list[Tensor]:
        """Return the gradients of a range of `reduce_by`, without shared parameters: one flat tensor a dtype.

        Without an argument, all gradients are returned, including those of shared parameters.
        """
        if layers is not None:
            return self._gradients[layers]
        return [flat for flats in (*self._gradients.values(), *self.shared_gradients.values()) for flat in flats]

    def summed(self, what: LayerRange | str) -> list[Tensor]:
        """Return the gradients of a range, or of a shared parameter by its first name, to be summed in place."""
        return self.shared_gradients[what] if isinstance(what, str) else self._gradients[what]

    def layer_squares(self) -> dict[int, float]:
        """Return the sum of squares of the gradients of each layer's own parts: `PartOptimizer.squares`."""
        return self.optimizer.squares()

    def squares(self) -> float:
        """Return the sum of squares of own gradients, for display: its bits depend on the layout."""
        # Ranks of a group share some parameters, members may own parts, and parameters with rules do not count.
        if worker_group() is not None or any(one.sharded for one in self.cuts.values()) or any(
                map(step_rules, self.modules.values())):
            return math.fsum(self.layer_squares().values())
        layers = {layer for layer, spans in self.optimizer.own.items() if spans}
        found = [flat for one, flats in self._gradients.items() if not layers.isdisjoint(range(*one)) for flat in flats]
        found += [flat for first, _ in self.sharing.held(self.modules) if first.layer in layers
                  for flat in self.shared_gradients[str(first)]]
        return float(torch.stack([squares_of(flat) for flat in found]).sum().item()) if found else 0.0

    def _build(self, modules: Mapping[int, nn.Module]) -> PartOptimizer:
        """Build an optimizer that stores and owns all elements."""
        everything = {layer: ((0, elements_of(module).total),) for layer, module in modules.items()}
        return PartOptimizer(modules, self._config, everything, everything, self.sharing)

    def _reduced(self, layers: LayerRange, *, whole: bool) -> list[nn.Parameter]:
        """Return the uncut parameters that are reduced with a range, or the others; without those with rules."""
        return [parameter for layer in range(*layers) for name, parameter in trained(self.modules[layer]).items()
                if (name in kept_whole(self.modules[layer])) is whole and not self.sharing.is_shared(layer, name)
                and name not in step_rules(self.modules[layer])]

    def zero_gradients(self) -> None:
        """Set all gradients to zero, after the optimizer's step."""
        for flat in self.gradients():
            flat.zero_()

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters by "layer.name"; a parameter that layers share has its first name."""
        return {str(self.sharing.first(layer, name)): parameter for layer, module in self.modules.items()
                for name, parameter in module.named_parameters()}


def built(model: LayeredModel, layer: int, *, filled: bool = True) -> nn.Module:
    """Build a layer on the model's device. Another thread may compute meanwhile; its random numbers are not affected.

    If it is not `filled`, its parameters have arbitrary values in host memory that is never accessed; its state is
    loaded after `moved` has put it on the device.
    """
    if not filled:
        with unfilled(), torch.no_grad():
            return with_local_parameters(model.build(layer))
    with GENERATORS, torch.no_grad():
        module = with_local_parameters(model.build(layer))
        for name, first in sharing_of(model).copies(layer).items():
            other = with_local_parameters(model.build(first.layer))
            module.get_parameter(name).copy_(other.get_parameter(first.name))
        return module.to(model.device)


def without_memory(model: LayeredModel, layer: int) -> nn.Module:
    """Build a layer on the meta device, for its shapes and dtypes only."""
    with torch.device("meta"):
        return with_local_parameters(model.build(layer))


def build_layer(model: LayeredModel, layer: int, config: TrainingConfig, *, filled: bool = True) -> nn.Module:
    """Build a layer as `built` does, and mark the parameters that are not cut, so that a `Holding` can hold it."""
    module = built(model, layer, filled=filled)
    _keep_whole(layer, module, config, sharing_of(model))
    return module


def build_holding(model: LayeredModel, layers: Iterable[int], config: TrainingConfig,
                  ) -> Holding:
    """Build the given layers in their state before the first iteration."""
    return Holding({layer: build_layer(model, layer, config) for layer in layers}, config, sharing_of(model))


def _keep_whole(layer: int, module: nn.Module, config: TrainingConfig, sharing: Sharing) -> None:
    """Mark a layer's parameters that are not cut: shared by other layers, of another dtype, or stepped by rules.

    Raises ConfigError if a rule belongs to no parameter.
    """
    rules, parameters = step_rules(module), trained(module)
    require_stepped_by_rules(layer, rules, {name: sharing.is_shared(layer, name) for name in parameters})
    keep_whole(module, [name for name, parameter in parameters.items() if sharing.is_shared(layer, name)
                        or parameter.dtype != parameter_dtype(config) or name in rules])


def trained_elements(model: LayeredModel, config: TrainingConfig) -> tuple[Elements, ...]:
    """Return the numbers of trained elements of each layer."""
    elements, sharing = [], sharing_of(model)
    for layer in range(model.layers):
        module = without_memory(model, layer)
        _keep_whole(layer, module, config, sharing)
        elements.append(elements_of(module))
    return tuple(elements)


def _flatten_gradients(parameters: Sequence[nn.Parameter], dtype: torch.dtype | None = None,
                       cut: Cut | None = None) -> list[Tensor]:
    """Give parameters zero gradients that are views of one flat tensor for each dtype."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(dtype or parameter.dtype, []).append(parameter)
    flats = []
    for kind, group in by_dtype.items():
        sizes = [parameter.numel() for parameter in group]
        length = sum(sizes) if cut is None else max(sum(sizes), cut.length)
        flat = torch.zeros(length, dtype=kind, device=group[0].device)
        for parameter, view in zip(group, torch.split(flat[:sum(sizes)], sizes), strict=True):
            if kind != parameter.dtype:
                parameter.grad_dtype = kind
            parameter.grad = view.view_as(parameter)
        flats.append(flat)
    return flats


def _lengths(cuts: Mapping[LayerRange, Cut]) -> dict[LayerRange, tuple[int, bool]]:
    """Return the properties of partitions that determine the flat tensors of ranges."""
    return {layers: (cut.length, cut.sharded) for layers, cut in cuts.items()}


def _flatten_parameters(parameters: Sequence[nn.Parameter], length: int) -> Tensor:
    """Move parameters of one dtype into one flat tensor of the given length, as views."""
    flat = torch.zeros(length, dtype=parameters[0].dtype, device=parameters[0].device)
    start = 0
    for parameter in parameters:
        view = flat[start:start + parameter.numel()].view_as(parameter)
        view.copy_(parameter.detach())
        parameter.data = view
        start += parameter.numel()
    return flat
