"""Find where `slipstream train` starts, or that nothing is left to do.

A run may start from a checkpoint, and by a schedule that is given or from a table, if it fits.
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
    report_damaged,
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
    """Exit 2 unless the grid of the schedule in `path` has the job's shape."""
    for property_name, of_schedule, of_job in (
        ("pipelines", grid.pipelines, job.pipelines),
        ("stages", grid.columns, job.stages),
        ("micro-batches", list(grid.microbatches), list(job.microbatches)),
        ("columns of virtual stages", [stage.column for stage in grid.stages], list(job.columns)),
        ("directions of micro-batches", grid.chains, job.chains),
    ):
        if of_schedule != of_job:
            refuse(
                f"{path}: made for another job: its {property_name} are {of_schedule}, the job's "
                f"{of_job}"
            )


def require_trainable(job: Job, config: RunConfig, resume: Checkpoint | None) -> str | None:
    """Check that the job's model and data can be trained, before anything is planned.

    Returns a line to print if the job has layers, but not as many as the model; else None. Raises
    ConfigError if model or data cannot be loaded, and PlacementError if the model does not fit the
    job's stages.
    """
    training, device = config.training, torch.device(choose_device(config.training.device))
    with simulating_rank(training.tensor_parallel):
        model = build_model(config.model, training.seed, parameter_dtype(training), device)
    place_layers(build_grid(job), model.layers)
    load_data(config, job.microbatches, count_samples_read(resume, config, job.microbatches))
    load_validation_data(config, job.microbatches)
    counted = sum(job.layers or ()) // job.chains
    return (
        None
        if counted in (0, model.layers)
        else (
            f"the job counts {counted} decoder layers, the model {model.layers}: its first one, "
            "the embedding, is with the first of them, and its last one, the head, with the last"
        )
    )


def read_fitting_table(path: Path, job: Job) -> Table:
    """Return the table in `path`, or the one that Slipstream includes by that name.

    Exits 2 if it cannot be used, or is for a job of another shape: other pipelines, stages,
    micro-batches or placement.
    """
    table = load_table_or_refuse(path)
    require_same_shape(path, table.basis.grid, job)
    return table


def look_up(
    table: Table | None, down: tuple[Worker, ...], *, settled: bool = False, nodes: Nodes = ()
) -> Schedule | None:
    """Return the table's schedule to begin a run with; None without table or entry.

    Since no worker holds layers yet, roles may have moved in the schedule; with `settled`, any
    layers may have. Exits 2 for workers outside the table's grid, and for an entry that cannot be
    used.

    Parameters
    ----------
    down
        Workers that are absent.
    nodes
        Workers of each machine, so that the holders of a stage can be spread over machines.
    """
    if table is None:
        return None
    try:
        result = table.lookup(down, settled=settled, roles_move=True, nodes=nodes)
    except ValueError as error:  # also TableError
        refuse(error)
    return None if result is None else result.schedule


def find_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the checkpoint that `folder` is, or the newest one in it; None if none.

    Checkpoints in its subfolder `checkpoints` come first. Raises CheckpointError if the newest one
    cannot be read.
    """
    if may_exist(folder / MANIFEST):
        return open_checkpoint(folder)
    return open_latest(folder / "checkpoints") or open_latest(folder)


def find_checkpoint_or_refuse(folder: Path, option: str = "") -> Checkpoint:
    """Return the checkpoint that `folder` is, or the newest in it (`find_checkpoint`).

    Exits 2 if it cannot be read, or if there is none. The message for none begins with `option`,
    such as "--resume ".
    """
    try:
        checkpoint = find_checkpoint(folder)
    except CheckpointError as error:
        refuse(error)
    if checkpoint is None:
        refuse(f"{option}{folder}: no checkpoint here or in its folder checkpoints")
    return checkpoint


def describe_resuming(ctx: typer.Context, folder: Path, resumed: Checkpoint | None) -> str:
    """Return a clause on how to resume a run that ended early.

    The clause names the newest checkpoint of the run, or else `resumed`, from which it started
    (None: it started with iteration 0). Without either, or if the newest cannot be read, it says
    that there is none.
    """
    with suppress(CheckpointError):
        newest = open_latest(folder / CHECKPOINTS)
        if newest is not None and (
            resumed is None or newest.path.resolve() != resumed.path.resolve()
        ):
            return (
                f"; resume from its checkpoint of iteration {newest.iteration}: "
                f"{_resume_command(ctx, folder)}"
            )
        if resumed is not None:
            source = folder if newest is not None else resumed.path
            # Its losses, which are computed again, would keep another run out of its folder.
            force = " --force" if newest is None and count_iterations_done(folder) else ""
            return (
                "; it saved no checkpoint of its own: resume again from that of iteration "
                f"{resumed.iteration}: {_resume_command(ctx, source)}{force}"
            )
    return "; there is no checkpoint to resume from"


def _resume_command(ctx: typer.Context, source: Path) -> str:
    """Return this run's command line, with `source` as the value of --resume."""
    return shlex.join(
        [
            "slipstream",
            "train",
            str(ctx.params["job"]),
            "--resume",
            str(source),
            *_given_options(ctx),
        ]
    )


