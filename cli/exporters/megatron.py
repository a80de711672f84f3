"""Write the stages of a plan, or of a job's placement, as Megatron-LM's flags.

Megatron-LM runs an order of its own, 1F1B, interleaved if ranks have several stages. Of a plan it
takes only which layers are on which rank. It derives the number of stages of a rank from the
layout, and refuses `--num-layers-per-virtual-pipeline-stage` and
`--num-virtual-stages-per-pipeline-rank` next to it (`megatron/training/arguments.py`).
"""

import shlex
from pathlib import Path
from typing import NamedTuple

import typer

from slipstream.cli.exporters import ExportError
from slipstream.cli.exporters.whole_stages import require_whole_pipeline
from slipstream.cli.shared.console import err, print_json
from slipstream.cli.shared.options import write_or_refuse
from slipstream.planner.job.file import Job
from slipstream.planner.job.megatron import split_letters, write_layout
from slipstream.planner.job.toml import JobError
from slipstream.planner.model.from_job import build_grid
from slipstream.schedules.schedule import Grid, Schedule
from slipstream.schedules.whole_stages import with_whole_stages


class MegatronSettings(NamedTuple):
    """Settings of Megatron-LM for a placement, named as its arguments are."""

    num_layers: int
    mtp_num_layers: int
    pipeline_model_parallel_size: int
    virtual_pipeline_model_parallel_size: int
    pipeline_model_parallel_layout: str
    microbatch_group_size_per_virtual_pipeline_stage: int | None
    """None if Megatron-LM's default, the number of ranks, fits the number of micro-batches."""

    def build_flags(self) -> list[str]:
        """Return the command-line arguments that set the stages in Megatron-LM."""
        flags = [
            "--pipeline-model-parallel-size",
            str(self.pipeline_model_parallel_size),
            "--pipeline-model-parallel-layout",
            self.pipeline_model_parallel_layout,
        ]
        if self.microbatch_group_size_per_virtual_pipeline_stage is not None:
            flags += [
                "--microbatch-group-size-per-virtual-pipeline-stage",
                str(self.microbatch_group_size_per_virtual_pipeline_stage),
            ]
        return flags


def export_schedule(
    schedule: Schedule, *, decoder_layers: int | None, out: Path | None, json: bool
) -> None:
    """Write Megatron-LM's flags for the stages of a plan, to `out` or stdout.

    The argument `decoder_layers` is that of `build_settings`; with `json`, stdout gets an object.
    Raises ExportError if the plan is more than a placement of stages, or as `build_settings`. Exits
    2 if `out` cannot be written.
    """
    schedule = with_whole_stages(schedule)
    if schedule.grid.chains == 1:  # `build_settings` refuses two
        for pipeline in range(schedule.grid.pipelines):
            require_whole_pipeline(schedule, pipeline, "Megatron-LM")
    _write_settings(build_settings(schedule.grid, decoder_layers), out, json=json)


def export_job(job: Job, *, decoder_layers: int | None, out: Path | None, json: bool) -> None:
    """Write Megatron-LM's flags for the `[placement]` of a job, as `export_schedule` does."""
    _write_settings(build_settings(build_grid(job), decoder_layers), out, json=json)


def _write_settings(settings: MegatronSettings, out: Path | None, *, json: bool) -> None:
    """Print the settings, or write them to `out`, and say for which model."""
    text = shlex.join(settings.build_flags()) + "\n"
    if out is not None:
        write_or_refuse(out, text.encode())
        err.print(f"written to {out}", soft_wrap=True)
    if json:
        print_json(settings._asdict())
    elif out is None:
        typer.echo(text, nl=False)
    predicting = f" --mtp-num-layers {settings.mtp_num_layers}" if settings.mtp_num_layers else ""
    err.print(
        f"for --num-layers {settings.num_layers}{predicting}; Megatron-LM runs its own order "
        "of micro-batches on these stages, not the plan's",
        style="dim",
        soft_wrap=True,
    )


