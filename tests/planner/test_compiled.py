"""Machine code of the kernel is made before the first plan.

It is of the source as it is.
"""

import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from benchmarks.jobs import uniform_job
from slipstream.planner import compiled, kernel, loops
from slipstream.planner.budget import Clock
from slipstream.planner.options import PlanOptions
from slipstream.planner.plan import plan_only, plan_with
from slipstream.schedules.schedule import Worker
from tests.patience import SECONDS

ROOT = Path(compiled.__file__).parents[2]
USE = """
from slipstream.planner import compiled, kernel, loops
import numpy as np

compiled.load_kernel = lambda: kernel.anneal(np.array([5], dtype=np.uint64), 1000)
compiled.ensure_compiled(lambda line: print("#", line))
print(int(kernel.anneal(np.array([5], dtype=np.uint64), 1000)), loops.is_compiled())
"""
SMALL = """
from .compiling import jit
from .timing import random_below


@jit
def anneal(random, bound):
    return random_below(random, bound)


def measure_best():
    pass
"""


def small_installation(folder: Path) -> Path:
    """An installation without machine code, and with little to compile.

    All of the kernel takes half a minute.

    Returns another file of the kernel than that of `anneal`, with the function that it calls.
    """
    for name in ("cli", "planner", "runtime", "schedules"):
        shutil.copytree(
            ROOT / "slipstream" / name,
            folder / "slipstream" / name,
            ignore=shutil.ignore_patterns("library", "__pycache__"),
        )
    (folder / "slipstream" / "__init__.py").touch()
    kernel = folder / "slipstream" / "planner" / "kernel"
    (kernel / "annealing.py").write_text(SMALL)
    return kernel / "timing.py"


def run(folder: Path, **environment: str) -> tuple[bool, str]:
    """Whether a process of this installation says that it compiles, and what `anneal` answers."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", USE],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    return any(
        f"# {line}" in lines for line in (compiled.COMPILING, compiled.COMPILING_EACH_TIME)
    ), lines[-1]


def test_compiled_before_it_is_used_and_again_when_a_file_of_its_source_differs(tmp_path):
    source = small_installation(tmp_path)
    (first, answer), second = run(tmp_path), run(tmp_path)
    assert (
        first
        and second == (False, answer)
        and answer.endswith("True")
        and not answer.startswith("999 ")
    )
    code = source.read_text()
    source.write_text(
        code.replace("return np.int64(_random_bits(random) % np.uint64(bound))", "return bound - 1")
    )
    assert run(tmp_path) == (True, "999 True")


def test_a_source_that_was_written_again_as_it_was_is_not_taken_for_another_one_for_ever(tmp_path):
    source = small_installation(tmp_path)
    _, answer = run(tmp_path)
    source.touch()
    assert [run(tmp_path), run(tmp_path)] == [(True, answer), (False, answer)]


def test_where_nothing_can_be_written_every_process_compiles_for_itself(tmp_path):
    source = small_installation(tmp_path / "installation")
    nowhere = tmp_path / "nowhere"
    for path in (source.parent / "__pycache__", nowhere):
        path.write_text("a file where numba wants a folder")
    for _ in range(2):
        notice, answer = run(
            tmp_path / "installation", HOME=str(nowhere), XDG_CACHE_HOME=str(nowhere)
        )
        assert notice and answer.endswith("True")


def test_a_plan_within_seconds_is_made_of_list_schedules_while_another_process_compiles(
    monkeypatch,
):
    started, said = [], []
    for module in (compiled, loops):
        monkeypatch.setattr(module, "is_compiled", lambda: False)
    monkeypatch.setattr(loops, "_compiling_elsewhere", threading.Event())
    monkeypatch.setattr(loops, "_compiled_kernel", lambda: Kernel)
    monkeypatch.setattr(compiled.subprocess, "Popen", lambda command, **_: started.append(command))
    plan = plan_with(
        PlanOptions(time_limit=1.0),
        uniform_job(2, 4, 4),
        [Worker(1, 2)],
        progress=said.append,
        clock=Clock(),
    )
    assert (
        started == [[sys.executable, "-m", compiled.__name__]]
        and said[0] == compiled.COMPILING_IN_BACKGROUND
    )
    assert (
        plan.schedule.method == "list schedules"
        and plan.schedule.period_ticks < 2 * plan.schedule.lower_bound_ticks
    )


class Kernel:
    """Of which nothing may be called."""

    __file__ = kernel.__file__
    SOURCES = kernel.SOURCES
    anneal = kernel.anneal


def test_no_plan_waits_for_the_compiler_within_its_time_limit():
    # Arrays of other types, or with gaps, would have the kernel compiled once more: five seconds.
    compiled.ensure_compiled()
    job = uniform_job(2, 4, 4, capacity=8)
    for layers in ("fixed", "move"):
        plan_only(PlanOptions(layers=layers, time_limit=0.5), job, [Worker(1, 2)])
    for entry in (
        kernel.list_order,
        kernel.set_earliest_starts,
        kernel.set_latest_starts,
        kernel.anneal,
    ):
        assert len(entry.signatures) == 1, entry.signatures
