r"""Run torchtitan's own command line on Slipstream's runtime:

    torchrun --nproc-per-node 1 -m slipstream.cli.torchtitan --module llama3 --config llama3_8b \
        --parallelism.pipeline_parallel_degree 4 --parallelism.data_parallel_replicate_degree 2

Start one process on each machine. Configuration, initialisation, data, optimizer, learning rates,
metrics and the last checkpoint are torchtitan's. Its Trainer holds the model on the CPU of node 0,
and hands it to the workers.
"""

import argparse
import contextlib
import os
import signal
import sys
import time
import warnings
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import typer

from slipstream.cli.shared.console import print_error
from slipstream.cli.shared.launch_options import (
    Rehearsals,
    find_own_node,
    read_rehearsals,
    read_secret_or_refuse,
    with_machines,
)
from slipstream.cli.shared.run_process import call_in_thread, exit_on_errors
from slipstream.cli.shared.run_start import find_whole_checkpoint
from slipstream.cli.start import exit_despite_planning
from slipstream.planner.failures import FailurePlanner
from slipstream.planner.job.file import Job, JobError, parse_job, read_job
from slipstream.planner.options import PlanOptions
from slipstream.planner.params import DEFAULTS
from slipstream.planner.plan import plan_with
from slipstream.runtime.checkpoints.checkpoint import identity_of, open_checkpoint, open_latest
from slipstream.runtime.config import ConfigError, RunConfig
from slipstream.runtime.coordinator.decisions.rebalancing import Rebalancing
from slipstream.runtime.coordinator.run_options import Resilience, RunOptions
from slipstream.runtime.errors import first_line
from slipstream.runtime.events import Metrics
from slipstream.runtime.launch import run
from slipstream.runtime.models.layered_model import build_model, parameter_dtype
from slipstream.runtime.node_agent import NodeJob, join_run
from slipstream.runtime.placement import split_layers
from slipstream.runtime.processes.launch_environment import LaunchInfo, choose_listen_address
from slipstream.runtime.processes.process_attributes import request_parent_death_signal
from slipstream.runtime.processes.restart_policy import FAULTS_PER_HOUR
from slipstream.runtime.processes.torchrun_store import announce_node_0, find_node_0
from slipstream.runtime.processes.worker_start import NodeSettings
from slipstream.runtime.protocol.setup import JOIN_TIMEOUT_SECONDS
from slipstream.runtime.run_folder import CHECKPOINTS, read_takeover_record
from slipstream.schedules.codec import read
from slipstream.schedules.schedule import Schedule, Worker

try:
    from slipstream.runtime.models.torchtitan.specification import parse_arguments, with_one_process
except ConfigError as error:
    print_error(error)
    sys.exit(2)
from torchtitan.observability import structured_logger
from torchtitan.tools.logging import init_logger, logger
from torchtitan.trainer import Trainer

from slipstream.runtime.checkpoints.trainer_state import load_into_trainer, save_trainer
from slipstream.runtime.models.torchtitan.training import (
    build_run_config,
    describe_differences,
    divide_microbatches,
)

HEARTBEAT_SECONDS = Resilience().heartbeat_timeout_seconds
PLAN_SECONDS = 10.0
"""Time limit of planning the first schedule."""
SINGLE_PROCESS = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
"""Environment in which torchtitan's Trainer believes to be the only process."""


@dataclass(frozen=True, slots=True)
class RunSetup:
    """What one command line says about a run: job, model, folder, node and own options."""

    here: LaunchInfo
    job: Job
    config: RunConfig
    folder: Path
    rehearsals: Rehearsals
    settled_seconds: float | None
    """Time limit of the search for schedules that move layers. None: layers stay."""
    silence: float
    """Seconds after which a worker that gives no sign of life counts as dead."""


