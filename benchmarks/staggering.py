"""Measure the cost of clipping for a staggered optimizer: nothing while no gradient is clipped.

    python -m benchmarks.staggering [--milliseconds 40] [--iterations 16]

There are four stages and six micro-batches; F, I and W sleep one unit, the optimizer three, so that
four workers fit on any machine. Prints the median time from one iteration's end to the next:
planned, without clipping, with a norm that is never exceeded, with one that is always exceeded, and
for a synchronous optimizer. Exit status 1 when a norm that is never exceeded costs more than 3 %.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.jobs import uniform_job
from slipstream.planner.plan import plan_job
from slipstream.runtime.computing.slices import SliceRunner
from slipstream.runtime.config import parse_run_config
from slipstream.runtime.launch import run
from slipstream.runtime.models.gpt import GPT
from slipstream.runtime.state.part_optimizer import PartOptimizer
from slipstream.schedules.schedule import OptimizerMode

UNIT = "STAGGERING_UNIT_SECONDS"
LIMIT = 1.03


def _sleep_in_ops() -> None:
    """Make every op of this process's stages sleep, in addition to the little it computes."""

    def slept(original: Callable[..., Any], units: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(units * float(os.environ[UNIT]))
            return original(*args, **kwargs)

        return call

    SliceRunner.forward = slept(SliceRunner.forward, 1)  # type: ignore[method-assign]
    SliceRunner.backward_input = slept(SliceRunner.backward_input, 1)  # type: ignore[method-assign]
    SliceRunner.backward_weight = slept(  # type: ignore[method-assign]
        SliceRunner.backward_weight, 1
    )
    PartOptimizer.step = slept(PartOptimizer.step, 3)  # type: ignore[method-assign]


class Sleepers(GPT):
    """Tiny GPT whose workers sleep."""

    def build(self, layer: int) -> nn.Module:
        if SliceRunner.forward.__name__ == "forward":
            _sleep_in_ops()
        return GPT.build(self, layer)


def period(
    optimizer: OptimizerMode, clip_norm: float | None, seconds: float, iterations: int
) -> tuple[float, float]:
    """Return the planned and measured seconds from iteration to iteration."""
    job = uniform_job(1, 4, 6, op=seconds, optimizer=3 * seconds, transfer=0)
    config = parse_run_config(
        {"name": "benchmarks.staggering:Sleepers", "blocks": 2, "context": 4, "width": 4},
        {"iterations": iterations, "clip_norm": clip_norm, "device": "cpu"},
    )
    ends: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        result = run(
            plan_job(job, optimizer=optimizer, time_limit=5).schedule,
            config,
            out=Path(folder),
            progress=lambda *_: ends.append(time.perf_counter()),
        )
    between = [after - before for before, after in pairwise(ends[2:])]
    return result.planned_period_seconds, statistics.median(between)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--milliseconds", type=float, default=40)
    parser.add_argument("--iterations", type=int, default=16)
    options = parser.parse_args()
    os.environ[UNIT] = str(options.milliseconds / 1e3)
    table = Table("optimizer", "clip_norm", "planned ms", "measured ms", "measured / planned")
    measured = {}
    for name, optimizer, clip_norm in (
        ("none", "staggered", None),
        ("never exceeded", "staggered", 1e6),
        ("always exceeded", "staggered", 1e-6),
        ("none", "synchronous", None),
    ):
        planned, real = period(
            optimizer,  # type: ignore[arg-type]
            clip_norm,
            options.milliseconds / 1e3,
            options.iterations,
        )
        measured[optimizer, name] = real
        table.add_row(
            optimizer, name, f"{planned * 1e3:.1f}", f"{real * 1e3:.1f}", f"{real / planned:.3f}"
        )
    Console().print(table)
    cost = measured["staggered", "never exceeded"] / measured["staggered", "none"]
    print(f"a norm that is never exceeded costs {cost - 1:+.1%}")
    sys.exit(cost > LIMIT)


if __name__ == "__main__":
    main()
