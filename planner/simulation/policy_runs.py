"""Simulate policies over an availability trace, and add up the time lost by cause."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property

import msgspec
import numpy as np
import numpy.typing as npt

from slipstream.planner.budget import CountCallback
from slipstream.planner.simulation.availability_trace import AvailabilityTrace
from slipstream.planner.simulation.costs import Costs
from slipstream.planner.simulation.policy import Cause, Phase, Policy, Scenario
from slipstream.planner.simulation.throughput import Throughputs

Floats = npt.NDArray[np.float64]
CAUSES = tuple(Cause)
_NUMBER = {cause: number for number, cause in enumerate(CAUSES)}


class PolicyRun(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Result of one policy over one trace: consecutive spans of time, each with its phase."""

    policy: str
    fault_free_rate: float
    """Samples per second with all workers alive."""
    seconds: Floats
    """Times in seconds at which spans start, and the last one ends. n + 1 values for n spans."""
    phases: Sequence[Phase]
    """Phase of the policy that is in progress during each span."""
    slowdowns: Sequence[tuple[float, float]]
    """Pairs of factors by which slow workers and slow links lengthen training, by span."""
    is_reference: bool
    """True if the policy is a line to compare with, and no system that exists."""

    @cached_property
    def useful_rates(self) -> Floats:
        """Useful samples per second, trained for the first time, one value for each span."""
        return np.array([phase.rate for phase in self.phases])

    @cached_property
    def checkpoint_rates(self) -> Floats:
        """Samples per second lost to writing checkpoints, one value for each span."""
        return np.array([phase.checkpoints for phase in self.phases])

    @cached_property
    def cause_indices(self) -> npt.NDArray[np.int64]:
        """Index into `CAUSES` of the cause of each span."""
        return np.array([_NUMBER[phase.cause] for phase in self.phases], dtype=np.int64)

    @property
    def length_seconds(self) -> float:
        """Length of the trace in seconds."""
        return float(self.seconds[-1])

    @property
    def switch_count(self) -> int:
        """Number of times that training stopped to switch the schedule, or to restart."""
        stopped = np.isin(self.cause_indices, [_NUMBER[Cause.SWITCH], _NUMBER[Cause.RESTART]])
        return int(np.count_nonzero(stopped & ~np.concatenate([[False], stopped[:-1]])))

    @property
    def throughput(self) -> float:
        """Mean useful samples per second."""
        return float(np.dot(self.useful_rates, np.diff(self.seconds)) / self.seconds[-1])

    @property
    def ettr(self) -> float:
        """Effective training time ratio: the share of time in which new samples are trained.

        The definition is that of Kokolis et al. ("Revisiting Reliability in Large-Scale Machine
        Learning Research Clusters", HPCA 2025, arXiv 2410.21680), whatever the throughput. Time to
        write checkpoints is not productive.
        """
        full = self.useful_rates + self.checkpoint_rates
        training = np.divide(self.useful_rates, full, out=np.zeros_like(full), where=full > 0)
        return float(np.dot(training, np.diff(self.seconds)) / self.seconds[-1])

    @property
    def seconds_to_recover(self) -> float:
        """Mean time to recover (MTTR): mean length of intervals without new samples.

        An interval lasts from a failure or change of schedule until all lost work is redone,
        waiting included. The mean is 0 without any interval.
        """
        stopped = self.useful_rates == 0
        count = np.count_nonzero(stopped & ~np.concatenate([[False], stopped[:-1]]))
        return float(np.diff(self.seconds)[stopped].sum() / count) if count else 0.0

    def mean_rates_between(self, edges: Floats) -> Floats:
        """Return the mean useful samples per second between neighbouring `edges`, in seconds."""
        trained = np.concatenate([[0.0], np.cumsum(self.useful_rates * np.diff(self.seconds))])
        mean: Floats = np.diff(np.interp(edges, self.seconds, trained)) / np.diff(edges)
        return mean

    def seconds_lost(self, best: float) -> dict[Cause, float]:
        """Return the seconds lost by each cause, compared with a job that never fails.

        The job compared with always trains `best` samples per second. The values add up to the
        length of the trace times (1 - throughput / best).
        """
        spans = np.diff(self.seconds)
        lost = {
            cause: float(spans[self.cause_indices == number].sum())
            for number, cause in enumerate(CAUSES)
        }
        # Training is slower than the best for several causes at a time: each is charged with the
        # samples that it takes, in seconds at the best rate.
        running = self.cause_indices == _NUMBER[Cause.RUN]
        durations, useful = spans[running], self.useful_rates[running]
        checkpointed = self.checkpoint_rates[running]
        workers, links = np.array(self.slowdowns).reshape(-1, 2)[running].T
        # Rates without any slowness; links are charged first, then slow workers, then dead ones.
        unslowed = workers * links * (useful + checkpointed)
        lost[Cause.LINKS] = float(np.dot(durations, (links - 1) * (useful + checkpointed)) / best)
        lost[Cause.SLOW] = float(
            np.dot(durations, unslowed - links * (useful + checkpointed)) / best
        )
        lost[Cause.RUN] = float(np.dot(durations, self.fault_free_rate - unslowed) / best)
        lost[Cause.CHECKPOINT] += float(np.dot(durations, checkpointed) / best)
        lost[Cause.WHOLE] = float(durations.sum() * (best - self.fault_free_rate) / best)
        return lost