class SlipstreamTrainer(Trainer):  # type: ignore[misc]
    """torchtitan's Trainer, except that the workers of a Slipstream run do the training steps."""

    own: RunSetup
    step: int

    def train(self) -> None:
        """Train until all steps are done, from the newest checkpoint of torchtitan or the run.

        At the end, torchtitan's last checkpoint is written. Errors of planning, of checkpoints and
        of the run are passed on to `main`.
        """
        # Find both checkpoints, and let torchtitan load its own where that may be newer.
        setup, steps = self.own, self.config.training.steps
        saved = setup.folder / CHECKPOINTS
        checkpoint = find_whole_checkpoint(saved, setup.folder, logger.warning)
        if checkpoint is not None:
            open_checkpoint(checkpoint.path, identity_of(setup.config, _count_layers(setup.config)))
        asked = self.config.checkpoint.load_step
        if checkpoint is None or asked != -1 or checkpoint.iteration < _newest_step(self.config):
            self.checkpointer.load(step=asked)  # torchtitan refuses one of the model alone
        # The newer checkpoint is where training begins: torchtitan's, or the run's.
        loaded = self.step
        if checkpoint is None or checkpoint.iteration < self.step:
            checkpoint = save_trainer(self, setup.config, saved)
        else:
            logger.info(f"Goes on from step {checkpoint.iteration}, of {checkpoint.path}")
            self._advance_to(checkpoint.iteration)
        # Plan, and train what is left to do.
        self.metrics_processor.time_last_log = time.perf_counter()
        if checkpoint is None or checkpoint.iteration < steps:
            first_schedule = _choose_schedule(setup)
            placed = with_machines(setup.job, first_schedule, setup.here)
            planner = FailurePlanner(placed, first_schedule, settled_seconds=setup.settled_seconds)
            # Workers that are killed on purpose come back only where --return says so.
            faults_per_hour = 0 if setup.rehearsals.kills else FAULTS_PER_HOUR
            settling = None if setup.settled_seconds is None else Rebalancing()
            with (
                call_in_thread(logger.info) as log_line,
                call_in_thread(self._log_step, logger.warning) as log_step,
            ):
                run(
                    first_schedule,
                    setup.config,
                    out=setup.folder,
                    resilience=Resilience(
                        scheduler=planner.after,
                        at_speeds=planner.at_speeds,
                        rebalancer=planner,
                        resume=checkpoint,
                        checkpoint_every=None,
                        injections=setup.rehearsals.injections,
                        returns=setup.rehearsals.returns,
                        node_failures=setup.rehearsals.node_failures,
                        slowdowns=setup.rehearsals.slowdowns,
                        heartbeat_timeout_seconds=setup.silence,
                        faults_per_hour=faults_per_hour,
                        settling=settling,
                    ),
                    options=RunOptions(
                        nodes=setup.here.nodes,
                        rendezvous=choose_listen_address(setup.here),
                        announce=partial(announce_node_0, setup.here),
                        local=setup.here.local,
                        topology=setup.job.nodes,
                        notify=log_line,
                        observe_iteration=log_step,
                        again=True,
                        secret=read_secret_or_refuse(setup.here),
                    ),
                )
        # torchtitan's own checkpoint is written as if its Trainer had trained.
        ended = open_latest(saved)
        assert ended is not None
        load_into_trainer(self, setup.config, ended)
        if self.config.checkpoint.enable and not self.config.checkpoint.last_save_model_only:
            batches = iter(self.dataloader)  # which is where the Trainer's checkpoint was
            for _ in range((self.step - loaded) * self.gradient_accumulation_steps):
                next(batches)
        self.checkpointer.save(self.step, last_step=True)
        logger.info("Training completed")

    def _log_step(self, line: Metrics) -> None:
        """Log a committed iteration as torchtitan does, if it is new and to be logged."""
        rates = self.lr_schedulers.get_metrics()
        if not self._advance_to(line.iteration + 1) or not self.metrics_processor.should_log(
            self.step
        ):
            return
        assert line.loss is not None
        self.metrics_processor.data_loading_times.append(0.0)  # workers read, while they train
        self.metrics_processor.log(
            self.step,
            line.loss,
            line.loss,
            line.gradient_norm or 0.0,
            {"n_tokens_seen": self.ntokens_seen, **rates},
        )

    def _advance_to(self, steps: int) -> bool:
        """Advance torchtitan's counters to `steps`; return whether any step is new."""
        # A step that is run again has already been counted.
        new = steps - self.step
        for _ in range(new):
            self.lr_schedulers.step()
        tokens = max(0, new) * self.config.training.global_batch_size * self.config.training.seq_len
        self.ntokens_seen += tokens
        devices = (
            self.own.job.pipelines * self.own.job.stages * self.own.config.training.tensor_parallel
        )
        # Torchtitan reports tokens per device.
        self.metrics_processor.ntokens_since_last_log += tokens / devices
        self.step = max(self.step, steps)
        return new > 0


