"""Write the report of a simulation as one HTML file, without network or fonts."""

from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from slipstream.cli.drawing.report_page import build_document, colour_swatch, render_table
from slipstream.cli.drawing.svg_chart import StepLine, draw_bars, draw_steps
from slipstream.planner.simulation import POLICIES, AvailabilityTrace, Cause, Comparison, PolicyRun

BINS = 480
"""Number of equal spans of the trace over each of which throughput is averaged."""
COLOURS = {
    "slipstream": "#128a63",
    "slipstream-fixed": "#6fb98f",
    "recycle": "#e69f00",
    "oobleck": "#0072b2",
    "bamboo": "#cc79a7",
    "torchft": "#d55e00",
    "checkpoint-restart": "#7a5195",
    "elaswave": "#b8860b",
    "malleus": "#8c564b",
    "resihp": "#808000",
    "ft-hsdp": "#a6761d",
    "fault-scaled": "#7d8590",
    "work-conserving": "#aaaaaa",
}
MORE_COLOURS = ("#7b68ee", "#5f9ea0", "#a0522d", "#c71585", "#6b8e23")
"""Colours that policies without a colour in `COLOURS` take in turn."""
OURS = ("slipstream", "slipstream-fixed")
"""Names of the policies that simulate this project's own runtime."""
TO_FAILURES = "lost to failures"
"""Name of all lost time but that of `Cause.WHOLE`."""
CAUSE_COLOURS = {
    Cause.RUN: "#0072b2",
    Cause.WHOLE: "#9ecae1",
    Cause.SWITCH: "#d55e00",
    Cause.LOAD: "#e69f00",
    Cause.LOST: "#cc79a7",
    Cause.RESTART: "#7a5195",
    Cause.CHECKPOINT: "#f0c05a",
    Cause.WAIT: "#6e7781",
    Cause.SLOW: "#8c6d31",
    Cause.LINKS: "#bd9e39",
}
DEFINITIONS = (
    "When whole: with all workers alive. ETTR: share of the time in which something is trained for "
    "the first time (Kokolis et al., HPCA 2025). Goodput: samples over those of the best policy "
    "with all workers alive all the time (as Google&rsquo;s ML Productivity Goodput). To recover: "
    "mean time from a failure or change until something new is trained. Hours are of live workers, "
    "also idle ones."
)
SCRIPT = """
document.querySelectorAll('.legend input').forEach(box => box.addEventListener('change', () => {
  document.querySelectorAll('.line').forEach(line => {
    if (line.dataset.name === box.value) line.style.display = box.checked ? '' : 'none';
  });
  box.parentElement.classList.toggle('off', !box.checked);
}));
"""


def build_simulation_report(
    result: Comparison, *, job: str, shape: str, notes: Sequence[str], tokens: int | None = None
) -> bytes:
    """Return the report on a comparison of policies, an HTML file, as bytes.

    Parameters
    ----------
    job, shape
        The job's name and size, for the title.
    notes
        Further assumptions.
    tokens
        Number of tokens in a sample, or None if it is unknown.
    """
    # First what differs most between policies, then details, and what was assumed last.
    shown = _initially_shown(result)
    parts = [
        f"<h1>{escape(job)}: what failures cost</h1>",
        f'<p class="dim">{escape(shape)} &middot; trace {escape(describe_trace(result.trace))}</p>',
        f'<p class="lead">{escape(_compare_leader(result))}</p>',
        "<h2>Schedule and failures</h2>",
        f'<p class="dim">Hours lost against a job that always trains {result.best_rate:.4g} '
        "samples a second, the "
        "most that any of these makes with all workers alive: because the policy's own schedule is "
        "slower even then, and to failures. Shorter bars are better.</p>",
        _schedule_and_failures_chart(result),
        *_like_for_like(result),
        "<h2>Hours lost to failures, by cause</h2>",
        '<p class="dim">Hours are of each policy&rsquo;s own rate when whole, as in the table '
        "above.</p>",
        _causes_chart(result),
        "<h2>Mean throughput</h2>",
        _throughput_table(result, tokens),
        f'<p class="dim">{DEFINITIONS}</p>',
        "<h2>Throughput over time</h2>",
        _policy_legend(result, shown),
        _throughput_chart(result, shown),
        "<h2>Live workers</h2>",
        _live_workers_chart(result),
        "<h2>Hours lost, in numbers</h2>",
        f'<p class="dim">Against a job that always trains {result.best_rate:.4g} samples a second, '
        "as in the "
        "first chart.</p>",
        _lost_table(result),
        "<h2>What was assumed</h2>",
        _list_assumptions(result, notes),
    ]
    body = "\n".join(parts)
    return build_document(f"{job}: what failures cost", body, SCRIPT)


