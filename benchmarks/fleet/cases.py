"""Define the benchmark: a versioned set of cases, the same for all policies.

A case consists of a job, its failures and slowdowns, and a length of time. All policies get the
same: the job's throughputs by schedule, the costs, and the mean time between failures. No policy
knows the trace. Seeds are simulated concurrently in processes, which begin with the plans that the
first seed needed.
"""

import math
import multiprocessing
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec

from benchmarks.figures import published
from slipstream.planner.job.file import Job, StageTimes, parse_job
from slipstream.planner.job.presets import preset_text
from slipstream.planner.simulation.availability_trace import AvailabilityTrace, group_gpus
from slipstream.planner.simulation.costs import Costs, costs_for
from slipstream.planner.simulation.entry import (
    EntryError,
    EntryTable,
    decode_json_file,
    make_table_policy,
)
from slipstream.planner.simulation.failure_models import FAILURE_MODELS, SLOW_MODELS, FailureModel
from slipstream.planner.simulation.policies import POLICIES
from slipstream.planner.simulation.policy import Policy, Scenario
from slipstream.planner.simulation.policy_runs import simulate_policy
from slipstream.planner.simulation.synthetic_trace import draw_slow_times, draw_trace
from slipstream.planner.simulation.throughput import Throughputs
from slipstream.planner.tables.process_pool import run_all

VERSION = "1"
"""Version of the set. Figures of different versions are not comparable."""
DOLLARS_PER_GPU_HOUR = 2.0
"""Assumed price, for the cost of tokens. All machines are paid for, including idle and dead ones.
"""
LARGE_STAGES = 16
LARGE_MICROBATCHES = 32
FLOPS = 0.4 * 989e12
"""FLOP/s of a GPU: an H100 at 40 % of its dense bfloat16 peak.

Llama 3 reports 38 to 43 % (table 4).
"""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """Case of the set."""

    name: str
    title: str
    job: str
    """Name of a preset, `published`, or `uniform-N`.

    `uniform-N` has N pipelines of 16 equal stages, 32 micro-batches, 8 layers per stage, F = I = W
    = 2 parameters x tokens / (stages x GPUs of a worker x FLOPS), memory unlimited.
    """
    parameters: float
    tokens: int
    """Number of tokens in a sample."""
    days: float = 0.0
    gpus_per_worker: int = 1
    failures: str = ""
    """Failure model. Empty for the availability trace of ReCycle's paper."""
    slow: str = ""
    """Model of slowdowns. Empty for none."""
    settle_seconds: float = 0.25
    """CPU time for a plan with layers that move: the budget of this planner."""
    policies: tuple[str, ...] = ()
    """Policies to simulate. Empty for all."""


CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        Case(
            name="spot-24",
            title="24 A100, 6.7B, the trace of ReCycle's paper: 6.4 h, 91 % alive",
            job="published",
            parameters=6.7e9,
            tokens=2_048,
            settle_seconds=1.0,
        ),
        Case(
            name="llama-3-70b",
            title="1,024 H100, 70B, 30 days, Meta RSC's failures at this size, Greyhound's slow "
            "times",
            job="llama-3-70b",
            parameters=70e9,
            tokens=8_192,
            days=30,
            gpus_per_worker=8,
            failures="meta-rsc",
            slow="greyhound",
        ),
        Case(
            name="byterobust",
            title="9,600 GPUs, 405B, 90 days, Llama 3's failures by cause",
            job="uniform-75",
            parameters=405e9,
            tokens=8_192,
            days=90,
            gpus_per_worker=8,
            failures="llama-3",
        ),
        Case(
            name="ft-hsdp",
            title="98,304 GPUs, 405B, 30 days, FT-HSDP's failures: one in 18 minutes",
            job="uniform-768",
            parameters=405e9,
            tokens=8_192,
            days=30,
            gpus_per_worker=8,
            failures="ft-hsdp",
        ),
        Case(
            name="100k",
            title="131,072 GPUs, 405B, 90 days, Meta RSC's failures at this size, Greyhound's slow "
            "times",
            job="uniform-1024",
            parameters=405e9,
            tokens=8_192,
            days=90,
            gpus_per_worker=8,
            failures="meta-rsc",
            slow="greyhound",
        ),
    )
}
"""Cases by name, in the order in which they are run."""


