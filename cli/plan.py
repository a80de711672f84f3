"""`slipstream plan`: a job and its failed workers become one checked schedule."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, cast

import typer

from cli.console import (
    answer_no,
    completing,
    duration,
    err,
    near,
    out,
    parse_workers,
    print_json,
    read_text_or_refuse,
    refuse,
    require_writable,
    write_or_refuse,
)
from cli.moves import move_lines
from cli.timeline import timeline
from planner.job.file import Job, JobError, read_job
from planner.judge import judge_order
from planner.model.problem import NoPlanError
from planner.normalise import normalised
from planner.options import PlanOptions
from planner.plan import Plan, plan_with
from planner.progress import ProgressCallback
from planner.search.solve import METHODS, Method
from schedules.codec import encode
from schedules.schedule import BackwardMode, OptimizerMode, Worker
from schedules.torchcsv import MAX_BYTES, TorchCsvError, read_order

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job file (TOML).")]
Failed = Annotated[list[str] | None, typer.Option("--failed", metavar="D.S", help=(
    "A worker that is down, as PIPELINE.STAGE; may be repeated."))]
Backward = Annotated[str | None, typer.Option("--backward", metavar="split|fused",
                                                  autocompletion=completing("split", "fused"), help=(
    "split: weight gradients are ops of their own that fill bubbles; fused: they follow the input gradients. "
    "Default: split; fused for 1f1b."))]
Optimizer = Annotated[str | None, typer.Option("--optimizer", metavar="staggered|synchronous",
                                                   autocompletion=completing("staggered", "synchronous"), help=(
    "staggered: a stage steps as soon as its own gradients are reduced; synchronous: all stages wait for the last. "
    "Default: staggered; synchronous for 1f1b."))]
How = Annotated[str, typer.Option("--method", metavar="cp-sat|greedy|1f1b|recycle",
                                        autocompletion=completing(*METHODS), help=(
    "cp-sat: list schedulers, annealing, the solver; greedy: list schedulers only; to compare with, 1f1b: the usual "
    "schedule, and recycle: 1F1B order with re-routed work in its bubbles."))]
TimeLimit = Annotated[float, typer.Option("--time-limit", metavar="SEC", min=0.01, max=7 * 86400, help=(
    "Seconds to search at most."))]
Normalise = Annotated[bool, typer.Option("--normalise", help=(
    "Let live workers take over other roles where that shortens the period; the schedule says who moves."))]
Given = Annotated[tuple[str, Path] | None, typer.Option("--from", metavar="FORMAT FILE", help=(
    "Time and check an order that somebody else made instead of planning one. FORMAT is torch-csv: what "
    "torch.distributed.pipelining dumps and loads, a row a rank."))]
Seed = Annotated[int, typer.Option("--seed", metavar="N", min=0, max=2**31 - 1, help="Seed of every random choice.")]

OutFile = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write the schedule to this file.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def plan(job: JobFile, failed: Failed = None, backward: Backward = None, optimizer: Optimizer = None,
         method: How = "cp-sat", time_limit: TimeLimit = 10.0, normalise: Normalise = False, seed: Seed = 0,
         given: Given = None, out_file: OutFile = None, json: Json = False) -> None:
    """Plan one schedule for a job and the workers that are down.

    Ctrl-C ends the search early; the best plan found until then is printed and written.
    """
    wanted = read_job_or_refuse(job)
    require_writable(out_file)
    if given is not None:
        if failed or backward or normalise:
            refuse("--from gives the order: leave out --failed, --backward and --normalise")
        made = judge(wanted, *given, optimizer=optimizer)
    else:
        made = make_plan(wanted, parse_workers(failed or []), backward=backward, optimizer=optimizer, method=method,
                         time_limit=time_limit, seed=seed, normalise=normalise)
    if out_file is not None:
        write_or_refuse(out_file, encode(made.schedule))
    if json:
        print_json(made.report())
        return
    out.print(timeline(made.schedule, out.width))
    out.print(summary(made), highlight=False)
    if out_file is not None:
        err.print(f"written to {out_file}", highlight=False)


def read_job_or_refuse(path: Path) -> Job:
    """The job in a file; exits 2 with one line where it cannot be used."""
    try:
        return read_job(path)
    except JobError as error:
        refuse(error)


def make_plan(job: Job, failed: tuple[Worker, ...], *, backward: str | None, optimizer: str | None, method: str,
              time_limit: float, seed: int, normalise: bool = False) -> Plan:
    """Plan with progress on stderr. Exits 2 on options that do not fit, 1 where no plan can exist."""
    require_choice("--backward", backward, ("split", "fused"))
    require_choice("--optimizer", optimizer, ("staggered", "synchronous"))
    require_choice("--method", method, METHODS)
    options = PlanOptions(backward=cast(BackwardMode | None, backward), method=cast(Method, method), seed=seed,
                          optimizer=cast(OptimizerMode | None, optimizer), time_limit=time_limit)
    try:
        with planning() as progress:
            if normalise:
                return normalised(job, failed, options, progress=progress)
            return plan_with(options, job, failed, progress=progress)
    except JobError as error:
        refuse(error)
    except NoPlanError as error:
        answer_no(error)


def judge(job: Job, form: str, path: Path, *, optimizer: str | None) -> Plan:
    """Time the order in a file. Exits 2 where it is none for this job, 1 where it breaks a rule."""
    require_choice("--from", form, ("torch-csv",))
    require_choice("--optimizer", optimizer, ("staggered", "synchronous"))
    try:
        rows = read_order(read_text_or_refuse(path, MAX_BYTES), str(path))
        judged = judge_order(job, rows, str(path), optimizer=cast(OptimizerMode, optimizer or "staggered"))
    except (JobError, TorchCsvError) as error:
        refuse(error)
    except NoPlanError as error:
        answer_no(error)
    if judged.violations:
        answer_no(f"{path}: breaks a rule: {judged.violations[0]}")
    return judged.plan


def require_choice(option: str, value: str | None, choices: tuple[str, ...]) -> None:
    """Exits 2 when an option is given a value that it does not know."""
    if value is not None and value not in choices:
        refuse(f"{option} {value}: expected {' or '.join(choices)}{near(value, choices)}")


@contextmanager
def planning() -> Iterator[ProgressCallback]:
    """Shows what the planner reports, with the time since it began, on stderr."""
    began = time.monotonic()
    with err.status("planning") as status:
        def report(message: str) -> None:
            status.update(f"planning: {message} (Ctrl-C keeps it)")
            err.print(f"{time.monotonic() - began:7.2f} s  {message}", style="dim", highlight=False)

        yield report


def summary(made: Plan) -> str:
    """A few lines a person reads: the period, how good it is proven to be, and what the failures cost."""
    schedule = made.schedule
    period, bound = (schedule.seconds(ticks) for ticks in (schedule.period_ticks, schedule.lower_bound_ticks))
    proof = "proven optimal" if schedule.status == "optimal" else \
        f"at most {schedule.gap:.2%} above the best possible (proven bound {duration(bound)})"
    lines = [f"period {duration(period)}, {proof}; planned in {duration(made.solve_seconds)}"
             + (", interrupted" if made.interrupted else "")]
    if made.evidence:
        lines.append(made.evidence)
    if schedule.failed:
        live, workers = len(schedule.seats), schedule.grid.pipelines * schedule.grid.columns
        lines.append(f"{', '.join(map(str, schedule.failed))} down: {schedule.rerouted} micro-batch runs re-routed to "
                     "peers")
        lines.append(f"throughput {made.fault_free_period / period:.1%} of fault-free (period "
                     f"{duration(made.fault_free_period)}), with {live} of {workers} workers = {live / workers:.1%}")
    return "\n".join([*lines, *move_lines(schedule)])
