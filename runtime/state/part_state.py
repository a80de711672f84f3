"""Describe parts of layers' states, which workers send and checkpoints store."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.runtime.ranks.shards import parameter_name
from slipstream.runtime.state.parts import ElementCounts, Span, VersionError, intersect
from slipstream.runtime.tensor_codec import decode_tensors, encode_tensors


class PartState(NamedTuple):
    """State of the elements [start, stop) of a layer.

    Tensors are flat, and have the elements of their parameter that are in the span. An optimizer's
    tensor for a parameter as a whole, such as a counter, is unchanged. Names are `model.NAME` as in
    the layer's state_dict, and `optimizer.SLOT.NAME`; if the optimizer has master weights,
    `model.NAME` are those. Untrained tensors are whole, and belong to the part that begins with
    element 0.
    """

    layer: int
    start: int
    stop: int
    tensors: Mapping[str, Tensor]
    state: bool = True
    """True if the part includes the optimizer's state; False for parameters alone."""
    after: int | None = None
    """Iteration after which the layer has this state; None if unknown."""

    def require_version(self, after: int) -> None:
        """Raise VersionError unless the part is the state after iteration `after`."""
        if self.after != after:
            raise VersionError(
                f"a part of layer {self.layer} is the state after iteration {self.after}; expected "
                f"that after iteration {after}"
            )


def mark_uncut(module: nn.Module, names: Collection[str]) -> None:
    """Mark parameters of a layer, by name, as stored whole by all its holders."""
    module.kept_whole = frozenset(names)  # type: ignore[assignment]


def uncut_names(module: nn.Module) -> Collection[str]:
    """Return the names of the layer's parameters that are not cut into parts (`mark_uncut`)."""
    names: Collection[str] = getattr(module, "kept_whole", ())
    return names


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return a layer's trained parameters by name, those not cut into parts last.

    Parts number the elements of a layer in this order.
    """
    whole_names, parameters = uncut_names(module), dict(module.named_parameters())
    return {
        name: parameter
        for last in (False, True)
        for name, parameter in parameters.items()
        if parameter.requires_grad and (name in whole_names) is last
    }


def untrained_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a layer's state_dict that are buffers or frozen parameters."""
    parameters = trained_parameters(module)
    return {name: tensor for name, tensor in module.state_dict().items() if name not in parameters}


def count_elements(module: nn.Module) -> ElementCounts:
    """Return the number of cut elements of a layer, and of each uncut parameter."""
    whole_names = uncut_names(module)
    cut, whole = 0, list[int]()
    for name, parameter in trained_parameters(module).items():
        if name in whole_names:
            whole.append(parameter.numel())
        else:
            cut += parameter.numel()
    return ElementCounts(cut, tuple(whole))


def parameter_spans(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Span]]:
    """Yield each trained parameter's name, itself, and its span of the layer's elements."""
    start = 0
    for name, parameter in trained_parameters(module).items():
        yield name, parameter, (start, start + parameter.numel())
        start += parameter.numel()


def slice_of(tensor: Tensor, has: Span, wanted: Span) -> Tensor:
    """Return the elements `wanted` from a flat tensor that has the elements `has`.

    A tensor of another length, such as a step counter, is returned unchanged.
    """
    return (
        tensor[wanted[0] - has[0] : wanted[1] - has[0]] if is_elementwise(tensor, has) else tensor
    )


def restore_shape(elements: Tensor, parameter: Tensor) -> Tensor:
    """Return elements in the parameter's shape if they are all of it; otherwise flat."""
    whole = parameter.dim() > 1 and elements.numel() == parameter.numel()
    return elements.view(parameter.shape) if whole else elements


def flatten_slot(tensor: Tensor, like: Tensor) -> Tensor:
    """Return an optimizer's tensor, flat if it has the shape of its parameter `like`."""
    return tensor.reshape(-1) if tensor.shape == like.shape else tensor


def is_elementwise(tensor: Tensor, has: Span) -> bool:
    """Return whether a tensor is flat, with a number for each element of `has`."""
    return tensor.dim() == 1 and tensor.numel() == has[1] - has[0]


def as_whole_part(
    module: nn.Module, layer: int, state: Mapping[str, Tensor], after: int | None = None
) -> PartState:
    """Return a layer's whole `state`, such as `assemble_state` returns, as one part.

    `after` is the iteration after which the layer has this state; None: unknown. Raises ValueError
    if the state does not fit the layer.
    """
    parameters = trained_parameters(module)
    tensors = dict(state)
    # Saved tensors have the parameters' shapes; those of parts are flat.
    for key, tensor in state.items():
        if (name := parameter_name(key)) in parameters:
            tensors[key] = flatten_slot(tensor, parameters[name])
    part = PartState(layer, 0, count_elements(module).total, tensors, after=after)
    require_fits(module, part)
    return part


