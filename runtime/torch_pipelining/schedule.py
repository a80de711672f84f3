"""Run an iteration around dead workers: stages and their schedule, as a training loop uses them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from slipstream.runtime.torch_pipelining.inside_torch import (
    Loss,
    RoutedRuntime,
    RoutedStage,
    finish_shards,
    reset_shards,
    reshards_after_forward,
)
from slipstream.runtime.torch_pipelining.place import Form, Place
from slipstream.runtime.torch_pipelining.routes import Sample
from slipstream.runtime.torch_pipelining.state import local

_FORMS = msgspec.json.Decoder(list[tuple[tuple[int, ...], str, bool]])


class ReroutedStage(RoutedStage):
    """A stage of the model on this worker, around any module.

    The module may be sharded inside the worker (FSDP2, DTensor), or compiled. Raises ValueError for
    one that would lose gradients or cannot be run so.
    """

    def __init__(self, module: nn.Module, stage: int, place: Place,
                 device: str | torch.device = "cpu") -> None:
        held = place.routes.stages_of(place.worker)
        if stage not in held:
            raise ValueError(f"worker {place.worker} holds stages {', '.join(map(str, held))}, not "
                             f"{stage}; expected one of these, by a schedule in which workers keep "
                             "their roles")
        if place.routes.has_split_backward:
            _require_splittable(module, stage)
        _require_own_shards(module, stage, place)
        reset_shards(module)
        super().__init__(module, stage, place, torch.device(device))


class ReroutedSchedule:
    """The part of an iteration that this worker runs.

    Attributes
    ----------
    samples
        Micro-batches that this worker runs at any of its stages, in the order of their forwards:
        `step` takes a value for each.

    Parameters
    ----------
    stages
        All stages that this worker holds.
    loss_fn
        Loss of a micro-batch, from the last stage's output and a target.
    scale_grads
        True if losses are means: gradients are then divided by the number of all micro-batches.
    """

    def __init__(self, stages: Sequence[ReroutedStage], loss_fn: Loss, *,
                 scale_grads: bool = True) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self._place = place = stages[0].place
        held = place.routes.stages_of(place.worker)
        if tuple(sorted(self._stages)) != held:
            raise ValueError(f"worker {place.worker} holds stages {', '.join(map(str, held))}; got "
                             f"{', '.join(map(str, sorted(self._stages)))}: expected all of them")
        self._numbers = place.routes.numbers_of(place.worker)
        self.samples: tuple[Sample, ...] = tuple(map(place.routes.sample_of, self._numbers))
        self._factor = 1 / place.routes.microbatches if scale_grads else 1.0
        self._examples: tuple[tuple[Any, ...], Mapping[str, Any]] = (), {}
        """Arguments of a micro-batch, by which forms are found."""
        self._runtime = RoutedRuntime(stages, place.routes.rows[place.worker],
                                      place.routes.microbatches, loss_fn, self._reduce)

    def step(self, *, arg_mbs: Sequence[Any] | None = None,
             kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
             target_mbs: Sequence[Any] | None = None, losses: list[Tensor] | None = None) -> None:
        """Run one iteration; then `.grad` of all parameters are the gradients of all micro-batches.

        Gradients are added to what `.grad` has, and the sum is summed over workers: begin with
        `optimizer.zero_grad()`.

        Args:
            arg_mbs: Input of the first stage for each of `samples`, a tensor or a tuple; unused on
                workers without the first stage.
            kwarg_mbs: Keyword arguments of all stages for each of `samples`.
            target_mbs: Second argument of the loss for each of `samples`; unused without the last
                stage.
            losses: List to which the losses that this worker computes are appended, in order.

        Raises CommunicationError if another worker has died; then call `Place.recover`.
        """
        args = self._spread("arg_mbs", arg_mbs, ())
        args = [value if isinstance(value, tuple) else (value,) for value in args]
        kwargs = [dict(value) for value in self._spread("kwarg_mbs", kwarg_mbs, {})]
        self._examples = next(filter(None, args), ()), next(filter(None, kwargs), {})
        self._learn_forms()
        with self._place.mates.failing_together():
            self._runtime.run(args, kwargs, self._spread("target_mbs", target_mbs, None))
        if losses is not None:
            losses += [self._runtime.loss_of[number].detach() for number in self._numbers
                       if number in self._runtime.loss_of]

    def step_samples(self, sample_of: Callable[[int, int], tuple[Any, Any]],
                     losses: list[Tensor] | None = None) -> None:
        """Run one iteration, as `step` does, on what a function returns for each of `samples`.

        `sample_of` takes the pipeline and the number there, and returns input and target.
        """
        data = [sample_of(*sample) for sample in self.samples]
        self.step(arg_mbs=[value for value, _ in data], target_mbs=[target for _, target in data],
                  losses=losses)

    def grad_norm(self) -> float:
        """Return the 2-norm of all gradients of the model; all workers call this."""
        place = self._place
        own = [stage for number, stage in self._stages.items()
               if place.routes.holders(number)[0] == place.worker]
        parameters = [parameter for stage in own for parameter in stage.submod.parameters()]
        squares = sum(_square(parameter, place.ranks) for parameter in parameters
                      if parameter.grad is not None)
        return float(place.sum_over_all(float(squares)) ** 0.5)

    def _spread(self, name: str, values: Sequence[Any] | None, missing: Any) -> list[Any]:
        """Return a list of the values of all micro-batches, by number, from those of `samples`."""
        spread = [missing] * self._place.routes.microbatches
        if values is None:
            return spread
        if len(values) != len(self._numbers):
            raise ValueError(f"{name} has {len(values)} values; expected {len(self._numbers)}, one "
                             "for each of `samples`")
        for number, value in zip(self._numbers, values, strict=True):
            spread[number] = value
        return spread

    def _reduce(self, stage: RoutedStage) -> None:
        """Sum the gradients of a stage over its holders.

        A parameter without one on all of them keeps none.
        """
        finish_shards(stage)
        parameters = [parameter for parameter in stage.submod.parameters()
                      if parameter.requires_grad]
        counts = torch.tensor([float(parameter.grad is not None) for parameter in parameters],
                              device=stage.device)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [local(parameter.grad) for parameter in parameters
                     if parameter.grad is not None]
        with self._place.mates.deferring_errors():
            self._place.session.sum_over_sharers(f"stage {stage.stage_index}", [counts, *gradients])
        for parameter, gradient, count in zip(parameters, gradients, counts.tolist(), strict=True):
            gradient.mul_(self._factor)
            if not count:
                parameter.grad = None

    def _learn_forms(self) -> None:
        """Learn the tensors that pass between stages from those who hold them."""
        for number, stage in sorted(self._stages.items()):
            if stage.forms_before is None:
                stage.set_forms(self._forms_at(number), self._forms_at(number + 1))

    def _forms_at(self, boundary: int) -> tuple[Form, ...]:
        """Return the tensors that pass before a stage.

        One holder of the stage before finds and publishes them.
        """
        place = self._place
        keys = [f"forms before stage {boundary} on rank {rank}" for rank in range(place.ranks)]
        if boundary not in place.forms:
            before = max(boundary - 1, 0)
            # a finder that died may have told some ranks, and all have to run the forward together
            if place.worker == self._finder(before) and not all(map(place.knows, keys)):
                forms = self._find_forms(boundary)
                told = [(shape, str(dtype), grad) for shape, dtype, grad in forms]
                place.publish(keys[place.rank], msgspec.json.encode(told).decode())
            with place.mates.failing_together():
                text = place.read(keys[place.rank])
            place.forms[boundary] = tuple(
                (shape, getattr(torch, dtype.removeprefix("torch.")), grad)
                for shape, dtype, grad in _FORMS.decode(text))
        return place.forms[boundary]

    def _finder(self, stage: int) -> Any:
        """Return the holder that finds the forms behind a stage.

        The first does, which at the model's beginning also has to have an input.
        """
        routes = self._place.routes
        return next(worker for worker in routes.holders(stage)
                    if stage or any((cell.stage, cell.action) == (0, "F")
                                    for cell in routes.rows[worker]))

    def _find_forms(self, boundary: int) -> list[Form]:
        """Return the forms of the model's input, or of the output before a boundary."""
        example, kwargs = self._examples
        if boundary == 0:
            return [(tuple(tensor.shape), tensor.dtype, False) for tensor in example]
        stage = self._stages[boundary - 1]
        if boundary > 1:
            example = tuple(torch.zeros(shape, dtype=dtype, device=stage.device, requires_grad=grad)
                            for shape, dtype, grad in self._forms_at(boundary - 1))
        before = {name: buffer.clone() for name, buffer in stage.submod.named_buffers()}
        with torch.random.fork_rng(devices=[stage.device] if stage.device.type == "cuda" else []):
            output = stage.submod(*example, **kwargs)
        with torch.no_grad():  # this forward is none of the iteration's, and others do without it
            for name, buffer in stage.submod.named_buffers():
                if name in before:
                    buffer.copy_(before[name])
        outputs = output if isinstance(output, tuple | list) else (output,)
        if any(isinstance(tensor, DTensor) for tensor in outputs):
            raise ValueError(f"stage {boundary - 1} returns a DTensor; expected a tensor of this "
                             "rank: give its last layer use_local_output=True, or return "
                             "tensor.to_local()")
        forms = [(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in outputs]
        del output, outputs
        reset_shards(stage.submod)
        return forms


def _square(parameter: nn.Parameter, ranks: int) -> float:
    """Return the square of a gradient's norm, divided among the ranks that have the same part."""
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient.detach().double().square().sum().item() / ranks
    if any(placement.is_partial() for placement in gradient.placements):
        sharding = parameter.placements  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=sharding)
    sharded = 1
    for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
        sharded *= 1 if placement.is_replicate() else size  # FSDP's shards of tensor parallelism's are no `Shard`
    return gradient.to_local().detach().double().square().sum().item() * sharded / ranks


