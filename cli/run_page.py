"""Write the page of a run: one file, which works offline and loads nothing.

This module writes charts, tables and events, which need no scripts. `page/run.js` zooms, highlights
events and opens the timelines of the schedules, which the page also contains.
"""

import os
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from html import escape
from pathlib import Path

from slipstream.cli.drawing.page_file import fill_page, pack_json, to_json
from slipstream.cli.drawing.run_charts import (
    MAX_POINTS,
    TIME_STEPS,
    Point,
    build_points,
    choose_ticks,
    describe_generation,
    draw_charts,
    find_settling,
    find_starting,
)
from slipstream.cli.shared.console import duration
from slipstream.cli.shared.summaries import (
    EventGroup,
    as_percent,
    describe_event,
    event_group,
    generation_rate,
    mean_throughput,
    notable_events,
    run_time,
    schedule_path,
    state,
)
from slipstream.cli.timeline_page import (
    MAX_OPS,
    ShownSchedule,
    count_stored_ops,
    timeline_data,
    timeline_shell,
)
from slipstream.runtime.events import Failed, Resumed
from slipstream.runtime.run_record import GenerationRecord, RunRecord, TimedEvent
from slipstream.schedules.check import check
from slipstream.schedules.codec import ScheduleError, read
from slipstream.schedules.measured_trace import MeasuredOp, MeasuredTraceError, read_measured_trace
from slipstream.schedules.schedule import COMPUTE_KINDS, OpKind, Schedule

SIGNS: dict[EventGroup, tuple[str, str]] = {
    "failure": ("✕", "failure"),
    "order": ("▲", "schedule"),
    "join": ("●", "worker joins"),
    "slow": ("▼", "slow worker"),
    "layers": ("◆", "layers move"),
    "checkpoint": ("■", "checkpoint"),
    "other": ("•", "other"),
}
TRACE = "trace.json"
MAX_EVENTS = 3000
"""Largest number of events on a page; of more, groups are dropped, then the earliest."""
_LEAST_IMPORTANT: tuple[EventGroup, ...] = (
    "order",
    "layers",
    "slow",
    "join",
    "other",
    "checkpoint",
)


def run_page(run: RunRecord, page: Path) -> bytes:
    """Return a run's HTML page in UTF-8, with links relative to the file `page`.

    Schedules and the trace are read from the run's folder. Left out are those that cannot be read,
    and schedules beyond `MAX_OPS` ops in all.
    """
    # The data of scripts: what can be zoomed, opened or pointed at.
    series, (events, left_out) = build_points(run), _select_events(notable_events(run))
    schedules = _read_schedules(run)
    title = f"{run.starts[-1].job}: run"
    data = {
        "total": run.seconds,
        "steps": TIME_STEPS,
        "points": [_round_values(astuple(point)) for point in series],
        "generations": [
            [item.begin, item.end, describe_generation(item)] for item in run.generations
        ],
        "events": [
            [item.at, event_group(item.event), describe_event(item.event)] for item in events
        ],
        "shell": timeline_shell("TITLE", "{{DATA}}") if schedules else "",
        "schedules": {
            digest: pack_json(
                timeline_data([ShownSchedule(name, schedule, _first_violation(schedule))])
            )
            for digest, (name, schedule) in schedules.items()
        },
    }
    # The HTML that is put in the template's places.
    parts = {
        "NAME": escape(run.starts[-1].job),
        "CARDS": _render_cards(run),
        "LEGEND": _render_legend(run, events),
        "MARKS": _render_marks(run, events),
        "CHARTS": draw_charts(run, series),
        "TICKS": _render_ticks(run),
        "NOTES": _render_notes(series, left_out),
        "ORDERS": _render_generations(run, page),
        "OPS": _render_ops(run),
        "EVENTS": _render_events(events),
    }
    return fill_page(
        "run.html",
        title=title,
        styles=("theme.css", "run.css"),
        scripts=("run.js",),
        data=to_json(data),
        parts=parts,
    ).encode()


def _round_values(values: Iterable[float | None]) -> list[float | None]:
    return [value and round(value, 4) for value in values]


def _select_events(events: list[TimedEvent]) -> tuple[list[TimedEvent], int]:
    """Return at most `MAX_EVENTS` events, the most important ones, and how many are left out."""
    kept, groups = events, list(_LEAST_IMPORTANT)
    while len(kept) > MAX_EVENTS and groups:
        dropped_group = groups.pop()
        kept = [event for event in kept if event_group(event.event) != dropped_group]
    return kept[-MAX_EVENTS:], len(events) - len(kept[-MAX_EVENTS:])


