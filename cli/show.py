"""Implement `slipstream show`, which shows schedules, in several forms, and runs."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from slipstream.cli.drawing.svg_timeline import draw_schedule
from slipstream.cli.drawing.text_timeline import draw_measured_timeline, draw_timeline
from slipstream.cli.exporters.perfetto import perfetto_trace
from slipstream.cli.run_page import run_page
from slipstream.cli.shared.console import console_of_width, duration, err, print_json, refuse
from slipstream.cli.shared.options import (
    Force,
    Json,
    ScheduleInFile,
    read_schedules,
    refusal_text,
    require_writable,
    write_or_refuse,
)
from slipstream.cli.shared.outputs import PAGE, PICTURE, TRACE
from slipstream.cli.shared.summaries import (
    build_run_summary,
    measured_period,
    print_run,
    summarize_schedule,
    summary_line,
)
from slipstream.cli.timeline_page import ShownSchedule, timeline_page
from slipstream.runtime.run_record import RunRecord, RunRecordError, read_run
from slipstream.schedules.check import check
from slipstream.schedules.measured_trace import (
    MeasuredIteration,
    MeasuredTrace,
    MeasuredTraceError,
    read_measured_trace,
)
from slipstream.schedules.program import build_program
from slipstream.schedules.schedule import Worker

DRAWN = "What is shown"
"""Title, in the help, of the options on what is shown."""
WRITTEN = "Files to write"
"""Title, in the help, of the options for files."""

Files = Annotated[
    list[Path] | None,
    typer.Argument(
        metavar="FILE...", help=("Schedule files, entries of a table, or the folder of one.")
    ),
]
Run = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="DIR",
        help=(
            "Show a run instead, from the --out of `slipstream train`: throughput and live "
            "workers over time, what happened, planned and measured periods."
        ),
    ),
]
Html = Annotated[
    Path | None,
    typer.Option(
        "--html",
        rich_help_panel=WRITTEN,
        metavar=PAGE,
        help=(
            "Write an interactive page, which works offline in any browser. Several schedules, "
            "and with --measured the measured iterations, are shown next to each other. With "
            "--run, a page of the run."
        ),
    ),
]
Perfetto = Annotated[
    Path | None,
    typer.Option(
        "--perfetto",
        rich_help_panel=WRITTEN,
        metavar=TRACE,
        help=(
            "Write a trace that ui.perfetto.dev opens; with --measured, the measured ops next to "
            "the planned ones."
        ),
    ),
]
Svg = Annotated[
    Path | None,
    typer.Option("--svg", rich_help_panel=WRITTEN, metavar=PICTURE, help="Write a picture."),
]
Measured = Annotated[
    Path | None,
    typer.Option(
        "--measured",
        rich_help_panel=DRAWN,
        metavar="TRACE",
        help=("When each op really ran: trace.json of `slipstream train`."),
    ),
]
Width = Annotated[
    int | None,
    typer.Option(
        "--width",
        rich_help_panel=DRAWN,
        metavar="N",
        min=40,
        max=1000,
        help=("Width in characters. Default: that of the terminal."),
    ),
]
ProgramOf = Annotated[
    str | None,
    typer.Option(
        "--program",
        rich_help_panel=DRAWN,
        metavar="D.S",
        help=(
            "Print the program of a worker instead: what it receives, computes, sends, reduces "
            "and steps, a line each."
        ),
    ),
]
BROWSER = ": open it in a browser"


def show(
    files: Files = None,
    run: Run = None,
    html: Html = None,
    perfetto: Perfetto = None,
    svg: Svg = None,
    measured: Measured = None,
    program: ProgramOf = None,
    width: Width = None,
    force: Force = False,  # noqa: ARG001  # read by the overwrite guard
    json: Json = False,
) -> None:
    """Show a schedule: a row for each worker, time from left to right; or the course of a run.

    Several schedules are shown one after the other. With --run: what happened when, and the planned
    and measured period after each change of workers or schedule. --html makes a page of it, which
    works offline and holds the timelines of its schedules.
    """
    for path in (html, perfetto, svg):
        require_writable(path)
    # A run: its events, instead of schedules.
    if run is not None:
        for what, value in (
            ("schedule files", files),
            ("--perfetto", perfetto),
            ("--svg", svg),
            ("--measured", measured),
            ("--program", program),
        ):
            if value:
                refuse(f"--run shows a run: leave out {what}")
        _show_run(run, html, console_of_width(width), json=json)
        return
    # Options that are for one schedule.
    if not files:
        refuse("give schedule files, or --run DIR")
    given = [*_read_or_refuse(files)]
    if len(given) > 1:
        for option, value in (
            ("--perfetto", perfetto),
            ("--svg", svg),
            ("--measured", measured),
            ("--program", program),
        ):
            if value is not None:
                refuse(f"{option} goes with one schedule; {len(given)} are given")
    first = given[0]
    # A worker's program, instead of the timeline.
    if program is not None:
        for option, value in (
            ("--html", html),
            ("--perfetto", perfetto),
            ("--svg", svg),
            ("--measured", measured),
        ):
            if value is not None:
                refuse(f"--program prints a worker's program: leave out {option}")
        _show_program(first, program, json=json)
        return
    # Timelines: files first, then the terminal.
    iterations = _read_measured(measured, first).iterations if measured is not None else ()
    if html is not None:
        write_or_refuse(html, _render_page(given, iterations))
    if perfetto is not None:
        write_or_refuse(perfetto, perfetto_trace(first.schedule, iterations))
    if svg is not None:
        write_or_refuse(svg, _render_picture(first))
    if json:
        print_json(_build_answer(given, iterations))
        return
    for schedule_in_file in given:
        _print_schedule(schedule_in_file, iterations, console_of_width(width))
    for path, hint in ((html, BROWSER), (perfetto, ": open it in ui.perfetto.dev"), (svg, "")):
        if path is not None:
            _print_written(path, hint)


def _read_or_refuse(files: Sequence[Path]) -> Iterator[ScheduleInFile]:
    """Yield all schedules of the given files and tables. Exits 2 if one cannot be read."""
    for path in files:
        try:
            yield from read_schedules(path)
        except ValueError as error:
            refuse(refusal_text(path, error))


def _show_run(folder: Path, html: Path | None, console: Console, *, json: bool) -> None:
    """Show the run in a folder. Exits 2 if it cannot be read."""
    try:
        run: RunRecord = read_run(folder)
    except RunRecordError as error:
        refuse(error)
    if html is not None:
        write_or_refuse(html, run_page(run, html))
    if json:
        print_json(build_run_summary(run))
        return
    print_run(run, console)
    if html is not None:
        _print_written(html, BROWSER)


def _show_program(given: ScheduleInFile, name: str, *, json: bool) -> None:
    """Print a worker's program. Exits 2 if there is none, or if the schedule breaks rules."""
    try:
        worker = Worker.parse(name)
    except ValueError as error:
        refuse(f"--program: {error}")
    # Only a live worker has a program, and only a valid schedule has transfers that match.
    if worker not in given.schedule.seat_of:
        refuse(
            f"--program {name}: {given.path} has no program for this worker; expected one of "
            f"{', '.join(map(str, given.schedule.members))}"
        )
    if violations := check(given.schedule):
        refuse(
            f"{given.path} breaks rules ({violations[0].rule} and perhaps others): see slipstream "
            "check"
        )
    lines = [*map(str, build_program(given.schedule, worker).instructions)]
    if json:
        print_json({"worker": name, "program": lines})
    else:
        typer.echo("\n".join(lines))


