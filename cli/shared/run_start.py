"""Find where `slipstream train` starts, or that nothing is left to do.

It starts with schedules that are given or from a table, if they fit the job, and from a checkpoint
if there is one.
"""

import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
import typer
from torch import Tensor

from slipstream.cli.shared.console import err, print_json, refuse
from slipstream.cli.shared.options import load_table_or_refuse, may_exist
from slipstream.cli.shared.run_process import exit_on_errors
from slipstream.cli.shared.train_options import TrainRequest
from slipstream.planner.job.file import Job
from slipstream.planner.model.from_job import build_grid
from slipstream.runtime.checkpoints.checkpoint import (
    MANIFEST,
    Checkpoint,
    CheckpointError,
    find_complete,
    find_newest_undamaged,
    identity_of,
    open_checkpoint,
    open_latest,
    rename_damaged,
    require_job,
    verify_checkpoint,
)
from slipstream.runtime.checkpoints.parameters import layer_path, load_layer
from slipstream.runtime.config import RunConfig
from slipstream.runtime.coordinator.run_fit import count_samples_read
from slipstream.runtime.data.data import load_data, load_validation_data
from slipstream.runtime.device import choose_device
from slipstream.runtime.models.layered_model import build_model, parameter_dtype
from slipstream.runtime.placement import place_layers
from slipstream.runtime.ranks.worker_group import simulating_rank
from slipstream.runtime.run_folder import (
    CHECKPOINTS,
    count_iterations_done,
    hold_folder_lock,
    list_saved,
    raise_unless_free,
    read_takeover_record,
)
from slipstream.runtime.state.checksum import combined_digest, tensor_digest
from slipstream.runtime.tensor_codec import TensorError
from slipstream.schedules.codec import read
from slipstream.schedules.document import DocumentError
from slipstream.schedules.schedule import Grid, Schedule, Worker
from slipstream.schedules.tables.relabel import Nodes
from slipstream.schedules.tables.table import Table


def require_same_shape(path: Path, grid: Grid, job: Job) -> None:
    """Exit 2 unless the grid of a schedule has the shape of this job."""
    for property_name, of_schedule, of_job in (
            ("pipelines", grid.pipelines, job.pipelines), ("stages", grid.columns, job.stages),
            ("micro-batches", list(grid.microbatches), list(job.microbatches)),
            ("columns of virtual stages", [stage.column for stage in grid.stages], list(job.columns)),
            ("directions of micro-batches", grid.chains, job.chains)):
        if of_schedule != of_job:
            refuse(f"{path}: made for another job: its {property_name} are {of_schedule}, the job's {of_job}")


def require_trainable(job: Job, config: RunConfig, resume: Checkpoint | None) -> str | None:
    """Check that the job's model and data can be trained, before it is planned.

    Returns a line to print if the number of layers in the job differs from the model's, otherwise
    None. Raises the errors that `run` would raise, ConfigError and PlacementError.
    """
    training, device = config.training, torch.device(choose_device(config.training.device))
    with simulating_rank(training.tensor_parallel):
        model = build_model(config.model, training.seed, parameter_dtype(training), device)
    place_layers(build_grid(job), model.layers)
    load_data(config, job.microbatches, count_samples_read(resume, config, job.microbatches))
    load_validation_data(config, job.microbatches)
    counted = sum(job.layers or ()) // job.chains
    return None if counted in (0, model.layers) else (
        f"the job counts {counted} decoder layers, the model {model.layers}: its first one, the embedding, is with the "
        "first of them, and its last one, the head, with the last")


def read_fitting_table(path: Path, job: Job) -> Table:
    """Return the table of schedules in a folder. Exits 2 if it is not for this job."""
    table = load_table_or_refuse(path)
    require_same_shape(path, table.basis.grid, job)
    return table


def look_up(table: Table | None, down: tuple[Worker, ...], *, settled: bool = False,
            nodes: Nodes = ()) -> Schedule | None:
    """Return the table's schedule with which a run begins, or None without one.

    The workers `down` are absent. With `settled`, it is the one for which any layers move;
    otherwise whole roles may have moved, because no worker holds layers before a run begins.
    `nodes` has the workers of each machine, over which the holders of a stage are spread. Exits 2
    for workers outside the table's grid.
    """
    if table is None:
        return None
    try:
        result = table.lookup(down, settled=settled, roles_move=True, nodes=nodes)
    except ValueError as error:  # also TableError
        refuse(error)
    return None if result is None else result.schedule


