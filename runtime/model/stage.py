"""One stage of the model on one worker: its layers, its gradients, and the micro-batches it has in flight."""

from collections import deque
from collections.abc import Sequence
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
from runtime.model.digest import parameter_digest
from runtime.model.layers import LayeredModel, autocast, layer_randomness
from runtime.model.seeds import GENERATORS
from runtime.model.split import WeightWork, backward_input, backward_weight, deferring
from runtime.torch_private import FakeTensorMode, unset_fake_temporarily


class Boundary(NamedTuple):
    """Shapes and dtypes of what a stage takes and gives; a receive can be posted from it without a handshake."""

    input_shape: tuple[int, ...]
    input_dtype: torch.dtype
    output_shape: tuple[int, ...]
    output_dtype: torch.dtype


class _Held(NamedTuple):
    """A micro-batch between F and I."""

    value: Tensor
    output: Tensor
    work: WeightWork | None


class StageModule:
    """A range of a model's layers, run op by op.

    Micro-batches may be run in any order; their tensors are kept under the micro-batch's name. Tensors given to a
    stage (activations, gradients) are kept, not copied, until W: the caller must not write to them. What a stage
    returns is contiguous, and may likewise be sent, not changed.

    Parameters
    ----------
    index
        Which stage of the job.
    layers
        Half-open range of the model's layers.
    first, last
        Whether the stage takes tokens, and whether it ends in the loss.
    loss_scale
        Factor of each micro-batch's loss: 1 / micro-batches of the whole iteration, so that losses and gradients
        summed over all of them are means.
    """

    def __init__(self, index: int, layers: tuple[int, int], model: LayeredModel, *, first: bool, last: bool,
                 loss_scale: float, config: RunConfig) -> None:
        self.index = index
        self.layers = layers
        self.first = first
        self.last = last
        self.loss_scale = loss_scale
        self.modules: dict[int, nn.Module] = {layer: _built(model, layer) for layer in range(*layers)}
        self._model = model
        self._config = config
        self._held: dict[Microbatch, _Held] = {}
        self._deferred: dict[Microbatch, WeightWork] = {}
        self._loss = torch.zeros((), dtype=torch.float64, device=model.device)
        self._gradients = _flatten_gradients(list(self.parameters().values()))

    def forward(self, microbatch: Microbatch, value: Tensor, target: Tensor | None = None, *,
                split: bool) -> Tensor | None:
        """F: the activation to send on; on the last stage None, and the loss is kept for `take_loss`.

        `value` holds tokens on the first stage, else the activation of the stage before; `target` the tokens to be
        predicted, on the last stage. With `split` the backward comes as I and W, else as B.
        """
        assert microbatch not in self._held and microbatch not in self._deferred, f"{microbatch} is in flight"
        if not self.first:
            value = value.detach().requires_grad_()
        # Without an input gradient I has nothing to do: the first stage leaves the whole backward to W.
        work: WeightWork | None = deque() if split and not self.first else None
        with nullcontext() if work is None else deferring(work):
            output = self._run_layers(microbatch, value, target)
        self._held[microbatch] = _Held(value, output, work)
        if not self.last:
            return output.detach().contiguous()
        self._loss += output.detach()
        return None

    def backward(self, microbatch: Microbatch, gradient: Tensor | None) -> Tensor | None:
        """B: the gradient for the stage before, None on the first stage."""
        result = self.backward_input(microbatch, gradient)
        self.backward_weight(microbatch)
        return result

    def backward_input(self, microbatch: Microbatch, gradient: Tensor | None) -> Tensor | None:
        """I: the gradient for the stage before, None on the first stage; frees all that W does not need.

        `gradient` is that of the activation sent on, None on the last stage. After a forward without `split`, and for
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
        """W: add the micro-batch's weight gradients to `gradients`."""
        backward_weight(self._deferred.pop(microbatch))

    def take_loss(self) -> Tensor:
        """The scaled losses summed over the micro-batches run since the last call: float64 scalar."""
        loss, self._loss = self._loss, torch.zeros_like(self._loss)
        return loss

    def gradients(self) -> list[Tensor]:
        """All gradients of the stage, one flat tensor a dtype. Parameters' `.grad` are views of them: sum in place."""
        return list(self._gradients)

    def zero_gradients(self) -> None:
        """Start the next sum of gradients; after the optimizer's step."""
        for flat in self._gradients:
            flat.zero_()

    def discard(self) -> None:
        """Forget all micro-batches in flight, the losses and the gradients: the iteration did not happen."""
        self._held.clear()
        self._deferred.clear()
        self._loss.zero_()
        self.zero_gradients()

    def in_flight(self) -> int:
        """Micro-batches whose tensors are held: those with an F and without a W or B."""
        return len(self._held) + len(self._deferred)

    def boundary(self) -> Boundary:
        """What the stage takes and gives, found without computing."""
        return boundaries(self._model, [self.layers], self._config)[0]

    def parameters(self) -> dict[str, nn.Parameter]:
        """The stage's parameters by "layer.name"."""
        return {f"{layer}.{name}": parameter for layer, module in self.modules.items()
                for name, parameter in module.named_parameters()}

    def layer_state(self, layer: int) -> dict[str, Tensor]:
        """Parameters and buffers of one layer; the tensors themselves, not copies."""
        return dict(self.modules[layer].state_dict())

    def load_layer_state(self, layer: int, state: dict[str, Tensor]) -> None:
        """Overwrite one layer's parameters and buffers. Raises RuntimeError when names or shapes differ."""
        self.modules[layer].load_state_dict(state)

    def digest(self) -> str:
        """Digest of the parameters; see `runtime.model.digest`."""
        return parameter_digest(self.parameters())

    def _run_layers(self, microbatch: Microbatch, value: Tensor, target: Tensor | None) -> Tensor:
        training, device = self._config.training, self._model.device
        with autocast(training.dtype, device):
            for layer, module in self.modules.items():
                with layer_randomness(training.seed, *microbatch, layer, device):
                    value = module(value)
            if not self.last:
                return value
            assert target is not None, "the last stage needs the target tokens"
            return self._model.loss(value, target) * self.loss_scale


