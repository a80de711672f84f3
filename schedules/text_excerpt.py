"""Draw the ops around an op as plain text, to show with a violation."""

from collections.abc import Iterable
from statistics import median_low

from slipstream.schedules.schedule import Op, OpKind, Schedule, Worker

MAX_ROWS = 12
MAX_COLUMNS = 96
OP_CHARACTERS = 5
"""Number of characters for an op of median length."""


def render_excerpt(schedule: Schedule, op: Op | None, worker: Worker | None = None) -> str:
    """Draw the ops around `op`, which is marked, as text.

    Without an op, the end of the program of `worker` is drawn. Without both, or if the worker is
    not live or runs nothing, the result is empty. At most MAX_ROWS workers are shown: the one that
    runs the op, those of its pipeline and the micro-batch's and, if the op is an A, its peers.
    Lines have at most MAX_COLUMNS characters of ops.
    """
    worker = op.worker if op is not None else worker
    if worker is None or worker not in schedule.seat_of:
        return ""
    rows = {row: schedule.ops(row) for row in _workers_to_show(schedule, op, worker)}
    focus = op or max(rows[worker], key=lambda op: op.end_ticks, default=None)
    if focus is None:
        return ""
    # The scale: an op of median length gets OP_CHARACTERS.
    lengths = [
        op.end_ticks - op.start_ticks
        for ops in rows.values()
        for op in ops
        if op.end_ticks > op.start_ticks
    ]
    ticks = median_low(lengths) if lengths else 1  # drawn as OP_CHARACTERS
    centred = (focus.start_ticks + focus.end_ticks) // 2 - ticks * MAX_COLUMNS // (
        2 * OP_CHARACTERS
    )
    # The op is in the middle, unless it comes early or is too long.
    first = min(focus.start_ticks, max(0, centred))
    lines = [
        f"{'':8}|from {schedule.seconds(first):g} s; {OP_CHARACTERS} characters are "
        f"{schedule.seconds(ticks):g} s"
    ]
    for row, ops in rows.items():
        pipeline = schedule.seat_of[row].role.pipeline
        mark = ">" if row == worker else " "
        lines.append(f"{mark}{row!s:>6} |{_draw_line(ops, op, pipeline, first, ticks)}")
        if op is not None and row == worker:
            visible = _visible_columns(op, first, ticks)
            lines.append(
                f"{'':7} |{' ' * visible.start}{'^' * len(visible)} {schedule.op_text(op)}"
            )
    return "\n".join(lines)


def _workers_to_show(schedule: Schedule, op: Op | None, worker: Worker) -> list[Worker]:
    """Return at most MAX_ROWS workers to draw around an op, sorted."""
    role = schedule.seat_of[worker].role
    pipelines = {role.pipeline} | ({op.pipeline} if op is not None else set())
    together = op is not None and op.kind is OpKind.A
    near = [
        seat
        for seat in schedule.seats
        if seat.role.pipeline in pipelines or (together and seat.role.column == role.column)
    ]
    # The worker itself, then those of the nearest columns.
    near.sort(
        key=lambda seat: (seat.worker != worker, abs(seat.role.column - role.column), seat.worker)
    )
    return sorted(seat.worker for seat in near[:MAX_ROWS])


def _draw_line(ops: Iterable[Op], marked: Op | None, pipeline: int, first: int, ticks: int) -> str:
    """Draw a worker's ops from tick `first` on: `F3--`, or `F1.3` of another pipeline."""
    cells = [" "] * MAX_COLUMNS
    # The marked op comes last, so that no other is drawn over it.
    for op in sorted(ops, key=lambda op: op == marked):
        label = _op_label(op, pipeline)
        begin = _column_of_tick(op.start_ticks, first, ticks)
        for column in _visible_columns(op, first, ticks):
            cells[column] = label[column - begin] if column - begin < len(label) else "-"
    return "".join(cells).rstrip()


def _visible_columns(op: Op, first: int, ticks: int) -> range:
    """Return the characters of an op in a line from tick `first`, OP_CHARACTERS per `ticks`."""
    begin = _column_of_tick(op.start_ticks, first, ticks)
    end = max(begin + 1, _column_of_tick(op.end_ticks, first, ticks))
    return range(max(begin, 0), min(end, MAX_COLUMNS))


def _column_of_tick(tick: int, first: int, ticks: int) -> int:
    """Return a tick's column in a line from tick `first`, in which `ticks` take OP_CHARACTERS."""
    return (tick - first) * OP_CHARACTERS // ticks


def _op_label(op: Op, pipeline: int) -> str:
    """Return the text of an op: `F3`, or `F1.3` for another pipeline's micro-batch."""
    if op.microbatch is None:
        return str(op.kind)
    return (
        f"{op.kind}{op.microbatch}"
        if op.pipeline == pipeline
        else f"{op.kind}{op.pipeline}.{op.microbatch}"
    )
