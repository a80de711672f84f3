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
from slipstream.runtime.models.layered_model import (
    LayeredModel,
    autocast_context,
    layer_seed,
    seeded_for_layer,
)
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
from slipstream.runtime.replay.layer_values import (
    Value,
    build_value,
    form_of,
    has_gradient,
    map_tensors,
    tensors_of,
)
from slipstream.runtime.seeds import restoring_generators
from slipstream.runtime.state.held_layers import HeldLayers
from slipstream.runtime.torch_private import run_backward
from slipstream.schedules.layers import LayerRange


class _MicrobatchState(NamedTuple):
    value: Value
    output: Value
    added: Tensor | None
    """Loss that layers of the slice added (`add_to_loss`); None on the last slice."""
    work: WeightWork | None
    """Queue to which I adds the work of W; None if I computes all gradients."""
    scale: float
    """Factor of the micro-batch's loss in its iteration's; 0 if the slice adds none."""


LossScale = Callable[[Microbatch], float]
"""Function that returns the factor of a micro-batch's loss in that of its iteration."""


class SliceRunner:
    """Runs the ops of a range of layers whose parameters belong to a `HeldLayers`.

    Micro-batches may be run in any order. Tensors passed in (activations, gradients) are stored
    until W and not copied, so the caller must not write to them. Returned tensors are contiguous
    and may be sent, but must not be changed.

    Parameters
    ----------
    layers
        Half-open range of the model's layers.
    modules
        Modules by layer, including those of the range.
    loss_scale
        Factor of each micro-batch's loss in that of its iteration, or a function that returns it.
        In training, the factors sum to 1 over an iteration.
    fused
        Layers whose slices' backward must not be divided into I and W.
    """

    def __init__(
        self,
        layers: LayerRange,
        modules: Mapping[int, nn.Module],
        model: LayeredModel,
        *,
        loss_scale: float | LossScale,
        config: RunConfig,
        fused: Collection[int] = (),
    ) -> None:
        self.layers = layers
        self._may_split = not any(layer in fused for layer in range(*layers))
        self.first = layers[0] == 0
        self.last = layers[1] == model.layers
        self.modules = [modules[layer] for layer in range(*layers)]
        """Modules of the slice's layers, in order."""
        self.device = model.device
        self._calls = {
            layer: LayerCall(modules[layer], compiled=config.training.compile)
            for layer in range(*layers)
        }
        calls = self._calls.values()
        takes_batch = any(call.needs_batch for call in calls)
        # Without extra tensors, a layer that may do without the batch does.
        if may_have_extra_tensors(config.training):
            takes_batch = any(call.takes_batch for call in calls)
        self.reads_batch = self.first or self.last or takes_batch
        """True if F needs the data of the micro-batch."""
        self._recomputed = parse_recompute(config.training, model.layers)
        self._loss_of = adapt_loss(model.loss)
        self.loss_scale: LossScale = loss_scale if callable(loss_scale) else lambda _: loss_scale
        self._model = model
        self._config = config
        self._states: dict[Microbatch, _MicrobatchState] = {}
        self._deferred: dict[Microbatch, WeightWork] = {}
        self._losses: list[Tensor] = []
        self.has_loss = self.last
        """True if the slice has ever contributed to the loss; the last slice always does."""

    def forward(
        self,
        microbatch: Microbatch,
        value: Value,
        target: Tensor | None = None,
        batch: Batch | None = None,
        *,
        split: bool,
    ) -> Value | None:
        """Run F, and return the activation to send on; None on the last slice.

        On the first slice of a route, `value` is the tokens, else the activation from the slice
        before. On the last slice, `target` is the tokens to predict, and the loss is kept for
        `take_loss`. `batch` is all data of the micro-batch, for layers that read it. With `split`
        the backward is run as I and W, otherwise as B.
        """
        assert microbatch not in self._states and microbatch not in self._deferred, (
            f"{microbatch} is in flight"
        )
        # A leaf, so that autograd stores the gradient of the slice's input in it.
        if not self.first:
            value = map_tensors(value, _as_leaf)
        # I computes nothing without an input gradient: the first slice leaves the whole backward to
        # W. Compiled code is always split: otherwise it would be compiled twice.
        work: WeightWork | None = None
        if self._config.training.compile or (split and self._may_split and not self.first):
            work = deque()
        with (
            nullcontext() if work is None else deferring_weights(work),
            collecting_losses() as losses,
        ):
            output = self._run_layers(microbatch, value, target, batch)
        # The last slice's output is the loss, to which its layers' losses are added.
        added = sum(losses[1:], losses[0]) if losses else None
        scale = self.loss_scale(microbatch) if self.last or losses else 0.0
        if self.last:
            assert isinstance(output, Tensor)
            if added is not None:
                output, added = output + added, None
            # A micro-batch that counts nothing: a mean over no tokens is not a number.
            if scale == 0.0:
                output = torch.zeros_like(output)
            self._losses.append(output.detach().double() * scale)
        elif added is not None:
            self._losses.append(added.detach().double() * scale)
            self.has_loss = True
        self._states[microbatch] = _MicrobatchState(value, output, added, work, scale)
        if self.last:
            return None
        return map_tensors(output, lambda tensor: tensor.detach().contiguous())

    def backward(self, microbatch: Microbatch, gradient: Value | None) -> Value | None:
        """Run B, and return the gradient of the slice's input; None on the first slice.

        `gradient` is that of the activation that `forward` returned; None on the last slice.
        """
        result = self.backward_input(microbatch, gradient)
        self.backward_weight(microbatch)
        return result

    def backward_input(self, microbatch: Microbatch, gradient: Value | None) -> Value | None:
        """Run I, and return the gradient of the slice's input; None on the first slice.

        `gradient` is that of the activation that `forward` returned, or of a tuple's floating-point
        tensors; None on the last slice. Without `split`, and for parameters that are not used in a
        matrix product, weight gradients are computed here instead of in W. The first slice leaves
        the whole backward to W.
        """
        # What is left for W is kept until then; the rest of the micro-batch is freed here.
        state = self._states.pop(microbatch)
        if self.first:
            self._deferred[microbatch] = deque([partial(_backward_slice, state, gradient)])
            if state.work is not None:
                self._deferred[microbatch].append(partial(backward_weight, state.work))
            return None
        _backward_slice(state, gradient)
        self._deferred[microbatch] = deque() if state.work is None else state.work
        if isinstance(state.value, Tensor):
            return _gradient_of(state.value)
        return tuple(_gradient_of(tensor) for tensor in state.value if has_gradient(tensor))

    def backward_weight(self, microbatch: Microbatch) -> None:
        """Run W: add the micro-batch's weight gradients to those of the `HeldLayers`."""
        backward_weight(self._deferred.pop(microbatch))

    def take_loss(self) -> Tensor:
        """Return the sum of losses since the last call, each times its `loss_scale`.

        It is a float64 scalar on the device; 0 without losses.
        """
        losses, self._losses = self._losses, []
        if not losses:
            return torch.zeros((), dtype=torch.float64, device=self._model.device)
        return torch.stack(losses).sum()

    def discard_microbatches(self) -> None:
        """Drop all micro-batches in flight, and all losses since the last `take_loss`."""
        self._states.clear()
        self._deferred.clear()
        self._losses.clear()

    def drop_microbatch(self, microbatch: Microbatch) -> None:
        """Drop a micro-batch whose F has been run and whose backward will not be."""
        del self._states[microbatch]

    def count_in_flight(self) -> int:
        """Return the number of micro-batches that have run F but not W or B."""
        return len(self._states) + len(self._deferred)

    def _run_layers(
        self, microbatch: Microbatch, value: Value, target: Tensor | None, batch: Batch | None
    ) -> Value:
        training, device = self._config.training, self._model.device
        with autocast_context(training, device):
            # Random numbers depend on the micro-batch and the layer, so it does not matter who runs
            # it.
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

    def _run_recomputed(
        self, microbatch: Microbatch, layer: int, value: Value, batch: Batch | None
    ) -> Value:
        """Run a layer of which only the input is stored; the backward repeats its forward."""
        # The second forward must queue its W where the first did, and draw the same random numbers.
        form, call, work = form_of(value), self._calls[layer], weight_work()
        seed, device = self._config.training.seed, self._model.device

        def forward(*tensors: Tensor) -> Value:
            with seeded_for_layer(seed, *microbatch, layer, device), deferring_again(work):
                return call(build_value(form, tensors), batch)

        result: Value = checkpoint(
            forward, *tensors_of(value), use_reentrant=False, preserve_rng_state=False
        )
        return result


