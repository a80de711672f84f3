"""Implement `slipstream export`, which writes schedules or models for other libraries."""

import importlib
import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.exporters import EXPORTERS, Exporter, ExportError
from slipstream.cli.exporters.torchtitan import NEWEST, VERSIONS
from slipstream.cli.shared.console import (
    complete_from,
    delay_interrupts,
    err,
    exit_negative,
    print_json,
    refuse,
)
from slipstream.cli.shared.options import (
    Force,
    Json,
    read_job_or_refuse,
    read_schedule_or_refuse,
    require_choice,
    require_writable,
)
from slipstream.cli.shared.outputs import ORDER
from slipstream.schedules.check import check

_FOR_CHECKPOINTS = " or ".join(
    name for name, exporter in EXPORTERS.items() if "schedule" not in exporter.modules
)
_FOR_EITHER = " or ".join(
    name
    for name, exporter in EXPORTERS.items()
    if {"schedule", "checkpoint"} <= set(exporter.modules)
)
_FOR_JOBS = " or ".join(name for name, exporter in EXPORTERS.items() if "job" in exporter.modules)
_FOR_FOLDERS = ", ".join(
    name for name, exporter in EXPORTERS.items() if "out" not in exporter.options
)

File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help=(
            f"A schedule file, as `slipstream plan --out` writes it; for {_FOR_CHECKPOINTS} a "
            f"checkpoint, or the --out of a run; for {_FOR_EITHER} either a schedule or such a "
            f"folder; for {_FOR_JOBS} a schedule or a job file (.toml)."
        ),
    ),
]
Folder = Annotated[
    Path | None, typer.Argument(metavar="[DIR]", help=f"{_FOR_FOLDERS}: the folder to write.")
]
To = Annotated[
    str,
    typer.Option(
        "--to",
        metavar="FORMAT",
        autocompletion=complete_from(*EXPORTERS),
        help=(
            "; ".join(f"{name}: {exporter.meaning}" for name, exporter in EXPORTERS.items()) + "."
        ),
    ),
]
Pipeline = Annotated[
    int | None,
    typer.Option(
        "--pipeline",
        metavar="D",
        min=0,
        help=(
            "The pipeline whose order is written, by default 0. With --communication and without "
            "this option, the rows of all pipelines are written if they share micro-batches, as "
            "around a dead worker."
        ),
    ),
]
AllPipelines = Annotated[
    bool,
    typer.Option(
        "--all-pipelines",
        help=(
            "torch-csv: with --communication, write the rows of all pipelines, also if each could "
            "be run by itself."
        ),
    ),
]
Communication = Annotated[
    bool,
    typer.Option(
        "--communication",
        help=(
            "torch-csv: write sends, receives and reductions too (format compute_comms); without, "
            "torch adds them (compute_only)."
        ),
    ),
]
DecoderLayers = Annotated[
    int | None,
    typer.Option(
        "--decoder-layers",
        metavar="N",
        min=1,
        max=10**6,
        help=(
            "torchtitan, megatron: the model's decoder layers, two fewer than all layers where "
            "embedding and head are layers of the job, as in those that `slipstream profile` and "
            "`slipstream new --model` write. Without it torchtitan splits the model by itself; "
            "megatron needs it, and takes further layers for multi-token prediction."
        ),
    ),
]
TensorParallel = Annotated[
    int,
    typer.Option(
        "--tensor-parallel",
        metavar="N",
        min=1,
        max=1024,
        help=(
            "torchtitan: devices of each worker, as [training] tensor_parallel of the job that "
            "the schedule was planned for; a schedule does not say it."
        ),
    ),
]
TitanVersion = Annotated[
    str,
    typer.Option(
        "--titan-version",
        metavar="VERSION",
        autocompletion=complete_from(*VERSIONS),
        help=f"torchtitan: the version that the flags are for: {', '.join(VERSIONS)}.",
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar=ORDER,
        help="torch-csv, megatron: write to this file, not to stdout.",
    ),
]


