"""The planner's inner loops as machine code: compiled by numba once per installation, and kept on disk.

The install step compiles them (`python -m slipstream.planner.search.compiled`). Where that was not done, the first plan
does, before its clock starts; other processes wait for it. Where no folder can be written, every process compiles.

numba keeps code by source file, and does not notice when a function that the file calls, in another file, has changed.
So a marker beside the code holds a digest of all its sources; where they differ, all code is removed and made anew.
"""

import contextlib
import fcntl
import hashlib
import importlib
import sys
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from slipstream.planner.progress import ProgressCallback, quiet

ENTRIES = ("slipstream.planner.search.kernel.list_scheduler.list_order",
           "slipstream.planner.search.kernel.annealing.loop.anneal")
"""A compiled function in each folder of the kernel. With these, all others are compiled."""
SOURCES = ("search/kernel/**/*.py", "model/arrays.py")
"""What the machine code is made of, within the planner's folder."""
LOCK_SECONDS, POLL_SECONDS = 300.0, 0.1
"""How long to wait while another process compiles, and between two looks at that."""


def ready(progress: ProgressCallback = quiet) -> None:
    """Compile the kernel unless it is compiled already, with one line of progress. Takes some 20 seconds, or none."""
    folders = _folders()
    if not folders:
        if not _entry(ENTRIES[-1]).signatures:
            progress("compiling the planner's inner loops, about 20 s; no folder can be written that would keep them")
            _use_once()
        return
    marker = _marker(folders)
    if marker.exists():
        return
    progress("compiling the planner's inner loops, once per installation, about 20 s")
    with _alone(marker.with_name("compiling.lock")):
        if not marker.exists():
            if not list(marker.parent.glob(f"compiled-{_sources()}-*")):
                _remove_code(folders)
            _use_once()
            marker.touch()


@cache
def load() -> None:
    """Have this process load the machine code, which takes a third of a second, before something is timed."""
    _use_once()


def is_compiled() -> bool:
    """Whether plans need not wait for the compiler."""
    folders = _folders()
    return _marker(folders).exists() if folders else bool(_entry(ENTRIES[-1]).signatures)


def _entry(name: str) -> Any:
    """A compiled function. Imported late: numba alone takes a third of a second."""
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)


def _folders() -> list[Path]:
    """Where numba keeps the kernel's code; none where no folder can be written."""
    paths = [_entry(name).stats.cache_path for name in ENTRIES]
    return [Path(path) for path in paths] if all(paths) else []


def _marker(folders: list[Path]) -> Path:
    """A file that is there when all of the kernel is compiled: of these sources, by this Python, for this processor."""
    return folders[0] / f"compiled-{_sources()}-{_environment()}"


@cache
def _sources() -> str:
    """By content: copies of an installation have new dates."""
    root, known = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in root.glob(pattern)):
        known.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return known.hexdigest()[:16]


@cache
def _environment() -> str:
    import numba
    from llvmlite import binding

    return hashlib.sha256(f"{sys.version} {numba.__version__} {binding.get_host_cpu_name()}".encode()).hexdigest()[:16]


def _remove_code(folders: list[Path]) -> None:
    """Remove what numba has kept of other sources, and the markers of it."""
    for folder in folders:
        for pattern in ("*.nbi", "*.nbc", "compiled-*"):
            for path in folder.glob(pattern):
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """While no other process compiles; one that died does not count. Two at once would only waste time."""
    with lock.open("w") as file:
        deadline = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(POLL_SECONDS)
            else:
                break
        yield


def _use_once() -> None:
    """Plan the smallest job: numba compiles a function when it is first called."""
    from slipstream.planner.job.file import parse_job
    from slipstream.planner.model.arrays import ProblemArrays
    from slipstream.planner.model.from_job import build_problem
    from slipstream.planner.search.annealing.chain import AnnealingChain
    from slipstream.planner.search.assignment import assign
    from slipstream.planner.search.list_scheduler import DispatchRule, ListScheduler

    problem = build_problem(parse_job("pipelines = 1\nstages = 1\nmicrobatches = 1\n[time]\nforward = 1\n"
                                      "backward_input = 1\nbackward_weight = 1\n"))
    scheduler = ListScheduler(ProblemArrays(problem, assign(problem, "least-loaded")))
    scheduler.period(DispatchRule())
    AnnealingChain(problem, scheduler.solution(), 0, 0).run()


if __name__ == "__main__":
    ready(lambda line: print(line, file=sys.stderr))
