"""`slipstream export`: writes a schedule for another runtime, or a checkpoint's model for transformers."""

from pathlib import Path
from typing import Annotated

import typer

from cli.shared.console import answer_no, err, print_json, refuse
from cli.shared.inputs import read_schedule_or_refuse, require_choice, write_or_refuse
from cli.shared.interrupts import importing
from cli.shared.options import Json
from schedules.check import check
from schedules.torchcsv import TorchCsvError, write_order

File = Annotated[Path, typer.Argument(metavar="FILE", help=(
    "A schedule file, as `slipstream plan --out` writes it; for hugging-face a checkpoint, or the --out of a run."))]
Folder = Annotated[Path | None, typer.Argument(metavar="[DIR]", help="hugging-face: the folder to write.")]
To = Annotated[str, typer.Option("--to", metavar="torch-csv|hugging-face", help=(
    "torch-csv: what torch.distributed.pipelining loads with `_PipelineScheduleRuntime._load_csv`; hugging-face: a "
    "folder that transformers' `from_pretrained` loads."))]
Pipeline = Annotated[int, typer.Option("--pipeline", metavar="D", min=0, help="The pipeline whose order is written.")]
Communication = Annotated[bool, typer.Option("--communication", help=(
    "Write sends, receives and reductions too (format compute_comms); without, torch adds them (compute_only)."))]
OutFile = Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write to this file, not to stdout.")]


def export(file: File, folder: Folder = None, to: To = "torch-csv", pipeline: Pipeline = 0,
           communication: Communication = False, out_file: OutFile = None, json: Json = False) -> None:
    """Write a schedule in the format of another runtime, or the model of a checkpoint for transformers.

    Exits 1 with the reason where that runtime cannot run it, for example because micro-batches are re-routed.
    """
    require_choice("--to", to, ("torch-csv", "hugging-face"))
    if to == "hugging-face":
        _to_hugging_face(file, folder, json)
        return
    if folder is not None:
        refuse(f"{folder}: --to torch-csv writes to --out FILE")
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


def _to_hugging_face(source: Path, folder: Path | None, json: bool) -> None:
    if folder is None:
        refuse("--to hugging-face: name the folder to write: slipstream export CHECKPOINT --to hugging-face DIR")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        refuse(f"{folder}: something is there already; name a folder that is new, or empty")
    with importing():
        from cli.shared.train_inputs import checkpoint_or_refuse
        from runtime.config import ConfigError
        from runtime.model.checkpoint import CheckpointError
    checkpoint = checkpoint_or_refuse(source)
    try:
        with importing():
            from runtime.model.hugging_face.export import export_checkpoint
        export_checkpoint(checkpoint, folder)
    except ModuleNotFoundError as error:
        refuse(f"--to hugging-face needs the package {error.name}: pip install 'slipstream-train[hf]'")
    except (CheckpointError, ConfigError) as error:
        refuse(error)
    except OSError as error:
        refuse(f"{error.filename or folder}: cannot be written: {error.strerror}")
    if json:
        print_json({"folder": str(folder), "iteration": checkpoint.iteration})
    else:
        err.print(f"iteration {checkpoint.iteration} written to {folder}", highlight=False, soft_wrap=True)