def _require_splittable(module: nn.Module, stage: int) -> None:
    """Raise ValueError for a module whose backward torch cannot split into I and W."""
    if reshards_after_forward(module):
        raise ValueError(f"stage {stage} drops its gathered parameters after each forward, and "
                         "torch's split backward then loses gradients; expected fully_shard(..., "
                         "reshard_after_forward=False), or a plan with --backward fused")
    if any(_is_compiled(part) for part in module.modules()):
        raise ValueError(f"stage {stage} is compiled, and compiled code cannot be split into I and "
                         "W: each would cost the whole backward; expected a plan with --backward "
                         "fused")


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _require_own_shards(module: nn.Module, stage: int, place: Place) -> None:
    """Raise ValueError for shards that span workers, and for those of parts only."""
    for name, parameter in _shards(module):
        if parameter.device_mesh.size() > place.ranks:
            raise ValueError(f"parameter {name} of stage {stage} is sharded over "
                             f"{parameter.device_mesh.size()} processes, a worker has "
                             f"{place.ranks}; expected a mesh inside the worker: let Place.take "
                             "initialise torch.distributed, or give it inner=")
    has_sharded_parts = any(isinstance(part, FSDPModule) for part in module.modules())
    if has_sharded_parts and not isinstance(module, FSDPModule):
        raise ValueError(f"stage {stage} has parts under fully_shard, but is not itself; expected "
                         "fully_shard of the whole stage as well, so that torch's pipeline "
                         "runtime gathers and sums")


def _shards(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from ((name, parameter) for name, parameter in module.named_parameters()
                if isinstance(parameter, DTensor))