def _built(model: LayeredModel, layer: int) -> nn.Module:
    """A layer; another thread may run stages meanwhile, whose random numbers are not to be disturbed."""
    with GENERATORS:
        return model.build(layer).to(model.device)


def boundaries(model: LayeredModel, stages: Sequence[tuple[int, int]], config: RunConfig) -> list[Boundary]:
    """What each stage takes and gives, found by running the model on tensors without memory.

    `stages` are ascending layer ranges; the first need not begin at layer 0.
    """
    shape, dtype = input_form(config)
    ends = {end for layers in stages for end in layers}
    seen: dict[int, tuple[tuple[int, ...], torch.dtype]] = {}
    with FakeTensorMode(), model.device, torch.no_grad(), autocast(config.training.dtype, model.device):
        value = torch.zeros(shape, dtype=dtype)
        for layer in range(max(ends) + 1):
            if layer in ends:
                seen[layer] = (tuple(value.shape), value.dtype)
            if layer < max(ends):
                value = _run_without_memory(model, layer, value)
    return [Boundary(*seen[start], *seen[end]) for start, end in stages]


def _run_without_memory(model: LayeredModel, layer: int, value: Tensor) -> Tensor:
    """What a layer gives, under FakeTensorMode. It is built on no device: fake parameters refuse `module.to(dtype)`."""
    with unset_fake_temporarily(), torch.device("meta"):
        module = model.build(layer)
    state = {name: torch.empty(tensor.shape, dtype=tensor.dtype)
             for name, tensor in chain(module.named_parameters(), module.named_buffers())}
    output: Tensor = functional_call(module, state, (value,))
    return output


def _backward(output: Tensor, gradient: Tensor | None, work: WeightWork | None) -> None:
    if not output.requires_grad:  # the stage has nothing to train and does not pass on what it is given
        return
    if work is None:
        torch.autograd.backward(output, gradient)
    else:
        backward_input(output, gradient, work)


def _flatten_gradients(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Give the parameters zero gradients that lie one after the other in one flat tensor a dtype."""
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    flats = []
    for dtype, group in by_dtype.items():
        flat = torch.zeros(sum(parameter.numel() for parameter in group), dtype=dtype, device=group[0].device)
        views = torch.split(flat, [parameter.numel() for parameter in group])
        for parameter, view in zip(group, views, strict=True):
            parameter.grad = view.view_as(parameter)
        flats.append(flat)
    return flats