def simulate_policy(policy: Policy, trace: AvailabilityTrace) -> PolicyRun:
    """Simulate a policy over a trace that fits its job (`fit_to_job`), and return the result.

    A policy object records the run, so it can be simulated once.
    """
    assert trace.places == policy.scenario.workers, "the trace does not fit the job"
    spans, links = policy.spans, 1.0
    phases: Sequence[Phase] = policy.start(trace.live)
    for change in trace.iterate_policy_changes(
        lambda alive: policy.alive_gpus(alive, trace.gpus_per_worker)
    ):
        if change.seconds >= trace.length_seconds:
            break
        # What was planned holds until the change, which the policy then answers.
        remaining = spans.record_until(phases, change.seconds, policy.slowdown, links)
        links = change.links or links
        phases = policy.handle_change(change, remaining)
    spans.record_until(phases, trace.length_seconds, policy.slowdown, links)
    return PolicyRun(
        policy=policy.name,
        fault_free_rate=policy.fault_free_rate,
        seconds=np.array(spans.seconds),
        phases=spans.phases,
        slowdowns=spans.slowdowns,
        is_reference=policy.is_reference,
    )


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Results of simulating several policies over the same trace."""

    trace: AvailabilityTrace
    runs: Mapping[str, PolicyRun]
    best_rate: float
    """Samples per second of the fastest policy, no reference line, with all workers alive."""
    planned: Mapping[str, PolicyRun] = msgspec.field(default_factory=dict)
    """Runs of other systems' policies with this planner's schedules instead of theirs, by name."""

    def failure_seconds(self, name: str, *, planned: bool = False) -> float:
        """Return the seconds that failures cost a policy, compared with its own rate without any.

        With `planned`, the policy's run with this planner's schedules counts. 0 if the policy's
        rate is 0. Raises KeyError without such a run.
        """
        run = (self.planned if planned else self.runs)[name]
        return (
            run.length_seconds * (1 - run.throughput / run.fault_free_rate)
            if run.fault_free_rate
            else 0.0
        )

    def mean_throughputs(self) -> dict[str, float]:
        """Return the mean useful samples per second, by name of policy."""
        return {name: run.throughput for name, run in self.runs.items()}

    def goodput(self, name: str) -> float | None:
        """Return a policy's mean useful samples per second as a share of the best rate.

        The best rate is the best policy's with all workers alive, as in Google's ML Productivity
        Goodput (2024). None for a reference line, which is not a system and may be faster than the
        best of them. Raises KeyError without such a run.
        """
        run = self.runs[name]
        if run.is_reference:
            return None
        return run.throughput / self.best_rate if self.best_rate else 0.0


def compare_policies(
    policies: Sequence[type[Policy]],
    throughputs: Throughputs,
    costs: Costs,
    trace: AvailabilityTrace,
    progress: CountCallback = lambda _done, _total: None,
) -> Comparison:
    """Simulate policies, of `POLICIES` or others, over one trace, which must fit the job.

    Policies of other systems are simulated twice: with the schedules that they publish, and with
    this planner's. The function `progress` receives how many policies are done, and how many there
    are. After Ctrl-C the result has the policies that were finished, the last possibly without its
    second run. Raises KeyboardInterrupt if there are none.
    """
    scenario = Scenario(throughputs, costs, trace.seconds_between_failures)
    with_planned = scenario._replace(throughputs=throughputs.with_planned_pipelines())
    runs: dict[str, PolicyRun] = {}
    planned: dict[str, PolicyRun] = {}
    try:
        for done, policy_class in enumerate(policies, 1):
            runs[policy_class.name] = simulate_policy(policy_class(scenario), trace)
            # With equal schedules, only the ways to handle failures differ.
            if not policy_class.plans_schedules and not policy_class.is_reference:
                planned[policy_class.name] = simulate_policy(policy_class(with_planned), trace)
            progress(done, len(policies))
    except KeyboardInterrupt:
        if not runs:
            raise
    return Comparison(
        trace=trace,
        runs=runs,
        planned=planned,
        best_rate=max(
            [0.0, *(run.fault_free_rate for run in runs.values() if not run.is_reference)]
        ),
    )


class TraceSimulator:
    """Function object that simulates policies over a trace at a time, and keeps all plans."""

    def __init__(
        self, policies: Sequence[type[Policy]], make: Callable[[], Throughputs], costs: Costs
    ) -> None:
        """Set the policies, the function `make` that creates throughputs, and the costs.

        The function must be picklable if other processes get a copy of this object.
        """
        self._policies, self._make, self._costs = policies, make, costs
        self._throughputs: Throughputs | None = None

    def __call__(self, numbered: tuple[int, AvailabilityTrace]) -> dict[str, float]:
        """Return the mean useful samples per second by policy; `numbered` is (number, trace)."""
        _, trace = numbered
        if self._throughputs is None:
            self._throughputs = self._make()
        scenario = Scenario(self._throughputs, self._costs, trace.seconds_between_failures)
        return {
            kind.name: simulate_policy(kind(scenario), trace).throughput for kind in self._policies
        }


def simulate_traces(
    policies: Sequence[type[Policy]],
    throughputs: Throughputs,
    costs: Costs,
    traces: Sequence[AvailabilityTrace],
    progress: CountCallback = lambda _done, _total: None,
) -> dict[str, Floats]:
    """Return the mean useful samples per second by policy, one value for each trace.

    Every trace must fit the job. The function `progress` receives how many traces are done, and how
    many there are. After Ctrl-C, the result has only the traces that were finished. Raises
    KeyboardInterrupt if there are none.
    """
    simulated = TraceSimulator(policies, lambda: throughputs, costs)
    results = ((number, simulated((number, trace))) for number, trace in enumerate(traces))
    return gather_throughputs(policies, results, len(traces), progress)


def gather_throughputs(
    policies: Sequence[type[Policy]],
    results: Iterable[tuple[int, Mapping[str, float]]],
    traces: int,
    progress: CountCallback = lambda _done, _total: None,
) -> dict[str, Floats]:
    """Collect the mean samples per second by policy, one value for each trace, in order.

    The `results` are pairs in any order: the number of a trace, and a result of `TraceSimulator`;
    `traces` is how many there will be. After Ctrl-C the result has only the traces that were
    finished. Raises KeyboardInterrupt if there are none.
    """
    by_number: dict[int, Mapping[str, float]] = {}
    try:
        for number, values in results:
            by_number[number] = values
            progress(len(by_number), traces)
    except KeyboardInterrupt:
        if not by_number:
            raise
    columns = [by_number[number] for number in sorted(by_number)]
    gathered = {}
    for kind in policies:
        gathered[kind.name] = np.array([column[kind.name] for column in columns])
    return gathered
