"""Parts of layers that another worker keeps, on their way here while it trains.

Of a part with optimizer state the state comes once, and then the gradients of each step. It is a whole part of whoever
sends it, and stepped by itself, as there: the ends of a vector are computed otherwise than its middle, so that steps
of other spans would not end in the same bits. Of a part without state, the parameters come anew after each step.

What follows lies in host memory, as plans leave no room for it on a device. Each tensor is stepped by itself on the
device that computes, as CPUs would not end in the same bits: only one at a time is there.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.model.layers.sharing import NOTHING_SHARED, Sharing, name_of
from slipstream.runtime.model.state.parameter_groups import grouped, rules_of
from slipstream.runtime.model.state.part_state import PartState, flattened, shaped, trained
from slipstream.runtime.model.state.undoable_steps import UndoableSteps
from slipstream.runtime.model.state.version import Version

HOST = torch.device("cpu")


class SteppedPart(UndoableSteps):
    """With the optimizer's state. `module` is the layer, of which nothing is changed; `device` is what computes."""

    def __init__(self, part: PartState, module: nn.Module, config: TrainingConfig, device: torch.device,
                 sharing: Sharing = NOTHING_SHARED) -> None:
        assert part.after is not None
        parameters = trained(module)
        self._device = device
        names = {key: name_of(key) for key in part.tensors if name_of(key) in parameters}
        self._part = part._replace(tensors={key: tensor for key, tensor in part.tensors.items() if key not in names})
        self._pieces = {name: nn.Parameter(shaped(part.tensors[key].to(HOST, copy=True), parameters[name]))
                        for key, name in names.items() if key.startswith("model.")}
        groups = grouped({str(sharing.first(part.layer, name)): parameters[name] for name in self._pieces}, config,
                         sharing.last, rules_of({part.layer: module}))
        pieces = {parameters[name]: piece for name, piece in self._pieces.items()}
        super().__init__([{**group, "params": [pieces[one] for one in group["params"]]} for group in groups], config)
        self.version = Version(part.after)
        for key, name in names.items():
            kind, slot, *_ = key.split(".")
            if kind == "optimizer":
                piece, tensor = self._pieces[name], part.tensors[key].to(HOST, copy=True)
                flat = tensor.dim() == 1 and tensor.numel() == piece.numel()
                self.states[piece][slot] = tensor.view(piece.shape) if flat else tensor

    def follow(self, iteration: int, tensors: Mapping[str, Tensor]) -> None:
        """The sender has stepped by these gradients; none: it made no step. Raises ValueError where they do not fit,
        and VersionError where they are not those of the next step."""
        if not tensors:
            self.step(iteration, None)
            return
        if {name: one.numel() for name, one in tensors.items()} != {
                name: one.numel() for name, one in self._pieces.items()}:
            raise ValueError(f"gradients of a part of layer {self._part.layer} do not fit")
        for name, piece in self._pieces.items():
            piece.grad = tensors[name].to(HOST, piece.dtype).view(piece.shape)
        self.step(iteration)
        for piece in self._pieces.values():
            piece.grad = None

    def _make_step(self, factor: float) -> None:
        assert factor == 1.0, "what comes are the gradients that were stepped by"
        stepped = self._stepped()
        self._save(stepped)
        gradients = [piece.grad for piece in stepped]
        for piece in stepped:
            piece.grad = None
        for piece, gradient in zip(stepped, gradients, strict=True):
            if gradient is not None:
                self._step_on_device(piece, gradient)

    def _step_on_device(self, piece: nn.Parameter, gradient: Tensor) -> None:
        """Step one tensor; what is live stays in the same host memory."""
        parameter, slots = piece.data, self.tensors_of(piece)
        piece.data = parameter.to(self._device)
        for slot, value in slots.items():
            self.states[piece][slot] = value.to(self._device_of(slot, piece))
        piece.grad = gradient.to(self._device)
        self._update()
        piece.grad, piece.data = None, parameter.copy_(piece.data)
        for slot, value in self.tensors_of(piece).items():
            self.states[piece][slot] = slots[slot].copy_(value) if slot in slots else value.to(HOST)

    def state(self) -> PartState:
        """The part; the tensors themselves."""
        found = dict(self._part.tensors)
        for name, piece in self._pieces.items():
            found[f"model.{name}"] = piece.detach().view(-1)
            found |= {f"optimizer.{slot}.{name}": flattened(value, piece)
                      for slot, value in self.tensors_of(piece).items()}
        return self._part._replace(tensors=found, after=self.version.after)


class CopiedPart:
    """Parameters alone; or what does not change, where the sender waits. They are as they are before an iteration."""

    def __init__(self, part: PartState) -> None:
        assert part.after is not None
        self._part = part
        self._last: Mapping[int, Mapping[str, Tensor]] = {part.after: part.tensors}
        """By the iteration after which they were so: the last two."""

    def follow(self, iteration: int, tensors: Mapping[str, Tensor]) -> None:
        """The sender has stepped: these are the parameters after that. Raises ValueError where they do not fit."""
        if {key: one.shape for key, one in tensors.items()} != {
                key: one.shape for key, one in self._part.tensors.items()}:
            raise ValueError(f"parameters of a part of layer {self._part.layer} do not fit")
        before = max(self._last)
        Version(before).require(iteration - 1, f"a part of layer {self._part.layer}")
        self._last = {before: self._last[before], iteration: tensors}

    def go_back(self, committed: int) -> None:
        """Be as it is after an iteration: the last one, or the one before. Raises VersionError."""
        Version(committed if committed in self._last else max(self._last)).require(
            committed, f"a part of layer {self._part.layer}")
        self._last = {committed: self._last[committed]}

    def state(self) -> PartState:
        """The part; the tensors themselves."""
        after = max(self._last)
        return self._part._replace(tensors=self._last[after], after=after)


FollowedPart = SteppedPart | CopiedPart
"""What has come of a part until now."""
