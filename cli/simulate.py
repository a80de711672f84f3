"""Implement `slipstream simulate`, which simulates several policies over an availability trace."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as Grid
from typer import Option

from slipstream.cli.drawing.simulation_report import (
    build_simulation_report,
    describe_trace,
    summarize_comparison,
    three_digits,
    tokens_per_gpu_hour,
    worker_hours,
)
from slipstream.cli.shared.console import (
    LogProgress,
    err,
    exit_negative,
    out,
    print_json,
    refuse,
    watch_interrupts,
)
from slipstream.cli.shared.options import (
    ANSWER,
    ExecutorName,
    Force,
    JobFile,
    Json,
    Settings,
    failed_workers,
    load_table_or_refuse,
    read_job_or_refuse,
    require_choice,
    require_trainable_tables,
    require_writable,
    take_request,
    write_or_refuse,
)
from slipstream.cli.shared.outputs import PAGE
from slipstream.cli.shared.planning import (
    compile_planner,
    find_recomputation,
    open_executor_or_refuse,
)
from slipstream.planner.budget import STEP_SECONDS, CountCallback
from slipstream.planner.job.estimate import BYTES_HELD, BYTES_UNDO
from slipstream.planner.job.file import Job
from slipstream.planner.job.layers import held_state_share
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.simulation import (
    FAILURE_MODELS,
    PLAN_SECONDS,
    POLICIES,
    SETTLE_SECONDS,
    SLOW_MODELS,
    AvailabilityTrace,
    Cause,
    Comparison,
    Costs,
    FailureModel,
    Floats,
    Policy,
    Throughputs,
    TraceFileError,
    TraceSimulator,
    build_death_trace,
    compare_policies,
    costs_for,
    draw_slow_times,
    draw_trace,
    find_node_places,
    fit_to_job,
    gather_throughputs,
    group_gpus,
    make_single_gpu_model,
    read_availability_trace,
    simulate_traces,
    with_node_failures,
)
from slipstream.planner.tables.process_pool import PoolError, run_all
from slipstream.schedules.schedule import Worker
from slipstream.schedules.tables.table import Table

DEFAULT_PRESET = "llama-3"
"""Failure model that is used without --preset."""
DEFAULT_DAYS = 30.0
"""Length of a drawn trace in days, without --days."""
FAILURES = "The failures"
"""Title, in the help, of the options on failures."""
FOLLOWED = "The policies"
"""Title, in the help, of the options on policies."""
BYTES_PER_PARAMETER = BYTES_HELD + BYTES_UNDO
"""Bytes that a stage always holds for each parameter, as `slipstream new` estimates them."""
DEFAULT_PARAMETERS = 6.7e9
"""Number of parameters to assume if the job does not tell the model's size."""
FEWEST_PARAMETERS = 1e6
"""Smallest value of --parameters."""
MOST_PARAMETERS = 1e14
"""Largest value of --parameters."""


