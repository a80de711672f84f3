"""Define the options of `slipstream train`, in the groups of its help."""

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.shared.console import complete_from
from slipstream.cli.shared.options import PLANNED
from slipstream.planner.options import LAYERS

MAX_ITERATIONS = 2**40
MODEL, FILES, CLUSTER = "What is trained", "Files", "Several machines"
FAILURES, WAITING, REHEARSAL = "After failures", "Waiting and ending", "Rehearsals"
"""Groups of options in the help."""

ScheduleToFollow = Annotated[Path | None, typer.Option("--schedule", rich_help_panel=PLANNED, metavar="FILE", help=(
    "Train by this schedule, made with `slipstream plan`, instead of planning one."))]
Iterations = Annotated[int | None, typer.Option("--iterations", rich_help_panel=MODEL,
                                                metavar="N", min=0, max=MAX_ITERATIONS, help=(
    "Optimizer steps. Default: what the job file says."))]
Dtype = Annotated[str | None, typer.Option("--dtype", rich_help_panel=MODEL, metavar="float32|float64|bf16", help=(
    "Arithmetic; bf16 is autocast. Default: what the job file says."))]
TrainingSeed = Annotated[int | None, typer.Option("--seed", rich_help_panel=MODEL,
                                                  metavar="N", min=0, max=2**31 - 1, help=(
    "Seed of parameters, text and planner. Default: what the job file says."))]
OutFolder = Annotated[Path | None, typer.Option("--out", rich_help_panel=FILES, metavar="DIR", help=(
    "Where results go. Default: runs/NAME, with the job file's name."))]
RanksPerWorker = Annotated[int | None, typer.Option("--ranks-per-worker", rich_help_panel=CLUSTER,
                                                    metavar="N", min=1, max=64, help=(
    "Processes of each worker, one device each: [training] tensor_parallel. torchrun, srun or mpirun start as many, "
    "and the first of each worker starts them."))]
Nodes = Annotated[int | None, typer.Option("--nodes", rich_help_panel=CLUSTER, metavar="N", min=1, max=2**20, help=(
    "Machines to train on; run the command on each. Default: what torchrun, srun or mpirun say, else 1."))]
NodeNumber = Annotated[int | None, typer.Option("--node", rich_help_panel=CLUSTER, metavar="I", min=0, max=2**20, help=(
    "Which of them this is. Node 0 plans and leads."))]
Rendezvous = Annotated[str | None, typer.Option("--rendezvous", rich_help_panel=CLUSTER, metavar="HOST:PORT", help=(
    "Where node 0 can be reached by the others. All nodes need the same SLIPSTREAM_SECRET_FILE."))]
TableFolder = Annotated[Path | None, typer.Option("--table", rich_help_panel=PLANNED, metavar="DIR", help=(
    "Take schedules from this table (`slipstream table`), the first one and those after failures. Without one, and "
    "for failures outside it, they are planned on the spot."))]
CheckpointEvery = Annotated[int | None, typer.Option("--checkpoint-every", rich_help_panel=FILES,
                                                     metavar="N", min=0, max=MAX_ITERATIONS, help=(
    "Save a checkpoint to checkpoints/ of --out every N iterations and at the end; 0: never. Default: at the end, "
    "and before as often as costs less than 1 % of a long run."))]
Force = Annotated[bool, typer.Option("--force", rich_help_panel=FILES, help=(
    "Remove what another run has left in --out, instead of refusing to train there."))]
Resume = Annotated[Path | None, typer.Option("--resume", rich_help_panel=FILES, metavar="DIR", help=(
    "Resume from the newest checkpoint there: the --out of another run, or one checkpoint's folder. The grid may "
    "differ. The same folder as --out may be empty: then a run starts there."))]
Kill = Annotated[list[str] | None, typer.Option("--kill", rich_help_panel=REHEARSAL, metavar="D.S@ITERATION", help=(
    "For rehearsals: have this worker killed in that iteration; or nodeN@ITERATION: all workers of that node at once, "
    "by [topology]; may be repeated."))]
BringBack = Annotated[list[str] | None, typer.Option("--return", rich_help_panel=REHEARSAL,
                                                     metavar="D.S@ITERATION", help=(
    "Start this worker, or those of nodeN, again in that iteration, or when dead after that; may be repeated."))]
Slow = Annotated[list[str] | None, typer.Option("--slow", rich_help_panel=REHEARSAL,
                                                metavar="D.S=FACTOR@ITERATION", help=(
    "For rehearsals: have this worker, or those of nodeN, compute FACTOR times as long from that iteration on; =1 ends "
    "it; may be repeated."))]
FaultsPerHour = Annotated[int, typer.Option("--faults-per-hour", rich_help_panel=FAILURES, metavar="N", min=0, max=1000,
                                            help=(
    "Start a worker again that crashes, each time after a longer pause, until it has more than N faults within an "
    "hour, or its node twice as many. 0, and always with --kill: dead workers stay out."))]
VerifyEvery = Annotated[int, typer.Option("--verify-every", rich_help_panel=FAILURES,
                                          metavar="N", min=0, max=MAX_ITERATIONS, help=(
    "Compare the copies of parameters and optimizer state that workers hold every N iterations, besides after each "
    "failure and with each checkpoint. If they differ, give up workers known to be wrong, and go back to a "
    "checkpoint if results may depend on them. 0: only after failures and with checkpoints."))]
HeartbeatTimeout = Annotated[float, typer.Option("--heartbeat-timeout", rich_help_panel=WAITING,
                                                 metavar="SEC", min=0.1, max=3600, help=(
    "Give up a worker that shows no sign of life for so long."))]
JoinTimeout = Annotated[float, typer.Option("--join-timeout", rich_help_panel=WAITING,
                                            metavar="SEC", min=0.1, max=1e6, help=(
    "Wait so long for other nodes and all workers before the first iteration."))]
CoordinatorTimeout = Annotated[float, typer.Option("--coordinator-timeout", rich_help_panel=WAITING,
                                                   metavar="SEC", min=0, max=1e6, help=(
    "When node 0 dies, let the workers wait for so long; restarted with the same command, it continues with"
    " them. 0: end them."))]
StallTimeout = Annotated[float, typer.Option("--stall-timeout", rich_help_panel=WAITING,
                                             metavar="SEC", min=0.1, max=1e6, help=(
    "When no iteration has been committed for so long, say which worker waits for what, and give up one that hangs."))]
Grace = Annotated[float, typer.Option("--grace", rich_help_panel=WAITING, metavar="SEC", min=0.1, max=1e6, help=(
    "After SIGTERM or Ctrl-C, end at the next iteration with a checkpoint, within so many seconds; a second signal "
    "ends at once."))]
LayersMode = Annotated[str, typer.Option("--layers", rich_help_panel=FAILURES,
                                         metavar="fixed|move", autocompletion=complete_from(*LAYERS), help=(
    "fixed: after a failure, layers stay with the workers that hold them, unless a table's answer with roles moved "
    "soon makes up for its pause; move: while training continues, they move "
    "so that all live workers have equal work, when that is expected to pay."))]
Mtbf = Annotated[float | None, typer.Option("--mtbf", rich_help_panel=FAILURES, metavar="SEC", min=1.0, max=1e9, help=(
    "With --layers move: from one failure in the whole cluster to the next. Default: as observed, and one an hour "
    "besides."))]
Tensorboard = Annotated[Path | None, typer.Option("--tensorboard", rich_help_panel=FILES, metavar="DIR", help=(
    "Write the metrics of each iteration there for TensorBoard, too (pip install -e '.[tensorboard]')."))]
