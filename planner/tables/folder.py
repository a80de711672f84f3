"""Folder of a table during its build, with each finished entry in `parts/`.

A part has all that its entry needs, its digest, and the job and options that it was planned for. So
a build that was killed continues where it stopped, and a part of another job or of other options is
refused.
"""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from slipstream.planner.report import Transition, format_gigabytes
from slipstream.schedules.document import DocumentKind
from slipstream.schedules.files import write_atomically
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.tables.file import (
    ENTRIES,
    INDEX,
    JOB,
    MAX_PROGRAMS_BYTES,
    PROGRAMS,
    READABLE_INDEX,
    VERSION,
    Basis,
    EntryDocument,
    Index,
    Programs,
    Row,
    TableEntry,
    TableError,
    compress,
    decompress,
    encode_document,
    encode_entry,
    entry_file,
    read_index,
    sha256_digest,
    with_digest,
)
from slipstream.schedules.tables.pattern import roles_key, settled_key
from slipstream.schedules.tables.table import Table

# --- The index as text for a reader ---------------------------------------------------------------


COLUMNS = (
    "failures",
    "answer",
    "period s",
    "throughput",
    "fault-scaled",
    "gap",
    "status",
    "roles down",
    "key",
)
"""Headings of the readable index."""
SETTLED_COLUMNS = ("settled s", "throughput", "settled gap", "GB to move", "s to move")
"""Headings, after the throughput, of the columns on rebalanced schedules in the readable index."""
NODES_COLUMN = "nodes down"
"""Heading before the key in the readable index of a table by node."""
LEFT_ALIGNED = ("answer", "status", "roles down", NODES_COLUMN, "key")
"""Headings of columns of text; all others are numbers."""


def index_markdown(index: Index) -> str:
    """Return a table's index as Markdown: an aligned table, and text that explains it."""
    rows = {row.key: row for row in index.entries}
    by_node = any(row.nodes for row in index.entries)
    settled_columns = SETTLED_COLUMNS if index.settled else ()
    nodes_column = (NODES_COLUMN,) if by_node else ()
    head = (*COLUMNS[:4], *settled_columns, *COLUMNS[4:-1], *nodes_column, COLUMNS[-1])
    lines = [head]
    for row in index.entries:
        # A settled entry is in the line of the entry at once.
        if not row.key.startswith(settled_key("")):
            lines.append(_row_cells(row, rows, by_node=by_node, settled=index.settled))
    # What the columns mean, for a reader who has only this file.
    table = _align_columns(lines)
    basis = index.basis
    title = f"# {basis.job}: {basis.grid.pipelines} pipelines x {basis.grid.columns} stages"
    effort = f"{basis.time_limit:g} s" if basis.steps is None else f"{basis.steps:,} steps"
    about = (
        f"Planned by {basis.method}, {basis.backward} backward, {basis.optimizer} optimizer, "
        f"{effort} an entry. Throughput is relative to\nfault-free; fault-scaled is the share of "
        "workers that are left; the gap is how far the period\ncan at most be from the best "
        "possible for these roles.\nAt once: no layer moves, whichever workers of these stages "
        "fail. Roles moved: for any failures of\nthat number; live workers take over the roles of "
        "the dead that are not down here, and load their\nlayers first."
    )
    if index.settled:
        about += (
            " Settled: with layers moved, which runs when they have\ncome; what moves is where the "
            "roles of that entry, in index.json, are down; s to move at 12.5 GB/s a\nworker."
        )
    if basis.times.slow:
        about += "\nOf key count-N-with-D.S, slow worker D.S is one of the N that are down."
    if by_node:
        about += (
            "\nNodes (machines) are numbered from 0, as [topology] of the job file has them; "
            "0+1: both are lost."
        )
    return "\n".join([title, "", about, "", *table]) + "\n"


