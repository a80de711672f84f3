"""Attention of transformers' models within documents (`runtime.model.layers.documents`), under a name of its own.

Where data give the positions of packed documents, transformers' own makes a mask of them, which leaves attention as
long as without. Padding and sliding windows have masks: then it is transformers' scaled_dot_product_attention.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from slipstream.runtime.model.layers.documents import within_documents

NAME = "slipstream_by_document"


def register() -> None:
    """Make transformers know the name."""
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def attends_by_document(config: PreTrainedConfig, slides: bool) -> bool:
    """Whether a layer needs no mask for documents."""
    return config._attn_implementation == NAME and not slides


def _attention(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
               position_ids: Tensor | None = None, **more: Any) -> tuple[Tensor, None]:
    """Of [B, heads, T, K], as transformers calls attention; gives [B, T, heads, K]."""
    if attention_mask is not None or position_ids is None:
        found: Tensor = sdpa_attention_forward(module, query, key, value, attention_mask, **more)[0]
        return found, None
    return within_documents(partial(_sdpa, module, **more), position_ids, query, key, value).transpose(1, 2), None


def _sdpa(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, **more: Any) -> Tensor:
    found: Tensor = sdpa_attention_forward(module, query, key, value, None, **more)[0]
    return found.transpose(1, 2)
