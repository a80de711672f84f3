"""torchtitan's Trainer, in which each worker runs its part of a plan around dead workers."""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.utils import dist_sum_tensor
from torchtitan.tools import utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from slipstream.runtime.torch_pipelining import CommunicationError, Place, ReroutedSchedule, ReroutedStage, Routes
from slipstream.runtime.torchtitan_pipelining.inside_torchtitan import (
    WorkerDims,
    expert_counts,
    pass_local_tensors,
    split_model,
)
from slipstream.runtime.torchtitan_pipelining.pipelines_loader import Batch, PipelinesLoader

SEED_KEY = "seed of torchtitan"


class ReroutedTrainer(Trainer):
    """A Trainer of one process of a worker.

    Its configuration is that of torchtitan's own run with all workers, and says which plans to use. The
    worker of a process is named by its rank, or by the environment variable SLIPSTREAM_WORKER.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's configuration, and the plans."""

        table: str = ""
        """Folder with a table of schedules, as `slipstream table ... --optimizer synchronous` writes it."""
        failed: str = ""
        """Workers that are down when the run begins, such as "1.1 0.2"."""
        patience: float = 300.0
        """Seconds after which a process that is alive but silent is left out, and waits end in an error."""

    ntokens_seen: int
    pp_schedule: ReroutedSchedule | None

    def __init__(self, config: Config) -> None:
        routes = Routes.read(config.table, config.failed.split())
        _require_supported(config, routes)
        device = utils.get_local_device()
        utils.device_module.set_device(device)
        torch.autograd.set_multithreading_enabled(False)  # as torchtitan does when it initialises torch.distributed
        self.place = Place.take(routes, inner=_count_ranks(config, routes), device=device,
                                transport="nccl" if device.type == "cuda" else "gloo", patience=config.patience,
                                returns=False)
        self._modules: dict[int, nn.Module] = {}
        """Stages of this worker."""
        self._losses: dict[int, Tensor] = {}
        """Sum of the losses of the micro-batches that this process ran, by their pipeline."""
        self._valid_tokens = torch.tensor(0)
        self._norm = self._greatest_loss = 0.0
        super().__init__(_fit_to_worker(config, self.place, self._make_modules))

    def init_distributed(self) -> ParallelDims:
        """Return the dimensions of this worker; `Place.take` has initialised torch.distributed."""
        given, ranks = self.config.parallelism, self.place.ranks
        cp, tp = given.context_parallel_degree, given.tensor_parallel_degree
        return WorkerDims(dp_replicate=1, dp_shard=ranks // (cp * tp), cp=cp, tp=tp, pp=1,
                          ep=given.expert_parallel_degree, world_size=ranks, spmd_backend=given.spmd_backend,
                          workers=len(self.place.routes.grid_workers))

    def train(self) -> None:
        """Train; then wait for all workers, from which one that owes its last step learns it."""
        super().train()
        self.place.close()

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Run one iteration, again if a worker dies meanwhile, and step."""
        learning_rates = self.lr_schedulers.get_metrics()
        batches = [next(data_iterator) for _ in range(self.place.routes.microbatches)]
        valid, seen = self._count_valid(batches), self.ntokens_seen
        self._valid_tokens = torch.tensor(sum(valid.values()), device=self.device)
        while not self._try_iteration(batches, valid):
            pass
        loss = self.place.last_sum
        if not math.isfinite(loss):
            raise RuntimeError(f"the loss of step {self.step} is {loss}; expected a finite number: training stops")
        self.ntokens_seen = seen + sum(labels.numel() for _, labels in batches) // self.parallel_dims.cp
        parameters = [parameter for part in self.model_parts for parameter in part.parameters()]
        norm = torch.tensor(self._norm, dtype=torch.float64, device=self.device)
        # one by one, since parameters of experts are on other meshes
        torch.nn.utils.clip_grads_with_norm_(parameters, self.config.training.max_norm, norm, foreach=False)
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        if self.metrics_processor.should_log(self.step):
            self.metrics_processor.log(
                self.step, loss, self._greatest_loss, self._norm,
                {"n_tokens_seen": self.ntokens_seen * self._data_ranks, **learning_rates})

    def pp_forward_backward_step(self, *, input_dict_mbs: Sequence[dict[str, Tensor]], label_mbs: Sequence[Tensor],
                                 global_valid_tokens: Tensor) -> Tensor:
        """Run this worker's part of an iteration, given the micro-batches of all pipelines.

        Returns the sum of the losses that this process has computed.
        """
        self._valid_tokens, self._losses = global_valid_tokens, {}
        schedule, numbers = self._open_schedule(), self.place.routes.numbers_of(self.place.worker)
        prepared = [self._prepare(input_dict_mbs[number], label_mbs[number]) for number in numbers]
        with self.train_context():
            schedule.step(
                arg_mbs=[(inputs,) for inputs, _, _ in prepared] if self.pp_has_first_stage else None,
                kwarg_mbs=[others for _, _, others in prepared],
                target_mbs=[(sample.pipeline, labels) for sample, (_, labels, _)
                            in zip(schedule.samples, prepared, strict=True)])
        return torch.stack([torch.zeros((), device=self.device), *self._losses.values()]).sum()

    def _prepare(self, inputs: dict[str, Any], labels: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Return input, labels and other arguments of a micro-batch, on this device."""
        moved = {key: value.to(self.device) if isinstance(value, Tensor) else value for key, value in inputs.items()}
        prepared: tuple[Tensor, Tensor, dict[str, Any]] = self.post_dataloading_process(moved, labels.to(self.device))
        return prepared

    def _try_iteration(self, batches: Sequence[Batch], valid: dict[int, int]) -> bool:
        """Run an iteration; return True if this process is to step. False: after a death, run it again."""
        self.optimizers.zero_grad()
        counts = {stage: expert_counts(module) for stage, module in self._modules.items()}
        for count in (count for stage_counts in counts.values() for count in stage_counts):
            count.zero_()
        try:
            loss = self.forward_backward_step(input_dict=[inputs for inputs, _ in batches],
                                              labels=[labels for _, labels in batches],
                                              global_valid_tokens=self._valid_tokens)
            self._norm = self._open_schedule().grad_norm()
            with self.place.mates.failing_together():
                for stage, stage_counts in counts.items():
                    if stage_counts:
                        self.place.session.sum_over_sharers(f"stage {stage}", stage_counts)
            if self.metrics_processor.should_log(self.step):
                self._greatest_loss = max(self._mean_loss(pipeline, tokens) for pipeline, tokens in valid.items())
            self.place.commit(loss.item() * self._data_ranks)
            return True
        except CommunicationError as error:
            logger.warning(f"step {self.step}: {error}")
            self.pp_schedule = None
            owes_step = self.place.recover()
            logger.warning(f"step {self.step}: {len(self.place.routes.workers)} workers go on")
            return owes_step

    def _make_modules(self, model: nn.Module, *, parallelize_fn: Callable[..., nn.Module], loss_fn: Any,  # noqa: ARG002
                      device: torch.device, model_config: Any,  # noqa: ARG002
                      **settings: Any) -> tuple[None, list[nn.Module], bool, bool]:
        """Make this worker's stages: torchtitan's `pipelining_fn`. Their schedule is made in the first step."""
        routes = self.place.routes
        stages = routes.stages_of(self.place.worker)
        parts = split_model(model, stages, routes.stages, settings["parallelism"], len(model_config.layers))
        self._modules = {stage: parallelize_fn(part, **settings) for stage, part in zip(stages, parts, strict=True)}
        last = routes.stages - 1
        for stage, module in self._modules.items():
            pass_local_tensors(module, settings["parallel_dims"], is_first=stage == 0, is_last=stage == last,
                               sequence_parallel=settings["parallelism"].enable_sequence_parallel)
        return None, list(self._modules.values()), 0 in stages, last in stages

    def _open_schedule(self) -> ReroutedSchedule:
        """Return the schedule; make it if there is none, as after a failure."""
        if self.pp_schedule is None:
            stages = [ReroutedStage(module, stage, self.place, self.device) for stage, module in self._modules.items()]
            self.pp_schedule = ReroutedSchedule(stages, self._find_loss, scale_grads=False)
        return self.pp_schedule

    def _find_loss(self, output: Tensor, target: tuple[int, Tensor]) -> Tensor:
        """Return the loss of a micro-batch, divided by the number of all tokens of the iteration."""
        pipeline, labels = target
        loss: Tensor = self.loss_fn(output, labels, self._valid_tokens)[0]
        own = loss.to_local() if isinstance(loss, DTensor) else loss
        self._losses[pipeline] = self._losses.get(pipeline, torch.zeros_like(own)) + own.detach()
        return loss

    def _mean_loss(self, pipeline: int, tokens: int) -> float:
        """Return the mean loss of the micro-batches of a pipeline, whoever ran them."""
        own = self._losses.get(pipeline)
        share = self.place.sum_over_all(0.0 if own is None else own.item() / self.parallel_dims.tp)
        return share * float(self._valid_tokens) / tokens

    def _count_valid(self, batches: Sequence[Batch]) -> dict[int, int]:
        """Return how many tokens of the iteration count, by pipeline."""
        counts: dict[int, int] = defaultdict(int)
        for number, (_, labels) in enumerate(batches):
            counts[self.place.routes.sample_of(number).pipeline] += int((labels != IGNORE_INDEX).sum())
        if self.parallel_dims.dp_enabled:
            own = torch.tensor(list(counts.values()), device=self.device)
            total = dist_sum_tensor(own, self.parallel_dims.get_mesh("batch"))
            counts = dict(zip(counts, total.tolist(), strict=True))
        return counts

    @property
    def _data_ranks(self) -> int:
        """Number of processes of this worker that have different tokens."""
        return self.place.ranks // int(self.parallel_dims.tp)


