"""Provide published points to compare with, and their job, as far as it is known.

The points are digitised from the vector graphics of the authors' SOSP 2024 talk and poster of
ReCycle (arXiv 2405.14009): 24 A100 GPUs, 6 pipelines x 4 stages, 80 Gb/s. The index of a list is
the number of failed workers, its values are samples per second. Numbers of micro-batches, stage
times and memory are not published.
"""

from collections.abc import Sequence

import msgspec

from slipstream.cli.figures.figure import Series
from slipstream.planner.job.file import Job, StageTimes
from slipstream.planner.simulation.availability_trace import AvailabilityTrace
from slipstream.planner.simulation.throughput import Throughputs
from slipstream.planner.simulation.trace_file import build_from_counts

SOURCE = "ReCycle (SOSP 2024, arXiv 2405.14009), digitised from the authors' talk and poster"
PIPELINES = 6
STAGES = 4
FAULT_SCALED = (11.34, 10.87, 10.39, 9.92, 9.45, 8.98, 8.51, 8.03, 7.56, 7.09)
RECYCLE_6_7B = (11.34, 11.287, 10.888, 10.683, 10.47, 9.494, 9.308, 9.13, 8.899, 8.85)
OOBLECK_6_7B_MAX = (11.34, 11.22, 10.52, 9.82, 9.47, 9.12, 8.77, 8.5, 8.15, 7.89)
"""Best throughput of Oobleck by number of failed workers, between reconfigurations."""
BAMBOO_350M_MAX = (13.41, 12.78, 12.2, 11.84, 11.32, 10.79, 10.14, 9.45, 8.12, 7.26)
AVERAGES = {
    "6.7B": {"recycle": 10.80, "oobleck": 9.01, "fault-scaled": 10.27},
    "350M": {"recycle": 19.49, "oobleck": 18.10, "bamboo": 11.86},
}
"""Average throughput over the availability trace."""
FAULT_FREE = {"6.7B": 11.34, "350M": 20.55}
PARAMETERS = {"6.7B": 6.7e9, "350M": 350e6}

SECONDS_PER_SAMPLE = 144.0
WORKERS_AND_SAMPLES = (
    (24, 3),
    (23, 11),
    (22, 3),
    (23, 5),
    (24, 4),
    (22, 2),
    (21, 2),
    (22, 2),
    (21, 2),
    (22, 4),
    (24, 4),
    (23, 3),
    (20, 4),
    (22, 3),
    (24, 4),
    (23, 6),
    (24, 3),
    (23, 6),
    (22, 3),
    (24, 3),
    (23, 6),
    (22, 4),
    (24, 3),
    (21, 6),
    (22, 3),
    (23, 3),
    (21, 3),
    (19, 3),
    (17, 4),
    (16, 2),
    (15, 3),
    (16, 1),
    (18, 6),
    (21, 20),
    (20, 2),
    (21, 2),
    (22, 7),
    (24, 4),
)
"""Availability trace: live workers, and the sampling intervals that they stay."""

LAYERS = {"6.7B": 32, "350M": 24}
"""Numbers of layers of the models of these sizes (GPT-3, Brown et al. 2020, table 2.1)."""
MICROBATCHES = (8, 12, 16, 24, 32)
"""Numbers of micro-batches per pipeline, which are not published.

They go from twice to eight times the stages; see `NOMINAL`.
"""
NOMINAL = 16
"""Nominal number of micro-batches: 4 S, the only one in a source.

Oobleck's planner has it for templates.
"""
SETTLE_SECONDS = 0.25
"""Seconds of counted steps for a plan with layers that move."""
OPTIMIZER = 1.0
"""Length of the optimizer step in forwards, which is not published."""


def published_job(model: str, microbatches: int) -> Job:
    """Return the job of the published points: F = I = W on all stages.

    As in the paper's worked example, transfers are hidden. Times are such that plain 1F1B with all
    workers alive makes the published samples per second, with one sample per micro-batch.
    """
    op = _job(model, microbatches, 1.0)
    return _job(
        model, microbatches, Throughputs(op).one_f_one_b_rate(PIPELINES) / FAULT_FREE[model]
    )


def _job(model: str, microbatches: int, op_seconds: float) -> Job:
    ops = (float(f"{op_seconds:.6g}"),) * STAGES
    step = (float(f"{OPTIMIZER * op_seconds:.6g}"),) * STAGES
    times = StageTimes(
        forward=ops,
        backward_input=ops,
        backward_weight=ops,
        optimizer=step,
        all_reduce=(0.0,) * STAGES,
        transfer=0.0,
    )
    return Job(
        name=f"published {model}",
        pipelines=PIPELINES,
        stages=STAGES,
        microbatches=(microbatches,) * PIPELINES,
        time=times,
        columns=tuple(range(STAGES)),
        layers=(LAYERS[model] // STAGES,) * STAGES,
    )


def published_trace(seed: int = 0) -> AvailabilityTrace:
    """Return the availability trace.

    The workers that leave are not published, and drawn at random.
    """
    clock, counts = 0.0, []
    for workers, samples in WORKERS_AND_SAMPLES:
        counts.append((clock, workers))
        clock += samples * SECONDS_PER_SAMPLE
    note = "which workers leave is drawn at random: it is not published"
    return msgspec.structs.replace(
        build_from_counts(counts, clock, "published", seed), notes=(SOURCE, note)
    )


def band(
    name: str, by_assumption: Sequence[Sequence[float]], nominal: int, *, is_reference: bool = False
) -> Series:
    """Return a series from a list of values for each assumption.

    It has those of `nominal`, with the least and the largest.
    """
    columns = list(zip(*by_assumption, strict=True))
    return Series(
        name=name,
        values=tuple(by_assumption[nominal]),
        low=tuple(map(min, columns)),
        high=tuple(map(max, columns)),
        is_reference=is_reference,
    )
