"""The optimizer of one worker: steps that can be undone bit for bit, and state that moves layer by layer.

Elementwise, so that it matters to no parameter who holds it. With a staggered optimizer a worker steps before it knows
that all others will: until that is known, `UndoableOptimizer` keeps what it takes to go back. It goes back by
copies, one of the parameters and one of the optimizer's state: computing backwards (as in Zero Bubble, Qi et al., ICLR
2024) needs no copy but is not exact in floating point, and then a worker that undid a step would drift from its peers.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runtime.config import ConfigError, TrainingConfig
from runtime.model.learning_rate import is_scheduled, scale
from runtime.model.object_reference import is_reference, load_reference
from runtime.model.parameter_groups import Groups, grouped
from runtime.model.shards import shards_of
from runtime.model.sharing import NOTHING_SHARED, Sharing
from runtime.model.worker_group import first_rank
from runtime.torch_private import copy_all

Factory = Callable[[Groups, TrainingConfig], torch.optim.Optimizer]


def _adamw(groups: Groups, config: TrainingConfig) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.epsilon,
                             amsgrad=config.amsgrad, maximize=config.maximize, fused=True)


def _sgd(groups: Groups, config: TrainingConfig) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.momentum, dampening=config.dampening,
                           nesterov=config.nesterov, maximize=config.maximize, fused=True)


OPTIMIZERS: dict[str, Factory] = {"adamw": _adamw, "sgd": _sgd}
"""By the name that `[training] optimizer` gives. One of your own is named `module:function` and must update each
element of a parameter from that element's gradient and state alone, and remember only tensors, in its `state`."""


def build_optimizer(layers: Mapping[int, nn.Module], config: TrainingConfig,
                    sharing: Sharing = NOTHING_SHARED) -> "UndoableOptimizer":
    """The configured optimizer over these layers. Raises ConfigError when there is none of that name."""
    return UndoableOptimizer(layers, config, sharing)


