"""Run iterations of a schedule that avoids dead workers, on this worker's stages."""

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
from slipstream.schedules.schedule import Worker

_FORMS = msgspec.json.Decoder(list[tuple[tuple[int, ...], str, bool]])


class ReroutedStage(RoutedStage):
    """Stage of the model on this worker, which runs any `module`.

    The module may be sharded inside the worker (FSDP2, DTensor), or compiled. Raises ValueError for
    a stage that this worker does not hold, and for a module that would lose gradients or cannot be
    run as a stage here. What FSDP keeps of an earlier iteration is dropped.
    """

    def __init__(
        self, module: nn.Module, stage: int, place: Place, device: str | torch.device = "cpu"
    ) -> None:
        own_stages = place.routes.stages_of(place.worker)
        if stage not in own_stages:
            raise ValueError(
                f"worker {place.worker} holds stages {', '.join(map(str, own_stages))}, not "
                f"{stage}; expected one of these, by a schedule in which workers keep "
                "their roles"
            )
        if place.routes.has_split_backward:
            _require_splittable(module, stage)
        _require_own_shards(module, stage, place)
        reset_shards(module)
        super().__init__(module, stage, place, torch.device(device))


class ReroutedSchedule:
    """The part of each iteration that this worker runs.

    Raises ValueError unless `stages` are all that the worker holds.

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
        Function that returns the loss of a micro-batch, from the last stage's output and a target.
    scale_grads
        True if losses are means: gradients are then divided by the number of all micro-batches.
    """

    def __init__(
        self, stages: Sequence[ReroutedStage], loss_fn: Loss, *, scale_grads: bool = True
    ) -> None:
        self._stages = {stage.stage_index: stage for stage in stages}
        self._place = place = stages[0].place
        # A stage that is missing would be waited for by other workers.
        own_stages = place.routes.stages_of(place.worker)
        if tuple(sorted(self._stages)) != own_stages:
            raise ValueError(
                f"worker {place.worker} holds stages {', '.join(map(str, own_stages))}; got "
                f"{', '.join(map(str, sorted(self._stages)))}: expected all of them"
            )
        self._numbers = place.routes.numbers_of(place.worker)
        self.samples: tuple[Sample, ...] = tuple(map(place.routes.sample_of, self._numbers))
        self._factor = 1 / place.routes.microbatches if scale_grads else 1.0
        self._examples: tuple[tuple[Any, ...], Mapping[str, Any]] = (), {}
        """Arguments of one micro-batch, to find the forms of tensors with."""
        self._runtime = RoutedRuntime(
            stages,
            place.routes.rows[place.worker],
            place.routes.microbatches,
            loss_fn,
            self._reduce,
        )

    def step(
        self,
        *,
        arg_mbs: Sequence[Any] | None = None,
        kwarg_mbs: Sequence[Mapping[str, Any]] | None = None,
        target_mbs: Sequence[Any] | None = None,
        losses: list[Tensor] | None = None,
    ) -> None:
        """Run one iteration, after which `.grad` has the gradients of all micro-batches.

        Gradients are added to what `.grad` had before, and the result is summed over workers: call
        `optimizer.zero_grad()` first. Raises CommunicationError if another worker has died; then
        call `Place.recover`. Raises ValueError if a list has not one value for each of `samples`,
        or a stage returns a DTensor, or other tensors than for the first micro-batch.

        Parameters
        ----------
        arg_mbs
            Input of the first stage for each of `samples`, a tensor or a tuple; unused on workers
            without the first stage.
        kwarg_mbs
            Keyword arguments of all stages for each of `samples`; None: no arguments.
        target_mbs
            Second argument of the loss for each of `samples`; unused without the last stage.
        losses
            List to which this worker's losses are appended, in order; None: they are dropped.
        """
        args = list(map(_as_tuple, self._spread("arg_mbs", arg_mbs, ())))
        kwargs = [dict(value) for value in self._spread("kwarg_mbs", kwarg_mbs, {})]
        self._examples = next(filter(None, args), ()), next(filter(None, kwargs), {})
        self._learn_forms()
        # All ranks of a worker raise an error together, none before the others.
        with self._place.mates.failing_together():
            self._runtime.run(args, kwargs, self._spread("target_mbs", target_mbs, None))
        if losses is not None:
            losses += [
                self._runtime.loss_of[number].detach()
                for number in self._numbers
                if number in self._runtime.loss_of
            ]

    def step_samples(
        self, sample_of: Callable[[int, int], tuple[Any, Any]], losses: list[Tensor] | None = None
    ) -> None:
        """Run one iteration, as `step` does, on data that a function returns.

        `sample_of` is called for each of `samples`, with the pipeline and the micro-batch's number
        there; it returns input and target.
        """
        data = [sample_of(*sample) for sample in self.samples]
        self.step(
            arg_mbs=[value for value, _ in data],
            target_mbs=[target for _, target in data],
            losses=losses,
        )

    def grad_norm(self) -> float:
        """Return the 2-norm of all gradients of the model; all workers call this after `step`.

        Raises CommunicationError if another worker has died.
        """
        place = self._place
        # After the sum over holders, all have the same gradients: the first of them counts.
        stages = [
            stage
            for number, stage in self._stages.items()
            if place.routes.holders(number)[0] == place.worker
        ]
        parameters = [parameter for stage in stages for parameter in stage.submod.parameters()]
        squares = sum(
            _square(parameter, place.ranks)
            for parameter in parameters
            if parameter.grad is not None
        )
        return float(place.sum_over_all(float(squares)) ** 0.5)

    def _spread(self, name: str, values: Sequence[Any] | None, missing: Any) -> list[Any]:
        """Return a value for each micro-batch: of `values` if it is run here, else `missing`."""
        spread = [missing] * self._place.routes.microbatches
        if values is None:
            return spread
        if len(values) != len(self._numbers):
            raise ValueError(
                f"{name} has {len(values)} values; expected {len(self._numbers)}, one "
                "for each of `samples`"
            )
        for number, value in zip(self._numbers, values, strict=True):
            spread[number] = value
        return spread

    def _reduce(self, stage: RoutedStage) -> None:
        """Sum the gradients of a stage over its holders, and scale the sums."""
        # First within this worker; then each rank sums its part with the same rank of others.
        finish_shards(stage)
        parameters = [
            parameter for parameter in stage.submod.parameters() if parameter.requires_grad
        ]
        # Holders need not have run the same parts: one without a gradient adds zeros, and a
        # parameter without one on all of them keeps none.
        counts = torch.tensor(
            [float(parameter.grad is not None) for parameter in parameters], device=stage.device
        )
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [
            local(parameter.grad) for parameter in parameters if parameter.grad is not None
        ]
        with self._place.mates.deferring_errors():
            self._place.session.sum_over_sharers(f"stage {stage.stage_index}", [counts, *gradients])
        for parameter, gradient, count in zip(parameters, gradients, counts.tolist(), strict=True):
            gradient.mul_(self._factor)
            if not count:
                parameter.grad = None

    def _learn_forms(self) -> None:
        # Once for each stage, before its first op: receivers allocate by the forms.
        for number, stage in sorted(self._stages.items()):
            if stage.forms_before is None:
                stage.set_forms(self._forms_at(number), self._forms_at(number + 1))

    def _forms_at(self, boundary: int) -> tuple[Form, ...]:
        """Return the forms of the tensors that pass into stage `boundary`."""
        place = self._place
        keys = [f"forms before stage {boundary} on rank {rank}" for rank in range(place.ranks)]
        if boundary not in place.forms:
            before = max(boundary - 1, 0)
            # One holder of the stage before finds and publishes them. A finder that died may have
            # told some ranks, and all have to run the forward together.
            if place.worker == self._finder(before) and not all(map(place.knows, keys)):
                forms = self._find_forms(boundary)
                entries = [(shape, str(dtype), grad) for shape, dtype, grad in forms]
                place.publish(keys[place.rank], msgspec.json.encode(entries).decode())
            with place.mates.failing_together():
                text = place.read(keys[place.rank])
            place.forms[boundary] = tuple(
                (shape, getattr(torch, dtype.removeprefix("torch.")), grad)
                for shape, dtype, grad in _FORMS.decode(text)
            )
        return place.forms[boundary]

    def _finder(self, stage: int) -> Any:
        """Return the worker that finds the forms of the tensors behind a stage."""
        # The first holder; of stage 0, the first that has an input.
        holders = self._place.routes.holders(stage)
        return next(worker for worker in holders if stage or self._has_input(worker))

    def _has_input(self, worker: Worker) -> bool:
        cells = self._place.routes.rows[worker]
        return any((cell.stage, cell.action) == (0, "F") for cell in cells)

    def _find_forms(self, boundary: int) -> list[Form]:
        """Return the forms of the tensors into stage `boundary`, by running the stage before."""
        # The model's input is like the example; what comes later is found by running a stage.
        example, kwargs = self._examples
        if boundary == 0:
            return [(tuple(tensor.shape), tensor.dtype, False) for tensor in example]
        stage = self._stages[boundary - 1]
        if boundary > 1:
            example = tuple(
                torch.zeros(shape, dtype=dtype, device=stage.device, requires_grad=grad)
                for shape, dtype, grad in self._forms_at(boundary - 1)
            )
        # Leave no trace in buffers and random numbers: this forward is none of the iteration's, and
        # others do without it.
        before = {name: buffer.clone() for name, buffer in stage.submod.named_buffers()}
        devices = [stage.device] if stage.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            output = stage.submod(*example, **kwargs)
        with torch.no_grad():
            for name, buffer in stage.submod.named_buffers():
                if name in before:
                    buffer.copy_(before[name])
        outputs = output if isinstance(output, tuple | list) else (output,)
        if any(isinstance(tensor, DTensor) for tensor in outputs):
            raise ValueError(
                f"stage {boundary - 1} returns a DTensor; expected a tensor of this "
                "rank: give its last layer use_local_output=True, or return "
                "tensor.to_local()"
            )
        forms = [(tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in outputs]
        # Drop the graph of this forward, and then what FSDP has gathered for it.
        del output, outputs
        reset_shards(stage.submod)
        return forms


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _square(parameter: nn.Parameter, ranks: int) -> float:
    """Return a rank's share of a gradient's squared norm, which the ranks' sum makes whole."""
    gradient = parameter.grad
    assert gradient is not None
    if not isinstance(gradient, DTensor):
        return gradient.detach().double().square().sum().item() / ranks
    # A square of a sum is not the sum of squares.
    if any(placement.is_partial() for placement in gradient.placements):
        sharding = parameter.placements  # type: ignore[attr-defined]
        gradient = gradient.redistribute(placements=sharding)
    sharded = 1
    for size, placement in zip(gradient.device_mesh.shape, gradient.placements, strict=True):
        # FSDP's shards of tensor parallelism's are no `Shard`.
        sharded *= 1 if placement.is_replicate() else size
    return gradient.to_local().detach().double().square().sum().item() * sharded / ranks


def _require_splittable(module: nn.Module, stage: int) -> None:
    """Raise ValueError for a module whose backward torch cannot split into I and W."""
    if reshards_after_forward(module):
        raise ValueError(
            f"stage {stage} drops its gathered parameters after each forward, and "
            "torch's split backward then loses gradients; expected fully_shard(..., "
            "reshard_after_forward=False), or a plan with --backward fused"
        )
    if any(_is_compiled(part) for part in module.modules()):
        raise ValueError(
            f"stage {stage} is compiled, and compiled code cannot be split into I and "
            "W: each would cost the whole backward; expected a plan with --backward "
            "fused"
        )


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def _require_own_shards(module: nn.Module, stage: int, place: Place) -> None:
    """Raise ValueError if a stage's parameters are sharded in an unsupported way."""
    for name, parameter in _shards(module):
        if parameter.device_mesh.size() > place.ranks:
            raise ValueError(
                f"parameter {name} of stage {stage} is sharded over "
                f"{parameter.device_mesh.size()} processes, a worker has "
                f"{place.ranks}; expected a mesh inside the worker: let Place.take "
                "initialise torch.distributed, or give it inner="
            )
    has_sharded_parts = any(isinstance(part, FSDPModule) for part in module.modules())
    if has_sharded_parts and not isinstance(module, FSDPModule):
        raise ValueError(
            f"stage {stage} has parts under fully_shard, but is not itself; expected "
            "fully_shard of the whole stage as well, so that torch's pipeline "
            "runtime gathers and sums"
        )


def _shards(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from (
        (name, parameter)
        for name, parameter in module.named_parameters()
        if isinstance(parameter, DTensor)
    )
