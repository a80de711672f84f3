"""The files of a table of schedules: what they hold, their JSON, and reading them with their digests verified.

    index.json          what the table is for, and one row an entry, with the digest of every other file
    index.md            the rows for a person
    job.toml            the job file
    programs.json.gz    every program of all entries, once
    entries/KEY.json    one schedule: its workers in order, each with the number of its program

Only what differs from entry to entry is in an entry. The program of a worker that helps other pipelines names them by
position in a list that the entry gives for each worker, so that equal helpers of different pipelines share a program.
"""

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from schedules.codec import MAX_OPS, validate
from schedules.document import DocumentError, DocumentKind
from schedules.files import read_at_most
from schedules.schedule import (
    BackwardMode,
    Grid,
    Memory,
    OptimizerMode,
    Program,
    ProgramOp,
    Schedule,
    Seat,
    Status,
    Times,
    Worker,
)

VERSION = 1
INDEX = "index.json"
READABLE_INDEX = "index.md"
JOB = "job.toml"
PROGRAMS = "programs.json.gz"
ENTRIES = "entries"
MAX_INDEX_BYTES = 64 * 2**20
MAX_PROGRAMS_BYTES = 512 * 2**20
"""Of the unpacked programs."""


class TableError(DocumentError):
    """A table that cannot be used. The message is one line."""


