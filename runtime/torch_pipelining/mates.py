"""Mates: the ranks of one worker, which fail together.

A death breaks connections of some ranks of a worker earlier than those of others. Ranks wait for
each other in collectives inside the worker, which nobody can interrupt, nor join again later. So a
rank that has an error goes on, on zeros, through all collectives inside the worker, and raises it
where all ranks of the worker do, having asked each other over a group of their own. That group
breaks only if one of them dies; their worker is then lost anyhow.
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
    """The ranks of this worker, as one of them asks the others. A single rank asks nobody.

    Parameters
    ----------
    end_generation
        Function that ends the generation for all members, so that no rank waits for another worker
        any more.
    """

    def __init__(self, rank: int, ranks: int, end_generation: Callable[[], None]) -> None:
        self._rank, self._ranks, self._end_generation = rank, ranks, end_generation
        self._group: Group | None = None
        self._failure: str | None = None
        """First error of this rank that the others do not know of yet."""
        self._know_failure = False

    def connect(self, store: Store, patience: float) -> None:
        """Connect the ranks, which all call this, by a store of their own."""
        if self._ranks > 1:
            self._group = create_gloo_group(PrefixStore("mates/", store), self._rank, self._ranks,
                                            timedelta(seconds=patience), open_gloo_devices())

    @contextlib.contextmanager
    def deferring_errors(self) -> Iterator[None]:
        """Keep a CommunicationError for the next `settle` of a worker of several ranks."""
        try:
            yield
        except CommunicationError as error:
            if self._ranks == 1:
                raise
            self.keep(error)
            self._end_generation()

    def keep(self, error: CommunicationError) -> None:
        """Raise an error in the next `settle`."""
        self._failure = self._failure or str(error)

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raise CommunicationError on all ranks if one has it. All ranks enter this in turn, and
        the context must go through the same collectives inside the worker with an error as without.
        """
        with self.deferring_errors():
            yield
        self.settle()

    def settle(self, values: Sequence[float] = (0.0, 0.0), *, needs_all: bool = True
               ) -> Sequence[float]:
        """Find out together whether all ranks, or one, are without an error; return the two values
        of the first that is. Raises CommunicationError on all ranks otherwise.
        """
        failure, self._failure = self._failure, None
        own = torch.tensor([float(failure is None), *values], dtype=torch.float64)
        told = own.expand(self._ranks, -1).contiguous()
        self._know_failure = True
        if self._group is not None:
            with one_line_errors("hearing from the other ranks of this worker"):
                self._group._allgather_base(told.view(-1), own).wait()
        said: list[list[float]] = told.tolist()
        passed = [others for has_passed, *others in said if has_passed]
        if len(passed) < (self._ranks if needs_all else 1):
            raise CommunicationError(failure or "another rank of this worker has lost a connection")
        self._know_failure = False
        return passed[0]

    def fail(self, failure: str) -> None:
        """Let all ranks fail in their present or next `settle`, unless they have done so."""
        if not self._know_failure:
            self._failure = failure
            with contextlib.suppress(CommunicationError):
                self.settle()
