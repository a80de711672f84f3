"""Define what the runs of `benchmarks.chaos` train, what happens in them, and how they react.

Everything is seeded.
"""

import functools
import itertools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from benchmarks.jobs import uniform_job
from slipstream.planner.failures import with_speeds
from slipstream.planner.job.file import Job
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.normalise import normal_form
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_job, plan_only
from slipstream.runtime.checkpoints.checkpoint import Checkpoint
from slipstream.runtime.config import RunConfig, parse_run_config
from slipstream.runtime.coordinator.decisions import slow_detector, slow_workers
from slipstream.runtime.coordinator.decisions.rebalancing import Rebalancing
from slipstream.runtime.coordinator.planning.schedule_finder import NoScheduleError, Scheduler
from slipstream.runtime.launch import Resilience
from slipstream.runtime.processes.process_manager import NodeFailure, Return
from slipstream.runtime.protocol.failure_injection import Action, Injection, Place, Slowdown
from slipstream.schedules.schedule import HeldLayers, Schedule, Speeds, Worker
from slipstream.schedules.tables.relabel import relabel_schedule

ACTIONS: dict[Action, int] = {"kill": 6, "stop": 1, "raise": 2, "cut": 3, "exit": 1}
"""Relative frequencies of failures."""
IN_RECOVERY: tuple[Place, ...] = ("ordered", "met", "moved")
FETCH_BYTES_PER_SECOND = (None, 400e3)
"""Speeds of fetches: unlimited, or so slow that a fetch lasts for many iterations."""
IN_FETCH: tuple[Place, ...] = ("asked", "loaded")
IN_FETCH_SPAN = 6
"""Number of consecutive iterations of an injected failure; a fetch may begin in one."""
FACTORS = (2.0, 3.0, 20.0)
"""Factors by which slow workers take longer. With the last one, a worker is not worth its place."""
LAYERS_A_STAGE = 4
"""Number of layers per stage in scenarios in which layers move."""
CHECKPOINT_EVERY = 7
GREEDY = PlanOptions(method="greedy", time_limit=0.3)
CLIP_NORM = 1.8
"""Norm for gradient clipping, which gradients exceed now and then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosScenario:
    """Job and configuration to train, and how often something happens to it."""

    name: str
    """Name of the scenario: the grid and the kind."""
    job: Job
    config: RunConfig
    iterations: int
    moves: bool = False
    """True if roles are reassigned after each failure, by normal forms."""
    settles: bool = False
    """True if layers move to better schedules."""
    slows: bool = False
    """True if workers are slow now and then."""
    ranks: int = 1
    """Number of processes per worker."""
    node_workers: int = 0
    """Number of workers per node, which may all die at once. 0 means that no node dies."""
    shards: bool = False
    """True if workers keep parts of the layers' optimizer states."""
    uneven: bool = False
    """True if samples are unequal: dealt by cost, weighted by tokens that count."""
    gap: tuple[int, int] = (4, 16)
    """Least and largest number of iterations between two planned failures."""
    away: tuple[int, int] = (1, 4)
    """Least and largest number of iterations until dead workers come back."""
    heartbeat_timeout_seconds: float = 1.0

    @property
    def nodes(self) -> list[tuple[Worker, ...]]:
        """Workers of each node, stage by stage: a stage loses several with a node."""
        by_stage = sorted(self.workers, key=lambda worker: (worker.column, worker.pipeline))
        size = self.node_workers
        if not size:
            return []
        return [tuple(by_stage[first : first + size]) for first in range(0, len(by_stage), size)]

    @property
    def workers(self) -> list[Worker]:
        """All workers of the grid."""
        return [
            Worker(pipeline, column)
            for pipeline in range(self.job.pipelines)
            for column in range(self.job.stages)
        ]


SETTLING: Mapping[str, Any] = {"settles": True, "gap": (25, 40), "away": (15, 35)}
"""Fields of scenarios in which layers move.

Failures are rare enough to plan a schedule and fetch layers in between.
"""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "plain": {},
    "roles": {"moves": True},
    "slow": {"slows": True},
    "settling": SETTLING,
    "slow-settling": {"slows": True, **SETTLING},
    "ranks": {"ranks": 2},
    "ranks-settling": {"ranks": 2, "slows": True, **SETTLING},
    "sharded": {"shards": True},
    "sharded-settling": {"shards": True, "moves": True, "slows": True, **SETTLING},
    "sharded-ranks": {"shards": True, "ranks": 2},
    "nodes": {"node_workers": 2, "moves": True},
    "uneven": {"uneven": True, "moves": True},
    "uneven-sharded-settling": {"uneven": True, "shards": True, "slows": True, **SETTLING},
    "uneven-ranks": {"uneven": True, "shards": True, "ranks": 2},
}
UNEVEN = {"data": "tests.runtime.uneven_data:Uneven", "loss_weights": "tokens"}
"""Keys of `[training]` for samples of unequal cost."""


