"""Draw a schedule as a timeline in the terminal.

One row per worker, time from left to right.

The timeline is readable without colour: each op begins with its letter, which is small if the
micro-batch is re-routed. A micro-batch of another pipeline is `pipeline.number` if there is room:
`f1.3` is re-routed, `F1.3` is shed. A slice that is no whole stage has its layers after a colon:
`F3:4-6`. Dots are bubbles.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise

import msgspec
from rich.console import Group
from rich.text import Text

from slipstream.cli.drawing.axis import label_times, nice_step
from slipstream.cli.drawing.op_colours import COLOURS, NAMES
from slipstream.cli.drawing.op_labels import op_labels, worker_label
from slipstream.schedules.layers import compact_layers_text, merge_ranges
from slipstream.schedules.measured_trace import TICK_SECONDS, MeasuredIteration, placed_ops
from slipstream.schedules.schedule import Op, OpKind, Schedule, Worker
from slipstream.schedules.symmetry import find_equal_pipelines

FULL_ROWS = 32
"""Largest number of workers that all have a row in a measured iteration's drawing."""
MAX_ROWS = 64
"""Maximum number of lines for workers if the height of the screen is unknown."""
MIN_ROWS = 4
OTHER_LINES = 3
"""Lines of a drawing besides workers: axis, legend, and what is not drawn."""
MIN_COLUMNS = 24
LABEL_COLUMNS = 10
"""Minimum distance of labels on the time axis, in characters."""

STYLES = {kind: f"black on {colour}" for kind, colour in COLOURS.items()}
REROUTED = "bold underline "
SHED = "italic underline "
ORIGIN_STYLES = {"own": "", "rerouted": REROUTED, "shed": SHED}
BUBBLE = "·"


def draw_timeline(schedule: Schedule, width: int, height: int | None = None) -> Group:
    """Return a drawing of the planned iteration in `width` characters.

    The drawing has up to about `height` lines, with room for `MIN_ROWS` workers at least; None:
    with room for `MAX_ROWS`. Pipelines that run the same programs are drawn once; what does not fit
    is only counted. The time axis has at least `MIN_COLUMNS` characters, whatever the width.
    """
    blocks = _to_blocks(schedule, _max_rows(height), find_equal_pipelines(schedule))
    programs = {
        worker: schedule.ops(worker)
        for block in blocks
        for worker in _workers_of_block(block, schedule)
        if worker in schedule.seat_of
    }
    return _draw(schedule, blocks, programs, schedule.tick_seconds, width, _max_rows(height))


def draw_measured_timeline(schedule: Schedule, iteration: MeasuredIteration, width: int) -> Group:
    """Return a drawing, `width` characters wide, of a measured iteration's workers.

    Of more than `FULL_ROWS` workers, pipelines with the same programs are drawn once, by the first
    of them, in up to `MAX_ROWS` lines.
    """
    grid = schedule.grid
    equal: list[tuple[int, ...]] = [(pipeline,) for pipeline in range(grid.pipelines)]
    if grid.pipelines * grid.columns > FULL_ROWS:
        equal = find_equal_pipelines(schedule)
    return _draw(
        schedule,
        _to_blocks(schedule, MAX_ROWS, equal),
        placed_ops(iteration),
        TICK_SECONDS,
        width,
        MAX_ROWS,
    )


def _max_rows(height: int | None) -> int:
    return MAX_ROWS if height is None else max(MIN_ROWS, height - OTHER_LINES)


class _Scale(msgspec.Struct, frozen=True):
    """Scale of a drawing: tick t is at character t * `up` // `down`."""

    up: int
    down: int
    columns: int

    def to_column(self, tick: int) -> int:
        return tick * self.up // self.down


def _draw(
    schedule: Schedule,
    blocks: Sequence[tuple[int, ...]],
    programs: Mapping[Worker, Sequence[Op]],
    tick_seconds: float,
    width: int,
    rows: int,
) -> Group:
    # What fits: the first workers of each set of equal pipelines.
    drawn = {block: _workers_of_block(block, schedule)[:rows] for block in blocks}
    shown = [worker for block in blocks for worker in drawn[block]]
    labels = {worker: worker_label(worker, schedule) for worker in shown}
    margin = max(map(len, labels.values())) + 2
    ops = [op for worker in shown for op in programs.get(worker, ())]
    scale = _choose_scale(ops, max(MIN_COLUMNS, width - margin))
    titled = (
        any(len(block) > 1 for block in blocks) or sum(map(len, blocks)) < schedule.grid.pipelines
    )
    lines = [Text(" " * margin + _draw_axis(scale, tick_seconds), style="dim")]
    for index, block in enumerate(blocks):
        if titled:
            lines.append(Text(_block_title(block), style="bold"))
        elif index:
            lines.append(Text())
        for worker in drawn[block]:
            label = Text(
                f"{labels[worker]:>{margin - 2}}  ",
                style="" if worker in schedule.seat_of else "red",
            )
            lines.append(label + _draw_row(worker, schedule, programs.get(worker, ()), scale))
    # Say what is not drawn.
    if hidden := schedule.grid.pipelines - sum(map(len, blocks)):
        lines.append(Text(f"and {hidden} more pipeline{'s' * (hidden > 1)}", style="bold"))
    if rows < schedule.grid.columns:
        lines.append(
            Text(f"and {schedule.grid.columns - rows} more workers of this pipeline", style="bold")
        )
    for line in lines:
        line.no_wrap, line.overflow = True, "crop"
    return Group(*lines, *_build_legend(ops, schedule, width))


