"""A worker's reports of the iterations of an order, and their acknowledgements."""

import math
import queue

from slipstream.runtime.model.state.clipping import watches_gradients
from slipstream.runtime.model.state.steps import Steps
from slipstream.runtime.protocol.to_coordinator import Ran, Validated
from slipstream.runtime.protocol.to_worker import Acknowledged, Factor
from slipstream.runtime.replay.recorder import Recorder
from slipstream.runtime.replay.session import OrderEndedError
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.worker.activity import WAITS
from slipstream.runtime.worker.context import OrderContext

ANSWER_SECONDS = 600.0
"""The coordinator acknowledges an iteration in a millisecond."""


class OrderStoppedError(Exception):
    """The order ends before an iteration that nothing has been passed on of."""


class Reports:
    """What the coordinator is told of each iteration, and what it has answered."""

    def __init__(self, part: OrderContext) -> None:
        self._part = part
        self._acknowledged: queue.SimpleQueue[Acknowledged | None] = queue.SimpleQueue()
        self._open: int | None = None
        """The iteration whose report is to be acknowledged."""
        self.reached = part.order.first_iteration - 1
        """The last iteration that this worker may have stepped: it is being evaluated, or reported, or was."""
        self.save_before: int | None = None
        """The iteration of this order before whose step all members save, where node 0 has chosen one."""

    def acknowledged(self, message: Acknowledged) -> None:
        """The coordinator has acknowledged a report."""
        self._acknowledged.put(message)

    def order_ended(self) -> None:
        """No report is acknowledged any more."""
        self._acknowledged.put(None)

    def report(self, iteration: int, loss: float, steps: Steps, recorder: Recorder, evaluation: float | None) -> None:
        """Report an iteration; the first member also says how all have stepped it, once that is known."""
        context, number = self._part.context, self._part.order.number
        self.reached = self._open = iteration
        context.channel.send(Ran(context.worker, number, iteration, finite(loss), recorder.window_seconds(),
                                 recorder.times(), recorder.ops(), finite(steps.squares),
                                 None if evaluation is None else finite(evaluation)))
        if context.worker == self._part.schedule.members[0] and watches_gradients(context.config.training):
            steps.when_validated(lambda: self._validated(steps))

    def require_acknowledged(self) -> None:
        """Wait until the last report has arrived, before anything of the next iteration is passed on.

        A worker can step an iteration only after all others have passed on something of it. It then knows that their
        reports of the one before have arrived, even of those that have died since. Raises OrderStoppedError where the
        order ends before the next iteration, and CommunicationError where no answer comes.
        """
        if self._open is None:
            return
        iteration, self._open = self._open, None
        context, activity = self._part.context, self._part.activity
        doing = activity.doing
        activity.begins(f"{WAITS} for node 0 to acknowledge iteration {iteration}")
        try:
            answer = self._acknowledged.get(timeout=ANSWER_SECONDS)
        except queue.Empty:
            raise CommunicationError(f"node 0 has not answered within {ANSWER_SECONDS:.0f} s") from None
        if answer is None:
            raise OrderEndedError("the order is over, or node 0 is gone")
        assert answer.iteration == iteration
        if answer.costs is not None:
            self._part.samples.change(answer.costs.first, answer.costs.known)
        if answer.save:
            self.save_before = iteration + 1
        context.injector.at(iteration, "reported")
        if answer.stop:
            raise OrderStoppedError
        activity.begins(doing)

    def _validated(self, steps: Steps) -> None:
        assert steps.validated is not None
        self._part.context.channel.send(Validated(self._part.order.number, Factor(*steps.validated)))


def finite(number: float) -> float | None:
    """A number as JSON can say it."""
    return number if math.isfinite(number) else None
