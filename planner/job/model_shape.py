"""The layers of a model, whose shapes are public: parameters, work and memory of each, by formulas.

Floating-point operations are those of Narayanan et al. (SC 2021, arXiv 2104.04473, appendix): 2 for each parameter and
token in matrix products, 4 s h for each token in attention, without the half that a causal mask saves. Mamba-2 layers
run the chunks of Dao and Gu (2024, arXiv 2405.21060, section 6). Activations are what the backward reads, 2 bytes a
value, with attention and Mamba-2's scan each one fused op: for a usual transformer layer the 34 s b h bytes of
Korthikanti et al. (2022, arXiv 2205.05198). From I to W, inputs of products and the gradients of their outputs are
held (Qi et al. 2023, arXiv 2401.10241).
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

VALUE_BYTES = 2
"""Of a value in bf16."""
LOGIT_BYTES = 4
"""Of a logit that the loss keeps: float32."""
MUON_STEPS = 5
"""Of the polynomial by which Muon makes a matrix orthogonal: of its default options."""


class LayerShape(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer has, and what it does and holds for each token."""

    kind: str
    """In words."""
    parameters: int = 0
    """All that the layer holds."""
    matrices: int = 0
    """Of these, those in matrix products."""
    used: int = 0
    """The parameters that a token meets in products: of experts, those that it is sent to; a matrix that it meets
    twice counts twice."""
    mixing: float = 0.0
    """Floating-point operations of the forward besides products with parameters: attention, scans. The backward for
    the input has twice as many."""
    loss_bytes: int = 0
    """Read and written by the loss, in the forward and as much in the backward for the input."""
    activation: int = 0
    """Bytes from F to I; so are the two below."""
    stash: int = 0
    """From I to W."""
    recomputed: int = 0
    """As `activation`, where activations are computed again."""
    experts: int = 0
    """Parts of which a token meets some; 0: it meets all of the layer."""
    chosen: int = 0
    """How many it meets."""
    expert_activation: int = 0
    """Of `activation`, what each of these holds; so is the stash."""
    expert_stash: int = 0
    by_muon: int = 0
    """Of the parameters, those that Muon steps where it is chosen: matrices of all but embedding and head."""
    orthogonal: float = 0.0
    """Floating-point operations of such a step."""

    def crowded(self, gpus: int) -> tuple[int, int]:
        """Activation and stash of a token on all GPUs of a worker, each of which has equally many of the experts, and
        room for all choices that may be among them: on one GPU, as many as a token makes, and on more hardly fewer."""
        more = gpus * min(self.chosen, self.experts // gpus) - self.chosen
        return self.activation + more * self.expert_activation, self.stash + more * self.expert_stash

    def __add__(self, other: "LayerShape") -> "LayerShape":
        """Both, one after the other, as one layer."""
        return LayerShape(kind=f"{self.kind} and {other.kind}", **{
            key: getattr(self, key) + getattr(other, key) for key in self.__struct_fields__ if key != "kind"})


class ModelLayers(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only model, layer by layer."""

    layers: tuple[LayerShape, ...]
    hidden: int
    """Width of what one layer hands to the next."""
    sequence: int
    """Tokens."""
    copies: int = 0
    """Parameters that several layers hold though the model has them once."""
    ends_merged: bool = False
    """Whether the embedding is a part of the first layer and the head of the last, instead of layers themselves."""

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, each once."""
        return sum(layer.parameters for layer in self.layers) - self.copies

    @property
    def used(self) -> int:
        """Parameters that a token meets in products, once for each time."""
        return sum(layer.used for layer in self.layers)

    def describe(self) -> str:
        """How many layers there are of each kind, in the order in which the kinds come first."""
        kinds = Counter(layer.kind for layer in self.layers)
        return ", ".join(kind if number == 1 else f"{number} x {kind}" for kind, number in kinds.items())


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer whose layers are alike."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    kv_heads: int | None = None
    """Heads of keys and values; None: as many as of queries."""
    ffn: int | None = None
    """Width of the feed-forward part; None: 4 x hidden."""
    gated: bool = False
    """Whether the feed-forward part has three matrices (SwiGLU) instead of two."""

    @property
    def layer_parameters(self) -> int:
        """Parameters of the matrices of one layer."""
        attention = 2 * self.hidden**2 * (1 + (self.kv_heads or self.heads) / self.heads)
        return round(attention) + self.hidden * (self.ffn or 4 * self.hidden) * (3 if self.gated else 2)

    @property
    def _sides(self) -> list[int]:
        """The other side of each matrix of a layer."""
        keys, wide = self.hidden // self.heads * (self.kv_heads or self.heads), self.ffn or 4 * self.hidden
        return [self.hidden, keys, keys, self.hidden, *[wide] * (3 if self.gated else 2)]

    def by_layer(self) -> ModelLayers:
        """Each decoder layer, with separate embedding and head, which are parts of the first and the last.

        Raises ValueError, with one line, where heads do not divide the width.
        """
        if self.hidden % self.heads or self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"hidden size {self.hidden}, {self.heads} heads, {self.kv_heads or self.heads} heads of "
                             "keys and values: expected each to divide the one before")
        ends = self.vocabulary * self.hidden
        decoder = LayerShape(
            kind="decoder layer", parameters=self.layer_parameters, matrices=self.layer_parameters,
            used=self.layer_parameters, mixing=4 * self.sequence * self.hidden, activation=34 * self.hidden,
            stash=32 * self.hidden, recomputed=2 * self.hidden, by_muon=self.layer_parameters,
            orthogonal=sum(muon_operations(self.hidden, side) for side in self._sides))
        logits = LOGIT_BYTES * self.vocabulary
        head = LayerShape(kind="head", parameters=ends, matrices=ends, used=ends, activation=logits, recomputed=logits)
        layers = [decoder] * self.layers
        layers[0] = LayerShape(kind="embedding", parameters=ends) + layers[0]
        layers[-1] = layers[-1] + head
        return ModelLayers(layers=tuple(layers), hidden=self.hidden, sequence=self.sequence, ends_merged=True)


# --- Parts of layers that are unlike ----------------------------------------------------------------------------------


def muon_operations(one: int, other: int) -> float:
    """Floating-point operations that make a matrix orthogonal: X X', its square, and that times X, five times."""
    short, long = sorted((one, other))
    return float(MUON_STEPS * (4 * short**2 * long + 2 * short**3))


def products(inputs: int, *outputs: int, bias: bool = False) -> LayerShape:
    """Matrices that multiply the same input, which is held for them, and their outputs' gradients, from I to W."""
    weights = inputs * sum(outputs)
    return LayerShape(kind="product", parameters=weights + bias * sum(outputs), matrices=weights, used=weights,
                      activation=VALUE_BYTES * inputs, stash=VALUE_BYTES * (inputs + sum(outputs)), by_muon=weights,
                      orthogonal=sum(muon_operations(inputs, output) for output in outputs))


def norm(width: int) -> LayerShape:
    """A norm that scales, of which the backward reads the input."""
    return LayerShape(kind="norm", parameters=width, activation=VALUE_BYTES * width)


def held_values(number: int) -> LayerShape:
    """Values that the backward reads besides the inputs of products and norms."""
    return LayerShape(kind="values", activation=VALUE_BYTES * number)


def mixed_tokens(sequence: int, window: int | None) -> float:
    """Tokens whose keys a token meets on average, twice what a causal mask leaves: s, or 2 w - w^2 / s in a window."""
    width = min(window or sequence, sequence)
    return 2 * width - width**2 / sequence


def attention(hidden: int, heads: int, kv_heads: int, head_width: int, tokens: float, *, bias: bool = False,
              output_bias: bool = False, head_norms: int = 0) -> LayerShape:
    """Attention with grouped heads; `head_norms`: the width of norms of queries and keys each, if they have any."""
    queries, keys = heads * head_width, kv_heads * head_width
    together = products(hidden, queries, keys, keys, bias=bias) + products(queries, hidden, bias=output_bias) \
        + held_values(queries + 2 * keys) + LayerShape(kind="scores", mixing=4 * tokens * queries)
    if head_norms:
        together += LayerShape(kind="norms", parameters=2 * head_norms, activation=VALUE_BYTES * (queries + keys))
    return together


def latent_attention(hidden: int, heads: int, tokens: float, *, query_rank: int | None, kv_rank: int, rotary: int,
                     plain: int, value: int) -> LayerShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), its keys and values unfolded."""
    query = heads * (plain + rotary)
    if query_rank is None:
        part = products(hidden, query, kv_rank + rotary)
    else:
        part = products(hidden, query_rank, kv_rank + rotary) + norm(query_rank) + products(query_rank, query)
    return part + norm(kv_rank) + products(kv_rank, heads * (plain + value)) + products(heads * value, hidden) \
        + held_values(2 * query + heads * value) \
        + LayerShape(kind="scores", mixing=2 * tokens * (query + heads * value))


def feed_forward(hidden: int, width: int, *, gated: bool, bias: bool = False) -> LayerShape:
    """A feed-forward part: two matrices with a function between, or three, two of which are multiplied."""
    widths = [width] * (2 if gated else 1)
    return products(hidden, *widths, bias=bias) + products(width, hidden, bias=bias) + held_values(sum(widths))


def experts(hidden: int, width: int, *, number: int, chosen: int, gated: bool, router_bias: bool = False) -> LayerShape:
    """Experts, of which each token meets some; the outputs are held, as the backward of their weights reads them."""
    one = feed_forward(hidden, width, gated=gated)
    router, activation = products(hidden, number), one.activation + VALUE_BYTES * hidden
    return LayerShape(
        kind="experts", parameters=router.parameters + router_bias * number + number * one.parameters,
        matrices=router.matrices + number * one.matrices, used=router.used + chosen * one.used,
        activation=router.activation + chosen * activation, stash=router.stash + chosen * one.stash,
        experts=number, chosen=chosen, expert_activation=activation, expert_stash=one.stash,
        by_muon=router.by_muon + number * one.by_muon, orthogonal=router.orthogonal + number * one.orthogonal)


def mamba_2(hidden: int, *, heads: int, head_width: int, groups: int, state: int, kernel: int, chunk: int,
            convolution_bias: bool = True, bias: bool = False) -> LayerShape:
    """A Mamba-2 mixer: within chunks of q tokens products as in attention, between them through states.

    For each token: 2 q g n for the scores, 2 q p for their values, 4 p n into states and out, with g groups, states of
    n and p channels. The fused op keeps what it is given and its output, and computes the convolution again.
    """
    inner = heads * head_width
    convolved = inner + 2 * groups * state
    projected = inner + convolved + heads
    small = convolved * (kernel + convolution_bias) + 3 * heads
    return products(hidden, projected, bias=bias) + products(inner, hidden, bias=bias) + norm(inner) \
        + held_values(projected) \
        + LayerShape(kind="scan", parameters=small, used=convolved * kernel,
                     mixing=2 * chunk * (groups * state + inner) + 4 * inner * state)


def embedding(hidden: int, vocabulary: int) -> LayerShape:
    """A lookup: no product, and a gradient for few of its rows."""
    return LayerShape(kind="embedding", parameters=hidden * vocabulary)


def head_and_loss(hidden: int, vocabulary: int, *, predicted: int = 1) -> LayerShape:
    """The last norm, the logits of so many tokens each, and their loss: it reads bf16 logits and keeps float32."""
    product = products(hidden, vocabulary)
    loss = (VALUE_BYTES + LOGIT_BYTES) * vocabulary
    each = LayerShape(kind="head", used=product.used, stash=product.stash, loss_bytes=loss,
                      activation=product.activation + LOGIT_BYTES * vocabulary)
    whole = LayerShape(kind="weights", parameters=product.parameters, matrices=product.matrices) + norm(hidden)
    for _ in range(predicted):
        whole += each
    return named("head", whole, recomputed=whole.activation)


def named(kind: str, *parts: LayerShape, recomputed: int) -> LayerShape:
    """A layer of such parts, and what it holds where its activations are computed again."""
    return msgspec.structs.replace(total(parts), kind=kind, recomputed=recomputed)


def total(parts: Sequence[LayerShape]) -> LayerShape:
    """All of them together."""
    return sum(parts[1:], start=parts[0])