def _choose_scale(ops: Sequence[Op], columns: int) -> _Scale:
    """Return a scale that fits all ops into `columns` characters."""
    horizon = max((op.end_ticks for op in ops), default=0) or 1
    # If every op is a multiple of some unit, give each unit equally many characters.
    unit = math.gcd(horizon, *(tick for op in ops for tick in (op.start_ticks, op.end_ticks)))
    per_unit = columns // (horizon // unit)
    return (
        _Scale(per_unit, unit, per_unit * (horizon // unit))
        if per_unit >= 2
        else _Scale(columns, horizon, columns)
    )


def _draw_row(worker: Worker, schedule: Schedule, ops: Sequence[Op], scale: _Scale) -> Text:
    if worker not in schedule.seat_of:
        return Text("╳ down ".ljust(scale.columns, "─"), style="red")
    characters = [" "] * scale.columns
    styles = [""] * scale.columns
    if schedule.has_overlap:  # what goes on beside other ops has no characters
        ops = [op for op in ops if op.kind is not OpKind.A]
    for before, op in pairwise(ops):
        for column in range(scale.to_column(before.end_ticks), scale.to_column(op.start_ticks)):
            characters[column], styles[column] = BUBBLE, "dim"
    for op in ops:
        begin, end = scale.to_column(op.start_ticks), scale.to_column(op.end_ticks)
        style = ORIGIN_STYLES[schedule.origin(op)] + STYLES[op.kind]
        for column, character in zip(
            range(begin, end), _choose_label(op, schedule, end - begin), strict=True
        ):
            characters[column], styles[column] = character, style
    row = Text()
    for style, run in groupby(zip(characters, styles, strict=True), key=lambda pair: pair[1]):
        row.append("".join(character for character, _ in run), style or None)
    return row


def _choose_label(op: Op, schedule: Schedule, width: int) -> str:
    """Return the most informative label of an op, padded to `width` characters."""
    return next((text for text in op_labels(op, schedule) if len(text) <= width), "").ljust(width)


def _draw_axis(scale: _Scale, tick_seconds: float) -> str:
    """Return the time axis as one line of text: `|0 s |10 |20`."""
    per_column = scale.down * tick_seconds / scale.up
    axis = ""
    for at, label in label_times(
        scale.columns * per_column, nice_step(LABEL_COLUMNS * per_column, 1)
    ):
        axis = axis.ljust(round(at / per_column)) + f"|{label}"
    return axis


def _to_blocks(
    schedule: Schedule, rows: int, equal_sets: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """Return the sets of pipelines to draw once each: those that fit, at least one."""
    # Pipelines with dead or moved workers are drawn by themselves. If room is short, they are kept
    # first, then the largest sets.
    broken = {worker.pipeline for worker in schedule.failed}
    broken |= {
        pipeline
        for seat in schedule.moves
        for pipeline in (seat.worker.pipeline, seat.role.pipeline)
    }
    sets: list[tuple[int, ...]] = []
    for equal in equal_sets:
        unbroken = tuple(pipeline for pipeline in equal if pipeline not in broken)
        sets += [(pipeline,) for pipeline in equal if pipeline in broken]
        sets += [unbroken] if unbroken else []
    sets.sort(key=lambda equal: (equal[0] not in broken, -len(equal), equal))
    return sorted(sets[: max(1, rows // (schedule.grid.columns + 1))])


def _workers_of_block(block: tuple[int, ...], schedule: Schedule) -> list[Worker]:
    """Return the workers drawn for a set of equal pipelines: those of the first."""
    return [Worker(block[0], column) for column in range(schedule.grid.columns)]


def _block_title(block: tuple[int, ...]) -> str:
    numbers = compact_layers_text(merge_ranges((number, number + 1) for number in block)).replace(
        ",", ", "
    )
    return (
        f"pipeline {numbers}" if len(block) == 1 else f"x {len(block)}: pipelines {numbers} alike"
    )


def _build_legend(ops: Iterable[Op], schedule: Schedule, width: int) -> list[Text]:
    """Return the lines of these ops' legend, of at most `width` characters if entries fit."""
    used = {op.kind for op in ops if op.end_ticks > op.start_ticks}
    if schedule.has_overlap:
        used.discard(OpKind.A)
    # Only what the drawing shows is explained.
    entries = [
        Text.assemble((f" {kind} ", STYLES[kind]), f" {NAMES[kind]}")
        for kind in OpKind
        if kind in used
    ]
    entries.append(Text(f"{BUBBLE} idle", "dim"))
    if schedule.has_overlap:
        entries.append(Text("all-reduces run beside other ops, not drawn"))
    if schedule.rerouted:
        entries.append(
            Text.assemble(
                ("f1.3", REROUTED + STYLES[OpKind.F]), " re-routed: micro-batch 3 of pipeline 1"
            )
        )
    if schedule.shed:
        entries.append(
            Text.assemble(("F1.3", SHED + STYLES[OpKind.F]), " shed: its own worker is alive")
        )
    if schedule.slices:
        entries.append(
            Text.assemble(("F3:4-6", STYLES[OpKind.F]), " layers 4 to 6, no whole stage")
        )
    if any(map(schedule.has_moved_layers, schedule.seats)):
        entries.append(Text("[4-6] holds layers 4 to 6"))
    # As many entries in a line as fit.
    lines = [entries[0]]
    for entry in entries[1:]:
        if len(lines[-1]) + 2 + len(entry) <= width:
            lines[-1] = Text.assemble(lines[-1], "  ", entry)
        else:
            lines.append(entry)
    return lines