class Measures(msgspec.Struct, frozen=True, kw_only=True):
    """Measures of one policy in one case and seed."""

    samples_per_second: float
    goodput: float
    """Throughput relative to that of the best policy with all workers alive."""
    kept: float
    """Throughput relative to that of this policy with all of its workers alive."""
    ettr: float
    tokens: float
    """Tokens in the whole time."""
    dollars_per_million_tokens: float | None
    hours_lost: dict[str, float]
    """Lost hours by cause."""
    switches: int
    seconds_to_recover: float


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and standard deviation over seeds."""

    mean: float
    deviation: float

    @classmethod
    def over(cls, values: Sequence[float]) -> "Spread":
        """Return the spread of these values, one for each seed."""
        return cls(
            mean=statistics.fmean(values),
            deviation=statistics.stdev(values) if len(values) > 1 else 0.0,
        )


class PolicyResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one policy in one case, with the seeds in order."""

    name: str
    title: str
    source: str
    is_reference: bool
    seeds: tuple[Measures, ...]

    def spread(self, of: Callable[[Measures], float | None]) -> Spread:
        """Return the spread of a measure over seeds; NaN if a seed lacks it."""
        values = []
        for measures in self.seeds:
            value = of(measures)
            values.append(math.nan if value is None else value)
        return Spread.over(values)


class Sensitivity(msgspec.Struct, frozen=True, kw_only=True):
    """Effect of one parameter on a policy's goodput, with all others unchanged."""

    parameter: str
    low: float
    """Goodput at the first of the two values."""
    high: float


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one case."""

    case: Case
    workers: int
    gpus: int
    hours: float
    failures: float
    """Number of whole or partial losses of workers, as a mean over seeds."""
    policies: tuple[PolicyResult, ...]
    sensitivity: tuple[Sensitivity, ...] = ()
    """Sensitivities of `slipstream` with seed 0, widest first."""
    notes: tuple[str, ...] = ()

    @property
    def seeds(self) -> int:
        """Number of traces that were drawn."""
        return len(self.policies[0].seeds)

    def ranked(self) -> list[PolicyResult]:
        """Systems by goodput, best first, without reference lines."""
        return sorted(
            (policy for policy in self.policies if not policy.is_reference),
            reverse=True,
            key=lambda policy: policy.spread(lambda measures: measures.goodput).mean,
        )


def job_of(case: Case) -> Job:
    """Return the job of a case."""
    if case.job == "published":
        return published.published_job("6.7B", published.NOMINAL)
    if case.job.startswith("uniform-"):
        seconds = 2 * case.parameters * case.tokens / (LARGE_STAGES * case.gpus_per_worker * FLOPS)
        stage_times = (float(f"{seconds:.3g}"),) * LARGE_STAGES
        pipelines = int(case.job.removeprefix("uniform-"))
        times = StageTimes(
            forward=stage_times,
            backward_input=stage_times,
            backward_weight=stage_times,
            optimizer=stage_times,
            all_reduce=(0.0,) * LARGE_STAGES,
            transfer=0.0,
        )
        return Job(
            name=case.job,
            pipelines=pipelines,
            stages=LARGE_STAGES,
            time=times,
            microbatches=(LARGE_MICROBATCHES,) * pipelines,
            columns=tuple(range(LARGE_STAGES)),
            layers=(8,) * LARGE_STAGES,
        )
    return parse_job(preset_text(case.job), case.job)


def trace_of(
    case: Case, workers: int, seed: int, model: FailureModel | None = None
) -> AvailabilityTrace:
    """Return the trace of a case. `model` replaces the case's own failures."""
    if not case.failures:
        return published.published_trace(seed)
    drawn = draw_trace(
        model or FAILURE_MODELS[case.failures], workers * case.gpus_per_worker, case.days, seed
    )
    drawn = group_gpus(drawn, case.gpus_per_worker)
    return draw_slow_times(drawn, SLOW_MODELS[case.slow], seed) if case.slow else drawn


# --- Running --------------------------------------------------------------------------------------