def rank_policies(result: Comparison) -> list[str]:
    """Return the names of the policies by throughput, highest first, without reference lines."""
    systems = _without_references(result)
    return sorted(systems, key=lambda name: -systems[name].throughput)


def _compare_leader(result: Comparison) -> str:
    """Compare the policy of highest throughput with the second and the last, in sentences."""
    order, runs = rank_policies(result), result.runs
    if not order:
        return "Only reference lines were asked for."
    best = order[0]
    text = (
        f"{best} trains most: {runs[best].throughput:.4g} samples a second, "
        f"{result.goodput(best) or 0.0:.0%} of a cluster that never fails."
    )
    # Our own two policies are not compared with each other.
    others = [name for name in order[1:] if not (name in OURS and best in OURS)]
    places = {"next": others[0]} if others else {}
    if len(others) > 1:
        places["last"] = others[-1]
    ratios = []
    for place, name in places.items():
        if runs[name].throughput:
            ratio = runs[best].throughput / runs[name].throughput
            ratios.append(f"{ratio:.2f} times {name}, the {place}")
    return (
        f"{text} That is {', and '.join(ratios)}.{_compare_planned(result, best)}"
        if ratios
        else text
    )


def _compare_planned(result: Comparison, best: str) -> str:
    """Return a sentence on `best`, if ours, beside others with our schedules; or ""."""
    # Only our own policies are on this planner's schedules already.
    if best not in OURS or not result.planned:
        return ""
    name, run = max(result.planned.items(), key=lambda item: item[1].throughput)
    if not run.throughput:
        return ""
    ratio = result.runs[best].throughput / run.throughput
    return f" With the same schedules it is {ratio:.2f} times {name}, as modelled here."


def _initially_shown(result: Comparison) -> set[str]:
    """Return the names of the policies whose lines are visible at first."""
    order = rank_policies(result)
    others = [name for name in order if name not in OURS]
    return {*order[:1], *others[:1], *others[-1:]} or set(result.runs)


def summarize_comparison(result: Comparison) -> str:
    """Return a line with the first policy's throughput and its ratios to those of others.

    The first is that of `result.runs`; reference lines are left out. A sentence may follow, on the
    first beside others with this planner's schedules. Without policies, the line says so.
    """
    real = {name: run.throughput for name, run in _without_references(result).items()}
    if not real:
        return "only reference lines were asked for"
    first, *others = real
    text = f"{first} trains {real[first]:.4g} samples per second on average"
    ratios = []
    for name in others:
        trained = f"{real[first] / real[name]:.2f}x {name}" if real[name] else f"{name} trains none"
        ratios.append(trained)
    if not ratios:
        return f"{text}."
    return f"{text}: {', '.join(ratios)}.{_compare_planned(result, first)}"


def describe_trace(trace: AvailabilityTrace) -> str:
    """Return a line on an availability trace: length, losses, slowdowns, mean live workers."""
    more = [
        text
        for count, text in (
            (trace.machine_slowdowns, "slow for a while"),
            (trace.link_slowdowns, "slow links"),
            (trace.partial_losses, "short of GPUs"),
        )
        if count
        for text in (f", {count} times {text}",)
    ]
    lost = f"{trace.machine_losses} worker{'s' * (trace.machine_losses != 1)} lost"
    return (
        f"{trace.name}: {trace.length_seconds / 3600:.4g} h, {lost}{''.join(more)}, "
        f"{trace.mean_live_machines:.4g} of {trace.places} alive on average"
    )


def tokens_per_gpu_hour(result: Comparison, run: PolicyRun, tokens: int | None) -> float | None:
    """Return the tokens trained in `run` per hour and GPU of the live workers.

    GPUs that idle count, too. None if the tokens of a sample are unknown, or no GPU was alive.
    """
    gpus = result.trace.mean_live_machines * result.trace.gpus_per_worker
    return run.throughput * tokens * 3600 / gpus if tokens and gpus else None


def policy_colour(policy: str) -> str:
    """Return the CSS colour of a policy's line. Raises ValueError for an unknown policy."""
    others = [name for name in POLICIES if name not in COLOURS]
    return COLOURS.get(policy) or MORE_COLOURS[others.index(policy) % len(MORE_COLOURS)]


def worker_hours(result: Comparison, run: PolicyRun) -> float | None:
    """Return the hours of live workers per 1,000 samples of `run`; None without samples."""
    return result.trace.mean_live_machines / run.throughput / 3.6 if run.throughput else None


