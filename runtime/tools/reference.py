"""Run the same training in one process, as plainly as torch allows.

The runtime must reproduce the result. This module shares the model, the text and the optimizer with
the runtime, but none of the code that runs stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from slipstream.runtime.config import RunConfig, TrainingConfig
from slipstream.runtime.data.data import (
    Data,
    Microbatch,
    is_evaluated,
    load_data,
    load_validation_data,
)
from slipstream.runtime.data.loss_weights import LossWeights
from slipstream.runtime.models.calling import LayerCall, adapt_loss, collecting_losses, move_batch
from slipstream.runtime.models.layered_model import (
    LayeredModel,
    autocast_context,
    build_model,
    parameter_dtype,
    seeded_for_layer,
)
from slipstream.runtime.models.sharing import sharing_of
from slipstream.runtime.replay.layer_values import Value
from slipstream.runtime.state.checksum import parameter_digest
from slipstream.runtime.state.parameter_groups import build_groups, rules_of
from slipstream.runtime.state.step_factors import clip_factor, sum_of_squares
from slipstream.runtime.state.undoable_steps import OptimizerSteps

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """Result of training in one plain process, with which a run is compared."""

    losses: list[float]
    """Mean loss of each iteration's micro-batches, computed before the step."""
    parameters: dict[str, Tensor]
    """Parameters after the last iteration, on the CPU, by "layer.name"."""
    digest: str
    """Hash of all parameters after the last iteration (`parameter_digest`)."""
    evaluations: dict[int, float]
    """Loss of the validation data after each iteration that was followed by an evaluation."""
    masters: dict[str, Tensor] = field(default_factory=dict)
    """Float32 master weights by "layer.name"; empty if the training has none."""


def reference_run(
    config: RunConfig, microbatches: Sequence[int], iterations: int, device: torch.device = CPU
) -> ReferenceResult:
    """Train the whole model in this process on the micro-batches of all pipelines.

    `microbatches` has the number of micro-batches of each pipeline. Torch has the configured number
    of threads meanwhile. Raises ConfigError if the model or the text cannot be loaded.
    """
    # As many threads as a worker has: with one for each core, threads would mostly wait for each
    # other in the ops of a small model.
    before = torch.get_num_threads()
    torch.set_num_threads(config.training.threads)
    try:
        return _train_model(config, microbatches, iterations, device)
    finally:
        torch.set_num_threads(before)


def _train_model(
    config: RunConfig, microbatches: Sequence[int], iterations: int, device: torch.device
) -> ReferenceResult:
    # Build the whole model, its optimizer and its data.
    training = config.training
    model = build_model(config.model, training.seed, parameter_dtype(training), device)
    corpus = load_data(config, microbatches)
    layers = nn.ModuleList(model.build(layer).to(device) for layer in range(model.layers))
    sharing = sharing_of(model)
    sharing.tie_parameters(dict(enumerate(layers)))
    optimizer = PlainSteps(layers, training)
    validation = load_validation_data(config, microbatches)
    weights = LossWeights(corpus, training, microbatches)
    losses, evaluations = [], {}
    for iteration in range(iterations):
        # Accumulate the gradients of all micro-batches.
        total = 0.0
        for microbatch in _list_microbatches(iteration, microbatches):
            loss = _compute_loss(config, model, layers, corpus, microbatch)
            scaled = loss * weights(microbatch)
            scaled.backward()  # type: ignore[no-untyped-call]
            total += scaled.item()

        # Clip and step.
        factor = clip_factor(optimizer.compute_squares(), training)
        if factor is not None:
            optimizer.step(iteration, factor)
        layers.zero_grad()
        losses.append(total)

        # Evaluate, by parameters after the step.
        if validation is not None and is_evaluated(training, iteration):
            layers.eval()
            with torch.no_grad():
                rounds = training.evaluation_iterations
                validation_weights = LossWeights(validation, training, microbatches, rounds)
                parts = []
                for number in range(rounds):
                    for microbatch in _list_microbatches(number, microbatches):
                        loss = _compute_loss(config, model, layers, validation, microbatch)
                        parts.append(validation_weights(microbatch) * loss.item())
                evaluations[iteration] = sum(parts) / rounds
            layers.train()
    parameters = {name: parameter.detach().cpu() for name, parameter in layers.named_parameters()}
    return ReferenceResult(
        losses,
        parameters,
        parameter_digest(parameters),
        evaluations,
        optimizer.get_master_weights() if training.master_weights else {},
    )