class SimulateRequest(msgspec.Struct, frozen=True):
    """Argument and options of one `slipstream simulate`, in the order of its help."""

    job: JobFile
    settings: Settings = None
    trace: Annotated[
        Path | None,
        Option(
            rich_help_panel=FAILURES,
            metavar="FILE",
            help=(
                "A failure trace: lines `YYYY-MM-DD, HH:MM:SS, LIVE`, or "
                "`MILLISECONDS,add|remove,NAME`, `MILLISECONDS,slow,NAME,FACTOR` (1: as usual) "
                "and `MILLISECONDS,gpus,NAME,ALIVE`. Without one, failures are drawn at the rates "
                "of --preset."
            ),
        ),
    ] = None
    policy: Annotated[
        list[str] | None,
        Option(
            rich_help_panel=FOLLOWED,
            metavar="NAME",
            help=(f"Only this policy; may be repeated. Known: {', '.join(POLICIES)}."),
        ),
    ] = None
    html: Annotated[
        Path | None,
        Option(
            rich_help_panel=ANSWER,
            metavar=PAGE,
            help=("Write the report to this file, a page that works offline."),
        ),
    ] = None
    table: Annotated[
        Path | None,
        Option(
            rich_help_panel=FOLLOWED,
            metavar="DIR",
            help=(
                "A table of schedules to take this planner's from, at once and with layers moved; "
                "what is not in it is planned on the spot."
            ),
        ),
    ] = None
    preset: Annotated[
        str | None,
        Option(
            rich_help_panel=FAILURES,
            metavar="NAME",
            help=(
                "Failure rates to draw from where there is no trace: "
                f"{', '.join(FAILURE_MODELS)}. Default: {DEFAULT_PRESET}."
            ),
        ),
    ] = None
    mtbf: Annotated[
        float | None,
        Option(
            rich_help_panel=FAILURES,
            metavar="HOURS",
            min=1e-3,
            max=1e9,
            help=(
                "Mean time between failures of one worker, in place of the preset's. Where the "
                "job has [topology], each takes its whole node."
            ),
        ),
    ] = None
    failed: Annotated[
        list[str] | None,
        Option(
            rich_help_panel=FAILURES,
            metavar="D.S",
            help=(
                "No trace: this worker, PIPELINE.STAGE, dies in the first minute and stays away; "
                "may be repeated. --days: 1."
            ),
        ),
    ] = None
    days: Annotated[
        float | None,
        Option(
            rich_help_panel=FAILURES,
            metavar="DAYS",
            min=1e-3,
            max=36500,
            help=(f"Length of a drawn trace. Default: {DEFAULT_DAYS:g}."),
        ),
    ] = None
    seed: Annotated[
        int,
        Option(
            rich_help_panel=FAILURES,
            metavar="N",
            min=0,
            max=2**31 - 1,
            help=("Seed of every random choice."),
        ),
    ] = 0
    seeds: Annotated[
        int,
        Option(
            rich_help_panel=FAILURES,
            metavar="N",
            min=1,
            max=100_000,
            help=(
                "Draw so many traces (or fit the given one to the job in so many ways), and tell "
                "the spread of the throughputs."
            ),
        ),
    ] = 1
    jobs: Annotated[
        int,
        Option(
            rich_help_panel=FAILURES,
            metavar="N",
            min=1,
            max=1024,
            help=(
                "With --seeds: processes to simulate in. Each plans for itself what its traces "
                "need, so more is planned in all."
            ),
        ),
    ] = 1
    executor: ExecutorName = None
    gpus: Annotated[
        int | None,
        Option(
            "--gpus-per-worker",
            rich_help_panel=FAILURES,
            metavar="N",
            min=1,
            max=4096,
            help=(
                "GPUs of a worker (a tensor-parallel group). Default: [training] tensor_parallel "
                "of the job. Drawn failures are of single GPUs; a worker that has lost some goes "
                "on slower or is down, by policy. Where the job has [topology], all workers of "
                "its node are down."
            ),
        ),
    ] = None
    fail_slow: Annotated[
        bool,
        Option(
            "--fail-slow",
            rich_help_panel=FAILURES,
            help=(
                "Draw slow workers and slow links, too, at published rates: a job that waits for "
                "them takes 1.34 times as long."
            ),
        ),
    ] = False
    tokens: Annotated[
        int | None,
        Option(
            rich_help_panel=ANSWER,
            metavar="N",
            min=1,
            max=2**31 - 1,
            help=(
                "Tokens in a sample. Default: [model] context of the job; without either, tokens "
                "are not counted."
            ),
        ),
    ] = None
    parameters: Annotated[
        float | None,
        Option(
            rich_help_panel=FOLLOWED,
            metavar="N",
            min=FEWEST_PARAMETERS,
            max=MOST_PARAMETERS,
            help=(
                "Parameters of the model: published costs of restarts and reconfigurations depend "
                "on it. Default: by what the job says that its stages hold always, in bytes, at "
                f"{BYTES_PER_PARAMETER} a parameter; without that, {DEFAULT_PARAMETERS:.3g}."
            ),
        ),
    ] = None
    batch: Annotated[
        float | None,
        Option(
            rich_help_panel=ANSWER,
            metavar="N",
            min=1e-6,
            max=1e9,
            help=("Samples in a micro-batch. Default: [training] batch of the job, else 1."),
        ),
    ] = None
    switch: Annotated[
        float | None,
        Option(
            rich_help_panel=FOLLOWED,
            metavar="SEC",
            min=0,
            max=1e6,
            help=(
                "Seconds in which this project's runtime, ReCycle's and torchft switch after a "
                "failure, as measured by you."
            ),
        ),
    ] = None
    steps: Annotated[
        int | None,
        Option(
            rich_help_panel=FOLLOWED,
            metavar="N",
            min=0,
            max=10**15,
            help=(
                "Search for so many counted steps for each plan, as `slipstream plan` does. A "
                f"core makes about 400,000 a second. Default: those of {PLAN_SECONDS:g} s, where "
                f"layers move of at most {SETTLE_SECONDS:g} s."
            ),
        ),
    ] = None
    force: Force = False
    json: Json = False


