"""Compute parameters, work and memory of the layers of public models, by formulas.

Floating-point operations are those of Narayanan et al. (SC 2021, arXiv 2104.04473, appendix): 2 per
parameter and token in matrix products, 4 s h per token in attention, without the half that a causal
mask saves. Mamba-2 layers run the chunks of Dao and Gu (2024, arXiv 2405.21060, section 6).
Activations are what the backward reads, 2 bytes per value; attention and Mamba-2's scan are one
fused op each. For a usual transformer layer these are the 34 s b h bytes of Korthikanti et al.
(2022, arXiv 2205.05198). From I to W, inputs of products and the gradients of their outputs are
held (Qi et al. 2023, arXiv 2401.10241).
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

VALUE_BYTES = 2
"""Bytes of a value in bf16."""
LOGIT_BYTES = 4
"""Bytes of a logit that the loss keeps: float32."""
MUON_STEPS = 5
"""Number of Newton-Schulz steps by which Muon orthogonalizes a matrix, by default."""


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """Size of a layer, and its work and memory per token."""

    kind: str
    """Words that name the kind of layer, such as "decoder layer"."""
    parameters: int = 0
    """Number of parameters that the layer holds."""
    matrices: int = 0
    """Number of parameters in weights of matrix products, so not of embeddings and norms."""
    used: int = 0
    """Number of weights by which a token is multiplied in matrix products.

    Of experts, only the chosen ones count. A matrix that is used twice counts twice.
    """
    mixing: float = 0.0
    """Floating-point operations per token of F that are no products with weights.

    Attention and scans take these operations. I has twice as many.
    """
    loss_bytes: int = 0
    """Bytes per token that the loss reads and writes in F, and again in I."""
    activation: int = 0
    """Bytes per token that are held from F to I."""
    stash: int = 0
    """Bytes per token that are held from I to W."""
    recomputed: int = 0
    """Bytes per token that are held from F to I if activations are recomputed."""
    experts: int = 0
    """Number of experts of the layer, of which a token uses some; 0 for none."""
    chosen: int = 0
    """Number of experts that a token uses."""
    expert_activation: int = 0
    """Bytes of `activation` per token due to each expert that the token uses."""
    expert_stash: int = 0
    """Bytes of `stash` per token due to each expert that the token uses."""
    by_muon: int = 0
    """Number of parameters that Muon steps, if it is used.

    They are the layer's matrices, unless it is the embedding or the head.
    """
    orthogonal: float = 0.0
    """Floating-point operations of Muon on the layer's matrices in an optimizer step."""

    def worst_case_bytes(self, gpus: int) -> tuple[int, int]:
        """Return the bytes per token that a worker's GPUs together must have room for.

        The first number is the bytes held from F to I, the second those held from I to W. Each GPU
        has whole experts, and needs room for as many of a token's choices as can fall on them: at
        most one for each expert. If the number of GPUs does not divide that of experts, all count
        like a GPU that has one more than others.
        """
        experts_per_gpu = -(-self.experts // gpus)
        extra = gpus * min(self.chosen, experts_per_gpu) - self.chosen
        return (
            self.activation + extra * self.expert_activation,
            self.stash + extra * self.expert_stash,
        )

    def __add__(self, other: "LayerShape") -> "LayerShape":
        """Return one layer that has the sizes, work and memory of both."""
        return LayerShape(
            kind=f"{self.kind} and {other.kind}",
            **{
                key: getattr(self, key) + getattr(other, key)
                for key in self.__struct_fields__
                if key != "kind"
            },
        )


class ModelLayers(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of a decoder-only model, with the sizes of the tensors between them."""

    layers: tuple[LayerShape, ...]
    hidden: int
    """Number of values per token that one layer passes to the next."""
    sequence: int
    """Length of a sequence in tokens."""
    copies: int = 0
    """Number of parameters that are counted twice although shared, such as tied embeddings."""
    ends_merged: bool = False
    """True if embedding and head are in the first and last layer, not layers themselves."""

    @property
    def parameter_count(self) -> int:
        """Number of parameters of the whole model; shared ones count once."""
        return sum(layer.parameters for layer in self.layers) - self.copies

    @property
    def used_parameters(self) -> int:
        """Number of weights by which a token is multiplied in matrix products.

        A weight that is used several times counts each time.
        """
        return sum(layer.used for layer in self.layers)

    def describe_kinds(self) -> str:
        """Return the kinds of layers as text: "embedding, 30 x decoder layer, head".

        Kinds are in the order in which they first appear.
        """
        kinds = Counter(layer.kind for layer in self.layers)
        texts = []
        for kind, number in kinds.items():
            texts.append(kind if number == 1 else f"{number} x {kind}")
        return ", ".join(texts)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of a decoder-only transformer whose layers are alike."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    kv_heads: int | None = None
    """Number of heads of keys and values; None: as many as of queries."""
    ffn: int | None = None
    """Width of the feed-forward part; None: 4 x hidden."""
    gated: bool = False
    """True if the feed-forward part has three matrices (SwiGLU) instead of two."""

    @property
    def layer_parameters(self) -> int:
        """Number of parameters in the matrices of one layer."""
        attention = 2 * self.hidden**2 * (1 + (self.kv_heads or self.heads) / self.heads)
        return round(attention) + self.hidden * (self.ffn or 4 * self.hidden) * (
            3 if self.gated else 2
        )

    @property
    def _matrix_sides(self) -> list[int]:
        """Length of one side of each matrix of a decoder layer; the other is `hidden`."""
        keys = self.hidden // self.heads * (self.kv_heads or self.heads)
        wide = self.ffn or 4 * self.hidden
        return [self.hidden, keys, keys, self.hidden, *[wide] * (3 if self.gated else 2)]

    def by_layer(self) -> ModelLayers:
        """Return the decoder layers; the first includes the embedding, and the last the head.

        Raises ValueError with a message of one line unless the number of heads divides the width,
        and the number of key-value heads divides the number of heads.
        """
        if self.hidden % self.heads or self.heads % (self.kv_heads or self.heads):
            raise ValueError(
                f"hidden size {self.hidden}, {self.heads} heads, {self.kv_heads or self.heads} "
                "heads of keys and values: expected each to divide the one before"
            )
        ends = self.vocabulary * self.hidden
        # Bytes per token and unit of width: 34 of Korthikanti et al., and 32 from I to W.
        decoder = LayerShape(
            kind="decoder layer",
            parameters=self.layer_parameters,
            matrices=self.layer_parameters,
            used=self.layer_parameters,
            mixing=4 * self.sequence * self.hidden,
            activation=34 * self.hidden,
            stash=32 * self.hidden,
            recomputed=2 * self.hidden,
            by_muon=self.layer_parameters,
            orthogonal=sum(muon_operations(self.hidden, side) for side in self._matrix_sides),
        )
        # The loss keeps the logits, whether or not activations are recomputed.
        logits = LOGIT_BYTES * self.vocabulary
        head = LayerShape(
            kind="head",
            parameters=ends,
            matrices=ends,
            used=ends,
            activation=logits,
            recomputed=logits,
        )
        layers = [decoder] * self.layers
        layers[0] = LayerShape(kind="embedding", parameters=ends) + layers[0]
        layers[-1] = layers[-1] + head
        return ModelLayers(
            layers=tuple(layers), hidden=self.hidden, sequence=self.sequence, ends_merged=True
        )


# --- Parts of layers that are unlike --------------------------------------------------------------


def muon_operations(height: int, width: int) -> float:
    """Return the floating-point operations by which Muon orthogonalizes a matrix.

    In each of its five steps, Muon computes X X', the square of that, and a product with X.
    """
    short, long = sorted((height, width))
    return float(MUON_STEPS * (4 * short**2 * long + 2 * short**3))


def products_shape(inputs: int, *outputs: int, bias: bool = False) -> LayerShape:
    """Return size, work and memory of matrix products of one input, one for each output.

    `inputs` and `outputs` are widths. The input and the gradients of the outputs are held from I to
    W.
    """
    weights = inputs * sum(outputs)
    return LayerShape(
        kind="product",
        parameters=weights + bias * sum(outputs),
        matrices=weights,
        used=weights,
        activation=VALUE_BYTES * inputs,
        stash=VALUE_BYTES * (inputs + sum(outputs)),
        by_muon=weights,
        orthogonal=sum(muon_operations(inputs, output) for output in outputs),
    )


def norm_shape(width: int) -> LayerShape:
    """Return size and memory of a norm over `width` values, with scales.

    The norm's input is held, because the backward reads it.
    """
    return LayerShape(kind="norm", parameters=width, activation=VALUE_BYTES * width)


def held_values_shape(number: int) -> LayerShape:
    """Return a layer without work that holds `number` values per token, to add to another."""
    return LayerShape(kind="values", activation=VALUE_BYTES * number)


def attended_tokens(sequence: int, window: int | None) -> float:
    """Return twice the mean number of tokens that a token attends to, causally.

    For a sequence of s tokens the result is s, or 2 w - w^2 / s with a window of w tokens.
    """
    width = min(window or sequence, sequence)
    return 2 * width - width**2 / sequence


def attention_shape(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    tokens: float,
    *,
    bias: bool = False,
    output_bias: bool = False,
    head_norms: int = 0,
) -> LayerShape:
    """Return size, work and memory of attention, grouped-query if there are fewer `kv_heads`.

    `tokens` is the result of `attended_tokens`. Each head of queries and keys has a norm of width
    `head_norms`, if that is not 0.
    """
    # Products into queries, keys and values, and out of their result; what is held; the scores.
    queries, keys = heads * head_width, kv_heads * head_width
    together = (
        products_shape(hidden, queries, keys, keys, bias=bias)
        + products_shape(queries, hidden, bias=output_bias)
        + held_values_shape(queries + 2 * keys)
        + LayerShape(kind="scores", mixing=4 * tokens * queries)
    )
    if head_norms:
        together += LayerShape(
            kind="norms", parameters=2 * head_norms, activation=VALUE_BYTES * (queries + keys)
        )
    return together


def latent_attention_shape(
    hidden: int,
    heads: int,
    tokens: float,
    *,
    query_rank: int | None,
    kv_rank: int,
    rotary: int,
    plain: int,
    value: int,
) -> LayerShape:
    """Return size, work and memory of latent attention, with keys and values expanded.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1. `tokens` is the result of `attended_tokens`.
    Queries are compressed to width `query_rank` (None: they are not), keys and values to `kv_rank`.
    A head has `plain` + `rotary` query channels and `value` value channels.
    """
    # Down to the ranks, a norm each, and up to all heads; the rotary key is not compressed.
    query = heads * (plain + rotary)
    if query_rank is None:
        part = products_shape(hidden, query, kv_rank + rotary)
    else:
        part = (
            products_shape(hidden, query_rank, kv_rank + rotary)
            + norm_shape(query_rank)
            + products_shape(query_rank, query)
        )
    # Queries and keys, which are equally wide, and the values are held.
    return (
        part
        + norm_shape(kv_rank)
        + products_shape(kv_rank, heads * (plain + value))
        + products_shape(heads * value, hidden)
        + held_values_shape(2 * query + heads * value)
        + LayerShape(kind="scores", mixing=2 * tokens * (query + heads * value))
    )


def feed_forward_shape(hidden: int, width: int, *, gated: bool, bias: bool = False) -> LayerShape:
    """Return size, work and memory of a feed-forward part with `width` values inside.

    The part has two matrices with a function between them or, if `gated`, three: the outputs of two
    are multiplied. `hidden` is the model's width.
    """
    widths = [width] * (2 if gated else 1)
    return (
        products_shape(hidden, *widths, bias=bias)
        + products_shape(width, hidden, bias=bias)
        + held_values_shape(sum(widths))
    )


def experts_shape(
    hidden: int, width: int, *, number: int, chosen: int, gated: bool, router_bias: bool = False
) -> LayerShape:
    """Return size, work and memory of `number` experts and their router.

    Each token uses `chosen` experts, which are feed-forward parts with `width` values inside. The
    experts' outputs are held, because the backward of their weights in the sum reads them.
    """
    # All experts are held and stepped, but a token is multiplied by the chosen ones only.
    expert = feed_forward_shape(hidden, width, gated=gated)
    router, activation = products_shape(hidden, number), expert.activation + VALUE_BYTES * hidden
    return LayerShape(
        kind="experts",
        parameters=router.parameters + router_bias * number + number * expert.parameters,
        matrices=router.matrices + number * expert.matrices,
        used=router.used + chosen * expert.used,
        activation=router.activation + chosen * activation,
        stash=router.stash + chosen * expert.stash,
        experts=number,
        chosen=chosen,
        expert_activation=activation,
        expert_stash=expert.stash,
        by_muon=router.by_muon + number * expert.by_muon,
        orthogonal=router.orthogonal + number * expert.orthogonal,
    )


def mamba_2_shape(
    hidden: int,
    *,
    heads: int,
    head_width: int,
    groups: int,
    state: int,
    kernel: int,
    chunk: int,
    convolution_bias: bool = True,
    bias: bool = False,
) -> LayerShape:
    """Return size, work and memory of a Mamba-2 mixer.

    The scan works in chunks of `chunk` tokens. With q = `chunk`, g = `groups`, n = `state` and p =
    `heads` x `head_width`, it takes per token 2 q g n operations for the scores, 2 q p for their
    values, and 4 p n into the states and out of them. The fused op keeps its inputs and its output,
    and recomputes the convolution, whose width is `kernel`.
    """
    # One product makes all inputs of the scan: x, the gate, B, C and the time steps.
    inner = heads * head_width
    convolved = inner + 2 * groups * state
    projected = inner + convolved + heads
    small = convolved * (kernel + convolution_bias) + 3 * heads
    return (
        products_shape(hidden, projected, bias=bias)
        + products_shape(inner, hidden, bias=bias)
        + norm_shape(inner)
        + held_values_shape(projected)
        + LayerShape(
            kind="scan",
            parameters=small,
            used=convolved * kernel,
            mixing=2 * chunk * (groups * state + inner) + 4 * inner * state,
        )
    )


def embedding_shape(hidden: int, vocabulary: int) -> LayerShape:
    """Return the size of an embedding, which has no work.

    A lookup is no matrix product, and its gradient has only a few rows.
    """
    return LayerShape(kind="embedding", parameters=hidden * vocabulary)


def head_and_loss_shape(hidden: int, vocabulary: int, *, predicted: int = 1) -> LayerShape:
    """Return size, work and memory of the last norm, the logits, and their loss.

    Each position has logits of `predicted` tokens. The loss reads bf16 logits and keeps float32
    ones for the backward.
    """
    product = products_shape(hidden, vocabulary)
    loss = (VALUE_BYTES + LOGIT_BYTES) * vocabulary
    each = LayerShape(
        kind="head",
        used=product.used,
        stash=product.stash,
        loss_bytes=loss,
        activation=product.activation + LOGIT_BYTES * vocabulary,
    )
    # The weights are there once, their work once for each predicted token.
    layer = LayerShape(
        kind="weights", parameters=product.parameters, matrices=product.matrices
    ) + norm_shape(hidden)
    for _ in range(predicted):
        layer += each
    return combine_named("head", layer, recomputed=layer.activation)


def combine_named(kind: str, *parts: LayerShape, recomputed: int) -> LayerShape:
    """Return one layer named `kind` that has the sizes, work and memory of all parts.

    If activations are recomputed, the layer holds `recomputed` bytes per token from F to I.
    """
    return msgspec.structs.replace(combine_parts(parts), kind=kind, recomputed=recomputed)


def combine_parts(parts: Sequence[LayerShape]) -> LayerShape:
    """Return one layer with the sizes, work and memory of all parts together."""
    return sum(parts[1:], start=parts[0])
