"""Run slices of a model's layers, and keep the micro-batches in flight in each."""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from slipstream.runtime.computing.forms import find_forms as find_forms
from slipstream.runtime.config import RunConfig, may_have_extra_tensors
from slipstream.runtime.data.data import Microbatch as Microbatch
from slipstream.runtime.models.calling import Batch, LayerCall, adapt_loss, collecting_losses
from slipstream.runtime.models.layered_model import LayeredModel, autocast_context, layer_seed, seeded_for_layer
from slipstream.runtime.models.recomputing import parse_recompute, recomputing_parts
from slipstream.runtime.models.split_backward import (
    WeightWork,
    backward_input,
    backward_weight,
    deferring_again,
    deferring_weights,
    weight_work,
)
from slipstream.runtime.replay.layer_values import TensorForm as TensorForm
from slipstream.runtime.replay.layer_values import Value, build_value, form_of, has_gradient, map_tensors, tensors_of
from slipstream.runtime.seeds import restoring_generators
from slipstream.runtime.state.held_layers import HeldLayers
from slipstream.runtime.torch_private import run_backward
from slipstream.schedules.layers import LayerRange


class _MicrobatchState(NamedTuple):
    """State of a micro-batch between its F and its I."""

    value: Value
    output: Value
    added: Tensor | None
    """Loss that layers of the slice added (`add_to_loss`); None on the last slice."""
    work: WeightWork | None
    """Queue to which I adds the work of W; None if I computes all gradients."""
    scale: float
    """Factor of the micro-batch's loss in its iteration's; 0 if the slice adds nothing."""


LossScale = Callable[[Microbatch], float]
"""Function that returns the factor of a micro-batch's loss in its iteration's."""


