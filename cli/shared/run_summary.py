"""Summarise a run, as numbers for JSON and as text."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from slipstream.cli.shared.console import duration, escape_controls
from slipstream.cli.shared.event_descriptions import describe_event, event_group
from slipstream.runtime.events import EVENTS, SCHEDULES, Failed, Resumed
from slipstream.runtime.run_record import GenerationRecord, RunRecord, TimedEvent

MAX_LINES = 60
"""Maximum number of generations, and of events, that are listed in a terminal: the last ones."""


def build_run_summary(run: RunRecord) -> dict[str, object]:
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
        "throughput": mean_throughput(run),
        "orders": [_summarize_generation(run, item) for item in run.stretches],
        "events": str(run.folder / EVENTS),
    }


def _summarize_generation(run: RunRecord, stretch: GenerationRecord) -> dict[str, object]:
    return {
        "from": stretch.begin, "to": stretch.end, "first_iteration": stretch.order.iteration,
        "iterations": len(stretch.committed), "phase": stretch.order.phase, "live": stretch.order.live,
        "planned_period": stretch.order.planned_period, "measured_period": stretch.measured_period,
        "planned_share": stretch.planned_share, "measured_share": run.measured_share(stretch),
        "throughput": stretch_rate(run, stretch),
        "schedule": str(schedule_path(run, stretch)),
    }


def schedule_path(run: RunRecord, stretch: GenerationRecord) -> Path:
    """Return the path of the file, in the run's folder, of the schedule of a generation, `stretch`."""
    return run.folder / SCHEDULES / f"{stretch.order.schedule}.json"


def mean_throughput(run: RunRecord) -> float | None:
    """Return the mean throughput of the whole run, in samples per second, or None for a run of no length."""
    return len(run.committed) * run.starts[-1].samples / run.seconds if run.seconds else None


def stretch_rate(run: RunRecord, stretch: GenerationRecord) -> float | None:
    """Return the samples per second of a generation, `stretch`, by its median iteration time; None if that is
    unknown."""
    return run.starts[-1].samples / stretch.iteration_seconds if stretch.iteration_seconds else None


def state(run: RunRecord) -> str:
    """Describe in a few words whether the run has finished, ended early, or may still be running."""
    if run.finish_event is None:
        return "still running, or was killed"
    return "finished" if run.finish_event.error is None else "ended early"


def run_time(seconds: float) -> str:
    """Format a time of the run for a reader: `12.3 s`, `4:05`, `26:04:05`."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def as_percent(share: float | None) -> str:
    """Format a share between 0 and 1 as a percentage. None gives an empty string."""
    return "" if share is None else f"{100 * share:.0f} %"


def notable_events(run: RunRecord) -> list[TimedEvent]:
    """Return the events of the run that have a group (`event_group`), and so are worth a line."""
    return [happened for happened in run.events if event_group(happened.event) is not None]


def run_headline(run: RunRecord) -> str:
    """Return one line on the run: job, state, iterations, duration, throughput, workers and failures."""
    newest, mean = run.starts[-1], mean_throughput(run)
    failures = sum(isinstance(one.event, Failed) for one in run.events)
    return escape_controls(f"{newest.job}: {state(run)} · {len(run.committed)} of {newest.iterations} iterations in "
                           f"{run_time(run.seconds)}") + (f" · {mean:.4g} samples/s" if mean else "") \
        + f" · {newest.workers} workers · {failures} failure{'s' * (failures != 1)}"


def print_run(run: RunRecord, console: Console) -> None:
    """Print the history of a run as text on a console."""
    console.print(run_headline(run), style="bold", soft_wrap=True)
    console.print(_generations_table(run.stretches[-MAX_LINES:], run))
    console.print("Shares are of the throughput with all workers, planned and measured; above 100 % where "
                  "those iterations were slower, as the first ones of a run are.", style="dim")
    events = notable_events(run)
    if len(events) > MAX_LINES:
        console.print(f"{len(events) - MAX_LINES} earlier events are in {run.folder / EVENTS}", style="dim",
                      soft_wrap=True)
    for event in events[-MAX_LINES:]:
        console.print(f"{run_time(event.at):>10}  iteration {event.event.iteration:>6}  "
                      f"{escape_controls(describe_event(event.event))}", soft_wrap=True)


def _generations_table(stretches: Sequence[GenerationRecord], run: RunRecord) -> Table:
    table = Table("from", "iterations", "phase", "workers", "planned", "share", "measured", "share", "samples/s",
                  box=None, padding=(0, 1, 0, 0))
    for column in table.columns:
        column.justify, column.no_wrap = "left" if column.header == "phase" else "right", True
    for one in stretches:
        measured, speed, first = one.measured_period, stretch_rate(run, one), one.order.iteration
        table.add_row(run_time(one.begin), f"{first}-{first + len(one.committed) - 1}" if one.committed else str(first),
                      one.order.phase, str(one.order.live), duration(one.order.planned_period),
                      as_percent(one.planned_share), "" if measured is None else duration(measured),
                      as_percent(run.measured_share(one)), "" if speed is None else f"{speed:.4g}")
    return table
