"""Export an order of ops, as `torch_csv` writes it, with flags for torchtitan.

torchtitan passes the file of `pipeline_parallel_schedule_csv` to torch's
`_PipelineScheduleRuntime`. The schedule class that is named as well decides only how many stages a
rank has, and whether they are assigned round-robin or as a V
(`torchtitan/distributed/pipeline_parallel.py`).
"""

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from slipstream.cli.exporters import ExportError
from slipstream.cli.exporters.torch_csv import write_order
from slipstream.cli.exporters.whole_stages import REMEDY
from slipstream.cli.shared.console import err, print_json, refuse
from slipstream.cli.shared.options import write_or_refuse
from slipstream.schedules.schedule import Grid, Schedule


class TorchtitanVersion(NamedTuple):
    """Names and flags in which a version of torchtitan differs from others."""

    head: str
    """Name of the module with the output head in this version's models."""
    config_arguments: str
    """Command-line arguments that select the model and its configuration in this version."""
    flags: tuple[str, ...] = ()
    """Further command-line flags that this version needs."""


VERSIONS = {
    "0.3.0": TorchtitanVersion(
        "lm_head", "--module MODEL --config CONFIG", ("--training.disable_cuda_graphs",)
    ),
    "0.2.2": TorchtitanVersion("output", "--job.config_file CONFIG"),
}
"""Versions of torchtitan that flags can be written for, newest first."""
NEWEST = next(iter(VERSIONS))


def export_schedule(
    schedule: Schedule,
    *,
    folder: Path,
    pipeline: int | None,
    decoder_layers: int | None,
    titan_version: str,
    tensor_parallel: int,
    json: bool,
) -> None:
    """Write one pipeline's order (`schedule.csv`), and torchtitan's `flags`, to a folder.

    Raises ExportError if torchtitan cannot run the schedule, or needs `decoder_layers` that fit.
    Exits 2 if the folder cannot be written.

    Parameters
    ----------
    pipeline
        Number of the pipeline; None: the first.
    decoder_layers
        The model's decoder layers, which flags assign to stages; None: torchtitan splits the model.
    titan_version
        Version of torchtitan, a key of `VERSIONS`, for which the flags are.
    tensor_parallel
        Number of ranks of a worker.
    json
        Whether the flags are printed as JSON, instead of the next command.
    """
    pipeline = pipeline or 0
    flags = _build_flags(
        schedule,
        folder.resolve() / "schedule.csv",
        pipeline,
        tensor_parallel,
        decoder_layers,
        titan_version,
    )
    # The folder is made once nothing can be refused any more.
    order = write_order(schedule, pipeline)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        refuse(f"{folder}: cannot be written: {error.strerror}")
    write_or_refuse(folder / "schedule.csv", order.encode())
    write_or_refuse(folder / "flags", (" ".join(map(shlex.quote, flags)) + "\n").encode())
    if schedule.optimizer == "staggered":
        err.print(
            "torchtitan steps all stages together, and the plan one after the other: plan with "
            "--optimizer synchronous for the best order there",
            soft_wrap=True,
        )
    if json:
        print_json({"folder": str(folder), "flags": flags, "pipeline": pipeline})
        return
    workers = schedule.grid.pipelines * schedule.grid.columns * tensor_parallel
    err.print(
        f"written to {folder}; next: xargs -a {shlex.quote(str(folder / 'flags'))} torchrun "
        f"--nproc-per-node {workers} -m torchtitan.train "
        f"{VERSIONS[titan_version].config_arguments}",
        soft_wrap=True,
    )
    if tensor_parallel == 1:
        err.print(
            "workers are of one device each; of more with --tensor-parallel",
            style="dim",
            soft_wrap=True,
        )


def _build_flags(
    schedule: Schedule,
    csv_path: Path,
    pipeline: int,
    ranks: int,
    decoder_layers: int | None,
    version: str,
) -> list[str]:
    """Return the flags for `torchtitan.train`, each followed by its values."""
    grid = schedule.grid
    if schedule.failed:
        raise ExportError(
            f"worker {schedule.failed[0]} is down, and torchtitan runs whole pipelines: {REMEDY}"
        )
    if len(set(grid.microbatches)) > 1:
        raise ExportError(
            f"pipelines have {min(grid.microbatches)} to {max(grid.microbatches)} micro-batches, "
            "and torchtitan needs the same number for all: export a plan with one number for "
            "microbatches"
        )
    kind = _schedule_class(grid)
    # Without module names, torchtitan splits the model over at most two stages a rank.
    if len(grid.stages) > 2 * grid.columns and decoder_layers is None:
        raise ExportError(
            f"torchtitan cannot split a model into {len(grid.stages) // grid.columns} stages per "
            "rank by itself: give --decoder-layers"
        )
    # A micro-batch is one sample, so a batch has as many samples as a pipeline has micro-batches.
    flags = [
        "--parallelism.pipeline_parallel_degree",
        str(grid.columns),
        "--parallelism.pipeline_parallel_schedule",
        kind,
        "--parallelism.pipeline_parallel_schedule_csv",
        str(csv_path),
        "--parallelism.pipeline_parallel_microbatch_size",
        "1",
        "--training.local_batch_size",
        str(grid.microbatches[pipeline]),
    ]
    if ranks > 1:
        flags += ["--parallelism.tensor_parallel_degree", str(ranks)]
    if decoder_layers is not None:
        flags += [
            "--parallelism.module_fqns_per_model_part",
            *_module_names(grid, decoder_layers, VERSIONS[version].head),
        ]
    return [*flags, *VERSIONS[version].flags]


def _schedule_class(grid: Grid) -> str:
    """Return torch's schedule class that assigns stages to ranks as the grid does."""
    columns = [stage.column for stage in grid.stages]
    there = list(range(grid.columns))
    if grid.columns == 1:
        raise ExportError(
            "torchtitan does not run pipelines of one rank: export a plan with at least 2 stages"
        )
    if columns == there:
        return "PipelineScheduleSingle"
    if columns == there * (len(columns) // grid.columns):
        return "PipelineScheduleMulti"
    if columns == [*there, *reversed(there)]:
        return "ZBVZeroBubble"
    raise ExportError(
        f"stages are on ranks {columns}; torchtitan puts them round-robin, or 2 per rank as a V: "
        "plan with [placement] order = 'interleaved' or 'v'"
    )


def _module_names(grid: Grid, decoder_layers: int, head: str) -> Iterator[str]:
    """Yield the names of each stage's modules in torchtitan, joined by commas.

    Raises ExportError unless the plan has `decoder_layers` layers, or two more.
    """
    outer = grid.layer_count - decoder_layers
    if outer not in (0, 2):
        raise ExportError(
            f"--decoder-layers {decoder_layers}: the plan has {grid.layer_count} layers; expected "
            f"{grid.layer_count}, or {grid.layer_count - 2} where embedding and head are layers "
            "of it"
        )
    # Embedding and head are layers of their own, or belong to the first and last decoder layer.
    names = [f"layers.{layer}" for layer in range(decoder_layers)]
    if outer:
        names = ["tok_embeddings", *names, f"norm,{head}"]
    else:
        names[0], names[-1] = f"tok_embeddings,{names[0]}", f"{names[-1]},norm,{head}"
    for stage in range(len(grid.stages)):
        first, end = grid.layers_of(stage)
        yield ",".join(names[first:end])
