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
    """Model that `[model] hugging_face` names, a `LayeredModel`.

    Attention is scaled_dot_product_attention for each document separately, and experts run as
    grouped products (`runtime.models.hugging_face.registered`); `[model.options]` can name other
    implementations. Raises ConfigError if the model cannot be used.
    """

    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        assert config.hugging_face is not None
        self._name, self._seed, self._dtype, self.device = config.hugging_face, seed, dtype, device
        document = read_config(config)
        self._config = transformers_config(document, self._name)
        self._family = FAMILIES[document["model_type"]]
        for key in config.options:
            if key not in _RUN_KEYS and not hasattr(AutoConfig.for_model(document["model_type"]), key):
                raise ConfigError(f"unknown key model.options.{key}; expected keys of the model's config.json, "
                                  f"{' or '.join(_RUN_KEYS)}")
        self.layers = self._config.num_hidden_layers + 2
        places = self._config.max_position_embeddings
        if config.context > places:
            raise ConfigError(f"model.context is {config.context}; the model of {MODEL_KEY} has {places} positions")
        folder = weights_folder(self._name)
        self._weights = None if folder is None else PretrainedWeights(folder, self._family)
        self._sample = build_sample(self._config, 0)
        group = worker_group()
        if group is not None:
            require_even_cut(self._config, group.size())
        self.shared = ((f"0.{self._family.embedding[0]}.weight", f"{self.layers - 1}.lm_head.weight"),) \
            if self._config.tie_word_embeddings else ()

    def build(self, layer: int) -> nn.Module:
        """Build one layer, with pretrained weights if there are any. Raises IndexError if the model
        has no such layer, and ConfigError if the weights are missing or do not fit."""
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} of a model of {self.layers}")
        with seeded(derive_seed("parameters", self._seed, layer)):
            module, is_filled = self._build_layer(layer).train(), torch.get_default_device().type != "meta"
            if is_filled:
                self._initialise_weights(module)
            for parameter in module.parameters():  # buffers stay as they are: angles of positions are always float32
                parameter.data = torch.empty_like(parameter, dtype=self._dtype) if is_uninitialized() \
                    else parameter.data.to(self._dtype)
            if is_filled and self._weights is not None and not is_uninitialized():
                self._load_pretrained(module, layer, self._weights)
        group = worker_group()
        if group is not None and isinstance(module, DecoderLayer):
            cut_decoder(module, group)
        return module

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """Return transformers' own loss: mean cross entropy, plus any balance loss of routers."""
        logits, balance = (output, None) if isinstance(output, Tensor) else output
        if logits.dtype in (torch.bfloat16, torch.float16):  # transformers would copy these logits to float32
            loss = cross_entropy(logits, target)
        else:
            target = target.contiguous()  # the loss function views it flat
            loss = self._sample.loss_function(logits=logits, labels=target, vocab_size=self._config.vocab_size,
                                              shift_labels=target)
        return loss if balance is None else loss + self._config.router_aux_loss_coef * balance

    def _build_layer(self, layer: int) -> nn.Module:
        """Build layer number `layer` with uninitialized parameters."""
        base, family, index = self._sample.base_model, self._family, layer - 1
        if layer == 0:
            return _allocate(Embedding({name: _copy_module(base.get_submodule(name)) for name in family.embedding}))
        if layer == self.layers - 1:
            return _allocate(Head(family.norm, _copy_module(base.get_submodule(family.norm)),
                                  _copy_module(self._sample.get_output_embeddings())))
        kind, rotary = type(getattr(base, family.decoders)[0]), getattr(base, "rotary_emb", None)
        inner: nn.Module = kind(self._config, index)
        return DecoderLayer(inner, None if rotary is None else type(rotary)(self._config), self._config, index, family)

    def _initialise_weights(self, module: nn.Module) -> None:
        """Draw initial values for a layer, as transformers does for the whole model."""
        whole = copy.copy(self._sample)
        whole._modules, whole.config = {"part": module}, self._config  # deviations depend on the number of layers
        whole.initialize_weights()

    def _load_pretrained(self, module: nn.Module, layer: int, weights: PretrainedWeights) -> None:
        """Load the pretrained weights of a layer. Raises ConfigError if they do not fit."""
        if isinstance(module, DecoderLayer):
            state = weights.read_decoder(layer - 1)
            target: nn.Module = module.layer
            if state.keys() != target.state_dict().keys():
                state = convert_state(type(self._sample), self._config, layer - 1, state, self._name)
        else:
            target = module
            tied = (f"{self._family.embedding[0]}.weight",) if self._config.tie_word_embeddings else ()
            state = weights.read_others({name: (name, *(tied if name == "lm_head.weight" else ()))
                                         for name in module.state_dict()})
        try:
            target.load_state_dict(state)
        except RuntimeError as error:
            raise ConfigError(f"{MODEL_KEY} is {self._name!r}: the weights of layer {layer} do not fit: "
                              f"{' '.join(str(error).split())[:300]}") from None


