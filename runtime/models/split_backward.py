"""Divide the backward: I computes the input's gradient, W those of the weights.

While a stage's forward runs under `deferring_weights`, every matrix product with a parameter is
recorded as a product whose backward computes the gradient of its input only, and leaves its weight
gradient as work for later. I is then an ordinary backward, and W runs the work that I left. A
parameter used in any other way (norms, embeddings, inside `nn.MultiheadAttention`) gets the same
gradient in I, earlier than necessary.

The idea of the split is from Zero Bubble (Qi et al., ICLR 2024, arXiv 2401.10241). torch's own
stage_backward_input and stage_backward_weight keep the graph alive from I to W, and refuse outputs
that are views.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from slipstream.runtime.torch_private import (
    GradientUse,
    current_function_mode,
    find_gradient_use,
    has_gradient_hooks,
    is_transforming,
    run_backward,
)

WeightWork = deque[Callable[[], None]]
"""Queue of the calls that W has to run, in order."""


_CURRENT: ContextVar[WeightWork | None] = ContextVar("weight work", default=None)
_IN_BACKWARD = set[int]()
"""Identities of the queues for which I is running, in any thread of autograd's engine."""
# A backward within a layer's forward is none, as it must add to `.grad` at once.


@contextmanager
def deferring_weights(work: WeightWork) -> Iterator[None]:
    """Defer weight gradients of the forward that runs within the context.

    The backward appends to the queue `work` the calls by which W computes these gradients.
    Parameters with hooks are not deferred, so that the hooks get the gradients that they expect.
    """
    before, mode = _CURRENT.set(work), current_function_mode()
    is_active = isinstance(mode, _DeferringMode) and mode.work is work
    try:
        # A second mode for the same queue would defer each product twice.
        with nullcontext() if is_active else _DeferringMode(work):
            yield
    finally:
        _CURRENT.reset(before)


@contextmanager
def deferring_again(work: WeightWork | None) -> Iterator[None]:
    """Defer weight gradients to `work` in a part of a forward that is recomputed.

    If `work` is None, nothing is deferred.
    """
    # It may be run again within torch.autograd.grad, which suspends TorchFunctionModes.
    with nullcontext() if work is None else deferring_weights(work):
        yield


def weight_work() -> WeightWork | None:
    """Return the queue of W's work, for a user's autograd.Function; None: nothing is deferred.

    To be called in the function's forward. The function's backward appends calls without arguments,
    each of which adds a gradient to `.grad`. If nothing is deferred, it returns weight gradients.
    """
    return _CURRENT.get()


def backward_input(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor], work: WeightWork
) -> None:
    """Run I: an ordinary backward from `outputs` and their gradients.

    The outputs were computed under `deferring_weights(work)`. Activation checkpointing works,
    reentrant or not.
    """
    # A recomputation must defer weight gradients like the forward. torch.autograd.backward would
    # suspend the mode of `deferring_weights`, so autograd's engine is called directly.
    _IN_BACKWARD.add(id(work))
    try:
        with deferring_weights(work):
            run_backward(outputs, gradients)
    finally:
        _IN_BACKWARD.discard(id(work))


def backward_weight(work: WeightWork) -> None:
    """Run W: make the calls in `work`, which add to `.grad`, and drop their tensors."""
    while work:
        work.popleft()()


class _Product(NamedTuple):
    """Product with a parameter: value @ weight^T, or @ weight if `transposed`; plus bias."""

    value: Tensor
    weight: Tensor
    bias: Tensor | None = None
    transposed: bool = False


def _parse_linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Product:
    return _Product(input, weight, bias)


def _parse_matmul(input: Tensor, other: Tensor) -> _Product:
    return _Product(input, other, transposed=True)


def _parse_mm(input: Tensor, mat2: Tensor) -> _Product:
    return _Product(input, mat2, transposed=True)


def _parse_addmm(input: Tensor, mat1: Tensor, mat2: Tensor) -> _Product:
    return _Product(mat1, mat2, input, transposed=True)


PRODUCTS: Mapping[Callable[..., Any], Callable[..., _Product]] = {
    functional.linear: _parse_linear,
    torch.matmul: _parse_matmul,
    Tensor.matmul: _parse_matmul,
    Tensor.__matmul__: _parse_matmul,
    torch.mm: _parse_mm,
    Tensor.mm: _parse_mm,
    torch.addmm: _parse_addmm,
}
"""Functions of torch whose weight gradients are deferred, with parsers of their arguments."""


_DEFERRED_OPS: dict[Callable[..., Any], Callable[..., Callable[[], None]]] = {}


def register_deferred_op(op: Callable[..., Any], work: Callable[..., Callable[[], None]]) -> None:
    """Register an op of compiled backwards whose weight gradient is left to W.

    When I calls the op, `work` gets its arguments, and returns the function that W has to run.
    """
    _DEFERRED_OPS[op] = work


