"""The optimizer of one worker: steps that can be undone bit for bit, and state that moves by parts of layers.

Most optimizers are elementwise, so that it matters to no parameter who holds it. Where nothing is sharded, a worker
keeps all of its layers. It steps *pieces*: what a part has of one parameter, flat, or in the parameter's shape where it
has all of it, as optimizers of whole matrices need. Without master weights a piece is a view of the parameter; with
them it is a float32 copy, from which the bfloat16 parameter is rounded after each step. Pieces of a part that is
another worker's, of which this one is the buddy, are copies, too, and stepped late (`runtime.model.state.late_steps`):
the parameter itself comes from the other worker, as all that is not kept here.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.model.layers.shards import shards_of
from slipstream.runtime.model.layers.sharing import NOTHING_SHARED, Sharing, name_of
from slipstream.runtime.model.layers.step_rules import step_rules
from slipstream.runtime.model.layers.worker_group import first_rank
from slipstream.runtime.model.state.checksum import checksum
from slipstream.runtime.model.state.clipping import squares_of
from slipstream.runtime.model.state.copied_sums import Sums
from slipstream.runtime.model.state.late_steps import BUFFERS, LateSteps
from slipstream.runtime.model.state.parameter_groups import Groups, grouped, rules_of
from slipstream.runtime.model.state.part_state import (
    PartState,
    elements_of,
    flattened,
    is_elementwise,
    placed,
    shaped,
    slice_of,
    trained,
    untrained,
)
from slipstream.runtime.model.state.parts import Parts, Span, common
from slipstream.runtime.model.state.undoable_steps import OptimizerSteps, UndoableSteps
from slipstream.runtime.model.state.version import Version


class _Piece(NamedTuple):
    """What a part has of a parameter."""

    layer: int
    name: str
    parameter: nn.Parameter
    part: Span
    whole: Span
    """Elements of the layer: those of the parameter."""
    span: Span
    """And these."""
    stepped: nn.Parameter
    late: Sequence[Tensor] = ()
    """Of a copy, the buffers for its gradients."""

    def of_parameter(self) -> Tensor:
        """These elements of the parameter itself."""
        return shaped(slice_of(self.parameter.detach().view(-1), self.whole, self.span), self.parameter)

    def gradient(self) -> Tensor | None:
        """Of these elements, in the dtype that is stepped: a view where that is the gradients' own."""
        gradient = self.parameter.grad
        return None if gradient is None else shaped(
            slice_of(gradient.view(-1), self.whole, self.span), self.parameter).to(self.stepped.dtype)

    def scaled(self, factor: float) -> Tensor:
        """The gradient as it was stepped by: times a factor, which a view has been multiplied by."""
        gradient, parameter = self.gradient(), self.parameter
        assert gradient is not None and parameter.grad is not None
        return gradient if factor == 1.0 or gradient.dtype == parameter.grad.dtype else gradient.mul_(factor)


NO_SUMS: Sums = {}


