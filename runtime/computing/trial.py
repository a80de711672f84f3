"""Try a user's layers before the start: whether they repeat, and run as autograd does.

Shapes do not show what a layer does to numbers (`runtime.computing.forms`). One micro-batch is
therefore run through each kind of layer, in this process, on the CPU: once as workers run it, and
once as plainly as autograd does, and what both give is compared.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor, nn

from slipstream.runtime.computing.slices import SliceRunner
from slipstream.runtime.config import ConfigError, RunConfig
from slipstream.runtime.errors import first_line
from slipstream.runtime.models.calling import Batch, LayerCall
from slipstream.runtime.models.distributed_tensors import with_local_parameters
from slipstream.runtime.models.layered_model import (
    LayeredModel,
    autocast_context,
    build_model,
    parameter_dtype,
    seeded_for_layer,
)
from slipstream.runtime.models.recomputing import parse_recompute
from slipstream.runtime.object_reference import is_reference
from slipstream.runtime.replay.layer_values import Value, has_gradient, map_tensors, tensors_of
from slipstream.runtime.replay.microbatch import Microbatch
from slipstream.runtime.seeds import restoring_generators
from slipstream.runtime.state.checksum import parameter_digest
from slipstream.runtime.state.held_layers import build_on_device
from slipstream.runtime.torch_private import count_changes

MAX_FLOPS = 2e12
"""Most operations of a micro-batch with which layers are tried; they take a CPU seconds."""
_ARITHMETIC = {"float64": torch.float64, "float32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes in which products are computed, by `[training] dtype`."""
_STATE_REMEDY = (
    "expected none, as each worker would have its own: use GroupNorm, LayerNorm, or BatchNorm with "
    "track_running_stats=False"
)


@dataclass(frozen=True, slots=True)
class _Gradients:
    """Gradients of a layer's input and parameters, by name, where autograd gives them."""

    tensors: Mapping[str, Tensor]
    arithmetic: torch.dtype

    def differ_from(self, other: "_Gradients") -> str | None:
        """Return the first name whose gradients differ beyond rounding; None if none do."""
        tolerance = torch.finfo(self.arithmetic).eps ** 0.5
        for name in sorted({*self.tensors, *other.tensors}):
            mine, theirs = self.tensors.get(name), other.tensors.get(name)
            if mine is None or theirs is None:
                return name
            # The tolerance is relative to the largest finite gradient of the tensor.
            scale = 0.0
            if theirs.numel():
                scale = float(theirs.double().abs().nan_to_num(0.0, 0.0, 0.0).max())
            if not torch.allclose(
                mine.double(),
                theirs.double(),
                rtol=tolerance,
                atol=tolerance * scale,
                equal_nan=True,
            ):
                return name
        return None


def try_layers(
    config: RunConfig,
    batch: Batch,
    begins: Collection[int],
    flops: float,
    notify: Callable[[str], None],
) -> frozenset[int]:
    """Run a micro-batch through a user's layers; return those that cannot divide their backward.

    `begins` are the layers with which stages begin, `flops` the operations of a forward and its
    backward. Models that come with the package or a library are not tried, and neither are those
    whose workers have several ranks. `notify` gets a text if layers are not tried because they need
    a GPU or are too large for a CPU, or if their backward is not divided. Raises ConfigError if a
    layer fails and the job trains on the CPU or this machine has no GPU, if a forward changes the
    layer's state, or if a layer cannot be computed again though the job asks for it.
    """
    name, training = config.model.name, config.training
    if (
        config.model.hugging_face is not None
        or config.model.torchtitan is not None
        or not is_reference(name)
        or training.tensor_parallel > 1
    ):
        return frozenset()
    if flops > MAX_FLOPS:
        notify(
            f"model.name is {name!r}: a micro-batch takes {flops / 1e12:.1f} TFLOP, so the layers "
            "are not tried on the CPU before the start: gradients and buffers are not compared"
        )
        return frozenset()
    # Layers are run in turn on the CPU: each takes the output of the layer before.
    model = build_model(config.model, training.seed, parameter_dtype(training), torch.device("cpu"))
    trial = _Trial(model, config, batch, begins)
    value: Value = batch[0]
    for layer in range(model.layers):
        try:
            value = trial.try_layer(layer, value)
        except ConfigError:
            raise
        except Exception as error:  # the user's code may raise anything
            what = f"layer {layer} cannot be run: {type(error).__name__}: {first_line(error)}"
            if training.device == "cpu" or not torch.cuda.is_available():
                raise ConfigError(f"model.name is {name!r}: {what}") from error
            notify(
                f"model.name is {name!r}: {what}; it and the layers after it are not tried on the "
                "CPU before the start"
            )
            break
    for text in trial.notes:
        notify(f"model.name is {name!r}: {text}")
    return frozenset(trial.fused)


