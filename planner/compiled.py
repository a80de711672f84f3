"""When the planner's inner loops (`planner.kernel`) are compiled: by numba, once per installation, and kept on disk.

The install step does it (`python -m slipstream.planner.compiled`). Else a plan within seconds has another process do
it, and is made of list schedules meanwhile; all else waits. numba compiles anew when the source, Python, numba or the
processor is another. Where no folder can be written, every process compiles for itself.
"""

import contextlib
import fcntl
import subprocess
import sys
from functools import cache
from pathlib import Path

from slipstream.planner.budget import ProgressCallback, quiet
from slipstream.planner.loops import go_on_in_plain_python, is_compiled, keeps_machine_code, note_compiled

BESIDE = "the planner's inner loops are being compiled, once per installation, about 20 s: until then plans are list " \
    "schedules only"
LINE = "compiling the planner's inner loops, once per installation, about 20 s"
NOT_KEPT = "compiling the planner's inner loops, about 20 s, and each time anew: no folder for machine code can be " \
    "written (NUMBA_CACHE_DIR names one)"


@cache
def load() -> None:
    """Have this process load the machine code, which takes a third of a second, or compile it.

    Plans the smallest job: numba compiles a function when it is first called.
    """
    from slipstream.planner.job.file import parse_job
    from slipstream.planner.model.arrays import ProblemArrays
    from slipstream.planner.model.from_job import build_problem
    from slipstream.planner.search.annealing import AnnealingChain
    from slipstream.planner.search.list_scheduler import DispatchRule, ListScheduler, assign

    problem = build_problem(parse_job("pipelines = 1\nstages = 1\nmicrobatches = 1\n[time]\nforward = 1\n"
                                      "backward_input = 1\nbackward_weight = 1\n"))
    scheduler = ListScheduler(ProblemArrays(problem, assign(problem, "least-loaded")))
    scheduler.period(DispatchRule())
    AnnealingChain(scheduler.solution(), 0, 0).run()


def ready(progress: ProgressCallback = quiet) -> None:
    """Compile the kernel unless it is compiled already, with one line of progress. Takes some 20 seconds, or none."""
    if is_compiled():
        return
    progress(LINE if keeps_machine_code() else NOT_KEPT)
    # One process at a time: two would only waste it.
    with Path(__file__).with_name("kernel.py").open("rb") as source:
        with contextlib.suppress(OSError):
            fcntl.flock(source, fcntl.LOCK_EX)
        load()
        note_compiled()


def begin(progress: ProgressCallback = quiet) -> None:
    """Unless the kernel is compiled already, have another process compile it; meanwhile plans are list schedules."""
    if is_compiled():
        return
    if not keeps_machine_code():
        ready(progress)
        return
    progress(BESIDE)
    subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                     stderr=subprocess.DEVNULL, start_new_session=True)
    go_on_in_plain_python()


if __name__ == "__main__":
    ready(lambda line: print(line, file=sys.stderr))
