"""Parts of layers' states: what one worker gives another, or a checkpoint holds."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from slipstream.runtime.model.layers.sharing import name_of
from slipstream.runtime.model.state.parts import Elements, Span, common
from slipstream.runtime.model.state.version import VersionError
from slipstream.runtime.model.tensor_codec import decode, encode


class PartState(NamedTuple):
    """The elements [start, stop) of a layer.

    Tensors are flat, and have the elements of their parameter that are in the span; what an optimizer remembers of a
    parameter as a whole, such as a counter, is as it is. Names are
    `model.NAME` as in the layer's state_dict, and `optimizer.SLOT.NAME`; where the optimizer has master weights,
    `model.NAME` are those. What is not trained is whole, and in the part that begins with element 0.
    """

    layer: int
    start: int
    stop: int
    tensors: Mapping[str, Tensor]
    state: bool = True
    """With the optimizer's state, else parameters alone."""
    after: int | None = None
    """The iteration that it is the state after; None: nobody has said."""

    def require(self, after: int) -> None:
        """Raise VersionError unless it is the state after this iteration."""
        if self.after != after:
            raise VersionError(f"a part of layer {self.layer} is that after iteration {self.after}; needed is that "
                               f"after iteration {after}")


def keep_whole(module: nn.Module, names: Collection[str]) -> None:
    """From now on, these parameters of a layer are not cut."""
    module.kept_whole = frozenset(names)  # type: ignore[assignment]


def kept_whole(module: nn.Module) -> Collection[str]:
    """The parameters of a layer that are not cut."""
    names: Collection[str] = getattr(module, "kept_whole", ())
    return names


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters whose elements are counted, in their order: those that are not cut are the last."""
    whole, found = kept_whole(module), dict(module.named_parameters())
    return {name: parameter for last in (False, True) for name, parameter in found.items()
            if parameter.requires_grad and (name in whole) is last}


def untrained(module: nn.Module) -> dict[str, Tensor]:
    """All else that a layer's state_dict has."""
    mine = trained(module)
    return {name: tensor for name, tensor in module.state_dict().items() if name not in mine}


def elements_of(module: nn.Module) -> Elements:
    """How many a layer has."""
    sizes, whole = {name: one.numel() for name, one in trained(module).items()}, kept_whole(module)
    return Elements(sum(size for name, size in sizes.items() if name not in whole),
                    tuple(size for name, size in sizes.items() if name in whole))


def placed(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Span]]:
    """Each trained parameter with the elements of the layer that it is."""
    start = 0
    for name, parameter in trained(module).items():
        yield name, parameter, (start, start + parameter.numel())
        start += parameter.numel()


def slice_of(tensor: Tensor, has: Span, wanted: Span) -> Tensor:
    """Some elements of a flat tensor that has these; what is of the parameter as a whole is for all of them."""
    return tensor[wanted[0] - has[0]:wanted[1] - has[0]] if is_elementwise(tensor, has) else tensor


def shaped(elements: Tensor, parameter: Tensor) -> Tensor:
    """Elements of a parameter: in its shape where these are all of them, which some optimizers need; else flat."""
    whole = parameter.dim() > 1 and elements.numel() == parameter.numel()
    return elements.view(parameter.shape) if whole else elements


def flattened(tensor: Tensor, like: Tensor) -> Tensor:
    """Return a tensor flat if it has the shape of another one, as states of its elements have; else as it is."""
    return tensor.reshape(-1) if tensor.shape == like.shape else tensor


def is_elementwise(tensor: Tensor, has: Span) -> bool:
    """Whether a tensor of a part has a number for each of these elements; else it is of their parameter as a whole."""
    return tensor.dim() == 1 and tensor.numel() == has[1] - has[0]


def as_parts(module: nn.Module, layer: int, state: Mapping[str, Tensor], after: int | None = None) -> PartState:
    """A layer's whole state (`whole`), which is that after an iteration. Raises ValueError where that does not fit."""
    mine = trained(module)
    part = PartState(layer, 0, elements_of(module).total, {
        key: flattened(tensor, mine[name_of(key)]) if name_of(key) in mine else tensor
        for key, tensor in state.items()}, after=after)
    require_fits(module, part)
    return part


