"""`slipstream plan`: a job and its failed workers become one checked schedule."""

from pathlib import Path
from typing import Annotated, cast

import typer

from cli.drawing.text_timeline import timeline
from cli.shared.console import answer_no, duration, err, out, print_json, refuse
from cli.shared.inputs import (
    parse_workers,
    read_job_or_refuse,
    read_text_or_refuse,
    require_choice,
    require_writable,
    write_or_refuse,
)
from cli.shared.options import Backward, Failed, JobFile, Json, MethodName, Optimizer, OutFile, Seed, TimeLimit
from cli.shared.planning import compile_planner, make_plan, plan_options
from cli.shared.role_changes import role_change_lines
from planner.job.file import Job, JobError
from planner.judge import judge_order
from planner.model.problem import NoPlanError
from planner.plan import Plan
from schedules.codec import encode
from schedules.schedule import OptimizerMode
from schedules.torchcsv import MAX_BYTES, TorchCsvError, read_order

Normalise = Annotated[bool, typer.Option("--normalise", help=(
    "Let live workers take over other roles where that shortens the period; the schedule says who moves."))]
Given = Annotated[tuple[str, Path] | None, typer.Option("--from", metavar="FORMAT FILE", help=(
    "Time and check an existing order instead of planning one. FORMAT is torch-csv: what torch.distributed.pipelining "
    "writes and loads, one row for each rank."))]


def plan(job: JobFile, failed: Failed = None, backward: Backward = None, optimizer: Optimizer = None,
         method: MethodName = "cp-sat", time_limit: TimeLimit = 10.0, normalise: Normalise = False, seed: Seed = 0,
         given: Given = None, out_file: OutFile = None, json: Json = False) -> None:
    """Plan one schedule for a job and the workers that are down.

    Ctrl-C ends the search early; the best plan found until then is printed and written.
    """
    wanted = read_job_or_refuse(job)
    require_writable(out_file)
    if given is not None:
        if failed or backward or normalise:
            refuse("--from gives the order: leave out --failed, --backward and --normalise")
        made = _judge(wanted, *given, optimizer=optimizer)
    else:
        options = plan_options(backward=backward, optimizer=optimizer, method=method, time_limit=time_limit, seed=seed)
        made = make_plan(wanted, parse_workers(failed or []), options, normalise=normalise)
    if out_file is not None:
        write_or_refuse(out_file, encode(made.schedule))
    if json:
        print_json(made.report())
        return
    out.print(timeline(made.schedule, out.width))
    out.print(_summary(made), highlight=False)
    if out_file is not None:
        err.print(f"written to {out_file}", highlight=False)


def _judge(job: Job, form: str, path: Path, *, optimizer: str | None) -> Plan:
    """Time and check the order in a file. Exits 2 where it is none for this job, 1 where it breaks a rule."""
    require_choice("--from", form, ("torch-csv",))
    require_choice("--optimizer", optimizer, ("staggered", "synchronous"))
    try:
        rows = read_order(read_text_or_refuse(path, MAX_BYTES), str(path))
        compile_planner()
        judged = judge_order(job, rows, str(path), optimizer=cast(OptimizerMode, optimizer or "staggered"))
    except (JobError, TorchCsvError) as error:
        refuse(error)
    except NoPlanError as error:
        answer_no(error)
    if judged.violations:
        answer_no(f"{path}: breaks a rule: {judged.violations[0]}")
    return judged.plan


def _summary(made: Plan) -> str:
    """A few lines for a reader: the period, its proven bound, and what the failures cost."""
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
    return "\n".join([*lines, *role_change_lines(schedule)])
