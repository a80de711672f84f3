"""torchtitan's own command line, for a run of Slipstream:

    torchrun --nproc-per-node 1 -m slipstream.cli.torchtitan --module llama3 --config llama3_8b \\
        --parallelism.pipeline_parallel_degree 4 --parallelism.data_parallel_replicate_degree 2

One process on each machine. Configuration, initialisation, data, optimizer, learning rates, metrics and the last
checkpoint are torchtitan's; its Trainer holds the model on the CPU of node 0, and hands it to the workers.
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

from slipstream.cli.shared.console import complain
from slipstream.cli.shared.going_on import take_whole
from slipstream.cli.shared.launch_options import given_secret_or_refuse, launched_as, with_machines
from slipstream.cli.shared.refusals import refusals
from slipstream.cli.shared.rehearsals import Rehearsals, read_rehearsals
from slipstream.cli.shared.run_progress import in_thread
from slipstream.cli.start import leave_plans
from slipstream.planner.failures import FailurePlanner
from slipstream.planner.job.file import Job, JobError, parse_job, read_job
from slipstream.planner.options import PlanOptions
from slipstream.planner.params import DEFAULTS
from slipstream.planner.plan import plan_with
from slipstream.runtime.config import ConfigError, RunConfig
from slipstream.runtime.coordinator.decisions.settling import Settling
from slipstream.runtime.errors import first_line
from slipstream.runtime.events import Metrics
from slipstream.runtime.launch import run
from slipstream.runtime.model.checkpoints.checkpoint import identity_of, latest, open_checkpoint
from slipstream.runtime.model.layers.layered_model import model_for, parameter_dtype, split_layers
from slipstream.runtime.node_agent import NodeJob, join
from slipstream.runtime.processes.faults import FAULTS_PER_HOUR
from slipstream.runtime.processes.launchers import Launched, announce, find, to_open
from slipstream.runtime.processes.parent_death import signal_at_death_of_parent
from slipstream.runtime.protocol.setup import JOIN_TIMEOUT_SECONDS
from slipstream.runtime.run_folder import CHECKPOINTS, left_behind
from slipstream.runtime.run_options import Resilience, RunOptions
from slipstream.schedules.codec import read
from slipstream.schedules.schedule import Schedule, Worker

try:
    from slipstream.runtime.model.layers.torchtitan.specification import as_given, in_one_process
except ConfigError as error:
    complain(error)
    sys.exit(2)
from torchtitan.observability import structured_logger
from torchtitan.tools.logging import init_logger, logger
from torchtitan.trainer import Trainer

from slipstream.runtime.model.layers.torchtitan.trainer_state import begin, read_state
from slipstream.runtime.model.layers.torchtitan.training import differences, microbatches, run_config

HEARTBEAT_SECONDS = Resilience().heartbeat_timeout_seconds
PLAN_SECONDS = 10.0
"""For the first schedule."""
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
"""What torchtitan's Trainer is told: it is one process, whoever else trains."""


@dataclass(frozen=True, slots=True)
class Own:
    """What this program is told beside torchtitan's own command line, and what comes of that."""

    here: Launched
    job: Job
    config: RunConfig
    folder: Path
    rehearsals: Rehearsals
    settled_seconds: float | None
    """For how long schedules are searched for which layers move; None: they stay."""
    silence: float
    """For so many seconds a worker may show no sign of life."""


