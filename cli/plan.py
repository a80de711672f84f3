"""Implement `slipstream plan`: one checked schedule for a job and its failed workers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from typer import Option

from slipstream.cli.drawing.text_timeline import draw_timeline
from slipstream.cli.shared import options
from slipstream.cli.shared.console import (
    complete_from,
    count_free_lines,
    err,
    out,
    print_json,
    refuse,
)
from slipstream.cli.shared.options import (
    encode_or_refuse,
    failed_workers,
    read_job_or_refuse,
    require_choice,
    require_trainable_tables,
    require_writable,
    write_or_refuse,
)
from slipstream.cli.shared.outputs import JOB
from slipstream.cli.shared.plan_summary import (
    answer_lines,
    detail_lines,
    placement_lines,
    rank_lines,
    recomputation_lines,
    tally_lines,
)
from slipstream.cli.shared.planning import (
    build_plan_options,
    find_pipeline,
    find_recomputation,
    make_plan,
)
from slipstream.planner.job.file import Job, read_job_text
from slipstream.planner.options import LAYERS
from slipstream.planner.placement import MAX_WEIGHED_FAILURES, MEAN_DOWN_SHARE, FoundPlacement
from slipstream.planner.plan import Plan
from slipstream.planner.recompute import Recomputation, with_bound_of_choices
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
from slipstream.schedules.schedule import Worker

COMPARE_SHARE = 0.25
"""Largest time for planning alternatives to compare with, as a share of the search's limit."""
COMPARE_SECONDS = 4.0
"""Largest time, in seconds, for planning alternatives to compare with."""
FAULT_FREE_SHARE = 0.2
"""Factor on both limits above if no worker is down: alternatives are fewer then."""


class PlanRequest(msgspec.Struct, frozen=True):
    """Argument and options of one `slipstream plan`, in the order of its help."""

    job: options.JobFile
    settings: options.Settings = None
    failed: options.Failed = None
    failed_node: options.FailedNode = None
    backward: options.Backward = None
    optimizer: options.Optimizer = None
    method: options.MethodName = "cp-sat"
    time_limit: options.TimeLimit = 10.0
    steps: options.Steps = None
    params: options.Params = None
    normalise: Annotated[
        bool,
        Option(
            "--normalise",
            rich_help_panel=options.PLANNED,
            help=(
                "Let live workers take over other roles where that shortens the period; the "
                "schedule says who moves."
            ),
        ),
    ] = False
    layers: Annotated[
        str,
        Option(
            rich_help_panel=options.PLANNED,
            metavar="fixed|move",
            autocompletion=complete_from(*LAYERS),
            help=(
                "fixed: layers stay with the workers that hold them, as right after a failure, "
                "and a micro-batch may be cut within a stage into slices (ranges of its layers), "
                "each run by another holder; move: layers may change hands, and the answer says "
                "what that takes."
            ),
        ),
    ] = "fixed"
    from_checkpoint: Annotated[
        bool,
        Option(
            "--from-checkpoint",
            rich_help_panel=options.PLANNED,
            help=("With --layers move: layers that no live worker holds come from a checkpoint."),
        ),
    ] = False
    bandwidth: Annotated[
        float,
        Option(
            rich_help_panel=options.ANSWER,
            metavar="BYTES",
            min=1.0,
            max=1e15,
            help=(
                "Bytes a second that a worker sends or receives while layers move; with "
                "[training] tensor_parallel, each of its ranks."
            ),
        ),
    ] = BANDWIDTH
    placement: options.Placement = "given"
    for_failures: Annotated[
        int,
        Option(
            rich_help_panel=options.PLANNED,
            metavar="K",
            min=0,
            max=MAX_WEIGHED_FAILURES,
            help=(
                "With --placement any: choose what has the most throughput in the mean, with 0 to "
                "K workers down as often as 1 % of them fail at once, see --share-down."
            ),
        ),
    ] = 0
    share_down: options.ShareDown = MEAN_DOWN_SHARE
    seed: options.Seed = 0
    out_file: options.OutFile = None
    job_out: Annotated[
        Path | None,
        Option(
            rich_help_panel=options.ANSWER,
            metavar=JOB,
            help=("With --placement any: write the job file of what is found to this file."),
        ),
    ] = None
    force: options.Force = False
    verbose: options.Verbose = False
    json: options.Json = False


