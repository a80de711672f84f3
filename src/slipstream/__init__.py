"""Plan and run pipeline-parallel training that keeps its speed when workers die.

    job = slipstream.load("job.toml")
    plan = slipstream.plan(job, failed=["2.1"])
    slipstream.check(plan.schedule)                     # violated rules: none
    slipstream.train(job, out="runs/job", schedule=plan.schedule)

The names in `__all__` are public: they change only with a line in CHANGELOG.md. All other names are
internal, except those that `slipstream.runtime.api` offers to programs with their own model, data
or optimizer. A name is imported when it is first used: planning does not import torch, and training
does not wait for the solver.
"""

import importlib
from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from slipstream.planner.simulation import AvailabilityTrace, Comparison
    from slipstream.planner.failures import FailurePlanner as FailurePlanner
    from slipstream.planner.job.file import Job as Job
    from slipstream.planner.job.file import JobError as JobError
    from slipstream.planner.model.problem import NoPlanError as NoPlanError
    from slipstream.planner.options import PlanOptions as PlanOptions
    from slipstream.planner.plan import Plan as Plan
    from slipstream.runtime.own_loop import replay as replay
    from slipstream.runtime.coordinator.run_options import Resilience as Resilience
    from slipstream.runtime.coordinator.run_options import RunOptions as RunOptions
    from slipstream.runtime.coordinator.run_result import RunResult as RunResult
    from slipstream.schedules.check import check as check
    from slipstream.schedules.codec import ScheduleError as ScheduleError
    from slipstream.schedules.schedule import Schedule as Schedule
    from slipstream.schedules.schedule import Worker as Worker
    from slipstream.schedules.tables.table import Table as Table

__all__ = [
    "FailurePlanner",
    "Job",
    "JobError",
    "NoPlanError",
    "Plan",
    "PlanOptions",
    "Resilience",
    "RunOptions",
    "RunResult",
    "Schedule",
    "ScheduleError",
    "Table",
    "Worker",
    "check",
    "load",
    "plan",
    "read",
    "replay",
    "simulate",
    "train",
    "write",
]

_HOMES = {
    "FailurePlanner": "planner.failures",
    "Job": "planner.job.file",
    "JobError": "planner.job.file",
    "NoPlanError": "planner.model.problem",
    "Plan": "planner.plan",
    "PlanOptions": "planner.options",
    "Resilience": "runtime.coordinator.run_options",
    "RunOptions": "runtime.coordinator.run_options",
    "RunResult": "runtime.coordinator.run_result",
    "Schedule": "schedules.schedule",
    "ScheduleError": "schedules.codec",
    "Table": "schedules.tables.table",
    "Worker": "schedules.schedule",
    "check": "schedules.check",
    "replay": "runtime.own_loop",
}
"""Public names that are defined elsewhere, and the module of each."""
_DISTRIBUTION = "slipstream-train"

Workers: TypeAlias = "str | Worker | Iterable[str | Worker | tuple[int, int]]"
"""A worker or several: "PIPELINE.STAGE", counted from 0, `Worker`, or a pair of numbers."""


def load(path: str | PathLike[str]) -> "Job":
    """Read a job file (TOML; docs/configuration.md has its keys). Raises JobError, in one line."""
    from slipstream.planner.job.file import read_job

    return read_job(Path(path))


def plan(
    job: "Job | str | PathLike[str]", failed: Workers = (), options: "PlanOptions | None" = None
) -> "Plan":
    """Plan one iteration of a job or job file for a set of failed workers.

    The runtime replays `Plan.schedule`. Default `options`: split backward, staggered optimizer,
    layers in place, 10 s of search. Raises JobError for a worker that the job does not have,
    ValueError for a text that is not a worker, and NoPlanError if no schedule can exist.
    """
    from slipstream.notebook import NotebookPlan
    from slipstream.planner.options import PlanOptions
    from slipstream.planner.plan import plan_with

    return NotebookPlan.of_plan(
        plan_with(options or PlanOptions(), _load_job(job), _parse_workers(failed))
    )


def read(path: str | PathLike[str]) -> "Schedule":
    """Read a schedule file, and check its form; `check` checks the rules.

    Raises ScheduleError, a ValueError, in one line.
    """
    from slipstream.schedules.codec import read as read_schedule

    return read_schedule(Path(path))


def write(schedule: "Schedule", path: str | PathLike[str]) -> None:
    """Write a schedule file atomically. Raises OSError."""
    from slipstream.schedules.codec import write as write_schedule

    write_schedule(schedule, Path(path))


