"""Build tables of schedules for failures: to use at once, and with layers moved.

There is an entry for every number of failures, and optionally for every failure pattern and every
loss of one or two nodes. Entries are planned in parallel processes, the most expensive first. Only
the parent writes (`planner.tables.folder`), all entries in the order of their keys, so that the
table does not depend on which process finished first.
"""

import math
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from itertools import chain, combinations, islice
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from slipstream.planner.bound_verifier import IN_PLACE, find_vacant_roles
from slipstream.planner.budget import CountCallback
from slipstream.planner.compiled import ensure_compiled
from slipstream.planner.exchange import unlike_workers
from slipstream.planner.job.file import Job, JobError
from slipstream.planner.model.from_job import build_problem
from slipstream.planner.model.problem import NoPlanError
from slipstream.planner.normalise import (
    WindowBounds,
    candidate_vacancies,
    normal_form,
    plan_moved_roles,
    slow_while_alive,
    window_bounds_of,
)
from slipstream.planner.options import Layers, PlanOptions
from slipstream.planner.params import DEFAULTS
from slipstream.planner.plan import plan_only
from slipstream.planner.recompute import with_bound_of_choices
from slipstream.planner.report import compute_transition
from slipstream.planner.tables.folder import (
    FinishedPart,
    NodesOfEntry,
    TableFolder,
    make_no_plan_part,
    make_part,
)
from slipstream.planner.tables.process_pool import run_all
from slipstream.planner.tables.taking_over import improve_parts, improve_patterns
from slipstream.schedules.schedule import Schedule, Worker
from slipstream.schedules.tables.file import Basis, Index, TableError, decode_entry
from slipstream.schedules.tables.pattern import (
    Pattern,
    count_key,
    failure_patterns,
    pattern_key,
    pattern_of,
    pipeline_classes,
    representative_failures,
    roles_key,
    settled_key,
)

# --- The entries ----------------------------------------------------------------------------------


MAX_ENTRIES = 20_000
"""Largest number of entries of one kind in a table."""
MAX_FEW_PATTERNS = 64
"""Largest number of failure patterns that all have an entry in place by default.

They are the patterns of one failure and, if workers are unlike, also of two, three and so on.
"""


Answer = Literal["at once", "roles moved", "settled"]
"""Kind of answer of an entry: layers in place, roles moved, or any layers moved."""


class EntryTask(msgspec.Struct, frozen=True):
    """Entry of a table to plan, for a number of failures or for certain workers."""

    key: str
    failures: int
    failed: tuple[Worker, ...] | None = None
    """Workers that have failed; None if the entry is for their number."""
    answer: Answer = "at once"
    """What the schedule may move. For a number of failures, "at once" may move roles."""
    nodes: tuple[tuple[int, ...], ...] = ()
    """Sets of nodes whose loss the entry is for, in a table by node."""
    slow: Worker | None = None
    """Slow worker that is among the failures of an entry for a number of failures."""

    def __str__(self) -> str:
        return f"entry {self.key}"


class BuiltTable(msgspec.Struct, frozen=True, kw_only=True):
    """Finished table, and the cost of building it."""

    index: Index
    planned: int
    """Number of entries that this call planned; the others had been finished before."""
    seconds: float
    """Duration of the call."""
    bytes: int
    """Size of the table's files."""

    @property
    def worst_gap(self) -> float:
        """Largest known gap of any entry, period / lower bound - 1; 0 without any."""
        return max((row.gap for row in self.index.entries if row.gap is not None), default=0.0)

    @property
    def worst_key(self) -> str:
        """Key of the table's entry with the largest gap between period and lower bound."""
        return max(self.index.entries, key=lambda row: row.gap or 0.0).key

    def report(self) -> dict[str, object]:
        """Return the answer of `slipstream table --json`."""
        return {
            "entries": len(self.index.entries),
            "seconds": round(self.seconds, 3),
            "worst_gap": self.worst_gap,
            "bytes": self.bytes,
            "planned": self.planned,
            "no_plan": sum(row.reason is not None for row in self.index.entries),
        }


class Share(NamedTuple):
    """One of N parts of a table's entries, each planned by its own command.

    All commands write to the same folder.
    """

    number: int = 0
    of: int = 1

    @staticmethod
    def parse(text: str) -> "Share":
        """Parse "I/N", the I-th (from 0) of N shares of a table.

        Raises ValueError for other text.
        """
        match = re.fullmatch(r"(\d{1,6})/(\d{1,6})", text)
        share = Share(*map(int, match.groups())) if match else Share(of=0)
        if share.number >= share.of:
            raise ValueError(
                f"{text!r} is not a share; expected I/N, with I from 0 to N - 1, such as 0/8"
            )
        return share


