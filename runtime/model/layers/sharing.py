"""Parameters that several layers share, such as an embedding and the head that is tied to it.

Each of the layers has the parameter, under a name of its own, so that any worker can hold any of them. Where a worker
holds several, they are one tensor. Gradients are summed over all workers that hold any, before they step; optimizers
are elementwise, so that all copies stay equal bit for bit. Files and digests have the first name of a group.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from slipstream.runtime.config import ConfigError


class Place(NamedTuple):
    """A parameter of a layer."""

    layer: int
    name: str

    def __str__(self) -> str:
        return f"{self.layer}.{self.name}"


class Sharing:
    """Which parameters are one: groups of places, each in another layer; of a model whose last layer is `last`."""

    def __init__(self, groups: tuple[tuple[Place, ...], ...] = (), last: int | None = None) -> None:
        self.groups = groups
        self.last = last
        self._first = {place: group[0] for group in groups for place in group}

    def first(self, layer: int, name: str) -> Place:
        """The first of its group; itself where it is not shared."""
        place = Place(layer, name)
        return self._first.get(place, place)

    def is_shared(self, layer: int, name: str) -> bool:
        """Whether another layer has it, too."""
        return (layer, name) in self._first

    def copies(self, layer: int) -> dict[str, Place]:
        """A layer's parameters that belong to another one, each with its first place."""
        return {place.name: first for place, first in self._first.items() if place.layer == layer and place != first}

    def held(self, layers: Collection[int]) -> Iterator[tuple[Place, list[Place]]]:
        """The groups that some layers have part in: the first place, and those in these layers."""
        for group in self.groups:
            mine = [place for place in group if place.layer in layers]
            if mine:
                yield group[0], mine

    def tie(self, layers: Mapping[int, nn.Module]) -> None:
        """Make what these layers share one tensor: that of the first of them."""
        for _, (one, *others) in self.held(layers):
            parameter = layers[one.layer].get_parameter(one.name)
            for other in others:
                put_tensor(layers[other.layer], other.name, parameter)

    def without_copies(self, layer: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A layer's whole state (`part_state.whole`) as it is written: without what belongs to another layer."""
        copies = self.copies(layer)
        return {key: tensor for key, tensor in state.items() if name_of(key) not in copies}

    def with_copies(self, layer: int, state: Mapping[str, Tensor],
                    read: Callable[[int], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """A layer's state from what was written: with what belongs to other layers, whose states `read` gives."""
        whole = dict(state)
        for name, first in self.copies(layer).items():
            for key, tensor in read(first.layer).items():
                if name_of(key) == first.name:
                    whole[key.removesuffix(first.name) + name] = tensor
        return whole


NOTHING_SHARED = Sharing()


def sharing_of(model: Any) -> Sharing:
    """What a model's layers share: its `shared`, groups of "LAYER.NAME". Raises ConfigError where that is no such."""
    groups = getattr(model, "shared", ())
    try:
        return Sharing(tuple(tuple(_place(text, model.layers) for text in group) for group in groups), model.layers - 1)
    except (TypeError, ValueError):
        raise ConfigError(f"the model's shared is {groups!r}; expected groups of parameters of different layers, each "
                          "as 'LAYER.NAME', such as (('0.tokens.weight', '5.logits.weight'),)") from None


def _place(text: str, layers: int) -> Place:
    layer, _, name = text.partition(".")
    if not name or not 0 <= int(layer) < layers:
        raise ValueError(text)
    return Place(int(layer), name)


def put_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    """Put a parameter or a buffer in the place of the one of this name."""
    owner, _, own = name.rpartition(".")
    setattr(module.get_submodule(owner), own, tensor)


def name_of(key: str) -> str:
    """The parameter's name in that of a state's tensor."""
    kind, _, name = key.partition(".")
    return name if kind == "model" else name.partition(".")[2]
