"""Write the page of the benchmark.

It has, for each case, the ranking, the lost time by cause, and the parameters that matter.
"""

import math
from collections.abc import Callable, Sequence
from html import escape

from benchmarks.fleet.cases import (
    DOLLARS_PER_GPU_HOUR,
    CaseResult,
    Fidelity,
    Measures,
    PolicyResult,
    Report,
    Returned,
    Spread,
)
from slipstream.cli.drawing.report_page import build_document, colour_swatch, render_table
from slipstream.cli.drawing.simulation_report import OURS, draw_hours_by_cause, three_digits
from slipstream.cli.drawing.svg_chart import draw_tornado
from slipstream.planner.simulation import Cause

FIRST = "#2f81f7"
"""Colour of a parameter's first value."""
SECOND = "#d29922"
"""Colour of a parameter's second value."""
READING = (
    "Goodput: samples trained, over those of the best policy if all workers were alive all the "
    "time. Higher is better; 100 % is a cluster that never fails. ETTR: share of the time in "
    "which something is trained for the first time, at whatever speed. Dollars: at {price:g} for "
    "an hour of each GPU of the cluster, idle, spare and dead ones too (assumed). &plusmn;: one "
    "standard deviation over seeds. Reference lines (in italics) are no systems."
)

BACK = (
    "The system that the case is named after, and slipstream, on the same failures. The last "
    "column counts missing workers, too; schedules that are faster with all workers alive count "
    "in neither."
)


def benchmark_page(report: Report) -> bytes:
    """Return the whole page: the ranking over all cases, then each case."""
    parts = [
        f"<h1>Slipstream benchmark, set {escape(report.set)}</h1>",
        '<p class="dim">Ways to keep training while machines fail, simulated on the same jobs and '
        "failures.</p>",
        f'<p class="lead">{escape(summary(report.cases))}</p>',
        "<h2>Goodput in each case</h2>",
        _overview(report),
        '<p class="dim">* most of the case.</p>',
        f'<p class="dim">{READING.format(price=DOLLARS_PER_GPU_HOUR)}</p>',
    ]
    if report.returned:
        head, rows = returned_rows(report.returned)
        parts += [
            "<h2>What comes back</h2>",
            render_table(head, [(False, row) for row in rows]),
            f'<p class="dim">{BACK}</p>',
        ]
    for result in report.cases:
        parts += _case(result)
    parts += [
        "<h2>How far models are from what they model</h2>",
        _fidelity(report.published),
        "<h2>What is taken from where</h2>",
        _sources(report.cases),
    ]
    return build_document(f"Slipstream benchmark, set {report.set}", "\n".join(parts))


def summary(results: Sequence[CaseResult]) -> str:
    """Return a sentence: the best policy in each case, and its lead.

    The lead is over the first policy of another project.
    """
    texts = []
    for result in results:
        ranked = result.ranked()
        others = [
            policy for policy in ranked[1:] if not (policy.name in OURS and ranked[0].name in OURS)
        ]
        if others:
            ahead = ranked[0].spread(goodput).mean / (others[0].spread(goodput).mean or math.nan)
            texts.append(
                f"{result.case.name}: {ranked[0].name}, {ahead:.2f} times {others[0].name}"
            )
    return "Most trained, by case. " + "; ".join(texts) + "." if texts else "One policy only."


def by_case(
    report: Report, of: Callable[[Measures], float | None]
) -> list[tuple[str, Sequence[Spread | None]]]:
    """Return each system's name, and a measure by case (None: not run).

    Systems that were run in most cases come first, and of these the ones with the highest goodput
    in the last case.
    """
    found = []
    for result in report.cases:
        found.append({policy.name: policy.spread(of) for policy in result.policies})
    ranked = [policy.name for result in reversed(report.cases) for policy in result.ranked()]
    names = sorted(dict.fromkeys(ranked), key=lambda name: -ranked.count(name))
    rows = []
    for name in names:
        rows.append((name, [case.get(name) for case in found]))
    return rows


def _overview(report: Report) -> str:
    first = [result.ranked()[0].name for result in report.cases]
    rows = []
    for name, spreads in by_case(report, goodput):
        cells = [name]
        for spread, best in zip(spreads, first, strict=True):
            mark = " *" if name == best else ""
            cells.append("" if spread is None else f"{spread.mean:.1%}{mark}")
        rows.append((False, cells))
    return render_table(
        ("policy", *(f"{result.case.name}, {result.gpus:,} GPUs" for result in report.cases)), rows
    )


def goodput(measures: Measures) -> float:
    """Return the goodput of one policy and seed."""
    return measures.goodput


