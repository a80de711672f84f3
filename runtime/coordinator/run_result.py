"""Result of a run."""

from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from slipstream.runtime.coordinator.decisions.commit_log import CheckpointCost
from slipstream.runtime.coordinator.decisions.recoveries import Recovery
from slipstream.runtime.coordinator.decisions.slow_workers import SpeedEvent
from slipstream.runtime.coordinator.event_loop import EventLoop
from slipstream.runtime.state.checksum import combined_digest
from slipstream.schedules.measured_trace import MeasuredTrace
from slipstream.schedules.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Losses, times and other results of a complete run, also held by files in `out`.

    After a restart of node 0, recoveries, speed events, notes, trace and measured periods are only
    those since then.
    """

    first_iteration: int
    """Iteration with which this start began: 0, or the iteration of its checkpoint."""
    losses: tuple[float, ...]
    """Loss of each iteration from `first_iteration` on, a mean over all micro-batches."""
    parameter_digest: str
    """Digest of all parameters after the last iteration (`runtime.state.checksum`)."""
    measured_period_seconds: float | None
    """Median longest busy window (`CommitLog.measured_period_seconds`); None without iterations."""
    planned_period_seconds: float
    """Period of the first schedule."""
    recoveries: tuple[Recovery, ...]
    speed_events: tuple[SpeedEvent, ...]
    """Changes of workers' speeds that were detected, and what was done about each."""
    speed_periods_seconds: tuple[float | None, ...]
    """Measured period after each of `speed_events` until the next; None without iterations."""
    notes: tuple[str, ...]
    """Lines about problems that the run survived, such as checkpoints that were not written."""
    checkpoints: tuple[CheckpointCost, ...]
    """Costs of the checkpoints that were written during training."""
    trace: MeasuredTrace
    out: Path


def build_result(schedule: Schedule, events: EventLoop, out: Path) -> RunResult:
    """Return the result of a complete run that began with `schedule`."""
    state, log, news = events.state, events.state.log, events.news
    # Each change of speeds counts until the next one; the last counts to the end of the run.
    periods = []
    for event, following in zip_longest(news.speed_events, news.speed_events[1:]):
        end = following.iteration if following else None
        periods.append(log.measured_period_seconds(event.iteration, end))
    # All else is as the decisions left it.
    return RunResult(
        first_iteration=log.first_iteration,
        losses=tuple(log.losses),
        trace=log.build_trace(),
        out=out,
        parameter_digest=combined_digest(log.digests),
        measured_period_seconds=log.measured_period_seconds(),
        planned_period_seconds=schedule.seconds(schedule.period_ticks),
        recoveries=state.recovery.recoveries,
        notes=tuple(news.notes),
        speed_events=tuple(news.speed_events),
        speed_periods_seconds=tuple(periods),
        checkpoints=state.checkpoints.checkpoint_costs,
    )