@take_request
def simulate(request: SimulateRequest) -> None:
    """Simulate policies over a failure trace: throughput over time, averages and lost time by
    cause.

    A policy is a way to react to failures, of this project or another one. Prints a summary; --html
    writes a report that works offline. Ctrl-C keeps the policies that were finished.
    """
    job = read_job_or_refuse(request.job, request.settings)
    require_trainable_tables(request.job, job)
    recomputation = find_recomputation(request.job, job, PlanOptions())
    job = job if recomputation is None else recomputation.job
    policy_kinds = _choose_policies(request.policy)
    _require_consistent(request)
    # Inputs are read before the long work: failures, table, costs.
    dead = failed_workers(job, request.failed, None)
    make = _trace_maker(request, job, dead)
    require_writable(request.html)
    table = None if request.table is None else load_table_or_refuse(request.table, "--table: ")
    first = make(request.seed)
    if job.time.slow:
        err.print(
            f"note: {request.job}: time.slow is left out: all workers count as equally fast",
            style="dim",
            soft_wrap=True,
        )
    if job.memory and job.memory.capacity_of:
        err.print(
            f"note: {request.job}: memory.capacity_of is left out: all workers of a stage count as "
            "having equal memory",
            style="dim",
            soft_wrap=True,
        )
    costs = costs_for(
        _estimate_parameters(job) if request.parameters is None else request.parameters, job.stages
    )
    if request.switch is not None:
        costs = msgspec.structs.replace(costs, switch_seconds=request.switch)
    samples = request.batch if request.batch is not None else float(job.run_keys.batch)
    planning = functools.partial(_make_throughputs, job, samples, table, request.steps, dead)
    try:
        with (
            open_executor_or_refuse(request.executor) as pool,
            _show_progress() as (tell, describe),
        ):
            throughputs = _prepare_throughputs(planning, describe)
            # Many traces give a spread of each policy's figures, one trace a report.
            if request.seeds > 1:
                traces = _draw_traces(request, make, first)
                values = (
                    simulate_traces(policy_kinds, throughputs, costs, traces, tell)
                    if pool is None and request.jobs == 1
                    else _simulate_in_processes(
                        policy_kinds, planning, costs, traces, tell, request.jobs, pool
                    )
                )
                _print_spread(values, policy_kinds, request.json)
                if len(values[policy_kinds[0].name]) < len(traces):
                    err.print("interrupted: some traces are missing", style="yellow")
                    raise typer.Exit(130)
                return
            result = compare_policies(policy_kinds, throughputs, costs, first, tell)
    except KeyboardInterrupt:
        err.print("interrupted before the first policy was finished", style="yellow")
        raise typer.Exit(130) from None
    # Write, print, and say what is missing.
    tokens, searched = request.tokens or job.run_keys.context, _describe_search(request.steps)
    if request.html is not None:
        notes = _report_notes(costs, samples, request.table, searched)
        write_or_refuse(
            request.html,
            build_simulation_report(
                result, job=job.name, shape=_describe_grid(job), notes=notes, tokens=tokens
            ),
        )
    if request.json:
        print_json(_build_answer(result, tokens))
    else:
        _print_summary(result, job, tokens, searched)
    if request.html is not None:
        err.print(f"report written to {request.html}", soft_wrap=True)
    elif not request.json:
        err.print(
            "note: --html FILE writes the report, a page with charts", style="dim", soft_wrap=True
        )
    if len(result.runs) < len(policy_kinds):
        err.print("interrupted: some policies are missing", style="yellow")
        raise typer.Exit(130)


