"""Simulates policies over an availability trace, and accounts for the time lost."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.cli.fleet.availability_trace import AvailabilityTrace
from slipstream.cli.fleet.costs import Costs
from slipstream.cli.fleet.policies import POLICIES
from slipstream.cli.fleet.policy import Cause, Phase, Policy, Scenario
from slipstream.cli.fleet.throughput import Throughputs
from slipstream.planner.budget import CountCallback

Floats = npt.NDArray[np.float64]
CAUSES = tuple(Cause)
_NUMBER = {cause: number for number, cause in enumerate(CAUSES)}


class PolicyRun(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One policy simulated over one trace: n consecutive spans of time, each with a rate and a cause."""

    policy: str
    fault_free_rate: float
    """Samples per second with all workers alive."""
    seconds: Floats
    """n + 1 values: where each span begins, and the end."""
    phases: Sequence[Phase]
    """The phase that each span is a part of."""
    slowdowns: Sequence[tuple[float, float]]
    """How many times as long training takes in each span, because of slow workers and of slow links."""

    @cached_property
    def rate(self) -> Floats:
        """Useful samples per second, by span."""
        return np.array([phase.rate for phase in self.phases])

    @cached_property
    def checkpoints(self) -> Floats:
        """Samples per second lost to writing checkpoints, by span."""
        return np.array([phase.checkpoints for phase in self.phases])

    @cached_property
    def cause(self) -> npt.NDArray[np.int64]:
        """Index into `CAUSES`, by span."""
        return np.array([_NUMBER[phase.cause] for phase in self.phases], dtype=np.int64)

    @property
    def length_seconds(self) -> float:
        """Length of the trace."""
        return float(self.seconds[-1])

    @property
    def switches(self) -> int:
        """How many times it stopped to switch its schedule, or to restart."""
        stopped = np.isin(self.cause, [_NUMBER[Cause.SWITCH], _NUMBER[Cause.RESTART]])
        return int(np.count_nonzero(stopped & ~np.concatenate([[False], stopped[:-1]])))

    @property
    def throughput(self) -> float:
        """Mean useful samples per second."""
        return float(np.dot(self.rate, np.diff(self.seconds)) / self.seconds[-1])

    @property
    def ettr(self) -> float:
        """Effective training time ratio: the share of the time in which it trains what it has not trained before.

        Productive time over elapsed time, as in "Revisiting Reliability in Large-Scale Machine Learning Research
        Clusters" (Kokolis et al., HPCA 2025, arXiv 2410.21680), whatever the throughput is in that time. Time spent
        writing checkpoints is not productive.
        """
        full = self.rate + self.checkpoints
        training = np.divide(self.rate, full, out=np.zeros_like(full), where=full > 0)
        return float(np.dot(training, np.diff(self.seconds)) / self.seconds[-1])

    @property
    def seconds_to_recover(self) -> float:
        """Mean time to recover (MTTR): how long nothing new is trained, on average over the times that this happens.

        From the failure (or the change of schedule) until all lost work is redone. 0 where it never stands still.
        """
        stopped = self.rate == 0
        count = np.count_nonzero(stopped & ~np.concatenate([[False], stopped[:-1]]))
        return float(np.diff(self.seconds)[stopped].sum() / count) if count else 0.0

    def binned(self, edges: Floats) -> Floats:
        """Mean useful samples per second between consecutive edges (seconds, ascending)."""
        trained = np.concatenate([[0.0], np.cumsum(self.rate * np.diff(self.seconds))])
        mean: Floats = np.diff(np.interp(edges, self.seconds, trained)) / np.diff(edges)
        return mean

    def lost(self, best: float) -> dict[Cause, float]:
        """Seconds lost by cause, compared with a job that trains `best` samples per second all the time.

        Their sum is length x (1 - throughput / best).
        """
        spans = np.diff(self.seconds)
        lost = {cause: float(spans[self.cause == number].sum()) for number, cause in enumerate(CAUSES)}
        running = self.cause == _NUMBER[Cause.RUN]
        train, kept = spans[running], self.rate[running]
        written = self.checkpoints[running]
        workers, links = np.array(self.slowdowns).reshape(-1, 2)[running].T
        without = workers * links * (kept + written)
        lost[Cause.LINKS] = float(np.dot(train, (links - 1) * (kept + written)) / best)
        lost[Cause.SLOW] = float(np.dot(train, without - links * (kept + written)) / best)
        lost[Cause.RUN] = float(np.dot(train, self.fault_free_rate - without) / best)
        lost[Cause.CHECKPOINT] += float(np.dot(train, written) / best)
        lost[Cause.WHOLE] = float(train.sum() * (best - self.fault_free_rate) / best)
        return lost


