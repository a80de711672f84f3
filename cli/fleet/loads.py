"""What workers have to compute in an iteration, and how failures spread over stages leave them least."""

import math
from collections.abc import Sequence
from functools import cached_property

from slipstream.planner.job.file import Job

LAYERS_PER_STAGE = 8
"""Assumed layers of a stage, where the job file gives none."""
MAX_LAYERS = 128
"""A model of more layers is cut into larger pieces, for policies that cut it by a formula."""
DownByStage = tuple[int, ...]
"""How many workers of each stage (column) are down."""


class Loads:
    """Those of one job, all of whose workers are equally fast."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._even: dict[int, DownByStage | None] = {}
        self._loads: dict[DownByStage, float] = {}

    def even_spread(self, failures: int) -> DownByStage | None:
        """One failure a stage, then two, and so on; first where one more leaves the others least work.

        Of all distributions it leaves the most workers to the stage that has fewest. Where stages are equal, the last
        ones come first, which wait least for others. None where some stage would have no live worker.
        """
        if failures not in self._even:
            self._even[failures] = self._even_spread(failures)
        return self._even[failures]

    def _even_spread(self, failures: int) -> DownByStage | None:
        each, rest = divmod(failures, self._job.stages)
        if each + (rest > 0) >= self._job.pipelines:
            return None
        order = sorted(range(self._job.stages), key=lambda stage: (self._load(stage, each + 1), -stage))
        more = set(order[:rest])
        return tuple(each + (stage in more) for stage in range(self._job.stages))

    def longest_load(self, down: DownByStage) -> float:
        """Seconds of an iteration that the most loaded worker computes, with so many workers of each stage down."""
        if down not in self._loads:
            self._loads[down] = max(self._load(stage, count) for stage, count in enumerate(down))
        return self._loads[down]

    def _load(self, stage: int, down: int) -> float:
        """Seconds that the most loaded worker of a stage computes: ceil(M / live) (F + I + W) + A + O."""
        if down >= self._job.pipelines:
            return math.inf
        work, step = self._work[stage]
        return -(-sum(self._job.microbatches) // (self._job.pipelines - down)) * work + step

    @cached_property
    def _work(self) -> Sequence[tuple[float, float]]:
        """(seconds of a micro-batch, seconds of the all-reduce and the optimizer step) by stage (column)."""
        clock, found = self._job.time, []
        for column in range(self._job.stages):
            stages = [stage for stage, of in enumerate(self._job.columns) if of == column]
            work = sum(clock.forward[stage] + clock.backward_input[stage] + clock.backward_weight[stage]
                       for stage in stages) * self._job.depth / len(self._job.columns)
            found.append((work, sum(clock.all_reduce[stage] + clock.optimizer[stage] for stage in stages)))
        return found

    @cached_property
    def layers(self) -> tuple[float, ...]:
        """Seconds of each layer, forward and backward: equal parts of its stage."""
        job, clock, depth = self._job, self._job.time, self._job.depth
        counts = [max(1, min(LAYERS_PER_STAGE, MAX_LAYERS // depth))] * depth
        if job.layers and sum(job.layers[:depth]) <= MAX_LAYERS:
            counts = [max(1, count) for count in job.layers[:depth]]
        totals = map(sum, zip(clock.forward[:depth], clock.backward_input[:depth], clock.backward_weight[:depth],
                              strict=True))
        return tuple(total / count for total, count in zip(totals, counts, strict=True) for _ in range(count))

    @cached_property
    def longest_step(self) -> float:
        """Seconds of the longest all-reduce and optimizer step."""
        return max(map(sum, zip(self._job.time.all_reduce, self._job.time.optimizer, strict=True)))

    def work_conserving(self, live: float) -> float:
        """Seconds of an iteration that no synchronous training is below: the work spread evenly over live workers, then
        one step. A worker at half speed counts half.
        """
        if live <= 0:
            return math.inf
        work, step = self._work_in_all
        return work / live + step

    @cached_property
    def _work_in_all(self) -> tuple[float, float]:
        """(seconds of an iteration's micro-batches on all stages, seconds of the shortest optimizer step)."""
        clock, depth = self._job.time, self._job.depth
        work = sum(map(sum, zip(clock.forward[:depth], clock.backward_input[:depth], clock.backward_weight[:depth],
                                strict=True)))
        return work * sum(self._job.microbatches), min(map(sum, zip(clock.all_reduce, clock.optimizer, strict=True)))


def spread_over_stages(failures: int, stages: int) -> DownByStage:
    """Failures by stage: one a stage, then two, and so on; the last stages first, which wait least for others."""
    return tuple(failures // stages + (stage >= stages - failures % stages) for stage in range(stages))
