"""A table while it is built: finished entries lie in `parts/`, one file each, until all are there and are packed.

A part is self-contained and carries its digest and what it was planned for, so that a build that was killed goes on
where it stopped, and a part of another job or of other options is refused rather than mixed in.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from schedules.document import DocumentKind
from schedules.files import write_atomically
from schedules.schedule import Schedule, Worker
from schedules.tables.file import (
    ENTRIES,
    INDEX,
    JOB,
    MAX_PROGRAMS_BYTES,
    PROGRAMS,
    READABLE_INDEX,
    VERSION,
    Basis,
    Entry,
    EntryDocument,
    Index,
    Programs,
    Row,
    TableError,
    digest,
    encode_document,
    entry_file,
    pack,
    read_index,
    sealed,
    store,
    unpack,
)
from schedules.tables.table import Table

PARTS = "parts"


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A finished entry: its schedule with its own programs, or the reason why there is none."""

    format: str = "slipstream.part"
    version: int = VERSION
    sha256: str = ""
    """Of this part, with an empty text in place of the digest."""
    basis: Basis
    entry: Entry
    programs: tuple[msgspec.Raw, ...]
    failures: int
    reason: str | None = None
    """Why no plan can exist; then the entry has no workers."""


_KIND = DocumentKind(name="part", format="slipstream.part", version=VERSION, content=Part,
                     bulk=("programs", "entry"), max_bytes=MAX_PROGRAMS_BYTES, error=TableError)


def make_part(basis: Basis, key: str, schedule: Schedule) -> Part:
    """The part of a schedule."""
    numbers: dict[bytes, int] = {}
    entry = store(key, schedule, numbers)
    return Part(basis=basis, entry=entry, programs=tuple(msgspec.Raw(text) for text in numbers),
                failures=len(schedule.failed))


def no_plan(basis: Basis, key: str, failed: tuple[Worker, ...], reason: str, *, failures: int) -> Part:
    """The part of an entry for which no plan can exist."""
    entry = Entry(key=key, failed=failed, period_ticks=0, lower_bound_ticks=0, status="feasible", method=basis.method,
                  seats=())
    return Part(basis=basis, entry=entry, programs=(), failures=failures, reason=reason)


def encode_part(part: Part) -> bytes:
    """The bytes of a part's file, digest included."""
    part = msgspec.structs.replace(part, sha256="")
    return pack(msgspec.json.encode(msgspec.structs.replace(part, sha256=digest(msgspec.json.encode(part)))))


def decode_part(data: bytes, source: str) -> Part:
    """Read a part. Raises TableError, also when its digest is not its own."""
    part = _KIND.decode(unpack(data, source), source)
    if digest(msgspec.json.encode(msgspec.structs.replace(part, sha256=""))) != part.sha256:
        raise TableError(f"{source}: changed since it was written: its digest does not match")
    return part


