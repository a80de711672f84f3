"""`slipstream show`: a schedule as a timeline, in the terminal and for Perfetto."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from cli.check import read_or_refuse
from cli.console import duration, err, out, print_json, refuse, write_or_refuse
from cli.perfetto import perfetto_trace
from cli.summary import summary, summary_line
from cli.svg import drawing
from cli.timeline import measured_timeline, timeline
from schedules.check import check
from schedules.schedule import Schedule, period_ticks
from schedules.trace import TICK_SECONDS, MeasuredIteration, Trace, TraceError, placed_ops, read_trace

File = Annotated[Path, typer.Argument(metavar="FILE", help="A schedule file.")]
Perfetto = Annotated[Path | None, typer.Option("--perfetto", metavar="FILE", help=(
    "Write a trace that ui.perfetto.dev opens; with --measured, the measured ops beside the planned ones."))]
Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write a picture.")]
Measured = Annotated[Path | None, typer.Option("--measured", metavar="TRACE", help=(
    "When each op really ran, as `slipstream train` recorded it."))]
Width = Annotated[int | None, typer.Option("--width", metavar="N", min=40, max=1000, help=(
    "Characters to draw in. Default: those of the terminal."))]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def show(file: File, perfetto: Perfetto = None, svg: Svg = None, measured: Measured = None, width: Width = None,
         json: Json = False) -> None:
    """Show a schedule: a row for each worker, time from left to right."""
    schedule = read_or_refuse(file)
    iterations = _read_measured(measured, schedule, file).iterations if measured is not None else ()
    if perfetto is not None:
        write_or_refuse(perfetto, perfetto_trace(schedule, iterations))
    if svg is not None:
        write_or_refuse(svg, _picture(schedule, file))
    if json:
        print_json(summary(schedule) | {"measured": [
            {"iteration": iteration.iteration, "period": measured_period(iteration)} for iteration in iterations]})
        return
    _print(schedule, iterations, Console(width=width) if width else out)
    if perfetto is not None:
        err.print(f"written to {perfetto}: open it in ui.perfetto.dev", markup=False, highlight=False, soft_wrap=True)
    if svg is not None:
        err.print(f"written to {svg}", markup=False, highlight=False, soft_wrap=True)


def _picture(schedule: Schedule, file: Path) -> bytes:
    """The SVG drawing; exits 2 where there is too much to draw."""
    try:
        return drawing(schedule)
    except ValueError as error:
        refuse(f"{file}: {error}; use --perfetto")


def measured_period(iteration: MeasuredIteration) -> float:
    """The longest busy window of a worker in a measured iteration, in seconds."""
    return period_ticks(op for ops in placed_ops(iteration).values() for op in ops) * TICK_SECONDS


def _print(schedule: Schedule, iterations: tuple[MeasuredIteration, ...], console: Console) -> None:
    violations = check(schedule)
    if violations:
        err.print(f"this schedule breaks rules ({violations[0].rule} and perhaps others): see slipstream check",
                  style="red", markup=False, highlight=False, soft_wrap=True)
    console.print(Text(summary_line(schedule), "bold"), soft_wrap=True)
    console.print(timeline(schedule, console.width))
    if iterations:
        last = iterations[-1]
        title = f"measured, iteration {last.iteration}: longest busy window {duration(measured_period(last))}"
        console.print(Text(title, "bold"), soft_wrap=True)
        console.print(measured_timeline(schedule, last, console.width))


def _read_measured(path: Path, schedule: Schedule, file: Path) -> Trace:
    """The trace in a file; exits 2 where it cannot be read or is not of this schedule's workers."""
    try:
        trace = read_trace(path)
    except TraceError as error:
        refuse(error)
    for iteration in trace.iterations:
        for op in iteration.ops:
            if op.worker not in schedule.seat_of:
                refuse(f"{path}: iteration {iteration.iteration}: worker {op.worker} is not one of the live workers of "
                       f"{file}; give the schedule that the run replayed")
    return trace
