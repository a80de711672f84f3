"""Assign samples to the micro-batches of a schedule by their costs, equally on all workers.

Each iteration is dealt ahead. No communication is needed, because schedule, data and seed are equal
on all workers, and `schedules.dealing` computes with integers. An iteration always has the same
samples. The properties of a sample, such as the seed of its dropout and its weight in the loss, go
with the sample to the worker that runs it.
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np

from slipstream.runtime.config import ConfigError, LengthCosts, TrainingConfig
from slipstream.runtime.data.data import Data, has_costs, has_lengths
from slipstream.runtime.data.loss_weights import count_loss_tokens
from slipstream.runtime.placement import Placement
from slipstream.runtime.replay.microbatch import Microbatch
from slipstream.runtime.seeds import derive_seed
from slipstream.schedules.dealing import (
    Coefficients,
    CostError,
    Costs,
    Dealer,
    costs_by_stage,
    require_costs,
)
from slipstream.schedules.dealing.arrays import COSTS
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.schedule import Grid, Op, OpKind, Schedule

POLL_SECONDS = 0.02
"""Interval at which a wait for dealing checks whether the generation has ended."""

CostFunction = Callable[[int], object]
"""Function that returns the relative costs of an iteration's samples, not checked yet."""


def find_cost_function(
    data: Data, training: TrainingConfig, layers_by_stage: Sequence[LayerRange]
) -> CostFunction | None:
    """Return the function that gives the costs of an iteration's samples; None: not dealt.

    Costs are times of F, I and W of each sample (`schedules.dealing.Costs`), from the data, or
    computed from the lengths of documents. Samples are not dealt if no costs are known, or if
    `deal_swaps` is 0. `layers_by_stage` has the model's layers of each stage.
    """
    if training.deal_swaps and has_costs(data):
        return data.costs  # type: ignore[attr-defined, no-any-return]
    if training.length_costs is None or not training.deal_swaps or not has_lengths(data):
        return None
    return _cost_function_by_length(data, training.length_costs, layers_by_stage)


def _cost_function_by_length(
    data: Data, length_costs: LengthCosts, layers_by_stage: Sequence[LayerRange]
) -> CostFunction:
    coefficients = np.array(
        [range_coefficients(length_costs, layers) for layers in layers_by_stage]
    )

    def costs(iteration: int) -> Costs:
        return costs_by_stage(data.lengths(iteration), coefficients)  # type: ignore[attr-defined]

    return costs


def layers_of_stages(grid: Grid, placement: Placement) -> list[LayerRange]:
    """Return the model's layers of each stage, in a micro-batch's order of stages."""
    return [placement.model_range(grid.layers_of(stage)) for stage in range(grid.depth)]


def digest_costs(data: Data, training: TrainingConfig) -> str:
    """Return a digest of what decides how samples are dealt, to compare workers.

    Of the data's costs, those of iteration 0 count, or none if they cannot be read as numbers.
    """
    digest = hashlib.sha256(
        msgspec.json.encode((training.deal_swaps, training.seed, training.length_costs))
    )
    # The costs of one iteration stand for those of all, rounded against tiny differences.
    if training.deal_swaps and has_costs(data):
        try:
            costs = np.asarray(data.costs(0), np.float64)  # type: ignore[attr-defined]
            digest.update(np.rint(costs * 1e6).astype(np.int64).tobytes())
        except (TypeError, ValueError):
            pass  # refused elsewhere
    return digest.hexdigest()


def digest_data(corpus: Data, validation: Data | None, training: TrainingConfig) -> dict[str, str]:
    """Return digests, by name, of a run's data and of how they are dealt.

    `corpus` are the training data; `validation` is None if the run has no evaluations.
    """
    digests = {"training data": corpus.digest, "sample costs": digest_costs(corpus, training)}
    if validation is not None:
        digests["validation data"] = validation.digest
    return {
        name: hashlib.sha256(digest.encode()).hexdigest()[:16] for name, digest in digests.items()
    }


