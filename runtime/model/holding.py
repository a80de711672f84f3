"""What a worker holds: layers, their gradients, and one optimizer over all of them.

Nothing here knows of stages: the layers are whichever a schedule gives to the worker, and they change with it.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from runtime.config import TrainingConfig
from runtime.model.digest import parameter_digest
from runtime.model.distributed_tensors import with_local_parameters
from runtime.model.layers import LayeredModel
from runtime.model.optimizer import UndoableOptimizer, build_optimizer
from runtime.model.rank_parts import summed_by_rank
from runtime.model.seeds import GENERATORS
from runtime.model.shards import shards_of
from runtime.model.sharing import NOTHING_SHARED, Sharing, sharing_of
from runtime.model.worker_group import standing_in, worker_group
from schedules.layers import LayerRange, joined


class Holding:
    """Layers of a model with gradients and optimizer. Parameters' `.grad` are views of flat tensors: sum in place."""

    def __init__(self, modules: Mapping[int, nn.Module], config: TrainingConfig,
                 sharing: Sharing = NOTHING_SHARED) -> None:
        self._config = config
        self._sharing = sharing
        self.modules: dict[int, nn.Module] = dict(sorted(modules.items()))
        sharing.tie(self.modules)
        self.optimizer: UndoableOptimizer = build_optimizer(self.modules, config, sharing)
        self._gradients: dict[LayerRange, list[Tensor]] = {}
        self.shared_gradients: dict[str, list[Tensor]] = {}
        """Of each parameter that layers share, by its first name: to be summed in place over all that hold a copy."""
        self.reduce_by(self.ranges)

    @property
    def ranges(self) -> tuple[LayerRange, ...]:
        """The layers, as ascending ranges that do not touch."""
        return joined((layer, layer + 1) for layer in self.modules)

    def change(self, layers: Collection[int], others: Iterable["Holding"] = ()) -> None:
        """Hold exactly these layers: some that are held already, and some of others, which must not be used any more.

        No step may be open here; one that is open in another holding is final. Gradients are zero afterwards.
        """
        others = list(others)
        if not others and self.modules.keys() == set(layers):
            return
        found = {layer: module for one in (self, *others) for layer, module in one.modules.items()}
        modules = {layer: found[layer] for layer in sorted(layers)}
        self._sharing.tie(modules)
        optimizer = build_optimizer(modules, self._config, self._sharing)
        for one in (self, *others):
            optimizer.take_over(one.optimizer)
        self.modules, self.optimizer = modules, optimizer
        self._gradients = {}
        self.reduce_by(self.ranges)

    def reduce_by(self, ranges: Iterable[LayerRange]) -> None:
        """From now on, gradients are summed by these ranges, which tile the layers. They are zero where this is new."""
        ranges = sorted(ranges)
        if ranges == list(self._gradients):
            return
        assert [layer for one in ranges for layer in range(*one)] == list(self.modules), "ranges tile the layers"
        self._gradients = {}
        for parameter in self.parameters().values():
            parameter.grad = None  # the memory goes before it is taken anew
        self._gradients = {one: _flatten_gradients([
            parameter for layer in range(*one) for name, parameter in self.modules[layer].named_parameters()
            if not self._sharing.is_shared(layer, name)]) for one in ranges}
        self.shared_gradients = {
            str(first): _flatten_gradients([self.modules[mine[0].layer].get_parameter(mine[0].name)])
            for first, mine in self._sharing.held(self.modules)}

    def gradients(self, layers: LayerRange | None = None) -> list[Tensor]:
        """The gradients of a range that `reduce_by` was given, without what is shared: one flat tensor a dtype; by
        default all there are."""
        if layers is not None:
            return self._gradients[layers]
        return [flat for flats in (*self._gradients.values(), *self.shared_gradients.values()) for flat in flats]

    @contextmanager
    def summed(self, layers: LayerRange) -> Iterator[list[list[Tensor]]]:
        """The gradients of a range, to be summed in place: for each rank that this process stands for, its tensors."""
        parts = _stands_for()
        if parts == 1:
            yield [self._gradients[layers]]
            return
        with summed_by_rank([(parameter, shards_of(self.modules[layer]).get(name)) for layer in range(*layers)
                             for name, parameter in self.modules[layer].named_parameters()
                             if not self._sharing.is_shared(layer, name)], parts) as found:
            yield found

    @contextmanager
    def summed_shared(self, first: str) -> Iterator[list[list[Tensor]]]:
        """As `summed`, of a parameter that layers share, by its first name."""
        parts = _stands_for()
        if parts == 1:
            yield [self.shared_gradients[first]]
            return
        mine = next(one for place, (one, *_) in self._sharing.held(self.modules) if str(place) == first)
        module = self.modules[mine.layer]
        with summed_by_rank([(module.get_parameter(mine.name), shards_of(module).get(mine.name))], parts) as found:
            yield found

    def squares(self, layers: Collection[int]) -> float:
        """The sum of squares of the gradients of some layers: of each range that begins with one of them.

        For people to look at; `UndoableOptimizer.squares` gives the same bits wherever a layer is.
        """
        if worker_group() is not None:  # whose ranks have some parameters alike
            return math.fsum(squares for layer, squares in self.optimizer.squares().items() if layer in layers)
        found = [flat for one, flats in self._gradients.items() if one[0] in layers for flat in flats]
        found += [flat for first, _ in self._sharing.held(self.modules) if first.layer in layers
                  for flat in self.shared_gradients[str(first)]]
        norms = [torch.linalg.vector_norm(flat, dtype=torch.float64) for flat in found]
        return float(torch.stack(norms).square().sum().item()) if norms else 0.0

    def zero_gradients(self) -> None:
        """Start the next sum of gradients; after the optimizer's step."""
        for flat in self.gradients():
            flat.zero_()

    def parameters(self) -> dict[str, nn.Parameter]:
        """All parameters by "layer.name"; what layers share by its first name."""
        return {str(self._sharing.first(layer, name)): parameter for layer, module in self.modules.items()
                for name, parameter in module.named_parameters()}

    def part(self, part: int, parts: int) -> dict[str, Tensor]:
        """`parameters`, as one of the ranks has them that this process stands for."""
        return {str(self._sharing.first(layer, name)): parameter if (shard := shards_of(module).get(name)) is None
                else shard.cut(parameter.detach(), part, parts)
                for layer, module in self.modules.items() for name, parameter in module.named_parameters()}

    def digest(self) -> str:
        """Digest of the parameters; see `runtime.model.digest`."""
        return parameter_digest(self.parameters())


