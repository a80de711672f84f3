"""Step on a guess where steps depend on all layers' gradients.

Clipping by the global norm, and skipping steps with non-finite gradients, make every worker's step
wait for the gradients of all layers, which loses the gain of staggering. So a worker steps at once,
on the guess that nothing is clipped, while the sums of squares of all layers travel. If these show
that the guess was wrong, the step is undone and made again. The idea is from Zero Bubble (Qi et
al., ICLR 2024, section 4); undoing by copies keeps it exact.

While the sums travel, the worker runs the first forwards of the next iteration. Forwards that ran
on a wrong guess are void: until the end of the iteration all workers then pass empty tensors to
each other and compute nothing, and they run the iteration once more. All workers decide this alike,
from the same bits, and before any backward, so gradients of two iterations never mix. Workers that
own parts of layers' states gather the parameters of the second step at the end of the void
iteration, which all of them reach. After an iteration that was clipped, no guess is made for some
iterations: if clipping is frequent, timing is that of a synchronous optimizer.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

from slipstream.runtime.config import TrainingConfig
from slipstream.runtime.ranks.worker_group import is_first_rank, worker_group
from slipstream.runtime.state.held_layers import HeldLayers
from slipstream.runtime.state.parts import VersionError
from slipstream.runtime.state.step_factors import clip_factor, needs_gradient_norm

UNCLIPPED_TO_GUESS = 4
"""Iterations without clipping before the next guess; a wrong one costs less than an iteration."""


class PendingSums(Protocol):
    """Interface to numbers that are being summed over all workers."""

    def has_arrived(self) -> bool:
        """Return whether `wait_for_sums` would return at once."""

    def wait_for_sums(self) -> Sequence[float]:
        """Wait for the sums and return them. Raises CommunicationError."""


StartSum = Callable[[Sequence[float]], PendingSums]
"""Function that starts to sum numbers over all workers while computation continues."""


class StepState(Enum):
    """State of a worker's last optimizer step.

    A step depends on sums over all workers. Until they arrive, it is GUESSED (made on the guess
    that nothing is clipped), WAITING (not made), or REFUTED (not made, because this worker's
    gradients show that the guess is wrong). Then the step is FINAL, but after a wrong guess first
    CORRECTED, until all ranks of the worker `validate`, and VOID, until `leave_void_state`. A
    worker of one rank is never CORRECTED. `return_to` leads from any state to FINAL.
    """

    FINAL = "made or skipped for good"
    WAITING = "not made before the sums arrive"
    GUESSED = "made on the guess that nothing is clipped"
    REFUTED = (
        "not made before the sums arrive: workers guess, "
        "but this one's own gradients show that they are wrong"
    )
    CORRECTED = (
        "final after a wrong guess, "
        "while other ranks of this worker may still compute from that guess"
    )
    VOID = (
        "final after a wrong guess; "
        "all that workers compute is void, because it is based on that guess"
    )


class StepController:
    """Maker of one worker's optimizer steps, which are guessed where that saves waiting.

    A guess is checked when the gradient norm over all workers is known.

    Parameters
    ----------
    layers
        Number of layers of the whole model.
    share
        Function that starts to sum over all workers: each layer's sum of squares of gradients, and
        the loss. None if `needs_gradient_norm` is false.
    staggered
        Whether steps may be guessed; with a synchronous optimizer all gradients are known soon.
    stepped
        Function called with each iteration whose step is final, or is known to be skipped, while
        the gradients are still those that it was made with.
    """

    def __init__(
        self,
        holding: HeldLayers,
        config: TrainingConfig,
        *,
        layers: int,
        share: StartSum | None,
        staggered: bool,
        stepped: Callable[[int], None] = lambda _: None,
    ) -> None:
        assert (share is not None) == needs_gradient_norm(config)
        self._holding = holding
        self._config = config
        self._layers = layers
        self._share = share
        self._may_guess = staggered
        self._on_stepped = stepped
        # The count starts anew in each order: a worker that joins must guess as others do.
        self._unclipped_iterations = UNCLIPPED_TO_GUESS
        self.squares = 0.0
        """Sum of squares of the last gradients of own parts, before clipping."""
        self.iteration = 0
        """Iteration whose step is being made, or was made last."""
        self.state = StepState.FINAL
        self._sums: PendingSums | None = None
        """Sums that a WAITING, GUESSED or REFUTED step depends on; None in the other states."""
        self._when_validated: list[Callable[[], None]] = []
        self.validated: tuple[int, float | None] | None = None
        """Last iteration whose step its sums have made final, with its step factor; or None."""
        self.losses: deque[tuple[int, float]] = deque(maxlen=2)
        """Last iterations whose sums have arrived, each with its mean loss."""

    def step(
        self, iteration: int, loss: float, until_unread: Callable[[], None] = lambda: None
    ) -> None:
        """Run O: step all held layers, if necessary on the guess that nothing is clipped.

        A step that depends on sums over all workers and is not guessed waits for them, and may be
        skipped. `loss` is this worker's summand of the mean loss. `until_unread` waits until no
        other worker reads this worker's gradients. Raises CommunicationError, and VersionError as
        `HeldLayers.step` does.
        """
        self.iteration = iteration
        # Without clipping or skipping, the step depends on no other layer's gradients.
        if self._share is None:
            self.squares = self._holding.sum_squares()
            self._holding.step(iteration)
            until_unread()
            self._finish_step()
            return
        until_unread()  # the gradients are set to zero below, even if the step is skipped
        squares = self._holding.layer_squares()
        contribution = [squares.get(layer, 0.0) for layer in range(self._layers)]
        self.squares = math.fsum(contribution)
        # Each rank has its own squares, but all ranks the same loss, which counts once.
        self._sums = self._share([*contribution, loss if is_first_rank() else 0.0])
        # If this worker's own layers already exceed the norm, the guess is known to be wrong.
        guesses = self._may_guess and self._unclipped_iterations >= UNCLIPPED_TO_GUESS
        if guesses and clip_factor(squares.values(), self._config) == 1.0:
            self.state = StepState.GUESSED
            self._holding.step(iteration)
        else:
            self.state = StepState.REFUTED if guesses else StepState.WAITING
            self._conclude_sums()

    def validate_if_arrived(self) -> None:
        """Validate the last step, as `validate` does, if the norm has arrived on all ranks.

        To be called before a forward, by all ranks of the worker together. If `state` is VOID
        afterwards, the forward must not be computed. Raises CommunicationError.
        """
        # Ranks must decide alike, or the collectives within their layers would not match.
        arrived, group = self._sums is None or self._sums.has_arrived(), worker_group()
        if group is not None and self.state not in (StepState.FINAL, StepState.VOID):
            arrived = group.all_ready(arrived)
        if arrived:
            self.validate()

    def validate(self) -> None:
        """Wait for the norm that the last step depends on, and correct a wrong guess.

        After a wrong guess `state` becomes VOID: what was computed since then must be discarded.
        Required before a backward. Raises CommunicationError.
        """
        self._conclude_sums()
        if self.state is StepState.CORRECTED:
            self.state = StepState.VOID

    @property
    def is_final(self) -> bool:
        """True if the last step is made or skipped for good."""
        return self.state is StepState.FINAL

    @property
    def is_void(self) -> bool:
        """True if the last step was wrongly guessed, so that results since are discarded."""
        return self.state is StepState.VOID

    def leave_void_state(self) -> None:
        """Set the state to FINAL, once all workers have gathered the corrected parameters."""
        self.state = StepState.FINAL

    def _conclude_sums(self) -> None:
        if self._sums is None:
            return
        *squares, loss = self._sums.wait_for_sums()
        self.losses.append((self.iteration, loss))
        self._conclude_step(clip_factor(squares, self._config))

    def return_to(
        self, committed: int, factor: float | None, *, is_factor_known: bool = True
    ) -> None:
        """After a failure, keep all steps up to iteration `committed`, and undo a later one.

        The step factor of iteration `committed` is `factor` (None: its step is skipped). No worker
        has made more than one later step. Raises VersionError if this factor is unknown and the
        step still waits for sums, or if the state is then still another iteration's.
        """
        self._when_validated.clear()
        # The others know the factor of a committed step, even if its sums never arrive here.
        if self._sums is not None and self.iteration == committed:
            if not is_factor_known:
                raise VersionError(
                    f"the factor of the step of iteration {committed} is unknown; expected one"
                )
            self._conclude_step(factor)
        self._holding.optimizer.return_to(committed)
        self._sums, self.state = None, StepState.FINAL

    def _conclude_step(self, factor: float | None) -> None:
        """Make the step final, with gradients times `factor`; None: the step is skipped."""
        # A step that was guessed right stays; any other guess is undone first.
        if self.state is StepState.GUESSED and factor != 1.0:
            self._holding.optimizer.undo()
        if self.state is not StepState.GUESSED or factor != 1.0:
            self._holding.step(self.iteration, factor)
        self._sums, self.validated = None, (self.iteration, factor)
        # If all waited, nobody has computed on a guess.
        if factor == 1.0 or self.state is StepState.WAITING:
            self.state = StepState.FINAL
        else:
            self.state = StepState.VOID if worker_group() is None else StepState.CORRECTED
        self._unclipped_iterations = self._unclipped_iterations + 1 if factor == 1.0 else 0
        self._finish_step()

    def when_validated(self, call: Callable[[], None]) -> None:
        """Call a function once the last step is final: now, later, or never after `return_to`."""
        if self._sums is None:
            call()
        else:
            self._when_validated.append(call)

    def _finish_step(self) -> None:
        self._on_stepped(self.iteration)
        self._holding.zero_gradients()
        calls, self._when_validated = self._when_validated, []
        for call in calls:
            call()
