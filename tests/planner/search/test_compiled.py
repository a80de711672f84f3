"""Machine code of the kernel: made before the first plan, of the sources as they are, by nobody in the background."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.jobs import uniform_job
from planner.options import PlanOptions
from planner.plan import plan_only
from planner.search import compiled
from schedules.schedule import Worker

ROOT = Path(compiled.__file__).parents[2]
LINE = "compiling the planner's inner loops"
PLAN = """
import hashlib, os
from pathlib import Path
from planner.job.file import parse_job
from planner.plan import plan_job
from planner.search.kernel.annealing.loop import anneal
from schedules.codec import encode
from schedules.schedule import Worker
import numpy as np

job = parse_job("pipelines = 3\\nstages = 4\\nmicrobatches = 4\\n[time]\\nforward = 3\\nbackward_input = 2\\n"
                "backward_weight = 2\\ntransfer = 1\\n[memory]\\ncapacity = 4\\nactivation = 1\\nweight_stash = 1\\n")
plan = plan_job(job, [Worker(1, 2)], method="greedy", time_limit=60, seed=3, progress=lambda line: print("#", line))
print(hashlib.sha256(encode(plan.schedule)).hexdigest())
print("children", Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())
print("random", [int(anneal(np.array([seed], dtype=np.uint64), 1000)) for seed in (1, 2, 3)])
"""
LOOP = """
from planner.search.kernel.annealing.random import below
from planner.search.kernel.jit import jit


@jit
def anneal(random, bound):
    return below(random, bound)
"""
CALL = "AnnealingChain(problem, scheduler.solution(), 0, 0).run()"
CALL_OF_LOOP = """import numpy as np
    _entry(ENTRIES[-1])(np.zeros(1, dtype=np.uint64), 1000)"""


def copy_of_the_installation(folder: Path, *, with_code: bool) -> Path:
    ignored = ("library", *(() if with_code else ("__pycache__",)))
    for room in ("planner", "schedules"):
        shutil.copytree(ROOT / room, folder / room, ignore=shutil.ignore_patterns(*ignored))
    return folder


def small_installation(folder: Path) -> Path:
    """Without machine code, and with little to compile: of annealing nothing is left but that it calls another file."""
    search = copy_of_the_installation(folder, with_code=False) / "planner" / "search"
    (search / "kernel" / "annealing" / "loop.py").write_text(LOOP)
    compiles = (search / "compiled.py").read_text()
    assert CALL in compiles
    (search / "compiled.py").write_text(compiles.replace(CALL, CALL_OF_LOOP))
    return folder


def run(folder: Path, **environment: str) -> list[str]:
    """What a process that plans by this installation prints."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run([sys.executable, "-c", PLAN], cwd=folder, env=env, capture_output=True, text=True,
                          timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def answer(lines: list[str]) -> list[str]:
    return [line for line in lines if not line.startswith("#")]


def said(lines: list[str]) -> list[str]:
    return [line for line in lines if LINE in line]


def test_a_copy_of_an_installation_uses_the_machine_code_that_came_with_it(tmp_path):
    compiled.ready()
    copy_of_the_installation(tmp_path, with_code=True)
    os.utime(tmp_path / "planner" / "search" / "kernel" / "annealing" / "loop.py")  # newer than its machine code
    ask = "from planner.search.compiled import is_compiled; print(is_compiled())"
    done = subprocess.run([sys.executable, "-c", ask], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)},
                          capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == ["True"]


def test_compiled_before_the_first_plan_and_again_when_a_source_differs(tmp_path):
    small_installation(tmp_path)
    first, second = run(tmp_path), run(tmp_path)
    assert len(said(first)) == 1 and said(second) == []
    assert answer(first) == answer(second)  # one seed, one plan: before and after
    assert "children []" in first
    # `anneal` is in another file: numba would take what it has kept of that.
    source = tmp_path / "planner" / "search" / "kernel" / "annealing" / "random.py"
    code = source.read_text()
    source.write_text(code.replace("return np.int64(_bits(random) % np.uint64(bound))", "return bound - 1"))
    changed = run(tmp_path)
    assert len(said(changed)) == 1 and "random [999, 999, 999]" in changed
    assert len(list((tmp_path / "planner").rglob("compiled-*"))) == 1


def test_where_nothing_can_be_written_every_process_compiles_for_itself(tmp_path):
    folder = small_installation(tmp_path / "installation")
    for kernel in ("kernel", "kernel/annealing"):
        (folder / "planner" / "search" / kernel / "__pycache__").write_text("a file where numba wants a folder")
    nowhere = str(tmp_path / "nowhere")
    Path(nowhere).write_text("neither is the user's folder one")
    lines = run(folder, HOME=nowhere, XDG_CACHE_HOME=nowhere)
    assert len(said(lines)) == 1 and "no folder can be written" in said(lines)[0]
    assert "children []" in lines


def test_no_plan_waits_for_the_compiler_within_its_time_limit():
    """Arrays of other types, or with gaps, would have the kernel compiled once more: five seconds."""
    from planner.search.kernel import list_scheduler, start_times
    from planner.search.kernel.annealing import loop

    compiled.ready()
    job = uniform_job(2, 4, 4, capacity=8)
    for layers in ("fixed", "move"):
        plan_only(PlanOptions(layers=layers, time_limit=0.5), job, [Worker(1, 2)])
    for entry in (list_scheduler.list_order, start_times.earliest, start_times.latest, loop.anneal):
        assert len(entry.signatures) == 1, entry.signatures
