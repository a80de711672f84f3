"""Receive parts of layers that another worker owns, while it trains.

Of a part with optimizer state, the state is received once, and then the gradients of each step. It
is a whole part of the sender, and is stepped separately, as on the sender: the ends of a vector are
computed differently from its middle, so steps of other spans would not give the same bits. Of a
part without state, the parameters are received again after each step.

Received parts lie in host memory, because plans leave no room for them on a device. Each tensor is
stepped by itself on the device that computes, as CPUs would not give the same bits; only one tensor
at a time is on the device.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.models.sharing import NOTHING_SHARED, Sharing
from slipstream.runtime.ranks.shards import parameter_name
from slipstream.runtime.state.parameter_groups import build_groups, rules_of
from slipstream.runtime.state.part_state import PartState, flatten_slot, restore_shape, trained_parameters
from slipstream.runtime.state.parts import Version
from slipstream.runtime.state.undoable_steps import UndoableSteps

HOST = torch.device("cpu")


class SteppedPart(UndoableSteps):
    """Received part with the optimizer's state, stepped as on the sender, with its gradients.

    Its tensors are copies in host memory, and `device` computes the steps. The layer `module` gives
    only names, shapes and step rules; it stays unchanged.
    """

    def __init__(self, part: PartState, module: nn.Module, config: TrainingConfig, device: torch.device,
                 sharing: Sharing = NOTHING_SHARED) -> None:
        assert part.after is not None
        parameters = trained_parameters(module)
        self._device = device
        names = {key: parameter_name(key) for key in part.tensors if parameter_name(key) in parameters}
        self._part = part._replace(tensors={key: tensor for key, tensor in part.tensors.items() if key not in names})
        self._pieces = {name: nn.Parameter(restore_shape(part.tensors[key].to(HOST, copy=True), parameters[name]))
                        for key, name in names.items() if key.startswith("model.")}
        groups = build_groups({str(sharing.first_of_group(part.layer, name)): parameters[name]
                               for name in self._pieces}, config,
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

    def follow_step(self, iteration: int, tensors: Mapping[str, Tensor]) -> None:
        """Make the sender's step of an iteration with its gradients `tensors`, by parameter.

        They are empty if the sender skipped it. Parameters that it left as they were, because no
        worker had used them, are not among them. Raises ValueError if the gradients do not fit, and
        VersionError if they are not those of the next step.
        """
        if not tensors:
            self.step(iteration, None)
            return
        if any(name not in self._pieces or tensor.numel() != self._pieces[name].numel()
               for name, tensor in tensors.items()):
            raise ValueError(f"gradients of a part of layer {self._part.layer} do not fit")
        for name, tensor in tensors.items():
            piece = self._pieces[name]
            piece.grad = tensor.to(HOST, piece.dtype).view(piece.shape)
        self.step(iteration)
        for piece in self._pieces.values():
            piece.grad = None

    def _make_step(self, factor: float) -> None:
        """Save copies, and step tensors one by one with the sender's scaled gradients."""
        assert factor == 1.0, "what comes are the gradients that were stepped by"
        stepped = self._stepped_parameters()
        self._save_copies(stepped)
        gradients = [piece.grad for piece in stepped]
        for piece in stepped:
            piece.grad = None
        for piece, gradient in zip(stepped, gradients, strict=True):
            if gradient is not None:
                self._step_on_device(piece, gradient)

    def _step_on_device(self, piece: nn.Parameter, gradient: Tensor) -> None:
        """Step one tensor on the computing device, and copy it back to host memory."""
        parameter, slots = piece.data, self.state_tensors(piece)
        piece.data = parameter.to(self._device)
        for slot, value in slots.items():
            self.states[piece][slot] = value.to(self._slot_device(slot, piece))
        piece.grad = gradient.to(self._device)
        self._apply_update()
        piece.grad, piece.data = None, parameter.copy_(piece.data)
        for slot, value in self.state_tensors(piece).items():
            self.states[piece][slot] = slots[slot].copy_(value) if slot in slots else value.to(HOST)

    def to_part_state(self) -> PartState:
        """Return the part in its present state. Its tensors are live: later steps change them."""
        tensors = dict(self._part.tensors)
        for name, piece in self._pieces.items():
            tensors[f"model.{name}"] = piece.detach().view(-1)
            tensors |= {f"optimizer.{slot}.{name}": flatten_slot(value, piece)
                        for slot, value in self.state_tensors(piece).items()}
        return self._part._replace(tensors=tensors, after=self.version.after)


class CopiedPart:
    """Received part that is not stepped here: without optimizer state, or of a waiting sender.
    Until the tensors of an iteration arrive, it has those of the iteration before."""

    def __init__(self, part: PartState) -> None:
        assert part.after is not None
        self._part = part
        self._last: Mapping[int, Mapping[str, Tensor]] = {part.after: part.tensors}
        """Tensors of the last two iterations, by the iteration after which they are the state."""

    def follow_step(self, iteration: int, tensors: Mapping[str, Tensor]) -> None:
        """Store `tensors`, the sender's parameters after the step of an iteration. Raises
        ValueError if they do not fit, and VersionError unless the iteration is the next one."""
        if {key: tensor.shape for key, tensor in tensors.items()} != {
                key: tensor.shape for key, tensor in self._part.tensors.items()}:
            raise ValueError(f"parameters of a part of layer {self._part.layer} do not fit")
        before = max(self._last)
        Version(before).require(iteration - 1, f"a part of layer {self._part.layer}")
        self._last = {before: self._last[before], iteration: tensors}

    def return_to(self, committed: int) -> None:
        """Return to the tensors of one of the last two iterations. Raises VersionError for
        others."""
        Version(committed if committed in self._last else max(self._last)).require(
            committed, f"a part of layer {self._part.layer}")
        self._last = {committed: self._last[committed]}

    def to_part_state(self) -> PartState:
        """Return the part as received last, with the tensors themselves, not copies."""
        after = max(self._last)
        return self._part._replace(tensors=self._last[after], after=after)


ReceivedPart = SteppedPart | CopiedPart
"""Received part, with or without the optimizer's state."""
