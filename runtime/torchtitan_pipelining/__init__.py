"""Train by re-routed schedules in torchtitan's own Trainer, and survive deaths of workers.

    def llama3_8b() -> ReroutedTrainer.Config:          # in a module of yours
        return reroute(config_registry.llama3_8b(), table="table")

    torchrun ... -m torchtitan.train --module my_module --config llama3_8b --parallelism...

torchtitan's `parallelize_fn` (FSDP, tensor, context and expert parallelism, float8, compile) acts
inside each worker; the pipelines around it are Slipstream's. docs/neighbours.md has what this
needs. Written for torchtitan 0.3.0.

    trainer             the Trainer, and its configuration
    pipelines_loader    data of all pipelines, as one data loader
    inside_torchtitan   all that is assumed of torchtitan beyond its public names
"""

from slipstream.runtime.torchtitan_pipelining.trainer import ReroutedTrainer as ReroutedTrainer
from slipstream.runtime.torchtitan_pipelining.trainer import reroute as reroute
