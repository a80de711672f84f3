"""Convert a model's config.json, as transformers writes it, to the shapes of its layers.

The embedding is the first layer, and the head with the loss is the last one. Between them are the
decoder's layers and those of multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).
Each of the latter holds a copy of the embedding, and the head makes one more prediction for it.
What layers pass on for the further predictions, besides their output, is not counted.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from slipstream.planner.job.model_shape import (
    LayerShape,
    ModelLayers,
    attended_tokens,
    attention_shape,
    combine_named,
    embedding_shape,
    experts_shape,
    feed_forward_shape,
    head_and_loss_shape,
    latent_attention_shape,
    mamba_2_shape,
    norm_shape,
    products_shape,
)
from slipstream.planner.job.toml import JobError, shorten_repr
from slipstream.schedules.files import read_at_most

MAX_CONFIG_BYTES = 2**20
MAX_LAYERS = 1000
MAX_VALUE = 2**24
"""Largest number that is accepted for a key of a model's config.json."""


class ModelKeys:
    """Reader of the keys of a model's config.json, with checks.

    Its methods raise JobError, which names the key, if a value is not as expected.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._values = values
        self._source = source

    def has_value(self, key: str) -> bool:
        """Return whether the key is given and not null."""
        return self._values.get(key) is not None

    def read_count(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """Return the value of a key, an integer from `low` to `MAX_VALUE`.

        If the key is missing, return `default`. Without a default, the key is required.
        """
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= MAX_VALUE:
            raise self.make_error(key, f"a whole number, {low} to {MAX_VALUE}")
        return value

    def read_flag(self, key: str, *, default: bool) -> bool:
        """Return the boolean value of a key; `default` if the key is missing."""
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.make_error(key, "true or false")
        return value

    def read_list(self, key: str, item: type, default: list[Any] | None = None) -> list[Any]:
        """Return the value of a key, a list whose items are of type `item`.

        If the key is missing, return `default`. Without a default, the key is required.
        """
        value = self._values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, list) or not all(isinstance(element, item) for element in value):
            raise self.make_error(key, f"a list of {'texts' if item is str else 'whole numbers'}")
        return value

    def read_text(self, key: str) -> str:
        """Return the value of a key, a string."""
        value = self._values.get(key)
        if not isinstance(value, str):
            raise self.make_error(key, "a text")
        return value

    def is_automatic(self, key: str) -> bool:
        """Return whether the key is missing or "auto", so that its value follows from others."""
        return self._values.get(key) in (None, "auto")

    def make_error(self, key: str, expected: str) -> JobError:
        """Return an error that names the key, its value and what was expected."""
        return JobError(
            f"{self._source}: {key} is {shorten_repr(self._values.get(key))}; expected {expected}"
        )


def read_model(path: Path, sequence: int) -> ModelLayers:
    """Read the layers of a model from its config.json, or from the folder with it.

    Training sequences have `sequence` tokens. Raises JobError if the file cannot be read, the kind
    of model is unknown, or a value is not as expected.
    """
    source = path / "config.json" if path.is_dir() else path
    try:
        document = json.loads(
            read_at_most(source, MAX_CONFIG_BYTES, JobError, "; a config.json is a page of JSON")
        )
    except (ValueError, RecursionError) as error:
        if isinstance(error, JobError):
            raise
        raise JobError(f"{source}: not JSON; expected a model's config.json") from None
    return model_layers(document, sequence, str(source))


def model_layers(document: object, sequence: int, source: str = "config.json") -> ModelLayers:
    """Return the layers of a model, given the parsed content of its config.json.

    Training sequences have `sequence` tokens. `source` names the file in errors. Raises JobError if
    the kind of model is unknown or a value is not as expected.
    """
    if not isinstance(document, dict):
        raise JobError(f"{source}: not a JSON object; expected a model's config.json")
    # the language part of a model that also sees images
    if isinstance(document.get("text_config"), dict):
        document = {
            "tie_word_embeddings": document.get("tie_word_embeddings"),
            **document["text_config"],
        }
    # The family decides which keys there are, and what they mean.
    family, keys = document.get("model_type"), ModelKeys(document, source)
    if not isinstance(family, str) or family not in FAMILIES:
        raise keys.make_error("model_type", f"one of {', '.join(FAMILIES)}")
    hidden, vocabulary = keys.read_count("hidden_size"), keys.read_count("vocab_size")
    decoder = FAMILIES[family](keys, hidden, sequence)
    if len(decoder) > MAX_LAYERS:
        raise JobError(f"{source}: {len(decoder)} layers; expected at most {MAX_LAYERS}")
    tied = keys.read_flag("tie_word_embeddings", default=family in TIED)
    more = keys.read_count("num_nextn_predict_layers", 0, low=0) if family in PREDICTING else 0
    if more > MAX_LAYERS:
        raise keys.make_error("num_nextn_predict_layers", f"a whole number, 0 to {MAX_LAYERS}")
    # A layer of multi-token prediction: norms and a product join the last output with the embedding
    # of the next token, and a decoder layer follows.
    lookup = embedding_shape(hidden, vocabulary)
    predicting = [
        combine_named(
            "multi-token prediction",
            lookup,
            norm_shape(hidden),
            norm_shape(hidden),
            norm_shape(hidden),
            products_shape(2 * hidden, hidden),
            decoder[-1],
            recomputed=4 * hidden,
        )
    ] * more
    layers = (
        lookup,
        *decoder,
        *predicting,
        head_and_loss_shape(hidden, vocabulary, predicted=1 + more),
    )
    return ModelLayers(
        layers=layers, hidden=hidden, sequence=sequence, copies=(tied + more) * lookup.parameters
    )


def _read_layer_count(keys: ModelKeys) -> int:
    count = keys.read_count("num_hidden_layers")
    if count > MAX_LAYERS:
        raise keys.make_error("num_hidden_layers", f"a whole number, 1 to {MAX_LAYERS}")
    return count


def _read_layer_kinds(keys: ModelKeys, key: str, default: list[str] | None = None) -> list[str]:
    """Read each decoder layer's kind from the list `key`; `default` if there is none."""
    kinds: list[str] = keys.read_list(key, str, default)
    if len(kinds) != _read_layer_count(keys):
        raise keys.make_error(
            key, f"{_read_layer_count(keys)} kinds of layers, as num_hidden_layers says"
        )
    return kinds


