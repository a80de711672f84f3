"""Implement `slipstream train`, which trains a job's model by a schedule that is planned, given, or taken from a
table."""

import shlex
import signal
import sys
from functools import partial
from pathlib import Path

import typer
from msgspec.structs import replace

from slipstream.cli.shared.console import err, exit_negative, out, print_json, refuse
from slipstream.cli.shared.device_peak import peak_flops
from slipstream.cli.shared.error_exits import exit_on_errors
from slipstream.cli.shared.inputs import (
    failed_workers,
    read_job_or_refuse,
    read_schedule_or_refuse,
    require_choice,
    require_writable,
)
from slipstream.cli.shared.launch_options import find_own_node, read_secret_or_refuse, with_machines
from slipstream.cli.shared.options import (
    Backward,
    Failed,
    FailedNode,
    JobFile,
    Json,
    MethodName,
    Optimizer,
    Params,
    Settings,
    TimeLimit,
)
from slipstream.cli.shared.plan_summary import recomputation_lines
from slipstream.cli.shared.planning import build_plan_options, find_recomputation, make_plan, read_search_params
from slipstream.cli.shared.rehearsals import read_rehearsals
from slipstream.cli.shared.resume import (
    describe_resuming,
    find_start,
    is_done_without_node,
    is_in_place,
    require_usable,
    warn_if_done,
)
from slipstream.cli.shared.run_progress import call_in_thread, show_progress
from slipstream.cli.shared.supervisor import exit_on_signals, fork_supervised
from slipstream.cli.shared.train_inputs import look_up, read_fitting_table, require_same_shape, require_trainable
from slipstream.cli.shared.train_options import (
    BringBack,
    CheckpointEvery,
    CoordinatorTimeout,
    Dtype,
    FaultsPerHour,
    Force,
    Grace,
    HeartbeatTimeout,
    Iterations,
    JoinTimeout,
    Kill,
    LayersMode,
    Mtbf,
    NodeNumber,
    Nodes,
    OutFolder,
    RanksPerWorker,
    Rendezvous,
    Resume,
    ScheduleToFollow,
    Slow,
    StallTimeout,
    TableFolder,
    Tensorboard,
    TrainingSeed,
    VerifyEvery,
)
from slipstream.cli.shared.train_result import build_report, summary_text
from slipstream.cli.start import PROGRAM
from slipstream.planner.failures import FailurePlanner
from slipstream.planner.job.file import Job
from slipstream.planner.options import LAYERS, PlanOptions
from slipstream.planner.recompute import chooses_recomputation
from slipstream.runtime.config import ConfigError, ModelConfig, RunConfig, parse_run_config
from slipstream.runtime.coordinator.decisions.settling import Settling
from slipstream.runtime.coordinator.records.tensorboard import require_tensorboard
from slipstream.runtime.launch import Resilience, RunOptions, run
from slipstream.runtime.node_agent import NodeJob, join_run
from slipstream.runtime.processes.launch_environment import (
    LaunchInfo,
    announce_node_0,
    choose_listen_address,
    find_node_0,
)
from slipstream.runtime.processes.parent_death import request_parent_death_signal
from slipstream.runtime.processes.process_title import name_process
from slipstream.runtime.processes.restart_policy import FAULTS_PER_HOUR
from slipstream.runtime.processes.stop_signals import GRACE_SECONDS
from slipstream.runtime.processes.worker_start import COORDINATOR_TIMEOUT_SECONDS
from slipstream.runtime.protocol.setup import JOIN_TIMEOUT_SECONDS, VERIFY_EVERY
from slipstream.runtime.run_folder import read_takeover_record
from slipstream.runtime.run_options import STALL_TIMEOUT_SECONDS
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.tables.table import Table


