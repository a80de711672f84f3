"""A GPT as a list of layers: embedding, blocks, head.

Shapes: B sequences of a micro-batch, T tokens of a sequence, C width, H heads, K = C / H width of a head, V vocabulary.
"""

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from slipstream.runtime.config import ModelConfig
from slipstream.runtime.model.layers.calling import Batch, positions_of
from slipstream.runtime.model.layers.cross_entropy import cross_entropy
from slipstream.runtime.model.layers.documents import within_documents
from slipstream.runtime.model.layers.recomputing import recomputable
from slipstream.runtime.model.seeds import derive_seed, seeded

INITIAL_DEVIATION = 0.02


class Embedding(nn.Module):
    """Tokens to features: the sum of what the token and its position stand for."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocabulary, config.width, dtype=dtype)
        self.positions = nn.Embedding(config.context, config.width, dtype=dtype)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens_BT: Tensor, batch: Batch | None = None) -> Tensor:
        """Tokens [B, T] to features [B, T, C]."""
        positions_BT = positions_of(batch)
        if positions_BT is None:
            positions_BT = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTC: Tensor = self.dropout(self.tokens(tokens_BT) + self.positions(positions_BT))
        return x_BTC


class Attention(nn.Module):
    """Causal self-attention over several heads."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, dtype=dtype)
        self.out = nn.Linear(config.width, config.width, dtype=dtype)

    def forward(self, x_BTC: Tensor, positions_BT: Tensor | None = None) -> Tensor:
        """Features [B, T, C] to features [B, T, C]; each token sees itself and those before it in its document."""
        qkv_BT3HK = self.qkv(x_BTC).unflatten(-1, (3, self.heads, -1))
        q_BHTK, k_BHTK, v_BHTK = qkv_BT3HK.permute(2, 0, 3, 1, 4).unbind(0)
        attend = partial(functional.scaled_dot_product_attention, dropout_p=self.dropout if self.training else 0.0,
                         is_causal=True)
        y_BHTK = within_documents(attend, positions_BT, q_BHTK, k_BHTK, v_BHTK)
        y_BTC: Tensor = self.out(y_BHTK.transpose(1, 2).flatten(2))
        return y_BTC


class Block(nn.Module):
    """Attention and MLP, each normed before and added to what came in."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width, dtype=dtype)
        self.attention = Attention(config, dtype)
        self.mlp_norm = nn.LayerNorm(config.width, dtype=dtype)
        self.up = nn.Linear(config.width, config.mlp * config.width, dtype=dtype)
        self.down = nn.Linear(config.mlp * config.width, config.width, dtype=dtype)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor, batch: Batch | None = None) -> Tensor:
        """Features [B, T, C] to features [B, T, C]."""
        x_BTC = x_BTC + recomputable("attention", self._attended, x_BTC, positions_of(batch))
        return x_BTC + recomputable("mlp", self._fed, x_BTC)

    def _attended(self, x_BTC: Tensor, positions_BT: Tensor | None) -> Tensor:
        """What attention adds to features."""
        y_BTC: Tensor = self.dropout(self.attention(self.attention_norm(x_BTC), positions_BT))
        return y_BTC

    def _fed(self, x_BTC: Tensor) -> Tensor:
        """What the MLP adds to features."""
        y_BTC: Tensor = self.dropout(self.down(functional.gelu(self.up(self.mlp_norm(x_BTC)))))
        return y_BTC


class Head(nn.Module):
    """Features to the logits of the next token."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.width, dtype=dtype)
        self.logits = nn.Linear(config.width, config.vocabulary, bias=False, dtype=dtype)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Features [B, T, C] to logits [B, T, V]."""
        logits_BTV: Tensor = self.logits(self.norm(x_BTC))
        return logits_BTV


@dataclass(frozen=True, slots=True)
class GPT:
    """A `LayeredModel`: layer 0 the embedding, then one layer a block, the last layer the head."""

    config: ModelConfig
    seed: int
    dtype: torch.dtype
    """Of the parameters."""
    device: torch.device
    """Where layers run."""

    @property
    def layers(self) -> int:
        """Embedding, blocks and head."""
        return self.config.blocks + 2

    def build(self, layer: int) -> nn.Module:
        """Make one layer. Raises IndexError when there is no such layer."""
        if not 0 <= layer < self.layers:
            raise IndexError(f"layer {layer} of a model of {self.layers}")
        with seeded(derive_seed("parameters", self.seed, layer)):
            if layer == 0:
                module: nn.Module = Embedding(self.config, self.dtype)
            elif layer == self.layers - 1:
                module = Head(self.config, self.dtype)
            else:
                module = Block(self.config, self.dtype)
            self._initialise(module)
        return module

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Cross entropy, mean over tokens, of logits [B, T, V] and tokens [B, T]; never in less than float32."""
        return cross_entropy(output, target)

    def _initialise(self, module: nn.Module) -> None:
        """Normal weights, zero biases; what adds to the residual stream is scaled down by its number of additions."""
        for name, parameter in module.named_parameters():
            if parameter.dim() >= 2:
                adds = name.endswith(("attention.out.weight", "down.weight"))
                scale = 1 / math.sqrt(2 * self.config.blocks) if adds else 1.0
                nn.init.normal_(parameter, std=INITIAL_DEVIATION * scale)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
