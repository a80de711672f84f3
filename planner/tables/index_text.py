"""The index of a table of schedules as text for a reader."""

from schedules.tables.file import Index, Row


def index_markdown(index: Index) -> str:
    """The index as a Markdown table with aligned columns, and a line that explains it."""
    head = ("failures", "period s", "throughput", "fault-scaled", "gap", "status", "roles down", "key")
    lines = [head, *(_cells(row) for row in index.entries)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    left = (5, 6, 7)
    text = ["| " + " | ".join(cell.ljust(width) if column in left else cell.rjust(width)
                              for column, (cell, width) in enumerate(zip(line, widths, strict=True))) + " |"
            for line in lines]
    rule = "|" + "|".join("-" * (width + 1) + ("-" if column in left else ":") for column, width in
                          enumerate(widths)) + "|"
    basis = index.basis
    title = f"# {basis.job}: {basis.grid.pipelines} pipelines x {basis.grid.columns} stages"
    about = (f"Planned by {basis.method}, {basis.backward} backward, {basis.optimizer} optimizer, "
             f"{basis.time_limit:g} s an entry. Throughput is relative to\nfault-free; fault-scaled is the share of "
             "workers that are left; the gap is how far the period\ncan at most be from the best possible for these "
             "roles.")
    return "\n".join([title, "", about, "", text[0], rule, *text[1:]]) + "\n"


def _cells(row: Row) -> tuple[str, ...]:
    roles = " ".join(map(str, row.failed)) or "-"
    roles = roles if len(roles) <= 60 else roles[:roles.rindex(" ", 0, 57)] + " ..."
    if row.period is None or row.throughput is None or row.fault_scaled is None or row.gap is None:
        return (str(row.failures), "-", "-", "-", "-", f"no plan: {row.reason}", roles, row.key)
    return (str(row.failures), f"{row.period:.6g}", f"{row.throughput:.2%}", f"{row.fault_scaled:.2%}",
            f"{row.gap:.2%}", row.status, roles, row.key)