def run_case(
    case: Case,
    *,
    seeds: int = 5,
    processes: int = 2,
    names: Sequence[str] = (),
    entries: Iterable[EntryTable | type[Policy]] = (),
    sensitivity: bool = True,
    progress: Callable[[str], None] = lambda _: None,
) -> CaseResult:
    """Simulate a case.

    The argument `names` restricts the project's policies, if the case has them; `entries` are
    systems of others. Raises EntryError for an entry that does not fit the case.
    """
    job = job_of(case)
    kinds = [
        kind
        for name, kind in POLICIES.items()
        if (not names or name in names) and (not case.policies or name in case.policies)
    ]
    for entry in entries:
        kind = (
            make_table_policy(entry, case.name, job.stages)
            if isinstance(entry, EntryTable)
            else entry
        )
        kinds += [kind] if kind is not None else []
    throughputs = Throughputs(job, settle_seconds=case.settle_seconds, announce=progress)
    costs = costs_for(case.parameters, job.stages)
    best = _best_rate(throughputs, costs)

    def seed(number: int) -> list[Measures]:
        return _measured(
            case, kinds, throughputs, costs, trace_of(case, throughputs.workers, number), best
        )

    progress("seed 0")
    found = [seed(0), *_side_by_side(seed, range(1, seeds), processes)]
    results = []
    for kind, measures_by_seed in zip(kinds, zip(*found, strict=True), strict=True):
        results.append(
            PolicyResult(
                name=kind.name,
                title=kind.title,
                source=kind.source,
                is_reference=kind.is_reference,
                seeds=measures_by_seed,
            )
        )
    rows: tuple[Sensitivity, ...] = ()
    if sensitivity and case.failures and any(kind.name == "slipstream" for kind in kinds):
        progress("sensitivity")
        rows = sensitivities(case, throughputs, costs, best)
    traces = [trace_of(case, throughputs.workers, number) for number in range(seeds)]
    return CaseResult(
        case=case,
        workers=throughputs.workers,
        gpus=throughputs.workers * case.gpus_per_worker,
        hours=traces[0].length_seconds / 3600,
        policies=tuple(results),
        sensitivity=rows,
        notes=traces[0].notes,
        failures=statistics.fmean(
            trace.length_seconds / trace.seconds_between_failures for trace in traces
        ),
    )


def _best_rate(throughputs: Throughputs, costs: Costs) -> float:
    """Return the samples per second of the project's fastest policy with all workers.

    It counts whichever policies are run.
    """
    scenario = Scenario(throughputs, costs, math.inf)
    return max(
        kind(scenario).fault_free_rate for kind in POLICIES.values() if not kind.is_reference
    )


def _measured(
    case: Case,
    kinds: Sequence[type[Policy]],
    throughputs: Throughputs,
    costs: Costs,
    trace: AvailabilityTrace,
    best: float,
) -> list[Measures]:
    scenario = Scenario(throughputs, costs, trace.seconds_between_failures)
    found = []
    gpu_hours = trace.places * trace.gpus_per_worker * trace.length_seconds / 3600
    for kind in kinds:
        run = simulate_policy(kind(scenario), trace)
        tokens = run.throughput * trace.length_seconds * case.tokens
        found.append(
            Measures(
                samples_per_second=run.throughput,
                goodput=run.throughput / best,
                ettr=run.ettr,
                tokens=tokens,
                kept=run.throughput / run.fault_free_rate if run.fault_free_rate else 0.0,
                dollars_per_million_tokens=DOLLARS_PER_GPU_HOUR * gpu_hours / (tokens / 1e6)
                if tokens
                else None,
                hours_lost={
                    cause.value: seconds / 3600 for cause, seconds in run.seconds_lost(best).items()
                },
                switches=run.switch_count,
                seconds_to_recover=run.seconds_to_recover,
            )
        )
    return found


def _side_by_side(
    seed: Callable[[int], list[Measures]], numbers: Sequence[int], processes: int
) -> list[list[Measures]]:
    """Simulate the seeds in forked processes, or else one after the other.

    The results are the same.
    """
    if processes < 2 or len(numbers) < 2 or "fork" not in multiprocessing.get_all_start_methods():
        return [seed(number) for number in numbers]
    found = dict(run_all(seed, numbers, processes, refusals=(Exception,), fork=True))
    return [found[number] for number in numbers]


# --- Sensitivity ----------------------------------------------------------------------------------

HALF_AND_TWICE = (0.5, 2.0)


