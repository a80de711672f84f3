"""Write orders of ops as CSV for torch.distributed.pipelining: a row per rank.

A cell is an action: the number of the stage, what is done, and the number of the micro-batch:
`2F0`, `2I0`, `2W0`, `2B0`. With communication there are also `2SEND_F0`, `3RECV_F0`, `2SEND_B0`,
`1RECV_B0` and `2REDUCE_GRAD`. Ranks are the workers of one pipeline, stages its virtual stages. The
format is that of `_PipelineScheduleRuntime._load_csv` of torch 2.13. The rows of all pipelines, for
micro-batches that are re-routed, are written by `torch_rows`.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import typer

from slipstream.cli.exporters import ExportError
from slipstream.cli.exporters.torch_rows import write_rows
from slipstream.cli.exporters.whole_stages import require_whole_pipeline
from slipstream.cli.shared.console import err, print_json
from slipstream.cli.shared.options import write_or_refuse
from slipstream.schedules.graph import Transfer, interleave_transfers, order_transfers, programs_of
from slipstream.schedules.schedule import COMPUTE_KINDS, Grid, Op, OpKind, Schedule, Worker
from slipstream.schedules.whole_stages import has_whole_stages, with_whole_stages


def export_schedule(
    schedule: Schedule,
    *,
    pipeline: int | None,
    communication: bool,
    all_pipelines: bool,
    out: Path | None,
    json: bool,
) -> None:
    """Write the order of ops as CSV for torch, to `out` or stdout.

    Raises ExportError if torch's runtime cannot run the order. Exits 2 if `out` cannot be written.

    Parameters
    ----------
    pipeline
        Pipeline whose rows are written. None: the first; with `communication`, all, if one
        cannot be run by itself.
    communication
        Whether transfers and reductions are written, too (see `write_order`), as `all_pipelines`
        needs.
    all_pipelines
        Whether the rows of all pipelines are written, whatever `pipeline` is.
    json
        Whether an object with the CSV and its format goes to stdout, also with `out`.
    """
    is_shared = bool(
        schedule.failed or schedule.rerouted or schedule.shed or schedule.grid.chains > 1
    )
    # One pipeline alone cannot run micro-batches that others share.
    if communication and (all_pipelines or (is_shared and pipeline is None)):
        text, pipeline = write_rows(schedule), None
        err.print(
            f"a row for each of the {schedule.grid.pipelines * schedule.grid.columns} workers, "
            "pipeline by pipeline; micro-batches are numbered over all pipelines",
            style="dim",
            soft_wrap=True,
        )
    else:
        pipeline = pipeline or 0
        try:
            text = write_order(schedule, pipeline, communication=communication)
        except ExportError as error:
            hint = (
                ", or give --communication without --pipeline" if has_whole_stages(schedule) else ""
            )
            raise ExportError(f"{error}{hint}") from None
    if out is not None:
        write_or_refuse(out, text.encode())
        err.print(f"written to {out}", soft_wrap=True)
    if json:
        print_json(
            {
                "csv": text,
                "format": "compute_comms" if communication else "compute_only",
                "pipeline": pipeline,
            }
        )
    elif out is None:
        typer.echo(text, nl=False)


def write_order(schedule: Schedule, pipeline: int = 0, *, communication: bool = False) -> str:
    """Return one pipeline's ops as CSV for torch.distributed.pipelining: a row per rank.

    With `communication`, the order also has the pipeline's sends and receives, free of deadlock,
    and its gradient reductions; without it, torch adds them. Raises ExportError if there is no such
    pipeline, or if torch's runtime cannot run it by itself.
    """
    schedule = with_whole_stages(schedule)
    require_whole_pipeline(schedule, pipeline)
    programs = programs_of(schedule, [pipeline])
    ordered_transfers = order_transfers(schedule, programs) if communication else None
    workers = (
        schedule.player_of[Worker(pipeline, column)] for column in range(schedule.grid.columns)
    )
    rows = (
        _actions_of(programs[worker], ordered_transfers, worker, schedule.grid)
        for worker in workers
    )
    return "".join(",".join(row) + "\n" for row in rows)


def _actions_of(
    ops: Sequence[Op], crossing: Sequence[Transfer] | None, worker: Worker, grid: Grid
) -> Iterator[str]:
    """Yield a worker's CSV cells, in order; with `crossing`, also transfers and REDUCE_GRAD."""
    for step in interleave_transfers(
        ops, crossing or (), worker, lambda _, number: grid.stages_of_microbatch(number)
    ):
        if isinstance(step, Transfer):
            yield _transfer_text(step, worker)
        elif step.kind in COMPUTE_KINDS:
            yield f"{step.slice}{step.kind}{step.microbatch}"
        elif step.kind is OpKind.A and crossing is not None:
            yield f"{step.slice}REDUCE_GRAD"


def _transfer_text(transfer: Transfer, worker: Worker) -> str:
    """Return the CSV cell for a transfer on one of its two workers."""
    forward = transfer.kind == "activation"
    letter = "F" if forward else "B"
    if transfer.target == worker:
        return f"{transfer.slice}RECV_{letter}{transfer.microbatch}"
    # A transfer has the stage that receives; the one before it sends.
    return f"{transfer.slice + (-1 if forward else 1)}SEND_{letter}{transfer.microbatch}"
