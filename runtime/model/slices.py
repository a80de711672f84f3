"""What a worker runs: slices of a model's layers, and the micro-batches that it has in flight in each of them."""

from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from runtime.config import RunConfig
from runtime.model.data import Microbatch as Microbatch
from runtime.model.data import input_form
from runtime.model.holding import Holding
from runtime.model.layers import LayeredModel, autocast, layer_seed
from runtime.model.seeds import seeding
from runtime.model.split import WeightWork, backward_input, backward_weight, deferring
from runtime.torch_private import FakeTensorMode, unset_fake_temporarily
from schedules.layers import LayerRange


class TensorForm(NamedTuple):
    """Shape and dtype of a tensor: a receive can be posted from it without a handshake."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class _Held(NamedTuple):
    """A micro-batch between F and I."""

    value: Tensor
    output: Tensor
    work: WeightWork | None


class SliceRunner:
    """Runs a range of layers op by op; the layers belong to a holding.

    Micro-batches may be run in any order; their tensors are kept under the micro-batch's name. Tensors given to it
    (activations, gradients) are kept, not copied, until W: the caller must not write to them. What it returns is
    contiguous, and may likewise be sent, not changed. What begins with layer 0 takes tokens, what ends with the last
    layer ends in the loss.

    Parameters
    ----------
    layers
        Half-open range.
    modules
        The layers, among others.
    loss_scale
        Factor of each micro-batch's loss: 1 / micro-batches of the whole iteration, so that losses and gradients
        summed over all of them are means.
    """

    def __init__(self, layers: LayerRange, modules: Mapping[int, nn.Module], model: LayeredModel, *, loss_scale: float,
                 config: RunConfig) -> None:
        self.layers = layers
        self.first = layers[0] == 0
        self.last = layers[1] == model.layers
        self._modules = {layer: modules[layer] for layer in range(*layers)}
        self._loss_scale = loss_scale
        self._model = model
        self._config = config
        self._held: dict[Microbatch, _Held] = {}
        self._deferred: dict[Microbatch, WeightWork] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=model.device)

    def forward(self, microbatch: Microbatch, value: Tensor, target: Tensor | None = None, *,
                split: bool) -> Tensor | None:
        """F: the activation to send on; of the last slice None, and the loss is kept for `take_loss`.

        `value` holds tokens for the first slice of a route, else the activation of the slice before; `target` the
        tokens to be predicted, for the last one. With `split` the backward comes as I and W, else as B.
        """
        assert microbatch not in self._held and microbatch not in self._deferred, f"{microbatch} is in flight"
        if not self.first:
            value = value.detach().requires_grad_()
        # Without an input gradient I has nothing to do: the first slice leaves the whole backward to W.
        work: WeightWork | None = deque() if split and not self.first else None
        with nullcontext() if work is None else deferring(work):
            output = self._run_layers(microbatch, value, target)
        self._held[microbatch] = _Held(value, output, work)
        if not self.last:
            return output.detach().contiguous()
        self._loss += output.detach()
        return None

    def backward(self, microbatch: Microbatch, gradient: Tensor | None) -> Tensor | None:
        """B: the gradient for the slice before, None for the first slice."""
        result = self.backward_input(microbatch, gradient)
        self.backward_weight(microbatch)
        return result

    def backward_input(self, microbatch: Microbatch, gradient: Tensor | None) -> Tensor | None:
        """I: the gradient for the slice before, None for the first slice; frees all that W does not need.

        `gradient` is that of the activation sent on, None for the last slice. After a forward without `split`, and for
        parameters that are not in a matrix product, the weights' gradients are computed here already.
        """
        value, output, work = self._held.pop(microbatch)
        if self.first:
            self._deferred[microbatch] = deque([partial(_backward, output, gradient, None)])
            return None
        _backward(output, gradient, work)
        self._deferred[microbatch] = deque() if work is None else work
        return torch.zeros_like(value) if value.grad is None else value.grad.contiguous()

    def backward_weight(self, microbatch: Microbatch) -> None:
        """W: add the micro-batch's weight gradients to those of the holding."""
        backward_weight(self._deferred.pop(microbatch))

    def take_loss(self) -> Tensor:
        """The scaled losses summed over the micro-batches run since the last call: float64 scalar."""
        loss, self._loss = self._loss, torch.zeros_like(self._loss)
        return loss

    def discard(self) -> None:
        """Forget all micro-batches in flight and the losses: the iteration did not happen."""
        self._held.clear()
        self._deferred.clear()
        self._loss.zero_()

    def forget(self, microbatch: Microbatch) -> None:
        """There will be no backward of a micro-batch whose F has been run."""
        del self._held[microbatch]

    def in_flight(self) -> int:
        """Micro-batches whose tensors are held: those with an F and without a W or B."""
        return len(self._held) + len(self._deferred)

    def _run_layers(self, microbatch: Microbatch, value: Tensor, target: Tensor | None) -> Tensor:
        training, device = self._config.training, self._model.device
        with autocast(training.dtype, device):
            with seeding(device) as seed_generators:
                for layer, module in self._modules.items():
                    seed_generators(layer_seed(training.seed, *microbatch, layer))
                    value = module(value)
            if not self.last:
                return value
            assert target is not None, "the last slice needs the target tokens"
            return self._model.loss(value, target) * self._loss_scale


