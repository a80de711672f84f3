"""Summarise a schedule, as numbers for JSON and as lines."""

from slipstream.cli.shared.console import duration
from slipstream.schedules.measured_trace import TICK_SECONDS, MeasuredIteration, placed_ops
from slipstream.schedules.memory import memory_peaks
from slipstream.schedules.schedule import Schedule, Worker, compute_period_ticks
from slipstream.schedules.tables.relabel import count_layers_to_load


def busy_shares(schedule: Schedule) -> dict[Worker, float]:
    """Return the share of the period in which each live worker runs ops; reductions that overlap with compute do not
    count."""
    return schedule.compute_for_each(lambda worker: sum(
        op.end_ticks - op.start_ticks for op in schedule.ops_on_compute(worker)) / (schedule.period_ticks or 1))


def bubble_share(schedule: Schedule) -> float:
    """Return the share of the live workers' time, over one period, in which they run no op (0 to 1)."""
    shares = busy_shares(schedule)
    return 1 - sum(shares.values()) / len(shares) if shares and schedule.period_ticks else 0.0


def measured_period(iteration: MeasuredIteration) -> float:
    """Return the longest busy window of a worker in a measured iteration, in seconds."""
    return compute_period_ticks(op for ops in placed_ops(iteration).values() for op in ops) * TICK_SECONDS


def summarize_schedule(schedule: Schedule) -> dict[str, object]:
    """Return the answer of `slipstream show --json`: durations in seconds, memory in the job's unit."""
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
        "holds": {str(seat.worker): seat.holds for seat in schedule.seats if seat.holds is not None},
        "moves": [{"worker": str(seat.worker), "role": str(seat.role)} for seat in schedule.moves],
        "peak_memory": max(peaks) * schedule.memory.unit if schedule.memory and peaks else None,
        "bubble_share": bubble_share(schedule),
    }


def gap_text(gap: float) -> str:
    """Return a gap to a bound in percent; one that is not 0 is never shown as 0."""
    return f"{max(gap, 1e-4) if gap > 0 else 0.0:.2%}"


def summary_line(schedule: Schedule) -> str:
    """Return one line with the main figures of a schedule."""
    parts = [f"period {duration(schedule.seconds(schedule.period_ticks))}"]
    if schedule.status == "optimal":
        parts.append(f"proven optimal {schedule.scope.description}")
    elif schedule.gap is not None:
        parts.append(f"bound {duration(schedule.seconds(schedule.lower_bound_ticks))}, gap {gap_text(schedule.gap)}")
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
    least, most = (peak * schedule.memory.unit for peak in (min(peaks), max(peaks)))
    return f"peak memory {least:,.6g}" + (f" to {most:,.6g}" if most > least else "") + ", in the job file's unit"


def role_change_lines(schedule: Schedule) -> list[str]:
    """Return one line for each worker that plays a role other than its own. Empty if all keep theirs."""
    lines = []
    for seat in schedule.moves:
        loads = count_layers_to_load(schedule.grid, seat.worker, seat.role)
        lines.append(f"{seat.worker} takes over {seat.role}: " + (
            "loads its parameters from a peer" if loads else "holds its parameters already"))
    return lines