def settings(
    grid: str, iterations: int, training: Mapping[str, Any] = {}
) -> dict[str, ChaosScenario]:
    """Return all scenarios by name, each with and without clipping.

    Scenarios combine: roles that move; slow workers; layers that move; workers of two processes;
    sharded optimizer state; nodes that die; and unequal samples. `training` replaces keys of
    `[training]`. On GPUs, workers may be silent for longer.
    """
    pipelines, stages = map(int, grid.split("x"))
    made = {}
    for (kind, more), clip_norm in itertools.product(KINDS.items(), (None, CLIP_NORM)):
        layers = [LAYERS_A_STAGE] * stages if "settles" in more else None
        job = uniform_job(pipelines, stages, 2, op=1, optimizer=1, transfer=0, layers=layers)
        model = {
            "blocks": sum(layers) - 2 if layers else max(2, stages - 2),
            "width": 16,
            "heads": 2,
            "context": 16,
            "dropout": 0.1,
        }
        data = (
            {**UNEVEN, "options": {"microbatches": list(job.microbatches)}}
            if more.get("uneven")
            else {}
        )
        config = parse_run_config(
            model,
            {
                **data,
                "batch": 1,
                "dtype": "float64",
                "device": "cpu",
                "iterations": iterations,
                "clip_norm": clip_norm,
                "tensor_parallel": more.get("ranks", 1),
                "shard_optimizer": more.get("shards", False),
                **training,
            },
        )
        name = kind if clip_norm is None else f"{kind}-clipped"
        made[name] = ChaosScenario(
            name=f"{grid}:{name}",
            job=job,
            config=config,
            iterations=iterations,
            heartbeat_timeout_seconds=10.0 if config.training.device == "cuda" else 1.0,
            **more,
        )
    return made


def scenario(name: str, iterations: int) -> ChaosScenario:
    """Return the scenario with this `ChaosScenario.name`."""
    grid, _, kind = name.partition(":")
    return settings(grid, iterations)[kind]


@contextmanager
def watching_closely() -> Iterator[None]:
    """Observe workers' speeds in every iteration, and measure those left out soon.

    Iterations and runs are short here.
    """
    before = slow_detector.OBSERVATION_SECONDS, slow_workers.FIRST_EXCLUSION_SECONDS
    slow_detector.OBSERVATION_SECONDS, slow_workers.FIRST_EXCLUSION_SECONDS = 0.0, 0.3
    try:
        yield
    finally:
        slow_detector.OBSERVATION_SECONDS, slow_workers.FIRST_EXCLUSION_SECONDS = before


def resilience(
    setting: ChaosScenario, rng: random.Random, resume: Checkpoint | None = None
) -> Resilience:
    """Return what happens from a checkpoint (or the beginning) on, and the run's reactions."""
    first = 0 if resume is None else resume.iteration
    injections, returns = _failures(setting, rng, first)
    return Resilience(
        scheduler=scheduler(setting),
        heartbeat_timeout_seconds=setting.heartbeat_timeout_seconds,
        checkpoint_every=CHECKPOINT_EVERY,
        resume=resume,
        injections=tuple(injections),
        returns=tuple(returns),
        node_failures=tuple(_node_failures(setting, rng, first)),
        slowdowns=tuple(_slowdowns(setting, rng)) if setting.slows else (),
        at_speeds=_SchedulerAtSpeeds(setting) if setting.slows else None,
        rebalancer=_Rebalancer(setting.job),
        settling=Rebalancing() if setting.settles else None,
        fetch_bytes_per_second=rng.choice(FETCH_BYTES_PER_SECOND),
    )


