"""The name of a micro-batch."""

from typing import NamedTuple


class Microbatch(NamedTuple):
    """The identity of a micro-batch: the `index`-th that `pipeline` reads in `iteration`."""

    iteration: int
    pipeline: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
