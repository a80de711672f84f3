"""Decoder layers of transformers cut over the ranks of a worker, all of which have all tokens.

A rank has a part of the heads and of the MLP's width, as in Megatron-LM (arXiv 1909.08053), and of the experts of a
mixture. Products are cut by columns, then by rows, and what rows and experts give is summed over the ranks. All else is
whole on each: embedding, head, norms, routers. Its gradient is whole there, too: where ranks begin to use what all have
for a part of the work, the backward sums over them.
"""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig

from slipstream.runtime.config import ConfigError
from slipstream.runtime.model.layers.hugging_face import experts
from slipstream.runtime.model.layers.hugging_face.configuration import FAMILIES, KEY, is_dense
from slipstream.runtime.model.layers.shards import Shard, cut_parameters
from slipstream.runtime.model.layers.tensor_parallel import for_all_ranks, gather_whole, own_part, sum_ranks
from slipstream.runtime.model.layers.worker_group import WorkerGroup

_COLUMNS = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
_ROWS = {"o_proj", "down_proj"}
_NORMS = {"q_norm", "k_norm"}


def require_even_cut(config: PreTrainedConfig, ranks: int) -> None:
    """Raises ConfigError where a model's decoder layers cannot be cut over so many ranks."""
    kind = config.model_type
    wrong = f"training.tensor_parallel is {ranks}, and {KEY} names a {kind}"
    if not FAMILIES[kind].can_be_cut:
        known = ", ".join(name for name, family in FAMILIES.items() if family.can_be_cut)
        raise ConfigError(f"{wrong}, whose layers cannot be cut; expected 1, or one of {known}")
    if config.attention_dropout:
        raise ConfigError(f"{wrong} with attention_dropout {config.attention_dropout}: what is dropped would depend on "
                          "the ranks; expected 0")
    if FAMILIES[kind].experts and config._experts_implementation != experts.NAME:
        raise ConfigError(f"{wrong} with experts_implementation {config._experts_implementation!r}, which wants all "
                          f"experts; expected {experts.NAME!r}")
    for name in _cut_by(config):
        if getattr(config, name) % ranks:
            raise ConfigError(f"{wrong} with {name} {getattr(config, name)}; expected a multiple of {ranks}")


def _cut_by(config: PreTrainedConfig) -> Iterator[str]:
    """The keys of what ranks have equal parts of."""
    yield from ("num_attention_heads", "num_key_value_heads")
    mixture = FAMILIES[config.model_type].experts
    if not mixture or any(is_dense(config, index) for index in range(config.num_hidden_layers)):
        yield "intermediate_size"
    if mixture:
        yield "num_local_experts" if config.model_type == "mixtral" else "num_experts"
    if hasattr(config, "shared_expert_intermediate_size"):
        yield "shared_expert_intermediate_size"


def cut_over(decoder: nn.Module, group: WorkerGroup) -> None:
    """Leave of a decoder layer, `decoder.layer`, what this rank has."""
    layer, shards, sharing = decoder.get_submodule("layer"), dict[str, Shard](), dict[str, nn.Module]()
    modules: dict[str, Any] = dict(layer.named_modules())
    for name, module in modules.items():
        parent, _, own = name.rpartition(".")
        if own in _COLUMNS | _ROWS:
            dim = 0 if own in _COLUMNS else 1
            shards |= {f"layer.{name}.{one}": Shard(dim) for one, tensor in module.named_parameters()
                       if tensor.dim() > dim}
            sharing[parent] = modules[parent]
            if own in _ROWS:
                module.forward = partial(_sum_rows, module, group)
        elif own in _NORMS:
            of_heads = module.weight.shape[0] == modules[parent].head_dim
            module.forward = partial(_norm_heads if of_heads else _norm_whole, module, group)
        elif own == "experts":
            shards |= {f"layer.{name}.{one}": Shard(0) for one, _ in module.named_parameters()}
            module.first_expert = group.rank() * module.num_experts // group.size()
            module.forward = partial(_sum_experts, module, group)
    cut_parameters(decoder, shards, group)
    decoder.shards = shards  # type: ignore[assignment]
    for module in sharing.values():
        module.register_forward_pre_hook(partial(_for_all_ranks, group), with_kwargs=True)


def _sum_rows(product: Any, group: WorkerGroup, x: Tensor) -> Tensor:
    """The sum of what all ranks' rows give, and then the bias."""
    total = sum_ranks(functional.linear(x, product.weight), group)
    return total if product.bias is None else total + product.bias


def _sum_experts(module: Any, group: WorkerGroup, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
                 ) -> Tensor:
    """The sum of what all ranks' experts add. All ranks' routers have made the same choices."""
    features, weights = for_all_ranks(group, hidden_states, top_k_weights)
    return sum_ranks(type(module).forward(module, features, top_k_index, weights), group)


def _norm_heads(norm: Any, group: WorkerGroup, hidden_states: Tensor) -> Tensor:
    """A norm of each head, with one weight for all heads."""
    stand_in = copy.copy(norm)
    stand_in._parameters = dict(zip(["weight"], for_all_ranks(group, norm.weight), strict=True))
    found: Tensor = type(norm).forward(stand_in, hidden_states)
    return found


def _norm_whole(norm: Any, group: WorkerGroup, hidden_states: Tensor) -> Tensor:
    """A norm over all heads together, which all ranks compute: transformers does it in float32, so that sums of the
    ranks' own squares would give other numbers."""
    last = hidden_states.dim() - 1
    found: Tensor = type(norm).forward(norm, gather_whole(hidden_states, last, group))
    return own_part(found, last, group)


def _for_all_ranks(group: WorkerGroup, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
                   ) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All ranks begin with the same features, whose gradients are summed."""
    if args:
        return (*for_all_ranks(group, args[0]), *args[1:]), kwargs
    (features,) = for_all_ranks(group, kwargs["hidden_states"])
    return args, {**kwargs, "hidden_states": features}
