"""The executor takes other implementations of all its seams, and the numbers stay the same.

Here a transport of queues in memory, layers with gradients by hand, an optimizer of three lines, a
list as the recorder, and a function of three numbers as the source of samples replay plans.
"""

import queue
import threading
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import pytest
import torch

from slipstream.runtime.replay.exchange import Exchange
from slipstream.runtime.replay.executor import Executor
from slipstream.runtime.replay.layer_values import form_of
from slipstream.schedules.program import RECEIVES, TransferKind, build_program
from slipstream.schedules.schedule import OpKind
from tests import patience
from tests.jobs import grid
from tests.runtime.running import schedule_for

WIDTH = 4
ITERATIONS = 3
RATE = 0.1
CASES = {
    "a dead worker": lambda: schedule_for(grid(3, 3, 4), ["1.1"]),
    "fused": lambda: schedule_for(grid(2, 2, 3), backward="fused"),
    "virtual stages": lambda: schedule_for(
        grid(2, 2, 4, more='[placement]\norder = "v"\nchunks = 2')
    ),
}


class Switchboard:
    """Queues and sums of all workers, which are threads."""

    def __init__(self):
        self.queues = defaultdict(queue.SimpleQueue)
        self.lock = threading.Condition()
        self.sums = {}
        self.sent = Counter()


class Arriving(NamedTuple):
    queue: queue.SimpleQueue

    def wait_for_tensor(self):
        return self.queue.get(timeout=patience.SECONDS)


class Gone(NamedTuple):
    target: object

    def wait(self):
        pass


class Transport:
    """A transport without process groups."""

    device, ordered = torch.device("cpu"), False

    def __init__(self, board, worker, sharers):
        self.board, self.worker, self.sharers = board, worker, sharers
        self.rounds = Counter()

    def send(self, tensor, target, tag):
        self.board.sent[self.worker] += 1
        self.board.queues[self.worker, target, tag].put(tensor.clone())
        return Gone(target)

    def receive(self, shape, dtype, source, tag):
        return Arriving(self.board.queues[source, self.worker, tag])

    def sum_over_sharers(self, what, tensors):
        sharers = self.sharers.get(what, (self.worker,))
        self.rounds[what] += 1
        parts = self.board.sums.setdefault((what, self.rounds[what]), {})
        with self.board.lock:
            parts[self.worker] = [tensor.clone() for tensor in tensors]
            self.board.lock.notify_all()
            assert self.board.lock.wait_for(lambda: len(parts) == len(sharers), patience.SECONDS)
        for place, tensor in enumerate(tensors):
            tensor.copy_(sum(parts[sharer][place] for sharer in sorted(sharers)))

    def reduce_in_background(self, reduce):
        reduce()

    def wait_for_reductions(self):
        pass

    def waiting_for_device(self):
        return nullcontext()

    def reach_commit_point(self):
        pass


class HandRunner:
    """Matrices, with the gradients of `mean((x W1 W2 ... - t)^2)` by hand."""

    def __init__(self, holding, layers, model_layers, scale):
        self.held, self.layers, self.scale = holding, layers, scale
        self.first, self.last = layers[0] == 0, layers[1] == model_layers
        self.reads_batch = self.first or self.last
        self.inputs, self.errors, self.deferred, self.losses = {}, {}, {}, []

    def forward(self, microbatch, value, target=None, batch=None, *, split):
        inputs = self.inputs[microbatch] = []
        for layer in range(*self.layers):
            inputs.append(value)
            value = value @ self.held.weights[layer]
        if not self.last:
            return value
        error = value - target
        self.losses.append((error**2).mean().item() * self.scale)
        self.errors[microbatch] = 2 * error / error.numel() * self.scale
        return None

    def backward(self, microbatch, gradient):
        result = self.backward_input(microbatch, gradient)
        self.backward_weight(microbatch)
        return result

    def backward_input(self, microbatch, gradient):
        gradient = self.errors.pop(microbatch) if gradient is None else gradient
        work = self.deferred[microbatch] = []
        for layer, value in zip(
            reversed(range(*self.layers)), reversed(self.inputs.pop(microbatch)), strict=True
        ):
            work.append((layer, value, gradient))
            gradient = gradient @ self.held.weights[layer].T
        return None if self.first else gradient

    def backward_weight(self, microbatch):
        for layer, value, gradient in self.deferred.pop(microbatch):
            self.held.gradients[layer] += value.T @ gradient

    def drop_microbatch(self, microbatch):
        del self.inputs[microbatch]


class Held:
    def __init__(self, layers):
        self.shared_gradients = {}
        self.weights = {layer: build_weight(layer) for layer in layers}
        self.gradients = {layer: torch.zeros_like(weight) for layer, weight in self.weights.items()}

    def gradients_to_sum(self, what):
        return [self.gradients[layer] for layer in range(*what)]


class HandLayers:
    def __init__(self, program):
        self.layers = {
            op.slice: program.layers_of(op.slice) for op in program.ops if op.slice is not None
        }
        self.holding = Held(layer for layers in program.holds for layer in range(*layers))
        self.runners = {
            number: HandRunner(
                self.holding, layers, program.grid.layer_count, 1 / program.grid.total_microbatches
            )
            for number, layers in self.layers.items()
        }

    def take_loss(self):
        losses = [loss for runner in self.runners.values() for loss in runner.losses]
        for runner in self.runners.values():
            runner.losses = []
        return sum(losses)


