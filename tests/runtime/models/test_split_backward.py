"""The split backward against a plain one.

Modules are of every kind that could upset it.
"""

from collections import deque
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from slipstream.runtime.models.split_backward import (
    WeightWork,
    backward_input,
    backward_weight,
    deferring_weights,
    weight_work,
)

WIDTH = 6


class Calls(nn.Module):
    """A module whose forward is a function of itself and the value."""

    def __init__(
        self, call: Callable[["Calls", Tensor], Tensor], **parts: nn.Module | nn.Parameter
    ) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.call = call

    def forward(self, value: Tensor) -> Tensor:
        return self.call(self, value)


def weight(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape or (WIDTH, WIDTH)) / 2)


def linear(**options: bool) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **options)


def mlp() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.3), nn.Linear(2 * WIDTH, WIDTH)
    )


def frozen() -> nn.Linear:
    module = linear()
    module.weight.requires_grad_(False)
    return module


def hooked() -> nn.Linear:
    """A linear whose weight's gradient is doubled on its way.

    Only its hook ever sees that.
    """
    module = linear()
    module.weight.register_hook(lambda gradient: gradient * 2)
    return module


def attend(self: Calls, value: Tensor) -> Tensor:
    rows = value.reshape(-1, value.shape[-2], WIDTH)
    return self.part(rows, rows, rows, need_weights=False)[0].reshape(value.shape)


def addmm(self: Calls, value: Tensor) -> Tensor:
    return torch.addmm(self.bias, value.reshape(-1, WIDTH), self.weight).view(value.shape)


class Scale(torch.autograd.Function):
    """value * weight, whose backward leaves the weight's gradient to W where there is one."""

    @staticmethod
    def forward(ctx, value, weight):
        ctx.save_for_backward(value)
        ctx.weight, ctx.work = weight, weight_work()
        return value * weight

    @staticmethod
    def backward(ctx, gradient):
        (value,) = ctx.saved_tensors
        if ctx.work is None:
            return gradient * ctx.weight, (gradient * value).flatten(0, -2).sum(0)
        ctx.work.append(lambda: add(ctx.weight, (gradient * value).flatten(0, -2).sum(0)))
        return gradient * ctx.weight, None


def add(weight: nn.Parameter, gradient: Tensor) -> None:
    weight.grad = gradient if weight.grad is None else weight.grad + gradient


def forces(self: Calls, value: Tensor) -> Tensor:
    """The gradient of an energy, as for the forces on atoms."""
    place = value if value.requires_grad else value.detach().requires_grad_()
    energy = torch.tanh(self.part(place)).square().sum()
    [gradient] = torch.autograd.grad(energy, place, create_graph=True)
    return value - gradient


def inner_step(self: Calls, value: Tensor) -> Tensor:
    """Training at test time: a step of the layer's own weights before it uses them."""
    loss = self.part(value).square().mean()
    of_weight, of_bias = torch.autograd.grad(
        loss, (self.part.weight, self.part.bias), create_graph=True
    )
    return functional.linear(
        value, self.part.weight - 0.1 * of_weight, self.part.bias - 0.1 * of_bias
    )


def first_order(self: Calls, value: Tensor) -> Tensor:
    """An inner step whose gradients are taken as constants."""
    loss = self.part(value.detach()).square().mean()
    [of_weight] = torch.autograd.grad(loss, (self.part.weight,))
    return functional.linear(value, self.part.weight - 0.1 * of_weight, self.part.bias)


def penalty(self: Calls, value: Tensor) -> Tensor:
    """A layer that runs a whole backward in its forward.

    It uses what that has left in `.grad`.
    """
    before = None if self.part.weight.grad is None else self.part.weight.grad.clone()
    with torch.enable_grad():
        self.part(value.detach()).square().mean().backward()
    added = self.part.weight.grad - (0 if before is None else before)
    return self.part(value) + (value @ added.detach().t())


def jacobian_product(self: Calls, value: Tensor) -> Tensor:
    return (
        value
        + torch.autograd.functional.vjp(
            self.part, value, torch.ones_like(value), create_graph=True
        )[1]
    )


def func_grad(self: Calls, value: Tensor) -> Tensor:
    return value - torch.func.grad(lambda x: torch.tanh(self.part(x)).square().sum())(value)


def func_weights(self: Calls, value: Tensor) -> Tensor:
    weights = dict(self.part.named_parameters())
    stepped = torch.func.grad(
        lambda weights: torch.func.functional_call(self.part, weights, value).square().mean()
    )(weights)
    return value + torch.func.functional_call(self.part, stepped, value)


