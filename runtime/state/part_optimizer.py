"""Step parts of layers so that steps can be undone, and state can move.

Most optimizers are elementwise, so the result for a parameter does not depend on which worker steps
it. If nothing is sharded, a worker stores the state of all of its layers. It steps *pieces*: the
elements of one parameter that a part has, flat, or in the parameter's shape if these are all, as
optimizers of whole matrices need. Without master weights, a piece is a view of the parameter. With
them, it is a float32 copy, from which the bfloat16 parameter is rounded after each step. Pieces of
a part of which this worker is the buddy are copies, too, and are stepped late
(`runtime.state.late_steps`): the parameter itself comes from the owner, like all elements that are
not stored here.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    """Elements of one parameter in one part of a layer, stepped as one tensor, `stepped`."""

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
        """Return a view of the parameter's own elements of the piece, not of `stepped`."""
        return restore_shape(slice_of(self.parameter.detach().view(-1), self.whole, self.span), self.parameter)

    def get_gradient(self) -> Tensor | None:
        """Return the gradient of the piece, in the dtype in which it is stepped. None without. It
        is a view of `.grad` if that has this dtype."""
        gradient = self.parameter.grad
        return None if gradient is None else restore_shape(
            slice_of(gradient.view(-1), self.whole, self.span), self.parameter).to(self.stepped.dtype)

    def scaled_gradient(self, factor: float) -> Tensor:
        """Return the piece's gradient as the last step used it, scaled by its `factor`.

        A gradient that is a view of the parameter's own was scaled in place by the step, and is
        returned as it is.
        """
        gradient, parameter = self.get_gradient(), self.parameter
        assert gradient is not None and parameter.grad is not None
        return gradient if factor == 1.0 or gradient.dtype == parameter.grad.dtype else gradient.mul_(factor)


NO_SUMS: CopyBuffers = {}
"""Empty mapping of buffers, for an optimizer without copies."""


