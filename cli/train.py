"""Implement `slipstream train`, which trains a job's model by a schedule."""

import re
import shlex
import signal
import sys
from functools import partial
from pathlib import Path

import typer
from msgspec.structs import replace

from slipstream.cli.shared.console import err, exit_negative, out, print_json, refuse
from slipstream.cli.shared.launch_options import (
    Rehearsals,
    find_own_node,
    read_rehearsals,
    read_secret_or_refuse,
    with_machines,
)
from slipstream.cli.shared.options import (
    failed_workers,
    read_job_or_refuse,
    read_schedule_or_refuse,
    require_choice,
    require_writable,
    take_request,
)
from slipstream.cli.shared.plan_summary import recomputation_lines
from slipstream.cli.shared.planning import (
    build_plan_options,
    find_recomputation,
    make_plan,
    read_search_params,
)
from slipstream.cli.shared.run_process import (
    build_answer,
    call_in_thread,
    exit_on_errors,
    exit_on_signals,
    fork_supervised,
    show_progress,
    summary_text,
)
from slipstream.cli.shared.run_start import (
    describe_resuming,
    find_start,
    is_done_without_node,
    look_up,
    read_fitting_table,
    require_same_shape,
    require_trainable,
    require_usable,
    warn_if_done,
)
from slipstream.cli.shared.train_options import TrainRequest
from slipstream.cli.start import PROGRAM
from slipstream.planner.failures import FailurePlanner
from slipstream.planner.job.estimate import GPUS
from slipstream.planner.job.file import Job
from slipstream.planner.options import LAYERS
from slipstream.planner.recompute import chooses_recomputation, with_bound_of_choices
from slipstream.runtime.checkpoints.checkpoint import Checkpoint
from slipstream.runtime.config import (
    ConfigError,
    ModelConfig,
    RunConfig,
    TrainingConfig,
    parse_run_config,
)
from slipstream.runtime.coordinator.decisions.rebalancing import Rebalancing
from slipstream.runtime.coordinator.records.metrics import require_tensorboard
from slipstream.runtime.device import choose_device, gpu_name
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.node_agent import NodeJob, RunDoneError, join_run
from slipstream.runtime.processes.launch_environment import LaunchInfo, choose_listen_address
from slipstream.runtime.processes.process_attributes import (
    name_process,
    request_parent_death_signal,
)
from slipstream.runtime.processes.torchrun_store import announce_node_0, find_node_0
from slipstream.runtime.processes.worker_start import NodeSettings
from slipstream.runtime.protocol.authentication import Secret
from slipstream.runtime.run_folder import read_takeover_record
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.tables.table import Table


@take_request
def train(ctx: typer.Context, request: TrainRequest) -> None:
    """Train a job's model, one process per live worker, replaying a schedule; workers may die and
    come back.

    Writes schedule.json, losses.jsonl, metrics.jsonl, events.jsonl, schedules/, trace.json,
    checkpoints/, parameters/ and logs/ into --out; `slipstream show --run` makes a page of them.

    On several machines, run the same command on each, with --nodes, --node and --rendezvous, or by
    torchrun, srun or mpirun; all need the same secret, and --out on a file system that they share.
    """
    here = find_own_node(
        request.nodes, request.node, request.rendezvous, request.ranks_per_worker or 1
    )
    if here is None:
        _say(
            "this process has nothing to do: another process of its worker starts all of its ranks"
        )
        return
    if here.tied:  # otherwise this process would keep training unnoticed
        request_parent_death_signal(signal.SIGTERM)
    # Only a program from the command line may fork and take signals.
    if ctx.obj == PROGRAM:
        if here.node == 0 and request.coordinator_timeout:
            fork_supervised(request.folder, _say)
        else:
            exit_on_signals()
        name_process(f"node {here.node}", shlex.join(sys.argv[1:]))
    # Node 0 leads the run; the others only start workers for it.
    job = read_job_or_refuse(request.job, request.settings)
    config = _parse_config(request, job)
    secret = read_secret_or_refuse(here)
    if here.node == 0:
        _lead_run(ctx, request, job, config, here, secret)
        return
    assert secret is not None
    settings = NodeSettings(
        config=config,
        secret=secret,
        out=str(request.folder),
        resume=None if request.resume is None else str(request.resume),
        coordinator_timeout_seconds=request.coordinator_timeout,
    )
    _join_run(
        request,
        here,
        NodeJob(
            settings=settings,
            workers=[
                Worker(pipeline, column)
                for pipeline in range(job.pipelines)
                for column in range(job.stages)
            ],
        ),
    )
    if request.json:
        print_json({"node": here.node})


