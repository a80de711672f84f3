"""Public names for programs with their own model, data or optimizer; see docs/own-model.md."""

from slipstream.runtime.config import (
    ConfigError,
    ModelConfig,
    RunConfig,
    TrainingConfig,
    parse_run_config,
)
from slipstream.runtime.coordinator.run_options import Resilience
from slipstream.runtime.data.data import Data, IterationData, Microbatch
from slipstream.runtime.events import Metrics
from slipstream.runtime.launch import RunError, RunOptions, RunResult, run
from slipstream.runtime.models.calling import add_to_loss
from slipstream.runtime.models.layered_model import LayeredModel
from slipstream.runtime.models.recomputing import recomputable
from slipstream.runtime.models.split_backward import weight_work
from slipstream.runtime.models.step_rules import StepRule, leave_gradient
from slipstream.runtime.processes.process_manager import NodeFailure, Return
from slipstream.runtime.protocol.failure_injection import Injection, Slowdown
from slipstream.runtime.ranks.shards import Shard, cut_parameters
from slipstream.runtime.ranks.tensor_parallel import (
    for_all_ranks,
    gather_parts,
    part_of,
    sum_parts,
    sum_ranks,
)
from slipstream.runtime.ranks.worker_group import WorkerGroup, worker_group
from slipstream.runtime.seeds import derive_seed, seeded
from slipstream.runtime.tools.reference import ReferenceResult, reference_run

__all__ = [
    "ConfigError",
    "Data",
    "Injection",
    "IterationData",
    "LayeredModel",
    "Metrics",
    "Microbatch",
    "ModelConfig",
    "NodeFailure",
    "ReferenceResult",
    "Resilience",
    "Return",
    "RunConfig",
    "RunError",
    "RunOptions",
    "RunResult",
    "Shard",
    "Slowdown",
    "StepRule",
    "TrainingConfig",
    "WorkerGroup",
    "add_to_loss",
    "cut_parameters",
    "derive_seed",
    "for_all_ranks",
    "gather_parts",
    "leave_gradient",
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
