"""Convert the configuration of torchtitan's Trainer to that of a run. Settings that a run does not
support are refused, and differences in how it trains are reported, before anything starts."""

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
"""Dtypes of a run by torchtitan's names: torchtitan's mixed precision is autocast here."""
_OPTIONS = {"lr", "weight_decay", "betas", "eps"}
"""Options of AdamW that a parameter group of a run may have."""
_IMPLEMENTATION_OPTIONS = {"fused", "foreach"}
"""Options of AdamW that change how it is computed and not its result."""
_REPLACED_SETTINGS = ("pipeline_parallel_schedule", "pipeline_parallel_schedule_csv", "module_fqns_per_model_part",
                      "pipeline_parallel_layers_per_stage", "pipeline_parallel_first_stage_less_layers",
                      "pipeline_parallel_last_stage_less_layers")
"""Settings of torchtitan's pipeline parallelism that are replaced by plans."""


def divide_microbatches(config: Trainer.Config, pipelines: int) -> tuple[int, ...]:
    """Return each pipeline's number of micro-batches in a step. Raises ConfigError if there are
    fewer micro-batches than pipelines."""
    training = with_one_process(config).training
    each, more = divmod(training.global_batch_size // training.local_batch_size, pipelines)
    if not each:
        raise ConfigError(f"a step has {more} micro-batches of {training.local_batch_size} samples, and there are "
                          f"{pipelines} pipelines; expected a larger --training.global_batch_size")
    return tuple(each + (pipeline < more) for pipeline in range(pipelines))


def build_run_config(arguments: Sequence[str], config: Trainer.Config, initial: Path) -> RunConfig:
    """Return the configuration of a run for the same training as torchtitan's `arguments`.

    `config` is parsed from these. A run that starts before the first step reads the parameters from
    the folder `initial`, in which the caller must save them as torchtitan's checkpoint
    (`save_trainer`). Raises ConfigError if a setting is not supported.
    """
    assert config.model_spec is not None
    # errors that no other option can fix come first
    build_meta_model(parse_for_one_process(tuple(arguments)), torch.device(device_type))
    require_supported(config)
    training = with_one_process(config).training
    groups = _convert_groups(arguments, config)
    run = parse_run_config(
        {"torchtitan": f"{config.model_spec.name}/{config.model_spec.flavor}", "context": training.seq_len,
         "options": {"arguments": list(arguments), "checkpoint": str(initial)}},
        {"iterations": training.steps, "batch": training.local_batch_size, "clip_norm": float(training.max_norm),
         "learning_rate": groups[0]["learning_rate"], "parameter_groups": groups,
         "learning_rate_schedule": f"{rate.__module__}:{rate.__name__}",
         "tensor_parallel": config.parallelism.tensor_parallel_degree,
         "compile": config.compile.enable and "model" in config.compile.components,
         "dtype": _DTYPES[training.mixed_precision_param if training.dtype == "float32" else training.dtype],
         "data": "torchtitan", "loss_weights": "tokens", "device": device_type,
         "recompute": "full" if isinstance(config.activation_checkpoint, FullAC.Config) else "none",
         "options": {"arguments": list(arguments)}})
    if run.training.compile:
        require_compilable(run, torch.device(device_type))
    return run


def rate(config: TrainingConfig, iteration: int) -> float:
    """Return the factor by which torchtitan's schedule multiplies an iteration's learning rate."""
    return _load_rate_function(tuple(config.options["arguments"]))(iteration)


@functools.cache
def _load_rate_function(arguments: Sequence[str]) -> Callable[[int], float]:
    """Return torchtitan's factor of the learning rate as a function of the iteration."""
    config = parse_for_one_process(arguments)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedulers = config.lr_scheduler.build(optimizers=[optimizer], training_steps=config.training.steps)
    factor_of: Callable[[int], float] = schedulers.schedulers[0].lr_lambdas[0]
    return factor_of


def require_supported(config: Trainer.Config) -> None:
    """Raise ConfigError, which names all, if a run does not support some settings."""
    problems = [f"{what}; expected {expected}" for wrong, what, expected in _check_settings(config) if wrong]
    if problems:
        raise ConfigError("not supported by Slipstream: " + ". ".join(problems))


def _check_settings(config: Trainer.Config) -> Iterator[tuple[bool, str, str]]:
    """Yield whether each unsupported setting is set, its description, and what is expected."""
    degrees, training, checkpoint = config.parallelism, config.training, config.checkpoint
    yield (device_type == "cuda" and not torch.cuda.is_available(), "a machine without GPUs",
           "a machine with GPUs, which torchtitan requires")
    yield type(config) is not Trainer.Config, f"{type(config).__qualname__}, a Trainer of its own", "torchtitan's"
    yield (degrees.data_parallel_shard_degree > 1,
           f"--parallelism.data_parallel_shard_degree {degrees.data_parallel_shard_degree} (FSDP)",
           "pipelines, as --parallelism.data_parallel_replicate_degree")
    heads = _count_kv_heads(config)
    yield (heads % max(1, degrees.tensor_parallel_degree) > 0,
           f"--parallelism.tensor_parallel_degree {degrees.tensor_parallel_degree}",
           f"a divisor of the model's {heads} heads of keys and values")
    for name in ("context_parallel_degree", "expert_parallel_degree"):
        yield getattr(degrees, name) > 1, f"--parallelism.{name} {getattr(degrees, name)}", "1"
    yield training.enable_cpu_offload, "--training.enable_cpu_offload", "training without it"
    yield (training.dtype == "bfloat16", "--training.dtype bfloat16",
           "float32, with --training.mixed_precision_param bfloat16")
    yield not 0 < training.max_norm <= 1e6, f"--training.max_norm {training.max_norm}", "a number above 0, at most 1e6"
    yield config.validator.enable, "--validator.enable", "validation by a Trainer of the checkpoint"
    yield config.comm.mode != "default", f"--comm.mode {config.comm.mode}", "default"
    compiled = config.compile.enable and "model" in config.compile.components
    yield (compiled and config.compile.backend != "inductor", f"--compile.backend {config.compile.backend}",
           "inductor")
    for beside, what in ((degrees.tensor_parallel_degree > 1,
                          f"--parallelism.tensor_parallel_degree {degrees.tensor_parallel_degree}"),
                         (isinstance(config.activation_checkpoint, FullAC.Config), "FullAC"),
                         (compiled and has_experts(config), "experts"),
                         (compiled and needs_masks(config), "attention that is given masks of documents")):
        yield compiled and beside, f"--compile.enable with {what}", "one of them"
    yield (has_experts(config) and degrees.tensor_parallel_degree > 1,
           f"--parallelism.tensor_parallel_degree {degrees.tensor_parallel_degree} with experts", "1")
    yield bool(config.override.imports), "--override.imports", "their changes in the configuration itself"
    yield checkpoint.create_seed_checkpoint, "--checkpoint.create_seed_checkpoint", "torchtitan's own program for it"
    loss = config.loss.loss_fn if isinstance(config.loss, ChunkedLossWrapper.Config) else config.loss
    yield type(loss) is not CrossEntropyLoss.Config, f"the loss {type(loss).__qualname__}", "CrossEntropyLoss"
    yield (config.optimizer.implementation == "fused_opt_states_bf16", "--optimizer.implementation "
           "fused_opt_states_bf16", "fused")
    yield (bool(config.optimizer.optimizer_factory_kwargs_by_name), "optimizer_factory_kwargs_by_name of the optimizer",
           "options of its param_groups")
    for group in config.optimizer.param_groups:
        yield group.optimizer_name != "AdamW", f"the optimizer {group.optimizer_name}", "AdamW"
        other = min(group.optimizer_kwargs.keys() - _OPTIONS - _IMPLEMENTATION_OPTIONS, default="")
        yield bool(other), f"{other} of the optimizer", f"of its options only {', '.join(sorted(_OPTIONS))}"


def _count_kv_heads(config: Trainer.Config) -> int:
    """Return the number of key and value heads; 0 for models without attention."""
    attention: Any = getattr(config.model_spec and config.model_spec.model, "first_attention", None)
    return getattr(attention, "n_kv_heads", None) or getattr(attention, "n_heads", None) or 0


def describe_differences(config: Trainer.Config) -> Iterator[str]:
    """Yield a line for each way in which a run differs from torchtitan's own training."""
    checkpoint = config.checkpoint
    if checkpoint.enable and not checkpoint.load_only:
        yield ("checkpoints while it trains are Slipstream's, and as often as they cost less than 1 % of the time: "
               f"--checkpoint.interval {checkpoint.interval} does not count; torchtitan's own is written after the "
               "last step")
    if config.activation_checkpoint is not None and not isinstance(config.activation_checkpoint, FullAC.Config):
        yield (f"activations are kept: {type(config.activation_checkpoint).__qualname__} does not count; "
               "FullAC computes them again")
    if config.parallelism.tensor_parallel_degree > 1 and config.parallelism.enable_sequence_parallel:
        yield "each rank of a worker has its samples whole between layers: sequence parallelism does not count"
    planned = [f"--parallelism.{name}" for name in _REPLACED_SETTINGS
               if getattr(config.parallelism, name) != getattr(ParallelismConfig(), name)]
    if planned:
        yield f"schedules and the layers of stages are planned: {', '.join(planned)} does not count"
    if config.compile.enable and "loss" in config.compile.components:
        yield "the loss is not compiled: of --compile.components only model counts"
    for option, given in {"--profiler.enable_profiling": config.profiler.enable_profiling,
                          "--profiler.enable_memory_snapshot": config.profiler.enable_memory_snapshot,
                          "--debug.deterministic": config.debug.deterministic,
                          "--debug.detect_anomaly": config.debug.detect_anomaly}.items():
        if given:
            yield f"{option} applies to this process, and to no worker"


def _convert_groups(arguments: Sequence[str], config: Trainer.Config) -> list[dict[str, Any]]:
    """Return torchtitan's parameter groups as `[training] parameter_groups`."""
    # A parameter is in the first group whose pattern fits. The `arguments` of torchtitan's command
    # line serve to build the model whose parameters are grouped. Raises ConfigError if there are no
    # groups.
    groups = config.optimizer.param_groups
    if not groups:
        raise ConfigError("the configuration's optimizer has no param_groups; expected one, such as default_adamw()")
    options = []
    for group in groups:
        own = {key: value for key, value in group.optimizer_kwargs.items() if key in _OPTIONS}
        all_ = torch.optim.AdamW([torch.zeros(1)], **own).defaults
        options.append({"learning_rate": all_["lr"], "weight_decay": all_["weight_decay"],
                        "betas": list(all_["betas"]), "epsilon": all_["eps"]})
    if len(groups) == 1 and groups[0].pattern == ".*":
        return [{"parameters": "*", **options[0]}]
    model = build_meta_model(parse_for_one_process(tuple(arguments)), torch.device(device_type))
    last = len(model.layers) + 1
    run_groups = []
    for name, _ in model.named_parameters():
        number = next((number for number, group in enumerate(groups) if re.search(group.pattern, name)), None)
        if number is not None:
            run_groups.append({"parameters": _name_in_run(name, last, model.enable_weight_tying), **options[number]})
    return run_groups


def _name_in_run(name: str, last: int, tied: bool) -> str:
    """Return a run's name for torchtitan's parameter; a tied embedding is the head's."""
    # `last` is the number of the run's last layer, the head.
    part, _, rest = name.partition(".")
    if part == "tok_embeddings":
        return f"{last}.lm_head.{rest}" if tied else f"0.{name}"
    return f"{int(rest.partition('.')[0]) + 1}.{name}" if part == "layers" else f"{last}.{name}"
