"""The optimizer of one worker: steps that can be undone bit for bit, and state that moves layer by layer.

Elementwise, so that it matters to no parameter who holds it. Where a worker keeps only parts of the state,
`runtime.model.state.part_optimizer` is in its place.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.model.layers.shards import shards_of
from slipstream.runtime.model.layers.sharing import NOTHING_SHARED, Sharing
from slipstream.runtime.model.layers.worker_group import first_rank
from slipstream.runtime.model.state.clipping import squares_of
from slipstream.runtime.model.state.parameter_groups import grouped
from slipstream.runtime.model.state.undoable_steps import UndoableSteps


def build_optimizer(layers: Mapping[int, nn.Module], config: TrainingConfig,
                    sharing: Sharing = NOTHING_SHARED) -> "UndoableOptimizer":
    """The configured optimizer over these layers. Raises ConfigError when there is none of that name."""
    return UndoableOptimizer(layers, config, sharing)


class UndoableOptimizer(UndoableSteps):
    """Steps the parameters of some layers by their `.grad`."""

    def __init__(self, layers: Mapping[int, nn.Module], config: TrainingConfig,
                 sharing: Sharing = NOTHING_SHARED) -> None:
        self._layers = layers
        self._sharing = sharing
        self._trained = {layer: {name: parameter for name, parameter in module.named_parameters()
                                 if parameter.requires_grad} for layer, module in layers.items()}
        super().__init__(grouped(
            {str(sharing.first(layer, name)): parameter for layer, trained in self._trained.items()
             for name, parameter in trained.items()}, config), config)

    def squares(self) -> dict[int, float]:
        """The sum of squares of each layer's gradients, computed in float64, whoever holds the layer.

        What several layers share counts as the first one's, and what all ranks of a worker have as the first rank's.
        """
        layers = [(layer, [squares_of(parameter.grad) for name, parameter in trained.items()
                           if parameter.grad is not None and self._counts(layer, name)])
                  for layer, trained in self._trained.items()]
        sums = [one for _, parts in layers for one in parts]
        values = iter(torch.stack(sums).tolist() if sums else ())
        return {layer: sum(next(values) for _ in parts) for layer, parts in layers}

    def state_bytes(self) -> int:
        """Memory of what the optimizer remembers."""
        return self._remembered_bytes()

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        """All that another worker needs to go on with a layer: the tensors themselves, not copies.

        Names are `model.NAME` as in the layer's state_dict, and `optimizer.SLOT.NAME`.
        """
        state = {f"model.{name}": tensor for name, tensor in self._layers[layer].state_dict().items()}
        for name, parameter in self._trained[layer].items():
            for slot, value in self.tensors_of(parameter).items():
                state[f"optimizer.{slot}.{name}"] = value
        return state

    def load_layer_state(self, layer: int, state: Mapping[str, Tensor]) -> None:
        """Take over a layer's state, by copies. No step may be open.

        Raises ValueError when the names or shapes are not those of the layer; then nothing has been changed.
        """
        assert self.open_iteration is None, "a step is open: undo or commit it first"
        module, trained = self._layers[layer], self._trained[layer]
        found: dict[str, dict[str, Tensor]] = {name: {} for name in trained}
        parameters = {}
        for key, tensor in state.items():
            kind, _, name = key.partition(".")
            slot, _, of = name.partition(".")
            if kind == "model":
                parameters[name] = tensor
            elif kind == "optimizer" and of in trained:
                found[of][slot] = tensor
            else:
                raise ValueError(f"layer {layer} has nothing named {key!r}")
        _require_equal_shapes(layer, module.state_dict(), parameters)
        module.load_state_dict(parameters)
        for name, parameter in trained.items():
            self.states.pop(parameter, None)
            if found[name]:
                self.states[parameter] = {
                    slot: tensor.detach().to(self._device_of(slot, parameter), copy=True)
                    for slot, tensor in found[name].items()}
        self._saved = []

    def layer_gradients(self, layer: int) -> dict[str, Tensor]:
        """The gradients of a layer's parameters by their names: the tensors themselves."""
        return {name: parameter.grad for name, parameter in self._trained[layer].items() if parameter.grad is not None}

    def take_over(self, other: "UndoableOptimizer") -> None:
        """Go on from where another optimizer of some of the same parameters is, which must not be used any more.

        No step may be open here; one that is open there is final.
        """
        assert self.open_iteration is None, "a step is open: undo or commit it first"
        mine = set(self._stepped())
        live: set[int] = set()
        for parameter in other._stepped():
            if parameter in mine:
                self.states.pop(parameter, None)
                if parameter in other.states:
                    self.states[parameter] = other.states[parameter]
                live.update(map(id, (parameter, *other.states.get(parameter, {}).values())))
        # Their memory, for the next step.
        self._saved += [(tensor, copy) for tensor, copy in other._saved if id(tensor) in live]

    def _counts(self, layer: int, name: str) -> bool:
        """Whether a parameter is not counted with another layer, or by another rank."""
        return self._sharing.first(layer, name) == (layer, name) and (
            first_rank() or name in shards_of(self._layers[layer]))


def _require_equal_shapes(layer: int, ours: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    if ours.keys() != given.keys():
        name = min(ours.keys() ^ given.keys())
        raise ValueError(f"layer {layer}: {name!r} is {'missing' if name in ours else 'unknown'}")
    for name, tensor in ours.items():
        if tensor.shape != given[name].shape or tensor.dtype != given[name].dtype:
            raise ValueError(f"layer {layer}: {name!r} is {given[name].dtype} {list(given[name].shape)}; expected "
                             f"{tensor.dtype} {list(tensor.shape)}")
