"""Keep up with parts of layers that another worker owns, while it trains.

Of a part with optimizer state, the state is received once, and then the gradients of each step. The
part must be one that the sender steps as a whole: the ends of a vector are computed differently
from its middle. Of a part without state, the parameters are received again after each step.

Received parts lie in host memory, because plans leave no room for them on a device. One tensor at a
time is stepped on the device that computes, as CPUs would not give the same bits.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.models.sharing import NOTHING_SHARED, Sharing
from slipstream.runtime.ranks.shards import parameter_name
from slipstream.runtime.state.parameter_groups import build_groups, rules_of
from slipstream.runtime.state.part_state import (
    PartState,
    flatten_slot,
    restore_shape,
    trained_parameters,
)
from slipstream.runtime.state.parts import Version
from slipstream.runtime.state.undoable_steps import UndoableSteps

HOST = torch.device("cpu")


class SteppedPart(UndoableSteps):
    """Received part with optimizer state, on which the sender's steps are repeated.

    The sender passes on the gradients of each step. The tensors of the part are in host memory, and
    `device` computes the steps. The layer `module` gives only names, shapes and step rules. It must
    be known after which iteration the part has its state (`part.after`).
    """

    def __init__(
        self,
        part: PartState,
        module: nn.Module,
        config: TrainingConfig,
        device: torch.device,
        sharing: Sharing = NOTHING_SHARED,
    ) -> None:
        assert part.after is not None
        parameters = trained_parameters(module)
        self._device = device
        # Separate what is stepped from buffers and the like, which stay as received.
        names = {
            key: parameter_name(key) for key in part.tensors if parameter_name(key) in parameters
        }
        untrained = {key: tensor for key, tensor in part.tensors.items() if key not in names}
        self._part = part._replace(tensors=untrained)
        self._pieces = dict[str, nn.Parameter]()
        for key, name in names.items():
            if key.startswith("model."):
                elements = part.tensors[key].to(HOST, copy=True)
                self._pieces[name] = nn.Parameter(restore_shape(elements, parameters[name]))
        # Options depend on the names and shapes of whole parameters, in whose place pieces step.
        by_name = {
            str(sharing.first_of_group(part.layer, name)): parameters[name] for name in self._pieces
        }
        groups = build_groups(by_name, config, sharing.last, rules_of({part.layer: module}))
        pieces = {parameters[name]: piece for name, piece in self._pieces.items()}
        for group in groups:
            group["params"] = [pieces[parameter] for parameter in group["params"]]
        super().__init__(groups, config)
        self.version = Version(part.after)
        # Begin with the sender's optimizer state; slots that are no vectors, such as step counts,
        # stay as they are.
        for key, name in names.items():
            kind, slot, *_ = key.split(".")
            if kind == "optimizer":
                piece, tensor = self._pieces[name], part.tensors[key].to(HOST, copy=True)
                flat = tensor.dim() == 1 and tensor.numel() == piece.numel()
                self.states[piece][slot] = tensor.view(piece.shape) if flat else tensor

    def follow_step(self, iteration: int, tensors: Mapping[str, Tensor]) -> None:
        """Repeat the sender's step of an iteration, with its gradients by parameter (`tensors`).

        `tensors` is empty if the sender skipped the step, and lacks parameters that no worker had
        used. Raises ValueError if gradients do not fit, and VersionError if `iteration` is not the
        next one.
        """
        if not tensors:
            self.step(iteration, None)
            return
        if any(
            name not in self._pieces or tensor.numel() != self._pieces[name].numel()
            for name, tensor in tensors.items()
        ):
            raise ValueError(f"gradients of a part of layer {self._part.layer} do not fit")
        for name, tensor in tensors.items():
            piece = self._pieces[name]
            piece.grad = tensor.to(HOST, piece.dtype).view(piece.shape)
        self.step(iteration)
        for piece in self._pieces.values():
            piece.grad = None

    def _make_step(self, factor: float) -> None:
        assert factor == 1.0, "what comes are the gradients that were stepped by"
        stepped = self._stepped_parameters()
        self._save_copies(stepped)
        # The optimizer steps what has a gradient, which is one tensor at a time.
        gradients = [piece.grad for piece in stepped]
        for piece in stepped:
            piece.grad = None
        for piece, gradient in zip(stepped, gradients, strict=True):
            if gradient is not None:
                self._step_on_device(piece, gradient)

    def _step_on_device(self, piece: nn.Parameter, gradient: Tensor) -> None:
        # The piece and its slots are moved to the device, stepped, and copied back.
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
        """Return the part in its present state, with tensors that are not copied."""
        tensors = dict(self._part.tensors)
        for name, piece in self._pieces.items():
            tensors[f"model.{name}"] = piece.detach().view(-1)
            tensors |= {
                f"optimizer.{slot}.{name}": flatten_slot(value, piece)
                for slot, value in self.state_tensors(piece).items()
            }
        return self._part._replace(tensors=tensors, after=self.version.after)


class CopiedPart:
    """Received part that is not stepped here.

    It is one without optimizer state, whose parameters are sent again after each step, or one that
    is sent while all workers wait.
    """

    def __init__(self, part: PartState) -> None:
        assert part.after is not None
        self._part = part
        self._last: Mapping[int, Mapping[str, Tensor]] = {part.after: part.tensors}
        """Tensors after each of the last two iterations."""

    def follow_step(self, iteration: int, tensors: Mapping[str, Tensor]) -> None:
        """Store `tensors`, the sender's parameters after the step of `iteration`.

        Raises ValueError if they do not fit, and VersionError if `iteration` is not the next one.
        """
        shapes = {key: tensor.shape for key, tensor in tensors.items()}
        expected = {key: tensor.shape for key, tensor in self._part.tensors.items()}
        if shapes != expected:
            raise ValueError(f"parameters of a part of layer {self._part.layer} do not fit")
        before = max(self._last)
        Version(before).require(iteration - 1, f"a part of layer {self._part.layer}")
        self._last = {before: self._last[before], iteration: tensors}

    def return_to(self, committed: int) -> None:
        """Return to the tensors after `committed`. Raises VersionError if they are gone."""
        after = committed if committed in self._last else max(self._last)
        Version(after).require(committed, f"a part of layer {self._part.layer}")
        self._last = {committed: self._last[committed]}

    def to_part_state(self) -> PartState:
        """Return the part with the tensors received last, not copied."""
        after = max(self._last)
        return self._part._replace(tensors=self._last[after], after=after)


ReceivedPart = SteppedPart | CopiedPart
"""Received part, stepped here or not."""