def _read_schedules(run: RunRecord) -> dict[str, tuple[str, Schedule]]:
    """Return the run's schedules by digest, each with its name on the page."""
    # Of large schedules, only as many as fit into a page.
    by_digest, remaining_ops = dict[str, tuple[str, Schedule]](), MAX_OPS
    for generation in run.generations:
        digest = generation.order.schedule
        if digest in by_digest:
            continue
        try:
            schedule = read(schedule_path(run, generation))
        except ScheduleError:  # its row says that it is not there
            continue
        ops = count_stored_ops(schedule)
        if ops <= remaining_ops:
            remaining_ops -= ops
            by_digest[digest] = (
                f"{generation.order.phase}, {generation.order.live} workers",
                schedule,
            )
    return by_digest


def _first_violation(schedule: Schedule) -> str | None:
    violations = check(schedule)
    return str(violations[0]) if violations else None


def _render_cards(run: RunRecord) -> str:
    # A number that is not known yet is left out, with its card.
    newest, mean = run.starts[-1], mean_throughput(run)
    pauses = [event.event.pause for event in run.events if isinstance(event.event, Resumed)]
    numbers = {
        "state": state(run),
        "iterations": f"{len(run.committed)} of {newest.iterations}",
        "time": run_time(run.seconds)
        + (f", {len(run.starts)} starts" if len(run.starts) > 1 else ""),
        "samples/s": "" if mean is None else f"{mean:.4g}",
        "workers": str(newest.workers),
        "failures": str(sum(isinstance(event.event, Failed) for event in run.events)),
        "samples' costs known to": ""
        if run.median_cost_error is None
        else f"{run.median_cost_error:.0%}",
        "longest pause": duration(max(pauses)) if pauses else "",
    }
    return "".join(
        f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>"
        for name, value in numbers.items()
        if value
    )


def _render_legend(run: RunRecord, events: Sequence[TimedEvent]) -> str:
    # Explain only the signs, lines and colours that this run's page has.
    shown_groups = {event_group(item.event) for item in events}
    signs = [
        f'<span><i class="sign {name}">{sign}</i>{words}</span>'
        for name, (sign, words) in SIGNS.items()
        if name in shown_groups
    ]
    lines = [
        f'<span><i class="swatch {name}"></i>{words}</span>'
        for name, words in (("measured", "measured"), ("planned", "as planned, scaled"))
    ]
    phases: set[str] = {item.order.phase for item in run.generations}
    if find_settling(run):
        phases.add("settling")
    if find_starting(run):
        phases.add("starting")
    return "".join(
        [
            *signs,
            *lines,
            *(
                f'<span><i class="swatch {name.replace(" ", "-")}"></i>{name}</span>'
                for name in ("starting", "whole", "at once", "settling", "settled")
                if name in phases
            ),
        ]
    )


def _render_marks(run: RunRecord, events: Sequence[TimedEvent]) -> str:
    return "".join(
        f'<a class="mark {event_group(entry.event)}" data-event="{number}" tabindex="-1" '
        f'href="#event-{number}" style="left:{100 * entry.at / (run.seconds or 1):.3f}%" '
        f'title="{run_time(entry.at)}: {escape(describe_event(entry.event))}">'
        f"{_event_sign(entry)}</a>"
        for number, entry in enumerate(events)
    )


def _event_sign(event: TimedEvent) -> str:
    return SIGNS[event_group(event.event) or "other"][0]


def _render_ticks(run: RunRecord) -> str:
    return "".join(
        f'<span style="left:{100 * at / (run.seconds or 1):.3f}%">{run_time(at)}</span>'
        for at in choose_ticks(run.seconds)
    )


def _render_notes(found: Sequence[Point], left_out: int) -> str:
    iterations = max((point.count for point in found), default=1)
    notes = (
        [
            f"Each point of the charts is up to {iterations} iterations: the line is their mean, "
            "the band goes from the slowest to the fastest of them (a page has about "
            f"{MAX_POINTS} points)."
        ]
        if iterations > 1
        else []
    )
    if left_out:
        notes.append(f"{left_out} events are left out; events.jsonl has them all.")
    return "".join(f"<p>{note}</p>" for note in notes)


def _render_generations(run: RunRecord, page: Path) -> str:
    return "".join(_render_generation(run, generation, page) for generation in run.generations)


def _render_generation(run: RunRecord, generation: GenerationRecord, page: Path) -> str:
    """Return a row of the table: when, phase, workers, periods, throughput, schedule."""
    # The link on the time marks this generation in the charts.
    order, speed = generation.order, generation_rate(run, generation)
    swatch = f'<i class="swatch {order.phase.replace(" ", "-")}"></i>'
    cells = (
        order.live,
        len(generation.committed),
        duration(order.planned_period),
        _format_optional(generation.measured_period),
        as_percent(generation.planned_share),
        as_percent(run.measured_share(generation)),
        "" if speed is None else f"{speed:.4g}",
    )
    return (
        f'<tr><td><a href="#chart" data-from="{generation.begin}" data-to="{generation.end}">'
        f"{run_time(generation.begin)}</a></td>"
        f'<td>{order.iteration}</td><td class="word">{swatch}{order.phase}</td>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + f'<td class="word">{_schedule_link(run, generation, page)}</td></tr>'
    )


