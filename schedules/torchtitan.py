"""The flags by which torchtitan runs an order that `schedules.torchcsv` has written.

torchtitan gives the file of `pipeline_parallel_schedule_csv` to torch's `_PipelineScheduleRuntime`. The schedule that
it is told besides decides only how many stages a rank has, and whether they are dealt in turn or as a V
(`torchtitan/distributed/pipeline_parallel.py`).
"""

from collections.abc import Iterator
from typing import NamedTuple

from slipstream.schedules.schedule import Grid, Schedule
from slipstream.schedules.torchcsv import MEND, TorchCsvError


class Version(NamedTuple):
    """What differs between versions of torchtitan."""

    head: str
    """Name of the models' heads."""
    what: str
    """How the command line says what to train."""
    flags: tuple[str, ...] = ()
    """What is to be given besides."""


VERSIONS = {
    "0.3.0": Version("lm_head", "--module MODEL --config CONFIG",
                     ("--training.disable_cuda_graphs",)),  # they are on by default, and refused with pipelines
    "0.2.2": Version("output", "--job.config_file CONFIG"),
}
"""Those that flags can be written for, the newest first."""
NEWEST = next(iter(VERSIONS))


def torchtitan_flags(schedule: Schedule, csv_path: str, *, pipeline: int = 0, ranks: int = 1,
                     decoder_layers: int | None = None, version: str = NEWEST) -> list[str]:
    """Flags for `torchtitan.train` of a version in `VERSIONS`, each with its values; micro-batches have one sample.

    `ranks`: processes of a worker, over which torchtitan cuts its layers (tensor parallelism). With `decoder_layers`,
    those of the model, the flags also give each stage its layers, by the names that modules have in torchtitan's
    decoder models; else torchtitan splits the model by itself. Raises TorchCsvError where torchtitan cannot run the
    schedule.
    """
    grid = schedule.grid
    if schedule.failed:
        raise TorchCsvError(f"worker {schedule.failed[0]} is down, and torchtitan runs whole pipelines: {MEND}")
    if len(set(grid.microbatches)) > 1:
        raise TorchCsvError(f"pipelines have {min(grid.microbatches)} to {max(grid.microbatches)} micro-batches, and "
                            "torchtitan's have all as many: export a plan with one number for microbatches")
    kind = _kind(grid)
    if len(grid.stages) > 2 * grid.columns and decoder_layers is None:
        raise TorchCsvError(f"torchtitan has to be told the layers of {len(grid.stages) // grid.columns} stages a "
                            "rank: give --decoder-layers")
    flags = ["--parallelism.pipeline_parallel_degree", str(grid.columns),
             "--parallelism.pipeline_parallel_schedule", kind,
             "--parallelism.pipeline_parallel_schedule_csv", csv_path,
             "--parallelism.pipeline_parallel_microbatch_size", "1",
             "--training.local_batch_size", str(grid.microbatches[pipeline])]
    if ranks > 1:
        flags += ["--parallelism.tensor_parallel_degree", str(ranks)]
    if decoder_layers is not None:
        flags += ["--parallelism.module_fqns_per_model_part", *_modules(grid, decoder_layers, VERSIONS[version].head)]
    return [*flags, *VERSIONS[version].flags]


def _kind(grid: Grid) -> str:
    """The schedule that has the stages where the grid has them."""
    columns = [stage.column for stage in grid.stages]
    there = list(range(grid.columns))
    if grid.columns == 1:
        raise TorchCsvError("torchtitan has no pipeline of one rank: export a plan with at least 2 stages")
    if columns == there:
        return "PipelineScheduleSingle"
    if columns == there * (len(columns) // grid.columns):
        return "PipelineScheduleMulti"
    if columns == [*there, *reversed(there)]:
        return "ZBVZeroBubble"
    raise TorchCsvError(f"its stages are on ranks {columns}; torchtitan deals them in turn, or two a rank as a V: plan "
                        "with [placement] order = 'interleaved' or 'v'")


def _modules(grid: Grid, decoder_layers: int, head: str) -> Iterator[str]:
    """For each stage the names of its modules, joined by commas."""
    outer = grid.layer_count - decoder_layers
    if outer not in (0, 2):
        raise TorchCsvError(f"--decoder-layers {decoder_layers}: the plan has {grid.layer_count} layers; expected "
                            f"{grid.layer_count}, or {grid.layer_count - 2} where embedding and head are layers of it")
    names = [f"layers.{layer}" for layer in range(decoder_layers)]
    if outer:
        names = ["tok_embeddings", *names, f"norm,{head}"]
    else:
        names[0], names[-1] = f"tok_embeddings,{names[0]}", f"{names[-1]},norm,{head}"
    for stage in range(len(grid.stages)):
        first, end = grid.layers_of(stage)
        yield ",".join(names[first:end])
