"""Decide whether workers run whole stages in place; rows of ops can name nothing else."""

from collections.abc import Iterator, Sequence

import msgspec

from slipstream.schedules.layers import compact_layers_text
from slipstream.schedules.schedule import OpKind, Program, ProgramOp, Schedule, Seat, Worker

WITHOUT_OVERLAP = "plan without [network] overlap, for which the last micro-batches are cut"
WITH_LAYERS_IN_PLACE = "plan with --layers fixed"
WITHOUT_LAYERS = "plan a job without [placement] layers, whose stages are not cut"


class NotWholeError(ValueError):
    """Error of one line for a worker that runs parts of stages, or others' stages."""


def with_whole_stages(schedule: Schedule) -> Schedule:
    """Return a copy in which slices of several whole stages run stage by stage.

    On a V, a worker may run two successive stages as one slice. Here their ops follow each other:
    forwards in the order of the stages, backwards in reverse. They start as if their worker had the
    usual speed. A schedule with two directions is returned as it is, because its stages are held
    twice.
    """
    if schedule.grid.chains > 1:
        return schedule
    grid = schedule.grid
    # A slice can be divided if stages that lie within it have all of its layers.
    stage_of = {layers: stage for stage, layers in enumerate(schedule.grid.layers_by_stage)}
    stages_of: dict[int, list[int]] = {}
    for number, (first, end) in enumerate(schedule.slices, len(grid.stages)):
        within = [stage for (low, high), stage in stage_of.items() if first <= low and high <= end]
        if sum(high - low for low, high in map(grid.layers_of, within)) == end - first:
            stages_of[number] = within
    programs: list[Program] = []
    for program in schedule.programs:
        parts: list[ProgramOp] = []
        for op in program:
            parts += _divide_op(schedule, op, stages_of.get(op.slice or 0))
        programs.append(tuple(parts))
    return msgspec.structs.replace(schedule, programs=tuple(programs))


def _divide_op(
    schedule: Schedule, op: ProgramOp, stages: Sequence[int] | None
) -> Iterator[ProgramOp]:
    """Iterate over the ops of `stages` that replace an op; for None, it is kept."""
    if stages is None:
        yield op
        return
    # Usual times are enough, whatever the worker's speed: who reads the result uses the order of a
    # worker's ops, and the starts only to choose which of several workers' ops comes next.
    start, nobody = op.start_ticks, Worker(-1, -1)
    for stage in stages if op.kind in (OpKind.F, OpKind.A) else reversed(stages):
        yield msgspec.structs.replace(op, slice=stage, start_ticks=start)
        start += schedule.times.duration_ticks(op.kind, stage, nobody)


def require_whole_stages(schedule: Schedule) -> Schedule:
    """Return the schedule with slices of several stages run stage by stage.

    Raises NotWholeError if a worker holds other layers than those of its stages, or runs a slice
    that is not made of whole stages or, with two directions, is no stage.
    """
    for seat in schedule.seats:
        if schedule.has_moved_layers(seat):
            raise NotWholeError(
                f"{describe_moved_layers(schedule, seat)}, not those of its stages; "
                f"rows name whole stages: {WITH_LAYERS_IN_PLACE}"
            )
    schedule = with_whole_stages(schedule)
    for op in schedule.all_ops():
        if op.slice is not None and op.slice >= len(schedule.grid.stages):
            remedy = WITHOUT_OVERLAP if schedule.has_overlap else WITHOUT_LAYERS
            raise NotWholeError(
                f"{schedule.op_text(op)} is not a whole stage; rows name whole stages: {remedy}"
            )
    return schedule


def has_whole_stages(schedule: Schedule) -> bool:
    """Return whether workers run whole stages in place, as rows of ops require."""
    try:
        require_whole_stages(schedule)
    except NotWholeError:
        return False
    return True


def describe_moved_layers(schedule: Schedule, seat: Seat) -> str:
    """Return a clause that names a worker and the layers that it holds."""
    held_text = compact_layers_text(schedule.held_layers_of_seat(seat)) or "none"
    return f"worker {seat.worker} holds layers of its own choice ({held_text})"