def _failures(
    setting: ChaosScenario, rng: random.Random, first: int
) -> tuple[list[Injection], list[Return]]:
    """Return failures at places in the program, and the returns of failed workers."""
    workers, ops = setting.workers, 3 * max(setting.job.microbatches)
    places: tuple[Place, ...] = (*range(ops), "A", "O", "stepped", "reported")
    injections, returns = [], []
    at = first
    while (at := at + rng.randint(*setting.gap)) < setting.iterations:
        for worker in rng.sample(workers, rng.choices((1, 2, 3), (8, 3, 1))[0]):
            injections.append(
                Injection(worker, at, rng.choice(places), _action(rng), _rank(setting, rng))
            )
        if rng.random() < 0.4:
            worker, place = rng.choice(workers), rng.choice(IN_RECOVERY)
            injections += [
                Injection(worker, iteration, place, _action(rng), _rank(setting, rng))
                for iteration in (at, at + 1)
            ]
        if rng.random() < 0.3:
            worker, place, action = rng.choice(workers), rng.choice(IN_FETCH), _action(rng)
            rank = _rank(setting, rng)
            injections += [
                Injection(worker, iteration, place, action, rank)
                for iteration in range(at, min(at + IN_FETCH_SPAN, setting.iterations))
            ]
        returns += [Return(worker, at + rng.randint(*setting.away)) for worker in workers]
    return injections, returns


def _node_failures(setting: ChaosScenario, rng: random.Random, first: int) -> Iterator[NodeFailure]:
    """Yield nodes whose workers die at once.

    They come back with the workers that other failures hit.
    """
    at = first
    while setting.nodes and (at := at + rng.randint(*setting.gap)) < setting.iterations:
        yield NodeFailure(rng.choice(setting.nodes), at)


def _rank(setting: ChaosScenario, rng: random.Random) -> int:
    """Return the rank of the process that fails."""
    return 0 if setting.ranks == 1 else rng.randrange(setting.ranks)


def _slowdowns(setting: ChaosScenario, rng: random.Random) -> Iterator[Slowdown]:
    """Yield workers that are slow for a while."""
    at = 0
    while (at := at + rng.randint(5, 15)) < setting.iterations:
        worker = rng.choice(setting.workers)
        yield Slowdown(worker, at, rng.choice(FACTORS))
        yield Slowdown(worker, at + rng.randint(8, 20), 1.0)


def _action(rng: random.Random) -> Action:
    return rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]


def scheduler(setting: ChaosScenario) -> Scheduler:
    """Return a function that plans by list schedulers.

    It moves roles to a normal form if the scenario says so.
    """
    options = PlanOptions(method="greedy", time_limit=1.0)

    most_down = (setting.job.pipelines - 1) * setting.job.stages

    @functools.cache
    def normal(failures: int) -> Schedule:
        return normal_form(setting.job, failures, options).schedule

    def schedule(down: tuple[Worker, ...]) -> Schedule:
        lost = _lost_column(setting.job, down)
        if lost is not None:
            found = (
                relabel_schedule(normal(len(down)), down, held_elsewhere=True)
                if len(down) <= most_down
                else None
            )
            if found is None:
                raise NoScheduleError(f"the failures leave no live worker in column {lost}")
            return found
        moved = relabel_schedule(normal(len(down)), down) if setting.moves else None
        return moved or plan_job(setting.job, down, method="greedy").schedule

    return schedule


def _lost_column(job: Job, down: tuple[Worker, ...]) -> int | None:
    """Return a column that has no live worker, or None."""
    for column in range(job.stages):
        if all(Worker(pipeline, column) in down for pipeline in range(job.pipelines)):
            return column
    return None


class _SchedulerAtSpeeds:
    """Scheduler that considers slow workers, unless a stage has no live worker."""

    def __init__(self, setting: ChaosScenario) -> None:
        self._job = setting.job
        self._plain = scheduler(setting)

    def __call__(self, down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
        if _lost_column(self._job, down) is not None:
            return self._plain(down)
        return plan_job(with_speeds(self._job, speeds), down, method="greedy").schedule


class _Rebalancer:
    """Rebalancer that plans in this process, in a fraction of a second."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def plan_at_once(
        self, down: tuple[Worker, ...], holdings: HeldLayers, speeds: Speeds
    ) -> Schedule:
        return self._planned(msgspec.structs.replace(GREEDY, holds=holdings), down, speeds)

    def plan_rebalanced(
        self, down: tuple[Worker, ...], holdings: HeldLayers, speeds: Speeds
    ) -> Schedule:
        return self._planned(
            msgspec.structs.replace(GREEDY, layers="move", holds=holdings), down, speeds
        )

    def plan_from_checkpoint(self, down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
        return self._planned(
            msgspec.structs.replace(GREEDY, layers="move", from_checkpoint=True), down, speeds
        )

    def _planned(self, options: PlanOptions, down: tuple[Worker, ...], speeds: Speeds) -> Schedule:
        try:
            return plan_only(
                options, with_speeds(self._job, speeds) if speeds else self._job, down
            ).schedule
        except NoPlanError as error:
            raise NoScheduleError(str(error)) from None
