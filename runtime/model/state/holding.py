"""What a worker holds: layers, their gradients, and one optimizer over all of them.

Nothing here knows of stages: the layers are whichever a schedule gives to the worker, and they change with it.
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
    """In which gradients are added up; None: that of each parameter."""
    if not config.master_weights:
        return None
    return torch.float32 if config.reduce_dtype == "float32" else torch.bfloat16


class Holding:
    """Layers of a model with gradients and optimizer. Parameters' `.grad` are views of flat tensors: sum in place.

    `keep` says which parts of their state it keeps; before that, and where a process trains alone, it keeps all.
    """

    def __init__(self, modules: Mapping[int, nn.Module], config: TrainingConfig,
                 sharing: Sharing = NOTHING_SHARED) -> None:
        self._config = config
        self.sharing = sharing
        self.modules: dict[int, nn.Module] = dict(sorted(modules.items()))
        sharing.tie(self.modules)
        self.cuts: dict[LayerRange, Cut] = {}
        """How each range that is reduced is cut."""
        self._flat_parameters: dict[LayerRange, Tensor] = {}
        self._sums = CopiedSums()
        self.optimizer = self._build(self.modules)
        self._gradients: dict[LayerRange, list[Tensor]] = {}
        self.shared_gradients: dict[str, list[Tensor]] = {}
        """Of each parameter that layers share, by its first name: to be summed in place over all that hold a copy."""
        self.reduce_by(joined_ranges((layer, layer + 1) for layer in self.modules))

    def clear(self) -> None:
        """Hold nothing."""
        self.modules, self.cuts, self._flat_parameters, self._sums = {}, {}, {}, CopiedSums()
        self.optimizer = self._build({})
        self.reduce_by(())

    def keep(self, modules: Mapping[int, nn.Module], cuts: Mapping[LayerRange, Cut], worker: Worker,
             parts: Sequence[PartState], after: int, built: Collection[int] = ()) -> None:
        """Hold exactly these layers, and of their optimizer's state what a worker keeps by these cuts.

        `parts`, and those that are kept until now, have all of that, and all that is lacking of the parameters, as they
        are after an iteration; `built` are layers that are as they are then without any. Raises VersionError where that
        is not so: nothing has changed then. Where nothing changes, all stays as it is: mostly, that is so of workers of
        other stages.
        """
        before, held = self.optimizer, self.modules
        self._require_all(modules, cuts, worker, parts, after, built)
        laid = held == modules and _lengths(self.cuts) == _lengths(cuts)
        same = laid and (self.cuts == cuts or not any(one.sharded for one in cuts.values()))
        if same:  # but perhaps who speaks for all: where nothing is sharded, each keeps all
            self.cuts = dict(sorted(cuts.items()))
            before.own = self._parts_by(worker, Cut.own)
        if not same:
            self.modules, self.cuts = dict(sorted(modules.items())), dict(sorted(cuts.items()))
            self._sums = CopiedSums()
        if not laid:
            self.sharing.tie(self.modules)
            self._gradients = {}
            self.reduce_by(self.cuts)
            self._flatten_parameters()
        if not same:
            for layers, one in self.cuts.items():
                for parameter in self._reduced(layers, whole=False)[:1]:
                    self._sums.make(layers, one, worker, gradient_dtype(self._config) or parameter.dtype,
                                    parameter.device)
        for layer, module in self.modules.items():
            put(module, [part for part in parts if part.layer == layer], untrained_too=held.get(layer) is not module)
        if not same:
            self.optimizer = self._keeping(worker)
            self.optimizer.take_over(before, parts)
        self.optimizer.as_after(after)
        self.gathered(after)

    def _require_all(self, modules: Mapping[int, nn.Module], cuts: Mapping[LayerRange, Cut], worker: Worker,
                     parts: Sequence[PartState], after: int, built: Collection[int]) -> None:
        """Raise VersionError unless `keep` has all that it is to keep, as it is after an iteration."""
        before, held = self.optimizer, self.modules
        for part in parts:
            part.require(after)
        needed = parts_of(worker, cuts, lambda layer: elements_of(modules[layer]))
        stay = [layer for layer, module in modules.items() if layer not in built and held.get(layer) is module]
        if stay:
            before.require(after)
        for layer, module in modules.items():
            if layer in built:
                continue
            states = [*(before.kept.get(layer, ()) if layer in stay else ()),
                      *((part.start, part.stop) for part in parts if part.layer == layer and part.state)]
            others = [(part.start, part.stop) for part in parts if part.layer == layer]
            whole = layer in stay and before.parameters == Version(after)
            lacking = [one for span in needed.get(layer, ()) for one in without(span, states)]
            lacking += () if whole else without((0, elements_of(module).total), [*states, *others])
            if lacking:
                start, stop = lacking[0]
                raise VersionError(f"worker {worker} lacks elements {start} to {stop} of layer {layer} as they are "
                                   f"after iteration {after}")

    def _flatten_parameters(self) -> None:
        """Have the parameters of each range whose state is sharded lie in one flat tensor, to be gathered."""
        self._flat_parameters = {layers: _flatten_parameters(self._reduced(layers, whole=False), one.length)
                                 for layers, one in self.cuts.items() if one.sharded}

    def _keeping(self, worker: Worker) -> PartOptimizer:
        """What steps what a worker keeps by the cuts."""
        kept, own = self._parts_by(worker, Cut.kept), self._parts_by(worker, Cut.own)
        return PartOptimizer(self.modules, self._config, kept, own, self.sharing,
                             self._sums.by_layer(lambda layer: elements_of(self.modules[layer]).cut))

    def _parts_by(self, worker: Worker, which: Callable[[Cut, Worker], tuple[Span, ...]]) -> Parts:
        """The parts that a worker keeps by the cuts, or its own."""
        return parts_of(worker, self.cuts, lambda layer: elements_of(self.modules[layer]), which)

    def step(self, iteration: int, factor: float | None = 1.0) -> None:
        """Step what is kept, or not; see `PartOptimizer.step`."""
        self.optimizer.step(iteration, factor)

    def undo(self) -> None:
        """Put what is kept back to before the open step."""
        self.optimizer.undo()

    def go_back(self, committed: int) -> None:
        """Undo the open step where it is of a later iteration than the last committed one; else it is final."""
        self.optimizer.go_back(committed)

    @property
    def cannot_undo(self) -> int:
        """The last iteration whose step cannot be undone any more, as far as steps of this order say; -1: none."""
        return self.optimizer.cannot_undo

    def sharded_cut(self, layers: LayerRange) -> Cut | None:
        """How the elements of a range are cut, where its optimizer's state is sharded."""
        found = self.cuts.get(layers)
        return found if found is not None and found.sharded else None

    def copies(self, layers: LayerRange) -> Mapping[Span, Tensor]:
        """The parts of a range that are copies of others', each with where the sums of its gradients are to come."""
        return self._sums.of(layers, self.optimizer.buffer)

    def arrived(self) -> None:
        """Parameters of others have come after a step, which may be a guess: compute with these. Meanwhile, what this
        worker keeps of others' states is stepped."""
        self.optimizer.begin_copies()

    def gathering(self, iteration: int) -> None:
        """Parameters of others, as they are after an iteration, are on their way: until `gathered`, any of them may be
        anything."""
        self.optimizer.gathering(iteration)

    def gathered(self, iteration: int) -> None:
        """All elements of the parameters are as they should be after an iteration."""
        self.optimizer.gathered(iteration)

    def flat_parameters(self) -> Iterable[tuple[LayerRange, Tensor, Cut]]:
        """Of each range whose optimizer's state is sharded, the parameters: one flat tensor, with padding."""
        return [(layers, flat, self.cuts[layers]) for layers, flat in self._flat_parameters.items()]

    def reduce_by(self, ranges: Iterable[LayerRange]) -> None:
        """From now on, gradients are summed by these ranges, which tile the layers. They are zero where this is new."""
        ranges = sorted(ranges)
        if ranges == list(self._gradients):
            return
        assert [layer for one in ranges for layer in range(*one)] == list(self.modules), "ranges tile the layers"
        self._gradients = {}
        for parameter in self.parameters().values():
            parameter.grad = None  # the memory goes before it is taken anew
        self._gradients = {one: self._zero_gradients(one) for one in ranges}
        self.shared_gradients = {str(first): self._zero_shared_gradients(mine[0])
                                 for first, mine in self.sharing.held(self.modules)}

    def _zero_gradients(self, layers: LayerRange) -> list[Tensor]:
        """Zero gradients for what is reduced with a range."""
        kind = gradient_dtype(self._config)
        ruled = [self.modules[layer].get_parameter(name) for layer in range(*layers)
                 for name in trained(self.modules[layer]) if name in step_rules(self.modules[layer])]
        return [*_flatten_gradients(self._reduced(layers, whole=False), kind, self.cuts.get(layers)),
                *_flatten_gradients(self._reduced(layers, whole=True), kind), *_flatten_gradients(ruled)]

    def _zero_shared_gradients(self, mine: Place) -> list[Tensor]:
        """Those of a parameter that layers share."""
        return _flatten_gradients([self.modules[mine.layer].get_parameter(mine.name)], gradient_dtype(self._config))

    def gradients(self, layers: LayerRange | None = None) -> list[Tensor]:
        """The gradients of a range that `reduce_by` was given, without what is shared: one flat tensor a dtype; by
        default all there are."""
        if layers is not None:
            return self._gradients[layers]
        return [flat for flats in (*self._gradients.values(), *self.shared_gradients.values()) for flat in flats]

    def summed(self, what: LayerRange | str) -> list[Tensor]:
        """The gradients of a range, or of a parameter that layers share, by its first name, to be summed in place."""
        return self.shared_gradients[what] if isinstance(what, str) else self._gradients[what]

    def layer_squares(self) -> dict[int, float]:
        """The sums of squares of the gradients of each layer's own parts: `PartOptimizer.squares`."""
        return self.optimizer.squares()

    def squares(self) -> float:
        """Their sum, for people to look at; `layer_squares` gives the same bits wherever a layer is."""
        # The ranks of a group have some parameters alike, others have parts, and what rules step counts nothing.
        if worker_group() is not None or any(one.sharded for one in self.cuts.values()) or any(
                map(step_rules, self.modules.values())):
            return math.fsum(self.layer_squares().values())
        layers = {layer for layer, own in self.optimizer.own.items() if own}
        found = [flat for one, flats in self._gradients.items() if not layers.isdisjoint(range(*one)) for flat in flats]
        found += [flat for first, _ in self.sharing.held(self.modules) if first.layer in layers
                  for flat in self.shared_gradients[str(first)]]
        return float(torch.stack([squares_of(flat) for flat in found]).sum().item()) if found else 0.0

    def _build(self, modules: Mapping[int, nn.Module]) -> PartOptimizer:
        everything = {layer: ((0, elements_of(module).total),) for layer, module in modules.items()}
        return PartOptimizer(modules, self._config, everything, everything, self.sharing)

    def _reduced(self, layers: LayerRange, *, whole: bool) -> list[nn.Parameter]:
        """The parameters that are reduced with a range, but for what rules step: those that are not cut, or the others.
        """
        return [parameter for layer in range(*layers) for name, parameter in trained(self.modules[layer]).items()
                if (name in kept_whole(self.modules[layer])) is whole and not self.sharing.is_shared(layer, name)
                and name not in step_rules(self.modules[layer])]

    def zero_gradients(self) -> None:
        """Start the next sum of gradients; after the optimizer's step."""
        for flat in self.gradients():
            flat.zero_()

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by "layer.name"; what layers share by its first name."""
        return {str(self.sharing.first(layer, name)): parameter for layer, module in self.modules.items()
                for name, parameter in module.named_parameters()}


def built(model: LayeredModel, layer: int, *, filled: bool = True) -> nn.Module:
    """A layer on the model's device; another thread may compute meanwhile, whose random numbers are not disturbed.

    Unless it is `filled`, its parameters hold anything, in host memory that is never touched: its state is to be
    loaded, once it is `moved` to the device.
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
    """A layer of which only shapes and dtypes are of interest."""
    with torch.device("meta"):
        return with_local_parameters(model.build(layer))