def _lead_run(
    ctx: typer.Context,
    request: TrainRequest,
    job: Job,
    config: RunConfig,
    here: LaunchInfo,
    secret: Secret | None,
) -> None:
    """Train as node 0, and print the result."""
    _require_consistent(request)
    # What can be wrong is found before anything is planned or started.
    table = None if request.table is None else read_fitting_table(request.table, job)
    search_params = read_search_params(request.params)
    _require_model(request, job)
    given = job
    job, config = _with_recomputation(request, job, config)
    iterations = config.training.iterations
    rehearsals = read_rehearsals(job, request.kill, request.bring_back, request.slow)
    absent = (
        failed_workers(job, request.failed, request.failed_node)
        if request.schedule is None
        else read_schedule_or_refuse(request.schedule).failed
    )
    for line in rehearsals.find_conflicts(iterations, absent):
        refuse(line)
    # Of a node 0 that has died: its workers may live.
    takeover = read_takeover_record(request.folder) is not None
    resumed = find_start(request, needed=not takeover)
    if not takeover:
        if resumed is not None and warn_if_done(request, resumed, iterations):
            return
        _require_startable(request, job, config, resumed)
    # The first schedule: given, of the node 0 before, from the table, or planned.
    fault_free, file = None, request.schedule
    if takeover and (request.folder / "schedule.json").exists():
        file = request.folder / "schedule.json"  # its workers wait only for a limited time
    if file is not None:
        first = _read_fitting_schedule(file, job)
    else:
        first, fault_free = look_up_or_plan(
            request, job, absent, table, None if job is given else given
        )
    # The run, which plans by itself after each failure.
    planner = FailurePlanner(
        with_machines(job, first, here), first, table, params=search_params, progress=_say
    )
    with (
        exit_on_errors(lambda: describe_resuming(ctx, request.folder, resumed), request.folder),
        show_progress(iterations, _find_tokens_per_sample(job, config)) as display,
    ):
        result = run(
            first,
            config,
            out=request.folder,
            progress=display.show_commit,
            resilience=_build_resilience(request, planner, rehearsals, resumed),
            options=RunOptions(
                nodes=here.nodes,
                rendezvous=choose_listen_address(here),
                announce=partial(announce_node_0, here),
                local=here.local,
                topology=job.nodes,
                notify=display.show_message,
                observe=display.show_event,
                fault_free_seconds=fault_free,
                secret=secret,
                force=request.force,
                again=request.is_in_place,
                grace_seconds=request.grace,
                tensorboard=request.tensorboard,
                prometheus=request.prometheus,
                peak_flops=peak_flops(config.training),
            ),
        )
    if request.json:
        print_json(build_answer(result))
    else:
        out.print(summary_text(result), soft_wrap=True)


def _find_tokens_per_sample(job: Job, config: RunConfig) -> int | None:
    """Return the number of tokens in a sample; None if it may have other content."""
    # A model of the user's own may read anything, unless the job names tokens.
    model, training = config.model, config.training
    is_own = ":" in model.name and model.hugging_face is None and model.torchtitan is None
    reads_tokens = job.run_keys.context is not None or training.tokens or training.tokenizer
    return None if is_own and not reads_tokens else model.context