def build_settings(grid: Grid, decoder_layers: int | None) -> MegatronSettings:
    """Return Megatron-LM's settings for the stages of a grid.

    The model has `decoder_layers` decoder layers; which of the stages' other layers are embedding,
    head or multi-token prediction, `planner.job.megatron.split_letters` says. Raises ExportError if
    `decoder_layers` is None or does not fit, or if Megatron-LM does not take the stages or the
    numbers of micro-batches.
    """
    chunks = len(grid.stages) // grid.columns
    _require_round_robin(grid, chunks)
    ranges = [stage.layers for stage in grid.stages if stage.layers is not None]
    if len(ranges) < len(grid.stages):
        raise ExportError(
            "the stages have no layers: give the job [placement] layers, as "
            "`slipstream new --model` and `slipstream profile` write them"
        )
    counts = [end - first for first, end in ranges]
    if decoder_layers is None:
        total = sum(counts)
        raise ExportError(
            f"give --decoder-layers {total}, or {max(1, total - 2)} where embedding and "
            "head are layers of the stages; a plan does not say which"
        )
    try:
        letters = split_letters(counts, decoder_layers)
    except JobError as error:
        raise ExportError(str(error)) from None
    # Layers of multi-token prediction must be on the last stage of their rank.
    predicting = [stage for stage, text in enumerate(letters) if "m" in text]
    if len(predicting) > 1 or any(stage < (chunks - 1) * grid.columns for stage in predicting):
        stage_text = ", ".join(map(str, predicting))
        raise ExportError(
            f"layers of multi-token prediction are in stages {stage_text}; "
            "Megatron-LM takes them in one stage, the last of its rank: plan with other "
            "[placement] layers"
        )
    return MegatronSettings(
        num_layers=decoder_layers,
        mtp_num_layers="".join(letters).count("m"),
        pipeline_model_parallel_size=grid.columns,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_model_parallel_layout=write_layout(letters),
        microbatch_group_size_per_virtual_pipeline_stage=_microbatch_group(grid, chunks),
    )


def _require_round_robin(grid: Grid, chunks: int) -> None:
    """Raise ExportError unless ranks take stages in turn, in one direction."""
    columns = [stage.column for stage in grid.stages]
    if grid.chains > 1:
        raise ExportError(
            "micro-batches pass in two directions; Megatron-LM has one: plan with "
            "[placement] order = 'interleaved'"
        )
    if columns != list(range(grid.columns)) * chunks:
        raise ExportError(
            f"stages are on ranks {columns}; Megatron-LM puts them on ranks in turn: "
            "plan with [placement] order = 'interleaved'"
        )
    if grid.columns == 1 and chunks > 1:
        raise ExportError(
            f"a rank has all {chunks} stages; Megatron-LM interleaves stages of 2 or "
            "more ranks: plan with [placement] chunks = 1"
        )


def _microbatch_group(grid: Grid, chunks: int) -> int | None:
    """Return a rank's micro-batches of one stage at a time; None: Megatron-LM's default.

    Raises ExportError if no number fits.
    """
    low, high = min(grid.microbatches), max(grid.microbatches)
    if low < high:
        raise ExportError(
            f"pipelines have {low} to {high} micro-batches, and Megatron-LM gives "
            "all the same number: plan with one number for microbatches"
        )
    if chunks == 1 or low % grid.columns == 0:
        return None
    if low < grid.columns:
        raise ExportError(
            f"{low} micro-batches on {grid.columns} ranks; Megatron-LM interleaves "
            f"stages from {grid.columns} micro-batches on: plan with more, or with "
            "[placement] chunks = 1"
        )
    # `forward_backward_pipelining_with_interleaving` wants at least as many micro-batches as ranks
    # in each group, and in what remains after the last whole one.
    sizes = range(grid.columns, low + 1)
    return next(size for size in sizes if low % size == 0 or low % size >= grid.columns)
