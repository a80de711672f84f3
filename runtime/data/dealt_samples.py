"""Assign samples to the micro-batches of a schedule, equally on all workers.

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
"""Seconds after which a wait for samples checks again if the generation has ended."""

CostFunction = Callable[[int], object]
"""Function that returns the relative costs of an iteration's samples, checked when used."""


def find_cost_function(data: Data, training: TrainingConfig,
                       layers_by_stage: Sequence[LayerRange]) -> CostFunction | None:
    """Return the function that maps an iteration to the costs of its samples.

    These are times of F, I and W of each, relative to the mean (`schedules.dealing.Costs`). Returns
    None if no costs are known, or samples are not dealt. The costs come from the data, or are
    computed from the lengths of the samples' documents. `layers_by_stage` has the model's layers of
    each stage.
    """
    if training.deal_swaps and has_costs(data):
        return data.costs  # type: ignore[attr-defined, no-any-return]
    if training.length_costs is None or not training.deal_swaps or not has_lengths(data):
        return None
    return _cost_function_by_length(data, training.length_costs, layers_by_stage)


def _cost_function_by_length(data: Data, known: LengthCosts, layers_by_stage: Sequence[LayerRange]) -> CostFunction:
    coefficients = np.array([range_coefficients(known, layers) for layers in layers_by_stage])

    def costs(iteration: int) -> Costs:
        return costs_by_stage(data.lengths(iteration), coefficients)  # type: ignore[attr-defined]

    return costs


def layers_of_stages(grid: Grid, placement: Placement) -> list[LayerRange]:
    """Return the model's layers of each stage that a micro-batch passes, in order."""
    return [placement.model_range(grid.layers_of(stage)) for stage in range(grid.depth)]


def digest_costs(data: Data, training: TrainingConfig) -> str:
    """Return a digest of all settings and data properties that decide how samples are dealt.
    Workers that train together must have equal digests."""
    digest = hashlib.sha256(msgspec.json.encode((training.deal_swaps, training.seed, training.length_costs)))
    if training.deal_swaps and has_costs(data):
        try:
            costs = np.asarray(data.costs(0), np.float64)  # type: ignore[attr-defined]
            digest.update(np.rint(costs * 1e6).astype(np.int64).tobytes())
        except (TypeError, ValueError):
            pass  # refused elsewhere
    return digest.hexdigest()


def digest_data(corpus: Data, validation: Data | None, training: TrainingConfig) -> dict[str, str]:
    """Return digests, by name, of a run's data and of how they are dealt. `validation` is None if
    it does not evaluate. They are part of the run's identity."""
    digests = {"training data": corpus.digest, "sample costs": digest_costs(corpus, training)}
    if validation is not None:
        digests["validation data"] = validation.digest
    return {name: hashlib.sha256(digest.encode()).hexdigest()[:16] for name, digest in digests.items()}


def check_costs(data: Data, schedule: Schedule, training: TrainingConfig, placement: Placement) -> None:
    """Raise ConfigError if the costs or token counts of the first iteration are unusable.

    Costs are checked if samples are dealt by them, token counts if `training.loss_weights` is
    "tokens". Raises ConfigError, too, if `training.length_costs` has another number of layers than
    the model.
    """
    samples = schedule.grid.total_microbatches
    if training.length_costs is not None and len(training.length_costs.forward) != placement.layer_count:
        raise ConfigError(f"training.length_costs is of {len(training.length_costs.forward)} layers; the model has "
                          f"{placement.layer_count}: `slipstream profile` measures them")
    costs = find_cost_function(data, training, layers_of_stages(schedule.grid, placement))
    if costs is not None:
        try:
            require_costs(costs(0), samples, schedule.grid.depth)
        except CostError as error:
            raise ConfigError(f"the data's costs of iteration 0: {error}") from None
    if training.loss_weights == "tokens":
        count_loss_tokens(data, 0, samples)


class _DealtIteration(NamedTuple):
    """Sample of each micro-batch after dealing, and their costs, [samples, slices, 3]."""

    sample: list[int]
    by_slice: Costs


