"""Configurations of torchtitan's Trainer that a run refuses: `--module tests.interop.titan_refused
--config lora`.
"""

from dataclasses import dataclass, fields

from torchtitan.components.lora import LoRAConverter
from torchtitan.components.loss import MSELoss
from torchtitan.components.optimizer.optimizer import default_adamw
from torchtitan.components.quantization import float8 as titans_float8
from torchtitan.models import llama3, muse_glimmer, qwen3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.common.linear import Linear
from torchtitan.trainer import Trainer

from tests.interop.titan_config import small


def _of(spec):
    """`small`, with another model."""
    config = small()
    config.model_spec = spec
    for layer in spec.model.layers:
        if spec.name == "llama3":
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return config


def lora():
    return _of(
        llama3.model_registry("debugmodel", converters=[LoRAConverter.Config(rank=4, alpha=8.0)])
    )


def fused_collectives():
    return _of(llama3.model_registry("debugmodel", tp_gemm_backend="dist_gemm"))


def experts():
    return _of(qwen3.model_registry("debugmodel_moe"))


def more_than_a_chain():
    return _of(muse_glimmer.model_registry("debugmodel"))


def documents():
    """Attention that is given masks."""
    config = small()
    config.model_spec = llama3.model_registry("debugmodel")
    return config


class Float8(Linear):
    """In the place of torchtitan's, which is None where torchao is not installed."""

    @dataclass(kw_only=True, slots=True)
    class Config(Linear.Config):
        """As it is."""


def float8():
    config, titans_float8.Float8Linear = small(), Float8
    head = config.model_spec.model.lm_head
    config.model_spec.model.lm_head = Float8.Config(
        **{field.name: getattr(head, field.name) for field in fields(head) if field.init}
    )
    return config


def _optimizer(**options):
    config = small()
    config.optimizer = default_adamw(lr=8e-4)
    for name, value in options.items():
        setattr(config.optimizer, name, value)
    return config


def factory_arguments():
    return _optimizer(optimizer_factory_kwargs_by_name={"AdamW": {"amsgrad": True}})


def no_groups():
    return _optimizer(param_groups=[])


def adam():
    config = _optimizer()
    config.optimizer.param_groups[0].optimizer_name = "Adam"
    return config


def amsgrad():
    config = _optimizer()
    config.optimizer.param_groups[0].optimizer_kwargs["amsgrad"] = True
    return config


def squares():
    config = small()
    config.loss = MSELoss.Config()
    return config


@dataclass(kw_only=True, slots=True)
class OwnConfig(Trainer.Config):
    """Of a Trainer of its own."""


def own_trainer():
    trainer_config = small()
    return OwnConfig(
        **{
            field.name: getattr(trainer_config, field.name)
            for field in fields(trainer_config)
            if field.init
        }
    )