def require_fits(module: nn.Module, part: PartState) -> None:
    """Raise ValueError unless a part has what it says of its layer's parameters."""
    expected = {f"model.{name}": both[1] - both[0] for name, _, span in placed(module)
                if (both := common(span, (part.start, part.stop))) is not None}
    if part.start == 0:
        expected |= {f"model.{name}": tensor.numel() for name, tensor in untrained(module).items()}
    given = {key: tensor.numel() for key, tensor in part.tensors.items() if key.startswith("model.")}
    unknown = [key for key in part.tensors if f"model.{name_of(key)}" not in expected]
    if given != expected or unknown:
        wrong = min([*unknown, *(key for key in given | expected if given.get(key) != expected.get(key))])
        raise ValueError(f"a part of layer {part.layer} has {given.get(wrong, 'no')} elements of {wrong!r}; expected "
                         f"{expected.get(wrong, 'none')}")


def span_of(module: nn.Module, part: PartState, wanted: Span, *, state: bool) -> dict[str, Tensor]:
    """What some elements of a part are; without `state`, the parameters alone."""
    found: dict[str, Tensor] = {}
    spans = {name: span for name, _, span in placed(module)}
    for key, tensor in part.tensors.items():
        name = name_of(key)
        both = common(spans[name], wanted) if name in spans else wanted if wanted[0] == 0 else None
        if both is None or not (state or key.startswith("model.")):
            continue
        has = max(spans.get(name, wanted)[0], part.start), min(spans.get(name, wanted)[1], part.stop)
        found[key] = slice_of(tensor, has, both) if name in spans else tensor
    return found


def put(module: nn.Module, parts: Iterable[PartState], *, untrained_too: bool) -> None:
    """Put what parts have of a layer's parameters in their place, by copies."""
    with torch.no_grad():
        for part in parts:
            for name, parameter, span in placed(module):
                both = common(span, (part.start, part.stop))
                tensor = part.tensors.get(f"model.{name}")
                if both is None or tensor is None:
                    continue
                slice_of(parameter.detach().view(-1), span, both).copy_(tensor)
            for name, own in untrained(module).items() if untrained_too else ():
                if f"model.{name}" in part.tensors:
                    own.copy_(part.tensors[f"model.{name}"])


def whole(module: nn.Module, parts: Iterable[PartState]) -> dict[str, Tensor]:
    """A layer's whole state in host memory, from parts that have all elements: copies. Those from a GPU are there once
    its present stream is done."""
    found: dict[str, Tensor] = {}
    shapes = {name: (parameter.shape, span) for name, parameter, span in placed(module)}
    for part in parts:
        for key, tensor in part.tensors.items():
            shape, span = shapes.get(name_of(key), (tensor.shape, (0, 0)))
            has = max(span[0], part.start), min(span[1], part.stop)
            if name_of(key) not in shapes or not is_elementwise(tensor, has):
                found[key] = tensor.detach().to("cpu", copy=True)
                continue
            if key not in found:
                found[key] = torch.empty(shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            slice_of(found[key].view(-1), span, has).copy_(tensor.detach(), non_blocking=True)
    for name, tensor in untrained(module).items():
        found.setdefault(f"model.{name}", tensor.detach().to("cpu", copy=True))
    return found


def pack_parts(parts: Iterable[PartState]) -> bytes:
    """Parts as bytes, for `unpack_parts`."""
    return b"".join(encode({f"{part.layer}/{part.start}/{part.stop}/{part.after}/{key}": tensor
                            for part in parts for key, tensor in part.tensors.items()}))


def unpack_parts(data: bytes) -> list[PartState]:
    """What `pack_parts` has packed."""
    found: dict[tuple[int, int, int, int], dict[str, Tensor]] = {}
    for name, tensor in decode(data).items():
        layer, start, stop, after, key = name.split("/", 4)
        found.setdefault((int(layer), int(start), int(stop), int(after)), {})[key] = tensor
    return [PartState(layer, start, stop, tensors, after=after)
            for (layer, start, stop, after), tensors in found.items()]
