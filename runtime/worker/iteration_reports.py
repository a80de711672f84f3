"""Report the iterations of an order to the coordinator, and wait for acknowledgements."""

import math
import queue

from slipstream.runtime.protocol.node_reports import AGENT_ANSWER_SECONDS
from slipstream.runtime.protocol.to_coordinator import Checksum, IterationReport, SampleDigest, StepValidated
from slipstream.runtime.protocol.to_worker import Acknowledged, StepFactor
from slipstream.runtime.replay.group_cache import GenerationEndedError
from slipstream.runtime.replay.recorder import Recorder
from slipstream.runtime.replay.transfers import CommunicationError
from slipstream.runtime.state.step_factors import needs_gradient_norm
from slipstream.runtime.state.steps import StepController
from slipstream.runtime.worker.context import WAITING_PREFIX, OrderContext

ANSWER_SECONDS = 600.0
"""Time limit for an acknowledgement, which usually comes within a millisecond."""


class OrderStoppedError(Exception):
    """Exception that ends an order because all members stop before the next iteration. Nothing of
    that iteration has been passed on to other workers."""


class IterationReports:
    """Sender of a worker's reports in one generation, which waits for acknowledgements."""

    def __init__(self, part: OrderContext) -> None:
        self._part = part
        self._acknowledged: queue.SimpleQueue[Acknowledged | None] = queue.SimpleQueue()
        self._open: IterationReport | None = None
        """Last report, if it has not been acknowledged; otherwise None."""
        self.reached = part.order.first_iteration - 1
        """Last iteration that this worker may have stepped. Its evaluation or report may have
        begun."""
        self.save_before: int | None = None
        """Iteration before whose step all save, if node 0 has chosen one."""

    def handle_acknowledgement(self, message: Acknowledged) -> None:
        """Pass the coordinator's acknowledgement on to the waiting thread."""
        self._acknowledged.put(message)

    def cancel_wait(self) -> None:
        """End another thread's wait for an acknowledgement, which may never come. It requires
        reports of other workers, which may be gone."""
        self._acknowledged.put(None)

    def send_report(self, iteration: int, loss: float, steps: StepController, recorder: Recorder,
                    evaluation: float | None, checksums: tuple[Checksum, ...],
                    samples: tuple[SampleDigest, ...] = ()) -> None:
        """Report to the coordinator that this worker has stepped an iteration.

        `loss` and `evaluation` (None: there was none) are this worker's parts of the losses. The
        first member also reports the factor by which all members scaled the gradients, as soon as
        it is known.

        Parameters
        ----------
        steps
            Controller that has the sum of squared gradients.
        recorder
            Recorder of the op times.
        checksums
            Checksums of held state that were computed for it, if any.
        samples
            Digests of the samples that the worker has read, if they are compared.
        """
        context, number = self._part.context, self._part.order.order
        self.reached = iteration
        self._open = IterationReport(context.worker, number, iteration, finite_or_none(loss), recorder.window_seconds(),
                                     recorder.op_times(), recorder.traced_ops(), finite_or_none(steps.squares),
                                     None if evaluation is None else finite_or_none(evaluation), checksums, samples,
                                     self._part.samples.digest_deal(iteration))
        context.reporter.send(self._open)
        if context.worker == self._part.program.members[0] and needs_gradient_norm(context.config.training):
            steps.when_validated(lambda: self._send_validated(steps))

    def wait_until_acknowledged(self) -> None:
        """Wait for the acknowledgement of the last report, before anything of the next is sent.

        A worker can step an iteration only after all others have sent something of it. So once it
        steps, their reports of the iteration before have arrived, even those of workers that have
        died since. Raises OrderStoppedError if all members stop before the next iteration, and
        CommunicationError if the generation has ended or no answer comes.
        """
        if self._open is None:
            return
        report, self._open = self._open, None
        iteration = report.iteration
        context, activity = self._part.context, self._part.activity
        doing = activity.doing
        activity.set_activity(f"{WAITING_PREFIX} for node 0 to acknowledge iteration {iteration}")
        answer = self._wait_for_answer(report)
        if answer is None:
            raise GenerationEndedError("the order is over, or node 0 is gone")
        assert answer.iteration == iteration
        if answer.save:
            self.save_before = iteration + 1
        context.injector.fail_if_due(iteration, "reported")
        if answer.stop:
            raise OrderStoppedError
        activity.set_activity(doing)

    def _wait_for_answer(self, report: IterationReport) -> Acknowledged | None:
        """Wait for the answer to a report; None if the order is over. Raises CommunicationError."""
        reporter = self._part.context.reporter
        while True:
            try:
                answer = self._acknowledged.get(timeout=AGENT_ANSWER_SECONDS if reporter.gathered else ANSWER_SECONDS)
            except queue.Empty:
                if not reporter.gathered:
                    raise CommunicationError(f"node 0 has not answered within {ANSWER_SECONDS:.0f} s") from None
                reporter.send_directly(report)
            else:
                if answer is None or answer.iteration >= report.iteration:
                    return answer  # answers to earlier reports are skipped: a report sent both ways gets two

    def _send_validated(self, steps: StepController) -> None:
        assert steps.validated is not None
        self._part.context.channel.send(StepValidated(self._part.order.order, StepFactor(*steps.validated)))


def finite_or_none(number: float) -> float | None:
    """Return a number, or None, as JSON needs it, if it is not finite."""
    return number if math.isfinite(number) else None
