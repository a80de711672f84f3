"""Workers of `slipstream train` that go on as half their processes: which can, and the schedules meanwhile."""

from collections.abc import Callable
from functools import cache

from slipstream.planner.degraded import degradable, with_degraded
from slipstream.planner.failures import FailurePlanner
from slipstream.planner.job.file import Job
from slipstream.runtime.config import RunConfig
from slipstream.runtime.coordinator.planning import Finders, WithDegraded
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.tables.table import Table


def may_degrade(job: Job, config: RunConfig, say: Callable[[str], None]) -> frozenset[int]:
    """The columns whose workers may; which have no room for that, though they are asked to, is said."""
    if not config.training.degraded_ranks:
        return frozenset()
    columns = degradable(job)
    for column in sorted(set(range(job.stages)) - columns):
        say(f"workers of stage {column} that lose a rank are down: half of their ranks have no room for a micro-batch, "
            "or for gradients on their way, beside twice the weights")
    return columns


def with_less_room(job: Job, first: Schedule, table: Table | None) -> WithDegraded:
    """What finds schedules while workers go on as half their processes: for each, less memory is left."""
    @cache
    def find(degraded: tuple[Worker, ...]) -> Finders:
        planner = FailurePlanner(with_degraded(job, degraded), first, table)
        return Finders(planner.after, planner.at_speeds, planner)

    return find
