"""Compute what a failure costs: the README's preset with no, one and five workers dead."""

from collections.abc import Sequence

from msgspec.structs import replace

from slipstream.cli.figures.figure import Cell, Figure, Series
from slipstream.planner import parse_job
from slipstream.planner.budget import CountCallback
from slipstream.planner.job.presets import preset_text
from slipstream.planner.simulation import (
    POLICIES,
    Throughputs,
    build_death_trace,
    costs_for,
    simulate_traces,
)
from slipstream.schedules.schedule import Worker

PRESET = "llama-3-8b"
"""Preset whose job is simulated."""
PARAMETERS = 8e9
"""Number of parameters of the preset's model, by which the costs of changes are estimated."""
DEAD_WORKERS = ("2.1", "5.0", "0.2", "7.3", "4.1")
CASES = {"one dead": DEAD_WORKERS[:1], "five dead": DEAD_WORKERS}
PLAN_SECONDS = 5.0
"""Time limit of a plan, in seconds of counted search steps: that of `--steps 2000000`."""
POLICY_LABELS = {
    "slipstream": "Slipstream, settled: layers have moved",
    "slipstream-fixed": "Slipstream, at once: every worker keeps its layers",
    "recycle": "ReCycle, as published",
    "oobleck": "Oobleck: pipelines of other lengths",
    "torchft": "drop the replica (torchft)",
    "checkpoint-restart": "restart from a checkpoint on whole pipelines",
}
"""Text for each policy in the README."""
LIKE_FOR_LIKE = ("oobleck", "torchft", "checkpoint-restart")
"""Policies also shown with this planner's schedules; ReCycle's would be `slipstream-fixed`'s."""


def _build_row(text: str, rates: Sequence[float]) -> tuple[Cell, ...]:
    """Return a row: `text`, the first rate, each further rate with its change in percent."""
    whole, *others = rates
    return (
        text,
        f"{whole:.1f}",
        *(f"{rate:.1f} ({round(100 * (rate / whole - 1))} %)" for rate in others),
    )


def reproduce_failure_cost(progress: CountCallback, *, exposed: bool = False) -> Figure:
    """Return the README's table as a figure.

    Each policy has a row: samples per second while all workers are alive, and in each failure case,
    with the change in percent; those in `LIKE_FOR_LIKE` have a second one. With `exposed`, gradient
    reductions occupy workers in all policies (`[network] overlap = false`). `progress` is called
    after each case.
    """
    job = parse_job(preset_text(PRESET))
    if exposed:
        job = replace(job, network=replace(job.network, overlap=False))
    kinds, costs = [POLICIES[name] for name in POLICY_LABELS], costs_for(PARAMETERS, job.stages)
    by_case = {}
    planned_by_case = {}
    for done, (name, dead) in enumerate({"all alive": (), **CASES}.items(), 1):
        workers = [Worker.parse(worker) for worker in dead]
        # Each case is planned for exactly these dead workers, as `slipstream plan` would.
        throughputs = Throughputs(
            job, plan_seconds=PLAN_SECONDS, settle_seconds=PLAN_SECONDS, thorough=True, dead=workers
        )
        trace = build_death_trace(job, workers)
        by_case[name] = simulate_traces(kinds, throughputs, costs, [trace])
        planned_by_case[name] = simulate_traces(
            [POLICIES[kind] for kind in LIKE_FOR_LIKE],
            throughputs.with_planned_pipelines(),
            costs,
            [trace],
        )
        progress(done, 1 + len(CASES))
    # Bars: a group for each policy, a bar for each case.
    series = []
    for name, column in by_case.items():
        rates = tuple(float(column[kind.name][0]) for kind in kinds)
        series.append(Series(name=name, values=rates))
    # Rows: policies with their own schedules, then with ours.
    rows = []
    for policy, text in POLICY_LABELS.items():
        rows.append(_build_row(text, [float(column[policy][0]) for column in by_case.values()]))
    for policy in LIKE_FOR_LIKE:
        text = f"with our schedules: {POLICY_LABELS[policy]}"
        planned = [float(column[policy][0]) for column in planned_by_case.values()]
        rows.append(_build_row(text, planned))
    return Figure(
        name="failure-cost" + "-exposed" * exposed,
        title=f"What a failure costs: {PRESET}, {job.pipelines} x {job.stages} workers",
        kind="bars",
        x_label="",
        y_label="samples per second",
        x=tuple(POLICY_LABELS),
        series=tuple(series),
        header=("", *by_case),
        rows=tuple(rows),
        findings={},
        assumptions=(
            f"the dead: {DEAD_WORKERS[0]}, or {', '.join(DEAD_WORKERS)}; they die in the first "
            "minute of a day and stay away",
            f"each plan is searched for as many counted steps as {PLAN_SECONDS:g} s of a processor "
            "have",
            f"costs of changes for {PARAMETERS:.3g} parameters",
            "reductions occupy workers: [network] overlap = false"
            if exposed
            else "reductions run while workers compute: [network] overlap = true",
        ),
    )
