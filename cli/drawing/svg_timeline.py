"""Draw a schedule as an SVG picture, without fonts or scripts.

One row per worker, time from left to right.

The picture is readable in greyscale. Stripes tell kinds of ops apart, frames and small letters mark
re-routed ops, dashed frames mark shed ops. Primes and a lighter shade mark the second (third, ...)
stage of a worker that holds several. A slice that is no whole stage has its layers after a colon.
"""

import math
from collections.abc import Iterator
from xml.sax.saxutils import escape

from slipstream.cli.drawing.axis import label_times, nice_step
from slipstream.cli.drawing.op_colours import COLOURS, NAMES
from slipstream.cli.drawing.op_labels import op_labels, worker_label
from slipstream.cli.shared.console import duration
from slipstream.schedules.schedule import Op, OpKind, Schedule, Worker

ROW = 20
"""Height of a row, in pixels."""
GAP = 3
"""Space between rows, in pixels."""
PIPELINE_GAP = 12
"""Space between pipelines, in pixels."""
LINK_HEIGHT = 4
"""Height, in pixels, of a reduction that overlaps with the ops of its row."""
LEFT = 84
"""Margin for the labels of workers, in pixels."""
RIGHT = 16
TOP = 44
"""Margin for the title and the labels of the time axis, in pixels."""
BOTTOM = 34
"""Margin for the legend, in pixels."""
WIDTH = 1000
"""Usual length of the time axis, in pixels."""
MAX_WIDTH = 3000
"""Maximum length of the time axis, in pixels; only re-routed and shed ops lengthen it."""
LABEL_ROOM = 5
"""Number of characters that fit into re-routed or shed F, I and B, within `MAX_WIDTH`."""
MAX_OPS = 200_000
MAX_MARKS = 12
"""Maximum number of labels of the time axis."""
CHARACTER = 7
"""Width of a character, in pixels."""
STRIPE = 2
ON_TOP = (OpKind.I, OpKind.B)
"""Kinds of ops with a stripe along their upper edge."""
BELOW = (OpKind.W, OpKind.B)
"""Kinds of ops with a stripe along their lower edge."""
LIGHTER_OPACITY = 0.55
FRAMES = {
    "own": (' stroke="white" stroke-width="0.6"', 0.6),
    "rerouted": (' stroke="#111" stroke-width="1.6"', 1.6),
    "shed": (' stroke="#111" stroke-width="1.6" stroke-dasharray="3 2"', 1.6),
}
"""Attributes of the line around an op, and its width in pixels, by origin."""
HATCH = (
    '<defs><pattern id="down" width="7" height="7" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)">'
    '<rect width="2" height="7" fill="#c33"/></pattern></defs>'
)


def draw_schedule(schedule: Schedule) -> bytes:
    """Return an SVG picture of all workers. Raises ValueError for more than `MAX_OPS` ops."""
    count = sum(len(schedule.programs[seat.program]) for seat in schedule.seats)
    if count > MAX_OPS:
        raise ValueError(f"{count} ops are too many for a picture (at most {MAX_OPS})")
    horizon = max((op.end_ticks for op in schedule.all_ops()), default=0) or 1
    rows = {
        worker: TOP + worker.pipeline * PIPELINE_GAP + index * (ROW + GAP)
        for index, worker in enumerate(schedule.grid.workers())
    }
    width = _axis_width(schedule, horizon)
    height = max(rows.values()) + ROW + BOTTOM
    # Long labels of workers widen the picture to the left.
    left = min(
        0, LEFT - 8 - CHARACTER * max(len(worker_label(worker, schedule)) for worker in rows)
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{left} 0 {LEFT + width + RIGHT - left} '
        f'{height}" '
        'font-family="sans-serif" font-size="11">',
        HATCH,
        f'<rect x="{left}" width="{LEFT + width + RIGHT - left}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="13">{escape(_picture_title(schedule))}</text>',
    ]
    parts += _draw_axis(schedule.seconds(horizon), width, height)
    for worker, y in rows.items():
        parts += _draw_row(schedule, worker, y, width, width / horizon)
    parts += _draw_legend(schedule, height - 12)
    return "\n".join([*parts, "</svg>\n"]).encode()


def _picture_title(schedule: Schedule) -> str:
    down = f", {', '.join(map(str, schedule.failed))} down" if schedule.failed else ""
    return f"{schedule.job}{down}: period {duration(schedule.seconds(schedule.period_ticks))}"


def _axis_width(schedule: Schedule, horizon: int) -> int:
    """Return the length in pixels of the time axis for a schedule of `horizon` ticks."""
    # Ops of other pipelines have the longest labels; W may remain without one.
    foreign = [
        op.end_ticks - op.start_ticks
        for op in schedule.all_ops()
        if op.kind is not OpKind.W
        and op.end_ticks > op.start_ticks
        and schedule.origin(op) != "own"
    ]
    return (
        max(WIDTH, min(MAX_WIDTH, math.ceil(LABEL_ROOM * CHARACTER * horizon / min(foreign))))
        if foreign
        else WIDTH
    )


