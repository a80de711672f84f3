"""Models whose middle layers do what not all layers may.

Or they ask autograd for it in an unusual way.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.runtime.api import ModelConfig, derive_seed, seeded, weight_work


class Plain(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.part = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.part(x))


class Forces(Plain):
    """Follows the gradient of an energy, as forces on atoms do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            place = x if x.requires_grad else x.detach().requires_grad_()
            [force] = torch.autograd.grad(
                torch.tanh(self.part(place)).square().sum(), place, create_graph=True
            )
        return x - force


class InnerStep(Plain):
    """Steps its weights by a loss of its own before it uses them."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            [gradient] = torch.autograd.grad(
                self.part(x).square().mean(), self.part.weight, create_graph=True
            )
        return x + functional.linear(x, self.part.weight - 0.1 * gradient)


class Normalized(Plain):
    """Keeps running statistics."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x.mT).mT)


class Counting(Plain):
    """Counts its calls in a buffer, by a way that autograd does not see."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.data.add_(1)
        return super().forward(x)


class InPlace(Plain):
    """Writes to its input.

    This is right behind another layer, wrong where the input is kept to compute the layer again.
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.part(x.mul_(2)))


class _Unreduced(torch.autograd.Function):
    """Product that leaves to W more than its gradient.

    The work is added once for each call of its backward.
    """

    @staticmethod
    def forward(ctx, value: Tensor, weight: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(value)
        ctx.weight, ctx.work = weight, weight_work()
        return value @ weight

    @staticmethod
    def backward(  # type: ignore[no-untyped-def]
        ctx, gradient: Tensor
    ) -> tuple[Tensor | None, ...]:
        [value] = ctx.saved_tensors
        of_weight = value.flatten(0, -2).mT @ gradient.flatten(0, -2)
        if ctx.work is None:
            return gradient @ ctx.weight.mT, of_weight
        ctx.work.append(lambda: ctx.weight.grad.add_(2 * of_weight))
        return gradient @ ctx.weight.mT, None


class Unreduced(Plain):
    """Has a function of its own that is wrong where its backward is divided."""

    def forward(self, x: Tensor) -> Tensor:
        product = _Unreduced.apply(x, self.part.weight)  # type: ignore[no-untyped-call]
        return x + product + self.part(x)


KINDS = {
    kind.__name__: kind
    for kind in (Plain, Forces, InnerStep, Normalized, Counting, InPlace, Unreduced)
}


class Model:
    """Embedding, blocks of the kinds that `[model.options] kinds` names, and a head."""

    def __init__(
        self, config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.seed, self.dtype, self.device = config, seed, dtype, device
        self.kinds = config.options["kinds"]
        self.layers = len(self.kinds) + 2

    def build(self, layer: int) -> nn.Module:
        width, vocabulary = self.config.width, self.config.vocabulary
        with seeded(derive_seed("parameters", self.seed, layer)):
            if layer == 0:
                module = nn.Embedding(vocabulary, width)
            elif layer == self.layers - 1:
                module = nn.Linear(width, vocabulary)
            else:
                module = KINDS[self.kinds[layer - 1]](width)
        return module.to(self.dtype)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())