def _read_attention(
    keys: ModelKeys,
    hidden: int,
    tokens: float,
    *,
    bias: bool | None = None,
    head_norms: bool = False,
    output_bias: bool | None = None,
) -> LayerShape:
    """Read the shape of an attention layer; `tokens` is the result of `attended_tokens`."""
    heads = keys.read_count("num_attention_heads")
    kv_heads = keys.read_count("num_key_value_heads", heads)
    width = keys.read_count("head_dim", max(1, hidden // heads))
    if heads % kv_heads or (hidden % heads and not keys.has_value("head_dim")):
        raise keys.make_error(
            "num_attention_heads",
            "a number that num_key_value_heads divides, and that divides "
            "hidden_size where there is no head_dim",
        )
    # Without a value from the caller, the file decides; `output_bias` of None follows `bias`.
    if bias is None:
        bias = keys.read_flag("attention_bias", default=False)
    return attention_shape(
        hidden,
        heads,
        kv_heads,
        width,
        tokens,
        bias=bias,
        head_norms=width if head_norms else 0,
        output_bias=bias if output_bias is None else output_bias,
    )


def _read_attended_tokens(keys: ModelKeys, kind: str, sequence: int) -> float:
    """Return a layer's `attended_tokens`; only "sliding_attention" is limited to a window."""
    window = keys.read_count("sliding_window") if kind == "sliding_attention" else None
    return attended_tokens(sequence, window)


def _transformer_reader(
    bias: bool | None = None, *, head_norms: bool = False
) -> Callable[[ModelKeys, int, int], list[LayerShape]]:
    """Return a reader of decoder layers like Llama's; `bias` of None: the file decides."""

    def read_layers(keys: ModelKeys, hidden: int, sequence: int) -> list[LayerShape]:
        # Qwen's files have a window that is used only if they say so; in others, a window is used.
        window = (
            keys.read_count("sliding_window")
            if keys.has_value("sliding_window")
            and keys.read_flag("use_sliding_window", default=bias is None and not head_norms)
            else None
        )
        mixer = _read_attention(
            keys,
            hidden,
            attended_tokens(sequence, window),
            bias=bias,
            head_norms=head_norms,
            output_bias=None if bias is None else False,
        )
        dense = feed_forward_shape(
            hidden,
            keys.read_count("intermediate_size"),
            gated=True,
            bias=keys.read_flag("mlp_bias", default=False),
        )
        return [
            combine_named(
                "attention + MLP",
                norm_shape(hidden),
                mixer,
                norm_shape(hidden),
                dense,
                recomputed=2 * hidden,
            )
        ] * _read_layer_count(keys)

    return read_layers


def _gemma_reader(
    norms: int, *, head_norms: bool = False, pattern: int = 1
) -> Callable[[ModelKeys, int, int], list[LayerShape]]:
    """Return a reader of Gemma's layers with `norms` norms; every `pattern`-th attends to all."""

    def read_layers(keys: ModelKeys, hidden: int, sequence: int) -> list[LayerShape]:
        # All layers except every `every`-th attend to a window only.
        every = keys.read_count("sliding_window_pattern", pattern)
        default = []
        for layer in range(_read_layer_count(keys)):
            default.append("sliding_attention" if (layer + 1) % every else "full_attention")
        kinds = _read_layer_kinds(keys, "layer_types", default)
        dense = feed_forward_shape(hidden, keys.read_count("intermediate_size"), gated=True)
        return [
            combine_named(
                f"{kind.replace('_', ' ')} + MLP",
                *[norm_shape(hidden)] * norms,
                _read_attention(
                    keys, hidden, _read_attended_tokens(keys, kind, sequence), head_norms=head_norms
                ),
                dense,
                recomputed=2 * hidden,
            )
            for kind in kinds
        ]

    return read_layers


def _mixture_reader(
    number: str,
    width: str,
    *,
    bias: bool | None = None,
    head_norms: bool = False,
    shared: bool = False,
) -> Callable[[ModelKeys, int, int], list[LayerShape]]:
    """Return a reader of layers with experts; `number` and `width` name keys of config.json."""

    def read_layers(keys: ModelKeys, hidden: int, sequence: int) -> list[LayerShape]:
        mixer = _read_attention(
            keys,
            hidden,
            attended_tokens(sequence, None),
            bias=bias,
            head_norms=head_norms,
            output_bias=None if bias is None else False,
        )
        sparse_part = experts_shape(
            hidden,
            keys.read_count(width),
            number=keys.read_count(number),
            gated=True,
            chosen=keys.read_count("num_experts_per_tok"),
        )
        # An expert that all tokens use, with a gate of one value.
        if shared:
            width_of_shared = keys.read_count("shared_expert_intermediate_size")
            sparse_part += feed_forward_shape(hidden, width_of_shared, gated=True) + products_shape(
                hidden, 1
            )
        # Every `step`-th layer has experts, except for those that the file lists as dense.
        dense = set(keys.read_list("mlp_only_layers", int, []))
        step = keys.read_count("decoder_sparse_step", 1)
        found = []
        for layer in range(_read_layer_count(keys)):
            sparse = layer not in dense and (layer + 1) % step == 0
            part = (
                sparse_part
                if sparse
                else feed_forward_shape(hidden, keys.read_count("intermediate_size"), gated=True)
            )
            found.append(
                combine_named(
                    f"attention + {'experts' if sparse else 'MLP'}",
                    norm_shape(hidden),
                    mixer,
                    norm_shape(hidden),
                    part,
                    recomputed=2 * hidden,
                )
            )
        return found

    return read_layers


def _deepseek_reader(*, router_bias: bool) -> Callable[[ModelKeys, int, int], list[LayerShape]]:
    """Return a reader of DeepSeek's layers; in V3, the router of experts has a bias."""

    def read_layers(keys: ModelKeys, hidden: int, sequence: int) -> list[LayerShape]:
        # All layers have the same attention.
        mixer = latent_attention_shape(
            hidden,
            keys.read_count("num_attention_heads"),
            attended_tokens(sequence, None),
            kv_rank=keys.read_count("kv_lora_rank"),
            query_rank=keys.read_count("q_lora_rank") if keys.has_value("q_lora_rank") else None,
            rotary=keys.read_count("qk_rope_head_dim"),
            plain=keys.read_count("qk_nope_head_dim"),
            value=keys.read_count("v_head_dim"),
        )
        width = keys.read_count("moe_intermediate_size")
        sparse = experts_shape(
            hidden,
            width,
            number=keys.read_count("n_routed_experts"),
            gated=True,
            router_bias=router_bias,
            chosen=keys.read_count("num_experts_per_tok"),
        ) + feed_forward_shape(hidden, width * keys.read_count("n_shared_experts", 1), gated=True)
        # The first layers are dense, all others have experts, some of which all tokens use.
        dense = feed_forward_shape(hidden, keys.read_count("intermediate_size"), gated=True)
        first = keys.read_count("first_k_dense_replace", 0, low=0)
        layers = []
        for layer in range(_read_layer_count(keys)):
            name, part = ("MLP", dense) if layer < first else ("experts", sparse)
            layers.append(
                combine_named(
                    f"latent attention + {name}",
                    norm_shape(hidden),
                    mixer,
                    norm_shape(hidden),
                    part,
                    recomputed=2 * hidden,
                )
            )
        return layers

    return read_layers


def _read_nemotron_h(keys: ModelKeys, hidden: int, sequence: int) -> list[LayerShape]:
    """Read the layers of Nemotron-H (arXiv 2504.03624), each of one of four kinds."""
    # Files name kinds by letters in one text, or by words in a list.
    names = {
        "M": "mamba",
        "*": "attention",
        "-": "mlp",
        "E": "moe",
        "linear_attention": "mamba",
        "full_attention": "attention",
    }
    key = (
        "hybrid_override_pattern"
        if keys.has_value("hybrid_override_pattern")
        else "layers_block_type"
    )
    pattern = (
        list(keys.read_text(key)) if key == "hybrid_override_pattern" else keys.read_list(key, str)
    )
    # Functions, because a file has only the keys of the kinds that it uses.
    makers: Mapping[str, Callable[[], LayerShape]] = {
        "mamba": lambda: _read_mamba(
            keys,
            hidden,
            heads="mamba_num_heads",
            width="mamba_head_dim",
            groups="n_groups",
            state="ssm_state_size",
            kernel="conv_kernel",
            chunk="chunk_size",
            convolution_bias="use_conv_bias",
        ),
        "attention": lambda: _read_attention(keys, hidden, attended_tokens(sequence, None)),
        "mlp": lambda: feed_forward_shape(
            hidden,
            keys.read_count("intermediate_size"),
            gated=False,
            bias=keys.read_flag("mlp_bias", default=False),
        ),
        "moe": lambda: (
            experts_shape(
                hidden,
                keys.read_count("moe_intermediate_size"),
                number=keys.read_count("n_routed_experts"),
                chosen=keys.read_count("num_experts_per_tok"),
                gated=False,
                router_bias=True,
            )
            + feed_forward_shape(
                hidden, keys.read_count("moe_shared_expert_intermediate_size"), gated=False
            )
        ),
    }
    kinds = [names.get(name, name) for name in pattern]
    if not kinds or not set(kinds) <= makers.keys() or len(kinds) > MAX_LAYERS:
        raise keys.make_error(key, f"1 to {MAX_LAYERS} layers, each {', '.join(names)}")
    # Refused, because an estimate without these products would be wrong in silence.
    if keys.has_value("moe_latent_size"):
        raise keys.make_error(
            "moe_latent_size", "no value: experts with a latent width are not supported"
        )
    shown = {"mamba": "Mamba-2", "attention": "attention", "mlp": "MLP", "moe": "experts"}
    # Layers of one kind are equal, and share a shape.
    shapes = {
        kind: combine_named(shown[kind], norm_shape(hidden), makers[kind](), recomputed=2 * hidden)
        for kind in set(kinds)
    }
    return [shapes[kind] for kind in kinds]


def _read_mamba(
    keys: ModelKeys,
    hidden: int,
    *,
    heads: str,
    width: str,
    groups: str,
    state: str,
    kernel: str,
    chunk: str,
    convolution_bias: str,
) -> LayerShape:
    """Read the shape of a Mamba-2 mixer; the arguments after `hidden` name its keys."""
    number = keys.read_count(heads)
    # The width of a head follows from the model's, unless it is given.
    each = (
        hidden * keys.read_count("mamba_expand", 2) // number
        if keys.is_automatic(width)
        else keys.read_count(width)
    )
    return mamba_2_shape(
        hidden,
        heads=number,
        head_width=each,
        groups=keys.read_count(groups, 1),
        state=keys.read_count(state),
        kernel=keys.read_count(kernel, 4),
        chunk=keys.read_count(chunk, 256),
        convolution_bias=keys.read_flag(convolution_bias, default=True),
        bias=keys.read_flag("mamba_proj_bias", default=False),
    )


def _read_granite_hybrid(keys: ModelKeys, hidden: int, sequence: int) -> list[LayerShape]:
    """Read the layers of Granite 4 and Bamba."""
    count = _read_layer_count(keys)
    # Granite lists the kind of each layer, Bamba the layers with attention.
    if keys.has_value("layer_types"):
        kinds = _read_layer_kinds(keys, "layer_types")
    else:
        attending = set(keys.read_list("attn_layer_indices", int, []))
        kinds = []
        for layer in range(count):
            kinds.append("attention" if layer in attending else "mamba")
    names = {
        "attention": "attention",
        "full_attention": "attention",
        "mamba": "Mamba-2",
        "linear_attention": "Mamba-2",
    }
    if not set(kinds) <= names.keys():
        raise keys.make_error("layer_types", f"each one of {', '.join(names)}")
    # Granite's MLP is the expert that all tokens use, beside others or alone.
    if keys.has_value("shared_intermediate_size"):
        dense = feed_forward_shape(hidden, keys.read_count("shared_intermediate_size"), gated=True)
        number = keys.read_count("num_local_experts", 0, low=0)
        part = (
            dense
            + experts_shape(
                hidden,
                keys.read_count("intermediate_size"),
                number=number,
                gated=True,
                chosen=keys.read_count("num_experts_per_tok"),
            )
            if number
            else dense
        )
    else:
        number = 0
        part = feed_forward_shape(
            hidden,
            keys.read_count("intermediate_size"),
            gated=True,
            bias=keys.read_flag("mlp_bias", default=False),
        )
    # A layer is a mixer, attention or Mamba-2, followed by an MLP or by experts with a shared one.
    mixers = {
        "attention": _read_attention(keys, hidden, attended_tokens(sequence, None)),
        "Mamba-2": _read_mamba(
            keys,
            hidden,
            heads="mamba_n_heads",
            width="mamba_d_head",
            groups="mamba_n_groups",
            state="mamba_d_state",
            kernel="mamba_d_conv",
            chunk="mamba_chunk_size",
            convolution_bias="mamba_conv_bias",
        ),
    }
    feed_forward = "experts" if number else "MLP"
    return [
        combine_named(
            f"{names[kind]} + {feed_forward}",
            norm_shape(hidden),
            mixers[names[kind]],
            norm_shape(hidden),
            part,
            recomputed=2 * hidden,
        )
        for kind in kinds
    ]


FAMILIES: Mapping[str, Callable[[ModelKeys, int, int], list[LayerShape]]] = {
    "llama": _transformer_reader(),
    "mistral": _transformer_reader(),
    "qwen2": _transformer_reader(bias=True),
    "qwen3": _transformer_reader(head_norms=True),
    "gemma": _gemma_reader(2),
    "gemma2": _gemma_reader(4, pattern=2),
    "gemma3_text": _gemma_reader(4, head_norms=True, pattern=6),
    "mixtral": _mixture_reader("num_local_experts", "intermediate_size"),
    "qwen2_moe": _mixture_reader("num_experts", "moe_intermediate_size", bias=True, shared=True),
    "qwen3_moe": _mixture_reader("num_experts", "moe_intermediate_size", head_norms=True),
    "deepseek_v2": _deepseek_reader(router_bias=False),
    "deepseek_v3": _deepseek_reader(router_bias=True),
    "nemotron_h": _read_nemotron_h,
    "granitemoehybrid": _read_granite_hybrid,
    "bamba": _read_granite_hybrid,
}
"""Functions that read a model's decoder layers from its config.json, by `model_type`.

Their arguments are the keys, the model's width, and the length of a sequence in tokens.
"""
TIED = frozenset({"gemma", "gemma2", "gemma3_text"})
"""Model types whose head uses the embedding's weights unless the file says otherwise."""
PREDICTING = frozenset({"deepseek_v3"})
"""Model types whose decoder is followed by `num_nextn_predict_layers` further layers.

These layers are for multi-token prediction.
"""