def _print_written(path: Path, hint: str) -> None:
    err.print(f"written to {path}{hint}", soft_wrap=True)


def _build_answer(
    given: Sequence[ScheduleInFile], iterations: Sequence[MeasuredIteration]
) -> dict[str, object]:
    """Return the JSON answer: of one schedule, or a list of several under `schedules`."""
    measured = [
        {"iteration": item.iteration, "period": measured_period(item)} for item in iterations
    ]
    answers = [summarize_schedule(item.schedule) | {"measured": measured} for item in given]
    if len(given) == 1:
        return answers[0]
    return {
        "schedules": [
            {"file": str(item.path)} | answer for item, answer in zip(given, answers, strict=True)
        ]
    }


def _render_page(given: Sequence[ScheduleInFile], iterations: Sequence[MeasuredIteration]) -> bytes:
    """Return the HTML page of the schedules. Exits 2 if there is too much to show."""
    # Files in different folders may have the same name.
    names = [item.path.stem for item in given]
    shown = []
    for item in given:
        violations = check(item.schedule)
        name = item.path.stem if names.count(item.path.stem) == 1 else str(item.path)
        shown.append(ShownSchedule(name, item.schedule, str(violations[0]) if violations else None))
    try:
        return timeline_page(shown, iterations)
    except ValueError as error:
        refuse(f"{', '.join(str(item.path) for item in given)}: {error}; use --perfetto")


def _render_picture(given: ScheduleInFile) -> bytes:
    """Return the SVG picture of a schedule. Exits 2 if there is too much to draw."""
    try:
        return draw_schedule(given.schedule)
    except ValueError as error:
        refuse(f"{given.path}: {error}; use --html or --perfetto")


def _print_schedule(
    given: ScheduleInFile, iterations: Sequence[MeasuredIteration], console: Console
) -> None:
    schedule = given.schedule
    # A schedule that breaks rules is shown as well, since its picture shows what is wrong.
    violations = check(schedule)
    if violations:
        err.print(
            f"this schedule breaks rules ({violations[0].rule} and perhaps others): see "
            "slipstream check",
            style="red",
            soft_wrap=True,
        )
    console.print(Text(summary_line(schedule), "bold"), soft_wrap=True)
    console.print(draw_timeline(schedule, console.width))
    if iterations:
        last = iterations[-1]
        title = (
            f"measured, iteration {last.iteration}: longest busy window "
            f"{duration(measured_period(last))}"
        )
        console.print(Text(title, "bold"), soft_wrap=True)
        console.print(draw_measured_timeline(schedule, last, console.width))


def _read_measured(path: Path, given: ScheduleInFile) -> MeasuredTrace:
    """Return a file's measured trace. Exits 2 if it is unreadable, or of another schedule."""
    try:
        trace = read_measured_trace(path)
    except MeasuredTraceError as error:
        refuse(error)
    # Ops are drawn in the rows of the schedule's workers, so all must be of this schedule.
    for iteration in trace.iterations:
        for op in iteration.ops:
            if op.worker not in given.schedule.seat_of:
                refuse(
                    f"{path}: iteration {iteration.iteration}: worker {op.worker} is not one of "
                    f"the live workers of {given.path}; give the schedule that the run replayed"
                )
            if op.slice is not None and not 0 <= op.slice < len(given.schedule.layers_by_slice):
                refuse(
                    f"{path}: iteration {iteration.iteration}: {op.kind} on {op.worker} is of "
                    f"slice {op.slice}; {given.path} has {len(given.schedule.layers_by_slice)}; "
                    "give the schedule that the run replayed"
                )
    return trace
