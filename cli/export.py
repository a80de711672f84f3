"""`slipstream export`: writes a schedule in the format of another runtime."""

from pathlib import Path
from typing import Annotated

import typer

from cli.shared.console import answer_no, err, print_json, refuse
from cli.shared.inputs import read_schedule_or_refuse, require_choice, write_or_refuse
from cli.shared.options import Json, ScheduleFile
from schedules.check import check
from schedules.torchcsv import TorchCsvError, write_order

To = Annotated[str, typer.Option("--to", metavar="torch-csv", help=(
    "torch-csv: what torch.distributed.pipelining loads with `_PipelineScheduleRuntime._load_csv`."))]
Pipeline = Annotated[int, typer.Option("--pipeline", metavar="D", min=0, help="The pipeline whose order is written.")]
Communication = Annotated[bool, typer.Option("--communication", help=(
    "Write sends, receives and reductions too (format compute_comms); without, torch adds them (compute_only)."))]
OutFile = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write to this file, not to stdout.")]


def export(file: ScheduleFile, to: To = "torch-csv", pipeline: Pipeline = 0, communication: Communication = False,
           out_file: OutFile = None, json: Json = False) -> None:
    """Hand a schedule to another runtime.

    Exits 1 with the reason where that runtime cannot run it, for example because micro-batches are re-routed.
    """
    require_choice("--to", to, ("torch-csv",))
    schedule = read_schedule_or_refuse(file)
    violations = check(schedule)
    if violations:
        answer_no(f"{file}: breaks a rule: {violations[0]}")
    if pipeline >= schedule.grid.pipelines:
        refuse(f"--pipeline {pipeline}: the schedule has pipelines 0 to {schedule.grid.pipelines - 1}")
    try:
        text = write_order(schedule, pipeline, communication=communication)
    except TorchCsvError as error:
        answer_no(f"{file}: {error}")
    if out_file is not None:
        write_or_refuse(out_file, text.encode())
        err.print(f"written to {out_file}", highlight=False)
    if json:
        print_json({"csv": text, "format": "compute_comms" if communication else "compute_only", "pipeline": pipeline})
    elif out_file is None:
        typer.echo(text, nl=False)