def find_checkpoint(folder: Path) -> Checkpoint | None:
    """Return a folder's checkpoint, the newest of several, or None. Raises CheckpointError."""
    if may_exist(folder / MANIFEST):
        return open_checkpoint(folder)
    return open_latest(folder / "checkpoints") or open_latest(folder)


def find_checkpoint_or_refuse(folder: Path, option: str = "") -> Checkpoint:
    """Return the checkpoint in a folder, or the newest of several. Exits 2 if none can be read; if
    there is none, the message begins with `option`, such as "--resume "."""
    try:
        checkpoint = find_checkpoint(folder)
    except CheckpointError as error:
        refuse(error)
    if checkpoint is None:
        refuse(f"{option}{folder}: no checkpoint here or in its folder checkpoints")
    return checkpoint


def describe_resuming(ctx: typer.Context, folder: Path, resumed: Checkpoint | None) -> str:
    """Return a clause that says how to resume a run that ended early.

    It names the newest checkpoint of the run, or else the one it started from.
    """
    with suppress(CheckpointError):
        newest = open_latest(folder / CHECKPOINTS)
        if newest is not None and (resumed is None or newest.path.resolve() != resumed.path.resolve()):
            return f"; resume from its checkpoint of iteration {newest.iteration}: {_resume_command(ctx, folder)}"
        if resumed is not None:
            source = folder if newest is not None else resumed.path
            return (f"; it saved no checkpoint of its own: resume again from that of iteration {resumed.iteration}: "
                    f"{_resume_command(ctx, source)}")
    return "; there is no checkpoint to resume from"


def _resume_command(ctx: typer.Context, source: Path) -> str:
    """Return the command line of this run with `source` as the value of --resume."""
    return shlex.join(["slipstream", "train", str(ctx.params["job"]), "--resume", str(source), *_given_options(ctx)])


def _given_options(ctx: typer.Context) -> Iterator[str]:
    for option in ctx.command.params:
        name, value = str(option.name), ctx.params.get(str(option.name))
        source = ctx.get_parameter_source(name)
        if name in ("job", "resume", "force") or source is None or source.name != "COMMANDLINE":
            continue
        for item in value if isinstance(value, (list, tuple)) else (value,):
            yield option.opts[0]
            if not isinstance(item, bool):
                yield str(item)


def find_start(request: TrainRequest, *, needed: bool) -> Checkpoint | None:
    """Return the checkpoint to start from; None without one, or without --resume.

    None if the run does not resume, or resumes in its own folder, which has no checkpoint. Set
    `needed` to False if the run continues with workers that live: if no checkpoint can be read, the
    result is then None, too. If True, the checkpoint must be whole: damaged checkpoints are
    reported, and those in the run's own folder are set aside. Exits 2 if all are damaged.
    """
    resume, folder = request.resume, request.folder
    if resume is None:
        return None
    if needed:
        checkpoint = _find_whole_or_refuse(resume, folder)
        if checkpoint is not None:
            return checkpoint
    if request.is_in_place and not list_saved(folder):
        completed = count_iterations_done(folder)
        if needed:
            err.print(f"{folder}: " + (f"the run there was ended before its first checkpoint: repeats its {completed} "
                                       "iterations from iteration 0" if completed else
                                       "no checkpoint to resume from; starts with iteration 0"),
                      style="yellow", soft_wrap=True)
        return None
    if needed:
        return find_checkpoint_or_refuse(resume, "--resume ")
    try:
        return find_checkpoint(resume)
    except CheckpointError:
        return None


def _find_whole_or_refuse(resume: Path, folder: Path) -> Checkpoint | None:
    """Return the checkpoint in `resume`, or the newest whole one below it, or None."""
    with exit_on_errors():
        if (resume / MANIFEST).exists():
            return verify_checkpoint(open_checkpoint(resume))
        source = next((path for path in (resume / CHECKPOINTS, resume) if find_complete(path)), resume)
        return find_whole_checkpoint(source, folder, lambda line: err.print(line, style="yellow", soft_wrap=True))