# --- Input ----------------------------------------------------------------------------------------


def _require_consistent(request: SimulateRequest) -> None:
    """Exit 2 if options are given that exclude each other."""
    # Failures come from one source: a trace, named workers, or a random draw.
    drawing = {
        "--preset": request.preset,
        "--mtbf": request.mtbf,
        "--fail-slow": request.fail_slow or None,
    }
    given = [
        name
        for name, value in {"--failed": request.failed, **drawing, "--days": request.days}.items()
        if value is not None
    ]
    if request.trace is not None and given:
        refuse(
            f"{given[0]}: not with --trace; a trace has its own failures, slow workers and length"
        )
    if request.failed and (drawn := [name for name in given if name in drawing]):
        refuse(f"{drawn[0]}: only where failures are drawn, not with --failed")
    # Several seeds give a table of spreads, and are what several processes can share.
    if request.html is not None and request.seeds > 1:
        refuse("--html: the report is of one trace; leave out --seeds")
    if request.seeds == 1 and (request.jobs > 1 or request.executor is not None):
        refuse(
            f"{'--jobs' if request.jobs > 1 else '--executor'}: only with --seeds, whose traces "
            "are simulated side by side"
        )


def _make_failed_trace(
    job: Job, dead: Sequence[Worker], days: float, gpus: int
) -> AvailabilityTrace:
    try:
        return build_death_trace(job, dead, days, gpus)
    except ValueError as error:
        refuse(f"--failed {error}")


def _choose_policies(names: list[str] | None) -> list[type[Policy]]:
    for name in names or ():
        require_choice("--policy", name, POLICIES)
    return [POLICIES[name] for name in POLICIES if not names or name in names]


def _trace_maker(
    request: SimulateRequest, job: Job, dead: Sequence[Worker]
) -> Callable[[int], AvailabilityTrace]:
    """Return a function that makes an availability trace for the job from a seed."""
    # By the request, the workers `dead` are down, or failures are those of a file, or drawn.
    gpus = request.gpus or job.ranks
    if request.failed:
        return functools.cache(lambda _: _make_failed_trace(job, dead, request.days or 1.0, gpus))
    workers, nodes = job.pipelines * job.stages, find_node_places(job)
    if (path := request.trace) is not None:
        read = _read_trace(path, 0, gpus)
        return lambda seed: fit_to_job(
            _read_trace(path, seed, gpus) if seed else read, workers, seed, nodes
        )
    failures = _choose_failure_model(request.preset or DEFAULT_PRESET, request.mtbf, gpus)

    # Failures are drawn for single GPUs: those of a node fail together, those of a worker make it
    # slower or dead.
    gpus_by_node = []
    for node in nodes:
        gpus_by_node.append(tuple(worker * gpus + gpu for worker in node for gpu in range(gpus)))

    def draw_fitted(seed: int) -> AvailabilityTrace:
        try:
            drawn = draw_trace(failures, workers * gpus, request.days or DEFAULT_DAYS, seed)
            if nodes:
                drawn = with_node_failures(drawn, gpus_by_node)
            drawn = group_gpus(drawn, gpus) if gpus > 1 else drawn
            return (
                draw_slow_times(drawn, SLOW_MODELS["greyhound"], seed)
                if request.fail_slow
                else drawn
            )
        except ValueError as error:
            refuse(error)

    return draw_fitted