class DealtSamples:
    """Samples of a schedule's micro-batches, dealt by their costs.

    Without costs, each micro-batch is its own sample, and only the grid of the schedule is needed.
    A thread of this object deals an iteration while the one before runs. A wait for that thread
    calls the function `require` repeatedly, which raises an error to end the wait. The wait can
    take many seconds if each process must first compile the code that deals.
    """

    def __init__(self, schedule: Schedule | None, grid: Grid, data: Data, training: TrainingConfig,
                 placement: Placement, require: Callable[[], None] = lambda: None) -> None:
        self._training = training
        self._require = require
        self._names = [(pipeline, index) for pipeline, count in enumerate(grid.microbatches)
                       for index in range(count)]
        self._first = list(accumulate(grid.microbatches, initial=0))
        self._schedule = schedule
        self._next_dealing: tuple[int, Future[_DealtIteration]] | None = None
        self._current: tuple[int, _DealtIteration] | None = None
        self._costs = find_cost_function(data, training, layers_of_stages(grid, placement))
        self._pool = ThreadPoolExecutor(1, "dealing") if self._costs is not None else None
        assert self._pool is None or schedule is not None, "samples are dealt by the whole schedule"
        self._dealer = None if self._pool is None or schedule is None else self._pool.submit(Dealer, schedule)

    def __call__(self, name: Microbatch) -> Microbatch:
        """Return the sample that a micro-batch gets, after waiting until samples are dealt.

        It is named by the micro-batch that would have it without dealing. Raises ConfigError if the
        costs of the samples are unusable, and any error of `require`.
        """
        if self._pool is None:
            return name
        return Microbatch(name.iteration, *self._names[self._sample_number(name)])

    @property
    def is_dealing(self) -> bool:
        """True if the costs of samples are known, so that samples are dealt."""
        return self._pool is not None

    def relative_duration(self, op: Op, iteration: int) -> float:
        """Return an op's expected duration with its sample, as a multiple of the schedule's. The
        result is 1 if the op is expected to take no time."""
        assert op.slice is not None and op.pipeline is not None and op.microbatch is not None
        assert self._schedule is not None
        sample = self._sample_number(Microbatch(iteration, op.pipeline, op.microbatch))
        costs, times = self._get_dealt_iteration(iteration).by_slice[sample, op.slice], self._schedule.times
        kinds = (OpKind.I, OpKind.W) if op.kind is OpKind.B else (op.kind,)
        ticks = [times.duration_ticks(kind, op.slice, op.worker) for kind in kinds]
        taken = sum(own * float(costs[COSTS.index(kind)]) for own, kind in zip(ticks, kinds, strict=True))
        return taken / sum(ticks) if taken > 0 else 1.0

    def _sample_number(self, name: Microbatch) -> int:
        return self._get_dealt_iteration(name.iteration).sample[self._first[name.pipeline] + name.index]

    def _get_dealt_iteration(self, iteration: int) -> "_DealtIteration":
        if self._current is None or self._current[0] != iteration:
            self._current = iteration, self._wait_for_dealing(iteration)
        return self._current[1]

    def start_dealing(self, iteration: int) -> None:
        """Start to assign samples to the micro-batches of an iteration in the background."""
        if self._pool is not None and (self._next_dealing is None or self._next_dealing[0] != iteration):
            self._next_dealing = iteration, self._pool.submit(self._deal_iteration, iteration)

    def digest_deal(self, iteration: int) -> str:
        """Return a digest of the dealt samples of an iteration. Empty if they are not dealt."""
        if self._pool is None:
            return ""
        samples = self._get_dealt_iteration(iteration).sample
        return hashlib.blake2b(msgspec.json.encode(samples), digest_size=8).hexdigest()

    def close(self) -> None:
        """Stop dealing, and release the thread."""
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
        return _DealtIteration([int(sample) for sample in dealt.sample], dealer.costs_by_slice(costs))


def work_kinds(kind: OpKind, layers: LayerRange) -> tuple[OpKind, ...]:
    """Return which of F, I and W an op does on some layers. A B does I and W. On layers that begin
    with layer 0, W does the whole backward, and I does no work."""
    if kind is OpKind.B or (kind is OpKind.W and layers[0] == 0):
        return OpKind.I, OpKind.W
    return () if kind is OpKind.I and layers[0] == 0 else (kind,)


def op_coefficients(known: LengthCosts, kind: OpKind, layers: LayerRange) -> Coefficients:
    """Return the coefficients of an op's time: per sample, token, and squared document length. They
    are in seconds, and sums over the layers of the coefficients in `known`."""
    by_layer = [one for part in work_kinds(kind, layers) for one in known.coefficients_for(part)[slice(*layers)]]
    a, b, c = (sum(one[index] for one in by_layer) for index in range(3))
    return a, b, c


def range_coefficients(known: LengthCosts, layers: LayerRange) -> list[Coefficients]:
    """Return the coefficients of F, I and W on some layers, three each (`op_coefficients`)."""
    return [op_coefficients(known, kind, layers) for kind in COSTS]
