"""Runs policies through a trace and says where the time went."""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from planner.fleet.availability import Trace
from planner.fleet.costs import Costs
from planner.fleet.policies import POLICIES
from planner.fleet.policy import Cause, Phase, Policy, Setting
from planner.fleet.speeds import Speeds

Floats = npt.NDArray[np.float64]
Tell = Callable[[int, int], None]
"""Called with (runs done, runs in all)."""

CAUSES = tuple(Cause)
_NUMBER = {cause: number for number, cause in enumerate(CAUSES)}


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's way through a trace: consecutive spans of time.

    `seconds` (n + 1): where spans begin, and the end; `rate`, `checkpoints`, `cause` (n): of each span.
    """

    policy: str
    whole_rate: float
    """Samples per second with all workers alive."""
    seconds: Floats
    rate: Floats
    checkpoints: Floats
    cause: npt.NDArray[np.int64]
    switches: int
    """Changes after which it trained on in another way."""

    @property
    def length_seconds(self) -> float:
        """Of the trace."""
        return float(self.seconds[-1])

    @property
    def throughput(self) -> float:
        """Mean useful samples per second."""
        return float(np.dot(self.rate, np.diff(self.seconds)) / self.seconds[-1])

    def binned(self, edges: Floats) -> Floats:
        """Mean useful samples per second between consecutive edges (seconds, ascending)."""
        made = np.concatenate([[0.0], np.cumsum(self.rate * np.diff(self.seconds))])
        mean: Floats = np.diff(np.interp(edges, self.seconds, made)) / np.diff(edges)
        return mean

    def lost(self, best: float) -> dict[Cause, float]:
        """Seconds lost by cause, against a job that makes `best` samples per second all the time.

        They add up to length x (1 - throughput / best).
        """
        spans = np.diff(self.seconds)
        lost = {cause: float(spans[self.cause == number].sum()) for number, cause in enumerate(CAUSES)}
        running = self.cause == _NUMBER[Cause.RUN]
        train, kept = spans[running], self.rate[running]
        written = self.checkpoints[running]
        lost[Cause.RUN] = float(np.dot(train, self.whole_rate - kept - written) / best)
        lost[Cause.CHECKPOINT] += float(np.dot(train, written) / best)
        lost[Cause.WHOLE] = float(train.sum() * (best - self.whole_rate) / best)
        return lost


def simulate(policy: Policy, trace: Trace) -> Run:
    """Take one policy through a trace that fits its job (`trace.fit`)."""
    assert trace.places == policy.setting.workers, "the trace does not fit the job"
    log = _Log()
    phases: Sequence[Phase] = policy.start(trace.live)
    switches = 0
    for change in trace.changes:
        if change.seconds >= trace.length_seconds:
            break
        left = log.spend(phases, change.seconds)
        phases = policy.change(change, left)
        switches += phases[0].cause in (Cause.SWITCH, Cause.RESTART)
    log.spend(phases, trace.length_seconds)
    return Run(policy=policy.name, whole_rate=policy.whole_rate, seconds=np.array(log.begin), rate=np.array(log.rate),
               checkpoints=np.array(log.checkpoints), cause=np.array(log.cause, dtype=np.int64), switches=switches)


class _Log:
    """What was done with the time so far."""

    def __init__(self) -> None:
        self.begin = [0.0]
        self.rate: list[float] = []
        self.checkpoints: list[float] = []
        self.cause: list[int] = []

    def spend(self, phases: Sequence[Phase], until: float) -> list[Phase]:
        """Note phases until a time; what is left of them from then on, the one under way first."""
        clock = self.begin[-1]
        for index, phase in enumerate(phases):
            end = clock + phase.seconds
            if min(end, until) > clock:
                self.begin.append(min(end, until))
                self.rate.append(phase.rate)
                self.checkpoints.append(phase.checkpoints)
                self.cause.append(_NUMBER[phase.cause])
            if end > until:
                return [phase._replace(seconds=end - until), *phases[index + 1:]]
            clock = end
        raise AssertionError("the last phase of a policy has an end")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace does to a job, by policy."""

    trace: Trace
    runs: Mapping[str, Run]
    best_rate: float
    """The fastest of all policies with all workers alive: what lost time is measured against."""

    def throughputs(self) -> dict[str, float]:
        """Mean samples per second by policy."""
        return {name: run.throughput for name, run in self.runs.items()}


def compare(policies: Sequence[type[Policy]], speeds: Speeds, costs: Costs, trace: Trace,
            tell: Tell = lambda _done, _total: None) -> Result:
    """All policies through one trace, which must fit the job. After Ctrl-C, those that were finished; at least one."""
    setting = Setting(speeds, costs, trace.seconds_between_failures)
    runs: dict[str, Run] = {}
    try:
        for done, kind in enumerate(policies, 1):
            runs[kind.name] = simulate(kind(setting), trace)
            tell(done, len(policies))
    except KeyboardInterrupt:
        if not runs:
            raise
    return Result(trace=trace, runs=runs, best_rate=max(
        [0.0, *(run.whole_rate for run in runs.values() if not POLICIES[run.policy].yardstick)]))


def over_seeds(policies: Sequence[type[Policy]], speeds: Speeds, costs: Costs, traces: Sequence[Trace],
                tell: Tell = lambda _done, _total: None) -> dict[str, Floats]:
    """Mean samples per second by policy, one value a trace; after Ctrl-C, for the traces that were finished."""
    values: dict[str, list[float]] = {kind.name: [] for kind in policies}
    try:
        for index, trace in enumerate(traces):
            setting = Setting(speeds, costs, trace.seconds_between_failures)
            found = {kind.name: simulate(kind(setting), trace).throughput for kind in policies}
            for name, value in found.items():
                values[name].append(value)
            tell(index + 1, len(traces))
    except KeyboardInterrupt:
        if not all(values.values()):
            raise
    return {name: np.array(column) for name, column in values.items()}
