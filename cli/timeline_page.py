"""Write a page that shows schedules: one file, which works offline and loads nothing.

The page's template, styles and five scripts are in `page/`; this module puts them together with the
data. To save space, a program that several workers run at one speed is stored once, as lists of
small numbers, one list for each field of its ops; the script expands them.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from slipstream.cli.drawing.op_colours import COLOURS, NAMES
from slipstream.cli.drawing.page_file import fill_page, to_json
from slipstream.cli.shared.summaries import measured_period, summarize_schedule
from slipstream.schedules.measured_trace import TICK_SECONDS, MeasuredIteration, placed_ops
from slipstream.schedules.memory import CHANGING_AT_START, activation_room, memory_change
from slipstream.schedules.precedence import RULES
from slipstream.schedules.schedule import COMPUTE_KINDS, Op, OpKind, Schedule, Seat, Worker

STYLES = ("theme.css", "style.css")
SCRIPTS = ("model.js", "paint.js", "rows.js", "words.js", "view.js")
MAX_OPS = 1_000_000
"""Largest number of ops that a page stores, which take about 15 MB of text."""

Columns = dict[str, Any]
"""Ops by field: lists of numbers, and their kinds as a text."""


class ShownSchedule(msgspec.Struct, frozen=True):
    """Schedule on the page, its name there, and the first rule that it breaks."""

    name: str
    schedule: Schedule
    violation: str | None = None


def timeline_page(
    shown: Sequence[ShownSchedule], measured: Sequence[MeasuredIteration] = ()
) -> bytes:
    """Return a page of schedules and measured iterations, in UTF-8.

    Measured iterations are of the first schedule's workers; the page shows the last one until the
    user chooses others. Raises ValueError if more than `MAX_OPS` ops had to be stored.
    """
    return timeline_shell(
        ", ".join(item.name for item in shown), to_json(timeline_data(shown, measured))
    ).encode()


def timeline_shell(title: str, data: str) -> str:
    """Return the page as HTML, given the result of `timeline_data` as JSON."""
    return fill_page("template.html", title=title, styles=STYLES, scripts=SCRIPTS, data=data)


def timeline_data(
    shown: Sequence[ShownSchedule], measured: Sequence[MeasuredIteration] = ()
) -> dict[str, Any]:
    """Return the data of the page's script, from the arguments of `timeline_page`.

    Raises ValueError for more than `MAX_OPS` ops.
    """
    count = sum(count_stored_ops(item.schedule) for item in shown)
    count += sum(len(iteration.ops) for iteration in measured)
    if count > MAX_OPS:
        raise ValueError(f"{count} different ops are too many for a page (at most {MAX_OPS})")
    panels = [_planned_panel(item) for item in shown]
    for iteration in measured:
        panels.append(_measured_panel(shown[0].schedule, iteration, last=iteration is measured[-1]))
    return {
        "panels": panels,
        "colours": {kind.value: COLOURS[kind] for kind in OpKind},
        "names": {kind.value: NAMES[kind] for kind in OpKind},
    }


def count_stored_ops(schedule: Schedule) -> int:
    """Count the ops that a page stores of a schedule, to compare with `MAX_OPS`.

    A program counts once for each class of equivalent workers that run it.
    """
    return sum(len(schedule.programs[seat.program]) for seat in schedule.representative_seats)


def _planned_panel(shown: ShownSchedule) -> dict[str, Any]:
    schedule = shown.schedule
    placed = [(seat.role, schedule.ops(seat.worker)) for seat in schedule.representative_seats]
    tracks, unit = _encode_tracks(schedule, placed, schedule.times.transfer)
    return _common_panel(
        schedule, shown.name, schedule.tick_seconds * unit, schedule.times.transfer / unit
    ) | {
        "measured": False,
        "shown": True,
        "violation": shown.violation,
        "tracks": tracks,
        "numbers": summarize_schedule(schedule),
        "seats": [
            _encode_seat(schedule, seat, schedule.equivalence_class_of[seat.worker])
            for seat in schedule.seats
        ],
    }


def _measured_panel(
    schedule: Schedule, iteration: MeasuredIteration, *, last: bool
) -> dict[str, Any]:
    placed = {
        worker: ops for worker, ops in placed_ops(iteration).items() if worker in schedule.seat_of
    }
    # The bubbles are those of the measured window, and the period the longest window: neither is
    # what was planned.
    roles = [schedule.seat_of[worker].role for worker in placed]
    tracks, unit = _encode_tracks(schedule, list(zip(roles, placed.values(), strict=True)), 0)
    period = measured_period(iteration)
    busy = (
        sum(op.end_ticks - op.start_ticks for ops in placed.values() for op in ops) * TICK_SECONDS
    )
    numbers = summarize_schedule(schedule) | {
        "period": period,
        "lower_bound": None,
        "gap": None,
        "status": "measured",
        "peak_memory": None,
        "planned": schedule.seconds(schedule.period_ticks),
        "bubble_share": 1 - busy / (period * len(placed)) if placed and period else 0.0,
    }
    return _common_panel(
        schedule, f"measured, iteration {iteration.iteration}", TICK_SECONDS * unit, 0
    ) | {
        "measured": True,
        "shown": last,
        "violation": None,
        "tracks": tracks,
        "numbers": numbers,
        "seats": [
            _encode_seat(schedule, schedule.seat_of[worker], index)
            for index, worker in enumerate(placed)
        ],
    }


def _encode_seat(schedule: Schedule, seat: Seat, track: int) -> list[Any]:
    """Return a live worker for the page: worker, role, its track's number, held layers, room."""
    holds = seat.holds if schedule.has_moved_layers(seat) else None
    return [*seat.worker, *seat.role, track, holds, activation_room(schedule, seat)]


