"""Divide a schedule into shares: what each worker must know of it.

A worker needs its program (`schedules.program`), and the workers that it sums gradients with. What
is equal for several workers is stored once, as a *content*, and named by its digest: all workers of
a column that are far from any failure have the same contents. Programs have no times, because no
worker follows them. So a worker that runs the same ops in the same order as before keeps its
content. Contents name pipelines by their index among those that share micro-batches, so a schedule
whose pipelines get other numbers keeps its contents.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from slipstream.schedules.crossings import Crossing, crossings_by_worker
from slipstream.schedules.graph import pipeline_groups
from slipstream.schedules.layers import LayerRange
from slipstream.schedules.program import (
    Instruction,
    Ties,
    WorkerProgram,
    find_reduced_ranges,
    find_reductions,
    lower_ops,
)
from slipstream.schedules.schedule import BackwardMode, Grid, OptimizerMode, Schedule, Seat, Worker

SumsByColumn = tuple[tuple[LayerRange, tuple[Worker, ...] | int], ...]
"""Form in which `Sums` is stored: a column's number stands for all its live workers."""
DIGEST_CHARACTERS = 32


class ProgramFrame(msgspec.Struct, frozen=True):
    """Part of a schedule that all workers must know."""

    grid: Grid
    slices: tuple[LayerRange, ...]
    backward: BackwardMode
    optimizer: OptimizerMode


class WorkerShare(NamedTuple):
    """Part of a divided schedule that one worker needs: its seat, and digests of contents."""

    seat: Seat
    """Seat of the worker; its program number means nothing and is 0."""
    pipelines: tuple[int, ...]
    """Numbers of the pipelines that the worker's program names by index."""
    frame: str
    """Digest of the content for all workers (`ProgramFrame`)."""
    work: str
    """Digest of the worker's program."""
    sums: str
    """Digest of the layers that the worker reduces, and of those with tied parameters."""

    @property
    def content_digests(self) -> tuple[str, str, str]:
        """Digests of all contents that this share refers to: `frame`, `work` and `sums`."""
        return self.frame, self.work, self.sums


class DividedSchedule(msgspec.Struct, frozen=True):
    """Schedule, divided into workers' shares; what several have in common is stored once."""

    failed: tuple[Worker, ...]
    shares: dict[Worker, WorkerShare]
    contents: dict[str, bytes]
    """JSON texts that shares refer to (frame, programs, gradient sums), by digest."""


EquivalentSchedule = tuple[DividedSchedule, Mapping[int, int]]
"""Divided schedule without moved workers, and new numbers for its pipelines, by old number.

With the new numbers, it equals the schedule that is to be divided.
"""


def divide_schedule(
    schedule: Schedule,
    alike: EquivalentSchedule | None = None,
    *,
    ties: Sequence[Sequence[Worker]] = (),
) -> DividedSchedule:
    """Divide a schedule into shares of its workers.

    The schedule must pass `schedules.check`. `ties` has the holders of each group of layers with
    tied parameters. `alike` is a divided schedule that differs from this one only in pipeline
    numbers, and the new number of each of its pipelines; None: there is none. Its programs are
    reused, which saves nearly all of the computation. Tensors that are planned for the same instant
    may then have another order, which all workers can follow as well.
    """
    contents: dict[str, bytes] = {}

    def store(content: object) -> str:
        """Add an object, as JSON, to `contents`; return its digest."""
        data = msgspec.json.encode(content)
        digest = hashlib.sha256(data).hexdigest()[:DIGEST_CHARACTERS]
        contents[digest] = data
        return digest

    # The frame has neither failures nor the plan's figures, so that it stays the same from one
    # order to the next.
    frame = store(
        ProgramFrame(schedule.grid, schedule.slices, schedule.backward, schedule.optimizer)
    )
    if alike is None:
        works = dict(_encode_programs(schedule, store))
    else:
        parts, numbers = alike
        works = {}
        for worker, share in parts.shares.items():
            pipelines = tuple(numbers[pipeline] for pipeline in share.pipelines)
            works[Worker(numbers[worker.pipeline], worker.column)] = pipelines, share.work
            contents[share.work] = parts.contents[share.work]
    shares = {}
    for seat, sums in zip(schedule.seats, _encode_sums(schedule, ties, store), strict=True):
        pipelines, work = works[seat.worker]
        shares[seat.worker] = WorkerShare(
            Seat(seat.worker, seat.role, 0, seat.holds), pipelines, frame, work, sums
        )
    failed = tuple(worker for worker in schedule.grid.workers() if worker not in shares)
    return DividedSchedule(failed, shares, contents)