def _stands_for() -> int:
    group = worker_group()
    return 1 if group is None else group.stands_for


def built(model: LayeredModel, layer: int) -> nn.Module:
    """A layer on the model's device; another thread may compute meanwhile, whose random numbers are not disturbed."""
    with GENERATORS, torch.no_grad():
        module = with_local_parameters(model.build(layer))
        for name, first in sharing_of(model).copies(layer).items():
            module.get_parameter(name).copy_(model.build(first.layer).get_parameter(first.name))
        return module.to(model.device)


def build_holding(model: LayeredModel, layers: Iterable[int], config: TrainingConfig) -> Holding:
    """Layers as they are before the first iteration."""
    return Holding({layer: built(model, layer) for layer in layers}, config, sharing_of(model))


def state_bytes(model: LayeredModel, config: TrainingConfig) -> list[int]:
    """About what a process of another worker needs of each layer: parameters, buffers, and the optimizer's state.

    Optimizers of one's own are taken to remember as much as AdamW does.
    """
    slots = 2 + config.amsgrad if config.optimizer != "sgd" else 1 if config.momentum else 0
    found = []
    for layer in range(model.layers):
        with standing_in(config.tensor_parallel), torch.device("meta"):
            module = with_local_parameters(model.build(layer))
        found.append(sum(one.nbytes for one in module.buffers())
                     + (1 + slots) * sum(one.nbytes for one in module.parameters()))
    return found


def _flatten_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Give the parameters zero gradients that lie one after the other in one flat tensor a dtype."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    flats = []
    for dtype, group in by_dtype.items():
        flat = torch.zeros(sum(parameter.numel() for parameter in group), dtype=dtype, device=group[0].device)
        views = torch.split(flat, [parameter.numel() for parameter in group])
        for parameter, view in zip(group, views, strict=True):
            parameter.grad = view.view_as(parameter)
        flats.append(flat)
    return flats
