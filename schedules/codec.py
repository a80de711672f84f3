"""Read and write schedules as JSON.

The format has versions, and is canonical: a schedule has one text only. Malformed files are refused
with an error of one line. Reading checks only the form: types, lengths, ranges and indices. The
rules of scheduling are checked by `schedules.check`.
"""

import inspect
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from slipstream.schedules.document import DocumentError, DocumentKind
from slipstream.schedules.files import write_atomically
from slipstream.schedules.schedule import (
    MAX_WORKERS,
    Grid,
    LayerRange,
    Memory,
    OpKind,
    ProgramOp,
    Schedule,
    Times,
    Worker,
)

FORMAT = "slipstream.schedule"
VERSION = 2
OLDER_VERSIONS = (1,)
"""Older versions that can be read; version 1 has neither slices nor held layers."""
MAX_FILE_BYTES = 64 * 2**20
MAX_OPS = 2**23
"""Largest number of ops of all workers together.

A file can have many more ops than it lists, because workers share programs.
"""
MAX_NAME = 200
MAX_LAYERS = 2**17
MAX_SLICE_LAYERS = 2**22
"""Largest number of layers of all slices together, and of held ranges of all seats."""


class ScheduleError(DocumentError):
    """Error of one line for a schedule that cannot be read, or is too large."""


