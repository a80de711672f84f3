"""The optimizer steps of one worker when a step depends on the gradients of all stages: validated afterwards.

Clipping by the global norm, and skipping what is not finite, make every stage's step wait for the last stage's
gradients, which takes back what staggering gains. So a stage steps right away, on the guess that nothing is clipped;
the sums of squares of all layers travel meanwhile, and when they are there and say otherwise, the step is undone and
done again. The idea is Zero Bubble's (Qi et al., ICLR 2024, section 4); undoing by copies keeps it exact.

While the sums travel, the worker runs the forwards that begin the next iteration. Those that ran on a wrong guess are
void: from there on all workers pass empty tensors to each other to the end of the iteration, computing nothing, and
run it once more. They all know alike, from the same bits, and before any backward (which needs the last stage's step),
so that gradients of two iterations never meet. After an iteration that was clipped, no guess is made for a while: where
clipping is the rule, timing is that of a synchronous optimizer, and nothing runs twice.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from runtime.config import TrainingConfig
from runtime.model.clipping import clip_factor, watches_gradients
from runtime.model.optimizer import StageOptimizer
from runtime.model.stage import StageModule

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
    """Makes the steps of one worker's stages.

    Parameters
    ----------
    speaks_for
        The stages whose sums this worker contributes; each stage has one such worker, its peers hold the same.
    layers
        How many the whole model has.
    share
        None where `watches_gradients` is false.
    staggered
        Whether steps may be guessed; with a synchronous optimizer all gradients are known soon anyway.
    stepped
        Called with each iteration whose step has been made for good, while the gradients are still those it was made
        by.
    """

    def __init__(self, stages: Mapping[int, StageModule], optimizers: Mapping[int, StageOptimizer],
                 config: TrainingConfig, *, speaks_for: Sequence[int], layers: int, share: Share | None,
                 staggered: bool, stepped: Callable[[int], None] = lambda _: None) -> None:
        assert (share is not None) == watches_gradients(config)
        self._stages = stages
        self._optimizers = optimizers
        self._config = config
        self._speaks_for = frozenset(speaks_for)
        self._layers = layers
        self._share = share
        self._staggered = staggered
        self._stepped = stepped
        self._unclipped = UNCLIPPED
        self._sums: Sums | None = None
        self._iteration = 0
        self._others_guess = False
        self._guessed = False
        self._when_validated: list[Callable[[], None]] = []
        self.validated: tuple[int, float | None] | None = None
        """The last iteration of which it is known how to step, with its `clip_factor`; None where all are 1."""
        self.void = False
        """Whether what the workers compute from here to the next step rests on a wrong guess; reset it then."""

    def step(self, iteration: int) -> None:
        """O: step all stages, for good or on a guess. Raises CommunicationError."""
        self._iteration = iteration
        if self._share is None:
            self._step(iteration, 1.0)
            self._end(1.0)
            return
        squares = {index: optimizer.squares() for index, optimizer in self._optimizers.items()}
        self._sums = self._share(self._contribution(squares))
        self._others_guess = self._staggered and self._unclipped >= UNCLIPPED
        mine = [square for stage in squares.values() for square in stage.values()]
        # What this worker holds may already be too much: then the guess is known to be wrong.
        self._guessed = self._others_guess and clip_factor(mine, self._config) == 1.0
        if self._guessed:
            self._step(iteration, 1.0)
        else:
            self.validate()

    def poll(self) -> None:
        """Validate the step if that can be done without waiting: before a forward. Raises CommunicationError."""
        if self._sums is not None and self._sums.arrived():
            self.validate()

    def validate(self) -> None:
        """Wait until it is known how to step, and see to it that this was done. Raises CommunicationError.

        Needed before a backward: until then the gradients of the iteration before are kept for a second step.
        """
        if self._sums is None:
            return
        self._conclude(clip_factor(self._sums.take(), self._config))

    def go_back(self, committed: int, factor: float | None) -> None:
        """After a failure: see to it that exactly the iterations up to `committed` have been stepped, for good.

        `factor` is the one of that iteration, for the case that this worker has not heard of it. At most one step has
        been made after it, by anyone. Gradients are zero afterwards.
        """
        self._when_validated.clear()
        if self._sums is not None and self._iteration == committed:
            self._conclude(factor)
        for optimizer in self._optimizers.values():
            if optimizer.open_iteration is not None and optimizer.open_iteration > committed:
                optimizer.undo()
            optimizer.commit()
        self._sums = None
        self.void = False
        self._unclipped = UNCLIPPED  # as with a worker that joins now: all must guess alike

    def _conclude(self, factor: float | None) -> None:
        right = self._guessed and factor == 1.0
        if self._guessed and not right:
            for optimizer in self._optimizers.values():
                optimizer.undo()
        if not right and factor is not None:
            self._step(self._iteration, factor)
        self._sums = None
        self.validated = self._iteration, factor
        self._unclipped = self._unclipped + 1 if factor == 1.0 else 0
        self.void = self._others_guess and factor != 1.0
        self._end(factor)

    def when_validated(self, call: Callable[[], None]) -> None:
        """Call as soon as the last step is for good: now, or when it has been validated."""
        if self._sums is None:
            call()
        else:
            self._when_validated.append(call)

    def _contribution(self, squares: Mapping[int, Mapping[int, float]]) -> list[float]:
        values = [0.0] * self._layers
        for stage in self._speaks_for:
            for layer, square in squares[stage].items():
                values[layer] = square
        return values

    def _step(self, iteration: int, factor: float) -> None:
        for optimizer in self._optimizers.values():
            optimizer.step(iteration, factor)

    def _end(self, factor: float | None) -> None:
        if factor is not None:
            self._stepped(self._iteration)
        for stage in self._stages.values():
            stage.zero_gradients()
        calls, self._when_validated = self._when_validated, []
        for call in calls:
            call()