def forward_mode(self: Calls, value: Tensor) -> Tensor:
    return torch.func.jvp(self.part, (value,), (torch.ones_like(value),))[1] + self.part(value)


class Reversible(torch.autograd.Function):
    """A layer that keeps no activation.

    Its backward runs the part again, and asks autograd for the gradients itself.
    """

    @staticmethod
    def forward(ctx, value, part, *weights):
        ctx.part = part
        ctx.save_for_backward(value, *weights)
        return part(value)

    @staticmethod
    def backward(ctx, gradient):
        value, *weights = ctx.saved_tensors
        with torch.enable_grad():
            again = value.detach().requires_grad_()
            of_value, *of_weights = torch.autograd.grad(
                torch.tanh(ctx.part(again)), (again, *weights), gradient
            )
        return of_value, None, *of_weights


KINDS: dict[str, Callable[[], nn.Module]] = {
    "forces": lambda: Calls(forces, part=linear()),
    "forces of two products": lambda: Calls(forces, part=mlp()),
    "inner step": lambda: Calls(inner_step, part=linear()),
    "first-order inner step": lambda: Calls(first_order, part=linear()),
    "backward in the forward": lambda: Calls(penalty, part=linear()),
    "vector-jacobian product": lambda: Calls(jacobian_product, part=linear()),
    "func.grad": lambda: Calls(func_grad, part=linear()),
    "func.grad of weights": lambda: Calls(func_weights, part=linear()),
    "func.vmap": lambda: Calls(lambda self, x: torch.func.vmap(self.part)(x), part=linear()),
    "func.jvp": lambda: Calls(forward_mode, part=linear()),
    "reversible": lambda: Calls(
        lambda self, x: Reversible.apply(x, self.part, *self.part.parameters()), part=linear()
    ),
    "linear": linear,
    "no bias": lambda: linear(bias=False),
    "mlp": mlp,
    "residual": lambda: Calls(lambda self, x: x + self.part(x), part=mlp()),
    "in place": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True)),
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "frozen": frozen,
    "hooked": hooked,
    "twice": lambda: Calls(lambda self, x: self.part(torch.tanh(self.part(x))), part=linear()),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(linear()),
    "side": lambda: Calls(
        lambda self, x: x * self.part(torch.ones(WIDTH, dtype=x.dtype)), part=linear()
    ),
    "detached": lambda: Calls(lambda self, x: x + self.part(x.detach()), part=linear()),
    "unused": lambda: Calls(lambda self, x: x.sin(), part=linear()),
    "matmul": lambda: Calls(lambda self, x: x @ self.weight, weight=weight()),
    "matmul by name": lambda: Calls(
        lambda self, x: torch.matmul(input=x, other=self.weight), weight=weight()
    ),
    "left matmul": lambda: Calls(lambda self, x: (self.weight @ x.mT).mT, weight=weight()),
    "mm": lambda: Calls(
        lambda self, x: x.reshape(-1, WIDTH).mm(self.weight).view(x.shape), weight=weight()
    ),
    "addmm": lambda: Calls(addmm, weight=weight(), bias=weight(WIDTH)),
    "batched matmul": lambda: Calls(
        lambda self, x: x @ self.weight, weight=weight(1, WIDTH, WIDTH)
    ),
    "transposed view": lambda: Calls(
        lambda self, x: functional.linear(x, self.weight.t()), weight=weight()
    ),
    "tied matmul": lambda: Calls(
        lambda self, x: functional.linear(x @ self.weight, self.weight), weight=weight()
    ),
    "attention": lambda: Calls(attend, part=nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    "checkpoint": lambda: Calls(
        lambda self, x: checkpoint(self.part, x, use_reentrant=False), part=mlp()
    ),
    "reentrant checkpoint": lambda: Calls(
        lambda self, x: checkpoint(self.part, x, use_reentrant=True), part=mlp()
    ),
    "own function": lambda: Calls(
        lambda self, x: Scale.apply(x, self.weight), weight=weight(WIDTH)
    ),
    "convolution": lambda: Calls(
        lambda self, x: self.part(x.reshape(-1, 1, WIDTH)).reshape(x.shape),
        part=nn.Conv1d(1, 1, 3, padding=1),
    ),
}
ROUNDED = {
    "twice",
    "tied matmul",
    "shared",
    "left matmul",
    "forces",
    "forces of two products",
    "inner step",
    "first-order inner step",
    "backward in the forward",
    "vector-jacobian product",
    "func.jvp",
}
"""Where the last bit may differ.

A parameter used twice is summed in another order than autograd's, and a transposed value is
multiplied in another order than one in place.
"""


