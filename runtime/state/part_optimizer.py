"""Step parts of layers so that steps can be undone, and state can move.

Most optimizers are elementwise, so the result for a parameter does not depend on which worker steps
it. If nothing is sharded, a worker stores the state of all of its layers. It steps *pieces*: the
elements of one parameter that a part has, flat, or in the parameter's shape if these are all, as
optimizers of whole matrices need. Without master weights, a piece is a view of the parameter. With
them, it is a float32 copy, from which the bfloat16 parameter is rounded after each step. Pieces of
a part of which this worker is the buddy are copies, too, and are stepped late
(`runtime.state.late_steps`): the parameter itself comes from the owner.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.models.sharing import NOTHING_SHARED, Sharing
from slipstream.runtime.models.step_rules import step_rules
from slipstream.runtime.ranks.shards import parameter_name, shards_of
from slipstream.runtime.ranks.worker_group import is_first_rank
from slipstream.runtime.state.checksum import compute_checksum
from slipstream.runtime.state.late_steps import GRADIENT_BUFFERS, CopyBuffers, LateSteps
from slipstream.runtime.state.parameter_groups import OptimizerGroups, build_groups, rules_of
from slipstream.runtime.state.part_state import (
    PartState,
    count_elements,
    flatten_slot,
    is_elementwise,
    parameter_spans,
    restore_shape,
    slice_of,
    trained_parameters,
    untrained_tensors,
)
from slipstream.runtime.state.parts import Parts, Span, Version, intersect
from slipstream.runtime.state.step_factors import sum_of_squares
from slipstream.runtime.state.undoable_steps import OptimizerSteps, UndoableSteps


class _Piece(NamedTuple):
    """Elements of one parameter that lie in one part of a layer: one stepped tensor."""

    layer: int
    name: str
    parameter: nn.Parameter
    part: Span
    whole: Span
    """Span of the parameter within the layer's elements."""
    span: Span
    """Span of the piece within the layer's elements."""
    stepped: nn.Parameter
    late: Sequence[Tensor] = ()
    """Buffers for the gradients, if the piece is a copy of another worker's; otherwise empty."""

    def parameter_view(self) -> Tensor:
        """Return a view of these elements in the parameter itself, not in `stepped`."""
        return restore_shape(
            slice_of(self.parameter.detach().view(-1), self.whole, self.span), self.parameter
        )

    def get_gradient(self) -> Tensor | None:
        """Return the piece's gradient, in the dtype of `stepped`; None if there is none."""
        gradient = self.parameter.grad
        if gradient is None:
            return None
        elements = slice_of(gradient.view(-1), self.whole, self.span)
        return restore_shape(elements, self.parameter).to(self.stepped.dtype)

    def scaled_gradient(self, factor: float) -> Tensor:
        """Return the piece's gradient times `factor`, the factor of the last step."""
        gradient, parameter = self.get_gradient(), self.parameter
        assert gradient is not None and parameter.grad is not None
        # The step has scaled a view of the parameter's own gradient in place.
        if factor == 1.0 or gradient.dtype == parameter.grad.dtype:
            return gradient
        return gradient.mul_(factor)


class StateChecksum(NamedTuple):
    """Checksum of a layer's parameters, or of a stored part with its optimizer state."""

    layer: int
    span: Span
    of_part: bool
    """True for a part with its optimizer state, False for the layer's parameters alone."""
    checksum: Tensor


NO_SUMS: CopyBuffers = {}
COPIES = "the copies that this worker keeps of others' parts"
"""Subject of an error about the version of copies."""