def _list_microbatches(iteration: int, microbatches: Sequence[int]) -> list[Microbatch]:
    return [
        Microbatch(iteration, pipeline, index)
        for pipeline, count in enumerate(microbatches)
        for index in range(count)
    ]


class PlainSteps(OptimizerSteps):
    """Optimizer of a model's parameters, or of the float32 masters of bfloat16 ones."""

    def __init__(self, layers: nn.ModuleList, config: TrainingConfig) -> None:
        last, rules = len(layers) - 1, rules_of(dict(enumerate(layers)))
        self._ruled = rules.keys()
        # Each parameter, with the master by which it is stepped, or itself.
        self._stepped_by: dict[str, tuple[nn.Parameter, nn.Parameter]] = {}
        for name, parameter in layers.named_parameters():
            if not parameter.requires_grad:
                continue
            master = parameter
            if config.master_weights:
                master = nn.Parameter(parameter.detach().float())
            self._stepped_by[name] = (parameter, master)
        stepped = dict(self._stepped_by.values())

        # Gradients of parameters with masters are accumulated in the configured dtype.
        if config.master_weights:
            dtype = torch.float32 if config.reduce_dtype == "float32" else torch.bfloat16
            for parameter in self._without_rules():
                parameter.grad_dtype = dtype

        # The groups are those of the model's parameters, with masters in their place.
        parameters = {name: parameter for name, (parameter, _) in self._stepped_by.items()}
        groups = []
        for group in build_groups(parameters, config, last, rules):
            masters = [stepped[parameter] for parameter in group["params"]]
            groups.append({**group, "params": masters})
        super().__init__(groups, config)

    def compute_squares(self) -> list[float]:
        """Return each gradient's sum of squares, except for parameters with a step rule."""
        return [
            sum_of_squares(parameter.grad).item()
            for parameter in self._without_rules()
            if parameter.grad is not None
        ]

    def _without_rules(self) -> list[nn.Parameter]:
        return [
            parameter
            for name, (parameter, _) in self._stepped_by.items()
            if name not in self._ruled
        ]

    def step(self, iteration: int, factor: float) -> None:
        """Step all parameters by their gradients times `factor`, at an iteration's learning rate.

        A parameter with a step rule is stepped by the rule, with its unscaled gradient.
        """
        self._set_rates(iteration)
        for name, (parameter, stepped) in self._stepped_by.items():
            scale = 1.0 if name in self._ruled else factor
            stepped.grad = (
                None if parameter.grad is None else parameter.grad.to(stepped.dtype) * scale
            )
        self._apply_update()
        # Masters are rounded to the parameters' dtype; without masters this copies a tensor to
        # itself.
        with torch.no_grad():
            for parameter, stepped in self._stepped_by.values():
                parameter.copy_(stepped)

    def get_master_weights(self) -> dict[str, Tensor]:
        """Return the weights that the optimizer steps, by "layer.name": masters, if it has any."""
        return {name: stepped.detach() for name, (_, stepped) in self._stepped_by.items()}


def _compute_loss(
    config: RunConfig,
    model: LayeredModel,
    layers: nn.ModuleList,
    corpus: Data,
    microbatch: Microbatch,
) -> Tensor:
    training = config.training
    batch = move_batch(corpus.batch(microbatch, training.batch, config.model.context), model.device)
    # The same random numbers as in the runtime, by micro-batch and layer.
    value: Value = batch[0]
    with autocast_context(training, model.device), collecting_losses() as added:
        for index, layer in enumerate(layers):
            with seeded_for_layer(training.seed, *microbatch, index, model.device):
                value = LayerCall(layer)(value, batch)
        return sum(added, adapt_loss(model.loss)(value, batch[1], batch))
