"""Implement `slipstream demo`: plan the published example, train a small model."""

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from slipstream.cli.drawing.text_timeline import draw_timeline
from slipstream.cli.shared.console import duration, err, out, print_json, refuse
from slipstream.cli.shared.options import Json, require_writable
from slipstream.cli.shared.planning import compile_planner
from slipstream.planner.job.file import Job, StageMemory, read_job
from slipstream.planner.plan import Plan, plan_job
from slipstream.runtime.config import ConfigError, RunConfig, parse_run_config
from slipstream.runtime.launch import RunError, RunOptions, RunResult, run
from slipstream.runtime.run_folder import FolderError
from slipstream.runtime.tools.reference import reference_run
from slipstream.schedules.schedule import Schedule, Worker

JOBS = Path(__file__).resolve().parent / "jobs"
DEAD_WORKER = Worker(1, 2)
"""Worker that is down in the published example, which is planned."""
ABSENT_WORKER = Worker(1, 1)
"""Worker that is missing in the second of the two training runs."""
SHORT_ITERATIONS = 5

Out = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Where the training runs leave their files.")
]
Short = Annotated[
    bool, typer.Option("--short", help=f"Train for {SHORT_ITERATIONS} iterations only.")
]


class _Variant(msgspec.Struct, frozen=True):
    """Plan in the demo's table, beside the period that was published for it, or ""."""

    name: str
    plan: Plan
    published: str


def demo(out_dir: Out = Path("out/demo"), short: Short = False, json: Json = False) -> None:
    """Plan the published worked example, then train a small GPT with and without one of its
    workers.
    """
    if json:
        out.quiet = True
    require_writable(out_dir / "whole" / "schedule.json")
    start_time = time.monotonic()
    compile_planner()
    ideas = _plan_worked_example()
    answer = _train_and_compare(out_dir, short)
    out.print(
        f"\nThe whole demo took {duration(time.monotonic() - start_time)}. Next: slipstream plan "
        f"{os.path.relpath(JOBS / 'worked-example.toml')} --failed 1.2 --failed 2.0",
        soft_wrap=True,
    )
    if json:
        print_json({"periods": {idea.name: idea.plan.period for idea in ideas}, **answer})


def _plan_worked_example() -> list[_Variant]:
    """Plan the published example in five ways; print the periods, and draw two plans."""
    job = read_job(JOBS / "worked-example.toml")
    out.rule("Planning: 3 pipelines x 4 stages x 6 micro-batches")
    with err.status("planning"):
        ideas = list(_plan_variants(job))
    # The published period next to each plan's shows that both agree.
    table = Table("schedule", "period", "proven bound", "published", box=SIMPLE_HEAD)
    for idea in ideas:
        schedule = idea.plan.schedule
        table.add_row(
            idea.name,
            duration(schedule.seconds(schedule.period_ticks)),
            duration(schedule.seconds(schedule.lower_bound_ticks)),
            idea.published,
        )
    out.print(table)
    out.print("published: ReCycle, SOSP 2024 (F = I = W = 1 s here, optimizer 3 s)\n", style="dim")
    out.print(f"With worker {DEAD_WORKER} down: as fast as 1F1B with all workers", style="bold")
    out.print(draw_timeline(ideas[-1].plan.schedule, out.width))
    out.print("\nFault-free", style="bold")
    out.print(draw_timeline(ideas[1].plan.schedule, out.width))
    return ideas


def _plan_variants(job: Job) -> Sequence[_Variant]:
    # The memory that 1F1B takes: an activation for each stage from this one on.
    tight = msgspec.structs.replace(
        job,
        memory=StageMemory(
            capacity=tuple(float(job.stages - stage) for stage in range(job.stages)),
            activation=(1.0,) * job.stages,
            weight_stash=(0.0,) * job.stages,
        ),
    )
    down = f"{DEAD_WORKER} down: "
    return (
        _Variant("fault-free, 1F1B", _plan_or_interrupt(job, method="1f1b"), "30 s"),
        _Variant("fault-free, split + staggered", _plan_or_interrupt(job), ""),
        _Variant(
            down + "re-routing, memory of 1F1B",
            _plan_or_interrupt(tight, [DEAD_WORKER], backward="fused", optimizer="synchronous"),
            "39 s",
        ),
        _Variant(
            down + "+ split backward",
            _plan_or_interrupt(job, [DEAD_WORKER], optimizer="synchronous"),
            "32 s",
        ),
        _Variant(down + "+ staggered optimizer", _plan_or_interrupt(job, [DEAD_WORKER]), "30 s"),
    )


