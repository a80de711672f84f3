"""Mates: the ranks of one worker, which fail together.

A death breaks connections of some ranks of a worker earlier than those of others. Ranks wait for
each other in collectives inside the worker, which nobody can interrupt, nor join again later. So a
rank that has an error goes on, with zeros for data, through all collectives inside the worker. At
certain points the ranks compare their errors, over a process group of their own, and raise them
together. That group breaks only if one of the ranks dies; their worker is then lost anyhow.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch

from slipstream.runtime.replay.torch_groups import (
    Group,
    PrefixStore,
    Store,
    create_gloo_group,
    open_gloo_devices,
)
from slipstream.runtime.replay.transfers import CommunicationError, one_line_errors


class Mates:
    """A rank's connection to the other ranks of its worker, by which all fail together.

    Parameters
    ----------
    end_generation
        Function that ends the generation for all members, so that no rank waits for another worker
        any more.
    """

    def __init__(self, rank: int, ranks: int, end_generation: Callable[[], None]) -> None:
        self._rank, self._ranks, self._end_generation = rank, ranks, end_generation
        self._group: Group | None = None
        # The first error of this rank that the others do not know of yet.
        self._failure: str | None = None
        self._know_failure = False

    def connect(self, store: Store, patience: float) -> None:
        """Connect the ranks of this worker through `store`; all ranks call this.

        From then on, a rank waits for another at most `patience` seconds. Raises RuntimeError,
        torch's, if a rank does not come.
        """
        if self._ranks > 1:
            self._group = create_gloo_group(
                PrefixStore("mates/", store),
                self._rank,
                self._ranks,
                timedelta(seconds=patience),
                open_gloo_devices(),
            )

    @contextlib.contextmanager
    def deferring_errors(self) -> Iterator[None]:
        """Keep a CommunicationError that the context raises, for the next `settle` to raise.

        The error also ends the generation, for all members. In a worker of one rank, it is only
        raised, at once.
        """
        try:
            yield
        except CommunicationError as error:
            if self._ranks == 1:
                raise
            self.keep(error)
            self._end_generation()

    def keep(self, error: CommunicationError) -> None:
        """Keep this rank's first error for the next `settle`, which tells all ranks."""
        self._failure = self._failure or str(error)

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raise CommunicationError on all ranks if the context raises it on one.

        All ranks enter such contexts in the same order. Within, a rank with an error must go
        through the same collectives of the worker as one without.
        """
        with self.deferring_errors():
            yield
        self.settle()

    def settle(
        self, values: Sequence[float] = (0.0, 0.0), *, needs_all: bool = True
    ) -> Sequence[float]:
        """Compare errors with all ranks; return `values` of the first rank without an error.

        A rank's error is the one kept since the last call, by `keep` or `deferring_errors`. All
        ranks call this, with equally many values. Raises CommunicationError if a rank cannot be
        heard. Raises it on all ranks if one of them has an error; if not `needs_all`, only if all
        of them have one.
        """
        failure, self._failure = self._failure, None
        # Each rank says whether it has passed, and its values.
        row = torch.tensor([float(failure is None), *values], dtype=torch.float64)
        table = row.expand(self._ranks, -1).contiguous()
        self._know_failure = True
        if self._group is not None:
            with one_line_errors("hearing from the other ranks of this worker"):
                self._group._allgather_base(table.view(-1), row).wait()
        # All ranks read the same table, and so raise or go on alike.
        rows: list[list[float]] = table.tolist()
        passed = [rank_values for has_passed, *rank_values in rows if has_passed]
        if len(passed) < (self._ranks if needs_all else 1):
            raise CommunicationError(failure or "another rank of this worker has lost a connection")
        self._know_failure = False
        return passed[0]

    def fail(self, failure: str) -> None:
        """Make all ranks fail in their present or next `settle`, and wait for them there.

        `failure` is the text of this rank's error. Nothing is done if the last `settle` has failed.
        """
        # If the last `settle` has failed, all ranks know already.
        if not self._know_failure:
            self._failure = failure
            with contextlib.suppress(CommunicationError):
                self.settle()
