"""Define the files of a table of schedules, and read them with digests verified.

index.json          the job that the table is for; one row per entry; digests of all other files
index.md            the rows in readable form
job.toml            the job file
programs.json.gz    every program of all entries, once
entries/KEY.json    one schedule: its workers in order, each with the number of its program
"""

import hashlib
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from slipstream.schedules.codec import MAX_OPS, require_op_limit, validate
from slipstream.schedules.document import DocumentError, DocumentKind
from slipstream.schedules.files import read_at_most
from slipstream.schedules.grid import Natural, Ticks, TickSeconds
from slipstream.schedules.schedule import (
    BackwardMode,
    Grid,
    LayerRange,
    Memory,
    OptimizerMode,
    Program,
    Schedule,
    Scope,
    Seat,
    Status,
    Times,
    Worker,
    with_pipeline_numbers,
)

VERSION = 2
OLDER_VERSIONS = (1,)
"""Older versions that can be read; version 1 has neither slices nor held layers."""
INDEX = "index.json"
READABLE_INDEX = "index.md"
JOB = "job.toml"
PROGRAMS = "programs.json.gz"
ENTRIES = "entries"
MAX_INDEX_BYTES = 64 * 2**20
MAX_PROGRAMS_BYTES = 512 * 2**20
"""Largest size of a table's programs in bytes when decompressed."""


class TableError(DocumentError):
    """Error of one line for a table that cannot be used."""


class Basis(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True
):
    """Values that all entries of a table share: the job in ticks, and planning options."""

    job: str
    tick_seconds: TickSeconds
    grid: Grid
    times: Times
    memory: Memory | None
    backward: BackwardMode
    optimizer: OptimizerMode
    method: str
    time_limit: float
    """Seconds of planning for each entry."""
    seed: int
    steps: int | None = None
    """Search steps of planning for each entry; if given, they replace `time_limit`."""
    params: dict[str, Any] = {}
    """Search parameters that differ from the defaults."""

    @property
    def default_costs(self) -> "EntryCosts":
        """Slices, times, memory and tick length of entries that have none of their own."""
        return EntryCosts(
            tick_seconds=self.tick_seconds, slices=(), times=self.times, memory=self.memory
        )


class EntryCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Slices, times, memory and tick length of a single entry of a table.

    An entry has its own only if they differ from those that all entries share (`Basis`): if it has
    slices or finer ticks, or if a slow worker is down in it.
    """

    tick_seconds: TickSeconds
    slices: tuple[LayerRange, ...]
    times: Times
    memory: Memory | None


class TableEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Schedule for some failures, in the form in which a table stores it."""

    key: str
    failed: tuple[Worker, ...]
    period_ticks: Ticks
    lower_bound_ticks: Ticks
    status: Status
    method: str
    seats: tuple[tuple[Natural, ...], ...]
    """Program of each live worker, sorted by worker.

    A program is given by its number in the table, followed by the other pipelines whose
    micro-batches it runs.
    """
    holds: tuple[tuple[LayerRange, ...] | None, ...] = ()
    """Held layers of each live worker, sorted by worker; None: those of its role's column.

    Empty if all are None.
    """
    costs: EntryCosts | None = None
    """Slices, times, memory and tick length of this schedule; None: those of the basis."""
    bound_scope: Scope | msgspec.UnsetType = msgspec.UNSET
    """Scope of the lower bound, as in `Schedule.bound_scope`."""
    roles: tuple[Worker, ...] | msgspec.UnsetType = msgspec.UNSET
    """Role of each live worker, sorted by worker; unset if all workers play their own."""

    def tick_seconds(self, basis: Basis) -> float:
        """Return the seconds of a tick of this entry's schedule."""
        return (self.costs or basis.default_costs).tick_seconds


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Line of a table's index about the schedule of one entry; durations are in seconds."""

    key: str
    failures: int
    failed: tuple[Worker, ...]
    """Roles that are vacant in the stored schedule."""
    status: str
    """`optimal`, `feasible`, or `no plan`, which has a `reason` and no figures."""
    period: float | None = None
    lower_bound: float | None = None
    gap: float | None = None
    throughput: float | None = None
    """Throughput relative to the job without failures: period without failures / period."""
    fault_scaled: float | None = None
    """Share of all workers that are live."""
    reason: str | None = None
    nodes: tuple[tuple[int, ...], ...] = ()
    """Sets of nodes (machines) whose loss the entry is for, in a table by node."""
    layers_moved: int | None = None
    """Number of layers that workers load, summed over workers; None unless rebalanced."""
    bytes_moved: float | None = None
    """Bytes of all layers that workers load; None if weights are unknown, or not rebalanced."""
    seconds_to_move: float | None = None
    """Seconds to load these layers at the table's bandwidth; None where `bytes_moved` is."""
    sha256: str | None = None
    """SHA-256 digest of the entry's file; None without a plan."""


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Index of a table, `index.json`: what all entries share, and a row for each."""

    format: str = "slipstream.table"
    version: int = VERSION
    sha256: str = ""
    """Digest of the index itself, computed with an empty string here."""
    basis: Basis
    max_failures: int
    exact: bool
    """True if every failure pattern of up to `max_failures` has its own entry."""
    settled: bool = False
    """True if entries for failures have second ones that are rebalanced."""
    job_sha256: str
    programs_sha256: str
    entries: tuple[Row, ...]


class Programs(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All programs of a table, each kept as JSON text until an entry needs it."""

    format: str = "slipstream.programs"
    version: int = VERSION
    programs: tuple[msgspec.Raw, ...]