def _common_panel(schedule: Schedule, name: str, second: float, transfer: float) -> dict[str, Any]:
    """Return the fields that all panels have, with times in a unit of `second` seconds."""
    grid, memory = schedule.grid, schedule.memory
    sizes = (
        list(zip(memory.activation, memory.weight_stash, strict=True))
        if memory
        else [(1, 0)] * len(schedule.layers_by_slice)
    )
    # How each kind of op changes the memory of its worker, for the page's memory curves.
    changes = {}
    for kind in sorted(COMPUTE_KINDS):
        moment = "starts" if kind in CHANGING_AT_START else "ends"
        changes[kind] = moment, [memory_change(kind, *size) for size in sizes]
    return {
        "name": name,
        "job": schedule.job,
        "second": second,
        "transfer": transfer,
        "pipelines": grid.pipelines,
        "columns": grid.columns,
        "depth": grid.depth,
        "chains": grid.chains,
        "microbatches": grid.microbatches,
        "stages": [stage.column for stage in grid.stages],
        "ranges": schedule.layers_by_slice,
        "named": all(
            stage.layers == layers
            for stage, layers in zip(grid.stages, grid.layers_by_stage, strict=True)
        ),
        "optimizer": schedule.optimizer,
        "failed": schedule.failed,
        "rules": _encode_rules(),
        "slow": {str(slow.worker): slow.per_mille for slow in schedule.times.slow},
        "memory": memory and {"unit": memory.unit},
        "changes": changes,
    }


def _encode_rules() -> list[dict[str, Any]]:
    """Return which op of a micro-batch waits for which, for the page's script."""
    return [
        {
            "kind": rule.kind,
            "position": rule.position,
            "awaited": rule.awaited,
            "step": rule.step,
            "tensor": rule.tensor is not None,
        }
        for rule in RULES
    ]


def _encode_tracks(
    schedule: Schedule, programs: Sequence[tuple[Worker, Sequence[Op]]], transfer: int
) -> tuple[list[Columns], int]:
    """Return each role's program as numbers, and the ticks of the unit of these numbers."""
    # Each program comes with a role that runs it. The largest unit that divides all times makes the
    # numbers smallest.
    ticks: Iterable[int] = (
        tick for _, ops in programs for op in ops for tick in (op.start_ticks, op.end_ticks)
    )
    unit = math.gcd(transfer, *ticks) or 1
    return [
        _encode_columns(schedule, role.pipeline, sorted(ops, key=lambda op: op.start_ticks), unit)
        for role, ops in programs
    ], unit


def _encode_columns(schedule: Schedule, pipeline: int, ops: Sequence[Op], unit: int) -> Columns:
    """Encode a program's ops for the page, by field; times are multiples of `unit` ticks."""
    # Starts are stored as differences, which have fewer digits; overlapped all-reduces, which run
    # beside other ops, in a list of their own.
    overlapped = [op for op in ops if schedule.has_overlap and op.kind is OpKind.A]
    ops = [op for op in ops if op not in overlapped]
    starts = [0, *(op.start_ticks // unit for op in ops)]
    return {
        "links": [(op.start_ticks // unit, op.end_ticks // unit) for op in overlapped],
        "kinds": "".join(op.kind for op in ops),
        "slices": _encode_numbers(op.slice for op in ops),
        "microbatches": _encode_numbers(op.microbatch for op in ops),
        "foreign": [
            (index, op.pipeline, int(schedule.origin(op) == "shed"))
            for index, op in enumerate(ops)
            if op.pipeline not in (None, pipeline)
        ],
        "steps": [after - before for before, after in pairwise(starts)],
        "lengths": [(op.end_ticks - op.start_ticks) // unit for op in ops],
    }


def _encode_numbers(numbers: Iterable[int | None]) -> list[int]:
    """Return `numbers` for the page, with -1 for None."""
    encoded = []
    for number in numbers:
        encoded.append(-1 if number is None else number)
    return encoded
