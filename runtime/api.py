"""What a program that brings its own model, data or optimizer needs; docs/own-model.md shows how."""

from runtime.config import ConfigError, ModelConfig, RunConfig, TrainingConfig, parse_run_config
from runtime.launch import RunError, RunOptions, RunResult, run
from runtime.model.calling import add_to_loss
from runtime.model.data import Data, Microbatch
from runtime.model.layers import LayeredModel
from runtime.model.seeds import derive_seed, seeded
from runtime.model.split import weight_work
from runtime.tools.reference import ReferenceResult, reference_run

__all__ = [
    "ConfigError",
    "Data",
    "LayeredModel",
    "Microbatch",
    "ModelConfig",
    "ReferenceResult",
    "RunConfig",
    "RunError",
    "RunOptions",
    "RunResult",
    "TrainingConfig",
    "add_to_loss",
    "derive_seed",
    "parse_run_config",
    "reference_run",
    "run",
    "seeded",
    "weight_work",
]
