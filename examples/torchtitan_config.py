"""A configuration of torchtitan, with plans around dead workers: what a user of these writes.

    torchrun ... -m torchtitan.train --module torchtitan_config --config llama3

TABLE is the folder of the plans. Here the data are numbers that count on; torchtitan_rerouted.py
runs it on CPUs.
"""

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from slipstream.runtime.torchtitan_pipelining import ReroutedTrainer, reroute

PIPELINES = 2
STAGES = 2
MICROBATCHES = 4
LENGTH = 32
VOCABULARY = 2048
STEPS = 6
KILLED_IN = 3
"""Iteration in which a worker is killed."""


class NoTokenizer(BaseTokenizer):
    """Stand-in for a tokenizer: samples are numbers, which need none."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """No settings."""

    def __init__(self, **_: Any) -> None:
        super().__init__()

    encode = decode = get_vocab_size = lambda *_, **__: None


class Counting(BaseDataLoader):
    """Data loader of samples that count on from a random number."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """No settings."""

    def __init__(self, *, dp_rank: int, local_batch_size: int, seq_len: int, **_: Any) -> None:
        self._stream, self._shape = (
            torch.Generator().manual_seed(dp_rank),
            (local_batch_size, seq_len),
        )

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield micro-batches; before one of them, the process of rank KILLED kills itself."""
        samples, length = self._shape
        for number in range(STEPS * MICROBATCHES):
            if (
                os.environ.get("KILLED") == os.environ["RANK"]
                and number == (KILLED_IN - 1) * MICROBATCHES
            ):
                os.kill(os.getpid(), signal.SIGKILL)
            first = torch.randint(VOCABULARY, (samples, 1), generator=self._stream)
            tokens = (first + torch.arange(length + 1)) % VOCABULARY
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    state_dict = load_state_dict = lambda *_: {}


def llama3() -> ReroutedTrainer.Config:
    """Return torchtitan's configuration of the run, with the table of plans to use."""
    spec = model_registry("debugmodel")
    for layer in spec.model.layers:  # torchtitan's default attention has no backward on CPUs
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return reroute(
        Trainer.Config(
            model_spec=spec,
            tokenizer=NoTokenizer.Config(),
            dataloader=Counting.Config(),
            activation_checkpoint=None,
            loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
            optimizer=default_adamw(lr=8e-4),
            training=TrainingConfig(
                local_batch_size=MICROBATCHES,
                seq_len=LENGTH,
                steps=STEPS,
                disable_cuda_graphs=True,
                mixed_precision_param="float32",
            ),
            parallelism=ParallelismConfig(
                pipeline_parallel_degree=STAGES,
                data_parallel_replicate_degree=PIPELINES,
                data_parallel_shard_degree=1,
                spmd_backend="partial_dtensor",
            ),
            metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
            debug=DebugConfig(seed=1),
        ),
        table=os.environ["TABLE"],
    )
