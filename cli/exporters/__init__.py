"""Formats of other programs, for `slipstream export` (`perfetto`: for `slipstream show`)."""

from collections.abc import Mapping
from typing import NamedTuple


class ExportError(ValueError):
    """One-line error: this format cannot express the schedule, or needs an option."""


class Exporter(NamedTuple):
    """Format that `slipstream export` writes; its modules are imported only when used."""

    meaning: str
    """What is written, for the help of `--to`."""
    modules: Mapping[str, str]
    """Modules of this package by what they export: schedule, job, or checkpoint.

    The modules define `export_schedule`, `export_job` and `export_checkpoint`. The first two are
    called with the schedule or job, `json`, all `options`, and `folder` unless `out` is an option.
    """
    options: tuple[str, ...] = ()
    """Parameters of `cli.export.export` for it; with `out`, a file is written, else a folder."""


EXPORTERS: Mapping[str, Exporter] = {
    "torch-csv": Exporter(
        "what torch.distributed.pipelining loads with `_PipelineScheduleRuntime._load_csv`",
        {"schedule": "torch_csv"},
        ("all_pipelines", "communication", "out", "pipeline"),
    ),
    "torchtitan": Exporter(
        "that, and torchtitan's flags for it, or a checkpoint that torchtitan loads",
        {"schedule": "torchtitan", "checkpoint": "torchtitan_checkpoint"},
        ("pipeline", "decoder_layers", "titan_version", "tensor_parallel"),
    ),
    "megatron": Exporter(
        "Megatron-LM's flags for the stages of a plan, or of a job's [placement]",
        {"schedule": "megatron", "job": "megatron"},
        ("decoder_layers", "out"),
    ),
    "hugging-face": Exporter(
        "a folder that transformers' `from_pretrained` loads", {"checkpoint": "hugging_face"}
    ),
}
"""Exporters by the names that `--to` takes."""
