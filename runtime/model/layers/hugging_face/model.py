"""A decoder model of transformers as a `LayeredModel`: the embedding, then the decoder layers, then the head."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from slipstream.runtime.config import ConfigError, ModelConfig
from slipstream.runtime.errors import first_line
from slipstream.runtime.model.layers.cross_entropy import cross_entropy
from slipstream.runtime.model.layers.hugging_face import attention, experts
from slipstream.runtime.model.layers.hugging_face.configuration import FAMILIES, KEY, folder_of, is_dense, read_config
from slipstream.runtime.model.layers.hugging_face.layers import DecoderLayer, Embedding, Head
from slipstream.runtime.model.layers.hugging_face.layers import router_of as router_of
from slipstream.runtime.model.layers.hugging_face.parallel import cut_over, require_even_cut
from slipstream.runtime.model.layers.hugging_face.weights import Weights
from slipstream.runtime.model.layers.unfilled import is_unfilled
from slipstream.runtime.model.layers.worker_group import worker_group
from slipstream.runtime.model.seeds import GENERATORS, derive_seed, seeded

_RUNNING = ("attn_implementation", "experts_implementation")
"""Keys that say how a model is run."""


class HuggingFace:
    """What `[model] hugging_face` names; see `runtime.model.layers.layered_model.LayeredModel`.

    Attention is scaled_dot_product_attention, document by document, and experts run as their module says
    (`runtime.model.layers.hugging_face.attention`, `.experts`); `[model.options]` can name others. Raises ConfigError.
    """

    def __init__(self, config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        assert config.hugging_face is not None
        self._name, self._seed, self._dtype, self.device = config.hugging_face, seed, dtype, device
        document = read_config(config)
        self._config = transformers_config(document, self._name)
        self._family = FAMILIES[document["model_type"]]
        for key in config.options:
            if key not in _RUNNING and not hasattr(AutoConfig.for_model(document["model_type"]), key):
                raise ConfigError(f"unknown key model.options.{key}; expected keys of the model's config.json, "
                                  f"{' or '.join(_RUNNING)}")
        self.layers = self._config.num_hidden_layers + 2
        places = self._config.max_position_embeddings
        if config.context > places:
            raise ConfigError(f"model.context is {config.context}; the model of {KEY} has {places} positions")
        folder = folder_of(self._name)
        self._weights = None if folder is None else Weights(folder, self._family)
        self._sample = sample(self._config, 0)
        group = worker_group()
        if group is not None:
            require_even_cut(self._config, group.size())
        self.shared = ((f"0.{self._family.embedding[0]}.weight", f"{self.layers - 1}.lm_head.weight"),) \
            if self._config.tie_word_embeddings else ()

    def build(self, layer: int) -> nn.Module:
        """Make one layer, with pretrained weights where there are any. Raises IndexError and ConfigError."""
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} of a model of {self.layers}")
        with seeded(derive_seed("parameters", self._seed, layer)):
            module, is_filled = self._made(layer).train(), torch.get_default_device().type != "meta"
            if is_filled:
                self._initialise(module)
            for parameter in module.parameters():  # buffers stay as they are: angles of positions are float32 always
                parameter.data = torch.empty_like(parameter, dtype=self._dtype) if is_unfilled() \
                    else parameter.data.to(self._dtype)
            if is_filled and self._weights is not None and not is_unfilled():
                self._load(module, layer, self._weights)
        group = worker_group()
        if group is not None and isinstance(module, DecoderLayer):
            cut_over(module, group)
        return module

    def loss(self, output: Any, target: Tensor) -> Tensor:
        """transformers' own loss: cross entropy, mean over tokens, and that of routers where they have one."""
        logits, balance = (output, None) if isinstance(output, Tensor) else output
        if logits.dtype in (torch.bfloat16, torch.float16):  # of which transformers would make a float32 copy
            loss = cross_entropy(logits, target)
        else:
            target = target.contiguous()  # which is viewed flat
            loss = self._sample.loss_function(logits=logits, labels=target, vocab_size=self._config.vocab_size,
                                              shift_labels=target)
        return loss if balance is None else loss + self._config.router_aux_loss_coef * balance

    def _made(self, layer: int) -> nn.Module:
        """A layer whose tensors hold anything."""
        base, family, index = self._sample.base_model, self._family, layer - 1
        if layer == 0:
            return _emptied(Embedding({name: _copy(base.get_submodule(name)) for name in family.embedding}))
        if layer == self.layers - 1:
            return _emptied(Head(family.norm, _copy(base.get_submodule(family.norm)),
                                 _copy(self._sample.get_output_embeddings())))
        kind, rotary = type(getattr(base, family.decoders)[0]), getattr(base, "rotary_emb", None)
        made: nn.Module = kind(self._config, index)
        return DecoderLayer(made, None if rotary is None else type(rotary)(self._config), self._config, index, family)

    def _initialise(self, module: nn.Module) -> None:
        """As transformers does: its model walks over what is a part of it for the moment."""
        whole = copy.copy(self._sample)
        whole._modules, whole.config = {"part": module}, self._config  # deviations depend on the number of layers
        whole.initialize_weights()

    def _load(self, module: nn.Module, layer: int, weights: Weights) -> None:
        if isinstance(module, DecoderLayer):
            state = weights.decoder(layer - 1)
            target: nn.Module = module.layer
            if state.keys() != target.state_dict().keys():
                state = converted(type(self._sample), self._config, layer - 1, state, self._name)
        else:
            target = module
            tied = (f"{self._family.embedding[0]}.weight",) if self._config.tie_word_embeddings else ()
            state = weights.others({name: (name, *(tied if name == "lm_head.weight" else ()))
                                    for name in module.state_dict()})
        try:
            target.load_state_dict(state)
        except RuntimeError as error:
            raise ConfigError(f"{KEY} is {self._name!r}: the weights of layer {layer} do not fit: "
                              f"{' '.join(str(error).split())[:300]}") from None


