"""Build a decoder model of transformers as a `LayeredModel`: embedding, decoders, head."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from slipstream.runtime.config import ConfigError, ModelConfig
from slipstream.runtime.errors import first_line
from slipstream.runtime.models.cross_entropy import cross_entropy
from slipstream.runtime.models.hugging_face.configuration import (
    FAMILIES,
    MODEL_KEY,
    is_dense,
    read_config,
    weights_folder,
)
from slipstream.runtime.models.hugging_face.layers import DecoderLayer, Embedding, Head
from slipstream.runtime.models.hugging_face.layers import router_of as router_of
from slipstream.runtime.models.hugging_face.parallel import cut_decoder, require_even_cut
from slipstream.runtime.models.hugging_face.registered import (
    ATTENTION_NAME,
    EXPERTS_NAME,
    register_attention,
    register_experts,
)
from slipstream.runtime.models.hugging_face.weights import PretrainedWeights
from slipstream.runtime.models.uninitialized import is_uninitialized
from slipstream.runtime.ranks.worker_group import worker_group
from slipstream.runtime.seeds import GENERATOR_LOCK, derive_seed, seeded

_RUN_KEYS = ("attn_implementation", "experts_implementation")
"""Keys of `[model.options]` that choose implementations, and are not of config.json."""


class HuggingFaceModel:
    """`LayeredModel` for the model that `[model] hugging_face` names.

    Attention runs for each document separately, and experts as grouped products
    (`runtime.models.hugging_face.registered`), unless `[model.options]` names other
    implementations. Raises ConfigError if the model cannot be used.
    """

    def __init__(
        self, config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        assert config.hugging_face is not None
        self._name, self._seed, self._dtype, self.device = config.hugging_face, seed, dtype, device
        document = read_config(config)
        self._config = transformers_config(document, self._name)
        self._family = FAMILIES[document["model_type"]]
        # config.json may have any key, but a misspelt option must not be ignored.
        example = AutoConfig.for_model(document["model_type"])
        for key in config.options:
            if key not in _RUN_KEYS and not hasattr(example, key):
                raise ConfigError(
                    f"unknown key model.options.{key}; expected keys of the model's config.json, "
                    f"{' or '.join(_RUN_KEYS)}"
                )
        self.layers = self._config.num_hidden_layers + 2
        places = self._config.max_position_embeddings
        if config.context > places:
            raise ConfigError(
                f"model.context is {config.context}; the model of {MODEL_KEY} has {places} "
                "positions"
            )
        folder = weights_folder(self._name)
        self._weights = None if folder is None else PretrainedWeights(folder, self._family)
        # The sample has the modules to copy, and the loss function.
        self._sample = build_sample(self._config, 0)
        group = worker_group()
        if group is not None:
            require_even_cut(self._config, group.size())
        self.shared: tuple[tuple[str, str], ...] = ()
        if self._config.tie_word_embeddings:
            embedding = f"0.{self._family.embedding[0]}.weight"
            self.shared = ((embedding, f"{self.layers - 1}.lm_head.weight"),)

    def build(self, layer: int) -> nn.Module:
        """Build one layer, with pretrained weights if there are any.

        None are read within `building_uninitialized`, or on the meta device. Raises IndexError if
        there is no such layer, and ConfigError if its weights are missing or do not fit.
        """
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} of a model of {self.layers}")
        with seeded(derive_seed("parameters", self._seed, layer)):
            module = self._build_layer(layer).train()
            is_filled = torch.get_default_device().type != "meta"
            if is_filled:
                self._initialise_weights(module)
            # Buffers stay as they are: angles of positions are always float32.
            for parameter in module.parameters():
                if is_uninitialized():
                    parameter.data = torch.empty_like(parameter, dtype=self._dtype)
                else:
                    parameter.data = parameter.data.to(self._dtype)
            if is_filled and self._weights is not None and not is_uninitialized():
                self._load_pretrained(module, layer, self._weights)
        group = worker_group()
        if group is not None and isinstance(module, DecoderLayer):
            cut_decoder(module, group)
        return module

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Return transformers' own loss: mean cross entropy, plus any balance loss of routers."""
        logits, balance = (output, None) if isinstance(output, Tensor) else output
        # Transformers would copy these logits to float32.
        if logits.dtype in (torch.bfloat16, torch.float16):
            loss = cross_entropy(logits, target)
        else:
            target = target.contiguous()  # the loss function views it flat
            # transformers' own loss, without its shift: targets are shifted already.
            loss = self._sample.loss_function(
                logits=logits,
                labels=target,
                vocab_size=self._config.vocab_size,
                shift_labels=target,
            )
        return loss if balance is None else loss + self._config.router_aux_loss_coef * balance

    def _build_layer(self, layer: int) -> nn.Module:
        base, family, index = self._sample.base_model, self._family, layer - 1
        if layer == 0:
            parts = {name: _copy_module(base.get_submodule(name)) for name in family.embedding}
            return _allocate(Embedding(parts))
        if layer == self.layers - 1:
            norm = _copy_module(base.get_submodule(family.norm))
            lm_head = _copy_module(self._sample.get_output_embeddings())
            return _allocate(Head(family.norm, norm, lm_head))
        # transformers makes each decoder layer by its index, which decides about windows and
        # experts.
        decoder: nn.Module = type(getattr(base, family.decoders)[0])(self._config, index)
        rotary = getattr(base, "rotary_emb", None)
        if rotary is not None:
            rotary = type(rotary)(self._config)
        return DecoderLayer(decoder, rotary, self._config, index, family)

    def _initialise_weights(self, module: nn.Module) -> None:
        whole = copy.copy(self._sample)
        # Deviations depend on the number of layers.
        whole._modules, whole.config = {"part": module}, self._config
        whole.initialize_weights()

    def _load_pretrained(self, module: nn.Module, layer: int, weights: PretrainedWeights) -> None:
        if isinstance(module, DecoderLayer):
            state = weights.read_decoder(layer - 1)
            target: nn.Module = module.layer
            if state.keys() != target.state_dict().keys():
                state = convert_state(
                    type(self._sample), self._config, layer - 1, state, self._name
                )
        else:
            target = module
            endings: dict[str, tuple[str, ...]] = {name: (name,) for name in module.state_dict()}
            if self._config.tie_word_embeddings and "lm_head.weight" in endings:
                # Files have a tied tensor once, as the embedding's or the head's.
                endings["lm_head.weight"] += (f"{self._family.embedding[0]}.weight",)
            state = weights.read_others(endings)
        try:
            target.load_state_dict(state)
        except RuntimeError as error:
            raise ConfigError(
                f"{MODEL_KEY} is {self._name!r}: the weights of layer {layer} do not fit: "
                f"{' '.join(str(error).split())[:300]}"
            ) from None