def check_costs(
    data: Data, schedule: Schedule, training: TrainingConfig, placement: Placement
) -> None:
    """Raise ConfigError if the costs or token counts of the first iteration are unusable.

    Costs are checked if samples are dealt, token counts if `training.loss_weights` is "tokens".
    Raises ConfigError, too, if `training.length_costs` has another number of layers than the model,
    and DataEndedError if the data have no samples. Other errors of the data are passed on.
    """
    samples = schedule.grid.total_microbatches
    if (
        training.length_costs is not None
        and len(training.length_costs.forward) != placement.layer_count
    ):
        raise ConfigError(
            f"training.length_costs is of {len(training.length_costs.forward)} layers; the model "
            f"has {placement.layer_count}: `slipstream profile` measures them"
        )
    # The user's code may give wrong numbers; it is better to know before the first iteration.
    costs = find_cost_function(data, training, layers_of_stages(schedule.grid, placement))
    if costs is not None:
        try:
            require_costs(costs(0), samples, schedule.grid.depth)
        except CostError as error:
            raise ConfigError(f"the data's costs of iteration 0: {error}") from None
    if training.loss_weights == "tokens":
        count_loss_tokens(data, 0, samples)


class _DealtIteration(NamedTuple):
    """Sample that each micro-batch got by dealing, and the costs of all samples.

    Costs are those of F, I and W: [samples, slices, 3].
    """

    sample: list[int]
    by_slice: Costs


