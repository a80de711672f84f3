"""The fault-free period, which plans with failures are compared with: that of whole stages in place, all workers alive.

Plans of other kinds, in which layers have moved or micro-batches are cut, say nothing about it. It is planned before
anything else, and kept by callers from plan to plan (`reference_key`): a poor one makes failures look cheap.
"""

import hashlib

import msgspec

from slipstream.planner.job.file import Job
from slipstream.planner.options import PlanOptions
from slipstream.schedules.schedule import Schedule

VERSION = 2
"""Of what is kept. Periods are those of valid plans and bounds are proven, so a better planner needs no new one. Until
version 1, periods of plans of other kinds were kept, too."""
CLOSE = 1e-3
"""A fault-free plan that is this close to its bound is as good as the best."""


class FaultFree(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is known of the best period with no worker down, in seconds."""

    period: float
    """Of the best plan found."""
    bound: float
    """Proven: none is shorter."""

    @property
    def close(self) -> bool:
        """Whether a better plan would change nothing that matters."""
        return self.period <= self.bound * (1 + CLOSE)

    def better(self, other: "FaultFree | None") -> "FaultFree":
        """The best of two plans, and the larger of two bounds."""
        if other is None:
            return self
        return FaultFree(period=min(self.period, other.period), bound=max(self.bound, other.bound))

    def at_most(self, period: float) -> "FaultFree":
        """With a plan of the same kind for fewer workers that has this period: they could all do as well."""
        return FaultFree(period=min(self.period, period), bound=min(self.bound, period))


def reference_options(options: PlanOptions) -> PlanOptions:
    """What plans are compared with: the job as it runs when nothing has failed, whatever may move or be cut then."""
    return msgspec.structs.replace(options, layers="fixed", slices=False, from_checkpoint=False)


def is_alike(schedule: Schedule) -> bool:
    """Whether a schedule is of the kind that `reference_options` asks for. Where reductions overlap, micro-batches are
    cut for these alone if all stay with their own workers."""
    in_place = not schedule.slices or (schedule.overlaps and not schedule.rerouted and not schedule.shed)
    return in_place and all(seat.holds is None and seat.role == seat.worker for seat in schedule.seats)


def reference_key(options: PlanOptions, job: Job) -> str:
    """A digest of all that the fault-free period depends on."""
    problem = reference_options(options).problem(job)
    rules = (VERSION, options.method, problem.backward, problem.optimizer,
             *([job.network] if job.network.overlap else []))
    text = msgspec.json.encode((rules, problem.tick_seconds, problem.grid, problem.times, problem.memory))
    return hashlib.sha256(text).hexdigest()