def transformers_config(document: Mapping[str, Any], name: str) -> PreTrainedConfig:
    """Build the config of transformers from `document`, the content of a config.json.

    Silences transformers, and registers attention and experts with it. Raises ConfigError, which
    contains `name`, if transformers refuses the document.
    """
    defaults = {"attn_implementation": ATTENTION_NAME}
    if FAMILIES[document["model_type"]].experts:
        defaults["experts_implementation"] = EXPERTS_NAME
    register_experts()
    register_attention()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return AutoConfig.for_model(**{**defaults, **document, "use_cache": False})
    except Exception as error:  # each config class raises errors of its own
        raise ConfigError(
            f"{MODEL_KEY} is {name!r}: {type(error).__name__}: {first_line(error)}"
        ) from None


def build_sample(config: PreTrainedConfig, index: int, **changes: object) -> PreTrainedModel:
    """Build, on the meta device, a transformers model with decoder layer `index` alone.

    `changes` replace values of its config. Several threads may call this.
    """
    # transformers sets torch's default dtype meanwhile, which belongs to the process, as the
    # generators do. If two threads did so at the same time, the last to end would leave it changed
    # permanently.
    with GENERATOR_LOCK, torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            single_layer_config(config, index, **changes)
        )
    return model


def single_layer_config(
    config: PreTrainedConfig, index: int, **changes: object
) -> PreTrainedConfig:
    """Return the config of a model with decoder layer `index` alone, and with `changes`."""
    reduced = copy.deepcopy(config)
    kinds = getattr(config, "layer_types", None)
    reduced.num_hidden_layers = 1
    # What the config says by layer must say it of the only layer.
    if kinds is not None:
        reduced.layer_types = [kinds[index]]
    if hasattr(config, "mlp_only_layers"):
        reduced.mlp_only_layers = [0] if is_dense(config, index) else []
        reduced.decoder_sparse_step = 1
    for name, value in changes.items():
        setattr(reduced, name, value)
    return reduced


def small_layer_config(config: PreTrainedConfig, index: int) -> PreTrainedConfig:
    """Return the config of decoder layer `index` alone, with a vocabulary of one token."""
    return single_layer_config(
        config, index, vocab_size=1, pad_token_id=None, bos_token_id=None, eos_token_id=None
    )


def convert_state(
    kind: type[PreTrainedModel],
    config: PreTrainedConfig,
    index: int,
    state: Mapping[str, Tensor],
    name: str,
) -> dict[str, Tensor]:
    """Convert a decoder layer's tensors from their form in files to that of its modules.

    `kind` is the class of the whole model, `index` the number of the decoder layer, and `name` the
    model's name for error messages. In files, experts are separate. Raises ConfigError if the
    tensors do not fit.
    """
    decoders = FAMILIES[config.model_type].decoders
    try:
        # transformers converts tensors only as it loads a model, here of this layer alone.
        model = kind.from_pretrained(
            None,
            config=small_layer_config(config, index),
            dtype=next(iter(state.values())).dtype,
            state_dict={f"model.{decoders}.0.{key}": tensor for key, tensor in state.items()},
        )
    except (RuntimeError, ValueError, StopIteration) as error:
        raise ConfigError(
            f"{MODEL_KEY} is {name!r}: the weights of decoder layer {index} cannot be read: "
            f"{first_line(error)}"
        ) from None
    layer: nn.Module = getattr(model.base_model, decoders)[0]
    return dict(layer.state_dict())


def _copy_module(module: Any) -> nn.Module:
    copied: nn.Module = copy.deepcopy(module)
    return copied


def _allocate(module: nn.Module) -> nn.Module:
    """Move a module from the meta device to torch's default device, uninitialized."""
    device = torch.get_default_device()
    return module if device.type == "meta" else module.to_empty(device=device)