def _align_columns(lines: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table with cells of equal width; the first line is its head."""
    head = lines[0]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    are_left = [name in LEFT_ALIGNED for name in head]
    table = []
    for line in lines:
        cells = []
        for cell, width, is_left in zip(line, widths, are_left, strict=True):
            cells.append(cell.ljust(width) if is_left else cell.rjust(width))
        table.append(f"| {' | '.join(cells)} |")
    # Under the head, a colon says that a column is aligned to the right.
    dashes = []
    for width, is_left in zip(widths, are_left, strict=True):
        dashes.append("-" * (width + 1) + ("-" if is_left else ":"))
    return [table[0], f"|{'|'.join(dashes)}|", *table[1:]]


def _row_cells(
    row: Row, rows: Mapping[str, Row], *, by_node: bool, settled: bool
) -> tuple[str, ...]:
    last: tuple[str, ...] = (_shorten_names(map(str, row.failed)), row.key)
    if by_node:
        nodes = _shorten_names("+".join(map(str, numbers)) for numbers in row.nodes)
        last = (last[0], nodes, row.key)
    answer = _settled_cells(rows.get(settled_key(row.key))) if settled else ()
    moves_roles = row.failures and row.key.startswith(("count-", roles_key("")))
    kind = "roles moved" if moves_roles else "at once"
    # An entry without a plan says why.
    if row.period is None or row.throughput is None or row.fault_scaled is None:
        return (
            str(row.failures),
            kind,
            "-",
            "-",
            *answer,
            "-",
            "-",
            f"no plan: {row.reason}",
            *last,
        )
    return (
        str(row.failures),
        kind,
        f"{row.period:.6g}",
        f"{row.throughput:.2%}",
        *answer,
        f"{row.fault_scaled:.2%}",
        "?" if row.gap is None else f"{row.gap:.2%}",
        row.status,
        *last,
    )


def _shorten_names(names: Iterable[str]) -> str:
    """Join names by spaces, shortened to at most 24 characters for the readable index."""
    # Each name has at most 20 characters: it is one worker, or one or two nodes.
    text = " ".join(names) or "-"
    return text if len(text) <= 24 else text[: text.rindex(" ", 0, 21)] + " ..."


def _settled_cells(row: Row | None) -> tuple[str, ...]:
    if row is None or row.period is None or row.throughput is None:
        return ("-",) * len(SETTLED_COLUMNS)
    moved = "?" if row.bytes_moved is None else format_gigabytes(row.bytes_moved)
    seconds = "?" if row.seconds_to_move is None else f"{row.seconds_to_move:.3g}"
    return (
        f"{row.period:.6g}",
        f"{row.throughput:.2%}",
        "?" if row.gap is None else f"{row.gap:.2%}",
        moved,
        seconds,
    )


# --- The folder -----------------------------------------------------------------------------------


PARTS = "parts"
"""Folder of finished entries in a table's folder."""
NodesOfEntry = Mapping[str, tuple[tuple[int, ...], ...]]
"""Sets of nodes whose loss an entry is for, by the entry's key."""
NO_NODES: NodesOfEntry = {}
"""Value of `NodesOfEntry` for a table that is not by node."""


class FinishedPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Finished entry of a table as a file: its schedule, or why it has none."""

    format: str = "slipstream.part"
    version: int = VERSION
    sha256: str = ""
    """SHA-256 digest of this entry's JSON, computed with this field empty."""
    basis: Basis
    entry: TableEntry
    programs: tuple[msgspec.Raw, ...]
    failures: int
    reason: str | None = None
    """Reason why it has no plan; `entry` then has no seats. None: it has one."""
    moved: Transition | None = None
    """Layers to copy, with bytes and seconds. None for an entry in which no layers moved."""


_KIND = DocumentKind(
    name="part",
    format="slipstream.part",
    version=VERSION,
    content=FinishedPart,
    bulk=("programs", "entry"),
    max_bytes=MAX_PROGRAMS_BYTES,
    error=TableError,
)


def make_part(
    basis: Basis, key: str, schedule: Schedule, moved: Transition | None = None
) -> FinishedPart:
    """Return the finished entry of a table with this key and schedule.

    The `basis` has the job and options of the table. The argument `moved` says what must be copied
    if layers moved; None: none moved.
    """
    numbers: dict[bytes, int] = {}
    entry = encode_entry(key, schedule, basis, numbers)
    return FinishedPart(
        basis=basis,
        entry=entry,
        programs=tuple(msgspec.Raw(text) for text in numbers),
        failures=len(schedule.failed),
        moved=moved,
    )


def make_no_plan_part(
    basis: Basis, key: str, failed: tuple[Worker, ...], reason: str, *, failures: int
) -> FinishedPart:
    """Return the finished entry for failures that have no plan.

    Parameters
    ----------
    basis, key
        Job and options of the table, and the entry's key.
    failed
        Failed workers; empty if any workers, as many as `failures`, may be down.
    reason
        Why there is no plan.
    failures
        Number of failures.
    """
    entry = TableEntry(
        key=key,
        failed=failed,
        period_ticks=0,
        lower_bound_ticks=0,
        status="feasible",
        method=basis.method,
        seats=(),
    )
    return FinishedPart(basis=basis, entry=entry, programs=(), failures=failures, reason=reason)


def encode_part(part: FinishedPart) -> bytes:
    """Encode a finished entry of a table as the bytes of its file."""
    part = msgspec.structs.replace(part, sha256="")
    digest = sha256_digest(msgspec.json.encode(part))
    return compress(msgspec.json.encode(msgspec.structs.replace(part, sha256=digest)))


def decode_part(data: bytes, source: str) -> FinishedPart:
    """Decode the file of a finished entry; messages of errors name it `source`.

    Raises TableError if the file is not valid or does not match its digest.
    """
    part = _KIND.decode(decompress(data, source), source)
    digest = sha256_digest(msgspec.json.encode(msgspec.structs.replace(part, sha256="")))
    if digest != part.sha256:
        raise TableError(f"{source}: changed since it was written: its digest does not match")
    return part


class TableFolder:
    """Folder of a table, either finished or with each finished entry as a file."""

    def __init__(self, path: Path, basis: Basis) -> None:
        """Open the folder of a table of this job and these options (`basis`).

        Raises TableError if the folder holds a damaged table or entry, or one of another job or
        other options.
        """
        self._path = path
        self._basis = basis
        self._table: Table | None = None
        if (path / INDEX).exists():
            self._require_same(read_index(path).basis, path / INDEX)
            self._table = Table.load(path)
        self._finished = {self._read_part(part).entry.key for part in self._part_paths()}

    def published_index(self, keys: Sequence[str], nodes: NodesOfEntry = NO_NODES) -> Index | None:
        """Return the index of the finished table. None unless it has exactly these entries.

        The argument `nodes` has the sets of nodes whose loss an entry is for, by the entry's key.
        """
        wanted = [(key, nodes.get(key, ())) for key in keys]
        if self._table is None or [(row.key, row.nodes) for row in self._table.rows()] != wanted:
            return None
        return self._table.index

    def find_published_index(
        self, keys: Sequence[str], nodes: NodesOfEntry = NO_NODES
    ) -> Index | None:
        """Return the index if another process has finished the table meanwhile; else None.

        The arguments are as in `published_index`. If the table is finished, the files of single
        entries are removed. Raises TableError if that table is damaged, or of another job or
        options.
        """
        if not (self._path / INDEX).exists():
            return None
        index = TableFolder(self._path, self._basis).published_index(keys, nodes)
        if index is not None:
            shutil.rmtree(self._path / PARTS, ignore_errors=True)
        return index

    def count_finished(self, keys: Sequence[str]) -> int:
        """Return how many of these entries are finished, by any process."""
        return sum(self._part_path(key).exists() for key in keys)

    def reopen(self) -> frozenset[str]:
        """Prepare the folder for more entries, and return the keys of all finished ones.

        The entries of a finished table become single files again, and its index is removed. Raises
        OSError if they cannot be written, TableError if the table is damaged.
        """
        (self._path / PARTS).mkdir(parents=True, exist_ok=True)
        if self._table is not None:
            for row in self._table.rows():
                if row.key not in self._finished:
                    self.add_part(self._part_of_row(self._table, row))
            (self._path / INDEX).unlink(missing_ok=True)  # another share may have done so
            self._table = None
        return frozenset(self._finished)

    def add_part(self, part: FinishedPart) -> None:
        """Write the file of a finished entry of the table. Raises OSError."""
        write_atomically(self._part_path(part.entry.key), encode_part(part))
        self._finished.add(part.entry.key)

    def read_parts(self, keys: Sequence[str]) -> dict[str, FinishedPart]:
        """Read the finished entries of the table with these keys, by key.

        Raises TableError if a file is missing or damaged, or of another job, options or entry.
        """
        return {key: self._read_part(self._part_path(key)) for key in keys}

    def publish(
        self,
        keys: Sequence[str],
        job_text: bytes,
        *,
        max_failures: int,
        exact: bool,
        settled: bool = False,
        nodes: NodesOfEntry = NO_NODES,
    ) -> Index:
        """Write the table with the entries of these keys, in order, and return its index.

        All entries must be finished, the first one fault-free, and one must have a plan. Files of
        single entries, and those of an earlier table, are removed. Raises OSError if the table
        cannot be written, TableError if the file of an entry is missing or damaged.

        Parameters
        ----------
        job_text, max_failures, exact, settled
            As in `planner.tables.build.build_share`.
        nodes
            Sets of nodes whose loss an entry is for, by the entry's key.
        """
        numbers: dict[bytes, int] = {}
        files: dict[str, bytes] = {}
        rows: list[Row] = []
        fault_free = 0.0
        # Entries refer to their programs by number, since many share one.
        for key in keys:
            part = self._read_part(self._part_path(key))
            fault_free = fault_free or part.entry.period_ticks * part.entry.tick_seconds(part.basis)
            row = msgspec.structs.replace(_index_row(part, fault_free), nodes=nodes.get(key, ()))
            if part.reason is None:
                files[entry_file(key)] = data = encode_document(_entry_document(part, numbers))
                row = msgspec.structs.replace(row, sha256=sha256_digest(data))
            rows.append(row)
        programs = compress(
            encode_document(Programs(programs=tuple(msgspec.Raw(text) for text in numbers)))
        )
        index = with_digest(
            Index(
                basis=self._basis,
                max_failures=max_failures,
                exact=exact,
                settled=settled,
                job_sha256=sha256_digest(job_text),
                programs_sha256=sha256_digest(programs),
                entries=tuple(rows),
            )
        )
        # The index comes last: until then the folder holds no table for a reader.
        files |= {JOB: job_text, PROGRAMS: programs, READABLE_INDEX: index_markdown(index).encode()}
        for name, data in files.items():
            write_atomically(self._path / name, data)
        for path in (self._path / ENTRIES).iterdir():
            if f"{ENTRIES}/{path.name}" not in files:
                path.unlink()  # of a larger table that was here before
        write_atomically(self._path / INDEX, encode_document(index))
        shutil.rmtree(self._path / PARTS, ignore_errors=True)
        return index

    def count_bytes(self) -> int:
        """Return the bytes of all files of the finished table."""
        files = [self._path / name for name in (INDEX, READABLE_INDEX, JOB, PROGRAMS)]
        return sum(path.stat().st_size for path in (*files, *(self._path / ENTRIES).iterdir()))

    def _part_of_row(self, table: Table, row: Row) -> FinishedPart:
        if row.reason is not None:
            return make_no_plan_part(
                self._basis, row.key, row.failed, row.reason, failures=row.failures
            )
        moved = None
        if row.layers_moved is not None:
            moved = Transition(
                layers=row.layers_moved, bytes=row.bytes_moved, seconds=row.seconds_to_move
            )
        return make_part(self._basis, row.key, table.checked_schedule(row.key), moved)

    def _part_path(self, key: str) -> Path:
        return self._path / PARTS / (Path(entry_file(key)).name + ".gz")

    def _part_paths(self) -> list[Path]:
        folder = self._path / PARTS
        if not folder.is_dir():
            return []
        return sorted(path for path in folder.iterdir() if path.name[0] != ".")

    def _read_part(self, path: Path) -> FinishedPart:
        part = decode_part(_KIND.read_bytes(path), str(path))
        self._require_same(part.basis, path)
        # A renamed file would answer other failures than its name says.
        if self._part_path(part.entry.key) != path:
            raise TableError(
                f"{path}: holds entry {part.entry.key[:80]!r}, which does not match its file name"
            )
        return part

    def _require_same(self, basis: Basis, path: Path) -> None:
        """Raise TableError that names `path` unless `basis` equals this folder's."""
        for name in Basis.__struct_fields__:
            theirs, ours = getattr(basis, name), getattr(self._basis, name)
            if theirs == ours:
                continue
            if isinstance(ours, str | int | float):
                what = f"its {name} is {theirs}, not {ours}"
            else:
                what = f"its {name} differ{'' if name.endswith('s') else 's'}"
            raise TableError(
                f"{path}: has another job or other options: {what}; remove it, or choose another "
                "folder"
            )


def _entry_document(part: FinishedPart, numbers: dict[bytes, int]) -> EntryDocument:
    """Return an entry as its file states it; add its new programs to `numbers`."""
    number = [numbers.setdefault(bytes(text), len(numbers)) for text in part.programs]
    fields = msgspec.structs.asdict(part.entry)
    fields["seats"] = tuple((number[program], *helped) for program, *helped in part.entry.seats)
    return EntryDocument(**fields)


def _index_row(part: FinishedPart, fault_free: float) -> Row:
    entry, grid, tick = part.entry, part.basis.grid, part.entry.tick_seconds(part.basis)
    if part.reason is not None:
        return Row(
            key=entry.key,
            failures=part.failures,
            failed=entry.failed,
            status="no plan",
            reason=part.reason,
        )
    # The index is in seconds and shares, so that a reader needs no ticks.
    period, bound = entry.period_ticks, entry.lower_bound_ticks
    workers = grid.pipelines * grid.columns
    return Row(
        key=entry.key,
        failures=part.failures,
        failed=entry.failed,
        status=entry.status,
        period=period * tick,
        lower_bound=bound * tick,
        gap=period / bound - 1 if bound else None,
        throughput=fault_free / (period * tick),
        fault_scaled=(workers - part.failures) / workers,
        layers_moved=part.moved.layers if part.moved else None,
        bytes_moved=part.moved.bytes if part.moved else None,
        seconds_to_move=part.moved.seconds if part.moved else None,
    )
