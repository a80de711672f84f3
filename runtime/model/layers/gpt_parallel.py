"""The tensor-parallel form of the GPT: each layer as one of the ranks of a worker has it.

Between layers a rank has its part of the sequence (sequence parallelism), and within them its heads, its part of the
MLP and of the vocabulary. The numbers, and the names of parameters, are those of the layers in
`runtime.model.layers.gpt`.

Shapes as there; R ranks, S = T / R tokens of a rank's part of the sequence, N = H / R heads of a rank.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.runtime.config import ConfigError, ModelConfig
from slipstream.runtime.model.layers.calling import Batch, positions_of
from slipstream.runtime.model.layers.cross_entropy import cross_entropy
from slipstream.runtime.model.layers.documents import within_documents
from slipstream.runtime.model.layers.gpt import GPT, Attention, Block, Embedding, Head
from slipstream.runtime.model.layers.recomputing import recomputable
from slipstream.runtime.model.layers.shards import Shard, Shards, cut_parameters
from slipstream.runtime.model.layers.tensor_parallel import for_all_ranks, gather_parts, part_of, sum_parts
from slipstream.runtime.model.layers.worker_group import WorkerGroup, worker_group

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
_ROWS, _COLUMNS = Shard(0), Shard(1)
_QKV = Shard(0, blocks=3)


class ParallelEmbedding(nn.Module):
    """A part of the vocabulary, and the positions of a part of the sequence."""

    shards: ClassVar[Shards] = {"tokens.weight": _ROWS, "positions.weight": _ROWS}

    def __init__(self, whole: Embedding, group: WorkerGroup) -> None:
        super().__init__()
        self.group, self.dropout = group, whole.dropout.p
        self.tokens, self.positions = whole.tokens, whole.positions

    def forward(self, tokens_BT: Tensor, batch: Batch | None = None) -> Tensor:
        """Tokens [B, T] to this rank's features [B, S, C]."""
        tokens_BTC, positions_BT = self._mine(tokens_BT, self.tokens.weight), positions_of(batch)
        if positions_BT is None:
            x_BSC = sum_parts(tokens_BTC, 1, self.group) + self.positions.weight
        else:  # any rank may have those of this part of the sequence
            x_BSC = sum_parts(tokens_BTC + self._mine(positions_BT, self.positions.weight), 1, self.group)
        return _dropped(x_BSC, 1, self.dropout, self)

    def _mine(self, number_BT: Tensor, rows: Tensor) -> Tensor:
        """The features [B, T, C] of those numbers whose rows this rank has, else 0."""
        known = rows.shape[0]
        local_BT = number_BT - self.group.rank() * known
        mine_BT = (local_BT >= 0) & (local_BT < known)
        return functional.embedding(local_BT.where(mine_BT, 0), rows) * mine_BT.unsqueeze(-1)


