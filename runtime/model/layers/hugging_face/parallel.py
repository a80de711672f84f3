"""Decoder layers of transformers cut over the ranks of a worker, as Megatron-LM cuts them (arXiv 1909.08053).

transformers says which products are cut by columns, and which by rows (`base_model_tp_plan`). What is between those has
a rank's part of the heads and of the MLP; all else, embedding and head too, is alike on all ranks.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedConfig

from slipstream.runtime.config import ConfigError
from slipstream.runtime.model.layers.hugging_face.configuration import FAMILIES, KEY
from slipstream.runtime.model.layers.shards import Shard, cut_parameters
from slipstream.runtime.model.layers.tensor_parallel import for_all_ranks, sum_ranks
from slipstream.runtime.model.layers.worker_group import WorkerGroup

COLUMNS, ROWS = "colwise", "rowwise"

Plan = Mapping[str, str]
"""How the products of a decoder layer are cut, by their names in it."""


def plan_for(config: PreTrainedConfig, ranks: int) -> Plan:
    """How to cut a model's decoder layers over so many ranks. Raises ConfigError where that cannot be."""
    kind, begin = config.model_type, f"{FAMILIES[config.model_type].decoders}.*."
    plan = {name.removeprefix(begin): how for name, how in (config.base_model_tp_plan or {}).items()
            if name.startswith(begin)}
    wrong = f"training.tensor_parallel is {ranks}, and {KEY} names a {kind}"
    if not plan or set(plan.values()) - {COLUMNS, ROWS}:
        raise ConfigError(f"{wrong}, whose layers transformers does not cut by columns and rows alone; expected 1, or "
                          "a llama, mistral or qwen2")
    if config.attention_dropout:
        raise ConfigError(f"{wrong} with attention_dropout {config.attention_dropout}: what is dropped would depend on "
                          "the ranks; expected 0")
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if getattr(config, name) % ranks:
            raise ConfigError(f"{wrong} with {name} {getattr(config, name)}; expected a multiple of {ranks}")
    return plan


def cut_over(decoder: nn.Module, plan: Plan, group: WorkerGroup) -> None:
    """Leave of a decoder layer, `decoder.layer`, what this rank has."""
    layer, shards = decoder.get_submodule("layer"), dict[str, Shard]()
    for name, how in plan.items():
        product = layer.get_submodule(name)
        for own, _ in product.named_parameters():
            if how == COLUMNS or own == "weight":
                shards[f"layer.{name}.{own}"] = Shard(0 if how == COLUMNS else 1)
        if how == ROWS:
            product.forward = partial(_summed, product, group)
    cut_parameters(decoder, shards, group)
    decoder.shards = shards  # type: ignore[assignment]
    for parent in {name.rpartition(".")[0] for name, how in plan.items() if how == COLUMNS}:
        layer.get_submodule(parent).register_forward_pre_hook(partial(_for_all_ranks, group), with_kwargs=True)


def _summed(product: Any, group: WorkerGroup, x: Tensor) -> Tensor:
    """The sum of what all ranks' rows give, and then the bias."""
    total = sum_ranks(functional.linear(x, product.weight), group)
    return total if product.bias is None else total + product.bias


def _for_all_ranks(group: WorkerGroup, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
                   ) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All ranks begin with the same features, whose gradients are summed."""
    if args:
        return (*for_all_ranks(group, args[0]), *args[1:]), kwargs
    (features,) = for_all_ranks(group, kwargs["hidden_states"])
    return args, {**kwargs, "hidden_states": features}
