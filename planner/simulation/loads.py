"""Compute workers' times in an iteration, and the cheapest distributions of failures."""

import math
from collections.abc import Sequence
from functools import cached_property

from slipstream.planner.job.file import Job

LAYERS_PER_STAGE = 8
"""Assumed number of layers of a stage, if the job file gives none."""
MAX_LAYERS = 128
"""Number of layers above which, in formulas, several layers of a stage count as one."""
DownByStage = tuple[int, ...]
"""Number of dead workers of each stage (column)."""


class Loads:
    """Seconds that a job's layers, workers and iterations take by formula, at equal speeds."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._spread_by_failures: dict[int, DownByStage | None] = {}
        self._loads: dict[DownByStage, float] = {}

    def spread_evenly(self, failures: int) -> DownByStage | None:
        """Return the dead workers of each stage if `failures` are spread evenly over stages.

        None if a stage would have no live worker. Failures that do not divide evenly go to the
        stages whose workers then have the least work; among equal ones, to the last, which wait
        least for others. No other distribution leaves more workers to the stage that has the
        fewest.
        """
        if failures not in self._spread_by_failures:
            self._spread_by_failures[failures] = self._compute_spread(failures)
        return self._spread_by_failures[failures]

    def _compute_spread(self, failures: int) -> DownByStage | None:
        each, rest = divmod(failures, self._job.stages)
        if each + (rest > 0) >= self._job.pipelines:
            return None
        order = sorted(
            range(self._job.stages),
            key=lambda stage: (self._stage_load_seconds(stage, each + 1), -stage),
        )
        more = set(order[:rest])
        return tuple(each + (stage in more) for stage in range(self._job.stages))

    def max_load_seconds(self, down: DownByStage) -> float:
        """Return the busiest worker's seconds of work in an iteration.

        The argument `down` has the number of dead workers of each stage. All-reduces and optimizer
        steps are included. Infinite if a stage has no live worker.
        """
        if down not in self._loads:
            self._loads[down] = max(
                self._stage_load_seconds(stage, count) for stage, count in enumerate(down)
            )
        return self._loads[down]

    def _stage_load_seconds(self, stage: int, down: int) -> float:
        """Return the seconds of work of a stage's busiest worker with `down` workers dead."""
        if down >= self._job.pipelines:
            return math.inf
        # Of all M micro-batches it runs ceil(M / live), then one all-reduce and one step.
        work, step = self._seconds_by_stage[stage]
        return -(-sum(self._job.microbatches) // (self._job.pipelines - down)) * work + step

    @cached_property
    def _seconds_by_stage(self) -> Sequence[tuple[float, float]]:
        """Pairs, by column: seconds of a micro-batch's compute, and of all-reduces and step."""
        times, by_column = self._job.time, []
        for column in range(self._job.stages):
            stages = [
                stage
                for stage, column_of_stage in enumerate(self._job.columns)
                if column_of_stage == column
            ]
            # With two directions, a micro-batch passes only the column's stages of its own one.
            work = (
                sum(
                    times.forward[stage]
                    + times.backward_input[stage]
                    + times.backward_weight[stage]
                    for stage in stages
                )
                * self._job.depth
                / len(self._job.columns)
            )
            by_column.append(
                (work, sum(times.all_reduce[stage] + times.optimizer[stage] for stage in stages))
            )
        return by_column

    @cached_property
    def layer_seconds(self) -> tuple[float, ...]:
        """Seconds of F, I and W of a micro-batch, by layer; equal within a stage.

        If the job gives no layers or more than `MAX_LAYERS`, all stages have an assumed number.
        """
        job, depth = self._job, self._job.depth
        counts = [max(1, min(LAYERS_PER_STAGE, MAX_LAYERS // depth))] * depth
        if job.layers and sum(job.layers[:depth]) <= MAX_LAYERS:
            counts = [max(1, count) for count in job.layers[:depth]]
        shares = zip(self._stage_seconds, counts, strict=True)
        return tuple(total / count for total, count in shares for _ in range(count))

    @cached_property
    def _stage_seconds(self) -> tuple[float, ...]:
        """Seconds of F, I and W of a micro-batch together, by stage."""
        times, depth = self._job.time, self._job.depth
        costs = zip(
            times.forward[:depth],
            times.backward_input[:depth],
            times.backward_weight[:depth],
            strict=True,
        )
        return tuple(map(sum, costs))

    @cached_property
    def longest_step(self) -> float:
        """Seconds of the all-reduce and the optimizer step of the stage where they take longest."""
        return max(map(sum, zip(self._job.time.all_reduce, self._job.time.optimizer, strict=True)))

    def work_conserving_seconds(self, live: float) -> float:
        """Return a lower bound on the seconds of an iteration on `live` workers.

        All work is spread evenly over the workers; then come the shortest all-reduce and optimizer
        step of any stage. A worker at half speed counts half. Infinite without live workers.
        """
        if live <= 0:
            return math.inf
        work, step = self._total_work_seconds
        return work / live + step

    @cached_property
    def _total_work_seconds(self) -> tuple[float, float]:
        """Seconds of all compute ops of an iteration, and of any stage's shortest closing ops."""
        times, work = self._job.time, sum(self._stage_seconds)
        return work * sum(self._job.microbatches), min(
            map(sum, zip(times.all_reduce, times.optimizer, strict=True))
        )


def spread_over_stages(failures: int, stages: int) -> DownByStage:
    """Return the number of failures of each stage, spread evenly. The last stages get the rest."""
    return tuple(
        failures // stages + (stage >= stages - failures % stages) for stage in range(stages)
    )