class Descent:
    """Gradient descent."""

    is_final, is_void, validated, iteration = True, False, None, 0

    def __init__(self, holding):
        self.held, self.made = holding, []

    def validate(self):
        pass

    validate_if_arrived = leave_void_state = validate

    def step(self, iteration, loss, until_unread):
        until_unread()
        self.made.append(iteration)
        for layer, gradient in self.held.gradients.items():
            self.held.weights[layer] -= RATE * gradient
            gradient.zero_()

    def when_validated(self, call):
        call()


class OpList:
    def __init__(self):
        self.ops = []

    @contextmanager
    def record_op(self, op):
        yield
        self.ops.append((op.kind, op.slice, op.pipeline, op.microbatch))

    def restart_iteration(self):
        raise AssertionError("no iteration is run again")


class Samples:
    """A source of samples that remembers what was read."""

    def __init__(self):
        self.read = []

    def __call__(self, microbatch):
        self.read.append(microbatch)
        return draw(*microbatch)


class Replayed(NamedTuple):
    program: object
    losses: list
    layers: HandLayers
    steps: Descent
    recorder: OpList
    samples: Samples
    board: Switchboard


def build_weight(layer):
    return (
        torch.rand(
            WIDTH, WIDTH, generator=torch.Generator().manual_seed(layer), dtype=torch.float64
        )
        / WIDTH
    )


def draw(iteration, pipeline, index):
    generator = torch.Generator().manual_seed(100 * iteration + 10 * pipeline + index)
    values = torch.rand(2, 3, WIDTH, generator=generator, dtype=torch.float64)
    return values[0], values[1]


def train_alone(grid):
    """One process, by autograd."""
    weights = [build_weight(layer).requires_grad_() for layer in range(grid.layer_count)]
    losses = []
    for iteration in range(ITERATIONS):
        total = 0.0
        for pipeline, number in enumerate(grid.microbatches):
            for index in range(number):
                value, target = draw(iteration, pipeline, index)
                for weight in weights:
                    value = value @ weight
                loss = ((value - target) ** 2).mean() / grid.total_microbatches
                loss.backward()
                total += loss.item()
        losses.append(total)
        with torch.no_grad():
            for weight in weights:
                weight -= RATE * weight.grad
                weight.grad = None
    return losses, weights


def replay_worker(schedule, worker, board):
    program = build_program(schedule, worker)
    transport = Transport(board, worker, dict(program.sums))
    layers, recorder, samples = HandLayers(program), OpList(), Samples()
    steps = Descent(layers.holding)
    forms = [form_of(torch.empty(3, WIDTH, dtype=torch.float64))] * (schedule.grid.layer_count + 1)
    exchange = Exchange(program, transport, forms, range(ITERATIONS))
    executor = Executor(
        program,
        slices=layers,
        steps=steps,
        session=transport,
        exchange=exchange,
        feed=samples,
        recorder=recorder,
    )
    losses = [executor.run(iteration) for iteration in range(ITERATIONS)]
    exchange.flush()
    return Replayed(program, losses, layers, steps, recorder, samples, board)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES.keys())
def replayed(request):
    schedule, board = request.param(), Switchboard()
    with ThreadPoolExecutor(len(schedule.members)) as pool:
        return list(
            pool.map(
                lambda worker: replay_worker(schedule, worker, board),
                schedule.members,
                timeout=patience.SECONDS,
            )
        )


def test_layers_that_know_their_own_gradients_get_the_numbers_of_autograd(replayed):
    losses, weights = train_alone(replayed[0].program.grid)
    losses_by_worker = [replay.losses for replay in replayed]
    totals = [sum(parts) for parts in zip(*losses_by_worker, strict=True)]
    assert totals == pytest.approx(losses, abs=1e-12)
    for replay in replayed:
        for layer, weight in replay.layers.holding.weights.items():
            torch.testing.assert_close(weight, weights[layer].detach(), rtol=0, atol=1e-12)


def test_a_transport_of_queues_carries_each_transfer_once(replayed):
    board = replayed[0].board
    for replay in replayed:
        sends = [transfer for transfer in replay.program.transfers if transfer.kind not in RECEIVES]
        assert board.sent[replay.program.worker] == ITERATIONS * len(sends)
    assert all(waiting.empty() for waiting in board.queues.values())
    assert sum(board.sent.values()) > 0


def test_an_optimizer_of_ones_own_steps_once_an_iteration(replayed):
    for replay in replayed:
        assert replay.steps.made == list(range(ITERATIONS))
        assert not any(gradient.any() for gradient in replay.layers.holding.gradients.values())


def test_a_recorder_that_is_a_list_has_the_ops_of_the_program(replayed):
    for replay in replayed:
        ops = [
            (instruction.kind, instruction.slice, instruction.pipeline, instruction.microbatch)
            for instruction in replay.program.instructions
            if not isinstance(instruction.kind, TransferKind)
        ]
        assert replay.recorder.ops == ops * ITERATIONS


def test_a_source_of_samples_is_asked_at_the_first_and_the_last_layer_alone(replayed):
    for replay in replayed:
        grid = replay.program.grid
        readers = [
            op
            for op in replay.program.ops
            if op.kind is OpKind.F
            and (
                replay.program.layers_of(op.slice)[0] == 0
                or replay.program.layers_of(op.slice)[1] == grid.layer_count
            )
        ]
        asked = Counter((sample.pipeline, sample.index) for sample in replay.samples.read)
        numbers = Counter((op.pipeline, op.microbatch) for op in readers)
        assert asked == {place: ITERATIONS * number for place, number in numbers.items()}