def reroute(config: Trainer.Config, table: str, failed: str = "") -> ReroutedTrainer.Config:
    """Return the configuration of a ReroutedTrainer for one of torchtitan's Trainer."""
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    return ReroutedTrainer.Config(**given, table=table, failed=failed)


def _count_ranks(config: Trainer.Config, routes: Routes) -> int:
    """Return how many processes a worker has: those of its shards and of its context and tensor parallelism."""
    given = config.parallelism
    shards = given.data_parallel_shard_degree
    if shards == -1:
        return int(os.environ["WORLD_SIZE"]) // len(routes.workers)
    return int(shards * given.context_parallel_degree * given.tensor_parallel_degree)


def _require_supported(config: Trainer.Config, routes: Routes) -> None:
    """Raise ValueError for settings that do not fit the plans, or cannot be carried out."""
    workers, given = routes.grid_workers, config.parallelism
    pipelines = 1 + workers[-1].pipeline
    wanted = {"pipeline_parallel_degree": len(workers) // pipelines, "data_parallel_replicate_degree": pipelines}
    for name, value in wanted.items():
        if getattr(given, name) != value:
            raise ValueError(f"parallelism.{name} is {getattr(given, name)}; expected {value}, as in the plans of "
                             f"{config.table}")
    samples = routes.microbatches * given.pipeline_parallel_microbatch_size
    if config.training.local_batch_size * pipelines != samples or config.training.global_batch_size > 0:
        raise ValueError(f"training.local_batch_size is {config.training.local_batch_size}; expected "
                         f"{samples / pipelines:g}, as in the plans of {config.table}, and no "
                         "training.global_batch_size")
    if given.spmd_backend == "full_dtensor":
        raise ValueError("parallelism.spmd_backend is full_dtensor; expected partial_dtensor or spmd_types, in which "
                         "stages can pass plain tensors")
    if config.validator.enable:
        raise ValueError("validator.enable is set; expected no validation during training")
    if config.checkpoint.enable and not config.checkpoint.load_only:
        raise ValueError("checkpoint.enable is set; expected checkpoint.load_only as well: a worker has a part of the "
                         "model only, and would write it as if it were all")


def _fit_to_worker(config: Any, place: Place, make_modules: Callable[..., Any]) -> Any:
    """Return the configuration of one worker.

    It reads the data of all pipelines, and initialises its parameters as its rank of a pipeline would in
    torchtitan, so that all that have a stage begin with the same.
    """
    routes, size = place.routes, config.parallelism.pipeline_parallel_microbatch_size
    samples = [routes.sample_of(number) for number in range(routes.microbatches)]
    if place.worker == routes.workers[0] and place.rank == 0 and not place.knows(SEED_KEY):
        place.publish(SEED_KEY, str(torch.initial_seed() if config.debug.seed is None else config.debug.seed))
    seed, is_first = int(place.read(SEED_KEY)) + place.worker.column, place.worker == routes.workers[0]
    return replace(
        config, model_spec=replace(config.model_spec, pipelining_fn=make_modules),
        dataloader=PipelinesLoader.Config(one=config.dataloader,
                                          pipelines=tuple(sample.pipeline for sample in samples)),
        training=replace(config.training, local_batch_size=routes.microbatches * size),
        debug=replace(config.debug, seed=seed % 2**63),
        metrics=replace(config.metrics, enable_tensorboard=config.metrics.enable_tensorboard and is_first,
                        enable_wandb=config.metrics.enable_wandb and is_first))
