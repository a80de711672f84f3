"""Decide whether other libraries can run a schedule: whole pipelines by themselves, or whole stages
in place."""

from collections.abc import Iterator, Sequence

import msgspec

from slipstream.cli.exporters import ExportError
from slipstream.schedules.layers import compact_layers_text
from slipstream.schedules.schedule import OpKind, ProgramOp, Schedule, Seat, Worker

REMEDY = "export a plan with all workers alive, each with its own layers and micro-batches"
WITHOUT_CUTS = "plan with --method 1f1b, which keeps every micro-batch whole and on its own workers"
WITHOUT_OVERLAP = "plan without [network] overlap, for which the last micro-batches are cut"
WITH_LAYERS_IN_PLACE = "plan with --layers fixed"
WITHOUT_LAYERS = "plan a job without [placement] layers, whose stages are not cut"


def with_whole_stages(schedule: Schedule) -> Schedule:
    """Return a copy of the schedule in which slices of several whole stages are run stage by stage.

    A worker of a V may run two consecutive stages as one slice. Their ops follow each other here,
    forwards in the order of the stages, and backwards in the reverse order. A schedule with two
    directions is returned as it is: its stages are held twice.
    """
    if schedule.grid.chains > 1:
        return schedule
    grid, stage_of = schedule.grid, {layers: stage for stage, layers in enumerate(schedule.grid.layers_by_stage)}
    stages_of: dict[int, list[int]] = {}
    for number, (first, end) in enumerate(schedule.slices, len(grid.stages)):
        within = [stage for (low, high), stage in stage_of.items() if first <= low and high <= end]
        if sum(high - low for low, high in map(grid.layers_of, within)) == end - first:
            stages_of[number] = within
    programs = tuple(tuple(part for op in program for part in _divide_op(schedule, op, stages_of.get(op.slice or 0)))
                     for program in schedule.programs)
    return msgspec.structs.replace(schedule, programs=programs)


def _divide_op(schedule: Schedule, op: ProgramOp, stages: Sequence[int] | None) -> Iterator[ProgramOp]:
    """Iterate over the ops of these stages, one after the other, in place of an op; over the op
    itself if None."""
    if stages is None:
        yield op
        return
    start, nobody = op.start_ticks, Worker(-1, -1)
    for stage in stages if op.kind in (OpKind.F, OpKind.A) else reversed(stages):
        yield msgspec.structs.replace(op, slice=stage, start_ticks=start)
        start += schedule.times.duration_ticks(op.kind, stage, nobody)


def _remedy(schedule: Schedule) -> str:
    """Return a clause that says how to get a plan that torch's runtime can run."""
    if schedule.failed or any(map(schedule.has_moved_layers, schedule.seats)):
        return REMEDY
    return WITHOUT_OVERLAP if schedule.has_overlap else WITHOUT_CUTS


def require_whole_pipeline(schedule: Schedule, pipeline: int, runtime: str = "torch's runtime") -> None:
    """Raise ExportError unless this pipeline of the schedule runs its own micro-batches, stage by
    stage.

    Another library can then run it by itself; messages call that library `runtime`.
    """
    grid = schedule.grid
    if not 0 <= pipeline < grid.pipelines:
        raise ExportError(f"the schedule has no pipeline {pipeline}; expected 0 to {grid.pipelines - 1}")
    if grid.chains > 1:
        raise ExportError(f"{runtime} keeps each stage on one rank; in a bidirectional schedule it is on two: "
                          "plan with [placement] order = 'v' or 'interleaved'")
    for column in range(grid.columns):
        if Worker(pipeline, column) not in schedule.player_of:
            raise ExportError(f"worker {Worker(pipeline, column)} is down, and peers of other pipelines run its "
                              f"micro-batches; {runtime} keeps each stage on one rank: {REMEDY}")
    for seat in schedule.seats:
        if seat.role.pipeline == pipeline and schedule.has_moved_layers(seat):
            raise ExportError(f"{_describe_moved_layers(schedule, seat)}, not those of its stage; {runtime} keeps each "
                              f"stage on one rank: {REMEDY}")
        for op in schedule.programs[seat.program]:
            _require_own(schedule, seat, op, pipeline, runtime)


def _require_own(schedule: Schedule, seat: Seat, op: ProgramOp, pipeline: int, runtime: str) -> None:
    """Raise ExportError if an op of a seat's worker prevents `runtime` from running `pipeline` by
    itself.

    Such an op runs a micro-batch of this pipeline on a worker of another one, or a micro-batch of
    another pipeline on a worker of this one, or a slice that is no whole stage.
    """
    if op.microbatch is None or op.slice is None:
        return
    owner = seat.role.pipeline if op.pipeline is None else op.pipeline
    if owner != pipeline and seat.role.pipeline == pipeline:
        raise ExportError(f"worker {seat.worker} also runs micro-batch {owner}.{op.microbatch}, of another pipeline; "
                          f"{runtime} knows one pipeline: {_remedy(schedule)}")
    if owner == pipeline != seat.role.pipeline:
        raise ExportError(f"{schedule.slice_text(op.slice)} of micro-batch {owner}.{op.microbatch} is shed to worker "
                          f"{seat.worker}, of another pipeline; {runtime} knows one pipeline: "
                          f"{_remedy(schedule)}")
    if owner == pipeline and op.slice >= len(schedule.grid.stages):
        raise ExportError(f"micro-batch {owner}.{op.microbatch} is not cut at the stages: "
                          f"{schedule.slice_text(op.slice)} run as one slice; {runtime} takes each micro-batch "
                          f"along the same stages: {_remedy(schedule)}")


def _describe_moved_layers(schedule: Schedule, seat: Seat) -> str:
    """Return a clause that names a worker and the layers that it holds."""
    held_text = compact_layers_text(schedule.held_layers_of_seat(seat)) or "none"
    return f"worker {seat.worker} holds layers of its own choice ({held_text})"


def require_whole_stages(schedule: Schedule) -> Schedule:
    """Return the schedule with slices of several stages run stage by stage.

    Raises ExportError if a worker holds other layers than those of its stages, or a slice is part
    of a stage.
    """
    for seat in schedule.seats:
        if schedule.has_moved_layers(seat):
            raise ExportError(f"{_describe_moved_layers(schedule, seat)}, not those of its stages; "
                              f"rows name whole stages: {WITH_LAYERS_IN_PLACE}")
    schedule = with_whole_stages(schedule)
    for op in schedule.all_ops():
        if op.slice is not None and op.slice >= len(schedule.grid.stages):
            remedy = WITHOUT_OVERLAP if schedule.has_overlap else WITHOUT_LAYERS
            raise ExportError(f"{schedule.op_text(op)} is not a whole stage; rows name whole "
                              f"stages: {remedy}")
    return schedule


def has_whole_stages(schedule: Schedule) -> bool:
    """Return whether workers run whole stages in place, so that rows of all pipelines can be
    written."""
    try:
        require_whole_stages(schedule)
    except ExportError:
        return False
    return True