class Document(Schedule, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Schedule as stored in a file, with the keys `format` and `version`."""

    format: str = FORMAT
    version: int = VERSION


_FIELDS = Schedule.__struct_fields__
_KIND = DocumentKind(
    name="schedule",
    format=FORMAT,
    version=VERSION,
    content=Document,
    bulk=("programs", "seats"),
    max_bytes=MAX_FILE_BYTES,
    error=ScheduleError,
    older=OLDER_VERSIONS,
)


def encode(schedule: Schedule) -> bytes:
    """Encode a schedule as canonical JSON: one line that ends with a newline.

    Raises ScheduleError if the schedule is too large to be read again.
    """
    try:
        # What is written can be read: the limits of `decode` apply here, too.
        require_op_limit(schedule)
        fields: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        fields |= {
            name: value
            for name in _FIELDS
            if (value := getattr(schedule, name)) is not msgspec.UNSET
        }
        data = msgspec.json.encode(fields) + b"\n"
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"{len(data)} bytes; expected at most {MAX_FILE_BYTES}")
    except ValueError as error:
        raise ScheduleError(f"the schedule is too large for a file: {error}") from None
    return data


def decode(data: bytes, source: str = "schedule") -> Schedule:
    """Decode a schedule file's bytes. Raises ScheduleError, whose message names `source`."""
    document = _KIND.decode(data, source)
    schedule = Schedule(**{name: getattr(document, name) for name in _FIELDS})
    try:
        if document.version == 1:
            _require_version_1(schedule)
        validate(schedule)
    except ValueError as error:
        # a number may have thousands of digits
        raise ScheduleError(f"{source}: {str(error)[:300]}") from None
    return schedule


def read(path: Path) -> Schedule:
    """Read a schedule file. Raises ScheduleError if it cannot be read."""
    return decode(_KIND.read_bytes(path), str(path))


def write(schedule: Schedule, path: Path) -> None:
    """Write a schedule atomically. Raises OSError, or ScheduleError if it is too large."""
    write_atomically(path, encode(schedule))


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a schedule file, as in `schedules/schedule.schema.json`."""
    schema = msgspec.json.schema(Document)
    document = schema["$defs"]["Document"]
    # In the struct, format and version have defaults; a file must have both.
    document["properties"]["format"] = {"const": FORMAT}
    document["properties"]["version"] = {"enum": [*OLDER_VERSIONS, VERSION]}
    document["required"] = [*document["required"], "format", "version"]
    # Releases of msgspec differ in whether they keep the indentation of docstrings.
    for definition in schema["$defs"].values():
        if "description" in definition:
            definition["description"] = inspect.cleandoc(definition["description"])
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Slipstream schedule",
        **schema,
    }


def _require_version_1(schedule: Schedule) -> None:
    """Raise ValueError if a schedule uses keys that version 1 of the format lacks."""
    has_holdings = any(seat.holds is not None for seat in schedule.seats)
    weights = schedule.memory is not None and schedule.memory.weights
    for key, used in (
        ("slices", schedule.slices),
        ("seats: layers held", has_holdings),
        ("memory.weights", weights),
        ("memory.capacity_of", schedule.memory is not None and schedule.memory.capacity_of),
        ("times.optimizer_of_layer", schedule.times.optimizer_of_layer),
        ("times.of_layers", schedule.times.of_layers),
        ("times.overlap", schedule.has_overlap),
        ("bound_scope", schedule.bound_scope),
    ):
        if used:
            raise ValueError(f"{key}: not in version 1 of the format; expected version {VERSION}")


def validate(schedule: Schedule) -> None:
    """Check all lengths and indices of a schedule, as `decode` does.

    The ranges of single numbers are checked by msgspec when a file is read, and the rules of
    scheduling by `schedules.check`. Raises ValueError, whose message names the key and the value.
    """
    for key, text in (("job", schedule.job), ("method", schedule.method)):
        if not text.isprintable() or len(text) > MAX_NAME:
            raise ValueError(
                f"{key} is {text[:MAX_NAME]!r}; expected at most {MAX_NAME} printable characters"
            )
    # The shape of the job comes first: all other lengths follow from it.
    _validate_grid(schedule.grid)
    _validate_slices(schedule)
    _validate_times(schedule.times, schedule)
    if schedule.memory is not None:
        _validate_memory(schedule.memory, schedule)
    # Workers and programs are given by number; each must exist.
    for worker in schedule.failed:
        _require_in_grid("failed", worker, schedule.grid)
    _require_ascending("failed", schedule.failed)
    for seat in schedule.seats:
        _require_in_grid("seats", seat.worker, schedule.grid)
        _require_in_grid("seats", seat.role, schedule.grid)
        if seat.program >= len(schedule.programs):
            raise ValueError(
                f"seats: worker {seat.worker} names program {seat.program} of "
                f"{len(schedule.programs)}"
            )
    _require_ascending("seats", tuple(seat.worker for seat in schedule.seats))
    _validate_holdings(schedule)
    require_op_limit(schedule)
    # Seats share programs, so each program is checked once.
    slices, pipelines = len(schedule.layers_by_slice), schedule.grid.pipelines
    for index, program in enumerate(schedule.programs):
        for position, op in enumerate(program):
            problem = _describe_op_error(op, slices, pipelines)
            if problem is not None:
                raise ValueError(f"programs[{index}][{position}]{problem}")


def require_op_limit(schedule: Schedule) -> None:
    """Raise ValueError if a schedule has more than `MAX_OPS` ops."""
    total = sum(len(schedule.programs[seat.program]) for seat in schedule.seats)
    if total > MAX_OPS:
        raise ValueError(f"the programs of all seats have {total} ops; expected at most {MAX_OPS}")


def _validate_grid(grid: Grid) -> None:
    _require_in_range("grid.columns", grid.columns, 1, MAX_WORKERS // grid.pipelines)
    _require_length("grid.microbatches", grid.microbatches, grid.pipelines, "pipeline")
    _require_in_range("number of grid.stages", len(grid.stages), grid.columns, MAX_WORKERS)
    for stage in grid.stages:
        _require_in_range("grid.stages column", stage.column, 0, grid.columns - 1)
        if stage.layers is not None and not 0 <= stage.layers[0] <= stage.layers[1] <= MAX_LAYERS:
            raise ValueError(
                f"grid.stages layers: {list(stage.layers)} is not a range of layers [first, end)"
            )
    _validate_chains(grid)


def _validate_chains(grid: Grid) -> None:
    """Raise ValueError unless each chain passes all columns, with the layers of the first chain."""
    _require_in_range("grid.chains", grid.chains, 1, len(grid.stages))
    if grid.chains == 1:
        return
    if len(grid.stages) % grid.chains:
        raise ValueError(
            f"grid.chains is {grid.chains}; expected a divisor of the {len(grid.stages)} stages"
        )
    places = {(index // grid.depth, stage.column) for index, stage in enumerate(grid.stages)}
    # Every column takes part in each direction.
    if len(places) < grid.chains * grid.columns:
        raise ValueError(
            f"grid.chains is {grid.chains}; expected each chain to pass all {grid.columns} columns"
        )
    for index, stage in enumerate(grid.stages):
        # Copies reduce their gradients together, so they must have the same layers.
        original = grid.stages[grid.original_stage(index)]
        if stage.layers != original.layers:
            raise ValueError(
                f"grid.stages[{index}] has layers {stage.layers}, its copy in the first chain "
                f"{original.layers}; expected the same"
            )
    if len(
        {(grid.original_stage(index), stage.column) for index, stage in enumerate(grid.stages)}
    ) < len(grid.stages):
        raise ValueError(
            "grid.stages: a column holds two copies of one stage; expected one at most"
        )


def _validate_slices(schedule: Schedule) -> None:
    """Raise ValueError unless slices are distinct ranges of layers."""
    grid, slices = schedule.grid, schedule.slices
    named = any(stage.layers is not None for stage in grid.stages)
    # Unless the named layers are contiguous, each stage counts as one layer
    # (`Grid.layers_by_stage`): slices could then not refer to layers by number.
    contiguous = grid.layers_by_stage == tuple(stage.layers for stage in grid.stages)
    refined = slices or any(seat.holds is not None for seat in schedule.seats)
    if named and not contiguous and refined:
        raise ValueError(
            "grid.stages layers: with slices or layers held, expected those of each chain to "
            "follow each other from 0 on, at least one per stage, or none at all"
        )
    _require_ranges("slices", slices, grid.layer_count)
    for layers, times in Counter(slices).items():
        if times > 1:
            raise ValueError(f"slices: {list(layers)} is given {times} times; expected each once")
    if sum(end - first for first, end in slices) > MAX_SLICE_LAYERS:
        raise ValueError(f"slices: more than {MAX_SLICE_LAYERS} layers together")


def _validate_holdings(schedule: Schedule) -> None:
    """Raise ValueError unless held layers are ascending ranges that do not touch, with costs."""
    layers = schedule.grid.layer_count
    seats = [seat for seat in schedule.seats if seat.holds is not None]
    if sum(len(seat.holds or ()) for seat in seats) > MAX_SLICE_LAYERS:
        raise ValueError(f"seats: more than {MAX_SLICE_LAYERS} ranges of layers held")
    for seat in seats:
        name = f"seats: layers held by worker {seat.worker}"
        _require_ranges(name, seat.holds or (), layers)
        for before, after in pairwise(seat.holds or ()):
            if before[1] >= after[0]:
                raise ValueError(
                    f"{name}: {list(after)} after {list(before)}; expected ascending ranges that "
                    "do not touch"
                )
    # The costs of a column say nothing of a seat with its own layers: costs by layer are needed.
    if seats:
        _require_length(
            "times.optimizer_of_layer", schedule.times.optimizer_of_layer, layers, "layer"
        )
        if schedule.memory is not None:
            _require_length("memory.weights", schedule.memory.weights, layers, "layer")


def _require_ranges(name: str, ranges: Iterable[LayerRange], layers: int) -> None:
    """Raise ValueError unless each range has layers, all below the number `layers`."""
    for first, end in ranges:
        if not 0 <= first < end <= layers:
            raise ValueError(
                f"{name}: [{first}, {end}] is not a range [first, end) of the {layers} layers"
            )


def _validate_times(times: Times, schedule: Schedule) -> None:
    grid = schedule.grid
    # Values by slice come first; then those by column, by layer and by worker.
    for name in ("forward", "backward_input", "backward_weight", "all_reduce"):
        _require_length(
            f"times.{name}",
            getattr(times, name),
            len(schedule.layers_by_slice),
            _slice_unit_text(schedule),
        )
    _require_length("times.optimizer", times.optimizer, grid.columns, "column")
    if times.optimizer_of_layer:
        _require_length(
            "times.optimizer_of_layer", times.optimizer_of_layer, grid.layer_count, "layer"
        )
    for name, values in msgspec.structs.asdict(times.of_layers).items() if times.of_layers else ():
        # These two are units, not lists.
        if name not in ("per_tick", "per_unit"):
            _require_length(f"times.of_layers.{name}", values, grid.layer_count, "layer")
    for slow in times.slow:
        _require_in_grid("times.slow", slow.worker, grid)
    _require_ascending("times.slow", tuple(slow.worker for slow in times.slow))


def _validate_memory(memory: Memory, schedule: Schedule) -> None:
    _require_length("memory.capacity", memory.capacity, schedule.grid.columns, "column")
    for name in ("activation", "weight_stash"):
        _require_length(
            f"memory.{name}",
            getattr(memory, name),
            len(schedule.layers_by_slice),
            _slice_unit_text(schedule),
        )
    if memory.weights:
        _require_length("memory.weights", memory.weights, schedule.grid.layer_count, "layer")
    rooms = memory.capacity_of or ()
    for room in rooms:
        _require_in_grid("memory.capacity_of", room.worker, schedule.grid)
    _require_ascending("memory.capacity_of", tuple(room.worker for room in rooms))


def _slice_unit_text(schedule: Schedule) -> str:
    return "slice, stages first" if schedule.slices else "stage"


def _describe_op_error(op: ProgramOp, slices: int, pipelines: int) -> str | None:
    """Describe what is wrong with a program's op; None if nothing is."""
    if (op.slice is None) != (op.kind is OpKind.O):
        return f": {op.kind} {'needs a' if op.slice is None else 'takes no'} slice"
    if op.slice is not None and op.slice >= slices:
        return f" slice is {op.slice}; expected 0 to {slices - 1}"
    of_microbatch = op.kind is not OpKind.A and op.kind is not OpKind.O
    if (op.microbatch is not None) != of_microbatch:
        return f": {op.kind} {'needs a' if of_microbatch else 'takes no'} micro-batch"
    if op.pipeline is not None and not of_microbatch:
        return f": {op.kind} takes no pipeline"
    if op.pipeline is not None and op.pipeline >= pipelines:
        return f" pipeline is {op.pipeline}; expected 0 to {pipelines - 1}"
    return None


def _require_in_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{name} is {value}; expected {low} to {high}")


def _require_length(name: str, values: tuple[int, ...], expected: int, per: str) -> None:
    if len(values) != expected:
        raise ValueError(f"{name} has {len(values)} values; expected {expected}, one per {per}")


def _require_in_grid(name: str, worker: Worker, grid: Grid) -> None:
    if worker.pipeline >= grid.pipelines or worker.column >= grid.columns:
        raise ValueError(
            f"{name}: worker {worker} lies outside the grid of {grid.pipelines} x {grid.columns}"
        )


def _require_ascending(name: str, workers: tuple[Worker, ...]) -> None:
    for left, right in pairwise(workers):
        if left >= right:
            raise ValueError(
                f"{name}: worker {right} after {left}; expected each worker once, in ascending "
                "order"
            )