def find_whole_checkpoint(source: Path, folder: Path, say: Callable[[str], object]) -> Checkpoint | None:
    """Return the newest checkpoint in `source` that is not damaged, or None.

    None: there is no checkpoint. Damaged ones are reported by `say`, and those in the run's own
    folder, `folder`, are set aside. Raises CheckpointError if all are damaged, and FolderError if
    some are to be set aside while another run writes to `folder`.
    """
    whole, damaged = find_newest_undamaged(source)
    with ExitStack() as stack:
        is_own = source.resolve() == (folder / CHECKPOINTS).resolve()
        if damaged and is_own:  # with the lock, because a run that is under way removes checkpoints
            stack.enter_context(hold_folder_lock(folder, 0))
            whole, damaged = find_newest_undamaged(source)
        if whole is None and damaged:
            raise CheckpointError(f"{next(iter(damaged.values()))}; no checkpoint in {source} is whole: start again "
                                  "with another --out")
        if is_own:
            damaged = {rename_damaged(path): error for path, error in damaged.items()}
    for path, error in damaged.items():
        say(f"{error}; it is kept as {path}, and training continues from {whole and whole.path}")
    return whole


def require_usable(request: TrainRequest, resume: Checkpoint | None, config: RunConfig) -> None:
    """Check the run's folder and checkpoint before planning. Raises the errors of `run`."""
    if resume is not None:
        require_job(resume, identity_of(config, len(resume.manifest.layers)))
    if request.folder.is_dir():
        with hold_folder_lock(request.folder, 0):
            raise_unless_free(request.folder, resume, config, force=request.force, again=request.is_in_place)


def warn_if_done(request: TrainRequest, resume: Checkpoint, iterations: int) -> bool:
    """Warn if all `iterations` were done when a checkpoint was written. Return whether nothing is
    left to do: True if the run's parameters are written, too.

    If nothing is left and --json is given, the run's answer is printed.
    """
    if resume.iteration < iterations:
        return False
    answer = answer_if_done(request.folder, resume, iterations)
    err.print(f"{resume.path} has seen {resume.iteration} iterations of {iterations}: nothing is left to do"
              f"{'' if answer else ' but to write the parameters'}; --iterations trains further", style="yellow",
              soft_wrap=True)
    if answer is not None and request.json:
        print_json(answer)
    return answer is not None


def is_done_without_node(request: TrainRequest, iterations: int) -> bool:
    """Return whether the run to join has done all iterations, by this node's files."""
    with suppress(CheckpointError, OSError):
        checkpoint = None if request.resume is None or read_takeover_record(request.folder) is not None else \
            find_checkpoint(request.resume)
        return checkpoint is not None and is_run_done(request.folder, checkpoint, iterations)
    return False


def is_run_done(folder: Path, resume: Checkpoint, iterations: int) -> bool:
    """Return whether a run is done and written, with `resume` newest. Raises CheckpointError."""
    newest = open_latest(folder / CHECKPOINTS)
    return (resume.iteration >= iterations and newest is not None and newest.path.resolve() == resume.path.resolve()
            and all(layer_path(folder, layer).exists() for layer in range(len(resume.manifest.layers))))


def answer_if_done(folder: Path, resume: Checkpoint, iterations: int) -> dict[str, object] | None:
    """Return the answer of `train --json` for a run with nothing left to do.

    None if something is left. The run in `folder` would resume from `resume`. One whose iterations
    are all done still has something to do if its parameters are missing.
    """
    with suppress(CheckpointError, DocumentError, TensorError, OSError):
        if not is_run_done(folder, resume, iterations):
            return None
        layers = range(len(resume.manifest.layers))
        schedule = read(folder / "schedule.json")
        digests = {name: tensor_digest(name, tensor) for layer in layers
                   for name, tensor in _load_named_layer(layer, folder).items()}
        return {"iterations": 0, "losses": [], "parameter_digest": combined_digest(digests),
                "first_iteration": resume.iteration, "recoveries": [], "slow_workers": [],
                "measured_period": None, "planned_period": schedule.seconds(schedule.period_ticks)}
    return None


def _load_named_layer(layer: int, folder: Path) -> dict[str, Tensor]:
    return {f"{layer}.{name}": tensor for name, tensor in load_layer(folder, layer).items()}
