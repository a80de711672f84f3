"""A learning rate, a loader and a callback as transformers' Trainer has them.

The run that calls them loses worker 1.1.
"""

import tempfile

import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_cosine_schedule_with_warmup
from transformers.trainer_callback import PrinterCallback, TrainerControl, TrainerState

import slipstream
from slipstream.planner import parse_job
from slipstream.runtime.api import Injection, Return, parse_run_config, reference_run

JOB = """pipelines = 2
stages = 2
microbatches = 2
time = { forward = 1, backward_input = 1, backward_weight = 1 }
model = { blocks = 2, width = 16, heads = 2, context = 16 }
[training]
dtype = "float64"
learning_rate_schedule = "examples.trainer_callbacks:rate"
data = "examples.trainer_callbacks:Loader"
"""


def rate(config, iteration):
    """Return the share of the learning rate that transformers' scheduler gives to an iteration."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    return get_cosine_schedule_with_warmup(optimizer, 2, config.iterations).lr_lambdas[0](iteration)


class Loader:
    """The samples of an iteration, from a DataLoader that is shuffled by the iteration's number."""

    digest = "counting, version 1"

    def __init__(self, config):
        self._batch, starts = config.training.batch, torch.arange(64)[:, None]
        self._data = TensorDataset(
            (starts + torch.arange(config.model.context + 1)) % config.model.vocabulary
        )

    def samples(self, iteration, count):
        """Return `count` micro-batches, each as inputs and targets."""
        loader = DataLoader(
            self._data,
            self._batch,
            shuffle=True,
            generator=torch.Generator().manual_seed(iteration),
        )
        return [
            (tokens[:, :-1], tokens[:, 1:])
            for _, (tokens,) in zip(range(count), loader, strict=False)
        ]


def told(line):
    """Tell one of the Trainer's callbacks of a committed iteration."""
    PrinterCallback().on_log(
        None, TrainerState(), TrainerControl(), {"loss": line.loss, "rate": line.learning_rate}
    )


if __name__ == "__main__":
    job, dies = parse_job(JOB), slipstream.Worker(1, 1)
    planner = slipstream.FailurePlanner(job, first := slipstream.plan(job).schedule)
    with tempfile.TemporaryDirectory() as folder:
        result = slipstream.train(
            job,
            out=folder,
            schedule=first,
            options=slipstream.RunOptions(observe_iteration=told),
            resilience=slipstream.Resilience(
                scheduler=planner.after,
                injections=(Injection(dies, 3),),
                returns=(Return(dies, 5),),
            ),
        )
    expected = reference_run(parse_run_config(job.model, job.training), job.microbatches, 20)
    assert all(
        abs(ours - theirs) < 1e-9
        for ours, theirs in zip(result.losses, expected.losses, strict=True)
    )
