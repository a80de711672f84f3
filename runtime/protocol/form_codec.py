"""Convert the shapes and dtypes of values (`Form`) to JSON and back."""

import torch

from slipstream.runtime.protocol.setup import FormSpec
from slipstream.runtime.replay.layer_values import Form, TensorForm, TupleForm


def encode_form(form: Form) -> FormSpec:
    """Return a form as a `FormSpec`, which JSON can represent."""
    if isinstance(form, TensorForm):
        return FormSpec(((form.shape, str(form.dtype)),))
    return FormSpec(
        tuple((tensor.shape, str(tensor.dtype)) for tensor in form.tensors), form.fields
    )


def decode_form(spec: FormSpec) -> Form:
    """Return the form that a `FormSpec` describes."""
    tensors = tuple(TensorForm(shape, _parse_dtype(dtype)) for shape, dtype in spec.tensors)
    return tensors[0] if spec.fields is None else TupleForm(tensors, spec.fields)


def _parse_dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name.removeprefix("torch."))
    assert isinstance(dtype, torch.dtype)
    return dtype