def shown(spread: Spread, *, is_share: bool = True) -> str:
    """Format a share's mean and standard deviation in percent; unknown: a dash."""
    mean, deviation = spread.mean, spread.deviation
    if math.isnan(mean):
        return "-"
    if is_share:
        return f"{100 * mean:.1f} ± {100 * deviation:.1f} %"
    # Three digits of the mean.
    decimals = max(0, 2 - math.floor(math.log10(abs(mean)))) if mean else 0
    return f"{mean:,.{decimals}f} ± {deviation:,.{decimals}f}"


def table_rows(result: CaseResult) -> list[tuple[bool, Sequence[str]]]:
    """Return a row for each policy, best first, reference lines last."""
    ranked = [*result.ranked(), *(policy for policy in result.policies if policy.is_reference)]
    rows: list[tuple[bool, Sequence[str]]] = []
    for policy in ranked:
        cells = (
            policy.name,
            "-" if policy.is_reference else shown(policy.spread(goodput)),
            shown(policy.spread(lambda measures: measures.ettr)),
            shown(policy.spread(lambda measures: measures.samples_per_second), is_share=False),
            three_digits(policy.spread(lambda measures: measures.tokens).mean / 1e9),
            shown(
                policy.spread(lambda measures: measures.dollars_per_million_tokens),
                is_share=False,
            ),
            three_digits(policy.spread(lambda measures: measures.seconds_to_recover).mean),
        )
        rows.append((policy.is_reference, cells))
    return rows


HEAD = (
    "policy",
    "goodput",
    "ETTR",
    "samples / s",
    "tokens, 1e9",
    "dollars / 1e6 tokens",
    "s to recover",
)


def _case(result: CaseResult) -> list[str]:
    case = result.case
    text = (
        f"{result.gpus:,} GPUs, {result.workers:,} workers, {three_digits(result.hours)} h, "
        f"{result.failures:,.0f} failures on average; means over {result.seeds} seeds; plans with "
        f"layers that move searched for {case.settle_seconds:g} s each"
    )
    parts = [
        f"<h2>{escape(case.name)}: {escape(case.title)}</h2>",
        f'<p class="dim">{escape(text)}</p>',
        render_table(HEAD, table_rows(result)),
        "<h3>Hours lost by cause</h3>",
        '<p class="dim">Hours of the best policy with all workers alive that a policy is short '
        "of, whatever the cause.</p>",
        _lost(result),
    ]
    if result.sensitivity:
        usual = (
            next(policy for policy in result.policies if policy.name == "slipstream")
            .seeds[0]
            .goodput
        )
        parts += [
            "<h3>Which parameter matters, for slipstream</h3>",
            '<p class="dim">Goodput if one parameter is other than assumed; as assumed it is '
            f"{usual:.1%}, the line. The widest bar is what matters most.</p>",
            f'<div class="legend"><label>{colour_swatch(FIRST)}first value named</label>'
            f"<label>{colour_swatch(SECOND)}second value named</label></div>",
            draw_tornado(
                [(row.parameter, row.low, row.high) for row in result.sensitivity],
                usual=usual,
                colours=(FIRST, SECOND),
                x="goodput, seed 0",
            ),
        ]
    return parts


def _lost(result: CaseResult) -> str:
    lost = {}
    for policy in result.ranked():
        lost[policy.name] = {cause: mean_lost(policy, cause) for cause in Cause}
    return draw_hours_by_cause(lost, result.hours)


def mean_lost(policy: PolicyResult, cause: Cause) -> float:
    """Return the lost hours, as a mean over seeds."""
    return max(0.0, policy.spread(lambda measures: measures.hours_lost[cause.value]).mean)


def returned_rows(back: Sequence[Returned]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Return the head and the rows of the table of recovered shares."""
    return (
        (
            "case",
            "policy",
            "of the time it trains nothing new",
            "of the time slipstream brings back",
            "of its own fault-free throughput slipstream keeps more",
        ),
        [
            (row.case, row.policy, shown(row.missing), shown(row.back), shown(row.kept))
            for row in back
        ],
    )


def _fidelity(fidelity: Sequence[Fidelity]) -> str:
    return render_table(
        ("policy", "figure (samples a second, or a share)", "published", "simulated", "off"),
        [(False, row.cells) for row in fidelity],
    )


def _sources(results: Sequence[CaseResult]) -> str:
    policies = {policy.name: policy for result in results for policy in result.policies}
    items = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(policy.title)}. From: {escape(policy.source)}.</dd>"
        for name, policy in policies.items()
    )
    notes = "".join(
        f"<li>{escape(result.case.name)}: {escape(note)}</li>"
        for result in results
        for note in result.notes
    )
    return f"<dl>{items}</dl><ul>{notes}</ul>"