def simulate(policy: Policy, trace: AvailabilityTrace) -> PolicyRun:
    """Simulate one policy over a trace that was fitted to its job (`availability_trace.fit_to_job`)."""
    assert trace.places == policy.scenario.workers, "the trace does not fit the job"
    spans, links = policy.spans, 1.0
    phases: Sequence[Phase] = policy.start(trace.live)
    for change in trace.changes_for(lambda alive: policy.alive_gpus(alive, trace.gpus_per_worker)):
        if change.seconds >= trace.length_seconds:
            break
        remaining = spans.spend(phases, change.seconds, policy.slowdown, links)
        links = change.links or links
        phases = policy.answer(change, remaining)
    spans.spend(phases, trace.length_seconds, policy.slowdown, links)
    return PolicyRun(policy=policy.name, fault_free_rate=policy.fault_free_rate, seconds=np.array(spans.seconds),
                     phases=spans.phases, slowdowns=spans.slowdowns)


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """The same trace under several policies."""

    trace: AvailabilityTrace
    runs: Mapping[str, PolicyRun]
    best_rate: float
    """Samples per second of the fastest policy with all workers alive: lost time is measured against it."""

    def throughputs(self) -> dict[str, float]:
        """Mean samples per second by policy."""
        return {name: run.throughput for name, run in self.runs.items()}

    def goodput(self, name: str) -> float | None:
        """Of a policy, useful samples over those that the best one with all workers alive trains in the same time.

        1 - lost time, as Google's ML Productivity Goodput (2024): what all losses, of availability and of efficiency,
        leave. None for a reference line, which is no system and may be beyond the best of them.
        """
        if POLICIES[name].is_reference:
            return None
        return self.runs[name].throughput / self.best_rate if self.best_rate else 0.0


def compare(policies: Sequence[type[Policy]], throughputs: Throughputs, costs: Costs, trace: AvailabilityTrace,
            progress: CountCallback = lambda _done, _total: None) -> Comparison:
    """Simulate policies over one trace, which must fit the job.

    After Ctrl-C the result has the policies that were finished. Raises KeyboardInterrupt when there are none.
    """
    scenario = Scenario(throughputs, costs, trace.seconds_between_failures)
    runs: dict[str, PolicyRun] = {}
    try:
        for done, kind in enumerate(policies, 1):
            runs[kind.name] = simulate(kind(scenario), trace)
            progress(done, len(policies))
    except KeyboardInterrupt:
        if not runs:
            raise
    return Comparison(trace=trace, runs=runs, best_rate=max(
        [0.0, *(run.fault_free_rate for run in runs.values() if not POLICIES[run.policy].is_reference)]))


class PoliciesOfTrace:
    """Simulates policies over numbered traces, in any process: what is planned for one is kept there for the next."""

    def __init__(self, policies: Sequence[type[Policy]], make: Callable[[], Throughputs], costs: Costs) -> None:
        """`make` must be picklable where processes are to have a copy of this."""
        self._policies, self._make, self._costs = policies, make, costs
        self._throughputs: Throughputs | None = None

    def __call__(self, numbered: tuple[int, AvailabilityTrace]) -> dict[str, float]:
        """Mean samples per second by policy."""
        _, trace = numbered
        if self._throughputs is None:
            self._throughputs = self._make()
        scenario = Scenario(self._throughputs, self._costs, trace.seconds_between_failures)
        return {kind.name: simulate(kind(scenario), trace).throughput for kind in self._policies}


def throughputs_over_traces(policies: Sequence[type[Policy]], throughputs: Throughputs, costs: Costs,
                            traces: Sequence[AvailabilityTrace],
                            progress: CountCallback = lambda _done, _total: None) -> dict[str, Floats]:
    """`gather_throughputs` of traces that are simulated here, one after the other."""
    simulated = PoliciesOfTrace(policies, lambda: throughputs, costs)
    return gather_throughputs(policies, ((one[0], simulated(one)) for one in enumerate(traces)), len(traces), progress)


def gather_throughputs(policies: Sequence[type[Policy]], results: Iterable[tuple[int, Mapping[str, float]]],
                       traces: int, progress: CountCallback = lambda _done, _total: None) -> dict[str, Floats]:
    """Mean samples per second by policy, one value for each trace, from what `PoliciesOfTrace` gives for numbered
    traces, in whatever order that comes.

    After Ctrl-C the result has the traces that were finished. Raises KeyboardInterrupt when there are none.
    """
    found: dict[int, Mapping[str, float]] = {}
    try:
        for number, values in results:
            found[number] = values
            progress(len(found), traces)
    except KeyboardInterrupt:
        if not found:
            raise
    return {kind.name: np.array([found[number][kind.name] for number in sorted(found)]) for kind in policies}