def transformers_config(document: Mapping[str, Any], name: str) -> PreTrainedConfig:
    """Build the transformers config that `document`, the content of a config.json, describes.

    Raises ConfigError, which contains `name`, if transformers refuses it. Silences the log messages
    and progress bars of transformers from then on.
    """
    chosen = {"experts_implementation": EXPERTS_NAME} if FAMILIES[document["model_type"]].experts else {}
    register_experts()
    register_attention()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return AutoConfig.for_model(**{"attn_implementation": ATTENTION_NAME, **chosen, **document,
                                       "use_cache": False})
    except Exception as error:  # each config class raises errors of its own
        raise ConfigError(f"{MODEL_KEY} is {name!r}: {type(error).__name__}: {first_line(error)}") from None


def build_sample(config: PreTrainedConfig, index: int, **changes: object) -> PreTrainedModel:
    """Build a transformers model with one decoder layer, of `index`, on the meta device. Its config
    is changed by `changes`. Several threads may call this."""
    # transformers sets torch's default dtype meanwhile, which belongs to the process, as the generators do. If two
    # threads did so at the same time, the last to end would leave it changed permanently.
    with GENERATOR_LOCK, torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(single_layer_config(config, index, **changes))
    return model


def single_layer_config(config: PreTrainedConfig, index: int, **changes: object) -> PreTrainedConfig:
    """Return the config of a model with one decoder layer, of `index`, and with `changes`."""
    reduced = copy.deepcopy(config)
    kinds = getattr(config, "layer_types", None)
    reduced.num_hidden_layers = 1
    if kinds is not None:
        reduced.layer_types = [kinds[index]]
    if hasattr(config, "mlp_only_layers"):
        reduced.mlp_only_layers, reduced.decoder_sparse_step = [0] if is_dense(config, index) else [], 1
    for name, value in changes.items():
        setattr(reduced, name, value)
    return reduced


def small_layer_config(config: PreTrainedConfig, index: int) -> PreTrainedConfig:
    """Return the config of one decoder layer, with a vocabulary of one token."""
    return single_layer_config(config, index, vocab_size=1, pad_token_id=None, bos_token_id=None, eos_token_id=None)


def convert_state(kind: type[PreTrainedModel], config: PreTrainedConfig, index: int, state: Mapping[str, Tensor],
                  name: str) -> dict[str, Tensor]:
    """Return a decoder layer's tensors as its modules have them, from their form in files.

    Raises ConfigError if the tensors do not fit.

    Parameters
    ----------
    kind
        Class of the whole model.
    state
        Tensors in their form in files, where experts are separate.
    name
        Name of the model, for error messages.
    """
    decoders = FAMILIES[config.model_type].decoders
    try:
        model = kind.from_pretrained(
            None, config=small_layer_config(config, index), dtype=next(iter(state.values())).dtype,
            state_dict={f"model.{decoders}.0.{key}": tensor for key, tensor in state.items()})
    except (RuntimeError, ValueError, StopIteration) as error:
        raise ConfigError(f"{MODEL_KEY} is {name!r}: the weights of decoder layer {index} cannot be read: "
                          f"{first_line(error)}") from None
    layer: nn.Module = getattr(model.base_model, decoders)[0]
    return dict(layer.state_dict())


def _copy_module(module: Any) -> nn.Module:
    copied: nn.Module = copy.deepcopy(module)
    return copied


def _allocate(module: nn.Module) -> nn.Module:
    """Move a module from the meta device to torch's default device, uninitialized."""
    device = torch.get_default_device()
    return module if device.type == "meta" else module.to_empty(device=device)