def _require_consistent(request: TrainRequest) -> None:
    """Exit 2 if options contradict each other, or need a package that is missing."""
    mode_option = request.backward or request.optimizer
    if request.schedule is not None and (request.failed or request.failed_node or mode_option):
        refuse(
            "--schedule says which workers are down and how to run: leave out --failed, "
            "--failed-node, --backward and --optimizer"
        )
    if request.table is not None and mode_option:
        refuse("--table says how to run: leave out --backward and --optimizer")
    require_choice("--layers", request.layers, LAYERS)
    if request.mtbf is not None and request.layers != "move":
        refuse("--mtbf says when moving layers pays: give it with --layers move")
    if request.tensorboard is not None:
        with exit_on_errors():
            require_tensorboard()


def _require_startable(
    request: TrainRequest, job: Job, config: RunConfig, resumed: Checkpoint | None
) -> None:
    """Exit 2 if the run could not begin, before time is spent on planning."""
    # What is checked: the files to write, the model, the data, and the checkpoint to begin with.
    require_writable(request.folder / "schedule.json")
    require_writable(request.prometheus)
    require_writable(None if request.tensorboard is None else request.tensorboard / "events")
    with exit_on_errors():
        counted = require_trainable(job, config, resumed)
        if counted is not None:
            _say(counted)
        require_usable(request, resumed, config)


def _build_resilience(
    request: TrainRequest,
    planner: FailurePlanner,
    rehearsals: Rehearsals,
    resumed: Checkpoint | None,
) -> Resilience:
    # A worker that is killed on purpose must stay out unless --return brings it back, so no crash
    # leads to a restart then.
    return Resilience(
        scheduler=planner.after,
        at_speeds=planner.at_speeds,
        rebalancer=planner,
        slowdowns=rehearsals.slowdowns,
        heartbeat_timeout_seconds=request.heartbeat_timeout,
        checkpoint_every=request.checkpoint_every,
        verify_every=request.verify_every,
        resume=resumed,
        injections=rehearsals.injections,
        node_failures=rehearsals.node_failures,
        returns=rehearsals.returns,
        faults_per_hour=0 if rehearsals.kills else request.faults_per_hour,
        join_timeout_seconds=request.join_timeout,
        stall_timeout_seconds=request.stall_timeout,
        coordinator_timeout_seconds=request.coordinator_timeout,
        settling=Rebalancing(mtbf_seconds=request.mtbf) if request.layers == "move" else None,
    )


def _join_run(request: TrainRequest, here: LaunchInfo, node_job: NodeJob) -> None:
    """Train as a node other than node 0, unless all iterations are done already."""
    # Node 0 may end the run before this node has joined: then this node has nothing to do, either.
    is_done = partial(is_done_without_node, request, node_job.settings.config.training.iterations)
    try:
        if is_done():
            raise RunDoneError
        with exit_on_errors(), call_in_thread(_say) as say:
            join_run(
                find_node_0(here, request.join_timeout, say),
                node_job,
                node=here.node,
                nodes=here.nodes,
                local=here.local,
                join_timeout_seconds=request.join_timeout,
                grace_seconds=request.grace,
                notify=say,
                is_done=is_done,
            )
    except RunDoneError:
        _say(f"{request.folder}: all iterations are done; node {here.node} has nothing to do")


def look_up_or_plan(
    request: TrainRequest,
    job: Job,
    down: tuple[Worker, ...],
    table: Table | None,
    given: Job | None = None,
) -> tuple[Schedule, float | None]:
    """Return the first schedule, and the fault-free period in seconds (None: not known).

    The schedule is taken from the table, or planned now if the table has none; Ctrl-C ends that
    with the best plan by then. Exits 2 for options or absent workers that cannot be used, and 1 if
    no plan is found.

    Parameters
    ----------
    down
        Workers that are absent from the start.
    given
        The job before the planner chose which layers of `job` recompute, since the bound must hold
        for all choices. None: there was no choice.
    """
    # A table's answers are for its own modes: what is planned later must have the same.
    options = build_plan_options(
        backward=table.basis.backward if table else request.backward,
        method=request.method,
        seed=request.seed or 0,
        optimizer=table.basis.optimizer if table else request.optimizer,
        time_limit=request.time_limit,
        layers=request.layers,
        params=request.params,
    )
    # The fault-free period is what throughput after failures is compared with.
    unbroken, found = (
        look_up(table, ()),
        look_up(table, down, settled=options.layers == "move", nodes=job.nodes),
    )
    fault_free = None if unbroken is None else unbroken.seconds(unbroken.period_ticks)
    if found is not None:
        return found, fault_free
    plan = make_plan(
        job, down, options, ctrl_c="ends the search, and training starts by this schedule"
    )
    if plan.interrupted:
        _say(
            "Ctrl-C has ended the search: training starts by the best schedule so far. The next "
            "Ctrl-C ends the run."
        )
    first = (
        plan.schedule
        if given is None
        else with_bound_of_choices(plan.schedule, given, options, down)
    )
    return first, plan.fault_free_period if fault_free is None else fault_free


