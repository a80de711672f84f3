"""Implement `slipstream table`: schedules for every number of failures ahead of time."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from typer import Option

from slipstream.cli.shared import options
from slipstream.cli.shared.console import (
    LogProgress,
    duration,
    err,
    exit_negative,
    out,
    print_json,
    refuse,
)
from slipstream.cli.shared.options import (
    may_exist,
    read_job_or_refuse,
    require_choice,
    require_trainable_tables,
    require_writable,
    write_or_refuse,
)
from slipstream.cli.shared.outputs import JOB
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
from slipstream.planner.job.file import Job, JobError, parse_job, read_job_text
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.placement import MAX_WEIGHED_FAILURES, MEAN_DOWN_SHARE
from slipstream.planner.search.list_scheduler import BASELINES
from slipstream.planner.tables.build import WHOLE_TABLE, BuiltTable, Share, build_share
from slipstream.planner.tables.process_pool import PoolError
from slipstream.schedules.tables.file import READABLE_INDEX, TableError

LESS_IMPORTANT = (
    "status",
    "s to move",
    "GB to move",
    "settled gap",
    "fault-scaled",
    "settled s",
    "period s",
)
"""Columns of the index that a narrow terminal lacks; the first is left out first."""

FINISHING = "all are planned; entries take over shorter plans of others, and the table is written"
"""Line that is printed after the last plan, since the table's end takes a while."""


class TableRequest(msgspec.Struct, frozen=True):
    """Argument and options of one `slipstream table`, in the order of its help."""

    job: options.JobFile
    max_failures: Annotated[
        int,
        Option(
            rich_help_panel=options.PLANNED,
            metavar="K",
            min=0,
            help=("Schedules for each number of failures up to this."),
        ),
    ]
    out_folder: Annotated[
        Path,
        Option(
            "--out", rich_help_panel=options.ANSWER, metavar="DIR", help=("The table's folder.")
        ),
    ]
    exact: Annotated[
        bool,
        Option(
            "--exact",
            rich_help_panel=options.PLANNED,
            help=(
                "Also for each failure pattern of up to K failures, with which no worker has to "
                "change its role."
            ),
        ),
    ] = False
    by_node: Annotated[
        bool,
        Option(
            "--by-node",
            rich_help_panel=options.PLANNED,
            help=(
                "Also for each one and each two nodes (machines) that are lost, with all of their "
                "workers by [topology] of the job file: with each worker in its role, and for as "
                "many failures with roles moved."
            ),
        ),
    ] = False
    jobs: Annotated[
        int | None,
        Option(
            rich_help_panel=options.SEARCH,
            metavar="N",
            min=1,
            max=1024,
            help=("Processes to plan in. Default: one for each core."),
        ),
    ] = None
    share: Annotated[
        str | None,
        Option(
            rich_help_panel=options.SEARCH,
            metavar="I/N",
            help=(
                "Plan share I of N (0 to N - 1) of the entries, at the same time as N - 1 such "
                "commands with the same folder, on any machines. The last one that finishes "
                "writes the table."
            ),
        ),
    ] = None
    executor: options.ExecutorName = None
    backward: options.Backward = None
    optimizer: options.Optimizer = None
    method: options.MethodName = "cp-sat"
    time_limit: Annotated[
        float,
        Option(
            rich_help_panel=options.SEARCH,
            metavar="SEC",
            min=0.01,
            max=7 * 86400,
            help=("Seconds to search at most, for each entry."),
        ),
    ] = 5.0
    steps: options.Steps = None
    params: options.Params = None
    seed: options.Seed = 0
    settings: options.Settings = None
    placement: options.Placement = "given"
    share_down: options.ShareDown = MEAN_DOWN_SHARE
    job_out: Annotated[
        Path | None,
        Option(
            rich_help_panel=options.ANSWER,
            metavar=JOB,
            help=(
                "With --placement any: the job file of what is found. Where it is there already, "
                "the table is planned for it."
            ),
        ),
    ] = None
    json: options.Json = False


@options.take_request
def table(request: TableRequest) -> None:
    """Plan a table of schedules: two for every number of failures.

    In the first, roles move: live workers take over roles of dead ones where that costs least, and
    load their layers. The second is the settled answer, for which any layers move. Each single
    failure also has an answer that runs at once, with layers in place, with which `train`
    continues.

    Started again after Ctrl-C or a crash, it continues where it stopped; with a larger K it adds to
    the table. With --placement any, it first searches for virtual stages, their layers and their
    workers, for at most K + 1 times as long as for one entry.
    """
    require_choice("--placement", request.placement, options.PLACEMENTS)
    if (request.placement == "any") != (request.job_out is not None):
        refuse(
            "--placement any and --job-out FILE: one needs the other; FILE is the job file to "
            "train with"
        )
    if request.placement == "any" and request.method in BASELINES:
        refuse(
            "--placement any: not with --method 1f1b and recycle, which are for a placement that "
            "is given"
        )
    plan_options = build_plan_options(
        backward=request.backward,
        optimizer=request.optimizer,
        method=request.method,
        time_limit=request.time_limit,
        steps=request.steps,
        params=request.params,
        seed=request.seed,
    )
    job, given, text = _read_placed_job(request, plan_options)
    # Entries are kept as they finish, so that an interrupted command can continue.
    try:
        compile_planner()
        with (
            open_executor_or_refuse(request.executor) as pool,
            _show_progress(is_whole=request.share is None) as tell,
        ):
            built = build_share(
                job,
                text.encode(),
                request.out_folder,
                plan_options,
                _to_share(request.share),
                max_failures=request.max_failures,
                exact=request.exact,
                by_node=request.by_node,
                jobs=request.jobs or os.cpu_count() or 1,
                progress=tell,
                executor=pool,
                base_job=given,
            )
    except (JobError, TableError) as error:
        refuse(error)
    except OSError as error:
        refuse(f"{error.filename or request.out_folder}: cannot be written: {error.strerror}")
    except (NoPlanError, PoolError) as error:
        exit_negative(error)
    except KeyboardInterrupt:
        err.print(
            f"interrupted; finished entries are kept in {request.out_folder}: the same command "
            "continues from there",
            style="yellow",
            soft_wrap=True,
        )
        raise typer.Exit(130) from None
    if request.json:
        print_json(built.report())
    elif isinstance(built, BuiltTable):
        _print_table(built, request.out_folder)
    else:
        out.print(
            f"{built.finished} of {built.entries} entries are in {request.out_folder}, "
            f"{built.planned} planned now, in {duration(built.seconds)}; the last share that "
            "finishes writes the table",
            soft_wrap=True,
        )


