"""How well a plan made from a profile predicts the period that is then measured: profile, plan, train, compare.

    python -m benchmarks.prediction [--width 256] [--blocks 6] [--batch 4] [--iterations 12] [--repeats 3]

The grid is 1 pipeline x as many stages as there are cores (or GPUs), at most 4, so that each worker has one of its own.
Prints one table: the period planned from measured times, the median period of a run, and how far they are apart; a run
on a busy machine tells nothing. Exit status 1 when the median of the repeats is more than 10 % off.
"""

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from cli.profile import job_tables, job_text
from planner.job import parse_job
from planner.plan import plan_job
from runtime.config import parse_run_config
from runtime.launch import run
from runtime.layers import split_layers
from runtime.profile import profile

LIMIT = 0.10


def predict_and_measure(options: argparse.Namespace, stages: int, backward: str, folder: Path) -> tuple[float, float]:
    """Planned and measured period in seconds."""
    guess = parse_job(f"""
        name = "prediction"
        pipelines = 1
        stages = {stages}
        microbatches = {options.microbatches}
        [time]
        forward = 1
        backward_input = 1
        backward_weight = 1
        [model]
        blocks = {options.blocks}
        width = {options.width}
        context = {options.context}
        [training]
        batch = {options.batch}
        iterations = {options.iterations}
        """)
    config = parse_run_config(guess.model, guess.training)
    measured = profile(config, split_layers(options.blocks + 2, stages), pipelines=1, workers=stages,
                       microbatches=options.microbatches)
    job = parse_job(job_text(job_tables(guess, measured), {}))
    schedule = plan_job(job, backward=backward, time_limit=5).schedule  # type: ignore[arg-type]
    result = run(schedule, config, out=folder)
    assert result.measured_period_seconds is not None
    return result.planned_period_seconds, result.measured_period_seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("width", 256), ("blocks", 6), ("context", 128), ("batch", 4), ("microbatches", 6),
                          ("iterations", 12), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    stages = max(2, min(4, torch.cuda.device_count() or os.cpu_count() or 1))
    table = Table("backward", "planned ms", "measured ms", "measured / planned",
                  title=f"{options.blocks} blocks of width {options.width} on {stages} stages")
    worst = 0.0
    for backward in ("split", "fused"):
        ratios = []
        for _ in range(options.repeats):
            with tempfile.TemporaryDirectory() as folder:
                planned, measured = predict_and_measure(options, stages, backward, Path(folder))
            ratios.append(measured / planned)
            table.add_row(backward, f"{planned * 1e3:.1f}", f"{measured * 1e3:.1f}", f"{ratios[-1]:.3f}")
        worst = max(worst, abs(statistics.median(ratios) - 1))
    Console().print(table)
    print(f"medians of {options.repeats} are at most {worst:.1%} off")
    sys.exit(worst > LIMIT)


if __name__ == "__main__":
    main()
