"""A GPT as a list of layers: embedding, blocks, head; whole, or as one of the ranks of a worker has them.

Between layers a rank has its part of the sequence (sequence parallelism), and within them its heads, its part of the
MLP and of the vocabulary. The numbers, and the names of parameters, are those of whole layers: without a group,
collectives (`runtime.model.layers.tensor_parallel`) do nothing.

Shapes: B sequences of a micro-batch, T tokens of a sequence, C width, K width of a head, V vocabulary. Of R ranks, each
has S = T / R tokens and N heads.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.runtime.config import ConfigError, ModelConfig
from slipstream.runtime.model.layers.calling import Batch, positions_of
from slipstream.runtime.model.layers.cross_entropy import cross_entropy
from slipstream.runtime.model.layers.documents import within_documents
from slipstream.runtime.model.layers.recomputing import recomputable
from slipstream.runtime.model.layers.shards import Shard, Shards, cut_parameters
from slipstream.runtime.model.layers.tensor_parallel import for_all_ranks, gather_parts, part_of, sum_parts
from slipstream.runtime.model.layers.worker_group import WorkerGroup, worker_group
from slipstream.runtime.model.seeds import derive_seed, seeded

INITIAL_DEVIATION = 0.02
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Ranks = WorkerGroup | None


class Embedding(nn.Module):
    """Tokens to features: the sum of what the token and its position stand for. Of both, a rank has some rows."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, group: Ranks) -> None:
        super().__init__()
        self.group, self.dropout = group, config.dropout
        self.tokens = nn.Embedding(config.vocabulary, config.width, dtype=dtype)
        self.positions = nn.Embedding(config.context, config.width, dtype=dtype)

    def forward(self, tokens_BT: Tensor, batch: Batch | None = None) -> Tensor:
        """Tokens [B, T] to features [B, S, C]."""
        tokens_BTC, positions_BT = self._mine(tokens_BT, self.tokens), positions_of(batch)
        if positions_BT is None:
            x_BSC = sum_parts(tokens_BTC, 1, self.group)
            x_BSC = x_BSC + self.positions.weight[:x_BSC.shape[1]]
        else:  # any rank may have those of this part of the sequence
            x_BSC = sum_parts(tokens_BTC + self._mine(positions_BT, self.positions), 1, self.group)
        return _dropped(x_BSC, self.dropout, self.group, self.training)

    def _mine(self, number_BT: Tensor, rows: nn.Embedding) -> Tensor:
        """The features [B, T, C] of those numbers whose rows this rank has, else 0."""
        if self.group is None:
            found: Tensor = rows(number_BT)
            return found
        known = rows.weight.shape[0]
        local_BT = number_BT - self.group.rank() * known
        mine_BT = (local_BT >= 0) & (local_BT < known)
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
        """Features [B, T, C] to features [B, S, C]; each token sees itself and those before it in its document."""
        qkv_BT3NK = self.qkv(x_BTC).unflatten(-1, (3, self.heads, -1))
        q_BNTK, k_BNTK, v_BNTK = qkv_BT3NK.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        attend: Attend = partial(functional.scaled_dot_product_attention, dropout_p=dropout, is_causal=True)
        if self.group is not None and dropout:
            attend = self._attend_dropping
        y_BNTK = within_documents(attend, positions_BT, q_BNTK, k_BNTK, v_BNTK)
        return _summed(y_BNTK.transpose(1, 2).flatten(2), self.out, out_bias, self.group)

    def _attend_dropping(self, q_BNTK: Tensor, k_BNTK: Tensor, v_BNTK: Tensor) -> Tensor:
        """Attention of whose weights [B, N, T, T] some are dropped: those that one process would drop.

        A fused kernel draws by the place of an element among the heads that it is given, and takes no other.
        """
        scores_BNTT = q_BNTK @ k_BNTK.transpose(-1, -2) / math.sqrt(q_BNTK.shape[-1])
        ahead_TT = torch.ones(scores_BNTT.shape[-2:], dtype=torch.bool, device=scores_BNTT.device).triu(1)
        weights_BNTT = scores_BNTT.masked_fill(ahead_TT, -math.inf).softmax(-1)
        return _dropped(weights_BNTT, self.dropout, self.group, self.training) @ v_BNTK