def _newest_step(config: Trainer.Config) -> int:
    """Return the step of torchtitan's newest checkpoint; -1 if there is none."""
    if not config.checkpoint.enable:
        return -1
    names = [
        path.name for path in (Path(config.dump_folder) / config.checkpoint.folder).glob("step-*")
    ]
    return max((int(name[5:]) for name in names if name[5:].isdecimal()), default=-1)


def _count_layers(config: RunConfig) -> int:
    """Return the model's number of layers. Raises ConfigError if it cannot be built."""
    training = config.training
    return build_model(
        config.model, 0, parameter_dtype(training), torch.device(training.device)
    ).layers


def _choose_schedule(setup: RunSetup) -> Schedule:
    """Return the first schedule: that of a run to take over, or a new plan."""
    # Live workers of a node 0 that has died wait only for a limited time, so nothing is planned.
    path = setup.folder / "schedule.json"
    if read_takeover_record(setup.folder) is not None and path.exists():
        return read(path)
    return plan_with(PlanOptions(time_limit=PLAN_SECONDS), setup.job, ()).schedule


def _parse_arguments() -> tuple[argparse.Namespace, list[str]]:
    """Return this program's options, and torchtitan's arguments. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        prog="slipstream.cli.torchtitan", allow_abbrev=False, add_help=False, exit_on_error=False
    )
    add = parser.add_argument_group("Slipstream").add_argument
    add(
        "--slipstream.job",
        dest="job",
        type=Path,
        metavar="FILE",
        help="a job file: times, memory and machines to plan by; its grid has precedence. Default: "
        "as many pipelines and stages as --parallelism.data_parallel_replicate_degree and "
        ".pipeline_parallel_degree say",
    )
    settled_seconds = DEFAULTS.failures.settled_seconds
    add(
        "--slipstream.settle",
        dest="settle",
        type=_seconds,
        nargs="?",
        const=settled_seconds,
        metavar="SECONDS",
        help="layers move to better schedules after failures, while the workers train on; for so "
        f"long such a schedule is searched (default: {settled_seconds:g})",
    )
    add(
        "--slipstream.heartbeat-timeout",
        dest="silence",
        type=_seconds,
        default=HEARTBEAT_SECONDS,
        metavar="SECONDS",
        help="give up a worker that shows no sign of life for so long (default: %(default)g)",
    )
    for name, form in (("kill", "D.S@STEP"), ("return", "D.S@STEP"), ("slow", "D.S=FACTOR@STEP")):
        add(
            f"--slipstream.{name}",
            dest=f"{name}s",
            action="append",
            metavar=form,
            help="a rehearsal, counted from 0, as that of `slipstream train`",
        )
    if {"-h", "--help"} & set(sys.argv):
        parser.print_help()  # torchtitan prints its own help next
    try:
        return parser.parse_known_args()
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None


def _seconds(given: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.1 <= (seconds := float(given)) <= 3600:
            return seconds
    raise argparse.ArgumentTypeError(f"{given}: expected 0.1 to 3600 seconds")


def _choose_job(path: Path | None, given: Trainer.Config, layers: int) -> Job:
    """Return the job to plan, from the file `path` or, without one, of equal layers."""
    # The grid of the latter is that of torchtitan's configuration `given`. Raises JobError if the
    # file contradicts it.
    degrees = given.parallelism
    asked = degrees.data_parallel_replicate_degree, degrees.pipeline_parallel_degree
    if path is None:
        pipelines, stages = asked
        counts = [end - begin for begin, end in split_layers(layers, stages)]
        return parse_job(
            f"pipelines = {pipelines}\nstages = {stages}\n"
            f"microbatches = {list(divide_microbatches(given, pipelines))}\n"
            f"[placement]\nlayers = {counts}\n"
            f"[time]\nforward = {counts}\nbackward_input = {counts}\nbackward_weight = {counts}\n"
        )
    job = read_job(path)
    if asked not in ((1, 1), (job.pipelines, job.stages)):
        raise JobError(
            f"{path}: {job.pipelines} pipelines of {job.stages} stages, and --parallelism says "
            f"{asked[0]} of {asked[1]}; expected the same, or nothing of it"
        )
    expected = sum(divide_microbatches(given, job.pipelines))
    if sum(job.microbatches) != expected:
        raise JobError(
            f"{path}: {sum(job.microbatches)} micro-batches in an iteration, and "
            f"--training.global_batch_size makes {expected}; expected the same"
        )
    return job


def _read_setup() -> tuple[RunSetup, Trainer.Config]:
    """Return the setup of this run, and the configuration of torchtitan's Trainer."""
    options, arguments = _parse_arguments()
    here = find_own_node(None, None, None)
    assert here is not None
    given = parse_arguments(arguments)
    folder = Path(given.dump_folder).absolute() / "slipstream"
    config = build_run_config(arguments, given, folder / "initial")
    job = _choose_job(options.job, given, _count_layers(config))
    single_process = with_one_process(given)
    # As for a seed checkpoint: the Trainer's model is plain tensors on the CPU.
    single_process = replace(
        single_process, checkpoint=replace(single_process.checkpoint, create_seed_checkpoint=True)
    )
    # Refuse impossible rehearsals, and say what differs from torchtitan, before long work begins.
    rehearsals = read_rehearsals(job, options.kills, options.returns, options.slows)
    for line in rehearsals.find_conflicts(given.training.steps):
        raise ConfigError(line)
    for line in describe_differences(given):
        logger.warning(line)
    return RunSetup(
        here, job, config, folder, rehearsals, options.settle, options.silence
    ), single_process


