"""Format the tables of the benchmark in Markdown, for documents that state its figures."""

from collections.abc import Sequence

from benchmarks.fleet.cases import Report
from benchmarks.fleet.page import by_case, goodput, returned_rows, shown

COLUMNS = (0, 1, 2, 5)
"""Columns of the page's table that fit into a narrow table."""
PARAMETERS = 4
"""Number of parameters to list, those with the largest effect."""


def benchmark_markdown(report: Report) -> str:
    """Return the results in Markdown.

    They are of each policy in each case, the parameters that matter most, recovered shares, and
    fidelity.
    """
    parts = [
        "\n".join(
            f"- **{result.case.name}**: {result.case.title}; seeds: {result.seeds}"
            for result in report.cases
        )
    ]
    for name, of in (("Goodput", goodput), ("ETTR", lambda measures: measures.ettr)):
        rows = []
        for policy, spreads in by_case(report, of):
            cells = [policy]
            for spread in spreads:
                cells.append("" if spread is None else shown(spread))
            rows.append(cells)
        parts += [
            f"{name}:",
            _table(("policy", *(result.case.name for result in report.cases)), rows),
        ]
    widest = [
        (result.case.name, row)
        for result in report.cases
        for row in result.sensitivity[:PARAMETERS]
    ]
    if widest:
        parts += [
            "Which parameter matters, by goodput of slipstream:",
            _table(
                ("case", "parameter", "at the first", "at the second"),
                [
                    (name, row.parameter, f"{row.low:.1%}", f"{row.high:.1%}")
                    for name, row in widest
                ],
            ),
        ]
    if report.returned:
        parts += ["What comes back:", _table(*returned_rows(report.returned))]
    parts += [
        "How far models are from what they model:",
        _table(
            ("policy", "figure", "published", "simulated", "off"),
            [figure.cells for figure in report.published],
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