class _DeferringMode(TorchFunctionMode):
    def __init__(self, work: WeightWork) -> None:
        super().__init__()
        self.work = work

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DEFERRED_OPS and type(args[0]) is Tensor:  # otherwise it is being compiled
            self.work.append(_DEFERRED_OPS[func](*args))
        elif func in PRODUCTS and torch.is_grad_enabled():
            try:
                product = PRODUCTS[func](*args, **kwargs)
            except TypeError:  # a less usual argument (out, alpha, ...)
                return func(*args, **kwargs)
            if _is_deferrable(product) and not is_transforming():
                return _DeferredProduct.apply(  # type: ignore[no-untyped-call]
                    _cast_operand(product.value),
                    product.weight,
                    product.bias,
                    product.transposed,
                    self.work,
                )
        return func(*args, **kwargs)


def _is_deferrable(product: _Product) -> bool:
    value, weight, bias, _ = product
    return (
        isinstance(value, Tensor)
        and _is_trained(weight)
        and weight.dim() == 2
        and value.dim() >= 1
        and (bias is None or (_is_trained(bias) and bias.dim() == 1))
    )


def _is_trained(tensor: Tensor) -> bool:
    """Return whether a gradient may be added to `tensor.grad` directly, without autograd."""
    return (
        isinstance(tensor, torch.nn.Parameter)
        and tensor.is_leaf
        and tensor.requires_grad
        and not tensor.is_complex()
        and not has_gradient_hooks(tensor)
    )


def _cast_operand(tensor: Tensor) -> Tensor:
    kind = tensor.device.type
    if (
        torch.is_autocast_enabled(kind)
        and tensor.is_floating_point()
        and tensor.dtype != torch.float64
    ):
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


class _DeferredProduct(torch.autograd.Function):
    """Product whose backward leaves to W the gradients that would be added to `.grad`."""

    # A gradient that is asked for by torch.autograd.grad is returned at once, and one that nobody
    # asks for is not computed. The backward can itself be differentiated.

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        transposed: bool,
        work: WeightWork,
    ) -> Tensor:
        used = _cast_operand(weight)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(value, used)
        ctx.weight, ctx.bias, ctx.transposed, ctx.work = weight, bias, transposed, work
        product = multiply(value, used, bias, transposed)
        # With three or more dimensions it is a view of a matrix, which an in-place op after it
        # would refuse. `.data`, unlike `.detach()`, is not a view.
        return product.data

    @staticmethod
    def backward(
        ctx: Any, gradient: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        # Nothing depends on the product.
        if gradient is None:
            return None, None, None, None, None
        value, used = ctx.saved_tensors
        # Without a bias there are two edges.
        of_value, of_weight, of_bias = (
            find_gradient_use(edge[0]) for edge in (*ctx.next_functions, (None, 0))[:3]
        )
        work = ProductWork(value, gradient, ctx.weight, ctx.bias, ctx.transposed)
        if torch.is_grad_enabled():
            # This backward is to be differentiated itself, also by the weight.
            used = ctx.weight.to(used.dtype)
        elif id(ctx.work) in _IN_BACKWARD and GradientUse.RETURNED not in (of_weight, of_bias):
            # I leaves to W what it would add to `.grad`.
            if GradientUse.ADDED in (of_weight, of_bias):
                deferred = work.without(
                    weight=of_weight is GradientUse.NONE, bias=of_bias is GradientUse.NONE
                )
                ctx.work.append(deferred.add_gradients)
            of_weight = of_bias = GradientUse.NONE

        value_gradient = weight_gradient = bias_gradient = None
        if of_value is not GradientUse.NONE:
            value_gradient = gradient @ (used.t() if ctx.transposed else used)
        if of_weight is not GradientUse.NONE:
            weight_gradient = work.weight_gradient()
        if of_bias is not GradientUse.NONE:
            bias_gradient = work.bias_gradient()
        return value_gradient, weight_gradient, bias_gradient, None, None


def multiply(value: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """Return value @ weight^T + bias, or value @ weight + bias if `transposed`."""
    if not transposed:
        return functional.linear(value, weight, bias)
    return value @ weight if bias is None else torch.addmm(bias, value, weight)


class ProductWork(NamedTuple):
    """Tensors from which W computes the gradients of a product's weight and bias."""

    value: Tensor
    gradient: Tensor
    weight: Tensor | None
    bias: Tensor | None
    transposed: bool

    def without(self, *, weight: bool, bias: bool) -> "ProductWork":
        """Return the work without the gradients whose argument is True."""
        return self._replace(
            weight=None if weight else self.weight, bias=None if bias else self.bias
        )

    def weight_gradient(self) -> Tensor:
        """Return the gradient of the weight, in its dtype."""
        assert self.weight is not None
        # All dimensions but the last are rows, for one product of matrices.
        value = self.value.reshape(-1, self.value.shape[-1])
        gradient = self.gradient.reshape(-1, self.gradient.shape[-1])
        product = value.t() @ gradient if self.transposed else gradient.t() @ value
        return product.to(self.weight.dtype)

    def bias_gradient(self) -> Tensor:
        """Return the gradient of the bias, in its dtype."""
        assert self.bias is not None
        return self.gradient.reshape(-1, self.gradient.shape[-1]).sum(0).to(self.bias.dtype)

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Compute the gradients of the weight and the bias, and add them to `.grad`."""
        if self.weight is not None:
            _add_gradient(self.weight, self.weight_gradient())
        if self.bias is not None:
            _add_gradient(self.bias, self.bias_gradient())


def _add_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Add a gradient to `.grad`, bit for bit as autograd would."""
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