def require_fits(module: nn.Module, part: PartState) -> None:
    """Raise ValueError unless a part has all `model` tensors of its span, and no others.

    Optimizer tensors must be of the same parameters; neither number nor size is checked.
    """
    # How many elements of each tensor lie in the span.
    expected = {
        f"model.{name}": overlap[1] - overlap[0]
        for name, _, span in parameter_spans(module)
        if (overlap := intersect(span, (part.start, part.stop))) is not None
    }
    if part.start == 0:
        expected |= {
            f"model.{name}": tensor.numel() for name, tensor in untrained_tensors(module).items()
        }
    counts = {
        key: tensor.numel() for key, tensor in part.tensors.items() if key.startswith("model.")
    }
    wrong = [key for key in part.tensors if f"model.{parameter_name(key)}" not in expected]
    wrong += [key for key in counts | expected if counts.get(key) != expected.get(key)]
    if wrong:
        key = min(wrong)
        raise ValueError(
            f"a part of layer {part.layer} has {counts.get(key, 'no')} elements of {key!r}; "
            f"expected {expected.get(key, 'none')}"
        )


def select_span(
    module: nn.Module, part: PartState, wanted: Span, *, state: bool
) -> dict[str, Tensor]:
    """Return the tensors of a part, cut to the elements of the span `wanted`.

    If `state` is false, the optimizer's tensors are left out.
    """
    tensors: dict[str, Tensor] = {}
    spans = {name: span for name, _, span in parameter_spans(module)}
    for key, tensor in part.tensors.items():
        if not state and not key.startswith("model."):
            continue
        span = spans.get(parameter_name(key))
        if span is None:
            # An untrained tensor is whole, and belongs to element 0.
            if wanted[0] == 0:
                tensors[key] = tensor
        elif overlap := intersect(span, wanted):
            has = max(span[0], part.start), min(span[1], part.stop)
            tensors[key] = slice_of(tensor, has, overlap)
    return tensors


def copy_to_module(module: nn.Module, parts: Iterable[PartState], *, untrained_too: bool) -> None:
    """Copy parts into a layer's parameters.

    If `untrained_too`, buffers and frozen parameters are copied, too.
    """
    with torch.no_grad():
        for part in parts:
            for name, parameter, span in parameter_spans(module):
                overlap = intersect(span, (part.start, part.stop))
                tensor = part.tensors.get(f"model.{name}")
                if overlap is None or tensor is None:
                    continue
                slice_of(parameter.detach().view(-1), span, overlap).copy_(tensor)
            # Buffers and frozen parameters are not cut; one of the parts has them.
            for name, target in untrained_tensors(module).items() if untrained_too else ():
                if f"model.{name}" in part.tensors:
                    target.copy_(part.tensors[f"model.{name}"])


def assemble_state(module: nn.Module, parts: Iterable[PartState]) -> dict[str, Tensor]:
    """Return a layer's whole state in host memory, joined from `parts`.

    The parts together have all elements. Copies from a GPU are complete when its current stream has
    finished.
    """
    state: dict[str, Tensor] = {}
    shapes = {name: (parameter.shape, span) for name, parameter, span in parameter_spans(module)}
    for part in parts:
        for key, tensor in part.tensors.items():
            shape, span = shapes.get(parameter_name(key), (tensor.shape, (0, 0)))
            has = max(span[0], part.start), min(span[1], part.stop)
            # Untrained tensors and counters are whole; each part has the same.
            if parameter_name(key) not in shapes or not is_elementwise(tensor, has):
                state[key] = tensor.detach().to("cpu", copy=True)
                continue
            if key not in state:
                state[key] = torch.empty(shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            slice_of(state[key].view(-1), span, has).copy_(tensor.detach(), non_blocking=True)
    # The module has what no part carries, as in a layer without trained elements.
    for name, tensor in untrained_tensors(module).items():
        state.setdefault(f"model.{name}", tensor.detach().to("cpu", copy=True))
    return state


def pack_parts(parts: Collection[PartState]) -> bytes:
    """Encode parts as bytes, which `unpack_parts` decodes.

    Each part must have optimizer state, and its iteration (`after`) must be known.
    """
    assert all(part.state and part.after is not None for part in parts)
    # A tensor's name says of which part it is.
    return b"".join(
        encode_tensors(
            {
                f"{part.layer}/{part.start}/{part.stop}/{part.after}/{key}": tensor
                for part in parts
                for key, tensor in part.tensors.items()
            }
        )
    )


def unpack_parts(data: bytes) -> list[PartState]:
    """Decode the parts that `pack_parts` has encoded. Raises ValueError for other bytes."""
    tensors_of: dict[tuple[int, int, int, int], dict[str, Tensor]] = {}
    for name, tensor in decode_tensors(data).items():
        layer, start, stop, after, key = name.split("/", 4)
        tensors_of.setdefault((int(layer), int(start), int(stop), int(after)), {})[key] = tensor
    return [
        PartState(layer, start, stop, tensors, after=after)
        for (layer, start, stop, after), tensors in tensors_of.items()
    ]
