"""Report the iterations of an order to the coordinator, and wait for acknowledgements."""

import math
import queue

from slipstream.runtime.model.state.clipping import watches_gradients
from slipstream.runtime.model.state.steps import Steps
from slipstream.runtime.protocol.node_reports import AGENT_SECONDS
from slipstream.runtime.protocol.to_coordinator import Checksum, Ran, Validated
from slipstream.runtime.protocol.to_worker import Acknowledged, Factor
from slipstream.runtime.replay.links import OrderEndedError
from slipstream.runtime.replay.recorder import Recorder
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.worker.activity import WAITS
from slipstream.runtime.worker.context import OrderContext

ANSWER_SECONDS = 600.0
"""Time limit for an acknowledgement. The coordinator usually acknowledges an iteration in a millisecond."""


class OrderStoppedError(Exception):
    """Exception that ends an order before an iteration of which nothing has been passed on."""


class Reports:
    """Reports of an order's iterations, and their acknowledgements."""

    def __init__(self, part: OrderContext) -> None:
        self._part = part
        self._acknowledged: queue.SimpleQueue[Acknowledged | None] = queue.SimpleQueue()
        self._open: Ran | None = None
        """Report that has not been acknowledged."""
        self.reached = part.order.first_iteration - 1
        """Last iteration that this worker may have stepped. Its evaluation or report may have begun."""
        self.save_before: int | None = None
        """Iteration of this order before whose step all members save, if node 0 has chosen one."""

    def acknowledged(self, message: Acknowledged) -> None:
        """Pass the coordinator's acknowledgement on to the waiting thread."""
        self._acknowledged.put(message)

    def order_ended(self) -> None:
        """End the wait for an acknowledgement: it would need the reports of other workers, which may be gone."""
        self._acknowledged.put(None)

    def report(self, iteration: int, loss: float, steps: Steps, recorder: Recorder, evaluation: float | None,
               checksums: tuple[Checksum, ...]) -> None:
        """Report an iteration. The first member also reports how all members stepped it, as soon as that is known."""
        context, number = self._part.context, self._part.order.order
        self.reached = iteration
        self._open = Ran(context.worker, number, iteration, finite(loss), recorder.window_seconds(),
                         recorder.times(), recorder.ops(), finite(steps.squares),
                         None if evaluation is None else finite(evaluation), checksums)
        context.reporter.send(self._open)
        if context.worker == self._part.schedule.members[0] and watches_gradients(context.config.training):
            steps.when_validated(lambda: self._validated(steps))

    def require_acknowledged(self) -> None:
        """Wait until the last report is acknowledged, before anything of the next iteration is passed on.

        A worker can step an iteration only after all others have passed on something of it. So it then knows that their
        reports of the iteration before have arrived, even those of workers that have died since. Raises
        OrderStoppedError if the order ends before the next iteration, and CommunicationError if no answer comes.
        """
        if self._open is None:
            return
        report, self._open = self._open, None
        iteration = report.iteration
        context, activity = self._part.context, self._part.activity
        doing = activity.doing
        activity.begins(f"{WAITS} for node 0 to acknowledge iteration {iteration}")
        answer = self._answer_to(report)
        if answer is None:
            raise OrderEndedError("the order is over, or node 0 is gone")
        assert answer.iteration == iteration
        if answer.save:
            self.save_before = iteration + 1
        context.injector.at(iteration, "reported")
        if answer.stop:
            raise OrderStoppedError
        activity.begins(doing)

    def _answer_to(self, report: Ran) -> Acknowledged | None:
        """Wait for the answer to a report. Return None if the order is over. Raises CommunicationError."""
        reporter = self._part.context.reporter
        while True:
            try:
                answer = self._acknowledged.get(timeout=AGENT_SECONDS if reporter.gathered else ANSWER_SECONDS)
            except queue.Empty:
                if not reporter.gathered:
                    raise CommunicationError(f"node 0 has not answered within {ANSWER_SECONDS:.0f} s") from None
                reporter.send_directly(report)
            else:
                if answer is None or answer.iteration >= report.iteration:
                    return answer  # answers to earlier reports are skipped: a report sent both ways gets two

    def _validated(self, steps: Steps) -> None:
        assert steps.validated is not None
        self._part.context.channel.send(Validated(self._part.order.order, Factor(*steps.validated)))


def finite(number: float) -> float | None:
    """Return a number in a form that JSON can represent: None if it is not finite."""
    return number if math.isfinite(number) else None