def export(
    file: File,
    folder: Folder = None,
    to: To = "torch-csv",
    pipeline: Pipeline = None,
    all_pipelines: AllPipelines = False,
    communication: Communication = False,
    decoder_layers: DecoderLayers = None,
    titan_version: TitanVersion = NEWEST,
    tensor_parallel: TensorParallel = 1,
    out: Out = None,
    force: Force = False,  # noqa: ARG001  # read by the overwrite guard
    json: Json = False,
) -> None:
    """Write a schedule, a job's placement, or a checkpoint's model in the format of another
    library.

    Exits 1 with the reason when that library cannot run the schedule, for example because
    micro-batches are re-routed.
    """
    require_choice("--to", to, EXPORTERS)
    exporter = EXPORTERS[to]
    options = {
        "all_pipelines": all_pipelines,
        "communication": communication,
        "out": out,
        "pipeline": pipeline,
        "decoder_layers": decoder_layers,
        "titan_version": titan_version,
        "tensor_parallel": tensor_parallel,
    }
    # An option given to a format that does not have it would be ignored in silence.
    parameters = inspect.signature(export).parameters
    given = {
        name: f"--{name.replace('_', '-')}"
        for name, value in options.items()
        if value != parameters[name].default
    }
    for name, option in given.items():
        if name not in exporter.options:
            formats = (other for other in EXPORTERS if name in EXPORTERS[other].options)
            refuse(f"{option}: only with --to {' or '.join(formats)}")
    if all_pipelines and (not communication or pipeline is not None):
        refuse("--all-pipelines: only with --communication, and without --pipeline")
    require_choice("--titan-version", titan_version, VERSIONS)
    require_writable(out)
    if folder is not None and "out" in exporter.options:
        refuse(f"{folder}: --to {to} writes to --out FILE")
    # A job's placement or a checkpoint's model.
    if "schedule" not in exporter.modules or ("checkpoint" in exporter.modules and file.is_dir()):
        if given:
            refuse(f"{', '.join(given.values())}: only with a schedule, and {file} holds a model")
        _export_checkpoint(file, _require_new_folder(folder, to, "CHECKPOINT"), to, json)
        return
    # A schedule, to a file or into a folder.
    arguments = {name: options[name] for name in exporter.options} | {"json": json}
    if "out" not in exporter.options:
        arguments["folder"] = _require_new_folder(folder, to, "PLAN")
    try:
        _export_plan(file, exporter, arguments)
    except ExportError as error:
        exit_negative(f"{file}: {error}")


def _export_plan(file: Path, exporter: Exporter, arguments: Mapping[str, Any]) -> None:
    """Call `exporter` with the schedule or job in `file`; exit if it cannot be exported."""
    if "job" in exporter.modules and file.suffix == ".toml":
        _import_exporter(exporter.modules["job"]).export_job(read_job_or_refuse(file), **arguments)
        return
    schedule = read_schedule_or_refuse(file)
    if violations := check(schedule):
        exit_negative(f"{file}: breaks a rule: {violations[0]}")
    pipeline = arguments.get("pipeline") or 0
    if pipeline >= schedule.grid.pipelines:
        refuse(
            f"--pipeline {pipeline}: the schedule has pipelines 0 to {schedule.grid.pipelines - 1}"
        )
    _import_exporter(exporter.modules["schedule"]).export_schedule(schedule, **arguments)


def _import_exporter(module: str) -> Any:
    with delay_interrupts():
        return importlib.import_module(f"slipstream.cli.exporters.{module}")


def _require_new_folder(folder: Path | None, to: str, what: str) -> Path:
    """Return `folder`, which `export WHAT --to TO` writes.

    Exits 2 if it is None, a file, or a folder with files.
    """
    if folder is None:
        refuse(f"--to {to}: name the folder to write: slipstream export {what} --to {to} DIR")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        refuse(f"{folder}: exists already; name a folder that is new or empty")
    return folder


def _export_checkpoint(source: Path, folder: Path, to: str, json: bool) -> None:
    """Write the model of a checkpoint, in the folder `source`, in the format `to`."""
    with delay_interrupts():
        from slipstream.cli.shared.run_start import find_checkpoint_or_refuse
        from slipstream.runtime.checkpoints.checkpoint import CheckpointError
        from slipstream.runtime.config import ConfigError
    checkpoint = find_checkpoint_or_refuse(source)
    try:
        _import_exporter(EXPORTERS[to].modules["checkpoint"]).export_checkpoint(checkpoint, folder)
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
