"""Convert the configuration of torchtitan's Trainer to that of a run.

Before anything starts, settings that a run does not support are refused, and differences in how the
run trains are reported.
"""

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

from slipstream.runtime.config import ConfigError, RunConfig, TrainingConfig, parse_run_config
from slipstream.runtime.models.compiling import require_compilable
from slipstream.runtime.models.torchtitan.specification import (
    build_meta_model,
    has_experts,
    needs_masks,
    parse_for_one_process,
    with_one_process,
)

_DTYPES = {"float32": "float32", "bfloat16": "bf16", "float64": "float64"}
"""Dtypes of a run, by torchtitan's names. torchtitan's mixed precision is autocast here."""
_OPTIONS = {"lr", "weight_decay", "betas", "eps"}
"""Options of AdamW that a parameter group of a run may have."""
_IMPLEMENTATION_OPTIONS = {"fused", "foreach"}
"""Options of AdamW that change how it is computed and not its result."""
_REPLACED_SETTINGS = (
    "pipeline_parallel_schedule",
    "pipeline_parallel_schedule_csv",
    "module_fqns_per_model_part",
    "pipeline_parallel_layers_per_stage",
    "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers",
)
"""Settings of torchtitan's pipeline parallelism that are replaced by plans."""


def divide_microbatches(config: Trainer.Config, pipelines: int) -> tuple[int, ...]:
    """Return each pipeline's number of micro-batches in a step.

    Raises ConfigError if there are fewer micro-batches than pipelines, or as `with_one_process`.
    """
    training = with_one_process(config).training
    each, more = divmod(training.global_batch_size // training.local_batch_size, pipelines)
    if not each:
        raise ConfigError(
            f"a step has {more} micro-batches of {training.local_batch_size} samples, and there "
            f"are {pipelines} pipelines; expected a larger --training.global_batch_size"
        )
    return tuple(each + (pipeline < more) for pipeline in range(pipelines))


def build_run_config(arguments: Sequence[str], config: Trainer.Config, initial: Path) -> RunConfig:
    """Return the configuration of a run that trains as torchtitan does with `arguments`.

    `config` is parsed from `arguments`. A run that starts before the first step reads its
    parameters from the folder `initial` (`save_trainer`). Raises ConfigError if a setting is not
    supported.
    """
    assert config.model_spec is not None
    # Errors that no other option can fix come first.
    build_meta_model(parse_for_one_process(tuple(arguments)), torch.device(device_type))
    require_supported(config)
    training = with_one_process(config).training
    # With float32 parameters, the dtype is that of autocast.
    dtype = training.mixed_precision_param if training.dtype == "float32" else training.dtype
    recomputes = isinstance(config.activation_checkpoint, FullAC.Config)
    groups = _convert_groups(arguments, config)
    run = parse_run_config(
        {
            "torchtitan": f"{config.model_spec.name}/{config.model_spec.flavor}",
            "context": training.seq_len,
            "options": {"arguments": list(arguments), "checkpoint": str(initial)},
        },
        {
            "iterations": training.steps,
            "batch": training.local_batch_size,
            "clip_norm": float(training.max_norm),
            "learning_rate": groups[0]["learning_rate"],
            "parameter_groups": groups,
            "learning_rate_schedule": f"{rate.__module__}:{rate.__name__}",
            "tensor_parallel": config.parallelism.tensor_parallel_degree,
            "compile": config.compile.enable and "model" in config.compile.components,
            "dtype": _DTYPES[dtype],
            "data": "torchtitan",
            "loss_weights": "tokens",
            "device": device_type,
            "recompute": "full" if recomputes else "none",
            "options": {"arguments": list(arguments)},
        },
    )
    if run.training.compile:
        require_compilable(run, torch.device(device_type))
    return run


def rate(config: TrainingConfig, iteration: int) -> float:
    """Return the factor of the base learning rate in an iteration, by torchtitan's schedule.

    The schedule is that of the command line in `[training.options]`. Raises ConfigError if
    torchtitan refuses this.
    """
    return _load_rate_function(tuple(config.options["arguments"]))(iteration)


@functools.cache
def _load_rate_function(arguments: Sequence[str]) -> Callable[[int], float]:
    config = parse_for_one_process(arguments)
    # torchtitan's schedule wants an optimizer, though the factor depends on the step alone.
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedulers = config.lr_scheduler.build(
        optimizers=[optimizer], training_steps=config.training.steps
    )
    factor_of: Callable[[int], float] = schedulers.schedulers[0].lr_lambdas[0]
    return factor_of


def require_supported(config: Trainer.Config) -> None:
    """Raise ConfigError, which names all unsupported settings, if there are any."""
    problems = [
        f"{what}; expected {expected}" for wrong, what, expected in _check_settings(config) if wrong
    ]
    if problems:
        raise ConfigError("not supported by Slipstream: " + ". ".join(problems))


def _check_settings(config: Trainer.Config) -> Iterator[tuple[bool, str, str]]:
    """Yield, for each setting, whether it is unsupported, its name, and what is expected."""
    degrees, training, checkpoint = config.parallelism, config.training, config.checkpoint
    yield (
        device_type == "cuda" and not torch.cuda.is_available(),
        "a machine without GPUs",
        "a machine with GPUs, which torchtitan requires",
    )
    yield (
        type(config) is not Trainer.Config,
        f"{type(config).__qualname__}, a Trainer of its own",
        "torchtitan's",
    )
    yield (
        degrees.data_parallel_shard_degree > 1,
        f"--parallelism.data_parallel_shard_degree {degrees.data_parallel_shard_degree} (FSDP)",
        "pipelines, as --parallelism.data_parallel_replicate_degree",
    )
    # Tensor parallelism cuts heads; the other axes have no counterpart here.
    heads = _count_kv_heads(config)
    yield (
        heads % max(1, degrees.tensor_parallel_degree) > 0,
        f"--parallelism.tensor_parallel_degree {degrees.tensor_parallel_degree}",
        f"a divisor of the model's {heads} heads of keys and values",
    )
    for name in ("context_parallel_degree", "expert_parallel_degree"):
        yield getattr(degrees, name) > 1, f"--parallelism.{name} {getattr(degrees, name)}", "1"
    yield training.enable_cpu_offload, "--training.enable_cpu_offload", "training without it"
    yield (
        training.dtype == "bfloat16",
        "--training.dtype bfloat16",
        "float32, with --training.mixed_precision_param bfloat16",
    )
    yield (
        not 0 < training.max_norm <= 1e6,
        f"--training.max_norm {training.max_norm}",
        "a number above 0, at most 1e6",
    )
    yield config.validator.enable, "--validator.enable", "validation by a Trainer of the checkpoint"
    yield config.comm.mode != "default", f"--comm.mode {config.comm.mode}", "default"
    # Compilation, alone and with other settings.
    compiled = config.compile.enable and "model" in config.compile.components
    yield (
        compiled and config.compile.backend != "inductor",
        f"--compile.backend {config.compile.backend}",
        "inductor",
    )
    for beside, what in (
        (
            degrees.tensor_parallel_degree > 1,
            f"--parallelism.tensor_parallel_degree {degrees.tensor_parallel_degree}",
        ),
        (isinstance(config.activation_checkpoint, FullAC.Config), "FullAC"),
        (compiled and has_experts(config), "experts"),
        (compiled and needs_masks(config), "attention that is given masks of documents"),
    ):
        yield compiled and beside, f"--compile.enable with {what}", "one of them"
    yield (
        has_experts(config) and degrees.tensor_parallel_degree > 1,
        f"--parallelism.tensor_parallel_degree {degrees.tensor_parallel_degree} with experts",
        "1",
    )
    yield (
        bool(config.override.imports),
        "--override.imports",
        "their changes in the configuration itself",
    )
    yield (
        checkpoint.create_seed_checkpoint,
        "--checkpoint.create_seed_checkpoint",
        "torchtitan's own program for it",
    )
    # What is trained: loss and optimizer.
    loss = config.loss
    if isinstance(loss, ChunkedLossWrapper.Config):
        loss = loss.loss_fn
    yield (
        type(loss) is not CrossEntropyLoss.Config,
        f"the loss {type(loss).__qualname__}",
        "CrossEntropyLoss",
    )
    yield (
        config.optimizer.implementation == "fused_opt_states_bf16",
        "--optimizer.implementation fused_opt_states_bf16",
        "fused",
    )
    yield (
        bool(config.optimizer.optimizer_factory_kwargs_by_name),
        "optimizer_factory_kwargs_by_name of the optimizer",
        "options of its param_groups",
    )
    for group in config.optimizer.param_groups:
        yield group.optimizer_name != "AdamW", f"the optimizer {group.optimizer_name}", "AdamW"
        other = min(group.optimizer_kwargs.keys() - _OPTIONS - _IMPLEMENTATION_OPTIONS, default="")
        yield (
            bool(other),
            f"{other} of the optimizer",
            f"of its options only {', '.join(sorted(_OPTIONS))}",
        )


def _count_kv_heads(config: Trainer.Config) -> int:
    attention: Any = getattr(config.model_spec and config.model_spec.model, "first_attention", None)
    return getattr(attention, "n_kv_heads", None) or getattr(attention, "n_heads", None) or 0


def describe_differences(config: Trainer.Config) -> Iterator[str]:
    """Yield a line for each way in which a run differs from torchtitan's own training."""
    # What is saved and recomputed.
    checkpoint = config.checkpoint
    if checkpoint.enable and not checkpoint.load_only:
        yield (
            "checkpoints while it trains are Slipstream's, and as often as they cost less than 1 % "
            f"of the time: --checkpoint.interval {checkpoint.interval} does not count; "
            "torchtitan's own is written after the last step"
        )
    if config.activation_checkpoint is not None and not isinstance(
        config.activation_checkpoint, FullAC.Config
    ):
        yield (
            f"activations are kept: {type(config.activation_checkpoint).__qualname__} does not "
            "count; FullAC computes them again"
        )
    if (
        config.parallelism.tensor_parallel_degree > 1
        and config.parallelism.enable_sequence_parallel
    ):
        yield (
            "each rank of a worker has its samples whole between layers: "
            "sequence parallelism does not count"
        )
    # What plans replace.
    planned = [
        f"--parallelism.{name}"
        for name in _REPLACED_SETTINGS
        if getattr(config.parallelism, name) != getattr(ParallelismConfig(), name)
    ]
    if planned:
        yield f"schedules and the layers of stages are planned: {', '.join(planned)} does not count"
    if config.compile.enable and "loss" in config.compile.components:
        yield "the loss is not compiled: of --compile.components only model counts"
    # What concerns the process of the Trainer, which does not train here.
    for option, given in {
        "--profiler.enable_profiling": config.profiler.enable_profiling,
        "--profiler.enable_memory_snapshot": config.profiler.enable_memory_snapshot,
        "--debug.deterministic": config.debug.deterministic,
        "--debug.detect_anomaly": config.debug.detect_anomaly,
    }.items():
        if given:
            yield f"{option} applies to this process, and to no worker"


def _convert_groups(arguments: Sequence[str], config: Trainer.Config) -> list[dict[str, Any]]:
    groups = config.optimizer.param_groups
    if not groups:
        raise ConfigError(
            "the configuration's optimizer has no param_groups; expected one, such as "
            "default_adamw()"
        )
    options = []
    for group in groups:
        given = {key: value for key, value in group.optimizer_kwargs.items() if key in _OPTIONS}
        # torch's defaults fill in what a group leaves out.
        values = torch.optim.AdamW([torch.zeros(1)], **given).defaults
        options.append(
            {
                "learning_rate": values["lr"],
                "weight_decay": values["weight_decay"],
                "betas": list(values["betas"]),
                "epsilon": values["eps"],
            }
        )
    # The usual case: one group for all parameters, so no names are needed.
    if len(groups) == 1 and groups[0].pattern == ".*":
        return [{"parameters": "*", **options[0]}]
    model = build_meta_model(parse_for_one_process(tuple(arguments)), torch.device(device_type))
    last = len(model.layers) + 1
    run_groups = []
    # torchtitan's patterns are regular expressions, so each parameter gets a group of its own.
    for name, _ in model.named_parameters():
        for group, group_options in zip(groups, options, strict=True):
            if re.search(group.pattern, name):
                name_in_run = _name_in_run(name, last, model.enable_weight_tying)
                run_groups.append({"parameters": name_in_run, **group_options})
                break
    return run_groups


def _name_in_run(name: str, last: int, tied: bool) -> str:
    """Return the run's name of torchtitan's parameter `name`; `last` is the head's layer."""
    # `last` is the number of the run's last layer, the head.
    part, _, rest = name.partition(".")
    # A tied embedding has the name of the head's weight.
    if part == "tok_embeddings":
        return f"{last}.lm_head.{rest}" if tied else f"0.{name}"
    return f"{int(rest.partition('.')[0]) + 1}.{name}" if part == "layers" else f"{last}.{name}"