class EntryDocument(TableEntry, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Contents of the file of one table entry, with the keys `format` and `version`."""

    format: str = "slipstream.entry"
    version: int = VERSION


INDEX_KIND = DocumentKind(
    name="table",
    format="slipstream.table",
    version=VERSION,
    content=Index,
    bulk=("entries",),
    max_bytes=MAX_INDEX_BYTES,
    error=TableError,
    older=OLDER_VERSIONS,
)
PROGRAMS_KIND = DocumentKind(
    name="program",
    format="slipstream.programs",
    version=VERSION,
    content=Programs,
    bulk=("programs",),
    max_bytes=MAX_PROGRAMS_BYTES,
    error=TableError,
    older=OLDER_VERSIONS,
)
ENTRY_KIND = DocumentKind(
    name="entry",
    format="slipstream.entry",
    version=VERSION,
    content=EntryDocument,
    bulk=("seats",),
    max_bytes=MAX_INDEX_BYTES,
    error=TableError,
    older=OLDER_VERSIONS,
)


def sha256_digest(data: bytes) -> str:
    """Return the SHA-256 digest in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def entry_file(key: str) -> str:
    """Return the path of an entry's file in the table's folder.

    A key of over 100 characters is cut off, and ends with its digest.
    """
    # Most file systems limit names to 255 bytes.
    if len(key) > 100:
        key = f"{key[:60]}-{sha256_digest(key.encode())[:32]}"
    return f"{ENTRIES}/{key}.json"


def encode_document(document: Index | Programs | EntryDocument) -> bytes:
    """Encode a file of a table as canonical JSON, one line with a newline.

    The keys `format` and `version` come first. Unset fields, as in entries of earlier versions, are
    left out.
    """
    values = {
        name: value
        for name in type(document).__struct_fields__
        if (value := getattr(document, name)) is not msgspec.UNSET
    }
    return (
        msgspec.json.encode({"format": values["format"], "version": values["version"], **values})
        + b"\n"
    )


def with_digest(index: Index) -> Index:
    """Return a copy of the index with its own digest in `sha256`."""
    blank = msgspec.structs.replace(index, sha256="")
    return msgspec.structs.replace(index, sha256=sha256_digest(encode_document(blank)))


def read_index(folder: Path) -> Index:
    """Read a table's index. Raises TableError if it is unreadable or its digest does not match."""
    path = folder / INDEX
    data = INDEX_KIND.read_bytes(path)
    index = INDEX_KIND.decode(data, str(path))
    # the text whose digest was computed
    blank = data.replace(f'"sha256":"{index.sha256}"'.encode(), b'"sha256":""', 1)
    if sha256_digest(blank) != index.sha256:
        raise TableError(f"{path}: changed since it was written: its digest does not match")
    return index


def read_verified(path: Path, sha256: str | None, limit: int = MAX_INDEX_BYTES) -> bytes:
    """Return the bytes of a table's file, at most `limit`.

    Raises TableError if the file cannot be read or is larger, or if its digest is not `sha256`. If
    that is None, no digest is right.
    """
    data = read_at_most(path, limit, TableError)
    if sha256_digest(data) != sha256:
        raise TableError(f"{path}: not as the index describes it: its digest does not match")
    return data


def decompress(data: bytes, source: str) -> bytes:
    """Decompress gzip data. Raises TableError, whose message names `source`.

    The result may have at most `MAX_PROGRAMS_BYTES`.
    """
    try:
        # At most one byte over the limit, however far the data would unpack.
        inflate = zlib.decompressobj(wbits=31)
        text = inflate.decompress(data, MAX_PROGRAMS_BYTES + 1)
    except zlib.error as error:
        raise TableError(f"{source}: not readable as gzip: {error}") from None
    if len(text) > MAX_PROGRAMS_BYTES:
        raise TableError(f"{source}: unpacks to more than {MAX_PROGRAMS_BYTES} bytes")
    if not inflate.eof:
        raise TableError(f"{source}: truncated")
    return text


def compress(data: bytes) -> bytes:
    """Compress data as gzip; equal data gives equal bytes."""
    deflate = zlib.compressobj(9, wbits=31)
    return deflate.compress(data) + deflate.flush()


# --- Schedules as entries, and back ---------------------------------------------------------------


def encode_entry(
    key: str, schedule: Schedule, basis: Basis, numbers: dict[bytes, int]
) -> TableEntry:
    """Return a schedule as the table entry with this key.

    `basis` has what all entries share. `numbers` has the number in the table of each program, by
    its JSON text; new programs are added. Raises TableError if the schedule is too large to be read
    again.
    """
    try:
        require_op_limit(schedule)
    except ValueError as error:
        raise TableError(f"entry {key}: too large for a table: {error}") from None
    # Programs that differ only in the pipelines that they help are stored once.
    texts = [_stored_text(program) for program in schedule.programs]
    seats = []
    for seat in schedule.seats:
        text, helped = texts[seat.program]
        seats.append((numbers.setdefault(text, len(numbers)), *helped))
    holds = tuple(seat.holds for seat in schedule.seats)
    moved = any(ranges is not None for ranges in holds)
    roles = tuple(seat.role for seat in schedule.seats)
    # Most entries have the costs of the basis, and do not repeat them.
    costs = EntryCosts(
        tick_seconds=schedule.tick_seconds,
        slices=schedule.slices,
        times=schedule.times,
        memory=schedule.memory,
    )
    return TableEntry(
        key=key,
        failed=schedule.failed,
        period_ticks=schedule.period_ticks,
        status=schedule.status,
        lower_bound_ticks=schedule.lower_bound_ticks,
        method=schedule.method,
        seats=tuple(seats),
        holds=holds if moved else (),
        costs=None if costs == basis.default_costs else costs,
        bound_scope=schedule.bound_scope,
        roles=roles if schedule.moves else msgspec.UNSET,
    )


def _stored_text(program: Program) -> tuple[bytes, tuple[int, ...]]:
    """Return a program's JSON text, and the other pipelines that it names by index."""
    helped = tuple(dict.fromkeys(op.pipeline for op in program if op.pipeline is not None))
    return msgspec.json.encode(
        with_pipeline_numbers(program, {pipeline: index for index, pipeline in enumerate(helped)})
    ), helped


def decode_entry(
    entry: TableEntry, basis: Basis, programs: Sequence[bytes | msgspec.Raw]
) -> Schedule:
    """Decode the schedule of a table's entry.

    `basis` has what all entries share, and `programs` all programs of the table, by number. Raises
    TableError if the entry is malformed.
    """
    try:
        schedule = _schedule_of(entry, basis, programs)
        validate(schedule)
        return schedule
    except (ValueError, LookupError) as error:  # msgspec.DecodeError is a ValueError
        raise TableError(
            f"entry {entry.key}: not readable: {' '.join(str(error).split())[:200]}"
        ) from None


_PROGRAM: msgspec.json.Decoder[Program] = msgspec.json.Decoder(Program)


def _schedule_of(
    entry: TableEntry, basis: Basis, programs: Sequence[bytes | msgspec.Raw]
) -> Schedule:
    """Build an entry's schedule, perhaps invalid. Raises ValueError and LookupError."""
    down = set(entry.failed)
    live = [worker for worker in basis.grid.workers() if worker not in down]
    # A schedule has its own programs, in the order in which its seats first use them.
    order: dict[tuple[int, ...], int] = {}
    holds = entry.holds or [None] * len(live)
    roles = live if entry.roles is msgspec.UNSET else entry.roles
    seats = tuple(
        Seat(worker, role, order.setdefault(stored, len(order)), ranges)
        for worker, role, stored, ranges in zip(live, roles, entry.seats, holds, strict=True)
    )
    # A small file must not unpack to more ops than a schedule may have.
    decoded: dict[int, Program] = {}
    lengths = 0
    for number, *_ in order:
        if number not in decoded:
            decoded[number] = _PROGRAM.decode(programs[number])
            lengths += len(decoded[number])
            if lengths > MAX_OPS:
                raise ValueError(f"more than {MAX_OPS} ops")
    costs = entry.costs or basis.default_costs
    return Schedule(
        job=basis.job,
        tick_seconds=costs.tick_seconds,
        grid=basis.grid,
        slices=costs.slices,
        times=costs.times,
        memory=costs.memory,
        backward=basis.backward,
        optimizer=basis.optimizer,
        failed=entry.failed,
        seats=seats,
        programs=tuple(with_pipeline_numbers(decoded[number], helped) for number, *helped in order),
        period_ticks=entry.period_ticks,
        lower_bound_ticks=entry.lower_bound_ticks,
        status=entry.status,
        method=entry.method,
        bound_scope=entry.bound_scope,
    )
