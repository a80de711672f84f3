"""Compile the planner's inner loops (`planner.kernel`) with numba, once per installation.

The machine code is stored on disk. The install step compiles it (`python -m
slipstream.planner.compiled`). Otherwise, `plan_with` and `normalised` with a limit in seconds start
another process that compiles, and use list schedules only until then; all other callers wait. numba
compiles again if the source, Python, numba or the processor has changed. If no folder is writable,
every process compiles for itself.
"""

import contextlib
import fcntl
import subprocess
import sys
from functools import cache
from pathlib import Path

from slipstream.planner.budget import ProgressCallback, ignore_progress
from slipstream.planner.loops import (
    can_store_machine_code,
    is_compiled,
    mark_as_compiled,
    use_plain_python,
)

COMPILING_IN_BACKGROUND = (
    "the planner's inner loops are being compiled, once per installation, about 20 s: "
    "until then plans are list schedules only"
)
COMPILING = "compiling the planner's inner loops, once per installation, about 20 s"
COMPILING_EACH_TIME = (
    "compiling the planner's inner loops, about 20 s, and each time anew: no folder for machine "
    "code can be written (NUMBA_CACHE_DIR names one)"
)


@cache
def load_kernel() -> None:
    """Load the machine code of the inner loops, or else compile it."""
    # Imported here, since numba takes a third of a second to load.
    from slipstream.planner.job.file import parse_job
    from slipstream.planner.model.arrays import ProblemArrays
    from slipstream.planner.model.from_job import build_problem
    from slipstream.planner.search.annealing import AnnealingChain
    from slipstream.planner.search.interleaved_scheduler import (
        InterleavedRule,
        InterleavedScheduler,
    )
    from slipstream.planner.search.list_scheduler import DispatchRule, ListScheduler, assign_hosts
    from slipstream.planner.search.round_scheduler import RoundRule, RoundScheduler

    # numba compiles a function at its first call, so each is called for the smallest job.
    problem = build_problem(
        parse_job(
            "pipelines = 1\nstages = 1\nmicrobatches = 1\n[time]\nforward = 1\n"
            "backward_input = 1\nbackward_weight = 1\n"
        )
    )
    scheduler = ListScheduler(ProblemArrays(problem, assign_hosts(problem, "least-loaded")))
    scheduler.evaluate_rule(DispatchRule())
    RoundScheduler(scheduler.arrays).evaluate_rule(RoundRule())
    InterleavedScheduler(scheduler.arrays).evaluate_rule(InterleavedRule(group=1, slope=1.0))
    AnnealingChain(scheduler.last_solution(), 0, 0).run()


def ensure_compiled(progress: ProgressCallback = ignore_progress) -> None:
    """Compile the inner loops unless done before; announce that by a line of progress.

    This blocks for some 20 s, or longer while another process compiles them.
    """
    if is_compiled():
        return
    progress(COMPILING if can_store_machine_code() else COMPILING_EACH_TIME)
    # One process at a time: a second compilation would be wasted.
    with (Path(__file__).parent / "kernel" / "__init__.py").open("rb") as source:
        with contextlib.suppress(OSError):
            fcntl.flock(source, fcntl.LOCK_EX)
        load_kernel()
        mark_as_compiled()


def compile_in_background(progress: ProgressCallback = ignore_progress) -> None:
    """Start a process that compiles the inner loops; use plain Python until it has.

    Do nothing if the loops are compiled. With plain Python, plans are list schedules only. If no
    folder for machine code is writable, compile in this process and wait.
    """
    if is_compiled():
        return
    if not can_store_machine_code():
        ensure_compiled(progress)
        return
    progress(COMPILING_IN_BACKGROUND)
    # In a session of its own, so that Ctrl-C in this one does not stop it.
    subprocess.Popen(
        [sys.executable, "-m", __name__],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    use_plain_python()


if __name__ == "__main__":
    ensure_compiled(lambda line: print(line, file=sys.stderr))