class DealtSamples:
    """Samples of a schedule's micro-batches, dealt by their costs.

    Without costs, each micro-batch is its own sample, and only the grid of the schedule is needed.
    A wait for dealing can take many seconds if each process must first compile the code that deals;
    meanwhile `require` is called repeatedly, and may raise.
    """

    # A thread deals an iteration while the one before runs.

    def __init__(
        self,
        schedule: Schedule | None,
        grid: Grid,
        data: Data,
        training: TrainingConfig,
        placement: Placement,
        require: Callable[[], None] = lambda: None,
    ) -> None:
        self._training = training
        self._require = require
        self._names = [
            (pipeline, index)
            for pipeline, count in enumerate(grid.microbatches)
            for index in range(count)
        ]
        self._first = list(accumulate(grid.microbatches, initial=0))
        self._schedule = schedule
        self._next_dealing: tuple[int, Future[_DealtIteration]] | None = None
        self._current: tuple[int, _DealtIteration] | None = None
        self._costs = find_cost_function(data, training, layers_of_stages(grid, placement))
        self._pool = ThreadPoolExecutor(1, "dealing") if self._costs is not None else None
        assert self._pool is None or schedule is not None, "samples are dealt by the whole schedule"
        # Preparing a schedule takes time, too, so the thread does it.
        self._dealer: Future[Dealer] | None = None
        if self._pool is not None and schedule is not None:
            self._dealer = self._pool.submit(Dealer, schedule)

    def __call__(self, name: Microbatch) -> Microbatch:
        """Return the sample that a micro-batch got by dealing; wait for dealing if necessary.

        A sample has the name of the micro-batch that would have it without dealing. Raises
        ConfigError if the costs are unusable, DataEndedError if the data have ended, and any error
        of `require`.
        """
        if self._pool is None:
            return name
        return Microbatch(name.iteration, *self._names[self._sample_number(name)])

    @property
    def is_dealing(self) -> bool:
        """True if costs of samples are known, so that samples are dealt."""
        return self._pool is not None

    def relative_duration(self, op: Op, iteration: int) -> float:
        """Return an op's expected duration with its sample, as a multiple of the schedule's.

        To be called only if samples are dealt (`is_dealing`). The result is 1 if the op is expected
        to take no time. Waits and raises as `__call__` does.
        """
        assert op.slice is not None and op.pipeline is not None and op.microbatch is not None
        assert self._schedule is not None
        sample = self._sample_number(Microbatch(iteration, op.pipeline, op.microbatch))
        costs = self._get_dealt_iteration(iteration).by_slice[sample, op.slice]
        planned = expected = 0.0
        # A B is both I and W.
        for kind in (OpKind.I, OpKind.W) if op.kind is OpKind.B else (op.kind,):
            ticks = self._schedule.times.duration_ticks(kind, op.slice, op.worker)
            planned += ticks
            expected += ticks * float(costs[COSTS.index(kind)])
        return expected / planned if expected > 0 else 1.0

    def _sample_number(self, name: Microbatch) -> int:
        dealt = self._get_dealt_iteration(name.iteration)
        return dealt.sample[self._first[name.pipeline] + name.index]

    def _get_dealt_iteration(self, iteration: int) -> "_DealtIteration":
        if self._current is None or self._current[0] != iteration:
            self._current = iteration, self._wait_for_dealing(iteration)
        return self._current[1]

    def start_dealing(self, iteration: int) -> None:
        """Start to deal the samples of an iteration, in the background, if samples are dealt."""
        if self._pool is not None and (
            self._next_dealing is None or self._next_dealing[0] != iteration
        ):
            self._next_dealing = iteration, self._pool.submit(self._deal_iteration, iteration)

    def digest_deal(self, iteration: int) -> str:
        """Return a digest of an iteration's dealt samples; empty if they are not dealt.

        Waits and raises as `__call__` does.
        """
        if self._pool is None:
            return ""
        samples = self._get_dealt_iteration(iteration).sample
        return hashlib.blake2b(msgspec.json.encode(samples), digest_size=8).hexdigest()

    def close(self) -> None:
        """Stop dealing, and release the thread, without waiting for it."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _wait_for_dealing(self, iteration: int) -> "_DealtIteration":
        self.start_dealing(iteration)
        assert self._next_dealing is not None
        dealing = self._next_dealing[1]
        while not dealing.done():
            self._require()
            wait([dealing], POLL_SECONDS)
        dealt = dealing.result()
        # The next iteration is dealt while this one runs.
        self.start_dealing(iteration + 1)
        return dealt

    def _deal_iteration(self, iteration: int) -> "_DealtIteration":
        assert self._dealer is not None and self._costs is not None
        seed = derive_seed("dealing", self._training.seed, iteration)
        try:
            dealer, costs = self._dealer.result(), self._costs(iteration)
            dealt = dealer.deal(costs, seed=seed, swaps=self._training.deal_swaps)
        except CostError as error:
            raise ConfigError(f"the data's costs of iteration {iteration}: {error}") from None
        samples = [int(sample) for sample in dealt.sample]
        return _DealtIteration(samples, dealer.costs_by_slice(costs))


def work_kinds(kind: OpKind, layers: LayerRange) -> tuple[OpKind, ...]:
    """Return which of F, I and W an op of kind `kind` does on `layers`."""
    # I does no work on layers that begin with layer 0; W does the whole backward.
    if kind is OpKind.B or (kind is OpKind.W and layers[0] == 0):
        return OpKind.I, OpKind.W
    return () if kind is OpKind.I and layers[0] == 0 else (kind,)


def op_coefficients(length_costs: LengthCosts, kind: OpKind, layers: LayerRange) -> Coefficients:
    """Return the seconds of an op on a range of layers, as three coefficients.

    The op takes the first for each sample, plus the second for each token, plus the third for each
    squared document length. Each is the sum over the layers of those in `length_costs`.
    """
    a = b = c = 0.0
    for part in work_kinds(kind, layers):
        for by_sample, by_token, by_square in length_costs.coefficients_for(part)[slice(*layers)]:
            a, b, c = a + by_sample, b + by_token, c + by_square
    return a, b, c


def range_coefficients(length_costs: LengthCosts, layers: LayerRange) -> list[Coefficients]:
    """Return the `op_coefficients` of each of F, I and W on a range of layers."""
    return [op_coefficients(length_costs, kind, layers) for kind in COSTS]
