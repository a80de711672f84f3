"""Summarise the result of `slipstream train`, as numbers for JSON and as text."""

import math

from slipstream.cli.shared.console import duration
from slipstream.runtime.launch import RunResult


def build_report(result: RunResult) -> dict[str, object]:
    """Return the answer of `slipstream train --json`, with durations in seconds."""
    return {
        "iterations": len(result.losses),
        "losses": [loss if math.isfinite(loss) else None for loss in result.losses],
        "parameter_digest": result.parameter_digest,
        "first_iteration": result.first_iteration,
        "recoveries": [{"iteration": one.iteration, "dead": list(map(str, one.dead)),
                        "returned": list(map(str, one.returned)), "reasons": list(one.reasons),
                        "live": one.live, "nodes": list(one.nodes), "seconds": one.seconds, "broken": one.broken,
                        "commit_gap_seconds": one.commit_gap_seconds, "went_back_to": one.went_back_to,
                        "repeated": one.repeated} for one in result.recoveries],
        "slow_workers": [{"worker": str(change.worker), "factor": change.factor, "since": change.since,
                          "iteration": event.iteration, "left_out": change.worker in event.left_out,
                          "rescheduled": event.changed, "planned_period_before": event.present_seconds,
                          "planned_period": event.planned_seconds, "measured_period": seconds}
                         for event, seconds in zip(result.speed_events, result.speed_periods_seconds, strict=True)
                         for change in event.changes],
        "measured_period": result.measured_period_seconds,
        "planned_period": result.planned_period_seconds,
    }


def summary_text(result: RunResult) -> str:
    """Return a few lines for a reader: the losses, the periods, and where the files are."""
    lines = []
    if result.losses and result.measured_period_seconds is not None:
        count = len(result.losses)
        lines.append(f"{count} iteration{'s' * (count > 1)}, loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f}")
        lines.append(f"period {duration(result.measured_period_seconds)} measured, "
                     f"{duration(result.planned_period_seconds)} planned with the job file's times")
    if result.recoveries:
        worst = max(recovery.seconds for recovery in result.recoveries)
        gap = max(recovery.commit_gap_seconds or 0.0 for recovery in result.recoveries)
        times = "once" if len(result.recoveries) == 1 else f"{len(result.recoveries)} times"
        lines.append(f"the workers changed {times}, the longest pause was {duration(worst)}"
                     + (f"; at most {duration(gap)} from one committed iteration to the next" if gap else ""))
    lines.append(f"parameters {result.parameter_digest[:16]}, everything in {result.out}")
    return "\n".join(lines)
