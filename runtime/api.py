"""What a program that brings its own model, data or optimizer needs; docs/own-model.md shows how."""

from runtime.config import ConfigError, ModelConfig, RunConfig, TrainingConfig, parse_run_config
from runtime.data import Data, Microbatch
from runtime.launch import RunError, RunResult, run
from runtime.layers import LayeredModel
from runtime.reference import ReferenceResult, reference_run
from runtime.seeds import derive_seed, seeded
from runtime.split import weight_work

__all__ = [
    "ConfigError",
    "Data",
    "LayeredModel",
    "Microbatch",
    "ModelConfig",
    "ReferenceResult",
    "RunConfig",
    "RunError",
    "RunResult",
    "TrainingConfig",
    "derive_seed",
    "parse_run_config",
    "reference_run",
    "run",
    "seeded",
    "weight_work",
]
