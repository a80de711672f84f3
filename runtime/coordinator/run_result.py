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
    """Result of a run. The files in its folder, `out`, hold the same data, and the parameters as
    well (`runtime.checkpoints.parameters`)."""

    first_iteration: int
    """First iteration of this start: 0, or that of the checkpoint it resumed from."""
    losses: tuple[float, ...]
    """Loss of each iteration from `first_iteration` on, a mean over all micro-batches."""
    parameter_digest: str
    """Digest of all parameters after the last iteration (`runtime.state.checksum`)."""
    measured_period_seconds: float | None
    """Median over iterations of the longest busy window of any worker; None without iterations."""
    planned_period_seconds: float
    """Period of the first schedule."""
    recoveries: tuple[Recovery, ...]
    speed_events: tuple[SpeedEvent, ...]
    """Changes of workers' speeds that were detected, and what was done about each."""
    speed_periods_seconds: tuple[float | None, ...]
    """Median longest window, in seconds, from each speed event to the next, if any."""
    notes: tuple[str, ...]
    """Other problems that the run survived, such as checkpoints that could not be written."""
    checkpoints: tuple[CheckpointCost, ...]
    """Costs of the checkpoints that were written during training."""
    trace: MeasuredTrace
    out: Path


def build_result(schedule: Schedule, events: EventLoop, out: Path) -> RunResult:
    """Return the result of a run that has ended."""
    state, log, news = events.state, events.state.log, events.news
    return RunResult(first_iteration=log.first_iteration, losses=tuple(log.losses), trace=log.build_trace(), out=out,
                     parameter_digest=combined_digest(log.digests),
                     measured_period_seconds=log.measured_period_seconds(),
                     planned_period_seconds=schedule.seconds(schedule.period_ticks),
                     recoveries=state.recovery.recoveries, notes=tuple(news.notes),
                     speed_events=tuple(news.speed_events), speed_periods_seconds=tuple(
                         log.measured_period_seconds(event.iteration, end.iteration if end else None)
                         for event, end in zip_longest(news.speed_events, news.speed_events[1:])),
                     checkpoints=state.checkpoints.checkpoint_costs)