class PartOptimizer(UndoableSteps):
    """Optimizer of the parts of layers that one worker stores: own ones, and copies.

    A copy is of another worker's part, of which this worker is the buddy. The owner sends the sums
    of gradients into the copy's buffers in `sums`. After each step, the caller receives the other
    elements of the parameters from other workers, and calls `mark_gathered`.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        config: TrainingConfig,
        stored_parts: Parts,
        own_parts: Parts,
        sharing: Sharing = NOTHING_SHARED,
        sums: CopyBuffers = NO_SUMS,
    ) -> None:
        self.stored_parts, self.own_parts = stored_parts, own_parts
        self._copied_parts = sums.keys()
        self._masters = config.master_weights
        self._first_rank = is_first_rank()
        self._modules = modules
        self._sharing = sharing
        self._tied: dict[nn.Parameter, nn.Parameter] = {}
        """Tensor that is stepped for each shared parameter, once for all held layers."""
        # Cut all stored parts into pieces of single parameters.
        pieces = [
            piece
            for layer, spans in stored_parts.items()
            for part in spans
            for piece in self._cut_pieces(layer, modules[layer], part, sums)
        ]
        self._pieces = [piece for piece in pieces if not piece.late]
        """Pieces that are stepped within the iteration."""
        self._copies = [piece for piece in pieces if piece.late]
        """Pieces of copies of other workers' parts, which are stepped late."""
        # Own pieces and copies have an optimizer each, as they are stepped at different times.
        super().__init__(self._piece_groups(self._pieces, config), config)
        late_gradients = []
        for buffer in range(GRADIENT_BUFFERS):
            late_gradients.append({piece.stepped: piece.late[buffer] for piece in self._copies})
        self._late = LateSteps(self._piece_groups(self._copies, config), config, late_gradients)
        self._factor: float | None = 1.0
        """Factor of the gradients in the last step; None if it was skipped."""
        self._unused: Collection[nn.Parameter] = ()
        """Parameters that the last step left as they were, because no worker had used them."""
        self.parameters = Version(-1, whole=False)
        """Version of all elements of the parameters, also those that come from other workers."""

    @property
    def copy_buffer(self) -> int:
        """Index of the buffer for the copies' next gradients; waits until no step reads it."""
        return self._late.free_buffer

    @property
    def whole_after(self) -> int | None:
        """Iteration after whose step all parameters are current; None while some change."""
        return self.parameters.after if self.parameters.whole else None

    @property
    def last_final(self) -> int:
        """Last iteration whose step a later one has made final; -1 without one.

        There is none unless a step is open. If this worker has copies of others' parts, their last
        step counts, too, as it cannot be undone.
        """
        last = -1 if self.open_iteration is None else self.open_iteration - 1
        return max(last, self._late.version.after) if self._copies else last

    def compute_checksums(self, after: int) -> Iterator[StateChecksum]:
        """Yield checksums of each layer's parameters and buffers, and of each stored part's state.

        Raises VersionError unless all state is that after iteration `after`, which is committed.
        """
        self.require_version(after)
        self.parameters.require(after, "what this worker has of the parameters")
        for layer, module in self._modules.items():
            trained_names = trained_parameters(module)
            for span in self.stored_parts.get(layer, ()):
                tensors = self.part_state(layer, span).tensors
                keys = [key for key in sorted(tensors) if parameter_name(key) in trained_names]
                if keys:
                    checksum = compute_checksum(tensors[key] for key in keys)
                    yield StateChecksum(layer, span, of_part=True, checksum=checksum)
            # All parameters, also those from other workers, and what is not trained.
            untrained = untrained_tensors(module)
            buffers = [untrained[name] for name, _ in module.named_buffers() if name in untrained]
            if compared := [*module.parameters(), *buffers]:
                whole = (0, count_elements(module).total)
                checksum = compute_checksum(compared)
                yield StateChecksum(layer, whole, of_part=False, checksum=checksum)

    def flip_bit(self, what: str, rng: Random) -> bool:
        """Flip a random bit of a stored number other than 0; return False without one.

        The bit is in the stepped parameters if `what` is "parameters", in their optimizer state if
        it is "state", and in one of these of another worker's part, as copied here, if it is
        "copy". Only one tensor is drawn and searched. Autograd does not notice the change.
        """
        pieces = self._copies if what == "copy" else self._pieces
        pieces = [piece for piece in pieces if piece.stepped.numel()]
        if not pieces:
            return False
        piece = rng.choice(pieces)
        tensors = [] if what == "state" else [piece.stepped.detach()]
        if what != "parameters":
            slots = self._optimizer_of(piece).state_tensors(piece.stepped)
            tensors += [tensor for tensor in slots.values() if tensor.dim()]
        tensor = rng.choice(tensors).data.view(-1) if tensors else torch.empty(0)

        # A high bit of the mantissa of a number other than 0: the next step may round others away,
        # and then nothing is wrong.
        elements = tensor.nonzero().flatten().tolist()
        if not elements:
            return False
        first_byte = rng.choice(elements) * tensor.itemsize
        lowest = tensor.itemsize * 3 // 8
        byte = first_byte + rng.randrange(lowest, max(lowest + 1, tensor.itemsize - 2))
        tensor.view(torch.uint8)[byte] ^= 1 << rng.randrange(7)
        return True

    def layer_squares(self) -> dict[int, float]:
        """Return, by layer, the sum of squares of the gradients of own parts, in float64.

        A parameter that layers share counts only for the first of them; one that all ranks of a
        worker have, only on the first rank. Parameters with a step rule do not count.
        """
        # Over all workers and ranks, each gradient counts once.
        counted = [
            piece
            for piece in self._pieces
            if piece.parameter.grad is not None
            and piece.part in self.own_parts.get(piece.layer, ())
            and self._sharing.first_of_group(piece.layer, piece.name) == (piece.layer, piece.name)
            and piece.name not in step_rules(self._modules[piece.layer])
            and (self._first_rank or piece.name in shards_of(self._modules[piece.layer]))
        ]
        sum_of_layer = dict.fromkeys(self._modules, 0.0)
        if not counted:
            return sum_of_layer
        sums = [
            sum_of_squares(gradient)
            for piece in counted
            if (gradient := piece.get_gradient()) is not None
        ]
        # One copy from the device for all sums.
        for piece, value in zip(counted, torch.stack(sums).tolist(), strict=True):
            sum_of_layer[piece.layer] += value
        return sum_of_layer

    def step(
        self, iteration: int, factor: float | None = 1.0, unused: Collection[nn.Parameter] = ()
    ) -> None:
        """Make an iteration's step with gradients times `factor`; it can be undone from now on.

        If `factor` is None, all parameters stay as they are, and the iteration counts as stepped.
        Those in `unused` always stay. Raises VersionError unless what is stepped is the state after
        the iteration before.
        """
        self.mark_gathering(iteration)
        self._factor, self._unused = factor, unused
        super().step(iteration, factor)
        self._late.register_step(
            iteration,
            factor,
            [piece.stepped for piece in self._copies if piece.parameter in unused],
        )

    def mark_gathering(self, iteration: int) -> None:
        """Mark the parameters as incomplete, while those after `iteration` are being received."""
        self.parameters = Version(iteration, whole=False)

    def mark_gathered(self, iteration: int) -> None:
        """Mark all elements of the parameters as those after `iteration`: they have arrived."""
        self.parameters = Version(iteration)

    def undo(self) -> None:
        """Undo the open step bit for bit; it can then be made again."""
        assert self.open_iteration is not None, "no step is open"
        self._late.cancel_step(self.open_iteration)
        self.mark_gathering(self.open_iteration - 1)
        super().undo()
        self._round_parameters(self._pieces)

    def return_to(self, committed: int) -> None:
        """Return to the state after iteration `committed`: undo a later step, keep any other.

        A step that is kept can no longer be undone. Copies of other workers' parts then equal their
        owners' parts. Raises VersionError if the state is then still another iteration's.
        """
        super().return_to(committed)
        self._late.catch_up()
        if self._copies:
            self._late.version.require(committed, COPIES)
        # Elements that had not arrived from their owners come from the copies, where there are any.
        if self.parameters != Version(committed):
            with torch.no_grad():
                for piece in self._copies:
                    piece.parameter_view().copy_(piece.stepped)

    def set_version(self, iteration: int) -> None:
        """Declare all stored state to be that after `iteration`, whatever it was before."""
        self.version = self._late.version = Version(iteration)

    def require_version(self, after: int) -> None:
        """Raise VersionError unless all stored state is that after this committed iteration."""
        if self._pieces:
            self.version.require(after, "what this worker keeps")
        if self._copies:
            self._late.catch_up()
            self._late.version.require(after, COPIES)

    def part_state(self, layer: int, span: Span, *, state: bool = True) -> PartState:
        """Return the state of a span within one stored part; its tensors are not copied.

        If `state` is false, optimizer state is left out. For a span of a copy of another worker's
        part, call this only when the last step is committed.
        """
        parts = self.stored_parts.get(layer, ())
        # The span may be a piece of a stored part.
        around = (part for part in parts if part[0] <= span[0] and span[1] <= part[1])
        part = next(around, span)
        version = self.version
        if (layer, part) in self._copied_parts:
            self._late.catch_up()
            version = self._late.version

        tensors: dict[str, Tensor] = {}
        for piece in (*self._pieces, *self._copies):
            if (piece.layer, piece.part) != (layer, part):
                continue
            overlap = intersect(piece.span, span)
            if overlap is None:
                continue
            elements = piece.stepped.detach().view(-1)
            tensors[f"model.{piece.name}"] = slice_of(elements, piece.span, overlap)
            if not state:
                continue
            for slot, value in self._optimizer_of(piece).state_tensors(piece.stepped).items():
                flat = flatten_slot(value, piece.stepped)
                tensors[f"optimizer.{slot}.{piece.name}"] = slice_of(flat, piece.span, overlap)
        # Untrained tensors belong to the part that begins with element 0.
        if span[0] == 0:
            for name, tensor in untrained_tensors(self._modules[layer]).items():
                tensors[f"model.{name}"] = tensor
        return PartState(layer, *span, tensors, state, version.after if version.whole else None)

    def part_gradients(self, layer: int, span: Span) -> dict[str, Tensor]:
        """Return the gradients, flat and by name, that the last step used for a part.

        The stored part is `span`. The dict is empty if the step was skipped. Parameters that no
        worker had used are left out. Most tensors are not copied, and the next backward changes
        them.
        """
        gradients: dict[str, Tensor] = {}
        if self._factor is None:
            return gradients
        rules = step_rules(self._modules[layer])
        for piece in self._pieces:
            if (piece.layer, piece.part) == (layer, span) and self._is_stepped(piece):
                # Gradients of step rules are never scaled.
                factor = 1.0 if piece.name in rules else self._factor
                gradients[piece.name] = piece.scaled_gradient(factor).view(-1)
        return gradients

    def own_states(self, layer: int) -> list[PartState]:
        """Return the state of each own part of a layer; tensors are not copied."""
        return [self.part_state(layer, span) for span in self.own_parts.get(layer, ())]

    def stored_states(self) -> list[PartState]:
        """Return the state of each part that is stored here; tensors are not copied."""
        return [
            self.part_state(layer, span)
            for layer, spans in self.stored_parts.items()
            for span in spans
        ]

    def load_parts(self, parts: Iterable[PartState]) -> None:
        """Copy `parts` into the parts stored here; no step may be open."""
        self._load_pieces((*self._pieces, *self._copies), parts)

    def adopt_state(self, before: "PartOptimizer", parts: Iterable[PartState]) -> None:
        """Take over the state of the optimizer `before`, and then that in `parts`.

        `before` must not be used afterwards. Optimizer state is taken over without copying where
        both optimizers step the same elements of a parameter as one tensor; other state is copied.
        Neither optimizer may have an open step.
        """
        old_pieces = {
            (piece.layer, piece.name, piece.span): piece
            for piece in (*before._pieces, *before._copies)
        }
        missing = []
        for piece in (*self._pieces, *self._copies):
            old = old_pieces.get((piece.layer, piece.name, piece.span))
            if old is None:
                missing.append(piece)
                continue
            # The same elements as before: their state changes hands without a copy.
            if slots := before._optimizer_of(old).states.get(old.stepped, {}):
                self._optimizer_of(piece).states[piece.stepped] = slots
            if piece.stepped.data_ptr() != old.stepped.data_ptr():
                with torch.no_grad():
                    piece.stepped.copy_(old.stepped)
        # Other pieces are joined from the parts of before.
        self._load_pieces(missing, before.stored_states() if missing else ())
        self.load_parts(parts)

    def _load_pieces(self, pieces: Sequence[_Piece], parts: Iterable[PartState]) -> None:
        assert self.open_iteration is None, "a step is open: undo or commit it first"
        with torch.no_grad():
            for part, piece in product(parts, pieces):
                if piece.layer != part.layer:
                    continue
                overlap = intersect(piece.span, (part.start, part.stop))
                if overlap is not None:
                    self._load_piece(piece, part, overlap)

    def state_bytes(self) -> int:
        """Return the bytes of optimizer state, master weights, and copies of others' parts."""
        masters = self._stepped_parameters() if self._masters else ()
        master_bytes = sum(tensor.nbytes for tensor in masters)
        return master_bytes + self._state_bytes() + self._late.memory_bytes()

    def _cut_pieces(
        self, layer: int, module: nn.Module, part: Span, sums: CopyBuffers
    ) -> Iterable[_Piece]:
        """Yield the pieces of a stored part; those of a copy get buffers from `sums`."""
        for name, parameter, span in parameter_spans(module):
            overlap = intersect(span, part)
            if overlap is None:
                continue
            view = restore_shape(slice_of(parameter.detach().view(-1), span, overlap), parameter)
            late = [
                restore_shape(slice_of(buffer, part, overlap), parameter)
                for buffer in sums.get((layer, part), ())
            ]
            # A parameter that several layers share is stepped once.
            stepped = self._tied.get(parameter)
            if stepped is None:
                if self._masters:
                    view = view.float()
                elif late:
                    view = view.clone()
                stepped = nn.Parameter(view)
            if self._sharing.is_shared(layer, name):
                self._tied[parameter] = stepped
            yield _Piece(layer, name, parameter, part, span, overlap, stepped, late)

    def _piece_groups(self, pieces: Iterable[_Piece], config: TrainingConfig) -> OptimizerGroups:
        stepped_of: dict[nn.Parameter, list[nn.Parameter]] = {}
        names = dict[str, nn.Parameter]()
        for piece in pieces:
            tensors = stepped_of.setdefault(piece.parameter, [])
            if piece.parameter not in self._tied or not tensors:
                tensors.append(piece.stepped)
            names[str(self._sharing.first_of_group(piece.layer, piece.name))] = piece.parameter
        # The options of a parameter are those of each of its pieces.
        groups = build_groups(names, config, self._sharing.last, rules_of(self._modules))
        for group in groups:
            parameters = group["params"]
            group["params"] = [
                tensor for parameter in parameters for tensor in stepped_of[parameter]
            ]
        return groups

    def _make_step(self, factor: float) -> None:
        for piece in self._pieces:
            piece.stepped.grad = piece.get_gradient() if self._is_stepped(piece) else None
        super()._make_step(factor)
        for piece in self._pieces:
            piece.stepped.grad = None
        self._round_parameters(self._pieces)

    def _is_stepped(self, piece: _Piece) -> bool:
        return piece.parameter.grad is not None and piece.parameter not in self._unused

    def _optimizer_of(self, piece: _Piece) -> OptimizerSteps:
        return self._late if piece.late else self

    def start_copy_steps(self) -> None:
        """Start the committed steps of copies of other workers' parts, in the background."""
        self._late.start_committed()

    def _round_parameters(self, pieces: Iterable[_Piece]) -> None:
        if self._masters:
            with torch.no_grad():
                for piece in pieces:
                    piece.parameter_view().copy_(piece.stepped)

    def _load_piece(self, piece: _Piece, part: PartState, both: Span) -> None:
        # The part's elements of the piece's parameter.
        has = max(piece.whole[0], part.start), min(piece.whole[1], part.stop)
        stepped, states = piece.stepped, self._optimizer_of(piece).states
        slots = states[stepped]
        for key, tensor in part.tensors.items():
            kind, slot, *_ = key.split(".")
            if parameter_name(key) != piece.name:
                continue
            if kind == "model":
                elements = slice_of(stepped.detach().view(-1), piece.span, both)
                elements.copy_(slice_of(tensor, has, both))
            elif not is_elementwise(tensor, has):
                # Such as a step counter, which each part has alike.
                slots[slot] = tensor.detach().to(self._slot_device(slot, stepped), copy=True)
            else:
                if slot not in slots:
                    slots[slot] = torch.empty(
                        stepped.shape, dtype=tensor.dtype, device=stepped.device
                    )
                slice_of(slots[slot].view(-1), piece.span, both).copy_(slice_of(tensor, has, both))
        if not slots:
            del states[stepped]