def build_layer(model: LayeredModel, layer: int, config: TrainingConfig, *, filled: bool = True) -> nn.Module:
    """`built`, to be held."""
    module = built(model, layer, filled=filled)
    _keep_whole(layer, module, config, sharing_of(model))
    return module


def build_holding(model: LayeredModel, layers: Iterable[int], config: TrainingConfig,
                  ) -> Holding:
    """Layers as they are before the first iteration."""
    return Holding({layer: build_layer(model, layer, config) for layer in layers}, config, sharing_of(model))


def _keep_whole(layer: int, module: nn.Module, config: TrainingConfig, sharing: Sharing) -> None:
    """What other layers have, too, what is of another dtype, and what rules step, is not cut. Raises ConfigError where
    a rule is of no parameter."""
    rules, mine = step_rules(module), trained(module)
    require_stepped_by_rules(layer, rules, {name: sharing.is_shared(layer, name) for name in mine})
    keep_whole(module, [name for name, parameter in mine.items() if sharing.is_shared(layer, name)
                        or parameter.dtype != parameter_dtype(config) or name in rules])


def trained_elements(model: LayeredModel, config: TrainingConfig) -> tuple[Elements, ...]:
    """How many elements of each layer are trained."""
    found, sharing = [], sharing_of(model)
    for layer in range(model.layers):
        module = without_memory(model, layer)
        _keep_whole(layer, module, config, sharing)
        found.append(elements_of(module))
    return tuple(found)


def _flatten_gradients(parameters: Sequence[nn.Parameter], dtype: torch.dtype | None = None,
                       cut: Cut | None = None) -> list[Tensor]:
    """Give the parameters zero gradients that lie one after the other in one flat tensor a dtype."""
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
    """What the flat tensors of ranges depend on."""
    return {layers: (one.length, one.sharded) for layers, one in cuts.items()}


def _flatten_parameters(parameters: Sequence[nn.Parameter], length: int) -> Tensor:
    """Have parameters of one dtype lie one after the other in a flat tensor of so many elements."""
    flat = torch.zeros(length, dtype=parameters[0].dtype, device=parameters[0].device)
    start = 0
    for parameter in parameters:
        view = flat[start:start + parameter.numel()].view_as(parameter)
        view.copy_(parameter.detach())
        parameter.data = view
        start += parameter.numel()
    return flat
