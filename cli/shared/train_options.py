"""Define the options of `slipstream train`, in the groups of its help."""

from pathlib import Path
from typing import Annotated

import msgspec
from typer import Option

from slipstream.cli.shared import options
from slipstream.cli.shared.console import complete_from
from slipstream.cli.shared.outputs import METRICS
from slipstream.planner.options import LAYERS
from slipstream.runtime.coordinator.run_options import STALL_TIMEOUT_SECONDS
from slipstream.runtime.processes.restart_policy import FAULTS_PER_HOUR
from slipstream.runtime.processes.stop_signals import GRACE_SECONDS
from slipstream.runtime.processes.worker_start import COORDINATOR_TIMEOUT_SECONDS
from slipstream.runtime.protocol.setup import JOIN_TIMEOUT_SECONDS, VERIFY_EVERY

MAX_ITERATIONS = 2**40
MODEL = "What is trained"
"""Title, in the help, of the options on the model and its training."""
FILES = "Files"
"""Title, in the help, of the options on files to read and write."""
CLUSTER = "Several machines"
"""Title, in the help, of the options on machines and processes."""
FAILURES = "After failures"
"""Title, in the help, of the options on what happens after failures."""
WAITING = "Waiting and ending"
"""Title, in the help, of the options on time limits."""
REHEARSAL = "Rehearsals"
"""Title, in the help, of the options for failures on purpose."""


