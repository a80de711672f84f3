"""What `slipstream train` needs to go on after failures: tables, schedules planned on the spot, checkpoints."""

from contextlib import suppress
from pathlib import Path

from cli.shared.console import refuse
from cli.shared.inputs import is_there, parse_workers
from planner.job.file import Job
from planner.model.problem import NoPlanError
from planner.normalise import PlanOptions, normal_form
from runtime.coordinator.planning import NoScheduleError, Scheduler
from runtime.model.checkpoint import MANIFEST, Checkpoint, CheckpointError, latest, open_checkpoint
from schedules.schedule import Grid, Schedule, Worker
from schedules.tables.file import TableError
from schedules.tables.relabel import relabel
from schedules.tables.table import Table

ON_THE_SPOT_SECONDS = 10.0
"""At most, to plan for failures that no table covers."""


def require_fit(path: Path, grid: Grid, job: Job) -> None:
    """Exits 2 unless a schedule's grid has this job's shape."""
    for what, of_schedule, of_job in (
            ("pipelines", grid.pipelines, job.pipelines), ("stages", grid.columns, job.stages),
            ("micro-batches", list(grid.microbatches), list(job.microbatches)),
            ("columns of virtual stages", [stage.column for stage in grid.stages], list(job.columns)),
            ("directions of micro-batches", grid.chains, job.chains)):
        if of_schedule != of_job:
            refuse(f"{path}: made for another job: its {what} are {of_schedule}, the job's {of_job}")


def read_table(path: Path, job: Job) -> Table:
    """A table that fits the job; exits 2 otherwise."""
    try:
        table = Table.load(path)
    except TableError as error:
        refuse(error)
    require_fit(path, table.basis.grid, job)
    return table


def look_up(table: Table | None, down: tuple[Worker, ...]) -> Schedule | None:
    """The table's schedule for these failures, None where there is none; exits 2 for workers it does not know."""
    if table is None:
        return None
    try:
        found = table.lookup(down)
    except ValueError as error:  # also TableError
        refuse(error)
    return None if found is None else found.schedule


def scheduler(job: Job, first: Schedule, table: Table | None) -> Scheduler:
    """Schedules for failures while the run goes on: from the table, or by the list schedulers, which take moments."""
    def schedule(down: tuple[Worker, ...]) -> Schedule:
        try:
            found = None if table is None else table.lookup(down)
            if found is not None and found.schedule.grid == first.grid:
                return found.schedule
            options = PlanOptions(backward=first.backward, optimizer=first.optimizer, method="greedy",
                                  time_limit=ON_THE_SPOT_SECONDS)
            if empty_columns(job, down):
                # One of another stage, which may have taken over there before, holds its layers: roles must move.
                return _with_moves(job, down, options)
            return options.plan(job, down, seconds=ON_THE_SPOT_SECONDS).schedule
        except (TableError, NoPlanError) as error:
            raise NoScheduleError(str(error)) from None

    return schedule


def empty_columns(job: Job, down: tuple[Worker, ...]) -> set[int]:
    """The columns none of whose own workers is left."""
    return {column for column in range(job.stages)
            if all(Worker(pipeline, column) in down for pipeline in range(job.pipelines))}


def _with_moves(job: Job, down: tuple[Worker, ...], options: PlanOptions) -> Schedule:
    """A schedule for as many failures, spread over the stages, in which live workers move. Raises NoScheduleError."""
    found = relabel(normal_form(job, len(down), options).schedule, down, held_elsewhere=True)
    if found is None:
        raise NoScheduleError(f"no live worker can take over the roles of {', '.join(map(str, down))}")
    return found


def find_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint that a folder is, or the newest one in it; exits 2 where there is none."""
    try:
        if is_there(folder / MANIFEST):
            return open_checkpoint(folder)
        found = latest(folder / "checkpoints") or latest(folder)
    except CheckpointError as error:
        refuse(error)
    return found or refuse(f"--resume {folder}: no checkpoint is there, nor in its folder checkpoints")


def events(option: str, texts: list[str] | None, job: Job) -> list[tuple[Worker, int]]:
    """Workers and iterations given as D.S@ITERATION; exits 2 when one is malformed."""
    events = []
    for text in texts or []:
        name, at, iteration = text.partition("@")
        if not (at and iteration.isascii() and iteration.isdecimal() and len(iteration) < 14):
            refuse(f"{option} {text}: expected D.S@ITERATION, for example 1.2@10")
        (worker,) = parse_workers([name])
        if worker.pipeline >= job.pipelines or worker.column >= job.stages:
            refuse(f"{option} {text}: the job has no worker {worker}")
        events.append((worker, int(iteration)))
    return events


def way_on(job: Path | None, folder: Path | None) -> str:
    """How to go on after a run that failed, where there is a checkpoint."""
    with suppress(CheckpointError):
        if folder is not None and (found := latest(folder / "checkpoints")) is not None:
            return f"; go on from iteration {found.iteration}: slipstream train {job} --resume {folder}"
    return ""
