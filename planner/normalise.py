"""Failure normalisation: let failures fall where they cost least, by moving live workers to other roles.

A live worker may take over another role once it has loaded that stage's parameters from a peer. So of F failures only
the number is given; which F roles are down is a choice. It is made in three steps:

1. how many roles are down in each column: dynamic programming over columns, on the proven bound of the window of a
   column with so many roles down, for the best few distributions (`Windows`);
2. which pipelines they belong to: spread or stacked (`arrangements`);
3. real plans of the best few candidates decide. On small grids every pattern is a candidate.

The result, the *normal form*, depends on the number of failures alone. `schedules.relabel` then chooses who plays
which role, at the fewest layers to load.

The idea is that of ReCycle (SOSP 2024, section 4.1), which distributes failures by the same kind of programme.
"""

import math
import time
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec

from planner.bounds import lower_bound
from planner.job import Job
from planner.plan import Plan, plan_job
from planner.problem import NoPlanError, Problem, build_problem
from planner.report import Report
from planner.solution import build_schedule
from planner.solve import Method, solve
from schedules.check import check
from schedules.pattern import Pattern, dead_column, pattern_of, patterns, pipeline_classes, representative
from schedules.relabel import relabel
from schedules.schedule import BackwardMode, OptimizerMode, Schedule, Worker

EXHAUSTIVE = 60
"""Up to so many patterns of a number of failures, all are planned."""
DISTRIBUTIONS = 4
"""How many distributions of failures over columns the dynamic programme keeps."""
SEARCH_SHARE = 0.3
"""Share of the time limit for comparing all candidates, and again for the best few; the rest is for the best."""
FINALISTS = 3

Counts = tuple[int, ...]
"""Roles that are down, by column."""
Ranked = tuple[int, int, Counts]
"""(longest window in ticks, sum of windows, counts) of a distribution."""


class Planned(msgspec.Struct, frozen=True):
    """A checked schedule, and whether Ctrl-C cut the search for it short."""

    schedule: Schedule
    interrupted: bool = False
    seconds: float = 0.0
    """Spent on it."""


class PlanOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to plan: as the arguments of `plan_job`."""

    backward: BackwardMode | None = None
    optimizer: OptimizerMode | None = None
    method: Method = "cp-sat"
    time_limit: float = 10.0
    seed: int = 0

    def problem(self, job: Job, failed: Sequence[Worker] = ()) -> Problem:
        """The problem to solve. Raises NoPlanError."""
        usual = self.method == "1f1b"
        return build_problem(job, failed, backward=self.backward or ("fused" if usual else "split"),
                             optimizer=self.optimizer or ("synchronous" if usual else "staggered"))

    def plan(self, job: Job, failed: Sequence[Worker], *, seconds: float, method: Method | None = None) -> Planned:
        """Plan within `seconds`, by another method if one is given, with nothing to compare. Raises NoPlanError."""
        began = time.monotonic()
        method = method or self.method
        problem = self.problem(job, failed)
        solved = solve(problem, method, began + max(0.01, seconds), self.seed, lambda _: None)
        schedule = build_schedule(problem, solved.solution, lower_bound=solved.lower_bound_ticks, method=method)
        violations = check(schedule)
        if violations:
            raise AssertionError(f"the planner made a schedule that breaks a rule: {violations[0]}")
        return Planned(schedule, solved.interrupted, time.monotonic() - began)

    @property
    def fast(self) -> Method:
        """The method to compare candidates by."""
        return "greedy" if self.method == "cp-sat" else self.method


class Windows:
    """The least period by column and number of roles down there, and the best distributions of failures over columns.

    Keeps what it has computed: one object serves all numbers of failures of a job.
    """

    def __init__(self, job: Job, options: PlanOptions) -> None:
        self._job = job
        self._options = options
        self._bound: dict[tuple[int, int], int] = {}
        self._slow = {worker for worker, _ in job.time.slow}
        self._best: list[list[Ranked]] = []

    def bound(self, column: int, down: int) -> int:
        """A proven lower bound on the period, in ticks, with this many roles down in the column and none elsewhere."""
        if down == 0:
            column = 0  # the same plan, whatever the column
        if (column, down) not in self._bound:
            failed = self.candidates(column)[:down]
            self._bound[column, down] = lower_bound(self._options.problem(self._job, failed))
        return self._bound[column, down]

    def candidates(self, column: int) -> list[Worker]:
        """The roles of a column that may be left empty: not those of slow workers, which are alive and play them."""
        return [role for pipeline in range(self._job.pipelines)
                if (role := Worker(pipeline, column)) not in self._slow]

    def most(self, column: int) -> int:
        """How many roles of a column may be down at most."""
        return min(self._job.pipelines - 1, len(self.candidates(column)))

    def distributions(self, failures: int) -> list[Ranked]:
        """The best few ways to distribute failures over columns, best first; the first one's window is the least.

        best[c][f] = the DISTRIBUTIONS smallest, by (longest window, sum of windows), of
            { (max(longest, w), sum + w, counts + (k,)) : k <= f, (longest, sum, counts) in best[c - 1][f - k] }
        with w = bound(c, k). Exact for the first, and near-best alternatives for the rest.
        """
        if len(self._best) <= failures:
            self._best = self._programme(failures)
        return self._best[failures]

    def _programme(self, failures: int) -> list[list[Ranked]]:
        best: list[list[Ranked]] = [[(0, 0, ())], *([] for _ in range(failures))]
        for column, most in enumerate(self._useful(failures)):
            windows = [self.bound(column, down) for down in range(most + 1)]
            best = [sorted((max(longest, window), total + window, (*counts, down))
                           for down, window in enumerate(windows[:count + 1])
                           for longest, total, counts in best[count - down])[:DISTRIBUTIONS]
                    for count in range(failures + 1)]
        return best

    def _useful(self, failures: int) -> list[int]:
        """How many roles down in each column are worth looking at: windows grow with them, so that taking the
        shortest next window each time gives the longest one that any distribution needs; and one role more, to have
        a choice. Spares computing bounds that cannot matter.
        """
        down = [0] * self._job.stages
        for _ in range(failures):
            free = [column for column in range(self._job.stages) if down[column] < self.most(column)]
            if not free:
                break
            down[min(free, key=lambda column: (self.bound(column, down[column] + 1), column))] += 1
        return [min(count + 1, self.most(column)) for column, count in enumerate(down)]


def arrangements(job: Job, windows: Windows, counts: Counts) -> Iterator[tuple[Worker, ...]]:
    """Ways to choose the pipelines of the roles that are down: in the same pipelines, or in different ones.

