"""Measure how well a plan made from a profile predicts the measured period.

    python -m benchmarks.prediction [--width 256] [--blocks 6] [--batch 4] [--iterations 12]
                                    [--repeats 3]

The grid is 1 pipeline with as many stages as there are cores (or GPUs), at most 4, so that each
worker has its own. Each repeat profiles, plans, trains, and profiles again. It counts only if the
machine was as fast after the run as before it and no profile had to wait for other programs.
Repeats that do not count are printed, too. Exit status 1 when the median of those that count is
more than 10 % off, and 2 when the machine is too busy to tell.
"""

import argparse
import math
import os
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.jobs import gpt_job
from slipstream.cli.profile import job_tables
from slipstream.planner.job.file import parse_job
from slipstream.planner.job.toml import job_text
from slipstream.planner.plan import plan_job
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.launch import run
from slipstream.runtime.placement import split_layers
from slipstream.runtime.tools.profile import Profile, profile_stages

LIMIT = 0.10
CALM = 0.05
"""Maximum change of speed, and maximum waiting share, of an idle machine."""
TRIES = 4
"""Maximum number of repeats, as a multiple of the requested ones."""


class Predicted(NamedTuple):
    """Periods in seconds, and whether the machine was calm."""

    planned: float
    measured: float
    calm: bool


def predict_and_measure(
    options: argparse.Namespace, stages: int, backward: str, folder: Path
) -> Predicted:
    """Run one repeat."""
    guess = gpt_job(stages, options.microbatches, options, iterations=options.iterations)
    config = parse_run_config(guess.model, guess.training)
    measure = partial(
        profile_stages,
        config,
        split_layers(options.blocks + 2, stages),
        copies=1,
        workers=stages,
        microbatches=options.microbatches,
    )
    measured = measure()
    job = parse_job(job_text(job_tables(guess, measured), {}))
    schedule = plan_job(job, backward=backward, time_limit=5).schedule  # type: ignore[arg-type]
    result = run(schedule, config, out=folder)
    assert result.measured_period_seconds is not None
    after = measure()
    calm = (
        abs(work(after) / work(measured) - 1) < CALM and max(measured.waiting, after.waiting) < CALM
    )
    return Predicted(result.planned_period_seconds, result.measured_period_seconds, calm)


def work(measured: Profile) -> float:
    """Return the seconds of one micro-batch in all stages."""
    return sum(
        stage.forward + stage.backward_input + stage.backward_weight for stage in measured.stages
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in (
        ("width", 256),
        ("blocks", 6),
        ("context", 128),
        ("batch", 4),
        ("microbatches", 6),
        ("iterations", 12),
        ("repeats", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    stages = max(2, min(4, torch.cuda.device_count() or os.cpu_count() or 1))
    columns = (
        f"{'backward':<10}{'planned ms':>12}{'measured ms':>13}{'measured / planned':>20}  counts"
    )
    print(
        f"{options.blocks} blocks of width {options.width} on {stages} stages\n{columns}",
        flush=True,
    )
    worst = 0.0
    for backward in ("split", "fused"):
        ratios: list[float] = []
        for _ in range(TRIES * options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                outcome = predict_and_measure(options, stages, backward, Path(folder))
            ratio = outcome.measured / outcome.planned
            print(
                f"{backward:<10}{outcome.planned * 1e3:12.1f}{outcome.measured * 1e3:13.1f}"
                f"{ratio:20.3f}  "
                f"{'yes' if outcome.calm else 'no: busy'}",
                flush=True,
            )
            ratios += [ratio] * outcome.calm
            if len(ratios) == options.repeats:
                break
        worst = max(worst, abs(statistics.median(ratios) - 1) if ratios else math.inf)
    if worst == math.inf:
        print("the machine is too busy to tell")
        sys.exit(2)
    print(f"medians of up to {options.repeats} repeats that count are at most {worst:.1%} off")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