class SlipstreamTrainer(Trainer):  # type: ignore[misc]
    """torchtitan's Trainer, whose steps are made by the workers of a run."""

    own: Own
    step: int

    def train(self) -> None:
        """Go on from torchtitan's checkpoint, or the run's own where that is newer, until all steps are done."""
        own, steps = self.own, self.config.training.steps
        saved = own.folder / CHECKPOINTS
        begun = take_whole(saved, own.folder, logger.warning)
        if begun is not None:
            open_checkpoint(begun.path, identity_of(own.config, _layers(own.config)))
        asked = self.config.checkpoint.load_step
        if begun is None or asked != -1 or begun.iteration < _newest(self.config):
            self.checkpointer.load(step=asked)  # one of the model alone cannot be gone on from: torchtitan refuses it
        loaded = self.step
        if begun is None or begun.iteration < self.step:
            begun = begin(self, own.config, saved)
        else:
            logger.info(f"Goes on from step {begun.iteration}, of {begun.path}")
            self._count(begun.iteration)
        self.metrics_processor.time_last_log = time.perf_counter()
        if begun is None or begun.iteration < steps:
            first = _first(own)
            placed = with_machines(own.job, first, own.here)
            planner = FailurePlanner(placed, first, settled_seconds=own.settled_seconds)
            with in_thread(logger.info) as say, in_thread(self._told, logger.warning) as told:
                run(first, own.config, out=own.folder, resilience=Resilience(
                    scheduler=planner.after, at_speeds=planner.at_speeds, rebalancer=planner, resume=begun,
                    checkpoint_every=None, injections=own.rehearsals.injections, returns=own.rehearsals.returns,
                    node_failures=own.rehearsals.node_failures, slowdowns=own.rehearsals.slowdowns,
                    heartbeat_timeout_seconds=own.silence,
                    faults_per_hour=0 if own.rehearsals.kills else FAULTS_PER_HOUR,
                    settling=None if own.settled_seconds is None else Settling()), options=RunOptions(
                        nodes=own.here.nodes, rendezvous=to_open(own.here), announce=partial(announce, own.here),
                        local=own.here.local, topology=own.job.nodes, notify=say, observe_iteration=told,
                        again=True, secret=given_secret_or_refuse(own.here)))
        ended = latest(saved)
        assert ended is not None
        read_state(self, own.config, ended)
        if self.config.checkpoint.enable and not self.config.checkpoint.last_save_model_only:
            batches = iter(self.dataloader)  # which is where the Trainer's checkpoint was
            for _ in range((self.step - loaded) * self.gradient_accumulation_steps):
                next(batches)
        self.checkpointer.save(self.step, last_step=True)
        logger.info("Training completed")

    def _told(self, line: Metrics) -> None:
        """An iteration is committed: log it, as torchtitan does."""
        rates = self.lr_schedulers.get_metrics()
        if not self._count(line.iteration + 1) or not self.metrics_processor.should_log(self.step):
            return
        assert line.loss is not None
        self.metrics_processor.data_loading_times.append(0.0)  # workers read, while they train
        self.metrics_processor.log(self.step, line.loss, line.loss, line.gradient_norm or 0.0,
                                   {"n_tokens_seen": self.ntokens_seen, **rates})

    def _count(self, steps: int) -> bool:
        """So many steps are done; whether that is new: one that is made again has been counted."""
        new = steps - self.step
        for _ in range(new):
            self.lr_schedulers.step()
        tokens = max(0, new) * self.config.training.global_batch_size * self.config.training.seq_len
        self.ntokens_seen += tokens
        devices = self.own.job.pipelines * self.own.job.stages * self.own.config.training.tensor_parallel
        self.metrics_processor.ntokens_since_last_log += tokens / devices  # it shows what each of them does
        self.step = max(self.step, steps)
        return new > 0


def _newest(config: Trainer.Config) -> int:
    """The step of torchtitan's last checkpoint; -1: there is none."""
    if not config.checkpoint.enable:
        return -1
    names = [path.name for path in (Path(config.dump_folder) / config.checkpoint.folder).glob("step-*")]
    return max((int(name[5:]) for name in names if name[5:].isdecimal()), default=-1)


def _layers(config: RunConfig) -> int:
    """How many the model has. Raises ConfigError."""
    training = config.training
    return model_for(config.model, 0, parameter_dtype(training), torch.device(training.device)).layers


def _first(own: Own) -> Schedule:
    """The schedule to begin with: that of a run whose workers live, or a plan."""
    path = own.folder / "schedule.json"
    if left_behind(own.folder) is not None and path.exists():
        return read(path)
    return plan_with(PlanOptions(time_limit=PLAN_SECONDS), own.job, ()).schedule


def _arguments() -> tuple[argparse.Namespace, list[str]]:
    """Ours, and torchtitan's. Raises ConfigError."""
    parser = argparse.ArgumentParser(prog="slipstream.cli.torchtitan", allow_abbrev=False, add_help=False,
                                     exit_on_error=False)
    add = parser.add_argument_group("Slipstream").add_argument
    add("--slipstream.job", dest="job", type=Path, metavar="FILE",
        help="a job file: times, memory and machines to plan by; its grid has precedence. Default: as many pipelines "
             "and stages as --parallelism.data_parallel_replicate_degree and .pipeline_parallel_degree say")
    settled_seconds = DEFAULTS.failures.settled_seconds
    add("--slipstream.settle", dest="settle", type=_seconds, nargs="?", const=settled_seconds, metavar="SECONDS",
        help="layers move to better schedules after failures, while the workers train on; for so long such a schedule "
             f"is searched (default: {settled_seconds:g})")
    add("--slipstream.heartbeat-timeout", dest="silence", type=_seconds, default=HEARTBEAT_SECONDS, metavar="SECONDS",
        help="give up a worker that shows no sign of life for so long (default: %(default)g)")
    for name, form in (("kill", "D.S@STEP"), ("return", "D.S@STEP"), ("slow", "D.S=FACTOR@STEP")):
        add(f"--slipstream.{name}", dest=f"{name}s", action="append", metavar=form,
            help="a rehearsal, counted from 0, as that of `slipstream train`")
    if {"-h", "--help"} & set(sys.argv):
        parser.print_help()  # and torchtitan's follows
    try:
        return parser.parse_known_args()
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None


