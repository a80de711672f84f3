"""Compile the kernel by using it once: `python -m planner.kernel.compile`. Waits for nobody who does so already."""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from planner.anneal import Annealer
from planner.dealing import deal
from planner.dense import Dense
from planner.greedy import Policy
from planner.job import parse_job
from planner.kernel import annealing, listing
from planner.listing import CompiledLister
from planner.problem import build_problem

STALE_SECONDS = 120
"""A compiler that has taken this long must have died."""


def main() -> None:
    """Plan the smallest job."""
    with _alone() as first:
        if first:
            problem = build_problem(parse_job("pipelines = 1\nstages = 1\nmicrobatches = 1\n[time]\nforward = 1\n"
                                              "backward_input = 1\nbackward_weight = 1\n"))
            dense = Dense(problem, deal(problem, "least-loaded"))
            lister = CompiledLister(listing, dense)
            lister.period(Policy())
            Annealer(annealing, problem, lister.solution(), 0, 0).run()


@contextlib.contextmanager
def _alone() -> Iterator[bool]:
    """Whether no other process compiles."""
    folder = Path(str(annealing.anneal.stats.cache_path))
    folder.mkdir(parents=True, exist_ok=True)
    lock = folder / "compiling"
    with contextlib.suppress(FileNotFoundError):
        if time.time() - lock.stat().st_mtime > STALE_SECONDS:
            lock.unlink()
    try:
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        yield False
        return
    try:
        yield True
    finally:
        lock.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
