"""Summarise a plan in a few lines: its quality, its moves, its alternatives."""

from collections.abc import Sequence

from slipstream.cli.shared.console import duration
from slipstream.cli.shared.summaries import bubble_share, busy_shares, gap_text, role_change_lines
from slipstream.planner.job.file import Job
from slipstream.planner.placement import FoundPlacement
from slipstream.planner.plan import Plan
from slipstream.planner.recompute import Recomputation
from slipstream.planner.reference import FaultFree
from slipstream.planner.report import (
    MORE_MEMORY,
    Alternative,
    Transition,
    format_gigabytes,
    pays_after_iterations,
)
from slipstream.schedules.layers import compact_layers_text, merge_ranges
from slipstream.schedules.schedule import Schedule, Scope

NARROW_RANGE = 0.01
"""Width from which on a range of shares of fault-free throughput is explained."""
BUSY_SHARE = 0.97
"""Share of the period from which on a worker counts as busy all the time."""
CLOSE_GAP = 0.01
"""Relative gap to the bound up to which more search would hardly shorten a plan."""
NEGLIGIBLE_GAP = 1e-3
"""Relative gap to the bound up to which no longer search is advised."""
MAX_NAMED = 3
"""Largest number of workers that a line names."""
MIN_GAIN = 1.0005
"""Factor in throughput above which an alternative is mentioned."""
LEAST_BYTES = 1e6
"""Size of moved layers, in bytes, below which the job's memory cannot be in bytes."""


def answer_lines(made: Plan, others: Sequence[Alternative], options: Sequence[str]) -> list[str]:
    """Return three lines on a plan: its period, its throughput, and what limits it.

    Without failed workers, the second says how busy the workers are. `others` are alternatives to
    compare with, and `options` those by which layers or roles may move in the plan.
    """
    schedule = made.schedule
    return [
        f"period {duration(made.period)}, {describe_proof(schedule)}",
        _kept_share(made)
        if schedule.failed
        else f"workers are busy {1 - bubble_share(schedule):.1%} of the time",
        "; ".join(
            [f"limited by {_describe_limit(made, others)}", *_recommend(made, others, options)]
        ),
    ]


def describe_proof(schedule: Schedule) -> str:
    """Return words on how far a schedule's period can be above the best possible one.

    The words also say of which schedules that holds, such as those with layers in place.
    """
    if schedule.gap is None:
        return "with no proven bound on how short it could be"
    proof = (
        "proven optimal"
        if schedule.status == "optimal"
        else f"at most {gap_text(schedule.gap)} above the best possible"
    )
    return f"{proof} {schedule.scope.description}"


def detail_lines(made: Plan, others: Sequence[Alternative], moved: Transition) -> list[str]:
    """Return lines on how a plan was found, what it re-routes and moves, and alternatives.

    `others` are the alternatives, and `moved` what has to be copied before the plan can run.
    """
    # How the plan was found, and whether it can be much better.
    schedule = made.schedule
    bound = (
        ""
        if schedule.status == "optimal" or not schedule.lower_bound_ticks
        else f"proven bound {duration(schedule.seconds(schedule.lower_bound_ticks))}; "
    )
    until = f", until {made.end}" if made.end else ""
    ending = ", interrupted" if made.interrupted else until
    lines = [f"{bound}planned in {duration(made.solve_seconds)} by {schedule.method}{ending}"]
    if made.evidence and (schedule.gap is None or schedule.gap > NEGLIGIBLE_GAP):
        lines.append(made.evidence)
    # What other workers run for those that are down, or for those that have less time.
    if schedule.failed:
        lines.append(
            f"{', '.join(map(str, schedule.failed))} down: {_runs_text(schedule.rerouted)} "
            "re-routed to peers"
        )
        lines += _uncertainty_lines(made)
    if schedule.shed:
        lines.append(
            f"{_runs_text(schedule.shed)} shed to workers with time to spare, though their own is "
            "alive"
        )
    return [
        *lines,
        *role_change_lines(schedule),
        *_move_lines(made, moved),
        *_alternative_lines(made, others),
    ]


def tally_lines(made: Plan) -> list[str]:
    """Return lines on how often each technique was tried, and how often it helped.

    The list is empty if nothing was counted.
    """
    if made.tally is None or not made.tally.tried:
        return []
    return [
        "tried, and made a plan shorter:",
        *(
            f"  {tried:>13,} {made.tally.helped[what]:>9,}  {what}"
            for what, tried in made.tally.tried.items()
            if tried
        ),
    ]