def assemble_program(
    failed: tuple[Worker, ...], share: WorkerShare, contents: Mapping[str, bytes]
) -> WorkerProgram:
    """Build a worker's program from its share of a divided schedule.

    `contents` has what the share refers to, by digest, and `failed` the workers that are down.
    Raises KeyError if a content is missing, and ValueError if one is malformed.
    """
    frame = _FRAME.decode(contents[share.frame])
    lines = _LINES.decode(contents[share.work])
    sums, ties = _SUMS.decode(contents[share.sums])
    down, seat = set(failed), share.seat
    # A seat lists layers only if they are not those of its role.
    holds = frame.grid.held_layers_by_column[seat.role.column] if seat.holds is None else seat.holds
    reducers: list[tuple[LayerRange, tuple[Worker, ...]]] = []
    for layers, sharers in sums:
        # A column stands for all its live workers.
        if isinstance(sharers, int):
            column = [Worker(pipeline, sharers) for pipeline in range(frame.grid.pipelines)]
            sharers = tuple(worker for worker in column if worker not in down)
        reducers.append((layers, sharers))
    return WorkerProgram(
        worker=seat.worker,
        grid=frame.grid,
        slices=frame.slices,
        backward=frame.backward,
        optimizer=frame.optimizer,
        failed=failed,
        holds=holds,
        ties=ties,
        instructions=tuple(Instruction.parse(line, share.pipelines) for line in lines),
        sums=tuple(reducers),
    )


def _encode_programs(
    schedule: Schedule, store: Callable[[object], str]
) -> Iterator[tuple[Worker, tuple[tuple[int, ...], str]]]:
    """Store all programs; yield (worker, (pipelines that its program names by index, digest))."""
    seats: dict[int, list[Seat]] = defaultdict(list)
    for seat in schedule.seats:
        seats[seat.role.pipeline].append(seat)
    digests: dict[object, list[str]] = {}
    for group in pipeline_groups(schedule):
        group_seats = [seat for pipeline in group for seat in seats[pipeline]]
        pipelines = tuple(sorted({*group, *(seat.worker.pipeline for seat in group_seats)}))
        place = {pipeline: index for index, pipeline in enumerate(pipelines)}
        # Groups with equal layouts, apart from pipelines' numbers, have equal programs.
        layout = tuple(
            (
                place[seat.worker.pipeline],
                seat.worker.column,
                place[seat.role.pipeline],
                seat.role.column,
                seat.program,
            )
            for seat in group_seats
        )
        if layout not in digests:
            # Lowering takes nearly all of the time, so each layout is lowered once.
            crossings = crossings_by_worker(schedule, group)
            digests[layout] = [
                store(_lower_to_text(schedule, seat.worker, crossings[seat.worker], place))
                for seat in group_seats
            ]
        for seat, digest in zip(group_seats, digests[layout], strict=True):
            yield seat.worker, (pipelines, digest)


def _lower_to_text(
    schedule: Schedule, worker: Worker, crossings: Sequence[Crossing], place: Mapping[int, int]
) -> list[str]:
    """Return a worker's program as lines of text; pipeline p has number `place[p]`."""
    return [
        str(instruction.with_pipeline_numbers(place))
        for instruction in lower_ops(schedule, worker, crossings)
    ]


def _encode_sums(
    schedule: Schedule, ties: Sequence[Sequence[Worker]], store: Callable[[object], str]
) -> Iterator[str]:
    """Store what each seat's worker sums, and yield the digests in the order of seats."""
    tied = [(number, tuple(sorted(workers))) for number, workers in enumerate(ties)]
    ties_of: dict[Worker, tuple[int, ...]] = defaultdict(tuple)
    for number, workers in tied:
        for worker in workers:
            ties_of[worker] += (number,)
    sums = _sums_by_program(schedule)
    digests: dict[tuple[int, tuple[int, ...]], str] = {}
    for seat in schedule.seats:
        key = seat.program, ties_of.get(seat.worker, ())
        if key not in digests:
            digests[key] = store((sums[seat.program], [tied[number] for number in key[1]]))
        yield digests[key]


def _sums_by_program(schedule: Schedule) -> list[SumsByColumn]:
    """Return, for each program in order, its reduced ranges of layers and who reduces them."""
    # If all live workers of a column reduce a range, its column says so: failures then change no
    # content.
    live = Counter(seat.worker.column for seat in schedule.seats)
    reducers: dict[LayerRange, tuple[Worker, ...] | int] = {}
    for layers, holders in find_reductions(schedule).items():
        columns = {worker.column for worker in holders}
        reducers[layers] = (
            holders[0].column
            if len(columns) == 1 and len(holders) == live[holders[0].column]
            else holders
        )
    sums: list[SumsByColumn] = []
    for ranges in find_reduced_ranges(schedule):
        reduced = [layers for layers in sorted(ranges) if layers in reducers]
        sums.append(tuple((layers, reducers[layers]) for layers in reduced))
    return sums


_FRAME = msgspec.json.Decoder(ProgramFrame)
_LINES = msgspec.json.Decoder(tuple[str, ...])
_SUMS = msgspec.json.Decoder(tuple[SumsByColumn, Ties])
