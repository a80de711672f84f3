"""Plan around a dead worker of a plain torch model, replay the plan, compare losses.

    python -m examples.dead_worker

Three pipelines of three stages train a small model. Worker 1.1, stage 1 of pipeline 1, is dead. Its
peers 0.1 and 2.1 hold the same parameters and run its micro-batches too, so the sum of the
gradients stays the same. The program trains three times on the same micro-batches and compares the
losses:

- `train_plainly`: one copy of the model and one loop over all micro-batches. The other two must
  equal it.
- `Replay`: the schedule op by op in this process. Every live worker has its own copy of the layers
  of its stage.
- `run`: the schedule on eight worker processes, as `slipstream train` runs it. `Model` and `Data`
  are what it asks for.
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from slipstream.planner import Job, parse_job, plan_job
from slipstream.runtime.api import (
    Microbatch,
    ModelConfig,
    RunConfig,
    derive_seed,
    parse_run_config,
    run,
    seeded,
)
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Op, OpKind, Schedule, Worker

JOB = """
pipelines = 3
stages = 3
microbatches = 6
[time]
forward = 1
backward_input = 1
backward_weight = 1
optimizer = 2
all_reduce = 1
"""
DEAD = Worker(1, 1)
ITERATIONS = 5
SHAPE = (2, 16)
"""Sequences in a micro-batch, tokens in a sequence."""
TOLERANCE = 1e-9


class Model:
    """A model is a list of layers: an embedding, hidden layers, a head."""

    def __init__(
        self, config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.config, self.seed, self.dtype, self.device = config, seed, dtype, device
        self.layers = config.blocks + 2

    def build(self, layer: int) -> nn.Module:
        """Return a layer, the same whoever builds it."""
        width, vocabulary = self.config.width, self.config.vocabulary
        with seeded(derive_seed("parameters", self.seed, layer)):
            if layer == 0:
                return nn.Embedding(vocabulary, width).to(self.dtype)
            if layer <= self.config.blocks:
                return nn.Sequential(nn.Linear(width, width), nn.Tanh()).to(self.dtype)
            return nn.Linear(width, vocabulary).to(self.dtype)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean loss of a micro-batch."""
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


class Data:
    """Counting: the next token is the one before plus one."""

    digest = "counting, version 1"

    def __init__(self, config: RunConfig) -> None:
        self.vocabulary = config.model.vocabulary

    def batch(self, microbatch: Microbatch, batch: int, context: int) -> tuple[Tensor, Tensor]:
        """Return tokens and targets of a micro-batch, the same whoever asks for it."""
        generator = torch.Generator().manual_seed(derive_seed("data", *microbatch))
        starts = torch.randint(self.vocabulary, (batch, 1), generator=generator)
        tokens = (starts + torch.arange(context + 1)) % self.vocabulary
        return tokens[:, :-1], tokens[:, 1:]


def configuration() -> RunConfig:
    """Return what a job file has under [model] and [training]."""
    return parse_run_config(
        {"name": "examples.dead_worker:Model", "blocks": 4, "width": 16, "context": SHAPE[1]},
        {
            "data": "examples.dead_worker:Data",
            "optimizer": "sgd",
            "learning_rate": 0.1,
            "momentum": 0.9,
            "weight_decay": 0,
            "batch": SHAPE[0],
            "dtype": "float64",
            "device": "cpu",
            "iterations": ITERATIONS,
        },
    )


def make_optimizer(layers: nn.ModuleList) -> torch.optim.Optimizer:
    """Return the optimizer that the configuration above calls "sgd"."""
    return torch.optim.SGD(layers.parameters(), lr=0.1, momentum=0.9)


def train_plainly(job: Job, model: Model, data: Data) -> list[float]:
    """Train in one loop over all micro-batches; return the mean loss of each iteration."""
    layers = nn.ModuleList(model.build(layer) for layer in range(model.layers))
    optimizer = make_optimizer(layers)
    losses = [0.0] * ITERATIONS
    for iteration in range(ITERATIONS):
        for pipeline, count in enumerate(job.microbatches):
            for index in range(count):
                tokens, targets = data.batch(Microbatch(iteration, pipeline, index), *SHAPE)
                loss = model.loss(nn.Sequential(*layers)(tokens), targets) / sum(job.microbatches)
                loss.backward()
                losses[iteration] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