def _draw_axis(seconds: float, width: int, height: int) -> Iterator[str]:
    """Yield SVG of labels and faint vertical lines at round numbers of seconds."""
    for at, label in label_times(seconds, nice_step(seconds, MAX_MARKS)):
        x = LEFT + at / seconds * width
        yield (
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{TOP - 8}" y2="{height - BOTTOM + 4}" '
            'stroke="#ccc"/>'
            f'<text x="{x:.2f}" y="{TOP - 10}" text-anchor="middle" font-size="10" '
            f'fill="#555">{label}</text>'
        )


def _draw_row(
    schedule: Schedule, worker: Worker, y: int, width: int, scale: float
) -> Iterator[str]:
    if worker not in schedule.seat_of:
        yield f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end" fill="#c33">{worker}</text>'
        yield f'<rect x="{LEFT}" y="{y + 3}" width="{width}" height="{ROW - 6}" fill="url(#down)"/>'
        yield f'<rect x="{LEFT + 10}" y="{y + 2}" width="42" height="{ROW - 4}" fill="white"/>'
        yield f'<text x="{LEFT + 16}" y="{y + 14}" fill="#c33" font-weight="bold">down</text>'
        return
    role = schedule.seat_of[worker].role
    label = worker_label(worker, schedule)
    yield f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{label}</text>'
    stages = schedule.grid.stages_of_column(role.column)
    for op in schedule.ops(worker):
        if op.end_ticks > op.start_ticks:
            yield from _draw_op(
                op, schedule, stages.index(op.slice) if op.slice in stages else 0, y, scale
            )


def _draw_op(op: Op, schedule: Schedule, chunk: int, y: int, scale: float) -> Iterator[str]:
    """Yield SVG of an op at height `y`; a tick is `scale` pixels wide."""
    # The number of the op's stage among its worker's; reductions and steps are of all.
    chunk = chunk if op.microbatch is not None else 0
    frame, line = FRAMES[schedule.origin(op)]
    x, width = LEFT + op.start_ticks * scale, (op.end_ticks - op.start_ticks) * scale
    # The line lies inside the op's interval, so that no neighbour covers it.
    left, inside = x + line / 2, max(0.1, width - line)
    title = f"<title>{escape(schedule.op_text(op))}</title>"
    if schedule.has_overlap and op.kind is OpKind.A:  # beside other ops, on links
        yield _draw_box(
            op.kind, left, y + ROW - LINK_HEIGHT, inside, LINK_HEIGHT, chunk, frame, title
        )
        return
    yield _draw_box(op.kind, left, y + line / 2, inside, ROW - line, chunk, frame, title)
    if label := _choose_label(op, schedule, "′" * chunk, int(width // CHARACTER)):
        yield f'<text x="{x + width / 2:.2f}" y="{y + 14}" text-anchor="middle">{label}</text>'


def _draw_box(
    kind: OpKind,
    x: float,
    y: float,
    width: float,
    height: float,
    chunk: int,
    line: str,
    inside: str,
) -> str:
    """Return SVG of a box for a kind of op, lighter unless `chunk` is 0."""
    faint = f' fill-opacity="{LIGHTER_OPACITY}"' if chunk else ""
    parts = [
        f'<rect x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" '
        f'fill="{COLOURS[kind]}"{faint}{line}>'
        f"{inside}</rect>"
    ]
    edges = [y + 0.5] if kind in ON_TOP else []
    if kind in BELOW:
        edges.append(y + height - STRIPE - 0.5)
    for edge in edges:
        parts.append(
            f'<rect x="{x:.2f}" y="{edge:g}" width="{width:.2f}" height="{STRIPE}" '
            'fill-opacity="0.55"/>'
        )
    return "".join(parts)


def _choose_label(op: Op, schedule: Schedule, prime: str, room: int) -> str:
    """Return the most informative label of at most `room` characters; "" if all are longer."""
    texts = op_labels(op, schedule, prime)
    if op.microbatch is not None:
        foreign = schedule.origin(op) != "own"
        number = f"{op.pipeline}.{op.microbatch}" if foreign else str(op.microbatch)
        texts = [*texts[:2], f"{number}{prime}", number]
    return next((text for text in texts if len(text) <= room), "")


def _draw_legend(schedule: Schedule, y: int) -> Iterator[str]:
    x = LEFT
    used = {op.kind for op in schedule.all_ops() if op.end_ticks > op.start_ticks}
    # Only what the picture shows is explained.
    for kind in (kind for kind in OpKind if kind in used):
        yield _draw_box(kind, x, y - 11, 14, 14, 0, "", "")
        yield f'<text x="{x + 19}" y="{y}">{kind} {NAMES[kind]}</text>'
        x += 48 + 6 * len(NAMES[kind])
    box = f'y="{y - 11}" width="14" height="14" fill="white"'
    if schedule.rerouted:
        yield f'<rect x="{x}" {box}{FRAMES["rerouted"][0]}/>'
        yield f'<text x="{x + 19}" y="{y}">re-routed (pipeline.micro-batch)</text>'
        x += 224
    if schedule.shed:
        yield f'<rect x="{x}" {box}{FRAMES["shed"][0]}/>'
        yield f'<text x="{x + 19}" y="{y}">shed</text>'
        x += 66
    if schedule.slices:
        yield f'<text x="{x}" y="{y}">F3:4-6: layers 4 to 6</text>'
        x += 130
    if len(schedule.grid.stages) > schedule.grid.columns:
        yield f'<text x="{x}" y="{y}">lighter, 1′: a worker\'s second stage</text>'
