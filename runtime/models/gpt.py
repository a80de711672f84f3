"""Build a GPT as a list of layers, or one rank's part of it.

The layers are the embedding, the blocks and the head. Between layers a rank has its part of the
sequence (sequence parallelism), within them its heads and its part of the MLP and of the
vocabulary. Numbers and names of parameters are the same as without ranks: without a group,
collectives (`runtime.ranks.tensor_parallel`) do nothing.

Shapes: B sequences of a micro-batch, T tokens of a sequence, C width, K width of a head, V
vocabulary. Of R ranks, each has S = T / R tokens and N heads.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.runtime.config import ConfigError, ModelConfig
from slipstream.runtime.models.calling import Batch, positions_of
from slipstream.runtime.models.cross_entropy import cross_entropy
from slipstream.runtime.models.documents import attend_by_document
from slipstream.runtime.models.recomputing import recomputable
from slipstream.runtime.ranks.shards import Shard, Shards, cut_parameters
from slipstream.runtime.ranks.tensor_parallel import for_all_ranks, gather_parts, part_of, sum_parts
from slipstream.runtime.ranks.worker_group import WorkerGroup, worker_group
from slipstream.runtime.seeds import derive_seed, seeded

INITIAL_DEVIATION = 0.02
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Ranks = WorkerGroup | None


class Embedding(nn.Module):
    """Layer 0: the sum of a token's features and its position's features."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, group: Ranks) -> None:
        super().__init__()
        self.group, self.dropout = group, config.dropout
        # With several ranks, each has some rows of both tables.
        self.tokens = nn.Embedding(config.vocabulary, config.width, dtype=dtype)
        self.positions = nn.Embedding(config.context, config.width, dtype=dtype)

    def forward(self, tokens_BT: Tensor, batch: Batch | None = None) -> Tensor:
        """Embed tokens [B, T] as features [B, S, C] of this rank's tokens."""
        tokens_BTC, positions_BT = self._embed_local(tokens_BT, self.tokens), positions_of(batch)
        if positions_BT is None:
            x_BSC = sum_parts(tokens_BTC, 1, self.group)
            x_BSC = x_BSC + self.positions.weight[: x_BSC.shape[1]]
        else:
            # The rows of these positions may be on any rank.
            places_BTC = self._embed_local(positions_BT, self.positions)
            x_BSC = sum_parts(tokens_BTC + places_BTC, 1, self.group)
        return _apply_dropout(x_BSC, self.dropout, self.group, self.training)

    def _embed_local(self, number_BT: Tensor, rows: nn.Embedding) -> Tensor:
        """Embed numbers [B, T] as features [B, T, C]; zeros for rows of other ranks."""
        if self.group is None:
            features: Tensor = rows(number_BT)
            return features
        size = rows.weight.shape[0]
        local_BT = number_BT - self.group.rank() * size
        mine_BT = (local_BT >= 0) & (local_BT < size)
        return functional.embedding(local_BT.where(mine_BT, 0), rows.weight) * mine_BT.unsqueeze(-1)


class Attention(nn.Module):
    """Causal self-attention over several heads."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, group: Ranks) -> None:
        super().__init__()
        self.group, self.dropout = group, config.dropout
        self.heads = config.heads // (1 if group is None else group.size())
        self.qkv = nn.Linear(config.width, 3 * config.width, dtype=dtype)
        self.out = nn.Linear(config.width, config.width, dtype=dtype)

    def forward(self, x_BTC: Tensor, positions_BT: Tensor | None, out_bias: Tensor) -> Tensor:
        """Return the attention of features [B, T, C], for this rank's tokens: [B, S, C].

        A token sees itself and the tokens before it in its document. `positions_BT` is None if each
        sample is one document. `out_bias` is the bias of the last product, after `for_all_ranks`.
        """
        qkv_BT3NK = self.qkv(x_BTC).unflatten(-1, (3, self.heads, -1))
        q_BNTK, k_BNTK, v_BNTK = qkv_BT3NK.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        attend: Attend = partial(
            functional.scaled_dot_product_attention, dropout_p=dropout, is_causal=True
        )
        # A kernel on some of the heads would drop other weights than in one process.
        if self.group is not None and dropout:
            attend = self._attend_with_dropout
        y_BNTK = attend_by_document(attend, positions_BT, q_BNTK, k_BNTK, v_BNTK)
        return _apply_row_parallel(
            y_BNTK.transpose(1, 2).flatten(2), self.out, out_bias, self.group
        )

    def _attend_with_dropout(self, q_BNTK: Tensor, k_BNTK: Tensor, v_BNTK: Tensor) -> Tensor:
        """Compute attention of this rank's heads, with the same dropout as without ranks."""
        # A fused kernel cannot be used: it draws random numbers by an element's position among the
        # heads that it is given.
        scores_BNTT = q_BNTK @ k_BNTK.transpose(-1, -2) / math.sqrt(q_BNTK.shape[-1])
        ahead_TT = torch.ones_like(scores_BNTT[0, 0], dtype=torch.bool).triu(1)
        weights_BNTT = scores_BNTT.masked_fill(ahead_TT, -math.inf).softmax(-1)
        return _apply_dropout(weights_BNTT, self.dropout, self.group, self.training) @ v_BNTK