def stack(names: list[str], dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(len(names))
    modules = [KINDS[name]() for name in names if name != "shared"]
    if "shared" in names:  # the first module again, at the end
        modules = [*modules, nn.Tanh(), modules[0]] if modules else [linear()]
    return nn.Sequential(*modules).to(dtype)


def run(
    names: list[str],
    shape: tuple[int, ...],
    split: bool,
    rounds: int = 2,
    *,
    dtype: torch.dtype = torch.float64,
    bf16: bool = False,
) -> tuple[list[Tensor], dict[str, Tensor | None]]:
    """Input gradients of some micro-batches, and the parameters' gradients summed over them."""
    module = stack(names, dtype)
    results = []
    works: list[WeightWork] = []
    for index in range(rounds):
        torch.manual_seed(index)
        leaf = torch.randn(*shape, dtype=dtype).requires_grad_()
        work: WeightWork = deque()
        if not split:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                output = module(leaf)
            torch.autograd.backward(output, torch.ones_like(output))
        else:
            with deferring_weights(work), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                output = module(leaf)
            backward_input([output], [torch.ones_like(output)], work)
        assert leaf.grad is not None
        results.append(leaf.grad)
        works.append(work)
    for work in works:
        backward_weight(work)
        assert not work
    return results, {name: parameter.grad for name, parameter in module.named_parameters()}


def assert_same(names: list[str], shape: tuple[int, ...], **options: object) -> None:
    plain = run(names, shape, False, **options)  # type: ignore[arg-type]
    split = run(names, shape, True, **options)  # type: ignore[arg-type]
    for left, right in zip(plain[0], split[0], strict=True):
        assert_equal(right, left, names)
    assert plain[1].keys() == split[1].keys()
    for name, gradient in plain[1].items():
        other = split[1][name]
        if gradient is None or other is None:
            assert gradient is other, name
        else:
            assert_equal(other, gradient, names)


def assert_equal(actual: Tensor, expected: Tensor, names: list[str]) -> None:
    tolerance = 1e-12 if ROUNDED & set(names) else 0.0
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", [(5, WIDTH), (2, 5, WIDTH), (2, 1, 3, WIDTH)])
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_bit_for_bit(name: str, shape: tuple[int, ...]) -> None:
    assert_same([name], shape)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([*KINDS, "shared"]), min_size=1, max_size=5),
    st.integers(1, 3),
    st.booleans(),
)
def test_stacks_of_any_kinds(names: list[str], rows: int, batched: bool) -> None:
    assert_same(names, (2, rows, WIDTH) if batched else (rows, WIDTH))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.sampled_from(
            [
                "linear",
                "no bias",
                "mlp",
                "residual",
                "layer norm",
                "frozen",
                "matmul",
                "addmm",
                "checkpoint",
            ]
        ),
        min_size=1,
        max_size=4,
    )
)
def test_autocast_bit_for_bit(names: list[str]) -> None:
    assert_same(names, (2, 3, WIDTH), dtype=torch.float32, bf16=True)


@pytest.mark.parametrize(
    ("name", "deferred"),
    [
        ("linear", 1),
        ("no bias", 1),
        ("mlp", 2),
        ("residual", 2),
        ("twice", 2),
        ("matmul", 1),
        ("matmul by name", 1),
        ("mm", 1),
        ("addmm", 1),
        ("tied matmul", 2),
        ("checkpoint", 2),
        ("reentrant checkpoint", 2),
        ("side", 1),
        ("detached", 1),
        ("in place", 1),
        ("own function", 1),
        ("first-order inner step", 0),
        ("backward in the forward", 1),
        ("reversible", 0),
        ("func.vmap", 0),
        ("func.jvp", 1),
        ("frozen", 0),
        ("hooked", 0),
        ("layer norm", 0),
        ("weight norm", 0),
        ("batched matmul", 0),
        ("attention", 0),
    ],
)
def test_what_is_deferred(name: str, deferred: int) -> None:
    module = stack([name])
    work: WeightWork = deque()
    leaf = torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True)
    with deferring_weights(work):
        loss = module(leaf).sum()
    backward_input([loss], [torch.ones_like(loss)], work)
    assert len(work) == deferred


def test_without_gradients_nothing_is_recorded() -> None:
    work: WeightWork = deque()
    with torch.no_grad(), deferring_weights(work):
        assert not linear()(torch.ones(1, WIDTH)).requires_grad
    assert not work


def test_wrong_shapes_are_torchs_own_error() -> None:
    with (
        deferring_weights(deque()),
        pytest.raises(RuntimeError, match="shapes cannot be multiplied"),
    ):
        linear()(torch.ones(2, WIDTH + 1))