def _throughput_table(result: Comparison, tokens: int | None) -> str:
    best = max((run.throughput for run in _without_references(result).values()), default=0.0)
    rows = []
    for name in (
        *rank_policies(result),
        *(name for name, run in result.runs.items() if run.is_reference),
    ):
        run = result.runs[name]
        spent, made = worker_hours(result, run), tokens_per_gpu_hour(result, run, tokens)
        reference, goodput = run.is_reference, result.goodput(name)
        of_best = f"{run.throughput / best:.1%}" if best else "-"
        goodput_text = f"{goodput:.1%}" if goodput is not None else "-"
        spent_text = f"{spent:.4g}" if spent else "-"
        made_text = f"{made:,.0f}" if made else "-"
        switches = "" if reference else str(run.switch_count)
        cells = [name, f"{run.throughput:.4g}", of_best, f"{run.fault_free_rate:.4g}"]
        cells += [f"{run.ettr:.1%}", goodput_text, three_digits(run.seconds_to_recover), spent_text]
        cells += [made_text] * bool(tokens)
        rows.append((reference, [*cells, switches]))
    head = (
        "policy",
        "samples / s",
        "of the best",
        "when whole",
        "ETTR",
        "goodput",
        "s to recover",
        "worker-hours / 1,000 samples",
        *(["tokens / GPU-hour"] * bool(tokens)),
        "switches",
    )
    return render_table(head, rows)