def optimizer_factory(name: str) -> Factory:
    """What makes the optimizer of a name. Raises ConfigError."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    if not is_reference(name):
        raise ConfigError(f"training.optimizer is {name!r}; expected one of {', '.join(map(repr, OPTIMIZERS))}, or "
                          "'module:function'")
    factory: Factory = load_reference("training.optimizer", name)
    return factory


class UndoableOptimizer:
    """Steps the parameters of some layers by their `.grad`.

    An iteration's step is *open* from `step` until it is committed or undone. At most one is open: stepping the next
    iteration commits the one before, because a worker gets there only after all others have validated that one. So
    recovery is, on each survivor, when c is the last iteration that all have committed, `go_back(c)`: parameters and
    state are bit for bit those after iteration c.
    """

    def __init__(self, layers: Mapping[int, nn.Module], config: TrainingConfig,
                 sharing: Sharing = NOTHING_SHARED) -> None:
        self._layers = layers
        self._sharing = sharing
        self._trained = {layer: {name: parameter for name, parameter in module.named_parameters()
                                 if parameter.requires_grad} for layer, module in layers.items()}
        self._config = config
        self._optimizer = optimizer_factory(config.optimizer)(grouped(
            {str(sharing.first(layer, name)): parameter for layer, trained in self._trained.items()
             for name, parameter in trained.items()}, config), config)
        self._rates = self._scheduled_rates()
        self._state: Any = self._optimizer.state
        self._saved: list[tuple[Tensor, Tensor]] = []
        """Live tensors, each with its copy from before the open step."""
        self._slots: dict[nn.Parameter, dict[str, Any]] = {}
        """The optimizer's state before the open step, as it names it; tensors are the live ones."""
        self.open_iteration: int | None = None
        """The iteration whose step can be undone."""

    def squares(self) -> dict[int, float]:
        """The sum of squares of each layer's gradients, computed in float64, whoever holds the layer.

        What several layers share counts as the first one's, and what all ranks of a worker have as the first rank's.
        """
        layers = [(layer, [parameter.grad.double().square().sum() for name, parameter in trained.items()
                           if parameter.grad is not None and self._counts(layer, name)])
                  for layer, trained in self._trained.items()]
        sums = [one for _, parts in layers for one in parts]
        values = iter(torch.stack(sums).tolist() if sums else ())
        return {layer: sum(next(values) for _ in parts) for layer, parts in layers}

    def step(self, iteration: int, factor: float = 1.0) -> None:
        """Update the parameters with the gradients times `factor`, which `.grad` then holds; undoable from now on."""
        assert self.open_iteration is None or self.open_iteration < iteration, f"iteration {iteration} is open already"
        self._save()
        self.open_iteration = iteration
        if factor != 1.0:
            for parameter in self._parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        for group, rate in self._rates:
            group["lr"] = rate * scale(self._config, iteration)
        self._optimizer.step()

    def undo(self) -> None:
        """Put parameters and state back, bit for bit, to before the open step; gradients stay as they are."""
        assert self.open_iteration is not None, "no step is open"
        with torch.no_grad():
            copy_all([copy for _, copy in self._saved], [live for live, _ in self._saved])
        for parameter in list(self._state):
            before = self._slots.get(parameter)
            if before is None:
                del self._state[parameter]
            else:
                self._state[parameter] = dict(before)
        self.open_iteration = None

    def go_back(self, committed: int) -> None:
        """Undo the open step where it is of a later iteration than the last committed one; else it is final."""
        if self.open_iteration is not None and self.open_iteration > committed:
            self.undo()
        self.commit()

    def commit(self) -> None:
        """Give up the way back: the open step, if there is one, is final. Memory is kept for the next."""
        self.open_iteration = None

    def undo_bytes(self) -> int:
        """Memory that the way back takes."""
        return sum(copy.nbytes for _, copy in self._saved)

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        """All that another worker needs to go on with a layer: the tensors themselves, not copies.

        Names are `model.NAME` as in the layer's state_dict, and `optimizer.SLOT.NAME`.
        """
        state = {f"model.{name}": tensor for name, tensor in self._layers[layer].state_dict().items()}
        for name, parameter in self._trained[layer].items():
            for slot, value in self._state.get(parameter, {}).items():
                if isinstance(value, Tensor):
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
            self._state.pop(parameter, None)
            if found[name]:
                self._state[parameter] = {
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
        mine = set(self._parameters())
        live: set[int] = set()
        for parameter in other._parameters():
            if parameter in mine:
                self._state.pop(parameter, None)
                if parameter in other._state:
                    self._state[parameter] = other._state[parameter]
                live.update(map(id, (parameter, *other._state.get(parameter, {}).values())))
        # Their memory, for the next step.
        self._saved += [(tensor, copy) for tensor, copy in other._saved if id(tensor) in live]

    def _scheduled_rates(self) -> list[tuple[dict[str, Any], float]]:
        """Each group with its highest learning rate; none where the learning rate is constant.

        Raises ConfigError where the optimizer, one of the user's own, has none that could be set.
        """
        if not is_scheduled(self._config):
            return []
        groups = self._optimizer.param_groups
        if not all("lr" in group for group in groups):
            raise ConfigError(f"training.optimizer is {self._config.optimizer!r}, whose groups have no 'lr' for "
                              "training.learning_rate_schedule to set")
        return [(group, group["lr"]) for group in groups]

    def _counts(self, layer: int, name: str) -> bool:
        """Whether a parameter is not counted with another layer, or by another rank."""
        return self._sharing.first(layer, name) == (layer, name) and (
            first_rank() or name in shards_of(self._layers[layer]))

    def _parameters(self) -> list[nn.Parameter]:
        """Each once."""
        return list(dict.fromkeys(parameter for trained in self._trained.values() for parameter in trained.values()))

    def _device_of(self, slot: str, parameter: nn.Parameter) -> torch.device:
        """Where torch.optim keeps a slot: counters of steps on the CPU, unless they are part of one fused kernel."""
        options = self._optimizer.defaults
        beside = slot != "step" or options.get("fused") or options.get("capturable")
        return parameter.device if beside else torch.device("cpu")

    def _save(self) -> None:
        live: list[Tensor] = [*self._parameters()]
        self._slots = {}
        for parameter, slots in self._state.items():
            self._slots[parameter] = dict(slots)
            live += [value for value in slots.values() if isinstance(value, Tensor)]
        copies = {id(tensor): copy for tensor, copy in self._saved}
        self._saved = [(tensor, copies[id(tensor)] if id(tensor) in copies else torch.empty_like(tensor))
                       for tensor in live]
        with torch.no_grad():
            copy_all(live, [copy for _, copy in self._saved])


def _require_equal_shapes(layer: int, ours: Mapping[str, Tensor], given: Mapping[str, Tensor]) -> None:
    if ours.keys() != given.keys():
        name = min(ours.keys() ^ given.keys())
        raise ValueError(f"layer {layer}: {name!r} is {'missing' if name in ours else 'unknown'}")
    for name, tensor in ours.items():
        if tensor.shape != given[name].shape or tensor.dtype != given[name].dtype:
            raise ValueError(f"layer {layer}: {name!r} is {given[name].dtype} {list(given[name].shape)}; expected "
                             f"{tensor.dtype} {list(tensor.shape)}")
