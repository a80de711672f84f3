"""Measure a stage's seconds and bytes, in a process that does nothing else."""

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import torch

from slipstream.runtime.computing.slices import SliceRunner
from slipstream.runtime.config import RunConfig
from slipstream.runtime.data.data import Data, Microbatch
from slipstream.runtime.data.token_data import PackedBatch
from slipstream.runtime.models.calling import move_batch
from slipstream.runtime.replay.layer_values import (
    Form,
    TensorForm,
    Value,
    allocate_value,
    gradient_form,
    tensors_of,
)
from slipstream.runtime.state.held_layers import HeldLayers
from slipstream.runtime.state.part_state import count_elements
from slipstream.runtime.state.parts import Span, build_partition
from slipstream.runtime.state.step_factors import needs_gradient_norm
from slipstream.runtime.torch_private import LiveStorages, TensorWatchMode
from slipstream.schedules.schedule import Worker

ROW_MICROBATCHES = 4
"""Number of micro-batches whose same op is timed in a row.

Each then finds caches that the others have filled.
"""


class StageProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one stage's ops, and bytes of its memory.

    F, I and W are of one micro-batch, the others of an iteration. If a worker has several
    processes, seconds are those until its last rank is done, and bytes those of the rank that holds
    most.
    """

    forward: float
    backward_input: float
    backward_weight: float
    optimizer: float
    all_reduce: float = 0.0
    activation_bytes: int
    """Memory, in bytes, that a micro-batch takes from its F to its I."""
    stash_bytes: int
    """Memory, in bytes, that a micro-batch takes from its I to its W."""
    recomputed_bytes: int | None = None
    """Bytes of a micro-batch from F to I if all is recomputed; None: not allowed."""
    static_bytes: int
    """Memory, in bytes, of parameters, gradients, optimizer state, and undo copies."""
    undo_bytes: int
    sent_bytes: int = 0
    """Bytes of the gradient for the stage before, on the device until it is sent."""
    state_bytes: int | None = None
    """Bytes of all members' optimizer state and undo copies; None unless state is sharded."""
    by_lengths: tuple[tuple[float, ...], ...] = ()
    """Measured seconds of ops for samples of several documents or half the length.

    Each row has the number of tokens, the sum of the squares of document lengths, and the seconds
    of F, I and W.
    """


