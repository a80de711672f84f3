"""Summarise schedules and runs, as numbers for JSON and as text, and describe events."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from slipstream.cli.shared.console import duration, escape_controls
from slipstream.runtime.events import (
    EVENTS,
    SCHEDULES,
    AnyEvent,
    CheckpointWritten,
    CoordinatorRestarted,
    Failed,
    FetchAbandoned,
    FetchBegun,
    FetchProgressed,
    HandedOver,
    Joined,
    LeftOut,
    NodeLost,
    Noted,
    OrderGiven,
    PlanAnswered,
    PlanAsked,
    Recovered,
    Resumed,
    RunFinished,
    SettlingChosen,
    Slowed,
    Started,
    WentBack,
)
from slipstream.runtime.run_record import GenerationRecord, RunRecord, TimedEvent
from slipstream.schedules.measured_trace import TICK_SECONDS, MeasuredIteration, placed_ops
from slipstream.schedules.memory import memory_peaks
from slipstream.schedules.schedule import Schedule, Worker, compute_period_ticks
from slipstream.schedules.tables.relabel import count_layers_to_load


def busy_shares(schedule: Schedule) -> dict[Worker, float]:
    """Return the share of the period in which each live worker computes."""
    return schedule.compute_for_each(
        lambda worker: (
            sum(op.end_ticks - op.start_ticks for op in schedule.ops_on_compute(worker))
            / (schedule.period_ticks or 1)
        )
    )


def bubble_share(schedule: Schedule) -> float:
    """Return live workers' idle share (0 to 1) of the period; 0 without workers."""
    shares = busy_shares(schedule)
    return 1 - sum(shares.values()) / len(shares) if shares and schedule.period_ticks else 0.0


def measured_period(iteration: MeasuredIteration) -> float:
    """Return the longest busy window of a worker in a measured iteration, in seconds."""
    return (
        compute_period_ticks(op for ops in placed_ops(iteration).values() for op in ops)
        * TICK_SECONDS
    )


def summarize_schedule(schedule: Schedule) -> dict[str, object]:
    """Return a schedule for JSON, with seconds, and memory in the job file's unit."""
    peaks = memory_peaks(schedule).values()
    return {
        "job": schedule.job,
        "period": schedule.seconds(schedule.period_ticks),
        "lower_bound": schedule.seconds(schedule.lower_bound_ticks),
        "gap": schedule.gap,
        "status": schedule.status,
        "bound_scope": schedule.scope,
        "method": schedule.method,
        "backward": schedule.backward,
        "optimizer": schedule.optimizer,
        "workers": len(schedule.seats),
        "failed": [str(worker) for worker in schedule.failed],
        "rerouted": schedule.rerouted,
        "shed": schedule.shed,
        "holds": {
            str(seat.worker): seat.holds for seat in schedule.seats if seat.holds is not None
        },
        "moves": [{"worker": str(seat.worker), "role": str(seat.role)} for seat in schedule.moves],
        "peak_memory": max(peaks) * schedule.memory.unit if schedule.memory and peaks else None,
        "bubble_share": bubble_share(schedule),
    }


def gap_text(gap: float) -> str:
    """Return a gap to a bound in percent, which is `0.00%` only for no gap."""
    return f"{max(gap, 1e-4) if gap > 0 else 0.0:.2%}"


def summary_line(schedule: Schedule) -> str:
    """Return one line with the main figures of a schedule."""
    parts = [f"period {duration(schedule.seconds(schedule.period_ticks))}"]
    if schedule.status == "optimal":
        parts.append(f"proven optimal {schedule.scope.description}")
    elif schedule.gap is not None:
        parts.append(
            f"bound {duration(schedule.seconds(schedule.lower_bound_ticks))}, gap "
            f"{gap_text(schedule.gap)}"
        )
    parts.append(f"bubbles {bubble_share(schedule):.1%}")
    if schedule.failed:
        parts.append(f"{len(schedule.failed)} down, {schedule.rerouted} re-routed")
    if schedule.shed:
        parts.append(f"{schedule.shed} shed")
    if schedule.moves:
        parts.append(f"{len(schedule.moves)} moved")
    parts.append(_describe_memory(schedule))
    return f"{schedule.job}: " + " · ".join(part for part in parts if part)


def _describe_memory(schedule: Schedule) -> str:
    peaks = memory_peaks(schedule).values()
    if schedule.memory is None or not peaks:
        return ""
    lowest, highest = (peak * schedule.memory.unit for peak in (min(peaks), max(peaks)))
    return (
        f"peak memory {lowest:,.6g}"
        + (f" to {highest:,.6g}" if highest > lowest else "")
        + ", in the job file's unit"
    )