def _plan_or_interrupt(job: Job, failed: Sequence[Worker] = (), **options: Any) -> Plan:
    """Return `plan_job` of these arguments; raise KeyboardInterrupt if it was interrupted."""
    plan = plan_job(job, failed, **options)
    if plan.interrupted:
        raise KeyboardInterrupt
    return plan


def _train_and_compare(folder: Path, short: bool) -> dict[str, object]:
    """Train with all workers, without one, and in one process; return results for JSON."""
    job = read_job(JOBS / "small-gpt.toml")
    config = parse_run_config(
        job.model, job.training, iterations=SHORT_ITERATIONS if short else None
    )
    out.print()
    out.rule(
        f"Training: a GPT on {job.pipelines} pipelines x {job.stages} stages, "
        f"{config.training.dtype}"
    )
    # Two runs and a reference read the same samples, so their losses can be compared.
    whole = _plan_or_interrupt(job).schedule
    broken = _plan_or_interrupt(job, [ABSENT_WORKER]).schedule
    try:
        runs = {
            "all workers": _train_one(whole, config, folder / "whole", "all workers"),
            f"without {ABSENT_WORKER}": _train_one(
                broken, config, folder / "without", f"without {ABSENT_WORKER}"
            ),
        }
        with err.status("the same in one plain process"):
            reference = reference_run(config, job.microbatches, config.training.iterations)
    except OSError as error:
        refuse(f"{error.filename or folder}: cannot be used: {error.strerror}")
    except (ConfigError, FolderError, RunError) as error:
        refuse(error)
    # Losses differ by rounding only, whoever runs the micro-batches.
    losses = {name: result.losses for name, result in runs.items()} | {
        "one process": tuple(reference.losses)
    }
    digits = min(count_agreeing_digits(losses["one process"], series) for series in losses.values())
    _print_losses(losses)
    out.print(
        f"Losses of all {len(reference.losses)} iterations agree to {digits} digits: with all "
        f"{len(whole.seats)} workers, with {len(broken.seats)}, and in one process.",
        style="bold",
    )
    out.print(
        "Each iteration reads other samples of the text: a loss is higher where these are unlike "
        "those before.",
        style="dim",
        soft_wrap=True,
    )
    for name, result in runs.items():
        out.print(
            f"{name}: {result.out} holds schedule.json, trace.json, losses.jsonl and parameters",
            style="dim",
            soft_wrap=True,
        )
    return {
        "losses": losses,
        "agreeing_digits": digits,
        "parameter_digests": {name: result.parameter_digest for name, result in runs.items()},
    }


def _train_one(schedule: Schedule, config: RunConfig, folder: Path, title: str) -> RunResult:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err) as progress:
        task = progress.add_task(title, total=config.training.iterations, loss="")
        return run(
            schedule,
            config,
            out=folder,
            options=RunOptions(force=True),
            progress=lambda iteration, loss: progress.update(
                task, completed=iteration + 1, loss=f"loss {loss:.4f}"
            ),
        )


def count_agreeing_digits(left: Sequence[float], right: Sequence[float]) -> int:
    """Return to how many significant digits, at most 16, all numbers of two series agree.

    The result is 16 for empty series, and may be negative. Raises ValueError if the series have
    different lengths. Numbers must be finite.
    """
    worst = max(
        (abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in zip(left, right, strict=True)),
        default=0.0,
    )
    return min(16, math.floor(-math.log10(worst))) if worst else 16


def _print_losses(losses: dict[str, tuple[float, ...]]) -> None:
    table = Table("iteration", *losses, box=SIMPLE_HEAD)
    count = len(losses["one process"])
    shown_iterations = sorted({*range(min(3, count)), *range(0, count, 5), count - 1})
    for iteration in shown_iterations:
        table.add_row(str(iteration), *(f"{series[iteration]:.13f}" for series in losses.values()))
    out.print(table)
