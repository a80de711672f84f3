"""The tables of the benchmark in Markdown, for documents that state its figures."""

from collections.abc import Sequence

from slipstream.cli.drawing.benchmark_page import HEAD, shown, table_rows
from slipstream.cli.fleet import CaseResult, Fidelity, Returned

COLUMNS = (0, 1, 2, 5)
"""Of the page's table those that a narrow one has room for."""
PARAMETERS = 4
"""The widest so many, of what parameters change."""


def benchmark_markdown(results: Sequence[CaseResult], fidelity: Sequence[Fidelity], back: Sequence[Returned]) -> str:
    """What each policy makes in each case, which parameters matter most, what comes back, how near models are."""
    parts = []
    for result in results:
        parts += [f"**{result.case.name}**: {result.case.title}; {len(result.policies[0].seeds)} seeds",
                  _table([HEAD[column] for column in COLUMNS],
                         [[cells[column] for column in COLUMNS] for _, cells in table_rows(result)])]
    widest = [(result.case.name, row) for result in results for row in result.sensitivity[:PARAMETERS]]
    if widest:
        parts.append(_table(("case", "parameter", "goodput at the first", "at the second"), [
            (name, row.parameter, f"{row.low:.1%}", f"{row.high:.1%}") for name, row in widest]))
    if back:
        parts.append(_table(
            ("case", "policy", "of the time it lacks", "ETTR that slipstream brings back", "kept of its own, likewise"),
            [(one.case, one.policy, shown(one.missing), shown(one.back), shown(one.kept)) for one in back]))
    parts.append(_table(("policy", "figure", "published", "simulated", "off"), [
        (one.policy, one.what, f"{one.published:.4g}", f"{one.simulated:.4g}", f"{one.off:+.1%}") for one in fidelity]))
    return "\n\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