def train(ctx: typer.Context, job: JobFile, settings: Settings = None, schedule: ScheduleToFollow = None,
          iterations: Iterations = None,
          failed: Failed = None, failed_node: FailedNode = None, backward: Backward = None,
          optimizer: Optimizer = None, method: MethodName = "cp-sat",
          time_limit: TimeLimit = 10.0, params: Params = None, dtype: Dtype = None, seed: TrainingSeed = None,
          out_folder: OutFolder = None, nodes: Nodes = None, node: NodeNumber = None, rendezvous: Rendezvous = None,
          ranks_per_worker: RanksPerWorker = None, table: TableFolder = None,
          checkpoint_every: CheckpointEvery = None, force: Force = False, resume: Resume = None, kill: Kill = None,
          bring_back: BringBack = None, slow: Slow = None, faults_per_hour: FaultsPerHour = FAULTS_PER_HOUR,
          verify_every: VerifyEvery = VERIFY_EVERY,
          heartbeat_timeout: HeartbeatTimeout = 5.0,
          join_timeout: JoinTimeout = JOIN_TIMEOUT_SECONDS,
          coordinator_timeout: CoordinatorTimeout = COORDINATOR_TIMEOUT_SECONDS,
          stall_timeout: StallTimeout = STALL_TIMEOUT_SECONDS, grace: Grace = GRACE_SECONDS,
          layers: LayersMode = "fixed", mtbf: Mtbf = None, tensorboard: Tensorboard = None, json: Json = False) -> None:
    """Train a job's model, one process per live worker, replaying a schedule; workers may die and come back.

    Writes schedule.json, losses.jsonl, metrics.jsonl, events.jsonl, schedules/, trace.json, checkpoints/, parameters/
    and logs/ into --out; `slipstream show --run` makes a page of them.

    On several machines, run the same command on each, with --nodes, --node and --rendezvous, or by torchrun, srun or
    mpirun; all need the same secret, and --out on a file system that they share.
    """
    here = find_own_node(nodes, node, rendezvous, ranks_per_worker or 1)
    if here is None:
        _say("this process has nothing to do: another process of its worker starts all of its ranks")
        return
    if here.tied:  # otherwise this process would keep training unnoticed
        request_parent_death_signal(signal.SIGTERM)
    folder = out_folder or Path("runs") / job.stem
    if ctx.obj == PROGRAM:
        if here.node == 0 and coordinator_timeout:
            fork_supervised(folder, _say)
        elif here.node > 0:
            exit_on_signals()
        name_process(f"node {here.node}", shlex.join(sys.argv[1:]))
    spec = read_job_or_refuse(job, settings)
    config = _parse_config(spec, job, dtype=dtype, seed=seed, iterations=iterations, tensor_parallel=ranks_per_worker)
    secret = read_secret_or_refuse(here)
    if here.node > 0:
        assert secret is not None
        _join_run(here, NodeJob(
            config=config, secret=secret, resume=resume, coordinator_timeout_seconds=coordinator_timeout,
            workers=[Worker(pipeline, column) for pipeline in range(spec.pipelines)
                     for column in range(spec.stages)]), folder, join_timeout, grace)
        if json:
            print_json({"node": here.node})
        return
    mode_option = backward or optimizer
    if schedule is not None and (failed or failed_node or mode_option):
        refuse("--schedule says which workers are down and how to run: leave out --failed, --failed-node, --backward "
               "and --optimizer")
    if table is not None and mode_option:
        refuse("--table says how to run: leave out --backward and --optimizer")
    require_choice("--layers", layers, LAYERS)
    if mtbf is not None and layers != "move":
        refuse("--mtbf says when moving layers pays: give it with --layers move")
    if tensorboard is not None:
        with exit_on_errors():
            require_tensorboard()
    plan_table = None if table is None else read_fitting_table(table, spec)
    search_settings = read_search_params(params)
    _require_model(spec, job)
    spec, config = _with_recomputation(job, spec, config, backward, optimizer, time_limit)
    takeover = read_takeover_record(folder) is not None  # of a node 0 that has died: its workers may live
    resume_from = None if resume is None else find_start(resume, folder, needed=not takeover)
    if resume_from is not None and not takeover and warn_if_done(folder, resume_from, config.training.iterations, json):
        return
    if not takeover:
        require_writable(folder / "schedule.json")
        require_writable(None if tensorboard is None else tensorboard / "events")
        with exit_on_errors():
            counted = require_trainable(spec, config, resume_from)
            if counted is not None:
                _say(counted)
            require_usable(folder, resume_from, config, force=force, again=is_in_place(resume, folder))
    rehearsals = read_rehearsals(spec, kill, bring_back, slow)
    absent = failed_workers(spec, failed, failed_node) if schedule is None else \
        read_schedule_or_refuse(schedule).failed
    for line in rehearsals.find_conflicts(config.training.iterations, absent):
        refuse(line)
    fault_free = None
    if takeover and (folder / "schedule.json").exists():
        initial = _read_fitting_schedule(folder / "schedule.json", spec)  # its workers wait only for a limited time
    elif schedule is not None:
        initial = _read_fitting_schedule(schedule, spec)
    else:
        dead = failed_workers(spec, failed, failed_node)
        options = build_plan_options(
            backward=plan_table.basis.backward if plan_table else backward, method=method, seed=seed or 0,
            optimizer=plan_table.basis.optimizer if plan_table else optimizer, time_limit=time_limit, layers=layers,
            params=params)
        initial, fault_free = _look_up_or_plan(spec, dead, plan_table, options)
    job_on_machines = with_machines(spec, initial, here)
    planner = FailurePlanner(job_on_machines, initial, plan_table, params=search_settings, progress=_say)
    resilience = Resilience(
        scheduler=planner.after, at_speeds=planner.at_speeds, rebalancer=planner,
        slowdowns=rehearsals.slowdowns, heartbeat_timeout_seconds=heartbeat_timeout,
        checkpoint_every=checkpoint_every, verify_every=verify_every, resume=resume_from,
        injections=rehearsals.injections, node_failures=rehearsals.node_failures, returns=rehearsals.returns,
        faults_per_hour=0 if rehearsals.kills else faults_per_hour, join_timeout_seconds=join_timeout,
        stall_timeout_seconds=stall_timeout, coordinator_timeout_seconds=coordinator_timeout,
        settling=Settling(mtbf_seconds=mtbf) if layers == "move" else None)
    with exit_on_errors(lambda: describe_resuming(ctx, folder, resume_from)), \
            show_progress(config.training.iterations, config.model.context) as display:
        result = run(initial, config, out=folder, progress=display.show_commit, resilience=resilience,
                     options=RunOptions(
            nodes=here.nodes, rendezvous=choose_listen_address(here), announce=partial(announce_node_0, here),
            local=here.local,
            topology=spec.nodes, notify=display.show_message, observe=display.show_event, fault_free_seconds=fault_free,
            secret=secret, force=force, again=is_in_place(resume, folder), grace_seconds=grace, tensorboard=tensorboard,
            peak_flops=peak_flops(config.training)))
    if json:
        print_json(build_report(result))
    else:
        out.print(summary_text(result), soft_wrap=True)


