"""Lines to compare with: nothing that could be run."""

from abc import abstractmethod
from collections.abc import Sequence

from planner.fleet.availability import Change
from planner.fleet.policy import Cause, Phase, Policy, Setting


class _Yardstick(Policy):
    """Depends on the number of live workers alone, and pays nothing for changes."""

    yardstick = True

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._live = 0

    @abstractmethod
    def _of(self, live: int) -> float:
        """Samples per second on so many workers."""

    @property
    def whole_rate(self) -> float:
        """On all workers."""
        return self._of(self.setting.workers)

    def steady(self, failures: int) -> float:
        """On those that are left."""
        return self._of(self.setting.workers - failures)

    def start(self, live: Sequence[int]) -> list[Phase]:
        """Begin."""
        self._live = len(live)
        return [Phase(Cause.RUN, rate=self._of(self._live))]

    def change(self, change: Change, left: Sequence[Phase]) -> list[Phase]:  # noqa: ARG002
        """Go on without a pause."""
        self._live += len(change.added) - len(change.removed)
        return [Phase(Cause.RUN, rate=self._of(self._live))]


class FaultScaled(_Yardstick):
    """What a system has that loses just what it lost."""

    name = "fault-scaled"
    title = "yardstick: plain 1F1B times the share of workers alive"
    assumes = "no cost of any change; as in the published figures"

    def _of(self, live: int) -> float:
        return self.speeds.usual(self.setting.pipelines) * live / self.setting.workers


class WorkConserving(_Yardstick):
    """What no synchronous training can beat: all live workers busy all the time."""

    name = "work-conserving"
    title = "yardstick: no live worker ever idle, no change costs anything"
    assumes = "an iteration's work spread evenly over live workers, whatever stage it is of, and one optimizer step"

    def _of(self, live: int) -> float:
        return self.speeds.limit(live)