class _Trial:
    def __init__(
        self, model: LayeredModel, config: RunConfig, batch: Batch, begins: Collection[int]
    ) -> None:
        self._model, self._config, self._batch, self._begins = model, config, batch, begins
        self._recomputed = parse_recompute(config.training, model.layers)
        self._verdicts: dict[Hashable, bool] = {}
        """For each kind of layer, whether its backward is not divided."""
        self.fused = set[int]()
        """Layers whose backward is not divided."""
        self.notes: list[str] = []

    def try_layer(self, layer: int, value: Value) -> Value:
        """Try a layer, unless its kind has been tried, and return its output."""
        # Layers of one kind do the same, wherever they are in the model; but the first of a stage
        # has no layer before it whose output it could change.
        module = build_on_device(self._model, layer)
        kind = (
            type(module),
            repr(module),
            tuple((name, tensor.shape) for name, tensor in module.state_dict().items()),
            layer in self._recomputed.layers,
            layer in self._begins,
        )
        is_new = kind not in self._verdicts
        output = self._run_forward(layer, module, value, check_state=is_new)
        if is_new:
            self._verdicts[kind] = layer > 0 and self._must_be_fused(layer, module, value)
        if self._verdicts[kind]:
            self.fused.add(layer)
        return output

    def _run_forward(
        self, layer: int, module: nn.Module, value: Value, *, check_state: bool
    ) -> Value:
        training, before = self._config.training, dict[str, Tensor]()
        if check_state:
            before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        with (
            torch.no_grad(),
            seeded_for_layer(training.seed, *Microbatch(0, 0, 0), layer, self._model.device),
            autocast_context(training, self._model.device),
        ):
            output = LayerCall(module)(map_tensors(value, torch.clone), self._batch)
        # State that a forward changes would differ between workers, so it is refused.
        after = module.state_dict() if before else {}
        for name, tensor in before.items():
            if not torch.equal(tensor.nan_to_num(), after[name].nan_to_num()):
                raise ConfigError(
                    f"model.name is {self._config.model.name!r}: the forward of layer {layer} "
                    f"({type(module).__name__}) changes its {name!r}, as running statistics do; "
                    f"{_STATE_REMEDY}"
                )
            after[name].copy_(tensor)
        return output

    def _must_be_fused(self, layer: int, module: nn.Module, value: Value) -> bool:
        name = f"layer {layer} ({type(module).__name__})"
        # What autograd gives without anything of the runtime's: no recomputing, no division.
        plain = replace(self._config, training=replace(self._config.training, recompute="none"))
        expected = self._find_gradients(plain, layer, module, value, split=False)
        differs = self._describe_difference(
            self._config, expected, layer, module, value, split=True
        )
        if differs is None:
            return False
        # An undivided backward differs, too, if the layer cannot be computed again.
        if again := self._describe_difference(
            self._config, expected, layer, module, value, split=False
        ):
            raise ConfigError(
                f"training.recompute is {self._config.training.recompute!r}: {name} cannot be "
                f"computed again: {again}; expected a layer that changes neither its input nor its "
                "state, or other layers"
            )
        self.notes.append(
            f"{name} is not divided into I and W, and neither are layers that run in one op with "
            f"it: {differs}"
        )
        return True

    def _describe_difference(
        self,
        config: RunConfig,
        expected: _Gradients,
        layer: int,
        module: nn.Module,
        value: Value,
        *,
        split: bool,
    ) -> str | None:
        """Say how a layer's gradients differ from `expected`, or fail; None if only by rounding."""
        try:
            gradients = self._find_gradients(config, layer, module, value, split=split)
            name = gradients.differ_from(expected)
        except Exception as error:  # the user's code may raise anything
            return f"{type(error).__name__}: {first_line(error)}"
        return None if name is None else f"the gradient of {name} is not that of a plain backward"

    def _find_gradients(
        self, config: RunConfig, layer: int, module: nn.Module, value: Value, *, split: bool
    ) -> _Gradients:
        """Return the gradients of a layer that is run as workers run it."""
        layers, modules = (layer, layer + 1), {layer: module}
        if layer not in self._begins:  # as behind other layers, whose output it may change
            layers, modules = (layer - 1, layer + 1), {layer - 1: _Copier(), layer: module}
        # As if it were not the first slice, so that the gradient of its input is computed, too.
        runner = SliceRunner(layers, modules, self._model, loss_scale=1.0, config=config)
        runner.first = False
        before = _zero_gradients(module)
        name = Microbatch(0, 0, 0)
        output = runner.forward(
            name, map_tensors(value, torch.clone), self._batch[1], self._batch, split=split
        )
        gradient = None if output is None else _draw_gradient(output)
        of_input = runner.backward_input(name, gradient)
        runner.backward_weight(name)
        # A gradient that is still the zeros from before has not been computed.
        tensors = {
            f"parameter {name!r}": parameter.grad.clone()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None and not before[name].is_unchanged(parameter.grad)
        }
        assert of_input is not None
        tensors |= {f"input {index}": tensor for index, tensor in enumerate(tensors_of(of_input))}
        return _Gradients(tensors, _ARITHMETIC[config.training.dtype])