def train(
    job: "Job | str | PathLike[str]",
    *,
    out: str | PathLike[str],
    schedule: "Schedule | None" = None,
    table: "Table | None" = None,
    iterations: int | None = None,
    resilience: "Resilience | None" = None,
    options: "RunOptions | None" = None,
) -> "RunResult":
    """Train the `[model]` of a job on this machine, and continue when workers die.

    Each worker is a process. A program that calls this must be started under
    `if __name__ == "__main__":`, because the worker processes import it. Raises the errors of
    `slipstream.runtime.launch.run`; KeyboardInterrupt ends the run with a checkpoint.

    Parameters
    ----------
    job
        The job, or the path of its file.
    out
        Folder of the run.
    schedule
        First schedule; None: it is planned with all workers alive.
    table
        Schedules for failures; those that are not in the table are planned when needed.
    iterations
        Number of iterations, instead of the job's.
    resilience
        How the run deals with failures. None: by the table and the planner. If given, `table` is
        not used.
    options
        Further options of the run.
    """
    from slipstream.planner.failures import FailurePlanner
    from slipstream.runtime.config import parse_run_config
    from slipstream.runtime.launch import run
    from slipstream.runtime.coordinator.run_options import Resilience, RunOptions

    job = _load_job(job)
    config = parse_run_config(job.model, job.training)
    first = plan(job).schedule if schedule is None else schedule
    if resilience is None:
        planner = FailurePlanner(job, first, table)
        resilience = Resilience(
            scheduler=planner.after, at_speeds=planner.at_speeds, rebalancer=planner
        )
    return run(
        first,
        config,
        out=Path(out),
        iterations=iterations,
        resilience=resilience,
        options=options or RunOptions(topology=job.nodes),
    )


def simulate(
    job: "Job | str | PathLike[str]",
    trace: "str | PathLike[str] | AvailabilityTrace",
    policies: Iterable[str] | None = None,
    *,
    parameters: float = 6.7e9,
    samples_per_microbatch: float = 1.0,
    seed: int = 0,
) -> "Comparison":
    """Compare policies on a trace of failures.

    The result has samples per second, and lost seconds by cause. Raises NoPlanError if no schedule
    can run the job, KeyError for an unknown policy, and TraceFileError, in one line.

    Parameters
    ----------
    job
        The job, or the path of its file.
    trace
        A file in one of the formats of docs/simulation.md, or a trace from
        `slipstream.planner.simulation.draw_trace`.
    policies
        Names of policies; None: all.
    parameters
        Number of parameters of the model, on which published costs of restarts depend.
    samples_per_microbatch
        Number of samples in a micro-batch.
    seed
        Seed that selects which machines of the trace are the job's.
    """
    from slipstream.planner.simulation import (
        POLICIES,
        AvailabilityTrace,
        Throughputs,
        compare_policies,
        costs_for,
        fit_to_job,
        find_node_places,
        read_availability_trace,
    )

    job = _load_job(job)
    kinds = [POLICIES[name] for name in policies or POLICIES]
    read_trace = (
        trace
        if isinstance(trace, AvailabilityTrace)
        else read_availability_trace(Path(trace), seed, job.ranks)
    )
    return compare_policies(
        kinds,
        Throughputs(job, samples_per_microbatch=samples_per_microbatch),
        costs_for(parameters, job.stages),
        fit_to_job(read_trace, job.pipelines * job.stages, seed, find_node_places(job)),
    )


def _load_job(job: "Job | str | PathLike[str]") -> "Job":
    """Return the job, read from its file if a path is given.

    Raises JobError, and TypeError for anything else.
    """
    from slipstream.planner.job.file import Job

    if isinstance(job, Job):
        return job
    if isinstance(job, str | PathLike):
        return load(job)
    raise TypeError(
        "expected a job, as slipstream.load gives one, or the path of its file; got a "
        f"{type(job).__name__}"
    )


def _parse_workers(names: Workers) -> "tuple[Worker, ...]":
    """Return the workers sorted, each once. Raises ValueError for a name that is not a worker."""
    from slipstream.schedules.schedule import Worker

    if isinstance(names, str | Worker):
        names = [names]
    return tuple(sorted({_parse_worker(name) for name in names}))


def _parse_worker(name: "str | Worker | tuple[int, int]") -> "Worker":
    from slipstream.schedules.schedule import Worker

    if isinstance(name, str):
        return Worker.parse(name)
    if (
        isinstance(name, tuple)
        and len(name) == 2
        and all(type(number) is int and number >= 0 for number in name)
    ):
        return Worker(*name)
    raise ValueError(
        f'{name!r} is not a worker: expected "PIPELINE.STAGE", such as "1.2", or (1, 2)'
    )


def _read_version() -> str:
    """Return the installed version, or that of a source tree that is not installed."""
    import tomllib
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return distribution(_DISTRIBUTION).version
    except PackageNotFoundError:
        pyproject = Path(__file__).resolve().parents[2] / "pyproject.toml"
        return str(tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["version"])


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _read_version()
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__")), "__version__"})
