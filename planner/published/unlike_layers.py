"""Compare Slipstream's schedules with published ones on models of unequal layers.

Each schedule has its best division of the layers. Published schedules run their published order;
Slipstream's is found by `planner.placement`. All have the same memory: no worker may hold more than
the fullest one of interleaved 1F1B with uniform stages, weights included. An iteration lasts from
its first op to its last, as AdaPtis counts it, as if all workers stepped together.
"""

import operator
import random
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec

from slipstream.planner.job.arrangement import Arrangement, MovableLayers
from slipstream.planner.job.divisions import StageLoads
from slipstream.planner.job.file import Job, parse_job
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.placement import FoundPlacement, find_placement
from slipstream.planner.plan import plan_only
from slipstream.planner.published import orders
from slipstream.planner.published.measured_layers import KEYS, MODELS, MeasuredModel, make_job
from slipstream.planner.published.orders import Orders, StageCosts
from slipstream.schedules.schedule import OptimizerMode, Worker

PLAN_SECONDS = 2.0
"""Time limit of each search, in seconds of a fixed number of search steps."""
TRIED_DIVISIONS = 200
"""Number of divisions of the layers that are tried for each published schedule."""
CHUNKS = (2, 3, 4)
"""Numbers of virtual stages per worker that are tried for interleaved 1F1B."""
PIPELINES = 4
"""Number of pipelines of a job in which a worker dies."""
DEAD_PIPELINE = 1
"""Pipeline of the worker that dies."""
QUICK_SHARE = 0.25
"""Share of the usual search steps for the plans with and without a dead worker."""
SMALLER = tuple(model for model in MODELS if model.workers == 4)
"""Models on four workers."""
LARGER = tuple(model for model in MODELS if model.workers == 8)
"""Models on eight workers."""
OCTOPIPE = {"nemotron-nano-v2-9b": (4, 8, 1.33121, 0.89870)}
"""Results that AdaPtis' authors publish in the README of their simulator, by model.

Each has workers, micro-batches, and the seconds of 1F1B and of the plan that they found.
"""


class Rival(msgspec.Struct, frozen=True, kw_only=True):
    """Published pipeline schedule to compare with Slipstream's."""

    name: str
    order: str
    """Placement of the virtual stages, as a value of `[placement] order`."""
    chunks: int = 1
    made: Callable[[int, int, int], Orders]
    """Function (workers, micro-batches, virtual stages per worker) that builds the orders."""


RIVALS = (
    Rival(
        name="1F1B",
        order="linear",
        made=lambda workers, count, _: orders.one_f_one_b(workers, count),
    ),
    *(
        Rival(
            name="interleaved 1F1B",
            order="interleaved",
            chunks=chunks,
            made=orders.interleaved_1f1b,
        )
        for chunks in CHUNKS
    ),
    Rival(
        name="ZB-H1",
        order="linear",
        made=lambda workers, count, _: orders.zero_bubble_h1(workers, count),
    ),
    Rival(
        name="ZB-V",
        order="v",
        chunks=2,
        made=lambda workers, count, _: orders.zero_bubble_v(workers, count),
    ),
    Rival(
        name="DualPipe",
        order="bidirectional",
        made=lambda workers, count, _: orders.dual_pipe(workers, count),
    ),
)
NAMES = tuple(dict.fromkeys(rival.name for rival in RIVALS))


class DividedPipeline(msgspec.Struct, frozen=True, kw_only=True):
    """Schedule with a division of the layers, its seconds per iteration, and its memory."""

    arrangement: Arrangement
    seconds: float
    megabytes: float
    """Memory of the fullest worker, weights included."""


