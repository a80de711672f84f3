"""What passes from layer to layer: a tensor, or a tuple of tensors. Between workers it travels as one tensor."""

import functools
from collections import namedtuple
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

Value = Tensor | tuple[Tensor, ...]
"""Of tensors in a tuple, those of floating point get gradients; all others pass without."""
_ALIGNMENT = 16
"""Of each tensor, in bytes, where several travel as one."""


class TensorForm(NamedTuple):
    """Shape and dtype of a tensor: a receive can be posted from it without a handshake."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TupleForm(NamedTuple):
    """Those of a tuple of tensors."""

    tensors: tuple[TensorForm, ...]
    fields: tuple[str, ...] = ()
    """The names of a named tuple; none for a plain one."""


Form = TensorForm | TupleForm


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    """The tensors of a value."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def rebuilt(value: Value, tensors: Sequence[Tensor]) -> Value:
    """Other tensors in the place of a value's."""
    if isinstance(value, Tensor):
        return tensors[0]
    return _tuple(getattr(value, "_fields", ()), tensors)


def changed(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    """A value with each of its tensors changed."""
    return change(value) if isinstance(value, Tensor) else rebuilt(value, list(map(change, value)))


def handed_on(value: Value) -> Value:
    """A value as the next layer takes it, wherever that runs: named tuples are all of one class by their fields."""
    return rebuilt(value, tensors_of(value))


def form_of(value: Value) -> Form:
    """The form of a value."""
    forms = tuple(TensorForm(tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(value))
    return forms[0] if isinstance(value, Tensor) else TupleForm(forms, getattr(value, "_fields", ()))


def of_form(form: Form, tensors: Sequence[Tensor]) -> Value:
    """The value of a form that these tensors make."""
    return tensors[0] if isinstance(form, TensorForm) else _tuple(form.fields, tensors)


def made(form: Form, make: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> Value:
    """A value of a form, its tensors made from their shapes and dtypes."""
    if isinstance(form, TensorForm):
        return make(*form)
    return _tuple(form.fields, [make(*one) for one in form.tensors])


def has_gradient(of: Tensor | TensorForm) -> bool:
    """Whether a tensor that passes gets a gradient."""
    return of.dtype.is_floating_point or of.dtype.is_complex


def gradient_form(form: Form) -> Form:
    """That of the gradient of a value: a tuple's is the plain tuple of the gradients that there are."""
    return form if isinstance(form, TensorForm) else TupleForm(tuple(filter(has_gradient, form.tensors)))


def carrier_form(form: Form) -> TensorForm:
    """That of the one tensor that carries a value from worker to worker."""
    if isinstance(form, TensorForm):
        return form
    if len(form.tensors) == 1:
        return form.tensors[0]
    return TensorForm((_places(form)[-1],), torch.uint8)


def packed(value: Value) -> Tensor:
    """The one tensor that carries a value. What is one tensor already is not copied."""
    if isinstance(value, Tensor):
        return value
    if len(value) == 1:
        return value[0]
    form = form_of(value)
    assert isinstance(form, TupleForm)
    carrier = torch.empty(_places(form)[-1], dtype=torch.uint8, device=value[0].device)
    for tensor, own in zip(value, _views(carrier, form), strict=True):
        own.copy_(tensor)
    return carrier


def unpacked(carrier: Tensor, form: Form) -> Value:
    """The value that a tensor carries; its tensors are views of it."""
    if isinstance(form, TensorForm):
        return carrier
    if len(form.tensors) == 1:
        return _tuple(form.fields, [carrier])
    return _tuple(form.fields, _views(carrier, form))


def _views(carrier: Tensor, form: TupleForm) -> list[Tensor]:
    return [carrier.narrow(0, place, _bytes(one)).view(one.dtype).view(one.shape)
            for one, place in zip(form.tensors, _places(form), strict=False)]


def _places(form: TupleForm) -> list[int]:
    """Where each tensor begins, in bytes, and where the last one ends."""
    return list(accumulate((-(-_bytes(one) // _ALIGNMENT) * _ALIGNMENT for one in form.tensors), initial=0))


def _bytes(form: TensorForm) -> int:
    return torch.Size(form.shape).numel() * form.dtype.itemsize


def _tuple(fields: tuple[str, ...], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return _named(fields)(*tensors) if fields else tuple(tensors)


@functools.cache
def _named(fields: tuple[str, ...]) -> Callable[..., Any]:
    return namedtuple("Passed", fields)  # its fields are the user's
