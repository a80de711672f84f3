"""Find the model that `[model] torchtitan` or a Trainer's configuration names."""

import functools
import io
import re
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torchtitan.components.quantization.utils import has_quantization
from torchtitan.config import CompileConfig, ConfigManager, ParallelismConfig, TrainingConfig
from torchtitan.models import _supported_models
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.moe import MoE
from torchtitan.models.deepseek_v3.mtp import MTPDecoder
from torchtitan.models.gpt_oss.model import GptOssModel
from torchtitan.models.gpt_oss.moe import GptOssMoE
from torchtitan.trainer import Trainer

from slipstream.runtime.config import ConfigError, ModelConfig
from slipstream.runtime.errors import first_line
from slipstream.runtime.object_reference import search_working_directory

MODEL_KEY = "model.torchtitan"
"""Key of the job file that names a model of torchtitan, for error messages."""
MODEL_OPTIONS = ("arguments", "attention", "checkpoint")
"""Keys of `[model.options]` for models of torchtitan.

    arguments   command line of torchtitan, which replaces the defaults of its models
    attention   "sdpa" for attention that does not separate documents
    checkpoint  checkpoint of torchtitan to begin with
"""
_MODULES = {"tok_embeddings", "layers", "norm", "lm_head"}
_ONE_PROCESS = ParallelismConfig(spmd_backend="partial_dtensor", enable_sequence_parallel=False)
"""Parallelism of a single process, with plain tensors."""
_EAGER = CompileConfig()


def trainer_config(config: ModelConfig) -> Trainer.Config:
    """Return the Trainer's configuration from which a model is built.

    Raises ConfigError for a model or option that is unknown, or that torchtitan refuses.
    """
    for key in config.options:
        if key not in MODEL_OPTIONS:
            raise ConfigError(
                f"unknown key model.options.{key}; with {MODEL_KEY} expected "
                f"{' or '.join(MODEL_OPTIONS)}"
            )
    # A command line of torchtitan describes the whole model; without one, its name does.
    arguments = config.options.get("arguments", ())
    if arguments:
        return parse_for_one_process(tuple(arguments))
    attention = config.options.get("attention")
    if attention not in (None, "sdpa"):
        raise ConfigError(
            f"model.options.attention is {attention!r}; expected 'sdpa', or torchtitan's own"
        )
    return _config_by_name(config.torchtitan or "", config.context, attention is not None)


def parse_arguments(arguments: Sequence[str]) -> Trainer.Config:
    """Return the Trainer's configuration that torchtitan parses from its command line.

    Appends the working directory to Python's search path. Raises ConfigError if torchtitan refuses
    the command line. For --help, prints the help and raises SystemExit.
    """
    search_working_directory()
    output = io.StringIO()
    try:
        with redirect_stdout(output), redirect_stderr(output):
            # torchtitan's CUDA graphs do not support pipelines, and this runtime uses none.
            config: Trainer.Config = ConfigManager().parse_args(
                ["--training.disable_cuda_graphs", *arguments]
            )
    except SystemExit as exit_:
        if not exit_.code:  # the user asked for help
            sys.stdout.write(output.getvalue())
            raise
        raise ConfigError(
            f"torchtitan does not take {' '.join(arguments)!r}: {_strip_box(output.getvalue())}"
        ) from None
    except Exception as error:  # the user's own module may raise anything
        raise ConfigError(
            f"torchtitan does not take {' '.join(arguments)!r}: {first_line(error)}"
        ) from None
    return config


def _strip_box(output: str) -> str:
    """Return, as one line, the lines in a box that torchtitan's parser has printed."""
    return " ".join(re.sub("[╭╮╰╯│─]|-{3,}", " ", output).split())


@functools.cache
def parse_for_one_process(arguments: Sequence[str]) -> Trainer.Config:
    """Parse torchtitan's command line into a configuration without parallelism.

    A model can be built from this configuration. Raises ConfigError if torchtitan refuses the
    command line.
    """
    return _update_model_config(with_one_process(parse_arguments(arguments)))


def with_one_process(config: Trainer.Config) -> Trainer.Config:
    """Return the configuration without parallelism, for one micro-batch after the other.

    Raises ConfigError unless micro-batches have samples and the global batch is a whole number of
    them.
    """
    training, degrees = config.training, config.parallelism
    # Samples of a micro-batch, and then of all micro-batches of a step.
    size = training.local_batch_size
    if degrees.pipeline_parallel_degree > 1:
        size = degrees.pipeline_parallel_microbatch_size
    if size < 1:
        raise ConfigError(f"--training.local_batch_size is {size}; expected a number above 0")
    samples = training.global_batch_size
    if samples < 0:
        samples = training.local_batch_size * degrees.data_parallel_replicate_degree
    if samples % size:
        raise ConfigError(
            f"--training.global_batch_size is {samples}; expected a multiple of the {size} samples "
            "of a micro-batch"
        )
    return replace(
        config,
        parallelism=_ONE_PROCESS,
        compile=_EAGER,
        training=replace(
            training, local_batch_size=size, global_batch_size=samples, disable_cuda_graphs=True
        ),
    )


