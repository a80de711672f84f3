"""The name of a micro-batch, and how samples are counted from run to run."""

from typing import NamedTuple


class Microbatch(NamedTuple):
    """The identity of a micro-batch: the `index`-th that `pipeline` reads in `iteration`."""

    iteration: int
    pipeline: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


class SamplesRead(NamedTuple):
    """How many samples all iterations before one have read: runs on other grids read other numbers in each."""

    iteration: int
    samples: int

    def before(self, iteration: int, samples_per_iteration: int) -> int:
        """Return how many samples are read before an iteration of this run."""
        return self.samples + (iteration - self.iteration) * samples_per_iteration


FROM_THE_START = SamplesRead(0, 0)