class _ZeroGradient(NamedTuple):
    gradient: Tensor
    changes: int
    """Count of its changes (`count_changes`) when it was zero."""

    def is_unchanged(self, gradient: Tensor) -> bool:
        """Return whether `gradient` is the stored tensor, and is still zero."""
        return gradient is self.gradient and count_changes(gradient) == self.changes


def _zero_gradients(module: nn.Module) -> dict[str, _ZeroGradient]:
    gradients = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            gradients[name] = _ZeroGradient(parameter.grad, count_changes(parameter.grad))
    return gradients


class _Copier(nn.Module):
    """Layer that copies its input, so that the next one may write to it."""

    def forward(self, value: Any) -> Value:
        return map_tensors(value, torch.clone)


def _draw_gradient(output: Value) -> Value:
    generator = torch.Generator().manual_seed(0)
    drawn = tuple(
        torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for tensor in tensors_of(output)
        if has_gradient(tensor)
    )
    return drawn[0] if isinstance(output, Tensor) else drawn


MAX_ELEMENTS = 2**26
"""Largest number of elements of all layers that are built twice.

At least one layer is built, however large.
"""


def require_repeatable_layers(
    model: LayeredModel, config: RunConfig, elements: Sequence[int]
) -> None:
    """Raise ConfigError if a layer of the user's model differs when it is built again.

    The smallest layers are built, twice each, up to `MAX_ELEMENTS` elements together; `elements`
    has each layer's number of elements. Models of this package and of libraries are not tried:
    their layers repeat.
    """
    if (
        config.model.hugging_face is not None
        or config.model.torchtitan is not None
        or not is_reference(config.model.name)
    ):
        return
    # The smallest first, so that as many as possible are tried.
    total = 0
    filled = [layer for layer, count in enumerate(elements) if count]
    for layer in sorted(filled, key=lambda layer: elements[layer]):
        total += elements[layer]
        if total - elements[layer] > 0 and total > MAX_ELEMENTS:
            break
        if _digest_layer(model, layer, 1) != _digest_layer(model, layer, 2):
            raise ConfigError(
                f"model.name is {config.model.name!r}: layer {layer} has other initial parameters "
                "when it is built again; expected the same: draw them within "
                "`seeded(derive_seed(..., seed, layer))`"
            )


def _digest_layer(model: LayeredModel, layer: int, state: int) -> str:
    # Other states of the generators show whether the layer draws from its own seed.
    with restoring_generators() as seed_generators, torch.no_grad():
        seed_generators(state)
        module = with_local_parameters(model.build(layer))
        return parameter_digest({**dict(module.named_parameters()), **dict(module.named_buffers())})
