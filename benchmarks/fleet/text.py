"""The tables of the benchmark in Markdown, for documents that state its figures."""

from collections.abc import Sequence

from benchmarks.fleet.cases import Report
from benchmarks.fleet.page import by_case, goodput, returned_rows, shown

COLUMNS = (0, 1, 2, 5)
"""Of the page's table those that a narrow one has room for."""
PARAMETERS = 4
"""The widest so many, of what parameters change."""


def benchmark_markdown(report: Report) -> str:
    """What each policy makes in each case, which parameters matter most, what comes back, how near models are."""
    parts = ["\n".join(f"- **{one.case.name}**: {one.case.title}; seeds: {one.seeds}" for one in report.cases)]
    for name, of in (("Goodput", goodput), ("ETTR", lambda measures: measures.ettr)):
        rows = [(policy, *("" if one is None else shown(one) for one in spreads)) for policy, spreads in
                by_case(report, of)]
        parts += [f"{name}:", _table(("policy", *(one.case.name for one in report.cases)), rows)]
    widest = [(result.case.name, row) for result in report.cases for row in result.sensitivity[:PARAMETERS]]
    if widest:
        parts += ["Which parameter matters, by goodput of slipstream:",
                  _table(("case", "parameter", "at the first", "at the second"), [
                      (name, row.parameter, f"{row.low:.1%}", f"{row.high:.1%}") for name, row in widest])]
    if report.returned:
        parts += ["What comes back:", _table(*returned_rows(report.returned))]
    parts += ["How far models are from what they model:", _table(
        ("policy", "figure", "published", "simulated", "off"), [one.cells for one in report.published])]
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