def _draw_traces(
    request: SimulateRequest, make: Callable[[int], AvailabilityTrace], first: AvailabilityTrace
) -> list[AvailabilityTrace]:
    """Return a trace for each seed, or only the `first` if all would be equal."""
    second = make(request.seed + 1)
    if (request.trace is not None or request.failed) and (first.live, first.changes) == (
        second.live,
        second.changes,
    ):
        err.print(
            f"note: there is nothing to draw: all {request.seeds} runs over {first.name} would be "
            "equal; this is one",
            style="dim",
            soft_wrap=True,
        )
        return [first]
    return [first, second, *(make(request.seed + index) for index in range(2, request.seeds))]


def _read_trace(path: Path, seed: int, gpus: int) -> AvailabilityTrace:
    try:
        return read_availability_trace(path, seed, gpus)
    except TraceFileError as error:
        refuse(error)


def _choose_failure_model(preset: str, mtbf: float | None, gpus: int) -> FailureModel:
    require_choice("--preset", preset, FAILURE_MODELS)
    if mtbf is None:
        return FAILURE_MODELS[preset]
    return make_single_gpu_model(
        mtbf * gpus,
        f"one failure in {mtbf:g} h a worker (--mtbf); 73 % transient (Unicron), "
        "repair times assumed",
        name="--mtbf",
    )


def _estimate_parameters(job: Job) -> float:
    """Return the model's number of parameters, estimated from the job's memory."""
    # Without memory in bytes there is nothing to estimate from.
    memory = job.memory
    if memory is None or not memory.weights or memory.unit_bytes == 1.0:
        return DEFAULT_PARAMETERS
    units = sum(memory.weights) + sum(memory.state) * float(1 - held_state_share(job.pipelines))
    return min(
        MOST_PARAMETERS, max(FEWEST_PARAMETERS, units * memory.unit_bytes / BYTES_PER_PARAMETER)
    )


def _simulate_in_processes(
    kinds: Sequence[type[Policy]],
    make: Callable[[], Throughputs],
    costs: Costs,
    traces: Sequence[AvailabilityTrace],
    tell: CountCallback,
    jobs: int,
    pool: Executor | None,
) -> dict[str, Floats]:
    """Return, for each policy, the mean samples per second on each trace."""
    # Up to `jobs` processes simulate, or those of `pool`; `tell` gets how many traces are done.
    try:
        with closing(
            run_all(TraceSimulator(kinds, make, costs), enumerate(traces), jobs, executor=pool)
        ) as results:
            return gather_throughputs(
                kinds, ((number, values) for (number, _), values in results), len(traces), tell
            )
    except PoolError as error:
        exit_negative(error)


def _prepare_throughputs(
    make: Callable[..., Throughputs], describe: Callable[[str], None]
) -> Throughputs:
    compile_planner()
    try:
        return make(describe)
    except NoPlanError as error:
        exit_negative(error)
    except ValueError as error:
        refuse(f"--table: {error}")


def _make_throughputs(
    job: Job,
    samples: float,
    table: Table | None,
    steps: int | None,
    dead: Sequence[Worker],
    describe: Callable[[str], None] = lambda _: None,
) -> Throughputs:
    if steps is None:
        return Throughputs(job, samples_per_microbatch=samples, table=table, announce=describe)
    seconds = steps * STEP_SECONDS
    return Throughputs(
        job,
        samples_per_microbatch=samples,
        table=table,
        announce=describe,
        plan_seconds=seconds,
        settle_seconds=seconds,
        thorough=True,
        dead=dead,
    )


# --- Output ---------------------------------------------------------------------------------------