class Slices:
    """The slices that one worker runs or reduces, by their numbers, over the layers that it holds."""

    def __init__(self, holding: Holding, layers: Mapping[int, LayerRange], model: LayeredModel, *, loss_scale: float,
                 config: RunConfig) -> None:
        self._holding = holding
        self.layers = layers
        """The half-open range of each slice."""
        self.runners = {number: SliceRunner(one, holding.modules, model, loss_scale=loss_scale, config=config)
                        for number, one in layers.items()}

    @property
    def modules(self) -> Iterable[nn.Module]:
        """All layers that are held."""
        return self._holding.modules.values()

    def gradients(self, slice: int) -> list[Tensor]:
        """The gradients of a slice that the holding reduces by: one flat tensor a dtype, to be summed in place."""
        return self._holding.gradients(self.layers[slice])

    def take_loss(self) -> float:
        """This worker's part of the mean loss since the last call."""
        return sum(runner.take_loss().item() for runner in self.runners.values() if runner.last)

    def discard(self) -> None:
        """Forget all micro-batches in flight, the losses and the gradients: the iteration did not happen."""
        for runner in self.runners.values():
            runner.discard()
        self._holding.zero_gradients()


def forms(model: LayeredModel, config: RunConfig) -> list[TensorForm]:
    """What goes into each layer, and then what comes out of the last; found on tensors without memory."""
    shape, dtype = input_form(config)
    seen = [TensorForm(shape, dtype)]
    with FakeTensorMode(), model.device, torch.no_grad(), autocast(config.training.dtype, model.device):
        value = torch.zeros(shape, dtype=dtype)
        for layer in range(model.layers):
            value = _run_without_memory(model, layer, value)
            seen.append(TensorForm(tuple(value.shape), value.dtype))
    return seen


def _run_without_memory(model: LayeredModel, layer: int, value: Tensor) -> Tensor:
    """What a layer gives, under FakeTensorMode. It is built on no device: fake parameters refuse `module.to(dtype)`."""
    with unset_fake_temporarily(), torch.device("meta"):
        module = model.build(layer)
    state = {name: torch.empty(tensor.shape, dtype=tensor.dtype)
             for name, tensor in chain(module.named_parameters(), module.named_buffers())}
    output: Tensor = functional_call(module, state, (value,))
    return output


def _backward(output: Tensor, gradient: Tensor | None, work: WeightWork | None) -> None:
    if not output.requires_grad:  # the slice has nothing to train and does not pass on what it is given
        return
    if work is None:
        torch.autograd.backward(output, gradient)
    else:
        backward_input(output, gradient, work)
