"""Handle the values between layers: tensors, or tuples that are sent as one tensor."""

import functools
from collections import namedtuple
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

Value = Tensor | tuple[Tensor, ...]
"""Tensor or tuple of tensors, of which floating-point ones get gradients."""
_ALIGNMENT = 16
"""Alignment in bytes of each tensor within the tensor into which `pack_value` packs them."""


class TensorForm(NamedTuple):
    """Shape and dtype of a tensor, for receives without a handshake."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TupleForm(NamedTuple):
    """Shapes and dtypes of a tuple of tensors."""

    tensors: tuple[TensorForm, ...]
    fields: tuple[str, ...] = ()
    """Field names of a named tuple; empty for a plain one."""


Form = TensorForm | TupleForm


def tensors_of(value: Value) -> tuple[Tensor, ...]:
    """Return the tensors of a value as a tuple."""
    return (value,) if isinstance(value, Tensor) else tuple(value)


def with_tensors(value: Value, tensors: Sequence[Tensor]) -> Value:
    """Return a value of the same structure, with `tensors` in place of its own."""
    if isinstance(value, Tensor):
        return tensors[0]
    return _build_tuple(getattr(value, "_fields", ()), tensors)


def map_tensors(value: Value, change: Callable[[Tensor], Tensor]) -> Value:
    """Return a value of the same structure, with `change` applied to each tensor."""
    return (
        change(value)
        if isinstance(value, Tensor)
        else with_tensors(value, list(map(change, value)))
    )


def as_layer_input(value: Value) -> Value:
    """Return a value as the next layer would get it from another worker.

    A tuple of another class becomes a named tuple if it has fields, else a plain one. The tensors
    stay the same.
    """
    return with_tensors(value, tensors_of(value))


def form_of(value: Value) -> Form:
    """Return a value's form: shapes and dtypes of its tensors, and a named tuple's fields."""
    forms = tuple(TensorForm(tuple(tensor.shape), tensor.dtype) for tensor in tensors_of(value))
    return (
        forms[0] if isinstance(value, Tensor) else TupleForm(forms, getattr(value, "_fields", ()))
    )


def build_value(form: Form, tensors: Sequence[Tensor]) -> Value:
    """Return `tensors`, unchecked, as a value of the structure that `form` describes."""
    return tensors[0] if isinstance(form, TensorForm) else _build_tuple(form.fields, tensors)


def allocate_value(form: Form, make: Callable[[tuple[int, ...], torch.dtype], Tensor]) -> Value:
    """Return a value of this form; `make` allocates each tensor from its shape and dtype."""
    if isinstance(form, TensorForm):
        return make(*form)
    return _build_tuple(form.fields, [make(*tensor) for tensor in form.tensors])


def has_gradient(of: Tensor | TensorForm) -> bool:
    """Return whether a tensor between layers gets a gradient, which depends on its dtype."""
    return of.dtype.is_floating_point or of.dtype.is_complex


def gradient_form(form: Form) -> Form:
    """Return the form of a gradient; a tuple's is plain, without tensors that get none."""
    return (
        form
        if isinstance(form, TensorForm)
        else TupleForm(tuple(filter(has_gradient, form.tensors)))
    )


def carrier_form(form: Form) -> TensorForm:
    """Return shape and dtype of the one tensor into which `pack_value` packs a value."""
    if isinstance(form, TensorForm):
        return form
    # A tuple of one tensor travels as this tensor, without a copy.
    if len(form.tensors) == 1:
        return form.tensors[0]
    return TensorForm((_tensor_offsets(form)[-1],), torch.uint8)


def pack_value(value: Value) -> Tensor:
    """Return a layer's output as one tensor to send; a single tensor is not copied."""
    if isinstance(value, Tensor):
        return value
    if len(value) == 1:
        return value[0]
    # One tensor of bytes, so that a tuple takes one transfer.
    form = form_of(value)
    assert isinstance(form, TupleForm)
    carrier = torch.empty(_tensor_offsets(form)[-1], dtype=torch.uint8, device=value[0].device)
    for tensor, view in zip(value, _carrier_views(carrier, form), strict=True):
        view.copy_(tensor)
    return carrier


def unpack_value(carrier: Tensor, form: Form) -> Value:
    """Return the value that `pack_value` has packed into `carrier`, as views of it."""
    if isinstance(form, TensorForm):
        return carrier
    if len(form.tensors) == 1:
        return _build_tuple(form.fields, [carrier])
    return _build_tuple(form.fields, _carrier_views(carrier, form))


def _carrier_views(carrier: Tensor, form: TupleForm) -> list[Tensor]:
    return [
        carrier.narrow(0, offset, _tensor_bytes(tensor)).view(tensor.dtype).view(tensor.shape)
        for tensor, offset in zip(form.tensors, _tensor_offsets(form), strict=False)
    ]


def _tensor_offsets(form: TupleForm) -> list[int]:
    """Return each tensor's offset in bytes in the packed tensor, then the packed length."""
    # Rounded up, as a view of another dtype must be aligned.
    sizes = (-(-_tensor_bytes(tensor) // _ALIGNMENT) * _ALIGNMENT for tensor in form.tensors)
    return list(accumulate(sizes, initial=0))


def _tensor_bytes(form: TensorForm) -> int:
    return torch.Size(form.shape).numel() * form.dtype.itemsize


def _build_tuple(fields: tuple[str, ...], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return _tuple_class(fields)(*tensors) if fields else tuple(tensors)


# Cached, so that tuples of equal fields have one class.
@functools.cache
def _tuple_class(fields: tuple[str, ...]) -> Callable[..., Any]:
    return namedtuple("Passed", fields)  # the user's model names the fields
