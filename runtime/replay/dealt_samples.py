"""Dealing: assign samples to the micro-batches of a schedule, ahead of each iteration and equally on all workers.

No communication is needed, because schedule, data and seed are equal on all workers, and `schedules.dealing` computes
with integers. An iteration always has the same samples. The properties of a sample, such as the seed of its dropout and
its weight in the loss, go with the sample to the worker that runs it.
"""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np

from slipstream.runtime.config import ConfigError, LengthCosts, TrainingConfig
from slipstream.runtime.model.data.data import Data, knows_costs, knows_lengths
from slipstream.runtime.model.data.loss_weights import tokens_of
from slipstream.runtime.model.microbatch import Microbatch
from slipstream.runtime.model.seeds import derive_seed
from slipstream.runtime.replay.placement import Placement
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

LOOK_SECONDS = 0.02
"""Interval at which a wait for a dealt iteration checks if the generation has ended."""

CostsOf = Callable[[int], object]
"""Function that returns the costs of an iteration, which should be `schedules.dealing.Costs`; they are checked when
used."""


def costs_known(data: Data, training: TrainingConfig, layers_by_stage: Sequence[LayerRange]) -> CostsOf | None:
    """Return the function that gives the costs of an iteration's samples.

    Returns None if no costs are known, or samples are not dealt. The costs come from the data, or follow from the
    lengths of their documents. The argument `layers_by_stage` has the model's layers of each stage.
    """
    if training.deal_swaps and knows_costs(data):
        return data.costs  # type: ignore[attr-defined, no-any-return]
    if training.length_costs is None or not training.deal_swaps or not knows_lengths(data):
        return None
    return _by_lengths(data, training.length_costs, layers_by_stage)


def _by_lengths(data: Data, known: LengthCosts, layers_by_stage: Sequence[LayerRange]) -> CostsOf:
    coefficients = np.array([coefficients_of(known, layers) for layers in layers_by_stage])

    def costs(iteration: int) -> Costs:
        return costs_by_stage(data.lengths(iteration), coefficients)  # type: ignore[attr-defined]

    return costs


def stage_layers(grid: Grid, placement: Placement) -> list[LayerRange]:
    """Return the model's layers of each stage of one chain."""
    return [placement.range_of(grid.layers_of(stage)) for stage in range(grid.depth)]


def costs_digest(data: Data, training: TrainingConfig) -> str:
    """Return a digest of all that decides how samples are dealt. Workers that train together must have equal
    digests."""
    digest = hashlib.sha256(msgspec.json.encode((training.deal_swaps, training.seed, training.length_costs)))
    if training.deal_swaps and knows_costs(data):
        try:
            costs = np.asarray(data.costs(0), np.float64)  # type: ignore[attr-defined]
            digest.update(np.rint(costs * 1e6).astype(np.int64).tobytes())
        except (TypeError, ValueError):
            pass  # refused elsewhere
    return digest.hexdigest()


def require_known_costs(data: Data, schedule: Schedule, training: TrainingConfig, placement: Placement) -> None:
    """Raise ConfigError if the costs or token counts of the data's first iteration are unusable.

    Costs are checked if samples are dealt by them, token counts if `training.loss_weights` is "tokens". Raises
    ConfigError, too, if `training.length_costs` has another number of layers than the model.
    """
    samples = schedule.grid.total_microbatches
    if training.length_costs is not None and len(training.length_costs.forward) != placement.layers:
        raise ConfigError(f"training.length_costs is of {len(training.length_costs.forward)} layers; the model has "
                          f"{placement.layers}: `slipstream profile` measures them")
    costs = costs_known(data, training, stage_layers(schedule.grid, placement))
    if costs is not None:
        try:
            require_costs(costs(0), samples, schedule.grid.depth)
        except CostError as error:
            raise ConfigError(f"the data's costs of iteration 0: {error}") from None
    if training.loss_weights == "tokens":
        tokens_of(data, 0, samples)


class _Iteration(NamedTuple):
    """Samples of an iteration, by the number of each micro-batch name, and their costs, [samples, slices, 3]."""

    sample: list[int]
    by_slice: Costs


