"""From a job and its failures to a schedule.

    job/         the job file
    model/       the scheduling problem, its bounds, its arrays
    search/      searches for the best solution
    plan         one checked schedule for a job and its failures (`options`)
    periods      periods by what is down, for simulations that ask for hundreds
    overlapped   reductions beside compute, in a plan made without them
    params       what steers a search
    budget       what a search may use: seconds or counted steps, a seed, a way to be stopped; progress
    kernel       the inner loops (`loops`: machine code or plain Python; `compiled`: when they are compiled)
    repetition   many micro-batches as a plan of fewer, again and again
    normalise    chooses which roles stay vacant, for a number of failures
    recompute    which stages compute their activations again
    placement    which virtual stages, workers and layers a pipeline has at all
    failures     what a run asks for when workers fail, slow down or come back
    report       what a plan moves, how long that takes, when it pays; what else could be done; `slipstream plan --json`
    tables/      builds tables of schedules
    bound_verifier  proves the bound that a file states

Other programs use the names below. Each is imported when it is first asked for, so that reading a job does not wait for
the solver.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.planner.failures import FailurePlanner as FailurePlanner
    from slipstream.planner.job.file import Job as Job
    from slipstream.planner.job.file import JobError as JobError
    from slipstream.planner.job.file import parse_job as parse_job
    from slipstream.planner.job.file import read_job as read_job
    from slipstream.planner.model.problem import NoPlanError as NoPlanError
    from slipstream.planner.normalise import normalised as normalised
    from slipstream.planner.options import PlanOptions as PlanOptions
    from slipstream.planner.plan import Plan as Plan
    from slipstream.planner.plan import plan_job as plan_job

_HOMES = {
    "Job": "job.file", "JobError": "job.file", "parse_job": "job.file", "read_job": "job.file",
    "FailurePlanner": "failures", "NoPlanError": "model.problem", "Plan": "plan", "plan_job": "plan",
    "PlanOptions": "options", "normalised": "normalise",
}
"""Public names, and the module that each lives in."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
