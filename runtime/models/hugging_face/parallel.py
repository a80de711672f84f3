"""Cut decoder layers of transformers over the ranks of a worker.

All ranks have the features of all tokens. A rank has a part of the heads and of the MLP's width, as
in Megatron-LM (arXiv 1909.08053), and of the experts of a mixture. Products are cut by columns,
then by rows, and the results of rows and experts are summed over the ranks. Embedding, head, norms
and routers are whole on each rank. So are their gradients: where each rank begins to use such a
tensor for its part of the work only, the backward sums over the ranks.
"""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig

from slipstream.runtime.config import ConfigError
from slipstream.runtime.models.hugging_face.configuration import FAMILIES, MODEL_KEY, is_dense
from slipstream.runtime.models.hugging_face.registered import EXPERTS_NAME
from slipstream.runtime.ranks.shards import Shard, cut_parameters
from slipstream.runtime.ranks.tensor_parallel import (
    for_all_ranks,
    gather_replicated,
    sum_ranks,
    take_own_part,
)
from slipstream.runtime.ranks.worker_group import WorkerGroup

_COLUMNS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
_ROWS = {"o_proj", "down_proj"}
_NORMS = {"q_norm", "k_norm"}


def require_even_cut(config: PreTrainedConfig, ranks: int) -> None:
    """Raise ConfigError if a model's decoder layers cannot be cut over this number of ranks."""
    kind = config.model_type
    wrong = f"training.tensor_parallel is {ranks}, and {MODEL_KEY} names a {kind}"
    if not FAMILIES[kind].can_be_cut:
        names = ", ".join(name for name, family in FAMILIES.items() if family.can_be_cut)
        raise ConfigError(f"{wrong}, whose layers cannot be cut; expected 1, or one of {names}")
    if config.attention_dropout:
        raise ConfigError(
            f"{wrong} with attention_dropout {config.attention_dropout}: what is dropped would "
            "depend on the ranks; expected 0"
        )
    if FAMILIES[kind].experts and config._experts_implementation != EXPERTS_NAME:
        raise ConfigError(
            f"{wrong} with experts_implementation {config._experts_implementation!r}, which wants "
            f"all experts; expected {EXPERTS_NAME!r}"
        )
    # All ranks get parts of equal size.
    for name in _divided_keys(config):
        if getattr(config, name) % ranks:
            raise ConfigError(
                f"{wrong} with {name} {getattr(config, name)}; expected a multiple of {ranks}"
            )


def _divided_keys(config: PreTrainedConfig) -> Iterator[str]:
    """Yield the keys of config.json whose values must be multiples of the number of ranks."""
    yield from ("num_attention_heads", "num_key_value_heads")
    mixture = FAMILIES[config.model_type].experts
    if not mixture or any(is_dense(config, index) for index in range(config.num_hidden_layers)):
        yield "intermediate_size"
    if mixture:
        yield "num_local_experts" if config.model_type == "mixtral" else "num_experts"
    if hasattr(config, "shared_expert_intermediate_size"):
        yield "shared_expert_intermediate_size"


def cut_decoder(decoder: nn.Module, group: WorkerGroup) -> None:
    """Cut `decoder.layer` over the ranks, in place: its parameters, and forwards that sum."""
    shards = dict[str, Shard]()
    # Modules whose products each rank has in part, from features that all ranks have.
    sharing = dict[str, nn.Module]()
    modules: dict[str, Any] = dict(decoder.get_submodule("layer").named_modules())
    for name, module in modules.items():
        parent, _, last_name = name.rpartition(".")
        if last_name in _COLUMNS | _ROWS:
            # A product by columns, then one by rows: a sum over ranks follows only the second.
            dim = 0 if last_name in _COLUMNS else 1
            # The bias of a product that is cut by rows is whole on each rank.
            shards |= {
                f"layer.{name}.{parameter}": Shard(dim)
                for parameter, tensor in module.named_parameters()
                if tensor.dim() > dim
            }
            sharing[parent] = modules[parent]
            if last_name in _ROWS:
                module.forward = partial(_sum_rows, module, group)
        elif last_name in _NORMS:
            # Norms of queries and keys: each head by itself, or all heads of all ranks together.
            of_heads = module.weight.shape[0] == modules[parent].head_dim
            module.forward = partial(_norm_heads if of_heads else _norm_whole, module, group)
        elif last_name == "experts":
            shards |= {
                f"layer.{name}.{parameter}": Shard(0) for parameter, _ in module.named_parameters()
            }
            # Each rank has consecutive experts.
            module.first_expert = group.rank() * module.num_experts // group.size()
            module.forward = partial(_sum_experts, module, group)
    cut_parameters(decoder, shards, group)
    decoder.shards = shards  # type: ignore[assignment]
    # From here on each rank uses the features for its part of the work.
    for module in sharing.values():
        module.register_forward_pre_hook(partial(_share_features, group), with_kwargs=True)


def _sum_rows(product: Any, group: WorkerGroup, x: Tensor) -> Tensor:
    total = sum_ranks(functional.linear(x, product.weight), group)
    return total if product.bias is None else total + product.bias


def _sum_experts(
    module: Any,
    group: WorkerGroup,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """Return the sum of all ranks' experts, as all routers have made the same choices."""
    features, weights = for_all_ranks(group, hidden_states, top_k_weights)
    return sum_ranks(type(module).forward(module, features, top_k_index, weights), group)


def _norm_heads(norm: Any, group: WorkerGroup, hidden_states: Tensor) -> Tensor:
    """Apply a norm to each head on this rank, with one weight for all heads."""
    stand_in = copy.copy(norm)
    stand_in._parameters = dict(zip(["weight"], for_all_ranks(group, norm.weight), strict=True))
    normed: Tensor = type(norm).forward(stand_in, hidden_states)
    return normed


def _norm_whole(norm: Any, group: WorkerGroup, hidden_states: Tensor) -> Tensor:
    """Apply a norm over all ranks' heads together, and return this rank's part."""
    # transformers computes the norm in float32, so sums of the ranks' own squares would give other
    # numbers.
    last = hidden_states.dim() - 1
    normed: Tensor = type(norm).forward(norm, gather_replicated(hidden_states, last, group))
    return take_own_part(normed, last, group)


def _share_features(
    group: WorkerGroup, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass a module's input features through `for_all_ranks`: a hook before its forward."""
    if args:
        return (*for_all_ranks(group, args[0]), *args[1:]), kwargs
    (features,) = for_all_ranks(group, kwargs["hidden_states"])
    return args, {**kwargs, "hidden_states": features}
