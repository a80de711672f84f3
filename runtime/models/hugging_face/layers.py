"""Use transformers' own modules as layers: embedding, each decoder layer, norm and head.

Positions and masks are built from the `position_ids` or `attention_mask` of the micro-batch. If
data give neither, positions are consecutive and attention is causal. If routers balance the load of
experts, their counts pass from layer to layer, because transformers computes the balance loss from
the means over all layers.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from slipstream.runtime.models.calling import Batch, positions_of
from slipstream.runtime.models.hugging_face.configuration import Family
from slipstream.runtime.models.hugging_face.registered import needs_no_document_mask
from slipstream.runtime.models.recomputing import Part, recomputable


class RoutedFeatures(NamedTuple):
    """Features [B, T, C], and counts of the experts chosen in the layers so far."""

    features: Tensor
    chosen: Tensor
    """Tokens with each expert as their first, second, ... choice so far: int64 [k, E]."""
    wanted: Tensor
    """Sum of each expert's probabilities, over tokens and layers so far: float32 [E]."""


class Embedding(nn.Module):
    """Layer that embeds tokens, and positions if the model has such an embedding."""

    def __init__(self, parts: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self._names = tuple(parts)

    def forward(self, tokens: Tensor, batch: Batch | None = None) -> Tensor:
        """Embed tokens [B, T] as features [B, T, C]."""
        of_tokens, *more = (self.get_submodule(name) for name in self._names)
        features: Tensor = of_tokens(tokens)
        if more:
            of_positions, drop = more
            features = drop(features + of_positions(_position_ids(tokens, batch)))
        return features


class DecoderLayer(nn.Module):
    """Decoder layer of transformers, given positions and masks from the micro-batch.

    `rotary` turns positions into angles; None: the model embeds positions in layer 0.
    """

    def __init__(
        self,
        layer: nn.Module,
        rotary: nn.Module | None,
        config: PreTrainedConfig,
        index: int,
        family: Family,
    ) -> None:
        super().__init__()
        self.layer = layer
        names: dict[Part, str] = {"attention": family.attention, "mlp": family.mlp}
        # transformers has no call for recomputing a part, so the parts get another class.
        for part, name in names.items():
            submodule: Any = layer.get_submodule(name)
            kind: Any = type(submodule)
            submodule.__class__ = _recomputable_class(part, kind)
        self.rotary = rotary
        self._config = config
        self._slides = _has_sliding_window(config, index)
        self._mask = create_sliding_window_causal_mask if self._slides else create_causal_mask
        self._balances = bool(getattr(config, "output_router_logits", False))

    @property
    def compiled_part(self) -> nn.Module:
        """Module that `runtime.models.compiling` compiles: the decoder layer of transformers.

        It is given positions and masks, which are made outside of it.
        """
        return self.layer

    def forward(
        self, value: Tensor | RoutedFeatures, batch: Batch | None = None
    ) -> Tensor | RoutedFeatures:
        """Apply the layer to features [B, T, C].

        Positions and padding come from `batch`; without them, or if it is None, each sample is one
        document without padding. The result has the routers' counts, too, if the load of experts is
        balanced.
        """
        features = value if isinstance(value, Tensor) else value[0]
        position_ids, padding = positions_of(batch), getattr(batch, "attention_mask", None)
        extra: dict[str, Any] = {}
        # Models without an embedding of positions get them as angles.
        if self.rotary is not None:
            places = _position_ids(features, batch)
            extra["position_embeddings"] = self.rotary(features, position_ids=places)
        # Padding, sliding windows, and causal attention without documents go by masks.
        mask = None
        if (
            padding is not None
            or position_ids is None
            or not needs_no_document_mask(self._config, self._slides)
        ):
            # Positional: the name of the fourth parameter (no cache) differs between versions.
            mask = self._mask(self._config, features, padding, None, position_ids=position_ids)
        # A hook reads the router's logits, which the layer does not return.
        logits: list[Tensor] = []
        router, hook = router_of(self.layer) if self._balances else None, None
        if router is not None:
            hook = router.register_forward_hook(lambda _, __, output: logits.append(output[0]))
        try:
            features = self.layer(
                features, attention_mask=mask, position_ids=position_ids, use_cache=False, **extra
            )
        finally:
            if hook is not None:
                hook.remove()
        if not logits:
            return features if isinstance(value, Tensor) else RoutedFeatures(features, *value[1:])
        before = None if isinstance(value, Tensor) else value
        return self._count_routing(features, logits[0], padding, before)

    def _count_routing(
        self,
        features: Tensor,
        logits: Tensor,
        padding: Tensor | None,
        before: RoutedFeatures | None,
    ) -> RoutedFeatures:
        """Return features, with the routing counts of `before` and of the router's `logits`."""
        # As in `load_balancing_loss_func` of transformers. Tokens where `padding` is 0 do not
        # count.
        experts, top = logits.shape[-1], self._config.num_experts_per_tok
        weights = logits.softmax(-1)
        best = functional.one_hot(weights.topk(top, -1).indices, experts)
        probabilities = weights.float()
        if padding is not None:
            counts = padding.reshape(-1).bool()
            best, probabilities = best * counts[:, None, None], probabilities * counts[:, None]
        chosen, wanted = best.sum(0), probabilities.sum(0)
        if before is None:
            return RoutedFeatures(features, chosen, wanted)
        return RoutedFeatures(features, before[1] + chosen, before[2] + wanted)


class Head(nn.Module):
    """Norm and projection of features to the logits of the next token."""

    def __init__(self, name: str, norm: nn.Module, lm_head: nn.Module) -> None:
        super().__init__()
        self.add_module(name, norm)
        self.lm_head = lm_head
        self._norm = name

    def forward(self, value: Tensor | RoutedFeatures) -> Tensor | tuple[Tensor, Tensor]:
        """Return logits [B, T, V], or, if routers balance the load, logits and balance loss."""
        features = value if isinstance(value, Tensor) else value[0]
        logits: Tensor = self.lm_head(self.get_submodule(self._norm)(features))
        return logits if isinstance(value, Tensor) else (logits, balance_loss(value[1], value[2]))


@functools.cache
def _recomputable_class(name: Part, kind: Any) -> Any:
    """Return a subclass of transformers' `kind` whose forward is the recomputable part `name`."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return recomputable(name, kind.forward, self, *args, **kwargs)

    return type(kind.__name__, (kind,), {"forward": functools.wraps(kind.forward)(forward)})


def balance_loss(chosen: Tensor, wanted: Tensor) -> Tensor:
    """Return the loss for unequal use of experts, over all layers.

    The loss is experts x sum over experts of (share of tokens x mean probability). The arguments
    are those of `RoutedFeatures`. Switch Transformer (Fedus et al., arXiv 2101.03961), equations 4
    to 6, as implemented in transformers.
    """
    # `chosen` counts k choices of each token in each layer.
    rows = (chosen.sum() // chosen.shape[0]).float()
    return ((chosen.sum(0).float() / rows) * (wanted / rows)).sum() * wanted.shape[0]


def router_of(layer: nn.Module) -> nn.Module | None:
    """Return the router of a decoder layer with experts; None for other layers."""
    mlp = getattr(layer, "mlp", None)
    return getattr(mlp, "gate", None) if hasattr(mlp, "experts") else None


def _has_sliding_window(config: PreTrainedConfig, index: int) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return getattr(config, "sliding_window", None) is not None
    return bool(kinds[index] == "sliding_attention")


def _position_ids(value: Tensor, batch: Batch | None) -> Tensor:
    positions = positions_of(batch)
    if positions is None:
        return torch.arange(value.shape[1], device=value.device)[None]
    return positions