class Block(nn.Module):
    """Attention and MLP, each with a norm and a residual connection."""

    # Norms, and the biases of last products, act on this rank's part of the sequence.

    def __init__(self, config: ModelConfig, dtype: torch.dtype, group: Ranks) -> None:
        super().__init__()
        self.group, self.dropout = group, config.dropout
        self.attention_norm = nn.LayerNorm(config.width, dtype=dtype)
        self.attention = Attention(config, dtype, group)
        self.mlp_norm = nn.LayerNorm(config.width, dtype=dtype)
        self.up = nn.Linear(config.width, config.mlp * config.width, dtype=dtype)
        self.down = nn.Linear(config.mlp * config.width, config.width, dtype=dtype)

    def forward(self, x_BSC: Tensor, batch: Batch | None = None) -> Tensor:
        """Apply attention and MLP to features [B, S, C] of this rank's tokens."""
        # Whole on each rank: their gradients are summed over the ranks.
        norm, bias, out_bias, mlp_norm, mlp_bias, down_bias = for_all_ranks(
            self.group,
            self.attention_norm.weight,
            self.attention_norm.bias,
            self.attention.out.bias,
            self.mlp_norm.weight,
            self.mlp_norm.bias,
            self.down.bias,
        )
        positions = positions_of(batch)
        x_BSC = x_BSC + recomputable(
            "attention", self._run_attention, x_BSC, norm, bias, out_bias, positions
        )
        return x_BSC + recomputable("mlp", self._run_mlp, x_BSC, mlp_norm, mlp_bias, down_bias)

    def _run_attention(
        self,
        x_BSC: Tensor,
        norm: Tensor,
        bias: Tensor,
        out_bias: Tensor,
        positions_BT: Tensor | None,
    ) -> Tensor:
        # The parameters are from `for_all_ranks`.
        x_BTC = _apply_norm(x_BSC, self.attention_norm, norm, bias, self.group)
        y_BSC: Tensor = self.attention(x_BTC, positions_BT, out_bias)
        return _apply_dropout(y_BSC, self.dropout, self.group, self.training)

    def _run_mlp(self, x_BSC: Tensor, norm: Tensor, bias: Tensor, down_bias: Tensor) -> Tensor:
        # The parameters are from `for_all_ranks`.
        x_BTC = _apply_norm(x_BSC, self.mlp_norm, norm, bias, self.group)
        hidden = functional.gelu(self.up(x_BTC))
        y_BSC = _apply_row_parallel(hidden, self.down, down_bias, self.group)
        return _apply_dropout(y_BSC, self.dropout, self.group, self.training)


class Head(nn.Module):
    """Last layer: norm, and projection to the logits of the next token."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, group: Ranks) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(config.width, dtype=dtype)
        self.logits = nn.Linear(config.width, config.vocabulary, bias=False, dtype=dtype)

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Project features [B, S, C] to this rank's logits [B, T, V / ranks]."""
        weight, bias = for_all_ranks(self.group, self.norm.weight, self.norm.bias)
        logits_BTV: Tensor = self.logits(_apply_norm(x_BSC, self.norm, weight, bias, self.group))
        return logits_BTV