def _read_placed_job(
    request: TableRequest, plan_options: PlanOptions
) -> tuple[Job, Job | None, str]:
    """Return the job to plan for, the job before recomputation was chosen, and the text."""
    # The second is None if there was no choice of layers that recompute.
    try:
        text = read_job_text(request.job, request.settings or ())
        job = parse_job(text, str(request.job))
        require_trainable_tables(request.job, job)
        if request.job_out is not None:
            text = _place_job(request, request.job_out, text, plan_options)
            job = parse_job(text, str(request.job_out))
    except JobError as error:
        refuse(error)
    again = find_recomputation(request.job, job, plan_options)
    return (job, None, text) if again is None else (again.job, job, text)


def _place_job(request: TableRequest, job_out: Path, text: str, plan_options: PlanOptions) -> str:
    """Return the job file's text with the best placement, from `job_out` or from a search.

    Exits 2 if `job_out` is of another job, or is missing for a --share.
    """
    # What a search finds is written to `job_out`, so that the next command plans for the same. An
    # existing placement is not searched for again: a second search by the clock may find another
    # one, for which an unfinished table is useless.
    if may_exist(job_out):
        if not MovableLayers(text).is_rearrangement(read_job_or_refuse(job_out)):
            refuse(
                f"{job_out}: exists already, and is not {request.job} with another placement; "
                "remove it, or choose another file"
            )
        err.print(f"{job_out}: exists already, and has the placement", soft_wrap=True)
        return read_job_text(job_out)
    if request.share is not None:
        refuse(
            f"--share: {job_out} does not exist; find the placement first, with `slipstream plan "
            f"{request.job} --placement any --for-failures {request.max_failures} --job-out "
            f"{job_out}`"
        )
    require_writable(job_out)
    # The placement is the one with most throughput in the mean over failures that entries are for.
    weighed = min(request.max_failures, MAX_WEIGHED_FAILURES)
    limited = plan_options.with_limit((1 + weighed) * plan_options.limit_seconds)
    found = find_pipeline(request.job, text, limited, weighed, request.share_down)
    write_or_refuse(job_out, found.text.encode())
    err.print("\n".join(placement_lines(found)), soft_wrap=True)
    return found.text


def _to_share(text: str | None) -> Share:
    try:
        return WHOLE_TABLE if text is None else Share.parse(text)
    except ValueError as error:
        refuse(f"--share: {error}")


@contextmanager
def _show_progress(*, is_whole: bool) -> Iterator[CountCallback]:
    """Yield a function that shows how many entries are finished."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, disable=not err.is_terminal) as bar:
        task, log = bar.add_task("planning", total=None), LogProgress("planning", "entries")

        def report_progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            log.show_count(done, total)
            if done == total and is_whole:  # thousands of patterns take minutes more
                err.print(FINISHING, style="dim", soft_wrap=True)

        yield report_progress


def _print_table(built: BuiltTable, folder: Path) -> None:
    text = (folder / READABLE_INDEX).read_text(encoding="utf-8").partition("\n\n")[2]
    out.print(fit_rows(text, out.width) if out.is_terminal else text, soft_wrap=True)
    count = len(built.index.entries)
    out.print(
        f"{count} {'entry' if count == 1 else 'entries'}, {built.planned} planned now, in "
        f"{duration(built.seconds)}; worst gap {built.worst_gap:.2%} ({built.worst_key}); "
        f"{built.bytes:,} bytes in {folder}",
        soft_wrap=True,
    )


def fit_rows(text: str, width: int) -> str:
    """Return a text whose Markdown table is at most `width` characters wide, if possible.

    To that end, columns are left out in the order of `LESS_IMPORTANT`.
    """
    lines = text.split("\n")
    numbers = [number for number, line in enumerate(lines) if line.startswith("|")]
    rows = [lines[number].strip("|").split("|") for number in numbers]
    for name in LESS_IMPORTANT:
        if not rows or sum(len(cell) + 1 for cell in rows[0]) + 1 <= width:
            break
        column = next((column for column, cell in enumerate(rows[0]) if cell.strip() == name), None)
        if column is not None:
            rows = [[*row[:column], *row[column + 1 :]] for row in rows]
    for number, row in zip(numbers, rows, strict=True):
        lines[number] = f"|{'|'.join(row)}|"
    return "\n".join(lines)