@functools.cache
def _config_by_name(name: str, context: int, causal: bool) -> Trainer.Config:
    # Samples have `context` tokens. With `causal`, attention is scaled_dot_product_attention, which
    # ignores documents. Raises ConfigError if there is none.
    family, _, flavour = name.partition("/")
    if family not in _supported_models or not flavour:
        raise ConfigError(
            f"{MODEL_KEY} is {name!r}; expected a model and its size, such as 'llama3/8B', of "
            f"{', '.join(sorted(_supported_models))}"
        )
    # The family knows its sizes; if this one is unknown, the message lists them.
    try:
        registry = import_module(f"torchtitan.models.{family}").model_registry
        spec = registry(flavour)
    except KeyError:
        sizes = getattr(import_module(f"torchtitan.models.{family}"), f"{family}_configs", ())
        names = ", ".join(f"{family}/{size}" for size in sizes)
        raise ConfigError(f"{MODEL_KEY} is {name!r}; expected one of {names}") from None
    except Exception as error:  # each model raises errors of its own
        raise ConfigError(
            f"{MODEL_KEY} is {name!r}: {type(error).__name__}: {first_line(error)}"
        ) from None
    # Attention without masks also runs on CPUs.
    for layer in spec.model.layers if causal and isinstance(spec.model, Decoder.Config) else ():
        if getattr(layer, "attention", None) is not None:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return _update_model_config(
        Trainer.Config(
            model_spec=spec,
            training=TrainingConfig(seq_len=context, disable_cuda_graphs=True),
            parallelism=_ONE_PROCESS,
        )
    )


def _update_model_config(config: Trainer.Config) -> Trainer.Config:
    assert config.model_spec is not None
    try:
        config.model_spec.model.update_from_config(config=config)
    except Exception as error:  # each model raises errors of its own
        raise ConfigError(
            f"{MODEL_KEY}: {config.model_spec.name}/{config.model_spec.flavor}, built without "
            f"parallelism inside layers: {first_line(error)}"
        ) from None
    return config


def needs_masks(config: Trainer.Config) -> bool:
    """Return whether attention needs masks of the documents in a sample."""
    assert config.model_spec is not None
    model: Any = config.model_spec.model
    return isinstance(model, Decoder.Config) and not isinstance(
        getattr(model.first_attention, "inner_attention", None), ScaledDotProductAttention.Config
    )


def has_experts(config: Trainer.Config) -> bool:
    """Return whether any layer is a mixture of experts."""
    assert config.model_spec is not None
    return any(
        getattr(layer, "moe", None) is not None
        for layer in getattr(config.model_spec.model, "layers", ())
    )


def require_no_experts(config: Trainer.Config, beside: str, expected: str) -> None:
    """Raise ConfigError if a model has experts, which a setting does not support.

    `beside` is the setting in `[training]`, with a reason; `expected` is what to set instead.
    """
    if has_experts(config):
        spec: Any = config.model_spec
        raise ConfigError(
            f"{MODEL_KEY} is '{spec.name}/{spec.flavor}', a mixture of experts, with "
            f"training.{beside}; expected {expected}"
        )


def build_meta_model(config: Trainer.Config, device: torch.device) -> Any:
    """Build the whole model on the meta device.

    Raises ConfigError unless it is a chain of supported layers that are trained as a whole, and
    whose attention can run on `device`.
    """
    spec = config.model_spec
    assert spec is not None
    wrong = f"{MODEL_KEY} is '{spec.name}/{spec.flavor}'"
    if not isinstance(spec.model, Decoder.Config):
        raise ConfigError(f"{wrong}, which is no decoder; expected a decoder, such as 'llama3/8B'")
    # State of unknown experts could not be summed, undone and moved.
    for layer in spec.model.layers:
        moe = getattr(layer, "moe", None)
        if moe is not None and type(moe) not in (MoE.Config, GptOssMoE.Config):
            raise ConfigError(
                f"{wrong}, whose experts are {type(moe).__qualname__}, which may have state of "
                "their own; expected torchtitan's MoE"
            )
    # The split of the backward knows plain products only.
    if has_quantization(spec.model):
        raise ConfigError(
            f"{wrong} with quantized products, whose backward cannot be split; expected plain ones"
        )
    # Layers are run one by one, so only a model whose forward is this chain will do.
    with torch.device("meta"):
        model = spec.model.build()
    if (
        type(model).forward not in (Decoder.forward, MTPDecoder.forward)
        or set(dict(model.named_children())) != _MODULES
    ):
        raise ConfigError(
            f"{wrong}, which is more than a chain of an embedding, decoder layers and a head; "
            "expected such a model"
        )
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    if frozen:
        raise ConfigError(
            f"{wrong}, whose {frozen[0]} is not trained (LoRA); expected a model that is trained "
            "as a whole"
        )
    if isinstance(spec.model, GptOssModel.Config) and not needs_masks(config):
        raise ConfigError(
            f"{wrong}, whose attention has sinks and windows, which ScaledDotProductAttention "
            "lacks; expected its own, on a GPU"
        )
    if needs_masks(config) and device.type != "cuda":
        raise ConfigError(
            f"{wrong}, whose attention has no backward on {device.type}; expected a GPU, or "
            "model.options.attention = 'sdpa' (in a configuration of torchtitan's "
            "ScaledDotProductAttention), which does not see where documents begin"
        )
    return model
