"""Build jobs for measurements."""

import argparse
from collections.abc import Sequence
from typing import Any

from slipstream.planner.job.file import Job, parse_job
from slipstream.planner.job.toml import job_text


def uniform_text(
    pipelines: int,
    stages: int,
    microbatches: int,
    *,
    op: float = 10,
    optimizer: float = 5,
    transfer: float = 1,
    capacity: float | None = None,
    layers: Sequence[int] | None = None,
) -> str:
    """Return a job file of equal stages; F, I and W take `op` seconds each.

    Memory, if limited, counts micro-batches until W. `layers` has the number of layers of each
    stage.
    """
    tables: dict[str, Any] = {
        "name": f"{pipelines}x{stages}x{microbatches}",
        "pipelines": pipelines,
        "stages": stages,
        "microbatches": microbatches,
        "time": {
            "forward": op,
            "backward_input": op,
            "backward_weight": op,
            "optimizer": optimizer,
            "transfer": transfer,
        },
    }
    if capacity is not None:
        tables["memory"] = {"capacity": capacity, "activation": 1, "weight_stash": 1}
    if layers is not None:
        tables["placement"] = {"layers": list(layers)}
    return job_text(tables, {})


def uniform_job(
    pipelines: int,
    stages: int,
    microbatches: int,
    *,
    op: float = 10,
    optimizer: float = 5,
    transfer: float = 1,
    capacity: float | None = None,
    layers: Sequence[int] | None = None,
) -> Job:
    """Return the job of `uniform_text`."""
    return parse_job(
        uniform_text(
            pipelines,
            stages,
            microbatches,
            op=op,
            optimizer=optimizer,
            transfer=transfer,
            capacity=capacity,
            layers=layers,
        )
    )


def gpt_job(stages: int, microbatches: int, options: argparse.Namespace, **training: object) -> Job:
    """Return a job of one pipeline of a GPT whose times are to be measured.

    The options `blocks`, `width`, `context` and `batch` give its shape.
    """
    tables: dict[str, Any] = {
        "name": "gpt",
        "pipelines": 1,
        "stages": stages,
        "microbatches": microbatches,
        "time": {"forward": 1, "backward_input": 1, "backward_weight": 1},
        "model": {"blocks": options.blocks, "width": options.width, "context": options.context},
        "training": {"batch": options.batch, **training},
    }
    return parse_job(job_text(tables, {}))