class StageBench:
    """Stage whose ops are run to measure their times and memory.

    `at_layer` has the forms of each layer's input, and of the last layer's output.
    """

    def __init__(
        self,
        stage: SliceRunner,
        holding: HeldLayers,
        at_layer: Sequence[Form],
        config: RunConfig,
        data: Data,
        device: torch.device,
    ) -> None:
        self._stage = stage
        self._holding = holding
        self._takes, self._gives = at_layer[stage.layers[0]], at_layer[stage.layers[1]]
        self._config = config
        self._data = data
        self._device = device
        self._rounds = 0
        # The micro-batch to run instead of the data's, if any.
        self._batch: PackedBatch | None = None

    def measure_documents(self, documents: int, at_layer: Sequence[Form]) -> tuple[float, ...]:
        """Measure the ops of micro-batches with several documents of nearly equal length.

        Returns a row of `StageProfile.by_lengths`. `at_layer` has the forms of each layer's input,
        and of the last layer's output, for samples of this length.
        """
        stage, usual_forms = self._stage, (self._takes, self._gives)
        self._takes, self._gives = at_layer[stage.layers[0]], at_layer[stage.layers[1]]
        assert isinstance(at_layer[0], TensorForm), "layer 0 takes tokens"
        batch, length = at_layer[0].shape
        lengths = _split_lengths(documents, length)
        # Attention sees the documents by the tokens' places, which begin anew with each.
        tokens = torch.zeros(batch, length, dtype=torch.int64)
        places = torch.cat([torch.arange(size) for size in lengths])
        self._batch = PackedBatch(tokens, tokens, places.expand(batch, length).contiguous())
        try:
            seconds = self.measure_round()
        finally:
            self._batch, (self._takes, self._gives) = None, usual_forms
        return (
            float(batch * length),
            float(batch * sum(size * size for size in lengths)),
            seconds["forward"],
            seconds["backward_input"],
            seconds["backward_weight"],
        )

    def keep_member_part(self, members: int) -> None:
        """Replace the optimizer state by a new one, the part of one of `members` workers."""
        self._holding = HeldLayers(
            self._holding.modules, self._config.training, self._holding.sharing
        )
        workers = [Worker(pipeline, 0) for pipeline in range(members)]
        total = sum(count_elements(module).cut for module in self._holding.modules.values())
        partition = build_partition(
            total, workers, (), sharded=self._config.training.shard_optimizer
        )
        self._holding.hold_layers(
            self._holding.modules, {self._stage.layers: partition}, workers[0], [], -1
        )

    def measure_round(self) -> dict[str, float]:
        """Time a few micro-batches' ops and a step; return seconds by field of `StageProfile`.

        The seconds of F, I and W are means over `ROW_MICROBATCHES` micro-batches, of which all F
        run first, then all I, then all W.
        """
        stage = self._stage
        # New micro-batches in each round, as the data and random numbers follow from their names.
        row = [Microbatch(self._rounds, 0, index) for index in range(ROW_MICROBATCHES)]
        self._rounds += 1
        gradient = None if stage.last else self._fill_value(gradient_form(self._gives), 5e-4)
        return {
            "forward": self._time_row(self._run_forward, row) / ROW_MICROBATCHES,
            "backward_input": self._time_row(
                lambda microbatch: stage.backward_input(microbatch, gradient), row
            )
            / ROW_MICROBATCHES,
            "backward_weight": self._time_row(stage.backward_weight, row) / ROW_MICROBATCHES,
            "optimizer": self._time_row(lambda _: self._run_step(), row[:1]),
        }

    def measure_memory(self) -> dict[str, int]:
        """Run a micro-batch and two steps; return bytes of memory by field of `StageProfile`."""
        stage, microbatch = self._stage, Microbatch(0, 1, 0)
        gradient = None if stage.last else self._fill_value(gradient_form(self._gives))
        # Parameters and gradients are alive all the time, and not counted.
        living = LiveStorages(
            [*self._holding.parameters_by_name().values(), *self._holding.flat_gradients()]
        )
        # What is alive after F is the activation, and after I the stash.
        with TensorWatchMode(living):
            self._run_forward(microbatch, living)
            activation = living.live_bytes()
            for tensor in () if gradient is None else tensors_of(gradient):
                living.watch_tensor(tensor)
            stage.backward_input(microbatch, gradient)
            del gradient
            stash = living.live_bytes()
            stage.backward_weight(microbatch)
        for _ in range(2):  # state appears with the first step, and is first copied by the second
            self._run_step()
        optimizer = self._holding.optimizer
        undo = optimizer.undo_bytes()
        state = optimizer.state_bytes() + sum(
            tensor.nbytes
            for module in self._holding.modules.values()
            for tensor in module.state_dict().values()
        )
        gradients = sum(flat.nbytes for flat in self._holding.flat_gradients())
        sizes = {
            "activation_bytes": activation,
            "stash_bytes": stash,
            "undo_bytes": undo,
            "static_bytes": state + gradients + undo,
        }
        if self._config.training.shard_optimizer:
            # Of all members together, in proportion to the elements that this one steps.
            own_bytes = optimizer.state_bytes() + undo
            own_elements = sum(map(_count_elements, optimizer.stored_parts.values()))
            elements = sum(count_elements(module).cut for module in self._holding.modules.values())
            sizes["state_bytes"] = own_bytes * elements // max(1, own_elements)
        return sizes

    def _run_forward(self, microbatch: Microbatch, living: LiveStorages | None = None) -> None:
        stage, training = self._stage, self._config.training
        # Only a slice that reads the batch needs it; what comes from other slices is filled in.
        batch = (
            move_batch(
                self._batch
                or self._data.batch(microbatch, training.batch, self._config.model.context),
                self._device,
            )
            if stage.reads_batch
            else None
        )
        value: Value = (
            batch[0] if batch is not None and stage.first else self._fill_value(self._takes)
        )
        # The input counts, as the runtime keeps it until the backward.
        if living is not None:
            for tensor in tensors_of(value):
                living.watch_tensor(tensor)
        stage.forward(
            microbatch,
            value,
            batch[1] if batch is not None and stage.last else None,
            batch,
            split=True,
        )

    def _run_step(self) -> None:
        optimizer = self._holding.optimizer
        # What a step costs in training includes the norm, if the job clips by it.
        if needs_gradient_norm(self._config.training):
            optimizer.layer_squares()
        optimizer.step(optimizer.version.after + 1)
        self._holding.zero_gradients()

    def _fill_value(self, form: Form, number: float = 0.5) -> Value:
        return allocate_value(
            form,
            lambda shape, dtype: torch.full(
                shape, number if dtype.is_floating_point else 0, dtype=dtype, device=self._device
            ),
        )

    def _time_row(self, call: Callable[[Microbatch], object], row: Sequence[Microbatch]) -> float:
        def run() -> None:
            for microbatch in row:
                call(microbatch)

        return time_call(run, self._device)


def _split_lengths(documents: int, tokens: int) -> list[int]:
    """Return the lengths, as equal as possible, of documents that together have `tokens`."""
    return [len(part) for part in np.array_split(np.arange(tokens), documents)]


def _count_elements(spans: Iterable[Span]) -> int:
    return sum(stop - start for start, stop in spans)


def time_call(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a call takes, including all its work on the device."""
    # The device works on after a launch returns, so wait for it before and after.
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