def _join_run(here: LaunchInfo, own: NodeJob, folder: Path, join_timeout: float, grace: float) -> None:
    """Train as a node other than node 0, unless all iterations are done."""
    if is_done_without_node(folder, own.resume, own.config.training.iterations):
        _say(f"{folder}: all iterations are done; node {here.node} has nothing to do")
        return
    with exit_on_errors(), call_in_thread(_say) as say:
        join_run(find_node_0(here, join_timeout, say), own, node=here.node, nodes=here.nodes, out=folder,
                 local=here.local,
                 join_timeout_seconds=join_timeout, grace_seconds=grace, notify=say)


def _look_up_or_plan(job: Job, down: tuple[Worker, ...], table: Table | None,
                     options: PlanOptions) -> tuple[Schedule, float | None]:
    """Return the first schedule, from the table or planned, and the period without failures, or None if unknown."""
    unbroken, found = look_up(table, ()), look_up(table, down, settled=options.layers == "move", nodes=job.nodes)
    fault_free = None if unbroken is None else unbroken.seconds(unbroken.period_ticks)
    if found is not None:
        return found, fault_free
    plan = make_plan(job, down, options, ctrl_c="ends the search, and training starts by this schedule")
    if plan.interrupted:
        _say("Ctrl-C has ended the search: training starts by the best schedule so far. The next Ctrl-C ends the run.")
    return plan.schedule, plan.fault_free_period if fault_free is None else fault_free


def _parse_config(job: Job, path: Path, **overrides: object) -> RunConfig:
    try:
        return parse_run_config(job.model, job.training, **overrides)
    except ConfigError as error:
        refuse(f"{path}: {error}")


def _require_model(job: Job, path: Path) -> None:
    """Exit 2 if the job gives only the times of stages, as `slipstream new` writes it, and no model to train."""
    layers = sum(job.layers or ()) // job.chains
    if not job.model and layers not in (0, ModelConfig().blocks + 2):
        refuse(f"{path}: has no [model], and its stages have {layers} layers: say which model is trained, by "
               "`hugging_face`, `name` or `blocks`")


def _with_recomputation(path: Path, job: Job, config: RunConfig, backward: str | None, optimizer: str | None,
                        time_limit: float) -> tuple[Job, RunConfig]:
    """Return the job and its configuration with the layers to recompute, if they leave that choice to the planner."""
    options = build_plan_options(backward=backward, optimizer=optimizer, method="greedy", time_limit=time_limit, seed=0)
    if chooses_recomputation(job) and job.layers is None:
        refuse(f"{path}: training.recompute is 'auto', and there is no [placement] layers; `slipstream profile` writes "
               "them")
    recomputation = find_recomputation(path, job, options)
    if recomputation is None:
        return job, config
    for line in recomputation_lines(recomputation):
        _say(line)
    training = replace(config.training, recompute=recomputation.layers)
    return recomputation.job, replace(config, training=training)


def _read_fitting_schedule(path: Path, job: Job) -> Schedule:
    """Return the schedule of a file. Exits 2 unless it has this job's shape, and 1 if it breaks a rule."""
    schedule = read_schedule_or_refuse(path)
    require_same_shape(path, schedule.grid, job)
    violations = check(schedule)
    if violations:
        exit_negative(f"{path}: breaks a rule: {violations[0]}")
    return schedule


def _say(line: str) -> None:
    err.print(line, style="yellow", soft_wrap=True)