class ModelBenchmark:
    """Comparison of all published schedules and Slipstream's on one model.

    Memory is limited to that of interleaved 1F1B with uniform stages.
    """

    def __init__(self, model: MeasuredModel) -> None:
        self.model, self.workers, self.microbatches = model, model.workers, 2 * model.workers
        self._sums = {key: [0.0] for key in KEYS}
        for key, sums in self._sums.items():
            for value in model.values_by_layer(key):
                sums.append(sums[-1] + value)
        self.layers = len(model.kinds)
        self._loads = StageLoads(
            MovableLayers(make_job(model, self.uniform(self.workers), self.microbatches, 1, None))
        )
        # The fastest interleaved 1F1B with uniform stages sets the memory for all others.
        interleaved: list[DividedPipeline] = []
        for rival in RIVALS:
            if rival.name == "interleaved 1F1B" and self.layers >= self.workers * rival.chunks:
                counts = self.uniform(self.workers * rival.chunks)
                pipeline = self._simulate_division(rival, counts)
                interleaved += [pipeline] if pipeline else []
        self.memory = min(interleaved, key=lambda pipeline: pipeline.seconds).megabytes

    def uniform(self, stages: int) -> tuple[int, ...]:
        """Return the number of layers of each of `stages` stages in a uniform division.

        The layers between embedding and head are divided evenly, with one more in the first stages
        if necessary. The embedding belongs to the first stage, the head to the last one. As many
        stages as layers have one each.
        """
        if stages in (1, self.layers):
            return (self.layers // stages,) * stages
        inner = self.layers - 2
        counts = [inner // stages + (stage < inner % stages) for stage in range(stages)]
        return (counts[0] + 1, *counts[1:-1], counts[-1] + 1)

    def find_best(self, name: str, *, divided: bool) -> DividedPipeline | None:
        """Return the published schedule of this name, such as "ZB-V", in its best division.

        None if no division fits into memory, or the model has fewer layers than virtual stages.
        Without `divided`, only the uniform division is tried.
        """
        candidates = []
        for pipeline in RIVALS:
            if pipeline.name == name and self.layers >= self.workers * pipeline.chunks:
                uniform = self._simulate_division(
                    pipeline, self.uniform(self.workers * pipeline.chunks)
                )
                candidates += [
                    uniform,
                    *([self._search_divisions(pipeline, uniform)] if divided else []),
                ]
        fitting = [
            pipeline
            for pipeline in candidates
            if pipeline and pipeline.megabytes <= self.memory * (1 + 1e-9)
        ]
        return min(fitting, key=lambda pipeline: pipeline.seconds, default=None)

    def _simulate_division(self, rival: Rival, counts: Sequence[int]) -> DividedPipeline | None:
        """Simulate the schedule `rival` with `counts` layers by stage; None: its ops deadlock."""
        arrangement = Arrangement(order=rival.order, chunks=rival.chunks, counts=tuple(counts))
        # Costs of each virtual stage; with two directions, those of the second follow.
        edges = [0, *arrangement.layer_ends]
        directions = arrangement.chains
        stages = {}
        for key, sums in self._sums.items():
            stages[key] = [sums[end] - sums[first] for first, end in pairwise(edges)] * directions
        # Weights of all virtual stages that a worker has.
        weights = [0.0] * self.workers
        columns = arrangement.stage_columns(self.workers)
        columns = (*columns, *columns[::-1]) if directions > 1 else columns
        for stage, column in enumerate(columns):
            weights[column] += stages["weights"][stage]
        simulated = orders.simulate(
            rival.made(self.workers, self.microbatches, rival.chunks),
            StageCosts(
                forward=stages["forward"],
                backward_input=stages["backward_input"],
                backward_weight=stages["backward_weight"],
                activation=stages["activation"],
                weight_stash=stages["weight_stash"],
                depth=len(counts),
            ),
        )
        if simulated is None:
            return None
        return DividedPipeline(
            arrangement=arrangement,
            seconds=simulated.end,
            megabytes=max(map(operator.add, weights, simulated.peaks)),
        )

    def _search_divisions(
        self, rival: Rival, uniform: DividedPipeline | None
    ) -> DividedPipeline | None:
        """Return `rival` with the best division that a local search finds; None: deadlock."""
        generator = random.Random(0)

        def rank(division: DividedPipeline | None) -> tuple[float, float]:
            """Return a sort key: memory above the limit, then seconds. Deadlock (None) is last."""
            if not division:
                return 1e18, 0.0
            return max(0.0, division.megabytes - self.memory * (1 + 1e-9)), division.seconds

        # Start from the uniform division, or the one whose busiest worker has the least work.
        starts = [
            uniform,
            self._simulate_division(
                rival, self._loads.balance_layers(rival.order, rival.chunks).counts
            ),
        ]
        best = min(starts, key=rank)
        for _ in range(TRIED_DIVISIONS):
            # With one stage, or one layer in each, no layer can move.
            if best is None or len(best.arrangement.counts) in (1, self.layers):
                return best
            # Move a layer from a stage that has several to one at most two stages away.
            counts = list(best.arrangement.counts)
            donor = generator.choice([stage for stage, count in enumerate(counts) if count > 1])
            receiver = generator.choice(
                [
                    stage
                    for stage in range(max(0, donor - 2), min(len(counts), donor + 3))
                    if stage != donor
                ]
            )
            counts[donor] -= 1
            counts[receiver] += 1
            best = min(best, self._simulate_division(rival, counts), key=rank)
        return best

    def build_job(self, arrangement: Arrangement, pipelines: int = 1) -> Job:
        """Return the job whose stages are placed and divided as in `arrangement`.

        Raises JobError if a worker has no room for its weights.
        """
        text = make_job(
            self.model, self.uniform(self.workers), self.microbatches, pipelines, self.memory
        )
        return parse_job(MovableLayers(text).arranged_job_text(arrangement))

    def find_own_placement(self, optimizer: OptimizerMode) -> FoundPlacement:
        """Return the placement and division of layers that Slipstream's planner finds.

        Raises NoPlanError if nothing fits.
        """
        text = make_job(self.model, self.uniform(self.workers), self.microbatches, 1, self.memory)
        return find_placement(text, _plan_options(optimizer))

    def share_lost_at_once(self, arrangement: Arrangement) -> float | None:
        """Return the share of its throughput that a job loses when one worker dies.

        Stages are placed and divided as in `arrangement`, and layers stay in place; Slipstream's
        planner finds the order of the ops. The job has `PIPELINES` pipelines. None if there is no
        plan.
        """
        job = self.build_job(arrangement, PIPELINES)
        try:
            options = _plan_options("synchronous", greedy=True)
            dead = Worker(DEAD_PIPELINE, self.workers // 2)
            unbroken = plan_only(options, job, ()).period
            broken = plan_only(options, job, (dead,)).period
        except NoPlanError:
            return None
        return 1 - unbroken / broken


def _plan_options(optimizer: OptimizerMode, *, greedy: bool = False) -> PlanOptions:
    options = PlanOptions(optimizer=optimizer, method="greedy" if greedy else "cp-sat", steps=0)
    return options.with_limit(PLAN_SECONDS * (QUICK_SHARE if greedy else 1.0))


class ModelResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results of all schedules on one model, as `compare_model` finds them."""

    uniform: dict[str, DividedPipeline | None]
    """Published schedules with uniform stages, by name. None if one does not fit."""
    divided: dict[str, DividedPipeline | None]
    """Published schedules with their best division, by name. None if no division fits."""
    ours: DividedPipeline
    bound: float
    """Lower bound on the seconds of an iteration; if proven, with any placement of layers."""
    staggered: float
    """Seconds of Slipstream's iteration with a staggered optimizer, best placed for it."""
    dead: float | None
    """Share of throughput lost when a worker dies in Slipstream's placement. None: no plan."""
    dead_of_best: float | None
    """Share of throughput lost likewise in the best published placement. None: no plan."""

    @property
    def base(self) -> float:
        """Seconds of interleaved 1F1B's iteration with uniform stages, to compare others with."""
        found = self.uniform["interleaved 1F1B"]
        assert found is not None
        return found.seconds

    @property
    def best_rival(self) -> DividedPipeline:
        """Fastest of the published schedules with their best division."""
        rivals = [rival for rival in self.divided.values() if rival]
        return min(rivals, key=lambda rival: rival.seconds)


def compare_model(model: MeasuredModel) -> ModelResult:
    """Simulate all published schedules on one model, plan our own, and return the results.

    Raises NoPlanError if no plan of our own is found.
    """
    bench = ModelBenchmark(model)
    uniform = {name: bench.find_best(name, divided=False) for name in NAMES}
    divided = {name: bench.find_best(name, divided=True) for name in NAMES}
    ours, staggered = bench.find_own_placement("synchronous"), bench.find_own_placement("staggered")
    schedule = ours.plan.schedule
    best = min(filter(None, divided.values()), key=lambda rival: rival.seconds)
    return ModelResult(
        uniform=uniform,
        divided=divided,
        staggered=staggered.plan.period,
        ours=DividedPipeline(
            arrangement=ours.arrangement, seconds=ours.plan.period, megabytes=bench.memory
        ),
        bound=schedule.seconds(schedule.lower_bound_ticks),
        dead=bench.share_lost_at_once(ours.arrangement),
        dead_of_best=bench.share_lost_at_once(best.arrangement),
    )
