"""Configurations of torchtitan's Trainer and of ours.

Its Trainer has two replicas, ours two pipelines of two stages.

    --module tests.interop.titan_rerouted --config llama3

torchtitan's own replicas are whole models: with torch 2.13, its pipelines do not run.

TITAN_TABLE is the folder of the plans, TITAN_KILL the worker that dies, with the step: "1.1@3".
"""

import os
import signal
from dataclasses import dataclass, fields

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.trainer import Trainer

from slipstream.runtime.torchtitan_pipelining import ReroutedTrainer, reroute
from tests.interop import titan_config


class MortalTrainer(ReroutedTrainer):
    """Its process may be killed in the midst of a step."""

    @dataclass(kw_only=True, slots=True)
    class Config(ReroutedTrainer.Config):
        """The same."""

    def post_dataloading_process(self, input_dict, labels):
        if os.environ.get("TITAN_KILL") == f"{self.place.worker}@{self.step}":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().post_dataloading_process(input_dict, labels)


def _in_replicas(config: Trainer.Config) -> Trainer.Config:
    """Two replicas, of four micro-batches of one sample each.

    Experts compute in bfloat16, so sizes matter.
    """
    config.training.local_batch_size, config.training.global_batch_size = 1, 8
    config.training.steps, config.training.disable_cuda_graphs = 6, True
    config.parallelism.data_parallel_replicate_degree = 2
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint = CheckpointManager.Config(
        enable=True, load_only=True, initial_load_path=os.environ["TITAN_BEGIN"]
    )
    return config


def _rerouted(config: Trainer.Config) -> MortalTrainer.Config:
    config.parallelism.pipeline_parallel_degree = 2
    config.training.local_batch_size, config.training.global_batch_size = 4, -1
    trainer_config = reroute(config, os.environ["TITAN_TABLE"], os.environ.get("TITAN_FAILED", ""))
    return MortalTrainer.Config(
        **{field.name: getattr(trainer_config, field.name) for field in fields(trainer_config)}
    )


def llama3() -> Trainer.Config:
    return _in_replicas(titan_config.small())


def rerouted_llama3() -> MortalTrainer.Config:
    return _rerouted(llama3())


def deepseek_v3() -> Trainer.Config:
    return _in_replicas(titan_config.small_experts())


def rerouted_deepseek_v3() -> MortalTrainer.Config:
    return _rerouted(deepseek_v3())


def beginning(config: Trainer.Config) -> Trainer.Config:
    """The parameters that both begin with, written by one process."""
    config.training.disable_cuda_graphs = True
    config.checkpoint = CheckpointManager.Config(enable=True, create_seed_checkpoint=True)
    return config


def llama3_beginning() -> Trainer.Config:
    return beginning(titan_config.small())


def deepseek_v3_beginning() -> Trainer.Config:
    return beginning(titan_config.small_experts())