class TableFolder:
    """The folder of a table, finished or not."""

    def __init__(self, path: Path, basis: Basis) -> None:
        """Raises TableError when the folder holds a table of another job or other options, or a damaged one."""
        self._path = path
        self._basis = basis
        self._table: Table | None = None
        if (path / INDEX).exists():
            self._require_same(read_index(path).basis, path / INDEX)
            self._table = Table.load(path)
        self._finished = {self._read_part(part).entry.key for part in self._parts()}

    def published(self, keys: Sequence[str]) -> Index | None:
        """The index of the finished table, if it has just these entries."""
        if self._table is None or [row.key for row in self._table.rows()] != list(keys):
            return None
        return self._table.index

    def open(self) -> frozenset[str]:
        """Make ready for more entries; the keys of those that are there. Raises OSError, TableError."""
        (self._path / PARTS).mkdir(parents=True, exist_ok=True)
        if self._table is not None:
            for row in self._table.rows():
                if row.key not in self._finished:
                    self.keep(self._unpublished(self._table, row))
            (self._path / INDEX).unlink()
            self._table = None
        return frozenset(self._finished)

    def keep(self, part: Part) -> None:
        """Write the file of a finished entry. Raises OSError."""
        write_atomically(self._part_path(part.entry.key), encode_part(part))
        self._finished.add(part.entry.key)

    def publish(self, keys: Sequence[str], job_text: bytes, *, max_failures: int, exact: bool) -> Index:
        """Pack the entries of these keys, all finished, into a table in this order; the first one is fault-free.

        The index is written last: until then a reader meets no table. Raises OSError, TableError.
        """
        numbers: dict[bytes, int] = {}
        files: dict[str, bytes] = {}
        rows: list[Row] = []
        fault_free = 0
        for key in keys:
            part = self._read_part(self._part_path(key))
            fault_free = fault_free or part.entry.period_ticks
            row = _row(part, fault_free)
            if part.reason is None:
                files[entry_file(key)] = data = encode_document(_document(part, numbers))
                row = msgspec.structs.replace(row, sha256=digest(data))
            rows.append(row)
        programs = pack(encode_document(Programs(programs=tuple(msgspec.Raw(text) for text in numbers))))
        index = sealed(Index(basis=self._basis, max_failures=max_failures, exact=exact, job_sha256=digest(job_text),
                             programs_sha256=digest(programs), entries=tuple(rows)))
        files |= {JOB: job_text, PROGRAMS: programs, READABLE_INDEX: readable(index).encode()}
        for name, data in files.items():
            write_atomically(self._path / name, data)
        for path in (self._path / ENTRIES).iterdir():
            if f"{ENTRIES}/{path.name}" not in files:
                path.unlink()  # of a larger table that was here before
        write_atomically(self._path / INDEX, encode_document(index))
        shutil.rmtree(self._path / PARTS, ignore_errors=True)
        return index

    def size(self) -> int:
        """Bytes of all files of the finished table."""
        files = [self._path / name for name in (INDEX, READABLE_INDEX, JOB, PROGRAMS)]
        return sum(path.stat().st_size for path in (*files, *(self._path / ENTRIES).iterdir()))

    def _unpublished(self, table: Table, row: Row) -> Part:
        if row.reason is not None:
            return no_plan(self._basis, row.key, row.failed, row.reason, failures=row.failures)
        return make_part(self._basis, row.key, table.entry(row.key))

    def _part_path(self, key: str) -> Path:
        return self._path / PARTS / (Path(entry_file(key)).name + ".gz")

    def _parts(self) -> list[Path]:
        folder = self._path / PARTS
        return sorted(path for path in folder.iterdir() if path.name[0] != ".") if folder.is_dir() else []

    def _read_part(self, path: Path) -> Part:
        part = decode_part(_KIND.read_bytes(path), str(path))
        self._require_same(part.basis, path)
        if self._part_path(part.entry.key) != path:
            raise TableError(f"{path}: holds entry {part.entry.key[:80]!r}")
        return part

    def _require_same(self, basis: Basis, path: Path) -> None:
        for name in Basis.__struct_fields__:
            theirs, ours = getattr(basis, name), getattr(self._basis, name)
            if theirs != ours:
                what = f"its {name} is {theirs}, not {ours}" if isinstance(ours, str | int | float) else \
                    f"its {name} differ{'' if name.endswith('s') else 's'}"
                raise TableError(f"{path}: of another job or other options: {what}; remove it, or choose another "
                                 "folder")


def _document(part: Part, numbers: dict[bytes, int]) -> EntryDocument:
    """The entry with the numbers that its programs have in the whole table; `numbers` learns new ones."""
    number = [numbers.setdefault(bytes(text), len(numbers)) for text in part.programs]
    fields = msgspec.structs.asdict(part.entry)
    fields["seats"] = tuple((number[program], *helped) for program, *helped in part.entry.seats)
    return EntryDocument(**fields)


def _row(part: Part, fault_free: int) -> Row:
    entry, grid, tick = part.entry, part.basis.grid, part.basis.tick_seconds
    if part.reason is not None:
        return Row(key=entry.key, failures=part.failures, failed=entry.failed, status="no plan", reason=part.reason)
    period, bound, workers = entry.period_ticks, entry.lower_bound_ticks, grid.pipelines * grid.columns
    return Row(key=entry.key, failures=part.failures, failed=entry.failed, status=entry.status, period=period * tick,
               lower_bound=bound * tick, gap=period / bound - 1 if bound else 0.0, throughput=fault_free / period,
               fault_scaled=(workers - part.failures) / workers)


def readable(index: Index) -> str:
    """The index as a table in Markdown, columns aligned."""
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