def role_change_lines(schedule: Schedule) -> list[str]:
    """Return one line for each worker that plays a role other than its own."""
    lines = []
    for seat in schedule.moves:
        loads = count_layers_to_load(schedule.grid, seat.worker, seat.role)
        lines.append(
            f"{seat.worker} takes over {seat.role}: "
            + ("loads its parameters from a peer" if loads else "holds its parameters already")
        )
    return lines


EventGroup = Literal["failure", "order", "join", "slow", "layers", "checkpoint", "other"]
"""Group of events that have the same kind of mark on a run's page."""


def event_group(event: AnyEvent) -> EventGroup | None:
    """Return the group that decides an event's mark on the page; None if no mark."""
    match event:
        case Failed() | NodeLost() | WentBack() | CoordinatorRestarted():
            return "failure"
        case OrderGiven():
            return "order"
        case Joined():
            return "join"
        case Slowed() | Recovered() | LeftOut():
            return "slow"
        case SettlingChosen() | FetchBegun() | FetchAbandoned() | HandedOver():
            return "layers"
        case CheckpointWritten():
            return "checkpoint"
        case PlanAsked() | FetchProgressed():
            return None
        case _:
            return "other"


def describe_event(event: AnyEvent) -> str:
    """Return one line that says what happened in an event of a run."""
    match event:
        case Started():
            return (
                "started" if event.iteration == 0 else f"restarted from iteration {event.iteration}"
            )
        case Failed():
            return event.reason
        case NodeLost():
            return (
                f"machine {event.node} is lost, with all of its workers: "
                f"{', '.join(map(str, event.workers))}"
            )
        case OrderGiven():
            return (
                f"{event.phase}: {event.live} workers train, with a period of "
                f"{duration(event.planned_period)} planned"
            )
        case PlanAsked():
            return f"a schedule {_list_down(event.down)} is asked for"
        case PlanAnswered():
            answer = (
                f"not found: {event.error}"
                if event.error is not None
                else f"ready in {duration(event.took)}"
            )
            return (
                "the schedule "
                f"{_list_down(event.down)}{'' if event.phase == 'at once' else ', settled'}: "
                f"{answer}"
            )
        case Joined():
            return f"worker {event.worker} has joined"
        case Resumed():
            return (
                f"training continues with {event.live} workers, after a pause of "
                f"{duration(event.pause)}"
            )
        case Slowed():
            return f"worker {event.worker} is slow: it takes {event.factor:.3g} times as long"
        case Recovered():
            return f"worker {event.worker} is not slow any more"
        case LeftOut():
            return f"worker {event.worker} is left out: {event.reason}"
        case CoordinatorRestarted():
            return f"a new coordinator has adopted {event.live} workers"
        case CheckpointWritten():
            return f"checkpoint of iteration {event.checkpoint}, written in {duration(event.took)}"
        case Noted():
            return event.text
        case RunFinished():
            return "ended" if event.error is None else f"ended early: {event.error}"
        case _:
            return _describe_layer_event(event)


def _describe_layer_event(
    event: SettlingChosen | FetchBegun | FetchProgressed | FetchAbandoned | HandedOver | WentBack,
) -> str:
    """Return one line on an event of moving layers, or a return to a checkpoint."""
    match event:
        case SettlingChosen():
            pays = (
                ""
                if event.pays_after is None
                else f", which pays after {event.pays_after} iterations"
            )
            return (
                f"layers {'are to move' if event.settles else 'stay'}: "
                f"{event.moves_bytes / 1e6:.4g} MB in {duration(event.move_seconds)} would make "
                f"the period {duration(event.settled_period)} instead of "
                f"{duration(event.present_period)}{pays}"
            )
        case FetchBegun():
            subject, verb = (
                ("worker", "fetches") if len(event.workers) == 1 else ("workers", "fetch")
            )
            layers = f"{event.layers} layer{'s' * (event.layers != 1)}"
            return (
                f"{subject} {', '.join(map(str, event.workers))} {verb} {layers}, "
                f"to {event.purpose}"
            )
        case FetchProgressed():
            return f"{100 * event.share:.0f} % of the layers have been fetched"
        case FetchAbandoned():
            return f"the fetch of layers is abandoned: {event.reason}"
        case HandedOver():
            return "schedule and layers change together"
        case WentBack():
            return f"back to a checkpoint, {event.lost} iterations are run again: {event.reason}"


def _list_down(down: Sequence[Worker]) -> str:
    return f"without {', '.join(map(str, down))}" if down else "with all workers"


MAX_LINES = 60
"""Largest number of last generations, and of last events, that are printed."""


