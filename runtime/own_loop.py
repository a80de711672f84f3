"""Replay a schedule in a user's own loop, with one process for each live worker.

No coordinator, job file or run folder takes part. The caller brings layers, loss, optimizer and
data, and owns the loop. If a process dies, the others end with an error; `slipstream train` would
plan a schedule for the rest, and move layers.
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
"""Function that builds a layer from its number, alike on every process."""
Loss = Callable[[Value, Tensor], Tensor]
"""Function of the last layer's output and the target; returns a micro-batch's mean loss."""
MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
"""Function that makes the optimizer of these parameters."""
ReadData = Callable[[int, int, int], tuple[Tensor, Tensor]]
"""Function of iteration, pipeline and micro-batch; returns input and target."""
_REPLAYS = count(1)
REPLAYS_PER_RESTART = 10**6
"""Largest number of replays that a process begins between two restarts by torchrun."""


class ScheduleReplay:
    """One worker's part in a replay; the user's loop calls `run` for each iteration.

    As a context manager it calls `close` at the end; after an error it ends all transfers instead.

    Attributes
    ----------
    worker
        Live worker as which this process takes part.
    layers
        Layers that this worker holds, by number.
    optimizer
        Optimizer of these layers. The loop may set its learning rate.
    """

    def __init__(
        self,
        program: WorkerProgram,
        session: GenerationSession,
        layers: Mapping[int, nn.Module],
        forms: Sequence[Form],
        *,
        loss: Loss,
        optimizer: MakeOptimizer,
        data: ReadData,
    ) -> None:
        self.worker, self.layers = program.worker, dict(layers)
        parameters = [
            parameter for layer in self.layers.values() for parameter in layer.parameters()
        ]
        self.optimizer = optimizer(parameters)
        self._session, self._data, self._input = session, data, forms[0]
        self._iteration = self._runs = 0
        # Every step is made once and for all, so plain modules and an optimizer suffice.
        self._recorder = Recorder(session.device)
        self._exchange = Exchange(program, session, forms, range(0))
        scale = 1 / program.grid.total_microbatches
        self._executor = Executor(
            program,
            slices=_ModuleSlices(program, self.layers, loss, scale),
            steps=_PlainSteps(self.optimizer),
            session=session,
            exchange=self._exchange,
            feed=self._read,
            recorder=self._recorder,
        )

    def run(self, iteration: int) -> float:
        """Run this worker's part of an iteration, and step; return the iteration's mean loss.

        All workers call this together. Raises CommunicationError if a process is gone, and
        ValueError if an input has another shape or dtype than the first one.
        """
        # Transfers count runs, so the loop may number iterations as it likes.
        self._iteration = iteration
        self._exchange.add_iterations()
        self._recorder.start_iteration(self._runs, traced=False)
        part = self._executor.run(self._runs)
        self._runs += 1
        return self._session.start_sum_over_all([part]).wait_for_sums()[0]

    def close(self) -> None:
        """Wait for all workers, and close the connections. Raises CommunicationError."""
        self._exchange.flush()
        self._session.wait_for_all()
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # After an error, the others may never come: end whatever waits for them.
        if kind is None:
            self.close()
        else:
            self._session.abort()

    def _read(self, microbatch: Microbatch) -> Batch:
        # Receives have fixed shapes, found from the first input.
        batch = self._data(self._iteration, microbatch.pipeline, microbatch.index)
        if form_of(batch[0].to("meta")) != self._input:
            raise ValueError(
                f"the input of micro-batch {microbatch.pipeline}.{microbatch.index} of iteration "
                f"{self._iteration} is {tuple(batch[0].shape)}, {batch[0].dtype}; "
                "expected the same as of the first one"
            )
        return tuple(tensor.to(self._session.device) for tensor in batch)


def replay(
    schedule: Schedule,
    *,
    layers: BuildLayer,
    loss: Loss,
    optimizer: MakeOptimizer,
    data: ReadData,
    device: str | torch.device = "cpu",
) -> ScheduleReplay:
    """Connect this process, one of torchrun's, as a live worker of a schedule.

    The process of rank r becomes the r-th of `schedule.members`; there must be a process for each
    member. All processes call this with the same schedule. Raises ValueError if the schedule breaks
    rules, has another number of live workers, or differs from the schedule of rank 0;
    CommunicationError if the others cannot be reached; and torch's DistError if the store at
    MASTER_ADDR cannot.

    Parameters
    ----------
    schedule
        Schedule to replay, which must pass `check`.
    layers
        Function that builds a layer from its number, 0 to `schedule.grid.layer_count` - 1, with the
        same parameters on every process. Called for the layers that this worker holds, and on the
        meta device once for each layer, to find the shapes of activations.
    loss
        Function of the last layer's output and the target; returns a micro-batch's mean loss.
    optimizer
        Function that makes the optimizer of the held parameters. The optimizer steps as soon as
        their gradients are complete, so it may not depend on other workers' gradients.
    data
        Function of iteration, pipeline and micro-batch; returns input and target. Called once here,
        for the shape and dtype that all inputs must have.
    device
        Device of this process, made torch's current one if it is a GPU. Tensors of a GPU are sent
        through host memory, by gloo.
    """
    # Refuse a schedule or a number of processes that cannot work.
    if violations := check(schedule):
        raise ValueError(
            f"the schedule breaks rules: {violations[0]}; expected one that passes slipstream.check"
        )
    rank = int(os.environ.get("RANK", "0"))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size != len(schedule.members):
        raise ValueError(
            f"{size} processes were started; the schedule has {len(schedule.members)} live "
            f"workers: torchrun --nproc-per-node {len(schedule.members)}"
        )
    # From here on, this process is one worker, and needs its program alone.
    device, program = torch.device(device), build_program(schedule, schedule.members[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Build this worker's layers, and find the forms of what passes between all layers.
    modules = {
        layer: layers(layer).to(device)
        for layer_range in program.holds
        for layer in range(*layer_range)
    }
    forms = find_forms(layers, schedule.grid.layer_count, data(0, *_first_microbatch(schedule))[0])

    # Connect, under a number that no earlier replay of these processes has had.
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    order = restarts * REPLAYS_PER_RESTART + next(_REPLAYS)
    store = open_common_store(rank)
    _require_same_schedule(schedule, store, order, rank)
    ranks = {worker: place for place, worker in enumerate(schedule.members)}
    session = GenerationSession(
        Membership(order, ranks, program.worker),
        links=GroupCache("gloo"),
        device=device,
        store=store,
    )
    sharers: dict[LayerRange | str, Sequence[Worker]] = dict(program.sums)
    session.connect(sharers, pairs=program.connections, sums=True)
    return ScheduleReplay(
        program, session, modules, forms, loss=loss, optimizer=optimizer, data=data
    )


def _require_same_schedule(schedule: Schedule, store: Store, order: int, rank: int) -> None:
    """Raise ValueError unless rank 0 replays the same schedule: planning twice may give two."""
    key, digest = f"replay {order}/schedule", sha256(encode(schedule)).hexdigest()
    if rank == 0:
        store.set(key, digest)
    elif store.get(key).decode() != digest:
        raise ValueError(
            "this process has another schedule than the one of rank 0; expected the same: "
            "plan once, write it (slipstream.write), and let all processes read it"
        )


def _first_microbatch(schedule: Schedule) -> tuple[int, int]:
    # A pipeline may have no micro-batch of its own.
    return next(pipeline for pipeline, number in enumerate(schedule.grid.microbatches) if number), 0


def find_forms(build: BuildLayer, layers: int, example: Tensor) -> list[Form]:
    """Return the forms of all layers' inputs, and of the last output, without computing.

    `build` builds each of the `layers` layers; `example` is an input of the first.
    """
    # On the meta device, tensors have shapes and dtypes, but no data.
    with torch.device("meta"), torch.no_grad():
        value: Value = example.to("meta")
        forms = [form_of(value)]
        for layer in range(layers):
            value = build(layer)(value)
            forms.append(form_of(value))
    return forms


class _PendingMicrobatch(NamedTuple):
    """A micro-batch between its F and its I."""

    value: Value
    output: Value
    work: WeightWork | None
    """Queue of the work of W; None if one backward computes all gradients."""


class _ModuleRunner:
    """`Runner` of the ops of a slice, for consecutive plain modules."""

    def __init__(
        self, modules: Sequence[nn.Module], *, first: bool, last: bool, loss: Loss, scale: float
    ) -> None:
        self.first, self.last, self.reads_batch = first, last, first or last
        self.modules, self._loss, self._scale = modules, loss, scale
        self.losses: list[Tensor] = []
        # Micro-batches between F and I, and the work of those between I and W.
        self._pending: dict[Microbatch, _PendingMicrobatch] = {}
        self._deferred: dict[Microbatch, Callable[[], None]] = {}

    def forward(
        self,
        microbatch: Microbatch,
        value: Value,
        target: Tensor | None = None,
        batch: Batch | None = None,  # noqa: ARG002
        *,
        split: bool,
    ) -> Value | None:
        assert microbatch not in self._pending
        # The input is a leaf, so that the backward ends here and leaves its gradient.
        if not self.first:
            value = map_tensors(value, _as_leaf)
        # The layers put off their weight gradients to W, if it is an op of its own.
        work: WeightWork | None = deque() if split and not self.first else None
        output = value
        with nullcontext() if work is None else deferring_weights(work):
            for module in self.modules:
                output = module(output)
            if self.last:
                assert target is not None
                output = self._loss(output, target) * self._scale
        # I runs backward from the output to the input.
        self._pending[microbatch] = _PendingMicrobatch(value, output, work)
        if isinstance(output, Tensor) and self.last:
            self.losses.append(output.detach().double())
            return None
        return map_tensors(output, lambda tensor: tensor.detach().contiguous())

    def backward(self, microbatch: Microbatch, gradient: Value | None) -> Value | None:
        result = self.backward_input(microbatch, gradient)
        self.backward_weight(microbatch)
        return result

    def backward_input(self, microbatch: Microbatch, gradient: Value | None) -> Value | None:
        # On the last slice, the backward starts from the loss itself.
        value, output, work = self._pending.pop(microbatch)
        outputs = [tensor for tensor in tensors_of(output) if has_gradient(tensor)]
        gradients = (
            [torch.ones_like(outputs[0])] if gradient is None else list(tensors_of(gradient))
        )
        # The first slice has no input gradient, so all of its backward is W.
        if self.first:
            self._deferred[microbatch] = partial(run_backward, outputs, gradients)
            return None
        if work is None:
            # Without a split backward, I computes the weight gradients, too.
            run_backward(outputs, gradients)
        else:
            backward_input(outputs, gradients, work)
        self._deferred[microbatch] = partial(backward_weight, work or deque())
        # An input that the layers do not use has no gradient: the previous slice gets zeros.
        inputs = [tensor for tensor in tensors_of(value) if has_gradient(tensor)]
        input_gradients = list(map(_gradient_of, inputs))
        return input_gradients[0] if isinstance(value, Tensor) else tuple(input_gradients)

    def backward_weight(self, microbatch: Microbatch) -> None:
        self._deferred.pop(microbatch)()

    def drop_microbatch(self, microbatch: Microbatch) -> None:
        del self._pending[microbatch]


class _ModuleState:
    """`State` of a worker's layers, which are whole and share no parameters."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self.shared_gradients: Mapping[str, object] = {}
        self._layers = layers
        for layer in layers.values():
            # Every holder must have each gradient to sum, even if it runs no micro-batch.
            for parameter in _trained(layer):
                parameter.grad = torch.zeros_like(parameter)

    def gradients_to_sum(self, what: LayerRange | str) -> list[Tensor]:
        assert not isinstance(what, str)
        return [
            parameter.grad
            for layer in range(*what)
            for parameter in _trained(self._layers[layer])
            if parameter.grad is not None
        ]


