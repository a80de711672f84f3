"""Replay a schedule in a loop of one's own, in one process a live worker.

No coordinator, job file or run folder takes part. The caller brings layers, loss, optimizer and
data, and owns the loop. A process that dies ends the others with an error; planning for the rest
and moving layers is what `slipstream train` adds.
"""

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from hashlib import sha256
from itertools import count
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from slipstream.runtime.models.split_backward import (
    WeightWork,
    backward_input,
    backward_weight,
    deferring_weights,
)
from slipstream.runtime.processes.torchrun_store import open_common_store
from slipstream.runtime.replay.exchange import Exchange
from slipstream.runtime.replay.executor import Executor
from slipstream.runtime.replay.group_cache import GroupCache
from slipstream.runtime.replay.layer_values import (
    Form,
    Value,
    form_of,
    has_gradient,
    map_tensors,
    tensors_of,
)
from slipstream.runtime.replay.membership import Membership
from slipstream.runtime.replay.microbatch import Microbatch
from slipstream.runtime.replay.recorder import Recorder
from slipstream.runtime.replay.seams import Batch
from slipstream.runtime.replay.session import GenerationSession
from slipstream.runtime.replay.torch_groups import Store
from slipstream.runtime.torch_private import run_backward
from slipstream.schedules.check import check
from slipstream.schedules.codec import encode
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.program import WorkerProgram, build_program
from slipstream.schedules.schedule import Schedule, Worker

BuildLayer = Callable[[int], nn.Module]
"""Function that builds a layer of the schedule, the same on every process."""
Loss = Callable[[Value, Tensor], Tensor]
"""Function of the last layer's output and target that returns a micro-batch's mean loss."""
MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
ReadData = Callable[[int, int, int], tuple[Tensor, Tensor]]
"""Function of iteration, pipeline and micro-batch; it returns input and target."""
_REPLAYS = count(1)
RESTARTS = 10**6
"""Number of replays that a process may begin before torchrun restarts it."""


class ScheduleReplay:
    """One worker's part in the replay of a schedule.

    Attributes
    ----------
    worker
        Live worker that this process is.
    layers
        Layers that it holds, by number.
    optimizer
        Optimizer of these layers, whose learning rate the loop may set.
    """

    def __init__(self, program: WorkerProgram, session: GenerationSession, layers: Mapping[int, nn.Module],
                 forms: Sequence[Form], *, loss: Loss, optimizer: MakeOptimizer, data: ReadData) -> None:
        self.worker, self.layers = program.worker, dict(layers)
        parameters = [parameter for layer in self.layers.values() for parameter in layer.parameters()]
        self.optimizer = optimizer(parameters)
        self._session, self._data, self._input = session, data, forms[0]
        self._iteration = self._runs = 0
        self._recorder = Recorder(session.device)
        self._exchange = Exchange(program, session, forms, range(0))
        scale = 1 / program.grid.total_microbatches
        self._executor = Executor(
            program, slices=_ModuleSlices(program, self.layers, loss, scale), steps=_PlainSteps(self.optimizer),
            session=session, exchange=self._exchange, feed=self._read, recorder=self._recorder)

    def run(self, iteration: int) -> float:
        """Run an iteration on all workers and step; return the mean loss of its micro-batches.
        Raises CommunicationError if another process is gone."""
        self._iteration = iteration
        self._exchange.add_iterations()
        self._recorder.start_iteration(self._runs, traced=False)
        part = self._executor.run(self._runs)
        self._runs += 1
        return self._session.start_sum_over_all([part]).wait_for_sums()[0]

    def close(self) -> None:
        """Wait for all workers, and close the connections."""
        self._exchange.flush()
        self._session.wait_for_all()
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._session.abort()

    def _read(self, microbatch: Microbatch) -> Batch:
        batch = self._data(self._iteration, microbatch.pipeline, microbatch.index)
        if form_of(batch[0].to("meta")) != self._input:
            raise ValueError(f"the input of micro-batch {microbatch.pipeline}.{microbatch.index} of iteration "
                             f"{self._iteration} is {tuple(batch[0].shape)}, {batch[0].dtype}; expected the same as of "
                             "the first one")
        return tuple(tensor.to(self._session.device) for tensor in batch)