def build_run_summary(run: RunRecord) -> dict[str, object]:
    """Return the JSON answer of `slipstream show --run`, with times in seconds."""
    # A run may have been started several times: its last start says what it is to do.
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
        "longest_pause": max(
            (item.event.pause for item in run.events if isinstance(item.event, Resumed)),
            default=0.0,
        ),
        "throughput": mean_throughput(run),
        "orders": [_summarize_generation(run, item) for item in run.generations],
        "events": str(run.folder / EVENTS),
    }


def _summarize_generation(run: RunRecord, generation: GenerationRecord) -> dict[str, object]:
    return {
        "from": generation.begin,
        "to": generation.end,
        "first_iteration": generation.order.iteration,
        "iterations": len(generation.committed),
        "phase": generation.order.phase,
        "live": generation.order.live,
        "planned_period": generation.order.planned_period,
        "measured_period": generation.measured_period,
        "planned_share": generation.planned_share,
        "measured_share": run.measured_share(generation),
        "throughput": generation_rate(run, generation),
        "schedule": str(schedule_path(run, generation)),
    }


def schedule_path(run: RunRecord, generation: GenerationRecord) -> Path:
    """Return the path of a generation's schedule in the run's folder."""
    return run.folder / SCHEDULES / f"{generation.order.schedule}.json"


def mean_throughput(run: RunRecord) -> float | None:
    """Return the run's mean samples per second; None if the run has taken no time."""
    return len(run.committed) * run.starts[-1].samples / run.seconds if run.seconds else None


def generation_rate(run: RunRecord, generation: GenerationRecord) -> float | None:
    """Return a generation's samples per second, by its median iteration; None if unknown."""
    return (
        run.starts[-1].samples / generation.iteration_seconds
        if generation.iteration_seconds
        else None
    )


def state(run: RunRecord) -> str:
    """Return words on whether the run has finished, ended early, or may still be running."""
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
    """Format a share, of which 1 is all, as a percentage; "" for None."""
    return "" if share is None else f"{100 * share:.0f} %"


def notable_events(run: RunRecord) -> list[TimedEvent]:
    """Return the run's events that get a mark on its page: those with an `event_group`."""
    return [happened for happened in run.events if event_group(happened.event) is not None]


def run_headline(run: RunRecord) -> str:
    """Return a line on job, state, iterations, duration, throughput if known, workers, failures."""
    newest, mean = run.starts[-1], mean_throughput(run)
    failures = sum(isinstance(entry.event, Failed) for entry in run.events)
    return (
        escape_controls(
            f"{newest.job}: {state(run)} · {len(run.committed)} of {newest.iterations} iterations "
            f"in {run_time(run.seconds)}"
        )
        + (f" · {mean:.4g} samples/s" if mean else "")
        + f" · {newest.workers} workers · {failures} failure{'s' * (failures != 1)}"
    )


def print_run(run: RunRecord, console: Console) -> None:
    """Print a run's headline, and its last generations and events, up to `MAX_LINES` of each."""
    console.print(run_headline(run), style="bold", soft_wrap=True)
    console.print(_generations_table(run.generations[-MAX_LINES:], run))
    console.print(
        "Shares are of the throughput with all workers, planned and measured; above 100 % where "
        "those iterations were slower, as the first ones of a run are.",
        style="dim",
    )
    # The last events matter most in a terminal; the file has them all.
    events = notable_events(run)
    if len(events) > MAX_LINES:
        console.print(
            f"{len(events) - MAX_LINES} earlier events are in {run.folder / EVENTS}",
            style="dim",
            soft_wrap=True,
        )
    for event in events[-MAX_LINES:]:
        console.print(
            f"{run_time(event.at):>10}  iteration {event.event.iteration:>6}  "
            f"{escape_controls(describe_event(event.event))}",
            soft_wrap=True,
        )


def _generations_table(generations: Sequence[GenerationRecord], run: RunRecord) -> Table:
    table = Table(
        "from",
        "iterations",
        "phase",
        "workers",
        "planned",
        "share",
        "measured",
        "share",
        "samples/s",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for column in table.columns:
        column.justify, column.no_wrap = "left" if column.header == "phase" else "right", True
    # A generation that ended before an iteration has nothing measured.
    for generation in generations:
        measured, speed = generation.measured_period, generation_rate(run, generation)
        iterations = str(generation.order.iteration)
        if generation.committed:
            iterations += f"-{generation.order.iteration + len(generation.committed) - 1}"
        measured_text = "" if measured is None else duration(measured)
        speed_text = "" if speed is None else f"{speed:.4g}"
        table.add_row(
            run_time(generation.begin),
            iterations,
            generation.order.phase,
            str(generation.order.live),
            duration(generation.order.planned_period),
            as_percent(generation.planned_share),
            measured_text,
            as_percent(run.measured_share(generation)),
            speed_text,
        )
    return table
