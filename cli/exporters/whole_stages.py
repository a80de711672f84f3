"""Decide whether other libraries can run a whole pipeline of a schedule by itself."""

from slipstream.cli.exporters import ExportError
from slipstream.schedules.schedule import ProgramOp, Schedule, Seat, Worker
from slipstream.schedules.whole_stages import WITHOUT_OVERLAP, describe_moved_layers

REMEDY = "export a plan with all workers alive, each with its own layers and micro-batches"
WITHOUT_CUTS = "plan with --method 1f1b, which keeps every micro-batch whole and on its own workers"


def _remedy(schedule: Schedule) -> str:
    """Return a clause that says how to get a plan that another library can run."""
    if schedule.failed or any(map(schedule.has_moved_layers, schedule.seats)):
        return REMEDY
    return WITHOUT_OVERLAP if schedule.has_overlap else WITHOUT_CUTS


def require_whole_pipeline(
    schedule: Schedule, pipeline: int, runtime: str = "torch's runtime"
) -> None:
    """Raise ExportError unless a pipeline runs its own micro-batches, stage by stage.

    Only then can another library run the pipeline by itself. The pipeline must exist, too. Messages
    call that library `runtime`.
    """
    grid = schedule.grid
    if not 0 <= pipeline < grid.pipelines:
        raise ExportError(
            f"the schedule has no pipeline {pipeline}; expected 0 to {grid.pipelines - 1}"
        )
    if grid.chains > 1:
        raise ExportError(
            f"{runtime} keeps each stage on one rank; in a bidirectional schedule it is on two: "
            "plan with [placement] order = 'v' or 'interleaved'"
        )
    for column in range(grid.columns):
        if Worker(pipeline, column) not in schedule.player_of:
            raise ExportError(
                f"worker {Worker(pipeline, column)} is down, and peers of other pipelines run its "
                f"micro-batches; {runtime} keeps each stage on one rank: {REMEDY}"
            )
    # Neither may its workers hold other layers or run other micro-batches, nor others run its own.
    for seat in schedule.seats:
        if seat.role.pipeline == pipeline and schedule.has_moved_layers(seat):
            raise ExportError(
                f"{describe_moved_layers(schedule, seat)}, not those of its stage; {runtime} "
                f"keeps each stage on one rank: {REMEDY}"
            )
        for op in schedule.programs[seat.program]:
            _require_own(schedule, seat, op, pipeline, runtime)


def _require_own(
    schedule: Schedule, seat: Seat, op: ProgramOp, pipeline: int, runtime: str
) -> None:
    """Raise ExportError if an op prevents `runtime` from running `pipeline` by itself."""
    if op.microbatch is None or op.slice is None:
        return
    owner = seat.role.pipeline if op.pipeline is None else op.pipeline
    if owner != pipeline and seat.role.pipeline == pipeline:
        raise ExportError(
            f"worker {seat.worker} also runs micro-batch {owner}.{op.microbatch}, of another "
            f"pipeline; {runtime} knows one pipeline: {_remedy(schedule)}"
        )
    # A worker of another pipeline runs this one's micro-batch.
    if owner == pipeline != seat.role.pipeline:
        raise ExportError(
            f"{schedule.slice_text(op.slice)} of micro-batch {owner}.{op.microbatch} is shed to "
            f"worker {seat.worker}, of another pipeline; {runtime} knows one pipeline: "
            f"{_remedy(schedule)}"
        )
    if owner == pipeline and op.slice >= len(schedule.grid.stages):
        raise ExportError(
            f"micro-batch {owner}.{op.microbatch} is not cut at the stages: "
            f"{schedule.slice_text(op.slice)} run as one slice; {runtime} takes each micro-batch "
            f"along the same stages: {_remedy(schedule)}"
        )
