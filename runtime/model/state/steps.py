"""The optimizer steps of one worker when a step depends on the gradients of all layers: validated afterwards.

Clipping by the global norm, and skipping what is not finite, make every worker's step wait for the gradients of all
layers, which takes back what staggering gains. So a worker steps right away, on the guess that nothing is clipped; the
sums of squares of all layers travel meanwhile, and when they are there and say otherwise, the step is undone and done
again. The idea is Zero Bubble's (Qi et al., ICLR 2024, section 4); undoing by copies keeps it exact.

While the sums travel, the worker runs the forwards that begin the next iteration. Those that ran on a wrong guess are
void: from there on all workers pass empty tensors to each other to the end of the iteration, computing nothing, and
run it once more. They all know alike, from the same bits, and before any backward (which needs the last layer's step),
so that gradients of two iterations never meet. Where workers keep parts of layers' states, they gather the parameters
of the second step at the end of the void iteration, where all are together. After an iteration that was clipped, no
guess is made for a while: where clipping is the rule, timing is that of a synchronous optimizer, and nothing runs
twice.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.model.layers.worker_group import first_rank, worker_group
from slipstream.runtime.model.state.clipping import clip_factor, watches_gradients
from slipstream.runtime.model.state.holding import Holding
from slipstream.runtime.model.state.version import VersionError

UNCLIPPED = 4
"""Iterations without clipping after which guessing pays again: a wrong guess costs less than one iteration."""


class Sums(Protocol):
    """Numbers that are being summed over all workers."""

    def arrived(self) -> bool:
        """Whether `take` returns at once."""

    def take(self) -> Sequence[float]:
        """Wait for the sums. Raises CommunicationError."""


Share = Callable[[Sequence[float]], Sums]
"""Starts to sum numbers over all workers; computing goes on."""


class Steps:
    """Makes the steps of what one worker holds.

    Parameters
    ----------
    layers
        How many the whole model has.
    share
        None where `watches_gradients` is false.
    staggered
        Whether steps may be guessed; with a synchronous optimizer all gradients are known soon anyway.
    stepped
        Called with each iteration whose step has been made for good, or for which it is known that there is none, while
        the gradients are still those it was made by.
    """

    def __init__(self, holding: Holding, config: TrainingConfig, *, layers: int, share: Share | None, staggered: bool,
                 stepped: Callable[[int], None] = lambda _: None) -> None:
        assert (share is not None) == watches_gradients(config)
        self._holding = holding
        self._config = config
        self._layers = layers
        self._share = share
        self._may_guess = staggered
        self._stepped = stepped
        self._unclipped = UNCLIPPED
        self.squares = 0.0
        """The sum of squares of the gradients of the last iteration, before clipping, of this worker's own parts."""
        self._sums: Sums | None = None
        self._iteration = 0
        self._others_guess = False
        self._guessed = False
        self.wrong = False
        """Whether the last step that has been validated was another one than others had guessed."""
        self._agreed = True
        """Whether the ranks of this worker go by that already."""
        self._when_validated: list[Callable[[], None]] = []
        self.validated: tuple[int, float | None] | None = None
        """The last iteration of which it is known how to step, with its `clip_factor`; None where all are 1."""
        self.losses: deque[tuple[int, float]] = deque(maxlen=2)
        """The last iterations whose sums have arrived, each with its mean loss."""
        self.void = False
        """Whether what the workers compute from here to the next step rests on a wrong guess; reset it then."""

    def step(self, iteration: int, loss: float, until_unread: Callable[[], None] = lambda: None) -> None:
        """O: step all layers, for good or on a guess. `loss` is this worker's part; `until_unread` waits until no other
        worker takes anything from the gradients any more. Raises CommunicationError, as that may."""
        self._iteration = iteration
        if self._share is None:
            self.squares = self._holding.squares()
            self._holding.step(iteration)
            until_unread()
            self._end()
            return
        until_unread()  # there may be no step, and gradients are zero afterwards
        squares = self._holding.layer_squares()
        contribution = [squares.get(layer, 0.0) for layer in range(self._layers)]
        self.squares = math.fsum(contribution)
        self._sums = self._share([*contribution, loss if first_rank() else 0.0])
        self._others_guess = self._may_guess and self._unclipped >= UNCLIPPED
        # What this worker holds may already be too much: then the guess is known to be wrong.
        self._guessed = self._others_guess and clip_factor(squares.values(), self._config) == 1.0
        self._agreed = worker_group() is None or not self._others_guess
        if self._guessed:
            self._holding.step(iteration)
        else:
            self._take()

    @property
    def iteration(self) -> int:
        """The one that has been stepped last, or is being stepped."""
        return self._iteration

    def poll(self) -> None:
        """Validate the step if that can be done without waiting: before a forward. Raises CommunicationError.

        The ranks of a worker agree on it: they meet within the op, unless it is void.
        """
        arrived, group = self._sums is None or self._sums.arrived(), worker_group()
        if arrived if group is None or self._agreed else group.all_ready(arrived):
            self.validate()

    def validate(self) -> None:
        """Wait until it is known how to step, and see to it that this was done. Raises CommunicationError.

        Needed before a backward: until then the gradients of the iteration before are kept for a second step.
        """
        self._take()
        if not self._agreed:
            self._agreed, self.void = True, self.wrong

    def _take(self) -> None:
        if self._sums is None:
            return
        *squares, loss = self._sums.take()
        self.losses.append((self._iteration, loss))
        self._conclude(clip_factor(squares, self._config))

    def go_back(self, committed: int, factor: float | None, *, known: bool = True) -> None:
        """After a failure: see to it that exactly the iterations up to `committed` have been stepped, for good.

        `factor` is the one of that iteration, if it is `known`, for the case that this worker has not heard of it. At
        most one step has been made after it, by anyone. Gradients are zero afterwards. Raises VersionError where this
        cannot be done.
        """
        self._when_validated.clear()
        if self._sums is not None and self._iteration == committed:
            if not known:
                raise VersionError(f"nobody says how iteration {committed} was stepped")
            self._conclude(factor)
        self._holding.go_back(committed)
        self._sums, self._agreed = None, True
        self.void = False
        self._unclipped = UNCLIPPED  # as with a worker that joins now: all must guess alike

    def _conclude(self, factor: float | None) -> None:
        right = self._guessed and factor == 1.0
        if self._guessed and not right:
            self._holding.undo()
        if not right:
            self._holding.step(self._iteration, factor)
        self._sums = None
        self.validated = self._iteration, factor
        self._unclipped = self._unclipped + 1 if factor == 1.0 else 0
        self.wrong = self._others_guess and factor != 1.0
        if self._agreed:
            self.void = self.wrong
        self._end()

    def when_validated(self, call: Callable[[], None]) -> None:
        """Call as soon as the last step is for good: now, or when it has been validated."""
        if self._sums is None:
            call()
        else:
            self._when_validated.append(call)

    def _end(self) -> None:
        self._stepped(self._iteration)
        self._holding.zero_gradients()
        calls, self._when_validated = self._when_validated, []
        for call in calls:
            call()