class SliceRunner:
    """Runs the ops of a range of layers whose parameters belong to a `HeldLayers`.

    Micro-batches may be run in any order; their tensors are stored under the micro-batch's name.
    Tensors passed in (activations, gradients) are stored until W and not copied, so the caller must
    not write to them. Returned tensors are contiguous and may be sent, but must not be changed. A
    slice that begins with layer 0 takes tokens. A slice that ends with the last layer computes the
    loss.

    Parameters
    ----------
    layers
        Half-open range of the model's layers.
    modules
        Modules by layer, including those of the range.
    loss_scale
        Factor of each micro-batch's loss, or a function that returns it for a micro-batch. In
        training, the factors sum to 1 over an iteration, so that the sums of losses and of
        gradients, each times its factor, are means.
    fused
        Layers whose backward must not be divided into I and W; that of a slice with one of them is
        not.
    """

    def __init__(self, layers: LayerRange, modules: Mapping[int, nn.Module], model: LayeredModel, *,
                 loss_scale: float | LossScale, config: RunConfig, fused: Collection[int] = ()) -> None:
        self.layers = layers
        self._may_split = not any(layer in fused for layer in range(*layers))
        self.first = layers[0] == 0
        self.last = layers[1] == model.layers
        self.modules = [modules[layer] for layer in range(*layers)]
        """Modules of the slice's layers, in order."""
        self.device = model.device
        self._calls = {layer: LayerCall(modules[layer], compiled=config.training.compile)
                       for layer in range(*layers)}
        more = may_have_extra_tensors(config.training)
        self.reads_batch = self.first or self.last or any(
            call.takes_batch if more else call.needs_batch for call in self._calls.values())
        """True if F needs the data of the micro-batch."""
        self._recomputed = parse_recompute(config.training, model.layers)
        self._loss_of = adapt_loss(model.loss)
        self.loss_scale: LossScale = loss_scale if callable(loss_scale) else lambda _: loss_scale
        self._model = model
        self._config = config
        self._held: dict[Microbatch, _MicrobatchState] = {}
        self._deferred: dict[Microbatch, WeightWork] = {}
        self._losses: list[Tensor] = []
        self.has_loss = self.last
        """True if the slice's layers have ever contributed to the loss."""

    def forward(self, microbatch: Microbatch, value: Value, target: Tensor | None = None, batch: Batch | None = None, *,
                split: bool) -> Value | None:
        """Run F and return the activation to send on. The last slice keeps its loss instead.

        The `value` is the tokens on the first slice of a route, else the activation from the slice
        before. `target` is the tokens to predict, on the last slice. `batch` is all data of the
        micro-batch, for layers that read it. With `split` the backward is run as I and W, otherwise
        as B.
        """
        assert microbatch not in self._held and microbatch not in self._deferred, f"{microbatch} is in flight"
        if not self.first:
            value = map_tensors(value, _as_leaf)
        # I computes nothing without an input gradient: the first slice leaves the whole backward to W. Compiled code
        # is always split: otherwise it would be compiled twice.
        work: WeightWork | None = deque() if self._config.training.compile or (
            split and self._may_split and not self.first) else None
        with nullcontext() if work is None else deferring_weights(work), collecting_losses() as losses:
            output = self._run_layers(microbatch, value, target, batch)
        added = sum(losses[1:], losses[0]) if losses else None
        scale = self.loss_scale(microbatch) if self.last or losses else 0.0
        if self.last:
            assert isinstance(output, Tensor)
            output, added = output if added is None else output + added, None
            if scale == 0.0:  # it counts nothing; a mean over no tokens is not a number
                output = torch.zeros_like(output)
            self._losses.append(output.detach().double() * scale)
        elif added is not None:
            self._losses.append(added.detach().double() * scale)
            self.has_loss = True
        self._held[microbatch] = _MicrobatchState(value, output, added, work, scale)
        return None if self.last else map_tensors(output, lambda tensor: tensor.detach().contiguous())

    def backward(self, microbatch: Microbatch, gradient: Value | None) -> Value | None:
        """Run B and return the gradient of the slice's input; None on the first slice. The
        `gradient` is that of the activation that `forward` returned; None on the last slice."""
        result = self.backward_input(microbatch, gradient)
        self.backward_weight(microbatch)
        return result

    def backward_input(self, microbatch: Microbatch, gradient: Value | None) -> Value | None:
        """Run I, and return the gradient of the slice's input.

        All tensors that W does not need are freed.

        The first slice returns None and leaves the whole backward to W. `gradient` is that of the
        activation that `forward` returned; for a tuple, the gradients of its floating-point
        tensors; None on the last slice. After a forward without `split`, and for parameters that
        are not used in a matrix product, weight gradients are computed here instead of in W.
        """
        held = self._held.pop(microbatch)
        if self.first:
            self._deferred[microbatch] = deque([partial(_backward_slice, held, gradient, held.scale)])
            if held.work is not None:
                self._deferred[microbatch].append(partial(backward_weight, held.work))
            return None
        _backward_slice(held, gradient, held.scale)
        self._deferred[microbatch] = deque() if held.work is None else held.work
        if isinstance(held.value, Tensor):
            return _gradient_of(held.value)
        return tuple(_gradient_of(tensor) for tensor in held.value if has_gradient(tensor))

    def backward_weight(self, microbatch: Microbatch) -> None:
        """Run W: add the micro-batch's weight gradients to those of the `HeldLayers`."""
        backward_weight(self._deferred.pop(microbatch))

    def take_loss(self) -> Tensor:
        """Return the scaled losses of the micro-batches since the last call, summed. Each is times
        its `loss_scale`; the sum is a float64 scalar on the device."""
        losses, self._losses = self._losses, []
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self._model.device)
        return torch.stack(losses).sum()

    def discard_microbatches(self) -> None:
        """Drop all micro-batches in flight and the losses: the iteration is discarded."""
        self._held.clear()
        self._deferred.clear()
        self._losses.clear()

    def drop_microbatch(self, microbatch: Microbatch) -> None:
        """Drop a micro-batch whose F has been run and whose backward will not be."""
        del self._held[microbatch]

    def count_in_flight(self) -> int:
        """Return the number of stored micro-batches: F has been run, W or B not."""
        return len(self._held) + len(self._deferred)

    def _run_layers(self, microbatch: Microbatch, value: Value, target: Tensor | None, batch: Batch | None) -> Value:
        training, device = self._config.training, self._model.device
        with autocast_context(training, device):
            with restoring_generators(device) as seed_generators:
                for layer, call in self._calls.items():
                    if layer in self._recomputed.layers:
                        value = self._run_recomputed(microbatch, layer, value, batch)
                        continue
                    seed_generators(layer_seed(training.seed, *microbatch, layer))
                    with recomputing_parts(self._recomputed.parts, device):
                        value = call(value, batch)
            if not self.last:
                return value
            assert target is not None, "the last slice needs the target tokens"
            return self._loss_of(value, target, batch)

    def _run_recomputed(self, microbatch: Microbatch, layer: int, value: Value, batch: Batch | None) -> Value:
        """Run a layer of which only the input is stored: its forward is run again."""
        form, call, seed, device = form_of(value), self._calls[layer], self._config.training.seed, self._model.device
        work = weight_work()

        def forward(*tensors: Tensor) -> Value:
            with seeded_for_layer(seed, *microbatch, layer, device), deferring_again(work):
                return call(build_value(form, tensors), batch)

        result: Value = checkpoint(forward, *tensors_of(value), use_reentrant=False, preserve_rng_state=False)
        return result


