"""Read the inputs of `slipstream train` besides the job: tables and checkpoints."""

from pathlib import Path

import torch

from slipstream.cli.shared.console import refuse
from slipstream.cli.shared.inputs import load_table_or_refuse, may_exist
from slipstream.planner.job.file import Job
from slipstream.planner.model.from_job import build_grid
from slipstream.runtime.checkpoints.checkpoint import (
    MANIFEST,
    Checkpoint,
    CheckpointError,
    open_checkpoint,
    open_latest,
)
from slipstream.runtime.config import RunConfig
from slipstream.runtime.coordinator.run_fit import count_samples_read
from slipstream.runtime.data.data import load_data, load_validation_data
from slipstream.runtime.device import choose_device
from slipstream.runtime.models.layered_model import build_model, parameter_dtype
from slipstream.runtime.placement import place_layers
from slipstream.runtime.ranks.worker_group import simulating_rank
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
    """Check that the job's model and data can be trained, before time is spent on planning.

    Returns a line to print if the number of layers in the job differs from the model's, otherwise None. Raises the
    errors that `run` would raise, ConfigError and PlacementError.
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
    """Return the table's schedule with which a run begins if the workers `down` are absent, or None if it has none or
    there is no table.

    With `settled`, it is the one for which any layers move; otherwise whole roles may have moved, because no worker
    holds layers before a run begins. `nodes` has the workers of each machine, over which the holders of a stage are
    spread. Exits 2 for workers outside the table's grid.
    """
    if table is None:
        return None
    try:
        result = table.lookup(down, settled=settled, roles_move=True, nodes=nodes)
    except ValueError as error:  # also TableError
        refuse(error)
    return None if result is None else result.schedule


def find_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the checkpoint in a folder, or the newest of several, or None if there is none. Raises CheckpointError."""
    if may_exist(folder / MANIFEST):
        return open_checkpoint(folder)
    return open_latest(folder / "checkpoints") or open_latest(folder)


def find_checkpoint_or_refuse(folder: Path, option: str = "") -> Checkpoint:
    """Return the checkpoint in a folder, or the newest of several. Exits 2 if none can be read; if there is none, the
    message begins with `option`, such as "--resume "."""
    try:
        checkpoint = find_checkpoint(folder)
    except CheckpointError as error:
        refuse(error)
    if checkpoint is None:
        refuse(f"{option}{folder}: no checkpoint here or in its folder checkpoints")
    return checkpoint
