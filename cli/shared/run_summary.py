"""Summarise a run, as numbers for JSON and as text."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slipstream.cli.shared.console import duration, printable
from slipstream.cli.shared.event_words import group, sentence
from slipstream.runtime.events import EVENTS, SCHEDULES, Failed, Resumed
from slipstream.runtime.run_record import Happened, RunRecord, Stretch

MOST_LINES = 60
"""Maximum number of generations, and of events, that are listed in a terminal: the last ones."""


def run_summary(run: RunRecord) -> dict[str, object]:
    """Return the answer of `slipstream show --run --json`, with durations in seconds."""
    newest = run.starts[-1]
    return {
        "job": newest.job,
        "workers": newest.workers,
        "iterations": len(run.committed),
        "of": newest.iterations,
        "seconds": run.seconds,
        "starts": len(run.starts),
        "state": state(run),
        "failures": sum(isinstance(item.event, Failed) for item in run.events),
        "longest_pause": max((item.event.pause for item in run.events if isinstance(item.event, Resumed)), default=0.0),
        "throughput": throughput(run),
        "orders": [_order(run, item) for item in run.stretches],
        "events": str(run.folder / EVENTS),
    }


def _order(run: RunRecord, stretch: Stretch) -> dict[str, object]:
    return {
        "from": stretch.begin, "to": stretch.end, "first_iteration": stretch.order.iteration,
        "iterations": len(stretch.committed), "phase": stretch.order.phase, "live": stretch.order.live,
        "planned_period": stretch.order.planned_period, "measured_period": stretch.measured_period,
        "planned_share": stretch.planned_share, "measured_share": run.measured_share(stretch),
        "throughput": rate(run, stretch),
        "schedule": str(schedule_file(run, stretch)),
    }


def schedule_file(run: RunRecord, stretch: Stretch) -> Path:
    """Return the path of the schedule of a generation."""
    return run.folder / SCHEDULES / f"{stretch.order.schedule}.json"


def throughput(run: RunRecord) -> float | None:
    """Return the mean throughput of the whole run, in samples per second, or None for a run of no length."""
    return len(run.committed) * run.starts[-1].samples / run.seconds if run.seconds else None


def rate(run: RunRecord, stretch: Stretch) -> float | None:
    """Return the usual throughput of a generation, in samples per second, or None if it is unknown."""
    return run.starts[-1].samples / stretch.iteration_seconds if stretch.iteration_seconds else None


def state(run: RunRecord) -> str:
    """Describe whether the run has ended."""
    if run.finished is None:
        return "goes on, or was killed"
    return "finished" if run.finished.error is None else "ended early"


def clock(seconds: float) -> str:
    """Format a time of the run for a reader: `12.3 s`, `4:05`, `26:04:05`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def percent(share: float | None) -> str:
    """Format a share for a reader. None gives an empty string."""
    return "" if share is None else f"{100 * share:.0f} %"


def told(run: RunRecord) -> list[Happened]:
    """Return the events that are worth a line."""
    return [happened for happened in run.events if group(happened.event) is not None]


def headline(run: RunRecord) -> str:
    """Return the run in one line."""
    newest, mean = run.starts[-1], throughput(run)
    failures = sum(isinstance(one.event, Failed) for one in run.events)
    return printable(f"{newest.job}: {state(run)} · {len(run.committed)} of {newest.iterations} iterations in "
                     f"{clock(run.seconds)}") + (f" · {mean:.4g} samples/s" if mean else "") \
        + f" · {newest.workers} workers · {failures} failure{'s' * (failures != 1)}"


def print_run(run: RunRecord, console: Console) -> None:
    """Print the run as text."""
    console.print(headline(run), style="bold", soft_wrap=True)
    console.print(_table(run.stretches[-MOST_LINES:], run))
    console.print("Shares are of the throughput with all workers, planned and measured; above 100 % where "
                  "those iterations were slower, as the first ones of a run are.", style="dim")
    events = told(run)
    if len(events) > MOST_LINES:
        console.print(f"{len(events) - MOST_LINES} earlier events are in {run.folder / EVENTS}", style="dim",
                      soft_wrap=True)
    for event in events[-MOST_LINES:]:
        console.print(f"{clock(event.at):>10}  iteration {event.event.iteration:>6}  "
                      f"{printable(sentence(event.event))}", soft_wrap=True)


def _table(stretches: Sequence[Stretch], run: RunRecord) -> Table:
    table = Table("from", "iterations", "phase", "workers", "planned", "share", "measured", "share", "samples/s",
                  box=None, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.justify, column.no_wrap = "left" if column.header == "phase" else "right", True
    for one in stretches:
        measured, speed, first = one.measured_period, rate(run, one), one.order.iteration
        table.add_row(clock(one.begin), f"{first}-{first + len(one.committed) - 1}" if one.committed else str(first),
                      one.order.phase, str(one.order.live), duration(one.order.planned_period),
                      percent(one.planned_share), "" if measured is None else duration(measured),
                      percent(run.measured_share(one)), "" if speed is None else f"{speed:.4g}")
    return table