@options.take_request
def plan(request: PlanRequest) -> None:
    """Plan one schedule for a job and the workers that are down.

    Ctrl-C ends the search early; the best plan found until then is printed and written.
    """
    job = read_job_or_refuse(request.job, request.settings)
    require_trainable_tables(request.job, job)
    require_writable(request.out_file)
    require_writable(request.job_out)
    if request.out_file is not None and (ops := 2 * job.depth * sum(job.microbatches)) > MAX_OPS:
        refuse(
            f"--out: a schedule of this job has {ops} ops or more, a file at most {MAX_OPS}: "
            "leave out --out, or plan fewer micro-batches or pipelines"
        )
    # The question: who is down, and how the answer is searched.
    down = failed_workers(job, request.failed, request.failed_node)
    _require_consistent(request, down)
    plan_options = build_plan_options(
        backward=request.backward,
        optimizer=request.optimizer,
        method=request.method,
        time_limit=request.time_limit,
        steps=request.steps,
        params=request.params,
        seed=request.seed,
        layers=request.layers,
        from_checkpoint=request.from_checkpoint,
    )
    # The answer, all parts of it within one limit.
    clock = plan_options.make_clock()
    found = None
    if request.placement == "any":
        text = read_job_text(request.job, request.settings or ())
        found = find_pipeline(
            request.job, text, plan_options, request.for_failures, request.share_down, clock
        )
        job, again, planned = found.job, found.recomputation, found.plan
    else:
        # A job without enough memory is planned with recomputation in some stages, whose choice
        # takes up to two shares of the limit; the bound is for all choices of these stages.
        given, again = job, find_recomputation(request.job, job, plan_options)
        if again is not None:
            limit, share = plan_options.limit_seconds, plan_options.params.blocks.recomputed_share
            left = max(limit - again.seconds, (1 - 2 * share) * limit, 0.0)
            job, plan_options = again.job, plan_options.with_limit(left)
            clock = plan_options.make_clock()
        planned = make_plan(job, down, plan_options, normalise=request.normalise, clock=clock)
        if again is not None:
            planned = msgspec.structs.replace(
                planned, schedule=with_bound_of_choices(planned.schedule, given, plan_options, down)
            )
    other_plans: list[Alternative] = []
    # What is only printed has time of its own: the same schedule is written with --json.
    if not request.json:
        seconds = min(COMPARE_SECONDS, COMPARE_SHARE * plan_options.limit_seconds) * (
            1.0 if down else FAULT_FREE_SHARE
        )
        other_plans += find_alternatives(
            job,
            down,
            planned,
            plan_options,
            normalise=request.normalise,
            seconds=seconds,
            clock=clock,
        )
    # Files first: what is printed says that they were written.
    if request.out_file is not None:
        write_or_refuse(request.out_file, encode_or_refuse(planned.schedule))
    if found is not None and request.job_out is not None:
        write_or_refuse(request.job_out, found.text.encode())
    if request.json:
        print_json(
            plan_report(planned, job, request.bandwidth, again)
            | ({} if found is None else placement_report(found))
        )
        return
    _print_plan(request, job, planned, other_plans, found, again)


def _print_plan(
    request: PlanRequest,
    job: Job,
    planned: Plan,
    other_plans: Sequence[Alternative],
    found: FoundPlacement | None,
    again: Recomputation | None,
) -> None:
    # The headline names the options that the answer depends on.
    choices = {
        "--placement any": found is not None,
        "--normalise": request.normalise,
        "--layers move": request.layers == "move",
    }
    chosen = [option for option, is_chosen in choices.items() if is_chosen]
    headline = answer_lines(planned, other_plans, chosen)
    transition = compute_transition(planned.schedule, job, request.bandwidth)
    remaining_lines = [
        *rank_lines(job),
        *placement_lines(found),
        *recomputation_lines(again),
        *detail_lines(planned, other_plans, transition),
        *(tally_lines(planned) if request.verbose else []),
    ]
    picture = draw_timeline(
        planned.schedule, out.width, count_free_lines([*headline, *remaining_lines])
    )
    texts = ["\n".join(headline), picture, "\n".join(remaining_lines)]
    # A small terminal shows what comes last.
    for text in [*texts[1:], texts[0]] if out.is_terminal else texts:
        out.print(text)
    for file in (request.out_file, request.job_out):
        if file is not None:
            err.print(f"written to {file}", soft_wrap=True)


def _require_consistent(request: PlanRequest, down: Sequence[Worker]) -> None:
    """Exit 2 if options are given that contradict each other."""
    # Options on what may move.
    require_choice("--layers", request.layers, LAYERS)
    if request.normalise and request.layers == "move":
        refuse("--normalise moves whole roles, --layers move any layers: take one")
    if request.from_checkpoint and request.layers != "move":
        refuse("--from-checkpoint: only with --layers move")
    # Options on the placement: a search for one is for a job without failures, and has its own
    # ways of planning.
    require_choice("--placement", request.placement, options.PLACEMENTS)
    if request.placement == "given":
        if request.for_failures or request.job_out is not None:
            refuse(
                f"{'--for-failures' if request.for_failures else '--job-out'}: only with "
                "--placement any"
            )
        return
    if down:
        refuse(
            "--placement any finds the pipeline of a whole job, and --failed comes later: leave "
            "one of them out; --for-failures K counts what failures will cost"
        )
    for is_given, option in (
        (request.normalise, "--normalise"),
        (request.layers == "move", "--layers move"),
        (request.method in BASELINES, "--method 1f1b and recycle"),
    ):
        if is_given:
            refuse(f"--placement any: not with {option}, which are for a placement that is given")