class PartOptimizer(UndoableSteps):
    """Steps the parts that are `kept` of some layers; of these, some are this worker's `own`, and some are copies, with
    `sums` of gradients that come from their owners.

    Other elements of the parameters come from other workers after each step: then `gathered` is to be called.
    """

    def __init__(self, modules: Mapping[int, nn.Module], config: TrainingConfig, kept: Parts, own: Parts,
                 sharing: Sharing = NOTHING_SHARED, sums: Sums = NO_SUMS) -> None:
        self.kept, self.own, self._copied = kept, own, sums.keys()
        self._masters = config.master_weights
        self._first_rank = first_rank()
        self._modules = modules
        self._sharing = sharing
        self._tied: dict[nn.Parameter, nn.Parameter] = {}
        """Of parameters that layers share, what is stepped: once where several of these layers are here."""
        pieces = [piece for layer, spans in kept.items() for part in spans
                  for piece in self._cut(layer, modules[layer], part, sums)]
        self._pieces = [piece for piece in pieces if not piece.late]
        """Those that are stepped at once."""
        self._copies = [piece for piece in pieces if piece.late]
        super().__init__(self._groups(self._pieces, config), config)
        self._late = LateSteps(self._groups(self._copies, config), config, [
            {piece.stepped: piece.late[buffer] for piece in self._copies} for buffer in range(BUFFERS)])
        self._factor: float | None = 1.0
        """Of the last step."""
        self.parameters = Version(-1, whole=False)
        """Of all elements of the parameters, those that come from other workers, too."""

    @property
    def buffer(self) -> int:
        """Of the sums of copies' gradients, where those of the next step are to come."""
        return self._late.free

    @property
    def whole_after(self) -> int | None:
        """The iteration after which all elements of the parameters are as they should be; None: they are not."""
        return self.parameters.after if self.parameters.whole else None

    @property
    def cannot_undo(self) -> int:
        """The last iteration whose step cannot be undone any more: a later one has been made, or that of copies has."""
        return max(self._late.version.after if self._copies else -1,
                   -1 if self.open_iteration is None else self.open_iteration - 1)

    def checksums(self, after: int) -> Iterator[tuple[int, Span, bool, Tensor]]:
        """Those of all that is trained, as it is after an iteration, which must stand: of each layer's parameters, and,
        with True, of each part that is kept with its optimizer's state. Raises VersionError."""
        self.require(after)
        self.parameters.require(after, "what this worker has of the parameters")
        for layer, module in self._modules.items():
            mine = trained(module)
            for span in self.kept.get(layer, ()):
                tensors = self.part_state(layer, span).tensors
                if kept := [tensor for key, tensor in sorted(tensors.items()) if name_of(key) in mine]:
                    yield layer, span, True, checksum(kept)
            if parameters := list(module.parameters()):
                yield layer, (0, elements_of(module).total), False, checksum(parameters)

    def flip_bit(self, what: str, rng: Random) -> bool:
        """Change one bit of what is kept, as broken memory does: of the `parameters` or the `state` of what is stepped
        here, or of both of a `copy`. It is a high bit of a mantissa: the next step may round a low one away, and
        nothing is wrong then. Autograd does not hear of it. Return whether there was any."""
        pieces = [piece for piece in (self._copies if what == "copy" else self._pieces) if piece.stepped.numel()]
        piece = rng.choice(pieces) if pieces else None
        found = [] if piece is None or what == "state" else [piece.stepped.detach()]
        found += [] if piece is None or what == "parameters" else [
            tensor for tensor in self._steps_of(piece).tensors_of(piece.stepped).values() if tensor.dim()]
        if found:
            tensor = rng.choice(found)
            lowest = tensor.itemsize * 3 // 8
            byte = rng.randrange(tensor.numel()) * tensor.itemsize + rng.randrange(
                lowest, max(lowest + 1, tensor.itemsize - 2))
            tensor.data.view(-1).view(torch.uint8)[byte] ^= 1 << rng.randrange(7)
        return bool(found)

    def squares(self) -> dict[int, float]:
        """The sum of squares of the gradients of each layer's own parts, computed in float64.

        What several layers share counts as the first one's, and what all ranks of a worker have as the first rank's.
        What rules step counts nothing.
        """
        counted = [piece for piece in self._pieces if piece.parameter.grad is not None
                   and piece.part in self.own.get(piece.layer, ())
                   and self._sharing.first(piece.layer, piece.name) == (piece.layer, piece.name)
                   and piece.name not in step_rules(self._modules[piece.layer])
                   and (self._first_rank or piece.name in shards_of(self._modules[piece.layer]))]
        sums = [squares_of(gradient) for piece in counted
                if (gradient := piece.gradient()) is not None]
        found = dict.fromkeys(self._modules, 0.0)
        for piece, value in zip(counted, torch.stack(sums).tolist() if sums else (), strict=True):
            found[piece.layer] += value
        return found

    def step(self, iteration: int, factor: float | None = 1.0) -> None:
        """Step what is kept, by the parameters' gradients times `factor`; None: there is no step. Undoable from now on.
        """
        self.gathering(iteration)
        self._factor = factor
        super().step(iteration, factor)
        self._late.step(iteration, factor)

    def gathering(self, iteration: int) -> None:
        """Elements of the parameters come from others, on the way to those after an iteration."""
        self.parameters = Version(iteration, whole=False)

    def gathered(self, iteration: int) -> None:
        """All other elements of the parameters have come, as they are after an iteration."""
        self.parameters = Version(iteration)

    def undo(self) -> None:
        """Put what is stepped here back, bit for bit, to before the open step."""
        assert self.open_iteration is not None, "no step is open"
        self._late.undo(self.open_iteration)
        self.gathering(self.open_iteration - 1)
        super().undo()
        self._round(self._pieces)

    def go_back(self, committed: int) -> None:
        """See `UndoableSteps.go_back`: copies are then as their owners' parts."""
        super().go_back(committed)
        self._late.catch_up()
        if self._copies:
            self._late.version.require(committed, "the copies that this worker keeps of others' parts")
        if self.parameters != Version(committed):
            with torch.no_grad():
                for piece in self._copies:
                    piece.of_parameter().copy_(piece.stepped)

    def as_after(self, iteration: int) -> None:
        """What is kept is known to be the state after an iteration, whatever it was before."""
        self.version = self._late.version = Version(iteration)

    def require(self, after: int) -> None:
        """Raise VersionError unless all that is kept is the state after an iteration."""
        if self._pieces:
            self.version.require(after, "what this worker keeps")
        if self._copies:
            self._late.catch_up()
            self._late.version.require(after, "the copies that this worker keeps of others' parts")

    def part_state(self, layer: int, span: Span, *, state: bool = True) -> PartState:
        """Some elements, which lie in one part that is kept: the tensors themselves. Without `state`, the parameters
        alone. Where they are a copy, the last step must stand."""
        tensors: dict[str, Tensor] = {}
        part = next((one for one in self.kept.get(layer, ()) if one[0] <= span[0] and span[1] <= one[1]), span)
        if (layer, part) in self._copied:
            self._late.catch_up()
        for piece in (*self._pieces, *self._copies):
            both = common(piece.span, span) if piece.layer == layer and piece.part == part else None
            if both is None:
                continue
            tensors[f"model.{piece.name}"] = slice_of(piece.stepped.detach().view(-1), piece.span, both)
            for slot, value in self._steps_of(piece).tensors_of(piece.stepped).items() if state else ():
                flat = flattened(value, piece.stepped)
                tensors[f"optimizer.{slot}.{piece.name}"] = slice_of(flat, piece.span, both)
        if span[0] == 0:
            tensors |= {f"model.{name}": tensor for name, tensor in untrained(self._modules[layer]).items()}
        version = self._late.version if (layer, part) in self._copied else self.version
        return PartState(layer, *span, tensors, state, version.after if version.whole else None)

    def part_gradients(self, layer: int, span: Span) -> dict[str, Tensor]:
        """By what the elements of one part that is no copy were stepped last; mostly the tensors themselves. Nothing
        where there was no step."""
        if self._factor is None:
            return {}
        return {piece.name: piece.scaled(self._factor).view(-1) for piece in self._pieces
                if (piece.layer, piece.part) == (layer, span) and piece.parameter.grad is not None}

    def own_states(self, layer: int) -> list[PartState]:
        """This worker's own parts of a layer."""
        return [self.part_state(layer, span) for span in self.own.get(layer, ())]

    def kept_states(self) -> list[PartState]:
        """All that is kept."""
        return [self.part_state(layer, span) for layer, spans in self.kept.items() for span in spans]

    def load(self, parts: Iterable[PartState]) -> None:
        """Take over, by copies, what others have of the parts that are kept here. No step may be open."""
        self._load_pieces((*self._pieces, *self._copies), parts)

    def take_over(self, before: "PartOptimizer", parts: Iterable[PartState]) -> None:
        """Go on from what another one keeps, which must not be used any more, and from what others have given.

        What is cut as before goes over with its memory; else it is copied. No step may be open here or there.
        """
        theirs = {(piece.layer, piece.name, piece.span): piece for piece in (*before._pieces, *before._copies)}
        lacking = []
        for piece in (*self._pieces, *self._copies):
            old = theirs.get((piece.layer, piece.name, piece.span))
            if old is None:
                lacking.append(piece)
                continue
            if slots := before._steps_of(old).states.get(old.stepped, {}):
                self._steps_of(piece).states[piece.stepped] = slots
            if piece.stepped.data_ptr() != old.stepped.data_ptr():
                with torch.no_grad():
                    piece.stepped.copy_(old.stepped)
        self._load_pieces(lacking, before.kept_states() if lacking else ())
        self.load(parts)

    def _load_pieces(self, pieces: Sequence[_Piece], parts: Iterable[PartState]) -> None:
        assert self.open_iteration is None, "a step is open: undo or commit it first"
        with torch.no_grad():
            for part in parts:
                for piece in pieces:
                    both = common(piece.span, (part.start, part.stop)) if piece.layer == part.layer else None
                    if both is not None:
                        self._load(piece, part, both)

    def state_bytes(self) -> int:
        """Memory of the optimizer's state, of what is stepped apart from parameters, and of copies of others' parts."""
        apart = self._stepped() if self._masters else ()
        return sum(tensor.nbytes for tensor in apart) + self._remembered_bytes() + self._late.bytes()

    def _cut(self, layer: int, module: nn.Module, part: Span, sums: Sums) -> Iterable[_Piece]:
        for name, parameter, span in placed(module):
            both = common(span, part)
            if both is None:
                continue
            view = shaped(slice_of(parameter.detach().view(-1), span, both), parameter)
            late = [shaped(slice_of(one, part, both), parameter) for one in sums.get((layer, part), ())]
            stepped = self._tied.get(parameter)
            if stepped is None:
                stepped = nn.Parameter(view.float() if self._masters else view.clone() if late else view)
            if self._sharing.is_shared(layer, name):
                self._tied[parameter] = stepped
            yield _Piece(layer, name, parameter, part, span, both, stepped, late)

    def _groups(self, pieces: Iterable[_Piece], config: TrainingConfig) -> Groups:
        """Pieces in the groups of their parameters."""
        by_parameter: dict[nn.Parameter, list[nn.Parameter]] = {}
        names = dict[str, nn.Parameter]()
        for piece in pieces:
            mine = by_parameter.setdefault(piece.parameter, [])
            if piece.parameter not in self._tied or not mine:
                mine.append(piece.stepped)
            names[str(self._sharing.first(piece.layer, piece.name))] = piece.parameter
        return [{**group, "params": [one for parameter in group["params"] for one in by_parameter[parameter]]}
                for group in grouped(names, config, self._sharing.last, rules_of(self._modules))]

    def _make_step(self, factor: float) -> None:
        for piece in self._pieces:
            piece.stepped.grad = piece.gradient()
        super()._make_step(factor)
        for piece in self._pieces:
            piece.stepped.grad = None
        self._round(self._pieces)

    def _steps_of(self, piece: _Piece) -> OptimizerSteps:
        """What steps a piece, and has its state once it has been stepped."""
        return self._late if piece.late else self

    def begin_copies(self) -> None:
        """Step copies of others' parts from now on, as far as their steps stand, beside what is computed."""
        self._late.begin()

    def _round(self, pieces: Iterable[_Piece]) -> None:
        """Where copies are stepped, they become the parameters: master weights in fewer bits."""
        if self._masters:
            with torch.no_grad():
                for piece in pieces:
                    piece.of_parameter().copy_(piece.stepped)

    def _load(self, piece: _Piece, part: PartState, both: Span) -> None:
        has = max(piece.whole[0], part.start), min(piece.whole[1], part.stop)
        stepped, states = piece.stepped, self._steps_of(piece).states
        slots = states[stepped]
        for key, tensor in part.tensors.items():
            kind, slot, *_ = key.split(".")
            if name_of(key) != piece.name:
                continue
            if kind == "model":
                slice_of(stepped.detach().view(-1), piece.span, both).copy_(slice_of(tensor, has, both))
            elif not is_elementwise(tensor, has):
                slots[slot] = tensor.detach().to(self._device_of(slot, stepped), copy=True)
            else:
                if slot not in slots:
                    slots[slot] = torch.empty(stepped.shape, dtype=tensor.dtype, device=stepped.device)
                slice_of(slots[slot].view(-1), piece.span, both).copy_(slice_of(tensor, has, both))
        if not slots:
            del states[stepped]
