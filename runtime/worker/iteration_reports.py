"""Report the iterations of an order to the coordinator, and wait for acknowledgements."""

import math
import queue

from slipstream.runtime.protocol.node_reports import AGENT_ANSWER_SECONDS
from slipstream.runtime.protocol.to_coordinator import (
    Checksum,
    IterationReport,
    SampleDigest,
    StepValidated,
)
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
    """Exception that ends an order because all members stop after the last iteration reported."""


class IterationReports:
    """Reports of a worker's iterations in one generation, and their acknowledgements.

    A report is sent after each step; it must be acknowledged before the next iteration sends
    anything to other workers.
    """

    def __init__(self, part: OrderContext) -> None:
        self._part = part
        self._acknowledged: queue.SimpleQueue[Acknowledged | None] = queue.SimpleQueue()
        # The last report; None once it is acknowledged.
        self._open: IterationReport | None = None
        self.reached = part.order.first_iteration - 1
        """Last iteration that this worker may have stepped."""
        self.save_before: int | None = None
        """Iteration before whose step node 0 has all members save their state; None: no such."""

    def handle_acknowledgement(self, message: Acknowledged) -> None:
        """Pass an acknowledgement to the thread that waits in `wait_until_acknowledged`."""
        self._acknowledged.put(message)

    def cancel_wait(self) -> None:
        """End another thread's wait for an acknowledgement, because the order is over."""
        self._acknowledged.put(None)

    def send_report(
        self,
        iteration: int,
        loss: float,
        steps: StepController,
        recorder: Recorder,
        evaluation: float | None,
        checksums: tuple[Checksum, ...],
        samples: tuple[SampleDigest, ...] = (),
    ) -> None:
        """Report to the coordinator that this worker has stepped an iteration.

        If steps need the norm of gradients, the first member also reports the step factor, once it
        is known.

        Parameters
        ----------
        loss, evaluation
            This worker's parts of the training loss and of the validation loss; `evaluation` is
            None if there was no evaluation.
        steps
            Controller of the steps, which has the sum of squared gradients and the step factor.
        checksums
            Checksums of held state before the step; empty if copies are not compared.
        samples
            Digests of the samples that the worker has read; empty if they are not compared.
        """
        context, number = self._part.context, self._part.order.order
        self.reached = iteration
        self._open = IterationReport(
            context.worker,
            number,
            iteration,
            finite_or_none(loss),
            recorder.window_seconds(),
            recorder.op_times(),
            recorder.traced_ops(),
            finite_or_none(steps.squares),
            None if evaluation is None else finite_or_none(evaluation),
            checksums,
            samples,
            self._part.samples.digest_deal(iteration),
        )
        context.reporter.send(self._open)
        # All members have the same step factor: one report of it is enough.
        if context.worker == self._part.program.members[0] and needs_gradient_norm(
            context.config.training
        ):
            steps.when_validated(lambda: self._send_validated(steps))

    def wait_until_acknowledged(self) -> None:
        """Wait until the last report is acknowledged, if there is one.

        Raises OrderStoppedError if all members stop before the next iteration, and
        CommunicationError if the generation has ended or no answer comes in `ANSWER_SECONDS`.
        """
        # A worker can step an iteration only after all others have sent something of it. So once it
        # steps, their reports of the iteration before have arrived, even those of workers that have
        # died since.
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
        # All members get the same answer, and so save and stop at the same iteration.
        if answer.save:
            self.save_before = iteration + 1
        context.injector.fail_if_due(iteration, "reported")
        if answer.stop:
            raise OrderStoppedError
        activity.set_activity(doing)

    def _wait_for_answer(self, report: IterationReport) -> Acknowledged | None:
        """Wait for the answer to a report; return None if the order has ended."""
        # An agent of this node that gathers reports may be gone: then the report goes directly.
        reporter = self._part.context.reporter
        while True:
            try:
                answer = self._acknowledged.get(
                    timeout=AGENT_ANSWER_SECONDS if reporter.gathered else ANSWER_SECONDS
                )
            except queue.Empty:
                if not reporter.gathered:
                    raise CommunicationError(
                        f"node 0 has not answered within {ANSWER_SECONDS:.0f} s"
                    ) from None
                reporter.send_directly(report)
            else:
                if answer is None or answer.iteration >= report.iteration:
                    # Answers to earlier reports are skipped: a report sent both ways gets two.
                    return answer

    def _send_validated(self, steps: StepController) -> None:
        assert steps.validated is not None
        self._part.context.channel.send(
            StepValidated(self._part.order.order, StepFactor(*steps.validated))
        )


def finite_or_none(number: float) -> float | None:
    """Return a number, or None if it is not finite: JSON has finite numbers only."""
    return number if math.isfinite(number) else None