def _seconds(given: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.1 <= (seconds := float(given)) <= 3600:
            return seconds
    raise argparse.ArgumentTypeError(f"{given}: expected 0.1 to 3600 seconds")


def _job(path: Path | None, given: Trainer.Config, layers: int) -> Job:
    """The job to plan: that of a file, or with the times of stages as their layers. Raises JobError and ConfigError."""
    degrees = given.parallelism
    asked = degrees.data_parallel_replicate_degree, degrees.pipeline_parallel_degree
    if path is None:
        pipelines, stages = asked
        cut = [end - begin for begin, end in split_layers(layers, stages)]
        return parse_job(f"pipelines = {pipelines}\nstages = {stages}\n"
                         f"microbatches = {list(microbatches(given, pipelines))}\n"
                         f"[placement]\nlayers = {cut}\n"
                         f"[time]\nforward = {cut}\nbackward_input = {cut}\nbackward_weight = {cut}\n")
    job = read_job(path)
    if asked not in ((1, 1), (job.pipelines, job.stages)):
        raise JobError(f"{path}: {job.pipelines} pipelines of {job.stages} stages, and --parallelism says {asked[0]} "
                       f"of {asked[1]}; expected the same, or nothing of it")
    wanted = sum(microbatches(given, job.pipelines))
    if sum(job.microbatches) != wanted:
        raise JobError(f"{path}: {sum(job.microbatches)} micro-batches in an iteration, and "
                       f"--training.global_batch_size makes {wanted}; expected the same")
    return job


def _own() -> tuple[Own, Trainer.Config]:
    """What is to be done, and torchtitan's configuration of it for this process. Raises ConfigError and JobError."""
    options, arguments = _arguments()
    here = launched_as(None, None, None)
    assert here is not None
    given = as_given(arguments)
    folder = Path(given.dump_folder).absolute() / "slipstream"
    config = run_config(arguments, given, folder / "initial")
    job = _job(options.job, given, _layers(config))
    alone = in_one_process(given)
    # As for a seed checkpoint: the Trainer's model is plain tensors on the CPU.
    alone = replace(alone, checkpoint=replace(alone.checkpoint, create_seed_checkpoint=True))
    rehearsals = read_rehearsals(job, options.kills, options.returns, options.slows)
    for line in rehearsals.impossible(given.training.steps):
        raise ConfigError(line)
    for line in differences(given):
        logger.warning(line)
    return Own(here, job, config, folder, rehearsals, options.settle, options.silence), alone


def _take_part(own: Own) -> None:
    """Train as a node that is not node 0, which has the Trainer, unless all is done."""
    ended = latest(own.folder / CHECKPOINTS)
    if ended is not None and ended.iteration >= own.config.training.iterations:
        logger.info(f"All steps are done; node {own.here.node} has nothing to do")
        return
    secret = given_secret_or_refuse(own.here)
    assert secret is not None
    workers = [Worker(pipeline, column) for pipeline in range(own.job.pipelines) for column in range(own.job.stages)]
    with in_thread(logger.info) as say:
        join(find(own.here, JOIN_TIMEOUT_SECONDS, say),
             NodeJob(config=own.config, workers=workers, secret=secret, resume=own.folder), node=own.here.node,
             nodes=own.here.nodes, out=own.folder, local=own.here.local, notify=say)


def main() -> None:
    """Train, or take part. Exits 2 where that cannot be, 1 where it fails, and as usual after a signal."""
    init_logger()
    code = 0
    try:
        with refusals(lambda: "; the same command goes on from there"):
            _train(*_own())
    except typer.Exit as ended:
        code = ended.exit_code
    leave_plans(code)
    sys.exit(code)


def _train(own: Own, config: Trainer.Config) -> None:
    if own.here.tied:  # else this process would train on, without anyone who knows of it
        signal_at_death_of_parent(signal.SIGTERM)
    if own.here.node:
        _take_part(own)
        return
    structured_logger.init_structured_logger(source="training", output_dir=config.dump_folder,
                                             enable=config.debug.enable_structured_logging)
    os.environ.update(ALONE)
    warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)  # workers step the optimizer
    try:
        trainer = SlipstreamTrainer(config)
    except Exception as error:  # whatever its tokenizer, data set or model raise
        raise ConfigError(f"torchtitan's Trainer cannot begin: {type(error).__name__}: {first_line(error)}") from error
    trainer.own = own
    try:
        trainer.train()
    finally:
        trainer.close()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