def _runs_text(count: int) -> str:
    return f"{count} micro-batch run{'' if count == 1 else 's'}"


def rank_lines(job: Job) -> list[str]:
    """Return a line that says which values are a rank's, if workers have several ranks."""
    if job.ranks == 1:
        return []
    return [
        f"workers of {job.ranks} ranks: times are those of a worker; memory is a rank's, and "
        "transfers and all-reduces are from rank to rank, all ranks at the same time"
    ]


def placement_lines(found: FoundPlacement | None) -> list[str]:
    """Return lines on the best placement found and its periods; none if `found` is None."""
    if found is None:
        return []
    verdict = "has no plan" if found.own_period is None else f"has {duration(found.own_period)}"
    # The keys of [placement] are printed as a job file has them, to be copied.
    lines = [
        f"placement: {found.arrangement.description}, the best of {found.looked_at} placements "
        f"and divisions; the job file's own {verdict}",
        *(
            f"  {key} = {value!r}".replace("'", '"')
            for key, value in found.arrangement.placement_table.items()
        ),
    ]
    if found.with_failures:
        periods = ", ".join(
            f"{count} down {duration(period)}"
            for count, period in enumerate(found.with_failures, 1)
        )
        lines.append(
            f"with failed workers: {periods}; {duration(found.mean_period)} is the period of the "
            "mean throughput"
        )
    return lines


def recomputation_lines(again: Recomputation | None) -> list[str]:
    """Return a line on the stages that the planner chose to recompute; none without choice."""
    if again is None:
        return []
    if not again.stages:
        return ["no activations are computed again: memory suffices"]
    which = compact_layers_text(merge_ranges((stage, stage + 1) for stage in again.stages))
    who = (
        f"stage {which} computes its" if len(again.stages) == 1 else f"stages {which} compute their"
    )
    without = (
        "without, no schedule fits into memory"
        if again.without is None
        else f"without, {duration(again.without)}"
    )
    return [
        f"{who} activations again: by quick plans with all workers alive the period is "
        f"{duration(again.period)}; {without}"
    ]


def _kept_share(made: Plan) -> str:
    """Return a clause with the shares of fault-free throughput and of workers that remain."""
    schedule = made.schedule
    live, workers = len(schedule.seats), schedule.grid.pipelines * schedule.grid.columns
    share = f"with {live} of {workers} workers = {live / workers:.1%}"
    if made.fault_free is None:
        return (
            f"{share}; throughput against fault-free is not known: there was no time left to plan "
            "it"
        )
    best, least = _throughput_range(made.fault_free, made.period)
    if f"{best:.1%}" == f"{least:.1%}" or made.fault_free.is_close:
        return (
            f"throughput {best:.1%} of fault-free (layers in place: "
            f"{duration(made.fault_free.period)}), {share}"
        )
    return f"throughput between {least:.1%} and {best:.1%} of fault-free, {share}"


def _throughput_range(whole: FaultFree, period: float) -> tuple[float, float]:
    """Return the largest and smallest share of fault-free throughput that a plan may have."""
    # The best fault-free period is not known exactly, but lies between bound and period of `whole`.
    return whole.period / period, whole.bound / period


def _uncertainty_lines(made: Plan) -> list[str]:
    """Return a line that explains a wide range of throughputs; none for a narrow one."""
    if made.fault_free is None or made.fault_free.is_close:
        return []
    best, least = _throughput_range(made.fault_free, made.period)
    if best - least < NARROW_RANGE:
        return []
    return [
        f"the shortest fault-free period is between {duration(made.fault_free.bound)} and "
        f"{duration(made.fault_free.period)}; with more time, or a plan without --failed first, "
        "it is known better"
    ]


def _describe_limit(made: Plan, others: Sequence[Alternative]) -> str:
    """Return a phrase for what limits the plan's period."""
    # In order of certainty: full workers, memory, the search, and the shape of the pipelines.
    schedule = made.schedule
    busy = [worker for worker, share in busy_shares(schedule).items() if share >= BUSY_SHARE]
    if busy:
        more = f" and {len(busy) - MAX_NAMED} more" if len(busy) > MAX_NAMED else ""
        return (
            f"the work of {', '.join(map(str, busy[:MAX_NAMED]))}{more}: busy {BUSY_SHARE:.0%} of "
            "the time and more"
        )
    roomier = next((other.period for other in others if other.what == MORE_MEMORY), made.period)
    if made.period / roomier > MIN_GAIN:
        return "memory"
    if schedule.status != "optimal" and (schedule.gap is None or schedule.gap > CLOSE_GAP):
        return "what was found in the time, or the pipelines' filling and draining"
    return (
        "the pipelines' filling and draining: more micro-batches in an iteration make it matter "
        "less"
    )