def _given_options(ctx: typer.Context) -> Iterator[str]:
    # --force is left out: it would remove the checkpoint that is resumed.
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
    """Return the checkpoint to start from; None to start with iteration 0.

    If `needed`, the checkpoint is one that is not damaged. Damaged ones are reported, and those in
    the run's own folder are renamed. Exits 2 if --resume names a folder without a checkpoint,
    unless it is the run's own and has no parameters either, or if all are damaged. If not `needed`,
    because live workers may have all layers, the checkpoint is the newest that has a readable
    manifest, or None; its files are not verified.
    """
    resume, folder = request.resume, request.folder
    if resume is None:
        return None
    if not needed:
        return _find_readable(resume)
    checkpoint = _find_whole_or_refuse(resume, folder)
    if checkpoint is not None:
        return checkpoint
    # A run that resumes in its own folder may have ended before its first checkpoint.
    if request.is_in_place and not list_saved(folder):
        completed = count_iterations_done(folder)
        err.print(
            f"{folder}: "
            + (
                f"the run there was ended before its first checkpoint: repeats its {completed} "
                "iterations from iteration 0"
                if completed
                else "no checkpoint to resume from; starts with iteration 0"
            ),
            style="yellow",
            soft_wrap=True,
        )
        return None
    return find_checkpoint_or_refuse(resume, "--resume ")


def _find_readable(resume: Path) -> Checkpoint | None:
    """Return the checkpoint `resume`, or the newest in it with a readable manifest; else None."""
    if may_exist(resume / MANIFEST):
        paths = [resume]
    else:
        found = find_complete(resume / CHECKPOINTS) or find_complete(resume)
        paths = [found[number] for number in sorted(found, reverse=True)]
    for path in paths:
        with suppress(CheckpointError):
            return open_checkpoint(path)
    return None


def _find_whole_or_refuse(resume: Path, folder: Path) -> Checkpoint | None:
    """Return the checkpoint `resume`, or the newest undamaged one in that folder.

    None if there is none at all. Exits 2 if the checkpoint, or each of several, is damaged.
    """
    with exit_on_errors():
        if (resume / MANIFEST).exists():
            return verify_checkpoint(open_checkpoint(resume))
        source = next(
            (path for path in (resume / CHECKPOINTS, resume) if find_complete(path)), resume
        )
        return find_whole_checkpoint(
            source, folder, lambda line: err.print(line, style="yellow", soft_wrap=True)
        )


def find_whole_checkpoint(
    source: Path, folder: Path, say: Callable[[str], object]
) -> Checkpoint | None:
    """Return the newest undamaged checkpoint in `source`; None if there are no checkpoints.

    Newer damaged ones are reported by `say`, and renamed if `source` is in the run's own `folder`.
    Raises CheckpointError if all are damaged or one cannot be read, FolderError if some are to be
    renamed while another run writes to `folder`, and OSError if renaming fails.
    """
    whole, damaged = find_newest_undamaged(source)
    with ExitStack() as stack:
        is_own = source.resolve() == (folder / CHECKPOINTS).resolve()
        if damaged and is_own:  # with the lock, because a run that is under way removes checkpoints
            stack.enter_context(hold_folder_lock(folder, 0))
            whole, damaged = find_newest_undamaged(source)
        if whole is None and damaged:
            raise CheckpointError(
                f"{next(iter(damaged.values()))}; no checkpoint in {source} is whole: start again "
                "with another --out"
            )
        report_damaged(damaged, whole, say, rename=is_own)
    return whole


