"""Name micro-batches, and count samples over several runs."""

from typing import NamedTuple


class Microbatch(NamedTuple):
    """Name of a micro-batch: the `index`-th that `pipeline` reads in `iteration`."""

    iteration: int
    pipeline: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here


class SamplesRead(NamedTuple):
    """Number of samples that all iterations before `iteration` have read.

    Jobs with other grids may have run some of these iterations.
    """

    iteration: int
    samples: int

    def count_before(self, iteration: int, samples_per_iteration: int) -> int:
        """Return how many samples all iterations before `iteration` have read.

        From the recorded iteration on, each iteration reads `samples_per_iteration`.
        """
        return self.samples + (iteration - self.iteration) * samples_per_iteration


NOTHING_READ = SamplesRead(0, 0)
"""`SamplesRead` of a run that does not continue an earlier one."""
