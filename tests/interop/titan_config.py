"""Configurations of torchtitan's Trainer for tests: `--module tests.interop.titan_config --config
small`.
"""

import os
import time
from dataclasses import dataclass

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer
from torchtitan.components.optimizer.optimizer import default_adamw
from torchtitan.config import DebugConfig, TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader
from torchtitan.models import deepseek_v3
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

SCHEDULE = {"warmup_steps": 2, "decay_ratio": 0.8, "min_lr_factor": 0.1}


class SlowData(HuggingFaceTextDataLoader):
    """Reading takes time."""

    @dataclass(kw_only=True, slots=True)
    class Config(HuggingFaceTextDataLoader.Config):
        """`pause`: seconds before each micro-batch."""

        pause: float = 0.0

    def __init__(self, config, **kwargs):
        super().__init__(config, **kwargs)
        self.pause = config.pause

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(self.pause)
            yield batch


def small() -> Trainer.Config:
    """A small Llama 3."""
    return _training(model_registry("debugmodel"))


def small_experts() -> Trainer.Config:
    """A small DeepSeek V3 of a dense layer and two of experts.

    Their bias moves fast.
    """
    spec = deepseek_v3.model_registry("debugmodel")
    del spec.model.layers[3:]
    for layer in spec.model.layers[1:]:
        layer.moe.load_balance_coeff = 0.01
    return _training(spec)


def _training(spec: ModelSpec) -> Trainer.Config:
    """A model whose attention runs on CPUs, with the data of `tests.interop.titan_training`."""
    assets, dtype = os.environ["TITAN_ASSETS"], os.environ["TITAN_DTYPE"]
    for layer in spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        model_spec=spec,
        hf_assets_path=assets,
        optimizer=default_adamw(lr=8e-4),
        activation_checkpoint=None,
        lr_scheduler=LRSchedulersContainer.Config(**SCHEDULE),
        training=TrainingConfig(
            local_batch_size=2,
            global_batch_size=8,
            seq_len=16,
            steps=20,
            max_norm=1.0,
            dtype=dtype,
            mixed_precision_param=dtype,
            mixed_precision_reduce=dtype,
        ),
        debug=DebugConfig(seed=42),
        dataloader=SlowData.Config(dataset="c4_test", dataset_path=f"{assets}/data"),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        checkpoint=CheckpointManager.Config(
            enable=True, interval=100, last_save_model_only=False, initial_load_model_only=False
        ),
    )