class Replay:
    """All live workers of a schedule in one process, each with its own layers."""

    def __init__(self, schedule: Schedule, model: Model, data: Data) -> None:
        self.schedule, self.model, self.data = schedule, model, data
        self.layers = {}
        for worker in schedule.seat_of:
            first = 2 * worker.column
            self.layers[worker] = nn.ModuleList([model.build(first), model.build(first + 1)])
        self.optimizers = {worker: make_optimizer(layers) for worker, layers in self.layers.items()}
        # Both by (stage, pipeline, micro-batch).
        self.sent: dict[tuple[int, int, int], Tensor] = {}
        """Activations on the way up, gradients on the way down, by the stage that waits."""
        self.held: dict[tuple[int, int, int], tuple[Tensor, Tensor, Tensor | None]] = {}
        """A stage's input and output from F to W, from I on the output's gradient.

        The gradient is None where the output is the loss.
        """
        self.handlers = {
            OpKind.F: self.forward,
            OpKind.I: self.backward_input,
            OpKind.W: self.backward_weight,
            OpKind.A: self.all_reduce,
            OpKind.O: self.step,
        }

    def run(self, iteration: int) -> float:
        """Run all ops of all live workers, earliest start first; return the mean loss."""
        self.iteration, self.loss = iteration, 0.0
        for op in sorted(self.schedule.all_ops(), key=lambda op: op.start_ticks):
            self.handlers[op.kind](op)
        return self.loss

    def forward(self, op: Op) -> None:
        """Run an F: the activation goes to the next stage; the last computes the loss."""
        key = op.slice, op.pipeline, op.microbatch
        tokens, targets = self.data.batch(
            Microbatch(self.iteration, op.pipeline, op.microbatch), *SHAPE
        )
        value = self.sent.pop(key).requires_grad_() if op.slice else tokens
        output = nn.Sequential(*self.layers[op.worker])(value)
        if self.schedule.grid.is_last(op.slice):
            output = self.model.loss(output, targets) / self.schedule.grid.total_microbatches
            self.loss += output.item()
        else:
            self.sent[op.slice + 1, op.pipeline, op.microbatch] = output.detach()
        self.held[key] = value, output, None

    def backward_input(self, op: Op) -> None:
        """Run an I: compute the gradient of the input, for which the stage before waits.

        The first stage's input, tokens, has none.
        """
        key = op.slice, op.pipeline, op.microbatch
        value, output, _ = self.held[key]
        gradient = None if self.schedule.grid.is_last(op.slice) else self.sent.pop(key)
        self.held[key] = value, output, gradient
        if op.slice:
            (result,) = torch.autograd.grad(output, value, gradient, retain_graph=True)
            self.sent[op.slice - 1, op.pipeline, op.microbatch] = result

    def backward_weight(self, op: Op) -> None:
        """Run a W: add the gradients of the parameters to those of earlier micro-batches.

        No other stage waits for it.
        """
        _, output, gradient = self.held.pop((op.slice, op.pipeline, op.microbatch))
        output.backward(gradient, inputs=list(self.layers[op.worker].parameters()))

    def all_reduce(self, op: Op) -> None:
        """Sum the gradients of a stage over its live workers (op A).

        The first of them does it for all.
        """
        peers = [worker for worker in self.layers if worker.column == op.slice]
        if op.worker == peers[0]:
            for copies in zip(*(self.layers[peer].parameters() for peer in peers), strict=True):
                total = torch.stack([copy.grad for copy in copies]).sum(0)
                for copy in copies:
                    copy.grad.copy_(total)

    def step(self, op: Op) -> None:
        """Run an O: step the optimizer, as this stage's gradients are complete.

        Other stages may still be at their backward.
        """
        self.optimizers[op.worker].step()
        self.optimizers[op.worker].zero_grad()


def main() -> None:
    """Plan around a dead worker, replay, and compare with one process."""
    job, config = parse_job(JOB), configuration()
    usual = plan_job(job, method="1f1b").schedule
    schedule = plan_job(job, [DEAD]).schedule
    assert check(schedule) == []
    print(
        f"period: {usual.period_ticks} with 1F1B on nine workers, {schedule.period_ticks} by this "
        f"schedule on eight ({schedule.status}); {schedule.rerouted} micro-batches of {DEAD} run "
        "on its peers"
    )
    model, data = (
        Model(config.model, config.training.seed, torch.float64, torch.device("cpu")),
        Data(config),
    )
    plain = train_plainly(job, model, data)
    replay = Replay(schedule, model, data)
    replayed = [replay.run(iteration) for iteration in range(ITERATIONS)]
    with tempfile.TemporaryDirectory() as out:
        trained = run(schedule, config, out=Path(out)).losses
    print(" one process       replay  8 processes")
    for row in zip(plain, replayed, trained, strict=True):
        print(" ".join(f"{loss:12.9f}" for loss in row))
        assert max(row) - min(row) < TOLERANCE
    print(f"equal to {TOLERANCE:g}")


if __name__ == "__main__":
    main()
