"""Implement `slipstream plan`, which plans one checked schedule for a job and its failed workers."""

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.drawing.text_timeline import draw_timeline
from slipstream.cli.shared.console import complete_from, count_free_lines, err, out, print_json, refuse
from slipstream.cli.shared.inputs import (
    encode_or_refuse,
    failed_workers,
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
    Backward,
    Failed,
    FailedNode,
    JobFile,
    Json,
    MethodName,
    Optimizer,
    OutFile,
    Params,
    Placement,
    Seed,
    Settings,
    ShareDown,
    Steps,
    TimeLimit,
    Verbose,
)
from slipstream.cli.shared.plan_summary import (
    answer_lines,
    detail_lines,
    placement_lines,
    rank_lines,
    recomputation_lines,
    tally_lines,
)
from slipstream.cli.shared.planning import build_plan_options, find_pipeline, find_recomputation, make_plan
from slipstream.planner.job.file import read_job_text
from slipstream.planner.options import LAYERS
from slipstream.planner.placement import MAX_WEIGHED_FAILURES, MEAN_DOWN_SHARE
from slipstream.planner.report import (
    BANDWIDTH,
    Alternative,
    compute_transition,
    find_alternatives,
    placement_report,
    plan_report,
)
from slipstream.planner.search.list_scheduler import BASELINES
from slipstream.schedules.codec import MAX_OPS

Normalise = Annotated[bool, typer.Option("--normalise", rich_help_panel=PLANNED, help=(
    "Let live workers take over other roles where that shortens the period; the schedule says who moves."))]
LayersMode = Annotated[str, typer.Option("--layers", rich_help_panel=PLANNED, metavar="fixed|move",
                                         autocompletion=complete_from("fixed", "move"), help=(
    "fixed: layers stay with the workers that hold them, as right after a failure, and a micro-batch may be cut within "
    "a stage into slices (ranges of its layers), each run by another holder; move: layers may change hands, and the "
    "answer says what that takes."))]
FromCheckpoint = Annotated[bool, typer.Option("--from-checkpoint", rich_help_panel=PLANNED, help=(
    "With --layers move: layers that no live worker holds come from a checkpoint."))]
ForFailures = Annotated[int, typer.Option("--for-failures", rich_help_panel=PLANNED, metavar="K", min=0,
                                      max=MAX_WEIGHED_FAILURES, help=(
    "With --placement any: choose what has the most throughput in the mean, with 0 to K workers down as often as 1 % "
    "of them fail at once, see --share-down."))]
JobOut = Annotated[Path | None, typer.Option("--job-out", rich_help_panel=ANSWER, metavar="FILE", help=(
    "With --placement any: write the job file of what is found to this file."))]
Bandwidth = Annotated[float, typer.Option("--bandwidth", rich_help_panel=ANSWER,
                                          metavar="BYTES", min=1.0, max=1e15, help=(
    "Bytes a second that a worker sends or receives while layers move; with [training] tensor_parallel, each of its "
    "ranks."))]
COMPARE_SHARE, COMPARE_SECONDS = 0.25, 4.0
"""Limits of the time spent on comparisons after the plan: a share of the time limit, and a number of seconds."""
FAULT_FREE_SHARE = 0.2
"""Share of the comparison time that is used when no worker is down, because there are fewer alternatives."""