class DealtSamples:
    """Samples of a schedule's micro-batches, dealt by their costs. Without costs, each micro-batch is its own sample.

    A thread of this object deals an iteration while the one before runs. A wait for that thread calls the function
    `require` repeatedly, which raises an error to end the wait. The wait can take many seconds if each process must
    first compile the code that deals.
    """

    def __init__(self, schedule: Schedule, data: Data, training: TrainingConfig, placement: Placement,
                 require: Callable[[], None] = lambda: None) -> None:
        self._training = training
        self._require = require
        self._own = [(pipeline, index) for pipeline, count in enumerate(schedule.grid.microbatches)
                     for index in range(count)]
        self._first = list(accumulate(schedule.grid.microbatches, initial=0))
        self._schedule = schedule
        self._ahead: tuple[int, Future[_Iteration]] | None = None
        self._now: tuple[int, _Iteration] | None = None
        self._costs = costs_known(data, training, stage_layers(schedule.grid, placement))
        self._pool = ThreadPoolExecutor(1, "dealing") if self._costs is not None else None
        self._dealer = self._pool.submit(Dealer, schedule) if self._pool is not None else None

    def __call__(self, name: Microbatch) -> Microbatch:
        """Return the sample of a micro-batch name in its iteration. Raises ConfigError if the costs are unusable."""
        if self._pool is None:
            return name
        return Microbatch(name.iteration, *self._own[self._sample(name)])

    @property
    def deals(self) -> bool:
        """True if costs are known, so that samples are dealt."""
        return self._pool is not None

    def times_longer(self, op: Op, iteration: int) -> float:
        """Return the expected duration of an op, relative to the usual one, by its sample's cost; 1 if it costs
        nothing."""
        assert op.slice is not None and op.pipeline is not None and op.microbatch is not None
        sample = self._sample(Microbatch(iteration, op.pipeline, op.microbatch))
        costs, times = self._of(iteration).by_slice[sample, op.slice], self._schedule.times
        kinds = (OpKind.I, OpKind.W) if op.kind is OpKind.B else (op.kind,)
        ticks = [times.duration_ticks(kind, op.slice, op.worker) for kind in kinds]
        taken = sum(own * float(costs[COSTS.index(kind)]) for own, kind in zip(ticks, kinds, strict=True))
        return taken / sum(ticks) if taken > 0 else 1.0

    def _sample(self, name: Microbatch) -> int:
        return self._of(name.iteration).sample[self._first[name.pipeline] + name.index]

    def _of(self, iteration: int) -> "_Iteration":
        if self._now is None or self._now[0] != iteration:
            self._now = iteration, self._dealt(iteration)
        return self._now[1]

    def begin(self, iteration: int) -> None:
        """Start to deal an iteration in the background."""
        if self._pool is not None and (self._ahead is None or self._ahead[0] != iteration):
            self._ahead = iteration, self._pool.submit(self._deal, iteration)

    def close(self) -> None:
        """Stop dealing, and release the thread."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _dealt(self, iteration: int) -> "_Iteration":
        self.begin(iteration)
        assert self._ahead is not None
        dealing = self._ahead[1]
        while not dealing.done():
            self._require()
            wait([dealing], LOOK_SECONDS)
        dealt = dealing.result()
        self.begin(iteration + 1)
        return dealt

    def _deal(self, iteration: int) -> "_Iteration":
        assert self._dealer is not None and self._costs is not None
        seed = derive_seed("dealing", self._training.seed, iteration)
        try:
            dealer, costs = self._dealer.result(), self._costs(iteration)
            dealt = dealer.deal(costs, seed=seed, swaps=self._training.deal_swaps)
        except CostError as error:
            raise ConfigError(f"the data's costs of iteration {iteration}: {error}") from None
        return _Iteration([int(sample) for sample in dealt.sample], dealer.by_slice(costs))


def kinds_of(kind: OpKind, layers: LayerRange) -> tuple[OpKind, ...]:
    """Return the kinds of work that an op on some layers contains.

    On layers that begin with layer 0, the whole backward belongs to W, and I contains no work.
    """
    if kind is OpKind.B or (kind is OpKind.W and layers[0] == 0):
        return OpKind.I, OpKind.W
    return () if kind is OpKind.I and layers[0] == 0 else (kind,)


def of_op(known: LengthCosts, kind: OpKind, layers: LayerRange) -> Coefficients:
    """Return the cost coefficients of an op on some layers."""
    by_layer = [one for part in kinds_of(kind, layers) for one in known.of(part)[slice(*layers)]]
    a, b, c = (sum(one[index] for one in by_layer) for index in range(3))
    return a, b, c


def coefficients_of(known: LengthCosts, layers: LayerRange) -> list[Coefficients]:
    """Return the cost coefficients of F, I and W on some layers, [3, 3]."""
    return [of_op(known, kind, layers) for kind in COSTS]
