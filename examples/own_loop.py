"""A training loop of one's own that replays a plan.

    torchrun --nproc-per-node 8 examples/own_loop.py

Layers, loss, optimizer and data are the program's. Three pipelines of three stages; worker 1.1 is
dead, so eight processes train, each as one live worker. Its peers 0.1 and 2.1 run its
micro-batches. There is no coordinator, job file or run folder. The losses equal those of one
process.
"""

import os

import torch
from torch import Tensor, nn

import slipstream
from slipstream.planner import parse_job

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
[placement]
layers = [2, 2, 2]
"""
DEAD = "1.1"
LAYERS = 6
VOCABULARY = 32
WIDTH = 16
TOKENS = 8
ITERATIONS = 5
TOLERANCE = 1e-9


def build_layer(layer: int) -> nn.Module:
    """Build a layer of the model, the same whoever builds it."""
    torch.manual_seed(layer)
    if layer == 0:
        return nn.Embedding(VOCABULARY, WIDTH).double()
    if layer < LAYERS - 1:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()
    return nn.Linear(WIDTH, VOCABULARY).double()


def compute_loss(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean loss of a micro-batch."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of some parameters."""
    return torch.optim.AdamW(parameters, lr=0.01)


def read_microbatch(iteration: int, pipeline: int, index: int) -> tuple[Tensor, Tensor]:
    """Return input and target: tokens that count on from a start that differs by micro-batch."""
    start = 7 * iteration + 5 * pipeline + 3 * index
    tokens = (torch.arange(TOKENS + 1) + torch.tensor([[start], [start + 11]])) % VOCABULARY
    return tokens[:, :-1], tokens[:, 1:]


def train_alone(microbatches: tuple[int, ...]) -> list[float]:
    """Train in one loop over all micro-batches; return the mean loss of each iteration."""
    model = nn.Sequential(*map(build_layer, range(LAYERS)))
    optimizer = make_optimizer([*model.parameters()])
    losses = [0.0] * ITERATIONS
    for iteration in range(ITERATIONS):
        for pipeline, number in enumerate(microbatches):
            for index in range(number):
                tokens, target = read_microbatch(iteration, pipeline, index)
                loss = compute_loss(model(tokens), target) / sum(microbatches)
                loss.backward()
                losses[iteration] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main() -> None:
    """Plan, replay what this process has to run, and compare with one process."""
    job = parse_job(JOB)
    # Counted steps instead of seconds: every process plans the same schedule.
    schedule = slipstream.plan(job, [DEAD], slipstream.PlanOptions(steps=2000)).schedule
    with slipstream.replay(
        schedule,
        layers=build_layer,
        loss=compute_loss,
        optimizer=make_optimizer,
        data=read_microbatch,
    ) as part:
        losses = [part.run(iteration) for iteration in range(ITERATIONS)]
    if os.environ.get("RANK", "0") == "0":
        alone = train_alone(job.microbatches)
        print(" one process  8 processes")
        for loss, replayed in zip(alone, losses, strict=True):
            print(f"{loss:12.9f} {replayed:12.9f}")
            assert abs(loss - replayed) < TOLERANCE
        print(f"equal to {TOLERANCE:g}")


if __name__ == "__main__":
    main()
