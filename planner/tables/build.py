"""Tables of schedules: one for every number of failures, normalised, and on request one for every exact pattern.

Entries are planned in parallel processes, the costliest first; the parent alone writes (`planner.tables.folder`), and
packs all entries in the order of their keys, so that the table does not depend on who finished first.
"""

import math
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec

from planner.job.file import Job
from planner.model.problem import NoPlanError, build_problem
from planner.normalise import Windows, normal_form
from planner.options import PlanOptions
from planner.plan import plan_only
from planner.search.compiled import ready
from planner.tables.folder import Part, TableFolder, make_part, no_plan
from planner.tables.process_pool import run_all
from schedules.schedule import Worker
from schedules.tables.file import Basis, Index, TableError
from schedules.tables.pattern import count_key, pattern_key, patterns, pipeline_classes, representative

MAX_ENTRIES = 20_000

Progress = Callable[[int, int], None]
"""Called with (entries finished, entries in all)."""


class Task(msgspec.Struct, frozen=True):
    """An entry to plan: a number of failures, or the roles that are down for an exact pattern."""

    key: str
    failures: int
    failed: tuple[Worker, ...] | None = None

    def __str__(self) -> str:
        return f"entry {self.key}"


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """A finished table."""

    index: Index
    planned: int
    """Entries that were planned now; the others had been finished before."""
    seconds: float
    bytes: int

    @property
    def worst_gap(self) -> float:
        """The largest gap of any entry."""
        return max((row.gap for row in self.index.entries if row.gap is not None), default=0.0)

    def report(self) -> dict[str, object]:
        """The answer of `slipstream table --json`."""
        return {"entries": len(self.index.entries), "seconds": round(self.seconds, 3), "worst_gap": self.worst_gap,
                "bytes": self.bytes, "planned": self.planned,
                "no_plan": sum(row.reason is not None for row in self.index.entries)}


def build_table(job: Job, job_text: bytes, folder: Path, options: PlanOptions, *, max_failures: int,
                exact: bool = False, jobs: int = 1, progress: Progress = lambda _done, _total: None) -> Built:
    """Plan what is missing in the table and publish it. `job_text` is the job file, kept beside the table.

    Whatever ends this early, finished entries are kept and the next call goes on from there. Raises NoPlanError when
    the job has no plan even without failures, TableError when the folder holds something else or is damaged, OSError
    when it cannot be written, PoolError when a process dies.
    """
    began = time.monotonic()
    basis = basis_of(job, options)
    tasks = all_tasks(job, max_failures, exact=exact)
    keys = [task.key for task in tasks]
    home = TableFolder(folder, basis)
    index = home.published(keys)
    todo: list[Task] = []
    if index is None:
        finished = home.open()
        todo = [task for task in tasks if task.key not in finished]
        progress(len(tasks) - len(todo), len(tasks))
        if todo:
            ready()  # here, and not in every process
        # Costliest first, so that the processes end together.
        todo.sort(key=lambda task: (task.failed is not None, -task.failures))
        with closing(run_all(Planner(job, options, basis), todo, jobs)) as results:
            for done, (_, part) in enumerate(results, 1):
                home.keep(part)
                progress(len(tasks) - len(todo) + done, len(tasks))
        index = home.publish(keys, job_text, max_failures=max_failures, exact=exact)
    return Built(index=index, planned=len(todo), seconds=time.monotonic() - began, bytes=home.size())


def basis_of(job: Job, options: PlanOptions) -> Basis:
    """What all entries of the job's table have in common. Raises NoPlanError when the job has no plan at all."""
    problem = options.problem(job)
    return Basis(job=problem.name, tick_seconds=problem.tick_seconds, grid=problem.grid, times=problem.times,
                 memory=problem.memory, backward=problem.backward, optimizer=problem.optimizer, method=options.method,
                 time_limit=float(options.time_limit), seed=options.seed)


def all_tasks(job: Job, max_failures: int, *, exact: bool) -> list[Task]:
    """All entries of a table in its order: counts, then patterns by number of failures. Raises TableError: too many."""
    workers = job.pipelines * job.stages
    if max_failures > workers:
        raise TableError(f"--max-failures {max_failures}: the job has only {workers} workers")
    tasks = [Task(count_key(failures), failures) for failures in range(max_failures + 1)]
    if exact:
        _require_few(job, max_failures)
        problem = build_problem(job)
        classes = pipeline_classes(problem.grid, problem.times)
        for failures in range(1, max_failures + 1):
            for pattern in patterns(failures, job.stages, classes):
                tasks.append(Task(pattern_key(pattern, classes), failures, representative(pattern, classes)))
                if len(tasks) > MAX_ENTRIES:
                    raise _too_many(max_failures)
    return tasks


def _require_few(job: Job, max_failures: int) -> None:
    """Before enumerating anything: the patterns in a single pipeline alone must not be too many."""
    if sum(math.comb(job.stages, lost) for lost in range(1, min(max_failures, job.stages) + 1)) > MAX_ENTRIES:
        raise _too_many(max_failures)


def _too_many(max_failures: int) -> TableError:
    return TableError(f"--exact: more than {MAX_ENTRIES} patterns of up to {max_failures} failures; lower "
                      "--max-failures, or leave out --exact")


class Planner:
    """Plans entries in one process, and keeps what it learns about the job between them."""

    def __init__(self, job: Job, options: PlanOptions, basis: Basis) -> None:
        self._job = job
        self._options = options
        self._basis = basis
        self._windows = Windows(job, options)

    def __call__(self, task: Task) -> Part:
        """The finished entry."""
        try:
            made = normal_form(self._job, task.failures, self._options, windows=self._windows) \
                if task.failed is None else plan_only(self._options, self._job, task.failed)
        except NoPlanError as error:
            return no_plan(self._basis, task.key, task.failed or (), str(error), failures=task.failures)
        return make_part(self._basis, task.key, made.schedule)