class Basis(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What all entries of a table have in common: the job in ticks, and how it was planned."""

    job: str
    tick_seconds: float
    grid: Grid
    times: Times
    memory: Memory | None
    backward: BackwardMode
    optimizer: OptimizerMode
    method: str
    time_limit: float
    """Seconds an entry."""
    seed: int


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One schedule. Every live worker plays its own role."""

    key: str
    failed: tuple[Worker, ...]
    period_ticks: int
    lower_bound_ticks: int
    status: Status
    method: str
    seats: tuple[tuple[Annotated[int, msgspec.Meta(ge=0)], ...], ...]
    """For each live worker, ascending: its program, then the pipelines that the program names by position."""


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An entry in the index; durations in seconds."""

    key: str
    failures: int
    failed: tuple[Worker, ...]
    """The roles that are down in the stored schedule."""
    status: str
    """`optimal`, `feasible`, or `no plan`; then `reason` says why and the figures are absent."""
    period: float | None = None
    lower_bound: float | None = None
    gap: float | None = None
    throughput: float | None = None
    """Fault-free period / period."""
    fault_scaled: float | None = None
    """Live workers / all workers: the throughput of a system that loses just what it lost."""
    reason: str | None = None
    sha256: str | None = None
    """Of the entry's file."""


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The index of a table."""

    format: str = "slipstream.table"
    version: int = VERSION
    sha256: str = ""
    """Of this index, with an empty text in place of the digest."""
    basis: Basis
    max_failures: int
    exact: bool
    """Whether every pattern of up to `max_failures` has an entry of its own."""
    job_sha256: str
    programs_sha256: str
    entries: tuple[Row, ...]


class Programs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All programs of a table, each left as text until it is needed."""

    format: str = "slipstream.programs"
    version: int = VERSION
    programs: tuple[msgspec.Raw, ...]


class EntryDocument(Entry, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An entry as it stands in a file."""

    format: str = "slipstream.entry"
    version: int = VERSION


INDEX_KIND = DocumentKind(name="table", format="slipstream.table", version=VERSION, content=Index, bulk=("entries",),
                          max_bytes=MAX_INDEX_BYTES, error=TableError)
PROGRAMS_KIND = DocumentKind(name="program", format="slipstream.programs", version=VERSION, content=Programs,
                             bulk=("programs",), max_bytes=MAX_PROGRAMS_BYTES, error=TableError)
ENTRY_KIND = DocumentKind(name="entry", format="slipstream.entry", version=VERSION, content=EntryDocument,
                          bulk=("seats",), max_bytes=MAX_INDEX_BYTES, error=TableError)


def digest(data: bytes) -> str:
    """SHA-256 in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def entry_file(key: str) -> str:
    """Where an entry lies in the table's folder; keys too long for a file name are shortened by their digest."""
    return f"{ENTRIES}/{key if len(key) <= 100 else key[:60] + '-' + digest(key.encode())[:32]}.json"


def encode_document(document: Index | Programs | EntryDocument) -> bytes:
    """Canonical JSON, one line, newline at the end; `format` and `version` come first."""
    fields = {name: getattr(document, name) for name in type(document).__struct_fields__}
    return msgspec.json.encode({"format": fields["format"], "version": fields["version"], **fields}) + b"\n"


def sealed(index: Index) -> Index:
    """The index with its own digest."""
    blank = msgspec.structs.replace(index, sha256="")
    return msgspec.structs.replace(index, sha256=digest(encode_document(blank)))


def read_index(folder: Path) -> Index:
    """The index of a table. Raises TableError, also when its digest is not its own."""
    path = folder / INDEX
    index = INDEX_KIND.decode(INDEX_KIND.read_bytes(path), str(path))
    if sealed(index).sha256 != index.sha256:
        raise TableError(f"{path}: changed since it was written: its digest does not match")
    return index


def read_verified(path: Path, sha256: str | None, limit: int = MAX_INDEX_BYTES) -> bytes:
    """The bytes of a file of a table. Raises TableError when it cannot be read or its digest is not the given one."""
    data = read_at_most(path, limit, TableError)
    if digest(data) != sha256:
        raise TableError(f"{path}: not as the index describes it: its digest does not match")
    return data


def unpack(data: bytes, source: str) -> bytes:
    """Decompress gzip, `MAX_PROGRAMS_BYTES` at most. Raises TableError."""
    try:
        inflate = zlib.decompressobj(wbits=31)
        text = inflate.decompress(data, MAX_PROGRAMS_BYTES + 1)
    except zlib.error as error:
        raise TableError(f"{source}: not readable as gzip: {error}") from None
    if len(text) > MAX_PROGRAMS_BYTES:
        raise TableError(f"{source}: unpacks to more than {MAX_PROGRAMS_BYTES} bytes")
    if not inflate.eof:
        raise TableError(f"{source}: truncated")
    return text


def pack(data: bytes) -> bytes:
    """Compress as gzip; equal data gives equal bytes."""
    deflate = zlib.compressobj(9, wbits=31)
    return deflate.compress(data) + deflate.flush()


# --- Between schedules and entries ------------------------------------------------------------------------------------


def store(key: str, schedule: Schedule, numbers: dict[bytes, int]) -> Entry:
    """The entry of a schedule. `numbers` maps the text of each known program to its number, and learns new ones."""
    texts = [_stored(program) for program in schedule.programs]
    seats = []
    for seat in schedule.seats:
        text, helped = texts[seat.program]
        seats.append((numbers.setdefault(text, len(numbers)), *helped))
    return Entry(key=key, failed=schedule.failed, period_ticks=schedule.period_ticks, status=schedule.status,
                 lower_bound_ticks=schedule.lower_bound_ticks, method=schedule.method, seats=tuple(seats))


def _stored(program: Program) -> tuple[bytes, tuple[int, ...]]:
    """The text of a program with the pipelines it helps numbered by first use, and these pipelines."""
    position: dict[int, int] = {}
    ops = [op if op.pipeline is None else
           ProgramOp(op.kind, op.stage, op.microbatch, op.start_ticks, position.setdefault(op.pipeline, len(position)))
           for op in program]
    return msgspec.json.encode(ops), tuple(position)


def restore(entry: Entry, basis: Basis, programs: Sequence[bytes | msgspec.Raw]) -> Schedule:
    """The schedule of an entry. Raises TableError when it is not well-formed."""
    try:
        schedule = _restored(entry, basis, programs)
        validate(schedule)
        return schedule
    except (ValueError, LookupError) as error:  # msgspec.DecodeError is a ValueError
        raise TableError(f"entry {entry.key}: not readable: {' '.join(str(error).split())[:200]}") from None


def _restored(entry: Entry, basis: Basis, programs: Sequence[bytes | msgspec.Raw]) -> Schedule:
    down = set(entry.failed)
    live = [worker for worker in basis.grid.workers() if worker not in down]
    order: dict[tuple[int, ...], int] = {}
    seats = tuple(Seat(worker, worker, order.setdefault(stored, len(order)))
                  for worker, stored in zip(live, entry.seats, strict=True))
    decoded: dict[int, Program] = {}
    lengths = 0
    for number, *_ in order:
        if number not in decoded:
            decoded[number] = msgspec.json.decode(programs[number], type=Program)
            lengths += len(decoded[number])
            if lengths > MAX_OPS:
                raise ValueError(f"more than {MAX_OPS} ops")
    return Schedule(job=basis.job, tick_seconds=basis.tick_seconds, grid=basis.grid, times=basis.times,
                    memory=basis.memory, backward=basis.backward, optimizer=basis.optimizer, failed=entry.failed,
                    seats=seats, programs=tuple(_named(decoded[number], helped) for number, *helped in order),
                    period_ticks=entry.period_ticks, lower_bound_ticks=entry.lower_bound_ticks, status=entry.status,
                    method=entry.method)


def _named(program: Program, helped: Sequence[int]) -> Program:
    """A stored program with the pipelines it helps in place of their positions."""
    if not helped:
        return program
    return tuple(op if op.pipeline is None else
                 ProgramOp(op.kind, op.stage, op.microbatch, op.start_ticks, helped[op.pipeline]) for op in program)
