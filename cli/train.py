"""`slipstream train`: plan a job, or take a schedule, and train its model by it."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from cli.check import read_or_refuse
from cli.console import answer_no, duration, err, out, parse_workers, print_json, refuse
from cli.plan import (
    Backward,
    Failed,
    How,
    JobFile,
    Optimizer,
    TimeLimit,
    make_plan,
    read_job_or_refuse,
)
from planner.job import Job
from runtime.config import ConfigError, RunConfig, parse_run_config
from runtime.launch import RunError, RunResult, join, run
from runtime.placement import PlacementError
from runtime.rendezvous import Rendezvous, RendezvousError
from schedules.check import check
from schedules.schedule import Schedule

MAX_ITERATIONS = 2**40


def train(job: JobFile,
          schedule: Annotated[Path | None, typer.Option("--schedule", metavar="FILE", help=(
              "Train by this schedule, made with `slipstream plan`, instead of planning one."))] = None,
          iterations: Annotated[int | None, typer.Option("--iterations", metavar="N", min=0, max=MAX_ITERATIONS, help=(
              "Optimizer steps. Default: what the job file says."))] = None,
          failed: Failed = None, backward: Backward = None, optimizer: Optimizer = None, method: How = "cp-sat",
          time_limit: TimeLimit = 10.0,
          dtype: Annotated[str | None, typer.Option("--dtype", metavar="float32|float64|bf16", help=(
              "Arithmetic; bf16 is autocast. Default: what the job file says."))] = None,
          seed: Annotated[int | None, typer.Option("--seed", metavar="N", min=0, max=2**31 - 1, help=(
              "Seed of parameters, text and planner. Default: what the job file says."))] = None,
          out_folder: Annotated[Path | None, typer.Option("--out", metavar="DIR", help=(
              "Where results go. Default: runs/NAME, with the job file's name."))] = None,
          nodes: Annotated[int, typer.Option("--nodes", metavar="N", min=1, max=4096, help=(
              "Machines to train on; run the command on each."))] = 1,
          node: Annotated[int, typer.Option("--node", metavar="I", min=0, max=4095, help=(
              "Which of them this is. Node 0 plans and leads."))] = 0,
          rendezvous: Annotated[str | None, typer.Option("--rendezvous", metavar="HOST:PORT", help=(
              "Where node 0 can be reached by the others. Only in a network you trust."))] = None,
          json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Train a job's model, one process a live worker, replaying a schedule.

    Writes schedule.json, losses.jsonl, trace.json, parameters/ and logs/ into --out. On several machines, run the
    same command on each, with --nodes, --node and --rendezvous.
    """
    meeting = _meeting_point(nodes, node, rendezvous)
    folder = out_folder or Path("runs") / job.stem
    wanted = read_job_or_refuse(job)
    config = _config(wanted, job, dtype=dtype, seed=seed, iterations=iterations)
    if node > 0:
        assert meeting is not None
        with _refusals():
            join(meeting, node=node, nodes=nodes, out=folder)
        if json:
            print_json({"node": node})
        return
    if schedule is not None:
        if failed or backward or optimizer:
            refuse("--schedule says which workers are down and how to run: leave out --failed, --backward and "
                   "--optimizer")
        chosen = _fitting(schedule, wanted)
    else:
        chosen = make_plan(wanted, parse_workers(failed or []), backward=backward, optimizer=optimizer, method=method,
                           time_limit=time_limit, seed=seed or 0).schedule
    with _refusals(), _progress(config.training.iterations) as tell:
        result = run(chosen, config, out=folder, nodes=nodes, rendezvous=meeting, progress=tell)
    if json:
        print_json(report(result))
    else:
        out.print(summary(result), highlight=False)


def report(result: RunResult) -> dict[str, object]:
    """The answer of `slipstream train --json`; durations in seconds."""
    return {
        "iterations": len(result.losses),
        "losses": [loss if math.isfinite(loss) else None for loss in result.losses],
        "parameter_digest": result.parameter_digest,
        "recoveries": [],
        "measured_period": result.measured_period_seconds,
        "planned_period": result.planned_period_seconds,
    }


def summary(result: RunResult) -> str:
    """A few lines a person reads: how the loss went, how fast, and where everything is."""
    lines = []
    if result.losses and result.measured_period_seconds is not None:
        lines.append(f"{len(result.losses)} iterations, loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}")
        lines.append(f"period {duration(result.measured_period_seconds)} measured, "
                     f"{duration(result.planned_period_seconds)} planned with the job file's times")
    lines.append(f"parameters {result.parameter_digest[:16]}, everything in {result.out}")
    return "\n".join(lines)


def _meeting_point(nodes: int, node: int, rendezvous: str | None) -> Rendezvous | None:
    if node >= nodes:
        refuse(f"--node {node}: expected 0 to {nodes - 1}, with --nodes {nodes}")
    if rendezvous is None:
        if nodes > 1:
            refuse("--nodes needs --rendezvous HOST:PORT, an address of node 0 that the others can reach")
        return None
    try:
        return Rendezvous.parse(rendezvous)
    except ValueError as error:
        refuse(f"--rendezvous: {error}")


def _config(job: Job, path: Path, **overrides: object) -> RunConfig:
    try:
        return parse_run_config(job.model, job.training, **overrides)
    except ConfigError as error:
        refuse(f"{path}: {error}")


def _fitting(path: Path, job: Job) -> Schedule:
    """The schedule in a file; exits 2 unless it is of this job's shape, 1 when it breaks a rule."""
    schedule = read_or_refuse(path)
    grid = schedule.grid
    for what, of_schedule, of_job in (
            ("pipelines", grid.pipelines, job.pipelines), ("stages", grid.columns, job.stages),
            ("micro-batches", list(grid.microbatches), list(job.microbatches)),
            ("columns of virtual stages", [stage.column for stage in grid.stages], list(job.columns))):
        if of_schedule != of_job:
            refuse(f"{path}: made for another job: its {what} are {of_schedule}, the job's {of_job}")
    violations = check(schedule)
    if violations:
        answer_no(f"{path}: breaks a rule: {violations[0]}")
    return schedule


@contextmanager
def _refusals() -> Iterator[None]:
    """Ends the program with one line when a run cannot begin (exit 2), fails (1), or is interrupted (130)."""
    try:
        yield
    except (ConfigError, PlacementError, RendezvousError) as error:
        refuse(error)
    except OSError as error:
        refuse(f"{error.filename or '--out'}: cannot be used: {error.strerror}")
    except RunError as error:
        answer_no(error)
    except KeyboardInterrupt:
        err.print("slipstream: interrupted; all workers are gone, and the losses so far are on disk", style="yellow")
        raise typer.Exit(130) from None


@contextmanager
def _progress(iterations: int) -> Iterator[Callable[[int, float], None]]:
    """A bar on stderr, and above it a line for each iteration."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task("starting the workers", total=iterations)

        def tell(iteration: int, loss: float) -> None:
            bar.update(task, completed=iteration + 1, description=f"loss {loss:.4f}")
            bar.console.print(f"iteration {iteration:>6}  loss {loss:.6f}", highlight=False)

        yield tell