def plan(job: JobFile, settings: Settings = None, failed: Failed = None, failed_node: FailedNode = None,
         backward: Backward = None, optimizer: Optimizer = None, method: MethodName = "cp-sat",
         time_limit: TimeLimit = 10.0, steps: Steps = None, params: Params = None, normalise: Normalise = False,
         layers: LayersMode = "fixed", from_checkpoint: FromCheckpoint = False, bandwidth: Bandwidth = BANDWIDTH,
         placement: Placement = "given", for_failures: ForFailures = 0, share_down: ShareDown = MEAN_DOWN_SHARE,
         seed: Seed = 0, out_file: OutFile = None, job_out: JobOut = None, verbose: Verbose = False,
         json: Json = False) -> None:
    """Plan one schedule for a job and the workers that are down.

    Ctrl-C ends the search early; the best plan found until then is printed and written.
    """
    wanted = read_job_or_refuse(job, settings)
    require_trainable_tables(job, wanted)
    require_writable(out_file)
    require_writable(job_out)
    if out_file is not None and (ops := 2 * wanted.depth * sum(wanted.microbatches)) > MAX_OPS:
        refuse(f"--out: a schedule of this job has {ops} ops or more, a file at most {MAX_OPS}: leave out --out, or "
               "plan fewer micro-batches or pipelines")
    down = failed_workers(wanted, failed, failed_node)
    other_plans: list[Alternative] = []
    _require_compatible(normalise=normalise, layers=layers, from_checkpoint=from_checkpoint)
    _require_placement_options(placement, failed=bool(down), normalise=normalise, moving=layers == "move",
                               baseline=method in BASELINES, for_failures=bool(for_failures),
                               job_out=job_out is not None)
    options = build_plan_options(backward=backward, optimizer=optimizer, method=method, time_limit=time_limit,
                                 steps=steps, params=params, seed=seed, layers=layers, from_checkpoint=from_checkpoint)
    clock = options.make_clock()
    found = None
    if placement == "any":
        found = find_pipeline(job, read_job_text(job, settings or ()), options, for_failures, share_down, clock)
        wanted, again, planned = found.job, found.recomputation, found.plan
    else:
        again = find_recomputation(job, wanted, options)
        if again is not None:
            left = 1 - options.params.blocks.recomputed_share
            wanted, options = again.job, options.with_limit(left * options.limit_seconds)
            clock = options.make_clock()
        planned = make_plan(wanted, down, options, normalise=normalise, clock=clock)
    if not json:  # what is only printed has time of its own: the same schedule is written with --json
        comparing = min(COMPARE_SECONDS, COMPARE_SHARE * options.limit_seconds) * (1.0 if down else FAULT_FREE_SHARE)
        other_plans = list(find_alternatives(wanted, down, planned, options, normalise=normalise, seconds=comparing,
                                             clock=clock))
    if out_file is not None:
        write_or_refuse(out_file, encode_or_refuse(planned.schedule))
    if found is not None and job_out is not None:
        write_or_refuse(job_out, found.text.encode())
    if json:
        print_json(plan_report(planned, wanted, bandwidth, again) | ({} if found is None else placement_report(found)))
        return
    chosen = [*(["--placement any"] if found else []), *(["--normalise"] if normalise else []),
              *(["--layers move"] if layers == "move" else [])]
    headline = answer_lines(planned, other_plans, chosen)
    remaining_lines = [*rank_lines(wanted), *placement_lines(found), *recomputation_lines(again),
                       *detail_lines(planned, other_plans, compute_transition(planned.schedule, wanted, bandwidth)),
                       *(tally_lines(planned) if verbose else [])]
    out.print("\n".join(headline))
    out.print(draw_timeline(planned.schedule, out.width, count_free_lines([*headline, *remaining_lines])))
    out.print("\n".join(remaining_lines))
    for file in (out_file, job_out):
        if file is not None:
            err.print(f"written to {file}", soft_wrap=True)


def _require_placement_options(placement: str, **others: bool) -> None:
    """Exit 2 if options are given that the value of --placement excludes.

    `others` tells by name whether each of these options is given.
    """
    require_choice("--placement", placement, PLACEMENTS)
    if placement == "given":
        if given := [name for name in ("for_failures", "job_out") if others[name]]:
            refuse(f"--{given[0].replace('_', '-')}: only with --placement any")
        return
    if others["failed"]:
        refuse("--placement any finds the pipeline of a whole job, and --failed comes later: leave one of them out; "
               "--for-failures K counts what failures will cost")
    for name, option in (("normalise", "--normalise"), ("moving", "--layers move"),
                         ("baseline", "--method 1f1b and recycle")):
        if others[name]:
            refuse(f"--placement any: not with {option}, which are for a placement that is given")


def _require_compatible(*, normalise: bool, layers: str, from_checkpoint: bool) -> None:
    """Exit 2 if --normalise, --layers and --from-checkpoint are given in a combination that has no meaning."""
    require_choice("--layers", layers, LAYERS)
    if normalise and layers == "move":
        refuse("--normalise moves whole roles, --layers move any layers: take one")
    if from_checkpoint and layers != "move":
        refuse("--from-checkpoint: only with --layers move")