class WorkerSlices:
    """Runners of all slices of one worker, by number, over the layers that it holds.

    `loss_scale` and `fused` are those of `SliceRunner`.
    """

    def __init__(
        self,
        holding: HeldLayers,
        layers: Mapping[int, LayerRange],
        model: LayeredModel,
        *,
        loss_scale: float | LossScale,
        config: RunConfig,
        fused: Collection[int] = (),
    ) -> None:
        self.holding = holding
        self.layers = layers
        """Half-open range of the model's layers of each slice, by the slice's number."""
        # Slices of one worker share its modules, and so its parameters and gradients.
        self.runners = {
            number: SliceRunner(
                layer_range,
                holding.modules,
                model,
                loss_scale=loss_scale,
                config=config,
                fused=fused,
            )
            for number, layer_range in layers.items()
        }

    def set_loss_scale(self, loss_scale: LossScale) -> None:
        """Set the function that returns the factor of each micro-batch's loss."""
        for runner in self.runners.values():
            runner.loss_scale = loss_scale

    def take_loss(self) -> float:
        """Return this worker's part of the mean loss of the micro-batches since the last call.

        Waits for the device.
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
    return tensor.detach().requires_grad_() if has_gradient(tensor) else tensor.detach()


def _gradient_of(tensor: Tensor) -> Tensor:
    """Return the gradient that a backward has stored in a leaf tensor; zeros if none."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()


def _backward_slice(state: _MicrobatchState, gradient: Value | None) -> None:
    outputs = [tensor for tensor in tensors_of(state.output) if has_gradient(tensor)]
    # The gradient of a loss is its scale. The last slice's output is the loss.
    if gradient is None:
        gradients = [torch.full_like(outputs[0], state.scale)]
    else:
        gradients = list(tensors_of(gradient))
    if state.added is not None:
        outputs.append(state.added)
        gradients.append(torch.full_like(state.added, state.scale))
    # An output needs no gradient if its layers have nothing to train and do not depend on the
    # input.
    pairs = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
    if not pairs:
        return
    outputs, gradients = map(list, zip(*pairs, strict=True))
    if state.work is None:
        run_backward(outputs, gradients)
    else:
        backward_input(outputs, gradients, state.work)