def _move_lines(made: Plan, moved: Transition) -> list[str]:
    """Return a line on the layers that the plan moves; none if it moves none."""
    if not moved.layers:
        return []
    line = f"layers to move: {moved.layers}"
    if moved.bytes is not None and moved.seconds is not None:
        if moved.bytes >= LEAST_BYTES:
            line += f", {format_gigabytes(moved.bytes)} GB in about {duration(moved.seconds)}"
        else:
            line += (
                f", {moved.bytes:g} bytes: say in [memory] unit_bytes what a unit of its values is"
            )
    if made.fixed_period and made.fixed_period > made.period:
        line += f"; with layers in place the period is {duration(made.fixed_period)}"
    if (paid := pays_after_iterations(made, moved)) is not None:
        line += f", so that moving pays after {paid} iteration{'s' * (paid != 1)} at the latest"
    return [line]


def _alternative_lines(made: Plan, others: Sequence[Alternative]) -> list[str]:
    """Return a line with the throughputs of the alternatives to the plan."""
    if not others or made.fault_free is None:
        return []
    texts = []
    for other in sorted(others, key=lambda other: -other.throughput):
        share = f"{other.throughput:.1%}"
        if other.effort is not None:  # a search in so short a time finds no best plan
            share = (
                f"at least {share}, found in {other.effort}"
                if other.found
                else f"none shorter found in {other.effort}"
            )
        text = f"{other.what} {share}"
        if other.option:
            text += f" ({other.option})"
        elif other.batch < 1:
            text += f" with {other.batch:.1%} of the batch"
        texts.append(text)
    return [f"instead, by quick plans: {'; '.join(texts)}"]


def _describe_effort(searched: Sequence[Alternative]) -> str:
    """Return a clause on how long plans with layers or roles moved were searched for."""
    by_effort = {other.option: other.effort for other in searched if other.effort}
    texts = []
    for option in ("--layers move", "--normalise"):
        effort = by_effort.get(option)
        texts.append(f"{option} searched for {effort} only" if effort else f"{option} not searched")
    return f" ({', '.join(texts)})"


def _recommend(made: Plan, others: Sequence[Alternative], options: Sequence[str]) -> list[str]:
    """Return clauses on the best of `made` and `others`, and on what more memory gains."""
    # The plan was made with `options`, those of the command line that let layers or roles move.
    if not others or made.fault_free is None:
        return []
    present = made.fault_free.period / made.period
    lines = []
    planned = [other for other in others if other.option]
    dropped = [other for other in others if other.batch < 1]
    # The last of equal ones.
    best = max(reversed(planned), key=lambda other: other.throughput, default=None)
    smaller_batch = max(dropped, key=lambda other: other.throughput, default=None)
    if (
        best
        and best.throughput > present * MIN_GAIN
        and f"{best.throughput:.1%}" != f"{present:.1%}"
    ):
        at_least = "at least " if best.effort else ""
        lines.append(
            f"shorter: {best.option}, {at_least}{best.throughput:.1%} instead of {present:.1%}"
        )
    elif made.schedule.failed:
        is_best = made.schedule.status == "optimal" and made.schedule.scope is Scope.LAYERS
        rank = "best" if is_best else "shortest found"
        choice = f" ({' '.join(options)})" if options else ""
        effort = "" if is_best or options else _describe_effort(planned)
        lines.append(f"{rank}: this plan{choice}, {present:.1%}{effort}")
    # A smaller batch changes the training, so it is named only where it gains more.
    if (
        smaller_batch
        and smaller_batch.throughput > max(present, best.throughput if best else 0.0) * MIN_GAIN
    ):
        lines.append(
            f"where a smaller batch will do: {smaller_batch.what}, {smaller_batch.throughput:.1%}"
        )
    for other in others:
        if other.what == MORE_MEMORY and other.throughput > present * MIN_GAIN:
            lines.append(
                f"{MORE_MEMORY} would give {other.throughput:.1%}"
                if made.schedule.failed
                else f"{MORE_MEMORY} would make it {other.throughput / present - 1:.1%} faster"
            )
    return lines