class Block(nn.Module):
    """Attention and MLP, each normed before and added to what came in; norms and biases on a part of the sequence."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, group: Ranks) -> None:
        super().__init__()
        self.group, self.dropout = group, config.dropout
        self.attention_norm = nn.LayerNorm(config.width, dtype=dtype)
        self.attention = Attention(config, dtype, group)
        self.mlp_norm = nn.LayerNorm(config.width, dtype=dtype)
        self.up = nn.Linear(config.width, config.mlp * config.width, dtype=dtype)
        self.down = nn.Linear(config.mlp * config.width, config.width, dtype=dtype)

    def forward(self, x_BSC: Tensor, batch: Batch | None = None) -> Tensor:
        """Features [B, S, C] to features [B, S, C]."""
        norm, bias, out_bias, mlp_norm, mlp_bias, down_bias = for_all_ranks(
            self.group, self.attention_norm.weight, self.attention_norm.bias, self.attention.out.bias,
            self.mlp_norm.weight, self.mlp_norm.bias, self.down.bias)
        x_BSC = x_BSC + recomputable("attention", self._attended, x_BSC, norm, bias, out_bias, positions_of(batch))
        return x_BSC + recomputable("mlp", self._fed, x_BSC, mlp_norm, mlp_bias, down_bias)

    def _attended(self, x_BSC: Tensor, norm: Tensor, bias: Tensor, out_bias: Tensor,
                  positions_BT: Tensor | None) -> Tensor:
        """What attention adds to features."""
        y_BSC: Tensor = self.attention(_normed(x_BSC, self.attention_norm, norm, bias, self.group), positions_BT,
                                       out_bias)
        return _dropped(y_BSC, self.dropout, self.group, self.training)

    def _fed(self, x_BSC: Tensor, norm: Tensor, bias: Tensor, down_bias: Tensor) -> Tensor:
        """What the MLP adds to features."""
        y_BTC = functional.gelu(self.up(_normed(x_BSC, self.mlp_norm, norm, bias, self.group)))
        return _dropped(_summed(y_BTC, self.down, down_bias, self.group), self.dropout, self.group, self.training)


class Head(nn.Module):
    """Features to the logits of the next token; of a rank, those of a part of the vocabulary."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, group: Ranks) -> None:
        super().__init__()
        self.group = group
        self.norm = nn.LayerNorm(config.width, dtype=dtype)
        self.logits = nn.Linear(config.width, config.vocabulary, bias=False, dtype=dtype)

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Features [B, S, C] to logits [B, T, V / R]."""
        weight, bias = for_all_ranks(self.group, self.norm.weight, self.norm.bias)
        logits_BTV: Tensor = self.logits(_normed(x_BSC, self.norm, weight, bias, self.group))
        return logits_BTV


_ROWS, _COLUMNS, _QKV = Shard(0), Shard(1), Shard(0, blocks=3)
_SHARDS: Mapping[type[nn.Module], Shards] = {
    Embedding: {"tokens.weight": _ROWS, "positions.weight": _ROWS},
    Block: {"attention.qkv.weight": _QKV, "attention.qkv.bias": _QKV, "attention.out.weight": _COLUMNS,
            "up.weight": _ROWS, "up.bias": _ROWS, "down.weight": _COLUMNS},
    Head: {"logits.weight": _ROWS}}


@dataclass(frozen=True, slots=True)
class GPT:
    """A `LayeredModel`: layer 0 the embedding, then one layer a block, the last layer the head."""

    config: ModelConfig
    seed: int
    dtype: torch.dtype
    """Of the parameters."""
    device: torch.device
    """Where layers run."""
    group: Ranks = None
    """The ranks over which layers are cut."""

    @property
    def layers(self) -> int:
        """Embedding, blocks and head."""
        return self.config.blocks + 2

    def build(self, layer: int) -> nn.Module:
        """Make one layer, or what this rank has of it. Raises IndexError when there is no such layer."""
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} of a model of {self.layers}")
        kind = Embedding if layer == 0 else Head if layer == self.layers - 1 else Block
        with seeded(derive_seed("parameters", self.seed, layer)):
            module = kind(self.config, self.dtype, self.group)
            self._initialise(module)
        if self.group is not None:
            cut_parameters(module, _SHARDS[kind], self.group)
            module.shards = _SHARDS[kind]  # type: ignore[assignment]
        return module

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy, mean over tokens, of logits [B, T, V / R] and tokens [B, T]; never in less than float32."""
        return cross_entropy(output, target, self.group)

    def _initialise(self, module: nn.Module) -> None:
        """Normal weights, zero biases; what adds to the residual stream is scaled down by its number of additions."""
        for name, parameter in module.named_parameters():
            if parameter.dim() >= 2:
                adds = name.endswith(("attention.out.weight", "down.weight"))
                scale = 1 / math.sqrt(2 * self.config.blocks) if adds else 1.0
                nn.init.normal_(parameter, std=INITIAL_DEVIATION * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)


def gpt(config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device) -> GPT:
    """The GPT, or what a rank of a worker has of it. Raises ConfigError where it cannot be cut evenly."""
    group = worker_group()
    ranks = 1 if group is None else group.size()
    for name in ("heads", "context", "vocabulary"):
        if getattr(config, name) % ranks:
            raise ConfigError(f"model.{name} is {getattr(config, name)}; expected a multiple of "
                              f"training.tensor_parallel, {ranks}")
    return GPT(config, seed, dtype, device, group)


def _normed(x_BSC: Tensor, norm: nn.LayerNorm, weight: Tensor, bias: Tensor, group: Ranks) -> Tensor:
    """Features of the whole sequence [B, T, C], normed; with weight and bias as all ranks use them."""
    if group is None:
        found: Tensor = norm(x_BSC)
        return found
    return gather_parts(functional.layer_norm(x_BSC, x_BSC.shape[-1:], weight, bias), 1, group)


def _summed(x_BTC: Tensor, product: nn.Linear, bias: Tensor, group: Ranks) -> Tensor:
    """A product, of whose columns each rank has some: features [B, S, C]. The bias is as all ranks use it."""
    if group is None:
        found: Tensor = product(x_BTC)
        return found
    return sum_parts(functional.linear(x_BTC, product.weight), 1, group) + bias


def _dropped(x: Tensor, dropout: float, group: Ranks, training: bool) -> Tensor:
    """Dropout; on a rank's part, along dimension 1, of what one process would have: what that would drop."""
    if group is None or not dropout or not training:
        return functional.dropout(x, dropout, training)
    whole = torch.Size(size * group.size() if dim == 1 else size for dim, size in enumerate(x.shape))
    return x * part_of(functional.dropout(torch.ones(whole, dtype=x.dtype, device=x.device), dropout), 1, group)