class TrainRequest(msgspec.Struct, frozen=True):
    """Argument and options of one `slipstream train`, in the order of its help."""

    job: options.JobFile
    settings: options.Settings = None
    schedule: Annotated[
        Path | None,
        Option(
            rich_help_panel=options.PLANNED,
            metavar="FILE",
            help=("Train by this schedule, made with `slipstream plan`, instead of planning one."),
        ),
    ] = None
    iterations: Annotated[
        int | None,
        Option(
            rich_help_panel=MODEL,
            metavar="N",
            min=0,
            max=MAX_ITERATIONS,
            help=("Optimizer steps. Default: what the job file says."),
        ),
    ] = None
    failed: options.Failed = None
    failed_node: options.FailedNode = None
    backward: options.Backward = None
    optimizer: options.Optimizer = None
    method: options.MethodName = "cp-sat"
    time_limit: options.TimeLimit = 10.0
    params: options.Params = None
    dtype: Annotated[
        str | None,
        Option(
            rich_help_panel=MODEL,
            metavar="float32|float64|bf16",
            help=("Arithmetic; bf16 is autocast. Default: what the job file says."),
        ),
    ] = None
    seed: Annotated[
        int | None,
        Option(
            rich_help_panel=MODEL,
            metavar="N",
            min=0,
            max=2**31 - 1,
            help=("Seed of parameters, text and planner. Default: what the job file says."),
        ),
    ] = None
    out_folder: Annotated[
        Path | None,
        Option(
            "--out",
            rich_help_panel=FILES,
            metavar="DIR",
            help=("Where results go. Default: runs/NAME, with the job file's name."),
        ),
    ] = None
    nodes: Annotated[
        int | None,
        Option(
            rich_help_panel=CLUSTER,
            metavar="N",
            min=1,
            max=2**20,
            help=(
                "Machines to train on; run the command on each. Default: what torchrun, srun or "
                "mpirun say, else 1."
            ),
        ),
    ] = None
    node: Annotated[
        int | None,
        Option(
            rich_help_panel=CLUSTER,
            metavar="I",
            min=0,
            max=2**20,
            help=("Which of them this is. Node 0 plans and leads."),
        ),
    ] = None
    rendezvous: Annotated[
        str | None,
        Option(
            rich_help_panel=CLUSTER,
            metavar="HOST:PORT",
            help=(
                "Where node 0 can be reached by the others. All nodes need the same "
                "SLIPSTREAM_SECRET_FILE."
            ),
        ),
    ] = None
    ranks_per_worker: Annotated[
        int | None,
        Option(
            rich_help_panel=CLUSTER,
            metavar="N",
            min=1,
            max=64,
            help=(
                "Processes of each worker, one device each: [training] tensor_parallel. torchrun, "
                "srun or mpirun start as many, and the first of each worker starts them."
            ),
        ),
    ] = None
    table: Annotated[
        Path | None,
        Option(
            rich_help_panel=options.PLANNED,
            metavar="DIR",
            help=(
                "Take schedules from this table (`slipstream table`), the first one and those "
                "after failures. Without one, and for failures outside it, they are planned on "
                "the spot."
            ),
        ),
    ] = None
    checkpoint_every: Annotated[
        int | None,
        Option(
            rich_help_panel=FILES,
            metavar="N",
            min=0,
            max=MAX_ITERATIONS,
            help=(
                "Save a checkpoint to checkpoints/ of --out every N iterations and at the end; 0: "
                "never. Default: at the end, and before as often as costs less than 1 % of a long "
                "run."
            ),
        ),
    ] = None
    force: Annotated[
        bool,
        Option(
            "--force",
            rich_help_panel=FILES,
            help=("Remove what another run has left in --out, instead of refusing to train there."),
        ),
    ] = False
    resume: Annotated[
        Path | None,
        Option(
            rich_help_panel=FILES,
            metavar="DIR",
            help=(
                "Resume from the newest checkpoint there: the --out of another run, or one "
                "checkpoint's folder. The grid may differ. The same folder as --out may be empty: "
                "then a run starts there."
            ),
        ),
    ] = None
    kill: Annotated[
        list[str] | None,
        Option(
            rich_help_panel=REHEARSAL,
            metavar="D.S@ITERATION",
            help=(
                "For rehearsals: have this worker killed in that iteration; or nodeN@ITERATION: "
                "all workers of that node at once, by [topology]; may be repeated."
            ),
        ),
    ] = None
    bring_back: Annotated[
        list[str] | None,
        Option(
            "--return",
            rich_help_panel=REHEARSAL,
            metavar="D.S@ITERATION",
            help=(
                "Start this worker, or those of nodeN, again in that iteration, or when dead "
                "after that; may be repeated."
            ),
        ),
    ] = None
    slow: Annotated[
        list[str] | None,
        Option(
            rich_help_panel=REHEARSAL,
            metavar="D.S=FACTOR@ITERATION",
            help=(
                "For rehearsals: have this worker, or those of nodeN, compute FACTOR times as "
                "long from that iteration on; =1 ends it; may be repeated."
            ),
        ),
    ] = None
    faults_per_hour: Annotated[
        int,
        Option(
            rich_help_panel=FAILURES,
            metavar="N",
            min=0,
            max=1000,
            help=(
                "Start a worker again that crashes, each time after a longer pause, until it has "
                "more than N faults within an hour, or its node twice as many. 0, and always with "
                "--kill: dead workers stay out."
            ),
        ),
    ] = FAULTS_PER_HOUR
    verify_every: Annotated[
        int,
        Option(
            rich_help_panel=FAILURES,
            metavar="N",
            min=0,
            max=MAX_ITERATIONS,
            help=(
                "Compare the copies of parameters and optimizer state that workers hold every N "
                "iterations, also after each failure and with each checkpoint. If they differ, "
                "give up workers known to be wrong, and go back to a checkpoint if results may "
                "depend on them. 0: only after failures and with checkpoints."
            ),
        ),
    ] = VERIFY_EVERY
    heartbeat_timeout: Annotated[
        float,
        Option(
            rich_help_panel=WAITING,
            metavar="SEC",
            min=0.1,
            max=3600,
            help=("Give up a worker that shows no sign of life for so long."),
        ),
    ] = 5.0
    join_timeout: Annotated[
        float,
        Option(
            rich_help_panel=WAITING,
            metavar="SEC",
            min=0.1,
            max=1e6,
            help=("Wait so long for other nodes and all workers before the first iteration."),
        ),
    ] = JOIN_TIMEOUT_SECONDS
    coordinator_timeout: Annotated[
        float,
        Option(
            rich_help_panel=WAITING,
            metavar="SEC",
            min=0,
            max=1e6,
            help=(
                "When node 0 dies, let the workers wait for so long; restarted with the same "
                "command, it continues with them. 0: end them."
            ),
        ),
    ] = COORDINATOR_TIMEOUT_SECONDS
    stall_timeout: Annotated[
        float,
        Option(
            rich_help_panel=WAITING,
            metavar="SEC",
            min=0.1,
            max=1e6,
            help=(
                "When no iteration has been committed for so long, say which worker waits for "
                "what, and give up one that hangs."
            ),
        ),
    ] = STALL_TIMEOUT_SECONDS
    grace: Annotated[
        float,
        Option(
            rich_help_panel=WAITING,
            metavar="SEC",
            min=0.1,
            max=1e6,
            help=(
                "After SIGTERM or Ctrl-C, end at the next iteration with a checkpoint, within so "
                "many seconds; a second signal ends at once."
            ),
        ),
    ] = GRACE_SECONDS
    layers: Annotated[
        str,
        Option(
            rich_help_panel=FAILURES,
            metavar="fixed|move",
            autocompletion=complete_from(*LAYERS),
            help=(
                "fixed: after a failure, layers stay with the workers that hold them, unless a "
                "table's answer with roles moved soon makes up for its pause; move: while "
                "training continues, they move so that all live workers have equal work, when "
                "that is expected to pay."
            ),
        ),
    ] = "fixed"
    mtbf: Annotated[
        float | None,
        Option(
            rich_help_panel=FAILURES,
            metavar="SEC",
            min=1.0,
            max=1e9,
            help=(
                "With --layers move: mean time between failures in the whole cluster. Default: as "
                "observed, with one more failure in an hour before the run assumed."
            ),
        ),
    ] = None
    tensorboard: Annotated[
        Path | None,
        Option(
            rich_help_panel=FILES,
            metavar="DIR",
            help=(
                "Write the metrics of each iteration there for TensorBoard, too (pip install -e "
                "'.[tensorboard]')."
            ),
        ),
    ] = None
    prometheus: Annotated[
        Path | None,
        Option(
            rich_help_panel=FILES,
            metavar=METRICS,
            help=(
                "Write the metrics of the newest iteration to this file for Prometheus' textfile "
                "collector, too."
            ),
        ),
    ] = None
    json: options.Json = False

    @property
    def folder(self) -> Path:
        """Folder of the run: --out, or its default."""
        return self.out_folder or Path("runs") / self.job.stem

    @property
    def is_in_place(self) -> bool:
        """True if the run resumes in its own folder, as when its command is repeated."""
        return self.resume is not None and self.resume.resolve() == self.folder.resolve()
