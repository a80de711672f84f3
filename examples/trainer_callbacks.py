"""Parts of transformers' Trainer around a run that loses a worker: its learning rates, a loader's order, its callbacks.

    python -m examples.trainer_callbacks

Worker 1.1 is killed in iteration 3, and comes back. The losses are those of one process.
"""

import tempfile
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_cosine_schedule_with_warmup
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState

import slipstream
from slipstream.planner import parse_job
from slipstream.runtime.api import (
    Injection,
    Metrics,
    Return,
    RunConfig,
    TrainingConfig,
    parse_run_config,
    reference_run,
)

JOB = """
pipelines = 2
stages = 2
microbatches = 2
time = { forward = 1, backward_input = 1, backward_weight = 1 }
model = { blocks = 2, width = 16, heads = 2, context = 16 }
[training]
iterations = 8
batch = 2
dtype = "float64"
device = "cpu"
learning_rate_schedule = "examples.trainer_callbacks:rate"
data = "examples.trainer_callbacks:Loader"
"""


def rate(config: TrainingConfig, iteration: int) -> float:
    """The share of the learning rate that transformers' scheduler gives to an iteration."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return get_cosine_schedule_with_warmup(optimizer, 2, config.iterations).lr_lambdas[0](iteration)


class Loader:
    """The samples of an iteration, from a DataLoader that is shuffled by the iteration's number."""

    digest = "counting, version 1"

    def __init__(self, config: RunConfig) -> None:
        self._batch, starts = config.training.batch, torch.arange(64)[:, None]
        self._data = TensorDataset((starts + torch.arange(config.model.context + 1)) % config.model.vocabulary)

    def samples(self, iteration: int, count: int) -> list[tuple[torch.Tensor, ...]]:
        """`count` micro-batches of inputs and targets."""
        loader = DataLoader(self._data, self._batch, shuffle=True, generator=torch.Generator().manual_seed(iteration))
        return [(tokens[:, :-1], tokens[:, 1:]) for _, (tokens,) in zip(range(count), loader, strict=False)]


class Printed(TrainerCallback):
    """One of the Trainer's callbacks."""

    def on_log(self, args: object, state: TrainerState, control: TrainerControl, logs: object = None,  # noqa: ARG002
               **_: object) -> None:
        """Called for each iteration that is committed."""
        print(f"step {state.global_step} of {state.max_steps}: {logs}")


def main() -> None:
    """Train, and compare."""
    job = parse_job(JOB)
    with tempfile.TemporaryDirectory() as folder:
        first, dies = slipstream.plan(job).schedule, slipstream.Worker(1, 1)
        planner, callback, state = slipstream.FailurePlanner(job, first), Printed(), TrainerState(max_steps=8)

        def told(line: Metrics) -> None:
            state.global_step = line.iteration + 1
            callback.on_log(None, state, TrainerControl(), {"loss": line.loss, "learning_rate": line.learning_rate})

        result = slipstream.train(
            job, out=Path(folder) / "run", schedule=first, options=slipstream.RunOptions(observe_iteration=told),
            resilience=slipstream.Resilience(scheduler=planner.after, at_speeds=planner.at_speeds, rebalancer=planner,
                                             injections=(Injection(dies, 3),), returns=(Return(dies, 5),)))
        expected = reference_run(parse_run_config(job.model, job.training), job.microbatches, 8)
    assert all(abs(ours - theirs) < 1e-9 for ours, theirs in zip(result.losses, expected.losses, strict=True))
    print(f"{len(result.recoveries)} changes of members; losses are those of one process")


if __name__ == "__main__":
    main()