def sensitivities(
    case: Case, throughputs: Throughputs, costs: Costs, best: float
) -> tuple[Sensitivity, ...]:
    """Return the effect of each parameter on `slipstream`'s goodput, widest first.

    Parameters are halved and doubled, for seed 0.
    """
    usual, kind = FAILURE_MODELS[case.failures], POLICIES["slipstream"]

    def goodput(model: FailureModel, changed: Costs, case: Case) -> float:
        trace = trace_of(case, throughputs.workers, 0, model)
        return (
            simulate_policy(
                kind(Scenario(throughputs, changed, trace.seconds_between_failures)), trace
            ).throughput
            / best
        )

    def scaled(field: str, factor: float) -> FailureModel:
        kinds = tuple(
            msgspec.structs.replace(kind, **{field: getattr(kind, field) * factor})
            for kind in usual.kinds
        )
        curve = tuple((gpus, hours * factor) for gpus, hours in usual.mttf_hours)
        return msgspec.structs.replace(
            usual, kinds=kinds, mttf_hours=curve if field == "mtbf_hours" else usual.mttf_hours
        )

    def costing(field: str, *values: float) -> list[float]:
        return [
            goodput(usual, msgspec.structs.replace(costs, **{field: value}), case)
            for value in values
        ]

    pairs = {}
    for field, text in (
        ("mtbf_hours", "time between failures"),
        ("repair_hours", "time of a repair"),
        ("restart_hours", "time of a machine's restart"),
    ):
        models = (scaled(field, factor) for factor in HALF_AND_TWICE)
        pairs[f"{text}: half, twice"] = [goodput(model, costs, case) for model in models]
    for field, text in (
        ("load_seconds", "loading a stage"),
        ("restart_seconds", "restart of the job"),
    ):
        values = (getattr(costs, field) * factor for factor in HALF_AND_TWICE)
        pairs[f"{text}: half, twice"] = costing(field, *values)
    pairs |= {
        "switch: 1 s, 30 s": costing("switch_seconds", 1.0, 30.0),
        "switch: 1 s, 180 s as FT-HSDP's stall": costing("switch_seconds", 1.0, 180.0),
        "planning: from a table, 60 s": costing("plan_seconds", 0.0, 60.0),
    }
    if case.slow:
        pairs[f"slow workers and links: none, {case.slow}"] = [
            goodput(usual, costs, msgspec.structs.replace(case, slow="")),
            goodput(usual, costs, case),
        ]
    rows = [Sensitivity(parameter=text, low=low, high=high) for text, (low, high) in pairs.items()]
    return tuple(sorted(rows, key=lambda row: -abs(row.high - row.low)))


# --- How close models are to what they model ------------------------------------------------------


class Fidelity(msgspec.Struct, frozen=True, kw_only=True):
    """Figure that a system's authors, or ReCycle's, have published, with its simulated value."""

    policy: str
    what: str
    published: float
    simulated: float

    @property
    def off(self) -> float:
        """Relative difference of the simulated value from the published one."""
        return self.simulated / self.published - 1

    @property
    def cells(self) -> tuple[str, ...]:
        """Texts of policy, figure, published value, simulated value, and difference."""
        off = round(self.off, 3) + 0.0  # no minus before 0.0
        return (
            self.policy,
            self.what,
            f"{self.published:.4g}",
            f"{self.simulated:.4g}",
            f"{off:+.1%}",
        )


FIDELITY_SEEDS = 5
STEADY = {
    "recycle": ("6.7B", published.RECYCLE_6_7B),
    "oobleck": ("6.7B", published.OOBLECK_6_7B_MAX),
    "bamboo": ("350M", published.BAMBOO_350M_MAX),
}
EFFECTIVE_TIME = (("ft-hsdp", "ft-hsdp", 0.80), ("ft-hsdp", "checkpoint-restart", 0.44))
"""Published effective training time by case and policy."""


def fidelity(results: Sequence[CaseResult] = ()) -> list[Fidelity]:
    """Compare ReCycle, Oobleck and Bamboo with published figures.

    These are mean throughput over 0 to 9 failures and over the trace. FT-HSDP is compared by the
    effective training time in its case, if `results` have it.
    """
    return [
        *_throughput_fidelity(),
        *(
            Fidelity(
                policy=name,
                what=f"effective training time, case {case}",
                published=share,
                simulated=policy.spread(lambda measures: measures.ettr).mean,
            )
            for case, name, share in EFFECTIVE_TIME
            for result in results
            if result.case.name == case
            for policy in result.policies
            if policy.name == name
        ),
    ]


