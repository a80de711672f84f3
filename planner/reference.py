"""Find the fault-free period of a job, and the key by which callers store it."""

import hashlib
from collections.abc import Callable
from contextlib import suppress

import msgspec

from slipstream.planner.blockwise import Speed, TooLargeError
from slipstream.planner.bounding import with_rounded_bound
from slipstream.planner.budget import (
    Budget,
    ProgressCallback,
    SearchProgress,
    Tally,
    ignore_progress,
)
from slipstream.planner.job.file import Job
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.options import PlanOptions
from slipstream.planner.search.list_scheduler import BASELINES
from slipstream.schedules.schedule import Schedule

VERSION = 2
"""Version of the stored fault-free periods, part of their key.

Periods are those of valid plans and bounds are proven, so a better planner needs no new version.
Before version 2, periods of other kinds of plans were also stored.
"""
CLOSE = 1e-3
"""Relative gap to the bound up to which no better fault-free plan is searched for."""


class FaultFree(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Best known period of a job with no worker down, and its bound, in seconds."""

    period: float
    """Period, in seconds, of the best plan found."""
    bound: float
    """Proven bound on the period, in seconds; for 1F1B and ReCycle, the period itself."""

    @property
    def is_close(self) -> bool:
        """True if the period is so close to its bound that better plans hardly matter."""
        return self.period <= self.bound * (1 + CLOSE)

    def merged_with(self, other: "FaultFree | None") -> "FaultFree":
        """Return the shorter period and the larger bound of this and `other`, if any."""
        if other is None:
            return self
        return FaultFree(period=min(self.period, other.period), bound=max(self.bound, other.bound))

    def capped_at(self, period: float) -> "FaultFree":
        """Return a copy with period and bound of at most `period` seconds."""
        # The period was reached on fewer workers, so all of them can, too.
        return FaultFree(period=min(self.period, period), bound=min(self.bound, period))


def reference_options(options: PlanOptions) -> PlanOptions:
    """Return a copy of the options with layers in place and no cut micro-batch.

    This is how a job runs before anything fails, whatever the options allow after a failure.
    """
    return msgspec.structs.replace(options, layers="fixed", slices=False, from_checkpoint=False)


def is_reference_kind(schedule: Schedule) -> bool:
    """Return whether a schedule keeps layers and roles in place and cuts no micro-batch.

    If reductions overlap compute, micro-batches may be cut for them, as long as all parts stay on
    their own workers.
    """
    in_place = not schedule.slices or (
        schedule.has_overlap and not schedule.rerouted and not schedule.shed
    )
    return in_place and all(
        seat.holds is None and seat.role == seat.worker for seat in schedule.seats
    )


def reference_key(options: PlanOptions, job: Job) -> str:
    """Return a digest of what the fault-free period of a job depends on.

    Limits, seed and parameters of the search are left out: a longer one improves the stored period.
    Raises NoPlanError if no schedule can exist.
    """
    problem = reference_options(options).make_problem(job)
    rules = (
        VERSION,
        options.method,
        problem.backward,
        problem.optimizer,
        *([job.network] if job.network.overlap else []),
    )
    text = msgspec.json.encode(
        (rules, problem.tick_seconds, problem.grid, problem.times, problem.memory)
    )
    return hashlib.sha256(text).hexdigest()


class ReferenceSearch:
    """Search for the fault-free period with which plans are compared."""

    def __init__(
        self,
        options: PlanOptions,
        job: Job,
        fault_free: FaultFree | None,
        budget: Budget,
        speed: Speed,
        search: Callable[[PlanOptions, Job, Budget, Speed], Schedule],
    ) -> None:
        """Prepare a search by the function `search`, given an earlier result or None."""
        # With counted steps, this search has its own clock, so that plans do not depend on whether
        # an earlier search has found the period.
        clock = options.make_clock()
        self._search = search
        self._options, self._job, self.best = reference_options(options), job, fault_free
        self._budget = msgspec.structs.replace(budget, clock=clock, tally=Tally())
        self._speed = (
            speed
            if options.steps is None
            else Speed(options.limit_seconds, clock, options.params.blocks)
        )

    def improve(self, seconds: float, progress: ProgressCallback = ignore_progress) -> None:
        """Search for about `seconds`, unless the best known period is close to its bound.

        If a period is known, negative `seconds` do nothing. Without a plan, `best` stays as it is.
        """
        budget = msgspec.structs.replace(
            self._budget.with_seconds(seconds), progress=SearchProgress(progress)
        )
        if self.best and (self.best.is_close or budget.seconds_left < 0.0):
            return
        with suppress(TooLargeError, NoPlanError):  # layers in place may have none where others do
            self.add_schedule(self._search(self._options, self._job, budget, self._speed))

    def add_schedule(self, schedule: Schedule) -> None:
        """Improve `best` by the period and bound of a schedule that has no worker down.

        The shorter period and the larger bound are kept. For 1F1B and ReCycle, the period serves as
        the bound.
        """
        # These methods make one schedule, so that no search would find a shorter one.
        schedule = with_rounded_bound(schedule, self._options, self._job, ())
        period = schedule.seconds(schedule.period_ticks)
        is_baseline = self._options.method in BASELINES
        bound = period if is_baseline else schedule.seconds(schedule.lower_bound_ticks)
        self.best = FaultFree(period=period, bound=bound).merged_with(self.best)
