"""The split backward against a plain one, over modules of every kind that could upset it."""

from collections import deque
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from slipstream.runtime.model.layers.split_backward import (
    WeightWork,
    backward_input,
    backward_weight,
    deferring_weights,
    weight_work,
)

WIDTH = 6


class Calls(nn.Module):
    """A module whose forward is a function of itself and the value."""

    def __init__(self, call: Callable[["Calls", Tensor], Tensor], **parts: nn.Module | nn.Parameter) -> None:
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
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Dropout(0.3), nn.Linear(2 * WIDTH, WIDTH))


def frozen() -> nn.Linear:
    module = linear()
    module.weight.requires_grad_(False)
    return module


def hooked() -> nn.Linear:
    """A linear whose weight's gradient is doubled on its way: only ever to be seen by its hook."""
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
        value, = ctx.saved_tensors
        if ctx.work is None:
            return gradient * ctx.weight, (gradient * value).flatten(0, -2).sum(0)
        ctx.work.append(lambda: add(ctx.weight, (gradient * value).flatten(0, -2).sum(0)))
        return gradient * ctx.weight, None


def add(weight: nn.Parameter, gradient: Tensor) -> None:
    weight.grad = gradient if weight.grad is None else weight.grad + gradient


KINDS: dict[str, Callable[[], nn.Module]] = {
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
    "side": lambda: Calls(lambda self, x: x * self.part(torch.ones(WIDTH, dtype=x.dtype)), part=linear()),
    "detached": lambda: Calls(lambda self, x: x + self.part(x.detach()), part=linear()),
    "unused": lambda: Calls(lambda self, x: x.sin(), part=linear()),
    "matmul": lambda: Calls(lambda self, x: x @ self.weight, weight=weight()),
    "matmul by name": lambda: Calls(lambda self, x: torch.matmul(input=x, other=self.weight),
                                    weight=weight()),
    "left matmul": lambda: Calls(lambda self, x: (self.weight @ x.mT).mT, weight=weight()),
    "mm": lambda: Calls(lambda self, x: x.reshape(-1, WIDTH).mm(self.weight).view(x.shape), weight=weight()),
    "addmm": lambda: Calls(addmm, weight=weight(), bias=weight(WIDTH)),
    "batched matmul": lambda: Calls(lambda self, x: x @ self.weight, weight=weight(1, WIDTH, WIDTH)),
    "transposed view": lambda: Calls(lambda self, x: functional.linear(x, self.weight.t()), weight=weight()),
    "tied matmul": lambda: Calls(lambda self, x: functional.linear(x @ self.weight, self.weight),
                                 weight=weight()),
    "attention": lambda: Calls(attend, part=nn.MultiheadAttention(WIDTH, 2, batch_first=True)),
    "checkpoint": lambda: Calls(lambda self, x: checkpoint(self.part, x, use_reentrant=False), part=mlp()),
    "reentrant checkpoint": lambda: Calls(lambda self, x: checkpoint(self.part, x, use_reentrant=True), part=mlp()),
    "own function": lambda: Calls(lambda self, x: Scale.apply(x, self.weight), weight=weight(WIDTH)),
    "convolution": lambda: Calls(lambda self, x: self.part(x.reshape(-1, 1, WIDTH)).reshape(x.shape),
                                 part=nn.Conv1d(1, 1, 3, padding=1)),
}
ROUNDED = {"twice", "tied matmul", "shared", "left matmul"}
"""Where the last bit may differ: a parameter used twice is summed in another order than autograd's, and a transposed
value is multiplied in another order than one in place."""


def stack(names: list[str], dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(len(names))
    modules = [KINDS[name]() for name in names if name != "shared"]
    if "shared" in names:  # the first module again, at the end
        modules = [*modules, nn.Tanh(), modules[0]] if modules else [linear()]
    return nn.Sequential(*modules).to(dtype)


def run(names: list[str], shape: tuple[int, ...], split: bool, rounds: int = 2, *, dtype: torch.dtype = torch.float64,
        bf16: bool = False) -> tuple[list[Tensor], dict[str, Tensor | None]]:
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
    plain, split = run(names, shape, False, **options), run(names, shape, True, **options)  # type: ignore[arg-type]
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
@given(st.lists(st.sampled_from([*KINDS, "shared"]), min_size=1, max_size=5), st.integers(1, 3), st.booleans())
def test_stacks_of_any_kinds(names: list[str], rows: int, batched: bool) -> None:
    assert_same(names, (2, rows, WIDTH) if batched else (rows, WIDTH))


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(["linear", "no bias", "mlp", "residual", "layer norm", "frozen", "matmul", "addmm",
                                 "checkpoint"]), min_size=1, max_size=4))
def test_autocast_bit_for_bit(names: list[str]) -> None:
    assert_same(names, (2, 3, WIDTH), dtype=torch.float32, bf16=True)


@pytest.mark.parametrize(("name", "deferred"), [
    ("linear", 1), ("no bias", 1), ("mlp", 2), ("residual", 2), ("twice", 2), ("matmul", 1), ("matmul by name", 1),
    ("mm", 1), ("addmm", 1), ("tied matmul", 2), ("checkpoint", 2), ("reentrant checkpoint", 2),
    ("side", 1), ("detached", 1), ("in place", 1), ("own function", 1),
    ("frozen", 0), ("hooked", 0), ("layer norm", 0), ("weight norm", 0), ("batched matmul", 0), ("attention", 0),
])
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
    with deferring_weights(deque()), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear()(torch.ones(2, WIDTH + 1))