class ParallelAttention(nn.Module):
    """Some of the heads."""

    def __init__(self, whole: Attention, group: WorkerGroup) -> None:
        super().__init__()
        self.group, self.heads, self.dropout = group, whole.heads // group.size(), whole.dropout
        self.qkv, self.out = whole.qkv, whole.out

    def forward(self, x_BTC: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Features [B, T, C] to what these heads add to them, [B, T, C], without the bias."""
        qkv_BT3NK = self.qkv(x_BTC).unflatten(-1, (3, self.heads, -1))
        q_BNTK, k_BNTK, v_BNTK = qkv_BT3NK.permute(2, 0, 3, 1, 4).unbind(0)
        attend: Attend = partial(functional.scaled_dot_product_attention, is_causal=True)
        if self.dropout and self.training:
            attend = self._attend_dropping
        y_BNTK = within_documents(attend, positions_BT, q_BNTK, k_BNTK, v_BNTK)
        return functional.linear(y_BNTK.transpose(1, 2).flatten(2), self.out.weight)

    def _attend_dropping(self, q_BNTK: Tensor, k_BNTK: Tensor, v_BNTK: Tensor) -> Tensor:
        """Attention of whose weights [B, N, T, T] some are dropped: those that one process would drop.

        A fused kernel draws by the place of an element among the heads that it is given, and takes no other.
        """
        scores_BNTT = q_BNTK @ k_BNTK.transpose(-1, -2) / math.sqrt(q_BNTK.shape[-1])
        ahead_TT = torch.ones(scores_BNTT.shape[-2:], dtype=torch.bool, device=scores_BNTT.device).triu(1)
        return _dropped(scores_BNTT.masked_fill(ahead_TT, -math.inf).softmax(-1), 1, self.dropout, self) @ v_BNTK


class ParallelBlock(nn.Module):
    """Attention and MLP, whose products are cut over the ranks; norms and biases on a part of the sequence."""

    shards: ClassVar[Shards] = {"attention.qkv.weight": _QKV, "attention.qkv.bias": _QKV,
                                "attention.out.weight": _COLUMNS, "up.weight": _ROWS, "up.bias": _ROWS,
                                "down.weight": _COLUMNS}

    def __init__(self, whole: Block, group: WorkerGroup) -> None:
        super().__init__()
        self.group, self.dropout = group, whole.dropout.p
        self.attention_norm, self.mlp_norm = whole.attention_norm, whole.mlp_norm
        self.attention = ParallelAttention(whole.attention, group)
        self.up, self.down = whole.up, whole.down

    def forward(self, x_BSC: Tensor, batch: Batch | None = None) -> Tensor:
        """Features [B, S, C] of a part of the sequence to features [B, S, C]."""
        norm, bias, out_bias, mlp_norm, mlp_bias, down_bias = for_all_ranks(
            self.group, self.attention_norm.weight, self.attention_norm.bias, self.attention.out.bias,
            self.mlp_norm.weight, self.mlp_norm.bias, self.down.bias)
        x_BSC = x_BSC + recomputable("attention", self._attended, x_BSC, norm, bias, out_bias, positions_of(batch))
        return x_BSC + recomputable("mlp", self._fed, x_BSC, mlp_norm, mlp_bias, down_bias)

    def _attended(self, x_BSC: Tensor, norm: Tensor, bias: Tensor, out_bias: Tensor,
                  positions_BT: Tensor | None) -> Tensor:
        """What attention adds to features."""
        y_BTC = self.attention(self._normed(x_BSC, norm, bias), positions_BT)
        return _dropped(sum_parts(y_BTC, 1, self.group) + out_bias, 1, self.dropout, self)

    def _fed(self, x_BSC: Tensor, norm: Tensor, bias: Tensor, down_bias: Tensor) -> Tensor:
        """What the MLP adds to features."""
        y_BTC = functional.linear(functional.gelu(self.up(self._normed(x_BSC, norm, bias))), self.down.weight)
        return _dropped(sum_parts(y_BTC, 1, self.group) + down_bias, 1, self.dropout, self)

    def _normed(self, x_BSC: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Features of the whole sequence [B, T, C], normed."""
        return gather_parts(functional.layer_norm(x_BSC, x_BSC.shape[-1:], weight, bias), 1, self.group)


class ParallelHead(nn.Module):
    """The logits of a part of the vocabulary."""

    shards: ClassVar[Shards] = {"logits.weight": _ROWS}

    def __init__(self, whole: Head, group: WorkerGroup) -> None:
        super().__init__()
        self.group, self.norm, self.logits = group, whole.norm, whole.logits

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Features [B, S, C] of a part of the sequence to logits [B, T, V / R]."""
        weight, bias = for_all_ranks(self.group, self.norm.weight, self.norm.bias)
        normed_BSC = functional.layer_norm(x_BSC, x_BSC.shape[-1:], weight, bias)
        logits_BTV: Tensor = self.logits(gather_parts(normed_BSC, 1, self.group))
        return logits_BTV


_FORMS: Mapping[type[nn.Module], Any] = {Embedding: ParallelEmbedding, Block: ParallelBlock, Head: ParallelHead}


@dataclass(frozen=True, slots=True)
class ParallelGPT(GPT):
    """A `LayeredModel` of one rank: the layers of a GPT, cut over the ranks of a worker."""

    group: WorkerGroup

    def build(self, layer: int) -> nn.Module:
        """Make what this rank has of a layer. Raises IndexError when there is no such layer."""
        whole = GPT.build(self, layer)
        form = _FORMS[type(whole)]
        cut_parameters(whole, form.shards, self.group)
        module: nn.Module = form(whole, self.group)
        return module

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """As `GPT.loss`, of the logits [B, T, V / R] of each rank."""
        return cross_entropy(output, target, self.group)


def gpt(config: ModelConfig, seed: int, dtype: torch.dtype, device: torch.device) -> GPT:
    """The GPT, or what a rank of a worker has of it. Raises ConfigError where it cannot be cut evenly."""
    group = worker_group()
    if group is None:
        return GPT(config, seed, dtype, device)
    for name in ("heads", "context", "vocabulary"):
        if getattr(config, name) % group.size():
            raise ConfigError(f"model.{name} is {getattr(config, name)}; expected a multiple of "
                              f"training.tensor_parallel, {group.size()}")
    return ParallelGPT(config, seed, dtype, device, group)


def _dropped(x: Tensor, dim: int, dropout: float, module: nn.Module) -> Tensor:
    """Dropout on this rank's part, along a dimension, of what one process would have: what that would drop."""
    group = module.group
    if not dropout or not module.training or not isinstance(group, WorkerGroup):
        return x
    whole = torch.Size(size * group.size() if at == dim else size for at, size in enumerate(x.shape))
    return x * part_of(functional.dropout(torch.ones(whole, dtype=x.dtype, device=x.device), dropout), dim, group)
