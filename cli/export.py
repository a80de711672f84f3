"""Implement `slipstream export`, which writes a schedule, or the model of a checkpoint, for other libraries."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.shared.console import complete_from, err, exit_negative, print_json, refuse
from slipstream.cli.shared.inputs import (
    read_schedule_or_refuse,
    require_choice,
    require_writable,
    write_or_refuse,
)
from slipstream.cli.shared.interrupts import delay_interrupts
from slipstream.cli.shared.options import Json
from slipstream.schedules.check import check
from slipstream.schedules.schedule import Schedule
from slipstream.schedules.torchcsv import TorchCsvError, write_order
from slipstream.schedules.torchtitan import NEWEST, VERSIONS, torchtitan_flags

FORMATS = ("torch-csv", "torchtitan", "hugging-face")

File = Annotated[Path, typer.Argument(metavar="FILE", help=(
    "A schedule file, as `slipstream plan --out` writes it; for hugging-face a checkpoint, or the --out of a run; "
    "for torchtitan either a schedule or such a folder."))]
Folder = Annotated[Path | None, typer.Argument(metavar="[DIR]", help="torchtitan, hugging-face: the folder to write.")]
To = Annotated[str, typer.Option("--to", metavar="FORMAT", autocompletion=complete_from(*FORMATS), help=(
    "torch-csv: what torch.distributed.pipelining loads with `_PipelineScheduleRuntime._load_csv`; torchtitan: that, "
    "and torchtitan's flags for it, or a checkpoint that torchtitan loads; hugging-face: a folder that transformers' "
    "`from_pretrained` loads."))]
Pipeline = Annotated[int, typer.Option("--pipeline", metavar="D", min=0, help="The pipeline whose order is written.")]
Communication = Annotated[bool, typer.Option("--communication", help=(
    "torch-csv: write sends, receives and reductions too (format compute_comms); without, torch adds them "
    "(compute_only)."))]
DecoderLayers = Annotated[int | None, typer.Option("--decoder-layers", metavar="N", min=1, max=10**6, help=(
    "torchtitan: the model's decoder layers, two fewer than all layers where embedding and head are layers "
    "of the job, as in those that `slipstream profile` writes. Without it torchtitan splits the model by itself."))]
TensorParallel = Annotated[int, typer.Option("--tensor-parallel", metavar="N", min=1, max=1024, help=(
    "torchtitan: devices of each worker, as [training] tensor_parallel of the job that the schedule was planned for; a "
    "schedule does not say it."))]
TitanVersion = Annotated[str, typer.Option(
    "--titan-version", metavar="VERSION", autocompletion=complete_from(*VERSIONS),
    help=f"torchtitan: the version that the flags are for: {', '.join(VERSIONS)}.")]
OutFile = Annotated[Path | None, typer.Option("--out", metavar="FILE", help=(
    "torch-csv: write to this file, not to stdout."))]


def export(file: File, folder: Folder = None, to: To = "torch-csv", pipeline: Pipeline = 0,
           communication: Communication = False, decoder_layers: DecoderLayers = None,
           titan_version: TitanVersion = NEWEST, tensor_parallel: TensorParallel = 1, out_file: OutFile = None,
           json: Json = False) -> None:
    """Write a schedule, or the model of a checkpoint, in the format of another library.

    Exits 1 with the reason when that library cannot run the schedule, for example because micro-batches are re-routed.
    """
    require_choice("--to", to, FORMATS)
    _require_format(to, ("torch-csv",), ("--communication", communication))
    _require_format(to, ("torch-csv",), ("--out", out_file))
    _require_format(to, ("torch-csv", "torchtitan"), ("--pipeline", pipeline))
    _require_format(to, ("torchtitan",), ("--decoder-layers", decoder_layers))
    _require_format(to, ("torchtitan",), ("--titan-version", titan_version != NEWEST))
    _require_format(to, ("torchtitan",), ("--tensor-parallel", tensor_parallel > 1))
    require_choice("--titan-version", titan_version, tuple(VERSIONS))
    require_writable(out_file)
    if folder is not None and to not in ("torchtitan", "hugging-face"):
        refuse(f"{folder}: --to {to} writes to --out FILE")
    if to == "hugging-face" or (to == "torchtitan" and file.is_dir()):
        if pipeline or decoder_layers:
            refuse(f"--pipeline and --decoder-layers: only with a schedule, and {file} is a folder")
        _export_model(file, folder, to, json)
    elif to == "torchtitan":
        _export_torchtitan(file, folder, pipeline, decoder_layers, titan_version, tensor_parallel, json)
    else:
        _export_torch_csv(file, pipeline, communication, out_file, json)


def _require_format(to: str, formats: tuple[str, ...], *given: tuple[str, object]) -> None:
    """Exit 2 if an option is given that belongs to formats other than the chosen one, `to`.

    `given` has the name of each option and its value, which is falsy if it was not given.
    """
    for option, value in given:
        if value and to not in formats:
            refuse(f"{option}: only with --to {' or '.join(formats)}")


def _require_new_folder(folder: Path | None, to: str, what: str) -> Path:
    """Return the folder to write. Exits 2 unless it is new or empty."""
    if folder is None:
        refuse(f"--to {to}: name the folder to write: slipstream export {what} --to {to} DIR")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        refuse(f"{folder}: exists already; name a folder that is new or empty")
    return folder


def _read_valid_schedule(file: Path, pipeline: int) -> Schedule:
    """Return the schedule of a file.

    Exits 1 if it breaks a rule, and 2 if it cannot be read or does not have the pipeline.
    """
    schedule = read_schedule_or_refuse(file)
    violations = check(schedule)
    if violations:
        exit_negative(f"{file}: breaks a rule: {violations[0]}")
    if pipeline >= schedule.grid.pipelines:
        refuse(f"--pipeline {pipeline}: the schedule has pipelines 0 to {schedule.grid.pipelines - 1}")
    return schedule


def _export_torch_csv(file: Path, pipeline: int, communication: bool, out_file: Path | None, json: bool) -> None:
    schedule = _read_valid_schedule(file, pipeline)
    try:
        text = write_order(schedule, pipeline, communication=communication)
    except TorchCsvError as error:
        exit_negative(f"{file}: {error}")
    if out_file is not None:
        write_or_refuse(out_file, text.encode())
        err.print(f"written to {out_file}", soft_wrap=True)
    if json:
        print_json({"csv": text, "format": "compute_comms" if communication else "compute_only", "pipeline": pipeline})
    elif out_file is None:
        typer.echo(text, nl=False)


def _export_torchtitan(file: Path, folder: Path | None, pipeline: int, decoder_layers: int | None, version: str,
                       ranks: int, json: bool) -> None:
    folder = _require_new_folder(folder, "torchtitan", "PLAN")
    schedule = _read_valid_schedule(file, pipeline)
    try:
        flags = torchtitan_flags(schedule, str(folder.resolve() / "schedule.csv"), pipeline=pipeline, ranks=ranks,
                                 decoder_layers=decoder_layers, version=version)
        order = write_order(schedule, pipeline)
    except TorchCsvError as error:
        exit_negative(f"{file}: {error}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"{folder}: cannot be written: {error.strerror}")
    write_or_refuse(folder / "schedule.csv", order.encode())
    write_or_refuse(folder / "flags", (" ".join(map(shlex.quote, flags)) + "\n").encode())
    if schedule.optimizer == "staggered":
        err.print("torchtitan steps all stages together, and the plan one after the other: plan with --optimizer "
                  "synchronous for the best order there", soft_wrap=True)
    if json:
        print_json({"folder": str(folder), "flags": flags, "pipeline": pipeline})
        return
    quoted, workers = shlex.quote(str(folder / "flags")), schedule.grid.pipelines * schedule.grid.columns * ranks
    err.print(f"written to {folder}; next: xargs -a {quoted} torchrun --nproc-per-node {workers} "
              f"-m torchtitan.train {VERSIONS[version].config_arguments}", soft_wrap=True)
    if ranks == 1:
        err.print("workers are of one device each; of more with --tensor-parallel", style="dim", soft_wrap=True)


def _export_model(source: Path, folder: Path | None, to: str, json: bool) -> None:
    """Write the model of a checkpoint in the format `to`."""
    folder = _require_new_folder(folder, to, "CHECKPOINT")
    with delay_interrupts():
        from slipstream.cli.shared.train_inputs import find_checkpoint_or_refuse
        from slipstream.runtime.config import ConfigError
        from slipstream.runtime.model.checkpoints.checkpoint import CheckpointError
    checkpoint = find_checkpoint_or_refuse(source)
    try:
        with delay_interrupts():
            if to == "torchtitan":
                from slipstream.runtime.model.layers.torchtitan.export import export_checkpoint
            else:
                from slipstream.runtime.model.checkpoints.hugging_face_export import export_checkpoint
        export_checkpoint(checkpoint, folder)
    except ModuleNotFoundError as error:
        refuse(f"--to {to} needs the package {error.name}: pip install -e '.[hf]'")
    except (CheckpointError, ConfigError) as error:
        refuse(error)
    except OSError as error:
        refuse(f"{error.filename or folder}: cannot be written: {error.strerror}")
    if json:
        print_json({"folder": str(folder), "iteration": checkpoint.iteration})
    else:
        err.print(f"iteration {checkpoint.iteration} written to {folder}", soft_wrap=True)