class PartOptimizer(UndoableSteps):
    """Optimizer of the parts `kept` of some layers, those in `own` and copies of others'.

    The owners send the sums of gradients of copies into the buffers in `sums`. Other elements of
    the parameters come from other workers after each step; the caller then calls `mark_gathered`.
    """

    def __init__(self, modules: Mapping[int, nn.Module], config: TrainingConfig, kept: Parts, own: Parts,
                 sharing: Sharing = NOTHING_SHARED, sums: CopyBuffers = NO_SUMS) -> None:
        self.kept, self.own, self._copied = kept, own, sums.keys()
        self._masters = config.master_weights
        self._first_rank = is_first_rank()
        self._modules = modules
        self._sharing = sharing
        self._tied: dict[nn.Parameter, nn.Parameter] = {}
        """Tensor that is stepped for each shared parameter, once for all held layers."""
        pieces = [piece for layer, spans in kept.items() for part in spans
                  for piece in self._cut_pieces(layer, modules[layer], part, sums)]
        self._pieces = [piece for piece in pieces if not piece.late]
        """Parts of parameters that are stepped within the iteration, unlike copies of other
        workers' parts."""
        self._copies = [piece for piece in pieces if piece.late]
        super().__init__(self._piece_groups(self._pieces, config), config)
        self._late = LateSteps(self._piece_groups(self._copies, config), config, [
            {piece.stepped: piece.late[buffer] for piece in self._copies} for buffer in range(GRADIENT_BUFFERS)])
        self._factor: float | None = 1.0
        """Factor of the gradients in the last step; None if it was skipped."""
        self._unused: Collection[nn.Parameter] = ()
        """Parameters that the last step left as they were, because no worker had used them."""
        self.parameters = Version(-1, whole=False)
        """Version of all elements of the parameters, including those that come from other
        workers."""

    @property
    def copy_buffer(self) -> int:
        """Index of the buffer for the gradient sums of copies in the next step. Waits until no step
        reads from that buffer."""
        return self._late.free_buffer

    @property
    def whole_after(self) -> int | None:
        """Iteration after whose step all parameters are as they are; None while some change."""
        return self.parameters.after if self.parameters.whole else None

    @property
    def last_final(self) -> int:
        """Last iteration whose step can no longer be undone; -1 if there is none. A later step, or
        the step of copies of other workers' parts, has been made."""
        return max(self._late.version.after if self._copies else -1,
                   -1 if self.open_iteration is None else self.open_iteration - 1)

    def compute_checksums(self, after: int) -> Iterator[tuple[int, Span, bool, Tensor]]:
        """Yield a checksum of each layer's parameters, and of each stored part with its state.

        Each comes as (layer, span, True if of a part with optimizer state, checksum); a layer's own
        has its stored buffers, too. The state must be that after a committed iteration. Raises
        VersionError if it is not.
        """
        self.require_version(after)
        self.parameters.require(after, "what this worker has of the parameters")
        for layer, module in self._modules.items():
            trained_names = trained_parameters(module)
            for span in self.kept.get(layer, ()):
                tensors = self.part_state(layer, span).tensors
                if kept := [tensor for key, tensor in sorted(tensors.items()) if parameter_name(key) in trained_names]:
                    yield layer, span, True, compute_checksum(kept)
            untrained = untrained_tensors(module)
            stored = [untrained[name] for name, _ in module.named_buffers() if name in untrained]
            if compared := [*module.parameters(), *stored]:
                yield layer, (0, count_elements(module).total), False, compute_checksum(compared)

    def flip_bit(self, what: str, rng: Random) -> bool:
        """Flip one random bit of a stored tensor; return whether there was such a tensor.

        The bit is in the stepped parameters if `what` is "parameters", in their optimizer state if
        it is "state", and in either of a copy of another worker's part if it is "copy". It is a
        high bit of the mantissa of a number other than 0, because the next step may round the
        others away, and then nothing is wrong. Autograd does not notice the change.
        """
        pieces = [piece for piece in (self._copies if what == "copy" else self._pieces) if piece.stepped.numel()]
        piece = rng.choice(pieces) if pieces else None
        tensors = [] if piece is None or what == "state" else [piece.stepped.detach()]
        tensors += [] if piece is None or what == "parameters" else [
            tensor for tensor in self._optimizer_of(piece).state_tensors(piece.stepped).values() if tensor.dim()]
        tensor = rng.choice(tensors).data.view(-1) if tensors else torch.empty(0)
        elements = tensor.nonzero().flatten().tolist()
        if elements:
            lowest = tensor.itemsize * 3 // 8
            byte = rng.choice(elements) * tensor.itemsize + rng.randrange(
                lowest, max(lowest + 1, tensor.itemsize - 2))
            tensor.view(torch.uint8)[byte] ^= 1 << rng.randrange(7)
        return bool(elements)

    def layer_squares(self) -> dict[int, float]:
        """Return, by layer, the sum of squares of the gradients of own parts, in float64.

        A parameter that layers share counts only for the first of them; one that all ranks of a
        worker have, only on the first rank. Parameters with a step rule do not count.
        """
        counted = [piece for piece in self._pieces if piece.parameter.grad is not None
                   and piece.part in self.own.get(piece.layer, ())
                   and self._sharing.first_of_group(piece.layer, piece.name) == (piece.layer, piece.name)
                   and piece.name not in step_rules(self._modules[piece.layer])
                   and (self._first_rank or piece.name in shards_of(self._modules[piece.layer]))]
        sums = [sum_of_squares(gradient) for piece in counted
                if (gradient := piece.get_gradient()) is not None]
        sum_of_layer = dict.fromkeys(self._modules, 0.0)
        for piece, value in zip(counted, torch.stack(sums).tolist() if sums else (), strict=True):
            sum_of_layer[piece.layer] += value
        return sum_of_layer

    def step(self, iteration: int, factor: float | None = 1.0, unused: Collection[nn.Parameter] = ()) -> None:
        """Make an iteration's step with gradients times `factor`; it can be undone from now on.

        The parameters in `unused` stay as they are. If `factor` is None, all do, and the iteration
        counts as stepped.
        """
        self.mark_gathering(iteration)
        self._factor, self._unused = factor, unused
        super().step(iteration, factor)
        self._late.register_step(iteration, factor,
                                 [piece.stepped for piece in self._copies if piece.parameter in unused])

    def mark_gathering(self, iteration: int) -> None:
        """Mark the parameters as being received, to become those after an iteration."""
        self.parameters = Version(iteration, whole=False)

    def mark_gathered(self, iteration: int) -> None:
        """Mark all elements of the parameters, which have arrived, as those after an iteration."""
        self.parameters = Version(iteration)

    def undo(self) -> None:
        """Undo the last step, which must not be permanent, bit for bit. It can then be made
        again."""
        assert self.open_iteration is not None, "no step is open"
        self._late.cancel_step(self.open_iteration)
        self.mark_gathering(self.open_iteration - 1)
        super().undo()
        self._round_parameters(self._pieces)

    def return_to(self, committed: int) -> None:
        """Return to the state after iteration `committed`: undo a later step, keep any other.

        A step that is kept can no longer be undone. Copies of other workers' parts then equal their
        owners' parts. Raises VersionError if that is impossible.
        """
        super().return_to(committed)
        self._late.catch_up()
        if self._copies:
            self._late.version.require(committed, "the copies that this worker keeps of others' parts")
        if self.parameters != Version(committed):
            with torch.no_grad():
                for piece in self._copies:
                    piece.parameter_view().copy_(piece.stepped)

    def set_version(self, iteration: int) -> None:
        """Declare all stored state to be that after an iteration, whatever it was before."""
        self.version = self._late.version = Version(iteration)

    def require_version(self, after: int) -> None:
        """Raise VersionError unless all stored state is that after a committed iteration."""
        if self._pieces:
            self.version.require(after, "what this worker keeps")
        if self._copies:
            self._late.catch_up()
            self._late.version.require(after, "the copies that this worker keeps of others' parts")

    def part_state(self, layer: int, span: Span, *, state: bool = True) -> PartState:
        """Return the state of a span that lies in one stored part, as live tensors.

        Without `state`, leave out the optimizer's. For a copy of another worker's part, call it
        only when the last step is committed.
        """
        tensors: dict[str, Tensor] = {}
        part = next((kept for kept in self.kept.get(layer, ()) if kept[0] <= span[0] and span[1] <= kept[1]), span)
        if (layer, part) in self._copied:
            self._late.catch_up()
        for piece in (*self._pieces, *self._copies):
            overlap = intersect(piece.span, span) if piece.layer == layer and piece.part == part else None
            if overlap is None:
                continue
            tensors[f"model.{piece.name}"] = slice_of(piece.stepped.detach().view(-1), piece.span, overlap)
            for slot, value in self._optimizer_of(piece).state_tensors(piece.stepped).items() if state else ():
                flat = flatten_slot(value, piece.stepped)
                tensors[f"optimizer.{slot}.{piece.name}"] = slice_of(flat, piece.span, overlap)
        if span[0] == 0:
            tensors |= {f"model.{name}": tensor for name, tensor in untrained_tensors(self._modules[layer]).items()}
        version = self._late.version if (layer, part) in self._copied else self.version
        return PartState(layer, *span, tensors, state, version.after if version.whole else None)

    def part_gradients(self, layer: int, span: Span) -> dict[str, Tensor]:
        """Return the gradients, flat and by name, that the last step used for a part.

        Empty if the step was skipped. Parameters that no worker had used are left out. Most are
        live tensors, which the next backward changes.
        """
        if self._factor is None:
            return {}
        rules = step_rules(self._modules[layer])  # their gradients are never scaled
        return {piece.name: piece.scaled_gradient(1.0 if piece.name in rules else self._factor).view(-1)
                for piece in self._pieces
                if (piece.layer, piece.part) == (layer, span) and self._is_stepped(piece)}

    def own_states(self, layer: int) -> list[PartState]:
        """Return the state of each own part of a layer, as live tensors."""
        return [self.part_state(layer, span) for span in self.own.get(layer, ())]

    def kept_states(self) -> list[PartState]:
        """Return the state of each part that is stored here, as live tensors."""
        return [self.part_state(layer, span) for layer, spans in self.kept.items() for span in spans]

    def load_parts(self, parts: Iterable[PartState]) -> None:
        """Copy `parts` into those stored here. The last step must be permanent or undone."""
        self._load_pieces((*self._pieces, *self._copies), parts)

    def adopt_state(self, before: "PartOptimizer", parts: Iterable[PartState]) -> None:
        """Take over the state of the optimizer `before`, and then that in `parts`.

        `before` must not be used afterwards. Optimizer state is taken over without copying where
        both optimizers step the same elements of a parameter as one tensor; other state is copied.
        In both, the last step must be permanent (`return_to`) or undone.
        """
        theirs = {(piece.layer, piece.name, piece.span): piece for piece in (*before._pieces, *before._copies)}
        missing = []
        for piece in (*self._pieces, *self._copies):
            old = theirs.get((piece.layer, piece.name, piece.span))
            if old is None:
                missing.append(piece)
                continue
            if slots := before._optimizer_of(old).states.get(old.stepped, {}):
                self._optimizer_of(piece).states[piece.stepped] = slots
            if piece.stepped.data_ptr() != old.stepped.data_ptr():
                with torch.no_grad():
                    piece.stepped.copy_(old.stepped)
        self._load_pieces(missing, before.kept_states() if missing else ())
        self.load_parts(parts)

    def _load_pieces(self, pieces: Sequence[_Piece], parts: Iterable[PartState]) -> None:
        """Copy the state of received or saved `parts` into the pieces that share elements."""
        assert self.open_iteration is None, "a step is open: undo or commit it first"
        with torch.no_grad():
            for part in parts:
                for piece in pieces:
                    overlap = intersect(piece.span, (part.start, part.stop)) if piece.layer == part.layer else None
                    if overlap is not None:
                        self._load_piece(piece, part, overlap)

    def state_bytes(self) -> int:
        """Return the bytes of the optimizer's state, master weights, and copies of others'
        parts."""
        masters = self._stepped_parameters() if self._masters else ()
        return sum(tensor.nbytes for tensor in masters) + self._state_bytes() + self._late.memory_bytes()

    def _cut_pieces(self, layer: int, module: nn.Module, part: Span, sums: CopyBuffers) -> Iterable[_Piece]:
        """Yield the pieces of a stored part: for each parameter, the elements in it."""
        # A part with gradient buffers in `sums` is a copy of another worker's.
        for name, parameter, span in parameter_spans(module):
            overlap = intersect(span, part)
            if overlap is None:
                continue
            view = restore_shape(slice_of(parameter.detach().view(-1), span, overlap), parameter)
            late = [restore_shape(slice_of(buffer, part, overlap), parameter) for buffer in sums.get((layer, part), ())]
            stepped = self._tied.get(parameter)
            if stepped is None:
                stepped = nn.Parameter(view.float() if self._masters else view.clone() if late else view)
            if self._sharing.is_shared(layer, name):
                self._tied[parameter] = stepped
            yield _Piece(layer, name, parameter, part, span, overlap, stepped, late)

    def _piece_groups(self, pieces: Iterable[_Piece], config: TrainingConfig) -> OptimizerGroups:
        """Return torch's parameter groups of the tensors that are stepped for pieces."""
        by_parameter: dict[nn.Parameter, list[nn.Parameter]] = {}
        names = dict[str, nn.Parameter]()
        for piece in pieces:
            members = by_parameter.setdefault(piece.parameter, [])
            if piece.parameter not in self._tied or not members:
                members.append(piece.stepped)
            names[str(self._sharing.first_of_group(piece.layer, piece.name))] = piece.parameter
        return [{**group, "params": [stepped for parameter in group["params"] for stepped in by_parameter[parameter]]}
                for group in build_groups(names, config, self._sharing.last, rules_of(self._modules))]

    def _make_step(self, factor: float) -> None:
        """Step own parts with gradients times `factor`, and round parameters from masters."""
        for piece in self._pieces:
            piece.stepped.grad = piece.get_gradient() if self._is_stepped(piece) else None
        super()._make_step(factor)
        for piece in self._pieces:
            piece.stepped.grad = None
        self._round_parameters(self._pieces)

    def _is_stepped(self, piece: _Piece) -> bool:
        """Return whether the last step, if made, changed a piece: its parameter was used."""
        return piece.parameter.grad is not None and piece.parameter not in self._unused

    def _optimizer_of(self, piece: _Piece) -> OptimizerSteps:
        """Return the optimizer of a piece: a `LateSteps` for a copy, otherwise this object."""
        return self._late if piece.late else self

    def start_copy_steps(self) -> None:
        """Start the steps of copies for the last committed iteration, beside computation."""
        self._late.start_committed()

    def _round_parameters(self, pieces: Iterable[_Piece]) -> None:
        """Copy master weights, if there are any, into the parameters, rounded to their dtype."""
        if self._masters:
            with torch.no_grad():
                for piece in pieces:
                    piece.parameter_view().copy_(piece.stepped)

    def _load_piece(self, piece: _Piece, part: PartState, both: Span) -> None:
        """Copy the span `both` of a part into a piece, with optimizer state."""
        # State of other parameters in the part is ignored.
        has = max(piece.whole[0], part.start), min(piece.whole[1], part.stop)
        stepped, states = piece.stepped, self._optimizer_of(piece).states
        slots = states[stepped]
        for key, tensor in part.tensors.items():
            kind, slot, *_ = key.split(".")
            if parameter_name(key) != piece.name:
                continue
            if kind == "model":
                slice_of(stepped.detach().view(-1), piece.span, both).copy_(slice_of(tensor, has, both))
            elif not is_elementwise(tensor, has):
                slots[slot] = tensor.detach().to(self._slot_device(slot, stepped), copy=True)
            else:
                if slot not in slots:
                    slots[slot] = torch.empty(stepped.shape, dtype=tensor.dtype, device=stepped.device)
                slice_of(slots[slot].view(-1), piece.span, both).copy_(slice_of(tensor, has, both))
        if not slots:
            del states[stepped]
