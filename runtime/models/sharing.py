"""Share parameters between layers, as an embedding and the head that is tied to it.

Each of the layers has the parameter under a name of its own, so that any worker can hold any of
these layers. On a worker that holds several of them, the parameters are one tensor. Before a step,
gradients are summed over all workers that hold any of the layers. Optimizers are elementwise, so
all copies stay equal bit for bit. Files and digests use the name in the first layer.
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
    """Parameter of a layer, by the layer's number and the parameter's name within it."""

    layer: int
    name: str

    def __str__(self) -> str:
        return f"{self.layer}.{self.name}"


class Sharing:
    """Groups of parameters that are one, each in another layer.

    The first layer of a group owns the parameter; the other layers have copies. `last` is the
    number of the model's last layer; None: unknown.
    """

    def __init__(
        self, groups: tuple[tuple[LayerParameter, ...], ...] = (), last: int | None = None
    ) -> None:
        self.groups = groups
        self.last = last
        self._first = {place: group[0] for group in groups for place in group}

    def first_of_group(self, layer: int, name: str) -> LayerParameter:
        """Return the first parameter of this one's group; itself if it is not shared."""
        place = LayerParameter(layer, name)
        return self._first.get(place, place)

    def is_shared(self, layer: int, name: str) -> bool:
        """Return whether another layer shares this parameter."""
        return (layer, name) in self._first

    def copies_in(self, layer: int) -> dict[str, LayerParameter]:
        """Return each copy's name in a layer, with the first parameter of its group."""
        return {
            place.name: first
            for place, first in self._first.items()
            if place.layer == layer and place != first
        }

    def groups_in(
        self, layers: Collection[int]
    ) -> Iterator[tuple[LayerParameter, list[LayerParameter]]]:
        """Yield each group found in `layers`: its first parameter, and its parameters there."""
        for group in self.groups:
            places = [place for place in group if place.layer in layers]
            if places:
                yield group[0], places

    def find_sharers(
        self, placement: Placement, program: WorkerProgram
    ) -> dict[LayerRange | str, Sequence[Worker]]:
        """Return the workers of each sum of gradients that a worker's `program` takes part in.

        The key of a sum is a range of layers or, for a parameter that layers share, `LAYER.NAME` of
        the first parameter of its group.
        """
        sharers: dict[LayerRange | str, Sequence[Worker]] = {}
        for layers, workers in placement.reductions_of(program).items():
            sharers[layers] = workers
        # Shared parameters have sums of their own: more workers take part than hold one range.
        return sharers | {str(self.groups[number][0]): members for number, members in program.ties}

    def tie_parameters(self, layers: Mapping[int, nn.Module]) -> None:
        """Make each parameter that these layers share one tensor, in place."""
        for _, (source, *others) in self.groups_in(layers):
            parameter = layers[source.layer].get_parameter(source.name)
            for other in others:
                replace_tensor(layers[other.layer], other.name, parameter)

    def without_copies(self, layer: int, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a layer's whole state without copies of other layers' parameters, to be saved."""
        copies = self.copies_in(layer)
        return {key: tensor for key, tensor in state.items() if parameter_name(key) not in copies}

    def with_copies(
        self, layer: int, state: Mapping[str, Tensor], read: Callable[[int], Mapping[str, Tensor]]
    ) -> dict[str, Tensor]:
        """Return a layer's saved state, with copies of the parameters that it shares.

        `read` is called with the number of a layer that owns one of these parameters, and returns
        that layer's saved state.
        """
        whole = dict(state)
        for name, first in self.copies_in(layer).items():
            # A parameter has several keys: its value, and each of its optimizer state.
            for key, tensor in read(first.layer).items():
                if parameter_name(key) == first.name:
                    whole[key.removesuffix(first.name) + name] = tensor
        return whole


NOTHING_SHARED = Sharing()
"""Sharing of a model whose layers share no parameters."""


def sharing_of(model: Any) -> Sharing:
    """Return the groups of shared parameters that a model's attribute `shared` lists.

    Raises ConfigError unless these are groups of "LAYER.NAME".
    """
    groups = getattr(model, "shared", ())
    try:
        places = []
        for group in groups:
            places.append(tuple(_parse(text, model.layers) for text in group))
        return Sharing(tuple(places), model.layers - 1)
    except (TypeError, ValueError):
        raise ConfigError(
            f"the model's shared is {groups!r}; expected groups of parameters of different layers, "
            "each as 'LAYER.NAME', such as (('0.tokens.weight', '5.logits.weight'),)"
        ) from None


def _parse(text: str, layers: int) -> LayerParameter:
    layer, _, name = text.partition(".")
    if not name or not 0 <= int(layer) < layers:
        raise ValueError(text)
    return LayerParameter(int(layer), name)
