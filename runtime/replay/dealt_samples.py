"""Which sample each name of a schedule stands for, in each iteration: computed ahead, the same on every worker.

Nothing is sent for it: the schedule, the data and the seed are the same everywhere, and `schedules.dealing` counts in
whole numbers. The samples of an iteration are those that it always has; what belongs to a sample, such as the seeds of
its dropout and its weight in the loss, goes with it to whoever runs it.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate

from slipstream.runtime.config import ConfigError, TrainingConfig
from slipstream.runtime.model.data.data import Data, knows_costs
from slipstream.runtime.model.data.loss_weights import tokens_of
from slipstream.runtime.model.microbatch import Microbatch
from slipstream.runtime.model.seeds import derive_seed
from slipstream.schedules.dealing import CostError, Dealer, require_costs
from slipstream.schedules.schedule import Schedule


def require_known_costs(data: Data, schedule: Schedule, training: TrainingConfig) -> None:
    """Raises ConfigError where what data tell of their first iteration cannot be: costs, or tokens that are asked for.
    """
    samples = schedule.grid.total_microbatches
    if training.deal_swaps > 0 and knows_costs(data):
        try:
            require_costs(data.costs(0), samples, schedule.grid.depth)  # type: ignore[attr-defined]
        except CostError as error:
            raise ConfigError(f"the data's costs of iteration 0: {error}") from None
    if training.loss_weights == "tokens":
        tokens_of(data, 0, samples)


class DealtSamples:
    """The samples of a schedule's names, by the costs that data know of them; without costs, each has its own name.

    A thread of its own computes an iteration while the one before is run.
    """

    def __init__(self, schedule: Schedule, data: Data, training: TrainingConfig) -> None:
        self._data, self._training = data, training
        self._own = [(pipeline, index) for pipeline, count in enumerate(schedule.grid.microbatches)
                     for index in range(count)]
        self._first = list(accumulate(schedule.grid.microbatches, initial=0))
        self._ahead: tuple[int, Future[list[int]]] | None = None
        self._now: tuple[int, list[int]] | None = None
        deals = training.deal_swaps > 0 and knows_costs(data)
        self._pool = ThreadPoolExecutor(1, "dealing") if deals else None
        self._dealer = self._pool.submit(Dealer, schedule) if self._pool is not None else None

    def __call__(self, name: Microbatch) -> Microbatch:
        """The sample that a name stands for in its iteration. Raises ConfigError where costs cannot be."""
        if self._pool is None:
            return name
        if self._now is None or self._now[0] != name.iteration:
            self._now = name.iteration, self._dealt(name.iteration)
        return Microbatch(name.iteration, *self._own[self._now[1][self._first[name.pipeline] + name.index]])

    def begin(self, iteration: int) -> None:
        """Compute an iteration beside what else is done."""
        if self._pool is not None and (self._ahead is None or self._ahead[0] != iteration):
            self._ahead = iteration, self._pool.submit(self._deal, iteration)

    def close(self) -> None:
        """Nothing is asked for any more."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _dealt(self, iteration: int) -> list[int]:
        self.begin(iteration)
        assert self._ahead is not None
        found = self._ahead[1].result()
        self.begin(iteration + 1)
        return found

    def _deal(self, iteration: int) -> list[int]:
        assert self._dealer is not None
        seed = derive_seed("dealing", self._training.seed, iteration)
        try:
            found = self._dealer.result().deal(self._data.costs(iteration), seed=seed,  # type: ignore[attr-defined]
                                               swaps=self._training.deal_swaps)
        except CostError as error:
            raise ConfigError(f"the data's costs of iteration {iteration}: {error}") from None
        return [int(one) for one in found.sample]