def three_digits(value: float) -> str:
    """Format a number with up to three significant digits; from 100 on, as an integer."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _lost_table(result: Comparison) -> str:
    lost = {
        name: result.runs[name].seconds_lost(result.best_rate) for name in rank_policies(result)
    }
    shown = [cause for cause in Cause if _is_lost(lost, cause)]
    rows = []
    for name, row in lost.items():
        hours = [f"{max(0.0, row[cause]) / 3600:.2f}" for cause in shown]
        rows.append((False, (name, f"{sum(row.values()) / 3600:.2f}", *hours)))
    return render_table(("hours lost", "in all", *shown), rows)


def _is_lost(lost: Mapping[str, Mapping[Cause, float]], cause: Cause) -> bool:
    """Return whether any policy loses more than a second by this cause."""
    return any(row[cause] > 1 for row in lost.values())


def _without_references(result: Comparison) -> dict[str, PolicyRun]:
    return {name: run for name, run in result.runs.items() if not run.is_reference}


def _time_axis(result: Comparison) -> tuple[str, float]:
    """Return the unit of the time axis, "days" or "hours", and the seconds in one."""
    return ("days", 86400.0) if result.trace.length_seconds > 5 * 86400 else ("hours", 3600.0)


def _throughput_chart(result: Comparison, shown: Collection[str]) -> str:
    unit, seconds = _time_axis(result)
    edges = np.linspace(0.0, result.trace.length_seconds, BINS + 1)
    first = next(iter(result.runs))
    lines = [
        StepLine(
            name,
            policy_colour(name),
            run.mean_rates_between(edges).tolist(),
            run.is_reference,
            name == first,
            name not in shown,
        )
        for name, run in result.runs.items()
    ]
    return _scrolled(
        draw_steps((edges / seconds).tolist(), lines[::-1], x=unit, y="samples per second")
    )


def _live_workers_chart(result: Comparison) -> str:
    unit, seconds = _time_axis(result)
    points = list(result.trace.iterate_live_counts())
    points = [point for point in points if point[0] < result.trace.length_seconds]
    edges = [time / seconds for time, _ in points] + [result.trace.length_seconds / seconds]
    line = StepLine("live workers", "currentColor", [float(count) for _, count in points])
    return _scrolled(
        draw_steps(edges, [line], x=unit, y="live workers", top=float(result.trace.places))
    )


def _scrolled(chart: str) -> str:
    """Return a wide chart, as HTML, that a narrow screen scrolls instead of shrinking."""
    return f'<div class="scroll chart">{chart}</div>'


def _policy_legend(result: Comparison, shown: Collection[str]) -> str:
    labels = ""
    for name in result.runs:
        kind = "" if name in shown else " class=off"
        checked = " checked" if name in shown else ""
        swatch = colour_swatch(policy_colour(name))
        labels += (
            f'<label{kind}><input type="checkbox"{checked} value="{escape(name)}"> '
            f"{swatch}{escape(name)}</label>"
        )
    return f'<div class="legend">{labels}</div>'


def _hours_by_cause(result: Comparison, name: str) -> dict[Cause, float]:
    lost = result.runs[name].seconds_lost(result.best_rate)
    return {cause: seconds / 3600 for cause, seconds in lost.items()}


def _schedule_and_failures_chart(result: Comparison) -> str:
    """Return a chart, as HTML, of hours lost to slower schedules, and to failures."""
    rows = {}
    for name in rank_policies(result):
        lost = _hours_by_cause(result, name)
        whole = lost.pop(Cause.WHOLE)
        rows[name] = {Cause.WHOLE.value: whole, TO_FAILURES: sum(lost.values())}
    colours = {
        Cause.WHOLE.value: CAUSE_COLOURS[Cause.WHOLE],
        TO_FAILURES: CAUSE_COLOURS[Cause.SWITCH],
    }
    legend = "".join(
        f"<label>{colour_swatch(colour)}{escape(part)}</label>" for part, colour in colours.items()
    )
    hours = result.trace.length_seconds / 3600
    return f'<div class="legend">{legend}</div>' + draw_bars(
        rows, colours, total=_find_axis_end(rows), x=f"hours lost, of {hours:,.4g}", unit="h"
    )


def _like_for_like(result: Comparison) -> list[str]:
    """Return HTML of a table of policies' results with their own and this planner's schedules."""
    rows = []
    for name in rank_policies(result):
        run, planned = result.runs[name], result.planned.get(name)
        cells = [
            f"{run.throughput:.4g}",
            f"{run.fault_free_rate:.4g}",
            f"{result.failure_seconds(name) / 3600:.2f}",
        ]
        # A policy that plans its schedules anyway has no second run.
        cells += (
            ["its own"] * 3
            if planned is None
            else [
                f"{planned.throughput:.4g}",
                f"{planned.fault_free_rate:.4g}",
                f"{result.failure_seconds(name, planned=True) / 3600:.2f}",
            ]
        )
        rows.append((False, (name, *cells)))
    head = (
        "policy",
        "samples / s",
        "when whole",
        "hours lost to failures",
        "samples / s, with our schedules",
        "when whole",
        "hours lost to failures",
    )
    return [
        "<h2>With the same schedules</h2>",
        '<p class="dim">Left: each policy with the schedules that it publishes. Right: with this '
        "planner&rsquo;s, "
        "as far as its way to handle failures allows. Hours are of its own rate when whole.</p>",
        render_table(head, rows),
    ]


def _causes_chart(result: Comparison) -> str:
    rows = {}
    for name in rank_policies(result):
        # Relative to its own schedule without failures, a policy loses nothing by being slower.
        hours = {**_hours_by_cause(result, name), Cause.WHOLE: 0.0}
        own_rate = result.runs[name].fault_free_rate
        scale = result.best_rate / own_rate if own_rate else 1.0
        rows[name] = {cause: scale * lost for cause, lost in hours.items()}
    return draw_hours_by_cause(rows, result.trace.length_seconds / 3600, top=_find_axis_end(rows))


def _find_axis_end(rows: Mapping[str, Mapping[Any, float]]) -> float:
    """Return the axis end of stacked bars: the longest row's hours, or 1 if 0."""
    return max((sum(row.values()) for row in rows.values()), default=0.0) or 1.0


def draw_hours_by_cause(
    rows: Mapping[str, Mapping[Cause, float]], hours: float, *, top: float | None = None
) -> str:
    """Return a chart, as HTML, with a stacked bar of lost hours for each policy.

    Of all `hours`, the argument `rows` has those lost, by policy and by each `Cause`. The axis ends
    at `top`; None: at `hours`.
    """
    legend = ""
    for cause in Cause:
        if any(row[cause] > 0.001 for row in rows.values()):
            legend += f"<label>{colour_swatch(CAUSE_COLOURS[cause])}{escape(cause)}</label>"
    bars = {}
    for name, row in rows.items():
        bars[name] = {cause.value: row[cause] for cause in Cause}
    chart = draw_bars(
        bars,
        {cause.value: colour for cause, colour in CAUSE_COLOURS.items()},
        total=top or hours,
        x=f"hours lost, of {hours:,.4g}",
        unit="h",
    )
    return f'<div class="legend">{legend}</div>{chart}'


def _list_assumptions(result: Comparison, notes: Sequence[str]) -> str:
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(kind.title)}. Assumes: "
        f"{escape(kind.assumptions)}.</dd>"
        for name, kind in POLICIES.items()
        if name in result.runs
    )
    listed = "".join(f"<li>{escape(note)}</li>" for note in (*result.trace.notes, *notes))
    return f"<dl>{items}</dl><ul>{listed}</ul>"