class WorkerSlices:
    """Runners of the slices of one worker, by number, over the layers that it holds."""

    def __init__(self, holding: HeldLayers, layers: Mapping[int, LayerRange], model: LayeredModel, *,
                 loss_scale: float | LossScale, config: RunConfig, fused: Collection[int] = ()) -> None:
        self.holding = holding
        self.layers = layers
        """Half-open range of the model's layers of each slice, by the slice's number."""
        self.runners = {number: SliceRunner(layer_range, holding.modules, model, loss_scale=loss_scale, config=config,
                                            fused=fused)
                        for number, layer_range in layers.items()}

    def set_loss_scale(self, loss_scale: LossScale) -> None:
        """Set the function that returns the factor of each micro-batch's loss."""
        for runner in self.runners.values():
            runner.loss_scale = loss_scale

    def take_loss(self) -> float:
        """Return this worker's share of the mean loss of the micro-batches since the last call.

        It is the sum of the losses, each times its `loss_scale`, and 0 if none of this worker's
        layers adds to the loss.
        """
        return sum(runner.take_loss().item() for runner in self.runners.values() if runner.has_loss)

    def free_microbatches(self) -> None:
        """Drop all micro-batches in flight, and the losses."""
        for runner in self.runners.values():
            runner.discard_microbatches()

    def discard_iteration(self) -> None:
        """Drop the micro-batches in flight and the losses, and zero the gradients."""
        self.free_microbatches()
        self.holding.zero_gradients()


def _as_leaf(tensor: Tensor) -> Tensor:
    """Return a tensor from another slice as a leaf, with a gradient if possible."""
    return tensor.detach().requires_grad_() if has_gradient(tensor) else tensor.detach()


def _gradient_of(tensor: Tensor) -> Tensor:
    """Return the gradient that a backward has stored in a leaf. Zeros if it has stored none."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()


def _backward_slice(held: _MicrobatchState, gradient: Value | None, loss_scale: float) -> None:
    """Run the backward of a micro-batch from a slice's output and its layers' losses."""
    # The `gradient` is that of the output; None on the last slice, whose output is the loss. The
    # gradient of a loss is `loss_scale`.
    outputs = [tensor for tensor in tensors_of(held.output) if has_gradient(tensor)]
    gradients = [torch.full_like(outputs[0], loss_scale)] if gradient is None else list(tensors_of(gradient))
    if held.added is not None:
        outputs, gradients = [*outputs, held.added], [*gradients, torch.full_like(held.added, loss_scale)]
    # An output needs no gradient if its layers have nothing to train and do not depend on the input.
    pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    if not pairs:
        return
    outputs, gradients = map(list, zip(*pairs, strict=True))
    if held.work is None:
        run_backward(outputs, gradients)
    else:
        backward_input(outputs, gradients, held.work)