def _join_run(setup: RunSetup) -> None:
    """Train as a node other than node 0, unless all steps are done already."""
    ended = open_latest(setup.folder / CHECKPOINTS)
    if ended is not None and ended.iteration >= setup.config.training.iterations:
        logger.info(f"All steps are done; node {setup.here.node} has nothing to do")
        return
    # Any worker of the job may be started here: node 0 says which ones.
    secret = read_secret_or_refuse(setup.here)
    assert secret is not None
    workers = [
        Worker(pipeline, column)
        for pipeline in range(setup.job.pipelines)
        for column in range(setup.job.stages)
    ]
    settings = NodeSettings(
        config=setup.config, secret=secret, out=str(setup.folder), resume=str(setup.folder)
    )
    with call_in_thread(logger.info) as say:
        join_run(
            find_node_0(setup.here, JOIN_TIMEOUT_SECONDS, say),
            NodeJob(settings=settings, workers=workers),
            node=setup.here.node,
            nodes=setup.here.nodes,
            local=setup.here.local,
            notify=say,
        )


def main() -> None:
    """Train as node 0, or take part as another node.

    Exits 2 for bad input, 1 for a failed run, and with 128 + its number after a signal.
    """
    init_logger()
    code = 0
    try:
        with exit_on_errors(lambda: "; the same command continues from there"):
            _run_node(*_read_setup())
    except typer.Exit as ended:
        code = ended.exit_code
    exit_despite_planning(code)
    sys.exit(code)


def _run_node(setup: RunSetup, config: Trainer.Config) -> None:
    if setup.here.tied:  # otherwise this process would keep training unnoticed
        request_parent_death_signal(signal.SIGTERM)
    if setup.here.node:
        _join_run(setup)
        return
    # torchtitan's Trainer, as its own main program would start it, but as the only process.
    structured_logger.init_structured_logger(
        source="training",
        output_dir=config.dump_folder,
        enable=config.debug.enable_structured_logging,
    )
    os.environ.update(SINGLE_PROCESS)
    # Workers step the optimizer.
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)
    try:
        trainer = SlipstreamTrainer(config)
    except Exception as error:  # whatever its tokenizer, data set or model raise
        raise ConfigError(
            f"torchtitan's Trainer cannot begin: {type(error).__name__}: {first_line(error)}"
        ) from error
    trainer.own = setup
    try:
        trainer.train()
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