def _parse_config(request: TrainRequest, job: Job) -> RunConfig:
    try:
        return parse_run_config(
            job.model,
            job.training,
            dtype=request.dtype,
            seed=request.seed,
            iterations=request.iterations,
            tensor_parallel=request.ranks_per_worker,
        )
    except ConfigError as error:
        refuse(f"{request.job}: {error}")


def _require_model(request: TrainRequest, job: Job) -> None:
    """Exit 2 if the job names no model, and the default one does not fit."""
    layers = sum(job.layers or ()) // job.chains
    if not job.model and layers not in (0, ModelConfig().blocks + 2):
        refuse(
            f"{request.job}: has no [model], and its stages have {layers} layers: say which model "
            "is trained, by `hugging_face`, `name` or `blocks`"
        )


def _with_recomputation(
    request: TrainRequest, job: Job, config: RunConfig
) -> tuple[Job, RunConfig]:
    """Return job and configuration with the layers that the planner has chosen to recompute."""
    # They are unchanged if the job leaves no choice.
    options = build_plan_options(
        backward=request.backward,
        optimizer=request.optimizer,
        method="greedy",
        time_limit=request.time_limit,
        seed=0,
    )
    if chooses_recomputation(job) and job.layers is None:
        refuse(
            f"{request.job}: training.recompute is 'auto', and there is no [placement] layers; "
            "`slipstream profile` writes them"
        )
    recomputation = find_recomputation(request.job, job, options)
    if recomputation is None:
        return job, config
    for line in recomputation_lines(recomputation):
        _say(line)
    training = replace(config.training, recompute=recomputation.layers)
    return recomputation.job, replace(config, training=training)


def _read_fitting_schedule(path: Path, job: Job) -> Schedule:
    """Return a file's schedule. Exits 2 if it is another job's, 1 if it breaks a rule."""
    schedule = read_schedule_or_refuse(path)
    require_same_shape(path, schedule.grid, job)
    violations = check(schedule)
    if violations:
        exit_negative(f"{path}: breaks a rule: {violations[0]}")
    return schedule


def _say(line: str) -> None:
    err.print(line, style="yellow", soft_wrap=True)


_NAME_PATTERNS = {
    "a100": r"A100\b",
    "h100": r"H100 80GB HBM3\b",
    "h200": r"\bH200\b",
    "b200": r"\bB200\b",
}
"""Patterns of the names that drivers give to GPUs, by the names in `GPUS`."""
# Other forms, such as H100 PCIe and NVL, have other peaks.


def peak_flops(training: TrainingConfig) -> float | None:
    """Return the peak of this machine's GPU in bf16 operations per second, without sparsity.

    The result is None if the peak is unknown, or if training is on CPUs or not in bf16. Raises
    ConfigError if bf16 training requires a GPU that this machine lacks.
    """
    # Other arithmetic may or may not use the tensor cores, whose peak this is. GPUs of other nodes
    # are assumed to be the same.
    if training.dtype != "bf16" or choose_device(training.device) == "cpu":
        return None
    return peak_of_gpu(gpu_name())


def peak_of_gpu(device: str) -> float | None:
    """Return a GPU's peak in bf16 operations per second, by the driver's name for it.

    The peak is without sparsity; None if the name is unknown.
    """
    return next(
        (
            GPUS[name].flops
            for name, pattern in _NAME_PATTERNS.items()
            if re.search(pattern, device)
        ),
        None,
    )
