"""Share parameters between layers, as an embedding and the head that is tied to it.

Each of the layers has the parameter under a name of its own, so that any worker can hold any of
them. On a worker that holds several, they are one tensor. Gradients are summed over all workers
that hold any of them before these step. Optimizers are elementwise, so all copies stay equal bit
for bit. Files and digests use the first name of a group.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from slipstream.runtime.errors import ConfigError
from slipstream.runtime.placement import Placement
from slipstream.runtime.ranks.shards import parameter_name, replace_tensor
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.program import WorkerProgram
from slipstream.schedules.schedule import Worker


class LayerParameter(NamedTuple):
    """Parameter of a layer, by the layer's number and the name within the layer."""

    layer: int
    name: str

    def __str__(self) -> str:
        return f"{self.layer}.{self.name}"


class Sharing:
    """Groups of parameters that layers share, each of which belongs to its first layer. The number
    of the model's last layer is `last`; None if it is not known."""

    def __init__(self, groups: tuple[tuple[LayerParameter, ...], ...] = (), last: int | None = None) -> None:
        self.groups = groups
        self.last = last
        self._first = {place: group[0] for group in groups for place in group}

    def first_of_group(self, layer: int, name: str) -> LayerParameter:
        """Return the first parameter of this one's group, or itself if it is not shared."""
        place = LayerParameter(layer, name)
        return self._first.get(place, place)

    def is_shared(self, layer: int, name: str) -> bool:
        """Return whether another layer shares this parameter."""
        return (layer, name) in self._first

    def copies_in(self, layer: int) -> dict[str, LayerParameter]:
        """Return, by name, the first of the group of each copy in a layer."""
        return {place.name: first for place, first in self._first.items() if place.layer == layer and place != first}

    def groups_in(self, layers: Collection[int]) -> Iterator[tuple[LayerParameter, list[LayerParameter]]]:
        """Yield the first parameter of each group, and a list of its members in `layers`."""
        for group in self.groups:
            places = [place for place in group if place.layer in layers]
            if places:
                yield group[0], places

    def find_sharers(self, placement: Placement, program: WorkerProgram) -> dict[LayerRange | str, Sequence[Worker]]:
        """Return all workers that take part in each sum of gradients of a worker. Keys are ranges
        of layers (`Placement.reductions_of`), and the first of each group of shared parameters."""
        sharers: dict[LayerRange | str, Sequence[Worker]] = {}
        for layers, workers in placement.reductions_of(program).items():
            sharers[layers] = workers
        return sharers | {str(self.groups[number][0]): members for number, members in program.ties}

    def tie_parameters(self, layers: Mapping[int, nn.Module]) -> None:
        """Tie the parameters that these layers share to the tensor of the first, in place."""
        for _, (source, *others) in self.groups_in(layers):
            parameter = layers[source.layer].get_parameter(source.name)
            for other in others:
                replace_tensor(layers[other.layer], other.name, parameter)

    def without_copies(self, layer: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer's whole state as it is saved: without parameters of other layers."""
        copies = self.copies_in(layer)
        return {key: tensor for key, tensor in state.items() if parameter_name(key) not in copies}

    def with_copies(self, layer: int, state: Mapping[str, Tensor],
                    read: Callable[[int], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return a layer's saved state with the parameters that other layers own. The function
        `read` returns the saved state of another layer."""
        whole = dict(state)
        for name, first in self.copies_in(layer).items():
            for key, tensor in read(first.layer).items():
                if parameter_name(key) == first.name:
                    whole[key.removesuffix(first.name) + name] = tensor
        return whole


NOTHING_SHARED = Sharing()
"""Sharing of a model whose layers share no parameters."""


def sharing_of(model: Any) -> Sharing:
    """Return the groups of shared parameters that a model's attribute `shared` lists. Raises
    ConfigError unless these are groups of "LAYER.NAME"."""
    groups = getattr(model, "shared", ())
    try:
        return Sharing(tuple(tuple(_parse(text, model.layers) for text in group) for group in groups), model.layers - 1)
    except (TypeError, ValueError):
        raise ConfigError(f"the model's shared is {groups!r}; expected groups of parameters of different layers, each "
                          "as 'LAYER.NAME', such as (('0.tokens.weight', '5.logits.weight'),)") from None


def _parse(text: str, layers: int) -> LayerParameter:
    """Return the parameter "LAYER.NAME". Raises ValueError if it cannot be one."""
    layer, _, name = text.partition(".")
    if not name or not 0 <= int(layer) < layers:
        raise ValueError(text)
    return LayerParameter(int(layer), name)