def replay(schedule: Schedule, *, layers: BuildLayer, loss: Loss, optimizer: MakeOptimizer, data: ReadData,
           device: str | torch.device = "cpu") -> ScheduleReplay:
    """Connect this process, one of torchrun's, as a live worker of a schedule.

    The process of rank r is the r-th of `schedule.members`; there must be one for each. All
    processes call this with the same schedule.

    Args: schedule: What to replay. It must pass `check`. layers: Builds a layer, given its number
    from 0 to `schedule.grid.layer_count` - 1: the same whoever builds it. Called for the layers
    that this worker holds, and once for each on the meta device, to find the shapes of activations.
    loss: Mean loss of a micro-batch, from the last layer's output and the target. optimizer: Makes
    the optimizer of the held parameters. It is stepped as soon as their gradients are complete, so
    it may not depend on other workers' gradients. data: Input and target of a micro-batch, from
    iteration, pipeline and number. device: Device of this process. Tensors of a GPU are sent
    through host memory, by gloo.

    Raises ValueError if the schedule breaks rules, has another number of live workers, or is not
    that of the process of rank 0; and CommunicationError if the others cannot be reached.
    """
    if violations := check(schedule):
        raise ValueError(f"the schedule breaks rules: {violations[0]}; expected one that passes slipstream.check")
    rank, size = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if size != len(schedule.members):
        raise ValueError(f"{size} processes were started; the schedule has {len(schedule.members)} live workers: "
                         f"torchrun --nproc-per-node {len(schedule.members)}")
    device, program = torch.device(device), build_program(schedule, schedule.members[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    held = {layer: layers(layer).to(device) for held_range in program.holds for layer in range(*held_range)}
    forms = find_forms(layers, schedule.grid.layer_count, data(0, *_first_microbatch(schedule))[0])
    order = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) * RESTARTS + next(_REPLAYS)
    store = open_common_store(rank)
    _require_same_schedule(schedule, store, order, rank)
    ranks = {worker: place for place, worker in enumerate(schedule.members)}
    session = GenerationSession(Membership(order, ranks, program.worker), links=GroupCache("gloo"), device=device,
                                store=store)
    sharers: dict[LayerRange | str, Sequence[Worker]] = dict(program.sums)
    session.connect(sharers, pairs=program.connections, sums=True)
    return ScheduleReplay(program, session, held, forms, loss=loss, optimizer=optimizer, data=data)


def _require_same_schedule(schedule: Schedule, store: Store, order: int, rank: int) -> None:
    """Raise ValueError if rank 0 replays another schedule: planned twice, plans may differ."""
    key, digest = f"replay {order}/schedule", sha256(encode(schedule)).hexdigest()
    if rank == 0:
        store.set(key, digest)
    elif store.get(key).decode() != digest:
        raise ValueError("this process has another schedule than the one of rank 0; expected the same: plan once, "
                         "write it (slipstream.write), and let all processes read it")


def _first_microbatch(schedule: Schedule) -> tuple[int, int]:
    return next(pipeline for pipeline, number in enumerate(schedule.grid.microbatches) if number), 0


def find_forms(build: BuildLayer, layers: int, example: Tensor) -> list[Form]:
    """Return the forms of all layers' inputs and the last output, without computing."""
    with torch.device("meta"), torch.no_grad():
        value: Value = example.to("meta")
        forms = [form_of(value)]
        for layer in range(layers):
            value = build(layer)(value)
            forms.append(form_of(value))
    return forms


class _Held(NamedTuple):
    """A micro-batch between its F and its I."""

    value: Value
    output: Value
    work: WeightWork | None
    """Queue of the work of W; None if I computes all gradients."""


class _ModuleRunner:
    """Runner of the ops of consecutive plain modules."""

    def __init__(self, modules: Sequence[nn.Module], *, first: bool, last: bool, loss: Loss, scale: float) -> None:
        self.first, self.last, self.reads_batch = first, last, first or last
        self.modules, self._loss, self._scale = modules, loss, scale
        self.losses: list[Tensor] = []
        self._held: dict[Microbatch, _Held] = {}
        self._deferred: dict[Microbatch, Callable[[], None]] = {}

    def forward(self, microbatch: Microbatch, value: Value, target: Tensor | None = None,
                batch: Batch | None = None, *, split: bool) -> Value | None:  # noqa: ARG002
        """Run F and return the activation to send on; None on the last slice."""
        assert microbatch not in self._held
        if not self.first:
            value = map_tensors(value, _as_leaf)
        work: WeightWork | None = deque() if split and not self.first else None
        output = value
        with nullcontext() if work is None else deferring_weights(work):
            for module in self.modules:
                output = module(output)
            if self.last:
                assert target is not None
                output = self._loss(output, target) * self._scale
        self._held[microbatch] = _Held(value, output, work)
        if isinstance(output, Tensor) and self.last:
            self.losses.append(output.detach().double())
            return None
        return map_tensors(output, lambda tensor: tensor.detach().contiguous())

    def backward(self, microbatch: Microbatch, gradient: Value | None) -> Value | None:
        """Run B and return the gradient of the slice's input; None on the first slice."""
        result = self.backward_input(microbatch, gradient)
        self.backward_weight(microbatch)
        return result

    def backward_input(self, microbatch: Microbatch, gradient: Value | None) -> Value | None:
        """Run I and return the gradient of the slice's input. The first slice leaves all to W."""
        value, output, work = self._held.pop(microbatch)
        outputs = [tensor for tensor in tensors_of(output) if has_gradient(tensor)]
        gradients = [torch.ones_like(outputs[0])] if gradient is None else list(tensors_of(gradient))
        if self.first:
            self._deferred[microbatch] = partial(run_backward, outputs, gradients)
            return None
        if work is None:
            run_backward(outputs, gradients)
        else:
            backward_input(outputs, gradients, work)
        self._deferred[microbatch] = partial(backward_weight, work or deque())
        inputs = [tensor for tensor in tensors_of(value) if has_gradient(tensor)]
        found = [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous() for tensor in inputs]
        return found[0] if isinstance(value, Tensor) else tuple(found)

    def backward_weight(self, microbatch: Microbatch) -> None:
        """Run W: add the micro-batch's weight gradients."""
        self._deferred.pop(microbatch)()

    def drop_microbatch(self, microbatch: Microbatch) -> None:
        """Drop a micro-batch whose backward will not be run."""
        del self._held[microbatch]


class _ModuleState:
    """Gradients of a worker's layers, which it holds whole, and which no other layer shares."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self.shared_gradients: Mapping[str, object] = {}
        self._layers = layers
        for layer in layers.values():
            for parameter in _trained(layer):
                parameter.grad = torch.zeros_like(parameter)

    def gradients_to_sum(self, what: LayerRange | str) -> list[Tensor]:
        """Return the gradients of a range of layers, to be summed in place."""
        assert not isinstance(what, str)
        return [parameter.grad for layer in range(*what) for parameter in _trained(self._layers[layer])
                if parameter.grad is not None]


class _ModuleSlices:
    """Runners of the slices of a worker's program."""

    def __init__(self, program: WorkerProgram, layers: Mapping[int, nn.Module], loss: Loss, scale: float) -> None:
        self.layers = {op.slice: program.layers_of(op.slice) for op in program.ops if op.slice is not None}
        self.holding = _ModuleState(layers)
        self.runners = {
            number: _ModuleRunner([layers[layer] for layer in range(first, end)], first=first == 0,
                                  last=end == program.grid.layer_count, loss=loss, scale=scale)
            for number, (first, end) in self.layers.items()}

    def take_loss(self) -> float:
        """Return this worker's share of the mean loss of the micro-batches since the last call."""
        losses = [loss for runner in self.runners.values() for loss in runner.losses]
        for runner in self.runners.values():
            runner.losses = []
        return torch.stack(losses).sum().item() if losses else 0.0

    def discard_iteration(self) -> None:
        """Refuse: steps are never guessed here, so no iteration is discarded."""
        raise AssertionError("no step is guessed")


class _PlainSteps:
    """Steps of an optimizer, each made once and for good."""

    is_final, is_void = True, False
    validated: tuple[int, float | None] | None = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.iteration = 0

    def validate_if_arrived(self) -> None:
        """Do nothing: a step depends on no other worker."""

    def validate(self) -> None:
        """Do nothing."""

    def leave_void_state(self) -> None:
        """Do nothing."""

    def step(self, iteration: int, loss: float, until_unread: Callable[[], None]) -> None:  # noqa: ARG002
        """Step, and set the gradients to zero."""
        self.iteration = iteration
        until_unread()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)

    def when_validated(self, call: Callable[[], None]) -> None:
        """Call the function."""
        call()


def _trained(layer: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in layer.parameters() if parameter.requires_grad]


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if has_gradient(tensor) else tensor.detach()
