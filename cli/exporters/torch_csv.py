"""Write orders of ops as CSV for torch.distributed.pipelining: one row per rank, one cell per action.

An action is the number of the stage, what is done, and the number of the micro-batch: `2F0`, `2I0`, `2W0`, `2B0`. With
communication there are also `2SEND_F0`, `3RECV_F0`, `2SEND_B0`, `1RECV_B0` and `2REDUCE_GRAD`. Ranks are the workers of
one pipeline, stages its virtual stages. The format is that of `_PipelineScheduleRuntime._load_csv` of torch 2.13.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import typer

from slipstream.cli.exporters import ExportError
from slipstream.cli.shared.console import err, print_json
from slipstream.cli.shared.inputs import write_or_refuse
from slipstream.schedules.graph import Transfer, interleave_transfers, order_transfers, programs_of
from slipstream.schedules.layers import compact_layers_text
from slipstream.schedules.precedence import op_key
from slipstream.schedules.schedule import COMPUTE_KINDS, Grid, Op, OpKind, ProgramOp, Schedule, Seat, Worker

REMEDY = "export a plan with all workers alive, each with its own layers and micro-batches"
WITHOUT_CUTS = "plan with --method 1f1b, which keeps every micro-batch whole and on its own workers"
WITHOUT_OVERLAP = "plan without [network] overlap, for which the last micro-batches are cut"


def export_schedule(schedule: Schedule, *, pipeline: int, communication: bool, out: Path | None, json: bool) -> None:
    """Write the order of one pipeline's ops, as CSV for torch, to the file `out`, or to stdout if it is None. Raises
    ExportError.

    The argument `communication` is that of `write_order`. With `json`, an object with the CSV and its format is printed
    to stdout.
    """
    text = write_order(schedule, pipeline, communication=communication)
    if out is not None:
        write_or_refuse(out, text.encode())
        err.print(f"written to {out}", soft_wrap=True)
    if json:
        print_json({"csv": text, "format": "compute_comms" if communication else "compute_only", "pipeline": pipeline})
    elif out is None:
        typer.echo(text, nl=False)


def write_order(schedule: Schedule, pipeline: int = 0, *, communication: bool = False) -> str:
    """Return the order of one pipeline's ops as CSV for torch.distributed.pipelining: one row per rank.

    With `communication`, the order also has the pipeline's sends and receives, in an order free of deadlock, and its
    gradient reductions; without it, torch adds them. Raises ExportError if torch's runtime cannot run the order.
    """
    if schedule.grid.chains == 1:
        schedule = with_whole_stages(schedule)
    _require_expressible(schedule, pipeline)
    programs = programs_of(schedule, [pipeline])
    ordered_transfers = order_transfers(schedule, programs) if communication else None
    workers = (schedule.player_of[Worker(pipeline, column)] for column in range(schedule.grid.columns))
    rows = (_actions_of(programs[worker], ordered_transfers, worker, schedule.grid) for worker in workers)
    return "".join(",".join(row) + "\n" for row in rows)


def with_whole_stages(schedule: Schedule) -> Schedule:
    """Return a copy of the schedule in which slices of several whole stages are run stage by stage.

    A worker of a V may run two consecutive stages as one slice. Their ops follow each other here,
    forwards in the order of the stages, and backwards in the reverse order.
    """
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
    """Iterate over the ops of these stages, one after the other, in place of an op; over the op itself if None."""
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


def _require_expressible(schedule: Schedule, pipeline: int) -> None:
    """Raise ExportError if torch's runtime cannot run this pipeline of the schedule."""
    grid = schedule.grid
    if not 0 <= pipeline < grid.pipelines:
        raise ExportError(f"the schedule has no pipeline {pipeline}; expected 0 to {grid.pipelines - 1}")
    if grid.chains > 1:
        raise ExportError("torch's runtime keeps each stage on one rank; in a bidirectional schedule it is on two: "
                          "plan with [placement] order = 'v' or 'interleaved'")
    for column in range(grid.columns):
        if Worker(pipeline, column) not in schedule.player_of:
            raise ExportError(f"worker {Worker(pipeline, column)} is down, and peers of other pipelines run its "
                              f"micro-batches; torch's runtime keeps each stage on one rank: {REMEDY}")
    for seat in schedule.seats:
        if seat.role.pipeline == pipeline and schedule.has_moved_layers(seat):
            held_text = compact_layers_text(schedule.held_layers_of_seat(seat)) or "none"
            raise ExportError(f"worker {seat.worker} holds layers of its own choice ({held_text}), not those of its "
                              f"stage; torch's runtime keeps each stage on one rank: {REMEDY}")
        for op in schedule.programs[seat.program]:
            _require_own(schedule, seat, op, pipeline)


def _require_own(schedule: Schedule, seat: Seat, op: ProgramOp, pipeline: int) -> None:
    """Raise ExportError if an op of a seat's worker prevents torch from running `pipeline` by itself.

    Such an op runs a micro-batch of this pipeline on a worker of another one, or a micro-batch of another pipeline on a
    worker of this one, or a slice that is no whole stage.
    """
    if op.microbatch is None or op.slice is None:
        return
    owner = seat.role.pipeline if op.pipeline is None else op.pipeline
    if owner != pipeline and seat.role.pipeline == pipeline:
        raise ExportError(f"worker {seat.worker} also runs micro-batch {owner}.{op.microbatch}, of another pipeline; "
                          f"torch's runtime knows one pipeline: {_remedy(schedule)}")
    if owner == pipeline != seat.role.pipeline:
        raise ExportError(f"{schedule.slice_text(op.slice)} of micro-batch {owner}.{op.microbatch} is shed to worker "
                          f"{seat.worker}, of another pipeline; torch's runtime knows one pipeline: "
                          f"{_remedy(schedule)}")
    if owner == pipeline and op.slice >= len(schedule.grid.stages):
        raise ExportError(f"micro-batch {owner}.{op.microbatch} is not cut at the stages: "
                          f"{schedule.slice_text(op.slice)} run as one slice; torch's runtime takes each micro-batch "
                          f"along the same stages: {_remedy(schedule)}")


def _actions_of(ops: Sequence[Op], crossing: Sequence[Transfer] | None, worker: Worker, grid: Grid) -> Iterator[str]:
    """Iterate over the CSV cells of a worker: its ops, each receive before the op that needs it, and each send after
    the op that makes the tensor.

    The argument `crossing` has the tensors sent between all workers, in the order of `order_transfers`. None: there are
    neither transfers nor reductions in the cells.
    """
    for step in interleave_transfers(ops, crossing or (), worker, lambda _, number: grid.stages_of_microbatch(number)):
        if isinstance(step, Transfer):
            yield _transfer_text(step, worker)
        elif step.kind in COMPUTE_KINDS:
            kind, stage, _, microbatch = op_key(step)
            yield f"{stage}{kind}{microbatch}"
        elif step.kind is OpKind.A and crossing is not None:
            yield f"{step.slice}REDUCE_GRAD"


def _transfer_text(transfer: Transfer, worker: Worker) -> str:
    """Return the CSV cell for a transfer on one of its workers.

    A send is named by the stage that sends, a receive by the stage that receives.
    """
    forward = transfer.kind == "activation"
    letter = "F" if forward else "B"
    if transfer.target == worker:
        return f"{transfer.slice}RECV_{letter}{transfer.microbatch}"
    return f"{transfer.slice + (-1 if forward else 1)}SEND_{letter}{transfer.microbatch}"