WHOLE_TABLE = Share()
"""Share of a process that plans all entries."""


class UnfinishedTable(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of a table some of whose entries other processes have yet to plan."""

    entries: int
    """Number of all entries."""
    finished: int
    """Number of entries that any process has finished."""
    planned: int
    """Number of entries that this call planned."""
    seconds: float
    """Duration of this call."""

    def report(self) -> dict[str, object]:
        """Return the answer of `slipstream table --share --json`."""
        return {
            "entries": self.entries,
            "seconds": round(self.seconds, 3),
            "planned": self.planned,
            "finished": self.finished,
        }


def build_table(
    job: Job,
    job_text: bytes,
    folder: Path,
    options: PlanOptions,
    *,
    max_failures: int,
    exact: bool = False,
    by_node: bool = False,
    settled: bool = True,
    jobs: int = 1,
    progress: CountCallback = lambda _done, _total: None,
    executor: Executor | None = None,
) -> BuiltTable:
    """Plan all entries of a table and write it to a folder.

    The arguments, and the errors raised, are those of `build_share`.
    """
    built = build_share(
        job,
        job_text,
        folder,
        options,
        WHOLE_TABLE,
        max_failures=max_failures,
        exact=exact,
        by_node=by_node,
        settled=settled,
        jobs=jobs,
        progress=progress,
        executor=executor,
    )
    assert isinstance(built, BuiltTable)
    return built


def build_share(
    job: Job,
    job_text: bytes,
    folder: Path,
    options: PlanOptions,
    share: Share,
    *,
    max_failures: int,
    exact: bool = False,
    by_node: bool = False,
    settled: bool = True,
    jobs: int = 1,
    progress: CountCallback = lambda _done, _total: None,
    executor: Executor | None = None,
    base_job: Job | None = None,
) -> BuiltTable | UnfinishedTable:
    """Plan the missing entries of one process's share; write the table if all are finished.

    Return the table, or its progress while entries of other shares are missing. All entries but
    those of `settled` leave each role its layers, and cut micro-batches within a stage if that is
    faster; a run uses them right after a failure. After an interruption, finished entries are
    stored, and the next call continues from there.

    Raises NoPlanError if no schedule can exist even without failures, or if no entry has a plan;
    JobError if the job is too large for the time limit or a stage has no layer where layouts are
    tried, TableError if such entries cannot be had (`all_tasks`) or the folder holds something else
    or is damaged, OSError if it cannot be written, PoolError if a process dies or a task fails.

    Parameters
    ----------
    job_text
        Job file, of which the table stores a copy.
    max_failures
        Largest number of failures with an entry by number.
    exact
        True for entries by failure pattern.
    by_node
        True for entries for lost nodes.
    settled
        True for further entries with layers moved.
    jobs
        Number of processes that plan entries, unless an `executor` does.
    progress
        Function that receives how many entries of the share are finished, and how many it has.
    base_job
        Job before the planner chose what `job` recomputes. Bounds then hold for every choice.
    """
    began = time.monotonic()
    # What the finished table has.
    basis = basis_of(job, options)
    tasks = all_tasks(job, max_failures, exact=exact, by_node=by_node, settled=settled)
    nodes = {task.key: task.nodes for task in tasks if task.nodes}
    keys = [task.key for task in tasks]
    table_folder = _open_folder(folder, basis, share)
    index = table_folder.published_index(keys, nodes)
    missing: list[EntryTask] = []
    if index is None:
        finished = table_folder.reopen()
        # Most expensive first, so that the processes end together, and shares take about as long.
        ordered = sorted(tasks, key=lambda task: (task.failed is not None, -task.failures))
        share_tasks = ordered[share.number :: share.of]
        missing = [task for task in share_tasks if task.key not in finished]
        progress(len(share_tasks) - len(missing), len(share_tasks))
        if missing and executor is None:
            ensure_compiled()  # here, and not in every process
        # Each entry is stored as soon as it is planned.
        planner = EntryPlanner(job, options, basis, base_job)
        with closing(
            run_all(planner, missing, jobs, (JobError, TableError), executor=executor)
        ) as results:
            for done, (_, part) in enumerate(results, 1):
                table_folder.add_part(part)
                progress(len(share_tasks) - len(missing) + done, len(share_tasks))
        # Whichever process finds all entries finished writes the table.
        finished_count = table_folder.count_finished(keys)
        if finished_count < len(keys):
            index = table_folder.find_published_index(keys, nodes)
            if index is None:
                return UnfinishedTable(
                    entries=len(keys),
                    finished=finished_count,
                    planned=len(missing),
                    seconds=time.monotonic() - began,
                )
        else:
            index = _publish_table(
                table_folder,
                planner,
                tasks,
                nodes,
                job_text,
                share,
                max_failures=max_failures,
                exact=exact,
                settled=settled,
            )
    return BuiltTable(
        index=index,
        planned=len(missing),
        seconds=time.monotonic() - began,
        bytes=table_folder.count_bytes(),
    )


def _open_folder(folder: Path, basis: Basis, share: Share) -> TableFolder:
    """Open the folder of a table; if a share is planned, try twice."""
    # The first try may fail because another process is publishing the table.
    try:
        return TableFolder(folder, basis)
    except TableError:
        if share == WHOLE_TABLE:
            raise
        return TableFolder(folder, basis)


def _publish_table(
    folder: TableFolder,
    planner: "EntryPlanner",
    tasks: Sequence[EntryTask],
    nodes: NodesOfEntry,
    job_text: bytes,
    share: Share,
    *,
    max_failures: int,
    exact: bool,
    settled: bool,
) -> Index:
    """Write the table of all entries from their files, and return its index.

    Raises NoPlanError if no entry has a plan.
    """
    keys = [task.key for task in tasks]
    counts = [task for task in tasks if task.failed is None]
    patterns = [task for task in tasks if task.failed is not None and task.answer == "at once"]
    try:
        parts = folder.read_parts(keys)
        # A table without any plan would be of no use.
        reason = parts[keys[0]].reason
        if reason is not None and all(part.reason is not None for part in parts.values()):
            raise NoPlanError(reason)
        largest_count = max(task.failures for task in counts)
        # Entries first take over shorter plans from other entries.
        better: dict[str, FinishedPart] = {}
        slow_workers = {task.slow for task in counts}
        # Entries for a number of failures leave no role of a slow worker vacant.
        alike = [task.key for task in patterns if slow_workers.isdisjoint(task.failed or ())]
        for slow in slow_workers:
            sources = alike if slow is None else []
            better |= improve_parts(parts, largest_count, slow, patterns=sources)
        # Patterns come second, since they may take over improved entries by number.
        better |= improve_patterns(parts | better, [task.key for task in patterns], planner.job)
        for task in tasks:
            if task.key in better:
                folder.add_part(planner.with_bound_of_choices(better[task.key], task))
        return folder.publish(
            keys, job_text, max_failures=max_failures, exact=exact, settled=settled, nodes=nodes
        )
    except TableError:
        # Several processes may come here at once, all with the same bytes. If another one has
        # removed the files already, its index is returned.
        index = None if share == WHOLE_TABLE else folder.find_published_index(keys, nodes)
        if index is None:
            raise
        return index


def basis_of(job: Job, options: PlanOptions) -> Basis:
    """Return what all entries share: grid, times, memory, options.

    Raises NoPlanError if no schedule can exist.
    """
    problem = options.make_problem(job)
    # The usual parameters are not stored.
    params = {}
    if options.params != DEFAULTS:
        params = msgspec.json.decode(msgspec.json.encode(options.params))
    return Basis(
        job=problem.name,
        tick_seconds=problem.tick_seconds,
        grid=problem.grid,
        times=problem.times,
        memory=problem.memory,
        backward=problem.backward,
        optimizer=problem.optimizer,
        method=options.method,
        time_limit=float(options.time_limit),
        seed=options.seed,
        steps=options.steps,
        params=params,
    )


def all_tasks(
    job: Job, max_failures: int, *, exact: bool, by_node: bool = False, settled: bool = False
) -> list[EntryTask]:
    """Return the entries to plan for a table, in the table's order.

    - one for each number of failures; then, for each slow worker, one for each number of failures
      that it is among;
    - one for each pattern, by number of failures: with `exact`, for up to `max_failures`; otherwise
      for one failure, if these patterns are few;
    - with `by_node`, one for each further pattern that the loss of one or two nodes leaves;
    - if workers are unlike, one with roles moved for each pattern, since the plan for the number of
      failures may fit only other patterns. Without `exact`, patterns of more failures are then
      included, as long as all together are few (`MAX_FEW_PATTERNS`);
    - with `settled`, one with layers moved for each number and pattern, except for the one-failure
      patterns of alike workers without `exact`, unless a lost node leaves them.

    With `by_node`, there is also an entry for each number of workers that one or two nodes have: in
    it, roles have moved to where their loss costs least. Raises TableError for more failures than
    workers, for too many patterns or slow workers, or with `by_node` if the job states no nodes, or
    too many.
    """
    workers = job.pipelines * job.stages
    if max_failures > workers:
        raise TableError(f"--max-failures {max_failures}: the job has only {workers} workers")
    # Numbers of failures, also those of one or two lost nodes.
    of_nodes = list(_node_tasks(job)) if by_node else []
    counts = sorted({*range(max_failures + 1), *(task.failures for task in of_nodes)})
    if len(counts) * len(job.time.slow) > MAX_ENTRIES:
        raise TableError(
            f"--max-failures {max_failures}: more than {MAX_ENTRIES} entries with one of "
            f"{len(job.time.slow)} slow workers among the failures; lower it, or name fewer of "
            "them in [time] slow"
        )
    # By number, then with each slow worker among the failures.
    tasks: dict[str, EntryTask] = {}
    for slow in (None, *(worker for worker, _ in job.time.slow)):
        for failures in counts:
            if failures or slow is None:
                key = count_key(failures, slow)
                tasks[key] = EntryTask(key, failures, slow=slow)
    # By pattern. A pattern that is there already keeps its place.
    has_unlike = bool(unlike_workers(job, ()))
    few: list[EntryTask] = []
    if exact:
        patterns = list(_pattern_tasks(job, max_failures))
    else:
        few = _few_pattern_tasks(job, max_failures if has_unlike else min(1, max_failures))
        patterns = few
    for task in (*patterns, *of_nodes):
        tasks[task.key] = task
    # The same failures with roles moved, then with layers moved.
    moving, settling = [], []
    for task in tasks.values():
        if has_unlike and task.failed:
            key = roles_key(task.key)
            moving.append(msgspec.structs.replace(task, key=key, answer="roles moved"))
        if task.failures and settled and (has_unlike or task not in few):
            key = settled_key(task.key)
            settling.append(msgspec.structs.replace(task, key=key, answer="settled"))
    return [*tasks.values(), *moving, *settling]


def _few_pattern_tasks(job: Job, max_failures: int) -> list[EntryTask]:
    """Return entries for all patterns of 1, 2 ... failures, while those patterns are few."""
    few: list[EntryTask] = []
    for failures in range(1, max_failures + 1):
        # There are at least so many patterns, and listing them all could take long.
        if math.comb(job.stages, min(failures, job.stages // 2)) > MAX_FEW_PATTERNS:
            break
        more = [*islice(_pattern_tasks(job, failures, least=failures), MAX_FEW_PATTERNS + 1)]
        if len(few) + len(more) > MAX_FEW_PATTERNS:
            break
        few += more
    return few


def _pattern_tasks(job: Job, max_failures: int, *, least: int = 1) -> Iterator[EntryTask]:
    """Iterate over entries for all patterns of `least` to `max_failures` failed workers."""
    _require_few(job, max_failures)
    problem = build_problem(job)
    classes = pipeline_classes(problem.grid, problem.times, problem.memory)
    number = max_failures + 1  # entries by number, fault-free included
    for failures in range(least, max_failures + 1):
        for pattern in failure_patterns(failures, job.stages, classes):
            number += 1
            if number > MAX_ENTRIES:
                raise _too_many(max_failures)
            key, failed = pattern_key(pattern, classes), representative_failures(pattern, classes)
            yield EntryTask(key, failures, failed)


def _node_tasks(job: Job) -> Iterator[EntryTask]:
    """Iterate over the entries for the loss of any one or two nodes."""
    if not job.nodes:
        raise TableError(
            "--by-node: the job file does not say which workers share a node; add [topology] "
            "workers_per_node = N"
        )
    sets = len(job.nodes) + math.comb(len(job.nodes), 2)
    if sets > MAX_ENTRIES:
        raise TableError(
            f"--by-node: one or two of {len(job.nodes)} nodes can be lost in {sets} ways; at most "
            f"{MAX_ENTRIES} are expected: leave out --by-node, or raise [topology] "
            "workers_per_node"
        )
    # Which pipelines are alike decides which losses are of one pattern.
    problem = build_problem(job)
    classes = pipeline_classes(problem.grid, problem.times, problem.memory)
    # Several nodes may leave the same pattern; they share an entry.
    nodes_by_pattern: dict[Pattern, list[tuple[int, ...]]] = {}
    numbers = range(len(job.nodes))
    for lost_nodes in chain(combinations(numbers, 1), combinations(numbers, 2)):
        lost_workers = chain.from_iterable(job.nodes[number] for number in lost_nodes)
        pattern = pattern_of(lost_workers, classes)
        nodes_by_pattern.setdefault(pattern, []).append(lost_nodes)
    for pattern, nodes in nodes_by_pattern.items():
        failed = representative_failures(pattern, classes)
        yield EntryTask(pattern_key(pattern, classes), len(failed), failed, nodes=tuple(nodes))


def _require_few(job: Job, max_failures: int) -> None:
    """Raise TableError if a table has too many patterns, before they are enumerated."""
    counts = range(1, min(max_failures, job.stages) + 1)
    if sum(math.comb(job.stages, count) for count in counts) > MAX_ENTRIES:
        raise _too_many(max_failures)


def _too_many(max_failures: int) -> TableError:
    return TableError(
        f"--exact: more than {MAX_ENTRIES} patterns of up to {max_failures} failures; lower "
        "--max-failures, or leave out --exact"
    )


class EntryPlanner:
    """Function object that plans the entries of a table, and keeps bounds for later ones."""

    def __init__(
        self, job: Job, options: PlanOptions, basis: Basis, base_job: Job | None = None
    ) -> None:
        self.job, self._base_job = job, base_job
        self._options = options
        self._basis = basis
        self._alive: dict[Worker | None, tuple[Job, WindowBounds]] = {
            None: (job, window_bounds_of(job, options))
        }
        """Job and `WindowBounds`, by the dead worker whose slowness they leave out; None: none."""

    def __call__(self, task: EntryTask) -> FinishedPart:
        """Plan an entry; return it with its schedule, or the reason why there is none.

        Raises JobError as `plan_only`.
        """
        try:
            plan = {
                "at once": self._plan_at_once,
                "roles moved": self._plan_roles,
                "settled": self._plan_settled,
            }
            schedule = self._bounded(plan[task.answer](task), task)
        except NoPlanError as error:
            return make_no_plan_part(
                self._basis, task.key, task.failed or (), str(error), failures=task.failures
            )
        moved = compute_transition(schedule, self.job) if task.answer == "settled" else None
        return make_part(self._basis, task.key, schedule, moved)

    def _plan_at_once(self, task: EntryTask) -> Schedule:
        if task.failed is not None:
            return plan_only(self._options, self.job, task.failed).schedule
        job, windows = self._job_while_alive(task.slow)
        return normal_form(job, task.failures, self._options, windows=windows).schedule

    def _plan_roles(self, task: EntryTask) -> Schedule:
        """Plan the schedule for an entry's failed workers, with roles moved."""
        assert task.failed is not None
        return plan_moved_roles(self.job, task.failed, self._options).schedule

    def _plan_settled(self, task: EntryTask) -> Schedule:
        """Plan an entry's rebalanced schedule, in which layers have moved."""
        job, windows = self._job_while_alive(task.slow)
        # For a number of failures, the roles that cost least are vacant.
        failed = task.failed
        if not failed:
            roles = self._options.params.roles
            failed = next(iter(candidate_vacancies(job, windows, task.failures, roles)), None)
        if failed is None:
            raise NoPlanError(f"{task.failures} failures leave some stage without a live worker")
        options = msgspec.structs.replace(self._options, layers="move")
        return plan_only(options, job, failed).schedule

    def with_bound_of_choices(self, part: FinishedPart, task: EntryTask) -> FinishedPart:
        """Return an entry with a plan, with a bound that holds whatever the job recomputes."""
        if self._base_job is None:
            return part
        schedule = decode_entry(part.entry, part.basis, part.programs)
        return make_part(part.basis, task.key, self._bounded(schedule, task), part.moved)

    def _bounded(self, schedule: Schedule, task: EntryTask) -> Schedule:
        if self._base_job is None:
            return schedule
        job = slow_while_alive(self._base_job, [task.slow] if task.slow else [])
        layers: Layers = "move" if task.answer == "settled" else "fixed"
        options = msgspec.structs.replace(self._options, layers=layers)
        vacant = find_vacant_roles(schedule) if schedule.scope in IN_PLACE else schedule.failed
        return with_bound_of_choices(schedule, job, options, vacant)

    def _job_while_alive(self, slow: Worker | None) -> tuple[Job, WindowBounds]:
        """Return the job and its `WindowBounds` with `slow`, dead in the plan, at usual speed."""
        if slow not in self._alive:
            job = slow_while_alive(self.job, [slow] if slow else [])
            self._alive[slow] = job, window_bounds_of(job, self._options)
        return self._alive[slow]