def _render_ops(run: RunRecord) -> str:
    """Return an HTML table of the last generation's ops, planned and measured; "" without."""
    generation = run.generations[-1] if run.generations else None
    try:
        trace = read_measured_trace(run.folder / TRACE)
        schedule = None if generation is None else read(schedule_path(run, generation))
    except (MeasuredTraceError, ScheduleError):
        return ""
    if generation is None or schedule is None:
        return ""
    planned, measured = (
        defaultdict[tuple[OpKind, int], list[float]](list),
        defaultdict[tuple[OpKind, int], list[float]](list),
    )
    # Iterations of other schedules have other slices.
    for iteration in trace.iterations:
        for op in iteration.ops if iteration.iteration >= generation.order.iteration else ():
            if (
                op.kind in COMPUTE_KINDS
                and op.slice is not None
                and op.slice < len(schedule.layers_by_slice)
            ):
                planned[op.kind, op.slice].append(_planned_seconds(schedule, op))
                measured[op.kind, op.slice].append(op.end_seconds - op.start_seconds)
    rows = "".join(
        _op_row(schedule, kind, slice_, planned[kind, slice_], measured[kind, slice_])
        for kind, slice_ in sorted(measured, key=lambda key: (list(OpKind).index(key[0]), key[1]))
    )
    if not rows:
        return ""
    return (
        '<div class="scroll"><table id="ops">\n'
        '<thead><tr><th class="word">op</th><th>layers</th><th>ops</th><th>planned</th>'
        "<th>measured, median</th>\n"
        "<th>10 % below</th><th>10 % above</th><th>measured / planned</th></tr></thead>\n"
        f"<tbody>{rows}</tbody>\n"
        "</table></div>\n"
        '<p class="notes">Ops of the last, traced iterations. Unequal samples widen the spread of '
        "measured times.</p>"
    )


def _planned_seconds(schedule: Schedule, op: MeasuredOp) -> float:
    kinds = (OpKind.I, OpKind.W) if op.kind is OpKind.B else (op.kind,)
    return schedule.seconds(
        sum(schedule.times.duration_ticks(kind, op.slice or 0, op.worker) for kind in kinds)
    )


def _op_row(
    schedule: Schedule,
    kind: OpKind,
    slice_: int,
    planned: Sequence[float],
    measured: Sequence[float],
) -> str:
    # The median is not moved by the few ops that a busy machine delays; 10 % lie outside on each
    # side of the range.
    first, end = schedule.layers_of(slice_)
    expected, ordered = statistics.median(planned), sorted(measured)
    middle, low, high = (
        statistics.median(ordered),
        *(ordered[int(share * (len(ordered) - 1))] for share in (0.1, 0.9)),
    )
    layers = str(first) if end == first + 1 else f"{first} to {end - 1}"
    ratio = f"{middle / expected:.2f}" if expected > 0 else ""
    times = map(duration, (expected, middle, low, high))
    cells = [layers, f"{len(measured):,}", *times, ratio]
    return (
        f'<tr><td class="word">{kind.name}</td>'
        + "".join(f"<td>{cell}</td>" for cell in cells)
        + "</tr>"
    )


def _format_optional(seconds: float | None) -> str:
    return "" if seconds is None else duration(seconds)


def _schedule_link(run: RunRecord, generation: GenerationRecord, page: Path) -> str:
    """Return an HTML link to a generation's schedule; without a file, the digest."""
    path, digest = schedule_path(run, generation), escape(generation.order.schedule)
    if not path.is_file():
        return f"<code>{digest}</code> (not there)"
    target = escape(Path(os.path.relpath(path, page.resolve().parent)).as_posix())
    return f'<a href="{target}" data-schedule="{digest}"><code>{digest}</code></a>'


def _render_events(events: Sequence[TimedEvent]) -> str:
    return "".join(
        f'<tr id="event-{number}"><td><a href="#chart" '
        f'data-event="{number}">{run_time(event.at)}</a></td><td>{event.event.iteration}</td><td '
        f'class="word"><i class="sign {event_group(event.event)}">{_event_sign(event)}</i></td>'
        f'<td class="word">{escape(describe_event(event.event))}</td></tr>'
        for number, event in enumerate(events)
    )
