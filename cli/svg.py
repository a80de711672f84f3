"""A schedule as an SVG picture: one row a worker, time from left to right; needs no fonts or scripts."""

from collections.abc import Iterator
from xml.sax.saxutils import escape

from cli.legend import COLOURS, NAMES
from schedules.schedule import Op, OpKind, Schedule, Worker

ROW, GAP, PIPELINE_GAP = 20, 3, 12
"""Height of a row, space between rows and between pipelines, in pixels."""
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 30, 34
WIDTH = 1000
"""Pixels of the time axis."""
MAX_OPS = 200_000


def drawing(schedule: Schedule) -> bytes:
    """Draw all workers. Raises ValueError where that would be more than `MAX_OPS` ops."""
    count = sum(len(schedule.programs[seat.program]) for seat in schedule.seats)
    if count > MAX_OPS:
        raise ValueError(f"{count} ops are too many for a picture (at most {MAX_OPS})")
    horizon = max((op.end_ticks for op in schedule.all_ops()), default=0) or 1
    rows = {worker: TOP + worker.pipeline * PIPELINE_GAP + index * (ROW + GAP)
            for index, worker in enumerate(schedule.grid.workers())}
    height = max(rows.values()) + ROW + BOTTOM
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + RIGHT} {height}" '
             'font-family="sans-serif" font-size="11">',
             f'<rect width="{LEFT + WIDTH + RIGHT}" height="{height}" fill="white"/>',
             f'<text x="{LEFT}" y="18" font-size="13">{escape(_title(schedule))}</text>']
    for worker, y in rows.items():
        parts += _row(schedule, worker, y, WIDTH / horizon)
    parts += _legend(schedule, height - 12)
    return "\n".join([*parts, "</svg>\n"]).encode()


def _title(schedule: Schedule) -> str:
    down = f", {', '.join(map(str, schedule.failed))} down" if schedule.failed else ""
    return f"{schedule.job}{down}: period {schedule.seconds(schedule.period_ticks):g} s"


def _row(schedule: Schedule, worker: Worker, y: int, scale: float) -> Iterator[str]:
    yield f'<text x="{LEFT - 8}" y="{y + 14}" text-anchor="end">{worker}</text>'
    if worker not in schedule.seat_of:
        yield (f'<line x1="{LEFT}" x2="{LEFT + WIDTH}" y1="{y + ROW / 2}" y2="{y + ROW / 2}" stroke="#c33" '
               'stroke-dasharray="4 4"/>')
        yield f'<text x="{LEFT + 8}" y="{y + 14}" fill="#c33" stroke="white" paint-order="stroke">down</text>'
        return
    own = schedule.seat_of[worker].role.pipeline
    for op in schedule.ops(worker):
        if op.end_ticks > op.start_ticks:
            yield _cell(op, own, y, scale)


def _cell(op: Op, own: int, y: int, scale: float) -> str:
    rerouted = op.pipeline not in (None, own)
    stroke, line = ("#111", 1.6) if rerouted else ("white", 0.6)
    x, width = LEFT + op.start_ticks * scale, (op.end_ticks - op.start_ticks) * scale
    # The line lies inside the op's interval, so that no neighbour covers it.
    box = (f'<rect x="{x + line / 2:.2f}" y="{y + line / 2}" width="{max(0.1, width - line):.2f}" '
           f'height="{ROW - line}" fill="{COLOURS[op.kind]}" stroke="{stroke}" stroke-width="{line}">'
           f"<title>{escape(str(op))}</title></rect>")
    label = op.kind.value if op.microbatch is None else \
        f"{op.pipeline}.{op.microbatch}" if rerouted else str(op.microbatch)
    if width < 7 * len(label):
        return box
    return f'{box}<text x="{x + width / 2:.2f}" y="{y + 14}" text-anchor="middle">{label}</text>'


def _legend(schedule: Schedule, y: int) -> Iterator[str]:
    x = LEFT
    used = {op.kind for op in schedule.all_ops() if op.end_ticks > op.start_ticks}
    for kind in (kind for kind in OpKind if kind in used):
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{COLOURS[kind]}"/>'
        yield f'<text x="{x + 16}" y="{y}">{kind} {NAMES[kind]}</text>'
        x += 44 + 6 * len(NAMES[kind])
    if schedule.rerouted:
        yield f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="white" stroke="#111" stroke-width="1.6"/>'
        yield f'<text x="{x + 16}" y="{y}">re-routed (pipeline.micro-batch)</text>'