def require_usable(request: TrainRequest, resume: Checkpoint | None, config: RunConfig) -> None:
    """Check that the run's folder is free, and that `resume`, if any, fits.

    Raises FolderError if the run would overwrite results of another one, or another one writes
    there, CheckpointError if the checkpoint is of another job or the folder's newest one cannot be
    read, and OSError.
    """
    if resume is not None:
        require_job(resume, identity_of(config, len(resume.manifest.layers)))
    if request.folder.is_dir():
        with hold_folder_lock(request.folder, 0):
            raise_unless_free(
                request.folder, resume, config, force=request.force, again=request.is_in_place
            )


def warn_if_done(request: TrainRequest, resume: Checkpoint, iterations: int) -> bool:
    """Warn if all `iterations` were done before; return whether nothing is left to do.

    What may be left is to write the parameters. If nothing is left, --json prints the run's answer.
    """
    if resume.iteration < iterations:
        return False
    answer = answer_if_done(request.folder, resume, iterations)
    err.print(
        f"{resume.path} has seen {resume.iteration} iterations of {iterations}: nothing is left "
        f"to do{'' if answer else ' but to write the parameters'}; --iterations trains further",
        style="yellow",
        soft_wrap=True,
    )
    if answer is not None and request.json:
        print_json(answer)
    return answer is not None


def is_done_without_node(request: TrainRequest, iterations: int) -> bool:
    """Return whether the run is done, so that this node need not join it.

    The result is False without --resume, if workers of a dead node 0 may live, and if this node
    cannot read the run's files.
    """
    # A record for a takeover says that workers may live, and the run go on.
    with suppress(CheckpointError, OSError):
        checkpoint = (
            None
            if request.resume is None or read_takeover_record(request.folder) is not None
            else find_checkpoint(request.resume)
        )
        return checkpoint is not None and is_run_done(request.folder, checkpoint, iterations)
    return False


def is_run_done(folder: Path, resume: Checkpoint, iterations: int) -> bool:
    """Return whether the run that would resume from `resume` in `folder` is done already.

    A run is done if its newest checkpoint, `resume`, is of the last iteration, and all parameters
    are written. Raises CheckpointError if a checkpoint cannot be read.
    """
    newest = open_latest(folder / CHECKPOINTS)
    return (
        resume.iteration >= iterations
        and newest is not None
        and newest.path.resolve() == resume.path.resolve()
        and all(layer_path(folder, layer).exists() for layer in range(len(resume.manifest.layers)))
    )


def answer_if_done(folder: Path, resume: Checkpoint, iterations: int) -> dict[str, object] | None:
    """Return a run's JSON answer if it is done (`is_run_done`), otherwise None.

    The result is None, too, if a file of the run cannot be read.
    """
    # The digest of parameters is computed from the files that the run has written.
    with suppress(CheckpointError, DocumentError, TensorError, OSError):
        if not is_run_done(folder, resume, iterations):
            return None
        layers = range(len(resume.manifest.layers))
        schedule = read(folder / "schedule.json")
        digests = {
            name: tensor_digest(name, tensor)
            for layer in layers
            for name, tensor in _load_named_layer(layer, folder).items()
        }
        return {
            "iterations": 0,
            "losses": [],
            "parameter_digest": combined_digest(digests),
            "first_iteration": resume.iteration,
            "recoveries": [],
            "slow_workers": [],
            "measured_period": None,
            "planned_period": schedule.seconds(schedule.period_ticks),
        }
    return None


def _load_named_layer(layer: int, folder: Path) -> dict[str, Tensor]:
    return {f"{layer}.{name}": tensor for name, tensor in load_layer(folder, layer).items()}
