"""Train in torchtitan's Trainer, by schedules that re-route around dead workers."""

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

from slipstream.runtime.torch_pipelining import (
    CommunicationError,
    Place,
    ReroutedSchedule,
    ReroutedStage,
    Routes,
)
from slipstream.runtime.torchtitan_pipelining.inside_torchtitan import (
    WorkerDims,
    expert_counts,
    pass_local_tensors,
    split_model,
)
from slipstream.runtime.torchtitan_pipelining.pipelines_loader import Batch, PipelinesLoader

SEED_KEY = "seed of torchtitan"


class ReroutedTrainer(Trainer):
    """Trainer of torchtitan that runs one worker's part of a schedule, and survives deaths.

    The configuration is as for torchtitan's own run with all workers, and says which schedules to
    use. Rank, or the environment variable SLIPSTREAM_WORKER, says which worker a process is. Raises
    ValueError for settings that do not fit the schedules, and the errors of `Routes.read` and
    `Place.take`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Configuration of torchtitan's Trainer, with the schedules to train by."""

        table: str = ""
        """Folder that `slipstream table ... --optimizer synchronous` wrote, or a schedule file."""
        failed: str = ""
        """Workers that are down when the run begins, such as "1.1 0.2"."""
        patience: float = 300.0
        """Seconds after which a silent process is left out, and waits raise an error."""

    ntokens_seen: int
    pp_schedule: ReroutedSchedule | None

    def __init__(self, config: Config) -> None:
        routes = Routes.read(config.table, config.failed.split())
        _require_supported(config, routes)
        device = utils.get_local_device()
        utils.device_module.set_device(device)
        # As torchtitan does when it initialises torch.distributed.
        torch.autograd.set_multithreading_enabled(False)
        # This process becomes one worker, which reports to the others and watches them.
        self.place = Place.take(
            routes,
            inner=_count_ranks(config, routes),
            device=device,
            transport="nccl" if device.type == "cuda" else "gloo",
            patience=config.patience,
            returns=False,
        )
        self._modules: dict[int, nn.Module] = {}
        self._losses: dict[int, Tensor] = {}
        """Sum of the losses of the micro-batches that this process ran, by their pipeline."""
        self._valid_tokens = torch.tensor(0)
        self._norm = self._greatest_loss = 0.0
        # From here on torchtitan builds the model, of which this worker keeps its stages.
        super().__init__(_fit_to_worker(config, self.place, self._make_modules))

    def init_distributed(self) -> ParallelDims:
        """Return the parallel dimensions of this worker."""
        # `Place.take` has initialised torch.distributed already.
        parallelism, ranks = self.config.parallelism, self.place.ranks
        cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
        return WorkerDims(
            dp_replicate=1,
            dp_shard=ranks // (cp * tp),
            cp=cp,
            tp=tp,
            pp=1,
            ep=parallelism.expert_parallel_degree,
            world_size=ranks,
            spmd_backend=parallelism.spmd_backend,
            workers=len(self.place.routes.grid_workers),
        )

    def train(self) -> None:
        """Train, and then wait for all workers: one may still owe the last step."""
        super().train()
        self.place.close()

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """Run one iteration, again if a worker dies meanwhile, and make the optimizer step.

        Raises RuntimeError if the loss is not finite, and the errors of `Place.recover`.
        """
        # Read all pipelines' micro-batches, and count the tokens that losses are divided by.
        learning_rates = self.lr_schedulers.get_metrics()
        batches = [next(data_iterator) for _ in range(self.place.routes.microbatches)]
        valid, seen = self._count_valid(batches), self.ntokens_seen
        self._valid_tokens = torch.tensor(sum(valid.values()), device=self.device)
        # Run until all live workers have the gradients of a whole iteration.
        while not self._try_iteration(batches, valid):
            pass  # a worker has died: the iteration is run again by other routes
        # A step on a loss that is not finite would spoil all parameters.
        loss = self.place.last_sum
        if not math.isfinite(loss):
            raise RuntimeError(
                f"the loss of step {self.step} is {loss}; expected a finite number: training stops"
            )
        # A repeated iteration counts its tokens once.
        self.ntokens_seen = (
            seen + sum(labels.numel() for _, labels in batches) // self.parallel_dims.cp
        )
        # Clip by the norm over all workers, and step.
        parameters = [parameter for part in self.model_parts for parameter in part.parameters()]
        norm = torch.tensor(self._norm, dtype=torch.float64, device=self.device)
        # one by one, since parameters of experts are on other meshes
        torch.nn.utils.clip_grads_with_norm_(
            parameters, self.config.training.max_norm, norm, foreach=False
        )
        self.checkpointer.maybe_wait_for_staging()
        self.optimizers.step()
        self.lr_schedulers.step()
        if self.metrics_processor.should_log(self.step):
            self.metrics_processor.log(
                self.step,
                loss,
                self._greatest_loss,
                self._norm,
                {"n_tokens_seen": self.ntokens_seen * self._data_ranks, **learning_rates},
            )

    def pp_forward_backward_step(
        self,
        *,
        input_dict_mbs: Sequence[dict[str, Tensor]],
        label_mbs: Sequence[Tensor],
        global_valid_tokens: Tensor,
    ) -> Tensor:
        """Run this worker's part of an iteration; return the sum of the losses computed here."""
        # Only the micro-batches of which this worker runs a stage are prepared.
        self._valid_tokens, self._losses = global_valid_tokens, {}
        schedule, numbers = self._open_schedule(), self.place.routes.numbers_of(self.place.worker)
        prepared = [self._prepare(input_dict_mbs[number], label_mbs[number]) for number in numbers]
        args = [(inputs,) for inputs, _, _ in prepared]
        with self.train_context():
            schedule.step(
                arg_mbs=args if self.pp_has_first_stage else None,
                kwarg_mbs=[others for _, _, others in prepared],
                target_mbs=[
                    (sample.pipeline, labels)
                    for sample, (_, labels, _) in zip(schedule.samples, prepared, strict=True)
                ],
            )
        return torch.stack([torch.zeros((), device=self.device), *self._losses.values()]).sum()

    def _prepare(
        self, inputs: dict[str, Any], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        # Returns torchtitan's inputs, labels and keyword arguments of a micro-batch.
        moved = dict(inputs)
        for key, value in inputs.items():
            if isinstance(value, Tensor):
                moved[key] = value.to(self.device)
        prepared: tuple[Tensor, Tensor, dict[str, Any]] = self.post_dataloading_process(
            moved, labels.to(self.device)
        )
        return prepared

    def _try_iteration(self, batches: Sequence[Batch], valid: dict[int, int]) -> bool:
        """Run an iteration, or recover if a worker dies; return whether to step now."""
        # Start from zero: a failed attempt may have left gradients and counts of tokens.
        self.optimizers.zero_grad()
        counts = {stage: expert_counts(module) for stage, module in self._modules.items()}
        for count in (count for stage_counts in counts.values() for count in stage_counts):
            count.zero_()
        try:
            loss = self.forward_backward_step(
                input_dict=[inputs for inputs, _ in batches],
                labels=[labels for _, labels in batches],
                global_valid_tokens=self._valid_tokens,
            )
            self._norm = self._open_schedule().grad_norm()
            # Peers have run different micro-batches, so each has counted a part of the tokens.
            with self.place.mates.failing_together():
                for stage, stage_counts in counts.items():
                    if stage_counts:
                        self.place.session.sum_over_sharers(f"stage {stage}", stage_counts)
            if self.metrics_processor.should_log(self.step):
                self._greatest_loss = max(
                    self._mean_loss(pipeline, tokens) for pipeline, tokens in valid.items()
                )
            # Returns once all live workers agree that the iteration counts.
            self.place.commit(loss.item() * self._data_ranks)
            return True
        except CommunicationError as error:
            logger.warning(f"step {self.step}: {error}")
            self.pp_schedule = None  # the next step makes one for the new routes
            # If others have committed before the failure, the step is due here too.
            owes_step = self.place.recover()
            logger.warning(f"step {self.step}: {len(self.place.routes.workers)} workers go on")
            return owes_step

    def _make_modules(
        self,
        model: nn.Module,
        *,
        parallelize_fn: Callable[..., nn.Module],
        loss_fn: Any,  # noqa: ARG002
        device: torch.device,  # noqa: ARG002
        model_config: Any,
        **settings: Any,
    ) -> tuple[None, list[nn.Module], bool, bool]:
        """Make this worker's stages, in place of torchtitan's `pipelining_fn`."""
        # Returns what torchtitan expects: no schedule yet, the modules, and whether the first and
        # the last stage are among them.
        routes = self.place.routes
        stages = routes.stages_of(self.place.worker)
        parts = split_model(
            model, stages, routes.stages, settings["parallelism"], len(model_config.layers)
        )
        self._modules = {
            stage: parallelize_fn(part, **settings)
            for stage, part in zip(stages, parts, strict=True)
        }
        last = routes.stages - 1
        for stage, module in self._modules.items():
            pass_local_tensors(
                module,
                settings["parallel_dims"],
                is_first=stage == 0,
                is_last=stage == last,
                sequence_parallel=settings["parallelism"].enable_sequence_parallel,
            )
        return None, list(self._modules.values()), 0 in stages, last in stages

    def _open_schedule(self) -> ReroutedSchedule:
        """Return the schedule of this generation, made anew after a failure."""
        if self.pp_schedule is None:
            stages = [
                ReroutedStage(module, stage, self.place, self.device)
                for stage, module in self._modules.items()
            ]
            self.pp_schedule = ReroutedSchedule(stages, self._find_loss, scale_grads=False)
        return self.pp_schedule

    def _find_loss(self, output: Tensor, target: tuple[int, Tensor]) -> Tensor:
        """Return a micro-batch's loss, divided by the iteration's tokens, and add it to a sum."""
        pipeline, labels = target
        loss: Tensor = self.loss_fn(output, labels, self._valid_tokens)[0]
        part = loss.to_local() if isinstance(loss, DTensor) else loss
        self._losses[pipeline] = self._losses.get(pipeline, torch.zeros_like(part)) + part.detach()
        return loss

    def _mean_loss(self, pipeline: int, tokens: int) -> float:
        """Return the mean loss of a pipeline's micro-batches, over its `tokens` labels."""
        # All workers call this together.
        loss = self._losses.get(pipeline)
        # Ranks of tensor parallelism have the same loss.
        part = 0.0 if loss is None else loss.item() / self.parallel_dims.tp
        share = self.place.sum_over_all(part)
        return share * float(self._valid_tokens) / tokens

    def _count_valid(self, batches: Sequence[Batch]) -> dict[int, int]:
        """Return the number of tokens with a label in the iteration, by pipeline."""
        counts: dict[int, int] = defaultdict(int)
        for number, (_, labels) in enumerate(batches):
            counts[self.place.routes.sample_of(number).pipeline] += int(
                (labels != IGNORE_INDEX).sum()
            )
        # Each rank of a worker has read a part of the samples.
        if self.parallel_dims.dp_enabled:
            rank_counts = torch.tensor(list(counts.values()), device=self.device)
            total = dist_sum_tensor(rank_counts, self.parallel_dims.get_mesh("batch"))
            counts = dict(zip(counts, total.tolist(), strict=True))
        return counts

    @property
    def _data_ranks(self) -> int:
        """Number of processes of this worker among which its tokens are divided."""
        return self.place.ranks // int(self.parallel_dims.tp)


def reroute(config: Trainer.Config, table: str, failed: str = "") -> ReroutedTrainer.Config:
    """Turn a configuration of torchtitan's Trainer into one of a ReroutedTrainer.

    `table` is the folder of a table of schedules, or the file of one schedule; `failed` names the
    workers that are down, such as "1.1 0.2".
    """
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return ReroutedTrainer.Config(**values, table=table, failed=failed)


def _count_ranks(config: Trainer.Config, routes: Routes) -> int:
    parallelism = config.parallelism
    shards = parallelism.data_parallel_shard_degree
    if shards == -1:
        return int(os.environ["WORLD_SIZE"]) // len(routes.workers)
    return int(shards * parallelism.context_parallel_degree * parallelism.tensor_parallel_degree)


def _require_supported(config: Trainer.Config, routes: Routes) -> None:
    """Raise ValueError for settings that do not fit the plans, or cannot be carried out."""
    # The numbers of stages and pipelines must be those of the schedules.
    workers, parallelism = routes.grid_workers, config.parallelism
    pipelines = 1 + workers[-1].pipeline
    degrees = {
        "pipeline_parallel_degree": len(workers) // pipelines,
        "data_parallel_replicate_degree": pipelines,
    }
    for name, degree in degrees.items():
        if getattr(parallelism, name) != degree:
            raise ValueError(
                f"parallelism.{name} is {getattr(parallelism, name)}; expected {degree}, as in the "
                f"plans of {config.table}"
            )
    # So must the micro-batches of an iteration; gradients are not accumulated over several.
    samples = routes.microbatches * parallelism.pipeline_parallel_microbatch_size
    if (
        config.training.local_batch_size * pipelines != samples
        or config.training.global_batch_size > 0
    ):
        raise ValueError(
            f"training.local_batch_size is {config.training.local_batch_size}; expected "
            f"{samples / pipelines:g}, as in the plans of {config.table}, and no "
            "training.global_batch_size"
        )
    # The rest cannot be done by a worker that has only some stages.
    if parallelism.spmd_backend == "full_dtensor":
        raise ValueError(
            "parallelism.spmd_backend is full_dtensor; expected partial_dtensor or spmd_types, "
            "in which stages can pass plain tensors"
        )
    if config.validator.enable:
        raise ValueError("validator.enable is set; expected no validation during training")
    if config.checkpoint.enable and not config.checkpoint.load_only:
        raise ValueError(
            "checkpoint.enable is set; expected checkpoint.load_only as well: a worker has a part "
            "of the model only, and would write it as if it were all"
        )


def _fit_to_worker(config: Any, place: Place, make_modules: Callable[..., Any]) -> Any:
    # The worker reads the data of all pipelines, and initialises its parameters as its rank of a
    # pipeline would in torchtitan, so that all workers that have a stage begin with the same.
    routes, size = place.routes, config.parallelism.pipeline_parallel_microbatch_size
    samples = [routes.sample_of(number) for number in range(routes.microbatches)]
    if place.worker == routes.workers[0] and place.rank == 0 and not place.knows(SEED_KEY):
        place.publish(
            SEED_KEY, str(torch.initial_seed() if config.debug.seed is None else config.debug.seed)
        )
    # Without a configured seed, the first worker's random one holds for all.
    seed = int(place.read(SEED_KEY)) + place.worker.column
    # One worker writes the metrics, which are the same for all.
    is_first = place.worker == routes.workers[0]
    return replace(
        config,
        model_spec=replace(config.model_spec, pipelining_fn=make_modules),
        dataloader=PipelinesLoader.Config(
            one=config.dataloader, pipelines=tuple(sample.pipeline for sample in samples)
        ),
        training=replace(config.training, local_batch_size=routes.microbatches * size),
        debug=replace(config.debug, seed=seed % 2**63),
        metrics=replace(
            config.metrics,
            enable_tensorboard=config.metrics.enable_tensorboard and is_first,
            enable_wandb=config.metrics.enable_wandb and is_first,
        ),
    )
