"""Implement `slipstream table`, which plans schedules for every number of failures ahead of time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from slipstream.cli.shared.console import duration, err, exit_negative, out, print_json, refuse
from slipstream.cli.shared.inputs import (
    may_exist,
    read_job_or_refuse,
    require_choice,
    require_trainable_tables,
    require_writable,
    write_or_refuse,
)
from slipstream.cli.shared.options import (
    ANSWER,
    PLACEMENTS,
    PLANNED,
    SEARCH,
    Backward,
    ExecutorName,
    JobFile,
    Json,
    MethodName,
    Optimizer,
    Params,
    Placement,
    Seed,
    Settings,
    ShareDown,
    Steps,
)
from slipstream.cli.shared.plan_summary import placement_lines
from slipstream.cli.shared.planning import (
    build_plan_options,
    compile_planner,
    find_pipeline,
    find_recomputation,
    open_executor_or_refuse,
)
from slipstream.planner.budget import CountCallback
from slipstream.planner.job.arrangement import MovableLayers
from slipstream.planner.job.file import JobError, parse_job, read_job_text
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.placement import MAX_WEIGHED_FAILURES, MEAN_DOWN_SHARE
from slipstream.planner.search.list_scheduler import BASELINES
from slipstream.planner.tables.build import WHOLE_TABLE, BuiltTable, Share, build_share
from slipstream.planner.tables.process_pool import PoolError
from slipstream.schedules.tables.file import READABLE_INDEX, TableError

MaxFailures = Annotated[int, typer.Option("--max-failures", rich_help_panel=PLANNED, metavar="K", min=0, help=(
    "Schedules for each number of failures up to this."))]
Exact = Annotated[bool, typer.Option("--exact", rich_help_panel=PLANNED, help=(
    "Also for each failure pattern of up to K failures, with which no worker has to change its role."))]
ByNode = Annotated[bool, typer.Option("--by-node", rich_help_panel=PLANNED, help=(
    "Also for each one and each two nodes (machines) that are lost, with all of their workers by [topology] of the job "
    "file: with each worker in its role, and for as many failures with roles moved."))]
ShareOption = Annotated[str | None, typer.Option("--share", rich_help_panel=SEARCH, metavar="I/N", help=(
    "Plan share I of N (0 to N - 1) of the entries, beside N - 1 such commands with the same folder, on any machines. "
    "The last one that finishes writes the table."))]
Jobs = Annotated[int | None, typer.Option("--jobs", rich_help_panel=SEARCH, metavar="N", min=1, max=1024, help=(
    "Processes to plan in. Default: one for each core."))]
TimeLimit = Annotated[float, typer.Option("--time-limit", rich_help_panel=SEARCH,
                                          metavar="SEC", min=0.01, max=7 * 86400, help=(
    "Seconds to search at most, for each entry."))]
JobOut = Annotated[Path | None, typer.Option("--job-out", rich_help_panel=ANSWER, metavar="FILE", help=(
    "With --placement any: the job file of what is found. Where it is there already, the table is planned for it."))]
OutFolder = Annotated[Path, typer.Option("--out", rich_help_panel=ANSWER, metavar="DIR", help="The table's folder.")]


def table(job: JobFile, max_failures: MaxFailures, out_folder: OutFolder, exact: Exact = False, by_node: ByNode = False,
          jobs: Jobs = None, share: ShareOption = None, executor: ExecutorName = None, backward: Backward = None,
          optimizer: Optimizer = None, method: MethodName = "cp-sat", time_limit: TimeLimit = 5.0, steps: Steps = None,
          params: Params = None, seed: Seed = 0, settings: Settings = None, placement: Placement = "given",
          share_down: ShareDown = MEAN_DOWN_SHARE, job_out: JobOut = None, json: Json = False) -> None:
    """Plan a table of schedules: two for every number of failures.

    In the first, roles move: live workers take over roles of dead ones where that costs least, and load their layers.
    The second is the settled answer, for which any layers move. Each single failure also has an answer that runs at
    once, with layers in place, with which `train` continues.

    Started again after Ctrl-C or a crash, it continues where it stopped; with a larger K it adds to the table. With
    --placement any, it first searches for the pipeline, for the time limit of one entry per number of failures.
    """
    require_choice("--placement", placement, PLACEMENTS)
    if (placement == "any") != (job_out is not None):
        refuse("--placement any and --job-out FILE: one needs the other; FILE is the job file to train with")
    if placement == "any" and method in BASELINES:
        refuse("--placement any: not with --method 1f1b and recycle, which are for a placement that is given")
    options = build_plan_options(backward=backward, optimizer=optimizer, method=method, time_limit=time_limit,
                                 steps=steps, params=params, seed=seed)
    try:
        # Read only once, so that the job stored with the table is the planned one, even if it comes from a pipe.
        text = read_job_text(job, settings or ())
        read = parse_job(text, str(job))
        require_trainable_tables(job, read)
        if job_out is not None:
            text = _place_job(job, text, job_out, options, max_failures, share_down, shared=share is not None)
            read = parse_job(text, str(job_out))
    except JobError as error:
        refuse(error)
    again = find_recomputation(job, read, options)
    read = read if again is None else again.job
    try:
        compile_planner()
        with open_executor_or_refuse(executor) as pool, _show_progress() as tell:
            built = build_share(read, text.encode(), out_folder, options, _to_share(share), max_failures=max_failures,
                                exact=exact, by_node=by_node, jobs=jobs or os.cpu_count() or 1, progress=tell,
                                executor=pool)
    except (JobError, TableError) as error:
        refuse(error)
    except OSError as error:
        refuse(f"{error.filename or out_folder}: cannot be written: {error.strerror}")
    except (NoPlanError, PoolError) as error:
        exit_negative(error)
    except KeyboardInterrupt:
        err.print(f"interrupted; finished entries are kept in {out_folder}: the same command goes on from there",
                  style="yellow", soft_wrap=True)
        raise typer.Exit(130) from None
    if json:
        print_json(built.report())
    elif isinstance(built, BuiltTable):
        _print_table(built, out_folder)
    else:
        out.print(f"{built.finished} of {built.entries} entries are in {out_folder}, {built.planned} planned now, in "
                  f"{duration(built.seconds)}; the last share that finishes writes the table", soft_wrap=True)


def _place_job(job: Path, text: str, job_out: Path, options: PlanOptions, failures: int, down: float, *,
               shared: bool) -> str:
    """Return the text of the job with the best placement, found by an earlier command or now.

    A placement that is found now is written to `job_out`. It is not searched for again: a second search by the clock
    may find another one, for which an unfinished table is useless.
    """
    if may_exist(job_out):
        if not MovableLayers(text).is_rearrangement(read_job_or_refuse(job_out)):
            refuse(f"{job_out}: exists already, and is not {job} with another placement; remove it, or choose "
                   "another file")
        err.print(f"{job_out}: exists already, and has the placement", soft_wrap=True)
        return read_job_text(job_out)
    if shared:
        refuse(f"--share: {job_out} does not exist; find the placement first, with `slipstream plan {job} --placement "
               f"any --for-failures {failures} --job-out {job_out}`")
    require_writable(job_out)
    weighed = min(failures, MAX_WEIGHED_FAILURES)
    found = find_pipeline(job, text, options.with_limit((1 + weighed) * options.limit_seconds), weighed, down)
    write_or_refuse(job_out, found.text.encode())
    err.print("\n".join(placement_lines(found)), soft_wrap=True)
    return found.text


def _to_share(text: str | None) -> Share:
    try:
        return WHOLE_TABLE if text is None else Share.parse(text)
    except ValueError as error:
        refuse(f"--share: {error}")


@contextmanager
def _show_progress() -> Iterator[CountCallback]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
               TimeRemainingColumn())
    with Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        task = bar.add_task("planning", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print_table(built: BuiltTable, folder: Path) -> None:
    text = (folder / READABLE_INDEX).read_text(encoding="utf-8").partition("\n\n")[2]
    out.print(text, soft_wrap=True)
    out.print(f"{len(built.index.entries)} entries, {built.planned} planned now, in {duration(built.seconds)}; worst "
              f"gap {built.worst_gap:.2%} ({built.worst_key}); {built.bytes:,} bytes in {folder}", soft_wrap=True)
