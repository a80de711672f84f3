"""List job files to start from: published measurements, and estimates for public models."""

from pathlib import Path

from msgspec.structs import replace

from slipstream.planner.job.estimate import GPUS, ModelLayout, estimate_job
from slipstream.planner.job.model_shape import ModelShape
from slipstream.planner.job.toml import job_text
from slipstream.schedules.tables.table import LIBRARY, library_names

MEASURED = Path(__file__).parent
ESTIMATED = {
    "llama-3-8b": (
        ModelShape(
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            ffn=14336,
            gated=True,
            sequence=8192,
            vocabulary=128_256,
        ),
        ModelLayout(
            gpu=GPUS["h100"],
            pipelines=8,
            stages=4,
            microbatches=16,
            tensor_parallel=2,
            efficiency=0.45,
        ),
    ),
    "llama-3-70b": (
        ModelShape(
            layers=80,
            hidden=8192,
            heads=64,
            kv_heads=8,
            ffn=28672,
            gated=True,
            sequence=8192,
            vocabulary=128_256,
        ),
        ModelLayout(
            gpu=GPUS["h100"],
            pipelines=8,
            stages=16,
            microbatches=32,
            tensor_parallel=8,
            efficiency=0.45,
        ),
    ),
}
"""Models whose job files are estimated, by preset name.

Each has a shape, and an example of a distribution over GPUs. The shapes are those of Llama 3
(Grattafiori et al. 2024, arXiv 2407.21783, table 3).
"""


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets, sorted."""
    return tuple(
        sorted({*library_names(), *(path.stem for path in MEASURED.glob("*.toml")), *ESTIMATED})
    )


def preset_text(name: str, *, shard_optimizer: bool = False) -> str:
    """Return the text of a preset's job file.

    If `shard_optimizer` is true, a preset whose values are estimated has sharded optimizer state.
    Raises KeyError for unknown names.
    """
    if name in ESTIMATED:
        shape, layout = ESTIMATED[name]
        return job_text(
            *estimate_job(name, shape.by_layer(), replace(layout, shard_optimizer=shard_optimizer))
        )
    for path in (MEASURED / f"{name}.toml", LIBRARY / name / "job.toml"):
        if name in preset_names() and path.exists():
            return path.read_text(encoding="utf-8")
    raise KeyError(name)
