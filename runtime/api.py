"""What a program that brings its own model, data or optimizer needs; docs/own-model.md shows how."""

from runtime.config import ConfigError, ModelConfig, RunConfig, TrainingConfig, parse_run_config
from runtime.launch import RunError, RunOptions, RunResult, run
from runtime.model.data.data import Data, Microbatch
from runtime.model.layers.calling import add_to_loss
from runtime.model.layers.layered_model import LayeredModel
from runtime.model.layers.recomputing import recomputable
from runtime.model.layers.shards import Shard, cut_parameters
from runtime.model.layers.split import weight_work
from runtime.model.layers.tensor_parallel import for_all_ranks, gather_parts, part_of, sum_parts, sum_ranks
from runtime.model.layers.worker_group import WorkerGroup, worker_group
from runtime.model.seeds import derive_seed, seeded
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
    "Shard",
    "TrainingConfig",
    "WorkerGroup",
    "add_to_loss",
    "cut_parameters",
    "derive_seed",
    "for_all_ranks",
    "gather_parts",
    "parse_run_config",
    "part_of",
    "recomputable",
    "reference_run",
    "run",
    "seeded",
    "sum_parts",
    "sum_ranks",
    "weight_work",
    "worker_group",
]
