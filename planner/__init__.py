"""Plan a schedule for a job and its failed workers.

    job/             the job file
    model/           the scheduling problem, its bounds, its arrays
    search/          searches for the best solution
    layout/          layouts: which worker holds which layers, and routes of micro-batches
    plan             one checked schedule for a job and its failures (`options`)
    candidates       what is tried for them: the problem in place, and layouts
    reference        the fault-free period that plans are compared with
    bounding         problems from which the bounds of a job are proven
    periods          periods by the number of failed workers of each stage, for simulations
    overlapped       gradient reductions that overlap compute, added to a plan without them
    params           parameters of the searches
    budget           limits of a search: seconds or steps, its seed, stop and progress
    kernel/          the inner loops (`loops`: compiled or not; `compiled`: when they are)
    blockwise        a plan of a block of micro-batches, repeated until all are done
    normalise        the choice of the roles that stay vacant, for a number of failures
    exchange         roles exchanged among unlike workers
    comparison       candidates compared by their plans: all, then the best few again
    recompute        the choice of the stages that recompute their activations
    placement        the choice of virtual stages, their workers and their layers
    failures         schedules that a run requests when workers fail, slow down or return
    report           what a plan moves, its alternatives, and `slipstream plan --json`
    tables/          builders of schedule tables
    bound_verifier   a second proof of the lower bound that a schedule file states
    stated_question  contradictions of a schedule file about what its bound answers
    simulation/      what failures cost over days; nothing else here imports it
    published/       published pipelines, and plans for the same; nothing else here imports it

Other programs use the names below. Each is imported at its first use, so that reading a job does
not wait for the solver.
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
    "Job": "job.file",
    "JobError": "job.file",
    "parse_job": "job.file",
    "read_job": "job.file",
    "FailurePlanner": "failures",
    "NoPlanError": "model.problem",
    "Plan": "plan",
    "plan_job": "plan",
    "PlanOptions": "options",
    "normalised": "normalise",
}
"""Module below `slipstream.planner` that defines each public name of the package."""


def __getattr__(name: str) -> Any:
    # Python calls this for names that the module does not have yet (PEP 562).
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
