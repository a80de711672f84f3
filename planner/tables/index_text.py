"""The index of a table of schedules as text for a reader."""

from collections.abc import Iterable, Mapping

from slipstream.schedules.tables.file import Index, Row
from slipstream.schedules.tables.pattern import settled_key

HEAD = ("failures", "period s", "throughput", "fault-scaled", "gap", "status", "roles down", "key")
SETTLED = ("settled s", "throughput", "GB to move", "s to move")
"""Further columns, after the period and the throughput, where the table has settled entries."""
NODES = "nodes down"
"""The column before the key where the table is by node."""
LEFT = ("status", "roles down", NODES, "key")


def index_markdown(index: Index) -> str:
    """The index as a Markdown table with aligned columns, and a line that explains it."""
    rows = {row.key: row for row in index.entries}
    by_node = any(row.nodes for row in index.entries)
    head = (*HEAD[:3], *(SETTLED if index.settled else ()), *HEAD[3:-1], *((NODES,) if by_node else ()), HEAD[-1])
    lines = [head, *(_cells(row, rows, by_node=by_node, settled=index.settled) for row in index.entries
                     if not row.key.startswith(settled_key("")))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    text = ["| " + " | ".join(cell.ljust(width) if name in LEFT else cell.rjust(width)
                              for name, cell, width in zip(head, line, widths, strict=True)) + " |" for line in lines]
    rule = "|" + "|".join("-" * (width + 1) + ("-" if name in LEFT else ":")
                          for name, width in zip(head, widths, strict=True)) + "|"
    basis = index.basis
    title = f"# {basis.job}: {basis.grid.pipelines} pipelines x {basis.grid.columns} stages"
    about = (f"Planned by {basis.method}, {basis.backward} backward, {basis.optimizer} optimizer, "
             f"{basis.time_limit:g} s an entry. Throughput is relative to\nfault-free; fault-scaled is the share of "
             "workers that are left; the gap is how far the period\ncan at most be from the best possible for these "
             "roles.")
    if index.settled:
        about += (" Settled: with layers moved, which runs when they have\ncome; what moves is where the roles of that "
                  "entry, in index.json, are down; s to move at 12.5 GB/s a\nworker.")
    if basis.times.slow:
        about += "\nOf key count-N-with-D.S, slow worker D.S is one of the N that are down."
    if by_node:
        about += ("\nNodes (machines) are numbered from 0, as [topology] of the job file has them; 0+1: both are lost.")
    return "\n".join([title, "", about, "", text[0], rule, *text[1:]]) + "\n"


def _cells(row: Row, rows: Mapping[str, Row], *, by_node: bool, settled: bool) -> tuple[str, ...]:
    nodes = (_shortened("+".join(map(str, chosen)) for chosen in row.nodes),) if by_node else ()
    last = (_shortened(map(str, row.failed)), *nodes, row.key)
    answer = _settled(rows.get(settled_key(row.key))) if settled else ()
    if row.period is None or row.throughput is None or row.fault_scaled is None or row.gap is None:
        return (str(row.failures), "-", "-", *answer, "-", "-", f"no plan: {row.reason}", *last)
    return (str(row.failures), f"{row.period:.6g}", f"{row.throughput:.2%}", *answer, f"{row.fault_scaled:.2%}",
            f"{row.gap:.2%}", row.status, *last)


def _shortened(names: Iterable[str]) -> str:
    """The names in a row, 60 characters at most."""
    text = " ".join(names) or "-"
    return text if len(text) <= 60 else text[:text.rindex(" ", 0, 57)] + " ..."


def _settled(row: Row | None) -> tuple[str, ...]:
    if row is None or row.period is None or row.throughput is None:
        return ("-",) * len(SETTLED)
    moved = "?" if row.bytes_moved is None else f"{row.bytes_moved / 1e9:.3g}"
    seconds = "?" if row.seconds_to_move is None else f"{row.seconds_to_move:.3g}"
    return f"{row.period:.6g}", f"{row.throughput:.2%}", moved, seconds
