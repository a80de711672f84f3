"""When the planner's inner loops (`planner.kernel`) are compiled: by numba, once per installation, and kept on disk.

The install step does it (`python -m slipstream.planner.compiled`), else the first plan, before its clock starts. numba
compiles them again when their source, Python, numba or the processor is another. Where no folder can be written, every
process compiles for itself.
"""

import sys
from functools import cache
from pathlib import Path

from slipstream.planner.progress import ProgressCallback, quiet

LINE = "compiling the planner's inner loops, once per installation, about 20 s"


def is_compiled() -> bool:
    """Whether numba keeps machine code of the kernel as it is now: what is compiled last is newer than the source."""
    from slipstream.planner import kernel  # numba alone takes a third of a second

    folder = kernel.anneal.stats.cache_path
    if not folder:
        return bool(kernel.anneal.signatures)
    changed = Path(kernel.__file__).stat().st_mtime
    return any(path.stat().st_mtime >= changed for path in Path(folder).glob("kernel.anneal-*.nbi"))


@cache
def load() -> None:
    """Have this process load the machine code, which takes a third of a second, or compile it.

    Plans the smallest job: numba compiles a function when it is first called.
    """
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


def ready(progress: ProgressCallback = quiet) -> None:
    """Compile the kernel unless it is compiled already, with one line of progress. Takes some 20 seconds, or none."""
    if not is_compiled():
        progress(LINE)
        load()


if __name__ == "__main__":
    ready(lambda line: print(line, file=sys.stderr))