class _ModuleSlices:
    def __init__(
        self, program: WorkerProgram, layers: Mapping[int, nn.Module], loss: Loss, scale: float
    ) -> None:
        self.layers = {
            op.slice: program.layers_of(op.slice) for op in program.ops if op.slice is not None
        }
        self.holding = _ModuleState(layers)
        self.runners: dict[int, _ModuleRunner] = {}
        for number, (first, end) in self.layers.items():
            self.runners[number] = _ModuleRunner(
                [layers[layer] for layer in range(first, end)],
                first=first == 0,
                last=end == program.grid.layer_count,
                loss=loss,
                scale=scale,
            )

    def take_loss(self) -> float:
        losses = [loss for runner in self.runners.values() for loss in runner.losses]
        for runner in self.runners.values():
            runner.losses = []
        return torch.stack(losses).sum().item() if losses else 0.0

    def discard_iteration(self) -> None:
        """Refuse: steps are never guessed here, so no iteration is discarded."""
        raise AssertionError("no step is guessed")


class _PlainSteps:
    """`Steps` of an optimizer, each made once and for good."""

    is_final, is_void = True, False
    validated: tuple[int, float | None] | None = None

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self.iteration = 0

    def validate_if_arrived(self) -> None:
        """Do nothing: a step depends on no other worker."""

    def validate(self) -> None:
        """Do nothing: a step depends on no other worker."""

    def leave_void_state(self) -> None:
        """Do nothing: no step is undone."""

    def step(
        self,
        iteration: int,
        loss: float,  # noqa: ARG002
        until_unread: Callable[[], None],
    ) -> None:
        self.iteration = iteration
        until_unread()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)

    def when_validated(self, call: Callable[[], None]) -> None:
        """Call the function at once: each step is valid as soon as it is made."""
        call()


def _trained(layer: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in layer.parameters() if parameter.requires_grad]


def _gradient_of(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.contiguous()


def _as_leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if has_gradient(tensor) else tensor.detach()