_ROWS = Shard(0)
_COLUMNS = Shard(1)
_QKV = Shard(0, blocks=3)
_SHARDS: Mapping[type[nn.Module], Shards] = {
    Embedding: {"tokens.weight": _ROWS, "positions.weight": _ROWS},
    Block: {
        "attention.qkv.weight": _QKV,
        "attention.qkv.bias": _QKV,
        "attention.out.weight": _COLUMNS,
        "up.weight": _ROWS,
        "up.bias": _ROWS,
        "down.weight": _COLUMNS,
    },
    Head: {"logits.weight": _ROWS},
}


@dataclass(frozen=True, slots=True)
class GPT:
    """GPT as a `LayeredModel`: embedding, blocks, head."""

    config: ModelConfig
    seed: int
    dtype: torch.dtype
    device: torch.device
    group: Ranks = None
    """Ranks over which layers are cut; None if a worker is one process."""

    @property
    def layers(self) -> int:
        """Number of layers: embedding, blocks and head."""
        return self.config.blocks + 2

    def build(self, layer: int) -> nn.Module:
        """Build a layer, or this rank's part. Raises IndexError if there is no such layer."""
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} of a model of {self.layers}")
        kind: type[Embedding | Block | Head] = Block
        if layer == 0:
            kind = Embedding
        elif layer == self.layers - 1:
            kind = Head
        # Each rank draws the whole layer and keeps its part, so numbers do not depend on ranks.
        with seeded(derive_seed("parameters", self.seed, layer)):
            module = kind(self.config, self.dtype, self.group)
            self._initialise_weights(module)
        if self.group is not None:
            cut_parameters(module, _SHARDS[kind], self.group)
            module.shards = _SHARDS[kind]  # type: ignore[assignment]
        return module

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the mean cross entropy of this rank's logits, [B, T, V / R]."""
        return cross_entropy(output, target, self.group)

    def _initialise_weights(self, module: nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if parameter.dim() >= 2:
                # As in GPT-2, what adds to the residual stream is scaled by its depth.
                adds = name.endswith(("attention.out.weight", "down.weight"))
                scale = 1 / math.sqrt(2 * self.config.blocks) if adds else 1.0
                nn.init.normal_(parameter, std=INITIAL_DEVIATION * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


def build_gpt(config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device) -> GPT:
    """Build the GPT, or this rank's part of it. Raises ConfigError if it cannot be cut evenly."""
    group = worker_group()
    ranks = 1 if group is None else group.size()
    for name in ("heads", "context", "vocabulary"):
        if getattr(config, name) % ranks:
            raise ConfigError(
                f"model.{name} is {getattr(config, name)}; expected a multiple of "
                f"training.tensor_parallel, {ranks}"
            )
    return GPT(config, seed, dtype, device, group)


def _apply_norm(
    x_BSC: Tensor, norm: nn.LayerNorm, weight: Tensor, bias: Tensor, group: Ranks
) -> Tensor:
    """Apply a norm to this rank's part of the sequence; return all ranks' results, joined."""
    # The weight and the bias are those of `norm`, from `for_all_ranks`.
    if group is None:
        normed: Tensor = norm(x_BSC)
        return normed
    return gather_parts(functional.layer_norm(x_BSC, x_BSC.shape[-1:], weight, bias), 1, group)


def _apply_row_parallel(x_BTC: Tensor, product: nn.Linear, bias: Tensor, group: Ranks) -> Tensor:
    """Apply a linear layer whose input is cut; return this rank's tokens, [B, S, C]."""
    # The `bias` is from `for_all_ranks`.
    if group is None:
        result: Tensor = product(x_BTC)
        return result
    return sum_parts(functional.linear(x_BTC, product.weight), 1, group) + bias


def _apply_dropout(x: Tensor, dropout: float, group: Ranks, training: bool) -> Tensor:
    """Apply dropout to this rank's part, with the same numbers as in one process."""
    if group is None or not dropout or not training:
        return functional.dropout(x, dropout, training)
    # Each rank draws the numbers of the whole, and uses those of its part.
    shape = list(x.shape)
    shape[1] *= group.size()
    factors = functional.dropout(torch.ones(shape, dtype=x.dtype, device=x.device), dropout)
    return x * part_of(factors, 1, group)
