"""Compile the kernel by using it once: `python -m planner.search.kernel.compile`. Done when compiled, by whomever."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from planner.job.file import parse_job
from planner.model.arrays import ProblemArrays
from planner.model.problem import build_problem
from planner.search.anneal import Annealer
from planner.search.assignment import assign
from planner.search.compiled import marker
from planner.search.kernel import annealing
from planner.search.list_scheduler import DispatchRule, ListScheduler

STALE_SECONDS = 120
"""A compiler that has taken this long must have died."""
PAUSE_SECONDS = 0.2
"""Between two looks at whether another one is done."""


def main() -> None:
    """Plan the smallest job, once nobody else does so. Takes no time where all is compiled already."""
    with _alone():
        problem = build_problem(parse_job("pipelines = 1\nstages = 1\nmicrobatches = 1\n[time]\nforward = 1\n"
                                          "backward_input = 1\nbackward_weight = 1\n"))
        scheduler = ListScheduler(ProblemArrays(problem, assign(problem, "least-loaded")))
        scheduler.period(DispatchRule())
        Annealer(annealing, problem, scheduler.solution(), 0, 0).run()
        marker().touch()


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """While no other process compiles."""
    lock = marker().with_name("compiling")
    lock.parent.mkdir(parents=True, exist_ok=True)
    while not _took(lock):
        time.sleep(PAUSE_SECONDS)
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)


def _took(lock: Path) -> bool:
    """Whether the lock file is ours now. One that is older than any compiler takes is removed."""
    with contextlib.suppress(FileNotFoundError):
        if time.time() - lock.stat().st_mtime > STALE_SECONDS:
            lock.unlink()
    try:
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


if __name__ == "__main__":
    main()