@contextmanager
def _show_progress() -> Iterator[tuple[Callable[[int, int], None], Callable[[str], None]]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with (
        watch_interrupts() as check_interrupt,
        Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar,
    ):
        task, log = bar.add_task("simulating", total=None), LogProgress("simulating", "runs")

        # Both functions are called often enough to end the simulation soon after Ctrl-C.
        def report_progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description="simulating")
            log.show_count(done, total)
            check_interrupt()

        def describe(text: str) -> None:
            bar.update(task, description=text)
            log.show_work(text)
            check_interrupt()

        yield report_progress, describe


def _describe_grid(job: Job) -> str:
    return (
        f"{job.pipelines} pipelines x {job.stages} stages, {sum(job.microbatches)} micro-batches "
        "an iteration"
    )


def _describe_search(steps: int | None) -> str:
    """Return a line on how long each plan was searched for."""
    searched = (
        f"{PLAN_SECONDS:g} s each, at most {SETTLE_SECONDS:g} s where layers move, in counted steps"
        if steps is None
        else f"{steps:,} counted steps each"
    )
    return (
        f"plans were searched for {searched}; with more --steps, here and in `slipstream plan`, "
        "better ones are found"
    )


def _report_notes(costs: Costs, samples: float, table: Path | None, searched: str) -> Sequence[str]:
    return (
        f"{samples:g} samples per micro-batch",
        (f"schedules from the table {table}; others " if table else "") + searched,
        f"costs for {costs.parameters:.3g} parameters: switch {costs.switch_seconds:g} s, loading "
        f"a stage {costs.load_seconds:.3g} s, restart {costs.restart_seconds:.3g} s, checkpoint "
        f"{costs.checkpoint_seconds:.3g} s, Oobleck's reconfiguration {costs.oobleck_seconds:.3g} "
        f"s, Bamboo's {costs.bamboo_seconds:.3g} s",
        "workers equally fast but for those that the trace makes slow; stage times and costs are "
        "the same for all policies",
    )


def _build_answer(result: Comparison, tokens: int | None) -> dict[str, object]:
    # Reference lines are no policies: they lose nothing that could be told by cause.
    trace = result.trace
    lost_seconds = {}
    for name, run in result.runs.items():
        if not run.is_reference:
            lost = run.seconds_lost(result.best_rate)
            lost_seconds[name] = {cause.value: seconds for cause, seconds in lost.items()}
    return {
        "policies": result.mean_throughputs(),
        "with_planned_schedules": {name: run.throughput for name, run in result.planned.items()},
        "failure_seconds": {
            name: result.failure_seconds(name)
            for name, run in result.runs.items()
            if not run.is_reference
        },
        "fault_free": {name: run.fault_free_rate for name, run in result.runs.items()},
        "lost_seconds": lost_seconds,
        "switches": {name: run.switch_count for name, run in result.runs.items()},
        "worker_hours_per_1000_samples": {
            name: worker_hours(result, run) for name, run in result.runs.items()
        },
        "ettr": {name: run.ettr for name, run in result.runs.items()},
        "goodput": {name: result.goodput(name) for name in result.runs},
        "seconds_to_recover": {name: run.seconds_to_recover for name, run in result.runs.items()},
        "tokens_per_gpu_hour": {
            name: tokens_per_gpu_hour(result, run, tokens) for name, run in result.runs.items()
        },
        "trace": {
            "name": trace.name,
            "seconds": trace.length_seconds,
            "workers": trace.places,
            "mean_live": trace.mean_live_machines,
            "removals": trace.machine_losses,
            "slowdowns": trace.machine_slowdowns,
            "partial_losses": trace.partial_losses,
            "notes": list(trace.notes),
        },
    }


