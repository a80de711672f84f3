"""The backward in two: I, which gives the gradient of the input, and W, which gives those of the weights.

While a stage's forward runs under `deferring`, every matrix product with a parameter is recorded as one whose backward
gives the gradient of its input only and leaves its weight gradient as work for later. I is then an ordinary backward,
and frees the graph as one; W runs the work that it left. Nothing else is changed: a parameter used in any other way
(norms, embeddings, inside `nn.MultiheadAttention`) gets its gradient in I, earlier than it might but exactly.

The idea of the split is Zero Bubble's (Qi et al., ICLR 2024, arXiv 2401.10241). torch's own
stage_backward_input and stage_backward_weight keep the graph alive from I to W, and refuse outputs that are views.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from slipstream.runtime.torch_private import has_gradient_hooks, run_backward

WeightWork = deque[Callable[[], None]]
"""What W has to run, in the order in which I left it."""


_CURRENT: ContextVar[WeightWork | None] = ContextVar("weight work", default=None)


@contextmanager
def deferring(work: WeightWork) -> Iterator[None]:
    """Run a forward in here, and weight gradients will become entries of `work` when its backward runs.

    Parameters that carry hooks are left alone, so that the hooks see what they expect.
    """
    before = _CURRENT.set(work)
    try:
        with _Deferring(work):
            yield
    finally:
        _CURRENT.reset(before)


def weight_work() -> WeightWork | None:
    """Where an autograd.Function of one's own may leave what belongs into W; to be asked for in its forward.

    Its backward appends calls that add to `.grad`. None: it has to do all at once.
    """
    return _CURRENT.get()


def backward_input(outputs: Sequence[Tensor], gradients: Sequence[Tensor], work: WeightWork) -> None:
    """I: an ordinary backward from outputs computed under `deferring(work)`, each with its gradient.

    Activation checkpointing works, reentrant or not: its recomputation must see what the forward saw, so the mode has
    to be active within the backward. torch.autograd.backward would suspend it, the engine that it calls does not.
    """
    with deferring(work):
        run_backward(outputs, gradients)


def backward_weight(work: WeightWork) -> None:
    """W: add the deferred weight gradients to the parameters' `.grad`, freeing each entry as it is done."""
    while work:
        work.popleft()()


class _Product(NamedTuple):
    """A product of a value with a parameter: value @ weight^T + bias, or value @ weight + bias when `transposed`."""

    value: Tensor
    weight: Tensor
    bias: Tensor | None = None
    transposed: bool = False


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> _Product:
    return _Product(input, weight, bias)


def _matmul(input: Tensor, other: Tensor) -> _Product:
    return _Product(input, other, transposed=True)


def _mm(input: Tensor, mat2: Tensor) -> _Product:
    return _Product(input, mat2, transposed=True)


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor) -> _Product:
    return _Product(mat1, mat2, input, transposed=True)


PRODUCTS: Mapping[Callable[..., Any], Callable[..., _Product]] = {
    functional.linear: _linear,
    torch.matmul: _matmul, Tensor.matmul: _matmul, Tensor.__matmul__: _matmul,
    torch.mm: _mm, Tensor.mm: _mm,
    torch.addmm: _addmm,
}


_LEAVING: dict[Callable[..., Any], Callable[..., Callable[[], None]]] = {}


def leaves_work(op: Callable[..., Any], work: Callable[..., Callable[[], None]]) -> None:
    """Whenever compiled code calls an op in its backward, I leaves what `work` makes of its arguments."""
    _LEAVING[op] = work


class _Deferring(TorchFunctionMode):
    def __init__(self, work: WeightWork) -> None:
        super().__init__()
        self._work = work

    def __torch_function__(self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _LEAVING and type(args[0]) is Tensor:  # else it is compiled at this moment
            self._work.append(_LEAVING[func](*args))
        elif func in PRODUCTS and torch.is_grad_enabled():
            try:
                product = PRODUCTS[func](*args, **kwargs)
            except TypeError:  # an argument of the less usual kind (out, alpha, ...)
                return func(*args, **kwargs)
            if _deferrable(product):
                return _DeferredProduct.apply(  # type: ignore[no-untyped-call]
                    _autocast(product.value), product.weight, product.bias, product.transposed, self._work)
        return func(*args, **kwargs)


def _deferrable(product: _Product) -> bool:
    value, weight, bias, _ = product
    return (isinstance(value, Tensor) and _trained(weight) and weight.dim() == 2 and value.dim() >= 1
            and (bias is None or (_trained(bias) and bias.dim() == 1)))


def _trained(tensor: Tensor) -> bool:
    """Whether a gradient may be added to `tensor.grad` behind autograd's back."""
    return (isinstance(tensor, torch.nn.Parameter) and tensor.is_leaf and tensor.requires_grad
            and not tensor.is_complex() and not has_gradient_hooks(tensor))


def _autocast(tensor: Tensor) -> Tensor:
    """The cast that autocast would make of a matrix product's operand."""
    kind = tensor.device.type
    if torch.is_autocast_enabled(kind) and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


class _DeferredProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool,
                work: WeightWork) -> Tensor:
        used = _autocast(weight)
        ctx.save_for_backward(value, used)
        ctx.weight, ctx.bias, ctx.transposed, ctx.work = weight, bias, transposed, work
        product = multiplied(value, used, bias, transposed)
        # Of three and more dimensions it is a view of a matrix, which a following in-place op would refuse: `.data`,
        # other than `.detach()`, is none.
        return product.data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        value, used = ctx.saved_tensors
        work = ProductWork(value, gradient, ctx.weight, ctx.bias, ctx.transposed)
        ctx.work.append(work.run)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None
        return gradient @ (used.t() if ctx.transposed else used), None, None, None, None


def multiplied(value: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> Tensor:
    """A `_Product` of operands of one dtype."""
    if not transposed:
        return functional.linear(value, weight, bias)
    return value @ weight if bias is None else torch.addmm(bias, value, weight)


class ProductWork(NamedTuple):
    """One deferred weight gradient: what went in, the gradient of what came out, and whose gradient it is."""

    value: Tensor
    gradient: Tensor
    weight: Tensor
    bias: Tensor | None
    transposed: bool

    @torch.no_grad()
    def run(self) -> None:
        """Add it to the weight's, and that of the bias to the bias'."""
        value = self.value.reshape(-1, self.value.shape[-1])
        gradient = self.gradient.reshape(-1, self.gradient.shape[-1])
        _accumulate(self.weight, value.t() @ gradient if self.transposed else gradient.t() @ value)
        if self.bias is not None:
            _accumulate(self.bias, gradient.sum(0))


def _accumulate(parameter: Tensor, gradient: Tensor) -> None:
    """Add to `.grad` as autograd would: the product is rounded before it is added, so the sums agree bit for bit."""
    gradient = gradient.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)