def transformers_config(document: Mapping[str, Any], name: str) -> PreTrainedConfig:
    """The config of transformers that a config.json describes. transformers is quiet from then on. Raises ConfigError.
    """
    chosen = {"experts_implementation": experts.NAME} if FAMILIES[document["model_type"]].experts else {}
    experts.register()
    attention.register()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return AutoConfig.for_model(**{"attn_implementation": attention.NAME, **chosen, **document, "use_cache": False})
    except Exception as error:  # each class checks its own
        raise ConfigError(f"{KEY} is {name!r}: {type(error).__name__}: {first_line(error)}") from None


def sample(config: PreTrainedConfig, index: int, **changes: object) -> PreTrainedModel:
    """The model with one decoder layer, that at `index`, on the meta device. May be called from several threads."""
    # transformers sets torch's default dtype meanwhile, which belongs to the process, as the generators do. Of two
    # threads that do so at a time, the last to end would leave it changed for good.
    with GENERATORS, torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(single(config, index, **changes))
    return model


def single(config: PreTrainedConfig, index: int, **changes: object) -> PreTrainedConfig:
    """The config of a model that has one decoder layer only, that at `index`."""
    one = copy.deepcopy(config)
    kinds = getattr(config, "layer_types", None)
    one.num_hidden_layers = 1
    if kinds is not None:
        one.layer_types = [kinds[index]]
    if hasattr(config, "mlp_only_layers"):
        one.mlp_only_layers, one.decoder_sparse_step = [0] if is_dense(config, index) else [], 1
    for name, value in changes.items():
        setattr(one, name, value)
    return one


def small(config: PreTrainedConfig, index: int) -> PreTrainedConfig:
    """`single`, with next to no vocabulary: what is of interest is the decoder layer."""
    return single(config, index, vocab_size=1, pad_token_id=None, bos_token_id=None, eos_token_id=None)


def converted(kind: type[PreTrainedModel], config: PreTrainedConfig, index: int, state: Mapping[str, Tensor],
              name: str) -> dict[str, Tensor]:
    """A decoder layer's tensors as its modules have them, from how files have them: experts lie there one by one."""
    decoders = FAMILIES[config.model_type].decoders
    try:
        model = kind.from_pretrained(
            None, config=small(config, index), dtype=next(iter(state.values())).dtype,
            state_dict={f"model.{decoders}.0.{key}": tensor for key, tensor in state.items()})
    except (RuntimeError, ValueError, StopIteration) as error:
        raise ConfigError(f"{KEY} is {name!r}: the weights of decoder layer {index} cannot be read: "
                          f"{first_line(error)}") from None
    layer: nn.Module = getattr(model.base_model, decoders)[0]
    return dict(layer.state_dict())


def _copy(module: Any) -> nn.Module:
    made: nn.Module = copy.deepcopy(module)
    return made


def _emptied(module: nn.Module) -> nn.Module:
    """Off the meta device, unless that is the default."""
    device = torch.get_default_device()
    return module if device.type == "meta" else module.to_empty(device=device)
