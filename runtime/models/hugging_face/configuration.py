"""Read the config.json that `[model] hugging_face` names, without transformers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from slipstream.runtime.config import ConfigError, ModelConfig

MODEL_KEY = "model.hugging_face"
"""Key of the job file that names a model of transformers, for error messages."""
CONFIG_FILE = "config.json"


class Family(NamedTuple):
    """Names of the parts of transformers' models in one family, such as Llama."""

    decoders: str
    """Name of the list of decoder layers."""
    embedding: tuple[str, ...]
    """Names of the token embedding, then of the modules applied after it."""
    norm: str
    attention: str = "self_attn"
    """Name of the attention within a decoder layer."""
    mlp: str = "mlp"
    experts: bool = False
    """True if layers are mixtures of experts."""
    can_be_cut: bool = True
    """True if ranks can share a layer (`runtime.models.hugging_face.parallel`)."""


_LLAMA = Family("layers", ("embed_tokens",), "norm")
_MIXTURE = _LLAMA._replace(experts=True)
_GPT2 = Family("h", ("wte", "wpe", "drop"), "ln_f", "attn", can_be_cut=False)
FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gpt2": _GPT2,
    "mixtral": _MIXTURE,
    "qwen2_moe": _MIXTURE,
    "qwen3_moe": _MIXTURE,
    "olmoe": _MIXTURE,
}
"""Supported models by `model_type`, each compared with transformers' own by a test."""


def weights_folder(path: str) -> Path | None:
    """Return `path` if it is a folder, of pretrained weights; else None: random weights."""
    return Path(path) if Path(path).is_dir() else None


def read_config(config: ModelConfig) -> dict[str, Any]:
    """Return the content of config.json, with the changes of `[model.options]`.

    Raises ConfigError if the file cannot be read, or the model is not supported.
    """
    assert config.hugging_face is not None
    path = Path(config.hugging_face)
    source = path / CONFIG_FILE if path.is_dir() else path
    subject = f"{MODEL_KEY} is {config.hugging_face!r}"
    try:
        document = json.loads(source.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{subject}: {source} cannot be read: {error.strerror}; expected a folder of a model, "
            f"or its {CONFIG_FILE}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"{subject}: {source} is not JSON: {error}") from None
    # A model of another family would need other names of parts, and a test of its own.
    kind = document.get("model_type") if isinstance(document, dict) else None
    if kind not in FAMILIES:
        raise ConfigError(
            f"{subject}: its model_type is {kind!r}; expected one of "
            f"{', '.join(map(repr, FAMILIES))}"
        )
    return {**document, **config.options}


def is_dense(config: Any, index: int) -> bool:
    """Return whether decoder layer `index` of a mixture of experts has no experts."""
    # Qwen's configs list layers without experts, and give experts to each `step`-th layer only.
    dense = getattr(config, "mlp_only_layers", None)
    step = getattr(config, "decoder_sparse_step", 1)
    return dense is not None and (index in dense or (index + 1) % step > 0)


def vocabulary_size(config: ModelConfig) -> int:
    """Return the size of a model's vocabulary.

    Raises ConfigError if the model's own configuration cannot be read, or lacks the size.
    """
    if config.torchtitan is not None:
        from slipstream.runtime.models.torchtitan.specification import trainer_config

        tokens: int = trainer_config(config).model_spec.model.vocab_size
        return tokens
    if config.hugging_face is None:
        return config.vocabulary
    size = read_config(config).get("vocab_size")
    if not isinstance(size, int):
        raise ConfigError(
            f"{MODEL_KEY} is {config.hugging_face!r}: its vocab_size is {size!r}; expected a whole "
            "number, as tokens are compared with it"
        )
    return size
