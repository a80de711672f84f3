"""Reference lines to compare with. They are not systems that exist."""

from abc import abstractmethod
from collections.abc import Sequence

from slipstream.planner.simulation.availability_trace import Change
from slipstream.planner.simulation.policy import Cause, Phase, Policy, Scenario


class _Reference(Policy):
    """Base class of reference lines, whose rate depends only on live workers and their speed."""

    is_reference = True
    balances_speeds = True

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self._live = 0

    @staticmethod
    def alive_gpus(alive: int, whole: int) -> int:  # noqa: ARG004
        return alive

    @abstractmethod
    def _rate_for_live(self, live: float) -> float:
        """Return the samples per second on this many workers; one at half speed counts half."""

    @property
    def fault_free_rate(self) -> float:
        return self._rate_for_live(self.scenario.workers)

    def steady_rate(self, failures: int) -> float:
        return self._rate_for_live(self.scenario.workers - failures)

    def start(self, live: Sequence[int]) -> list[Phase]:
        self._live = len(live)
        return [Phase(Cause.RUN, rate=self._rate_for_live(self._live))]

    def on_change(self, change: Change, remaining: Sequence[Phase]) -> list[Phase]:  # noqa: ARG002
        self._live += len(change.added) - len(change.removed)
        # A worker that takes f times as long counts as 1 / f workers.
        speed = self._live - sum(1 - 1 / factor for factor in self.slow.values())
        return [Phase(Cause.RUN, rate=self._rate_for_live(speed))]


class FaultScaled(_Reference):
    """Reference line: 1F1B's throughput without failures, times the share of live workers."""

    name = "fault-scaled"
    title = "reference: plain 1F1B times the share of workers alive"
    source = "as in the figures of ReCycle (SOSP 2024)"
    assumptions = "no cost of any change; as in the published figures"

    def _rate_for_live(self, live: float) -> float:
        return (
            self.throughputs.one_f_one_b_rate(self.scenario.pipelines)
            * live
            / self.scenario.workers
        )


class WorkConserving(_Reference):
    """Reference line: an upper bound, at which all live workers are busy all the time."""

    name = "work-conserving"
    title = "reference: no live worker ever idle, no change costs anything"
    source = "a bound: the work over the live workers"
    assumptions = (
        "an iteration's work spread evenly over live workers, whatever stage it is of, and one "
        "optimizer step"
    )

    def _rate_for_live(self, live: float) -> float:
        return self.throughputs.work_conserving_rate(live)