def _print_summary(result: Comparison, job: Job, tokens: int | None, searched: str) -> None:
    out.print(f"{job.name}: {_describe_grid(job)}; {describe_trace(result.trace)}", soft_wrap=True)
    grid = Grid(
        "policy",
        "samples/s",
        "when whole",
        "hours lost to failures",
        "mostly",
        box=None,
        header_style="bold",
    )
    for name, run in result.runs.items():
        # Reference lines lose no time to failures that could be compared.
        if run.is_reference:
            grid.add_row(
                name,
                f"{run.throughput:.4g}",
                f"{run.fault_free_rate:.4g}",
                "",
                "a reference line",
                style="dim",
            )
            continue
        lost = run.seconds_lost(result.best_rate)
        lost[Cause.WHOLE] = 0.0  # of the schedule, not of failures
        total = sum(lost.values())
        # The two causes that cost most, unless they cost next to nothing.
        causes = sorted(
            (cause for cause in Cause if lost[cause] > 0.01 * total), key=lambda cause: -lost[cause]
        )[:2]
        mostly = ", ".join(f"{cause} {lost[cause] / total:.0%}" for cause in causes if total > 0)
        grid.add_row(
            name,
            f"{run.throughput:.4g}",
            f"{run.fault_free_rate:.4g}",
            f"{result.failure_seconds(name) / 3600:.2f}",
            mostly,
        )
    out.print(grid)
    if result.planned:
        out.print(_planned_table(result))
    out.print(_measures_table(result, tokens))
    out.print(summarize_comparison(result), soft_wrap=True)
    for note in (*result.trace.notes, searched):
        err.print(f"note: {note}", style="dim", soft_wrap=True)


def _planned_table(result: Comparison) -> Grid:
    """Return a table of other systems' policies, run with this planner's schedules."""
    grid = Grid(
        "with our schedules",
        "samples/s",
        "when whole",
        "hours lost to failures",
        box=None,
        header_style="bold",
    )
    for name, run in result.planned.items():
        grid.add_row(
            name,
            f"{run.throughput:.4g}",
            f"{run.fault_free_rate:.4g}",
            f"{result.failure_seconds(name, planned=True) / 3600:.2f}",
        )
    return grid


def _measures_table(result: Comparison, tokens: int | None) -> Grid:
    """Return a table of each policy's ETTR, goodput, time to recover and tokens per GPU-hour."""
    grid = Grid(
        "policy",
        "ETTR",
        "goodput",
        "s to recover",
        *["tokens/GPU-hour"] * bool(tokens),
        box=None,
        header_style="bold",
    )
    # Without tokens in a sample, or where a policy has no such value, there is none to show.
    for name, run in result.runs.items():
        trained, goodput = tokens_per_gpu_hour(result, run, tokens), result.goodput(name)
        goodput_text = "-" if goodput is None else f"{goodput:.1%}"
        trained_text = "-" if trained is None else f"{trained:.4g}"
        grid.add_row(
            name,
            f"{run.ettr:.1%}",
            goodput_text,
            three_digits(run.seconds_to_recover),
            *[trained_text] * bool(tokens),
            style="dim" if run.is_reference else None,
        )
    return grid


def _print_spread(values: Mapping[str, Floats], kinds: Sequence[type[Policy]], json: bool) -> None:
    # The mean over traces compares policies; the percentiles say how much chance decides.
    spread = {
        kind.name: {
            "mean": float(np.mean(values[kind.name])),
            "p5": float(np.percentile(values[kind.name], 5)),
            "p95": float(np.percentile(values[kind.name], 95)),
        }
        for kind in kinds
    }
    count = len(values[kinds[0].name])
    if json:
        print_json(
            {
                "policies": {name: row["mean"] for name, row in spread.items()},
                "spread": spread,
                "seeds": count,
            }
        )
        return
    grid = Grid(
        "policy",
        "mean samples/s",
        "5 %",
        "95 %",
        box=None,
        header_style="bold",
        title=f"{count} trace{'s' * (count > 1)}",
    )
    for name, row in spread.items():
        grid.add_row(
            name,
            *(f"{row[key]:.4g}" for key in ("mean", "p5", "p95")),
            style="dim" if POLICIES[name].is_reference else None,
        )
    out.print(grid)