@cache
def _throughput_fidelity() -> list[Fidelity]:
    found = []
    for model in ("6.7B", "350M"):
        throughputs = Throughputs(published.published_job(model, published.NOMINAL))
        costs = costs_for(published.PARAMETERS[model], published.STAGES)
        for name in ("recycle", "oobleck", "bamboo"):
            scenario = Scenario(throughputs, costs, 3600.0)
            if STEADY[name][0] == model:
                points = STEADY[name][1]
                rates = [
                    POLICIES[name](scenario).steady_rate(failures)
                    for failures in range(len(points))
                ]
                found.append(
                    Fidelity(
                        policy=name,
                        what=f"{model}, mean over 0 to 9 failures",
                        published=statistics.fmean(points),
                        simulated=statistics.fmean(rates),
                    )
                )
            if name in published.AVERAGES[model]:
                found.append(
                    Fidelity(
                        policy=name,
                        what=f"{model}, over the published trace",
                        published=published.AVERAGES[model][name],
                        simulated=_over_published_trace(name, throughputs, costs),
                    )
                )
    return found


def _over_published_trace(name: str, throughputs: Throughputs, costs: Costs) -> float:
    means = []
    for seed in range(FIDELITY_SEEDS):
        trace = published.published_trace(seed)
        policy = POLICIES[name](Scenario(throughputs, costs, trace.seconds_between_failures))
        means.append(simulate_policy(policy, trace).throughput)
    return statistics.fmean(means)


RETURNED = (("ft-hsdp", "ft-hsdp"),)
"""Pairs (case, policy) for which recovered shares are reported."""


class Returned(msgspec.Struct, frozen=True, kw_only=True):
    """Share of another policy's loss that this planner recovers.

    Shares are of the time, by seed.
    """

    case: str
    policy: str
    missing: Spread
    """Lost share of the other policy: 1 - its effective training time."""
    back: Spread
    """Recovered share: effective training time of this planner less that of the other policy."""
    kept: Spread
    """Difference of the shares of fault-free throughput that each keeps.

    It also counts missing workers.
    """


def returned(results: Iterable[CaseResult]) -> list[Returned]:
    """Return the recovered shares for the cases that have results."""
    by_case = {}
    for result in results:
        by_case[result.case.name] = {policy.name: policy.seeds for policy in result.policies}
    found = []
    for case, policy in RETURNED:
        seeds = by_case.get(case, {})
        if policy in seeds and "slipstream" in seeds:
            pairs = list(zip(seeds["slipstream"], seeds[policy], strict=True))
            found.append(
                Returned(
                    case=case,
                    policy=policy,
                    missing=Spread.over([1 - other.ettr for _, other in pairs]),
                    back=Spread.over([ours.ettr - other.ettr for ours, other in pairs]),
                    kept=Spread.over([ours.kept - other.kept for ours, other in pairs]),
                )
            )
    return found


# --- All of it ------------------------------------------------------------------------------------


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Results of the benchmark."""

    set: str = VERSION
    cases: tuple[CaseResult, ...] = ()
    """Results of the cases, in the order of the set."""
    published: tuple[Fidelity, ...] = ()
    returned: tuple[Returned, ...] = ()
    cpu_seconds: dict[str, float] = {}
    """CPU seconds of the simulation of each case, on all processors."""

    def with_case(self, result: CaseResult, cpu_seconds: float) -> "Report":
        """Return the report with this result in place of an earlier one of the case."""
        by_name = {case_result.case.name: case_result for case_result in (*self.cases, result)}
        cases = tuple(
            by_name[name] for name in (*CASES, *(by_name.keys() - CASES.keys())) if name in by_name
        )
        return Report(
            cases=cases,
            published=tuple(fidelity(cases)),
            returned=tuple(returned(cases)),
            cpu_seconds=self.cpu_seconds | {result.case.name: cpu_seconds},
        )


_REPORT = msgspec.json.Decoder(Report)


def read_report(path: Path) -> Report:
    """Read a report of this version of the set. Raises EntryError, whose message names the file."""
    report = decode_json_file(path, _REPORT, "what `python -m benchmarks.fleet` writes")
    changed = [
        case_result.case.name
        for case_result in report.cases
        if case_result.case != CASES.get(case_result.case.name)
    ]
    if report.set != VERSION or changed:
        raise EntryError(
            f"{path}: set {report.set}{f', case {changed[0]}' if changed else ''} is not as in set "
            f"{VERSION} now; write to another folder"
        )
    return report
